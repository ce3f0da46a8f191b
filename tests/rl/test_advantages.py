"""Advantages against hand-computed numbers: ends, time limits and the cut of a fragment keep their own meaning."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from soma_lightning.rl.advantages import episode_weights, gae, loss_mask, normalize_advantages

GAMMA, LAM = 0.99, 0.95

# Two environments, four decisions; columns are environments. dones[t] lies before decision t.
REWARDS = torch.tensor([[0.0, 0, 1, 0], [0, 1, 0, 0]]).T
VALUES = torch.tensor([[0.5, 0.6, 0.7, 0.1, 0.2], [0.2, 0.4, 0.3, 0.5, 0.6]]).T
DONES = torch.tensor([[0, 0, 0, 1, 0], [0, 0, 1, 0, 0]], dtype=torch.bool).T
NEVER, ZEROS = torch.zeros(4, 2, dtype=torch.bool), torch.zeros(4, 2)


def test_reference_values() -> None:
    found = gae(REWARDS, VALUES, DONES[1:], NEVER, ZEROS, GAMMA, LAM)
    expected = torch.tensor([[0.4468, 0.3752, 0.3000, 0.0980], [0.7603, 0.6000, 0.2834, 0.0940]]).T
    torch.testing.assert_close(found.advantages, expected, rtol=0, atol=5e-5)
    returns = torch.tensor([[0.9468, 0.9752, 1.0, 0.1980], [0.9603, 1.0, 0.5834, 0.5940]]).T
    torch.testing.assert_close(found.returns, returns, rtol=0, atol=5e-5)


def test_reference_values_of_the_masked_mode() -> None:
    mask = loss_mask(DONES)
    assert mask.T.tolist() == [[True, True, True, False], [True, True, False, False]]
    advantages = gae(REWARDS, VALUES, DONES[1:], NEVER, ZEROS, GAMMA, LAM).advantages
    assert advantages[mask].mean().item() == pytest.approx(0.4965, abs=5e-5)
    assert advantages[mask].std().item() == pytest.approx(0.1845, abs=5e-5)
    normalized = normalize_advantages(advantages, mask)
    assert normalized[mask[:, 0], 0].tolist() == pytest.approx([-0.2690, -0.6576, -1.0650], abs=3e-4)
    assert normalized[mask[:, 1], 1].tolist() == pytest.approx([1.4303, 0.5613], abs=3e-4)


def column(*values: float) -> Tensor:
    return torch.tensor(values)[:, None]


def test_nothing_follows_an_episode_that_ended() -> None:
    terminated = column(0, 1, 0).bool()
    found = gae(column(0, 1, 5), column(0.5, 0.25, 7, 9), terminated, torch.zeros(3, 1).bool(), column(0, 3, 0))
    delta = [0.99 * 0.25 - 0.5, 1 - 0.25, 5 + 0.99 * 9 - 7]
    expected = [delta[0] + 0.99 * 0.95 * delta[1], delta[1], delta[2]]
    assert found.advantages.flatten().tolist() == pytest.approx(expected, abs=1e-6)


def test_a_time_limit_takes_the_value_of_its_own_last_observation() -> None:
    """And not that of the next episode, which begins in the following row."""
    truncated = column(0, 1, 0).bool()
    found = gae(column(0, 1, 5), column(0.5, 0.25, 7, 9), torch.zeros(3, 1).bool(), truncated, column(0, 3, 0))
    delta = [0.99 * 0.25 - 0.5, 1 + 0.99 * 3 - 0.25, 5 + 0.99 * 9 - 7]
    expected = [delta[0] + 0.99 * 0.95 * delta[1], delta[1], delta[2]]
    assert found.advantages.flatten().tolist() == pytest.approx(expected, abs=1e-6)
    expected_returns = [expected[0] + 0.5, expected[1] + 0.25, expected[2] + 7]
    assert found.returns.flatten().tolist() == pytest.approx(expected_returns)


def test_the_cut_of_a_fragment_takes_the_value_behind_it() -> None:
    never = torch.zeros(1, 1).bool()
    values = column(0.5, 2)
    assert gae(column(1), values, never, never, column(9)).advantages.item() == pytest.approx(1 + 0.99 * 2 - 0.5)


def test_lambda_one_is_the_discounted_return_and_lambda_zero_one_step() -> None:
    rewards, values = torch.rand(6, 3, dtype=torch.float64), torch.rand(7, 3, dtype=torch.float64)
    never, none = torch.zeros(6, 3, dtype=torch.bool), torch.zeros(6, 3, dtype=torch.float64)
    long = gae(rewards, values, never, never, none, GAMMA, 1.0)
    powers = GAMMA ** torch.arange(6, dtype=torch.float64)[:, None]
    torch.testing.assert_close(long.returns[0], (powers * rewards).sum(0) + GAMMA**6 * values[6])
    short = gae(rewards, values, never, never, none, GAMMA, 0.0)
    torch.testing.assert_close(short.advantages, rewards + GAMMA * values[1:] - values[:-1])


def test_environments_do_not_mix() -> None:
    rewards, values = torch.rand(5, 4), torch.rand(6, 4)
    ends = torch.rand(5, 4) < 0.3
    limits, last = (torch.rand(5, 4) < 0.3) & ~ends, torch.rand(5, 4)
    together = gae(rewards, values, ends, limits, last)
    for env in range(4):
        one = slice(env, env + 1)
        alone = gae(rewards[:, one], values[:, one], ends[:, one], limits[:, one], last[:, one])
        assert torch.equal(alone.advantages, together.advantages[:, one])


def test_normalization_has_mean_zero_and_unbiased_deviation_one() -> None:
    found = normalize_advantages(1e4 + torch.randn(50))
    assert found.dtype == torch.float32
    assert found.mean().item() == pytest.approx(0, abs=1e-3)
    assert found.std().item() == pytest.approx(1, abs=1e-3)
    assert normalize_advantages(torch.tensor([3.0])).item() == 0
    assert normalize_advantages(torch.full((5,), 2.0)).abs().max() == 0


def test_masked_entries_do_not_count_and_an_empty_mask_is_refused() -> None:
    values = torch.tensor([1.0, 3.0, 1000.0])
    mask = torch.tensor([True, True, False])
    found = normalize_advantages(values, mask)
    assert torch.equal(found[:2], normalize_advantages(values[:2]))
    with pytest.raises(ValueError, match="the mask is empty"):
        normalize_advantages(values, torch.zeros(3, dtype=torch.bool))


def test_each_episode_weighs_alike() -> None:
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]], dtype=torch.bool).T
    weights = episode_weights(mask, torch.tensor([15, 8]), 20)
    assert weights.mean().item() == pytest.approx(1.125)
    assert weights[:, 0].tolist() == pytest.approx([20 / 15] * 3 + [0])
