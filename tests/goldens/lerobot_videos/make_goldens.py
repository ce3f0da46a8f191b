"""Does lerobot's own reader see in a data set with videos what our reader sees, whichever of the two wrote it?

Lets lerobot record two small data sets (its default codec AV1, and H.264) into this folder, and stores what its reader
sees of some frames in `frames.npz`; the tests in tests/data compare our reader with it. Then our writer records the same
episodes, and both readers must see the same frames in them. Needs Python 3.12 with lerobot 0.6.1 and its dataset
requirements (datasets < 5, pandas < 3, av 15). From the root of the repository:

    HF_HUB_OFFLINE=1 PYTHONPATH=.:kernels python tests/goldens/lerobot_videos/make_goldens.py
"""

from __future__ import annotations

import shutil
import tempfile
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from lerobot.configs.video import RGBEncoderConfig
from lerobot.datasets.lerobot_dataset import LeRobotDataset as TheirDataset

from soma_lightning.data.lerobot import LeRobotDataset as OurDataset
from soma_lightning.data.lerobot_writer import LeRobotWriter

HERE = Path(__file__).parent
CAMERAS = ("observation.images.image", "observation.images.image2")
EPISODES = ((12, "pick up the cube"), (17, "reach the green disc"), (9, "pick up the cube"))
KEPT_FRAMES = (0, 12, 28, 37)  # the first of two episodes, the last of two
HEIGHT, WIDTH, FPS = 48, 64, 20
CODECS = {"av1": "libsvtav1", "h264": "h264"}


def features(dtype: str = "video") -> dict[str, dict[str, object]]:
    image = {"dtype": dtype, "shape": (HEIGHT, WIDTH, 3), "names": ["height", "width", "channel"]}
    return {
        **dict.fromkeys(CAMERAS, image),
        "observation.state": {"dtype": "float32", "shape": (3,), "names": None},
        "observation.grasped": {"dtype": "bool", "shape": (1,), "names": None},
        "action": {"dtype": "float32", "shape": (2,), "names": None},
    }


def episode(index: int) -> dict[str, np.ndarray]:
    """A gradient that drifts under a bright square that moves, so that no two frames are alike."""
    length = EPISODES[index][0]
    y, x = np.mgrid[:HEIGHT, :WIDTH]
    images = np.empty((len(CAMERAS), length, HEIGHT, WIDTH, 3), np.uint8)
    for camera in range(len(CAMERAS)):
        for t in range(length):
            shade = 40 * index + 6 * t
            images[camera, t] = np.stack([(2 * x + shade) % 200, 3 * y + 30 * camera, (x + y + 2 * shade) % 200], axis=-1)
            images[camera, t, 8 + t : 20 + t, 4 + 2 * t : 16 + 2 * t] = (250, 240 - 60 * camera, 60 * index)
    steps = np.arange(length, dtype=np.float32)
    return {
        **dict(zip(CAMERAS, images, strict=True)),
        "observation.state": np.stack([np.full_like(steps, index), steps, steps / 8], axis=1),
        "observation.grasped": (steps > length // 2)[:, None],
        "action": np.stack([100 * index + steps, -steps], axis=1),
    }


def record_with_lerobot(root: Path, codec: str) -> None:
    shutil.rmtree(root, ignore_errors=True)
    data = TheirDataset.create(
        "local/theirs",
        fps=FPS,
        features=features(),
        root=root,
        robot_type="panda",
        rgb_encoder=RGBEncoderConfig(vcodec=codec),
    )
    for index, (length, task) in enumerate(EPISODES):
        frames = episode(index)
        for t in range(length):
            data.add_frame({**{key: values[t] for key, values in frames.items()}, "task": task})
        data.save_episode()
    data.finalize()
    shutil.rmtree(root / "images", ignore_errors=True)  # of the time before encoding


def record_with_ours(root: Path) -> None:
    with LeRobotWriter(root, fps=FPS, features=features(), robot_type="panda") as writer:
        for index, (_, task) in enumerate(EPISODES):
            writer.add_episode(episode(index), task)


def pixels(item: dict[str, torch.Tensor], camera: str) -> np.ndarray:
    return torch.round(item[camera] * 255).to(torch.uint8).numpy()


def compare(root: Path) -> int:
    """Largest difference of a pixel between the two readers; everything else must be equal."""
    theirs, ours = TheirDataset("local/any", root=root), OurDataset(root)
    assert len(theirs) == len(ours) == sum(length for length, _ in EPISODES)
    worst = 0
    for i in range(len(theirs)):
        for key in ("observation.state", "index", "episode_index"):
            assert torch.equal(theirs[i][key], ours[i][key]), (i, key)
        assert torch.equal(theirs[i]["action"], ours[i]["action"][0]), i
        assert theirs[i]["task"] == ours[i]["task"]
        for camera in CAMERAS:
            difference = pixels(theirs[i], camera).astype(int) - ours[i][camera].numpy()
            worst = max(worst, int(np.abs(difference).max()))
    return worst


def main() -> None:
    golden = {}
    for name, codec in CODECS.items():
        record_with_lerobot(HERE / name, codec)
        data = TheirDataset("local/theirs", root=HERE / name)
        for camera in CAMERAS:
            golden[f"{name}/{camera}"] = np.stack([pixels(data[i], camera) for i in KEPT_FRAMES])
    np.savez_compressed(HERE / "frames.npz", kept=np.array(KEPT_FRAMES), **golden)
    print({name: f"{compare(HERE / name)} levels apart" for name in CODECS}, "recorded by lerobot", version("lerobot"))
    with tempfile.TemporaryDirectory() as folder:
        record_with_ours(Path(folder) / "ours")
        print(f"recorded by us: {compare(Path(folder) / 'ours')} levels apart")


if __name__ == "__main__":
    main()
