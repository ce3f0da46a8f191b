"""Which pieces of which tensors a kernel works on: the tables that both passes of the optimizer step read.

Many tensors of any size become one launch: every tensor is cut into chunks, and one program works on one chunk. What
changes rarely (sizes, chunks, addresses of parameters and moments) is uploaded once into `WorkList` and
`StateTable`; what changes every step (addresses of gradients, hyperparameters) is one small copy, `StepTable`.

n is the number of tensors, R the number of chunks, G of hyperparameter groups, K of clip groups.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

#: What the kernels read and write; fp64 goes through the reference.
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

#: fp64 words of one hyperparameter group in a StepTable.
GROUP_WORDS = 7

#: Stands for the address of a gradient without elements: present, with nothing to read.
EMPTY_GRADIENT = 1


class Tiles(NamedTuple):
    """Sizes of the two passes. `chunk` fixes the order of every sum: another value gives other last bits.

    chunk: elements of one program, a multiple of both tiles. *_tile: elements of one iteration. *_warps: warps of one
    program.
    """

    chunk: int = 65536
    stats_tile: int = 4096
    stats_warps: int = 4
    update_tile: int = 1024
    update_warps: int = 4


class Variant(NamedTuple):
    """The dtypes of one tensor's step: tensors with the same ones share a launch."""

    param: torch.dtype
    grad: torch.dtype
    moment: torch.dtype
    master: bool


class Hyper(NamedTuple):
    """Hyperparameters of one group as AdamW defines them. lr: a number, or a 0-d tensor on the device."""

    lr: float | Tensor
    beta1: float
    beta2: float
    eps: float
    weight_decay: float


class Launch(NamedTuple):
    """The chunks [first, first + count) hold tensors of one variant."""

    variant: Variant
    first: int
    count: int


@dataclass(frozen=True)
class WorkList:
    """The chunks of n tensors, grouped by variant, on the device.

    chunk_tensor: [R] int32, which tensor. chunk_start: [R] int64, first element. chunk_clip: [R] int32, clip group
    that counts the chunk's squares, -1 for none. numel: [n] int64. clip, group: [n] int32.
    tensor_of_chunk: chunk_tensor on the host.
    """

    launches: tuple[Launch, ...]
    chunk_tensor: Tensor
    chunk_start: Tensor
    chunk_clip: Tensor
    numel: Tensor
    clip: Tensor
    group: Tensor
    num_clips: int
    num_groups: int
    tiles: Tiles
    tensor_of_chunk: np.ndarray

    @property
    def num_tensors(self) -> int:
        return self.numel.numel()

    @property
    def num_chunks(self) -> int:
        return self.chunk_tensor.numel()

    @property
    def device(self) -> torch.device:
        return self.numel.device

    @classmethod
    def build(
        cls,
        numels: Sequence[int],
        variants: Sequence[Variant],
        device: torch.device,
        *,
        groups: Sequence[int] | None = None,
        clips: Sequence[int] | None = None,
        counted: Sequence[bool] | None = None,
        tiles: Tiles | None = None,
    ) -> WorkList:
        """Cuts n tensors into chunks.

        groups: hyperparameter group of each tensor; None: all 0. clips: clip group of each tensor; None: all 0.
        counted: False leaves a tensor's squares to another process (its non-finite values still count); None: all.
        """
        tiles = tiles or Tiles()
        n = len(numels)
        groups = groups if groups is not None else [0] * n
        clips = clips if clips is not None else [0] * n
        order = sorted(range(n), key=lambda i: _sort_key(variants[i]))
        chunks_of = np.array([-(-numels[i] // tiles.chunk) for i in order], dtype=np.int64)
        tensor = np.repeat(np.array(order, dtype=np.int64), chunks_of)
        start = (np.arange(len(tensor)) - np.repeat(np.cumsum(chunks_of) - chunks_of, chunks_of)) * tiles.chunk
        clip_of = np.array(clips, dtype=np.int64)
        counted_clip = clip_of if counted is None else np.where(np.array(counted, dtype=bool), clip_of, -1)
        return cls(
            launches=_launches(order, variants, chunks_of),
            chunk_tensor=upload(tensor.astype(np.int32), device),
            chunk_start=upload(start.astype(np.int64), device),
            chunk_clip=upload(counted_clip[tensor].astype(np.int32), device),
            numel=upload(np.array(numels, dtype=np.int64), device),
            clip=upload(clip_of.astype(np.int32), device),
            group=upload(np.array(groups, dtype=np.int32), device),
            num_clips=max(clips, default=0) + 1,
            num_groups=max(groups, default=0) + 1,
            tiles=tiles,
            tensor_of_chunk=tensor,
        )


def _sort_key(variant: Variant) -> tuple[str, str, str, bool]:
    return str(variant.grad), str(variant.param), str(variant.moment), variant.master


def _launches(order: Sequence[int], variants: Sequence[Variant], chunks_of: np.ndarray) -> tuple[Launch, ...]:
    launches: list[Launch] = []
    first = 0
    for i, count in zip(order, chunks_of.tolist(), strict=True):
        if launches and launches[-1].variant == variants[i]:
            launches[-1] = launches[-1]._replace(count=launches[-1].count + count)
        else:
            launches.append(Launch(variants[i], first, count))
        first += count
    return tuple(launch for launch in launches if launch.count > 0)


class StateTable:
    """Addresses of what the update writes: [5, n] int64 rows param, exp_avg, exp_avg_sq, master (0: none), step.

    The tensors are held, so that no address outlives its memory.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        exp_avgs: Sequence[Tensor],
        exp_avg_sqs: Sequence[Tensor],
        masters: Sequence[Tensor | None],
        steps: Sequence[Tensor],
    ) -> None:
        columns = (params, exp_avgs, exp_avg_sqs, masters, steps)
        self.tensors = tuple(tuple(column) for column in columns)
        rows = [[0 if t is None else t.data_ptr() for t in column] for column in columns]
        self.addresses = upload(np.array(rows, dtype=np.int64), steps[0].device)


class StepTable:
    """What moves between steps: [n + 7 G + K + 1] 64-bit words, written by one asynchronous copy.

    Gradient addresses (int64, 0: this tensor has no gradient), then fp64: seven words a group (lr, log beta1,
    1 - beta1, log beta2, 1 - beta2, eps, weight decay), one limit a clip group (inf: none), and the normalizer.
    """

    def __init__(self, work: WorkList) -> None:
        self.num_tensors = work.num_tensors
        self._groups_at = self.num_tensors
        self._limits_at = self._groups_at + GROUP_WORDS * work.num_groups
        self._normalizer_at = self._limits_at + work.num_clips
        size = self._normalizer_at + 1
        self.words = torch.empty(size, dtype=torch.int64, device=work.device)
        self._reals = self.words.view(torch.float64)
        self._pinned = work.device.type == "cuda"
        #: Host copies that a CUDA graph reads again at every replay.
        self._captured: list[Tensor] = []

    def write(
        self,
        grad_addresses: np.ndarray,
        hypers: Sequence[Hyper] = (),
        max_norms: Sequence[float | None] = (),
    ) -> None:
        """Sets this step's addresses ([n] int64) and, for the update, hyperparameters and limits (None: no limit).

        Device tensors among the hyperparameters are copied on the device. Nothing waits for it.
        """
        # Freshly pinned every time: the caching host allocator hands a block out again only when its copy is done.
        host = torch.empty(self.words.numel(), dtype=torch.int64, pin_memory=self._pinned)
        words = host.numpy()
        words[: self.num_tensors] = grad_addresses
        reals = words[self.num_tensors :].view(np.float64)
        moved: list[tuple[int, Tensor]] = []
        row: list[float] = []
        for hyper in hypers:
            lr = hyper.lr
            if isinstance(lr, Tensor):
                moved.append((self._groups_at + len(row), lr))
                lr = 0.0
            row += (lr, _log(hyper.beta1), 1 - hyper.beta1, _log(hyper.beta2), 1 - hyper.beta2)
            row += (hyper.eps, hyper.weight_decay)
        row += (math.inf if limit is None else limit for limit in max_norms)
        reals[: len(row)] = row
        self.words.copy_(host, non_blocking=True)
        for at, value in moved:
            self._reals[at].copy_(value, non_blocking=True)
        if self._pinned and torch.cuda.is_current_stream_capturing():
            self._captured.append(host)


def _log(beta: float) -> float:
    return math.log(beta) if beta > 0 else -math.inf


def upload(array: np.ndarray, device: torch.device) -> Tensor:
    """`array` on the device, by a copy that the host does not wait for."""
    host = torch.from_numpy(np.ascontiguousarray(array))
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
