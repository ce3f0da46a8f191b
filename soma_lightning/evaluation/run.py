"""From a policy and an environment to files with results; interrupted evaluations go on."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from soma_lightning import plots
from soma_lightning.envs.base import EnvGroup, Episode, require_known
from soma_lightning.evaluation.folder import (
    CONTACT_SHEET,
    REPORT,
    RESULTS,
    SEEDS,
    SUCCESS_CHART,
    VIDEOS,
    EvaluationFolder,
    check_folder,
    write_json,
)
from soma_lightning.evaluation.protocol import check_init_states
from soma_lightning.evaluation.report import check_policy_parts, policy_digest, run_report
from soma_lightning.evaluation.results import over_seeds, summarize
from soma_lightning.evaluation.runner import Runner
from soma_lightning.evaluation.settings import EvaluationSettings
from soma_lightning.evaluation.videos import KeptVideos
from soma_lightning.models.policy import check_executed_steps

Announce = Callable[[dict[str, Any]], None]


def evaluate(
    policy: Any,
    envs: EnvGroup,
    settings: EvaluationSettings,
    out: Path,
    *,
    overwrite: bool = False,
    announce: Announce | None = None,
) -> dict[str, Any]:
    """Rolls `policy` out on every (task, initial state) of `settings` once and writes the results into `out`.

    policy: has the POLICY_PARTS. announce: gets the run report before the first episode. An interrupted evaluation
    goes on where it stopped. Writes run_report.json with the first episode, then results.json, success.png,
    videos/*.mp4 and contact_sheet.png; returns the results.
    Raises ValueError when more steps are to be executed than the policy predicts, for tasks and initial states that
    are not there, when `out` holds an evaluation with other settings, another policy or another simulator, and for a
    policy that lacks a part; OSError when `out` cannot be written.
    """
    _check(policy, envs, settings)
    check_folder(out)
    digest, simulator = policy_digest(policy), dict(envs.facts())
    report = run_report(policy, settings, envs, digest=digest, simulator=simulator)
    identity = {**asdict(settings), "policy_digest": digest, "simulator": simulator}
    with EvaluationFolder(out, identity, overwrite) as folder:
        done = folder.read()
        finished = {(rollout.task, rollout.init_state) for rollout in done}
        todo = [Episode(task, k) for task in settings.tasks for k in settings.init_states if (task, k) not in finished]
        if announce is not None:
            announce(report)
        videos = KeptVideos(out / VIDEOS, settings.recorded, settings.executed_steps, done)
        runner = Runner(policy, envs, settings, videos.wants)
        begin = time.perf_counter()
        for rollout, frames in runner.run(todo):
            folder.begin()
            if not (out / REPORT).exists():
                write_json(out / REPORT, report)
            if frames:  # before the episode counts as finished, so that a killed run makes them again
                videos.keep(rollout, frames)
            folder.add(rollout)
            done.append(rollout)
        results = {**summarize(settings, done), "videos": videos.listing(settings.tasks), **report}
        took = {"wall": time.perf_counter() - begin, "episodes_run": len(todo), **runner.seconds}
        results["seconds"] = took if todo else _seconds_of_last_run(out, took)
        write_json(out / RESULTS, results)
        draw(out, results)
    return results


def evaluate_seeds(
    policy: Any,
    envs: EnvGroup,
    settings: EvaluationSettings,
    seeds: Sequence[int],
    out: Path,
    *,
    overwrite: bool = False,
    announce: Announce | None = None,
) -> dict[str, Any]:
    """One `evaluate` a seed of the policy's noise, in out/seed_N; mean and standard deviation go into seeds.json."""
    if len(seeds) < 2 or len(set(seeds)) != len(seeds):
        raise ValueError(f"seeds={list(seeds)} must be two or more different ones; use seed for a single one")
    runs = [replace(settings, seed=seed) for seed in seeds]
    results = [
        evaluate(policy, envs, run, out / f"seed_{run.seed}", overwrite=overwrite, announce=announce) for run in runs
    ]
    summary = {"seeds": list(seeds), "runs": [f"seed_{seed}" for seed in seeds], **over_seeds(results)}
    summary["protocol"] = results[0]["protocol"]
    write_json(out / SEEDS, summary)
    return summary


def _seconds_of_last_run(out: Path, otherwise: dict[str, Any]) -> dict[str, Any]:
    """Asking again for what is there must not replace the times of the run that made it."""
    try:
        kept = json.loads((out / RESULTS).read_text())["seconds"]
    except (OSError, ValueError, KeyError):
        return otherwise
    return kept if isinstance(kept, dict) else otherwise


def _check(policy: Any, envs: EnvGroup, settings: EvaluationSettings) -> None:
    check_policy_parts(policy)
    check_executed_steps(policy, settings.executed_steps)
    for task in settings.tasks:
        require_known("task", task, envs.tasks)
    check_init_states(settings, envs.tasks)


def draw(out: Path, results: dict[str, Any]) -> None:
    """success.png, and contact_sheet.png of the kept videos."""
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
