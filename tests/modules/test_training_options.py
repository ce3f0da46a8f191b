"""PI05Module's ways to train less, with less memory: runs of a few steps, their files, reports and resumption."""

from __future__ import annotations

import json

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors.torch import load_file

pytest.importorskip("peft", reason="needs `pip install 'soma-lightning[lora]'`")

from soma_lightning.models import PI05Policy
from soma_lightning.models.pi05.lora import LoRAConfig


def test_a_run_with_adapters_leaves_a_merged_policy_and_the_adapter(make_run, tmp_path):
    trainer, module, data = make_run("run", model={"lora": LoRAConfig(rank=2, alpha=4)}, training={"ema_decay": 0.5})
    before = {name: p.detach().clone() for name, p in module.policy.model.named_parameters()}
    trainer.fit(module, datamodule=data)
    moved = {n for n, p in module.policy.model.named_parameters() if not torch.equal(p, before[n])}
    assert moved == set(module.policy.model.trainable_names())
    assert set(module._ema.shadow) == {f"policy.model.{name}" for name in moved}
    adapter = load_file(tmp_path / "run" / "adapter" / "adapter_model.safetensors")
    assert len(adapter) == len(moved)
    averaged = {n.removeprefix("policy.model."): value for n, value in module._ema.shadow.items()}
    name = "expert.action_in_proj"
    product = 2 * averaged[f"{name}.lora_B.default.weight"] @ averaged[f"{name}.lora_A.default.weight"]
    policy = PI05Policy.from_pretrained(tmp_path / "run" / "policy")  # the average, merged
    expected = before[f"{name}.base_layer.weight"] + product
    torch.testing.assert_close(policy.model.expert.action_in_proj.weight, expected)
    report = module.report_facts()
    assert report["trainable_part"] == "LoRA"
    assert "rank 2, scale 2, float32, on 6 layers (expert)" in report["lora"]
    json.dumps(report)


def test_a_run_with_adapters_goes_on_and_refuses_other_ones(make_run, tmp_path):
    lora = {"lora": LoRAConfig(rank=2, targets="openpi")}
    trainer, module, data = make_run("whole", model=lora, max_steps=4)
    trainer.fit(module, datamodule=data)
    keep = ModelCheckpoint(tmp_path / "kept", every_n_train_steps=2, save_top_k=-1, filename="{step}")
    first, module_1, data_1 = make_run("first", model=lora, max_steps=4, enable_checkpointing=True, callbacks=[keep])
    first.fit(module_1, datamodule=data_1)
    again, module_2, data_2 = make_run("again", model=lora, max_steps=4)
    again.fit(module_2, datamodule=data_2, ckpt_path=tmp_path / "kept" / "step=2.ckpt")
    for name, p in module.policy.model.named_parameters():
        assert torch.equal(p, dict(module_2.policy.model.named_parameters())[name]), name
    other = make_run("other", model={"lora": LoRAConfig(rank=2, alpha=8, targets="openpi")})
    with pytest.raises(ValueError, match=r"the checkpoint's config \(lora\) differs"):
        other[0].fit(other[1], datamodule=other[2], ckpt_path=tmp_path / "kept" / "step=2.ckpt")


def test_layers_that_run_again_train_to_the_same_bits(make_run):
    runs = [make_run(str(on), model={"trainable": "all", "gradient_checkpointing": on}) for on in (False, True)]
    for trainer, module, data in runs:
        trainer.fit(module, datamodule=data)
    first, second = (dict(module.policy.model.named_parameters()) for _, module, _ in runs)
    assert all(torch.equal(p, second[name]) for name, p in first.items())


def test_adapters_and_trainable_exclude_each_other(make_run):
    with pytest.raises(ValueError, match="trainable='all' has no effect with lora"):
        make_run("run", model={"lora": LoRAConfig(), "trainable": "all"})


def test_the_memory_estimate_is_in_the_run_report_before_training(make_run, tmp_path):
    trainer, module, data = make_run("run", model={"config": {"dtype": "bfloat16"}}, training={"ema_decay": 0.9})
    trainer.fit(module, datamodule=data)
    written = json.loads((tmp_path / "run" / "run_report.json").read_text())["model"]["memory_estimate"]
    estimate = module.memory_estimate()
    assert written == estimate.facts()
    trained = [p for p in module.policy.parameters() if p.requires_grad]
    assert estimate.gradients == sum(p.nbytes for p in trained)
    assert estimate.optimizer == sum(p.numel() * (12 if p.dtype == torch.bfloat16 else 8) for p in trained)
    assert estimate.average == 4 * sum(p.numel() for p in trained)
    trainer, module, data = make_run("half", model={"config": {"dtype": "bfloat16"}})
    data.batch_size = 4
    trainer.fit(module, datamodule=data)
    assert module.memory_estimate().activations * 2 == estimate.activations
    assert module.memory_estimate().average == 0
