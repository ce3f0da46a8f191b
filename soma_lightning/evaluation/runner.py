"""How episodes are rolled out side by side: which slot takes which, what the policy is shown, what is noted."""

from __future__ import annotations

import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from soma_lightning.contract import EnvObservation
from soma_lightning.envs.base import ChunkOutcome, EnvGroup, Episode
from soma_lightning.evaluation.settings import EvaluationSettings, Rollout
from soma_lightning.models.flow import keyed_generator


def draw_noise(settings: EvaluationSettings, episode: Episode, look: int, shape: tuple[int, ...]) -> Tensor:
    """The noise a chunk starts from: a function of (seed, task name, initial state, look) only."""
    key = (settings.seed, zlib.crc32(episode.task.encode()), episode.init_state, look)
    return torch.randn(shape, generator=keyed_generator(key))


class EpisodeQueue:
    """Episodes that wait. A slot stays with its task as long as one waits there: another means another simulator.

    A slot whose task has none left helps the task with the most waiting episodes for each slot that is at it.
    """

    def __init__(self, episodes: Iterable[Episode]) -> None:
        self._waiting: dict[str, deque[Episode]] = {}
        for episode in episodes:
            self._waiting.setdefault(episode.task, deque()).append(episode)
        self._task_of: dict[int, str] = {}

    def next(self, slot: int) -> Episode | None:
        """The episode that `slot` runs next; None when no one waits."""
        task = self._task_of.pop(slot, None)
        if task not in self._waiting:
            if not self._waiting:
                return None
            at_work = list(self._task_of.values())
            task = max(self._waiting, key=lambda name: len(self._waiting[name]) / (1 + at_work.count(name)))
        self._task_of[slot] = task
        episode = self._waiting[task].popleft()
        if not self._waiting[task]:
            del self._waiting[task]
        return episode


@dataclass
class _Running:
    """The episode of a slot so far. frames: what the policy saw, uint8 [h, w, 3] each."""

    episode: Episode
    looks: int = 0
    steps: int = 0
    reward: float = 0.0
    first_success: int | None = None
    frames: list[np.ndarray] = field(default_factory=list)


class Runner:
    """Keeps every slot busy: a slot whose episode ends takes the next one.

    wants: whether the frames of a finished episode are needed.
    """

    def __init__(
        self, policy: Any, envs: EnvGroup, settings: EvaluationSettings, wants: Callable[[Rollout], bool]
    ) -> None:
        self.policy, self.envs, self.settings, self.wants = policy, envs, settings, wants
        self.seconds = {"render": 0.0, "policy": 0.0, "simulate": 0.0}
        self._running: dict[int, _Running] = {}

    def run(self, episodes: Iterable[Episode]) -> Iterator[tuple[Rollout, list[np.ndarray]]]:
        """The finished episodes, each with the images that the policy saw, or none."""
        queue = EpisodeQueue(episodes)
        self._start(range(self.envs.num_slots), queue)
        while self._running:
            slots = self._ready()
            actions_SKA = self._act(slots)
            begin = time.perf_counter()
            outcomes = self.envs.execute(slots, actions_SKA)
            self.seconds["simulate"] += time.perf_counter() - begin
            finished = []
            for slot, outcome in zip(slots, outcomes, strict=True):
                rollout = self._advance(slot, outcome)
                if rollout is not None:
                    finished.append(slot)
                    yield rollout, self._frames_of(slot, rollout)
                    del self._running[slot]
            self._start(finished, queue)

    def _start(self, slots: Iterable[int], queue: EpisodeQueue) -> None:
        begun = {slot: episode for slot in slots if (episode := queue.next(slot)) is not None}
        if not begun:
            return
        self.envs.start(list(begun), list(begun.values()))
        self._running.update({slot: _Running(episode) for slot, episode in begun.items()})

    def _ready(self) -> list[int]:
        """Slots to go on with. A reset may take as long as a whole episode, so the others do not wait for it."""
        begin = time.perf_counter()
        slots = self.envs.ready(sorted(self._running))
        self.seconds["simulate"] += time.perf_counter() - begin
        return slots

    def _act(self, slots: list[int]) -> np.ndarray:
        begin = time.perf_counter()
        observation = self.envs.observe(slots)
        seen = time.perf_counter()
        self._note_images(slots, observation)
        shape, running = self.policy.noise_shape, [self._running[slot] for slot in slots]
        noise = [draw_noise(self.settings, one.episode, one.looks, shape) for one in running]
        actions, _ = self.policy.predict_action_batch(
            blackened(observation) if self.settings.blind else observation,
            mode="eval",
            compute_values=False,
            num_steps=self.settings.denoising_steps,
            noise=torch.stack(noise),
        )
        for one in running:
            one.looks += 1
        self.seconds["render"] += seen - begin
        self.seconds["policy"] += time.perf_counter() - seen
        return np.asarray(actions, np.float32)[:, : self.settings.executed_steps]

    def _note_images(self, slots: list[int], observation: EnvObservation) -> None:
        if not self.settings.recorded:
            return
        images = observation["main_images"]
        if images is None:
            raise ValueError(
                f"recorded={self.settings.recorded} keeps what the policy sees, and this environment draws no images; "
                "set recorded=0"
            )
        for slot, image in zip(slots, np.asarray(images), strict=True):
            self._running[slot].frames.append(image.copy())  # a view would keep the whole batch alive

    def _advance(self, slot: int, outcome: ChunkOutcome) -> Rollout | None:
        one = self._running[slot]
        if outcome.success and one.first_success is None:
            one.first_success = one.steps + (outcome.steps_to_success or outcome.steps)
        one.steps += outcome.steps
        one.reward += outcome.reward
        if not outcome.done:
            return None
        return Rollout(
            one.episode.task,
            one.episode.init_state,
            success_once=outcome.success,
            success_at_end=outcome.at_goal if self.settings.until == "limit" else None,
            steps=one.steps if one.first_success is None else one.first_success,
            reward=one.reward,
        )

    def _frames_of(self, slot: int, rollout: Rollout) -> list[np.ndarray]:
        """What the policy saw, and the end, which it did not see any more."""
        if not self.wants(rollout):
            return []
        begin = time.perf_counter()
        self._note_images([slot], self.envs.observe([slot]))
        self.seconds["render"] += time.perf_counter() - begin
        return self._running[slot].frames


def blackened(observation: EnvObservation) -> EnvObservation:
    """The same observation with black images. ValueError when there are none."""
    images = {name: observation[name] for name in ("main_images", "wrist_images")}  # type: ignore[literal-required]
    if images["main_images"] is None:
        raise ValueError("blind=True takes the images away, and this environment draws none; leave it out")
    black = {name: None if value is None else np.zeros_like(value) for name, value in images.items()}
    return cast("EnvObservation", {**observation, **black})
