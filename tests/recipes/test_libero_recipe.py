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
