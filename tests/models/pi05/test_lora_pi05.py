"""Low-rank adapters: what trains, merged checkpoints, peft's files, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("peft", reason="needs `pip install 'soma-lightning[lora]'`")

import soma_lightning.models.pi05.frozen as frozen
from soma_lightning.models import PI05Policy
from soma_lightning.models.pi05.building import build_pi05
from soma_lightning.models.pi05.checkpoint import merged_tensors, public_key
from soma_lightning.models.pi05.identity import check_features_fixed
from soma_lightning.models.pi05.lora import LoRAConfig, add_lora, save_adapter
from soma_lightning.optim.fused_adamw import FusedAdamW

EXPERT_LAYERS = {
    *(f"expert.layers.{i}.self_attn.{p}_proj" for i in range(2) for p in "qv"),
    *("expert.action_in_proj", "expert.action_out_proj"),
}


def fill_b(policy: PI05Policy) -> None:
    """As after training: B is no longer zero."""
    draw = torch.Generator().manual_seed(1)
    for name, p in policy.model.named_parameters():
        if ".lora_B." in name:
            p.data = (0.1 * torch.randn(p.shape, generator=draw)).to(p.dtype)


def actions(policy: PI05Policy, batch: dict[str, Any]) -> Tensor:
    return policy.sample_actions(batch, generator=torch.Generator().manual_seed(2))


def loss(policy: PI05Policy, batch: dict[str, Any]) -> Tensor:
    return policy.sft_forward(batch, generator=torch.Generator().manual_seed(5))["loss"]


def layers_of(policy: PI05Policy) -> set[str]:
    return {name.split(".lora_")[0] for name in policy.model.trainable_names() if ".lora_" in name}


def test_adapters_of_the_expert_start_as_nothing_and_alone_train(make_policy, make_batch):
    policy, batch = make_policy(), make_batch()
    before = loss(policy, batch).item()
    add_lora(policy.model, LoRAConfig(rank=4))
    assert loss(policy, batch).item() == before
    assert layers_of(policy) == EXPERT_LAYERS
    assert all(".lora_" in name for name in policy.model.trainable_names())
    shapes = {name: tuple(p.shape) for name, p in policy.model.named_parameters() if p.requires_grad}
    assert shapes["expert.layers.0.self_attn.q_proj.lora_A.default.weight"] == (4, 64)
    assert shapes["expert.layers.0.self_attn.q_proj.lora_B.default.weight"] == (128, 4)
    fill_b(policy)
    loss(policy, batch).backward()
    assert {name for name, p in policy.model.named_parameters() if p.grad is not None} == set(shapes)
    assert policy.model.frozen_modules()[0] is policy.model.prefix


@pytest.mark.parametrize("targets", ["paligemma", "openpi", r"prefix\..*language_model.*\.q_proj"])
def test_every_adapter_of_the_prefix_gets_a_gradient(targets, make_policy, make_batch):
    policy = make_policy()
    names = add_lora(policy.model, LoRAConfig(targets=targets))
    fill_b(policy)
    loss(policy, make_batch()).backward()
    without = [name for name, p in policy.model.named_parameters() if p.requires_grad and p.grad is None]
    assert without == []
    assert all(p.grad is None for p in policy.model.parameters() if not p.requires_grad)
    last = [name for name in names if "language_model.layers.1." in name]  # its other parts feed nothing
    assert {name.rpartition(".")[2] for name in last} <= {"k_proj", "v_proj"}


def test_gradients_are_those_of_the_product(make_policy, make_batch):
    """dA = scale * B' dW and dB = scale * dW A', with dW the gradient of the merged weight."""
    policy, batch = make_policy(), make_batch()
    add_lora(policy.model, LoRAConfig(rank=4, alpha=8))
    fill_b(policy)
    loss(policy, batch).backward()
    merged = make_policy()
    merged.model.load_state_dict(merged_tensors(policy.model, policy.model.state_dict()))
    loss(merged, batch).backward()
    layer = policy.model.expert.layers[1].self_attn.v_proj
    dw = merged.model.expert.layers[1].self_attn.v_proj.weight.grad
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    torch.testing.assert_close(a.grad, 2 * b.detach().T @ dw, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(b.grad, 2 * dw @ a.detach().T, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("targets", ["expert", "paligemma"])
def test_a_merged_checkpoint_gives_the_same_actions(targets, dtype, make_policy, make_batch, tmp_path: Path):
    policy, batch = make_policy(dtype=dtype), make_batch()
    before = {name: value.clone() for name, value in policy.model.state_dict().items()}
    plain = actions(policy, batch)
    add_lora(policy.model, LoRAConfig(rank=4, alpha=6, targets=targets))
    fill_b(policy)
    wanted = actions(policy, batch)
    assert (wanted - plain).abs().max() > 1e-3
    policy.save_pretrained(tmp_path / "policy")
    loaded = PI05Policy.from_pretrained(tmp_path / "policy")
    limit = 1e-5 if dtype == "float32" else 0.25 * (wanted - plain).abs().max()
    assert (actions(loaded, batch) - wanted).abs().max() <= limit
    now = loaded.model.state_dict()
    changed = {name for name in before if not torch.equal(before[name], now[name])}
    assert changed <= {f"{name}.weight" for name in layers_of(policy)}
    assert changed
    for name in ("expert.layers.0.self_attn.q_proj", "prefix.paligemma.language_model.layers.0.mlp.up_proj"):
        if name in layers_of(policy):
            layer = policy.model.get_submodule(name)
            product = layer.lora_B["default"].weight.float() @ layer.lora_A["default"].weight.float()
            exact = before[f"{name}.weight"].float() + 1.5 * product
            torch.testing.assert_close(now[f"{name}.weight"], exact.to(now[f"{name}.weight"].dtype))


def tree(names: dict[str, tuple[int, int]]) -> nn.Module:
    """Linear layers without bias, at paths, as lerobot's policy has them."""
    root = nn.Module()
    for name, (inputs, outputs) in names.items():
        at = root
        *path, leaf = name.split(".")
        for part in path:
            if not hasattr(at, part):
                at.add_module(part, nn.Module())
            at = getattr(at, part)
        at.add_module(leaf, nn.Linear(inputs, outputs, bias=False))
    return root


def test_peft_reads_the_adapter_under_lerobots_names(make_policy, tmp_path: Path):
    from peft import PeftModel

    policy = make_policy()
    q_proj, full = "expert.layers.0.self_attn.q_proj", "expert.layers.0.mlp.up_proj"
    add_lora(policy.model, LoRAConfig(rank=4, alpha=8, targets=r"expert\..*\.(q|v)_proj", full=(full,)))
    fill_b(policy)
    save_adapter(policy.model, tmp_path / "adapter", "some/base")
    settings = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"], settings["peft_type"]) == (4, 8, "LORA")
    assert settings["base_model_name_or_path"] == "some/base"
    names = {name: policy.model.get_submodule(name) for name in layers_of(policy) | {full}}
    theirs = {f"model.{public_key(name)}": (m.in_features, m.out_features) for name, m in names.items()}
    base = tree(theirs)
    start = base.get_submodule(f"model.{public_key(q_proj)}").weight.detach().clone()
    read = PeftModel.from_pretrained(base, str(tmp_path / "adapter")).merge_and_unload()
    layer = policy.model.get_submodule(q_proj)
    product = 2 * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    torch.testing.assert_close(read.get_submodule(f"model.{public_key(q_proj)}").weight - start, product)
    assert torch.equal(read.get_submodule(f"model.{public_key(full)}").weight, policy.model.get_submodule(full).weight)


def test_a_frozen_prefix_stays_fused_beside_adapters_of_the_expert(monkeypatch, make_policy):
    monkeypatch.setattr(frozen, "has_kernels", lambda device: True)
    policy = make_policy(dtype="bfloat16", islands="openpi")
    add_lora(policy.model, LoRAConfig())
    assert policy.model.prefix.path() == "vision: fused (torch), language: fused (torch)"
    check_features_fixed(policy)
    policy = make_policy(dtype="bfloat16", islands="openpi")
    add_lora(policy.model, LoRAConfig(targets=r"prefix\..*language_model.*q_proj"))
    assert policy.model.prefix.path() == "vision: fused (torch), language: stock modules (a part of the prefix trains)"
    with pytest.raises(ValueError, match="a feature cache needs a frozen backbone, but adapters of it train"):
        check_features_fixed(policy)
    with pytest.raises(ValueError, match="a part of the prefix trains"):
        policy.model.use_cuda_graphs()


def test_an_fp8_backbone_takes_adapters_of_the_expert_only(make_policy, tmp_path: Path, monkeypatch):
    import soma_lightning.models.pi05.model as model

    monkeypatch.setattr(model, "why_no_fp8", lambda device: None)
    make_policy(dtype="bfloat16", islands="openpi").save_pretrained(tmp_path / "base")
    policy = PI05Policy.from_pretrained(tmp_path / "base", frozen_precision="fp8")
    with pytest.raises(ValueError, match="frozen_precision='fp8' takes no adapters"):
        add_lora(policy.model, LoRAConfig(targets="paligemma"))
    add_lora(policy.model, LoRAConfig())
    fill_b(policy)
    policy.save_pretrained(tmp_path / "merged")
    base, merged = (PI05Policy.from_pretrained(tmp_path / name).model.state_dict() for name in ("base", "merged"))
    assert {name for name in base if not torch.equal(base[name], merged[name])} == {
        f"{n}.weight" for n in EXPERT_LAYERS
    }


def test_masters_of_bf16_adapters_are_merged_and_saved(make_policy, make_batch, tmp_path: Path):
    policy = make_policy(dtype="bfloat16")
    add_lora(policy.model, LoRAConfig(rank=4, dtype="bfloat16"))
    policy.model.check_dtypes()
    trained = [p for p in policy.model.parameters() if p.requires_grad]
    assert {p.dtype for p in trained} == {torch.bfloat16}
    optimizer = FusedAdamW(trained, lr=1e-3, master_weights=True)
    for _ in range(3):
        optimizer.zero_grad()
        loss(policy, make_batch()).backward()
        optimizer.step()
    policy.save_pretrained(tmp_path / "policy", optimizer=optimizer)
    save_adapter(policy.model, tmp_path / "adapter", optimizer=optimizer)
    from safetensors.torch import load_file

    adapter = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert {value.dtype for value in adapter.values()} == {torch.float32}
    name = "expert.layers.0.self_attn.q_proj"
    key = f"base_model.model.model.{public_key(name)}"
    product = adapter[f"{key}.lora_B.weight"] @ adapter[f"{key}.lora_A.weight"]
    merged = load_file(tmp_path / "policy" / "model.safetensors")[f"model.{public_key(name)}.weight"]
    assert merged.dtype == torch.float32
    torch.testing.assert_close(merged, policy.model.get_submodule(name).weight.float() + product)
    assert product.abs().max() > 0


def test_rlinfs_configuration(make_policy):
    policy = build_pi05({"model_type": "pi05", "size": "tiny", "is_lora": True, "lora_rank": 8}, torch.float32)
    assert policy.model.lora == LoRAConfig(8, targets="paligemma", full=("expert",), init="gaussian")
    names = policy.model.trainable_names()
    assert all(name.startswith("expert.") or ".lora_" in name for name in names)
    assert sum(name.startswith("expert.") for name in names) == len(list(policy.model.expert.parameters()))
    plain = build_pi05({"model_type": "pi05", "size": "tiny", "is_lora": False, "lora_rank": 8}, torch.float32)
    assert plain.model.lora is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"targets": r"expert\.nothing"}, "fits no linear layer"),
        ({"full": ["head"]}, r"full=\['head'\] are no modules"),
        ({"full": ["expert"]}, "both in lora targets and in full"),
        ({"full": "expert"}, r"full='expert' must be a list of modules: \['expert'\]"),
        ({"full": ["prefix.paligemma.language_model.norm"]}, "has nothing that the loss can reach"),
        ({"rank": 0}, "rank=0 must be a whole number, at least 1"),
        ({"rank": "8"}, "rank='8' must be a whole number"),
        ({"alpha": 0.0}, "alpha=0.0 must be positive"),
        ({"alpha": math.nan}, "alpha=nan must be positive and finite"),
        ({"dtype": "float16"}, "dtype='float16' must be one of"),
        ({"targets": "("}, "no regular expression"),
    ],
)
def test_settings_that_fit_nothing_are_refused(settings, message, make_policy):
    with pytest.raises(ValueError, match=message):
        add_lora(make_policy().model, LoRAConfig(**settings))


def test_an_order_that_does_not_work_is_refused(make_policy):
    with pytest.raises(ValueError, match="trainable='all' has no effect with lora"):
        add_lora(make_policy(trainable="all").model, LoRAConfig())
    policy = make_policy()
    policy.model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="add adapters before"):
        add_lora(policy.model, LoRAConfig())
    policy = make_policy()
    add_lora(policy.model, LoRAConfig(targets=r"expert\.action_(in|out)_proj"))
    with pytest.raises(ValueError, match="would change nothing, because no layer trains"):
        policy.model.gradient_checkpointing_enable()
    policy = make_policy()
    with pytest.raises(ValueError, match="no adapters to save"):
        save_adapter(policy.model, "nowhere")
    add_lora(policy.model, LoRAConfig())
    with pytest.raises(ValueError, match="adapters already"):
        add_lora(policy.model, LoRAConfig())
    with pytest.raises(ValueError, match="adapters say what trains"):
        policy.model.freeze("expert")
