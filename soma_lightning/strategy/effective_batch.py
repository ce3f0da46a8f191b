"""Who divides the gradients? FSDP2 by the number of ranks, or the optimizer step by the global count of samples.

A module that sets `self.soma_normalizer` returns a loss sum and says how many samples stand behind it. Then gradients
are summed over ranks and micro-batches, and the fused step divides them once by the sum of all counts.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

ATTRIBUTE = "soma_normalizer"


def count_of(modules: Iterable[Module]) -> Tensor | float | None:
    """What the modules say of the loss that is about to be differentiated; None if they say nothing.

    ValueError for what is no count, or if two modules say something.
    """
    found = [(m, value) for m in modules if (value := getattr(m, ATTRIBUTE, None)) is not None]
    if not found:
        return None
    if len(found) > 1:
        raise ValueError(
            f"{' and '.join(type(m).__name__ for m, _ in found)} both set {ATTRIBUTE}; one loss has one count: set it "
            "on one of them"
        )
    module, value = found[0]
    if isinstance(value, bool) or not isinstance(value, int | float | Tensor):
        raise ValueError(
            f"{type(module).__name__}.{ATTRIBUTE}={value!r} must be a number or a 0-d tensor: how many valid samples "
            "this rank's loss sums over"
        )
    if isinstance(value, Tensor) and value.numel() != 1:
        raise ValueError(f"{type(module).__name__}.{ATTRIBUTE} must be 0-d, got shape {tuple(value.shape)}")
    return value.detach().reshape(()) if isinstance(value, Tensor) else value


def any_rank_counts(has_count: bool, device: torch.device) -> bool:
    """Whether any rank's module sets a count: a collective, and one answer for all of them."""
    flag = torch.tensor([float(has_count)], device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return bool(flag.item())
