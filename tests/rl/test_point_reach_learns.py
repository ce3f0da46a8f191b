"""Flow-SDE PPO turns a policy that solves a third of point_reach into one that solves nearly all of it.

And it does so through its advantages and its policy gradient: without either of them nothing is gained.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import soma_lightning.models.registry as registry
import soma_lightning.rl.learner as learner_module
from soma_lightning.contract import ACTION, STATE
from soma_lightning.envs.base import Episode
from soma_lightning.envs.point_reach import MAX_STEPS, STEP, PointReach, demonstrate
from soma_lightning.envs.registry import make_group
from soma_lightning.models.flow_mlp import FlowMLPConfig, FlowMLPPolicy
from soma_lightning.models.flow_sde import FlowSDE
from soma_lightning.rl.loop import LoopSettings, train_ppo
from soma_lightning.rl.ppo import PPOConfig, RowLoss
from soma_lightning.rl.rollout import RolloutSettings
from tests.rl.gaussian import GaussianPolicy

CHUNK, GOALS, EVERY = 4, 512, 5
#: Episodes of training count from initial state 0, those of evaluation run through another sequence of goals.
EVALUATION = {"stream": 1}


def demonstrated_states(rng: np.random.Generator, episodes: int = 1024) -> np.ndarray:
    """States [N, 6] that the demonstrator comes by."""
    env = PointReach()
    goals = []
    for episode in range(episodes):
        env.reset("reach", 10_000 + episode)
        goals.append(env.observe()["state"][2:4])
    goal = np.array(goals)
    position, states = np.zeros_like(goal), []
    for _ in range(MAX_STEPS // CHUNK):
        states.append(np.concatenate([position, goal, goal - position], axis=1))
        actions = demonstrate(states[-1], CHUNK, rng).clip(-1, 1)
        position = position + STEP * actions.sum(1)
    return np.concatenate(states).astype(np.float32)


def imitating_policy(seed: int) -> FlowMLPPolicy:
    """1,500 steps of flow matching on a demonstrator that steers 45 degrees beside the goal."""
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    policy = FlowMLPPolicy(FlowMLPConfig(state_dim=6, action_dim=2))
    states = demonstrated_states(rng)
    optimizer = torch.optim.Adam(policy.velocity_net.parameters(), lr=1e-3)
    for _ in range(1500):
        chosen = states[rng.integers(len(states), size=256)]
        actions = demonstrate(chosen, CHUNK, rng)
        loss = policy.sft_forward({STATE: torch.from_numpy(chosen), ACTION: torch.from_numpy(actions)})["loss"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return policy


def success(policy: nn.Module, updates: int = 0) -> dict[str, float]:
    """Share of 512 fixed goals that the policy reaches without exploring."""
    generator = torch.Generator().manual_seed(0)
    everyone = range(GOALS)
    with make_group("point_reach", EVALUATION, num_slots=GOALS) as envs:
        envs.reset(everyone, [Episode("reach", number) for number in everyone])
        running, reached = list(everyone), 0
        while running:
            noise = torch.randn(GOALS, CHUNK, 4, generator=generator)[running]
            options = {"noise": noise} if isinstance(policy, FlowMLPPolicy) else {}
            actions, _ = policy.predict_action_batch(envs.observe(running), mode="eval", **options)  # type: ignore[operator]
            outcomes = envs.execute(running, actions.numpy())
            reached += sum(outcome.success for outcome in outcomes)
            running = [slot for slot, outcome in zip(running, outcomes, strict=True) if not outcome.done]
    return {"success": reached / GOALS}


def learning_curve(folder: Path, seed: int, iterations: int = 60) -> tuple[float, list[float], list[Mapping[str, Any]]]:
    """(success before, after every fifth iteration, what was logged)."""
    start = imitating_policy(seed)
    start.save_pretrained(folder / "imitating")
    result = train_ppo(
        {"model_type": "flow_mlp", "model_path": str(folder / "imitating")},
        RolloutSettings("point_reach", envs_per_worker=128, decisions=6, executed_steps=CHUNK, seed=seed),
        LoopSettings(iterations, engine="sync"),
        PPOConfig(lr=3e-4, value_lr=1e-3, minibatch_size=256, micro_batch_size=256, epochs=4, seed=seed),
        FlowSDE(4, 0.5),
        evaluate=success,
        evaluate_every=EVERY,
    )
    curve = [row["success"] for row in result.history if "success" in row]
    return success(start)["success"], curve, result.history


@pytest.mark.parametrize("seed", [0, 1])
def test_point_reach_is_learned(tmp_path: Path, seed: int) -> None:
    before, curve, history = learning_curve(tmp_path, seed)
    assert 0.25 < before < 0.55
    assert max(curve[: 20 // EVERY]) >= 0.80, curve
    assert np.mean(curve[-3:]) >= 0.93, curve
    assert all(row["lag"] == 0 for row in history)
    assert max(row["logp_gap_max"] for row in history) < 1e-3


def imitating_gaussian(cfg: Any, torch_dtype: Any) -> GaussianPolicy:
    """A builder: the mean fitted to the demonstrator."""
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    policy = GaussianPolicy()
    states = demonstrated_states(rng)
    optimizer = torch.optim.Adam(policy.mean.parameters(), lr=3e-3)
    for _ in range(300):
        chosen = states[rng.integers(len(states), size=256)]
        wanted = torch.from_numpy(demonstrate(chosen, CHUNK, rng)).flatten(1)
        loss = (policy.mean(torch.from_numpy(chosen)) - wanted).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return policy


def test_a_policy_that_is_no_flow_learns_in_the_same_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_models", dict(registry._models))
    registry.register_model("gaussian", imitating_gaussian)
    result = train_ppo(
        {"model_type": "gaussian"},
        RolloutSettings("point_reach", envs_per_worker=64, decisions=6, executed_steps=CHUNK),
        LoopSettings(10, engine="sync"),
        PPOConfig(lr=1e-3, value_lr=1e-3, minibatch_size=128, micro_batch_size=128, epochs=4),
        evaluate=success,
        evaluate_every=EVERY,
    )
    curve = [row["success"] for row in result.history if "success" in row]
    before = success(imitating_gaussian(None, None))["success"]
    assert 0.2 < before < 0.55
    assert curve[-1] >= 0.9, curve


@pytest.mark.slow
def test_permuted_advantages_teach_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = learner_module.normalize_advantages

    def permuted(advantages: Tensor) -> Tensor:
        return original(advantages)[torch.randperm(len(advantages))]

    monkeypatch.setattr(learner_module, "normalize_advantages", permuted)
    _, curve, _ = learning_curve(tmp_path, seed=0)
    assert max(curve) < 0.55, curve


@pytest.mark.slow
def test_without_the_policys_gradient_nothing_is_learned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = learner_module.policy_loss

    def cut(log_probs: Tensor, *others: Any) -> RowLoss:
        return original(log_probs.detach(), *others)

    monkeypatch.setattr(learner_module, "policy_loss", cut)
    _, curve, _ = learning_curve(tmp_path, seed=0)
    assert max(curve) < 0.55, curve
