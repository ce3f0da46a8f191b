"""What does the backward of one call launch? Only what the inputs that require grad need, decided once per shape.

    wanted                                   launches
    dq, dk, dv of own keys                   rows (+ the sum of the tiles' parts, if a query row has several tiles)
    dck, dcv (and dq), few folded queries    one pass
    dck, dcv, many folded queries            keys (+ rows for dq, dk, dv)
    dk, dv of own keys in very many tiles    keys over the own keys, whose parts would take more memory than they

Own keys without a context come here as a context that nobody shares.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from soma_kernels.attention.backward_keys import attention_backward_keys_kernel, attention_backward_one_pass_kernel
from soma_kernels.attention.backward_rows import attention_backward_rows_kernel, attention_sum_parts_kernel
from soma_kernels.attention.call import (
    LOG2E,
    PAD,
    Shape,
    Sizes,
    Stride,
    Strides,
    alignment,
    are_aligned,
    as_operands,
    empty_result,
    is_in_reach,
    precision,
    row_strides,
)
from soma_kernels.attention.keys import as_bytes, key_list
from soma_kernels.attention.tiles import Kernel, Tile, find_tile
from soma_kernels.launch import Prepared, on_device

#: Parts of dk and dv that are written at most; with more tiles a query row, the own keys get a pass of their own.
MAX_PARTS = 8
#: Own keys that one program of the sum adds up.
SUM_LINES = 8


class Needs(NamedTuple):
    """Which gradients are wanted."""

    q: bool
    k: bool
    v: bool
    ck: bool
    cv: bool


class Layouts(NamedTuple):
    """Strides of everything that a backward reads or writes; dk is also dv's and dck also dcv's."""

    q: Strides
    k: Strides
    v: Strides
    ck: Strides
    cv: Strides
    out: Strides
    do: Strides
    dk: Strides
    dck: Strides


class _Launch(NamedTuple):
    """A launch that only lacks its pointers and scales."""

    kernel: Prepared
    programs: int
    integers: tuple[int, ...]


class _Plan(NamedTuple):
    """The launches of one backward, None where there is nothing to do. num_parts: of dk and dv; 1: written directly.

    copies: whether an operand must be copied first. out_copies: whether out must, since it has to lie as dq does.
    """

    rows: _Launch | None
    sum: _Launch | None
    one_pass: _Launch | None
    context_keys: _Launch | None
    own_keys: _Launch | None
    num_parts: int
    copies: bool = False
    out_copies: bool = False


class Call(NamedTuple):
    """What names a plan. tiles: instead of the table's."""

    device: torch.device
    dtype: torch.dtype
    sizes: Sizes
    layouts: Layouts
    needs: Needs
    has_key_mask: bool
    is_listed: bool
    tiles: tuple[tuple[Kernel, Tile], ...]

    def tile(self, kernel: Kernel, sizes: Sizes, is_listed: bool) -> Tile | None:
        given = dict(self.tiles)
        if given:
            return given.get(kernel)
        return find_tile(
            kernel,
            sizes.D,
            self.dtype,
            rows=sizes.rows,
            keys=sizes.Lc,
            own=sizes.Lk > 0,
            listed=is_listed,
            aligned=alignment(self.dtype, *self.layouts) > 1,
        )

    def prepared(self, kernel: object, tile: Tile, constants: tuple[object, ...]) -> Prepared:
        return Prepared(
            kernel,
            constants,
            num_warps=tile.warps,
            num_stages=tile.stages,
            max_registers=tile.max_registers,
            fuse=True,
        )


def _flat(*strides: Strides) -> tuple[int, ...]:
    return tuple(s for three in strides for s in three)


def _num_parts(sizes: Sizes, rows: int) -> int:
    """Most tiles of `rows` folded queries that one query row's queries lie in."""
    R = sizes.row_of_query
    return max(((t + 1) * R - 1) // rows - t * R // rows + 1 for t in range(sizes.T))


@lru_cache(maxsize=4096)
def _plan(
    device: torch.device,
    dtype: torch.dtype,
    needs: Needs,
    shapes: tuple[Shape, Shape | None, Shape],
    strides: tuple[Stride, Stride | None, Stride | None, Stride, Stride, Stride, Stride],
    results: tuple[Stride | None, Stride | None, Stride | None],
    has_key_mask: bool,
    is_listed: bool,
    tiles: tuple[tuple[Kernel, Tile], ...],
) -> _Plan:
    """shapes: of q, k, ck. strides: of q, k, v, ck, cv, out, do. results: strides of dq, of dk or dv, of dck or dcv."""
    q, k, ck = shapes
    read = [
        (shape, stride)
        for shape, stride in zip((q, k, k, ck, ck, q, q), strides, strict=True)
        if shape is not None and stride is not None
    ]
    copies = not all(is_in_reach(*layout) for layout in read)
    dq, dk, dck = results
    of_q = row_strides(q, strides[0])

    def rows(shape: Shape | None, stride: Stride | None) -> Strides:
        return of_q if shape is None or stride is None else row_strides(shape, stride)

    layouts = Layouts(
        *(of_q, rows(k, strides[1]), rows(k, strides[2]), rows(ck, strides[3]), rows(ck, strides[4])),
        *(rows(q, strides[5]), rows(q, strides[6]), rows(k, dk), rows(ck, dck)),
    )
    sizes = Sizes.of(q, k, ck)
    plan = _launches(Call(device, dtype, sizes, layouts, needs, has_key_mask, is_listed, tiles))
    return plan._replace(copies=copies, out_copies=dq is not None and layouts.out != row_strides(q, dq))


def _launches(call: Call) -> _Plan:
    sizes, needs = call.sizes, call.needs
    one_pass = call.tile("one_pass", sizes, call.is_listed) if (needs.ck or needs.cv) and not sizes.Lk else None
    if one_pass is not None and sizes.rows <= one_pass.rows + one_pass.more_rows:
        return _Plan(None, None, _one_pass(call, one_pass), None, None, 1)
    context_keys = own_keys = rows = parts_sum = None
    if needs.ck or needs.cv:
        context_keys = _keys(call, sizes, call.layouts.ck, call.layouts.cv, call.layouts.dck, (needs.ck, needs.cv))
    num_parts = 1
    needs_k, needs_v = needs.k, needs.v
    if needs.q or needs_k or needs_v:
        tile = call.tile("rows", sizes, call.is_listed)
        assert tile is not None, "the table has a rows tile for every call"
        if needs_k or needs_v:
            num_parts = _num_parts(sizes, tile.rows)
        if num_parts > MAX_PARTS:
            own = sizes._replace(Bc=sizes.Bc * sizes.T, T=1, Lc=sizes.Lk, Lk=0)
            own_keys = _keys(call, own, call.layouts.k, call.layouts.v, call.layouts.dk, (needs_k, needs_v))
            needs_k = needs_v = False
            num_parts = 1
        if needs.q or needs_k or needs_v:
            rows = _rows(call, tile, needs_k, needs_v, num_parts)
        if num_parts > 1:
            parts_sum = _sum(call, tile, num_parts)
    return _Plan(rows, parts_sum, None, context_keys, own_keys, num_parts)


def _rows(call: Call, tile: Tile, needs_k: bool, needs_v: bool, num_parts: int) -> _Launch:
    sizes, at = call.sizes, call.layouts
    # Own keys are entered for dq, which they change, and for their own gradients.
    own = sizes.Lk > 0
    key_elements = sizes.Hkv * sizes.Lk * sizes.D
    parts = (key_elements, sizes.Lk * sizes.D, sizes.D)
    dk = at.dk if num_parts == 1 else parts
    strides = (at.q, at.k, at.v, at.ck, at.cv, at.out, at.do, dk)
    constants = (
        *(sizes.D, tile.width, tile.rows, tile.keys, tile.own_keys),
        *(own, call.has_key_mask, sizes.T == 1 and sizes.Lk <= tile.own_keys),
        *(call.is_listed, sizes.T > 1, sizes.G > 1),
        *(call.needs.q, needs_k, needs_v, num_parts > 1, at.q == at.out == at.do, at.ck == at.cv),
        *(alignment(call.dtype, *strides), precision(call.dtype)),
    )
    programs = sizes.Bc * sizes.Hkv * -(-sizes.rows // tile.rows)
    part = 0 if num_parts == 1 else sizes.Bc * sizes.T * key_elements
    integers = (*_flat(*strides), part, sizes.T, sizes.G, sizes.Hkv, sizes.Lq, sizes.Lk, sizes.Lc)
    return _Launch(call.prepared(attention_backward_rows_kernel, tile, constants), programs, integers)


def _sum(call: Call, tile: Tile, num_parts: int) -> _Launch:
    sizes, needs = call.sizes, call.needs
    lines = sizes.Bc * sizes.T * sizes.Hkv * sizes.Lk
    constants = (
        *(sizes.D, triton.next_power_of_2(sizes.D), tile.rows, SUM_LINES, num_parts, sizes.T > 1),
        *(needs.k, needs.v, alignment(call.dtype, call.layouts.dk)),
    )
    integers = (*call.layouts.dk, lines * sizes.D, lines, sizes.T, sizes.G, sizes.Hkv, sizes.Lq, sizes.Lk)
    kernel = Prepared(attention_sum_parts_kernel, constants, num_warps=4)
    return _Launch(kernel, -(-lines // SUM_LINES), integers)


def _one_pass(call: Call, tile: Tile) -> _Launch:
    sizes, at, needs = call.sizes, call.layouts, call.needs
    assert not tile.one_block or sizes.Lc <= tile.keys, "the only block holds all keys"
    strides = (at.q, at.ck, at.cv, at.out, at.do, at.dck)
    constants = (
        *(sizes.D, tile.width, tile.rest, tile.rows, tile.more_rows, tile.keys),
        *(call.is_listed, tile.one_block, sizes.T > 1, sizes.G > 1),
        *(needs.q, needs.ck, needs.cv, at.q == at.out == at.do, at.ck == at.cv == at.dck),
        *(alignment(call.dtype, *strides), precision(call.dtype)),
    )
    integers = (*_flat(*strides), sizes.T, sizes.G, sizes.Hkv, sizes.Lq, sizes.Lc)
    kernel = call.prepared(attention_backward_one_pass_kernel, tile, constants)
    return _Launch(kernel, sizes.Bc * sizes.Hkv, integers)


def _keys(call: Call, sizes: Sizes, ck: Strides, cv: Strides, dck: Strides, needs: tuple[bool, bool]) -> _Launch:
    is_listed = call.is_listed if sizes is call.sizes else call.has_key_mask
    tile = call.tile("keys", sizes, is_listed)
    assert tile is not None, "the table has a keys tile for every call"
    assert tile.keys <= PAD
    at = call.layouts
    strides = (at.q, ck, cv, at.out, at.do, dck)
    constants = (
        *(sizes.D, tile.width, tile.rows, tile.keys, is_listed, sizes.T > 1, sizes.G > 1),
        *(*needs, at.q == at.out == at.do, ck == cv == dck),
        *(alignment(call.dtype, *strides), precision(call.dtype)),
    )
    integers = (*_flat(*strides), sizes.T, sizes.G, sizes.Hkv, sizes.Lq, sizes.Lc)
    programs = sizes.Bc * sizes.Hkv * -(-sizes.Lc // tile.keys)
    return _Launch(call.prepared(attention_backward_keys_kernel, tile, constants), programs, integers)


def empty_gradients(
    q: Tensor, k: Tensor | None, ck: Tensor, needs: Needs
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """Memory for the wanted gradients of q, k, v, ck, cv; v's lies as k's and cv's as ck's."""
    own = k if k is not None else ck
    return (
        empty_result(q) if needs.q else None,
        empty_result(own) if needs.k else None,
        empty_result(own) if needs.v else None,
        empty_result(ck) if needs.ck else None,
        empty_result(ck) if needs.cv else None,
    )


def run_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    ck: Tensor,
    cv: Tensor,
    key_mask: Tensor | None,
    keys: tuple[Tensor, Tensor] | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    needs: Needs,
    *,
    tiles: dict[Kernel, Tile] | None = None,
) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v, ck, cv, None where `needs` says so; those of the context summed over its T query rows.

    do: gradient of `out`, any strides. Everything else as `run_forward` got and gave it. tiles: instead of the table's.
    """
    gradients = empty_gradients(q, k, ck, needs)
    lse = lse.contiguous()  # as it was saved, unless hooks on saved tensors laid it out anew
    given = tuple((tiles or {}).items())
    _run(gradients, do, q, k, v, ck, cv, key_mask, keys, out, lse, scale, needs, given)
    return gradients


def _run(
    gradients: tuple[Tensor | None, ...],
    do: Tensor,
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    ck: Tensor,
    cv: Tensor,
    key_mask: Tensor | None,
    keys: tuple[Tensor, Tensor] | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    needs: Needs,
    tiles: tuple[tuple[Kernel, Tile], ...],
) -> None:
    """Writes the gradients that are not None."""
    dq, dk, dv, dck, dcv = gradients
    k_shape, k_stride, v_stride = (None, None, None) if k is None or v is None else (k.shape, k.stride(), v.stride())
    own, context = dv if dk is None else dk, dcv if dck is None else dck
    shapes = (q.shape, k_shape, ck.shape)
    strides = (q.stride(), k_stride, v_stride, ck.stride(), cv.stride(), out.stride(), do.stride())
    results = tuple(None if x is None else x.stride() for x in (dq, own, context))
    is_masked, is_listed = key_mask is not None, keys is not None
    plan = _plan(q.device, q.dtype, needs, shapes, strides, results, is_masked, is_listed, tiles)  # type: ignore[arg-type]
    if plan.copies or plan.out_copies or not are_aligned(q, k, v, ck, cv, out, do):
        if plan.out_copies and dq is not None:
            out = torch.empty_like(dq).copy_(out)
        q, k, v, ck, cv, do, out = as_operands(q, k, v, ck, cv, do, out)
        _run(gradients, do, q, k, v, ck, cv, key_mask, keys, out, lse, scale, needs, tiles)
        return
    if k is None or v is None:
        k = v = q  # a tensor that is not there is never read: any pointer stands for it
    index, count = keys or (lse, lse)
    exponent = scale * LOG2E
    # A pointer that is not used stands for a tensor that is not there.
    dck_or, dcv_or = q if dck is None else dck, q if dcv is None else dcv
    with on_device(q.device):
        if plan.one_pass is not None:
            kernel, programs, integers = plan.one_pass
            dq_or = q if dq is None else dq
            kernel(programs, q, ck, cv, index, count, out, do, lse, dq_or, dck_or, dcv_or, *integers, exponent, scale)
        if plan.rows is not None:
            _run_rows(plan, (q, k, v, ck, cv), key_mask, (index, count), (out, do, lse), (dq, dk, dv), exponent, scale)
        if plan.context_keys is not None:
            kernel, programs, integers = plan.context_keys
            kernel(programs, q, ck, cv, index, count, out, do, lse, dck_or, dcv_or, *integers, exponent, scale)
        if plan.own_keys is not None:
            kernel, programs, integers = plan.own_keys
            index, count = (lse, lse) if key_mask is None else key_list(key_mask)
            dk_or, dv_or = (q if x is None else x for x in (dk, dv))
            kernel(programs, q, k, v, index, count, out, do, lse, dk_or, dv_or, *integers, exponent, scale)


def _run_rows(
    plan: _Plan,
    inputs: tuple[Tensor, ...],
    key_mask: Tensor | None,
    keys: tuple[Tensor, Tensor],
    saved: tuple[Tensor, Tensor, Tensor],
    gradients: tuple[Tensor | None, Tensor | None, Tensor | None],
    exponent: float,
    scale: float,
) -> None:
    """Launches the rows kernel and the sum of its parts."""
    assert plan.rows is not None
    q, k, *_ = inputs
    dq, dk, dv = (q if x is None else x for x in gradients)
    mask = q if key_mask is None else as_bytes(key_mask)
    kernel, programs, integers = plan.rows
    if plan.sum is None:
        kernel(programs, *inputs, mask, *keys, *saved, dq, dk, dv, *integers, exponent, scale)
        return
    shape = (plan.num_parts, *k.shape)
    dk_parts, dv_parts = (
        q if x is None else torch.empty(shape, dtype=torch.float32, device=q.device) for x in gradients[1:]
    )
    kernel(programs, *inputs, mask, *keys, *saved, dq, dk_parts, dv_parts, *integers, exponent, scale)
    kernel, programs, integers = plan.sum
    kernel(programs, dk_parts, dv_parts, dk, dv, *integers)
