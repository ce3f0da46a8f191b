"""A small recording of the simulator that every recipe test trains on."""

from __future__ import annotations

from pathlib import Path

import pytest

from soma_lightning.cli import demos


@pytest.fixture(scope="session")
def reach_demos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("recipes") / "reach"
    line = ["--env", "somatable", "--task", "reach_cube", "--episodes", "6", "--out", str(out)]
    assert demos.main(line) == 0
    return out
