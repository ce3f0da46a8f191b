"""Do the data files hold the frames that the metadata announce, with sound numbers? All of it is read, and every fault
is noted; the reader (`lerobot_frames`) stops at the first.

One row group at a time: memory does not depend on the data set's size, but for a few numbers an episode. Images are
read elsewhere (`image_checks`). Shape letters: n rows of a row group, D dimensions of a column.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from soma_lightning.data import lerobot_format as fmt
from soma_lightning.data.findings import Findings
from soma_lightning.data.totals import FloatArray, Histogram, Totals

Rows = NDArray[np.bool_]
Integers = NDArray[np.int64]

#: LeRobot's own tolerance: farther from frame_index / fps, it refuses to load the frame.
TIMESTAMP_TOLERANCE_S = 1e-4
_REPORT_EVERY_S = 5.0


@dataclass(frozen=True)
class _Block:
    """A row group: file (relative to the root), its table, and of each row the episode and its number in that."""

    file: str
    table: Any
    episode_n: Integers
    frame_n: Integers


class Progress:
    """Hands out at most one line every few seconds."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report, self._last = report, time.monotonic()

    def at(self, what: str, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._last >= _REPORT_EVERY_S:
            self._last = now
            self._report(f"{what}: {done} of {total}")


class FrameScan:
    """Reads every number of a data set once (`check`), and those of some columns once more (`histograms`).

    watched: columns (state and action) whose changes inside an episode and whose duplicates are looked for.
    Afterwards: totals {column: Totals}; sound: episodes whose frames are where the metadata say; task_episodes,
    task_frames: how many of each task there are; unchanging: episodes whose last watched column, the action, never
    changes; duplicates: groups of episodes with the same watched values.
    """

    def __init__(
        self,
        root: Path,
        info: fmt.DatasetInfo,
        episodes: Sequence[fmt.EpisodeRow],
        num_tasks: int,
        watched: tuple[str, str],
        findings: Findings,
    ) -> None:
        self.root, self.info, self.episodes, self.findings = root, info, episodes, findings
        self.watched = watched
        declared = {
            key: feature
            for key, feature in info.features.items()
            if feature.dtype in fmt.NUMERIC_DTYPES and len(feature.shape) == 1
        }
        self.features = {key: fmt.Feature(key, dtype, (1,)) for key, dtype in fmt.BOOKKEEPING_DTYPES.items()} | declared
        self.totals = {key: Totals(feature.shape[0]) for key, feature in self.features.items()}
        self.task_episodes, self.task_frames = np.zeros(num_tasks, np.int64), np.zeros(num_tasks, np.int64)
        self.announced: dict[str, dict[int, fmt.EpisodeRow]] = {}
        for episode in episodes:
            self.announced.setdefault(episode.data_file, {})[episode.episode_index] = episode
        self._first_index = np.cumsum([0, *(episode.length for episode in episodes)])
        self._seen = np.zeros(len(episodes), np.int64)
        self._unsound: set[int] = set()
        self._first_action: dict[int, FloatArray] = {}
        self._moving: set[int] = set()
        self._digests: dict[int, Any] = {}

    @property
    def sound(self) -> set[int]:
        return {episode.episode_index for episode in self.episodes} - self._unsound

    @property
    def unchanging(self) -> list[int]:
        return [e for e in self._first_action if e not in self._moving and self._seen[e] > 1]

    @property
    def duplicates(self) -> list[list[int]]:
        groups: dict[bytes, list[int]] = {}
        for episode, digest in self._digests.items():
            groups.setdefault(digest.digest(), []).append(episode)
        return [group for group in groups.values() if len(group) > 1]

    # -- first pass ---------------------------------------------------------------------------------------------------

    def check(self, progress: Progress) -> None:
        """Reads all numbers, notes every fault in `findings`."""
        present = {path.relative_to(self.root).as_posix() for path in self.root.glob("data/*/*.parquet")}
        for name in sorted(present - set(self.announced)):
            self.findings.problem("meta/episodes knows nothing of this file", name)
        for done, (name, announced) in enumerate(self.announced.items(), 1):
            if (self.root / name).is_file():
                self._check_file(name, announced)
            else:
                self._unsound.update(announced)
                span = f"{min(announced)} to {max(announced)}"
                self.findings.problem(f"the file is missing; meta/episodes says episodes {span} are in it", name)
            progress.at("data files", done, len(self.announced))

    def _check_file(self, name: str, announced: Mapping[int, fmt.EpisodeRow]) -> None:
        last = -1
        for table in self._row_groups(name, list(self.features), complain=True):
            episode_n = self._integers(name, table, fmt.EPISODE_INDEX)
            if episode_n is None:
                continue
            known_n = np.isin(episode_n, list(announced))
            for unknown, count in zip(*np.unique(episode_n[~known_n], return_counts=True), strict=True):
                what = f"{count} frames of an episode that meta/episodes does not place in this file"
                self.findings.problem(what, name, int(unknown), fmt.EPISODE_INDEX)
            episode_n = episode_n[known_n]
            if len(episode_n):
                frame_n = self._count_frames(name, episode_n, last)
                last = int(episode_n[-1])
                block = _Block(name, table.filter(pa.array(known_n)), episode_n, frame_n)
                self._check_bookkeeping(block)
                self._check_numbers(block)
        for number, episode in announced.items():
            if self._seen[number] != episode.length:
                self._unsound.add(number)
                what = f"{self._seen[number]} frames, meta/episodes says {episode.length}"
                self.findings.problem(what, name, number, fmt.EPISODE_INDEX)

    def _row_groups(self, name: str, columns: Sequence[str], *, complain: bool = False) -> Iterator[Any]:
        """Tables of those columns that are there; with `complain`, faults become problems."""
        problem: Callable[..., None] = self.findings.problem if complain else (lambda *_: None)
        try:
            file = pq.ParquetFile(self.root / name)
        except fmt.PARQUET_ERRORS as error:
            problem(f"cannot be read as parquet: {error}", name)
            return
        there = file.schema_arrow.names
        stored = [key for key, feature in self.info.features.items() if feature.dtype != "video"]
        for key in dict.fromkeys([*columns, *stored]):
            if key not in there:
                problem(f"the column is missing; the file has {there}", name, None, key)
        if complain:
            for key in sorted(set(there) - set(self.info.features) - set(fmt.BOOKKEEPING_DTYPES)):
                self.findings.warning(f"{fmt.INFO_FILE} does not declare this column", name, None, key)
        for group in range(file.metadata.num_row_groups):
            try:
                yield file.read_row_group(group, columns=[key for key in columns if key in there])
            except fmt.PARQUET_ERRORS as error:
                problem(f"row group {group} cannot be read: {error}", name)

    def _integers(self, name: str, table: Any, key: str) -> Integers | None:
        """A bookkeeping column, or None after a problem was noted."""
        if key not in table.column_names:
            return None
        column = table[key].combine_chunks()
        if not pa.types.is_integer(column.type) or column.null_count:
            what = f"must be int64 without nulls, found {column.type} ({column.null_count} nulls)"
            self.findings.problem(what, name, None, key)
            return None
        return np.asarray(column.to_numpy(zero_copy_only=False), dtype=np.int64)

    def _count_frames(self, name: str, episode_n: Integers, last: int) -> Integers:
        """Each row's number inside its episode, by counting. last: episode of the row before."""
        frame_n = np.empty(len(episode_n), np.int64)
        starts = np.flatnonzero(np.diff(episode_n, prepend=-1) != 0)
        for start, end in zip(starts.tolist(), [*starts[1:].tolist(), len(episode_n)], strict=True):
            number = int(episode_n[start])
            if number != last and (self._seen[number] or number < last):
                self._unsound.add(number)
                what = f"its frames follow those of episode {last}; frames must be in order and in one piece"
                self.findings.problem(what, name, number, fmt.EPISODE_INDEX)
            frame_n[start:end] = self._seen[number] + np.arange(end - start)
            self._seen[number] += end - start
            last = number
        return frame_n

    def _check_bookkeeping(self, block: _Block) -> None:
        expected = {
            fmt.FRAME_INDEX: block.frame_n,
            fmt.INDEX: self._first_index[block.episode_n] + block.frame_n,
        }
        for key, due in expected.items():
            found = self._integers(block.file, block.table, key)
            if found is not None:
                self._unsound |= self._note(block, key, found != due, "{}, must be {}", found, due)
        task_n = self._integers(block.file, block.table, fmt.TASK_INDEX)
        if task_n is None:
            return
        num_tasks = len(self.task_frames)
        wrong = (task_n < 0) | (task_n >= num_tasks)
        text = f"task {{}} is not in {fmt.TASKS_FILE}, which has {num_tasks} tasks"
        self._unsound |= self._note(block, fmt.TASK_INDEX, wrong, text, task_n)
        self.task_frames += np.bincount(task_n[~wrong], minlength=num_tasks)
        self.task_episodes += np.bincount(task_n[~wrong & (block.frame_n == 0)], minlength=num_tasks)

    def _check_numbers(self, block: _Block) -> None:
        for key, feature in self.features.items():
            if key not in block.table.column_names:
                continue
            try:
                x_nD, whole_n = vectors(block.table[key].combine_chunks(), feature)
            except TypeError as error:
                self.findings.problem(str(error), block.file, None, key)
                continue
            finite_n = np.isfinite(x_nD).all(axis=1)
            bad = self._note(block, key, ~whole_n, f"a row that is not {feature.shape[0]} numbers")
            bad |= self._note(block, key, whole_n & ~finite_n, "a value is missing or not finite: {}", x_nD)
            if key == fmt.TIMESTAMP:
                self._unsound |= bad  # the reader could not place their images
                due_n = block.frame_n / self.info.fps
                late_n = finite_n & (np.abs(x_nD[:, 0] - due_n) > TIMESTAMP_TOLERANCE_S)
                self._note(block, key, late_n, "{} s, must be frame_index / fps = {} s", x_nD[:, 0], due_n)
            self.totals[key].add(x_nD[finite_n], block.file, block.episode_n[finite_n], block.frame_n[finite_n])
            if key in self.watched:
                self._watch(key, x_nD, block.episode_n)

    def _note(self, block: _Block, key: str, wrong_n: Rows, text: str, *values: NDArray[Any]) -> set[int]:
        """One problem for each episode that has wrong rows, about the first of them; returns these episodes.

        text: a format whose fields become that row of `values`.
        """
        rows = np.flatnonzero(wrong_n)
        episodes: list[int] = np.unique(block.episode_n[rows]).tolist()
        for number in episodes:
            mine = rows[block.episode_n[rows] == number]
            what = text.format(*(_shown(array[mine[0]]) for array in values))
            more = f" (and {len(mine) - 1} frames more)" if len(mine) > 1 else ""
            self.findings.problem(f"frame {block.frame_n[mine[0]]}: {what}{more}", block.file, number, key)
        return set(episodes)

    def _watch(self, key: str, x_nD: FloatArray, episode_n: Integers) -> None:
        for number in np.unique(episode_n).tolist():
            mine = x_nD[episode_n == number]
            self._digests.setdefault(number, hashlib.blake2b(digest_size=16)).update(key.encode() + mine.tobytes())
            if key == self.watched[1]:
                first = self._first_action.setdefault(number, mine[0].copy())  # a view would keep all rows
                if (mine != first).any():
                    self._moving.add(number)

    # -- second pass --------------------------------------------------------------------------------------------------

    def histograms(self, progress: Progress) -> dict[str, Histogram]:
        """Of the watched columns, between the ends that `check` found; columns without a value are left out."""
        keys = [key for key in dict.fromkeys(self.watched) if self.totals[key].count]
        histograms = {key: Histogram(self.totals[key].low, self.totals[key].high) for key in keys}
        for done, name in enumerate(self.announced, 1):
            for table in self._row_groups(name, keys):
                for key in set(keys) & set(table.column_names):
                    try:
                        x_nD, _ = vectors(table[key].combine_chunks(), self.features[key])
                    except TypeError:  # noted in the first pass
                        continue
                    histograms[key].add(x_nD[np.isfinite(x_nD).all(axis=1)])
            progress.at("histograms of data files", done, len(self.announced))
        return histograms


def vectors(column: Any, feature: fmt.Feature) -> tuple[FloatArray, Rows]:
    """A numeric column as float64 [n, D], NaN where there is no number, and which rows have D entries, bool [n].

    Raises TypeError when the column holds another type than the feature declares.
    """
    size = feature.shape[0]
    is_list = any(test(column.type) for test in (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list))
    found = column.type.value_type if is_list else column.type
    if str(found) != str(pa.from_numpy_dtype(np.dtype(feature.dtype))):
        raise TypeError(f"holds {column.type}, but {fmt.INFO_FILE} declares {feature.dtype} {list(feature.shape)}")
    lengths = np.asarray(pc.fill_null(pc.list_value_length(column), 0)) if is_list else np.ones(len(column), np.int64)
    whole = lengths == size
    if is_list:
        column = column.filter(pa.array(whole)).flatten()
    numbers = column.cast(pa.float64(), safe=False) if not pa.types.is_boolean(column.type) else column.cast(pa.uint8())
    values = np.full((len(whole), size), np.nan)
    if whole.any():
        values[whole] = pc.cast(numbers, pa.float64()).to_numpy(zero_copy_only=False).reshape(-1, size)
    return values, whole


def _shown(value: Any) -> str:
    if np.ndim(value):
        return "[" + ", ".join(f"{number:.6g}" for number in value[:16]) + (", ...]" if len(value) > 16 else "]")
    return f"{value:.6g}" if isinstance(value, np.floating) else str(value)
