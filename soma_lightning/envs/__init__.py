"""Simulated environments, experts and demonstrations.

Public names resolve when they are first used, so a worker process of an environment never imports torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from soma_lightning.imports import lazy_names

if TYPE_CHECKING:
    from soma_lightning.envs.base import ChunkOutcome as ChunkOutcome
    from soma_lightning.envs.base import EnvGroup as EnvGroup
    from soma_lightning.envs.base import Episode as Episode
    from soma_lightning.envs.base import ManipulationEnv as ManipulationEnv
    from soma_lightning.envs.base import StepOutcome as StepOutcome
    from soma_lightning.envs.base import TaskSpec as TaskSpec
    from soma_lightning.envs.base import batch_observations as batch_observations
    from soma_lightning.envs.base import state_of as state_of
    from soma_lightning.envs.demos import record_demonstrations as record_demonstrations
    from soma_lightning.envs.libero import LiberoEnv as LiberoEnv
    from soma_lightning.envs.registry import EnvSpec as EnvSpec
    from soma_lightning.envs.registry import make as make
    from soma_lightning.envs.registry import make_group as make_group
    from soma_lightning.envs.rendering import check_gl as check_gl
    from soma_lightning.envs.somatable import SomaTable as SomaTable
    from soma_lightning.envs.spawned import SpawnedEnvs as SpawnedEnvs
    from soma_lightning.envs.vector import LocalEnvs as LocalEnvs
    from soma_lightning.envs.worker import WorkerError as WorkerError

_HOME_OF_NAME = {
    "ChunkOutcome": "soma_lightning.envs.base",
    "EnvGroup": "soma_lightning.envs.base",
    "Episode": "soma_lightning.envs.base",
    "ManipulationEnv": "soma_lightning.envs.base",
    "StepOutcome": "soma_lightning.envs.base",
    "TaskSpec": "soma_lightning.envs.base",
    "batch_observations": "soma_lightning.envs.base",
    "state_of": "soma_lightning.envs.base",
    "record_demonstrations": "soma_lightning.envs.demos",
    "LiberoEnv": "soma_lightning.envs.libero",
    "EnvSpec": "soma_lightning.envs.registry",
    "make": "soma_lightning.envs.registry",
    "make_group": "soma_lightning.envs.registry",
    "check_gl": "soma_lightning.envs.rendering",
    "SomaTable": "soma_lightning.envs.somatable",
    "LocalEnvs": "soma_lightning.envs.vector",
    "SpawnedEnvs": "soma_lightning.envs.spawned",
    "WorkerError": "soma_lightning.envs.worker",
}

__all__ = list(_HOME_OF_NAME)

__getattr__, __dir__ = lazy_names(__name__, _HOME_OF_NAME)
