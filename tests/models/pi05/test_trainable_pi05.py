"""Partly frozen backbones, and layers that run again in the backward pass: which parts, and the same gradients."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

import soma_lightning.models.pi05.frozen as frozen
from soma_lightning.models import PI05Config
from soma_lightning.models.pi05.config_files import read_config, write_config
from soma_lightning.models.pi05.model import PI05Model


def gradients(policy, batch) -> dict[str, Tensor]:
    policy.zero_grad()
    loss = policy.sft_forward(batch, generator=torch.Generator().manual_seed(5))["loss"]
    loss.backward()
    return {name: p.grad for name, p in policy.model.named_parameters() if p.grad is not None}


def test_a_frozen_vision_tower_leaves_no_graph_and_the_rest_has_the_gradients_of_all(make_policy, make_batch):
    policy, batch = make_policy(trainable="all"), make_batch()
    wanted = gradients(policy, batch)
    policy.model.freeze("all_but_vision")
    seen: list[bool] = []
    tower = policy.model.prefix.paligemma.vision_tower
    tower.encoder.layers[0].register_forward_hook(lambda *_: seen.append(torch.is_grad_enabled()))
    found = gradients(policy, batch)
    assert seen == [False]
    assert set(wanted) - set(found) == {name for name in wanted if ".vision_tower." in name}
    assert "prefix.paligemma.multi_modal_projector.linear.weight" in found
    assert all(torch.equal(g, wanted[name]) for name, g in found.items())
    assert not any(m.training for m in tower.modules())


def test_frozen_vision_layers_run_fused_before_language_layers_that_train(monkeypatch, make_batch, make_policy):
    policy = make_policy(trainable="all_but_vision", dtype="bfloat16", islands="openpi")
    batch = make_batch()
    stock = gradients(policy, batch)
    monkeypatch.setattr(frozen, "has_kernels", lambda device: True)
    path = policy.model.prefix.path()
    assert path == "vision: fused (torch), language: stock modules (a part of the prefix trains)"
    fused = gradients(policy, batch)
    assert set(fused) == set(stock)
    name = "prefix.paligemma.multi_modal_projector.linear.weight"
    torch.testing.assert_close(fused[name].float(), stock[name].float(), rtol=0.05, atol=0.05 * stock[name].abs().max())


@pytest.mark.parametrize("trainable", ["expert", "all_but_vision", "all"])
def test_lerobots_fields_say_what_trains(trainable: str, tmp_path: Path):
    config = PI05Config.base(trainable=trainable)
    write_config(config, tmp_path)
    public = json.loads((tmp_path / "config.json").read_text())
    assert (public["train_expert_only"], public["freeze_vision_encoder"]) == (
        trainable == "expert",
        trainable == "all_but_vision",
    )
    assert read_config(tmp_path).trainable == trainable
    (tmp_path / "soma.json").unlink()  # as lerobot writes it; with both off a file says nothing
    assert read_config(tmp_path).trainable == ("expert" if trainable == "all" else trainable)


@pytest.mark.parametrize("trainable", ["expert", "all_but_vision", "all"])
def test_layers_that_run_again_give_the_same_bits(trainable: str, make_policy, make_batch):
    policy, batch = make_policy(trainable=trainable), make_batch()
    wanted = gradients(policy, batch)
    saved: list[int] = []

    def kept(policy) -> int:
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.nbytes) or x, lambda x: x):
            policy.sft_forward(batch, generator=torch.Generator().manual_seed(5))
        return sum(saved)

    before = kept(policy)
    policy.model.gradient_checkpointing_enable()
    wrapped = {name for name, m in policy.model.named_modules() if "forward" in vars(m)}
    owners = {".".join(name.split(".")[:-1]) for name in wrapped}
    stacks = {
        "vision": "prefix.paligemma.vision_tower.encoder.layers",
        "language": "prefix.paligemma.language_model.layers",
    }
    expected = {"expert": [], "all_but_vision": ["language"], "all": ["vision", "language"]}[trainable]
    assert owners == {"expert.layers", *(stacks[name] for name in expected)}
    assert kept(policy) < 0.7 * before
    found = gradients(policy, batch)
    assert set(found) == set(wanted)
    assert all(torch.equal(g, wanted[name]) for name, g in found.items())
    copied = copy.deepcopy(policy)  # runs its own layers, not the original's
    with torch.no_grad():
        policy.model.expert.layers[0].mlp.down_proj.weight.zero_()
    assert all(torch.equal(g, wanted[name]) for name, g in gradients(copied, batch).items())


def test_settings_that_exclude_each_other_are_refused():
    model = PI05Model(PI05Config.tiny(trainable="all"))
    with pytest.raises(ValueError, match="a part of the prefix trains"):
        model.use_cuda_graphs()
    model.freeze("expert")
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="exclude each other"):
        model.use_cuda_graphs()
    with pytest.raises(ValueError, match="on already"):
        model.gradient_checkpointing_enable()
