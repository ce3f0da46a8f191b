"""How large is one attention call, and how do its tensors lie in memory? What every launch needs to know."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

#: Factor from natural exponents to those of 2, which is what the hardware raises.
LOG2E = 1.4426950408889634

#: Copies of a readable key behind the readable ones of a `KeyList`: a block of at most so many keys never loads a
#: masked one, which may hold NaN.
PAD = 128

#: Offsets inside one batch row are 32-bit numbers.
REACH = 2**31

#: A tensor's own shape and strides, and the strides of its rows, heads and lines that kernels get.
Shape = tuple[int, ...]
Stride = tuple[int, ...]
Strides = tuple[int, int, int]


class KeyList(NamedTuple):
    """The keys that each of Bc context rows lets its queries read; made by `keys.key_list`.

    lines: int32 [Bc, Lc + PAD], key numbers of each row: the readable ones in order, PAD copies of the last of them
    (of key 0 if there is none), then the masked ones in order. readable: int32 [Bc], how many are readable.
    """

    lines: Tensor
    readable: Tensor


class Sizes(NamedTuple):
    """Sizes of a call; Lk is 0 without own keys. Heads: G * Hkv query heads."""

    Bc: int
    T: int
    G: int
    Hkv: int
    Lq: int
    Lk: int
    Lc: int
    D: int

    @classmethod
    def of(cls, q: Shape, k: Shape | None, ck: Shape) -> Sizes:
        """From the shapes of q [N, Hq, Lq, D], own keys [N, Hkv, Lk, D] or None, context [Bc, Hkv, Lc, D]."""
        N, Hq, Lq, D = q
        Bc, Hkv, Lc, _ = ck
        return cls(Bc, N // Bc, Hq // Hkv, Hkv, Lq, 0 if k is None else k[2], Lc, D)

    @property
    def rows(self) -> int:
        """Folded queries of one (context row, head)."""
        return self.T * self.G * self.Lq

    @property
    def row_of_query(self) -> int:
        """Folded queries of one (query row, head)."""
        return self.G * self.Lq


def row_strides(shape: Shape, stride: Stride) -> Strides:
    """Strides of [rows, heads, lines, D] in elements, 0 where there is one of it; the last one is 1."""
    (row, head, line, _), (rows, heads, lines, _) = stride, shape
    return row if rows > 1 else 0, head if heads > 1 else 0, line if lines > 1 else 0


def empty_result(x: Tensor) -> Tensor:
    """Memory for a result that belongs to `x`: its shape and order of dimensions, columns side by side."""
    return torch.empty_like(x) if x.stride(3) == 1 else torch.empty(x.shape, dtype=x.dtype, device=x.device)


def is_in_reach(shape: Shape, stride: Stride) -> bool:
    """Whether kernels can read such a tensor: columns side by side, offsets inside one row below 2**31."""
    _, head, line, column = stride
    return column == 1 and (shape[1] - 1) * head + (shape[2] - 1) * line + shape[3] < REACH


def are_aligned(*tensors: Tensor | None) -> bool:
    """Whether all start at a multiple of 16 bytes, as kernels are told they do."""
    return not any(x is not None and x.data_ptr() % 16 for x in tensors)


def as_operands(*tensors: Any) -> tuple[Any, ...]:
    """Tensors [rows, heads, lines, D] as kernels read them, in reach and aligned; copies of those that are not.

    None stays None. ValueError for one that is out of reach as a copy too.
    """
    return tuple(None if x is None else _as_operand(x) for x in tensors)


def _as_operand(x: Tensor) -> Tensor:
    if is_in_reach(x.shape, x.stride()) and x.data_ptr() % 16 == 0:
        return x
    if x.shape[1:].numel() >= REACH:
        raise ValueError(
            f"one row of a tensor of shape {tuple(x.shape)} has {x.shape[1:].numel():,} elements, and the kernels "
            f"reach {REACH:,}; pass implementation='reference', or fewer heads at a time"
        )
    return x.clone(memory_format=torch.contiguous_format)


def alignment(dtype: torch.dtype, *strides: Strides) -> int:
    """Elements that every row starts at a multiple of: 16 bytes' worth, the widest load, or 1."""
    elements = 16 // dtype.itemsize
    return elements if all(s % elements == 0 for three in strides for s in three) else 1


def precision(dtype: torch.dtype) -> str:
    """How products of `dtype` are taken: float32 ones are not rounded to tf32."""
    return "ieee" if dtype == torch.float32 else "tf32"
