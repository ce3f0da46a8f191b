"""How do queries, and the own keys beside them, get their gradients? One program for a tile of folded queries.

The program recomputes the probabilities from the log-sum-exp (Dao, 2023, algorithm 2) and never visits the context
unless dq is wanted. dk and dv of the own keys are sums over the tiles of a query row: each tile writes its own part in
float32, and `attention_sum_parts_kernel` adds them up in a fixed order. With a single tile they are written directly.
"""

from __future__ import annotations

import triton
import triton.language as tl

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
    store_transposed,
)

#: Integer parameters that are never specialized.
ROWS_INTEGERS = (
    *(f"{x}_{s}" for x in ("q", "k", "v", "ck", "cv", "out", "do", "dk") for s in ("row", "head", "line")),
    *("part", "T", "G", "Hkv", "Lq", "Lk", "Lc"),
)
SUM_INTEGERS = ("dk_row", "dk_head", "dk_line", "part", "num_rows", "T", "G", "Hkv", "Lq", "Lk")


@triton.jit
def _own_block(
    at, stop, i_tile, i_context, i_head, query_row, q1, do1, delta, rows_lse, dq1, k, v, key_mask, dk, dv, k_row,
    k_head, k_line, v_row, v_head, v_line, dk_row, dk_head, dk_line, part, rows_of_key, T, Lk, scale, score_scale,
    D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, KEY_MASK: tl.constexpr, SHARED: tl.constexpr,
    NEED_Q: tl.constexpr, NEED_K: tl.constexpr, NEED_V: tl.constexpr, PARTED: tl.constexpr, ALIGN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds one block of own keys to dq and writes this tile's part of dk and dv. A function of its own, so that its
    values are not carried through the loop over the context."""
    inside = at < stop
    row, line = own_lines(at, i_context, T, Lk, SHARED)
    readable = inside
    if KEY_MASK:
        readable = inside & (tl.load(key_mask + row.to(tl.int64) * Lk + line, mask=inside, other=0) != 0)
    at_k = line_starts(head_start(k, row, i_head, k_row, k_head, ALIGN), line, k_line, ALIGN)
    k1 = load_rows(at_k, readable, 0, WIDTH, D, True)
    visible = readable[None, :]
    # Parts are numbered from the first tile of the query row.
    slot = i_tile
    if SHARED:
        visible = visible & (query_row[:, None] == (at // Lk)[None, :])
        slot = i_tile - at // Lk * rows_of_key // ROWS
    scores = tl.dot(q1, tl.trans(k1), input_precision=PRECISION) * scale
    probs = tl.where(visible, tl.exp2(scores - rows_lse[:, None]), 0.0)
    # Transposed, [D, keys]: probs and d_scores are right-hand operands as they are, and no accumulator is transposed.
    part_line = dk_line
    if PARTED:  # known to the compiler: an address for each key and not for each element
        part_line = D
    part_start = slot.to(tl.int64) * part
    if ALIGN > 1:
        part_start = tl.multiple_of(part_start, ALIGN)
    if NEED_V:
        dv1 = tl.dot(tl.trans(do1), probs.to(k1.dtype), input_precision=PRECISION)
        at_dv = line_starts(head_start(dv + part_start, row, i_head, dk_row, dk_head, ALIGN), line, part_line, ALIGN)
        store_transposed(at_dv, inside, dv1, WIDTH, D)
    if NEED_Q or NEED_K:
        at_v = line_starts(head_start(v, row, i_head, v_row, v_head, ALIGN), line, v_line, ALIGN)
        v1 = load_rows(at_v, readable, 0, WIDTH, D, True)
        d_scores = probs * (tl.dot(do1, tl.trans(v1), input_precision=PRECISION) - delta[:, None])
        d_scores = d_scores.to(k1.dtype)
        if NEED_K:
            dk1 = tl.dot(tl.trans(q1), d_scores, input_precision=PRECISION) * score_scale
            at_dk = line_starts(
                head_start(dk + part_start, row, i_head, dk_row, dk_head, ALIGN), line, part_line, ALIGN
            )
            store_transposed(at_dk, inside, dk1, WIDTH, D)
        if NEED_Q:
            dq1 = tl.dot(d_scores, k1, dq1, input_precision=PRECISION)
    return dq1


@triton.jit(do_not_specialize=[*ROWS_INTEGERS, "scale", "score_scale"])
def attention_backward_rows_kernel(
    q, k, v, ck, cv, key_mask, index, count, out, do, lse, dq, dk, dv, q_row, q_head, q_line, k_row, k_head, k_line,
    v_row, v_head, v_line, ck_row, ck_head, ck_line, cv_row, cv_head, cv_line, out_row, out_head, out_line, do_row,
    do_head, do_line, dk_row, dk_head, dk_line, part, T, G, Hkv, Lq, Lk, Lc, scale, score_scale,
    D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, OWN_KEYS: tl.constexpr,
    OWN: tl.constexpr, KEY_MASK: tl.constexpr, SINGLE: tl.constexpr, LISTED: tl.constexpr,
    SHARED: tl.constexpr, GROUPED: tl.constexpr, NEED_Q: tl.constexpr, NEED_K: tl.constexpr, NEED_V: tl.constexpr,
    PARTED: tl.constexpr, QUERIES_ALIKE: tl.constexpr, KEYS_ALIKE: tl.constexpr, ALIGN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    if QUERIES_ALIKE:  # equal strides under one name: equal offsets are computed and kept once
        out_row, out_head, out_line = q_row, q_head, q_line
        do_row, do_head, do_line = q_row, q_head, q_line
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
    at_do = query_starts(do, folded, i_context, i_head, T, G, Lq, do_row, do_head, do_line, SHARED, GROUPED, ALIGN)
    at_lse = query_starts(lse, folded, i_context, i_head, T, G, Lq, Hkv * G * Lq, Lq, 1, SHARED, GROUPED, 1)
    do1 = load_rows(at_do, valid, 0, WIDTH, D, True)
    rows_lse = tl.load(at_lse, mask=valid, other=float("inf"))
    delta = rows_lse
    if NEED_Q or NEED_K:
        at_out = query_starts(
            out, folded, i_context, i_head, T, G, Lq, out_row, out_head, out_line, SHARED, GROUPED, ALIGN
        )
        delta = tl.sum(load_rows(at_out, valid, 0, WIDTH, D, True).to(tl.float32) * do1.to(tl.float32), 1)
    q1 = load_rows(at_q, valid, 0, WIDTH, D, True)
    dq1 = tl.zeros([ROWS, WIDTH], tl.float32)

    if OWN:
        query_row = folded
        if SHARED:
            query_row = folded // (G * Lq)
        begin, stop = own_range(i_tile, G * Lq, num_folded, Lk, ROWS, SHARED)
        if SINGLE:
            dq1 = _own_block(
                tl.arange(0, OWN_KEYS), stop, i_tile, i_context, i_head, query_row, q1, do1, delta, rows_lse, dq1,
                k, v, key_mask, dk, dv, k_row, k_head, k_line, v_row, v_head, v_line, dk_row, dk_head, dk_line,
                part, G * Lq, T, Lk, scale, score_scale, D, WIDTH, ROWS, KEY_MASK, SHARED, NEED_Q, NEED_K, NEED_V,
                PARTED, ALIGN, PRECISION,
            )  # fmt: skip
        else:
            for start in tl.range(begin, stop, OWN_KEYS, num_stages=1):
                dq1 = _own_block(
                    start + tl.arange(0, OWN_KEYS), stop, i_tile, i_context, i_head, query_row, q1, do1, delta,
                    rows_lse, dq1, k, v, key_mask, dk, dv, k_row, k_head, k_line, v_row, v_head, v_line, dk_row,
                    dk_head, dk_line, part, G * Lq, T, Lk, scale, score_scale, D, WIDTH, ROWS, KEY_MASK, SHARED,
                    NEED_Q, NEED_K, NEED_V, PARTED, ALIGN, PRECISION,
                )  # fmt: skip

    if NEED_Q:
        ck_start = head_start(ck, i_context, i_head, ck_row, ck_head, ALIGN)
        cv_start = head_start(cv, i_context, i_head, cv_row, cv_head, ALIGN)
        end = Lc
        if LISTED:
            index += i_context.to(tl.int64) * (Lc + LIST_PAD)
            end = tl.load(count + i_context)
        for j in range(0, tl.cdiv(end, KEYS)):
            lines, inside = context_lines(j, index, end, KEYS, LISTED)
            at_k = line_starts(ck_start, lines, ck_line, ALIGN)
            at_v = line_starts(cv_start, lines, cv_line, ALIGN)
            k1 = load_rows(at_k, inside, 0, WIDTH, D, not LISTED)
            v1 = load_rows(at_v, inside, 0, WIDTH, D, not LISTED)
            scores = tl.dot(q1, tl.trans(k1), input_precision=PRECISION) * scale
            probs = tl.where(inside[None, :], tl.exp2(scores - rows_lse[:, None]), 0.0)
            d_scores = probs * (tl.dot(do1, tl.trans(v1), input_precision=PRECISION) - delta[:, None])
            dq1 = tl.dot(d_scores.to(k1.dtype), k1, dq1, input_precision=PRECISION)
        # dq has the strides of out.
        at_dq = query_starts(
            dq, folded, i_context, i_head, T, G, Lq, out_row, out_head, out_line, SHARED, GROUPED, ALIGN
        )
        store_rows(at_dq, valid, dq1 * score_scale, 0, WIDTH, D)


@triton.jit(do_not_specialize=[*SUM_INTEGERS])
def attention_sum_parts_kernel(
    dk_parts, dv_parts, dk, dv, dk_row, dk_head, dk_line, part, num_rows, T, G, Hkv, Lq, Lk,
    D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, LINES: tl.constexpr, PARTS: tl.constexpr,
    SHARED: tl.constexpr, NEED_K: tl.constexpr, NEED_V: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Adds up to PARTS parts ([PARTS, N, Hkv, Lk, D] float32) of each own key's gradients. ROWS: of the tiles."""
    at = tl.program_id(0) * LINES + tl.arange(0, LINES)
    inside = at < num_rows
    line = at % Lk
    i_head = at // Lk % Hkv
    row = at // Lk // Hkv
    parts = tl.zeros([LINES], tl.int32) + tl.cdiv(G * Lq, ROWS)
    if SHARED:
        t = row % T
        parts = (t * (G * Lq) + G * Lq - 1) // ROWS - t * (G * Lq) // ROWS + 1
    at_part = at.to(tl.int64) * D
    if ALIGN > 1:
        at_part = tl.multiple_of(at_part, ALIGN)
    sum_k = tl.zeros([LINES, WIDTH], tl.float32)
    sum_v = tl.zeros([LINES, WIDTH], tl.float32)
    part = part.to(tl.int64)  # PARTS of them are more elements than 32 bits count
    for s in tl.static_range(PARTS):
        present = inside & (s < parts)
        if NEED_K:
            sum_k += load_rows(dk_parts + s * part + at_part, present, 0, WIDTH, D, True)
        if NEED_V:
            sum_v += load_rows(dv_parts + s * part + at_part, present, 0, WIDTH, D, True)
    if NEED_K:
        at_k = line_starts(head_start(dk, row, i_head, dk_row, dk_head, ALIGN), line, dk_line, ALIGN)
        store_rows(at_k, inside, sum_k, 0, WIDTH, D)
    if NEED_V:
        at_v = line_starts(head_start(dv, row, i_head, dk_row, dk_head, ALIGN), line, dk_line, ALIGN)
        store_rows(at_v, inside, sum_v, 0, WIDTH, D)
