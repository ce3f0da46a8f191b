"""Adapters and recomputed layers over two ranks that hold shards: exports, names in the run report, the same bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("peft", reason="needs `pip install 'soma-lightning[lora]'`")

from soma_lightning.models import PI05Policy
from soma_lightning.models.pi05.checkpoint import public_key
from soma_lightning.models.pi05.lora import LoRAConfig
from soma_lightning.modules.base import TrainingConfig
from tests.modules.two_ranks import fit_on_two
from tests.ranks import ranks_run, whole

OPENPI = LoRAConfig(rank=2, alpha=4, targets="openpi")
CASES: dict[str, dict[str, Any]] = {
    "replicated": {"model": {"lora": OPENPI}, "strategy": "somaspeed"},
    "sharded": {"model": {"lora": OPENPI}, "strategy": "frozen"},
    "kept": {"model": {"trainable": "all"}, "strategy": "somaspeed"},
    "recomputed": {"model": {"trainable": "all", "gradient_checkpointing": True}, "strategy": "somaspeed"},
}


def fit_all(root: str, folder: str) -> dict[str, dict[str, torch.Tensor]]:
    """{case: the trained network's parameters}, whole."""
    return {name: fit(root, f"{folder}/{name}", **case) for name, case in CASES.items()}


def fit(root: str, folder: str, model: dict[str, Any], strategy: str) -> dict[str, torch.Tensor]:
    from soma_lightning import SomaSpeedStrategy

    chosen = SomaSpeedStrategy(frozen="shard") if strategy == "frozen" else strategy
    _, module = fit_on_two(root, folder, model, TrainingConfig(lr=1e-2, final_lr=1e-3), chosen, steps=3)
    return whole(module.policy.model)


@pytest.fixture(scope="module")
def runs(recorded: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("options")
    ranks = ranks_run(fit_all, folder, arguments={"root": str(recorded), "folder": str(folder)})
    return folder, ranks[0]


@pytest.mark.parametrize("case", ["replicated", "sharded"])
def test_adapters_are_exported_merged_and_by_themselves(runs, case: str):
    folder, wanted = runs[0] / case, runs[1][case]
    adapters = {name: value for name, value in wanted.items() if ".lora_" in name}
    saved = load_file(folder / "adapter" / "adapter_model.safetensors")
    assert len(saved) == len(adapters)
    for name, value in adapters.items():
        assert torch.equal(saved[f"base_model.model.model.{public_key(name.replace('.default.', '.'))}"], value), name
    policy = dict(PI05Policy.from_pretrained(folder / "policy").model.named_parameters())
    moved = 0
    for name, value in policy.items():
        layer, leaf = name.rsplit(".", 1)
        base = wanted.get(f"{layer}.base_layer.{leaf}")
        if base is None:
            assert torch.equal(value, wanted[name]), name
            continue
        product = 2 * adapters[f"{layer}.lora_B.default.weight"] @ adapters[f"{layer}.lora_A.default.weight"]
        torch.testing.assert_close(value, base + product)
        moved += bool(product.abs().max() > 0)
    assert moved == len(adapters) / 2
    report = json.loads((folder / "run_report.json").read_text())
    assert {name.removeprefix("policy.model.") for name in report["trainable"]["names"]} == set(adapters)
    assert report["model"]["trainable_part"] == "LoRA"


def test_frozen_parts_are_divided_or_whole_and_the_result_is_the_same(runs):
    for name, value in runs[1]["replicated"].items():
        torch.testing.assert_close(runs[1]["sharded"][name], value, rtol=1e-4, atol=1e-5)


def test_recomputed_layers_give_the_same_bits(runs):
    assert all(torch.equal(value, runs[1]["recomputed"][name]) for name, value in runs[1]["kept"].items())
