"""How is attention over a shared context and own keys computed? One program for a tile of folded queries.

The program reads the context's keys, then the own ones of its rows, under one running softmax (Milakov and Gimelshein,
2018; Dao, 2023, algorithm 1) in base 2, and writes the output and the log-sum-exp of each row. A row that reads nothing
gets output 0 and log-sum-exp +inf, with which every probability of the backward is exactly 0.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from soma_kernels.attention.blocks import (
    LIST_PAD,
    context_lines,
    head_start,
    line_starts,
    load_rows,
    own_lines,
    own_range,
    query_starts,
    store_rows,
)
from soma_kernels.attention.call import (
    LOG2E,
    PAD,
    Shape,
    Sizes,
    Stride,
    alignment,
    are_aligned,
    as_operands,
    empty_result,
    is_in_reach,
    precision,
    row_strides,
)
from soma_kernels.attention.keys import as_bytes
from soma_kernels.attention.tiles import Tile, find_tile
from soma_kernels.launch import Prepared, on_device

#: Running maximum of a row that has read nothing yet: finite, so that no difference is inf - inf.
LOWEST = tl.constexpr(-3.0e38)

#: Integer parameters of the kernel: never specialized, so one compiled kernel serves every length and layout.
INTEGERS = (
    *(f"{x}_{s}" for x in ("q", "k", "v", "ck", "cv", "out") for s in ("row", "head", "line")),
    *("T", "G", "Hkv", "Lq", "Lk", "Lc"),
)


@triton.jit
def _online_softmax(scores, top, total):
    """One block of base-2 scores [R, K]: new running maximum and sum, probabilities so far, factor of older sums."""
    new_top = tl.maximum(top, tl.max(scores, 1))
    probs = tl.exp2(scores - new_top[:, None])
    decay = tl.exp2(top - new_top)
    return new_top, total * decay + tl.sum(probs, 1), probs, decay


@triton.jit(do_not_specialize=[*INTEGERS, "scale"])
def attention_forward_kernel(
    q, k, v, ck, cv, key_mask, index, count, out, lse, q_row, q_head, q_line, k_row, k_head, k_line, v_row, v_head,
    v_line, ck_row, ck_head, ck_line, cv_row, cv_head, cv_line, out_row, out_head, out_line, T, G, Hkv, Lq, Lk, Lc,
    scale,
    D: tl.constexpr, WIDTH: tl.constexpr, REST: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    OWN_KEYS: tl.constexpr, OWN: tl.constexpr, KEY_MASK: tl.constexpr, LISTED: tl.constexpr,
    ONE_BLOCK: tl.constexpr, SHARED: tl.constexpr, GROUPED: tl.constexpr,
    QUERIES_ALIKE: tl.constexpr, KEYS_ALIKE: tl.constexpr, ALIGN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    if QUERIES_ALIKE:  # equal strides under one name: equal offsets are computed and kept once
        out_row, out_head, out_line = q_row, q_head, q_line
    if KEYS_ALIKE:
        cv_row, cv_head, cv_line = ck_row, ck_head, ck_line
    num_folded = T * G * Lq
    num_tiles = tl.cdiv(num_folded, ROWS)
    i_tile = tl.program_id(0) % num_tiles
    i_context = tl.program_id(0) // num_tiles // Hkv
    i_head = tl.program_id(0) // num_tiles % Hkv
    folded = i_tile * ROWS + tl.arange(0, ROWS)
    valid = folded < num_folded
    at_q = query_starts(q, folded, i_context, i_head, T, G, Lq, q_row, q_head, q_line, SHARED, GROUPED, ALIGN)
    q1 = load_rows(at_q, valid, 0, WIDTH, D, True)
    sum1 = tl.zeros([ROWS, WIDTH], tl.float32)
    if REST > 0:
        q2 = load_rows(at_q, valid, WIDTH, REST, D, True)
        sum2 = tl.zeros([ROWS, REST], tl.float32)
    top = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)

    ck_start = head_start(ck, i_context, i_head, ck_row, ck_head, ALIGN)
    cv_start = head_start(cv, i_context, i_head, cv_row, cv_head, ALIGN)
    end = Lc
    if LISTED:
        index += i_context.to(tl.int64) * (Lc + LIST_PAD)
        end = tl.load(count + i_context)
    num_blocks = tl.cdiv(end, KEYS)
    if ONE_BLOCK:  # known to the compiler: no loop, far fewer registers
        num_blocks = 1
    # Behind a list's readable keys are copies of one of them, but an empty list has none, and its only block is read.
    MASKED: tl.constexpr = ONE_BLOCK or not LISTED
    for j in range(0, num_blocks):
        lines, inside = context_lines(j, index, end, KEYS, LISTED)
        at_k = line_starts(ck_start, lines, ck_line, ALIGN)
        at_v = line_starts(cv_start, lines, cv_line, ALIGN)
        k1 = load_rows(at_k, inside, 0, WIDTH, D, MASKED)
        scores = tl.dot(q1, tl.trans(k1), input_precision=PRECISION)
        if REST > 0:
            k2 = load_rows(at_k, inside, WIDTH, REST, D, MASKED)
            scores = tl.dot(q2, tl.trans(k2), scores, input_precision=PRECISION)
        scores = tl.where(inside[None, :], scores * scale, -float("inf"))
        top, total, probs, decay = _online_softmax(scores, top, total)
        probs = probs.to(q.dtype.element_ty)
        v1 = load_rows(at_v, inside, 0, WIDTH, D, MASKED)
        sum1 = tl.dot(probs, v1, sum1 * decay[:, None], input_precision=PRECISION)
        if REST > 0:
            v2 = load_rows(at_v, inside, WIDTH, REST, D, MASKED)
            sum2 = tl.dot(probs, v2, sum2 * decay[:, None], input_precision=PRECISION)

    if OWN:  # never together with REST: see tiles.py
        rows_of_key = G * Lq
        begin, stop = own_range(i_tile, rows_of_key, num_folded, Lk, ROWS, SHARED)
        # A loop even for one block: in straight-line code ptxas serializes the matrix products of the loop before it.
        for start in tl.range(begin, stop, OWN_KEYS, num_stages=1):
            at = start + tl.arange(0, OWN_KEYS)
            inside = at < stop
            row, line = own_lines(at, i_context, T, Lk, SHARED)
            if KEY_MASK:
                inside = inside & (tl.load(key_mask + row.to(tl.int64) * Lk + line, mask=inside, other=0) != 0)
            at_k = line_starts(head_start(k, row, i_head, k_row, k_head, ALIGN), line, k_line, ALIGN)
            at_v = line_starts(head_start(v, row, i_head, v_row, v_head, ALIGN), line, v_line, ALIGN)
            k1 = load_rows(at_k, inside, 0, WIDTH, D, True)
            scores = tl.dot(q1, tl.trans(k1), input_precision=PRECISION) * scale
            visible = inside[None, :]
            if SHARED:
                visible = visible & ((folded // rows_of_key)[:, None] == (at // Lk)[None, :])
            scores = tl.where(visible, scores, -float("inf"))
            top, total, probs, decay = _online_softmax(scores, top, total)
            v1 = load_rows(at_v, inside, 0, WIDTH, D, True)
            sum1 = tl.dot(probs.to(q.dtype.element_ty), v1, sum1 * decay[:, None], input_precision=PRECISION)

    read = total > 0
    total = tl.where(read, total, 1.0)
    at_lse = query_starts(lse, folded, i_context, i_head, T, G, Lq, Hkv * G * Lq, Lq, 1, SHARED, GROUPED, 1)
    tl.store(at_lse, tl.where(read, top + tl.log2(total), float("inf")), mask=valid)
    at_out = query_starts(out, folded, i_context, i_head, T, G, Lq, out_row, out_head, out_line, SHARED, GROUPED, ALIGN)
    store_rows(at_out, valid, sum1 / total[:, None], 0, WIDTH, D)
    if REST > 0:
        store_rows(at_out, valid, sum2 / total[:, None], WIDTH, REST, D)


class _Plan(NamedTuple):
    """A launch that only lacks its pointers and the scale. in_reach: whether all operands are (`call.is_in_reach`)."""

    kernel: Prepared
    programs: int
    integers: tuple[int, ...]
    in_reach: bool


@lru_cache(maxsize=4096)
def _plan(
    device: torch.device,
    dtype: torch.dtype,
    shapes: tuple[Shape, Shape | None, Shape],
    strides: tuple[Stride, Stride | None, Stride | None, Stride, Stride, Stride],
    has_key_mask: bool,
    is_listed: bool,
    tile: Tile | None,
) -> _Plan:
    """shapes: of q, k, ck. strides: of q, k, v, ck, cv, out."""
    q, k, ck = shapes
    sizes = Sizes.of(q, k, ck)
    of = [
        (q if shape is None or stride is None else shape, strides[0] if stride is None else stride)
        for shape, stride in zip((q, k, k, ck, ck, q), strides, strict=True)
    ]
    rows = [row_strides(*layout) for layout in of]
    own, align = sizes.Lk > 0, alignment(dtype, *rows)
    tile = tile or find_tile(
        *("forward", sizes.D, dtype),
        rows=sizes.rows,
        keys=sizes.Lc,
        own=own,
        listed=is_listed,
        aligned=align > 1,
    )
    assert tile is not None, "the table has a forward tile for every call"
    assert not (own and tile.rest), "own keys are read in one piece"
    assert tile.keys <= PAD
    assert not tile.one_block or sizes.Lc <= tile.keys, "the only block holds all keys"
    constants = (
        *(sizes.D, tile.width, tile.rest, tile.rows, tile.keys, tile.own_keys),
        *(own, has_key_mask, is_listed, tile.one_block, sizes.T > 1, sizes.G > 1),
        *(rows[0] == rows[5], rows[3] == rows[4]),
        *(align, precision(dtype)),
    )
    kernel = Prepared(
        attention_forward_kernel,
        constants,
        num_warps=tile.warps,
        num_stages=tile.stages,
        max_registers=tile.max_registers,
        fuse=True,
    )
    programs = sizes.Bc * sizes.Hkv * -(-sizes.rows // tile.rows)
    lengths = (sizes.T, sizes.G, sizes.Hkv, sizes.Lq, sizes.Lk, sizes.Lc)
    integers = (*(s for three in rows for s in three), *lengths)
    return _Plan(kernel, programs, integers, all(is_in_reach(*layout) for layout in of))


def run_forward(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    ck: Tensor,
    cv: Tensor,
    key_mask: Tensor | None,
    keys: tuple[Tensor, Tensor] | None,
    scale: float,
    *,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor]:
    """Output [N, Hq, Lq, D] in q's memory order and log-sum-exp (base 2) [N, Hq, Lq] float32; no size may be 0.

    q [N, Hq, Lq, D], own k, v [N, Hkv, Lk, D] or None, ck, cv [Bc, Hkv, Lc, D], key_mask [N, Lk] bool. keys: the
    context's index and count, None when all are readable. tile: instead of the table's.
    """
    out = empty_result(q)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    _launch(out, lse, q, k, v, ck, cv, key_mask, keys, scale, tile)
    return out, lse


def _launch(
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    ck: Tensor,
    cv: Tensor,
    key_mask: Tensor | None,
    keys: tuple[Tensor, Tensor] | None,
    scale: float,
    tile: Tile | None,
) -> None:
    k_shape, k_stride, v_stride = (None, None, None) if k is None or v is None else (k.shape, k.stride(), v.stride())
    shapes = (q.shape, k_shape, ck.shape)
    strides = (q.stride(), k_stride, v_stride, ck.stride(), cv.stride(), out.stride())
    plan = _plan(q.device, q.dtype, shapes, strides, key_mask is not None, keys is not None, tile)
    if not plan.in_reach or not are_aligned(q, k, v, ck, cv):
        q, k, v, ck, cv = as_operands(q, k, v, ck, cv)
        _launch(out, lse, q, k, v, ck, cv, key_mask, keys, scale, tile)
        return
    if k is None or v is None:
        k = v = q  # a tensor that is not there is never read: any pointer stands for it
    index, count = keys or (lse, lse)
    mask = lse if key_mask is None else as_bytes(key_mask)
    with on_device(q.device):
        plan.kernel(plan.programs, q, k, v, ck, cv, mask, index, count, out, lse, *plan.integers, scale * LOG2E)
