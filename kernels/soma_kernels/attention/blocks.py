"""How do the attention kernels find and move their rows? Addresses of folded queries and listed keys, tile transfers.

A program works on folded rows: the T query rows that read one context row, times the G query heads that read one
key/value head, times Lq positions, numbered (t * G + g) * Lq + i. Offsets count elements; those of batch rows are
int64, and those inside one batch row int32 (`call.as_operands` sees to it).
"""

from __future__ import annotations

import triton
import triton.language as tl

from soma_kernels.attention.call import PAD

LIST_PAD = tl.constexpr(PAD)


@triton.jit
def head_start(base, i_row, i_head, s_row, s_head, ALIGN: tl.constexpr):
    """First element of (batch row, head), a multiple of ALIGN behind `base`; one of each, or [L] batch rows."""
    offset = i_row.to(tl.int64) * s_row + i_head * s_head
    # The hint is tied to the operation that made the value, so it is given here and not by the caller.
    if ALIGN > 1:
        offset = tl.multiple_of(offset, ALIGN)
    return base + offset


@triton.jit
def line_starts(head, lines, stride, ALIGN: tl.constexpr):
    """First elements of `lines` ([L] int32) of what starts at `head`; multiples of ALIGN behind it."""
    offsets = lines * stride
    if ALIGN > 1:
        offsets = tl.multiple_of(offsets, ALIGN)
    return head + offsets


@triton.jit
def query_starts(
    base,
    folded,
    i_context,
    i_head,
    T,
    G,
    Lq,
    s_row,
    s_head,
    s_line,
    SHARED: tl.constexpr,
    GROUPED: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """First elements of folded rows ([R] int32) in a [N, Hq, Lq, *] tensor. SHARED: T > 1. GROUPED: G > 1."""
    row = i_context * T
    head = i_head * G
    line = folded
    if SHARED or GROUPED:
        line = folded % Lq
        block = folded // Lq
        if SHARED and GROUPED:
            row = row + block // G
            head = head + block % G
        elif SHARED:
            row = row + block
        else:
            head = head + block
    row_start = row.to(tl.int64) * s_row
    offsets = head * s_head + line * s_line
    if ALIGN > 1:
        row_start = tl.multiple_of(row_start, ALIGN)
        offsets = tl.multiple_of(offsets, ALIGN)
    # 32-bit offsets from one address, unless every row has its own: half the registers.
    return base + row_start + offsets


@triton.jit
def context_lines(j, index, end, KEYS: tl.constexpr, LISTED: tl.constexpr):
    """Block j of the keys that a context row's queries read: their lines ([KEYS] int32) and which of them count.

    LISTED: `index` is the list of the context row, whose entries behind `end` are readable lines, repeated.
    """
    at = j * KEYS + tl.arange(0, KEYS)
    lines = at
    if LISTED:
        lines = tl.load(index + at)
    return lines, at < end


@triton.jit
def own_lines(at, i_context, T, Lk, SHARED: tl.constexpr):
    """Query row and line of own keys `at`, which are numbered t * Lk + line in one context row."""
    row = i_context * T
    line = at
    if SHARED:
        row = row + at // Lk
        line = at % Lk
    return row, line


@triton.jit
def own_range(i_tile, rows_of_key, num_folded, Lk, ROWS: tl.constexpr, SHARED: tl.constexpr):
    """The own keys of every query row with folded rows in this tile: first and end. rows_of_key: G * Lq."""
    begin = 0
    end = Lk
    if SHARED:
        begin = i_tile * ROWS // rows_of_key * Lk
        end = (tl.minimum(i_tile * ROWS + ROWS, num_folded) - 1) // rows_of_key * Lk + Lk
    return begin, end


@triton.jit
def load_rows(starts, inside, FIRST: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, MASKED: tl.constexpr):
    """Columns [FIRST, FIRST + WIDTH) of the rows at `starts`, [R, WIDTH]; 0 beyond D and, if MASKED, outside."""
    columns = FIRST + tl.arange(0, WIDTH)
    at = starts[:, None] + columns[None, :]
    if FIRST + WIDTH > D:
        if MASKED:
            return tl.load(at, mask=inside[:, None] & (columns < D)[None, :], other=0.0)
        else:  # noqa: RET505 (Triton needs both branches)
            return tl.load(at, mask=(columns < D)[None, :], other=0.0)
    else:  # noqa: RET505
        if MASKED:
            return tl.load(at, mask=inside[:, None], other=0.0)
        else:  # noqa: RET505
            return tl.load(at)


@triton.jit
def store_rows(starts, inside, values, FIRST: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr):
    """Writes [R, WIDTH] values into columns [FIRST, FIRST + WIDTH) of the rows inside, in the target's dtype."""
    columns = FIRST + tl.arange(0, WIDTH)
    at = starts[:, None] + columns[None, :]
    values = values.to(starts.dtype.element_ty)
    if FIRST + WIDTH > D:
        tl.store(at, values, mask=inside[:, None] & (columns < D)[None, :])
    else:
        tl.store(at, values, mask=inside[:, None])


@triton.jit
def store_transposed(starts, inside, values, WIDTH: tl.constexpr, D: tl.constexpr):
    """Writes [WIDTH, R] values, a column for each row at `starts`."""
    columns = tl.arange(0, WIDTH)
    at = starts[None, :] + columns[:, None]
    values = values.to(starts.dtype.element_ty)
    if WIDTH > D:
        tl.store(at, values, mask=inside[None, :] & (columns < D)[:, None])
    else:
        tl.store(at, values, mask=inside[None, :])


@triton.jit
def zero_listed_rows(
    head,
    index,
    begin,
    end,
    stride,
    KEYS: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    REST: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Writes zeros into the lines that the list entries [begin, end) name, of what starts at `head`."""
    for start in tl.range(begin, end, KEYS, num_stages=1):
        at = start + tl.arange(0, KEYS)
        lines = tl.load(index + at, mask=at < end, other=0)
        starts = line_starts(head, lines, stride, ALIGN)
        store_rows(starts, at < end, tl.zeros([KEYS, WIDTH], tl.float32), 0, WIDTH, D)
        if REST > 0:
            store_rows(starts, at < end, tl.zeros([KEYS, REST], tl.float32), WIDTH, REST, D)
