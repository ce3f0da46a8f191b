"""What would a perfect operator do now: scripted experts for SomaTable's tasks.

Every expert is a stateless function of the current scene, so a policy without memory can imitate it, and so that the
label of a disturbed state is the correction.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from soma_lightning.envs.base import CLOSED, OPEN, ScriptedExpert, TaskSpec, require_known
from soma_lightning.envs.somatable import TASKS, SomaTable, reach_target
from soma_lightning.envs.somatable_scene import TableState

#: Demonstrations with seed s use the init states of stream DEMONSTRATION_STREAM + s, far from evaluation's streams.
DEMONSTRATION_STREAM = 1_000_000

_GAIN_PER_M = 15.0  # full speed until 67 mm before the target

# push
_BEHIND_M = 0.065  # the hand waits this far behind the cube's centre, seen from the disc
_BEHIND_RADIUS_M = 0.02
_PUSH_HEIGHT_M = 0.922  # grip height while pushing: the cube's centre
_TRAVEL_HEIGHT_M = 1.0
_PUSH_SPEED = 0.8

# pick
_GRASP_RADIUS_M = 0.02
_GRASP_HALF_HEIGHT_M = 0.012
_HELD_OPENING_M = 0.05  # the 44 mm cube stops the closing fingers at 42 mm


class SomaTableExpert(ScriptedExpert):
    """`expert_action` for the running episode of a `SomaTable`."""

    def __init__(self, env: SomaTable) -> None:
        self._env = env

    @classmethod
    def tasks(cls, settings: Mapping[str, Any]) -> dict[str, TaskSpec]:
        return {name: task for name, task in TASKS.items() if name in _EXPERTS}

    @classmethod
    def recording_settings(cls, seed: int) -> dict[str, Any]:
        return {"stream": DEMONSTRATION_STREAM + seed}

    def reset(self) -> None:
        """Nothing to forget: an expert of SomaTable is a function of the scene."""

    def act(self) -> np.ndarray:
        return expert_action(self._env.task, self._env.table_state())


def expert_action(task: str, state: TableState) -> np.ndarray:
    """The expert's action for `task` in `state`, float32 [7]; the rotation part is zero.

    Raises ValueError naming the nearest task when there is no expert for `task`.
    """
    require_known("task with a scripted expert", task, _EXPERTS)
    velocity, gripper = _EXPERTS[task](task, state)
    return np.array([*velocity, 0.0, 0.0, 0.0, gripper], dtype=np.float32)


def _towards(grip: np.ndarray, target: np.ndarray, speed: float = 1.0) -> np.ndarray:
    """Proportional motion to `target`, slowed down so that no component exceeds `speed`; the direction is kept."""
    velocity = (target - grip) * _GAIN_PER_M
    return np.asarray(velocity / max(1.0, np.abs(velocity).max() / speed))


def _reach(task: str, state: TableState) -> tuple[np.ndarray, float]:
    return _towards(state.grip, reach_target(task, state)), OPEN


def _push(task: str, state: TableState) -> tuple[np.ndarray, float]:
    """Behind the cube at travel height, down, then forward through the cube while steering its lateral error back."""
    grip, cube = state.grip, state.cube
    direction = state.green - cube[:2]
    direction = direction / (np.linalg.norm(direction) + 1e-9)
    offset = grip[:2] - cube[:2]
    along = float(offset @ direction)
    lateral = offset - along * direction
    behind = cube[:2] - _BEHIND_M * direction
    to_behind = float(np.linalg.norm(grip[:2] - behind))
    if grip[2] < 0.94 and along < -0.025 and np.linalg.norm(lateral) < 0.02:
        ahead = cube[:2] + 0.03 * direction - 1.5 * lateral
        return _towards(grip, np.array([*ahead, _PUSH_HEIGHT_M]), _PUSH_SPEED), CLOSED
    if to_behind < _BEHIND_RADIUS_M:
        return _towards(grip, np.array([*behind, _PUSH_HEIGHT_M - 0.02])), CLOSED
    if grip[2] < 0.975 and to_behind > 0.03:
        return _towards(grip, np.array([*grip[:2], _TRAVEL_HEIGHT_M + 0.03])), CLOSED
    return _towards(grip, np.array([*behind, _TRAVEL_HEIGHT_M])), CLOSED


def _pick(task: str, state: TableState) -> tuple[np.ndarray, float]:
    """Over the cube, straight down, close, lift; away from a cube that was pushed aside before trying again."""
    grip, cube = state.grip, state.cube
    sideways = float(np.linalg.norm(grip[:2] - cube[:2]))
    height = float(grip[2] - cube[2])
    if sideways < _GRASP_RADIUS_M and abs(height) < _GRASP_HALF_HEIGHT_M:
        if state.opening < _HELD_OPENING_M:
            return np.array([0.0, 0.0, 0.9]), CLOSED
        return _towards(grip, cube), CLOSED
    if sideways < 0.012 or (sideways < _GRASP_RADIUS_M and height < 0.05):
        return _towards(grip, cube), OPEN
    if height < 0.05 and sideways > _GRASP_RADIUS_M:
        return _towards(grip, np.array([*grip[:2], cube[2] + 0.09])), OPEN
    above = cube[2] + (0.07 if sideways < 0.06 else 0.09)
    return _towards(grip, np.array([*cube[:2], above])), OPEN


_Expert = Callable[[str, TableState], tuple[np.ndarray, float]]
_EXPERTS: dict[str, _Expert] = {
    "reach_cube": _reach,
    "reach_green": _reach,
    "reach_blue": _reach,
    "push": _push,
    "pick": _pick,
}
