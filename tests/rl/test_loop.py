"""The whole loop in one process: exact replay, no change without learning rates, going on after a stop."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from soma_lightning.models import registry
from soma_lightning.models.flow_sde import FlowSDE
from soma_lightning.rl.loop import LoopSettings, build_policy, train_ppo
from soma_lightning.rl.ppo import PPOConfig
from tests.rl.gaussian import GaussianPolicy, build


@pytest.fixture
def gaussian(monkeypatch):
    """Registers the policy that is no flow, for one test."""
    monkeypatch.setattr(registry, "_models", dict(registry._models))
    registry.register_model("gaussian_test", build)
    return {"model_type": "gaussian_test"}


def weights(result):
    return {name: p.detach().clone() for name, p in result.policy.named_parameters()}


def test_without_learning_rates_nothing_is_learned_and_every_ratio_is_one(start, rollout, sync, small_ppo):
    still = replace(small_ppo, lr=0.0, value_lr=0.0, weight_decay=0.0)
    result = train_ppo(start, rollout, sync, still, FlowSDE(4))
    for row in result.history:
        assert row["clip_fraction"] == 0.0
        assert row["approx_kl"] == 0.0
        assert row["logp_gap_max"] <= 1e-4
    before = build_policy(start, FlowSDE(4))
    for name, p in before.named_parameters():
        assert torch.equal(weights(result)[name], p), name


def test_a_run_that_stops_goes_on_as_if_it_had_not(start, rollout, sync, small_ppo, tmp_path):
    whole = train_ppo(start, rollout, sync, small_ppo, FlowSDE(4), state=tmp_path / "whole.ckpt")
    first = train_ppo(start, rollout, replace(sync, iterations=2), small_ppo, FlowSDE(4), state=tmp_path / "a.ckpt")
    assert [row["optimizer_steps"] for row in first.history] == [2.0, 2.0]
    rest = train_ppo(start, rollout, sync, small_ppo, FlowSDE(4), state=tmp_path / "a.ckpt")
    assert len(rest.history) == 1
    # Environments begin new episodes after a stop, so the third update differs; optimizer and draws go on.
    assert rest.history[0]["grad_norm"] != first.history[0]["grad_norm"]
    saved = [torch.load(tmp_path / name, weights_only=True) for name in ("whole.ckpt", "a.ckpt")]
    assert [one["updates"] for one in saved] == [3, 3]
    steps = [one["optimizer"]["state"][0]["step"] for one in saved]
    assert steps[0] == steps[1] == 12.0
    assert set(whole.history[0]) == set(rest.history[0])


def test_weights_after_a_load_are_those_of_the_save(start, rollout, sync, small_ppo, tmp_path):
    first = train_ppo(start, rollout, sync, small_ppo, FlowSDE(4), state=tmp_path / "a.ckpt")
    again = train_ppo(start, rollout, sync, small_ppo, FlowSDE(4), state=tmp_path / "a.ckpt")
    assert again.history == []
    for name, value in weights(first).items():
        assert torch.equal(weights(again)[name], value), name


def test_a_damaged_state_is_refused(start, rollout, sync, small_ppo, tmp_path):
    (tmp_path / "a.ckpt").write_bytes(b"no checkpoint")
    with pytest.raises(ValueError, match=r"a\.ckpt is no state of this run"):
        train_ppo(start, rollout, sync, small_ppo, FlowSDE(4), state=tmp_path / "a.ckpt")


def test_a_policy_that_is_no_flow_learns_in_the_same_loop(gaussian, rollout, sync, small_ppo):
    result = train_ppo(gaussian, rollout, sync, small_ppo)
    assert result.history[0]["logp_gap_max"] <= 1e-5
    assert result.history[0]["entropy"] > 0


def of_learner(forward_inputs) -> bool:
    """Whether a replay is the learner's: in micro-batches of 8 rows, not the rollout's 6 environments."""
    return len(forward_inputs["action"]) == 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda replay: replay.pop("entropy"), "entropy missing"),
        (lambda replay: replay.update(entropy=replay["logprobs"]), r"entropy as \[B\] or \[B, 1\] with B=8"),
        (lambda replay: replay.update(values=replay["values"].sum()), r"values as \[B\] or \[B, 1\] with B=8"),
    ],
)
def test_a_replay_of_another_form_is_named(gaussian, rollout, sync, small_ppo, monkeypatch, change, message):
    original = GaussianPolicy.default_forward

    def changed(self, forward_inputs):
        replay = original(self, forward_inputs)
        if of_learner(forward_inputs):
            change(replay)
        return replay

    monkeypatch.setattr(GaussianPolicy, "default_forward", changed)
    with pytest.raises(ValueError, match=message):
        train_ppo(gaussian, rollout, sync, small_ppo)


def test_a_replay_that_computes_something_else_is_warned_of(gaussian, rollout, sync, small_ppo, monkeypatch):
    original = GaussianPolicy.default_forward

    def changed(self, forward_inputs):
        replay = original(self, forward_inputs)
        return {**replay, "logprobs": replay["logprobs"] + 0.1 * of_learner(forward_inputs)}

    monkeypatch.setattr(GaussianPolicy, "default_forward", changed)
    with pytest.warns(UserWarning, match=r"differ by 0\.8 nats between rollout and learner for the same weights"):
        train_ppo(gaussian, rollout, replace(sync, iterations=1), small_ppo)


def test_evaluations_come_before_the_first_and_after_every_nth_iteration(start, rollout, sync, small_ppo):
    rows = []
    result = train_ppo(
        start,
        rollout,
        sync,
        small_ppo,
        FlowSDE(4),
        evaluate=lambda policy, updates: {"success": 0.5, "updates": updates},
        evaluate_every=2,
        log=lambda iteration, row: rows.append(iteration),
    )
    assert rows == [1, 2, 3]
    assert [("start_success" in row, "success" in row) for row in result.history] == [
        (True, False),
        (False, True),
        (False, False),
    ]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"iterations": 0}, "iterations=0"),
        ({"engine": "ray"}, "engine='ray'"),
        ({"max_lag": 3}, "max_lag=3"),
        ({"engine": "sync", "workers": 2}, "workers=2 has no effect"),
    ],
)
def test_settings_out_of_range_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        LoopSettings(**{"iterations": 1, **settings})


def test_flow_settings_go_with_flow_policies(gaussian, start, rollout, sync):
    with pytest.raises(ValueError, match="explores by stochastic denoising steps; set flow"):
        train_ppo(start, rollout, sync, PPOConfig())
    with pytest.raises(ValueError, match="GaussianPolicy is no FlowPolicy"):
        train_ppo(gaussian, rollout, sync, PPOConfig(), FlowSDE(4))
