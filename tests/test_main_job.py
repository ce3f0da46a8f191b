"""The claim of the README with its controls: the frozen path is what learns.

On another seed than the demo; or, where SOMA_DEMO names the folder that `make demo` left, on that one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_stage_two_beats_its_controls(tmp_path: Path):
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    environment.pop("OMP_NUM_THREADS", None)
    made = os.environ.get("SOMA_DEMO")
    folder, seed = (Path(made), "0") if made else (tmp_path, "1")
    for script in ("controls.sh",) if made else ("demo.sh", "controls.sh"):
        command = ["bash", str(ROOT / "recipes" / script), str(folder), seed]
        run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
        assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    verdict = json.loads((folder / "controls.json").read_text())
    assert verdict["claim"] == {"best": "stage 2", "beats": ["stage 1", "blind", "random backbone"], "holds": True}
    backbone = {row["label"]: row["backbone"] for row in verdict["rows"]}
    assert backbone["stage 2"] == backbone["stage 1"] == backbone["blind"] != backbone["random backbone"]
