"""A data set in which nothing is to be learned, for tests that only need one."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from soma_lightning.data.lerobot_writer import LeRobotWriter

IMAGE = {"dtype": "image", "shape": [64, 64, 3], "names": ["height", "width", "channel"]}
FEATURES = {
    "observation.images.image": IMAGE,
    "observation.images.image2": IMAGE,
    "observation.state": {"dtype": "float32", "shape": [8], "names": None},
    "action": {"dtype": "float32", "shape": [7], "names": None},
}


def record_noise(root: Path, episodes: int, length: int) -> Path:
    """Episodes of `length` frames with random images, states and actions; returns `root`."""
    draw = np.random.default_rng(0)
    with LeRobotWriter(root, features=FEATURES) as writer:
        for _ in range(episodes):
            images = draw.integers(0, 256, (2, length, 64, 64, 3), dtype=np.uint8)
            state = draw.normal(size=(length, 8)).astype(np.float32)
            action = np.tanh(draw.normal(size=(length, 7))).astype(np.float32)
            frames = {"observation.images.image": images[0], "observation.images.image2": images[1]}
            writer.add_episode({**frames, "observation.state": state, "action": action}, "pick up the cube")
    return root
