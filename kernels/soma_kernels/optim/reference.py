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

#: Where the clip groups' sums start in the vector of `GradStats`.
VECTOR_SUMS = 2

#: Elements whose scaled gradients exist at once on an accelerator: bounds the extra memory and still fills the device.
CHUNK_ELEMENTS = 1 << 26


class GradStats(NamedTuple):
    """Statistics of n gradients in k clip groups.

    partials: one value a piece, fp32 (fp64 when a gradient is fp64): its sum of squares, or its max-abs for `inf`. A
    piece is a gradient here and a part of one in the kernels; it is non-finite when the piece holds a NaN or an
    infinity, or overflows when squared.
    vector: [2 + k], same dtype: how many pieces are non-finite; the normalizer (1 until somebody sets it); the sum (or
    maximum) of each clip group. One all-reduce (SUM) makes it global; for `inf` a MAX, but for the normalizer, which
    stays a sum.
    norm_type: 2.0 or inf.
    """

    partials: Tensor
    vector: Tensor
    norm_type: float

    @property
    def nonfinite(self) -> Tensor:
        """0-d: how many pieces are not finite."""
        return self.vector[0]

    @property
    def groups(self) -> Tensor:
        """[k]: sum of squares (or maximum) of each clip group."""
        return self.vector[VECTOR_SUMS:]

    @property
    def total(self) -> Tensor:
        """0-d: sum of squares (or maximum) over all clip groups."""
        return self.groups.sum() if self.norm_type == 2.0 else self.groups.max()


class Decision(NamedTuple):
    """What one step does, on the gradients' device.

    norm: 0-d, the global norm before clipping, after division by the normalizer.
    scale: [k], the factor applied to the gradients of each clip group (1 / normalizer times the clip coefficient).
    take: 0-d bool; False leaves parameters, moments and step counters as they are.
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
def grad_stats(
    grads: Sequence[Tensor],
    *,
    norm_type: float = 2.0,
    clips: Sequence[int] | None = None,
    num_clips: int | None = None,
    counted: Sequence[bool] | None = None,
) -> GradStats:
    """Reads every gradient once and returns its norm contribution.

    grads: n >= 1 dense floating-point tensors, any shapes (empty ones add 0) and dtypes; they may sit on several
    devices, the result is on the first one's. Squares are summed in fp32 whatever the gradients' dtype.
    norm_type: 2.0 or inf. clips: clip group of each gradient; None: one group. num_clips: how many groups there are;
    None: as many as `clips` names. counted: False leaves a gradient's norm to another process, its non-finite values
    still count; None: all count.
    """
    if norm_type not in (2.0, math.inf):
        raise ValueError(f"norm_type={norm_type} is not supported; use 2.0 or inf")
    clips = clips if clips is not None else [0] * len(grads)
    num_clips = num_clips or max(clips) + 1
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
    vector = stacked.new_ones(VECTOR_SUMS + num_clips)
    vector[0] = (~stacked.isfinite()).sum()
    for group in range(num_clips):
        members = [i for i, clip in enumerate(clips) if clip == group and (counted is None or counted[i])]
        values = stacked if len(members) == len(grads) else torch.stack([stacked.new_zeros(()), *stacked[members]])
        vector[VECTOR_SUMS + group] = values.sum() if norm_type == 2.0 else values.max()
    return GradStats(stacked, vector, norm_type)


@torch.no_grad()
def decide(
    stats: GradStats,
    *,
    max_norm: float | Sequence[float | None] | None = None,
    normalize: bool = False,
) -> Decision:
    """Turns statistics into one decision for all tensors, without a host synchronization.

    max_norm: the norm of each clip group is clipped to this value: coefficient min(1, max_norm / (norm + 1e-6)). None:
    no clipping; a sequence has one limit a clip group.
    normalize: every gradient is divided by `stats.vector[1]` first (the number of samples behind a summed loss).
    A step is not taken when a gradient is non-finite, when the sum of squares overflows, or when the normalizer is not
    positive and finite.
    """
    squares = torch.cat([stats.total.reshape(1), stats.groups])
    norms = squares.sqrt() if stats.norm_type == 2.0 else squares
    take = stats.nonfinite == 0
    scale = torch.ones_like(stats.groups)
    if normalize:
        inverse = 1 / stats.vector[1]
        norms, scale = norms * inverse.abs(), scale * inverse
        take = take & (inverse > 0)  # 1 / 0 makes the norm infinite or NaN, 1 / inf makes the scale 0
    take = take & norms[0].isfinite()
    # A maximum over processes can drop a NaN, the count cannot.
    norm = norms[0] if stats.norm_type == 2.0 else torch.where(stats.nonfinite == 0, norms[0], torch.nan)
    limits = list(max_norm) if isinstance(max_norm, Sequence) else [max_norm] * len(scale)
    if any(limit is not None for limit in limits):
        coefficients = [
            torch.ones_like(norm) if limit is None else (limit / (norm + CLIP_EPS)).clamp(max=1.0)
            for limit, norm in zip(limits, norms[1:].unbind(), strict=True)
        ]
        scale = scale * torch.stack(coefficients)
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
        max_value = min(max_value, torch.finfo(torch.float32).max)
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

    params[i], exp_avgs[i], exp_avg_sqs[i]: same shape; the moments have the parameter's dtype or fp32 (then a parameter
    of lower precision is rounded once, from an fp32 result).
    grads[i]: same shape, any floating dtype. steps[i]: 0-d fp32 on the parameter's device, steps taken so far.
    masters[i]: fp32 copy of a low-precision parameter; it is updated instead and rounded into params[i].
    lr: learning rate, a number or a 0-d tensor (its device decides whether it is read by the host or not).
    scale, max_value: gradients are used as clamp(g * scale, -max_value, max_value).
    take: 0-d bool on the device: False changes nothing. None: the caller knows that the step is taken, and the update
    runs in place with exactly torch.optim.AdamW's operations (foreach), in its order.
    """
    hyper = _Hyper(_host_scalar(lr), beta1, beta2, eps, weight_decay)
    masters = masters if masters is not None else [None] * len(params)
    targets = [
        (p if p.dtype == m.dtype else p.to(m.dtype)) if master is None else master
        for p, m, master in zip(params, exp_avgs, masters, strict=True)
    ]
    for bucket in _indices_by_dtype(targets, exp_avgs, grads):
        for rows in [bucket] if take is None else _chunks(bucket, targets):
            p, m, v, t = ([column[i] for i in rows] for column in (targets, exp_avgs, exp_avg_sqs, steps))
            g = _scaled_grads([grads[i] for i in rows], [x.dtype for x in m], scale, max_value)
            if take is None:
                _update_in_place_(p, g, m, v, t, hyper)
            else:
                _update_if_taken_(p, g, m, v, t, hyper, take)
    for param, target in zip(params, targets, strict=True):
        if target is not param:
            param.copy_(target)


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
    irregular = [i for i, (x, y, z) in enumerate(zip(p, m, v, strict=True)) if not _walks_alike(x, y, z)]
    originals = {i: (p[i], v[i]) for i in irregular}
    for i in irregular:
        p[i], v[i] = torch.empty_like(m[i], dtype=p[i].dtype).copy_(p[i]), torch.empty_like(m[i]).copy_(v[i])
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
    for i, (param, exp_avg_sq) in originals.items():
        param.copy_(p[i])
        exp_avg_sq.copy_(v[i])


def _walks_alike(*tensors: Tensor) -> bool:
    """Whether one index over memory visits the same elements of all tensors, and no gaps."""
    dense = torch.empty_like(tensors[0], device="meta").stride()
    return all(t.stride() == dense for t in tensors)
