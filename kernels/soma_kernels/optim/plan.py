"""Which pieces of which tensors a kernel works on: the tables that both passes of the optimizer step read.

Many tensors of any size become one launch: every tensor is cut into chunks, and one program works on one chunk. What
changes rarely (sizes, chunks, addresses of parameters and moments) is uploaded once into `WorkList` and
`StateTable`; what changes every step (addresses of gradients, hyperparameters) is one small copy, `StepTable`.

n is the number of tensors, R of chunks, G of hyperparameter groups, K of clip groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

_P = TypeVar("_P")

#: fp64 words of one hyperparameter group in a StepTable.
GROUP_WORDS = 7

#: fp32 scalars of one tensor that pass 2 computes once and reads everywhere.
SCALARS = 8

#: Stands for the address of a gradient without elements: present, with nothing to read.
EMPTY_GRADIENT = 1


class Tiles(NamedTuple):
    """Sizes of the two passes, in elements. `stats_chunk` fixes the order of every sum: another value, other last bits.

    *_chunk: elements of one program, a multiple of its tile. *_tile: elements of one iteration, a power of two and at
    least 16. *_warps: warps of one program.
    """

    stats_chunk: int = 65536
    stats_tile: int = 4096
    stats_warps: int = 8
    update_chunk: int = 1024
    update_tile: int = 512
    update_warps: int = 2


#: Measured on an H200 (docs/benchmarks/optimizer.md): tensors of a few hundred elements waste wide tiles.
SMALL_TENSORS = Tiles(stats_tile=512, stats_warps=1, update_chunk=2048, update_tile=256, update_warps=1)
#: Mean size below which the tensors count as small.
SMALL_MEAN = 16384


def tiles_for(numels: Sequence[int]) -> Tiles:
    """The sizes for tensors of these sizes; they depend on nothing else, so results have the same bits everywhere."""
    return SMALL_TENSORS if sum(numels) < SMALL_MEAN * len(numels) else Tiles()


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
    """The chunks [first, first + programs) hold tensors of one variant."""

    variant: Variant
    first: int
    programs: int


@dataclass(frozen=True)
class Chunks:
    """n tensors cut into R chunks of `size` elements, in launch order.

    tensor: [R] int32, which tensor. first: [n] int64, the first chunk of each tensor. tensor_on_host: [R].
    """

    size: int
    launches: tuple[Launch, ...]
    tensor: Tensor
    first: Tensor
    tensor_on_host: np.ndarray

    @property
    def count(self) -> int:
        return len(self.tensor_on_host)

    @classmethod
    def cut(cls, numels: np.ndarray, variants: Sequence[Variant], size: int, device: torch.device) -> Chunks:
        """Cuts tensors of `numels` elements; those of one variant are neighbors and share a launch."""
        order = np.array(sorted(range(len(numels)), key=lambda i: _sort_key(variants[i])), dtype=np.int64)
        counts = -(-numels[order] // size)
        first = np.zeros(len(numels), dtype=np.int64)
        first[order] = np.cumsum(counts) - counts
        tensor = np.repeat(order, counts)
        launches = _launches([variants[i] for i in order], counts.tolist())
        return cls(size, launches, upload(tensor.astype(np.int32), device), upload(first, device), tensor)


def _sort_key(variant: Variant) -> tuple[str, str, str, bool]:
    return str(variant.grad), str(variant.param), str(variant.moment), variant.master


def _launches(variants: Sequence[Variant], counts: Sequence[int]) -> tuple[Launch, ...]:
    launches: list[Launch] = []
    first = 0
    for variant, count in zip(variants, counts, strict=True):
        if launches and launches[-1].variant == variant:
            launches[-1] = launches[-1]._replace(programs=launches[-1].programs + count)
        else:
            launches.append(Launch(variant, first, count))
        first += count
    return tuple(launch for launch in launches if launch.programs > 0)


@dataclass(frozen=True)
class WorkList:
    """What both passes know about n tensors before they see a gradient, on the device.

    stats, update: the chunks of each pass. clip_of_chunk: [R of stats] int32, the clip group that counts the chunk's
    squares, -1 for none. numel: [n] int64. clip, group: [n] int32. partials: [R of stats] fp32 and scalars: [n x 8]
    fp32, memory that the passes write and read. kernels: ready to launch, by what they are for.
    """

    tiles: Tiles
    stats: Chunks
    update: Chunks
    clip_of_chunk: Tensor
    numel: Tensor
    clip: Tensor
    group: Tensor
    num_clips: int
    num_groups: int
    partials: Tensor
    scalars: Tensor
    kernels: dict[Hashable, Any] = field(default_factory=dict)

    def prepared(self, key: Hashable, make: Callable[[], _P]) -> _P:
        """The kernels under `key`, made at the first call."""
        if key not in self.kernels:
            self.kernels[key] = make()
        return cast(_P, self.kernels[key])

    @property
    def num_tensors(self) -> int:
        return self.numel.numel()

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
        num_groups: int = 1,
        clips: Sequence[int] | None = None,
        num_clips: int = 1,
        counted: Sequence[bool] | None = None,
        tiles: Tiles | None = None,
    ) -> WorkList:
        """Plans for n >= 1 tensors.

        groups: hyperparameter group of each tensor; None: all 0. clips: clip group of each tensor; None: all 0.
        counted: False leaves a tensor's squares to another process (its non-finite values still count); None: all.
        """
        tiles = tiles or tiles_for(numels)
        sizes = np.array(numels, dtype=np.int64)
        group = np.array(groups if groups is not None else [0] * len(sizes), dtype=np.int32)
        clip = np.array(clips if clips is not None else [0] * len(sizes), dtype=np.int32)
        stats = Chunks.cut(sizes, variants, tiles.stats_chunk, device)
        counted_clip = clip if counted is None else np.where(np.array(counted, dtype=bool), clip, np.int32(-1))
        return cls(
            tiles=tiles,
            stats=stats,
            update=Chunks.cut(sizes, variants, tiles.update_chunk, device),
            clip_of_chunk=upload(counted_clip[stats.tensor_on_host], device),
            numel=upload(sizes, device),
            clip=upload(clip, device),
            group=upload(group, device),
            num_clips=num_clips,
            num_groups=num_groups,
            partials=torch.empty(stats.count, dtype=torch.float32, device=device),
            scalars=torch.empty(len(sizes) * SCALARS, dtype=torch.float32, device=device),
        )


class StateTable:
    """Addresses of what the update writes: [5, n] int64 rows param, exp_avg, exp_avg_sq, master (0: none), step.

    The tensors are held, so that no address outlives its memory, unless somebody assigns to their `.data`. rows: the
    addresses on the host.
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
        self.params = tuple(params)
        self.tensors = (self.params, tuple(exp_avgs), tuple(exp_avg_sqs), tuple(masters), tuple(steps))
        self.rows = [[0 if t is None else t.data_ptr() for t in column] for column in columns]
        self.addresses = upload(np.array(self.rows, dtype=np.int64), steps[0].device)


class StepTable:
    """What moves between steps: [n + 7 G + K] 64-bit words, written by one asynchronous copy.

    Gradient addresses (int64, 0: this tensor has no gradient), then fp64: seven words a group (lr, log beta1,
    1 - beta1, log beta2, 1 - beta2, eps, weight decay), and one limit a clip group (inf: none).
    """

    def __init__(self, work: WorkList) -> None:
        self.num_tensors = work.num_tensors
        size = self.num_tensors + GROUP_WORDS * work.num_groups + work.num_clips
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
        host = torch.empty(self.words.numel(), dtype=torch.int64, device="cpu", pin_memory=self._pinned)
        words = host.numpy()
        words[: self.num_tensors] = grad_addresses
        reals = words[self.num_tensors :].view(np.float64)
        moved: list[tuple[int, Tensor]] = []
        row: list[float] = []
        for hyper in hypers:
            lr = hyper.lr
            if isinstance(lr, Tensor):
                moved.append((self.num_tensors + len(row), lr))
                lr = 0.0
            row += (lr, _log(hyper.beta1), 1 - hyper.beta1, _log(hyper.beta2), 1 - hyper.beta2)
            row += (hyper.eps, hyper.weight_decay)
        row += (math.inf if limit is None else limit for limit in max_norms)
        reals[: len(row)] = row
        self.words.copy_(host, non_blocking=True)
        for at, value in moved:
            self._reals[at].copy_(value.reshape(()), non_blocking=True)
        if self._pinned and torch.cuda.is_current_stream_capturing():
            self._captured.append(host)


def _log(beta: float) -> float:
    return math.log(beta) if beta > 0 else -math.inf


def upload(array: np.ndarray, device: torch.device) -> Tensor:
    """`array` on the device, by a copy that the host does not wait for."""
    host = torch.from_numpy(np.ascontiguousarray(array))
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
