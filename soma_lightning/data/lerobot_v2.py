"""How do the metadata of LeRobot v2.0 and v2.1 answer the questions that v3.0's answer?

There each episode has files of its own, whose names follow from its number; `meta/episodes.jsonl` and
`meta/tasks.jsonl` have one JSON object a line. v2.0 has `meta/stats.json`, v2.1 `meta/episodes_stats.jsonl`; neither
has quantiles.
`load_tasks` and `load_episodes` are those of `lerobot_format` for these versions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from soma_lightning.contract import Statistics
from soma_lightning.data import lerobot_format as fmt

TASKS_FILE = "meta/tasks.jsonl"
EPISODES_FILE = "meta/episodes.jsonl"
EPISODES_STATS_FILE = "meta/episodes_stats.jsonl"


def load_tasks(root: Path) -> list[str]:
    """The instruction of each task index. Raises DatasetFormatError naming file and line of what is wrong."""
    path = root / TASKS_FILE
    tasks: dict[int, str] = {}
    for line, row in enumerate(_read_lines(path), start=1):
        number, task = row.get(fmt.TASK_INDEX), row.get("task")
        if not isinstance(number, int) or not isinstance(task, str) or number in tasks:
            raise fmt.DatasetFormatError(
                f"{path}: line {line} needs a '{fmt.TASK_INDEX}' of its own and a 'task', found {row}"
            )
        tasks[number] = task
    if sorted(tasks) != list(range(len(tasks))):
        raise fmt.DatasetFormatError(f"{path}: '{fmt.TASK_INDEX}' must count 0, 1, 2, ..., found {sorted(tasks)[:8]}")
    return [tasks[number] for number in range(len(tasks))]


def load_episodes(root: Path, info: fmt.DatasetInfo, videos: Sequence[str] = ()) -> list[fmt.EpisodeRow]:
    """Every episode in order; see `lerobot_format.load_episodes`."""
    path = root / EPISODES_FILE
    rows: list[fmt.EpisodeRow] = []
    lines = _read_lines(path)
    if all(isinstance(row.get(fmt.EPISODE_INDEX), int) for row in lines):
        lines.sort(key=lambda row: int(row[fmt.EPISODE_INDEX]))  # recordings that were merged may be out of order
    for row in lines:
        fmt.check_episode(path, len(rows), row.get(fmt.EPISODE_INDEX), row.get("length"))
        number, length = row[fmt.EPISODE_INDEX], row["length"]
        place = {"episode_chunk": number // info.chunks_size, "episode_index": number}
        spans = {key: fmt.VideoSpan(info.video_path.format(video_key=key, **place), 0.0) for key in videos}
        rows.append(fmt.EpisodeRow(number, length, info.data_path.format(**place), spans))
    fmt.check_totals(root, info, rows, EPISODES_FILE)
    return rows


def pool_statistics(root: Path, features: Sequence[str]) -> Statistics:
    """Statistics of `features` over all episodes, from those of each in `meta/episodes_stats.jsonl`.

    min and max are exact; mean and std (population) follow from the episodes' by their counts: the variance over all
    is the mean of E[x^2] minus the square of the mean. Quantiles cannot be pooled. Raises DatasetFormatError.
    """
    path = root / EPISODES_STATS_FILE
    lines = [row.get("stats", {}) for row in _read_lines(path)]
    pooled: Statistics = {}
    for feature in features:
        try:
            parts = [
                {name: np.atleast_1d(np.asarray(line[feature][name], np.float64)) for name in _POOLED} for line in lines
            ]
            stacked = {name: np.stack([part[name] for part in parts]) for name in _POOLED}
            pooled[feature] = _pool(stacked)
        except (KeyError, TypeError, ValueError) as error:
            raise fmt.DatasetFormatError(
                f"{path}: the statistics of '{feature}' are incomplete or of different lengths ({error!r}); use "
                "statistics='computed'"
            ) from error
    return pooled


_POOLED = ("min", "max", "mean", "std", "count")


def _pool(parts: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers of all episodes from those of each: [episodes, D] and counts [episodes, 1]."""
    weight = parts["count"] / parts["count"].sum()
    mean = (weight * parts["mean"]).sum(axis=0)
    # Around the common mean, so that nothing cancels when the mean is large against the spread.
    variance = (weight * (parts["std"] ** 2 + (parts["mean"] - mean) ** 2)).sum(axis=0)
    return {
        "min": parts["min"].min(axis=0),
        "max": parts["max"].max(axis=0),
        "mean": mean,
        "std": np.sqrt(variance),
        "count": np.array([parts["count"].sum()], np.int64),
    }


def _read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file with one JSON object a line; empty lines are left out."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise fmt.DatasetFormatError(f"{path} is missing") from error
    except UnicodeDecodeError as error:
        raise fmt.DatasetFormatError(f"{path} is no UTF-8 text: {error}") from error
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise fmt.DatasetFormatError(f"{path}: line {number} is no valid JSON: {error}") from error
        if not isinstance(row, dict):
            raise fmt.DatasetFormatError(f"{path}: line {number} holds a {type(row).__name__}, expected an object")
        rows.append(row)
    if not rows:
        raise fmt.DatasetFormatError(f"{path} is empty")
    return rows
