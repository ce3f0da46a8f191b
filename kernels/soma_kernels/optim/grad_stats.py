"""Pass 1 of the optimizer step: what do all gradients together look like? One read of every gradient, nothing written.

Each chunk's sum of squares (or largest magnitude) is one fp32 partial; the partials are added in fp64 in a fixed
order, so the result has the same bits in every run. The squares are never negative: a partial is non-finite exactly
when its chunk holds a NaN or an infinity, or overflows fp32.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from soma_kernels.launch import Prepared, on_device
from soma_kernels.optim.plan import StepTable, WorkList
from soma_kernels.optim.reference import VECTOR_SUMS, GradStats
from soma_kernels.optim.streams import TRITON_DTYPE, load_fp32, pointer

#: Partials that the combining program adds at once.
_COMBINE_BLOCK = 4096


@triton.jit
def _largest(x):
    """The maximum of non-negative numbers; NaN if one is not finite, which a plain maximum would drop."""
    return tl.max(x) + tl.sum(x * 0.0)


@triton.jit
def _accumulate(
    acc,
    address,
    start,
    begin,
    end,
    GRAD: tl.constexpr,
    INF: tl.constexpr,
    ALIGNED: tl.constexpr,
    MASKED: tl.constexpr,
    TILE: tl.constexpr,
):
    """Adds the elements [begin, end) after `start` to the lanes of `acc`."""
    g = pointer(address, start, GRAD, ALIGNED)
    for i in range(begin, end, TILE):
        at = i + tl.arange(0, TILE)
        x = load_fp32(g + at, at < end, MASKED)
        acc = tl.maximum(acc, tl.abs(x), propagate_nan=tl.PropagateNan.ALL) if INF else tl.fma(x, x, acc)
    return acc


@triton.jit(do_not_specialize=["first"])
def _grad_stats_kernel(
    tensor_of_chunk,
    first_chunk,
    numel,
    grad_addresses,
    partials,
    first,
    GRAD: tl.constexpr,
    INF: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
):
    i_chunk = first + tl.program_id(0)
    i_tensor = tl.load(tensor_of_chunk + i_chunk)
    start = (i_chunk - tl.load(first_chunk + i_tensor)) * CHUNK
    address = tl.load(grad_addresses + i_tensor)
    length = tl.minimum(tl.load(numel + i_tensor) - start, CHUNK).to(tl.int32)
    full = length // TILE * TILE
    acc = tl.zeros([TILE], tl.float32)
    if address != 0:
        if address % 16 == 0:
            acc = _accumulate(acc, address, start, 0, full, GRAD, INF, True, False, TILE)
        else:
            acc = _accumulate(acc, address, start, 0, full, GRAD, INF, False, False, TILE)
        acc = _accumulate(acc, address, start, full, length, GRAD, INF, False, True, TILE)
    tl.store(partials + i_chunk, _largest(acc) if INF else tl.sum(acc))


@triton.jit(do_not_specialize=["num_chunks"])
def _combine_kernel(partials, clip_of_chunk, vector, num_chunks, INF: tl.constexpr, BLOCK: tl.constexpr):
    """One program a clip group; program 0 also counts the chunks that are not finite."""
    i_clip = tl.program_id(0)
    total = tl.zeros([BLOCK], tl.float64)
    bad = tl.zeros([BLOCK], tl.int32)
    for i in range(0, num_chunks, BLOCK):
        row = i + tl.arange(0, BLOCK)
        x = tl.load(partials + row, mask=row < num_chunks, other=0.0)
        clip = tl.load(clip_of_chunk + row, mask=row < num_chunks, other=-1)
        bad += (tl.abs(x) < float("inf")).to(tl.int32) ^ 1
        x = tl.where(clip == i_clip, x, 0.0).to(tl.float64)
        if INF:
            total = tl.maximum(total, x, propagate_nan=tl.PropagateNan.ALL)
        else:
            total += x
    result = _largest(total) if INF else tl.sum(total)
    tl.store(vector + 2 + i_clip, result.to(tl.float32))
    if i_clip == 0:
        tl.store(vector, tl.sum(bad).to(tl.float32))
        tl.store(vector + 1, 1.0)


def grad_stats(work: WorkList, table: StepTable, *, norm_type: float = 2.0) -> GradStats:
    """Statistics of the gradients at `table`'s addresses; two launches, no synchronization.

    Returns partials [R] fp32 (the work list's own memory, until its next statistics) and the vector of
    `soma_kernels.optim.reference.grad_stats`, a new tensor ready for an all-reduce.
    """
    vector = torch.empty(VECTOR_SUMS + work.num_clips, dtype=torch.float32, device=work.device)
    stats, combine = work.prepared(("grad_stats", norm_type), lambda: _prepare(work, inf=norm_type == math.inf))
    chunks = work.stats
    with on_device(work.device):
        for kernel, (_, first, count) in zip(stats, chunks.launches, strict=True):
            kernel(count, chunks.tensor, chunks.first, work.numel, table.words, work.partials, first)
        combine(work.num_clips, work.partials, work.clip_of_chunk, vector, chunks.count)
    return GradStats(work.partials, vector, norm_type)


def _prepare(work: WorkList, *, inf: bool) -> tuple[list[Prepared], Prepared]:
    tiles = work.tiles
    stats = [
        Prepared(
            _grad_stats_kernel,
            (TRITON_DTYPE[launch.variant.grad], inf, tiles.stats_chunk, tiles.stats_tile),
            num_warps=tiles.stats_warps,
        )
        for launch in work.stats.launches
    ]
    return stats, Prepared(_combine_kernel, (inf, _COMBINE_BLOCK), num_warps=8)


def tensor_of_first_nonfinite(work: WorkList, partials: Tensor) -> int | None:
    """Smallest index of a tensor with a non-finite partial; waits for the device."""
    bad = (~partials.isfinite()).cpu().numpy()
    return int(work.stats.tensor_on_host[bad].min()) if bad.any() else None
