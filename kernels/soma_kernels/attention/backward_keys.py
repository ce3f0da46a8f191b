"""How do a context's keys and values get their gradients? By programs that own rows of dck and dcv: no atomic adds.

Two kernels. When all folded queries of one (context row, head) fit one program, `attention_backward_one_pass_kernel`
reads every key once and makes dq, dck and dcv together. Otherwise `attention_backward_keys_kernel` gives each block of
keys a program that reads all queries, and dq comes from `backward_rows`. Scores are transposed here, [keys, rows]:
dv = P^T dO and dk = dS^T q then need no transposed accumulator (Dao, 2023, algorithm 2). Rows of masked keys get zeros.
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
    query_starts,
    store_rows,
    zero_listed_rows,
)

#: Integer parameters that are never specialized.
INTEGERS = (
    *(f"{x}_{s}" for x in ("q", "ck", "cv", "out", "do", "dck") for s in ("row", "head", "line")),
    *("T", "G", "Hkv", "Lq", "Lc"),
)


@triton.jit
def _query_rows(
    q, out, do, lse, first, end, i_context, i_head, q_row, q_head, q_line, out_row, out_head, out_line, do_row,
    do_head, do_line, T, G, Hkv, Lq,
    D: tl.constexpr, WIDTH: tl.constexpr, REST: tl.constexpr, ROWS: tl.constexpr, SHARED: tl.constexpr,
    GROUPED: tl.constexpr, NEED_DS: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Folded rows [first, first + ROWS) below `end`: q and do as WIDTH and REST columns, delta, log-sum-exp.
    Rows from `end` on have log-sum-exp +inf, so that their probabilities are 0."""
    folded = first + tl.arange(0, ROWS)
    valid = folded < end
    at_q = query_starts(q, folded, i_context, i_head, T, G, Lq, q_row, q_head, q_line, SHARED, GROUPED, ALIGN)
    at_do = query_starts(do, folded, i_context, i_head, T, G, Lq, do_row, do_head, do_line, SHARED, GROUPED, ALIGN)
    at_lse = query_starts(lse, folded, i_context, i_head, T, G, Lq, Hkv * G * Lq, Lq, 1, SHARED, GROUPED, 1)
    do1 = load_rows(at_do, valid, 0, WIDTH, D, True)
    q1 = load_rows(at_q, valid, 0, WIDTH, D, True)
    rows_lse = tl.load(at_lse, mask=valid, other=float("inf"))
    q2 = q1
    do2 = do1
    if REST > 0:
        q2 = load_rows(at_q, valid, WIDTH, REST, D, True)
        do2 = load_rows(at_do, valid, WIDTH, REST, D, True)
    delta = rows_lse
    if NEED_DS:
        at_out = query_starts(
            out, folded, i_context, i_head, T, G, Lq, out_row, out_head, out_line, SHARED, GROUPED, ALIGN
        )
        delta = tl.sum(load_rows(at_out, valid, 0, WIDTH, D, True).to(tl.float32) * do1.to(tl.float32), 1)
        if REST > 0:
            delta += tl.sum(load_rows(at_out, valid, WIDTH, REST, D, True).to(tl.float32) * do2.to(tl.float32), 1)
    return q1, q2, do1, do2, delta, rows_lse


@triton.jit
def _store_query_gradient(
    dq, dq1, dq2, first, end, i_context, i_head, s_row, s_head, s_line, T, G, Lq,
    D: tl.constexpr, WIDTH: tl.constexpr, REST: tl.constexpr, ROWS: tl.constexpr, SHARED: tl.constexpr,
    GROUPED: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Writes dq of the folded rows [first, first + ROWS) below `end`."""
    folded = first + tl.arange(0, ROWS)
    at_dq = query_starts(dq, folded, i_context, i_head, T, G, Lq, s_row, s_head, s_line, SHARED, GROUPED, ALIGN)
    store_rows(at_dq, folded < end, dq1, 0, WIDTH, D)
    if REST > 0:
        store_rows(at_dq, folded < end, dq2, WIDTH, REST, D)


@triton.jit
def _transposed_block(
    q1, q2, do1, do2, delta, rows_lse, k1, k2, v1, v2, inside, scale,
    REST: tl.constexpr, NEED_DS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Probabilities and score gradients of one block, [keys, rows] in the input dtype."""
    scores = tl.dot(k1, tl.trans(q1), input_precision=PRECISION)
    if REST > 0:
        scores = tl.dot(k2, tl.trans(q2), scores, input_precision=PRECISION)
    probs = tl.where(inside[:, None], tl.exp2(scores * scale - rows_lse[None, :]), 0.0)
    d_scores = probs
    if NEED_DS:
        d_probs = tl.dot(v1, tl.trans(do1), input_precision=PRECISION)
        if REST > 0:
            d_probs = tl.dot(v2, tl.trans(do2), d_probs, input_precision=PRECISION)
        d_scores = probs * (d_probs - delta[None, :])
    return probs.to(k1.dtype), d_scores.to(k1.dtype)


@triton.jit
def _load_keys(
    ck_start, cv_start, lines, inside, ck_line, cv_line,
    D: tl.constexpr, WIDTH: tl.constexpr, REST: tl.constexpr, MASKED: tl.constexpr, ALIGN: tl.constexpr,
):  # fmt: skip
    """Keys and values of `lines` as WIDTH and REST columns; zeros outside if MASKED."""
    at_k = line_starts(ck_start, lines, ck_line, ALIGN)
    at_v = line_starts(cv_start, lines, cv_line, ALIGN)
    k1 = load_rows(at_k, inside, 0, WIDTH, D, MASKED)
    v1 = load_rows(at_v, inside, 0, WIDTH, D, MASKED)
    k2 = k1
    v2 = v1
    if REST > 0:
        k2 = load_rows(at_k, inside, WIDTH, REST, D, MASKED)
        v2 = load_rows(at_v, inside, WIDTH, REST, D, MASKED)
    return k1, k2, v1, v2


@triton.jit
def _store_key_gradient(
    starts, inside, weights_a, a1, a2, weights_b, b1, b2, factor,
    D: tl.constexpr, WIDTH: tl.constexpr, REST: tl.constexpr, MORE_ROWS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Writes factor * (weights_a @ a + weights_b @ b) for one block of keys; b is there if MORE_ROWS.

    weights: [keys, rows], dS for dk and P for dv. a, b: WIDTH and REST columns of q or dO.
    """
    sum1 = tl.dot(weights_a, a1, input_precision=PRECISION)
    if MORE_ROWS > 0:
        sum1 = tl.dot(weights_b, b1, sum1, input_precision=PRECISION)
    store_rows(starts, inside, sum1 * factor, 0, WIDTH, D)
    if REST > 0:
        sum2 = tl.dot(weights_a, a2, input_precision=PRECISION)
        if MORE_ROWS > 0:
            sum2 = tl.dot(weights_b, b2, sum2, input_precision=PRECISION)
        store_rows(starts, inside, sum2 * factor, WIDTH, REST, D)


@triton.jit
def _add_query_gradient(dq1, dq2, d_scores, k1, k2, REST: tl.constexpr, PRECISION: tl.constexpr):
    """dq of one group of rows, WIDTH and REST columns, with one more block of keys."""
    by_row = tl.trans(d_scores)
    dq1 = tl.dot(by_row, k1, dq1, input_precision=PRECISION)
    if REST > 0:
        dq2 = tl.dot(by_row, k2, dq2, input_precision=PRECISION)
    return dq1, dq2


@triton.jit
def _zero_columns(ROWS: tl.constexpr, WIDTH: tl.constexpr, REST: tl.constexpr):
    """Sums of WIDTH and REST columns that start at zero."""
    sum1 = tl.zeros([ROWS, WIDTH], tl.float32)
    sum2 = sum1
    if REST > 0:
        sum2 = tl.zeros([ROWS, REST], tl.float32)
    return sum1, sum2


@triton.jit(do_not_specialize=[*INTEGERS, "scale", "score_scale"])
def attention_backward_one_pass_kernel(
    q, ck, cv, index, count, out, do, lse, dq, dck, dcv, q_row, q_head, q_line, ck_row, ck_head, ck_line, cv_row,
    cv_head, cv_line, out_row, out_head, out_line, do_row, do_head, do_line, dck_row, dck_head, dck_line, T, G, Hkv,
    Lq, Lc, scale, score_scale,
    D: tl.constexpr, WIDTH: tl.constexpr, REST: tl.constexpr, ROWS: tl.constexpr, MORE_ROWS: tl.constexpr,
    KEYS: tl.constexpr, LISTED: tl.constexpr, ONE_BLOCK: tl.constexpr, SHARED: tl.constexpr,
    GROUPED: tl.constexpr, NEED_Q: tl.constexpr, NEED_K: tl.constexpr, NEED_V: tl.constexpr,
    QUERIES_ALIKE: tl.constexpr, KEYS_ALIKE: tl.constexpr, ALIGN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """All folded rows of one (context row, head): ROWS, then MORE_ROWS that share each block of keys with them."""
    if QUERIES_ALIKE:  # equal strides under one name: equal offsets are computed and kept once
        out_row, out_head, out_line = q_row, q_head, q_line
        do_row, do_head, do_line = q_row, q_head, q_line
    if KEYS_ALIKE:
        cv_row, cv_head, cv_line = ck_row, ck_head, ck_line
        dck_row, dck_head, dck_line = ck_row, ck_head, ck_line
    NEED_DS: tl.constexpr = NEED_Q or NEED_K
    i_context = tl.program_id(0) // Hkv
    i_head = tl.program_id(0) % Hkv
    num_folded = T * G * Lq
    qa1, qa2, da1, da2, delta_a, lse_a = _query_rows(
        q, out, do, lse, 0, num_folded, i_context, i_head, q_row, q_head, q_line, out_row, out_head, out_line, do_row,
        do_head, do_line, T, G, Hkv, Lq, D, WIDTH, REST, ROWS, SHARED, GROUPED, NEED_DS, ALIGN,
    )  # fmt: skip
    dqa1, dqa2 = _zero_columns(ROWS, WIDTH, REST)
    qb1, qb2, db1, db2 = qa1, qa2, da1, da2  # stand for a second group that is not there: never read
    if MORE_ROWS > 0:
        qb1, qb2, db1, db2, delta_b, lse_b = _query_rows(
            q, out, do, lse, ROWS, num_folded, i_context, i_head, q_row, q_head, q_line, out_row, out_head, out_line,
            do_row, do_head, do_line, T, G, Hkv, Lq, D, WIDTH, REST, MORE_ROWS, SHARED, GROUPED, NEED_DS, ALIGN,
        )  # fmt: skip
        dqb1, dqb2 = _zero_columns(MORE_ROWS, WIDTH, REST)

    ck_start = head_start(ck, i_context, i_head, ck_row, ck_head, ALIGN)
    cv_start = head_start(cv, i_context, i_head, cv_row, cv_head, ALIGN)
    dck_start = head_start(dck, i_context, i_head, dck_row, dck_head, ALIGN)
    dcv_start = head_start(dcv, i_context, i_head, dck_row, dck_head, ALIGN)
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
        k1, k2, v1, v2 = _load_keys(ck_start, cv_start, lines, inside, ck_line, cv_line, D, WIDTH, REST, MASKED, ALIGN)
        pa, sa = _transposed_block(
            qa1, qa2, da1, da2, delta_a, lse_a, k1, k2, v1, v2, inside, scale, REST, NEED_DS, PRECISION
        )
        pb, sb = pa, sa
        if MORE_ROWS > 0:
            pb, sb = _transposed_block(
                qb1, qb2, db1, db2, delta_b, lse_b, k1, k2, v1, v2, inside, scale, REST, NEED_DS, PRECISION
            )
        if NEED_V:
            at_dv = line_starts(dcv_start, lines, dck_line, ALIGN)
            _store_key_gradient(at_dv, inside, pa, da1, da2, pb, db1, db2, 1.0, D, WIDTH, REST, MORE_ROWS, PRECISION)
        if NEED_K:
            at_dk = line_starts(dck_start, lines, dck_line, ALIGN)
            _store_key_gradient(
                at_dk, inside, sa, qa1, qa2, sb, qb1, qb2, score_scale, D, WIDTH, REST, MORE_ROWS, PRECISION
            )
        if NEED_Q:
            dqa1, dqa2 = _add_query_gradient(dqa1, dqa2, sa, k1, k2, REST, PRECISION)
            if MORE_ROWS > 0:
                dqb1, dqb2 = _add_query_gradient(dqb1, dqb2, sb, k1, k2, REST, PRECISION)

    if LISTED:
        if NEED_V:
            zero_listed_rows(dcv_start, index, end + LIST_PAD, Lc + LIST_PAD, dck_line, KEYS, D, WIDTH, REST, ALIGN)
        if NEED_K:
            zero_listed_rows(dck_start, index, end + LIST_PAD, Lc + LIST_PAD, dck_line, KEYS, D, WIDTH, REST, ALIGN)
    if NEED_Q:  # dq has the strides of out
        _store_query_gradient(
            dq, dqa1 * score_scale, dqa2 * score_scale, 0, num_folded, i_context, i_head, out_row, out_head, out_line,
            T, G, Lq, D, WIDTH, REST, ROWS, SHARED, GROUPED, ALIGN,
        )  # fmt: skip
        if MORE_ROWS > 0:
            _store_query_gradient(
                dq, dqb1 * score_scale, dqb2 * score_scale, ROWS, num_folded, i_context, i_head, out_row, out_head,
                out_line, T, G, Lq, D, WIDTH, REST, MORE_ROWS, SHARED, GROUPED, ALIGN,
            )  # fmt: skip


@triton.jit(do_not_specialize=[*INTEGERS, "scale", "score_scale"])
def attention_backward_keys_kernel(
    q, ck, cv, index, count, out, do, lse, dck, dcv, q_row, q_head, q_line, ck_row, ck_head, ck_line, cv_row, cv_head,
    cv_line, out_row, out_head, out_line, do_row, do_head, do_line, dck_row, dck_head, dck_line, T, G, Hkv, Lq, Lc,
    scale, score_scale,
    D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, LISTED: tl.constexpr,
    SHARED: tl.constexpr, GROUPED: tl.constexpr, NEED_K: tl.constexpr, NEED_V: tl.constexpr,
    QUERIES_ALIKE: tl.constexpr, KEYS_ALIKE: tl.constexpr, ALIGN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One block of keys against all folded rows of its (context row, head)."""
    if QUERIES_ALIKE:  # equal strides under one name: equal offsets are computed and kept once
        out_row, out_head, out_line = q_row, q_head, q_line
        do_row, do_head, do_line = q_row, q_head, q_line
    if KEYS_ALIKE:
        cv_row, cv_head, cv_line = ck_row, ck_head, ck_line
        dck_row, dck_head, dck_line = ck_row, ck_head, ck_line
    num_blocks = tl.cdiv(Lc, KEYS)
    j = tl.program_id(0) % num_blocks
    i_context = tl.program_id(0) // num_blocks // Hkv
    i_head = tl.program_id(0) // num_blocks % Hkv
    num_folded = T * G * Lq
    ck_start = head_start(ck, i_context, i_head, ck_row, ck_head, ALIGN)
    cv_start = head_start(cv, i_context, i_head, cv_row, cv_head, ALIGN)
    dck_start = head_start(dck, i_context, i_head, dck_row, dck_head, ALIGN)
    dcv_start = head_start(dcv, i_context, i_head, dck_row, dck_head, ALIGN)
    end = Lc
    stop = num_folded
    if LISTED:
        index += i_context.to(tl.int64) * (Lc + LIST_PAD)
        end = tl.load(count + i_context)
        # Blocks behind the readable keys have no rows to visit.
        stop = tl.where(j * KEYS < end, num_folded, 0)
        begin = end + LIST_PAD + j * KEYS
        if NEED_V:
            zero_listed_rows(
                dcv_start, index, begin, tl.minimum(begin + KEYS, Lc + LIST_PAD), dck_line, KEYS, D, WIDTH, 0, ALIGN
            )
        if NEED_K:
            zero_listed_rows(
                dck_start, index, begin, tl.minimum(begin + KEYS, Lc + LIST_PAD), dck_line, KEYS, D, WIDTH, 0, ALIGN
            )
    lines, inside = context_lines(j, index, end, KEYS, LISTED)
    k1 = load_rows(line_starts(ck_start, lines, ck_line, ALIGN), inside, 0, WIDTH, D, True)
    v1 = load_rows(line_starts(cv_start, lines, cv_line, ALIGN), inside, 0, WIDTH, D, True)
    dk1 = tl.zeros([KEYS, WIDTH], tl.float32)
    dv1 = tl.zeros([KEYS, WIDTH], tl.float32)
    for first in range(0, stop, ROWS):
        q1, q2, do1, do2, delta, rows_lse = _query_rows(
            q, out, do, lse, first, num_folded, i_context, i_head, q_row, q_head, q_line, out_row, out_head, out_line,
            do_row, do_head, do_line, T, G, Hkv, Lq, D, WIDTH, 0, ROWS, SHARED, GROUPED, NEED_K, ALIGN,
        )  # fmt: skip
        probs, d_scores = _transposed_block(
            q1, q2, do1, do2, delta, rows_lse, k1, k1, v1, v1, inside, scale, 0, NEED_K, PRECISION
        )
        if NEED_V:
            dv1 = tl.dot(probs, do1, dv1, input_precision=PRECISION)
        if NEED_K:
            dk1 = tl.dot(d_scores, q1, dk1, input_precision=PRECISION)
    if NEED_V:
        store_rows(line_starts(dcv_start, lines, dck_line, ALIGN), inside, dv1, 0, WIDTH, D)
    if NEED_K:
        store_rows(line_starts(dck_start, lines, dck_line, ALIGN), inside, dk1 * score_scale, 0, WIDTH, D)
