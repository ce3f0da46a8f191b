"""How do new weights reach the rollout processes, whole and without anybody waiting for them?

The learner writes a version into one of a few slots of shared memory, never into one that a rollout process is leased.
There a thread copies it into private memory, verifies version and checksums and gives the lease back; the collector
puts it in place when its next fragment begins. Who holds a lease is the learner's knowledge alone, so a reader that is
killed takes none with it.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from soma_lightning.rl.blocks import ALIGNMENT, Block, BlockLayout, aligned, fill, finish_copies, lay_out, views
from soma_lightning.rl.engine import check_fit

#: Enough for one reader: the slot that it holds, the current one, and one to write. Each further reader may hold one.
NUM_SLOTS = 3
_HEADER = BlockLayout((), ALIGNMENT)  # the version, int64, in the first bytes of a slot


class Snapshot(NamedTuple):
    """A published version: what a reader must find in `slot`. checksums: one a tensor, in the layout's order."""

    version: int
    slot: int
    checksums: tuple[int, ...]


class TornSnapshotError(RuntimeError):
    """A slot held something else than was published."""


def checksums(memory: Tensor, layout: BlockLayout) -> tuple[int, ...]:
    """For each tensor the sum of its bytes taken as 64-bit words, with overflow. Bytes up to the next tensor count."""
    sums = [
        memory[field.offset : field.offset + aligned(field.num_bytes)].view(torch.int64).sum()
        for field in layout.fields
    ]
    return tuple(torch.stack(sums).tolist()) if sums else ()


class SnapshotWriter:
    """The learner's side. `publish` may run in one thread while another leases and releases.

    Slots are allocated by the first `publish`, which fixes names, shapes and dtypes.
    """

    def __init__(self, device: torch.device | str = "cpu", num_slots: int = NUM_SLOTS) -> None:
        self._device, self._num_slots = device, num_slots
        self.layout: BlockLayout | None = None
        self.slots: list[Block] = []
        self._current: Snapshot | None = None
        self._leases: dict[Hashable, int] = {}  # slot by reader
        self._lock = threading.Lock()

    @property
    def current(self) -> Snapshot | None:
        """The newest published version; None before the first, and while its slot is written again."""
        return self._current

    def publish(self, version: int, tensors: Mapping[str, Tensor]) -> bool:
        """Copies `tensors` into a slot that nobody reads. False, at once, when there is none.

        Raises ValueError for tensors of another layout than the first ones.
        """
        layout = self._prepare(tensors)
        with self._lock:
            slot = self._unread_slot()
            if slot is None:
                return False
            if self._current is not None and self._current.slot == slot:
                self._current = None
        memory = self.slots[slot].memory
        memory[:8].view(torch.int64).fill_(version)
        fill(memory, layout, tensors)
        published = Snapshot(version, slot, checksums(memory, layout))
        with self._lock:
            self._current = published
        return True

    def lease(self, reader: Hashable) -> Snapshot | None:
        """The newest version, which stays as it is until `release(reader)`; None when there is none."""
        with self._lock:
            if reader in self._leases:
                raise ValueError(f"reader {reader} holds a lease already")
            if self._current is not None:
                self._leases[reader] = self._current.slot
            return self._current

    def release(self, reader: Hashable) -> None:
        """Ends the lease of `reader`, dead or alive; nothing when it holds none."""
        with self._lock:
            self._leases.pop(reader, None)

    def close(self) -> None:
        """Gives the memory back; nothing is published afterwards."""
        self.slots, self._current = [], None

    def _prepare(self, tensors: Mapping[str, Tensor]) -> BlockLayout:
        if self.layout is None:
            self.layout = lay_out(tensors, begin=_HEADER.num_bytes)
            self.slots = [Block(self.layout.num_bytes, self._device) for _ in range(self._num_slots)]
            for slot in self.slots:
                slot.memory.zero_()  # the bytes between tensors are summed too
        check_fit(tensors, {field.name: field.to_meta() for field in self.layout.fields})
        return self.layout

    def _unread_slot(self) -> int | None:
        """One that nobody is leased, rather not the current one: who comes meanwhile still finds that."""
        unread = [slot for slot in range(self._num_slots) if slot not in self._leases.values()]
        current = self._current.slot if self._current is not None else None
        return min(unread, key=lambda slot: slot == current, default=None)


class SnapshotReader:
    """A rollout process's side. `stage` runs in one thread, `put_in_place` in the one that collects.

    slots: memory of the writer's slots. targets: what snapshots replace, in place; their addresses never change.
    """

    def __init__(self, slots: Sequence[Tensor], layout: BlockLayout, targets: Mapping[str, Tensor]) -> None:
        check_fit({field.name: field.to_meta() for field in layout.fields}, targets)
        self._slots, self._layout, self._targets = slots, layout, targets
        self._staged, self._spare = (torch.zeros_like(slots[0]) for _ in range(2))
        self._staged_version = self.version = -1
        self._lock = threading.Lock()  # of _staged

    def stage(self, snapshot: Snapshot) -> None:
        """Copies a snapshot aside. The lease can be released on return.

        Raises TornSnapshotError when it is not what was published.
        """
        self._spare.copy_(self._slots[snapshot.slot])
        finish_copies(self._spare)
        version = int(self._spare[:8].view(torch.int64).item())
        found = checksums(self._spare, self._layout)
        if version != snapshot.version or found != snapshot.checksums:
            wrong = [
                field.name
                for field, seen, told in zip(self._layout.fields, found, snapshot.checksums, strict=True)
                if seen != told
            ]
            raise TornSnapshotError(
                f"version {snapshot.version} was published in slot {snapshot.slot}, which holds version {version}; "
                f"checksums differ of {wrong[:5]}"
            )
        with self._lock:
            self._staged, self._spare = self._spare, self._staged
            self._staged_version = version

    @torch.no_grad()
    def put_in_place(self) -> int:
        """Replaces the targets by the newest staged version, if they are not that already; returns their version."""
        with self._lock:
            if self._staged_version != self.version:
                for name, view in views(self._staged, self._layout).items():
                    self._targets[name].copy_(view)
                self.version = self._staged_version
                finish_copies(self._staged)
            return self.version
