"""Where a LeRobot v3.0 data set keeps what, and whether the metadata of a folder describe a whole one.

`meta/info.json` has features, rate and totals, `meta/tasks.parquet` one row per task, `meta/episodes/*/*.parquet` one
row per episode, `meta/stats.json` the statistics, and `data/*/*.parquet` one row per frame with images embedded as PNG.
Cameras stored as video have no column; their frames are in `videos/<camera>/*/*.mp4`, several episodes in each file.
Writer and reader take every name from here; what differs in v2.x is in `lerobot_v2`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from soma_lightning.contract import IMAGE_PREFIX

CODEBASE_VERSION = "v3.0"
#: Versions with one file per episode, which are read but not written.
EPISODE_FILE_VERSIONS = ("v2.1", "v2.0")
INFO_FILE = "meta/info.json"
STATS_FILE = "meta/stats.json"
TASKS_FILE = "meta/tasks.parquet"
#: Ours, not LeRobot's: how `soma demos` recorded the data set. Other readers leave it alone.
RECORDING_FILE = "meta/soma_demos.json"
FILES_PER_CHUNK = 1000
DATA_FILE_SIZE_MB = 100
VIDEO_FILE_SIZE_MB = 200
DATA_PATH = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
VIDEO_PATH = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
#: Patterns of v2.x.
EPISODE_DATA_PATH = "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet"
EPISODE_VIDEO_PATH = "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4"
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


#: What pyarrow raises at a damaged file; the last one where the damage hits a name.
PARQUET_ERRORS = (OSError, pa.ArrowException, UnicodeError)


class DatasetFormatError(ValueError):
    """A folder is no data set that this version reads; the message names the file and, where one is to blame, the
    episode and the column."""


@dataclass(frozen=True)
class Feature:
    """One column: its numpy dtype name (or "image", "video", "string"), the shape of one frame, and axis names.

    video_info: what is known of a video's encoding, {"video.codec": ...}; reading depends on its `is_depth_map` alone.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    names: Any = None
    video_info: Mapping[str, Any] | None = None

    @property
    def is_camera(self) -> bool:
        return self.dtype in ("image", "video")

    @property
    def is_depth_map(self) -> bool:
        info = self.video_info or {}
        return bool(info.get("is_depth_map") or info.get("video.is_depth_map"))

    @property
    def image_size(self) -> tuple[int, int]:
        """(height, width) of an image feature, whichever way round its shape is declared."""
        channels_first = len(self.shape) == 3 and (
            "channel" in str(self.names[0]) if isinstance(self.names, list) and self.names else self.shape[-1] != 3
        )
        return (self.shape[1], self.shape[2]) if channels_first else (self.shape[0], self.shape[1])

    def to_json(self) -> dict[str, Any]:
        described = {"dtype": self.dtype, "shape": list(self.shape), "names": self.names}
        return described if self.video_info is None else {**described, "info": dict(self.video_info)}


@dataclass(frozen=True)
class DatasetInfo:
    """What `meta/info.json` says. `fps`: control rate in frames per second; a chunk of H actions lasts H / fps s.

    data_path, video_path: patterns of file names, in the words of `version`.
    """

    fps: int
    features: dict[str, Feature]
    total_episodes: int
    total_frames: int
    data_path: str = DATA_PATH
    video_path: str = VIDEO_PATH
    robot_type: str | None = None
    version: str = CODEBASE_VERSION
    chunks_size: int = FILES_PER_CHUNK

    @property
    def image_keys(self) -> list[str]:
        return [key for key, feature in self.features.items() if feature.dtype == "image"]

    @property
    def video_keys(self) -> list[str]:
        return [key for key, feature in self.features.items() if feature.dtype == "video"]


@dataclass(frozen=True)
class VideoSpan:
    """Where the frames of an episode lie: in which file (relative to the root), from which time on, in seconds."""

    file: str
    from_timestamp: float


@dataclass(frozen=True)
class EpisodeRow:
    """One row of `meta/episodes`: `length` frames in the file `data_file` (relative to the root).

    videos: {camera: where its frames are}, for the cameras that were asked for.
    """

    episode_index: int
    length: int
    data_file: str
    videos: Mapping[str, VideoSpan] = field(default_factory=dict)


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
    version = _check_version(path, raw.get("codebase_version"))
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
        data_path=_pattern(path, "data_path", raw.get("data_path"), version),
        video_path=_pattern(path, "video_path", raw.get("video_path"), version),
        robot_type=raw.get("robot_type"),
        version=version,
        chunks_size=_positive_integer(path, "chunks_size", raw.get("chunks_size", FILES_PER_CHUNK)),
    )


def _check_version(path: Path, version: object) -> str:
    supported = (CODEBASE_VERSION, *EPISODE_FILE_VERSIONS)
    if isinstance(version, str) and version in supported:
        return version
    way_out = f"supported: {', '.join(supported)}"
    if isinstance(version, str) and version.startswith("v1."):
        way_out += "; convert the data set with the lerobot release that introduced v2.0, or record it anew"
    raise DatasetFormatError(f"{path}: codebase_version {version!r} cannot be read; {way_out}")


def _positive_integer(path: Path, key: str, value: object) -> int:
    number = int(value) if isinstance(value, float) and value.is_integer() else value  # JSON may say 20.0
    if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number < 2**63:
        raise DatasetFormatError(f"{path}: {key}={value!r} must be a positive integer")
    return number


def _pattern(path: Path, key: str, value: object, version: str) -> str:
    """A pattern of file names; None means the usual one of `version`."""
    usual = {"data_path": DATA_PATH, "video_path": VIDEO_PATH}
    words: dict[str, Any] = {"chunk_index": 0, "file_index": 0}
    if version in EPISODE_FILE_VERSIONS:
        usual = {"data_path": EPISODE_DATA_PATH, "video_path": EPISODE_VIDEO_PATH}
        words = {"episode_chunk": 0, "episode_index": 0}
    if value is None:
        return usual[key]
    if key == "video_path":
        words["video_key"] = "camera"
    try:
        name = value.format(**words) if isinstance(value, str) else ""
    except (KeyError, IndexError, ValueError):
        name = ""
    if not name:
        raise DatasetFormatError(f"{path}: {key}={value!r} is no pattern of {' and '.join(words)}: {usual[key]!r}")
    return str(value)


def _parse_feature(path: Path, key: str, value: object) -> Feature:
    if not isinstance(value, Mapping) or "dtype" not in value or "shape" not in value:
        raise DatasetFormatError(f"{path}: feature '{key}' needs 'dtype' and 'shape', found {value!r}")
    shape = value["shape"]
    if not isinstance(shape, Sequence) or not all(_is_count(size) and 0 < size < 2**31 for size in shape):
        raise DatasetFormatError(f"{path}: feature '{key}' has shape {shape!r}, expected a list of positive integers")
    info = value.get("info") or value.get("video_info")  # the latter: v2.0
    feature = Feature(
        key, str(value["dtype"]), tuple(shape), value.get("names"), info if isinstance(info, Mapping) else None
    )
    if feature.is_camera and len(shape) != 3:
        raise DatasetFormatError(f"{path}: {feature.dtype} feature '{key}' has shape {shape!r}, expected 3 sizes")
    if key.startswith(IMAGE_PREFIX) and not feature.is_camera:
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


def load_episodes(root: Path, info: DatasetInfo, videos: Sequence[str] = ()) -> list[EpisodeRow]:
    """Every episode in order, with the place of its frames in the videos of the cameras `videos`.

    Raises DatasetFormatError when rows are missing, unordered or disagree with `info`.
    """
    paths = sorted((root / "meta/episodes").glob("*/*.parquet"))
    if not paths:
        raise DatasetFormatError(f"{root / 'meta/episodes'} holds no parquet file (looked for */*.parquet)")
    rows: list[EpisodeRow] = []
    needed = [EPISODE_INDEX, "length", "data/chunk_index", "data/file_index"]
    needed += [f"videos/{key}/{name}" for key in videos for name in ("chunk_index", "file_index", "from_timestamp")]
    for path in paths:
        table = _read_table(path, needed)
        missing = [name for name in needed if name not in table.column_names]
        if missing:
            raise DatasetFormatError(f"{path} lacks the columns {missing}")
        for number, length, chunk, file, *spans in zip(*(table[name].to_pylist() for name in needed), strict=True):
            check_episode(path, len(rows), number, length)
            if not _is_count(chunk) or not _is_count(file):
                raise DatasetFormatError(f"{path}: episode {number}: data has chunk {chunk!r} and file {file!r}")
            data_file = info.data_path.format(chunk_index=chunk, file_index=file)
            found = {
                key: _video_span(path, info, number, key, *spans[3 * i : 3 * i + 3]) for i, key in enumerate(videos)
            }
            rows.append(EpisodeRow(number, length, data_file, found))
    check_totals(root, info, rows, "meta/episodes")
    return rows


def _video_span(path: Path, info: DatasetInfo, episode: int, key: str, chunk: Any, file: Any, start: Any) -> VideoSpan:
    if not _is_count(chunk) or not _is_count(file) or not isinstance(start, float | int):
        raise DatasetFormatError(
            f"{path}: episode {episode}: videos/{key} has chunk {chunk!r}, file {file!r} and from_timestamp {start!r}"
        )
    if not (math.isfinite(start) and start >= 0):
        raise DatasetFormatError(f"{path}: episode {episode}: videos/{key}/from_timestamp is {start!r}")
    return VideoSpan(info.video_path.format(video_key=key, chunk_index=chunk, file_index=file), float(start))


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def check_episode(path: Path, expected: int, number: object, length: object) -> None:
    """Raises DatasetFormatError unless this is episode `expected`, with at least one frame."""
    if number != expected:
        raise DatasetFormatError(f"{path}: row {expected} describes episode {number}; rows must be in order")
    if isinstance(length, bool) or not isinstance(length, int) or length < 1:
        raise DatasetFormatError(f"{path}: episode {number} has length {length!r}")


def check_totals(root: Path, info: DatasetInfo, rows: Sequence[EpisodeRow], where: str) -> None:
    """Raises DatasetFormatError unless `rows` are as many episodes and frames as `info` counts."""
    frames = sum(row.length for row in rows)
    if len(rows) != info.total_episodes or frames != info.total_frames:
        raise DatasetFormatError(
            f"{root}: meta/info.json counts {info.total_episodes} episodes and {info.total_frames} frames, "
            f"{where} {len(rows)} and {frames}; the data set is incomplete"
        )


def _read_table(path: Path, columns: list[str] | None = None) -> Any:
    """A whole small parquet file; columns that it lacks are left out."""
    try:
        file = pq.ParquetFile(path)
        wanted = None if columns is None else [name for name in columns if name in file.schema_arrow.names]
        table = file.read(columns=wanted)
        table.validate(full=True)  # text that is no UTF-8
        return table
    except FileNotFoundError as error:
        raise DatasetFormatError(f"{path} is missing") from error
    except PARQUET_ERRORS as error:
        raise DatasetFormatError(f"{path} cannot be read as parquet: {error}") from error
