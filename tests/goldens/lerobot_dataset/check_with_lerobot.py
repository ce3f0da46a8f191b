"""Does lerobot's own reader see in a data set of ours what our reader sees, and ours what it sees in one of lerobot's?

Writes the small data set of make_dataset.py, reads every frame with lerobot.datasets.LeRobotDataset (chunks of actions
through delta_timestamps) and with ours, compares all values, and stores what lerobot read in lerobot_reading.json. The
test in tests/data compares our reader with that file. The same frames recorded by lerobot itself are read by both, too.
Needs Python 3.12 with lerobot 0.6.1 and its dataset
requirements (datasets < 5, pandas < 3, av 15). From the root of the repository:

    HF_HUB_OFFLINE=1 PYTHONPATH=.:kernels python tests/goldens/lerobot_dataset/check_with_lerobot.py
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lerobot.datasets.lerobot_dataset import LeRobotDataset as TheirDataset

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import make_dataset  # noqa: E402

from soma_lightning.data.lerobot import LeRobotDataset as OurDataset  # noqa: E402


def sha256(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()


def record(item: dict[str, Any]) -> dict[str, Any]:
    """What the golden file keeps of a frame that lerobot read."""
    pixels = {key: torch.round(item[key] * 255).to(torch.uint8).numpy() for key in make_dataset.CAMERAS}
    return {
        "index": int(item["index"]),
        "episode_index": int(item["episode_index"]),
        "task": item["task"],
        "images": {key: sha256(image) for key, image in pixels.items()},
        "state": sha256(item["observation.state"].numpy()),
        "action": sha256(item["action"].numpy()),
        "first_action": item["action"][0].tolist(),
        "action_is_pad": [bool(pad) for pad in item["action_is_pad"]],
    }


def compare(theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    for key in make_dataset.CAMERAS:
        assert torch.equal(torch.round(theirs[key] * 255).to(torch.uint8), ours[key]), key
    for key in ("observation.state", "action", "action_is_pad", "index", "episode_index"):
        assert torch.equal(theirs[key], ours[key]), key
    assert theirs["task"] == ours["task"]


def record_with_lerobot(root: Path) -> None:
    features = make_dataset.features()
    # lerobot compares shapes as tuples
    features = {key: {**feature, "shape": tuple(feature["shape"])} for key, feature in features.items()}
    theirs = TheirDataset.create(
        "local/theirs", fps=make_dataset.FPS, features=features, root=root, robot_type="panda", use_videos=False
    )
    for index, (length, task) in enumerate(make_dataset.EPISODES):
        frames = make_dataset.episode(index)
        for t in range(length):
            theirs.add_frame({**{key: values[t] for key, values in frames.items()}, "task": task})
        theirs.save_episode()
    theirs.finalize()


def main() -> None:
    steps = [i / make_dataset.FPS for i in range(make_dataset.CHUNK_SIZE)]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "recorded"
        make_dataset.write(root)
        theirs = TheirDataset("local/recorded", root=root, delta_timestamps={"action": steps})
        ours = OurDataset(root, make_dataset.CHUNK_SIZE)
        assert len(theirs) == len(ours) == sum(length for length, _ in make_dataset.EPISODES)
        frames = []
        for i in range(len(theirs)):
            compare(theirs[i], ours[i])
            frames.append(record(theirs[i]))
        second = TheirDataset("local/recorded", root=root, episodes=[1], delta_timestamps={"action": steps})
        ours_second = OurDataset(root, make_dataset.CHUNK_SIZE, episodes=[1])
        assert len(second) == len(ours_second)
        for i in range(len(second)):
            compare(second[i], ours_second[i])
        record_with_lerobot(Path(folder) / "theirs")
        reread = OurDataset(Path(folder) / "theirs", make_dataset.CHUNK_SIZE)
        assert len(reread) == len(theirs)
        for i in range(len(theirs)):
            compare(theirs[i], reread[i])
        golden = {
            "lerobot": version("lerobot"),
            "datasets": version("datasets"),
            "total_episodes": theirs.meta.total_episodes,
            "fps": theirs.meta.fps,
            "robot_type": theirs.meta.robot_type,
            "tasks": theirs.meta.tasks.index.tolist(),
            "episode_lengths": [int(n) for n in theirs.meta.episodes["length"]],
            "statistics": {
                key: {name: values.tolist() for name, values in theirs.meta.stats[key].items()}
                for key in ("observation.state", "action", make_dataset.CAMERAS[0])
            },
            "frames": frames,
        }
    (HERE / "lerobot_reading.json").write_text(json.dumps(golden, indent=1) + "\n")
    print(f"lerobot {golden['lerobot']} and our reader agree on {len(frames)} frames; wrote lerobot_reading.json")


if __name__ == "__main__":
    main()
