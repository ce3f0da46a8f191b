"""Loss sums with counts: unequal ranks, micro-batches and short windows are one division by the global count."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812 (Lightning's own convention)
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.ranks import ranks_run, whole

MICRO_BATCHES, ROWS, CLIP = 8, 6, 0.3


class Net(L.LightningModule):
    """Squared error over the valid rows only."""

    def __init__(self, *, declares: bool = True, optimizer: Any = torch.optim.AdamW) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        self.scale = nn.Parameter(torch.tensor(1.5))  # 0-d: whole on every rank
        self.declares, self.optimizer = declares, optimizer

    def loss_sum(self, batch: dict[str, Tensor]) -> Tensor:
        error = (self.body(batch["x"]) * self.scale - batch["y"]).square().sum(1)
        return (error * batch["valid"]).sum()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        if self.declares or batch_idx > 0:
            self.soma_normalizer = batch["valid"].sum()
        return self.loss_sum(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer(self.parameters(), lr=0.05)  # type: ignore[no-any-return]


def micro_batch(rank: int, number: int) -> dict[str, Tensor]:
    """Unequal counts; rank 1 has no valid row in micro-batch 3."""
    generator = torch.Generator().manual_seed(100 * rank + number)
    x, y = torch.randn(ROWS, 4, generator=generator), torch.randn(ROWS, 3, generator=generator)
    valid = (torch.arange(ROWS) < (number + 3 * rank) % ROWS + 1).float()
    return {"x": x, "y": y, "valid": valid * (0.0 if (rank, number) == (1, 3) else 1.0)}


def expected(ranks: int, accumulate: int, clip: float | None, norms: list[float] | None = None) -> dict[str, Tensor]:
    """One process: the mean over all valid rows of a window. norms: takes those before clipping."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for start in range(0, MICRO_BATCHES, accumulate):
        window = [micro_batch(r, n) for n in range(start, min(start + accumulate, MICRO_BATCHES)) for r in range(ranks)]
        loss = sum(model.loss_sum(batch) for batch in window) / sum(batch["valid"].sum() for batch in window)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[union-attr]
        if clip is not None:
            norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
            if norms is not None:
                norms.append(norm.item())
        optimizer.step()
    return whole(model)


def train(accumulate: int, clip: float | None, layout: str = "fsdp", **net: Any) -> dict[str, Tensor]:
    from soma_lightning import SomaSpeedStrategy

    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    batches: Any = [micro_batch(rank, number) for number in range(MICRO_BATCHES)]
    model = Net(**net)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=size,
        strategy=SomaSpeedStrategy(layout=layout if size > 1 else "auto", report=False),
        max_epochs=1,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=clip,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(batches, batch_size=None))
    return whole(model)


def train_all() -> dict[str, dict[str, Tensor]]:
    cases = [(1, None, "fsdp"), (3, CLIP, "fsdp"), (1, CLIP, "replicate"), (3, None, "hsdp")]
    return {f"{accumulate} {clip} {layout}": train(accumulate, clip, layout) for accumulate, clip, layout in cases}


def train_fabric(accumulate: int, clip: float | None) -> tuple[dict[str, Tensor], list[float]]:
    """Parameters, and the norms that `fabric.clip_gradients` returned."""
    from soma_lightning import FabricSomaSpeedStrategy

    size = int(os.environ.get("WORLD_SIZE", "1"))
    fabric = L.Fabric(accelerator="cpu", devices=size, strategy=FabricSomaSpeedStrategy(report=False))
    fabric.launch()
    model = Net()
    module, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.05))[:2]
    module.mark_forward_method("training_step")
    norms = []
    for start in range(0, MICRO_BATCHES, accumulate):
        window = range(start, min(start + accumulate, MICRO_BATCHES))
        for number in window:
            with fabric.no_backward_sync(module, enabled=number != window[-1]):
                fabric.backward(module.training_step(micro_batch(fabric.global_rank, number), number))
        if clip is not None:
            norms.append(fabric.clip_gradients(module, optimizer, max_norm=clip).item())
        optimizer.step()
        assert clip is None or optimizer.last_grad_norm.item() == pytest.approx(norms[-1], rel=1e-6)
        optimizer.zero_grad()
    return whole(model), norms


def train_fabric_all() -> dict[tuple[int, float | None], tuple[dict[str, Tensor], list[float]]]:
    return {case: train_fabric(*case) for case in FABRIC_CASES}


FABRIC_CASES: list[tuple[int, float | None]] = [(1, None), (3, None), (1, CLIP), (3, CLIP)]


def test_fabric_divides_by_the_count_of_all_ranks_and_clips_what_is_divided(tmp_path: Path) -> None:
    for ranks, results in [(1, [train_fabric_all()]), (2, ranks_run(train_fabric_all, tmp_path))]:
        for found in results:
            for (accumulate, clip), (parameters, norms) in found.items():
                limits: list[float] = []
                assert_equal(parameters, expected(ranks, accumulate, clip, limits), f"{ranks} {accumulate} {clip}")
                assert norms == pytest.approx(limits, rel=1e-5)


def assert_equal(got: dict[str, Tensor], want: dict[str, Tensor], what: str) -> None:
    for name, value in want.items():
        assert (got[name] - value).abs().max() <= 1e-6, (what, name)


@pytest.mark.parametrize(("accumulate", "clip"), [(1, None), (1, CLIP), (3, None), (3, CLIP)])
def test_one_process_divides_by_the_count_of_its_window(accumulate: int, clip: float | None) -> None:
    assert_equal(train(accumulate, clip), expected(1, accumulate, clip), "one process")


def test_two_ranks_with_unequal_counts_are_one_process(tmp_path: Path) -> None:
    for found in ranks_run(train_all, tmp_path):
        for case, got in found.items():
            accumulate, clip, _ = case.split()
            limit = None if clip == "None" else float(clip)
            assert_equal(got, expected(2, int(accumulate), limit), case)


def test_the_mean_of_ranks_is_something_else() -> None:
    """The control: with these counts the ordinary average of two ranks is far from the global mean."""
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for number in range(MICRO_BATCHES):
        batches = [micro_batch(rank, number) for rank in range(2)]
        optimizer.zero_grad()
        sum(model.loss_sum(b) / b["valid"].sum().clamp(min=1) / 2 for b in batches).backward()  # type: ignore[union-attr]
        optimizer.step()
    wrong, right = whole(model), expected(2, 1, None)
    assert max((wrong[name] - right[name]).abs().max() for name in right) > 1e-3


def test_a_count_that_comes_late_is_refused() -> None:
    with pytest.raises(ValueError, match="soma_normalizer was not set in the first training step"):
        train(1, None, declares=False)


def test_a_count_that_is_taken_back_is_refused() -> None:
    class Forgetful(Net):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            self.soma_normalizer = batch["valid"].sum() if batch_idx == 0 else None
            return self.loss_sum(batch)

    batches = DataLoader([micro_batch(0, number) for number in range(2)], batch_size=None)  # type: ignore[arg-type]
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(strategy="somaspeed", devices=1, accelerator="cpu", max_steps=2, **quiet)
    with pytest.raises(ValueError, match="soma_normalizer is not set before this backward pass"):
        trainer.fit(Forgetful(), batches)


def test_a_count_needs_the_fused_step() -> None:
    with pytest.raises(ValueError, match="soma_normalizer needs the fused optimizer step, which is off: torch .SGD."):
        train(1, None, optimizer=torch.optim.SGD)


@pytest.mark.parametrize("value", [True, "four", torch.ones(2)])
def test_what_is_no_count_is_refused(value: Any) -> None:
    from soma_lightning.strategy.effective_batch import count_of

    model = Net()
    model.soma_normalizer = value
    with pytest.raises(ValueError, match=r"Net\.soma_normalizer"):
        count_of([model])


def test_two_counts_are_refused() -> None:
    from soma_lightning.strategy.effective_batch import count_of

    one, two = Net(), Net()
    one.soma_normalizer = two.soma_normalizer = torch.tensor(1.0)
    with pytest.raises(ValueError, match="Net and Net both set soma_normalizer"):
        count_of([one, two])


# -- a rank with NaN --------------------------------------------------------------------------------------------------


class Spoiled(Net):
    """Rank 1 has NaN in one gradient, from the third step on."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.global_step >= 2 and os.environ["RANK"] == "1":
            grad: Any = self.body[0].weight.grad
            grad.to_local().fill_(torch.nan)


def stopped_by_nan() -> tuple[str, dict[str, Tensor], dict[str, Tensor]]:
    from soma_lightning import SomaSpeedStrategy

    rank = int(os.environ["RANK"])
    batches: Any = [micro_batch(rank, number) for number in range(MICRO_BATCHES)]
    model = Spoiled()
    states: list[dict[str, Tensor]] = []

    class Watch(L.Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            states.append(whole(model))

    strategy = SomaSpeedStrategy(report=False, max_consecutive_skips=3)
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=1,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Watch()],
    )
    try:
        trainer.fit(model, DataLoader(batches, batch_size=None))
    except RuntimeError as error:
        return str(error), states[1], states[-1]
    raise AssertionError("the run was not stopped")


def test_nan_on_one_rank_stops_all_of_them_with_its_name(tmp_path: Path) -> None:
    for message, before, after in ranks_run(stopped_by_nan, tmp_path):
        assert "3 optimizer steps in a row were skipped" in message
        assert "the gradient of 'body.0.weight' on rank 1 holds a NaN or an infinity" in message
        assert all(torch.equal(before[name], after[name]) for name in before)
