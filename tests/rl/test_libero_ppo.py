"""One iteration of PPO with the tiny pi0.5 in LIBERO's real simulator: two environments, images, soft resets."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from soma_lightning.envs.somatable import SomaTable
from soma_lightning.imports import is_available
from soma_lightning.models import PI05Config, PI05Policy
from soma_lightning.models.flow_sde import FlowSDE
from soma_lightning.rl.loop import LoopSettings, train_ppo
from soma_lightning.rl.ppo import PPOConfig
from soma_lightning.rl.rollout import RolloutSettings

if os.environ.get("SOMA_REQUIRE_LIBERO") != "1" and not is_available("libero"):
    pytest.skip("needs `pip install 'soma-lightning[libero]'`", allow_module_level=True)

# One worker process of pytest runs the whole file: a simulator takes 2 GB.
pytestmark = pytest.mark.xdist_group("libero")

ENV = {
    "suite": "libero_goal",
    "task_numbers": [8],
    "image_size": 64,
    "max_steps": 8,
    "stream": 101,
    "hard_reset": False,
    "reflections": False,
    "multisampling": False,
}


def test_an_iteration_in_the_real_simulator(tmp_path: Path):
    torch.manual_seed(0)
    policy = PI05Policy(PI05Config.tiny(), SomaTable.statistics())
    policy.reset_parameters()
    policy.save_pretrained(tmp_path / "start")
    rollout = RolloutSettings(
        "libero", ENV, envs_per_worker=2, env_workers=2, decisions=3, executed_steps=4, env_timeout_s=180.0
    )
    result = train_ppo(
        {"model_type": "pi05", "model_path": str(tmp_path / "start")},
        rollout,
        LoopSettings(iterations=1, engine="sync"),
        PPOConfig(epochs=1, minibatch_size=6, micro_batch_size=6),
        FlowSDE(3),
    )
    row = result.history[0]
    assert row["env_steps"] == 2 * 3 * 4
    assert row["episodes"] == 2.0  # both were cut off after 8 steps, and the third decision began new ones
    assert row["logp_gap_max"] <= 1e-3
    assert row["ratio_deviation"] == 0.0
    assert not [name for name, _ in result.policy.named_parameters() if ".prefix." in name]
