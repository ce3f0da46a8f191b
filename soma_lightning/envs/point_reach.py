"""A point that reaches a goal: the smallest task on which reinforcement learning of a flow policy shows.

No images, no simulator, microseconds a step. The point starts in the origin, the goal lies on a ring around it.
"""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np

from soma_lightning.envs.base import WHOLE_STATE, StepOutcome, TaskEnv, TaskSpec, require_flags, require_known

STATE_DIM, ACTION_DIM = 6, 2
#: Movement of one step at full action, distance that counts as reached, steps of an episode.
STEP, REACHED, MAX_STEPS = 0.12, 0.10, 24
_RADIUS = (0.8, 1.2)
_TASK = TaskSpec("reach", "reach the goal", MAX_STEPS)


class PointReach(TaskEnv[TaskSpec]):
    """One point in the plane.

    Action: float [2] in -1..1, values outside are clipped; the point moves by 0.12 times it. State: float32 [6] =
    position, goal, goal - position. Reward 1 once, when the distance falls below 0.10. stream: which sequence of goals
    the initial states count through; end_on_success: False goes on to the limit of 24 steps.
    """

    name = "point_reach"
    action_dim: ClassVar[int] = ACTION_DIM

    def __init__(self, *, stream: int = 0, end_on_success: bool = True) -> None:
        if not isinstance(stream, int) or isinstance(stream, bool) or stream < 0:
            raise ValueError(f"stream={stream!r} must be a whole number from 0")
        require_flags(end_on_success=end_on_success)
        self.tasks = {_TASK.name: _TASK}
        self.stream, self.end_on_success = stream, end_on_success
        self._position, self._goal = (0.0, 0.0), (0.0, 0.0)
        self._steps = 0
        self._success = self._done = False

    def reset(self, task: str, init_state: int) -> None:
        require_known("task", task, self.tasks)
        if init_state < 0:
            raise ValueError(f"init_state={init_state} is negative; initial states count from 0")
        words = np.random.SeedSequence((self.stream, init_state)).generate_state(2, np.uint64)
        angle, share = (float(word) / 2**64 for word in words)
        radius = _RADIUS[0] + (_RADIUS[1] - _RADIUS[0]) * share
        self._goal = (radius * math.cos(2 * math.pi * angle), radius * math.sin(2 * math.pi * angle))
        self._position, self._steps, self._success, self._done = (0.0, 0.0), 0, False, False
        self._task = _TASK

    def step(self, action: np.ndarray) -> StepOutcome:
        self._running_task()
        if self._done:
            raise RuntimeError(f"the episode has ended after {self._steps} steps; reset first")
        if np.shape(action) != (ACTION_DIM,) or not np.isfinite(action).all():
            raise ValueError(f"an action must be {ACTION_DIM} finite numbers; got {action}")
        x, y = (p + STEP * min(max(float(a), -1.0), 1.0) for p, a in zip(self._position, action, strict=True))
        self._position = (x, y)
        self._steps += 1
        reached = math.hypot(x - self._goal[0], y - self._goal[1]) < REACHED
        reward = float(reached and not self._success)
        self._success = self._success or reached
        terminated = self._success and self.end_on_success
        truncated = self._steps >= MAX_STEPS and not terminated
        self._done = terminated or truncated
        return StepOutcome(reward, self._success, terminated, truncated, at_goal=reached)

    def observe(self) -> dict[str, np.ndarray]:
        """`state`: float32 [6] = position, goal, goal - position."""
        self._running_task()
        position, goal = np.array(self._position), np.array(self._goal)
        return {WHOLE_STATE: np.concatenate([position, goal, goal - position]).astype(np.float32)}

    def frame(self) -> np.ndarray:
        raise RuntimeError("point_reach draws no images; evaluate it with recorded=0")

    def close(self) -> None:
        self._task = None


def demonstrate(
    states: np.ndarray,
    horizon: int,
    rng: np.random.Generator,
    *,
    heading_error_deg: float = 45.0,
    gain: float = 0.6,
    noise: float = 0.25,
) -> np.ndarray:
    """Action chunks [N, horizon, 2] of a demonstrator that steers beside the goal; states [N, 6].

    It heads for the goal turned by `heading_error_deg`, with `gain` as length, and adds normal noise of standard
    deviation `noise` to every action: a policy that imitates it solves about a third of the goals.
    """
    offset = states[:, 4:6]
    heading = offset / np.maximum(np.linalg.norm(offset, axis=1, keepdims=True), 1e-6)
    angle = math.radians(heading_error_deg)
    turned = heading @ np.array([[math.cos(angle), math.sin(angle)], [-math.sin(angle), math.cos(angle)]])
    chunks = np.repeat(gain * turned[:, None], horizon, axis=1)
    chunks += noise * rng.standard_normal(chunks.shape)
    return chunks.astype(np.float32)
