"""A policy whose frozen backbone is in fp8: loaded from a checkpoint, saved without having been rounded."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from soma_lightning.models import PI05Policy
from soma_lightning.models.pi05.building import build_pi05

CHANGES = {"dtype": "bfloat16", "islands": "openpi"}


@pytest.fixture
def folder(make_policy, tmp_path):
    """A checkpoint in fp32, as public ones may be."""
    make_policy().save_pretrained(tmp_path / "p")
    return tmp_path / "p"


def quantized(folder, **more) -> PI05Policy:
    return PI05Policy.from_pretrained(folder, frozen_precision="fp8", changes=CHANGES, **more)


def test_saving_writes_the_backbone_that_was_loaded_and_the_expert_that_was_trained(folder, make_batch, tmp_path):
    policy = quantized(folder)
    with torch.no_grad():
        policy.model.expert.action_out_proj.weight += 1
    policy.save_pretrained(tmp_path / "saved")
    before, after = load_file(folder / "model.safetensors"), load_file(tmp_path / "saved" / "model.safetensors")
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        if "paligemma.model" in key or "paligemma.lm_head" in key:
            assert torch.equal(after[key], tensor), key
    assert torch.equal(after["model.action_out_proj.weight"], before["model.action_out_proj.weight"] + 1)
    again = quantized(tmp_path / "saved")
    noise = torch.randn(3, *policy.noise_shape)
    assert torch.equal(again.sample_actions(make_batch(), noise), policy.sample_actions(make_batch(), noise))
    assert again.backbone_hash() == policy.backbone_hash()


def test_actions_of_fp8_are_near_those_of_bf16(folder, make_batch):
    noise = torch.randn(3, *quantized(folder).noise_shape)
    exact = PI05Policy.from_pretrained(folder, changes=CHANGES).sample_actions(make_batch(), noise)
    rough = quantized(folder).sample_actions(make_batch(), noise)
    assert 0 < (rough - exact).norm() < 0.05 * exact.norm()


def test_features_of_another_precision_are_other_features(folder):
    rough, exact = quantized(folder), PI05Policy.from_pretrained(folder, changes=CHANGES)
    assert rough.feature_identity() != exact.feature_identity()
    before = rough.backbone_hash()
    rough.model.prefix.paligemma.language_model.layers[0].mlp.up_proj.scale *= 2
    assert rough.backbone_hash() != before, "scales are part of the backbone"


def test_the_report_names_the_precision(folder):
    facts = quantized(folder).report_facts()
    assert facts["frozen_precision"] == "fp8"
    assert facts["frozen_layers"] == "vision: fused (torch), language: fused (torch)"
    assert quantized(folder).describe()["frozen_precision"] == "fp8"
    assert PI05Policy.from_pretrained(folder).report_facts()["frozen_precision"] == "float32"


def test_the_registry_builds_it(folder):
    policy = build_pi05({"model_type": "pi05", "model_path": str(folder), "frozen_precision": "fp8", **CHANGES}, None)
    assert policy.frozen_precision == "fp8"
    assert not policy.report_facts()["cuda_graphs"]
    graphed = build_pi05({"model_type": "pi05", "model_path": str(folder), "cuda_graphs": True}, None)
    assert graphed.report_facts()["cuda_graphs"]
    with pytest.raises(ValueError, match="frozen_precision='fp8' has no effect without model_path"):
        build_pi05({"model_type": "pi05", "size": "tiny", "frozen_precision": "fp8"}, None)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"frozen_precision": "fp4"}, "frozen_precision='fp4' is unknown"),
        ({"frozen_precision": "fp8", "changes": {"dtype": "bfloat16"}}, "needs islands='openpi'"),
        ({"frozen_precision": "fp8", "changes": CHANGES, "trainable": "all"}, "needs trainable='expert'"),
    ],
)
def test_what_cannot_be_in_fp8_is_refused_before_weights_are_read(folder, more, message):
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=message):
        PI05Policy.from_pretrained(folder, **more)


def test_a_prefix_in_fp8_is_not_thawed(folder):
    policy = quantized(folder)
    with pytest.raises(ValueError, match="the prefix is in fp8, which does not train"):
        policy.model.freeze("all")
    policy.model.freeze("expert")


def test_fresh_weights_are_not_quantized(make_policy):
    with pytest.raises(ValueError, match="loaded from a checkpoint"):
        make_policy(**CHANGES).quantize_frozen("fp8")
