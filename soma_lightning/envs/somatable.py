"""SomaTable: reach, push and pick on one table, with LIBERO's conventions and no files but `mujoco` itself.

Conventions are LIBERO's as measured there: a control step is 50 ms; +1 on a translation axis for ten steps moves the
hand about 0.10 m; the gripper follows the sign of the last component. Positions are metres in world axes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from soma_lightning.envs.base import (
    ACTION_DIM,
    EEF_POSITION,
    EEF_QUATERNION,
    FINGERS,
    MAIN_IMAGE,
    OBJECT_STATE,
    WRIST_IMAGE,
    StepOutcome,
    TaskEnv,
    TaskSpec,
    require_flags,
    require_known,
)
from soma_lightning.envs.rendering import check_gl
from soma_lightning.envs.somatable_scene import (
    CUBE_REST_M,
    DISC_HEIGHT_M,
    MAIN_CAMERA,
    TABLE_TOP_M,
    WRIST_CAMERA,
    TableScene,
    TableState,
)

if TYPE_CHECKING:
    from soma_lightning.contract import Statistics

ObsType = Literal["image", "state"]

SUBSTEPS = 12  # physics steps of 4 ms in one control step
SETTLE_STEPS = 10  # control steps with an open gripper and no command before the first observation
GAIN_M = 0.0145  # hand travel a control step per unit of action; LIBERO's arm moves this far for its nominal 0.05 m
GAIN_RAD = 0.145  # LIBERO's nominal 0.5 rad, scaled as the translation is
WORKSPACE_LOW_M, WORKSPACE_HIGH_M = np.array([-0.45, -0.55, 0.98]), np.array([0.45, 0.55, 1.40])
FINGER_OPEN_M = 0.04

OBJECT_AREA_M = ((-0.12, 0.20), (-0.20, 0.20))  # x and y range of cube and discs
OBJECT_SPACING_M = 0.11
PUSH_DISTANCE_M = 0.22  # push: the disc is at most this far from the cube
HOVER_M = 0.06  # reach targets lie this far above the cube's centre or the table top
REACH_RADIUS_M = 0.025
PUSH_RADIUS_M = 0.04
LIFT_M = 0.08

#: Init states 0..49 of this stream are the standard evaluation block; demonstrations use streams of their own.
EVALUATION_STREAM = 0
_INIT_STATE_PURPOSE = 1  # first word of every seed, so that no two uses of random numbers share one

#: The fixed state range that stands for q01 and q99: room around the workspace in position, narrow in rotation, so
#: that dimensions which stay constant stay constant after normalization.
STATE_LOW = (-0.3, -0.3, 0.88, 2.9, -0.2, -0.2, -0.01, -0.045)
STATE_HIGH = (0.35, 0.3, 1.15, 3.4, 0.2, 0.2, 0.045, 0.01)


@dataclass(frozen=True)
class TableTask(TaskSpec):
    """A task and the objects that it names; nothing else stands on the table."""

    objects: tuple[str, ...] = ()


TASKS: dict[str, TableTask] = {
    task.name: task
    for task in (
        TableTask("reach_cube", "reach the cube", 60, ("cube",)),
        TableTask("reach_green", "reach the green disc", 60, ("green",)),
        TableTask("reach_blue", "reach the blue disc", 60, ("blue",)),
        TableTask("push", "push the cube to the green disc", 120, ("cube", "green")),
        TableTask("pick", "pick up the cube", 90, ("cube",)),
    )
}


class SomaTable(TaskEnv[TableTask]):
    """A floating parallel gripper, a cube and two discs.

    image_size: side of both square images, pixels. obs_type: "image", or "state" for no images (and no OpenGL) but
    `object-state` float64 [7] = cube position, green and blue disc centres (x, y). stream: which family of init states.
    shaped_reward: adds the step's progress (0 at the start, 1 at the goal, as a difference, so the sum over an
    episode only depends on its ends) to the sparse 1 of success. end_on_success: the episode ends when the goal is
    reached; False goes on to the limit with `success` kept and the 1 paid once. lock_rotation: the hand keeps pointing
    down and the rotation part of actions has no effect; False turns the hand by 0.145 rad a step and unit.
    Raises ValueError for a setting out of range and ImportError with the install line when MuJoCo is missing.
    """

    name = "somatable"

    def __init__(
        self,
        *,
        image_size: int = 64,
        obs_type: ObsType = "image",
        stream: int = EVALUATION_STREAM,
        shaped_reward: bool = False,
        end_on_success: bool = True,
        lock_rotation: bool = True,
        scene: TableScene | None = None,
    ) -> None:
        require_known("obs_type", obs_type, get_args(ObsType))
        for name, value in (("image_size", image_size), ("stream", stream)):
            if not isinstance(value, int) or isinstance(value, bool):
                raise ValueError(f"{name}={value!r} must be a whole number")
        require_flags(shaped_reward=shaped_reward, end_on_success=end_on_success, lock_rotation=lock_rotation)
        if not 16 <= image_size <= 1024:
            raise ValueError(f"image_size={image_size} is outside 16..1024 pixels")
        if stream < 0:
            raise ValueError(f"stream={stream} is negative; streams of init states are numbered from 0")
        if scene is not None and scene.image_size != image_size:
            raise ValueError(f"image_size={image_size} differs from the shared scene's {scene.image_size}")
        self.tasks = dict(TASKS)
        self.image_size, self.obs_type, self.stream = image_size, obs_type, stream
        self.shaped_reward, self.end_on_success, self.lock_rotation = shaped_reward, end_on_success, lock_rotation
        if obs_type == "image":
            check_gl()
        self._scene = (scene or TableScene(image_size)).acquire()
        self._mujoco = self._scene.mujoco
        self._data: Any = self._mujoco.MjData(self._scene.model)
        self._steps = 0
        self._success = self._done = self._closed = False
        self._gripper_open = True
        self._progress = 0.0

    def sibling(self) -> SomaTable:
        return SomaTable(
            image_size=self.image_size,
            obs_type=self.obs_type,
            stream=self.stream,
            shaped_reward=self.shaped_reward,
            end_on_success=self.end_on_success,
            lock_rotation=self.lock_rotation,
            scene=self._scene,
        )

    def reset(self, task: str, init_state: int) -> None:
        """Starts `task` from init state `init_state` (any number from 0) of this environment's stream."""
        if self._closed:
            raise RuntimeError("this SomaTable is closed; make a new one")
        require_known("task", task, TASKS)
        if init_state < 0:
            raise ValueError(f"init_state={init_state} of task '{task}' is negative; init states are numbered from 0")
        self._task = TASKS[task]
        self._steps, self._success, self._done = 0, False, False
        self._place(self._task, init_state)
        self._gripper_open = True
        self._command_fingers()
        self._mujoco.mj_step(self._scene.model, self._data, SUBSTEPS * SETTLE_STEPS)
        self._progress = self._measure_progress()

    def step(self, action: np.ndarray) -> StepOutcome:
        """Executes one action, float [7] in -1..1 (clipped). ValueError for another shape or a non-finite value."""
        task = self._running_task()
        if self._done:
            raise RuntimeError(f"the episode of task '{task.name}' has ended after {self._steps} steps; reset first")
        action = np.asarray(action, dtype=np.float64)
        if action.shape != (ACTION_DIM,) or not np.isfinite(action).all():
            raise ValueError(f"an action must be {ACTION_DIM} finite numbers; got {action}")
        action = np.clip(action, -1.0, 1.0)
        self._move_hand_target(action)
        if abs(action[6]) > 1e-6:
            self._gripper_open = bool(action[6] < 0)
        self._command_fingers()
        self._mujoco.mj_step(self._scene.model, self._data, SUBSTEPS)
        self._steps += 1
        reached = self._reached(task)
        reward = self._reward_of_step(reached)
        terminated = self._success and self.end_on_success
        truncated = self._steps >= task.max_steps and not terminated
        self._done = terminated or truncated
        return StepOutcome(reward, self._success, terminated, truncated, at_goal=reached)

    def observe(self) -> dict[str, np.ndarray]:
        self._running_task()
        observation = {
            EEF_POSITION: self._data.site_xpos[self._scene.grip_site].copy(),
            EEF_QUATERNION: self._data.xquat[self._scene.hand_body][[1, 2, 3, 0]],  # MuJoCo stores w first
            FINGERS: self._data.qpos[self._scene.finger_qpos],
        }
        if self.obs_type == "state":
            state = self.table_state()
            observation[OBJECT_STATE] = np.concatenate([state.cube, state.green, state.blue])
        else:
            observation[MAIN_IMAGE] = self._scene.picture(self._data, MAIN_CAMERA)
            observation[WRIST_IMAGE] = self._scene.picture(self._data, WRIST_CAMERA)
        return observation

    def frame(self) -> np.ndarray:
        """The main camera's image, uint8 [image_size, image_size, 3]. RuntimeError with state observations."""
        self._running_task()
        if self.obs_type == "state":
            raise RuntimeError("obs_type='state' renders no images; make the environment with obs_type='image'")
        return self._scene.picture(self._data, MAIN_CAMERA)

    def table_state(self) -> TableState:
        """Where everything is: what no policy sees, but predicates, rewards and experts read."""
        self._running_task()
        data, scene = self._data, self._scene
        left, right = data.qpos[scene.finger_qpos]
        return TableState(
            grip=data.site_xpos[scene.grip_site].copy(),
            cube=data.xpos[scene.cube_body].copy(),
            green=data.mocap_pos[scene.green_disc][:2].copy(),
            blue=data.mocap_pos[scene.blue_disc][:2].copy(),
            opening=float(left - right),
        )

    def facts(self) -> dict[str, str]:
        """MuJoCo's version, and what draws the images ("nothing" with state observations)."""
        if self.obs_type == "state":
            return {"mujoco": str(self._mujoco.__version__), "gl": "nothing"}
        state = check_gl()
        return {"mujoco": state.mujoco_version, "gl": state.backend, "gl_renderer": state.renderer}

    def close(self) -> None:
        if not self._closed:
            self._closed, self._task = True, None
            self._scene.release()

    @staticmethod
    def statistics() -> Statistics:
        """Fixed normalization ranges of state [8] and action [7], in `contract.Statistics` form.

        q01 and q99 (and min and max) are the ends of the range; mean and std are those of a uniform distribution over
        it; count is 0, because nothing was measured.
        """
        return {
            "observation.state": _uniform_statistics(np.array(STATE_LOW), np.array(STATE_HIGH)),
            "action": _uniform_statistics(-np.ones(ACTION_DIM), np.ones(ACTION_DIM)),
        }

    def _place(self, task: TableTask, init_state: int) -> None:
        data, scene = self._data, self._scene
        seed = (_INIT_STATE_PURPOSE, self.stream, list(TASKS).index(task.name), init_state)
        cube, green, blue, hand = _draw_layout(np.random.default_rng(seed), near_disc=task.name == "push")
        self._mujoco.mj_resetData(scene.model, data)
        data.qpos[scene.hand_qpos : scene.hand_qpos + 3] = hand
        data.mocap_pos[scene.hand_target] = hand
        data.qpos[scene.finger_qpos] = [FINGER_OPEN_M, -FINGER_OPEN_M]
        # An object that the task does not name lies on the floor behind the camera.
        if "cube" in task.objects:
            data.qpos[scene.cube_qpos : scene.cube_qpos + 2] = cube
        else:
            data.qpos[scene.cube_qpos : scene.cube_qpos + 3] = [1.6, 0.0, 0.022]
        data.mocap_pos[scene.green_disc] = [*green, DISC_HEIGHT_M] if "green" in task.objects else [1.7, 0.2, 0.5]
        data.mocap_pos[scene.blue_disc] = [*blue, DISC_HEIGHT_M] if "blue" in task.objects else [1.7, -0.2, 0.5]

    def _move_hand_target(self, action: np.ndarray) -> None:
        data, scene = self._data, self._scene
        wanted = data.xpos[scene.hand_body] + GAIN_M * action[:3]
        data.mocap_pos[scene.hand_target] = np.clip(wanted, WORKSPACE_LOW_M, WORKSPACE_HIGH_M)
        angle = float(np.linalg.norm(action[3:6]))
        if self.lock_rotation or angle < 1e-9:
            return
        turn, turned = np.empty(4), np.empty(4)
        self._mujoco.mju_axisAngle2Quat(turn, action[3:6] / angle, GAIN_RAD * angle)
        self._mujoco.mju_mulQuat(turned, turn, data.xquat[scene.hand_body])
        data.mocap_quat[scene.hand_target] = turned

    def _command_fingers(self) -> None:
        width = FINGER_OPEN_M if self._gripper_open else 0.0
        self._data.ctrl[:] = [width, -width]

    def _reward_of_step(self, reached: bool) -> float:
        reward = float(reached and not self._success)
        self._success = self._success or reached
        if self.shaped_reward:
            progress = self._measure_progress()
            reward += progress - self._progress
            self._progress = progress
        return reward

    def _reached(self, task: TableTask) -> bool:
        state = self.table_state()
        if task.name == "push":
            close = np.linalg.norm(state.cube[:2] - state.green) < PUSH_RADIUS_M
            return bool(close and state.cube[2] < TABLE_TOP_M + 0.05)
        if task.name == "pick":
            return bool(state.cube[2] > CUBE_REST_M + LIFT_M)
        return bool(np.linalg.norm(state.grip - reach_target(task.name, state)) < REACH_RADIUS_M)

    def _measure_progress(self) -> float:
        """0..1, rising towards the running task's goal; smooth, for `shaped_reward`."""
        task, state = self._running_task(), self.table_state()
        if task.name == "push":
            approach = _closeness(state.grip - state.cube)
            return 0.3 * approach + 0.7 * _closeness(np.append(state.cube[:2] - state.green, 0.0))
        if task.name == "pick":
            lifted = float(np.clip((state.cube[2] - CUBE_REST_M) / LIFT_M, 0.0, 1.0))
            return 0.5 * _closeness(state.grip - state.cube) + 0.5 * lifted
        return _closeness(state.grip - reach_target(task.name, state))


def reach_target(task: str, state: TableState) -> np.ndarray:
    """Where the grip must be in a reach task, float64 [3], m."""
    if task == "reach_cube":
        return np.asarray(state.cube + np.array([0.0, 0.0, HOVER_M]))
    disc = {"reach_green": state.green, "reach_blue": state.blue}[task]
    return np.array([*disc, TABLE_TOP_M + HOVER_M])


def _draw_layout(
    generator: np.random.Generator, *, near_disc: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Cube, green disc, blue disc (x, y) and hand (x, y, z). All three objects are drawn whether shown or not."""
    (x_low, x_high), (y_low, y_high) = OBJECT_AREA_M
    while True:
        cube, green, blue = generator.uniform((x_low, y_low), (x_high, y_high), size=(3, 2))
        distances = [np.linalg.norm(a - b) for a, b in ((cube, green), (cube, blue), (green, blue))]
        if min(distances) > OBJECT_SPACING_M and (not near_disc or distances[0] < PUSH_DISTANCE_M):
            break
    hand = np.array([-0.2, 0.0, 1.15]) + generator.uniform(-1.0, 1.0, size=3) * np.array([0.04, 0.10, 0.03])
    return cube, green, blue, hand


def _closeness(offset: np.ndarray) -> float:
    """1 at distance 0, about 0.24 at 0.2 m."""
    return float(1.0 - np.tanh(5.0 * np.linalg.norm(offset)))


def _uniform_statistics(low: np.ndarray, high: np.ndarray) -> dict[str, np.ndarray]:
    return {
        "mean": (low + high) / 2.0,
        "std": (high - low) / np.sqrt(12.0),
        "min": low,
        "max": high,
        "q01": low,
        "q99": high,
        "count": np.zeros(1, dtype=np.int64),
    }
