"""Which episodes of which folder are trained on, in what share, and how are their keys and dimensions read?"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from soma_lightning.data import lerobot_format as fmt
from soma_lightning.data.lerobot import LeRobotDataset, check_episodes
from soma_lightning.data.lerobot_metadata import load_episodes, load_tasks


@dataclass(frozen=True)
class DataSource:
    """One data set of a mixture. None takes the data module's setting, or sets no limit.

    root: folder. weight: share of the samples that come from here, relative to the other sources' weights; None for all
    sources draws every frame once an epoch. action_scale, action_offset: one number an action dimension, after
    action_indices; the policy sees `action * scale + offset` (-1 flips a gripper).
    cameras, state_key, action_key, state_indices, action_indices: as in `LeRobotDataset`.

    Filters, all of which an episode must pass: episodes: numbers, or ranges as in "0:50,60" (50 left out, "50:" to the
    last). tasks: instructions, of which all of an episode's must match one; `*`, `?` and `[...]` as in file names.
    min_length, max_length: frames, both included. max_episodes: only the first ones of those.

    Values are checked by the data module (`as_sources`).
    """

    root: str
    weight: float | None = None
    episodes: list[int] | str | int | None = None
    tasks: list[str] | None = None
    min_length: int | None = None
    max_length: int | None = None
    max_episodes: int | None = None
    cameras: dict[str, str] | None = None
    state_key: str | None = None
    action_key: str | None = None
    state_indices: list[int] | None = None
    action_indices: list[int] | None = None
    action_scale: list[float] | None = None
    action_offset: list[float] | None = None

    def check(self) -> None:
        """Raises ValueError for values out of range."""
        if self.weight is not None and not (math.isfinite(self.weight) and self.weight > 0):
            raise ValueError(
                f"weight={self.weight} of '{self.root}' must be a positive number; leave a source out to draw nothing"
            )
        if isinstance(self.episodes, int):  # YAML reads 1:50 as a number of base 60
            raise ValueError(
                f"episodes={self.episodes} of '{self.root}' is a number; write a list ([{self.episodes}]) or a range "
                'in quotes ("1:50"), which YAML would read as a number'
            )
        for name in ("min_length", "max_length", "max_episodes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} of '{self.root}' must be at least 1")
        if self.tasks is not None and (isinstance(self.tasks, str) or not self.tasks):
            raise ValueError(f"tasks={self.tasks!r} of '{self.root}' must be a list of at least one instruction")

    @property
    def filters(self) -> dict[str, Any]:
        """The filters that are set."""
        names = ("episodes", "tasks", "min_length", "max_length", "max_episodes")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    @property
    def reading(self) -> dict[str, Any]:
        """The arguments of `LeRobotDataset` that are set, apart from root and episodes."""
        names = ("cameras", "state_key", "action_key", "state_indices", "action_indices")
        values = {name: getattr(self, name) for name in (*names, "action_scale", "action_offset")}
        return {name: value for name, value in values.items() if value is not None}

    def with_defaults(self, **defaults: Any) -> DataSource:
        """This source with the defaults where it says nothing itself."""
        return replace(self, **{name: value for name, value in defaults.items() if getattr(self, name) is None})


#: What may stand for one source: a folder, a source, or its fields as a dictionary.
SourceLike: TypeAlias = str | Path | DataSource | Mapping[str, Any]


def as_sources(root: SourceLike | Sequence[SourceLike]) -> list[DataSource]:
    """Every source of a mixture.

    Raises ValueError when there is none, for unknown fields, for values out of range, for weights of some only.
    """
    entries = [root] if isinstance(root, str | Path | DataSource | Mapping) else list(root)
    sources = [_as_source(entry) for entry in entries]
    if not sources:
        raise ValueError("root is empty; name at least one data set folder")
    for source in sources:
        source.check()  # not when it is built: a command line would hide the message among all types that it tried
    unweighted = [source.root for source in sources if source.weight is None]
    if 0 < len(unweighted) < len(sources):
        raise ValueError(f"{unweighted} have no weight, but other sources have; give every source a weight, or none")
    return sources


def _as_source(entry: SourceLike) -> DataSource:
    if isinstance(entry, DataSource):
        return entry
    if isinstance(entry, str | Path):
        return DataSource(str(entry))
    known = [field.name for field in fields(DataSource)]
    if unknown := sorted(set(entry) - set(known)):
        raise ValueError(f"a source has no {unknown}; it has {known}")
    if "root" not in entry:
        raise ValueError(f"a source needs root, its folder: {dict(entry)}")
    return DataSource(**entry)


def choose_episodes(source: DataSource) -> list[int]:
    """The numbers of the episodes that pass the source's filters, sorted.

    Raises what `LeRobotDataset` raises, and ValueError naming what there is when a filter leaves nothing.
    """
    root = Path(source.root)
    info = fmt.load_info(root)
    lengths = [row.length for row in load_episodes(root, info)]
    wanted = source.episodes
    numbers = parse_ranges(wanted, len(lengths)) if isinstance(wanted, str) else wanted
    assert not isinstance(numbers, int)
    low, high = source.min_length or 1, source.max_length or math.inf
    chosen = [number for number in check_episodes(root, numbers, len(lengths)) if low <= lengths[number] <= high]
    if source.tasks is not None and chosen:
        chosen = _with_tasks(root, chosen, source)
    if not chosen:
        raise ValueError(
            f"no episode of '{root}' passes {source.filters}: it has {len(lengths)} episodes of {min(lengths)} to "
            f"{max(lengths)} frames with the tasks {load_tasks(root, info)}"
        )
    return chosen[: source.max_episodes]


def parse_ranges(text: str, count: int) -> list[int]:
    """The numbers of ranges like "0:50,60": ends are left out as in Python, and an open end is `count`."""
    numbers: list[int] = []
    for part in text.split(","):
        start, colon, end = (piece.strip() for piece in part.partition(":"))
        try:
            first = int(start or 0) if colon else int(start)
            last = (int(end) if end else count) if colon else first + 1
        except ValueError:
            first = last = 0
        if not 0 <= first < last:
            raise ValueError(f'episodes="{text}": {part.strip()!r} is no number or range; write e.g. "0:50,60"')
        numbers += range(first, last)
    return numbers


def _with_tasks(root: Path, episodes: list[int], source: DataSource) -> list[int]:
    """Those episodes of which every instruction matches a pattern of source.tasks."""
    # Which instructions an episode has is said by its frames in every version of the format.
    data = LeRobotDataset(root, episodes=episodes, **{**source.reading, "cameras": {}})
    assert source.tasks is not None
    there = {data.tasks[number] for number in np.unique(data.frames.task_index)}
    if unmatched := [p for p in source.tasks if not any(fnmatchcase(task, p) for task in there)]:
        raise ValueError(f"tasks: nothing in '{root}' matches {unmatched}; the chosen episodes have {sorted(there)}")
    matches = np.array([any(fnmatchcase(task, p) for p in source.tasks) for task in data.tasks])
    other = data.frames.episode_index[~matches[data.frames.task_index]]
    return sorted(set(episodes) - set(other.tolist()))


def check_disjoint(sources: Sequence[DataSource], episodes: Sequence[Sequence[int]]) -> None:
    """Raises ValueError when two sources read the same episodes, which would then be in both splits."""
    seen: dict[Path, set[int]] = {}
    for source, numbers in zip(sources, episodes, strict=True):
        there = seen.setdefault(Path(source.root).resolve(), set())
        if both := sorted(there & set(numbers)):
            raise ValueError(
                f"root names '{source.root}' twice with the same episodes {both[:5]} ({len(both)} in all), so their "
                "frames would count twice; use weight to draw a data set more often"
            )
        there.update(numbers)
