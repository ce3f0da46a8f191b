"""Which keys of a context may be read? A list of them, made once for each mask and read by every layer and pass.

A mask of Lc keys is mostly runs, so testing it in every block of every layer would cost loads and reading the masked
keys would cost most of the time. The list names the readable keys first: kernels gather exactly those, and also the
masked ones behind them, whose gradients are zero.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from soma_kernels.attention.call import PAD, KeyList
from soma_kernels.launch import Prepared, on_device


@triton.jit(do_not_specialize=["length"])
def _key_list_kernel(mask, index, count, length, PADDING: tl.constexpr, BLOCK: tl.constexpr):
    i_row = tl.program_id(0).to(tl.int64)
    mask += i_row * length
    index += i_row * (length + PADDING)
    total = 0
    last = 0
    for start in range(0, length, BLOCK):
        at = start + tl.arange(0, BLOCK)
        readable = (tl.load(mask + at, mask=at < length, other=0) != 0).to(tl.int32)
        total += tl.sum(readable)
        last = tl.maximum(last, tl.max(readable * at))
    before = 0
    for start in range(0, length, BLOCK):
        at = start + tl.arange(0, BLOCK)
        readable = (tl.load(mask + at, mask=at < length, other=0) != 0).to(tl.int32)
        rank = before + tl.cumsum(readable, 0) - readable
        slot = tl.where(readable != 0, rank, total + PADDING + at - rank)
        tl.store(index + slot, at, mask=at < length)
        before += tl.sum(readable)
    pad = tl.arange(0, PADDING)
    tl.store(index + total + pad, tl.zeros([PADDING], tl.int32) + last)
    tl.store(count + i_row, total)


@lru_cache(maxsize=64)
def _prepared(block: int, device: torch.device) -> Prepared:
    return Prepared(_key_list_kernel, (PAD, block), num_warps=4)


def _key_list(mask: Tensor) -> tuple[Tensor, Tensor]:
    rows, length = mask.shape
    index, count = _empty_list(mask)
    if rows:
        block = min(1024, max(16, triton.next_power_of_2(length)))
        with on_device(mask.device):
            _prepared(block, mask.device)(rows, as_bytes(mask), index, count, length)
    return index, count


def as_bytes(mask: Tensor) -> Tensor:
    """A bool mask as kernels read it: uint8, contiguous, from a multiple of 16 bytes."""
    mask = mask.contiguous()
    return (mask if mask.data_ptr() % 16 == 0 else mask.clone()).view(torch.uint8)


def _empty_list(mask: Tensor) -> tuple[Tensor, Tensor]:
    rows, length = mask.shape
    return (
        torch.empty(rows, length + PAD, dtype=torch.int32, device=mask.device),
        torch.empty(rows, dtype=torch.int32, device=mask.device),
    )


_library = torch.library.Library("soma_kernels", "FRAGMENT")
_library.define("attention_key_list(Tensor mask) -> (Tensor, Tensor)")
for _key in ("CUDA", "CPU"):  # on a CPU: Triton's interpreter
    _library.impl("attention_key_list", _key_list, _key)
torch.library.register_fake("soma_kernels::attention_key_list", _empty_list, lib=_library)


def key_list(mask: Tensor) -> KeyList:
    """The list of bool `mask` [Bc, Lc], True = readable; one small kernel. Inside a CUDA graph it is made at replay."""
    return KeyList(*torch.ops.soma_kernels.attention_key_list.default(mask))
