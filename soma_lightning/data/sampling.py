"""In which order are frames drawn, and how does a run that stopped inside an epoch go on with the rest of it?

The order of an epoch depends on (seed, epoch) alone. The loader counts the batches that it handed out; Lightning keeps
that number in its checkpoints through `state_dict`, and the loader of a resumed run leaves out as many batches.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, Protocol, cast

import numpy as np
from torch.utils.data import DataLoader, Sampler


class EpochSampler(Sampler[int]):
    """Every index once an epoch, in an order that (seed, epoch) alone decide.

    Lightning and Fabric call `set_epoch`, and wrap this sampler to share the order out over ranks.
    """

    def __init__(self, data_source: Sized, seed: int = 0) -> None:
        if seed < 0:
            raise ValueError(f"seed={seed} must not be negative")
        self.data_source = data_source
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.data_source)

    def __iter__(self) -> Iterator[int]:
        # A pair seeds the stream, so that (seed 0, epoch 1) and (seed 1, epoch 0) have nothing in common.
        order = np.random.default_rng((self.seed, self.epoch)).permutation(len(self.data_source))
        return iter(order.tolist())


class MixtureSampler(EpochSampler):
    """Indices of several sources, which lie one after the other, in given shares of an epoch.

    sizes: frames of each source. weights: positive; their quotients are the shares. An epoch has as many samples as
    there are frames in all. Each source is read in passes: shuffled anew for every pass, and the next epoch goes on
    where the last one stopped, so that frames of one source are never drawn more than one time more than others.
    (seed, epoch) alone decide, as in `EpochSampler`.

    Raises ValueError for a source that gets less than one sample an epoch.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], seed: int = 0) -> None:
        super().__init__(range(sum(sizes)), seed)
        self.sizes = list(sizes)
        self.counts = _share_out(sum(sizes), weights)
        if 0 in self.counts:
            raise ValueError(
                f"weights {list(weights)} leave source {self.counts.index(0)} without a single one of the "
                f"{sum(sizes)} samples of an epoch; raise its weight or leave it out"
            )

    def __iter__(self) -> Iterator[int]:
        starts = np.cumsum([0, *self.sizes[:-1]])
        drawn = [start + self._drawn(source) for source, start in enumerate(starts)]
        mixed = np.random.default_rng((self.seed, self.epoch)).permutation(np.concatenate(drawn))
        return iter(mixed.tolist())

    def _drawn(self, source: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The frames of one source in this epoch: a window of its endless sequence of shuffled passes."""
        size, count = self.sizes[source], self.counts[source]
        first, skip = divmod(self.epoch * count, size)
        passes = range(first, first + (skip + count - 1) // size + 1)
        shuffled = [np.random.default_rng((self.seed, source, number)).permutation(size) for number in passes]
        return np.concatenate(shuffled)[skip : skip + count]


def _share_out(total: int, weights: Sequence[float]) -> list[int]:
    """Whole numbers proportional to `weights` that add up to `total` (largest remainders are rounded up)."""
    exact = np.asarray(weights, np.float64) / sum(weights) * total
    counts = np.floor(exact).astype(np.int64)
    largest = np.argsort(counts - exact, kind="stable")[: total - int(counts.sum())]
    counts[largest] += 1
    return [int(count) for count in counts]


class _HasEpoch(Protocol):
    epoch: int

    def set_epoch(self, epoch: int) -> None: ...


@dataclass
class _Position:
    """Where the next iteration begins (`epoch`, after `start` batches), and how many batches were handed out."""

    epoch: int = 0
    start: int = 0
    delivered: int = 0


class _RemainingBatches:
    """Index batches of the sampler's epoch without those that an earlier run has had; its length is the whole epoch's.

    The epoch is read when iteration begins, not when the iterator is made: Lightning sets it in between.
    """

    def __init__(self, batches: Iterable[Any], sampler: _HasEpoch, position: _Position) -> None:
        self.batches, self.sampler, self.position = batches, sampler, position

    def __len__(self) -> int:
        return len(cast(Sized, self.batches))

    def __iter__(self) -> Iterator[Any]:
        start = self.position.start if self.sampler.epoch == self.position.epoch else 0
        yield from islice(self.batches, start, None)


class ResumableDataLoader(DataLoader[Any]):
    """A DataLoader whose `state_dict` says which epoch it is in and how many batches it has handed out.

    The sampler needs `epoch` and `set_epoch` (`EpochSampler`, or a DistributedSampler). An epoch that was read to its
    end is followed by the next one; an interrupted one begins again, unless `set_epoch` or `load_state_dict` say
    otherwise. Prefetched batches that nobody received are not counted.
    """

    #: Seconds that its readers have waited for batches, over all epochs.
    waited_s = 0.0

    @cached_property
    def _position(self) -> _Position:
        return _Position(epoch=self._epochs.epoch)

    @property
    def _epochs(self) -> _HasEpoch:
        if not hasattr(self.sampler, "set_epoch"):
            raise TypeError(
                f"a ResumableDataLoader needs a sampler with set_epoch, found {type(self.sampler).__name__}"
            )
        return cast(_HasEpoch, self.sampler)

    @property
    def _index_sampler(self) -> Any:  # DataLoader takes every index batch from here, workers or not
        return _RemainingBatches(cast(Iterable[Any], super()._index_sampler), self._epochs, self._position)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return self._count(super().__iter__())

    def _count(self, batches: Iterator[Any]) -> Iterator[Any]:
        position, sampler = self._position, self._epochs
        first = True
        for batch in self._timed(batches):
            if first:
                position.delivered = position.start if sampler.epoch == position.epoch else 0
                position.epoch, position.start, first = sampler.epoch, 0, False
            position.delivered += 1
            yield batch
        if first and sampler.epoch == position.epoch:
            position.start = 0  # a resumed epoch that had nothing left
        if position.delivered >= len(self):
            position.delivered = 0
            position.epoch = sampler.epoch + 1
            sampler.set_epoch(position.epoch)

    def _timed(self, batches: Iterator[Any]) -> Iterator[Any]:
        while True:
            began = time.perf_counter()
            batch = next(batches, None)  # no batch is None
            self.waited_s += time.perf_counter() - began
            if batch is None:
                return
            yield batch

    def state_dict(self) -> dict[str, int]:
        """{"epoch", "batches"}: the batches of that epoch which were handed out. A finished epoch is the next one's
        beginning."""
        position = self._position
        batches = max(position.start, position.delivered)
        if batches >= len(self):
            return {"epoch": position.epoch + 1, "batches": 0}
        return {"epoch": position.epoch, "batches": batches}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Lets the next iteration go on after `state`. Raises ValueError when the epoch is shorter than that."""
        epoch, batches = int(state["epoch"]), int(state["batches"])
        if not 0 <= batches < max(1, len(self)):
            raise ValueError(
                f"the checkpoint was written after batch {batches} of epoch {epoch}, but this loader has only "
                f"{len(self)} batches an epoch; resume with the data set and batch size of the run that wrote it"
            )
        self._epochs.set_epoch(epoch)
        self._position.epoch, self._position.start, self._position.delivered = epoch, batches, 0


def split_episodes(num_episodes: int, val_fraction: float, seed: int) -> tuple[list[int], list[int]]:
    """Training and validation episodes, disjoint and sorted; the seed decides.

    With a positive fraction and more than one episode each side has at least one; a single episode is for training.
    """
    if not 0.0 <= val_fraction < 1.0:
        raise ValueError(f"val_fraction={val_fraction} must lie in [0, 1)")
    num_val = round(num_episodes * val_fraction)
    if val_fraction > 0.0:
        num_val = min(max(num_val, 1), num_episodes - 1)
    order = np.random.default_rng((seed, num_episodes)).permutation(num_episodes).tolist()
    return sorted(order[num_val:]), sorted(order[:num_val])
