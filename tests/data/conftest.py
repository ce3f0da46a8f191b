"""Small recorded data sets for the tests of this folder."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from soma_lightning.data.lerobot_writer import LeRobotWriter
from tests.data.videos import CAMERA, FPS, HEIGHT, LENGTHS, WIDTH, features, frames

GOLDEN = Path(__file__).parents[1] / "goldens" / "lerobot_dataset"


@pytest.fixture(scope="session")
def golden_module() -> ModuleType:
    """tests/goldens/lerobot_dataset/make_dataset.py, which the golden script imports too."""
    spec = importlib.util.spec_from_file_location("make_dataset", GOLDEN / "make_dataset.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def golden_root(golden_module: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The golden data set: 3 episodes of 12, 17 and 9 frames, 2 cameras of 32 pixels, 2 tasks. Read only."""
    root: Path = tmp_path_factory.mktemp("golden") / "recorded"
    golden_module.write(root)
    return root


@pytest.fixture
def record(tmp_path: Path) -> Callable[..., Path]:
    """Records a data set whose values say where they come from: state[0] = episode, state[1] = frame, pixels = frame.

    lengths: frames of each episode. Keyword arguments: name of the folder, size of the images, state and action
    dimensions, fps, cameras, tasks (used in turn), offset added to the actions.
    """

    def make(
        lengths: Sequence[int] = (5, 7, 4, 6),
        *,
        name: str = "data",
        size: int = 8,
        state_dim: int = 3,
        action_dim: int = 2,
        fps: int = 10,
        cameras: Sequence[str] = ("observation.images.image",),
        tasks: Sequence[str] = ("pick up the cube", "reach the green disc"),
        offset: float = 0.0,
        **settings: Any,
    ) -> Path:
        image = {"dtype": "image", "shape": [size, size, 3], "names": ["height", "width", "channel"]}
        features: dict[str, Any] = {
            **dict.fromkeys(cameras, image),
            "observation.state": {"dtype": "float32", "shape": [state_dim], "names": None},
            "action": {"dtype": "float32", "shape": [action_dim], "names": None},
        }
        root = tmp_path / name
        with LeRobotWriter(root, fps=fps, features=features, **settings) as writer:
            for episode, length in enumerate(lengths):
                writer.add_episode(
                    make_frames(episode, length, size, state_dim, action_dim, cameras, offset),
                    tasks[episode % len(tasks)],
                )
        return root

    return make


def make_frames(
    episode: int,
    length: int,
    size: int,
    state_dim: int,
    action_dim: int,
    cameras: Sequence[str],
    offset: float,
) -> dict[str, np.ndarray]:
    steps = np.arange(length)
    images = np.broadcast_to(steps.astype(np.uint8)[:, None, None, None], (length, size, size, 3)).copy()
    images[..., 0] = episode
    state = np.zeros((length, state_dim), np.float32)
    state[:, 0], state[:, 1] = episode, steps
    action = np.zeros((length, action_dim), np.float32)
    action[:, 0], action[:, 1] = 100 * episode + steps + offset, -steps
    return {
        **{key: images + np.uint8(10 * i) for i, key in enumerate(cameras)},
        "observation.state": state,
        "action": action,
    }


@pytest.fixture
def record_video(tmp_path: Path) -> Callable[..., Path]:
    """Records a data set of `frames` with videos, or with the cameras {key: dtype}."""

    def make(
        lengths: tuple[int, ...] = LENGTHS,
        cameras: dict[str, str] | None = None,
        name: str = "data",
        size: tuple[int, int] = (HEIGHT, WIDTH),
        **settings: Any,
    ) -> Path:
        cameras = cameras or {CAMERA: "video"}
        with LeRobotWriter(tmp_path / name, fps=FPS, features=features(cameras, *size), **settings) as writer:
            for episode, length in enumerate(lengths):
                writer.add_episode(frames(episode, length, cameras, *size), "pick up the cube")
        return tmp_path / name

    return make
