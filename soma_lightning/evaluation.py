"""How well a policy does in an environment: seeded rollouts, success rates with intervals, resumable."""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import numpy as np
import torch
from torch import Tensor

from soma_lightning import __version__, plots
from soma_lightning.attention import attention_path
from soma_lightning.envs.base import ChunkOutcome, EnvGroup, Episode, require_known

RESULTS, EPISODES, SETTINGS, REPORT = "results.json", "episodes.jsonl", "settings.json", "run_report.json"
SUCCESS_CHART, CONTACT_SHEET, VIDEOS = "success.png", "contact_sheet.png", "videos"
#: What a policy must offer to be evaluated.
POLICY_PARTS = ("predict_action_batch", "noise_shape", "report_facts", "describe", "state_dict", "backbone_hash")
_PARTIAL = ".partial"  # suffix of a file that is being written
_WAY_OUT = "restore the file, or start anew with --overwrite"


@dataclass(frozen=True)
class EvaluationSettings:
    """What decides the outcome of an evaluation; a resumed one must have the same.

    policy: folder of the checkpoint. tasks: names in the environment. episodes: per task, on the initial states
    first_init_state, first_init_state + 1, ... executed_steps: actions executed per predicted chunk.
    denoising_steps: Euler steps of the flow. seed: of the policy's noise, see `draw_noise`.
    recorded: episodes per task that are kept as video and on the contact sheet.
    """

    policy: str
    env: str
    tasks: tuple[str, ...]
    executed_steps: int
    denoising_steps: int
    episodes: int = 100
    first_init_state: int = 0
    seed: int = 0
    recorded: int = 2
    env_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("episodes", "executed_steps", "denoising_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("first_init_state", "seed", "recorded"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative")
        if not self.tasks:
            raise ValueError("no task given; name at least one")
        if len(set(self.tasks)) != len(self.tasks):
            raise ValueError(f"tasks {list(self.tasks)} name one task twice; raise episodes instead")


@dataclass
class Rollout:
    """A finished episode."""

    task: str
    init_state: int
    success: bool
    steps: int
    reward: float


def wilson_interval(successes: int, episodes: int, z: float = 1.959964) -> tuple[float, float]:
    """95 % score interval of a success probability (Wilson, 1927, JASA 22). Raises ValueError on impossible counts."""
    if not 0 <= successes <= episodes or episodes < 1:
        raise ValueError(f"successes={successes} of episodes={episodes} is no success count")
    rate, weight = successes / episodes, 1 + z * z / episodes
    center = (rate + z * z / (2 * episodes)) / weight
    half = z / weight * math.sqrt(rate * (1 - rate) / episodes + z * z / (4 * episodes**2))
    # At no success the two terms of the lower end are equal, and at no failure the upper end is 1; rounding is not.
    return (center - half if successes else 0.0), (center + half if successes < episodes else 1.0)


def draw_noise(settings: EvaluationSettings, episode: Episode, look: int, shape: tuple[int, ...]) -> Tensor:
    """The noise a chunk starts from: a function of (seed, task name, initial state, look) only."""
    key = [settings.seed, zlib.crc32(episode.task.encode()), episode.init_state, look]
    seed = int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> 1)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def policy_digest(policy: Any) -> str:
    """SHA-256 of all that decides a policy's actions: its description (configuration, statistics) and its weights."""
    digest = hashlib.sha256(json.dumps(policy.describe(), sort_keys=True).encode())
    for name, tensor in sorted(policy.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def check_folder(out: Path) -> None:
    """Makes the folder of an evaluation. Raises OSError naming it when nothing can be written there."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise NotADirectoryError(f"the results cannot go into {out}: it is or lies in a file ({error})") from error
    if not os.access(out, os.W_OK | os.X_OK):
        raise PermissionError(f"the results cannot go into {out}: the folder is not writable")


class _Log:
    """Finished episodes on disk, one JSON line each; what an interrupted run left behind is read back.

    One process at a time: a second one is refused. Nothing of an earlier evaluation is deleted before the first episode
    of the new one is there to replace it.
    """

    def __init__(self, out: Path, settings: EvaluationSettings, digest: str, overwrite: bool) -> None:
        self.out, self.path = out, out / EPISODES
        self._wanted = {**json.loads(json.dumps(asdict(settings))), "policy_digest": digest}
        self._lock = _locked(out)
        try:
            self._begun = (out / SETTINGS).exists() and not overwrite
            if self._begun:
                self._check_settings()
            elif self.path.exists() and not overwrite:
                raise ValueError(
                    f"{self.path} lies there without {SETTINGS}; choose another --out, or pass --overwrite"
                )
        except BaseException:
            self._lock.close()
            raise

    def _check_settings(self) -> None:
        found = _read_json(self.out / SETTINGS)
        # The digest says what the policy is; the folder it lies in may have moved.
        changed = sorted(key for key in self._wanted if key != "policy" and self._wanted[key] != found.get(key))
        if changed:
            names = ["the policy's weights or statistics" if key == "policy_digest" else key for key in changed]
            raise ValueError(
                f"{self.out} holds an evaluation with other settings ({', '.join(names)}); choose another --out, "
                "or pass --overwrite"
            )

    def read(self) -> list[Rollout]:
        """The finished episodes. Raises ValueError naming file and line of one that cannot be read."""
        if not self._begun or not self.path.exists():
            return []
        content = self.path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]  # a killed run may have left half a line
        if whole != content:
            os.truncate(self.path, len(whole))
        rollouts: list[Rollout] = []
        for number, line in enumerate(whole.decode().splitlines(), 1):
            try:
                rollouts.append(Rollout(**json.loads(line)))
            except (ValueError, TypeError) as error:
                raise ValueError(f"{self.path}, line {number} is no finished episode ({error}); {_WAY_OUT}") from error
        episodes = [(rollout.task, rollout.init_state) for rollout in rollouts]
        if len(set(episodes)) != len(episodes):
            raise ValueError(f"{self.path} holds an episode twice; {_WAY_OUT}")
        return rollouts

    def begin(self) -> None:
        """Puts the settings there, in place of an earlier evaluation's files; once."""
        if self._begun:
            return
        for name in (RESULTS, REPORT, SUCCESS_CHART, CONTACT_SHEET, EPISODES, SETTINGS):
            (self.out / name).unlink(missing_ok=True)
        for video in (self.out / VIDEOS).glob("*"):
            if video.suffix in (".npz", ".mp4", _PARTIAL):
                video.unlink()
        _write_json(self.out / SETTINGS, self._wanted)
        self._begun = True

    def add(self, rollout: Rollout) -> None:
        with open(self.path, "a") as file:
            file.write(json.dumps(asdict(rollout)) + "\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.close()


def _locked(out: Path) -> IO[str]:
    """An open file that no other process holds; the system gives it free when this one ends, however it ends."""
    file = open(out / ".lock", "w")  # noqa: SIM115 (kept open as long as the evaluation runs)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise ValueError(f"another evaluation is writing into {out}; wait for it, or choose another --out") from error
    return file


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is no valid JSON ({error}); {_WAY_OUT}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds no JSON object; {_WAY_OUT}")
    return value


class _Runner:
    """Keeps every slot busy: a slot whose episode ends takes the next one."""

    def __init__(self, policy: Any, envs: EnvGroup, settings: EvaluationSettings) -> None:
        self.policy, self.envs, self.settings = policy, envs, settings
        self.seconds = {"render": 0.0, "policy": 0.0, "simulate": 0.0}
        self.running: dict[int, Episode] = {}
        self.looks: dict[int, int] = {}
        self.steps: dict[int, int] = {}
        self.reward: dict[int, float] = {}
        self.frames: dict[int, list[np.ndarray]] = {}

    def run(self, episodes: Iterable[Episode]) -> Iterator[tuple[Rollout, list[np.ndarray]]]:
        queue = iter(episodes)
        self._start(range(self.envs.num_slots), queue)
        while self.running:
            slots = sorted(self.running)
            actions_SKA = self._act(slots)
            record = [self._is_recorded(self.running[slot]) for slot in slots]
            begin = time.perf_counter()
            outcomes = self.envs.execute(slots, actions_SKA, record)
            self.seconds["simulate"] += time.perf_counter() - begin
            finished = []
            for slot, outcome in zip(slots, outcomes, strict=True):
                rollout = self._advance(slot, outcome)
                if rollout is not None:
                    finished.append(slot)
                    yield rollout, self.frames.pop(slot)
            self._start(finished, queue)

    def _is_recorded(self, episode: Episode) -> bool:
        return episode.init_state - self.settings.first_init_state < self.settings.recorded

    def _start(self, slots: Iterable[int], queue: Iterator[Episode]) -> None:
        begun = {slot: episode for slot, episode in zip(slots, queue, strict=False)}
        if not begun:
            return
        begin = time.perf_counter()
        self.envs.reset(list(begun), list(begun.values()))
        self.seconds["simulate"] += time.perf_counter() - begin
        for slot, episode in begun.items():
            self.running[slot], self.looks[slot], self.steps[slot], self.reward[slot] = episode, 0, 0, 0.0
            self.frames[slot] = []

    def _act(self, slots: list[int]) -> np.ndarray:
        begin = time.perf_counter()
        observation = self.envs.observe(slots)
        seen = time.perf_counter()
        shape = self.policy.noise_shape
        noise = [draw_noise(self.settings, self.running[slot], self.looks[slot], shape) for slot in slots]
        actions, _ = self.policy.predict_action_batch(
            observation,
            mode="eval",
            compute_values=False,
            num_steps=self.settings.denoising_steps,
            noise=torch.stack(noise),
        )
        for slot in slots:
            self.looks[slot] += 1
        self.seconds["render"] += seen - begin
        self.seconds["policy"] += time.perf_counter() - seen
        return np.asarray(actions, np.float32)[:, : self.settings.executed_steps]

    def _advance(self, slot: int, outcome: ChunkOutcome) -> Rollout | None:
        self.steps[slot] += outcome.steps
        self.reward[slot] += outcome.reward
        self.frames[slot] += outcome.frames or []
        if not outcome.done:
            return None
        episode = self.running.pop(slot)
        return Rollout(episode.task, episode.init_state, outcome.success, self.steps[slot], self.reward[slot])


def evaluate(
    policy: Any,
    envs: EnvGroup,
    settings: EvaluationSettings,
    out: Path,
    *,
    overwrite: bool = False,
    announce: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Rolls `policy` out on every (task, initial state) of `settings` and writes the results into `out`.

    policy: has the POLICY_PARTS. announce: gets the run report before the first episode. An interrupted evaluation
    goes on where it stopped. Writes run_report.json with the first episode, then results.json, success.png,
    videos/*.mp4 and contact_sheet.png; returns the results.
    Raises ValueError when more steps are to be executed than the policy predicts, for unknown tasks, and when `out`
    holds an evaluation with other settings or another policy, and for a policy that lacks a part; OSError when `out`
    cannot be written.
    """
    report = run_report(policy, settings)
    chunk_size = policy.noise_shape[0]
    if settings.executed_steps > chunk_size:
        raise ValueError(
            f"executed_steps={settings.executed_steps} is more than the {chunk_size} actions that the policy predicts; "
            f"use at most {chunk_size}"
        )
    for task in settings.tasks:
        require_known("task", task, envs.tasks)
    check_folder(out)
    with _Log(out, settings, policy_digest(policy), overwrite) as log:
        done = log.read()
        finished = {(rollout.task, rollout.init_state) for rollout in done}
        init_states = range(settings.first_init_state, settings.first_init_state + settings.episodes)
        todo = [Episode(task, k) for task in settings.tasks for k in init_states if (task, k) not in finished]
        if announce is not None:
            announce(report)
        runner = _Runner(policy, envs, settings)
        begin = time.perf_counter()
        for rollout, frames in runner.run(todo):
            log.begin()
            if not (out / REPORT).exists():
                _write_json(out / REPORT, report)
            if frames:  # before the episode counts as finished, so that a killed run makes them again
                _keep_frames(out, rollout, frames)
            log.add(rollout)
            done.append(rollout)
        results = summarize(settings, done)
        results.update(report)
        results["seconds"] = {"wall": time.perf_counter() - begin, "episodes_run": len(todo), **runner.seconds}
        _write_json(out / RESULTS, results)
        _draw(out, results)
    return results


def run_report(policy: Any, settings: EvaluationSettings) -> dict[str, Any]:
    """What is evaluated and how, in plain types. Raises ValueError for a policy that lacks one of the POLICY_PARTS."""
    missing = [name for name in POLICY_PARTS if not hasattr(policy, name)]
    if missing:
        raise ValueError(f"{type(policy).__name__} cannot be evaluated: it has no {', '.join(missing)}")
    last = settings.first_init_state + settings.episodes - 1
    return {
        "settings": asdict(settings),
        "init_states": {task: [settings.first_init_state, last] for task in settings.tasks},
        "policy": {"path": settings.policy, "backbone_hash": policy.backbone_hash(), **policy.report_facts()},
        "attention": attention_path(),
        "versions": {"soma_lightning": __version__, "torch": torch.__version__, "numpy": np.__version__},
    }


def summarize(settings: EvaluationSettings, rollouts: list[Rollout]) -> dict[str, Any]:
    """Success counts and Wilson intervals per task and in all, with every episode's outcome."""
    tasks = {}
    for task in settings.tasks:
        mine = sorted((r for r in rollouts if r.task == task), key=lambda r: r.init_state)
        won = [r for r in mine if r.success]
        low, high = wilson_interval(len(won), len(mine))
        tasks[task] = {
            "successes": len(won),
            "episodes": len(mine),
            "rate": len(won) / len(mine),
            "wilson95": [low, high],
            "mean_steps_of_successes": float(np.mean([r.steps for r in won])) if won else None,
            "init_states": [r.init_state for r in mine],
            "successful_init_states": [r.init_state for r in won],
        }
    total, episodes = sum(rollout.success for rollout in rollouts), len(rollouts)
    overall = {"successes": total, "episodes": episodes, "wilson95": list(wilson_interval(total, episodes))}
    return {"tasks": tasks, "overall": overall}


def _keep_frames(out: Path, rollout: Rollout, frames: list[np.ndarray]) -> None:
    outcome = "success" if rollout.success else "failure"
    path = out / VIDEOS / f"{rollout.task}_{rollout.init_state:04d}_{outcome}.npz"
    path.parent.mkdir(exist_ok=True)
    partial = path.with_suffix(_PARTIAL)
    with open(partial, "wb") as file:
        np.savez_compressed(file, frames=np.stack(frames))
    partial.replace(path)
    plots.write_video(frames, path.with_suffix(".mp4"), fps=20)


def _draw(out: Path, results: dict[str, Any]) -> None:
    rows: list[tuple[str, int, int, tuple[float, float]]]
    rows = [(n, t["successes"], t["episodes"], tuple(t["wilson95"])) for n, t in results["tasks"].items()]
    title = "/".join(Path(results["settings"]["policy"]).absolute().parts[-2:])  # every run's folder is named "policy"
    plots.success_bars(rows, out / SUCCESS_CHART, title)
    rollouts = []
    for path in sorted((out / VIDEOS).glob("*.npz")):
        with np.load(path) as kept:
            rollouts.append((path.stem.replace("_", " "), list(kept["frames"])))
    if rollouts:
        plots.contact_sheet(rollouts, out / CONTACT_SHEET)


def _write_json(path: Path, value: Any) -> None:
    """Whole or not at all: a reader never sees half a file."""
    temporary = path.with_suffix(path.suffix + f".tmp{os.getpid()}")
    temporary.write_text(json.dumps(value, indent=1))
    temporary.replace(path)
