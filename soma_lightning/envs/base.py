"""What every simulated environment and every group of environments promises.

Shape letters: N slots or observations, K executed steps, S state dimensions, h/w image height/width. This module needs
numpy only: a worker process of an environment never imports torch.
"""

from __future__ import annotations

import difflib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, Self, TypeVar, cast

import numpy as np

if TYPE_CHECKING:
    from soma_lightning.contract import EnvObservation

MAIN_IMAGE = "agentview_image"
WRIST_IMAGE = "robot0_eye_in_hand_image"
EEF_POSITION = "robot0_eef_pos"
EEF_QUATERNION = "robot0_eef_quat"
FINGERS = "robot0_gripper_qpos"
#: Present only in environments of state observations; appended to the state by `batch_observations`.
OBJECT_STATE = "object-state"
#: Present only in environments without an arm: the whole state as the policy reads it.
WHOLE_STATE = "state"

ACTION_DIM = 7
#: Values of an action's last component.
OPEN, CLOSED = -1.0, 1.0


@dataclass(frozen=True)
class TaskSpec:
    """One task: its name, the English instruction a policy reads, and the steps after which an episode is cut off.

    num_init_states: how many initial states there are, numbered from 0; None: as many as one likes.
    """

    name: str
    instruction: str
    max_steps: int
    num_init_states: int | None = field(default=None, kw_only=True)


@dataclass
class StepOutcome:
    """What one control step gave. `success` stays True once the goal was reached in this episode.

    at_goal: whether the goal holds after this very step; None when the environment does not tell.
    """

    reward: float
    success: bool
    terminated: bool
    truncated: bool
    at_goal: bool | None = None

    @property
    def done(self) -> bool:
        return self.terminated or self.truncated


TaskT = TypeVar("TaskT", bound=TaskSpec)


class ManipulationEnv(ABC):
    """One simulated arm with LIBERO's conventions, at 20 control steps a second.

    Actions: float [7] in -1..1 = translation (3), rotation vector (3), gripper (-1 opens, +1 closes, 0 holds); values
    outside are clipped. Observations use LIBERO's names, but images are already turned the way the policies want them:
    upright and mirrored left to right (the 180 degree rotation of LIBERO's upside-down raw images).
    """

    name: str
    tasks: dict[str, TaskSpec]
    #: Numbers in one action.
    action_dim: ClassVar[int] = ACTION_DIM
    #: Memory (GB) of one environment that needs a process and a core of its own; 0 where many fit into one process.
    process_memory_gb: ClassVar[float] = 0.0
    #: Setting without a default -> what it may be, for whoever left it out.
    setting_choices: ClassVar[Mapping[str, Sequence[str]]] = {}

    @abstractmethod
    def reset(self, task: str, init_state: int) -> None:
        """Starts an episode of `task` from init state `init_state`. ValueError for an unknown task or init state."""

    @abstractmethod
    def step(self, action: np.ndarray) -> StepOutcome:
        """Executes one action, float [7]. RuntimeError before `reset` and after the episode's end."""

    @abstractmethod
    def observe(self) -> dict[str, np.ndarray]:
        """The current observation.

        agentview_image, robot0_eye_in_hand_image: uint8 [h, w, 3]; robot0_eef_pos: float64 [3], m;
        robot0_eef_quat: float64 [4], x y z w; robot0_gripper_qpos: float64 [2], m, second finger negative.
        """

    @abstractmethod
    def frame(self) -> np.ndarray:
        """The main camera's image for a video, uint8 [h, w, 3]."""

    @property
    @abstractmethod
    def instruction(self) -> str:
        """The running task's instruction."""

    @abstractmethod
    def close(self) -> None:
        """Frees simulator and renderer; a second call does nothing."""

    def facts(self) -> dict[str, str]:
        """Versions of the simulator and what draws the images, for reports."""
        return {}

    def sibling(self) -> ManipulationEnv | None:
        """Another environment of the same settings that shares what both only read; None when nothing can be shared."""
        return None


class TaskEnv(ManipulationEnv, Generic[TaskT]):
    """An environment that keeps the running episode's task in `_task`; None before the first `reset`."""

    _task: TaskT | None = None

    @property
    def instruction(self) -> str:
        return self._running_task().instruction

    @property
    def task(self) -> str:
        """The running task's name."""
        return self._running_task().name

    def _running_task(self) -> TaskT:
        if self._task is None:
            raise RuntimeError("no episode is running; call reset(task, init_state) first")
        return self._task


@dataclass(frozen=True)
class DisturbanceModel:
    """How recordings disturb an expert's actions.

    noise: standard deviation of the translation, action units, unless the recording sets another. rotation: the
    rotation's, as a share of it. push_probability: that a push begins in a step.
    """

    noise: float = 0.25
    rotation: float = 0.0
    push_probability: float = 0.03


class ScriptedExpert(ABC):
    """Solves an environment's tasks by looking at the whole scene; built with the environment that it acts in.

    It may remember what it is doing, so it is reset with every episode. It draws no random numbers.
    """

    disturbance: ClassVar[DisturbanceModel] = DisturbanceModel()

    @abstractmethod
    def __init__(self, env: Any) -> None: ...

    @classmethod
    @abstractmethod
    def tasks(cls, settings: Mapping[str, Any]) -> Mapping[str, TaskSpec]:
        """The tasks with an expert in an environment of these settings; ValueError for settings that it refuses."""

    @classmethod
    @abstractmethod
    def recording_settings(cls, seed: int) -> dict[str, Any]:
        """Settings of the environment that recordings with `seed` add to the user's."""

    @abstractmethod
    def reset(self) -> None:
        """Starts with the episode that the environment just started. ValueError for a task without an expert."""

    @abstractmethod
    def act(self) -> np.ndarray:
        """The action for the scene as it is now, float32 [7] in -1..1; called once a step."""

    def may_be_pushed(self) -> bool:
        """Whether a push may begin with the next action; False where it would only spoil the attempt."""
        return True


@dataclass(frozen=True)
class Episode:
    """Which episode a slot runs."""

    task: str
    init_state: int


@dataclass
class ChunkOutcome:
    """What executing one action chunk gave.

    `steps` control steps were executed (fewer than the chunk has when the episode ended inside it); `reward` is their
    sum; `frames` holds one image after each of them when recording was asked for. steps_to_success: the step of the
    chunk, from 1, after which `success` was first true. at_goal, truncated: as in the last `StepOutcome`.
    """

    success: bool
    done: bool
    steps: int
    reward: float
    frames: list[np.ndarray] | None
    steps_to_success: int | None = None
    at_goal: bool | None = None
    truncated: bool = False


class EnvGroup(Protocol):
    """Several environments that a policy sees as one batch: a slot runs one episode at a time."""

    @property
    def num_slots(self) -> int: ...

    @property
    def tasks(self) -> Mapping[str, TaskSpec]: ...

    @property
    def action_dim(self) -> int:
        """Numbers in one action, A below."""

    def facts(self) -> Mapping[str, str]:
        """`ManipulationEnv.facts` of one environment of the group."""

    def reset(self, slots: Sequence[int], episodes: Sequence[Episode]) -> None:
        """Starts `episodes[i]` in `slots[i]`."""

    def start(self, slots: Sequence[int], episodes: Sequence[Episode]) -> None:
        """As `reset`, without waiting for the simulators; `ready` tells which have come so far."""

    def ready(self, slots: Sequence[int]) -> list[int]:
        """Those of `slots` whose episode runs, in their order; waits until there is one."""

    def observe(self, slots: Sequence[int]) -> EnvObservation:
        """The batched observation of `slots`, in their order."""

    def execute(
        self, slots: Sequence[int], actions: np.ndarray, record: Sequence[bool] | None = None
    ) -> list[ChunkOutcome]:
        """Executes `actions` float32 [len(slots), K, A], each slot up to its episode's end."""

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def axis_angle(quaternion: np.ndarray) -> np.ndarray:
    """Rotation vector float64 [3] (rad) of a unit quaternion [4] x y z w.

    The quaternion's sign is kept: with w slightly negative the angle exceeds pi, and released LIBERO policies were
    trained on that. A converter that makes w positive first would turn (3.15, ...) into (-3.13, ...).
    """
    w = float(np.clip(quaternion[3], -1.0, 1.0))
    sine = math.sqrt(1.0 - w * w)
    if sine < 1e-9:
        return np.zeros(3)
    return np.asarray(quaternion[:3], dtype=np.float64) / sine * (2.0 * math.acos(w))


def state_of(observation: Mapping[str, np.ndarray]) -> np.ndarray:
    """The robot's state, float32 [8]: position (m), axis-angle without sign change (rad), two fingers (m)."""
    return np.concatenate(
        [observation[EEF_POSITION], axis_angle(observation[EEF_QUATERNION]), observation[FINGERS]]
    ).astype(np.float32)


def batch_observations(observations: Iterable[tuple[Mapping[str, np.ndarray], str]]) -> EnvObservation:
    """Stacks pairs of (observation, instruction) into one batch of numpy arrays.

    states: float32 [N, 8], or [N, 8 + objects] where the observations carry `object-state`, or what they carry as
    `state`; such observations have no images and `main_images` is None. ValueError for an empty list.
    """
    pairs = list(observations)
    if not pairs:
        raise ValueError("there is no observation to batch: give at least one slot")
    states = [_policy_state(one) for one, _ in pairs]
    batch: dict[str, object] = {
        "main_images": _stacked_images(pairs, MAIN_IMAGE),
        "states": np.stack(states),
        "task_descriptions": [instruction for _, instruction in pairs],
        "wrist_images": _stacked_images(pairs, WRIST_IMAGE),
    }
    return cast("EnvObservation", batch)


def _policy_state(observation: Mapping[str, np.ndarray]) -> np.ndarray:
    if WHOLE_STATE in observation:
        return np.asarray(observation[WHOLE_STATE], np.float32)
    robot = state_of(observation)
    objects = observation.get(OBJECT_STATE)
    return robot if objects is None else np.concatenate([robot, objects.astype(np.float32)])


def _stacked_images(pairs: Sequence[tuple[Mapping[str, np.ndarray], str]], key: str) -> np.ndarray | None:
    if key not in pairs[0][0]:
        return None
    return np.stack([one[key] for one, _ in pairs])


def require_flags(**settings: object) -> None:
    """Raises ValueError naming the first of `settings` that is neither True nor False ("false" would count as true)."""
    for name, value in settings.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name}={value!r} must be True or False")


def require_known(kind: str, name: str, known: Iterable[str]) -> None:
    """Raises ValueError that lists `known` and the nearest of them unless `name` is one of them."""
    names = list(known)
    if name in names:
        return
    nearest = difflib.get_close_matches(str(name), names, n=1, cutoff=0.4)
    hint = f" Did you mean '{nearest[0]}'?" if nearest else ""
    raise ValueError(f"unknown {kind} '{name}'; known: {', '.join(names)}.{hint}")
