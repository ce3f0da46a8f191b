"""Simulated environments, experts and demonstrations.

Public names resolve when they are first used, so a worker process of an environment never imports torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

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
    from soma_lightning.envs.registry import EnvSpec as EnvSpec
    from soma_lightning.envs.registry import make as make
    from soma_lightning.envs.registry import make_group as make_group
    from soma_lightning.envs.rendering import check_gl as check_gl
    from soma_lightning.envs.somatable import SomaTable as SomaTable
    from soma_lightning.envs.vector import LocalEnvs as LocalEnvs
    from soma_lightning.envs.vector import SpawnedEnvs as SpawnedEnvs
    from soma_lightning.envs.worker import WorkerError as WorkerError

_HOME_OF_NAME = {
    "ChunkOutcome": "base",
    "EnvGroup": "base",
    "Episode": "base",
    "ManipulationEnv": "base",
    "StepOutcome": "base",
    "TaskSpec": "base",
    "batch_observations": "base",
    "state_of": "base",
    "record_demonstrations": "demos",
    "EnvSpec": "registry",
    "make": "registry",
    "make_group": "registry",
    "check_gl": "rendering",
    "SomaTable": "somatable",
    "LocalEnvs": "vector",
    "SpawnedEnvs": "vector",
    "WorkerError": "worker",
}

__all__ = list(_HOME_OF_NAME)


def __getattr__(name: str) -> Any:
    if name in _HOME_OF_NAME:
        return getattr(import_module(f"soma_lightning.envs.{_HOME_OF_NAME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
