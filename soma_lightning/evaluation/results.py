"""What the finished episodes say: success rates with intervals, by task and in all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from soma_lightning.evaluation.settings import EvaluationSettings, Rollout

_EQUAL_BY_CONSTRUCTION = (
    "not measured: episodes end at their first success, where both are equal by construction; until=limit measures it"
)
_NOT_TOLD = "not measured: the environment does not tell whether the goal holds after each step"


def wilson_interval(successes: int, episodes: int, z: float = 1.959964) -> tuple[float, float]:
    """95 % score interval of a success probability (Wilson, 1927, JASA 22). Raises ValueError on impossible counts."""
    if not 0 <= successes <= episodes or episodes < 1:
        raise ValueError(f"successes={successes} of episodes={episodes} is no success count")
    rate, weight = successes / episodes, 1 + z * z / episodes
    center = (rate + z * z / (2 * episodes)) / weight
    half = z / weight * math.sqrt(rate * (1 - rate) / episodes + z * z / (4 * episodes**2))
    # At no success the two terms of the lower end are equal, and at no failure the upper end is 1; rounding is not.
    return (center - half if successes else 0.0), (center + half if successes < episodes else 1.0)


def summarize(settings: EvaluationSettings, rollouts: list[Rollout]) -> dict[str, Any]:
    """Success counts and Wilson intervals per task and in all, with every episode's outcome.

    "successes" and "rate" count success_once. overall "mean_of_tasks" is the average of the tasks' rates.
    """
    tasks = {}
    for task in settings.tasks:
        mine = sorted((r for r in rollouts if r.task == task), key=lambda r: r.init_state)
        won = [r for r in mine if r.success_once]
        tasks[task] = {
            **_counts(mine),
            "mean_steps_of_successes": float(np.mean([r.steps for r in won])) if won else None,
            "init_states": [r.init_state for r in mine],
            "successful_init_states": [r.init_state for r in won],
        }
    overall = {**_counts(rollouts), "mean_of_tasks": float(np.mean([task["rate"] for task in tasks.values()]))}
    if overall["success_at_end"] is None:
        overall["success_at_end_note"] = _EQUAL_BY_CONSTRUCTION if settings.until == "success" else _NOT_TOLD
    return {"tasks": tasks, "overall": overall}


def _counts(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    successes, episodes = sum(rollout.success_once for rollout in rollouts), len(rollouts)
    at_end = [rollout.success_at_end for rollout in rollouts]
    return {
        "successes": successes,
        "episodes": episodes,
        "rate": successes / episodes,
        "wilson95": list(wilson_interval(successes, episodes)),
        "success_at_end": None if None in at_end else sum(map(bool, at_end)),
    }


def over_seeds(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Mean and standard deviation (n - 1) of the rates of evaluations that differ in their seed alone."""
    tasks = {name: _spread([one["tasks"][name]["rate"] for one in results]) for name in results[0]["tasks"]}
    return {"tasks": tasks, "mean_of_tasks": _spread([one["overall"]["mean_of_tasks"] for one in results])}


def _spread(rates: list[float]) -> dict[str, Any]:
    return {"rates": rates, "mean": float(np.mean(rates)), "std": float(np.std(rates, ddof=1))}


def table(results: dict[str, Any]) -> str:
    """The results as lines of text: one a task and, of several, one of all and their average."""
    tasks, overall = results["tasks"], results["overall"]
    width = max(20, *(len(name) for name in tasks)) + 2
    at_end = overall["success_at_end"] is not None
    lines = [f"{'task':<{width}}{'success':>9}{'rate':>7}   {'95 % interval':<18}{'steps':>7}{'  at end' * at_end}"]
    several = len(tasks) > 1
    rows = {**tasks, f"all {len(tasks)} tasks": {**overall, "mean_steps_of_successes": None}} if several else tasks
    for name, row in rows.items():
        low, high = row["wilson95"]
        steps = row["mean_steps_of_successes"]
        line = f"{name:<{width}}{row['successes']:>5}/{row['episodes']:<4}{row['rate']:>6.3f}"
        line += f"   {low:.3f} to {high:.3f}    " + (f"{steps:>7.1f}" if steps is not None else " " * 7)
        lines.append((line + (f"{row['success_at_end']:>8}" if at_end else "")).rstrip())
    return "\n".join([*lines, *([f"average over tasks: {overall['mean_of_tasks']:.3f}"] if several else [])])
