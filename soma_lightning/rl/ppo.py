"""What does a policy minimise? The losses of PPO, decoupled from the policy that acted, and their settings.

PPO: Schulman et al. 2017, arXiv 1707.06347. Dual clip: Ye et al. 2020, arXiv 1912.09729. Decoupled objective: Hilton et
al. 2021, arXiv 2110.00641, with AReaL's proximal policy (the weights at the start of the update, arXiv 2505.24298) or
A-3PO's interpolation (arXiv 2512.06547). Three policies occur: behaviour (acted), proximal, current.

Every function works row by row; the learner sums and divides. Shape letters: N rows, C executed actions, D dimensions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

#: Dropping more of a batch than this would be learning from a selection; then weights are cut off instead.
_MOST_DROPPED = 0.2
#: Far beyond every clip. A ratio that overflows would make its gradient NaN, also where the clip cuts it off.
_LARGEST_LOG_RATIO = 20.0
_WHOLE = ("epochs", "minibatch_size", "micro_batch_size", "critic_warmup_updates", "seed")
_OPTIONAL = ("dual_clip", "value_clip", "huber_delta", "target_kl")


@dataclass(frozen=True)
class PPOConfig:
    """Settings of the algorithm; the defaults are those of the public pi0.5 recipes for LIBERO.

    gamma, gae_lambda: per decision. clip_low, clip_high: the ratio stays in 1 - clip_low..1 + clip_high. dual_clip:
    bound of the loss for negative advantages, in units of |A|; None for none. value_clip: how far values may move from
    the old ones before the loss stops rewarding it; None for none. huber_delta: where the value loss turns linear; None
    for a square. value_coef, entropy_coef: weights beside the policy's loss. target_kl: an epoch whose estimate (k3)
    exceeds 1.5 times this is the last one; None: all run. epochs: passes over an update's rows. minibatch_size: rows of
    an optimizer step, over all ranks. micro_batch_size: rows that one rank computes at once. lr, value_lr, betas, eps,
    weight_decay, max_grad_norm: of AdamW. normalize_advantages: over an update's rows. recompute_log_probs: the
    proximal policy's are computed by the learner; False takes the behaviour policy's. interpolate_proximal: A-3PO's
    estimate instead of a computation. max_behaviour_weight: rows whose weight is above are left out, and with
    interpolate_proximal cut off.
    critic_warmup_updates: updates in which only the critic learns.
    Raises ValueError for values out of range and for those that others would make void.
    """

    gamma: float = 0.99
    gae_lambda: float = 0.95
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = 3.0
    value_clip: float | None = 0.2
    huber_delta: float | None = 10.0
    value_coef: float = 1.0
    entropy_coef: float = 0.0
    target_kl: float | None = None
    epochs: int = 4
    minibatch_size: int = 2048
    micro_batch_size: int = 128
    lr: float = 5e-6
    value_lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    normalize_advantages: bool = True
    recompute_log_probs: bool = True
    interpolate_proximal: bool = False
    max_behaviour_weight: float = 2.0
    critic_warmup_updates: int = 0
    seed: int = field(default=0)

    def __post_init__(self) -> None:
        for name in _WHOLE:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError(f"{name}={value!r} must be a whole number")
        limits: dict[str, tuple[float, float]] = {
            "gamma": (0.0, 1.0),
            "gae_lambda": (0.0, 1.0),
            "clip_low": (0.0, 1.0),
            "clip_high": (0.0, math.inf),
            "dual_clip": (1.0, math.inf),
            "value_clip": (0.0, math.inf),
            "huber_delta": (0.0, math.inf),
            "value_coef": (0.0, math.inf),
            "entropy_coef": (0.0, math.inf),
            "target_kl": (0.0, math.inf),
            "epochs": (1, math.inf),
            "minibatch_size": (1, math.inf),
            "micro_batch_size": (1, math.inf),
            "lr": (0.0, math.inf),
            "value_lr": (0.0, math.inf),
            "eps": (0.0, math.inf),
            "weight_decay": (0.0, math.inf),
            "max_grad_norm": (0.0, math.inf),
            "max_behaviour_weight": (1.0, math.inf),
            "critic_warmup_updates": (0, math.inf),
            "seed": (0, math.inf),
        }
        for name, (low, high) in limits.items():
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            if value is None or not low <= value <= high:
                raise ValueError(f"{name}={value} must lie in {low:g}..{high:g}")
        for name in ("max_grad_norm", "huber_delta", "eps"):
            if getattr(self, name) == 0:
                raise ValueError(f"{name}={getattr(self, name)} must be above 0")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas={self.betas} must be two numbers in 0..1, 1 excluded")
        self._check_together()

    def _check_together(self) -> None:
        if self.micro_batch_size > self.minibatch_size:
            raise ValueError(
                f"micro_batch_size={self.micro_batch_size} is more than minibatch_size={self.minibatch_size}, the rows "
                "of a whole optimizer step"
            )
        if self.interpolate_proximal and self.recompute_log_probs:
            raise ValueError(
                "interpolate_proximal estimates what recompute_log_probs computes; set one of them to False"
            )
        is_decoupled = self.recompute_log_probs or self.interpolate_proximal
        if not is_decoupled and self.max_behaviour_weight != type(self).max_behaviour_weight:
            raise ValueError(
                f"max_behaviour_weight={self.max_behaviour_weight} has no effect: without recompute_log_probs and "
                "interpolate_proximal every weight is 1"
            )


@dataclass(frozen=True)
class RowLoss:
    """loss: [N], with gradients. facts: {name: [N]}, detached; their means are logged."""

    loss: Tensor
    facts: dict[str, Tensor]


def reduce_rows(log_probs: Tensor, valid_steps: Tensor) -> Tensor:
    """Log-probability of what was executed, [N]: summed over the executed actions of the chunk and their dimensions.

    log_probs: [N, H, ...] elementwise or per action, of the whole chunk; or [N], which is taken as it is.
    valid_steps: [N], executed actions; what was predicted beyond them counts for nothing.
    """
    if log_probs.dim() == 1:
        return log_probs
    steps = torch.arange(log_probs.shape[1], device=log_probs.device)
    executed = steps < valid_steps.to(steps.device)[:, None]
    return torch.where(executed, log_probs.flatten(2).sum(2) if log_probs.dim() > 2 else log_probs, 0.0).sum(1)


def behaviour_weights(proximal: Tensor, behaviour: Tensor, config: PPOConfig) -> tuple[Tensor, dict[str, float]]:
    """Weights [N] that make up for the policy that acted being another than the proximal one, and what is logged.

    w = exp(proximal - behaviour). Rows above `max_behaviour_weight` get 0, and the others so much more that their mean
    counts; where that would drop more than a fifth of the rows, weights are cut off at the bound instead.
    """
    weights = (proximal - behaviour).exp()
    above = weights > config.max_behaviour_weight
    share = above.float().mean().item()
    facts = {
        "behaviour_weight": weights.mean().item(),
        "behaviour_weight_max": weights.max().item(),
        "behaviour_weight_above": share,
    }
    if share > _MOST_DROPPED:
        return weights.clamp(max=config.max_behaviour_weight), facts
    return torch.where(above, 0.0, weights) / (1 - share), facts


def truncated_weights(proximal: Tensor, behaviour: Tensor, config: PPOConfig) -> Tensor:
    """Weights [N] as of `behaviour_weights`, cut off at the bound: each a function of its own row.

    For a proximal policy that moves with the current one, where no share of all rows is known.
    """
    return (proximal - behaviour).exp().clamp(max=config.max_behaviour_weight)


def interpolated_proximal(current: Tensor, behaviour: Tensor, lag: Tensor) -> Tensor:
    """A-3PO's proximal log-probabilities: behaviour + alpha (current - behaviour), detached; alpha = (lag - 1) / lag.

    lag: int64 [N], versions between the weights that acted and those after this update: 1 where the rollouts had the
    newest, and then alpha is 0.
    """
    behind = lag.clamp(min=1)
    alpha = (behind - 1) / behind
    return (behaviour + alpha * (current - behaviour)).detach()


def policy_loss(log_probs: Tensor, proximal: Tensor, weights: Tensor, advantages: Tensor, config: PPOConfig) -> RowLoss:
    """w max(-A rho, -A clip(rho)), cut off at dual_clip |A| where A < 0; rho = exp(log_probs - proximal).

    All [N], float32; weights as `behaviour_weights` gives them. Facts: approx_kl (k3: rho - 1 - ln rho), clip_fraction,
    ratio_deviation (|rho - 1|).
    """
    log_ratio = (log_probs - proximal).clamp(max=_LARGEST_LOG_RATIO)
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    loss = torch.maximum(-advantages * ratio, -advantages * clipped)
    if config.dual_clip is not None:
        bound = config.dual_clip * advantages.abs()
        loss = torch.where(advantages < 0, torch.minimum(loss, bound), loss)
    with torch.no_grad():
        facts = {
            "approx_kl": log_ratio.expm1() - log_ratio,
            "clip_fraction": (clipped != ratio).float(),
            "ratio_deviation": (ratio - 1).abs(),
        }
    return RowLoss(weights * loss, facts)


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, config: PPOConfig) -> RowLoss:
    """max(h(R - V), h(R - V_old - clip(V - V_old))), h the Huber loss (0.5 e^2 inside); all [N], float32.

    Facts: value_clip_fraction, how often |V - V_old| exceeds the bound.
    """
    moved = values - old_values
    loss = _huber(returns - values, config.huber_delta)
    facts = {}
    if config.value_clip is not None:
        kept = old_values + moved.clamp(-config.value_clip, config.value_clip)
        loss = torch.maximum(loss, _huber(returns - kept, config.huber_delta))
        facts["value_clip_fraction"] = (moved.detach().abs() > config.value_clip).float()
    return RowLoss(loss, facts)


def stop_early(approx_kl: float, config: PPOConfig) -> bool:
    """Whether an epoch has moved the policy so far that no further one should run on these rows."""
    return config.target_kl is not None and approx_kl > 1.5 * config.target_kl


def _huber(error: Tensor, delta: float | None) -> Tensor:
    square = 0.5 * error.square()
    if delta is None:
        return square
    return torch.where(error.abs() <= delta, square, delta * (error.abs() - 0.5 * delta))
