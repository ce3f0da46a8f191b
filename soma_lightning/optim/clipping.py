"""Which clipping the next optimizer step applies: one rule, set before the step and used up by it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

NORM_TYPES = (2.0, math.inf)


def check_norm_type(norm_type: float) -> float:
    """`norm_type` as a float; ValueError unless it is 2.0 or inf."""
    if not isinstance(norm_type, int | float) or norm_type not in NORM_TYPES:
        raise ValueError(f"norm_type={norm_type!r} is not supported; use 2.0 or inf")
    return float(norm_type)


def clip_in_place(
    parameters: Iterable[Tensor], max_norm: float, norm_type: float, *, error_if_nonfinite: bool = False
) -> Tensor:
    """torch.nn.utils.clip_grad_norm_, for DTensors and plain tensors together; returns the global norm, plain and 0-d.

    A plain gradient is the same on all ranks and counts once.
    """
    grads = {p: p.grad for p in parameters if p.grad is not None}
    kinds = [[p for p in grads if hasattr(grads[p], "full_tensor") is divided] for divided in (True, False)]
    kinds = [kind for kind in kinds if kind]
    norms = [get_total_norm([grads[p] for p in kind], norm_type) for kind in kinds]
    whole = [norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in norms]
    total = get_total_norm(whole, norm_type, error_if_nonfinite)
    for kind in kinds:
        clip_grads_with_norm_(kind, max_norm, total)
    return total


@dataclass(frozen=True)
class ClipRule:
    """What one step does to its gradients before it uses them; `.grad` itself keeps its bits.

    max_norm: the global norm is scaled down to this. max_value: every element is clamped to [-max_value, max_value].
    normalizer: gradients are divided by it first (number or 0-d tensor); a step whose normalizer is not positive and
    finite (no valid sample) is skipped. norm_type: 2.0 or inf. loss_scale: what the loss was multiplied by against
    underflow (number or 0-d tensor): gradients are divided by it too, in the same pass.
    Raises ValueError for a limit that is not positive, or when both limits are set.
    """

    max_norm: float | None = None
    max_value: float | None = None
    normalizer: float | Tensor | None = None
    norm_type: float = 2.0
    loss_scale: float | Tensor | None = None

    @property
    def divides(self) -> bool:
        """Whether gradients are divided by anything before they are clipped."""
        return self.normalizer is not None or self.loss_scale is not None

    def __post_init__(self) -> None:
        check_norm_type(self.norm_type)
        for name, limit in (("max_norm", self.max_norm), ("max_value", self.max_value)):
            if limit is not None and (isinstance(limit, bool | str) or not limit > 0):
                raise ValueError(f"{name}={limit!r} must be positive; leave it out for no clipping")
        for name, divisor in (("normalizer", self.normalizer), ("loss_scale", self.loss_scale)):
            if divisor is not None and not isinstance(divisor, int | float | Tensor):
                raise ValueError(f"{name}={divisor!r} must be a number or a 0-d tensor")
        if self.max_norm is not None and self.max_value is not None:
            raise ValueError(
                f"max_norm={self.max_norm} and max_value={self.max_value} are both set for one step; "
                "clip by norm or by value, not both"
            )

    def tightened(self, other: ClipRule) -> ClipRule:
        """Both rules, one after the other: the smaller limit wins.

        ValueError if one clips by norm and one by value, or both by norms of two types.
        """
        if self.max_norm is not None and other.max_norm is not None and self.norm_type != other.norm_type:
            raise ValueError(
                f"max_norm={self.max_norm} of norm type {self.norm_type} and max_norm={other.max_norm} of norm type "
                f"{other.norm_type} are both set for one step; use one norm type"
            )
        return ClipRule(
            max_norm=_smaller(self.max_norm, other.max_norm),
            max_value=_smaller(self.max_value, other.max_value),
            normalizer=other.normalizer if other.normalizer is not None else self.normalizer,
            norm_type=other.norm_type,
            loss_scale=other.loss_scale if other.loss_scale is not None else self.loss_scale,
        )


def _smaller(a: float | None, b: float | None) -> float | None:
    if a is None or b is None:
        return b if a is None else a
    return min(a, b)
