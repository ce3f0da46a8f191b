"""A start policy for point_reach, and settings of short runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from soma_lightning.models.flow_mlp import FlowMLPConfig, FlowMLPPolicy
from soma_lightning.rl.loop import LoopSettings
from soma_lightning.rl.ppo import PPOConfig
from soma_lightning.rl.rollout import RolloutSettings


@pytest.fixture
def start(tmp_path: Path) -> dict[str, str]:
    """`get_model` configuration of an untrained flow policy on disk."""
    torch.manual_seed(0)
    FlowMLPPolicy(FlowMLPConfig(state_dim=6, action_dim=2, hidden=32)).save_pretrained(tmp_path / "start")
    return {"model_type": "flow_mlp", "model_path": str(tmp_path / "start")}


@pytest.fixture
def rollout() -> RolloutSettings:
    return RolloutSettings("point_reach", {"stream": 1}, envs_per_worker=6, decisions=4, executed_steps=4)


@pytest.fixture
def sync() -> LoopSettings:
    return LoopSettings(iterations=3, engine="sync")


@pytest.fixture
def small_ppo() -> PPOConfig:
    return PPOConfig(epochs=2, minibatch_size=16, micro_batch_size=8, lr=1e-3, value_lr=1e-3)
