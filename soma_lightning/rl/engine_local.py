"""How do rollout processes of this machine collect while the learner learns?

One thread of the learner's process waits for everything that can happen - messages, ends of processes, deadlines,
wishes of the learner - and acts on it at once; nothing is polled. It hands credits to idle processes, offers them new
weights, takes their fragments and replaces them when they die.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import wait
from typing import Any

from torch import Tensor

from soma_lightning.models.registry import subprocess_environment
from soma_lightning.rl.blocks import BlockLayout, finish_copies, views
from soma_lightning.rl.engine import Collector, EngineStats, FragmentLease, RolloutEngine, check_fit
from soma_lightning.rl.rollout_process import Seconds, rollout_environment
from soma_lightning.rl.rollout_worker import RolloutWorker, WorkerGone, per_worker, pickled
from soma_lightning.rl.schedule import Schedule
from soma_lightning.rl.slabs import Packed
from soma_lightning.rl.snapshots import SnapshotWriter

_HOUR_S = 3600.0
_GOODBYE_S = 5.0  # for idle processes to close their collectors


@dataclass(frozen=True)
class _Finished:
    """A fragment in the queue. memory: of its slab."""

    number: int
    version: int
    worker: RolloutWorker
    packed: Packed
    facts: dict[str, Any]
    memory: Tensor


class LocalEngine(RolloutEngine):
    """Collects in `num_workers` processes of this machine; versions of weights must be published in rising order.

    make_collector: picklable; called in each process with the process's number. fragments_per_update: F, what the
    learner takes between two `publish` calls. max_lag: 0 to 2; how many versions the weights that acted may be behind
    the learner's, so that at most (max_lag + 1) F fragments are under way. arena_bytes: shared memory of one process
    for its fragments, from the collector to `FragmentLease.release`. environment: variables of all processes, or of
    each one, such as CUDA_VISIBLE_DEVICES. device: where fragments and snapshots lie on their way; "cuda" shares them
    by CUDA IPC between processes that see the same GPUs. start_timeout_s: to build a collector. fragment_timeout_s: to
    collect one fragment, without the time that the learner's leases leave no memory, and to copy a snapshot; a process
    that takes longer is ended. max_restarts_per_hour: of all processes together; one more is an error.

    A process that dies, hangs or raises loses the fragment that it was collecting, and another takes its place; what it
    had finished stays readable. Raises ValueError for settings out of range, TypeError when `make_collector` cannot be
    pickled.
    """

    def __init__(
        self,
        make_collector: Callable[[int], Collector],
        num_workers: int,
        *,
        fragments_per_update: int,
        max_lag: int = 1,
        arena_bytes: int = 2**30,
        environment: Mapping[str, str] | Sequence[Mapping[str, str]] = (),
        device: str = "cpu",
        start_timeout_s: float = 300.0,
        fragment_timeout_s: float = 600.0,
        max_restarts_per_hour: int = 6,
    ) -> None:
        counts = {"num_workers": num_workers, "fragments_per_update": fragments_per_update, "arena_bytes": arena_bytes}
        _check_settings(counts, max_lag, max_restarts_per_hour, start_timeout_s, fragment_timeout_s)
        self._num_workers, self._max_lag, self._arena_bytes = num_workers, max_lag, arena_bytes
        self._device, self._start_timeout_s, self._fragment_timeout_s = device, start_timeout_s, fragment_timeout_s
        self._max_restarts_per_hour = max_restarts_per_hour
        self._environment = per_worker(environment, num_workers)
        self._build = pickled(make_collector)
        self._schedule = Schedule(fragments_per_update, max_lag)
        self._writer = SnapshotWriter(device, num_workers + 2)  # so that there is always one to write into
        self._stats = EngineStats(arena_bytes=arena_bytes * num_workers)
        self._inherited: dict[str, str] = {}
        self._workers: list[RolloutWorker] = []
        self._finished: list[_Finished] = []
        self._restarts: deque[float] = deque()
        self._wanted: BlockLayout | None = None  # of the collectors' tensors
        self._published = self._learner_version = -1
        self._last_loss = ""
        self._error: str | None = None
        self._is_started = self._is_draining = self._stops = False
        self._monitor: threading.Thread | None = None
        self._wake = -1
        self._changed = threading.Condition()  # guards everything above, and all sending

    # -- the learner's thread -----------------------------------------------------------------------------------------

    def start(self) -> None:
        if self._monitor is not None or self._stops:
            raise RuntimeError("an engine is started once; build another one")
        self._inherited = {**os.environ, **subprocess_environment()}
        self._workers = [self._new_worker(number) for number in range(self._num_workers)]
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # A daemon, so that a learner that forgets to stop can still exit; `stop` then runs at exit.
        self._monitor = threading.Thread(target=self._watch, name="rollout-monitor", daemon=True)
        atexit.register(self.stop)
        self._monitor.start()
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._is_started or self._error is not None)
        except BaseException:
            self.stop()
            raise
        if self._error is not None:
            self.stop()
            raise RuntimeError(self._error)

    def submit_fragment_credit(self, n: int) -> None:
        if n < 0:
            raise ValueError(f"credit n={n} is negative; drain() withdraws credit")
        with self._changed:
            self._check_running()
            self._schedule.credit += n
            self._wake_up()

    def next_fragment(self, timeout_s: float) -> FragmentLease:
        """The next fragment, in the order of completion unless that would make an older one too old to be used."""
        begin = time.monotonic()
        try:
            with self._changed:
                while True:
                    self._check_running()
                    found = self._take()
                    if found is not None:
                        return self._leased(found)
                    self._check_hope()
                    left = begin + timeout_s - time.monotonic()
                    if left <= 0:
                        raise TimeoutError(self._what_is_awaited(timeout_s))
                    self._changed.wait(left)
        finally:
            self._stats.learner_waited_s += time.monotonic() - begin

    def publish(self, version: int, tensors: Mapping[str, Tensor]) -> bool:
        with self._changed:
            self._check_running()
            assert self._wanted is not None
            if version <= self._published:
                raise ValueError(f"version {version} must be above the published version, {self._published}")
            check_fit(tensors, {field.name: field.to_meta() for field in self._wanted.fields})
        done = self._writer.publish(version, tensors)
        with self._changed:
            self._learner_version = version
            if not done:
                self._stats.snapshots_skipped += 1
                return False
            if self._published < 0:
                self._schedule.first_version = version
            self._published = version
            self._stats.snapshots_published += 1
            self._wake_up()
        return True

    def stats(self) -> EngineStats:
        with self._changed:
            by_lag = Counter(self._stats.consumed_by_lag)
            return replace(self._stats, queued=len(self._finished), consumed_by_lag=by_lag)

    def drain(self, deadline_s: float) -> int:
        """As in `RolloutEngine`. A process that is still at work at the deadline is ended, its fragment counts as lost.
        Credit that is submitted afterwards is used as before."""
        with self._changed:
            self._check_running()
            self._is_draining = True
            self._schedule.withdraw()
            try:
                self._changed.wait_for(lambda: not self._running() or self._error is not None, deadline_s)
                late = self._running()
                for worker in late:
                    worker.deadline = time.monotonic()
                self._wake_up()
                self._changed.wait_for(lambda: not self._running() or self._error is not None)
            finally:
                self._is_draining = False
            return sum(not worker.is_alive for worker in late)

    def stop(self) -> None:
        monitor, self._monitor = self._monitor, None
        if monitor is None:
            return
        with self._changed:
            self._stops = True
            self._wake_up()
        monitor.join()
        os.close(self._wake)
        atexit.unregister(self.stop)
        self._finished.clear()
        self._writer.close()

    @property
    def worker_pids(self) -> list[int | None]:
        """The process ids, in the order of their numbers; None for one that does not run."""
        return [worker.pid for worker in self._workers]

    def _check_running(self) -> None:
        if self._error is not None:
            raise RuntimeError(self._error)
        if self._monitor is None:
            raise RuntimeError("the engine is not running; use it in a `with` block")

    def _take(self) -> _Finished | None:
        """The oldest finished fragment, if the learner may have it now. Drops those that are too old."""
        while self._finished:
            oldest = min(self._finished, key=lambda one: (one.version, one.number))
            if self._learner_version - oldest.version > self._max_lag:
                self._finished.remove(oldest)
                self._schedule.lose(oldest.number)
                self._stats.stale += 1
                self._release(oldest)
                continue
            if not self._schedule.may_take(oldest.number, self._learner_version):
                return None
            self._finished.remove(oldest)
            self._schedule.take(oldest.number)
            return oldest
        return None

    def _leased(self, found: _Finished) -> FragmentLease:
        self._stats.consumed += 1
        self._stats.consumed_by_lag[self._learner_version - found.version] += 1
        return FragmentLease(
            views(found.memory, found.packed.layout),
            found.facts,
            version=found.version,
            index=found.number,
            worker=found.worker.number,
            on_release=partial(self._release, found),
        )

    def _release(self, found: _Finished) -> None:
        """The learner is done with a fragment: its slab goes back to its process, if that still runs."""
        finish_copies(found.memory)
        worker = found.worker
        with self._changed:
            self._stats.bytes_leased -= found.memory.numel()
            if not worker.is_alive:
                return
            worker.num_releases += 1
            worker.send("release", found.packed.slab)
            if worker.is_full:  # it tries again, and says so if that was not enough
                worker.is_full, worker.deadline = False, time.monotonic() + self._fragment_timeout_s
                self._wake_up()

    def _check_hope(self) -> None:
        """RuntimeError when nothing can come, however long the learner waits here."""
        number, oldest = self._schedule.upcoming
        running = self._running()
        can_begin = self._schedule.credit > 0 and oldest <= self._published
        if not running and not can_begin:
            if self._schedule.credit < 1:
                raise RuntimeError("no credit is left, so no fragment would ever come; submit_fragment_credit first")
            raise RuntimeError(
                f"fragment {number} needs weights of version {oldest}, and "
                f"{f'the newest published is {self._published}' if self._published >= 0 else 'none were published'}; "
                "publish them (again, where publish() gave False)"
            )
        if running and all(worker.is_full for worker in running):
            if can_begin and len(running) < self._num_workers:
                return
            raise RuntimeError(
                f"rollout processes {[worker.number for worker in running]} wait for memory that unreleased fragments "
                f"hold ({self._stats.bytes_leased:,} bytes); release some first, or raise arena_bytes="
                f"{self._arena_bytes:,} so that all fragments of an update and one more fit into each process's arena"
            )

    def _running(self) -> list[RolloutWorker]:
        return [worker for worker in self._workers if worker.running is not None]

    def _what_is_awaited(self, timeout_s: float) -> str:
        what = ", ".join(f"{worker.running} of process {worker.number}" for worker in self._running()) or "none"
        last = f"; the last fragment was lost because: {self._last_loss}" if self._last_loss else ""
        return f"no fragment came within {timeout_s:g} s; under way: {what}{last}"

    def _wake_up(self) -> None:
        """Makes the monitor look at what the learner changed."""
        if self._monitor is not None or self._stops:
            os.eventfd_write(self._wake, 1)

    # -- the monitor's thread -----------------------------------------------------------------------------------------

    def _watch(self) -> None:
        try:
            for worker in self._workers:  # here, because they die with the thread that started them
                worker.start(self._start_timeout_s)
            while not self._stops and self._error is None:
                self._wait_and_act()
        except BaseException:  # a fault of ours; the learner must not wait for ever
            self._error = f"the monitor of the rollout processes failed:\n{traceback.format_exc()}"
        finally:
            with self._changed:
                self._changed.notify_all()
                self._end_workers()

    def _wait_and_act(self) -> None:
        with self._changed:
            self._hand_out()
            alive = [worker for worker in self._workers if worker.is_alive]
            deadlines = [one for worker in alive if (one := worker.nearest_deadline) is not None]
        sources: dict[Any, RolloutWorker] = {worker.connection: worker for worker in alive}
        sources.update({worker.sentinel: worker for worker in alive})
        nearest = max(0.0, min(deadlines) - time.monotonic()) if deadlines else None
        ready = wait([self._wake, *sources], nearest)
        if self._wake in ready:
            os.eventfd_read(self._wake)
        for worker in dict.fromkeys(sources[source] for source in ready if source != self._wake):
            self._listen(worker)
        with self._changed:
            for worker in self._workers:
                deadline = worker.nearest_deadline
                if deadline is not None and time.monotonic() >= deadline:
                    self._lost_worker(worker, self._overdue(worker))
            self._changed.notify_all()

    def _new_worker(self, number: int) -> RolloutWorker:
        environment = rollout_environment(self._inherited, number, self._environment[number])
        return RolloutWorker(number, self._build, environment, (self._arena_bytes, self._device))

    def _hand_out(self) -> None:
        """Offers new weights, and a fragment to every idle process that may begin one; the longest idle one first."""
        for worker in self._workers:
            if worker.is_alive and worker.wanted is not None:
                self._offer_snapshot(worker)
        idle = [worker for worker in self._workers if worker.is_idle and worker.version >= 0]
        for worker in sorted(idle, key=lambda one: one.idle_since):
            number = self._schedule.begin(worker.version)
            if number is not None:
                worker.running, worker.deadline = number, time.monotonic() + self._fragment_timeout_s
                worker.send("credit", number)

    def _offer_snapshot(self, worker: RolloutWorker) -> None:
        """One at a time, so that a process never holds more than one slot."""
        if worker.staging_until is not None or worker.version >= self._published:
            return
        snapshot = self._writer.lease(worker)
        if snapshot is None:  # its slot is written again just now; another offer follows
            return
        if not worker.has_slots:
            worker.send("slots", len(self._writer.slots), self._writer.layout)
            worker.send_blocks(self._writer.slots)
        worker.has_slots, worker.staging_until = True, time.monotonic() + self._fragment_timeout_s
        worker.send("snapshot", snapshot)

    def _listen(self, worker: RolloutWorker) -> None:
        """Takes one message of a process, or notices its end once it has sent everything."""
        try:
            if not worker.has_message():
                raise WorkerGone(worker.how_it_ended())
            message, *told = worker.receive()
        except WorkerGone as gone:
            with self._changed:
                self._lost_worker(worker, f"{gone} {worker.occupation}")
            return
        with self._changed:
            self._hear(worker, message, told)

    def _hear(self, worker: RolloutWorker, message: str, told: list[Any]) -> None:
        if message == "fragment":
            self._add(worker, *told)
        elif message == "staged":
            self._writer.release(worker)
            worker.staging_until, worker.version = None, told[0]
        elif message == "full":
            if told[0] == worker.num_releases:  # else it has not seen the newest release, and tries again
                worker.is_full, worker.deadline = True, None
        elif message == "retire":
            del worker.slabs[told[0]]
        elif message == "lost":
            self._lose(worker, told[1])
        elif message == "failed":
            self._lost_worker(worker, f"raised {worker.occupation}:\n{told[0]}")
        elif message == "ready":
            self._ready(worker, told[0])

    def _ready(self, worker: RolloutWorker, wanted: BlockLayout) -> None:
        worker.wanted, worker.deadline, worker.idle_since = wanted, None, time.monotonic()
        if self._wanted is None:
            self._wanted = wanted
        elif self._wanted != wanted:
            self._error = f"rollout process {worker.number} builds other tensors than the first one that was ready"
        self._is_started = self._is_started or all(one.wanted is not None for one in self._workers)

    def _add(
        self, worker: RolloutWorker, number: int, version: int, packed: Packed, facts: dict[str, Any], spent: Seconds
    ) -> None:
        """A fragment has come: into the queue, whose length the schedule bounds."""
        self._now_idle(worker)
        self._schedule.finish(number, version)
        self._finished.append(_Finished(number, version, worker, packed, facts, worker.slabs[packed.slab]))
        self._stats.collected += 1
        self._stats.bytes_leased += worker.slabs[packed.slab].numel()
        self._stats.credit_waited_s += spent.credit_waited
        self._stats.memory_waited_s += spent.memory_waited
        self._stats.collecting_s += spent.collecting

    def _lose(self, worker: RolloutWorker, reason: str) -> None:
        """The fragment that `worker` was at came to nothing; another one may begin for it."""
        assert worker.running is not None
        self._schedule.lose(worker.running)
        self._stats.lost += 1
        self._last_loss = reason
        self._now_idle(worker)

    def _now_idle(self, worker: RolloutWorker) -> None:
        worker.running, worker.deadline, worker.is_full, worker.idle_since = None, None, False, time.monotonic()

    def _lost_worker(self, worker: RolloutWorker, how: str) -> None:
        """Ends what is left of a process and starts another one in its place, within the limit."""
        how = f"rollout process {worker.number} {how}"
        if worker.running is not None:
            self._lose(worker, how)
        worker.end()
        self._writer.release(worker)
        if not self._is_started:
            self._error = how
        if self._error is not None:
            return
        if not self._is_draining:
            self._count_restart(how)
        if self._error is None:
            replacement = self._new_worker(worker.number)
            self._workers[worker.number] = replacement
            replacement.start(self._start_timeout_s)

    def _count_restart(self, how: str) -> None:
        now = time.monotonic()
        while self._restarts and now - self._restarts[0] > _HOUR_S:
            self._restarts.popleft()
        if len(self._restarts) >= self._max_restarts_per_hour:
            self._error = (
                f"rollout processes had to be replaced more than max_restarts_per_hour={self._max_restarts_per_hour} "
                f"times; the last one: {how}"
            )
            return
        self._restarts.append(now)
        self._stats.restarts += 1

    def _overdue(self, worker: RolloutWorker) -> str:
        if worker.wanted is None:
            return f"was not ready within start_timeout_s={self._start_timeout_s:g} and was ended"
        if self._is_draining:
            return f"had not finished fragment {worker.running} at the deadline of drain() and was ended"
        what = "take over new weights" if worker.deadline is None else f"finish fragment {worker.running}"
        return f"did not {what} within fragment_timeout_s={self._fragment_timeout_s:g} and was ended"

    def _end_workers(self) -> None:
        """Idle processes close their collectors first, within a time; the others are killed at once."""
        polite = [worker for worker in self._workers if worker.is_idle]
        for worker in polite:
            worker.send("stop")
        for worker in self._workers:
            if worker not in polite:
                worker.end()
        left: list[Any] = [worker.sentinel for worker in polite]
        deadline = time.monotonic() + _GOODBYE_S
        while left and time.monotonic() < deadline:
            ended = wait(left, max(0.0, deadline - time.monotonic()))
            left = [sentinel for sentinel in left if sentinel not in ended]
        for worker in polite:
            worker.end()


def _check_settings(
    counts: Mapping[str, int], max_lag: int, max_restarts_per_hour: int, start_timeout_s: float, timeout_s: float
) -> None:
    for name, value in counts.items():
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    if max_lag not in (0, 1, 2):
        raise ValueError(f"max_lag={max_lag} must be 0, 1 or 2; older fragments teach too little")
    if max_restarts_per_hour < 0 or start_timeout_s <= 0 or timeout_s <= 0:
        raise ValueError(
            f"max_restarts_per_hour={max_restarts_per_hour} must be at least 0, start_timeout_s={start_timeout_s:g} "
            f"and fragment_timeout_s={timeout_s:g} above 0"
        )
    most = (max_lag + 1) * counts["fragments_per_update"]
    if counts["num_workers"] > most:
        raise ValueError(
            f"num_workers={counts['num_workers']} can never work at once: at most (max_lag + 1) * fragments_per_update "
            f"= {most} fragments are under way; raise fragments_per_update or use {most} processes"
        )
