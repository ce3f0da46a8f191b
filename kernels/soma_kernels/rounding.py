"""How is an fp32 number rounded to a narrower dtype? To nearest even, also in Triton's interpreter, which does not.

The interpreter truncates to bf16. To fp8 it loses the carry of numbers that round up to a power of two, and it drops
the smallest ones. There, integers do what hardware does.
"""

from __future__ import annotations

import triton
import triton.language as tl

from soma_kernels.runtime import is_interpreter

_INTERPRETED = tl.constexpr(is_interpreter())
#: fp32 numbers of this size have no fraction: adding and subtracting it rounds to whole numbers.
_WHOLE = tl.constexpr(1.5 * 2.0**23)


@triton.jit
def rounded(value, TYPE: tl.constexpr):
    """fp32 `value` in TYPE; numbers beyond its range are the caller's business."""
    if _INTERPRETED and tl.bfloat16 == TYPE:
        bits = value.to(tl.int32, bitcast=True)
        value = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
    if _INTERPRETED and tl.float8e4nv == TYPE:
        bits = value.to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -1048576).to(tl.float32, bitcast=True)
        value = tl.where(tl.abs(value) < 2.0**-6, ((value * 512.0 + _WHOLE) - _WHOLE) / 512.0, normal)
    return value.to(TYPE)
