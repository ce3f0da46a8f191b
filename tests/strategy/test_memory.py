"""Out of memory: the error says who was doing what and what would need less, as far as it is not done already."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812 (Lightning's own convention)
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from soma_lightning import FabricSomaSpeedStrategy, Layout, SomaSpeedStrategy
from soma_lightning.strategy.memory import Situation, explaining, note
from tests.ranks import ranks_run

CPU = torch.device("cpu")
LAYOUT = "layout='fsdp' (now replicate=2, shard=1)"
FROZEN = "frozen='shard' (now 'auto')"
RESHARD = "reshard_after_forward=True (now False)"
BATCH = "half the batch_size with accumulate_grad_batches=6 (now 3): the same effective batch"
RECOMPUTE = "torch.utils.checkpoint around the blocks of the module"
MIXED = "precision='bf16-mixed' (now '32-true')"
EVALUATION = "a smaller batch_size of the evaluation data"
NOTHING = "a smaller model, or a device with more memory"

SHARDED, REPLICATED = Layout(shard=2), Layout(replicate=2, shard=1)

#: Settings of a situation -> exactly what is suggested.
SUGGESTED: list[tuple[dict[str, Any], list[str]]] = [
    ({"activity": "forward pass", "layout": SHARDED, "accumulate": 3}, [FROZEN, BATCH, RECOMPUTE, MIXED]),
    ({"activity": "backward pass", "layout": REPLICATED, "precision": "bf16-mixed", "accumulate": 3}, [LAYOUT, BATCH]),
    ({"activity": "optimizer step", "layout": SHARDED, "frozen": "shard"}, [NOTHING]),
    ({"activity": "optimizer step", "layout": SHARDED, "reshard_after_forward": False}, [FROZEN, RESHARD]),
    ({"activity": "evaluation", "layout": Layout(shard=1), "precision": "bf16-mixed"}, [EVALUATION]),
    ({"activity": "set-up", "layout": Layout(shard=1)}, ["precision='bf16-true' (now '32-true')"]),
    (
        {"activity": "set-up", "layout": Layout(shard=1), "precision": "64-true"},
        ["precision='32-true' (now '64-true')"],
    ),
]


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4))


@pytest.mark.parametrize(("settings", "expected"), SUGGESTED)
def test_only_what_applies_is_suggested(settings: dict[str, Any], expected: list[str]) -> None:
    situation = Situation(where="", device=CPU, **{"precision": "32-true", **settings})
    ways = [line.removeprefix("  - ") for line in note(situation, [network()]).splitlines() if line.startswith("  - ")]
    if "backward pass" in settings.values():
        expected = [*expected, RECOMPUTE]
    assert len(ways) == len(expected), ways
    for words in expected:
        assert any(way.startswith(words) for way in ways), (words, ways)


def test_a_transformers_model_recomputes_by_its_own_switch() -> None:
    class Checkpointed(nn.Module):
        gradient_checkpointing = False

        def gradient_checkpointing_enable(self) -> None:
            self.gradient_checkpointing = True

    model = Checkpointed()
    situation = Situation("forward pass", "", CPU, SHARDED, "bf16-mixed")
    assert "gradient_checkpointing_enable() of the transformers model" in note(situation, [model])
    model.gradient_checkpointing_enable()
    assert "twice" not in note(situation, [model])


def test_other_errors_and_an_explained_one_stay_as_they_are() -> None:
    inner, outer = (
        Situation(activity, "", CPU, SHARDED, "32-true") for activity in ("backward pass", "optimizer step")
    )
    with pytest.raises(ValueError, match="other") as other, explaining(inner, []):
        raise ValueError("other")
    assert not hasattr(other.value, "__notes__")
    with pytest.raises(torch.OutOfMemoryError) as caught, explaining(outer, []), explaining(inner, []):
        raise torch.OutOfMemoryError("no memory")
    assert len(caught.value.__notes__) == 1
    assert "in the backward pass\n" in caught.value.__notes__[0]


class NoGradient(torch.autograd.Function):
    """Is out of memory when it computes its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("no memory for gradients")


class Greedy(L.LightningModule):
    """Is out of memory at one place, in the second step."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.net = network()
        self.place = place

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.place == "forward pass" and batch_idx == 3:
            raise torch.OutOfMemoryError("no memory")
        loss = self.net(batch).sum()
        return NoGradient.apply(loss) if self.place == "backward pass" and batch_idx == 3 else loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        if self.place == "evaluation":
            raise torch.OutOfMemoryError("no memory")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.place == "set-up":
            raise torch.OutOfMemoryError("no memory")
        optimizer = torch.optim.AdamW([p for p in self.parameters() if p.requires_grad])
        if self.place == "optimizer step":
            optimizer.register_step_post_hook(self.fail)
        return optimizer

    def fail(self, *_: Any) -> None:
        if self.global_step == 0:
            raise torch.OutOfMemoryError("no memory")


PLACES = ["set-up", "forward pass", "backward pass", "optimizer step", "evaluation"]


def failed(place: str) -> list[str]:
    """The notes on the error of a fit that has no memory at `place`."""
    trainer = L.Trainer(
        strategy=SomaSpeedStrategy(report=False, layout="replicate"),
        accelerator="cpu",
        devices=int(os.environ.get("WORLD_SIZE", "1")),
        max_steps=4,
        accumulate_grad_batches=3,
        num_sanity_val_steps=1 if place == "evaluation" else 0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader: Any = DataLoader(torch.ones(64, 4), batch_size=1)  # type: ignore[arg-type]
    with pytest.raises(torch.OutOfMemoryError) as caught:
        trainer.fit(Greedy(place), loader, loader)
    return caught.value.__notes__


@pytest.mark.parametrize("place", PLACES)
def test_the_trainer_says_where(place: str) -> None:
    (text,) = failed(place)
    step = {"set-up": "", "forward pass": " of global_step 1", "backward pass": " of global_step 1"}
    first, second, third, *ways = text.splitlines()
    assert first == f"rank 0 of 1 was out of memory in the {place}{step.get(place, ' of global_step 0')}"
    assert second.startswith("in use: ")
    assert second.endswith(" GiB at the peak of this process")
    assert third == "what needs less:"
    assert ways
    assert any("accumulate_grad_batches=6 (now 3)" in way for way in ways) == (place in PLACES[1:3])


@pytest.mark.parametrize("place", ["set-up", "backward pass", "optimizer step"])
def test_fabric_says_where(place: str) -> None:
    fabric = L.Fabric(accelerator="cpu", devices=1, strategy=FabricSomaSpeedStrategy(report=False))
    net = network()

    def fail(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("no memory")

    class NoDevice(nn.Linear):
        _apply = fail

    def train() -> None:
        if place == "set-up":
            fabric.setup(NoDevice(2, 2))
        optimizer: Any = torch.optim.AdamW(net[1].parameters())  # type: ignore[index]
        optimizer.register_step_pre_hook(fail)
        wrapped, optimizer = fabric.setup(net, optimizer)[:2]
        loss = wrapped(torch.ones(1, 4)).sum()
        fabric.backward(NoGradient.apply(loss) if place == "backward pass" else loss)
        optimizer.step()

    with pytest.raises(torch.OutOfMemoryError) as caught:
        train()
    assert caught.value.__notes__[0].startswith(f"rank 0 of 1 was out of memory in the {place}\n")


def both_ranks() -> list[str]:
    return failed("forward pass")[:1]


def test_a_rank_names_itself_and_the_layout(tmp_path: Path) -> None:
    found = ranks_run(both_ranks, tmp_path)
    for rank, (text,) in enumerate(found):
        assert text.startswith(f"rank {rank} of 2 was out of memory in the forward pass of global_step 1\n")
        assert f"{LAYOUT}: a rank holds 1/2 of the trained parameters" in text
