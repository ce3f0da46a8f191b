"""How do a learner and those who collect for it talk to each other? The interface, and collection in one process.

The learner grants credits; a collector spends one on each fragment and takes the newest published weights at its
beginning, never in its middle. Fragment number n may begin once version n // F - max_lag is published, where F
fragments make an update: so what is collected is never too old to learn from, and never dropped for that.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, Self

import torch
from torch import Tensor


@dataclass(frozen=True)
class Collected:
    """A fragment as it leaves its collector: named tensors, copied from here on, and facts that JSON can say."""

    tensors: dict[str, Tensor]
    facts: dict[str, Any]


class FragmentLostError(Exception):
    """What a collector raises when an environment hung or died: this fragment is lost, and it can go on."""


class Collector(Protocol):
    """Lives where fragments are collected."""

    def tensors(self) -> dict[str, Tensor]:
        """What snapshots replace, in place; the same tensors at every call."""

    def collect(self, index: int, version: int) -> Collected:
        """Fragment number `index` of the run, with weights `version`. FragmentLostError when it came to nothing."""

    def close(self) -> None: ...


class FragmentLease:
    """A fragment in the learner's hands. `tensors` are views of memory that `release` gives back.

    version: of the weights that acted. index: number of the fragment. worker: who collected it. Leaving a `with` block
    releases it.
    """

    def __init__(
        self,
        tensors: dict[str, Tensor],
        facts: Mapping[str, Any],
        *,
        version: int,
        index: int,
        worker: int,
        on_release: Callable[[], None] | None = None,
    ) -> None:
        self._tensors: dict[str, Tensor] | None = tensors
        self._on_release = on_release
        self.facts, self.version, self.index, self.worker = facts, version, index, worker

    @property
    def tensors(self) -> dict[str, Tensor]:
        """RuntimeError after `release`: the memory may hold another fragment by then."""
        if self._tensors is None:
            raise RuntimeError(f"fragment {self.index} was released; copy what is needed before")
        return self._tensors

    def release(self) -> None:
        """Gives the memory back; a second call does nothing."""
        self._tensors = None
        release, self._on_release = self._on_release, None
        if release is not None:
            release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


@dataclass
class EngineStats:
    """What has happened since the start. Seconds are sums; *_by_lag counts consumed fragments by their lag.

    learner_waited_s: in `next_fragment`. credit_waited_s, memory_waited_s: collectors without credit (or the version
    that the credit asks for), and without free memory. collecting_s: collectors at work.
    """

    collected: int = 0
    consumed: int = 0
    lost: int = 0
    stale: int = 0
    restarts: int = 0
    queued: int = 0
    consumed_by_lag: Counter[int] = field(default_factory=Counter)
    learner_waited_s: float = 0.0
    credit_waited_s: float = 0.0
    memory_waited_s: float = 0.0
    collecting_s: float = 0.0
    snapshots_published: int = 0
    snapshots_skipped: int = 0
    bytes_leased: int = 0
    arena_bytes: int = 0


class RolloutEngine(ABC):
    """Collects fragments for a learner. Used by one thread, as a context manager: leaving it stops everything."""

    @abstractmethod
    def start(self) -> None:
        """Builds the collectors. RuntimeError with the cause when one cannot be built; nothing is left behind then."""

    @abstractmethod
    def submit_fragment_credit(self, n: int) -> None:
        """Allows `n` more fragments."""

    @abstractmethod
    def next_fragment(self, timeout_s: float) -> FragmentLease:
        """The next fragment, normally in the order of completion. TimeoutError after `timeout_s`; RuntimeError when
        there is no credit left to wait for, or collectors keep failing."""

    @abstractmethod
    def publish(self, version: int, tensors: Mapping[str, Tensor]) -> bool:
        """Offers weights to the collectors: copies them and returns at once. False when no memory was free for it; the
        version is then skipped, and may be published again."""

    @abstractmethod
    def stats(self) -> EngineStats:
        """A copy of the counters."""

    @abstractmethod
    def drain(self, deadline_s: float) -> int:
        """Withdraws all credit and waits for what is running; returns how many fragments were dropped at the deadline.
        Finished ones can still be taken."""

    @abstractmethod
    def stop(self) -> None:
        """Ends the collectors and frees everything; a second call does nothing."""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


class SyncEngine(RolloutEngine):
    """Collects in this process, when the learner asks: for comparison, debugging and the smallest tasks.

    make_collector: as for `LocalEngine`; called with 0.
    """

    def __init__(self, make_collector: Callable[[int], Collector]) -> None:
        self._make_collector = make_collector
        self._collector: Collector | None = None
        self._stats = EngineStats()
        self._credit, self._begun, self._version = 0, 0, -1

    def start(self) -> None:
        if self._collector is None:
            self._collector = self._make_collector(0)

    def submit_fragment_credit(self, n: int) -> None:
        self._credit += n

    def next_fragment(self, timeout_s: float) -> FragmentLease:
        """Collects one. FragmentLostError is counted and the fragment tried again; timeout_s bounds the tries."""
        collector = self._running()
        begin = time.perf_counter()
        while True:
            if self._credit < 1:
                raise RuntimeError("no credit is left, so no fragment would ever come; submit_fragment_credit first")
            if self._version < 0:
                raise RuntimeError("no weights were published, so nothing can act; publish version 0 first")
            try:
                found = collector.collect(self._begun, self._version)
                break
            except FragmentLostError:
                self._stats.lost += 1
                if time.perf_counter() - begin > timeout_s:
                    raise
        seconds = time.perf_counter() - begin
        self._stats.learner_waited_s += seconds
        self._stats.collecting_s += seconds
        self._stats.collected += 1
        self._stats.consumed += 1
        self._stats.consumed_by_lag[0] += 1
        self._credit -= 1
        self._begun += 1
        return FragmentLease(found.tensors, found.facts, version=self._version, index=self._begun - 1, worker=0)

    @torch.no_grad()
    def publish(self, version: int, tensors: Mapping[str, Tensor]) -> bool:
        targets = self._running().tensors()
        check_fit(tensors, targets)
        for name, target in targets.items():
            target.copy_(tensors[name])
        self._version = version
        self._stats.snapshots_published += 1
        return True

    def stats(self) -> EngineStats:
        return EngineStats(**{**vars(self._stats), "consumed_by_lag": Counter(self._stats.consumed_by_lag)})

    def drain(self, deadline_s: float) -> int:
        self._credit = 0
        return 0

    def stop(self) -> None:
        collector, self._collector = self._collector, None
        if collector is not None:
            collector.close()

    def _running(self) -> Collector:
        if self._collector is None:
            raise RuntimeError("the engine is not running; use it in a `with` block")
        return self._collector


def check_fit(published: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """Raises ValueError that names what a collector lacks, misses or has in another shape or dtype."""
    missing = sorted(set(wanted) - set(published))
    unexpected = sorted(set(published) - set(wanted))
    different = [
        f"{name} is {_kind(published[name])}, the collector has {_kind(tensor)}"
        for name, tensor in wanted.items()
        if name in published and _kind(published[name]) != _kind(tensor)
    ]
    if missing or unexpected or different:
        raise ValueError(
            f"the published weights do not fit the collector's policy: missing {missing[:5]}, unexpected "
            f"{unexpected[:5]}, different {different[:5]}; learner and rollouts must build the same policy"
        )


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
