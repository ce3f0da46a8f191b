"""What would a perfect operator do now in LIBERO: a scripted pick and place that sees the whole scene.

One control law for every object, no table of objects. It is closed-loop, so the action in a disturbed state is the
correction; unlike SomaTable's experts it remembers its phase, and starts anew with every episode.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np

from soma_lightning.envs.base import CLOSED, OPEN, DisturbanceModel, ScriptedExpert, TaskSpec, require_known
from soma_lightning.envs.libero import LiberoEnv
from soma_lightning.envs.libero_geometry import Box, LiberoScene, Shape, site_box
from soma_lightning.envs.libero_suites import LiberoSuite, select_tasks

#: Suite -> numbers of the tasks that are one pick and place. Drawers, knobs, pushing and the rack need other skills.
EXPERT_TASKS: dict[str, tuple[int, ...]] = {
    "libero_object": tuple(range(10)),
    "libero_goal": (1, 2, 4, 6, 8),
    "libero_spatial": tuple(range(10)),
}

# control law
_GAIN_PER_M = 10.0
_ROTATION_GAIN_PER_RAD = 4.0
# LIBERO's controller stands still for small actions when the arm is stretched out: without an integral 1.5 cm remain.
_INTEGRAL_GAIN_PER_M, _INTEGRAL_LIMIT, _INTEGRAL_ZONE_M = 1.2, 0.35, 0.04

_GRIP_SITE = "gripper0_grip_site"
# The site's axes when the hand points down and its fingers close along y; `robot0_eef_quat` is another body's.
_POINTING_DOWN = np.array([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, -1.0]])

# grasps
_FINGER_REACH_M = 0.030  # from the grip up to the palm: deeper, and a milk carton with its lid stays in the open hand
_THIN_M, _LOWEST_GRIP_M = 0.04, 0.009
_WIDEST_M = 0.07  # of the 8 cm that the fingers open
_RIM_INSET_M, _RIM_GRIP_M, _RIM_GRIP_IN_DRAWER_M = 0.005, 0.020, 0.012
_OUTER_FINGER_M, _ENOUGH_SPACE_M, _OBSTACLE_M = 0.03, 0.05, 0.02
_TURN_PENALTY_M = 0.02
# From here on, measured from the robot's base, the elbow is straight against its stop, and the hand hardly comes back.
_ROBOT_BASE, _REACH_M, _STRETCH_PENALTY = "robot0_base", 0.76, 2.0
_SIDES = ((0.0, (0.0, 1.0)), (0.0, (0.0, -1.0)), (np.pi / 2, (1.0, 0.0)), (np.pi / 2, (-1.0, 0.0)))

# phases: distances in metres, durations in control steps
_HOVER_M = 0.08
_SETTLING_STEPS = 12  # objects still slide a little after the settle steps, so the grasp is planned anew
_LIFT_M, _CLEARANCE_M = 0.10, 0.05
_DROP_M = 0.02
_BELOW_WALL_M, _ABOVE_PLATE_M = 0.05, 0.022
_LOST_M = 0.08  # an object that hangs this much too low is not in the hand
_RETREAT_M = 0.12


class Phase(Enum):
    """What the expert is doing."""

    HOVER = "hover"
    DOWN = "down"
    CLOSE = "close"
    LIFT = "lift"
    CARRY = "carry"
    LOWER = "lower"
    OPEN = "open"
    RETREAT = "retreat"


_HOLDING = (Phase.CLOSE, Phase.LIFT, Phase.CARRY, Phase.LOWER)
# A push while the fingers close or open, or just above the goal, ruins the attempt and teaches nothing.
_PUSHED = (Phase.HOVER, Phase.DOWN, Phase.LIFT, Phase.CARRY)


@dataclass(frozen=True)
class Grasp:
    """Where the grip goes: point float64 [3], yaw (rad), how far object reaches below the point and how high, m."""

    point: np.ndarray
    yaw: float
    below: float
    top: float


class LiberoExpert(ScriptedExpert):
    """The scripted expert of a `LiberoEnv`, for EXPERT_TASKS."""

    disturbance = DisturbanceModel(noise=0.2, rotation=0.2, push_probability=0.02)

    def __init__(self, env: LiberoEnv) -> None:
        self._env = env
        self._controller: PickAndPlace | None = None

    @classmethod
    def tasks(cls, settings: Mapping[str, Any]) -> dict[str, TaskSpec]:
        suite = LiberoSuite(settings["suite"], assets_root=settings.get("assets_root"))
        chosen = select_tasks(suite.tasks, settings.get("task_numbers"))
        numbers = EXPERT_TASKS.get(suite.name, ())
        return {name: task for name, task in chosen.items() if task.number in numbers}

    @classmethod
    def recording_settings(cls, seed: int) -> dict[str, Any]:
        """Streams of their own, so that the benchmark's initial states stay for evaluation."""
        return {"stream": 1 + seed}

    def reset(self) -> None:
        task, suite = self._env.task, self._env.suite
        known = self.tasks({"suite": suite, "assets_root": self._env.assets_root})
        require_known(f"task of {suite} with a scripted expert", task, known)
        self._controller = PickAndPlace(self._env.scene())

    def act(self) -> np.ndarray:
        return self._running().act()

    def may_be_pushed(self) -> bool:
        return self._running().phase in _PUSHED

    def _running(self) -> PickAndPlace:
        if self._controller is None:
            raise RuntimeError("no episode was started; call reset() after the environment's reset")
        return self._controller


class PickAndPlace:
    """Hover, down, close, lift, carry, lower, open, retreat; back to hover when the object was lost."""

    def __init__(self, scene: LiberoScene) -> None:
        ((_, name, goal),) = scene.goal
        self._scene, self._name = scene, name
        self._shape = Shape(scene, name)
        self._goal = Goal(scene, goal)
        self._others = {other: Shape(scene, other) for other in scene.bodies if other != name}
        self._site = scene.model.site(_GRIP_SITE).id
        self._grasp = self._plan()
        self._enter(Phase.HOVER, self._grip())

    @property
    def phase(self) -> Phase:
        return self._phase

    def act(self) -> np.ndarray:
        """One step: the action float32 [7] of the current phase; afterwards the phase may be another one."""
        grip = self._grip()
        self._steps += 1
        phase = self._phase
        target, following = _TARGETS[phase](self, grip)
        action = self._towards(grip, target, CLOSED if phase in _HOLDING else OPEN)
        if following is not phase:
            self._enter(following, grip)
        return action

    def _enter(self, phase: Phase, grip: np.ndarray) -> None:
        self._phase, self._steps = phase, 0
        self._start = grip  # where the hand was when the phase began
        self._integral = np.zeros(3)

    def _grip(self) -> np.ndarray:
        return np.array(self._scene.data.site_xpos[self._site])

    def _towards(self, grip: np.ndarray, target: np.ndarray, gripper: float) -> np.ndarray:
        """Proportional-integral motion to `target` [3], no component above 1 and in the exact direction."""
        error = target - grip
        near = np.abs(error) < _INTEGRAL_ZONE_M
        self._integral = self._integral + _INTEGRAL_GAIN_PER_M * error * near
        self._integral = np.clip(self._integral, -_INTEGRAL_LIMIT, _INTEGRAL_LIMIT)
        velocity = _GAIN_PER_M * error + self._integral
        velocity = velocity / max(1.0, float(np.abs(velocity).max()))
        now = self._scene.data.site_xmat[self._site].reshape(3, 3)
        turn = _rotation_vector(_about_z(self._grasp.yaw) @ _POINTING_DOWN @ now.T)
        rotation = np.clip(_ROTATION_GAIN_PER_RAD * turn, -1.0, 1.0)
        return np.array([*velocity, *rotation, gripper], dtype=np.float32)

    def _hover(self, grip: np.ndarray) -> tuple[np.ndarray, Phase]:
        """Over the grasp point; far away it also stays high."""
        if self._steps <= _SETTLING_STEPS:
            self._grasp = self._plan()
        grasp = self._grasp
        height = max(grasp.top, grasp.point[2]) + _HOVER_M
        sideways = float(np.linalg.norm(grip[:2] - grasp.point[:2]))
        if sideways > _HOVER_M:
            height = max(height, min(grip[2], height + 0.1))
        is_over = sideways < 0.012 or (self._steps > 50 and sideways < 0.03)
        there = is_over and abs(grip[2] - height) < 0.03
        return np.array([*grasp.point[:2], height]), Phase.DOWN if there or self._steps > 70 else Phase.HOVER

    def _down(self, grip: np.ndarray) -> tuple[np.ndarray, Phase]:
        there = np.linalg.norm(grip - self._grasp.point) < 0.008 or self._steps > 35
        return self._grasp.point, Phase.CLOSE if there else Phase.DOWN

    def _close(self, grip: np.ndarray) -> tuple[np.ndarray, Phase]:
        return self._grasp.point, Phase.LIFT if self._steps >= 10 else Phase.CLOSE

    def _lift(self, grip: np.ndarray) -> tuple[np.ndarray, Phase]:
        """Straight up; only an object that came along is carried."""
        if self._steps == 1:
            self._height = max(self._goal.box().high[2] + self._grasp.below + _CLEARANCE_M, self._start[2] + _LIFT_M)
        target = np.array([*self._start[:2], self._height])
        if grip[2] <= self._height - 0.03:
            return target, Phase.LIFT
        return target, Phase.HOVER if self._is_lost(grip, _LOST_M - 0.02) else Phase.CARRY

    def _carry(self, grip: np.ndarray) -> tuple[np.ndarray, Phase]:
        """Moves the hand by what the object lacks: how it lies in the hand needs no model."""
        missing = self._missing()
        if self._is_lost(grip, _LOST_M):
            return grip, Phase.HOVER
        there = np.linalg.norm(missing) < 0.015 or self._steps > 55
        return np.array([*(grip[:2] + missing), self._height]), Phase.LOWER if there else Phase.CARRY

    def _lower(self, grip: np.ndarray) -> tuple[np.ndarray, Phase]:
        if self._is_lost(grip, _LOST_M):
            return grip, Phase.HOVER
        height = self._goal.surface() + self._grasp.below
        there = grip[2] < height + 0.008 or self._steps > 30
        return np.array([*(grip[:2] + self._missing()), height]), Phase.OPEN if there else Phase.LOWER

    def _open(self, grip: np.ndarray) -> tuple[np.ndarray, Phase]:
        return self._start, Phase.RETREAT if self._steps > 6 else Phase.OPEN

    def _retreat(self, grip: np.ndarray) -> tuple[np.ndarray, Phase]:
        return self._start + [0.0, 0.0, _RETREAT_M], Phase.HOVER if self._steps > 25 else Phase.RETREAT

    def _missing(self) -> np.ndarray:
        return np.asarray((self._goal.box().centre - self._shape.box().centre)[:2])

    def _is_lost(self, grip: np.ndarray, too_low: float) -> bool:
        return bool(self._shape.box().low[2] < grip[2] - self._grasp.below - too_low)

    def _plan(self) -> Grasp:
        box = self._shape.box()
        if "bowl" not in self._name:
            return grasp_of_solid(box)
        others = {name: shape.box() for name, shape in self._others.items()}
        base = np.array(self._scene.data.body(_ROBOT_BASE).xpos[:2])
        return grasp_of_bowl(box, self._shape.rim(), others, base)


_TARGETS = {
    Phase.HOVER: PickAndPlace._hover,
    Phase.DOWN: PickAndPlace._down,
    Phase.CLOSE: PickAndPlace._close,
    Phase.LIFT: PickAndPlace._lift,
    Phase.CARRY: PickAndPlace._carry,
    Phase.LOWER: PickAndPlace._lower,
    Phase.OPEN: PickAndPlace._open,
    Phase.RETREAT: PickAndPlace._retreat,
}


class Goal:
    """Where the object goes: on an object, into the basket, or on a region of a fixture."""

    def __init__(self, scene: LiberoScene, name: str) -> None:
        # A basket's inner region says nothing about its walls, which the object must pass.
        self._basket = name.endswith("_contain_region")
        self._name = name.removesuffix("_contain_region")
        self._scene = scene
        self._shape = Shape(scene, self._name) if self._name in scene.bodies else None

    def box(self) -> Box:
        """Around the object or region, now."""
        return self._shape.box() if self._shape is not None else site_box(self._scene, self._name)

    def surface(self) -> float:
        """Height at which the object's lowest point is when the fingers open, m."""
        box = self.box()
        if self._basket:
            return float(box.high[2]) - _BELOW_WALL_M + _DROP_M
        if self._name.startswith("plate"):  # its rim is higher than where the bowl comes to rest
            return float(box.low[2]) + _ABOVE_PLATE_M
        return float(box.high[2] if self._shape is not None else box.low[2]) + _DROP_M


def grasp_of_solid(box: Box) -> Grasp:
    """Around the middle of an object that fills its `box`, across its narrow side."""
    (length, width, height), low, high = box.size, box.low[2], box.high[2]
    turned = not (width <= length + 0.012 or width < _WIDEST_M)
    grip = low + max(_LOWEST_GRIP_M, height / 2) if height < _THIN_M else max(high - _FINGER_REACH_M, box.centre[2])
    return Grasp(np.array([*box.centre[:2], grip]), np.pi / 2 if turned else 0.0, float(grip - low), float(high))


def grasp_of_bowl(box: Box, rim: np.ndarray, others: Mapping[str, Box], base: np.ndarray) -> Grasp:
    """One finger inside, one outside: at the side of the `rim` [V, 3] with most space, without a turn if possible.

    base: where the robot stands, [2]; a side beyond its easy reach loses.
    """
    in_drawer = any(
        "cabinet" in name and other.is_below_or_above(box.centre) and other.high[2] > box.low[2] + _OBSTACLE_M
        for name, other in others.items()
    )
    obstacles = [other for other in others.values() if other.high[2] > box.low[2] + _OBSTACLE_M]
    best, chosen = -np.inf, (np.zeros(3), 0.0)
    for yaw, towards in _SIDES:
        if in_drawer and yaw == 0.0:
            continue  # the hand is 20 cm wide along y, wider than the drawer
        side = np.array(towards)
        edge = rim[np.argmax(rim[:, :2] @ side)]
        point = np.where(side != 0.0, edge[:2] - _RIM_INSET_M * side, box.centre[:2])
        space = min([_ENOUGH_SPACE_M, *(one.sideways_distance(point + _OUTER_FINGER_M * side) for one in obstacles)])
        if not in_drawer:  # from there the near side was lost more often
            space -= _STRETCH_PENALTY * max(0.0, float(np.linalg.norm(point - base)) - _REACH_M)
        # Of two sides alike: the higher one of a tilted bowl, then +y.
        score = space - (_TURN_PENALTY_M if yaw else 0.0) + 0.5 * (edge[2] - box.high[2]) + 0.001 * side[1]
        if score > best:
            best, chosen = score, (np.array([*point, edge[2]]), yaw)
    point, yaw = chosen
    point[2] -= _RIM_GRIP_IN_DRAWER_M if in_drawer else _RIM_GRIP_M  # in a drawer the palm must stay over the cabinet
    return Grasp(point, yaw, float(point[2] - box.low[2]), float(box.high[2]))


def _about_z(angle: float) -> np.ndarray:
    cosine, sine = np.cos(angle), np.sin(angle)
    return np.array([[cosine, -sine, 0.0], [sine, cosine, 0.0], [0.0, 0.0, 1.0]])


def _rotation_vector(rotation: np.ndarray) -> np.ndarray:
    """Axis times angle (rad), float64 [3], of a rotation matrix [3, 3]; 0 also for half a turn, which has no sign."""
    axis = np.array([rotation[2, 1] - rotation[1, 2], rotation[0, 2] - rotation[2, 0], rotation[1, 0] - rotation[0, 1]])
    length = float(np.linalg.norm(axis))
    if length < 1e-9:
        return np.zeros(3)
    return axis / length * float(np.arccos(np.clip((np.trace(rotation) - 1.0) / 2.0, -1.0, 1.0)))
