"""The memory estimate against peaks that were measured at full size, and what must make it larger or smaller."""

from __future__ import annotations

import pytest
import torch

from soma_lightning.models.pi05.config import PI05Config
from soma_lightning.models.pi05.lora import LoRAConfig, add_lora
from soma_lightning.models.pi05.memory import GIB, Batch, estimate_memory
from soma_lightning.models.pi05.model import PI05Model


def full_size(**changes) -> PI05Model:
    with torch.device("meta"):
        return PI05Model(PI05Config.base(**{"dtype": "bfloat16", "islands": "openpi", **changes}))


@pytest.mark.parametrize(("kind", "measured"), [("bf16", 15.7), ("fp8", 13.0), ("cached", 14.0)])
def test_the_estimate_is_near_the_peak_measured_on_an_h200(kind: str, measured: float, monkeypatch):
    """Full size, batch 32, two cameras, 60 prompt tokens, horizon 50, expert only, fp32 masters, CUDA graphs."""
    import soma_lightning.models.pi05.model as network

    monkeypatch.setattr(network, "why_no_fp8", lambda device: None)
    model = full_size()
    if kind == "fp8":
        model.quantize_frozen()
    model.use_cuda_graphs()
    found = estimate_memory(model, Batch(32, 2, 60, features_cached=kind == "cached"), masters=True)
    frozen = sum(p.nbytes for p in model.prefix.parameters()) / GIB
    assert frozen == pytest.approx(2.73 if kind == "fp8" else 5.45, abs=0.02)
    assert found.total / GIB == pytest.approx(measured, rel=0.15), found.facts()


def test_the_parts_are_those_of_the_parameters():
    model = full_size()
    found = estimate_memory(model, Batch(32, 2, 60), masters=True, average=True)
    trained = [p for p in model.parameters() if p.requires_grad]
    assert sum(found.parameters.values()) == sum(p.nbytes for p in model.parameters())
    assert found.gradients == sum(p.nbytes for p in trained)
    assert found.average == 4 * sum(p.numel() for p in trained)
    low = sum(p.numel() for p in trained if p.dtype == torch.bfloat16)
    full = sum(p.numel() for p in trained if p.dtype == torch.float32)
    assert found.optimizer == 12 * low + 8 * full
    assert found.prefix == 2 * 18 * 32 * (2 * 256 + 60) * 256 * 2  # two cameras, one key head of 256, bf16
    assert set(found.parameters) == {"bfloat16", "float32"}
    assert sum(float(text.split()[0]) for name, text in found.facts().items() if name != "total") == pytest.approx(
        found.total / GIB, abs=0.05
    )


def test_what_changes_the_activations():
    batch = Batch(8, 2, 60)
    expert, language, everything = (
        estimate_memory(full_size(trainable=trainable), batch, masters=True)
        for trainable in ("expert", "all_but_vision", "all")
    )
    assert expert.activations < language.activations < everything.activations
    again = full_size(trainable="all")
    again.gradient_checkpointing_enable()
    assert estimate_memory(again, batch, masters=True).activations < 0.15 * everything.activations
    twice = estimate_memory(full_size(), Batch(8, 2, 60, flow_draws=2), masters=True)
    assert twice.activations == 2 * expert.activations
    assert twice.prefix == expert.prefix
    assert estimate_memory(full_size(), Batch(16, 2, 60), masters=True).activations == 2 * expert.activations


def kept_by_autograd(policy, batch) -> int:
    """Bytes that wait for the backward pass, without parameters."""
    kept: dict[int, int] = {}
    parameters = {p.untyped_storage().data_ptr() for p in policy.parameters()}

    def keep(x):
        storage = x.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        policy.sft_forward(batch, generator=torch.Generator().manual_seed(5))["loss"]
    return sum(kept.values())


@pytest.mark.parametrize("trainable", ["expert", "all_but_vision", "all"])
def test_activations_are_what_autograd_keeps(trainable: str, make_policy, make_batch):
    """On the tiny network in fp32."""
    policy, batch = make_policy(trainable=trainable, dtype="float32"), make_batch(3)
    found = estimate_memory(policy.model, Batch(3, 2, 20), masters=False)
    assert found.activations + found.prefix == pytest.approx(kept_by_autograd(policy, batch), rel=0.2)


@pytest.mark.parametrize(
    ("targets", "full"), [("expert", ()), ("paligemma", ()), ("paligemma", ("expert",)), ("openpi", ())]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_adapters_keep_copies_of_what_they_read_and_frozen_layers_nothing(
    targets: str, full: tuple[str, ...], dtype: str, make_policy, make_batch
):
    """Adapters in fp32 on a network in bf16, which is what `LoRAConfig` makes of one, and in their own dtype."""
    pytest.importorskip("peft", reason="needs `pip install 'soma-lightning[lora]'`")
    policy, batch = make_policy(dtype="bfloat16"), make_batch(3)
    add_lora(policy.model, LoRAConfig(rank=8, targets=targets, full=full, dtype=dtype))
    found = estimate_memory(policy.model, Batch(3, 2, 20), masters=False)
    assert found.activations + found.prefix == pytest.approx(kept_by_autograd(policy, batch), rel=0.2)
