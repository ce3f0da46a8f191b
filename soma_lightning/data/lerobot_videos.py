"""Where in which mp4 file is a frame, and how is it decoded without decoding or keeping more than needed?

A frame's time in its file is from_timestamp + frame_index / fps, in float64. The nearest decoded frame is taken and
must be within a tolerance, as in lerobot; a video must therefore have a constant frame rate.
Shape letters: N frames, B rows asked for, h/w image size.
"""

from __future__ import annotations

import os
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from soma_lightning.data import lerobot_format as fmt
from soma_lightning.data.lerobot_frames import FrameTable
from soma_lightning.imports import require_package

TOLERANCE_S = 1e-4
#: Open files per process. Each holds a decoder (1 to 5 MB for small frames), so that memory does not grow with the
#: number of files; opening one takes 1 to 2 ms.
_OPEN_FILES = 16
#: Files per camera whose first and last frame are decoded at opening, so that a broken data set is refused before
#: training; the others are checked when they are used.
_CHECKED_FILES = 200
_THREADS = 4
#: Far below the distance of any two frames, and far above the rounding of times in a file of hours.
_SAME_TIME_S = 1e-6


class VideoImages:
    """Decodes frames of videos when they are asked for; each process keeps at most 16 files open.

    root: the data set's folder. fps: its rate. episodes: the rows behind `frames`, with the place of every camera of
    `sizes` ({camera: (h, w)}). tolerance_s: how far a frame may be from its time, seconds. A copy in another process (a
    loader's worker) opens the files itself.

    Raises ImportError without PyAV, DatasetFormatError naming file, camera and episode when a file is missing, or when
    the first or last frame of one (of 200 a camera, where there are more) cannot be decoded.
    """

    def __init__(
        self,
        root: Path,
        fps: int,
        episodes: Sequence[fmt.EpisodeRow],
        frames: FrameTable,
        sizes: Mapping[str, tuple[int, int]],
        tolerance_s: float = TOLERANCE_S,
    ) -> None:
        require_package("av", purpose=f"read the videos of '{root}'")
        self._frames = frames
        self._sizes = dict(sizes)
        self._fps = fps
        self._tolerance_s = tolerance_s
        self._files: dict[str, list[Path]] = {}
        self._file_of_row: dict[str, NDArray[np.int32]] = {}
        self._time_of_row: dict[str, NDArray[np.float64]] = {}
        lengths = [episode.length for episode in episodes]
        for camera in sizes:
            spans = [episode.videos[camera] for episode in episodes]
            numbers = {file: number for number, file in enumerate(dict.fromkeys(span.file for span in spans))}
            self._files[camera] = [root / file for file in numbers]
            self._file_of_row[camera] = np.repeat([numbers[span.file] for span in spans], lengths).astype(np.int32)
            starts = np.repeat(np.array([span.from_timestamp for span in spans], np.float64), lengths)
            self._time_of_row[camera] = starts + frames.frame_index / fps
        self._open: OrderedDict[tuple[str, int], VideoFile] = OrderedDict()
        self._inherited: OrderedDict[tuple[str, int], VideoFile] | None = None
        self._process = os.getpid()
        self._check_files()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": OrderedDict(), "_inherited": None}

    def fetch(self, camera: str, rows: Sequence[int]) -> Tensor:
        """See `ImageSource`. Raises DatasetFormatError naming file, episode, camera and frame of what is wrong."""
        if self._process != os.getpid():
            # A forked copy shares the position in its parent's files. They stay as they are: freeing them here could
            # wait for threads that only the parent has.
            self._inherited, self._open = self._open, OrderedDict()
            self._process = os.getpid()
        images = np.empty((len(rows), 3, *self._sizes[camera]), dtype=np.uint8)
        for slot in self._decoding_order(camera, rows):
            images[slot] = self._decode(self._opened(camera, rows[slot]), camera, rows[slot])
        return torch.from_numpy(images)

    def decode_all(self) -> dict[str, NDArray[np.uint8]]:
        """Every frame once: {camera: uint8 [N, 3, h, w]}. Threads share the files; none stays open."""
        images = {camera: np.empty((len(self._frames), 3, *size), np.uint8) for camera, size in self._sizes.items()}

        def decode_file(camera: str, number: int) -> None:
            rows = np.flatnonzero(self._file_of_row[camera] == number)
            ordered = rows[np.argsort(self._time_of_row[camera][rows], kind="stable")]
            for row, image in self._decode_rows(camera, number, ordered.tolist()):
                images[camera][row] = image

        self._for_files([(camera, n) for camera, files in self._files.items() for n in range(len(files))], decode_file)
        return images

    def _check_files(self) -> None:
        """Every file is there, and the first and last frame that is needed of it can be decoded."""
        chosen = []
        for camera, files in self._files.items():
            for number, path in enumerate(files):
                if not path.is_file():
                    row = int(np.argmax(self._file_of_row[camera] == number))
                    raise fmt.DatasetFormatError(
                        f"{path} is missing; {fmt.INFO_FILE} and the episodes' metadata say that episode "
                        f"{self._frames.episode_index[row]} of camera '{camera}' is in it"
                    )
            picks = np.linspace(0, len(files) - 1, min(len(files), _CHECKED_FILES)).round().astype(int)
            chosen += [(camera, int(number)) for number in picks]

        def decode_ends(camera: str, number: int) -> None:
            rows = np.flatnonzero(self._file_of_row[camera] == number)
            times = self._time_of_row[camera][rows]
            ends = [int(rows[times.argmin()]), int(rows[times.argmax()])]
            for _ in self._decode_rows(camera, number, ends):
                pass

        self._for_files(chosen, decode_ends)

    def _for_files(self, files: Iterable[tuple[str, int]], work: Callable[[str, int], None]) -> None:
        threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="decode")
        try:
            for job in [threads.submit(work, camera, number) for camera, number in files]:
                job.result()
        finally:
            threads.shutdown(cancel_futures=True)

    def _decode_rows(self, camera: str, number: int, rows: Sequence[int]) -> Iterator[tuple[int, NDArray[np.uint8]]]:
        """(row, image) of these rows of one file, through a decoder of its own."""
        file = self._open_file(camera, number, rows[0])
        try:
            for row in rows:
                yield row, self._decode(file, camera, row)
        finally:
            file.close()

    def _decoding_order(self, camera: str, rows: Sequence[int]) -> Iterator[int]:
        """Slots by file and time. Files that are open come first: in the same order every time, each file would be
        closed shortly before it is needed again."""
        files, times = self._file_of_row[camera][rows], self._time_of_row[camera][rows]
        closed = np.array([(camera, number) not in self._open for number in files.tolist()])
        return iter(np.lexsort((times, files, closed)).tolist())

    def _opened(self, camera: str, row: int) -> VideoFile:
        key = (camera, int(self._file_of_row[camera][row]))
        if key in self._open:
            self._open.move_to_end(key)
            return self._open[key]
        while len(self._open) >= _OPEN_FILES:
            self._open.popitem(last=False)[1].close()
        self._open[key] = self._open_file(*key, row)
        return self._open[key]

    def _open_file(self, camera: str, number: int, row: int) -> VideoFile:
        try:
            return VideoFile(self._files[camera][number], self._fps)
        except VideoError as error:
            raise fmt.DatasetFormatError(f"{self._where(camera, row)}: {error}") from error

    def _decode(self, file: VideoFile, camera: str, row: int) -> NDArray[np.uint8]:
        """uint8 [3, h, w], a view."""
        try:
            pixels = file.frame_at(float(self._time_of_row[camera][row]), self._tolerance_s)
        except VideoError as error:
            raise fmt.DatasetFormatError(f"{self._where(camera, row)}: {error}") from error
        height, width = self._sizes[camera]
        if pixels.shape[:2] != (height, width):
            raise fmt.DatasetFormatError(
                f"{self._where(camera, row)}: the video is {pixels.shape[0]}x{pixels.shape[1]}, {fmt.INFO_FILE} "
                f"declares {height}x{width} (height x width); correct the feature's shape or encode the video anew"
            )
        return pixels.transpose(2, 0, 1)

    def _where(self, camera: str, row: int) -> str:
        file = self._files[camera][int(self._file_of_row[camera][row])]
        frames = self._frames
        return f"{file}: episode {int(frames.episode_index[row])}, camera '{camera}', frame {frames.frame_index[row]}"


@cache
def _one_thread() -> dict[str, int]:
    """Converts colours in the calling thread; early versions of PyAV do so anyway and have no argument for it."""
    from av.video.reformatter import VideoReformatter

    return {"threads": 1} if "threads=" in str(VideoReformatter.reformat.__doc__) else {}


class VideoError(ValueError):
    """What is wrong with one video file; the caller adds which one, and which frame was asked for."""


class VideoFile:
    """One open mp4 file: answers with the frame of a time; cheap when times rise in small steps, a seek otherwise.

    fps: the rate that the file must have. Raises VideoError.
    """

    def __init__(self, path: Path, fps: int) -> None:
        import av  # optional, and 0.1 s
        from av.video.reformatter import VideoReformatter

        self._reformatter = VideoReformatter()
        self._av_error = av.FFmpegError
        self._fps = fps
        try:
            self._container = av.open(str(path), metadata_errors="replace")  # a title may be in any encoding
        except (av.FFmpegError, OSError) as error:
            raise VideoError(f"cannot be opened as a video: {error}; copy or encode it anew") from error
        if not self._container.streams.video:
            self._container.close()
            raise VideoError("the file holds no video stream")
        self._stream = self._container.streams.video[0]
        if self._stream.codec_context is None:
            self._container.close()
            raise VideoError("this PyAV has no decoder for the video; encode it anew, for example as H.264")
        # One thread: workers are already as many as the machine has cores, and every frame thread holds frames.
        self._stream.codec_context.thread_count = 1
        # One demuxer until the end of the file is met: PyAV 18 loses 150 bytes with each that is left before its end.
        self._packets: Iterator[Any] | None = None
        self._decoded: deque[Any] = deque()
        self._previous: Any = None
        self._current: Any = None
        self._position = np.inf  # time of `_current`, seconds
        #: From here a seek would decode as much as going on does: the longest way from a keyframe to a frame so far.
        self._reach = 1.5 / fps
        rate = self._stream.average_rate
        # Some encoders give the last frame no duration, which shows in a short file.
        if rate is None or abs(float(rate) - fps) > fps * max(0.01, 1.5 / max(1, self._stream.frames)):
            self.close()
            raise VideoError(
                f"the video runs at {float(rate or 0):g} frames per second on average, {fmt.INFO_FILE} declares "
                f"fps={fps}; encode it at a constant rate of {fps}, or correct fps"
            )

    def close(self) -> None:
        """Frees the decoder."""
        self._previous = self._current = None
        self._decoded.clear()
        if self._packets is not None and self._stream.duration:
            with suppress(self._av_error, OSError):  # brings the demuxer to its end, without decoding
                self._container.seek(self._stream.duration, stream=self._stream)
                for _ in self._packets:
                    pass
        self._packets = None
        self._container.close()

    def frame_at(self, time_s: float, tolerance_s: float) -> NDArray[np.uint8]:
        """The frame nearest to `time_s`, uint8 [h, w, 3]. Raises VideoError when it is more than `tolerance_s` away."""
        ended = False
        if not 0 <= time_s + _SAME_TIME_S - self._position <= self._reach:
            ended = not self._seek(time_s)
            self._reach = max(self._reach, time_s - self._position)
        while not ended and self._position < time_s - _SAME_TIME_S:
            ended = not self._advance()
        nearest, distance = None, np.inf
        for frame in (self._current, self._previous):
            if frame is not None and abs(self._time(frame) - time_s) < distance:
                nearest, distance = frame, abs(self._time(frame) - time_s)
        if nearest is None or distance > tolerance_s:
            found = "no frame was found" if nearest is None else f"the nearest frame is at {self._time(nearest):.6f} s"
            raise VideoError(
                f"{found}, the frame must be at {time_s:.6f} s (within {tolerance_s:g} s); {self._way_out(ended)}"
            )
        try:
            colours = self._reformatter.reformat(nearest, format="rgb24", **_one_thread())
            pixels: Any = colours.to_ndarray()
        except (self._av_error, ValueError) as error:
            raise VideoError(f"the frame has no colours: {error}") from error
        return np.asarray(pixels, dtype=np.uint8)

    def _seek(self, time_s: float) -> bool:
        """Goes to the keyframe at or before `time_s` and decodes it; False when there is none."""
        self._previous = self._current = None
        self._decoded.clear()
        if self._packets is None:
            self._packets = self._container.demux(self._stream)
        try:
            self._container.seek(max(0, round((time_s + _SAME_TIME_S) / self._stream.time_base)), stream=self._stream)
        except (self._av_error, OSError) as error:
            raise VideoError(f"cannot be searched: {error}; copy or encode it anew") from error
        return self._advance()

    def _advance(self) -> bool:
        """Decodes one frame; False at the end of the file."""
        self._position = np.inf  # after the end or an error the next call seeks
        try:
            while not self._decoded:
                if self._packets is None or (packet := next(self._packets, None)) is None:
                    return False
                self._decoded.extend(frame for frame in packet.decode() if frame.pts is not None)
                if packet.dts is None:  # the last one, which is empty and only makes the decoder give what it holds
                    next(self._packets, None)
                    self._packets = None
        except (self._av_error, OSError) as error:
            self._packets = None
            raise VideoError(f"cannot be decoded: {error}; the file is damaged or cut short, copy it anew") from error
        self._previous, self._current = self._current, self._decoded.popleft()
        self._position = self._time(self._current)
        return True

    def _time(self, frame: Any) -> float:
        return float(frame.pts * self._stream.time_base)

    def _way_out(self, ended: bool) -> str:
        if ended:
            return (
                f"the file ends there, with {self._stream.frames} frames: frames are missing (copy or record it anew), "
                "or from_timestamp in the episodes' metadata is wrong"
            )
        return (
            "the frame rate is not constant or from_timestamp in the episodes' metadata is wrong: encode the video at "
            f"a constant rate of {self._fps}, or raise tolerance_s"
        )
