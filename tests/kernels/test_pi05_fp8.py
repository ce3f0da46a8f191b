"""The comparison of fp8 and bf16 backbones, on a tiny checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from bench import pi05_fp8
from soma_lightning.data import LeRobotDataModule
from soma_lightning.models import PI05Config, PI05Policy
from tests.recordings import record_noise


def test_differences_are_small_and_not_zero(tmp_path: Path, device: torch.device) -> None:
    data = record_noise(tmp_path / "set", episodes=2, length=10)
    policy = PI05Policy(PI05Config.tiny())
    policy.reset_parameters()
    module = LeRobotDataModule(str(data), batch_size=4)
    module.connect_policy(policy.config)
    module.setup("fit")
    policy.set_statistics(module.statistics)
    policy.save_pretrained(tmp_path / "policy")
    sizes = ["--batches", "2", "--batch_size", "4", "--device", str(device), "--commit", "abc"]
    assert (
        pi05_fp8.main(["--policy", str(tmp_path / "policy"), "--data", str(data), "--out", str(tmp_path), *sizes]) == 0
    )
    found = json.loads((tmp_path / "pi05_fp8.json").read_text())
    fp8, bf16 = (found[pair] for pair in pi05_fp8.PAIRS)
    for name in pi05_fp8.QUANTITIES:
        assert len(fp8[name]) == len(bf16[name]) == 2
        assert all(0 < value < 0.3 for value in [*fp8[name], *bf16[name]]), name
    assert sum(bf16["gradient"]) < sum(fp8["gradient"])
