"""The benchmark of pi0.5's checkpoints, at its tiny size."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench import pi05_checkpoint


def options(folder: Path) -> list[str]:
    sizes = ["--size", "tiny", "--device", "cpu", "--commit", "abc"]
    return ["--folder", str(folder), "--out", str(folder / "out"), *sizes]


def test_every_case_is_timed_and_compared(tmp_path: Path) -> None:
    assert pi05_checkpoint.main(options(tmp_path)) == 0
    cases = json.loads((tmp_path / "out" / "pi05_checkpoint.json").read_text())["cases"]
    assert [(case["saved"], case["loaded"]) for case in cases] == list(pi05_checkpoint.CASES)
    assert all(case["equal_bits"] and case["save"]["seconds"] > 0 and case["load"]["seconds"] > 0 for case in cases)
    assert cases[0]["file_gb"] < cases[1]["file_gb"]
    assert "| file | loaded as |" in (tmp_path / "out" / "pi05_checkpoint.md").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]  # the checkpoints are gone


def test_a_bit_that_differs_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load_and_damage(model, file, device):  # type: ignore[no-untyped-def]
        pi05_checkpoint_load(model, file, device)
        with torch.no_grad():
            model.expert.norm.dense.bias[0] += 1e-6

    pi05_checkpoint_load = pi05_checkpoint.load_weights
    monkeypatch.setattr(pi05_checkpoint, "load_weights", load_and_damage)
    assert pi05_checkpoint.main(options(tmp_path)) == 1
