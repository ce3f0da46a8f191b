"""Where a LeRobot v3.0 data set keeps what, and whether the metadata of a folder describe a whole one.

`meta/info.json` has features, rate and totals, `meta/tasks.parquet` one row per task, `meta/episodes/*/*.parquet` one
row per episode, `meta/stats.json` the statistics, and `data/*/*.parquet` one row per frame with images embedded as PNG.
Writer and reader take every name from here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from soma_lightning.contract import IMAGE_PREFIX

CODEBASE_VERSION = "v3.0"
INFO_FILE = "meta/info.json"
STATS_FILE = "meta/stats.json"
TASKS_FILE = "meta/tasks.parquet"
#: Ours, not LeRobot's: how `soma demos` recorded the data set. Other readers leave it alone.
RECORDING_FILE = "meta/soma_demos.json"
FILES_PER_CHUNK = 1000
DATA_FILE_SIZE_MB = 100
VIDEO_FILE_SIZE_MB = 200
DATA_PATH = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
EPISODES_PATH = "meta/episodes/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"

TIMESTAMP = "timestamp"
FRAME_INDEX = "frame_index"
EPISODE_INDEX = "episode_index"
INDEX = "index"
TASK_INDEX = "task_index"

#: Columns that every data set has; the writer fills them, so no recording may name them itself.
BOOKKEEPING_DTYPES = {
    TIMESTAMP: "float32",
    FRAME_INDEX: "int64",
    EPISODE_INDEX: "int64",
    INDEX: "int64",
    TASK_INDEX: "int64",
}

NUMERIC_DTYPES = frozenset(
    {"bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float32", "float64"}
)


class DatasetFormatError(ValueError):
    """A folder is no data set that this version reads; the message names the file and, where one is to blame, the
    episode and the column."""


@dataclass(frozen=True)
class Feature:
    """One column: its numpy dtype name (or "image", "video", "string"), the shape of one frame, and axis names."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    names: Any = None

    @property
    def is_image(self) -> bool:
        return self.dtype == "image"

    @property
    def image_size(self) -> tuple[int, int]:
        """(height, width) of an image feature, whichever way round its shape is declared."""
        channels_first = len(self.shape) == 3 and (
            "channel" in str(self.names[0]) if isinstance(self.names, list) and self.names else self.shape[-1] != 3
        )
        return (self.shape[1], self.shape[2]) if channels_first else (self.shape[0], self.shape[1])

    def to_json(self) -> dict[str, Any]:
        return {"dtype": self.dtype, "shape": list(self.shape), "names": self.names}


@dataclass(frozen=True)
class DatasetInfo:
    """What `meta/info.json` says. `fps`: control rate in frames per second; a chunk of H actions lasts H / fps s."""

    fps: int
    features: dict[str, Feature]
    total_episodes: int
    total_frames: int
    data_path: str = DATA_PATH
    robot_type: str | None = None

    @property
    def image_keys(self) -> list[str]:
        return [key for key, feature in self.features.items() if feature.is_image]

    @property
    def video_keys(self) -> list[str]:
        return [key for key, feature in self.features.items() if feature.dtype == "video"]


@dataclass(frozen=True)
class EpisodeRow:
    """One row of `meta/episodes`: `length` frames in the file `data_file` (relative to the root)."""

    episode_index: int
    length: int
    data_file: str


def load_info(root: Path) -> DatasetInfo:
    """Reads `meta/info.json`.

    Raises FileNotFoundError when the folder or the file is missing, DatasetFormatError for another version, unreadable
    JSON, or features that are not described completely.
    """
    path = root / INFO_FILE
    if not root.is_dir():
        raise FileNotFoundError(
            f"no data set at '{root}': the folder does not exist. A LeRobot {CODEBASE_VERSION} data set has "
            f"{INFO_FILE} in it; record one with: soma demos --env somatable --task pick --episodes 200 --out {root}"
        )
    if not path.is_file():
        raise FileNotFoundError(
            f"'{root}' is no LeRobot data set: {path} is missing. Point to the folder that has 'meta' and 'data' in "
            f"it, or record one with: soma demos --env somatable --task pick --episodes 200 --out DIR"
        )
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DatasetFormatError(f"{path} is no valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise DatasetFormatError(f"{path} holds a {type(raw).__name__}, expected an object")
    _check_version(path, raw.get("codebase_version"))
    for key in ("fps", "features", "total_episodes", "total_frames"):
        if key not in raw:
            raise DatasetFormatError(f"{path} has no '{key}'; it has {sorted(raw)}")
    if not isinstance(raw["features"], Mapping):
        raise DatasetFormatError(f"{path}: features={raw['features']!r} must be an object of columns")
    return DatasetInfo(
        fps=_positive_integer(path, "fps", raw["fps"]),
        features={key: _parse_feature(path, key, value) for key, value in raw["features"].items()},
        total_episodes=_positive_integer(path, "total_episodes", raw["total_episodes"]),
        total_frames=_positive_integer(path, "total_frames", raw["total_frames"]),
        data_path=_data_path(path, raw.get("data_path")),
        robot_type=raw.get("robot_type"),
    )


def _check_version(path: Path, version: object) -> None:
    if version == CODEBASE_VERSION:
        return
    way_out = f"supported: {CODEBASE_VERSION}"
    if isinstance(version, str) and version.startswith("v2."):
        way_out += (
            "; convert the data set with lerobot's own tool: "
            "python -m lerobot.scripts.convert_dataset_v21_to_v30 --repo-id=REPO_ID --root=FOLDER"
        )
    raise DatasetFormatError(f"{path}: codebase_version {version!r} cannot be read; {way_out}")


def _positive_integer(path: Path, key: str, value: object) -> int:
    number = int(value) if isinstance(value, float) and value.is_integer() else value  # JSON may say 20.0
    if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number < 2**63:
        raise DatasetFormatError(f"{path}: {key}={value!r} must be a positive integer")
    return number


def _data_path(path: Path, value: object) -> str:
    """The pattern of data files; None means the usual one."""
    if value is None:
        return DATA_PATH
    try:
        name = value.format(chunk_index=0, file_index=0) if isinstance(value, str) else ""
    except (KeyError, IndexError, ValueError):
        name = ""
    if not name:
        raise DatasetFormatError(
            f"{path}: data_path={value!r} is no pattern of chunk_index and file_index: {DATA_PATH!r}"
        )
    return str(value)


def _parse_feature(path: Path, key: str, value: object) -> Feature:
    if not isinstance(value, Mapping) or "dtype" not in value or "shape" not in value:
        raise DatasetFormatError(f"{path}: feature '{key}' needs 'dtype' and 'shape', found {value!r}")
    shape = value["shape"]
    if not isinstance(shape, Sequence) or not all(isinstance(size, int) and size > 0 for size in shape):
        raise DatasetFormatError(f"{path}: feature '{key}' has shape {shape!r}, expected a list of positive integers")
    feature = Feature(key, str(value["dtype"]), tuple(shape), value.get("names"))
    if feature.is_image and len(shape) != 3:
        raise DatasetFormatError(f"{path}: image feature '{key}' has shape {shape!r}, expected 3 sizes")
    if key.startswith(IMAGE_PREFIX) and feature.dtype not in ("image", "video"):
        raise DatasetFormatError(f"{path}: camera '{key}' has dtype '{feature.dtype}', expected 'image' or 'video'")
    return feature


def load_tasks(root: Path) -> list[str]:
    """The instruction of each task index. Raises DatasetFormatError naming the file and what it lacks."""
    path = root / TASKS_FILE
    table = _read_table(path)
    # pandas stores the instruction as its index: a column "task", or "__index_level_0__" when the index has no name.
    column = next((name for name in ("task", "__index_level_0__") if name in table.column_names), None)
    if column is None or TASK_INDEX not in table.column_names:
        raise DatasetFormatError(
            f"{path} needs the columns '{TASK_INDEX}' and 'task' (the pandas index), found {table.column_names}"
        )
    numbers: list[int] = table[TASK_INDEX].to_pylist()
    tasks: list[str] = table[column].to_pylist()
    if numbers != list(range(len(numbers))):
        raise DatasetFormatError(f"{path}: column '{TASK_INDEX}' must count 0, 1, 2, ..., found {numbers[:8]}")
    for number, task in enumerate(tasks):
        if not isinstance(task, str):
            raise DatasetFormatError(f"{path}: task {number} is {task!r}, expected the instruction as a string")
    return tasks


def load_episodes(root: Path, info: DatasetInfo) -> list[EpisodeRow]:
    """Every episode in order. Raises DatasetFormatError when rows are missing, unordered or disagree with `info`."""
    paths = sorted((root / "meta/episodes").glob("*/*.parquet"))
    if not paths:
        raise DatasetFormatError(f"{root / 'meta/episodes'} holds no parquet file (looked for */*.parquet)")
    rows: list[EpisodeRow] = []
    needed = (EPISODE_INDEX, "length", "data/chunk_index", "data/file_index")
    for path in paths:
        table = _read_table(path, [*needed])
        missing = [name for name in needed if name not in table.column_names]
        if missing:
            raise DatasetFormatError(f"{path} lacks the columns {missing}")
        for number, length, chunk, file in zip(*(table[name].to_pylist() for name in needed), strict=True):
            if number != len(rows):
                raise DatasetFormatError(f"{path}: row {len(rows)} describes episode {number}; rows must be in order")
            if not isinstance(length, int) or length < 1:
                raise DatasetFormatError(f"{path}: episode {number} has length {length!r}")
            rows.append(EpisodeRow(number, length, info.data_path.format(chunk_index=chunk, file_index=file)))
    frames = sum(row.length for row in rows)
    if len(rows) != info.total_episodes or frames != info.total_frames:
        raise DatasetFormatError(
            f"{root}: meta/info.json counts {info.total_episodes} episodes and {info.total_frames} frames, "
            f"meta/episodes {len(rows)} and {frames}; the data set is incomplete"
        )
    return rows


def _read_table(path: Path, columns: list[str] | None = None) -> Any:
    """A whole small parquet file; columns that it lacks are left out."""
    try:
        file = pq.ParquetFile(path)
        wanted = None if columns is None else [name for name in columns if name in file.schema_arrow.names]
        return file.read(columns=wanted)
    except FileNotFoundError as error:
        raise DatasetFormatError(f"{path} is missing") from error
    except (OSError, pa.ArrowException) as error:
        raise DatasetFormatError(f"{path} cannot be read as parquet: {error}") from error
