"""What one clipped AdamW step computes, in plain torch: the truth that faster versions of the same step are held to.

Three pure functions, called in this order once a step:

    stats = grad_stats(grads)                      one pass over the original gradients
    decision = decide(stats, max_norm=1.0)         0-d tensors on the gradients' device, nothing is read by the host
    adamw_step_(params, grads, ..., decision)      one update; `grads` keep their bits

n is the number of tensors. A gradient is never written.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

#: Added to the norm before dividing, as torch.nn.utils.clip_grad_norm_ does, so that results agree with it.
CLIP_EPS = 1e-6

#: Elements whose scaled gradients exist at once on an accelerator: bounds the extra memory and still fills the device.
CHUNK_ELEMENTS = 1 << 26


class GradStats(NamedTuple):
    """Statistics of a list of n gradients.

    partials: [n] fp32 (fp64 when a gradient is fp64): sum of squares of each gradient, or its max-abs for `inf`.
    total: 0-d, the sum (or the maximum) of `partials`.
    nonfinite: 0-d int64, how many gradients hold a NaN or an infinity, or overflow when squared in fp32.
    norm_type: 2.0 or inf.
    """

    partials: Tensor
    total: Tensor
    nonfinite: Tensor
    norm_type: float


class Decision(NamedTuple):
    """What one step does, as 0-d tensors on the gradients' device.

    norm: the global norm before clipping, after division by the normalizer.
    scale: the factor applied to every gradient (1 / normalizer times the clip coefficient).
    take: bool; False leaves parameters, moments and step counters as they are.
    """

    norm: Tensor
    scale: Tensor
    take: Tensor


def _accumulation_dtype(tensors: Sequence[Tensor]) -> torch.dtype:
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def _indices_by_dtype(*columns: Sequence[Tensor]) -> list[list[int]]:
    """Positions whose tensors share device and dtypes: torch's foreach kernels need uniform lists to be fast."""
    buckets: dict[tuple[object, ...], list[int]] = {}
    for i, row in enumerate(zip(*columns, strict=True)):
        buckets.setdefault((row[0].device, *(t.dtype for t in row)), []).append(i)
    return list(buckets.values())


@torch.no_grad()
def grad_stats(grads: Sequence[Tensor], *, norm_type: float = 2.0) -> GradStats:
    """Reads every gradient once and returns its norm contribution.

    grads: n >= 1 dense floating-point tensors, any shapes (empty ones add 0) and dtypes; they may sit on several
    devices, the result is on the first one's. Squares are summed in fp32 whatever the gradients' dtype.
    norm_type: 2.0 or inf.
    """
    if norm_type not in (2.0, math.inf):
        raise ValueError(f"norm_type={norm_type} is not supported; use 2.0 or inf")
    dtype, device = _accumulation_dtype(grads), grads[0].device
    partials: list[Tensor] = [torch.zeros((), dtype=dtype, device=device)] * len(grads)
    for bucket in _indices_by_dtype(grads):
        filled = [i for i in bucket if grads[i].numel() > 0]  # the inf norm of an empty tensor is an error in torch
        if not filled:
            continue
        norms = torch._foreach_norm([grads[i] for i in filled], norm_type, dtype=dtype)
        for i, norm in zip(filled, norms, strict=True):
            partials[i] = norm.to(device)
    stacked = torch.stack(partials)
    if norm_type == 2.0:
        stacked = stacked.square_()
        total = stacked.sum()
    else:
        total = stacked.max()
    return GradStats(stacked, total, (~stacked.isfinite()).sum(), norm_type)


@torch.no_grad()
def decide(stats: GradStats, *, max_norm: float | None = None, normalizer: float | Tensor | None = None) -> Decision:
    """Turns statistics into one decision for all tensors, without a host synchronization.

    max_norm: the norm is clipped to this value: coefficient min(1, max_norm / (norm + 1e-6)). None: no clipping.
    normalizer: every gradient is divided by it first (the number of samples behind a summed loss). None: 1.
    A step is not taken when a gradient is non-finite, when the sum of squares overflows, or when the normalizer is
    zero or non-finite.
    """
    norm = stats.total.sqrt() if stats.norm_type == 2.0 else stats.total
    scale = torch.ones_like(norm)
    take = (stats.nonfinite == 0) & norm.isfinite()
    if normalizer is not None:
        scale = scale / (normalizer.to(scale) if isinstance(normalizer, Tensor) else normalizer)
        norm = norm * scale.abs()
        take &= norm.isfinite() & (scale != 0)  # 1 / 0 makes the norm infinite or NaN, 1 / inf makes the scale 0
    if max_norm is not None:
        scale = scale * (max_norm / (norm + CLIP_EPS)).clamp(max=1.0)
    return Decision(norm, scale, take)


def _host_scalar(value: float | Tensor) -> float | Tensor:
    """A Python number unless reading it would synchronize with an accelerator."""
    return value.item() if isinstance(value, Tensor) and value.device.type == "cpu" else value


def _scaled_grads(
    grads: Sequence[Tensor], dtypes: Sequence[torch.dtype], scale: float | Tensor | None, max_value: float | None
) -> list[Tensor]:
    """Copies of the gradients after conversion, scaling and clamping; the gradients themselves if nothing is to do."""
    result = [g.to(dtype) for g, dtype in zip(grads, dtypes, strict=True)]
    if scale is not None:
        # A 0-d gradient times a 0-d tensor would take the wider dtype of the two.
        result = [g.to(dtype) for g, dtype in zip(torch._foreach_mul(result, scale), dtypes, strict=True)]
    if max_value is not None:
        result = list(torch._foreach_clamp_min(result, -max_value))
        torch._foreach_clamp_max_(result, max_value)
    return result


class _Hyper(NamedTuple):
    lr: float | Tensor
    beta1: float
    beta2: float
    eps: float
    weight_decay: float

    @property
    def decay(self) -> float | Tensor:
        return 1 - self.lr * self.weight_decay


@torch.no_grad()
def adamw_step_(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    masters: Sequence[Tensor | None] | None = None,
    scale: float | Tensor | None = None,
    max_value: float | None = None,
    take: Tensor | None = None,
) -> None:
    """One AdamW update (Loshchilov and Hutter 2019, algorithm 2) of n tensors; writes everything but `grads`.

    params[i], exp_avgs[i], exp_avg_sqs[i]: same shape; the moments have the parameter's dtype, or fp32 with a master.
    grads[i]: same shape, any floating dtype. steps[i]: 0-d fp32 on the parameter's device, steps taken so far.
    masters[i]: fp32 copy of a low-precision parameter; it is updated instead and rounded into params[i].
    lr: learning rate, a number or a 0-d tensor (its device decides whether it is read by the host or not).
    scale, max_value: gradients are used as clamp(g * scale, -max_value, max_value).
    take: 0-d bool on the device: False changes nothing. None: the caller knows that the step is taken, and the update
    runs in place with exactly torch.optim.AdamW's operations (foreach), in its order.
    """
    hyper = _Hyper(_host_scalar(lr), beta1, beta2, eps, weight_decay)
    masters = masters if masters is not None else [None] * len(params)
    targets = [p if m is None else m for p, m in zip(params, masters, strict=True)]
    for bucket in _indices_by_dtype(targets, exp_avgs, grads):
        for rows in [bucket] if take is None else _chunks(bucket, targets):
            p, m, v, t = ([column[i] for i in rows] for column in (targets, exp_avgs, exp_avg_sqs, steps))
            g = _scaled_grads([grads[i] for i in rows], [x.dtype for x in m], scale, max_value)
            if take is None:
                _update_in_place_(p, g, m, v, t, hyper)
            else:
                _update_if_taken_(p, g, m, v, t, hyper, take)
    for param, master in zip(params, masters, strict=True):
        if master is not None:
            param.copy_(master)


def _chunks(rows: Sequence[int], tensors: Sequence[Tensor]) -> Iterator[list[int]]:
    chunk: list[int] = []
    elements = 0
    for i in rows:
        if chunk and elements + tensors[i].numel() > CHUNK_ELEMENTS:
            yield chunk
            chunk, elements = [], 0
        chunk.append(i)
        elements += tensors[i].numel()
    yield chunk


def _update_in_place_(
    p: list[Tensor], g: list[Tensor], m: list[Tensor], v: list[Tensor], t: list[Tensor], hyper: _Hyper
) -> None:
    """torch.optim.AdamW's operations in torch's order, so that an unclipped step has the same bits."""
    torch._foreach_add_(t, 1.0)
    taken = torch.stack(t).tolist()
    if hyper.weight_decay != 0:
        torch._foreach_mul_(p, hyper.decay)
    torch._foreach_lerp_(m, g, 1 - hyper.beta1)
    torch._foreach_mul_(v, hyper.beta2)
    torch._foreach_addcmul_(v, g, g, 1 - hyper.beta2)
    denominator = torch._foreach_sqrt(v)
    torch._foreach_div_(denominator, [(1 - hyper.beta2**s) ** 0.5 for s in taken])
    torch._foreach_add_(denominator, hyper.eps)
    torch._foreach_addcdiv_(p, m, denominator, [-float(hyper.lr) / (1 - hyper.beta1**s) for s in taken])


def _update_if_taken_(
    p: list[Tensor], g: list[Tensor], m: list[Tensor], v: list[Tensor], t: list[Tensor], hyper: _Hyper, take: Tensor
) -> None:
    """The same update with the decision on the device: torch's fused kernel returns at once where it is not taken.

    The kernel counts bias corrections from the device's step counters and computes in fp32 whatever the dtype.
    """
    not_taken = (~take).to(torch.float32)
    # The kernel walks all five tensors with one index: a gradient must have its parameter's memory layout.
    g = [x if x.stride() == y.stride() else torch.empty_like(y).copy_(x) for x, y in zip(g, p, strict=True)]
    lr = hyper.lr.to(torch.float32) if isinstance(hyper.lr, Tensor) else hyper.lr
    torch._foreach_add_(t, 1.0)
    torch._fused_adamw_(
        p,
        g,
        m,
        v,
        [],
        t,
        lr=lr,
        beta1=hyper.beta1,
        beta2=hyper.beta2,
        weight_decay=hyper.weight_decay,
        eps=hyper.eps,
        amsgrad=False,
        maximize=False,
        found_inf=not_taken,
    )
    torch._foreach_sub_(t, [not_taken] * len(t))
