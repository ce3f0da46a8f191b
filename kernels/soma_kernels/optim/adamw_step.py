"""Pass 2 of the optimizer step: one decision, then AdamW with clipping in one read and one write of everything.

`_prepare_kernel` turns the statistics into the decision (clip coefficients, skip) and each tensor's scalars;
`_adamw_kernel` reads gradient, parameter (or its fp32 master) and moments once and writes them once. Nothing is read
by the host. AdamW: Loshchilov and Hutter 2019, algorithm 2.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from soma_kernels.launch import Prepared, on_device
from soma_kernels.optim.plan import SCALARS, StateTable, StepTable, WorkList
from soma_kernels.optim.reference import CLIP_EPS, GradStats
from soma_kernels.optim.streams import TRITON_DTYPE, load_fp32, pointer, store_rounded

_PREPARE_BLOCK = 128
_NORM_EPS = tl.constexpr(CLIP_EPS)


@triton.jit
def _norm_of(total, inverse, INF: tl.constexpr):
    root = total if INF else tl.sqrt_rn(total)
    return root * tl.abs(inverse)


@triton.jit(do_not_specialize=["num_tensors", "num_groups", "num_clips"])
def _prepare_kernel(
    vector,
    words,
    groups,
    clips,
    state_addresses,
    scalars,
    norm_out,
    counters,
    num_tensors,
    num_groups,
    num_clips,
    INF: tl.constexpr,
    NORMALIZE: tl.constexpr,
    CLIPS: tl.constexpr,
    SCALARS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # Every program takes the whole decision again: it is a few scalars, and none has to wait for another.
    i_clip = tl.arange(0, CLIPS)
    sums = tl.load(vector + 2 + i_clip, mask=i_clip < num_clips, other=0.0)
    total = tl.max(sums) if INF else tl.sum(sums)
    inverse = tl.full([], 1.0, tl.float32)
    if NORMALIZE:
        inverse = 1.0 / tl.load(vector + 1)
    norm = _norm_of(total, inverse, INF)
    take = (tl.load(vector) == 0) & (norm < float("inf")) & (inverse > 0)

    reals = words.to(tl.pointer_type(tl.float64)) + num_tensors
    i_tensor = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    valid = i_tensor < num_tensors
    clip = tl.load(clips + i_tensor, mask=valid, other=0)
    limit = tl.load(reals + 7 * num_groups + clip, mask=valid, other=0.0).to(tl.float32)
    clip_norm = _norm_of(tl.load(vector + 2 + clip, mask=valid, other=0.0), inverse, INF)
    scale = inverse * tl.minimum(limit / (clip_norm + _NORM_EPS), 1.0)

    hyper = reals + 7 * tl.load(groups + i_tensor, mask=valid, other=0)
    lr = tl.load(hyper, mask=valid, other=0.0)
    weight1 = tl.load(hyper + 2, mask=valid, other=1.0)
    weight2 = tl.load(hyper + 4, mask=valid, other=1.0)
    present = valid & (tl.load(words + i_tensor, mask=valid, other=0) != 0)
    step_address = tl.load(state_addresses + 4 * num_tensors + i_tensor, mask=valid, other=0)
    step_at = step_address.to(tl.pointer_type(tl.float32))
    step = tl.load(step_at, mask=present, other=0.0) + 1.0
    if take:
        tl.store(step_at, step, mask=present)
    correction1 = 1.0 - tl.exp(step.to(tl.float64) * tl.load(hyper + 1, mask=valid, other=-1.0))
    correction2 = 1.0 - tl.exp(step.to(tl.float64) * tl.load(hyper + 3, mask=valid, other=-1.0))

    row = scalars + i_tensor * SCALARS
    tl.store(row, scale, mask=valid)
    tl.store(row + 1, weight1.to(tl.float32), mask=valid)
    tl.store(row + 2, weight2.to(tl.float32), mask=valid)
    tl.store(row + 3, (lr * tl.load(hyper + 6, mask=valid, other=0.0)).to(tl.float32), mask=valid)
    tl.store(row + 4, (lr / correction1).to(tl.float32), mask=valid)
    tl.store(row + 5, (1.0 / tl.sqrt(correction2)).to(tl.float32), mask=valid)
    tl.store(row + 6, tl.load(hyper + 5, mask=valid, other=0.0).to(tl.float32), mask=valid)
    tl.store(row + 7, present.to(tl.float32) * take.to(tl.float32), mask=valid)
    if tl.program_id(0) == 0:
        skipped = 1 - take.to(tl.int64)
        # A maximum over processes can drop a NaN, the count cannot.
        tl.store(norm_out, tl.where(tl.load(vector) == 0, norm, float("nan")) if INF else norm)
        tl.store(counters, tl.load(counters) + skipped)
        tl.store(counters + 1, (tl.load(counters + 1) + 1) * skipped)


@triton.jit
def _toward(start, end, weight):
    """start + weight (end - start), from the nearer end, so that neither cancels the other.

    beta start + (1 - beta) end would drift: in fp32 the two factors do not add up to 1.
    """
    near = tl.where(weight >= 0.5, end, start)
    return tl.fma(tl.where(weight >= 0.5, weight - 1.0, weight), end - start, near)


@triton.jit
def _update(
    streams,
    start,
    begin,
    end,
    scalars,
    max_value,
    PARAM: tl.constexpr,
    GRAD: tl.constexpr,
    MOMENT: tl.constexpr,
    MASTER: tl.constexpr,
    CLAMP: tl.constexpr,
    ALIGNED: tl.constexpr,
    MASKED: tl.constexpr,
    TILE: tl.constexpr,
):
    """AdamW on the elements [begin, end) after `start` of one tensor."""
    scale, weight1, weight2, decay, step_size, root, eps = scalars
    p = pointer(streams[0], start, PARAM, ALIGNED)
    g = pointer(streams[1], start, GRAD, ALIGNED)
    m = pointer(streams[2], start, MOMENT, ALIGNED)
    v = pointer(streams[3], start, MOMENT, ALIGNED)
    w = pointer(streams[4], start, tl.float32, ALIGNED)
    for i in range(begin, end, TILE):
        at = i + tl.arange(0, TILE)
        mask = at < end
        grad = load_fp32(g + at, mask, MASKED) * scale
        exp_avg = load_fp32(m + at, mask, MASKED)
        exp_avg_sq = load_fp32(v + at, mask, MASKED)
        weight = load_fp32((w if MASTER else p) + at, mask, MASKED)
        if CLAMP:
            grad = tl.minimum(tl.maximum(grad, -max_value), max_value)
        exp_avg = _toward(exp_avg, grad, weight1)
        exp_avg_sq = _toward(exp_avg_sq, grad * grad, weight2)
        denominator = tl.fma(tl.sqrt_rn(exp_avg_sq), root, eps)
        # Decay and step are added first, where rounding is small: the weight itself is rounded once.
        weight -= tl.fma(step_size, tl.div_rn(exp_avg, denominator), weight * decay)
        store_rounded(m + at, exp_avg, mask, MASKED)
        store_rounded(v + at, exp_avg_sq, mask, MASKED)
        if MASTER:
            store_rounded(w + at, weight, mask, MASKED)
        store_rounded(p + at, weight, mask, MASKED)


@triton.jit(do_not_specialize=["last", "num_tensors", "max_value"])
def _adamw_kernel(
    tensor_of_chunk,
    first_chunk,
    numel,
    grad_addresses,
    state_addresses,
    scalars,
    last,
    num_tensors,
    max_value,
    PARAM: tl.constexpr,
    GRAD: tl.constexpr,
    MOMENT: tl.constexpr,
    MASTER: tl.constexpr,
    CLAMP: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    SCALARS: tl.constexpr,
):
    # Backwards: the gradients that pass 1 read last are the ones still in the L2 cache.
    i_chunk = last - tl.program_id(0)
    i_tensor = tl.load(tensor_of_chunk + i_chunk)
    row = scalars + i_tensor * SCALARS
    if tl.load(row + 7) != 0:
        start = (i_chunk - tl.load(first_chunk + i_tensor)) * CHUNK
        length = tl.minimum(tl.load(numel + i_tensor) - start, CHUNK).to(tl.int32)
        full = length // TILE * TILE
        state = state_addresses + i_tensor
        p, m, v = tl.load(state), tl.load(state + num_tensors), tl.load(state + 2 * num_tensors)
        w, g = tl.load(state + 3 * num_tensors), tl.load(grad_addresses + i_tensor)
        streams = (p, g, m, v, w)
        s = (
            tl.load(row),
            tl.load(row + 1),
            tl.load(row + 2),
            tl.load(row + 3),
            tl.load(row + 4),
            tl.load(row + 5),
            tl.load(row + 6),
        )
        if (p | g | m | v | w) % 16 == 0:
            _update(streams, start, 0, full, s, max_value, PARAM, GRAD, MOMENT, MASTER, CLAMP, True, False, TILE)
        else:
            _update(streams, start, 0, full, s, max_value, PARAM, GRAD, MOMENT, MASTER, CLAMP, False, False, TILE)
        _update(streams, start, full, length, s, max_value, PARAM, GRAD, MOMENT, MASTER, CLAMP, False, True, TILE)


def adamw_step_(
    work: WorkList,
    states: StateTable,
    table: StepTable,
    stats: GradStats,
    counters: Tensor,
    *,
    normalize: bool = False,
    max_value: float | None = None,
) -> Tensor:
    """One AdamW step of n tensors from `stats` (after its all-reduce, if any); gradients keep their bits.

    counters: [2] int64 on the device, skipped steps in all and in a row; updated in place. normalize: gradients are
    divided by `stats.vector[1]`. max_value: every scaled gradient is clamped to [-max_value, max_value].
    Returns the global norm after normalization and before clipping, a new 0-d fp32 tensor. A step with a non-finite
    gradient, norm or normalizer, or a normalizer that is not positive, changes nothing but the counters.
    """
    norm = torch.empty((), dtype=torch.float32, device=work.device)
    key = ("adamw_step", stats.norm_type, normalize, max_value is None)
    prepare, update = work.prepared(
        key, lambda: _prepare(work, inf=stats.norm_type == math.inf, normalize=normalize, clamp=max_value is not None)
    )
    sizes = (work.num_tensors, work.num_groups, work.num_clips)
    tables = (stats.vector, table.words, work.group, work.clip, states.addresses, work.scalars)
    chunks = work.update
    # Triton's interpreter would make a larger number an fp64 one.
    limit = 0.0 if max_value is None else min(float(max_value), torch.finfo(torch.float32).max)
    with on_device(work.device):
        prepare(triton.cdiv(work.num_tensors, _PREPARE_BLOCK), *tables, norm, counters, *sizes)
        tables = (chunks.tensor, chunks.first, work.numel, table.words, states.addresses, work.scalars)
        for kernel, (_, first, count) in zip(update, chunks.launches, strict=True):
            kernel(count, *tables, first + count - 1, work.num_tensors, limit)
    return norm


def _prepare(work: WorkList, *, inf: bool, normalize: bool, clamp: bool) -> tuple[Prepared, list[Prepared]]:
    tiles = work.tiles
    clips = triton.next_power_of_2(work.num_clips)
    update = [
        Prepared(
            _adamw_kernel,
            (
                TRITON_DTYPE[variant.param],
                TRITON_DTYPE[variant.grad],
                TRITON_DTYPE[variant.moment],
                variant.master,
                clamp,
                tiles.update_chunk,
                tiles.update_tile,
                SCALARS,
            ),
            num_warps=tiles.update_warps,
        )
        for variant, _, _ in work.update.launches
    ]
    return Prepared(_prepare_kernel, (inf, normalize, clips, SCALARS, _PREPARE_BLOCK), num_warps=4), update
