"""Queries, keys and values of one product, rotated and put where they are read: one pass over them."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from soma_kernels.launch import Prepared, on_device
from soma_kernels.rounding import rounded


@triton.jit
def _rotate(
    source, target, c, s, HEADS: tl.constexpr, HALF: tl.constexpr, HEADS_BLOCK: tl.constexpr, BLOCK: tl.constexpr
):
    """HEADS heads of 2 * HALF numbers each from `source` to `target`."""
    i_head = tl.arange(0, HEADS_BLOCK)[:, None]
    i = tl.arange(0, BLOCK)[None, :]
    inside = (i_head < HEADS) & (i < HALF)
    at = i_head * (2 * HALF) + i
    low = tl.load(source + at, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(source + at + HALF, mask=inside, other=0.0).to(tl.float32)
    tl.store(target + at, rounded(low * c - high * s, target.dtype.element_ty), mask=inside)
    tl.store(target + at + HALF, rounded(high * c + low * s, target.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["length", "table_rows"])
def _split_heads_kernel(
    q,
    k,
    v,
    cos,
    sin,
    queries,
    keys,
    values,
    length,
    table_rows,
    Q_STRIDE: tl.constexpr,
    K_STRIDE: tl.constexpr,
    V_STRIDE: tl.constexpr,
    HALF: tl.constexpr,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    Q_BLOCK: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, HALF_BLOCK)[None, :]
    # Rows of one observation follow each other; a table of one observation serves all.
    at = (i_row % (length * table_rows)) * HALF + i
    c = tl.load(cos + at, mask=i < HALF, other=0.0)
    s = tl.load(sin + at, mask=i < HALF, other=0.0)
    Q_WIDTH: tl.constexpr = 2 * HALF * Q_HEADS
    KV_WIDTH: tl.constexpr = 2 * HALF * KV_HEADS
    _rotate(q + i_row * Q_STRIDE, queries + i_row * Q_WIDTH, c, s, Q_HEADS, HALF, Q_BLOCK, HALF_BLOCK)
    _rotate(k + i_row * K_STRIDE, keys + i_row * KV_WIDTH, c, s, KV_HEADS, HALF, KV_BLOCK, HALF_BLOCK)
    j = tl.arange(0, V_BLOCK)
    x = tl.load(v + i_row * V_STRIDE + j, mask=j < KV_WIDTH, other=0.0)
    tl.store(values + i_row * KV_WIDTH + j, x, mask=j < KV_WIDTH)


@lru_cache(maxsize=64)
def _prepared(
    strides: tuple[int, int, int], half: int, heads: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> Prepared:
    power = triton.next_power_of_2
    blocks = (power(heads[0]), power(heads[1]), power(half), power(2 * half * heads[1]))
    return Prepared(_split_heads_kernel, (*strides, half, *heads, *blocks), num_warps=4, fuse=True)


def split_heads(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Rotates q [M, Hq * D] and k [M, Hkv * D], writes keys and values [M, Hkv * D], returns queries [M, Hq * D].

    M = B * P rows of B observations. cos, sin: float32 [R, P, D / 2], R = B or 1 for all. Gemma rotates the pair
    (x[i], x[i + D / 2]); products in float32. Rows of q, k and v may lie apart; keys and values are contiguous.
    """
    table_rows, length, half = cos.shape
    heads = (q.shape[1] // (2 * half), k.shape[1] // (2 * half))
    queries = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    kernel = _prepared((q.stride(0), k.stride(0), v.stride(0)), half, heads, q.dtype, q.device)
    with on_device(q.device):
        kernel(q.shape[0], q, k, v, cos, sin, queries, keys, values, length, table_rows)
    return queries
