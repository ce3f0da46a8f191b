"""Does our network compute what lerobot computes? Loss, every gradient and sampled actions of stored tiny networks.

On a GPU the expert's attention runs the Triton kernels.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from soma_lightning.attention import attention_implementation
from soma_lightning.models.pi05.checkpoint import load_weights, own_name, read_config, save_weights, write_config
from soma_lightning.models.pi05.config import PI05Config
from soma_lightning.models.pi05.model import PI05Model
from soma_lightning.models.pi05.prefix import PrefixCache

GOLDENS = Path(__file__).parents[2] / "goldens" / "pi05"
SIZES: dict[str, Any] = json.loads((GOLDENS / "sizes.json").read_text())
FP32_CASES = ["state_prompt", "task_prompt", "full_rows", "ragged_cameras", "all_trainable", "vision_frozen"]
LOSS_TOLERANCE = 1e-6
GRADIENT_TOLERANCE = 5e-6  # relative, by tensor
ACTION_TOLERANCE = {"float32": 5e-6, "bfloat16": 1e-2}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def place(request: pytest.FixtureRequest) -> Iterator[str]:
    """The device of a test's networks."""
    if request.param == "cpu":
        yield "cpu"
        return
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    with attention_implementation("kernel"):
        yield "cuda"


def load_case(name: str, place: str) -> tuple[PI05Model, dict[str, Tensor], dict[str, str]]:
    file = GOLDENS / f"case_{name}.safetensors"
    tensors = load_file(file, place)
    with safe_open(file, "pt") as opened:
        settings: dict[str, str] = opened.metadata()
    horizon = tensors["actions"].shape[1]
    config = PI05Config(
        **SIZES, chunk_size=horizon, n_action_steps=5, dtype=settings["dtype"], trainable=settings["trainable"]
    )
    model = PI05Model(config)
    load_weights(model, GOLDENS / "network.safetensors")
    return model.to(place), tensors, settings


def encode(model: PI05Model, tensors: dict[str, Tensor], *, compact: bool = True) -> PrefixCache:
    images = [image.float() for image in tensors["images"]]
    return model.encode_prefix(
        images, list(tensors["image_masks"]), tensors["tokens"], tensors["token_mask"], compact=compact
    )


def golden_loss(model: PI05Model, tensors: dict[str, Tensor], settings: dict[str, str]) -> tuple[Tensor, Tensor]:
    losses = model.flow_loss(encode(model, tensors), tensors["actions"], tensors["noise"], tensors["time"])
    counted = losses[..., : SIZES["action_dim"]] if settings["loss_dims"] == "real" else losses
    return losses, counted.mean()


@pytest.mark.parametrize("name", FP32_CASES)
def test_loss_and_every_gradient_equal_lerobot(name: str, place: str) -> None:
    model, tensors, settings = load_case(name, place)
    losses, loss = golden_loss(model, tensors, settings)
    loss.backward()
    assert abs(loss.item() - tensors["loss"].item()) <= LOSS_TOLERANCE
    torch.testing.assert_close(losses, tensors["losses"], rtol=5e-6, atol=5e-6)

    golden = {own_name(key.removeprefix("grad.")): g for key, g in tensors.items() if key.startswith("grad.")}
    ours = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert set(ours) == set(model.trainable_names())
    # lerobot's joint attention also sends zeros into the dead end of the last prefix layer.
    dead = {n for n, g in golden.items() if g.count_nonzero() == 0}
    assert dead.isdisjoint(ours)
    assert set(golden) - dead == set(ours)
    # A key bias of the vision tower shifts all scores of a query alike: its true gradient is zero, both have noise.
    noise = {n for n in ours if n.endswith("k_proj.bias")}
    for n in noise:
        size = ours[n.replace("bias", "weight")].norm()
        assert max(ours[n].norm(), golden[n].norm()) <= 1e-6 * size
    worst = {n: ((g - golden[n]).norm() / golden[n].norm()).item() for n, g in ours.items() if n not in noise}
    assert max(worst.values()) <= GRADIENT_TOLERANCE, sorted(worst.items(), key=lambda item: -item[1])[:3]


@pytest.mark.parametrize("name", [*FP32_CASES, "bfloat16"])
@pytest.mark.parametrize("compact", [True, False])
def test_sampled_actions_equal_lerobot(name: str, compact: bool, place: str) -> None:
    model, tensors, settings = load_case(name, place)
    actions = model.sample_actions(encode(model, tensors, compact=compact), tensors["sampling_noise"], num_steps=10)
    assert actions.dtype == torch.float32
    error = (actions - tensors["sampled"]).abs().max().item()
    assert error <= ACTION_TOLERANCE[settings["dtype"]]


def test_bfloat16_islands_give_lerobots_loss_and_gradient_dtypes(place: str) -> None:
    model, tensors, settings = load_case("bfloat16", place)
    _, loss = golden_loss(model, tensors, settings)
    loss.backward()
    assert abs(loss.item() / tensors["loss"].item() - 1.0) <= 1e-2
    golden = {own_name(key.removeprefix("grad.")): g for key, g in tensors.items() if key.startswith("grad.")}
    for name, p in model.named_parameters():
        if p.requires_grad:
            assert p.grad is not None
            assert p.grad.dtype == golden[name].dtype, name


def test_lerobot_computes_the_same_from_a_checkpoint_of_ours(tmp_path: Path) -> None:
    """`loads.safetensors` is what lerobot made of a folder that we wrote: its strict load lacked and left no key."""
    tensors = load_file(GOLDENS / "loads.safetensors")
    stored = {key.removeprefix("weight."): value for key, value in tensors.items() if key.startswith("weight.")}
    config = PI05Config(**SIZES, chunk_size=10, n_action_steps=5, empty_cameras=1)
    model = PI05Model(config)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for key, value in stored.items():
            name = own_name(key)
            assert name is not None
            parameters[name].copy_(value)
    actions = model.sample_actions(encode(model, tensors), tensors["sampling_noise"], num_steps=10)
    assert (actions - tensors["sampled"]).abs().max().item() <= ACTION_TOLERANCE["float32"]

    # What we write today is what lerobot loaded then: the same keys and bits, and nothing else but the unused head.
    written = load_file(save_weights(model, tmp_path, "lerobot"))
    assert set(written) - set(stored) == {"model.paligemma_with_expert.gemma_expert.lm_head.weight"}
    assert all(torch.equal(written[key], value) for key, value in stored.items())
    write_config(config, tmp_path, "lerobot")
    assert read_config(tmp_path) == config
