"""How do the frames of one camera, episode after episode, become mp4 files with exact timestamps?

H.264, constant frame rate, a keyframe every second frame (random access decodes at most two), no B-frames. Episodes
follow each other in one file until it would grow too large or too long.
"""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from soma_lightning.data import lerobot_format as fmt
from soma_lightning.imports import require_package

CODEC = "libx264"
#: crf 18 leaves errors of a few levels of 255. `threads`: the bits of a file must not depend on the machine's cores.
_OPTIONS = {"g": "2", "crf": "18", "preset": "veryfast", "bf": "0", "threads": "1"}
_PIXEL_FORMAT = "yuv420p"
_INDEX_BYTES_PER_FRAME = 32
#: lerobot compares times in float32, whose spacing beyond 1024 s is more than its tolerance of 1e-4 s.
MAX_DURATION_S = 1000


class VideoTrack:
    """The video files of one camera.

    folder: root of the data set. key: the camera. fps: frames per second. size: (height, width), both even.
    file_size_mb: a file is closed before it would grow past this, as far as can be told before an episode is encoded.

    Raises ImportError without PyAV.
    """

    def __init__(self, folder: Path, key: str, fps: int, size: tuple[int, int], file_size_mb: int) -> None:
        require_package("av", purpose=f"record '{key}' as video (dtype 'image' needs no codec)")
        self._folder = folder
        self._key = key
        self._fps = fps
        self._size = size
        self._limit = file_size_mb * 1024**2
        self._file_number = -1
        self._container: Any = None
        self._stream: Any = None
        self._num_frames = 0  # given to the encoder of the open file
        self._num_packets = 0  # that came out of it
        self._num_bytes = 0

    @property
    def info(self) -> dict[str, Any]:
        """What `meta/info.json` says about the encoding."""
        height, width = self._size
        return {
            "video.height": height,
            "video.width": width,
            "video.codec": "h264",
            "video.pix_fmt": _PIXEL_FORMAT,
            "video.fps": self._fps,
            "video.channels": 3,
            "has_audio": False,
            "is_depth_map": False,
            "video.g": int(_OPTIONS["g"]),
            "video.crf": int(_OPTIONS["crf"]),
            "video.preset": _OPTIONS["preset"],
            "video.fast_decode": 0,
            "video.video_backend": "pyav",
            "video.extra_options": {"bf": _OPTIONS["bf"]},
        }

    def check_length(self, num_frames: int, episode: int) -> None:
        """Raises ValueError for an episode that no video file can hold."""
        if num_frames > MAX_DURATION_S * self._fps:
            raise ValueError(
                f"episode {episode}, column '{self._key}': {num_frames} frames at {self._fps} per second are longer "
                f"than a video's {MAX_DURATION_S} s; split the episode, or use dtype 'image'"
            )

    def add(self, images: NDArray[np.uint8]) -> dict[str, Any]:
        """Encodes one episode, uint8 [T, h, w, 3]. Returns its columns in `meta/episodes`."""
        if self._container is None or self._is_full(len(images)):
            self._start_file()
        begin = self._num_frames
        self._encode(images)
        chunk_index, file_index = divmod(self._file_number, fmt.FILES_PER_CHUNK)
        columns = {
            "chunk_index": chunk_index,
            "file_index": file_index,
            "from_timestamp": begin / self._fps,
            "to_timestamp": self._num_frames / self._fps,
        }
        return {f"videos/{self._key}/{name}": value for name, value in columns.items()}

    def close(self) -> None:
        """Writes what the encoder still holds, and ends the file."""
        if self._container is None:
            return
        try:
            self._container.mux(self._stream.encode())
        finally:
            self._container.close()
            self._container = None

    def _is_full(self, num_frames: int) -> bool:
        total = self._num_frames + num_frames
        if total > MAX_DURATION_S * self._fps:
            return True
        # The encoder holds some frames back, so their size is not known yet either.
        bytes_per_frame = self._num_bytes / max(1, self._num_packets) + _INDEX_BYTES_PER_FRAME
        return bytes_per_frame * total >= self._limit

    def _start_file(self) -> None:
        import av  # optional, and 0.1 s

        self.close()
        self._file_number += 1
        self._num_frames = self._num_packets = self._num_bytes = 0
        chunk_index, file_index = divmod(self._file_number, fmt.FILES_PER_CHUNK)
        name = fmt.VIDEO_PATH.format(video_key=self._key, chunk_index=chunk_index, file_index=file_index)
        path = self._folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        self._container = av.open(str(path), "w", format="mp4")
        self._stream = self._container.add_stream(CODEC, rate=self._fps, options=dict(_OPTIONS))
        self._stream.height, self._stream.width = self._size
        self._stream.pix_fmt = _PIXEL_FORMAT
        self._stream.codec_context.time_base = Fraction(1, self._fps)

    def _encode(self, images: NDArray[np.uint8]) -> None:
        import av

        for image in images:
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(image), format="rgb24")
            frame.pts, frame.time_base = self._num_frames, Fraction(1, self._fps)
            self._num_frames += 1
            for packet in self._stream.encode(frame):
                self._num_packets += 1
                self._num_bytes += packet.size
                self._container.mux(packet)
