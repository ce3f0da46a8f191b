"""Reinforcement learning of flow policies: Flow-SDE PPO with rollouts in processes of their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from soma_lightning.imports import lazy_names

if TYPE_CHECKING:
    from soma_lightning.models.flow_sde import FlowSDE as FlowSDE
    from soma_lightning.rl.engine import RolloutEngine as RolloutEngine
    from soma_lightning.rl.engine import SyncEngine as SyncEngine
    from soma_lightning.rl.engine_local import LocalEngine as LocalEngine
    from soma_lightning.rl.loop import LoopSettings as LoopSettings
    from soma_lightning.rl.loop import train_ppo as train_ppo
    from soma_lightning.rl.ppo import PPOConfig as PPOConfig
    from soma_lightning.rl.rollout import RolloutSettings as RolloutSettings

_HOME_OF_NAME = {
    "FlowSDE": "soma_lightning.models.flow_sde",
    "RolloutEngine": "soma_lightning.rl.engine",
    "SyncEngine": "soma_lightning.rl.engine",
    "LocalEngine": "soma_lightning.rl.engine_local",
    "LoopSettings": "soma_lightning.rl.loop",
    "train_ppo": "soma_lightning.rl.loop",
    "PPOConfig": "soma_lightning.rl.ppo",
    "RolloutSettings": "soma_lightning.rl.rollout",
}

__all__ = list(_HOME_OF_NAME)

__getattr__, __dir__ = lazy_names(__name__, _HOME_OF_NAME)
