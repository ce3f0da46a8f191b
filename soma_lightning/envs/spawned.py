"""How does a group of environments run in worker processes, where one may be slow, or die?"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from soma_lightning.envs.base import ChunkOutcome, Episode, ManipulationEnv, TaskSpec
from soma_lightning.envs.rendering import choose_egl_device
from soma_lightning.envs.vector import ClosedOnExit, Ledger, LocalEnvs
from soma_lightning.envs.worker import Worker, WorkerError, WorkerFailure

if TYPE_CHECKING:
    from soma_lightning.contract import EnvObservation

_IMAGE_FIELDS = ("main_images", "wrist_images")


@dataclass(frozen=True)
class _Start:
    """Episodes that a worker was asked to start, by slot. deadline: of its answer. failure: why none will come."""

    episodes: dict[int, Episode]
    deadline: float
    failure: WorkerFailure | None


class SpawnedEnvs(ClosedOnExit):
    """The group of `LocalEnvs` with its slots spread over worker processes (slot s lives in worker s % num_workers).

    make_env: picklable; built in the workers only, so this process gets no OpenGL context. timeout_s: the longest one
    call may take; start_timeout_s: the longest a worker may take to build its environments. gl_devices: index among
    the EGL devices for each worker, in turn (MUJOCO_EGL_DEVICE_ID); None takes those that CUDA_VISIBLE_DEVICES names,
    in turn, and leaves the choice to MuJoCo where it is not set.

    A worker that dies or does not answer in time is ended (its own process only) and a new one takes its place. Its
    slots are lost: the call raises one `WorkerError` that names worker, slots and episodes, and carries the other
    slots' results, so nothing is silently counted as a failed episode. Reset the lost slots to go on. A worker whose
    environment raised lives on; the error holds its traceback.
    """

    def __init__(
        self,
        make_env: Callable[[], ManipulationEnv],
        num_slots: int,
        num_workers: int,
        timeout_s: float = 60.0,
        *,
        start_timeout_s: float = 120.0,
        gl_devices: Sequence[int] | None = None,
    ) -> None:
        self._ledger = Ledger(num_slots)
        if not 1 <= num_workers <= num_slots:
            raise ValueError(f"num_workers={num_workers} must be between 1 and num_slots={num_slots}")
        if timeout_s <= 0 or start_timeout_s <= 0:
            raise ValueError(f"timeout_s={timeout_s} and start_timeout_s={start_timeout_s} must be above 0 seconds")
        if gl_devices is not None and not gl_devices:
            raise ValueError("gl_devices is empty; name at least one EGL device or leave it out")
        self._timeout_s = timeout_s
        self._workers: list[Worker] = []
        self._starting: dict[int, _Start] = {}  # by the worker's number
        for number in range(num_workers):
            slots_here = len(range(number, num_slots, num_workers))
            device = {"MUJOCO_EGL_DEVICE_ID": str(gl_devices[number % len(gl_devices)])} if gl_devices else {}
            build = partial(_build_share, make_env, slots_here, number)
            self._workers.append(Worker(number, build, environment=device, start_timeout_s=start_timeout_s))
        try:
            self.tasks: Mapping[str, TaskSpec]
            self.tasks, self._ledger.action_dim = self._start()
        except BaseException:
            self.close()
            raise

    @property
    def num_slots(self) -> int:
        return self._ledger.num_slots

    @property
    def action_dim(self) -> int:
        return self._ledger.action_dim

    @property
    def worker_pids(self) -> list[int | None]:
        """The workers' process ids, in the order of their numbers."""
        return [worker.pid for worker in self._workers]

    def facts(self) -> dict[str, str]:
        """`ManipulationEnv.facts` as the first worker has them. WorkerError when it fails."""
        facts: dict[str, str] = self._ask_first("facts")
        return facts

    def reset(self, slots: Sequence[int], episodes: Sequence[Episode]) -> None:
        """Starts `episodes[i]` in `slots[i]`. ValueError for an unknown task, WorkerError when a worker fails."""
        self.start(slots, episodes)
        self._settle(slots)

    def start(self, slots: Sequence[int], episodes: Sequence[Episode]) -> None:
        """As `reset`, without waiting: other workers' slots go on meanwhile. Failures are raised by what waits."""
        self._ledger.check_episodes(slots, episodes, self.tasks)
        self._settle(slots)
        self._ledger.lost(slots)  # until the worker has said that the new episode runs
        deadline = time.monotonic() + self._timeout_s
        for number, positions in self._shares(slots).items():
            here = {slots[position]: episodes[position] for position in positions}
            local_slots = [slot // len(self._workers) for slot in here]
            try:
                self._workers[number].send("reset", local_slots, list(here.values()))
                self._starting[number] = _Start(here, deadline, None)
            except WorkerFailure as failure:
                self._starting[number] = _Start(here, deadline, failure)

    def ready(self, slots: Sequence[int]) -> list[int]:
        """Those of `slots` whose episode runs, in their order; waits until there is one.

        WorkerError when a worker fails: the slots that it names must be started again.
        """
        while True:
            running = [slot for slot in slots if slot % len(self._workers) not in self._starting]
            come = self._come(wait_for_one=not running)
            if come:
                self._settle(come)
            elif running or not slots:
                return running

    def observe(self, slots: Sequence[int]) -> EnvObservation:
        """Batched observation as `LocalEnvs.observe`. WorkerError when a worker fails."""
        self._settle(slots)
        self._ledger.check_started(slots, running=False)
        rows = self._call("observe", slots, [])
        merged: dict[str, Any] = {
            "states": np.stack([row["states"] for row in rows]),
            "task_descriptions": [row["task_descriptions"] for row in rows],
        }
        for field in _IMAGE_FIELDS:
            merged[field] = None if rows[0][field] is None else np.stack([row[field] for row in rows])
        return cast("EnvObservation", merged)

    def execute(
        self, slots: Sequence[int], actions: np.ndarray, record: Sequence[bool] | None = None
    ) -> list[ChunkOutcome]:
        """Executes `actions` float32 [N, K, A] as `LocalEnvs.execute`. WorkerError when a worker fails."""
        self._settle(slots)
        self._ledger.check_actions(slots, actions, record)
        wanted = record if record is not None else [False] * len(slots)
        try:
            outcomes = self._call("execute", slots, [np.asarray(actions), wanted])
        except WorkerError as error:
            self._ledger.executed(list(error.results), list(error.results.values()))
            raise
        self._ledger.executed(slots, outcomes)
        return outcomes

    def close(self) -> None:
        """Ends all workers; a second call does nothing."""
        for worker in self._workers:
            worker.end()

    def _start(self) -> tuple[dict[str, TaskSpec], int]:
        for worker in self._workers:
            worker.start()
        try:
            for worker in self._workers:
                worker.await_ready()
        except WorkerFailure as failure:
            raise self._useless(failure) from failure
        found: tuple[dict[str, TaskSpec], int] = self._ask_first("description")
        return found

    def _ask_first(self, method: str) -> Any:
        """What all workers would answer alike, from the first one."""
        self._settle(range(0, self.num_slots, len(self._workers)))
        try:
            self._workers[0].send(method)
            return self._workers[0].receive(method, time.monotonic() + self._timeout_s, self._timeout_s)
        except WorkerFailure as failure:
            raise self._useless(failure) from failure

    def _shares(self, slots: Sequence[int]) -> dict[int, list[int]]:
        """Positions in `slots` by the number of the worker that they live in."""
        shares: dict[int, list[int]] = {}
        for position, slot in enumerate(slots):
            shares.setdefault(slot % len(self._workers), []).append(position)
        return shares

    def _come(self, *, wait_for_one: bool) -> list[int]:
        """A slot of each worker that has started its episodes, failed, or had its time."""
        failed = [number for number, start in self._starting.items() if start.failure is not None]
        if failed or not self._starting:
            return failed
        nearest = min(start.deadline for start in self._starting.values())
        connections = {self._workers[number].connection: number for number in self._starting}
        answered = wait(list(connections), max(0.0, nearest - time.monotonic()) if wait_for_one else 0.0)
        late = [number for number, start in self._starting.items() if time.monotonic() >= start.deadline]
        return [connections[one] for one in answered if isinstance(one, Connection)] or late

    def _settle(self, slots: Sequence[int]) -> None:
        """Waits until the episodes that were started in the workers of `slots` run. WorkerError when one fails."""
        failures: dict[int, WorkerFailure] = {}
        given: dict[int, Episode] = {}
        come: dict[int, Episode] = {}
        for number in self._shares(slots):
            start = self._starting.pop(number, None)
            if start is None:
                continue
            given.update(start.episodes)
            try:
                if start.failure is not None:
                    raise start.failure
                self._workers[number].receive("reset", start.deadline, self._timeout_s)
            except WorkerFailure as failure:
                failures[number] = failure
            else:
                come.update(start.episodes)
        self._ledger.started(list(come), list(come.values()))
        if failures:
            raise self._lose(failures, list(given), dict.fromkeys(come), given)

    def _useless(self, failure: WorkerFailure) -> WorkerError:
        slots = list(range(self.num_slots))
        return WorkerError(str(failure), slots=slots, episodes=dict.fromkeys(slots), results={})

    def _call(self, method: str, slots: Sequence[int], columns: Sequence[Sequence[Any] | np.ndarray]) -> list[Any]:
        """Calls `method(slots, *columns)` in every worker concerned; one result a slot, in the order of `slots`.

        All workers work at the same time and share one deadline.
        """
        shares = self._shares(slots)
        failures: dict[int, WorkerFailure] = {}
        results: dict[int, Any] = {}
        for number, positions in shares.items():
            local_slots = [slots[position] // len(self._workers) for position in positions]
            parts = [[column[position] for position in positions] for column in columns]
            try:
                self._workers[number].send(method, local_slots, *parts)
            except WorkerFailure as failure:
                failures[number] = failure
        deadline = time.monotonic() + self._timeout_s
        for number, positions in shares.items():
            if number in failures:
                continue
            try:
                answer = self._workers[number].receive(method, deadline, self._timeout_s)
            except WorkerFailure as failure:
                failures[number] = failure
            else:
                rows = _rows(answer, len(positions))
                results.update(zip((slots[position] for position in positions), rows, strict=True))
        if failures:
            raise self._lose(failures, slots, results)
        return [results[slot] for slot in slots]

    def _lose(
        self,
        failures: Mapping[int, WorkerFailure],
        called: Sequence[int],
        results: dict[int, Any],
        starting: Mapping[int, Episode] | None = None,
    ) -> WorkerError:
        """Replaces the failed workers and says which slots went with them. starting: what was to run there."""
        episodes = {**self._ledger.episodes, **(starting or {})}
        lost: dict[int, Episode | None] = {}
        lines: list[str] = []
        for number, failure in failures.items():
            of_worker = range(number, self.num_slots, len(self._workers))
            slots = [slot for slot in of_worker if not failure.alive or slot in called]
            lost.update((slot, episodes[slot]) for slot in slots)
            if not failure.alive:
                self._workers[number].restart()
            running = ", ".join(f"slot {slot}: {episodes[slot] or 'no episode'}" for slot in slots)
            lines.append(f"{failure}\nlost with it: {running}")
        self._ledger.lost(list(lost))
        lines.append("Reset these slots to go on; the other slots are unharmed.")
        return WorkerError("\n".join(lines), slots=sorted(lost), episodes=lost, results=results)


def _build_share(make_env: Callable[[], ManipulationEnv], num_slots: int, number: int) -> LocalEnvs:
    """What worker `number` serves, drawn on a device of its own where several are visible."""
    choose_egl_device(number)
    return LocalEnvs(make_env, num_slots)


def _rows(answer: Any, count: int) -> list[Any]:
    """One entry a slot from what a worker's group returned: nothing, a list, or a batched observation."""
    if answer is None:
        return [None] * count
    if isinstance(answer, list):
        return answer
    return [
        {field: None if values is None else values[row] for field, values in answer.items()} for row in range(count)
    ]
