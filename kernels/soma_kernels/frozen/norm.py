"""Residual sum and norm in one read: x + delta, then RMSNorm or LayerNorm, in the input's dtype or in fp8."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from soma_kernels.frozen.reference import FP8, Fp8Rows
from soma_kernels.frozen.rows import store_row
from soma_kernels.launch import Prepared, on_device
from soma_kernels.rounding import rounded


@triton.jit
def _add_norm_kernel(
    x,
    delta,
    weight,
    bias,
    total,
    normed,
    scales,
    eps,
    WIDTH: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    QUANTIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < WIDTH
    row = i_row * WIDTH + at
    a = tl.load(x + row, mask=inside, other=0.0)
    if HAS_DELTA:
        # Rounded before it is normed, as a sum of its own would be.
        a = rounded(a.to(tl.float32) + tl.load(delta + row, mask=inside, other=0.0).to(tl.float32), a.dtype)
        tl.store(total + row, a, mask=inside)
    v = a.to(tl.float32)
    w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        v = tl.where(inside, v - tl.sum(v) / WIDTH, 0.0)
        n = v * tl.rsqrt(tl.sum(v * v) / WIDTH + eps) * w + tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
    else:
        n = v * tl.rsqrt(tl.sum(v * v) / WIDTH + eps) * (1.0 + w)
    store_row(normed, scales, i_row, row, n, inside, QUANTIZE)


@lru_cache(maxsize=64)
def _prepared(
    width: int, has_delta: bool, has_bias: bool, quantize: bool, dtypes: tuple[torch.dtype, ...], device: torch.device
) -> Prepared:
    block = triton.next_power_of_2(width)
    constants = (width, has_delta, has_bias, quantize, block)
    return Prepared(_add_norm_kernel, constants, num_warps=min(16, max(1, block // 512)), fuse=True)


def add_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, *, quantize: bool
) -> tuple[Tensor, Tensor | Fp8Rows]:
    """(x + delta, its norm) of contiguous rows [M, W]; without delta the first result is x.

    With bias: LayerNorm. Without: RMSNorm as Gemma has it, times (1 + weight). Sums in float32. quantize: the norm as
    fp8 rows instead of x's dtype.
    """
    rows, width = x.shape
    total = x if delta is None else torch.empty_like(x)
    normed = torch.empty_like(x, dtype=FP8 if quantize else x.dtype)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device) if quantize else x
    kernel = _prepared(width, delta is not None, bias is not None, quantize, (x.dtype, weight.dtype), x.device)
    with on_device(x.device):
        kernel(
            rows, x, x if delta is None else delta, weight, weight if bias is None else bias, total, normed, scales, eps
        )
    return total, Fp8Rows(normed, scales) if quantize else normed
