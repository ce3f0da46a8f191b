"""How are demonstrations recorded as a LeRobot v3.0 data set that is either whole or not there at all?

Everything is written into a hidden folder beside the target and renamed at the end, so that an interrupted recording
never reads as a data set. Images are embedded as PNG (lossless, no video decoder needed) or encoded as video; one row
group per episode.
"""

from __future__ import annotations

import io
import json
import os
import secrets
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from PIL import Image

from soma_lightning.data import lerobot_format as fmt
from soma_lightning.data.lerobot_features import check_frames, parse_features
from soma_lightning.data.lerobot_video_writer import VideoTrack
from soma_lightning.data.statistics import describe, describe_pixels
from soma_lightning.models.normalization import save_statistics

_PNG_THREADS = 4
_SAMPLED_SIDE = 150  # of the larger images whose pixels are counted
_ZLIB_LEVEL = 1  # a 64-pixel frame: a third of the default level's time for a tenth more bytes


class LeRobotWriter:
    """Records episodes one by one; `finish` (or the end of a `with` block without error) puts the data set in place.

    root: folder of the data set to be. features: {key: {"dtype", "shape", "names"}}; dtype "image" or "video" (uint8
    frames [h, w, 3]) or a numeric numpy name with shape [D]. fps: control rate, frames per second. overwrite: replace
    an existing data set at `root` (nothing else is ever deleted). data_file_size_mb, video_file_size_mb: a file is
    closed before it would grow past this.

    Raises FileExistsError when `root` is not empty and may not be replaced, ValueError for features that the format
    or this writer cannot hold, ImportError for videos without PyAV.
    """

    def __init__(
        self,
        root: str | Path,
        fps: int = 20,
        features: Mapping[str, Mapping[str, Any]] | None = None,
        robot_type: str | None = None,
        overwrite: bool = False,
        data_file_size_mb: int = fmt.DATA_FILE_SIZE_MB,
        video_file_size_mb: int = fmt.VIDEO_FILE_SIZE_MB,
    ) -> None:
        self.root = Path(root)
        if not isinstance(fps, int) or fps < 1:
            raise ValueError(f"fps={fps!r} must be a positive integer")
        for name, size in (("data_file_size_mb", data_file_size_mb), ("video_file_size_mb", video_file_size_mb)):
            if size < 1:
                raise ValueError(f"{name}={size} must be at least 1")
        self.fps = fps
        self.features = parse_features(features or {})
        self.robot_type = robot_type
        self.data_file_size_mb = data_file_size_mb
        self.video_file_size_mb = video_file_size_mb
        # A link is followed, so that the folder it points to is replaced and not the link.
        self._target = self.root.resolve()
        self._overwrite = overwrite
        _check_target(self.root, overwrite)

        self._tasks: dict[str, int] = {}
        self._rows: list[dict[str, Any]] = []
        self._numeric: dict[str, list[NDArray[Any]]] = {}
        self._histograms = {key: np.zeros((3, 256), np.int64) for key, f in self.features.items() if f.is_camera}
        self._images_counted = dict.fromkeys(self._histograms, 0)
        self._num_frames = 0
        self._file_number = -1
        self._parquet: Any = None
        self._finished = False
        self._threads = ThreadPoolExecutor(_PNG_THREADS, thread_name_prefix="png")
        self._folder = self._target.parent / f".{self._target.name}.partial-{os.getpid()}-{secrets.token_hex(4)}"
        self._videos = {
            key: VideoTrack(self._folder, key, fps, feature.image_size, video_file_size_mb)
            for key, feature in self.features.items()
            if feature.dtype == "video"
        }
        try:
            (self._folder / "meta").mkdir(parents=True)
        except OSError as error:
            raise OSError(f"the data set '{self.root}' cannot be written: {error}") from error

    @property
    def num_episodes(self) -> int:
        return len(self._rows)

    @property
    def num_frames(self) -> int:
        return self._num_frames

    def add_episode(self, frames: Mapping[str, NDArray[Any]], task: str) -> None:
        """Appends one episode.

        frames: {key: array [T, *shape]} with exactly the keys and dtypes of `features`; a feature of shape [1] may also
        be [T]. task: the instruction in English. Raises ValueError naming the episode and the column.
        """
        if self._finished:
            raise RuntimeError(f"the data set at '{self.root}' is finished; open another writer")
        episode = len(self._rows)
        if not isinstance(task, str) or not task.strip():
            raise ValueError(f"episode {episode}: task={task!r} must be an instruction")
        arrays = check_frames(self.features, frames, episode)
        length = len(next(iter(arrays.values())))
        for track in self._videos.values():
            track.check_length(length, episode)
        task_index = self._tasks.setdefault(task, len(self._tasks))
        arrays |= self._bookkeeping(length, episode, task_index)

        table, image_bytes = self._to_table(arrays)
        statistics = self._episode_statistics(arrays)
        self._write_row_group(table, table.nbytes, image_bytes)
        spans = self._threads.map(lambda key: self._videos[key].add(arrays[key]), self._videos)
        video_columns = {column: value for span in spans for column, value in span.items()}
        chunk_index, file_index = divmod(self._file_number, fmt.FILES_PER_CHUNK)
        self._rows.append(
            {
                fmt.EPISODE_INDEX: episode,
                "tasks": [task],
                "length": length,
                "data/chunk_index": chunk_index,
                "data/file_index": file_index,
                "dataset_from_index": self._num_frames,
                "dataset_to_index": self._num_frames + length,
                **video_columns,
                "meta/episodes/chunk_index": 0,
                "meta/episodes/file_index": 0,
                **statistics,
            }
        )
        self._num_frames += length

    def write_side_file(self, name: str, content: Any) -> None:
        """Puts a JSON file of our own, such as seeds, into `meta/`; it appears together with the data set.

        Raises ValueError when `name` is no plain file name or belongs to the format.
        """
        if Path(name).name != name or not name.endswith(".json"):
            raise ValueError(f"name={name!r} must be a plain file name that ends in .json")
        if f"meta/{name}" in (fmt.INFO_FILE, fmt.STATS_FILE):
            raise ValueError(f"meta/{name} belongs to the LeRobot format; choose another name")
        _write_json(self._folder / "meta" / name, content)

    def finish(self) -> None:
        """Writes the metadata and puts the data set in place. Raises ValueError when no episode was added."""
        if self._finished:
            return
        if not self._rows:
            self.discard()
            raise ValueError(f"no episode was added; there is no data set to write to '{self.root}'")
        self._close_files()
        self._write_tasks()
        self._write_episodes()
        save_statistics(self._pooled_statistics(), self._folder / fmt.STATS_FILE)
        _write_json(self._folder / fmt.INFO_FILE, self._info())
        self._put_in_place()
        self._finished = True

    def discard(self) -> None:
        """Drops everything recorded so far; `root` stays as it was."""
        if self._finished:
            return
        self._close_files()
        shutil.rmtree(self._folder)
        self._finished = True

    def _close_files(self) -> None:
        self._threads.shutdown()
        if self._parquet is not None:
            self._parquet.close()
        for track in self._videos.values():
            track.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.finish()
        else:
            self.discard()

    def _bookkeeping(self, length: int, episode: int, task_index: int) -> dict[str, NDArray[Any]]:
        frame = np.arange(length, dtype=np.int64)
        return {
            fmt.TIMESTAMP: (frame / self.fps).astype(np.float32),
            fmt.FRAME_INDEX: frame,
            fmt.EPISODE_INDEX: np.full(length, episode, np.int64),
            fmt.INDEX: self._num_frames + frame,
            fmt.TASK_INDEX: np.full(length, task_index, np.int64),
        }

    def _to_table(self, arrays: Mapping[str, NDArray[Any]]) -> tuple[Any, int]:
        """The episode as an Arrow table, and the bytes of its images (which do not compress further)."""
        columns: dict[str, Any] = {}
        image_bytes = 0
        for key, array in arrays.items():
            feature = self.features.get(key)
            if key in self._videos:
                continue
            if feature is not None and feature.is_camera:
                encoded = list(self._threads.map(encode_png, array))
                image_bytes += sum(map(len, encoded))
                paths = [f"frame-{i:06d}.png" for i in range(len(encoded))]
                columns[key] = pa.StructArray.from_arrays(
                    [pa.array(encoded, pa.binary()), pa.array(paths, pa.string())], names=["bytes", "path"]
                )
            elif array.ndim == 2 and array.shape[1] > 1:
                columns[key] = pa.FixedSizeListArray.from_arrays(pa.array(array.ravel()), array.shape[1])
            else:
                columns[key] = pa.array(array.ravel())
        return pa.table(columns), image_bytes

    def _write_row_group(self, table: Any, table_bytes: int, image_bytes: int) -> None:
        limit = self.data_file_size_mb * 1024**2
        # Images are stored as they are; the rest may shrink a little, so this errs on the side of the next file.
        if self._parquet is not None and self._file_size() + max(table_bytes, image_bytes) >= limit:
            self._parquet.close()
            self._parquet = None
        if self._parquet is None:
            self._file_number += 1
            path = self._data_file()
            path.parent.mkdir(parents=True, exist_ok=True)
            self._parquet = pq.ParquetWriter(path, table.schema, compression="snappy")
        self._parquet.write_table(table, row_group_size=len(table))

    def _data_file(self) -> Path:
        chunk_index, file_index = divmod(self._file_number, fmt.FILES_PER_CHUNK)
        return self._folder / fmt.DATA_PATH.format(chunk_index=chunk_index, file_index=file_index)

    def _file_size(self) -> int:
        return self._data_file().stat().st_size

    def _episode_statistics(self, arrays: Mapping[str, NDArray[Any]]) -> dict[str, Any]:
        """Columns `stats/<feature>/<number>` of this episode; adds to what the pooled statistics need."""
        columns: dict[str, Any] = {}
        for key, array in arrays.items():
            if key in self._histograms:
                histogram, count = _pixel_histogram(array)
                self._histograms[key] += histogram
                self._images_counted[key] += count
                described = describe_pixels(histogram, count)
            else:
                values = array.reshape(len(array), -1)
                self._numeric.setdefault(key, []).append(values)
                described = describe(values)
            columns |= {f"stats/{key}/{name}": value.tolist() for name, value in described.items()}
        return columns

    def _pooled_statistics(self) -> dict[str, dict[str, NDArray[Any]]]:
        images = {key: describe_pixels(h, self._images_counted[key]) for key, h in self._histograms.items()}
        numeric = {key: describe(np.concatenate(parts)) for key, parts in self._numeric.items()}
        return images | numeric

    def _write_tasks(self) -> None:
        table = pa.table(
            {
                fmt.TASK_INDEX: pa.array(list(self._tasks.values()), pa.int64()),
                "task": pa.array(list(self._tasks), pa.string()),
            }
        )
        # LeRobot looks a task up by position and takes the pandas INDEX as its text, so pandas has to find the
        # column "task" marked as the index.
        columns = [
            {"name": name, "field_name": name, "pandas_type": kind, "numpy_type": numpy_kind, "metadata": None}
            for name, kind, numpy_kind in ((fmt.TASK_INDEX, "int64", "int64"), ("task", "unicode", "object"))
        ]
        pandas = {"index_columns": ["task"], "column_indexes": [], "columns": columns, "pandas_version": "2.0.0"}
        pq.write_table(table.replace_schema_metadata({"pandas": json.dumps(pandas)}), self._folder / fmt.TASKS_FILE)

    def _write_episodes(self) -> None:
        path = self._folder / fmt.EPISODES_PATH.format(chunk_index=0, file_index=0)
        path.parent.mkdir(parents=True)
        pq.write_table(pa.Table.from_pylist(self._rows), path)

    def _info(self) -> dict[str, Any]:
        features = {
            key: replace(feature, video_info=self._videos[key].info) if key in self._videos else feature
            for key, feature in self.features.items()
        }
        bookkeeping = {key: fmt.Feature(key, dtype, (1,)) for key, dtype in fmt.BOOKKEEPING_DTYPES.items()}
        return {
            "codebase_version": fmt.CODEBASE_VERSION,
            "robot_type": self.robot_type,
            "total_episodes": len(self._rows),
            "total_frames": self._num_frames,
            "total_tasks": len(self._tasks),
            "chunks_size": fmt.FILES_PER_CHUNK,
            "data_files_size_in_mb": self.data_file_size_mb,
            "video_files_size_in_mb": self.video_file_size_mb,
            "fps": self.fps,
            "splits": {"train": f"0:{len(self._rows)}"},
            "data_path": fmt.DATA_PATH,
            "video_path": fmt.VIDEO_PATH if self._videos else None,
            "features": {key: feature.to_json() for key, feature in {**features, **bookkeeping}.items()},
        }

    def _put_in_place(self) -> None:
        try:
            _check_target(self.root, self._overwrite)  # another recording may have finished there meanwhile
        except FileExistsError as error:
            raise FileExistsError(f"{error}; this recording is whole and kept in '{self._folder}'") from error
        if not self._target.exists():
            self._folder.rename(self._target)
            return
        replaced = self._folder.with_name(self._folder.name + "-replaced")
        self._target.rename(replaced)
        try:
            self._folder.rename(self._target)
        except OSError:
            replaced.rename(self._target)
            raise
        shutil.rmtree(replaced)


def encode_png(image: NDArray[np.uint8]) -> bytes:
    """uint8 [h, w, 3] as PNG, compressed fast."""
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "PNG", compress_level=_ZLIB_LEVEL)
    return buffer.getvalue()


def _check_target(root: Path, overwrite: bool) -> None:
    if not root.exists() or (root.is_dir() and not any(root.iterdir())):
        return
    if not root.is_dir():
        raise FileExistsError(f"'{root}' is a file; choose another name for the data set's folder")
    if not overwrite:
        raise FileExistsError(
            f"'{root}' is not empty; choose another folder, or replace the data set there (overwrite=True, --overwrite)"
        )
    if not (root / fmt.INFO_FILE).is_file():
        raise FileExistsError(f"'{root}' is no LeRobot data set ({fmt.INFO_FILE} is missing), so it is not replaced")


def _pixel_histogram(images: NDArray[np.uint8]) -> tuple[NDArray[np.int64], int]:
    """Histogram [3, 256] over sampled frames, and how many: all below 100, else LeRobot's rule n^0.75, evenly spaced.

    images: uint8 [T, h, w, 3]; of 300 pixels and more every second one, or every third and so on, so that about 150
    are left.
    """
    n = len(images)
    count = n if n < 100 else max(100, min(int(n**0.75), 10_000))
    side = max(images.shape[1:3])
    stride = side // _SAMPLED_SIDE if side >= 2 * _SAMPLED_SIDE else 1
    sample = images[np.round(np.linspace(0, n - 1, count)).astype(np.int64), ::stride, ::stride]
    histogram = [np.bincount(sample[..., channel].ravel(), minlength=256) for channel in range(3)]
    return np.stack(histogram).astype(np.int64), count


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
