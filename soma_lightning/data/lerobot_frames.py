"""What the data files say about each frame, apart from its pixels, checked against the metadata.

Shape letters: N frames of the chosen episodes in order, S state dimensions, A action dimensions. Everything here is a
few dozen bytes a frame and stays in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from soma_lightning.data import lerobot_format as fmt

DatasetFormatError = fmt.DatasetFormatError


@dataclass(frozen=True)
class FrameTable:
    """Numbers of all frames, and where their images lie.

    states: float32 [N, S]. actions: float32 [N, A]. index, episode_index, frame_index, task_index: int64 [N].
    last_row: int64 [N], the row of the last frame of each frame's episode. files: data files, absolute.
    location: int64 [N, 3], for each frame its file, its row group in it, and its row in that group.
    """

    states: NDArray[np.float32]
    actions: NDArray[np.float32]
    index: NDArray[np.int64]
    episode_index: NDArray[np.int64]
    frame_index: NDArray[np.int64]
    task_index: NDArray[np.int64]
    last_row: NDArray[np.int64]
    files: list[Path]
    location: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.states)


def read_frames(
    root: Path,
    info: fmt.DatasetInfo,
    episodes: Sequence[fmt.EpisodeRow],
    all_episodes: Sequence[fmt.EpisodeRow],
    num_tasks: int,
    state_key: str,
    action_key: str,
) -> FrameTable:
    """Reads the numeric columns of `episodes` (a part of `all_episodes`, in order).

    Raises DatasetFormatError naming file, episode and column of what is missing, of a wrong type or length, or not
    finite.
    """
    _check_files(root, all_episodes)
    wanted_of: dict[str, list[fmt.EpisodeRow]] = {}
    for episode in episodes:
        wanted_of.setdefault(episode.data_file, []).append(episode)
    parts: list[dict[str, NDArray[Any]]] = []
    for number, (name, wanted) in enumerate(wanted_of.items()):
        parts.append(_read_file(root / name, number, info, wanted, state_key, action_key))
        _check_tasks(root / name, parts[-1], num_tasks)
    columns = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
    lengths = np.array([episode.length for episode in episodes])
    ends = np.cumsum(lengths) - 1
    expected = np.repeat([episode.episode_index for episode in episodes], lengths)
    if (wrong := np.flatnonzero(columns[fmt.EPISODE_INDEX] != expected)).size:
        raise DatasetFormatError(
            f"{root}: the frames of episode {expected[wrong[0]]} do not follow those of the episode before it; "
            f"meta/episodes and column '{fmt.EPISODE_INDEX}' disagree about the order"
        )
    return FrameTable(
        states=columns[state_key],
        actions=columns[action_key],
        index=columns[fmt.INDEX],
        episode_index=columns[fmt.EPISODE_INDEX],
        frame_index=columns[fmt.FRAME_INDEX],
        task_index=columns[fmt.TASK_INDEX],
        last_row=np.repeat(ends, lengths),
        files=[root / name for name in wanted_of],
        location=columns["location"],
    )


def _check_files(root: Path, episodes: Sequence[fmt.EpisodeRow]) -> None:
    """The files that the metadata name are the files that are there."""
    first_episode: dict[str, int] = {}
    for episode in episodes:
        first_episode.setdefault(episode.data_file, episode.episode_index)
    for name, episode_index in first_episode.items():
        if not (root / name).is_file():
            raise DatasetFormatError(f"{root / name} is missing; meta/episodes says episode {episode_index} is in it")
    present = {path.relative_to(root).as_posix() for path in sorted((root / "data").glob("*/*.parquet"))}
    if unknown := sorted(present - set(first_episode)):
        raise DatasetFormatError(f"{root}: meta/episodes knows nothing of {unknown}; the metadata are incomplete")


def _read_file(
    path: Path,
    file_number: int,
    info: fmt.DatasetInfo,
    episodes: Sequence[fmt.EpisodeRow],
    state_key: str,
    action_key: str,
) -> dict[str, NDArray[Any]]:
    """Columns of the rows that belong to `episodes`, plus "location" [n, 3]."""
    numeric = dict.fromkeys((state_key, action_key), np.float32)
    names = [*numeric, fmt.INDEX, fmt.EPISODE_INDEX, fmt.FRAME_INDEX, fmt.TASK_INDEX]
    try:
        file = pq.ParquetFile(path)
        for key in (*names, *info.image_keys):
            if key not in file.schema_arrow.names:
                raise DatasetFormatError(
                    f"{path} (episodes {episodes[0].episode_index} to {episodes[-1].episode_index}) has no column "
                    f"'{key}'; it has {file.schema_arrow.names}"
                )
        table = file.read(columns=names)
    except fmt.PARQUET_ERRORS as error:
        raise DatasetFormatError(f"{path} cannot be read as parquet: {error}") from error

    episode_of_row = _integers(path, table, fmt.EPISODE_INDEX)
    rows = _rows_of_episodes(path, episode_of_row, episodes)
    columns: dict[str, NDArray[Any]] = {fmt.EPISODE_INDEX: episode_of_row[rows]}
    for key in (fmt.INDEX, fmt.FRAME_INDEX, fmt.TASK_INDEX):
        columns[key] = _integers(path, table, key)[rows]
    for key in numeric:
        values = _vectors(path, table, info.features[key], episode_of_row)[rows]
        _check_finite(path, key, values, columns)
        columns[key] = np.ascontiguousarray(values, dtype=np.float32)
    _check_counting(path, columns)

    group_sizes = [file.metadata.row_group(group).num_rows for group in range(file.metadata.num_row_groups)]
    group_of_row = np.repeat(np.arange(len(group_sizes)), group_sizes)
    row_in_group = np.arange(len(group_of_row)) - np.repeat(np.cumsum([0, *group_sizes[:-1]]), group_sizes)
    columns["location"] = np.stack([np.full(len(rows), file_number), group_of_row[rows], row_in_group[rows]], axis=1)
    return columns


def _rows_of_episodes(
    path: Path, episode_of_row: NDArray[Any], episodes: Sequence[fmt.EpisodeRow]
) -> NDArray[np.int64]:
    found, counts = np.unique(episode_of_row, return_counts=True)
    count_of = dict(zip(found.tolist(), counts.tolist(), strict=True))
    for episode in episodes:
        if count_of.get(episode.episode_index, 0) != episode.length:
            raise DatasetFormatError(
                f"{path}: episode {episode.episode_index} has {count_of.get(episode.episode_index, 0)} frames in "
                f"column '{fmt.EPISODE_INDEX}', meta/episodes says {episode.length}"
            )
    return np.flatnonzero(np.isin(episode_of_row, [episode.episode_index for episode in episodes]))


def _integers(path: Path, table: Any, key: str) -> NDArray[np.int64]:
    column = table[key].combine_chunks()
    if not pa.types.is_integer(column.type) or column.null_count:
        raise DatasetFormatError(
            f"{path}: column '{key}' must be int64 without nulls, found {column.type} ({column.null_count} nulls)"
        )
    return np.asarray(column.to_numpy(zero_copy_only=False), dtype=np.int64)


def _vectors(path: Path, table: Any, feature: fmt.Feature, episode_of_row: NDArray[Any]) -> NDArray[Any]:
    """A numeric column as [rows, D], from a list, a fixed-size list, or (D = 1) a plain column."""
    if feature.dtype not in fmt.NUMERIC_DTYPES or len(feature.shape) != 1:
        raise DatasetFormatError(
            f"{path}: column '{feature.key}' is declared as {feature.dtype} {list(feature.shape)} in "
            f"{fmt.INFO_FILE}; a state or action is a vector of numbers"
        )
    column = table[feature.key].combine_chunks()
    size = feature.shape[0]
    is_list = any(test(column.type) for test in (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list))
    value_type = column.type.value_type if is_list else column.type
    if str(value_type) != str(pa.from_numpy_dtype(np.dtype(feature.dtype))):
        raise DatasetFormatError(
            f"{path}: column '{feature.key}' holds {value_type}, but {fmt.INFO_FILE} declares {feature.dtype}"
        )
    lengths = np.ones(len(column), np.int64)
    if is_list:
        # A null row counts as length 0, so that it is reported with its episode like any other wrong length.
        lengths = np.asarray(pc.fill_null(pc.list_value_length(column), 0))
    elif column.null_count:
        lengths = np.asarray(column.is_valid()).astype(np.int64)
    if (wrong := np.flatnonzero(lengths != size)).size:
        row = int(wrong[0])
        raise DatasetFormatError(
            f"{path}: episode {episode_of_row[row]}, column '{feature.key}': row {row} has {lengths[row]} values, "
            f"{fmt.INFO_FILE} declares {size}"
        )
    values = column.flatten() if is_list else column
    if values.null_count:
        row = int(np.flatnonzero(~np.asarray(values.is_valid()))[0]) // size
        raise DatasetFormatError(
            f"{path}: episode {episode_of_row[row]}, column '{feature.key}': row {row} has a null value"
        )
    return np.asarray(values.to_numpy(zero_copy_only=False)).reshape(-1, size)


def _check_finite(path: Path, key: str, values: NDArray[Any], columns: dict[str, NDArray[Any]]) -> None:
    bad = np.flatnonzero(~np.isfinite(values).all(axis=1))
    if bad.size:
        row = int(bad[0])
        raise DatasetFormatError(
            f"{path}: episode {columns[fmt.EPISODE_INDEX][row]}, column '{key}': frame "
            f"{columns[fmt.FRAME_INDEX][row]} is not finite ({values[row].tolist()})"
        )


def _check_counting(path: Path, columns: dict[str, NDArray[Any]]) -> None:
    """Frames count from 0 inside an episode, and the global index counts on with them."""
    episode, index = columns[fmt.EPISODE_INDEX], columns[fmt.INDEX]
    starts = np.concatenate([[True], np.diff(episode) != 0])
    first_row = np.maximum.accumulate(np.where(starts, np.arange(len(episode)), 0))
    expected = {
        fmt.EPISODE_INDEX: np.maximum.accumulate(episode),
        fmt.FRAME_INDEX: np.arange(len(episode)) - first_row,
        fmt.INDEX: index[first_row] + np.arange(len(episode)) - first_row,
    }
    for key, values in expected.items():
        if (wrong := np.flatnonzero(columns[key] != values)).size:
            row = int(wrong[0])
            raise DatasetFormatError(
                f"{path}: episode {episode[row]}, column '{key}': found {columns[key][row]} where {values[row]} must "
                "follow; the frames are out of order"
            )


def _check_tasks(path: Path, columns: dict[str, NDArray[Any]], num_tasks: int) -> None:
    task = columns[fmt.TASK_INDEX]
    if (wrong := np.flatnonzero((task < 0) | (task >= num_tasks))).size:
        row = int(wrong[0])
        raise DatasetFormatError(
            f"{path}: episode {columns[fmt.EPISODE_INDEX][row]}, column '{fmt.TASK_INDEX}': task {task[row]} is not "
            f"in {fmt.TASKS_FILE}, which has {num_tasks} tasks"
        )
