"""How do several environments run as one batch in this process, and which calls make sense for such a group?

Slots are numbered 0..num_slots-1; each runs one episode at a time. Rendering happens only in `observe` and for recorded
slots. `spawned` has the same group in worker processes, bit for bit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

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

if TYPE_CHECKING:
    from soma_lightning.contract import EnvObservation


class ClosedOnExit(ABC):
    """A group as a context manager."""

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Ledger:
    """Which slot runs which episode; refuses calls that make no sense, naming slot and value."""

    def __init__(self, num_slots: int, action_dim: int = ACTION_DIM) -> None:
        if num_slots < 1:
            raise ValueError(f"num_slots={num_slots}; an environment group needs at least one slot")
        self.num_slots, self.action_dim = num_slots, action_dim
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
        if len(shape) != 3 or shape[0] != len(slots) or shape[1] < 1 or shape[2] != self.action_dim:
            raise ValueError(
                f"actions have shape {list(shape)}; {len(slots)} slots need [{len(slots)}, K >= 1, {self.action_dim}]"
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


class LocalEnvs(ClosedOnExit):
    """All environments in this process; those of one kind share model and renderer where they can.

    make_env: builds one environment (`EnvSpec`, or any function without arguments). Use it from one thread.
    """

    def __init__(self, make_env: Callable[[], ManipulationEnv], num_slots: int) -> None:
        self._ledger = Ledger(num_slots)
        first = make_env()
        self._ledger.action_dim = first.action_dim
        self._envs = [first]
        while len(self._envs) < num_slots:
            self._envs.append(first.sibling() or make_env())

    @property
    def num_slots(self) -> int:
        return self._ledger.num_slots

    @property
    def tasks(self) -> Mapping[str, TaskSpec]:
        return self._envs[0].tasks

    @property
    def action_dim(self) -> int:
        return self._ledger.action_dim

    def facts(self) -> dict[str, str]:
        return self._envs[0].facts()

    def description(self) -> tuple[dict[str, TaskSpec], int]:
        """`tasks` and `action_dim` as a call, for a worker process that serves this group."""
        return dict(self._envs[0].tasks), self.action_dim

    def reset(self, slots: Sequence[int], episodes: Sequence[Episode]) -> None:
        """Starts `episodes[i]` in `slots[i]`. ValueError naming the nearest task for an unknown one."""
        self._ledger.check_episodes(slots, episodes, self.tasks)
        for slot, episode in zip(slots, episodes, strict=True):
            self._envs[slot].reset(episode.task, episode.init_state)
        self._ledger.started(slots, episodes)

    def start(self, slots: Sequence[int], episodes: Sequence[Episode]) -> None:
        """`reset`: nothing here goes on beside the caller."""
        self.reset(slots, episodes)

    def ready(self, slots: Sequence[int]) -> list[int]:
        """All of `slots`."""
        return list(slots)

    def observe(self, slots: Sequence[int]) -> EnvObservation:
        """Batched observation: images uint8 [N, h, w, 3], states float32 [N, S], in the order of `slots`."""
        self._ledger.check_started(slots, running=False)
        return batch_observations((self._envs[slot].observe(), self._envs[slot].instruction) for slot in slots)

    def execute(
        self, slots: Sequence[int], actions: np.ndarray, record: Sequence[bool] | None = None
    ) -> list[ChunkOutcome]:
        """Executes `actions` float32 [N, K, A]; a slot whose episode ends stops there.

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


def _run_chunk(env: ManipulationEnv, chunk: np.ndarray, *, record: bool) -> ChunkOutcome:
    """Executes `chunk` [K, A] in one environment up to its episode's end."""
    outcome = ChunkOutcome(success=False, done=False, steps=0, reward=0.0, frames=[] if record else None)
    for action in chunk:
        step = env.step(action)
        outcome.steps += 1
        outcome.reward += step.reward
        outcome.success, outcome.done, outcome.at_goal = step.success, step.done, step.at_goal
        outcome.truncated = step.truncated
        if step.success and outcome.steps_to_success is None:
            outcome.steps_to_success = outcome.steps
        if outcome.frames is not None:
            outcome.frames.append(env.frame())
        if step.done:
            break
    return outcome
