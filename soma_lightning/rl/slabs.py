"""Where does a fragment lie between the process that collected it and the learner? In a slab, leased for one fragment.

A rollout process owns its slabs and uses them again and again, so a slab's handle travels once and afterwards only its
number. Together they never exceed a bound: where none is free, the collector waits until the learner releases one.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from soma_lightning.rl.blocks import Block, BlockLayout, aligned, fill, lay_out


@dataclass(frozen=True)
class Packed:
    """A fragment in a slab. waited_s: seconds until there was memory."""

    slab: int
    layout: BlockLayout
    waited_s: float


class SlabPool:
    """The slabs of one rollout process, at most `arena_bytes` together.

    announce: called with the number and block of a new slab before anything lies in it. retire: called with the number
    of a free slab that gives way to a larger one. when_full: called with the count of `release` calls so far, whenever
    a fragment has to wait. All three run in the thread that packs; `release` may be called from any other.
    """

    def __init__(
        self,
        arena_bytes: int,
        device: torch.device | str = "cpu",
        *,
        announce: Callable[[int, Block], None] = lambda slab, block: None,
        retire: Callable[[int], None] = lambda slab: None,
        when_full: Callable[[int], None] = lambda num_releases: None,
    ) -> None:
        self.arena_bytes, self._device = arena_bytes, device
        self._announce, self._retire, self._when_full = announce, retire, when_full
        self._numbers = itertools.count()
        self._slabs: dict[int, Block] = {}
        self._free: set[int] = set()
        self._num_releases = 0
        self._changed = threading.Condition()

    @property
    def num_bytes(self) -> int:
        """Of all slabs, free ones included."""
        return sum(block.num_bytes for block in self._slabs.values())

    @property
    def bytes_leased(self) -> int:
        with self._changed:
            return sum(block.num_bytes for slab, block in self._slabs.items() if slab not in self._free)

    def pack(self, tensors: Mapping[str, Tensor], clock: Callable[[], float]) -> Packed:
        """Copies a fragment into a slab, which is leased until `release`. Waits while there is no memory.

        clock: seconds, for the time that is waited. Raises ValueError when the fragment is larger than the bound.
        """
        layout = lay_out(tensors)
        begin = clock()
        slab = self._lease(max(layout.num_bytes, aligned(1)))
        waited = clock() - begin
        fill(self._slabs[slab].memory, layout, tensors)
        return Packed(slab, layout, waited)

    def release(self, slab: int) -> None:
        """Ends the lease: the slab may be written again. ValueError for one that is not leased."""
        with self._changed:
            if slab not in self._slabs or slab in self._free:
                raise ValueError(f"slab {slab} is not leased")
            self._free.add(slab)
            self._num_releases += 1
            self._changed.notify_all()

    def _lease(self, num_bytes: int) -> int:
        if num_bytes > self.arena_bytes:
            raise ValueError(
                f"a fragment of {num_bytes:,} bytes can never fit into arena_bytes={self.arena_bytes:,}; raise "
                "arena_bytes, or collect fewer environments or decisions in a fragment"
            )
        while True:
            with self._changed:
                seen = self._num_releases
                slab = self._fitting(num_bytes)
                if slab is not None:
                    self._free.discard(slab)
                    return slab
                room = self._make_room(num_bytes)
            if room:
                return self._add(num_bytes)
            self._when_full(seen)
            with self._changed:
                while self._num_releases == seen:
                    self._changed.wait()

    def _fitting(self, num_bytes: int) -> int | None:
        """The smallest free slab that is large enough."""
        fitting = [slab for slab in self._free if self._slabs[slab].num_bytes >= num_bytes]
        return min(fitting, key=lambda slab: self._slabs[slab].num_bytes, default=None)

    def _make_room(self, num_bytes: int) -> bool:
        """Drops free slabs, the largest first, until a new one fits; none where that would not be enough."""
        free = sorted(self._free, key=lambda slab: self._slabs[slab].num_bytes, reverse=True)
        if self.num_bytes - sum(self._slabs[slab].num_bytes for slab in free) + num_bytes > self.arena_bytes:
            return False
        while self.num_bytes + num_bytes > self.arena_bytes:
            slab = free.pop(0)
            self._free.remove(slab)
            del self._slabs[slab]
            self._retire(slab)
        return True

    def _add(self, num_bytes: int) -> int:
        block = Block(num_bytes, self._device)
        slab = next(self._numbers)
        with self._changed:
            self._slabs[slab] = block
        self._announce(slab, block)
        return slab
