"""How is a row stored, rounded to a dtype or quantized to fp8 with a scale of its own?"""

from __future__ import annotations

import triton
import triton.language as tl

from soma_kernels.frozen.reference import FP8_MAX, MIN_SCALE
from soma_kernels.rounding import rounded

_LARGEST = tl.constexpr(FP8_MAX)
_SMALLEST_SCALE = tl.constexpr(MIN_SCALE)


@triton.jit
def store_row(out, scales, i_row, at, values, inside, QUANTIZE: tl.constexpr):
    """Writes fp32 `values` to out + at; with QUANTIZE as fp8, and their scale to scales + i_row.

    The block must hold the whole row; `values` outside it must be 0.
    """
    if QUANTIZE:
        # Without a sign, the bits of floats are ordered as integers, and NaN is above all numbers: it is not lost.
        bits = tl.where(inside, tl.abs(values), 0.0).to(tl.int32, bitcast=True)
        scale = tl.max(bits).to(tl.float32, bitcast=True) / _LARGEST
        scale = tl.where(scale < _SMALLEST_SCALE, _SMALLEST_SCALE, scale)
        tl.store(scales + i_row, scale)
        values /= scale
    tl.store(out + at, rounded(values, out.dtype.element_ty), mask=inside)
