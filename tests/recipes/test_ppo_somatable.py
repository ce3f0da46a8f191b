"""The tiny pi0.5 improves by its own experience, from images: what docs/ppo.md says, on held-out initial states."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from soma_lightning.cli import main as soma

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_ppo_improves_a_policy_of_few_demonstrations(tmp_path: Path):
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    demo = Path(os.environ.get("SOMA_DEMO", tmp_path / "demo"))
    scripts = [["recipes/ppo/somatable.sh", str(demo), str(tmp_path / "run"), "0", "--loop.iterations", "20"]]
    if not (demo / "base" / "policy").is_dir():
        scripts.insert(0, ["recipes/demo.sh", str(demo), "0"])
    for script in scripts:
        run = subprocess.run(["bash", *script], cwd=ROOT, env=environment, capture_output=True, text=True)
        assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    rows = [json.loads(line) for line in (tmp_path / "run/ppo/history.jsonl").read_text().splitlines()]
    start, end = rows[0]["start_success"], rows[-1]["success"]
    assert start <= 0.7
    assert end - start >= 0.15
    # What it learned goes on elsewhere, such as supervised training.
    fit = ["fit", "--config", "pi05_somatable", "--data.root", str(demo / "demos/pick"), "--data.batch_size", "8"]
    start = [
        "--model.pretrained",
        str(tmp_path / "run/ppo/policy"),
        "--trainer.default_root_dir",
        str(tmp_path / "fit"),
    ]
    assert soma.main([*fit, *start, "--trainer.max_steps", "1"]) == 0
