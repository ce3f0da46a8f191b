"""How a kernel reads and writes a tensor of which it knows only the address and the dtype."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from soma_kernels.rounding import rounded

TRITON_DTYPE = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def pointer(address, start, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Pointer to element `start` of what lies at an int64 address; ALIGNED: the address is a multiple of 16.

    The hint is tied to the operation that makes the pointer, so aligned and unaligned code must each make their own.
    """
    result = address.to(tl.pointer_type(TYPE))
    if ALIGNED:
        result = tl.multiple_of(result, 16)
    return result + start


@triton.jit
def load_fp32(at, mask, MASKED: tl.constexpr):
    """The values at these pointers in fp32, 0 where the mask is off."""
    value = tl.load(at, mask=mask, other=0.0) if MASKED else tl.load(at)
    return value.to(tl.float32)


@triton.jit
def store_rounded(at, value, mask, MASKED: tl.constexpr):
    """Writes fp32 values, rounded to nearest even where the pointers have a narrower dtype."""
    value = rounded(value, at.dtype.element_ty)
    if MASKED:
        tl.store(at, value, mask=mask)
    else:
        tl.store(at, value)
