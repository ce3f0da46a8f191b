"""How demonstrations are recorded: successful attempts of the scripted experts, in order, into a data set writer.

The result depends on settings and seed alone, not on the number of worker processes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.metadata import version
from typing import Any, Protocol

import numpy as np

from soma_lightning import __version__
from soma_lightning.contract import ACTION, CAMERA_OF_OBSERVATION, STATE
from soma_lightning.envs.attempts import AttemptStore
from soma_lightning.envs.base import ACTION_DIM, MAIN_IMAGE, WRIST_IMAGE, require_known
from soma_lightning.envs.recorder import Recorder, Rollout
from soma_lightning.envs.registry import EnvSpec, expert_class
from soma_lightning.envs.worker import Worker, WorkerError, WorkerFailure, ordered_results

FPS = 20
#: An attempt in LIBERO takes a minute or two where drawing is slow, and several where cores are shared, too.
TIMEOUT_S = 600.0
_MAIN_CAMERA, _WRIST_CAMERA = CAMERA_OF_OBSERVATION["main_images"], CAMERA_OF_OBSERVATION["wrist_images"]
_STATE_NAMES = ["x", "y", "z", "axis_angle_x", "axis_angle_y", "axis_angle_z", "left_finger", "right_finger"]
_ACTION_NAMES = ["dx", "dy", "dz", "rotation_x", "rotation_y", "rotation_z", "gripper"]
#: A task is given up after this many attempts: an expert that rarely succeeds makes poor teaching.
_MIN_ATTEMPTS, _ATTEMPTS_PER_EPISODE = 20, 5
_REPORTS_PER_TASK = 5


class EpisodeWriter(Protocol):
    """Where episodes go (`LeRobotWriter`, or a list in tests)."""

    def add_episode(self, frames: Mapping[str, np.ndarray], task: str) -> None: ...


@dataclass(frozen=True)
class TaskSummary:
    """What recording one task took. init_states: those of the kept episodes, in the data set's order."""

    task: str
    instruction: str
    attempts: int
    init_states: list[int]

    @property
    def success_rate(self) -> float:
        return len(self.init_states) / self.attempts


@dataclass
class RecordingSummary:
    """How a data set was made; enough to make it again."""

    environment: str
    settings: dict[str, Any]
    seed: int
    init_state_stream: int
    noise: float
    tasks: list[TaskSummary] = field(default_factory=list)
    num_frames: int = 0

    def to_dict(self) -> dict[str, Any]:
        """The same as plain JSON types, with each task's success rate."""
        tasks = [{**asdict(task), "success_rate": task.success_rate} for task in self.tasks]
        return {**asdict(self), "tasks": tasks}


def demonstration_features(image_size: int, *, videos: bool = False) -> dict[str, dict[str, Any]]:
    """The data set's features, as `LeRobotWriter` takes them. videos: cameras as video instead of embedded images."""
    dtype = "video" if videos else "image"
    image = {"dtype": dtype, "shape": (image_size, image_size, 3), "names": ["height", "width", "channel"]}
    return {
        _MAIN_CAMERA: image,
        _WRIST_CAMERA: dict(image),
        STATE: {"dtype": "float32", "shape": (len(_STATE_NAMES),), "names": _STATE_NAMES},
        ACTION: {"dtype": "float32", "shape": (ACTION_DIM,), "names": _ACTION_NAMES},
    }


def record_demonstrations(
    spec: EnvSpec,
    tasks: Sequence[str],
    *,
    episodes: int,
    writer: EpisodeWriter,
    seed: int = 0,
    noise: float | None = None,
    workers: int = 1,
    timeout_s: float | None = None,
    store: AttemptStore | None = None,
    report: Callable[[str], None] = print,
) -> RecordingSummary:
    """Records `episodes` successful demonstrations of every task and hands them to `writer`, task by task.

    noise: standard deviation of the disturbance, action units; None: the expert's own. The stored actions are the
    expert's clean ones. workers: 1 records in this process, more in that many spawned ones; the result is the same.
    timeout_s: the longest one attempt may take in a worker; None: TIMEOUT_S. store: where finished attempts are kept,
    and those of an earlier run found. report: receives lines of progress.

    Raises ValueError for unknown names and values out of range, RuntimeError when a task succeeds so rarely that
    `episodes` are not reached within five times as many attempts, WorkerError when a worker fails.
    """
    check_recording(spec, tasks, episodes=episodes, seed=seed, noise=noise, workers=workers, timeout_s=timeout_s)
    stream = expert_class(spec.name).recording_settings(seed)["stream"]
    noise = recording_noise(spec, noise)
    summary = RecordingSummary(spec.name, dict(spec.settings), seed, stream, noise)
    with _attempts(partial(Recorder, spec, seed, noise), workers, timeout_s or TIMEOUT_S) as made:
        attempts_of = made if store is None else partial(_kept_attempts, store, made)
        for task in tasks:
            summary.num_frames += _record_task(task, episodes, attempts_of, writer, summary.tasks, report)
    return summary


def recording_noise(spec: EnvSpec, noise: float | None) -> float:
    """The disturbance's standard deviation, action units: `noise`, or the expert's own for None."""
    return expert_class(spec.name).disturbance.noise if noise is None else noise


def recording_identity(spec: EnvSpec, *, seed: int, noise: float | None) -> dict[str, Any]:
    """What an attempt depends on besides task and number, for an `AttemptStore`."""
    return {
        "environment": spec.name,
        "settings": dict(spec.settings),
        "seed": seed,
        "noise": recording_noise(spec, noise),
        "versions": {"soma-lightning": __version__, "mujoco": version("mujoco")},
    }


def check_recording(
    spec: EnvSpec,
    tasks: Sequence[str],
    *,
    episodes: int,
    seed: int,
    noise: float | None,
    workers: int,
    timeout_s: float | None = None,
) -> None:
    """Raises ValueError for settings that `record_demonstrations` cannot work with, before anything is started."""
    expert = expert_class(spec.name)
    known = expert.tasks(spec.settings)
    if not tasks:
        raise ValueError(f"no task was named; known: {', '.join(known)}")
    if not known:
        raise ValueError(
            f"no task of environment '{spec.name}' with the settings {dict(spec.settings)} has a scripted expert; "
            "choose others"
        )
    for task in tasks:
        require_known("task with a scripted expert", task, known)
    if len(set(tasks)) != len(tasks):
        raise ValueError(f"tasks {list(tasks)} name one task twice; raise episodes instead")
    for name, value, least in (
        ("episodes", episodes, 1),
        ("seed", seed, 0),
        ("noise", noise, 0),
        ("workers", workers, 1),
    ):
        if value is not None and value < least:
            raise ValueError(f"{name}={value} must be at least {least}")
    if timeout_s is not None and (timeout_s <= 0 or workers == 1):
        raise ValueError(f"timeout_s={timeout_s} must be above 0 seconds, and works with workers above 1")
    for setting in expert.recording_settings(seed):
        if setting in spec.settings:
            raise ValueError(
                f"{setting} is set by the seed of the recording; leave it out of the environment's settings"
            )
    if spec.settings.get("obs_type", "image") != "image":
        raise ValueError("demonstrations hold images; leave obs_type at 'image'")
    if not spec.settings.get("hard_reset", True):
        raise ValueError(
            "hard_reset=False makes an attempt depend on those before it, and a recording must not depend on the "
            "number of workers; leave it out"
        )
    cameras = spec.settings.get("cameras", (MAIN_IMAGE, WRIST_IMAGE))
    if not isinstance(cameras, Sequence) or len(cameras) < 2:
        raise ValueError(f"demonstrations hold both cameras' images; leave out cameras={spec.settings['cameras']}")


#: (task, numbers) -> the results of these attempts, in their order.
_AttemptsOf = Callable[[str, Iterable[int]], Iterator[Rollout | None]]


def _record_task(
    task: str,
    episodes: int,
    attempts_of: _AttemptsOf,
    writer: EpisodeWriter,
    summaries: list[TaskSummary],
    report: Callable[[str], None],
) -> int:
    """Records one task, appends its summary, and returns the number of frames."""
    limit = max(_MIN_ATTEMPTS, _ATTEMPTS_PER_EPISODE * episodes)
    every = max(1, episodes // _REPORTS_PER_TASK)
    begin, frames, attempts = time.monotonic(), 0, 0
    kept: list[int] = []
    report(f"{task}: {episodes} demonstrations wanted")  # a simulator may need a minute to its first one
    for rollout in _first_successes(task, episodes, limit, attempts_of):
        attempts += 1
        if rollout is None:
            continue
        writer.add_episode(_frames_of(rollout), rollout.instruction)
        kept.append(rollout.init_state)
        instruction = rollout.instruction
        frames += len(rollout)
        if len(kept) % every == 0 or len(kept) == episodes:
            progress = f"{len(kept)}/{episodes} demonstrations of {attempts} attempts"
            report(f"{task}: {progress}, {frames} frames, {time.monotonic() - begin:.1f} s")
    if len(kept) < episodes:
        raise RuntimeError(
            f"only {len(kept)} of {attempts} attempts of task '{task}' succeeded, {episodes} were asked for; "
            "lower the noise"
        )
    summaries.append(TaskSummary(task, instruction, attempts, kept))
    return frames


def _first_successes(task: str, episodes: int, limit: int, attempts_of: _AttemptsOf) -> Iterator[Rollout | None]:
    """Attempts in order up to the one that solves `task` for the `episodes`-th time. No worker starts one in vain."""
    begun = solved = 0
    while solved < episodes and begun < limit:
        numbers = range(begun, min(limit, begun + episodes - solved))
        begun = numbers.stop
        for rollout in attempts_of(task, numbers):
            solved += rollout is not None
            yield rollout


def _frames_of(rollout: Rollout) -> dict[str, np.ndarray]:
    return {
        _MAIN_CAMERA: rollout.main_images,
        _WRIST_CAMERA: rollout.wrist_images,
        STATE: rollout.states,
        ACTION: rollout.actions,
    }


def _kept_attempts(
    store: AttemptStore, made: _AttemptsOf, task: str, numbers: Iterable[int]
) -> Iterator[Rollout | None]:
    """Takes from `store` what is there, and keeps there what is made."""
    numbers, known = list(numbers), store.known(task)
    missing = made(task, (number for number in numbers if number not in known))
    for number in numbers:
        if number in known:
            yield store.load(task, number)
            continue
        rollout = next(missing)
        store.save(task, number, rollout)
        yield rollout


@contextmanager
def _attempts(build: Callable[[], Recorder], workers: int, timeout_s: float) -> Iterator[_AttemptsOf]:
    """Makes attempts in this process or in workers."""
    if workers == 1:
        recorder = build()
        try:
            yield lambda task, numbers: (recorder.attempt(task, number) for number in numbers)
        finally:
            recorder.close()
        return
    pool = [Worker(number, build, environment={}, start_timeout_s=timeout_s) for number in range(workers)]
    try:
        for worker in pool:
            worker.start()
        yield lambda task, numbers: ordered_results(pool, "attempt", ((task, n) for n in numbers), timeout_s)
    except WorkerFailure as failure:
        raise WorkerError(f"recording stopped: {failure}", slots=[], episodes={}, results={}) from failure
    finally:
        for worker in pool:
            worker.end()
