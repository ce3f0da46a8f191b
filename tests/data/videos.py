"""Data sets with videos for the tests of this folder, and what is in their files frame by frame."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from soma_lightning.data.lerobot_writer import LeRobotWriter

CAMERA, WRIST = "observation.images.image", "observation.images.image2"
VIDEO_FILE = f"videos/{CAMERA}/chunk-000/file-000.mp4"
EPISODES_FILE = "meta/episodes/chunk-000/file-000.parquet"
FPS = 10
LENGTHS = (12, 17, 9)
HEIGHT, WIDTH = 16, 24


def moving_square(length: int, seed: int, height: int = HEIGHT, width: int = WIDTH) -> np.ndarray:
    """uint8 [T, h, w, 3]: a bright square that moves over a shade of its own; no two frames are alike."""
    y, x = np.mgrid[:height, :width]
    images = np.empty((length, height, width, 3), np.uint8)
    for t in range(length):
        images[t] = np.stack([(4 * x + 11 * seed) % 180, (6 * y + 5 * t) % 200, np.full_like(x, (9 * t) % 250)], -1)
        images[t, t % (height - 4) : t % (height - 4) + 4, (3 * t) % (width - 6) : (3 * t) % (width - 6) + 6] = 250
    return images


def decode(path: Path) -> dict[int, np.ndarray]:
    """{pts: uint8 [3, h, w]} of every frame, decoded in order."""
    import av  # not for all who import this module: a GPU machine may lack it

    with av.open(str(path)) as container:
        return {frame.pts: frame.to_ndarray(format="rgb24").transpose(2, 0, 1) for frame in container.decode(video=0)}


def encode(path: Path, images: np.ndarray, times: list[Fraction], rate: int, **options: str) -> None:
    """H.264 with these presentation times, in seconds."""
    import av

    with av.open(str(path), "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=rate, options={"g": "2", "bf": "0", "threads": "1", **options})
        stream.height, stream.width, stream.pix_fmt = *images.shape[1:3], "yuv420p"
        stream.codec_context.time_base = Fraction(1, 1000)
        for image, time in zip(images, times, strict=True):
            frame = av.VideoFrame.from_ndarray(image, format="rgb24")
            frame.pts, frame.time_base = int(time * 1000), Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())


def steady(count: int, rate: int) -> list[Fraction]:
    return [Fraction(i, rate) for i in range(count)]


def put_index_first(path: Path) -> None:
    """The same packets in a file that begins with its index, as lerobot leaves it."""
    import av

    moved = path.with_suffix(".moved.mp4")
    with av.open(str(path)) as source, av.open(str(moved), "w", options={"movflags": "faststart"}) as target:
        stream = source.streams.video[0]
        copy: Any = target.add_stream_from_template(stream)
        for packet in source.demux(stream):
            if packet.dts is not None:
                packet.stream = copy
                target.mux(packet)
    moved.replace(path)


def features(cameras: dict[str, str], height: int = HEIGHT, width: int = WIDTH) -> dict[str, Any]:
    return {
        **{key: {"dtype": dtype, "shape": [height, width, 3]} for key, dtype in cameras.items()},
        "observation.state": {"dtype": "float32", "shape": [2]},
        "action": {"dtype": "float32", "shape": [1]},
    }


def frames(episode: int, length: int, cameras: dict[str, str], height: int = HEIGHT, width: int = WIDTH) -> Any:
    images = {key: moving_square(length, 10 * episode + i, height, width) for i, key in enumerate(cameras)}
    steps = np.arange(length, dtype=np.float32)
    return {
        **images,
        "observation.state": np.stack([np.full_like(steps, episode), steps], axis=1),
        "action": steps[:, None],
    }


def record_noise(root: Path, episodes: int, **settings: Any) -> None:
    """Episodes of 20 frames that take 13 kB each."""
    noise = np.random.default_rng(0).integers(0, 256, (20, 64, 96, 3), dtype=np.uint8)
    cameras = {CAMERA: "video"}
    with LeRobotWriter(root, fps=FPS, features=features(cameras, 64, 96), **settings) as writer:
        for _ in range(episodes):
            writer.add_episode({**frames(0, 20, cameras), CAMERA: noise}, "pick up the cube")
