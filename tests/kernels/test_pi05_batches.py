"""The benchmark of full-size pi0.5 on recorded batches, at its tiny size."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from bench import pi05_batches
from soma_lightning.data.lerobot_writer import LeRobotWriter

IMAGE = {"dtype": "image", "shape": [64, 64, 3], "names": ["height", "width", "channel"]}
FEATURES = {
    "observation.images.image": IMAGE,
    "observation.images.image2": IMAGE,
    "observation.state": {"dtype": "float32", "shape": [8], "names": None},
    "action": {"dtype": "float32", "shape": [7], "names": None},
}


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """Two episodes of ten frames."""
    draw = np.random.default_rng(0)
    with LeRobotWriter(tmp_path / "set", features=FEATURES) as writer:
        for _ in range(2):
            images = draw.integers(0, 256, (10, 64, 64, 3), dtype=np.uint8)
            frames = {
                "observation.images.image": images,
                "observation.images.image2": images,
                "observation.state": draw.normal(size=(10, 8)).astype(np.float32),
                "action": np.tanh(draw.normal(size=(10, 7))).astype(np.float32),
            }
            writer.add_episode(frames, "pick up the cube")
    return tmp_path / "set"


def options(data: Path, out: Path, device: torch.device, steps: int) -> list[str]:
    sizes = ["--size", "tiny", "--batch_size", "2", "--num_workers", "0", "--steps", str(steps)]
    return ["--data", str(data), "--out", str(out), "--device", str(device), "--commit", "abc", *sizes]


def test_every_step_but_the_first_is_measured(recorded: Path, tmp_path: Path, device: torch.device) -> None:
    assert pi05_batches.main(options(recorded, tmp_path / "out", device, 3)) == 0
    found = json.loads((tmp_path / "out" / "pi05_batches.json").read_text())
    assert len(found["steps"]) == 3
    assert found["optimizer"] == "FusedAdamW"
    assert "trained bfloat16" in found["dtypes"]
    assert (found["peak"] is None) == (device.type == "cpu")
    for step in found["steps"]:
        parts = step["forward_ms"] + step["backward_ms"] + step["optimizer_ms"]
        assert 0 < parts < step["step_ms"] * 1.5
    assert "| step ms | data ms |" in (tmp_path / "out" / "pi05_batches.md").read_text()


def test_a_data_set_that_is_too_small_is_an_error(recorded: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="20 steps and the first need more than the 5 batches"):
        pi05_batches.main(options(recorded, tmp_path, torch.device("cpu"), 20))
