"""Which small data set do the golden script and the test both write? Integer arithmetic only, so it is the same anywhere."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from soma_lightning.data.lerobot_writer import LeRobotWriter

CAMERAS = ("observation.images.image", "observation.images.image2")
EPISODES = ((12, "pick up the cube"), (17, "reach the green disc"), (9, "pick up the cube"))
CHUNK_SIZE = 8
SIZE = 32
FPS = 20


def numbers(count: int, start: int) -> np.ndarray:
    """`count` float32 values in [-1, 1) that look random and are exact in binary."""
    scrambled = (np.arange(start, start + count, dtype=np.uint64) * np.uint64(2654435761)) % np.uint64(1 << 16)
    return (scrambled.astype(np.float64) / (1 << 15) - 1).astype(np.float32)


def episode(index: int) -> dict[str, np.ndarray]:
    """Frames of one episode: two cameras uint8 [T, 32, 32, 3], state float32 [T, 8], action float32 [T, 7]."""
    length = EPISODES[index][0]
    pixels = numbers(length * len(CAMERAS) * SIZE * SIZE * 3, 1_000_000 * (index + 1))
    images = ((pixels + 1) * 127.5).astype(np.uint8).reshape(len(CAMERAS), length, SIZE, SIZE, 3)
    return {
        **dict(zip(CAMERAS, images, strict=True)),
        "observation.state": numbers(length * 8, 10_000 * (index + 1)).reshape(length, 8),
        "action": numbers(length * 7, 20_000 * (index + 1)).reshape(length, 7),
    }


def features(size: int = SIZE) -> dict[str, dict[str, object]]:
    image = {"dtype": "image", "shape": [size, size, 3], "names": ["height", "width", "channel"]}
    return {
        **dict.fromkeys(CAMERAS, image),
        "observation.state": {"dtype": "float32", "shape": [8], "names": None},
        "action": {"dtype": "float32", "shape": [7], "names": None},
    }


def write(root: Path) -> None:
    with LeRobotWriter(root, fps=FPS, features=features(), robot_type="panda") as writer:
        for index, (_, task) in enumerate(EPISODES):
            writer.add_episode(episode(index), task)
