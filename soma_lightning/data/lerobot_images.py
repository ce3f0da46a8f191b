"""Where do the pixels of a frame come from: PNG bytes read from parquet when asked for, or tensors decoded once?

Both, and `lerobot_videos.VideoImages`, answer `fetch(camera, rows)` with uint8 [B, 3, h, w].
Shape letters: N frames, B rows asked for, h/w image size.
"""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from soma_lightning.data import lerobot_format as fmt
from soma_lightning.data.lerobot_frames import FrameTable

_DECODE_THREADS = 4
GIB = 1024**3


class ImageSource(Protocol):
    """Hands out images of frames by row."""

    def fetch(self, camera: str, rows: Sequence[int]) -> Tensor:
        """uint8 [B, 3, h, w] of the data set's camera key `camera`."""
        ...


class EncodedImages:
    """Reads and decodes images when they are asked for; keeps the bytes of recently used row groups.

    sizes: {camera: (h, w)}. cache_mib: how many MiB of encoded images each process keeps. A copy in another process
    (a loader's worker) starts with an empty cache and opens the files itself.
    """

    def __init__(self, frames: FrameTable, sizes: Mapping[str, tuple[int, int]], cache_mib: int) -> None:
        self._frames = frames
        self._sizes = dict(sizes)
        self._limit = cache_mib * 1024**2
        self._files: dict[int, Any] = {}
        self._groups: OrderedDict[tuple[int, int], Any] = OrderedDict()
        self._cached = 0

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": {}, "_groups": OrderedDict(), "_cached": 0}

    def fetch(self, camera: str, rows: Sequence[int]) -> Tensor:
        """See `ImageSource`. Raises DatasetFormatError naming file, episode, column and frame of a bad image."""
        height, width = self._sizes[camera]
        images = torch.empty(len(rows), 3, height, width, dtype=torch.uint8)
        for slot, row in enumerate(rows):
            images[slot] = self.decode(camera, int(row))
        return images

    def decode(self, camera: str, row: int) -> Tensor:
        """One image, uint8 [3, h, w]."""
        file, group, offset = self._frames.location[row].tolist()
        encoded = self._row_group(file, group)[camera][offset].as_py()
        if encoded is None:
            raise fmt.DatasetFormatError(f"{self._where(camera, row)}: the image is not embedded (no bytes)")
        try:
            with Image.open(io.BytesIO(encoded)) as image:
                pixels = np.asarray(image.convert("RGB"))
        except (OSError, SyntaxError, ValueError) as error:
            raise fmt.DatasetFormatError(f"{self._where(camera, row)}: the image cannot be decoded: {error}") from error
        if pixels.shape[:2] != self._sizes[camera]:
            raise fmt.DatasetFormatError(
                f"{self._where(camera, row)}: the image is {pixels.shape[0]}x{pixels.shape[1]}, {fmt.INFO_FILE} "
                f"declares {self._sizes[camera][0]}x{self._sizes[camera][1]} (height x width)"
            )
        return torch.from_numpy(pixels.transpose(2, 0, 1).copy())

    def _row_group(self, file: int, group: int) -> Any:
        """{camera: Arrow array of PNG bytes} of one row group."""
        key = (file, group)
        if key in self._groups:
            self._groups.move_to_end(key)
            return self._groups[key]
        path = self._frames.files[file]
        try:
            if file not in self._files:
                self._files[file] = pq.ParquetFile(path)
            table = self._files[file].read_row_group(group, columns=list(self._sizes))
        except fmt.PARQUET_ERRORS as error:
            raise fmt.DatasetFormatError(f"{path}: row group {group} cannot be read: {error}") from error
        arrays = {camera: _png_bytes(path, camera, table[camera].combine_chunks()) for camera in self._sizes}
        self._groups[key] = arrays
        self._cached += _num_bytes(arrays)
        while self._cached > self._limit and len(self._groups) > 1:
            _, oldest = self._groups.popitem(last=False)
            self._cached -= _num_bytes(oldest)
        return arrays

    def _where(self, camera: str, row: int) -> str:
        frames = self._frames
        file = frames.files[int(frames.location[row, 0])]
        return f"{file}: episode {int(frames.episode_index[row])}, column '{camera}', frame {frames.frame_index[row]}"


class DecodedImages:
    """All images in memory. images: {camera: uint8 [N, 3, h, w]}."""

    def __init__(self, images: Mapping[str, np.ndarray]) -> None:
        self.images = dict(images)

    def fetch(self, camera: str, rows: Sequence[int]) -> Tensor:
        """See `ImageSource`."""
        # numpy copies whole images in one thread; torch would wake its pool for a copy shorter than the waking.
        return torch.from_numpy(self.images[camera][rows])


def decode_all(frames: FrameTable, sizes: Mapping[str, tuple[int, int]]) -> dict[str, NDArray[np.uint8]]:
    """Every embedded image once: {camera: uint8 [N, 3, h, w]}. Raises DatasetFormatError for a bad image."""
    encoded = EncodedImages(frames, sizes, cache_mib=0)
    images = {
        camera: np.empty((len(frames), 3, height, width), dtype=np.uint8) for camera, (height, width) in sizes.items()
    }

    def decode_into(camera: str, row: int) -> None:
        images[camera][row] = encoded.decode(camera, row).numpy()

    # Rows of one group follow each other, so each group is read once; the threads share the decoding of its images.
    starts = np.flatnonzero(np.any(np.diff(frames.location[:, :2], axis=0, prepend=-1) != 0, axis=1))
    with ThreadPoolExecutor(_DECODE_THREADS, thread_name_prefix="decode") as threads:
        for start, end in zip(starts, [*starts[1:], len(frames)], strict=True):
            encoded.decode(next(iter(sizes)), int(start))
            jobs = [threads.submit(decode_into, camera, row) for camera in sizes for row in range(start, end)]
            for job in jobs:
                job.result()
    return images


def check_memory(num_frames: int, sizes: Mapping[str, tuple[int, int]], limit_gib: float) -> None:
    """Raises ValueError when all decoded images would take more than `limit_gib` GiB."""
    needed = memory_needed(num_frames, sizes)
    if needed > limit_gib * GIB:
        raise ValueError(
            f"preload=True would decode {num_frames} frames of {len(sizes)} cameras into {needed / GIB:.2f} GiB, more "
            f"than preload_limit_gib={limit_gib}; use preload=False with num_workers > 0, fewer episodes, or a higher "
            "limit"
        )


def memory_needed(num_frames: int, sizes: Mapping[str, tuple[int, int]]) -> int:
    """Bytes of all decoded images: frames * 3 * height * width, summed over cameras."""
    return sum(num_frames * 3 * height * width for height, width in sizes.values())


def _png_bytes(path: object, camera: str, column: Any) -> Any:
    if pa.types.is_struct(column.type) and column.type.get_field_index("bytes") >= 0:
        column = column.field("bytes")
    if not (pa.types.is_binary(column.type) or pa.types.is_large_binary(column.type)):
        raise fmt.DatasetFormatError(
            f"{path}: column '{camera}' must hold struct<bytes: binary, path: string>, found {column.type}"
        )
    return column


def _num_bytes(arrays: Mapping[str, Any]) -> int:
    return sum(array.nbytes for array in arrays.values())
