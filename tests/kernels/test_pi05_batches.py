"""The benchmark of full-size pi0.5 on recorded batches, at its tiny size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench import pi05_batches
from tests.recordings import record_noise


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """Two episodes of ten frames."""
    return record_noise(tmp_path / "set", episodes=2, length=10)


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
