"""The whole system in processes of its own: exact replay across them, bounded lag, and it learns."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from soma_lightning.models.flow_sde import FlowSDE
from soma_lightning.rl.loop import LoopSettings, build_policy, train_ppo

#: Two fragments an update from two processes; the learner is one update ahead of what it learns from.
LOCAL = LoopSettings(iterations=4, fragments_per_update=2, workers=2, engine="local", max_lag=1)


def test_without_learning_rates_every_ratio_is_one_across_processes(start, rollout, small_ppo):
    still = replace(small_ppo, lr=0.0, value_lr=0.0, weight_decay=0.0)
    result = train_ppo(start, rollout, LOCAL, still, FlowSDE(4))
    for row in result.history:
        assert row["clip_fraction"] == 0.0
        assert row["approx_kl"] == 0.0
        assert row["logp_gap_max"] <= 1e-4
        assert row["behaviour_weight_above"] == 0.0
    for name, p in build_policy(start, FlowSDE(4)).named_parameters():
        assert torch.equal(dict(result.policy.named_parameters())[name], p), name


@pytest.mark.parametrize("max_lag", [0, 2])
def test_nothing_is_older_than_the_limit_and_every_fragment_is_used(start, rollout, small_ppo, max_lag):
    result = train_ppo(start, rollout, replace(LOCAL, max_lag=max_lag), small_ppo, FlowSDE(4))
    lags = [row["lag"] for row in result.history]
    assert len(lags) == 4
    assert max(lags) <= max_lag
    if max_lag == 0:  # nothing may be collected while the learner learns
        assert all(row["logp_gap_max"] <= 1e-4 for row in result.history)


def test_a_run_goes_on_in_new_processes(start, rollout, small_ppo, tmp_path):
    state = tmp_path / "state.ckpt"
    train_ppo(start, rollout, replace(LOCAL, iterations=2), small_ppo, FlowSDE(4), state=state)
    cursors = torch.load(state, weights_only=True)["cursors"]
    assert sum(decisions for cursor in cursors.values() for _, decisions in cursor) == 2 * 2 * 6 * 4
    result = train_ppo(start, rollout, LOCAL, small_ppo, FlowSDE(4), state=state)
    assert len(result.history) == 2
    assert max(row["lag"] for row in result.history) <= 1
