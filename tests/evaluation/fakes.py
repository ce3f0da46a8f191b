"""An environment group that counts, and a policy that acts its own noise."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import torch

from soma_lightning.envs.base import ChunkOutcome, Episode, TaskSpec
from soma_lightning.evaluation import EvaluationSettings

TASKS = {name: TaskSpec(name, name, max_steps=12) for name in ("push", "pick")}


class CountingEnvs:
    """An episode of state k ends after k % 3 + 1 chunks and succeeds when the mean of its actions is positive.

    Images count the looks. With to_the_limit an episode goes on for 3 chunks, and `at_goal` is what `success` is then.
    """

    tasks = TASKS

    def __init__(self, num_slots: int, fail_after: int | None = None, *, to_the_limit: bool = False) -> None:
        self.num_slots, self.fail_after, self.to_the_limit = num_slots, fail_after, to_the_limit
        self.running: dict[int, tuple[Episode, int, float]] = {}
        self.won: dict[int, bool] = {}
        self.executed: list[tuple[int, ...]] = []
        self.started: list[tuple[int, Episode]] = []

    def facts(self) -> dict[str, str]:
        return {"counter": "1.0"}

    def reset(self, slots: Sequence[int], episodes: Sequence[Episode]) -> None:
        for slot, episode in zip(slots, episodes, strict=True):
            self.running[slot], self.won[slot] = (episode, 0, 0.0), False
            self.started.append((slot, episode))

    def start(self, slots: Sequence[int], episodes: Sequence[Episode]) -> None:
        self.reset(slots, episodes)

    def ready(self, slots: Sequence[int]) -> list[int]:
        return list(slots)

    def observe(self, slots: Sequence[int]) -> dict:
        tasks = [self.running[slot][0].task for slot in slots]
        images = np.stack([np.full((8, 8, 3), 40 * (self.running[slot][1] + 1), np.uint8) for slot in slots])
        return {
            "main_images": images,
            "wrist_images": None,
            "states": np.zeros((len(slots), 8)),
            "task_descriptions": tasks,
        }

    def execute(self, slots, actions, record=None) -> list[ChunkOutcome]:
        if self.fail_after is not None and len(self.executed) >= self.fail_after:
            raise RuntimeError("the simulator died")
        self.executed.append(actions.shape)
        return [self.advance(slot, chunk) for slot, chunk in zip(slots, actions, strict=True)]

    def advance(self, slot: int, chunk: np.ndarray) -> ChunkOutcome:
        episode, chunks, total = self.running[slot]
        chunks, total = chunks + 1, total + float(chunk.mean())
        self.running[slot] = (episode, chunks, total)
        decided = chunks == episode.init_state % 3 + 1
        first = decided and total > 0
        self.won[slot] = self.won[slot] or first
        done = chunks == 3 if self.to_the_limit else decided
        steps = 1 if first else None
        return ChunkOutcome(self.won[slot], done, len(chunk), 0.5, None, steps, at_goal=first)


class NoisePolicy:
    """Acts its own noise, so the outcome shows which noise it was given."""

    noise_shape = (4, 7)
    config = SimpleNamespace(n_action_steps=2, num_inference_steps=3)

    def predict_action_batch(self, observation, *, mode, compute_values, num_steps, noise):
        assert mode == "eval"
        assert len(observation["task_descriptions"]) == len(noise)
        return noise.numpy(), {}

    def __init__(self, weight: float = 0.0) -> None:
        self.weight = torch.tensor([weight])

    def backbone_hash(self) -> str:
        return "none"

    def describe(self) -> dict:
        return {"config": "noise"}

    def state_dict(self) -> dict:
        return {"weight": self.weight}

    def report_facts(self) -> dict:
        return {"kind": "noise"}


def settings(**changes) -> EvaluationSettings:
    values = {"policy": "p", "env": "e", "tasks": ("pick", "push"), "executed_steps": 2, "denoising_steps": 3}
    return EvaluationSettings(**{**values, "episodes": 7, "recorded": 0, **changes})
