"""A policy that two ranks hold in shards is exported whole: parameters, fp32 masters, averages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from bench.trainer import bare_trainer
from soma_lightning.contract import TRAINING_FILE
from soma_lightning.data import LeRobotDataModule
from soma_lightning.models import PI05Policy
from soma_lightning.modules import PI05Module
from soma_lightning.modules.base import TrainingConfig
from soma_lightning.optim.masters import master_values
from tests.modules.two_ranks import fit_on_two
from tests.ranks import ranks_run, whole

CASES: dict[str, dict[str, Any]] = {
    "plain": {"model": {}, "training": {}},
    "masters": {"model": {"config": {"dtype": "bfloat16"}}, "training": {}},
    "average": {"model": {"config": {"dtype": "bfloat16"}}, "training": {"ema_decay": 0.5}},
}


def fit_all(root: str, folder: str) -> dict[str, dict[str, torch.Tensor]]:
    """{case: what the export should hold}, by the model's names."""
    found = {name: fit(root, f"{folder}/{name}", **case) for name, case in CASES.items()}
    return {**found, "losses of the average": losses_of_the_average(root, f"{folder}/validated")}


def losses_of_the_average(root: str, folder: str) -> dict[str, torch.Tensor]:
    """Of validation and test: by the policy that was exported, and by a checkpoint in whose run no fit begins."""
    training = TrainingConfig(lr=1e-1, final_lr=1e-1, warmup_steps=0, ema_decay=0.5)
    trainer, module = fit_on_two(root, folder, {}, training)
    trainer.save_checkpoint(f"{folder}/a.ckpt")
    exported = PI05Module(pretrained=f"{folder}/policy")
    exported.draw_seed = module.draw_seed
    checkpoint = {"ckpt_path": f"{folder}/a.ckpt", "weights_only": True}
    found = {}
    for name, of, more in (("file", PI05Module(size="tiny", training=training), checkpoint), ("export", exported, {})):
        for loop in ("validate", "test"):
            runner = bare_trainer(torch.device("cpu"), folder, 1, strategy="somaspeed", devices=2)
            data = LeRobotDataModule(root, batch_size=4, preload=True, val_fraction=0.4)
            loss = getattr(runner, loop)(of, data, verbose=False, **more)[0]
            found[f"{name} {loop}"] = torch.tensor(next(value for key, value in loss.items() if "loss" in key))
    return found


def fit(root: str, folder: str, model: dict[str, Any], training: dict[str, Any]) -> dict[str, torch.Tensor]:
    trainer, module = fit_on_two(root, folder, model, TrainingConfig(lr=1e-3, final_lr=1e-4, **training))
    kept = whole(module.policy.model)
    better: dict[str, torch.Tensor] = {}
    if training:
        better = {name.removeprefix("policy.model."): value for name, value in module._ema.shadow.items()}
    elif model:
        better = master_values(module.policy.model, trainer.optimizers[0])
    return kept | {name: value.full_tensor().detach().clone() for name, value in better.items()}


@pytest.fixture(scope="module")
def exported(recorded: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("exports")
    ranks = ranks_run(fit_all, folder, arguments={"root": str(recorded), "folder": str(folder)})
    return folder, ranks[0]


@pytest.mark.parametrize("case", CASES)
def test_shards_are_exported_whole_and_unrounded(exported, case: str):
    folder, wanted = exported
    found = load_file(folder / case / "policy" / "model.safetensors")
    name = "expert.layers.0.mlp.up_proj.weight"
    key = "model.paligemma_with_expert.gemma_expert.model.layers.0.mlp.up_proj.weight"
    assert found[key].dtype == torch.float32
    assert torch.equal(found[key], wanted[case][name])
    loaded = dict(PI05Policy.from_pretrained(folder / case / "policy").model.named_parameters())
    for name, value in wanted[case].items():
        assert torch.equal(loaded[name], value.to(loaded[name].dtype)), name
    assert json.loads((folder / case / "policy" / TRAINING_FILE).read_text())["step"] == 2


def test_a_checkpoint_is_validated_and_tested_with_its_average(exported):
    losses = exported[1]["losses of the average"]
    for loop in ("validate", "test"):
        torch.testing.assert_close(losses[f"file {loop}"], losses[f"export {loop}"])
