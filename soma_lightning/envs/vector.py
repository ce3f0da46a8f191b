"""How several environments run as one batch: in this process, or spread over worker processes.

Both groups give bit-identical results for the same calls. Slots are numbered 0..num_slots-1; each runs one episode at
a time. Rendering happens only in `observe` and for recorded slots.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, cast

import numpy as np

from soma_lightning.envs.base import (
    ACTION_DIM,
    ChunkOutcome,
    Episode,
    ManipulationEnv,
    TaskSpec,
    batch_observations,
    require_known,
)
from soma_lightning.envs.rendering import choose_egl_device
from soma_lightning.envs.worker import Worker, WorkerError, WorkerFailure

if TYPE_CHECKING:
    from soma_lightning.contract import EnvObservation

_IMAGE_FIELDS = ("main_images", "wrist_images")


class _ClosedOnExit(ABC):
    """A group as a context manager."""

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Ledger:
    """Which slot runs which episode; refuses calls that make no sense, naming slot and value."""

    def __init__(self, num_slots: int) -> None:
        if num_slots < 1:
            raise ValueError(f"num_slots={num_slots}; an environment group needs at least one slot")
        self.num_slots = num_slots
        self.episodes: dict[int, Episode | None] = dict.fromkeys(range(num_slots))
        self._ended: set[int] = set()

    def check_slots(self, slots: Sequence[int]) -> None:
        unknown = [slot for slot in slots if slot not in self.episodes]
        if unknown:
            raise ValueError(f"slots {unknown} do not exist; this group has slots 0..{self.num_slots - 1}")
        if len(set(slots)) != len(slots):
            raise ValueError(f"slots {list(slots)} name one slot twice")

    def check_started(self, slots: Sequence[int], *, running: bool) -> None:
        self.check_slots(slots)
        for slot in slots:
            if self.episodes[slot] is None:
                raise RuntimeError(f"slot {slot} has no episode; reset it first")
            if running and slot in self._ended:
                raise RuntimeError(f"the episode {self.episodes[slot]} of slot {slot} has ended; reset the slot first")

    def check_episodes(self, slots: Sequence[int], episodes: Sequence[Episode], tasks: Mapping[str, TaskSpec]) -> None:
        self.check_slots(slots)
        if len(episodes) != len(slots):
            raise ValueError(f"{len(slots)} slots were given {len(episodes)} episodes")
        for episode in episodes:
            require_known("task", episode.task, tasks)

    def check_actions(self, slots: Sequence[int], actions: np.ndarray, record: Sequence[bool] | None) -> None:
        self.check_started(slots, running=True)
        shape = np.shape(actions)
        if len(shape) != 3 or shape[0] != len(slots) or shape[1] < 1 or shape[2] != ACTION_DIM:
            raise ValueError(
                f"actions have shape {list(shape)}; {len(slots)} slots need [{len(slots)}, K >= 1, {ACTION_DIM}]"
            )
        finite = np.isfinite(actions).all(axis=(1, 2))
        if not finite.all():
            bad = [slot for slot, good in zip(slots, finite, strict=True) if not good]
            raise ValueError(f"the actions for slots {bad} hold NaN or infinity")
        if record is not None and len(record) != len(slots):
            raise ValueError(f"record has {len(record)} entries for {len(slots)} slots")

    def started(self, slots: Sequence[int], episodes: Sequence[Episode]) -> None:
        self.episodes.update(zip(slots, episodes, strict=True))
        self._ended.difference_update(slots)

    def executed(self, slots: Sequence[int], outcomes: Sequence[ChunkOutcome]) -> None:
        self._ended.update(slot for slot, outcome in zip(slots, outcomes, strict=True) if outcome.done)

    def lost(self, slots: Sequence[int]) -> None:
        self.episodes.update(dict.fromkeys(slots))


class LocalEnvs(_ClosedOnExit):
    """All environments in this process; those of one kind share model and renderer where they can.

    make_env: builds one environment (`EnvSpec`, or any function without arguments). Use it from one thread.
    """

    def __init__(self, make_env: Callable[[], ManipulationEnv], num_slots: int) -> None:
        self._ledger = _Ledger(num_slots)
        first = make_env()
        self._envs = [first]
        while len(self._envs) < num_slots:
            self._envs.append(first.sibling() or make_env())

    @property
    def num_slots(self) -> int:
        return self._ledger.num_slots

    @property
    def tasks(self) -> Mapping[str, TaskSpec]:
        return self._envs[0].tasks

    def facts(self) -> dict[str, str]:
        return self._envs[0].facts()

    def task_table(self) -> dict[str, TaskSpec]:
        """`tasks` as a call, for a worker process that serves this group."""
        return dict(self._envs[0].tasks)

    def reset(self, slots: Sequence[int], episodes: Sequence[Episode]) -> None:
        """Starts `episodes[i]` in `slots[i]`. ValueError naming the nearest task for an unknown one."""
        self._ledger.check_episodes(slots, episodes, self.tasks)
        for slot, episode in zip(slots, episodes, strict=True):
            self._envs[slot].reset(episode.task, episode.init_state)
        self._ledger.started(slots, episodes)

    def observe(self, slots: Sequence[int]) -> EnvObservation:
        """Batched observation: images uint8 [N, h, w, 3], states float32 [N, S], in the order of `slots`."""
        self._ledger.check_started(slots, running=False)
        return batch_observations((self._envs[slot].observe(), self._envs[slot].instruction) for slot in slots)

    def execute(
        self, slots: Sequence[int], actions: np.ndarray, record: Sequence[bool] | None = None
    ) -> list[ChunkOutcome]:
        """Executes `actions` float32 [N, K, 7]; a slot whose episode ends stops there.

        record: for which slots the main camera's image is kept after every step.
        """
        self._ledger.check_actions(slots, actions, record)
        wanted = record if record is not None else [False] * len(slots)
        outcomes = [
            _run_chunk(self._envs[slot], chunk, record=keep)
            for slot, chunk, keep in zip(slots, actions, wanted, strict=True)
        ]
        self._ledger.executed(slots, outcomes)
        return outcomes

    def close(self) -> None:
        for env in self._envs:
            env.close()


class SpawnedEnvs(_ClosedOnExit):
    """The same group with its slots spread over worker processes (slot s lives in worker s % num_workers).

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
        self._ledger = _Ledger(num_slots)
        if not 1 <= num_workers <= num_slots:
            raise ValueError(f"num_workers={num_workers} must be between 1 and num_slots={num_slots}")
        if timeout_s <= 0 or start_timeout_s <= 0:
            raise ValueError(f"timeout_s={timeout_s} and start_timeout_s={start_timeout_s} must be above 0 seconds")
        if gl_devices is not None and not gl_devices:
            raise ValueError("gl_devices is empty; name at least one EGL device or leave it out")
        self._timeout_s = timeout_s
        self._workers: list[Worker] = []
        for number in range(num_workers):
            slots_here = len(range(number, num_slots, num_workers))
            device = {"MUJOCO_EGL_DEVICE_ID": str(gl_devices[number % len(gl_devices)])} if gl_devices else {}
            build = partial(_build_share, make_env, slots_here, number)
            self._workers.append(Worker(number, build, environment=device, start_timeout_s=start_timeout_s))
        try:
            self.tasks: Mapping[str, TaskSpec] = self._start()
        except BaseException:
            self.close()
            raise

    @property
    def num_slots(self) -> int:
        return self._ledger.num_slots

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
        self._ledger.check_episodes(slots, episodes, self.tasks)
        self._ledger.lost(slots)  # until the worker has said that the new episode runs
        try:
            self._call("reset", slots, [episodes])
        except WorkerError as error:
            given = dict(zip(slots, episodes, strict=True))
            error.episodes.update({slot: given[slot] for slot in error.slots if slot in given})
            self._ledger.started(list(error.results), [given[slot] for slot in error.results])
            raise
        self._ledger.started(slots, episodes)

    def observe(self, slots: Sequence[int]) -> EnvObservation:
        """Batched observation as `LocalEnvs.observe`. WorkerError when a worker fails."""
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
        """Executes `actions` float32 [N, K, 7] as `LocalEnvs.execute`. WorkerError when a worker fails."""
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

    def _start(self) -> dict[str, TaskSpec]:
        for worker in self._workers:
            worker.start()
        try:
            for worker in self._workers:
                worker.await_ready()
        except WorkerFailure as failure:
            raise self._useless(failure) from failure
        tasks: dict[str, TaskSpec] = self._ask_first("task_table")
        return tasks

    def _ask_first(self, method: str) -> Any:
        """What all workers would answer alike, from the first one."""
        try:
            self._workers[0].send(method)
            return self._workers[0].receive(method, time.monotonic() + self._timeout_s, self._timeout_s)
        except WorkerFailure as failure:
            raise self._useless(failure) from failure

    def _useless(self, failure: WorkerFailure) -> WorkerError:
        slots = list(range(self.num_slots))
        return WorkerError(str(failure), slots=slots, episodes=dict.fromkeys(slots), results={})

    def _call(self, method: str, slots: Sequence[int], columns: Sequence[Sequence[Any] | np.ndarray]) -> list[Any]:
        """Calls `method(slots, *columns)` in every worker concerned; one result a slot, in the order of `slots`.

        All workers work at the same time and share one deadline.
        """
        shares: dict[int, list[int]] = {}
        for position, slot in enumerate(slots):
            shares.setdefault(slot % len(self._workers), []).append(position)
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
        self, failures: Mapping[int, WorkerFailure], called: Sequence[int], results: dict[int, Any]
    ) -> WorkerError:
        """Replaces the failed workers and says which slots went with them."""
        lost: dict[int, Episode | None] = {}
        lines: list[str] = []
        for number, failure in failures.items():
            of_worker = range(number, self.num_slots, len(self._workers))
            slots = [slot for slot in of_worker if not failure.alive or slot in called]
            lost.update((slot, self._ledger.episodes[slot]) for slot in slots)
            if not failure.alive:
                self._workers[number].restart()
            running = ", ".join(f"slot {slot}: {self._ledger.episodes[slot]}" for slot in slots)
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


def _run_chunk(env: ManipulationEnv, chunk: np.ndarray, *, record: bool) -> ChunkOutcome:
    """Executes `chunk` [K, 7] in one environment up to its episode's end."""
    outcome = ChunkOutcome(success=False, done=False, steps=0, reward=0.0, frames=[] if record else None)
    for action in chunk:
        step = env.step(action)
        outcome.steps += 1
        outcome.reward += step.reward
        outcome.success, outcome.done, outcome.at_goal = step.success, step.done, step.at_goal
        if step.success and outcome.steps_to_success is None:
            outcome.steps_to_success = outcome.steps
        if outcome.frames is not None:
            outcome.frames.append(env.frame())
        if step.done:
            break
    return outcome
