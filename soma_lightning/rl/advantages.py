"""How much better than expected was what was done? Generalised advantage estimation over chunk decisions.

A decision is one action chunk: its reward is the sum over the executed actions, and discounting happens between
decisions, not inside a chunk (Schulman et al. 2016, arXiv 1506.02438; chunk level as in RLinf).

Shape letters: T decisions, B environments.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

_EPS = 1e-5


class Advantages(NamedTuple):
    """advantages, returns: float32 [T, B]; returns = advantages + values."""

    advantages: Tensor
    returns: Tensor


def gae(
    rewards: Tensor,
    values: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    bootstrap_values: Tensor,
    gamma: float = 0.99,
    lam: float = 0.95,
) -> Advantages:
    """A_t = delta_t + gamma lam A_{t+1}, delta_t = r_t + gamma V_{t+1} - V_t, within an episode.

    rewards: [T, B]. values: [T + 1, B], the last row that of the observation after the cut. terminated: bool [T, B],
    the episode ended: nothing follows. truncated: bool [T, B], a time limit cut it: V_{t+1} is bootstrap_values[t, b],
    the value of its last observation; what follows in the column belongs to the next episode.
    """
    next_values = torch.where(truncated, bootstrap_values, values[1:])
    deltas = rewards + gamma * torch.where(terminated, 0.0, next_values) - values[:-1]
    goes_on = ~(terminated | truncated)
    advantages = torch.zeros_like(deltas)
    carried = torch.zeros_like(deltas[0])
    for t in reversed(range(deltas.shape[0])):
        carried = deltas[t] + gamma * lam * torch.where(goes_on[t], carried, 0.0)
        advantages[t] = carried
    return Advantages(advantages, advantages + values[:-1])


def normalize_advantages(advantages: Tensor, mask: Tensor | None = None) -> Tensor:
    """(A - mean) / (std + 1e-5) over the entries of `mask` (bool; None: all); sums in float64, unbiased deviation.

    A single entry becomes 0. Entries outside the mask are transformed alike, and count for nothing.
    """
    chosen = (advantages if mask is None else advantages[mask]).double()
    if chosen.numel() == 0:
        raise ValueError("there is no entry to normalise over: the mask is empty")
    std = chosen.std() if chosen.numel() > 1 else torch.zeros((), dtype=torch.float64)
    return ((advantages.double() - chosen.mean()) / (std + _EPS)).to(advantages.dtype)


def loss_mask(dones: Tensor) -> Tensor:
    """Where an environment that is not reset still runs its first episode: bool [T, B].

    dones: bool [T + 1, B], entry t before decision t. For recordings in RLinf's masked mode.
    """
    return dones.int().cumsum(0)[:-1] == 0


def episode_weights(mask: Tensor, valid_steps: Tensor, max_steps: int) -> Tensor:
    """mask * max_steps / valid_steps: under a mean over all entries each episode weighs alike, whatever its length.

    mask: bool [T, B]. valid_steps: [B], environment steps of the episode.
    """
    return mask * (max_steps / valid_steps)
