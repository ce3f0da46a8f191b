"""Observations in openpi's names, and a policy whose answers are known; `register()` makes it known as "state"."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from soma_lightning import BasePolicy, register_model
from soma_lightning.serving.policy import draw_noise


def observation(seed: int, side: int = 64) -> dict[str, Any]:
    """What a LIBERO client of openpi sends."""
    draw = np.random.default_rng(seed)
    return {
        "observation/image": draw.integers(0, 256, (side, side, 3), dtype=np.uint8),
        "observation/wrist_image": draw.integers(0, 256, (side, side, 3), dtype=np.uint8),
        "observation/state": draw.uniform(-0.1, 0.1, 8),  # float64, as robosuite's
        "prompt": ["pick up the cube", "push the red cube"][seed % 2],
    }


class StatePolicy(BasePolicy):
    """Acts its state plus its noise; notes its batches; waits, sleeps, refuses or breaks as an instruction says."""

    noise_shape = (4, 2)

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(n_action_steps=3, num_inference_steps=2, cameras=(), state_dim=2)
        self.batches: list[list[str]] = []
        self.may_go_on = threading.Event()

    def predict_action_batch(self, env_obs, mode="train", compute_values=True, num_steps=None, noise=None):
        assert (mode, compute_values, num_steps) == ("eval", False, 2)
        assert not torch.is_grad_enabled()
        tasks = env_obs["task_descriptions"]
        self.batches.append(tasks)
        if "wait" in tasks:
            assert self.may_go_on.wait(20)
        if "sleep" in tasks:
            print("asleep", flush=True)
            time.sleep(1.0)
        if "refuse" in tasks:
            raise ValueError("this instruction is refused")
        if "break" in tasks:
            raise KeyError("broken")
        return noise + torch.as_tensor(env_obs["states"])[:, None], {}


def ask(state: float, instruction: str = "go") -> dict[str, Any]:
    """An observation for a `StatePolicy`."""
    return {"observation.state": np.full(2, state), "task": instruction}


def acted(state: float, number: int = 0, seed: int = 0) -> np.ndarray:
    """The actions of a `StatePolicy` for `ask(state)` after `number` answers, float32 [3, 2]."""
    return (draw_noise(seed, number, (4, 2))[:3] + state).numpy()


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Waits for the condition, and fails after `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.005)


def register() -> None:
    register_model("state", lambda cfg, dtype: StatePolicy(), force=True)
