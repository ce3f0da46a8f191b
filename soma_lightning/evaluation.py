"""How well a policy does in an environment: seeded rollouts, success rates with intervals, resumable."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from soma_lightning import __version__, plots
from soma_lightning.envs.base import ChunkOutcome, EnvGroup, Episode

RESULTS, EPISODES, SETTINGS = "results.json", "episodes.jsonl", "settings.json"


@dataclass(frozen=True)
class EvaluationSettings:
    """What decides the outcome of an evaluation; a resumed one must have the same.

    policy: folder of the checkpoint. tasks: names in the environment. episodes: per task, on the initial states
    first_init_state, first_init_state + 1, ... executed_steps: actions executed per predicted chunk.
    denoising_steps: Euler steps of the flow. seed: of the policy's noise, drawn per (task, initial state, look).
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
        if self.first_init_state < 0 or self.recorded < 0:
            raise ValueError(
                f"first_init_state={self.first_init_state}, recorded={self.recorded}: must not be negative"
            )
        if not self.tasks:
            raise ValueError("no task given; name at least one")


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
    return max(0.0, center - half), min(1.0, center + half)


def draw_noise(settings: EvaluationSettings, episode: Episode, look: int, shape: tuple[int, ...]) -> Tensor:
    """The noise a chunk starts from: a function of (seed, task, initial state, look) only, not of the batch."""
    key = [settings.seed, settings.tasks.index(episode.task), episode.init_state, look]
    seed = int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0] >> 1)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class _Log:
    """Finished episodes on disk, one JSON line each; what an interrupted run left behind is read back."""

    def __init__(self, out: Path, settings: EvaluationSettings, overwrite: bool) -> None:
        self.path = out / EPISODES
        out.mkdir(parents=True, exist_ok=True)
        if overwrite:
            for name in (EPISODES, SETTINGS, RESULTS):
                (out / name).unlink(missing_ok=True)
        wanted = json.loads(json.dumps(asdict(settings)))
        if (out / SETTINGS).exists():
            found = json.loads((out / SETTINGS).read_text())
            changed = sorted(key for key in wanted if wanted[key] != found.get(key))
            if changed:
                raise ValueError(
                    f"{out} holds an evaluation with other settings ({', '.join(changed)}); choose another --out, "
                    "or pass --overwrite"
                )
        _write_json(out / SETTINGS, wanted)

    def read(self) -> list[Rollout]:
        if not self.path.exists():
            return []
        text = self.path.read_text()
        whole = text[: text.rfind("\n") + 1]  # a killed run may have left half a line
        if whole != text:
            self.path.write_text(whole)
        return [Rollout(**json.loads(line)) for line in whole.splitlines()]

    def add(self, rollout: Rollout) -> None:
        with open(self.path, "a") as file:
            file.write(json.dumps(asdict(rollout)) + "\n")


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
    policy: Any, envs: EnvGroup, settings: EvaluationSettings, out: Path, *, overwrite: bool = False
) -> dict[str, Any]:
    """Rolls `policy` out on every (task, initial state) of `settings` and writes the results into `out`.

    policy: a policy with `predict_action_batch`, `noise_shape`, `backbone_hash` and `report_facts`. An interrupted
    evaluation goes on where it stopped. Writes results.json, success.png, videos/*.mp4 and contact_sheet.png; returns
    the results. Raises ValueError when more steps are to be executed than the policy predicts, for unknown tasks, and when `out`
    holds an evaluation with other settings.
    """
    chunk_size = policy.noise_shape[0]
    if settings.executed_steps > chunk_size:
        raise ValueError(
            f"executed_steps={settings.executed_steps} is more than the {chunk_size} actions that the policy predicts; "
            f"use at most {chunk_size}"
        )
    unknown = sorted(set(settings.tasks) - set(envs.tasks))
    if unknown:
        raise ValueError(f"unknown tasks {unknown}; the environment has {sorted(envs.tasks)}")
    log = _Log(out, settings, overwrite)
    done = log.read()
    finished = {(rollout.task, rollout.init_state) for rollout in done}
    init_states = range(settings.first_init_state, settings.first_init_state + settings.episodes)
    todo = [Episode(task, k) for task in settings.tasks for k in init_states if (task, k) not in finished]
    runner = _Runner(policy, envs, settings)
    begin = time.perf_counter()
    for rollout, frames in runner.run(todo):
        log.add(rollout)
        done.append(rollout)
        if frames:
            _keep_frames(out, rollout, frames)
    results = summarize(settings, done)
    results["policy"] = {"path": settings.policy, "backbone_hash": policy.backbone_hash(), **policy.report_facts()}
    results["versions"] = {"soma_lightning": __version__, "torch": torch.__version__, "numpy": np.__version__}
    results["seconds"] = {"wall": time.perf_counter() - begin, "episodes_run": len(todo), **runner.seconds}
    _write_json(out / RESULTS, results)
    _draw(out, results)
    return results


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
    return {"settings": asdict(settings), "tasks": tasks, "overall": overall}


def _keep_frames(out: Path, rollout: Rollout, frames: list[np.ndarray]) -> None:
    outcome = "success" if rollout.success else "failure"
    name = f"{rollout.task}_{rollout.init_state:04d}_{outcome}"
    (out / "videos").mkdir(exist_ok=True)
    np.savez_compressed(out / "videos" / f"{name}.npz", frames=np.stack(frames))
    plots.write_video(frames, out / "videos" / f"{name}.mp4", fps=20)


def _draw(out: Path, results: dict[str, Any]) -> None:
    rows: list[tuple[str, int, int, tuple[float, float]]]
    rows = [(n, t["successes"], t["episodes"], tuple(t["wilson95"])) for n, t in results["tasks"].items()]
    plots.success_bars(rows, out / "success.png", Path(results["settings"]["policy"]).name or "policy")
    kept = sorted((out / "videos").glob("*.npz")) if (out / "videos").exists() else []
    if kept:
        rollouts = [(path.stem.replace("_", " "), list(np.load(path)["frames"])) for path in kept]
        plots.contact_sheet(rollouts, out / "contact_sheet.png")


def _write_json(path: Path, value: Any) -> None:
    """Whole or not at all: a reader never sees half a file."""
    temporary = path.with_suffix(path.suffix + f".tmp{os.getpid()}")
    temporary.write_text(json.dumps(value, indent=1))
    temporary.replace(path)
