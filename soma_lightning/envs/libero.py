"""LiberoEnv: the tasks of one LIBERO suite with the conventions that released policies were trained with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import ClassVar

import numpy as np

from soma_lightning.envs.base import (
    ACTION_DIM,
    EEF_POSITION,
    EEF_QUATERNION,
    FINGERS,
    MAIN_IMAGE,
    WRIST_IMAGE,
    StepOutcome,
    TaskEnv,
    TaskSpec,
    require_flags,
    require_known,
)
from soma_lightning.envs.libero_conventions import IMAGE_ROTATION, turn_half
from soma_lightning.envs.libero_geometry import LiberoScene
from soma_lightning.envs.libero_package import benchmark_version
from soma_lightning.envs.libero_simulator import LiberoSimulator
from soma_lightning.envs.libero_suites import MAX_STEPS, NUM_INIT_STATES, LiberoSuite, select_tasks
from soma_lightning.envs.rendering import check_gl

MAIN_CAMERA, WRIST_CAMERA = MAIN_IMAGE.removesuffix("_image"), WRIST_IMAGE.removesuffix("_image")
_OPEN_AND_WAIT = np.array([0.0] * 6 + [-1.0])


class LiberoEnv(TaskEnv[TaskSpec]):
    """One suite of LIBERO; the simulator of a task is built by the first `reset` to it, one at a time.

    suite: "libero_spatial", "libero_object", "libero_goal", "libero_10" or "libero_90". task_numbers: which of its
    tasks, as papers count them (from 0); None for all. image_size: side of the square images, pixels. cameras: which
    of "agentview" and "robot0_eye_in_hand" are drawn; without any, no OpenGL context is made. max_steps: policy steps
    before an episode is cut off; None takes the suite's limit. settle_steps: control steps with an open gripper and no
    motion before the first observation; they do not count. end_on_success: the episode ends when the goal is reached;
    False goes on to the limit with `success` kept and nothing more paid. hard_reset: load the model anew in every
    reset, as reported evaluations need; False is ten times faster and not exactly repeatable. reflections: draw mirror
    images on the table; multisampling: smooth edges; both as the public data sets have them. seed: initial states say
    nothing about cabinets, stoves and racks, whose place LIBERO draws (within 2 cm); episode k draws from seed + k, so
    it is the same in every run. stream: which family of initial states; 0 is the benchmark's own, another one is drawn
    by LIBERO's rules for the task, as for its human demonstrations: any number of states that no evaluation uses.
    assets_root: LIBERO's folder `assets`; None finds an installed one.

    Raises ValueError for a setting out of range, ImportError and FileNotFoundError with the install line when LIBERO
    or its assets are missing.
    """

    name = "libero"
    process_memory_gb = 2.5
    setting_choices: ClassVar[Mapping[str, Sequence[str]]] = {"suite": tuple(MAX_STEPS)}
    image_rotation = IMAGE_ROTATION

    def __init__(
        self,
        suite: str,
        *,
        task_numbers: Sequence[int] | None = None,
        image_size: int = 256,
        cameras: Sequence[str] = (MAIN_CAMERA, WRIST_CAMERA),
        max_steps: int | None = None,
        settle_steps: int = 10,
        end_on_success: bool = True,
        hard_reset: bool = True,
        reflections: bool = True,
        multisampling: bool = True,
        seed: int = 7,
        stream: int = 0,
        assets_root: str | Path | None = None,
    ) -> None:
        limits = {
            "image_size": (image_size, 16, 1024),
            "settle_steps": (settle_steps, 0, 1000),
            "seed": (seed, 0, 2**31),
            "stream": (stream, 0, 2**31),
        }
        if max_steps is not None:
            limits["max_steps"] = (max_steps, 1, 100_000)
        _check_numbers(limits)
        require_flags(
            end_on_success=end_on_success, hard_reset=hard_reset, reflections=reflections, multisampling=multisampling
        )
        _check_cameras(cameras)
        if assets_root is not None and not isinstance(assets_root, str | Path):
            raise ValueError(f"assets_root={assets_root!r} must be the path of LIBERO's folder `assets`")
        self._suite = LiberoSuite(suite, assets_root=assets_root)
        chosen = select_tasks(self._suite.tasks, task_numbers)
        self._bddl_files = {name: task.bddl_file for name, task in chosen.items()}
        self.tasks = {
            name: TaskSpec(
                name, task.instruction, max_steps or task.max_steps, num_init_states=None if stream else NUM_INIT_STATES
            )
            for name, task in chosen.items()
        }
        self.assets_root = assets_root
        self.suite, self.image_size, self.cameras = suite, image_size, tuple(cameras)
        self.settle_steps, self.end_on_success, self.seed = settle_steps, end_on_success, seed
        self.hard_reset, self.reflections, self.multisampling = hard_reset, reflections, multisampling
        self.stream = stream
        self._init_states: dict[str, np.ndarray] = {}
        self._simulator: LiberoSimulator | None = None
        self._simulated: str | None = None  # the task that the simulator was built for
        self._raw: dict[str, np.ndarray] = {}
        self._steps = 0
        self._success = self._done = self._closed = False

    def reset(self, task: str, init_state: int) -> None:
        """Starts `task` from `init_state` (0..49 of stream 0, any number of another one) and lets the objects settle.

        Raises ValueError for an unknown task or initial state, RuntimeError when LIBERO cannot place its objects, and
        whatever the simulator raises; none of them is tried again for ever.
        """
        if self._closed:
            raise RuntimeError("this LiberoEnv is closed; make a new one")
        require_known("task", task, self.tasks)
        state, seed = self._start(task, init_state)
        self._task = None
        try:
            simulator = self._simulator_of(task)
            self._raw = simulator.reset(state, seed)
            for _ in range(self.settle_steps):
                self._raw, _ = simulator.step(_OPEN_AND_WAIT)
        except BaseException:
            self._drop_simulator()  # half reset, it must not be used again
            raise
        self._task = self.tasks[task]
        self._steps, self._success, self._done = 0, False, False

    def step(self, action: np.ndarray) -> StepOutcome:
        """Executes one action, float [7] in -1..1 (clipped). ValueError for another shape or a non-finite value."""
        task = self._running_task()
        assert self._simulator is not None
        if self._done:
            raise RuntimeError(f"the episode of task '{task.name}' has ended after {self._steps} steps; reset first")
        action = np.asarray(action, dtype=np.float64)
        if action.shape != (ACTION_DIM,) or not np.isfinite(action).all():
            raise ValueError(f"an action must be {ACTION_DIM} finite numbers; got {action}")
        self._raw, reached = self._simulator.step(np.clip(action, -1.0, 1.0))
        self._steps += 1
        reward = float(reached and not self._success)
        self._success = self._success or reached
        terminated = self._success and self.end_on_success
        truncated = self._steps >= task.max_steps and not terminated
        self._done = terminated or truncated
        return StepOutcome(reward, self._success, terminated, truncated, at_goal=reached)

    def observe(self) -> dict[str, np.ndarray]:
        """As `ManipulationEnv.observe`; images of `cameras` only, drawn by this call."""
        self._running_task()
        observation = {key: np.array(self._raw[key], np.float64) for key in (EEF_POSITION, EEF_QUATERNION, FINGERS)}
        for camera in self.cameras:
            observation[f"{camera}_image"] = self._picture(camera)
        return observation

    def frame(self) -> np.ndarray:
        """The main camera's image, uint8 [image_size, image_size, 3]. RuntimeError without cameras."""
        self._running_task()
        if not self.cameras:
            raise RuntimeError("cameras=[] draws no images; name 'agentview' to record them")
        return self._picture(MAIN_CAMERA)

    def simulator_state(self) -> np.ndarray:
        """Time, positions and velocities of the whole scene, float64 [D]: what initial states are made of."""
        self._running_task()
        assert self._simulator is not None
        return self._simulator.state()

    def scene(self) -> LiberoScene:
        """The whole scene, for scripted experts; valid until the next `reset`."""
        self._running_task()
        assert self._simulator is not None
        return self._simulator.scene()

    def facts(self) -> dict[str, str]:
        """Versions of benchmark and simulator, and what draws the images ("nothing" without cameras)."""
        found = {"benchmark": benchmark_version(), **{name: version(name) for name in ("robosuite", "mujoco")}}
        if not self.cameras:
            return {**found, "gl": "nothing"}
        state = check_gl()
        return {**found, "gl": state.backend, "gl_renderer": state.renderer}

    def close(self) -> None:
        if not self._closed:
            self._closed, self._task = True, None
            self._drop_simulator()

    def _start(self, task: str, init_state: int) -> tuple[np.ndarray | None, int]:
        """The state of the objects, None where they are drawn, and the seed of what is drawn."""
        if self.stream:
            if init_state < 0:
                raise ValueError(f"init_state={init_state} of task '{task}' is negative; initial states count from 0")
            words = np.random.SeedSequence((self.stream, self.seed, init_state)).generate_state(1)
            return None, int(words[0])
        if task not in self._init_states:
            self._init_states[task] = self._suite.init_states(task)
        states = self._init_states[task]
        if not 0 <= init_state < len(states):
            raise ValueError(f"init_state={init_state} of task '{task}' does not exist; it has 0..{len(states) - 1}")
        return states[init_state], self.seed + init_state

    def _simulator_of(self, task: str) -> LiberoSimulator:
        if self._simulator is None or self._simulated != task:
            self._drop_simulator()
            self._simulator = LiberoSimulator(
                self._bddl_files[task],
                image_size=self.image_size if self.cameras else None,
                hard_reset=self.hard_reset,
                reflections=self.reflections,
                multisampling=self.multisampling,
            )
            self._simulated = task
        return self._simulator

    def _drop_simulator(self) -> None:
        if self._simulator is not None:
            self._simulator.close()
        self._simulator = self._simulated = None

    def _picture(self, camera: str) -> np.ndarray:
        assert self._simulator is not None
        return turn_half(self._simulator.picture(camera))


def _check_numbers(limits: dict[str, tuple[int, int, int]]) -> None:
    for name, (value, low, high) in limits.items():
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(f"{name}={value!r} must be a whole number")
        if not low <= value <= high:
            raise ValueError(f"{name}={value} is outside {low}..{high}")


def _check_cameras(cameras: Sequence[str]) -> None:
    if isinstance(cameras, str) or not isinstance(cameras, Sequence):
        raise ValueError(f"cameras={cameras!r} must be a list, such as ['{MAIN_CAMERA}']; [] draws nothing")
    for camera in cameras:
        require_known("camera", camera, (MAIN_CAMERA, WRIST_CAMERA))
    if cameras and (MAIN_CAMERA not in cameras or len(set(cameras)) != len(cameras)):
        raise ValueError(f"cameras={list(cameras)} must hold '{MAIN_CAMERA}', none twice; [] draws nothing")
