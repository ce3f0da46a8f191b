"""The losses against hand-computed numbers, their gradients against differences, their settings against nonsense."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from soma_lightning.rl.ppo import (
    PPOConfig,
    behaviour_weights,
    interpolated_proximal,
    policy_loss,
    reduce_rows,
    stop_early,
    truncated_weights,
    value_loss,
)

CONFIG = PPOConfig()


def policy_row(advantage: float, ratio: float, config: PPOConfig = CONFIG) -> float:
    log_ratio = torch.tensor([math.log(ratio)])
    loss = policy_loss(log_ratio, torch.zeros(1), torch.ones(1), torch.tensor([advantage]), config).loss
    return loss.item()


@pytest.mark.parametrize(
    ("advantage", "ratio", "loss"),
    [
        (1, 1.5, -1.2),
        (1, 0.5, -0.5),
        (1, 1.1, -1.1),
        (-1, 1.5, 1.5),
        (-1, 0.5, 0.8),
        (-1, 5, 3),
        (-2, 5, 6),
        (1, 5, -1.2),
        (0, 5, 0),
    ],
)
def test_policy_loss(advantage: float, ratio: float, loss: float) -> None:
    assert policy_row(advantage, ratio) == pytest.approx(loss, rel=1e-6)


def test_without_dual_clip_a_bad_action_may_cost_anything() -> None:
    assert policy_row(-1, 5, PPOConfig(dual_clip=None)) == pytest.approx(5, rel=1e-6)


def test_the_two_bounds_are_their_own() -> None:
    config = PPOConfig(clip_low=0.1, clip_high=0.3)
    assert policy_row(1, 1.5, config) == pytest.approx(-1.3, rel=1e-6)
    assert policy_row(-1, 0.5, config) == pytest.approx(0.9, rel=1e-6)


def test_what_is_logged_of_the_policy() -> None:
    log_probs = torch.tensor([0.0, math.log(1.5), math.log(0.9)])
    facts = policy_loss(log_probs, torch.zeros(3), torch.ones(3), torch.ones(3), CONFIG).facts
    assert facts["clip_fraction"].tolist() == [0, 1, 0]
    assert facts["ratio_deviation"].tolist() == pytest.approx([0, 0.5, 0.1], abs=1e-6)
    expected = [ratio - 1 - math.log(ratio) for ratio in (1, 1.5, 0.9)]
    assert facts["approx_kl"].tolist() == pytest.approx(expected, abs=1e-6)
    assert not any(value.requires_grad for value in facts.values())


def test_a_ratio_beyond_all_bounds_gives_finite_gradients() -> None:
    log_probs = torch.tensor([200.0, 200.0, -200.0, 200.0], requires_grad=True)
    advantages = torch.tensor([1.0, -1.0, 1.0, 0.0])
    found = policy_loss(log_probs, torch.zeros(4), torch.ones(4), advantages, CONFIG)
    found.loss.sum().backward()
    assert found.loss.tolist() == pytest.approx([-1.2, 3.0, 0.0, 0.0], abs=1e-6)
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == [0, 0, 0, 0]
    assert all(value.isfinite().all() for value in found.facts.values())


def test_policy_loss_has_the_right_gradient() -> None:
    ratios = torch.tensor([1.0, 1.1, 1.5, 0.5, 0.9, 5.0, 1.1, 0.5], dtype=torch.float64)
    advantages = torch.tensor([1.0, 1.0, 1.0, 1.0, -1.0, -1.0, -0.5, -2.0], dtype=torch.float64)
    weights = torch.linspace(0.5, 1.5, 8, dtype=torch.float64)
    proximal = torch.zeros(8, dtype=torch.float64)
    log_probs = (ratios.log()).requires_grad_()
    policy_loss(log_probs, proximal, weights, advantages, CONFIG).loss.sum().backward()
    is_free = torch.tensor([1, 1, 0, 1, 1, 0, 1, 0], dtype=torch.float64)  # else clipped, or beyond dual clip
    assert log_probs.grad is not None
    torch.testing.assert_close(log_probs.grad, -advantages * ratios * weights * is_free)


def test_losses_pass_gradcheck() -> None:
    def policy(log_probs: Tensor) -> Tensor:
        advantages = torch.tensor([1.0, -1.0, 2.0, -0.5, -1.0], dtype=torch.float64)
        return policy_loss(log_probs, torch.zeros_like(log_probs), torch.ones_like(log_probs), advantages, CONFIG).loss

    def value(values: Tensor) -> Tensor:
        returns = torch.tensor([1.0, 0.3, -20.0, 15.0, 0.0], dtype=torch.float64)
        return value_loss(values, torch.zeros_like(values), returns, CONFIG).loss

    points = torch.tensor([0.1, -0.1, 0.4, -0.5, 1.5], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(policy, points)
    assert torch.autograd.gradcheck(value, points)


@pytest.mark.parametrize(
    ("value", "old", "returned", "loss"),
    [
        (0.5, 0.0, 1.0, 0.32),  # held back at .2, where the error is .8
        (0.1, 0.0, 1.0, 0.405),
        (0.5, 0.0, 0.0, 0.125),
        (0.0, 0.0, 30.0, 10 * (30 - 5)),
        (0.0, 0.0, -30.0, 10 * (30 - 5)),
    ],
)
def test_value_loss(value: float, old: float, returned: float, loss: float) -> None:
    found = value_loss(torch.tensor([value]), torch.tensor([old]), torch.tensor([returned]), CONFIG)
    assert found.loss.item() == pytest.approx(loss, rel=1e-6)
    assert found.facts["value_clip_fraction"].item() == float(abs(value - old) > 0.2)


def test_value_loss_without_bounds_is_half_a_square() -> None:
    config = PPOConfig(value_clip=None, huber_delta=None)
    found = value_loss(torch.tensor([0.5, 0.0]), torch.zeros(2), torch.tensor([1.0, 30.0]), config)
    assert found.loss.tolist() == pytest.approx([0.125, 450.0])
    assert found.facts == {}


# -- rows -------------------------------------------------------------------------------------------------------------


def test_a_row_sums_what_was_executed() -> None:
    log_probs = torch.arange(12.0).view(2, 3, 2)
    valid = torch.tensor([2, 3], dtype=torch.int32)
    assert reduce_rows(log_probs, valid).tolist() == [0 + 1 + 2 + 3, 6 + 7 + 8 + 9 + 10 + 11]
    assert reduce_rows(log_probs.sum(2), valid).tolist() == [6, 51]
    assert reduce_rows(torch.tensor([1.0, 2.0]), valid).tolist() == [1, 2]


def test_actions_that_were_not_executed_may_hold_anything() -> None:
    log_probs = torch.tensor([[1.0, math.nan], [2.0, math.inf]], requires_grad=True)
    found = reduce_rows(log_probs, torch.tensor([1, 1]))
    found.sum().backward()
    assert found.tolist() == [1, 2]
    assert log_probs.grad is not None
    assert log_probs.grad.tolist() == [[1, 0], [1, 0]]


# -- three policies ---------------------------------------------------------------------------------------------------


def test_the_decoupled_loss_with_an_interpolated_proximal_policy() -> None:
    """Acted with version 3, learns version 4: alpha = 1/2."""
    behaviour, current = torch.tensor([-1.0]), torch.tensor([-0.6], requires_grad=True)
    proximal = interpolated_proximal(current, behaviour, torch.tensor([2]))
    assert proximal.item() == pytest.approx(-0.8)
    assert not proximal.requires_grad
    weights = truncated_weights(proximal, behaviour, CONFIG)
    assert weights.item() == pytest.approx(1.2214, abs=5e-5)
    assert policy_loss(current, proximal, weights, torch.ones(1), CONFIG).loss.item() == pytest.approx(
        -1.4657, abs=5e-5
    )


def test_alpha_by_lag() -> None:
    """0 for the newest weights, 1/2 one version behind, 2/3 two behind; never outside 0..1."""
    behaviour, current = torch.zeros(5), torch.ones(5)
    found = interpolated_proximal(current, behaviour, torch.tensor([1, 2, 3, 0, -4]))
    assert found.tolist() == pytest.approx([0, 1 / 2, 2 / 3, 0, 0])


def test_rows_above_the_bound_are_left_out_and_the_others_make_up_for_them() -> None:
    log_ratios = torch.tensor([math.log(3.0)] + [0.0] * 9)
    weights, facts = behaviour_weights(log_ratios, torch.zeros(10), CONFIG)
    assert weights.tolist() == pytest.approx([0] + [10 / 9] * 9)
    losses = torch.arange(10.0)
    assert (weights * losses).mean().item() == pytest.approx(losses[1:].mean().item())
    assert facts["behaviour_weight_above"] == pytest.approx(0.1)
    assert facts["behaviour_weight_max"] == pytest.approx(3)
    assert facts["behaviour_weight"] == pytest.approx(1.2)


def test_where_that_were_too_many_weights_are_cut_off() -> None:
    log_ratios = torch.tensor([math.log(3.0)] * 3 + [math.log(0.5)] * 7)
    weights, facts = behaviour_weights(log_ratios, torch.zeros(10), CONFIG)
    assert weights.tolist() == pytest.approx([2] * 3 + [0.5] * 7)
    assert facts["behaviour_weight_above"] == pytest.approx(0.3)
    dropped, _ = behaviour_weights(log_ratios[1:6], torch.zeros(5), PPOConfig(max_behaviour_weight=5))
    assert dropped.tolist() == pytest.approx([3] * 2 + [0.5] * 3)


def test_truncated_weights_are_a_rows_own() -> None:
    log_ratios = torch.tensor([math.log(3.0), 0.0, math.log(0.5)])
    weights = truncated_weights(log_ratios, torch.zeros(3), CONFIG)
    assert weights.tolist() == pytest.approx([2, 1, 0.5])
    assert torch.equal(weights[:1], truncated_weights(log_ratios[:1], torch.zeros(1), CONFIG))


def test_an_epoch_that_moved_too_far_is_the_last() -> None:
    config = PPOConfig(target_kl=0.01)
    assert not stop_early(0.0149, config)
    assert stop_early(0.0151, config)
    assert not stop_early(1e9, PPOConfig())


# -- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gamma": 1.1}, r"gamma=1.1 must lie in 0\.\.1"),
        ({"gae_lambda": -0.1}, "gae_lambda=-0.1 must lie in"),
        ({"gamma": math.nan}, "gamma=nan"),
        ({"gamma": None}, "gamma=None"),
        ({"clip_low": 1.5}, "clip_low=1.5"),
        ({"clip_high": -0.1}, "clip_high=-0.1"),
        ({"dual_clip": 0.5}, "dual_clip=0.5"),
        ({"value_clip": -1.0}, "value_clip=-1.0"),
        ({"huber_delta": -1.0}, "huber_delta=-1.0"),
        ({"value_coef": -1.0}, "value_coef=-1.0"),
        ({"entropy_coef": -1.0}, "entropy_coef=-1.0"),
        ({"target_kl": -1.0}, "target_kl=-1.0"),
        ({"epochs": 0}, "epochs=0"),
        ({"epochs": 1.5}, "epochs=1.5 must be a whole number"),
        ({"epochs": True}, "epochs=True must be a whole number"),
        ({"minibatch_size": 0}, "minibatch_size=0"),
        ({"micro_batch_size": 0}, "micro_batch_size=0"),
        ({"micro_batch_size": 16.0}, "micro_batch_size=16.0 must be a whole number"),
        ({"lr": -1e-3}, "lr=-0.001"),
        ({"lr": math.nan}, "lr=nan"),
        ({"value_lr": -1e-3}, "value_lr=-0.001"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1"),
        ({"max_grad_norm": 0.0}, "max_grad_norm=0.0 must be above 0"),
        ({"huber_delta": 0.0}, "huber_delta=0.0 must be above 0"),
        ({"eps": 0.0}, "eps=0.0 must be above 0"),
        ({"betas": (0.9, 1.0)}, r"betas=\(0.9, 1.0\)"),
        ({"max_behaviour_weight": 0.5}, "max_behaviour_weight=0.5"),
        ({"critic_warmup_updates": -1}, "critic_warmup_updates=-1"),
        ({"seed": -1}, "seed=-1"),
        ({"minibatch_size": 64}, "micro_batch_size=128 is more than minibatch_size=64"),
        ({"interpolate_proximal": True}, "interpolate_proximal estimates what recompute_log_probs computes"),
        ({"recompute_log_probs": False, "max_behaviour_weight": 3.0}, "max_behaviour_weight=3.0 has no effect"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PPOConfig(**settings)


def test_settings_that_are_left_open() -> None:
    assert PPOConfig(dual_clip=None, value_clip=None, huber_delta=None, target_kl=None).value_clip is None
    least = PPOConfig(lr=0.0, value_lr=0, weight_decay=0, epochs=1, minibatch_size=1, micro_batch_size=1, dual_clip=1)
    assert (least.lr, least.minibatch_size, least.dual_clip) == (0.0, 1, 1)
    assert PPOConfig(
        recompute_log_probs=False, interpolate_proximal=True, max_behaviour_weight=3.0
    ).interpolate_proximal
