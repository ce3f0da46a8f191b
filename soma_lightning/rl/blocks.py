"""How do named tensors lie in one block of memory that two processes see?

A block on the CPU is an anonymous file in memory (memfd): it has no name anywhere, so nothing is left when its last
process ends, however that ends, and a small /dev/shm does not bound it. Its descriptor travels through a pipe. A block
on a GPU is shared by CUDA IPC; both processes must see the same GPUs then.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Mapping
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import NamedTuple

import torch
from torch import Tensor

#: Bytes; every tensor of a block begins at a multiple.
ALIGNMENT = 64


class Field(NamedTuple):
    """Where one tensor lies. offset: bytes from the beginning of its block."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def to_meta(self) -> Tensor:
        """A tensor of this shape and dtype without memory."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


class BlockLayout(NamedTuple):
    """Fields that do not overlap, and the bytes that they need together."""

    fields: tuple[Field, ...]
    num_bytes: int


def lay_out(tensors: Mapping[str, Tensor], begin: int = 0) -> BlockLayout:
    """Places for `tensors`, one after the other from byte `begin`, each at a multiple of ALIGNMENT."""
    fields, offset = [], aligned(begin)
    for name, tensor in tensors.items():
        fields.append(Field(name, tensor.dtype, tuple(tensor.shape), offset))
        offset += aligned(fields[-1].num_bytes)
    return BlockLayout(tuple(fields), offset)


def aligned(num_bytes: int) -> int:
    """The next multiple of ALIGNMENT."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def views(memory: Tensor, layout: BlockLayout) -> dict[str, Tensor]:
    """The tensors of `layout` in `memory` (uint8, one dimension), without a copy."""
    return {
        field.name: memory[field.offset : field.offset + field.num_bytes].view(field.dtype).view(field.shape)
        for field in layout.fields
    }


@torch.no_grad()
def fill(memory: Tensor, layout: BlockLayout, tensors: Mapping[str, Tensor]) -> None:
    """Copies `tensors` to their places. On a GPU they are done on return: others read without asking."""
    for name, view in views(memory, layout).items():
        view.copy_(tensors[name])
    finish_copies(memory)


def finish_copies(memory: Tensor) -> None:
    """Waits for what this process has queued on a GPU's stream; nothing to wait for on the CPU."""
    if memory.is_cuda:
        torch.cuda.current_stream(memory.device).synchronize()


class Block:
    """Memory that this process owns and others can see. `memory`: uint8 [num_bytes]."""

    def __init__(self, num_bytes: int, device: torch.device | str = "cpu") -> None:
        self.num_bytes, self.device = num_bytes, torch.device(device)
        if self.device.type != "cpu":
            self.memory = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
            return
        self._descriptor = os.memfd_create("soma_block", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor)
        os.ftruncate(self._descriptor, num_bytes)
        self.memory = _mapped(self._descriptor, num_bytes)

    def send(self, connection: Connection) -> None:
        """Hands the block to the process at the other end, which calls `receive_block`."""
        if self.device.type == "cpu":
            connection.send(self.num_bytes)
            reduction.send_handle(connection, self._descriptor, 0)
        else:
            connection.send(self.memory)  # torch's reduction: a CUDA IPC handle


def receive_block(connection: Connection) -> Tensor:
    """The memory of a block that our own process at the other end sent, uint8 [num_bytes]."""
    told = connection.recv()
    if isinstance(told, Tensor):
        return told
    descriptor = reduction.recv_handle(connection)
    try:
        return _mapped(descriptor, told)
    finally:
        os.close(descriptor)  # the mapping keeps one of its own


def _mapped(descriptor: int, num_bytes: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)
