"""The gate of an MLP in one read, gelu(gate) * up, and rows as they are: in the input's dtype or in fp8."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from soma_kernels.frozen.reference import FP8, Fp8Rows
from soma_kernels.frozen.rows import store_row
from soma_kernels.launch import Prepared, on_device

#: Elements of a program where rows need no scale.
_CHUNK = 4096


@triton.jit
def _activation_kernel(
    gate,
    up,
    out,
    scales,
    WIDTH: tl.constexpr,
    GATE_STRIDE: tl.constexpr,
    UP_STRIDE: tl.constexpr,
    GELU: tl.constexpr,
    HAS_UP: tl.constexpr,
    QUANTIZE: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i_program = tl.program_id(0).to(tl.int64)
    i_row = i_program // CHUNKS
    at = (i_program % CHUNKS).to(tl.int32) * BLOCK + tl.arange(0, BLOCK)
    inside = at < WIDTH
    v = tl.load(gate + i_row * GATE_STRIDE + at, mask=inside, other=0.0).to(tl.float32)
    if GELU:
        # tanh(y) = 2 * sigmoid(2 y) - 1, so gelu-tanh is x * sigmoid(2 y) with y = sqrt(2 / pi) (x + 0.044715 x^3).
        v = v * tl.sigmoid(1.5957691216057308 * (v + 0.044715 * v * v * v))
    if HAS_UP:
        v *= tl.load(up + i_row * UP_STRIDE + at, mask=inside, other=0.0).to(tl.float32)
    store_row(out, scales, i_row, i_row * WIDTH + at, v, inside, QUANTIZE)


@lru_cache(maxsize=64)
def _prepared(
    width: int,
    strides: tuple[int, int],
    gelu: bool,
    has_up: bool,
    quantize: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[Prepared, int]:
    """The kernel, and its programs a row."""
    block = triton.next_power_of_2(width)
    block = block if quantize else min(block, _CHUNK)
    chunks = triton.cdiv(width, block)
    constants = (width, *strides, gelu, has_up, quantize, chunks, block)
    return Prepared(_activation_kernel, constants, num_warps=min(16, max(1, block // 1024)), fuse=True), chunks


def _run(gate: Tensor, up: Tensor | None, gelu: bool, quantize: bool) -> Tensor | Fp8Rows:
    rows, width = gate.shape
    out = torch.empty(rows, width, dtype=FP8 if quantize else gate.dtype, device=gate.device)
    scales = torch.empty(rows, dtype=torch.float32, device=gate.device) if quantize else out
    other = gate if up is None else up
    strides = (gate.stride(0), other.stride(0))
    kernel, chunks = _prepared(width, strides, gelu, up is not None, quantize, gate.dtype, gate.device)
    with on_device(gate.device):
        kernel(rows * chunks, gate, other, out, scales)
    return Fp8Rows(out, scales) if quantize else out


def gelu(gate: Tensor, up: Tensor | None, *, quantize: bool) -> Tensor | Fp8Rows:
    """gelu-tanh of `gate` [M, F], times `up` [M, F] if there is one: in gate's dtype or as fp8 rows; float32 inside.

    Rows may lie apart (two halves of one product), their elements together.
    """
    return _run(gate, up, True, quantize)


def quantize_rows(x: Tensor) -> Fp8Rows:
    """x [M, W] as fp8 rows; rows may lie apart."""
    rows = _run(x, None, False, True)
    assert isinstance(rows, Fp8Rows)
    return rows
