"""The LIBERO job from end to end, at a size at which nothing is learned: every command fits the next one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from soma_lightning.imports import is_available

ROOT = Path(__file__).resolve().parents[2]

if os.environ.get("SOMA_REQUIRE_LIBERO") != "1" and not is_available("libero"):
    pytest.skip("needs `pip install 'soma-lightning[libero]'`", allow_module_level=True)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"EPISODES": "100"}, "EPISODES=100, but the benchmark has 50 initial states; ask for at most 50, or"),
        ({"EPISODES": "0"}, "EPISODES=0 must be at least 1"),
        ({"DEMOS": "1"}, "DEMOS=1 must be at least 2"),
        ({"STREAM": "2"}, "STREAM=2 is what the demonstrations of seed 1 start from"),
        ({"WORKERS": "two"}, "WORKERS=two must be a whole number"),
        ({"IMAGE_SIZE": "-64"}, "IMAGE_SIZE=-64 must be a whole number"),
    ],
)
def test_sizes_that_cannot_work_end_the_job_before_it_begins(
    tmp_path: Path, sizes: dict[str, str], message: str
) -> None:
    command = ["bash", str(ROOT / "recipes" / "libero.sh"), str(tmp_path / "out"), "1"]
    environment = {**os.environ, **sizes, "PATH": "/usr/bin:/bin"}  # no soma there
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 2, run.stdout + run.stderr
    assert run.stderr.startswith(f"error: {message}")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_libero_job_runs_at_its_smallest(tmp_path: Path) -> None:
    short = "--trainer.max_steps 2 --data.batch_size 8 --trainer.limit_val_batches 1"
    size = {"BASE_DEMOS": "1", "DEMOS": "2", "EPISODES": "1", "BASE_OPTIONS": short, "TUNE_OPTIONS": short}
    environment = {**os.environ, **size, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = ["bash", str(ROOT / "recipes" / "libero.sh"), str(tmp_path), "1"]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    assert "kept: " not in run.stdout
    again = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert again.returncode == 0, again.stdout[-3000:] + again.stderr[-3000:]
    assert again.stdout.count("kept: ") == 5  # two recordings and three trainings; rollouts keep themselves
    rows = {row["label"]: row for row in json.loads((tmp_path / "success.json").read_text())["rows"]}
    assert set(rows) == {"stage 1", "stage 2", "blind"}
    assert len({row["backbone"] for row in rows.values()}) == 1  # stage 2 left it as it was
    recorded = json.loads((tmp_path / "demos" / "plate" / "meta" / "soma_demos.json").read_text())
    assert (recorded["init_state_stream"], recorded["settings"]["suite"]) == (2, "libero_goal")
    results = json.loads((tmp_path / "eval" / "stage2" / "results.json").read_text())
    assert results["settings"]["env_options"]["stream"] == 0  # the benchmark's own initial states
