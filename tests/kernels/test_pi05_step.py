"""The benchmark of pi0.5's training step at its tiny size, without the peer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench import pi05_step
from bench.pi05_step_worker import Row

CACHED = ["ours cached", "ours on disk"]
OURS = ["stock layers", "ours", "ours fp8", *CACHED]


def test_ours_agrees_with_itself_in_all_ways(tmp_path: Path, device: torch.device) -> None:
    # Compiling takes a C++ compiler and a minute on the CPU.
    size = ["--contenders", *OURS, "--size", "tiny", "--rows", "3", "1", "--sample-rows", "3", "2"]
    size += ["--device", str(device), "--commit", "abc"]
    assert pi05_step.main(["--out", str(tmp_path), *size]) == 0
    found = json.loads((tmp_path / "pi05_step.json").read_text())
    assert list(found) == ["environment", *OURS]
    for name in OURS:
        assert [row["rows"] for row in found[name]] == ([3, 1] if name in CACHED else [3, 1, 2])
        steps = found[name][:2]
        assert all(row["step"] and row["forward"] and row["loss"] > 0 and row["grad_norm"] > 0 for row in steps)
        assert [bool(row["sample"]) for row in found[name][::2]] == ([False] if name in CACHED else [True, True])
    assert all(found["ours"][0]["loss"] == found[name][0]["loss"] for name in CACHED)
    assert found["stock layers"][0]["action_error"] is None
    assert 0 < found["ours fp8"][0]["action_error"] < 0.1
    assert found["ours fp8"][0]["backbone"] < 0.8 * found["ours"][0]["backbone"]


def test_another_loss_is_found() -> None:
    rows = {"a": [Row(8, loss=1.0, grad_norm=2.0)], "b": [Row(8, loss=1.05, grad_norm=2.0), Row(9, note="failed")]}
    assert pi05_step.disagreements(rows) == ["b, 8 rows: loss 1.05, a has 1"]
    rows["b"][0] = Row(8, loss=1.0, grad_norm=float("nan"))
    assert pi05_step.disagreements(rows) == ["b, 8 rows: gradient norm nan, a has 2"]
    rows["b"][0] = Row(8, action_error=0.2)
    assert pi05_step.disagreements(rows) == ["b, 8 rows: actions are 0.2 off, relative"]


def test_a_contender_that_fails_is_a_row_that_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(pi05_step.CONTENDERS, "ours", pi05_step.Contender("ours", {"islands": "none"}, ""))
    job = pi05_step.Job("ours", "ours", str(tmp_path), [2], [], "tiny", "cpu", {"islands": "none"})
    (row,) = pi05_step.run(job, None, tmp_path, 120.0)
    assert row.note is not None
    assert "none" in row.note
    assert not row.step
