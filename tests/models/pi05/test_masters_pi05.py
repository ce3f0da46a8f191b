"""Does what trains keep its fp32 bits from an fp32 checkpoint through bf16 training into the saved file?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from soma_lightning.models import PI05Policy
from soma_lightning.models.pi05.checkpoint import public_key
from soma_lightning.optim.fused_adamw import FP32MasterAdamW, FusedAdamW
from soma_lightning.optim.masters import master_values


def trained(policy: PI05Policy) -> list[Tensor]:
    return [p for p in policy.parameters() if p.requires_grad]


@pytest.fixture
def bf16(make_policy: Any, tmp_path: Path) -> PI05Policy:
    """A bf16 policy from an fp32 checkpoint, `tmp_path / "fp32"`."""
    make_policy().save_pretrained(tmp_path / "fp32")
    return PI05Policy.from_pretrained(tmp_path / "fp32", dtype="bfloat16")


def step(policy: PI05Policy, optimizer: FusedAdamW, batch: dict[str, Any]) -> None:
    policy.sft_forward(batch, generator=torch.Generator().manual_seed(1))["loss"].backward()
    optimizer.step()
    optimizer.zero_grad()


def trained_part(policy: PI05Policy, folder: Path, start: str = "model.") -> dict[str, Tensor]:
    tensors = load_file(folder / "model.safetensors")
    return {name: tensors[start + public_key(name)] for name in policy.model.trainable_names()}


def same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return set(a) == set(b) and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize(("layout", "start"), [("lerobot", "model."), ("openpi", "")])
def test_a_step_that_changes_nothing_keeps_every_fp32_bit(
    bf16: PI05Policy, make_batch: Any, tmp_path: Path, layout: Any, start: str
) -> None:
    optimizer = FP32MasterAdamW(trained(bf16), lr=0.0)
    bf16.seed_masters(optimizer)
    step(bf16, optimizer, make_batch())
    bf16.save_pretrained(tmp_path / "saved", layout, optimizer=optimizer)
    source = trained_part(bf16, tmp_path / "fp32")
    assert same_bits(trained_part(bf16, tmp_path / "saved", start), source)
    bf16.save_pretrained(tmp_path / "rounded")
    assert not same_bits(trained_part(bf16, tmp_path / "rounded"), source)


def test_steps_too_small_for_bf16_are_saved_and_go_on(bf16: PI05Policy, make_batch: Any, tmp_path: Path) -> None:
    name = "expert.layers.0.mlp.up_proj.weight"
    optimizer = FP32MasterAdamW(trained(bf16), lr=1e-7)
    bf16.seed_masters(optimizer)
    start = trained_part(bf16, tmp_path / "fp32")[name]
    step(bf16, optimizer, make_batch())
    masters = {n: value.clone() for n, value in master_values(bf16.model, optimizer).items()}
    assert not torch.equal(masters[name], start)
    bf16.save_pretrained(tmp_path / "saved", optimizer=optimizer)
    again = PI05Policy.from_pretrained(tmp_path / "saved")
    assert again.config.dtype == "bfloat16"
    fresh = FP32MasterAdamW(trained(again))
    again.seed_masters(fresh)
    assert same_bits(master_values(again.model, fresh), masters)
    assert same_bits(dict(again.model.named_parameters()), dict(bf16.model.named_parameters()))


def test_what_was_changed_since_counts_for_itself(bf16: PI05Policy, tmp_path: Path) -> None:
    name = "expert.layers.1.self_attn.q_proj.weight"
    optimizer = FP32MasterAdamW(trained(bf16))
    weight = dict(bf16.model.named_parameters())[name]
    with torch.no_grad():
        weight[0, 0] = 3.0
    bf16.seed_masters(optimizer)
    expected = trained_part(bf16, tmp_path / "fp32")[name].clone()
    expected[0, 0] = 3.0
    assert torch.equal(master_values(bf16.model, optimizer)[name], expected)
    with torch.no_grad():
        weight[0, 1] = 5.0  # after seeding: noticed when it is read
    expected[0, 1] = 5.0
    assert torch.equal(master_values(bf16.model, optimizer)[name], expected)


def test_an_fp32_policy_has_no_masters_and_keeps_its_bits(make_policy: Any, make_batch: Any, tmp_path: Path) -> None:
    make_policy().save_pretrained(tmp_path / "fp32")
    policy = PI05Policy.from_pretrained(tmp_path / "fp32")
    optimizer = FP32MasterAdamW(trained(policy), lr=0.0)
    policy.seed_masters(optimizer)
    with torch.autocast("cpu", torch.bfloat16):
        step(policy, optimizer, make_batch())
    policy.save_pretrained(tmp_path / "saved", optimizer=optimizer)
    assert same_bits(*(load_file(tmp_path / n / "model.safetensors") for n in ("fp32", "saved")))


def test_masters_that_are_not_there_are_named(bf16: PI05Policy, make_policy: Any, tmp_path: Path) -> None:
    plain = torch.optim.AdamW(trained(bf16))
    with pytest.raises(ValueError, match="AdamW keeps no fp32 masters; use FP32MasterAdamW"):
        bf16.seed_masters(plain)
    with pytest.raises(ValueError, match="AdamW keeps no fp32 masters"):
        bf16.save_pretrained(tmp_path / "x", optimizer=plain)
    assert not (tmp_path / "x").exists()
    fresh = make_policy(dtype="bfloat16")
    with pytest.raises(ValueError, match="was not loaded from a checkpoint"):
        fresh.seed_masters(FP32MasterAdamW(trained(fresh)))
