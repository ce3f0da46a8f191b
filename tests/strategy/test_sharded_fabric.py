"""Fabric on several ranks: training equals one process, clipping returns the norm, synchronization comes back."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812 (Lightning's own convention)
import pytest
import torch
from torch import Tensor, nn

from tests.ranks import ranks_run, whole

#: One worker runs the file: starting its processes takes longest.
pytestmark = pytest.mark.xdist_group("sharded_fabric")

STEPS, BATCH = 10, 8

CASES: dict[str, dict[str, Any]] = {
    "together": {},
    "separately": {"separate": True},
    "accumulation": {"accumulate": 3, "clip": {"max_norm": 0.05}},
    "infinity norm": {"clip": {"max_norm": 0.02, "norm_type": math.inf}},
    "value": {"clip": {"clip_val": 0.01}},
    "stock optimizer": {"options": {"fused_optimizer": False}, "clip": {"max_norm": 0.05}},
    "replicate": {"options": {"layout": "replicate"}, "accumulate": 3, "clip": {"max_norm": 0.05}},
}


def network() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 3))
    model[0].bias.requires_grad_(False)
    return model


def inputs(step: int) -> Tensor:
    return torch.randn(BATCH, 6, generator=torch.Generator().manual_seed(step))


def make_fabric(*, precision: Any = None, **options: Any) -> L.Fabric:
    from soma_lightning import FabricSomaSpeedStrategy

    strategy = FabricSomaSpeedStrategy(report=False, **options)
    devices = int(os.environ["WORLD_SIZE"])
    fabric = L.Fabric(accelerator="cpu", devices=devices, strategy=strategy, precision=precision)
    fabric.launch()
    return fabric


def train(model: nn.Module, case: dict[str, Any], fabric: L.Fabric | None) -> list[float]:
    """Trains `model`, by Fabric on this rank's part of each batch or by torch on all of it; returns the norms."""
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    wrapped: Any = model
    part = slice(None)
    if fabric is not None:
        part = slice(fabric.global_rank, None, fabric.world_size)
        if case.get("separate"):
            wrapped = fabric.setup_module(model)
            optimizer = fabric.setup_optimizers(optimizer)
        else:
            wrapped, optimizer, _ = fabric.setup(model, optimizer, scheduler=scheduler)
    accumulate, norms = case.get("accumulate", 1), []
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(accumulate):
            loss = lambda: wrapped(inputs(10 * step + micro)[part]).pow(2).mean() / accumulate  # noqa: B023, E731
            if fabric is None:
                loss().backward()
            else:
                with fabric.no_backward_sync(wrapped, enabled=micro < accumulate - 1):
                    fabric.backward(loss())
        norms.append(clip(model, wrapped, optimizer, case.get("clip", {}), fabric))
        optimizer.step()
        scheduler.step()
    return [norm for norm in norms if norm is not None]


def clip(model: nn.Module, wrapped: Any, optimizer: Any, limits: dict[str, Any], fabric: Any) -> float | None:
    if fabric is not None and limits:
        norm = fabric.clip_gradients(wrapped, optimizer, **limits)
        assert norm is None or type(norm) is Tensor
        return None if norm is None else norm.item()
    if "clip_val" in limits:
        nn.utils.clip_grad_value_(model.parameters(), limits["clip_val"])
    elif limits:
        return nn.utils.clip_grad_norm_(model.parameters(), **limits).item()
    return None


def every_rank(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, case in CASES.items():
        fabric = make_fabric(**case.get("options", {}))
        torch.manual_seed(fabric.global_rank)
        model = network()
        found[name] = {"norms": train(model, case, fabric), "parameters": whole(model)}
    found["nonfinite"] = nonfinite()
    found["sync"] = sync_comes_back()
    found["collectives"] = collectives()
    found["checkpoint"] = save_and_load(folder)
    found["data"] = data_parts()
    return found


def nonfinite() -> dict[str, Any]:
    """One rank has a NaN: every rank raises before anything changes."""
    fabric = make_fabric()
    model = network()
    wrapped, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))[:2]
    fabric.backward(wrapped(inputs(0)).sum() * (math.nan if fabric.global_rank == 1 else 1.0))
    before = whole(model)
    with pytest.raises(RuntimeError) as caught:
        fabric.clip_gradients(wrapped, optimizer, max_norm=1.0)
    unchanged = all(torch.equal(a, b) for a, b in zip(before.values(), whole(model).values(), strict=True))
    fabric.clip_gradients(wrapped, optimizer, max_norm=1.0, error_if_nonfinite=False)
    optimizer.step()
    skipped = int(optimizer.skipped_steps)
    after = all(torch.equal(a, b) for a, b in zip(before.values(), whole(model).values(), strict=True))
    return {"message": str(caught.value), "unchanged": unchanged and after, "skipped": skipped}


def sync_comes_back() -> list[Tensor]:
    """`no_backward_sync(enabled=False)` and an exception inside leave later backward passes reducing."""
    fabric = make_fabric()
    torch.manual_seed(0)
    model = network()
    wrapped = fabric.setup_module(model)
    with fabric.no_backward_sync(wrapped, enabled=False):
        fabric.backward(wrapped(inputs(0)).sum())
    with pytest.raises(KeyError), fabric.no_backward_sync(wrapped, enabled=True):
        raise KeyError
    fabric.backward(wrapped(inputs(fabric.global_rank)).sum())
    return [p.grad.full_tensor() for p in model.parameters() if p.grad is not None]


def collectives() -> dict[str, Any]:
    fabric = make_fabric()
    rank = fabric.global_rank
    return {
        "mean": fabric.all_reduce(torch.tensor(float(rank)), reduce_op="mean").item(),
        "mean of integers": fabric.all_reduce(torch.tensor([2 * rank, 4 * rank])).tolist(),
        "sum": fabric.all_reduce(torch.tensor(float(rank + 1)), reduce_op="sum").item(),
        "gather": fabric.all_gather(torch.tensor([rank])).flatten().tolist(),
        "broadcast": fabric.broadcast({"from": rank}, src=1),
        "any": fabric.strategy.reduce_boolean_decision(rank == 1, all=False),
        "all": fabric.strategy.reduce_boolean_decision(rank == 1, all=True),
    }


def save_and_load(folder: Path) -> dict[str, Tensor]:
    """Five steps, a file, and a fresh start from it under another layout, five more steps."""
    fabric = make_fabric()
    torch.manual_seed(1)
    model = network()
    wrapped, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.05))[:2]
    some_steps(fabric, wrapped, optimizer, range(5))
    fabric.save(folder / "fabric.ckpt", {"model": wrapped, "optimizer": optimizer, "step": 5})
    fabric = make_fabric(layout="replicate")
    torch.manual_seed(2)
    fresh = network()
    again, restored = fabric.setup(fresh, torch.optim.AdamW(fresh.parameters(), lr=1.0))[:2]
    rest = fabric.load(folder / "fabric.ckpt", state := {"model": again, "optimizer": restored, "step": 0})
    assert (rest, state["step"]) == ({}, 5)
    some_steps(fabric, again, restored, range(5, 10))
    return whole(fresh)


def some_steps(fabric: Any, wrapped: Any, optimizer: Any, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        fabric.backward(wrapped(inputs(step)[fabric.global_rank :: fabric.world_size]).pow(2).mean())
        optimizer.step()


def data_parts() -> list[int]:
    fabric = make_fabric()
    loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(range(8), batch_size=2))  # type: ignore[arg-type]
    return [int(x) for batch in loader for x in batch]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    return ranks_run(every_rank, folder, arguments={"folder": folder})


@pytest.mark.parametrize("case", CASES)
def test_ten_steps_equal_one_process(found: Any, case: str) -> None:
    torch.manual_seed(0)
    model = network()
    norms = train(model, CASES[case], None)
    for rank in found:
        assert rank[case]["norms"] == pytest.approx(norms, rel=1e-6)
        for name, value in whole(model).items():
            assert (rank[case]["parameters"][name] - value).abs().max().item() <= 1e-6, name


def test_a_nonfinite_norm_is_an_error_on_every_rank_before_any_change(found: Any) -> None:
    for rank in found:
        assert "norm (type 2.0) is nan" in rank["nonfinite"]["message"]
        assert rank["nonfinite"]["unchanged"]
        assert rank["nonfinite"]["skipped"] == 1


def test_no_backward_sync_always_ends_with_synchronization(found: Any) -> None:
    torch.manual_seed(0)
    model = network()
    (model(inputs(0)).sum() + (model(inputs(0)).sum() + model(inputs(1)).sum()) / 2).backward()
    expected = [p.grad for p in model.parameters() if p.grad is not None]
    for rank in found:
        for grad, value in zip(rank["sync"], expected, strict=True):
            torch.testing.assert_close(grad, value)


def test_collectives(found: Any) -> None:
    for rank in found:
        assert rank["collectives"] == {
            "mean": 0.5,
            "mean of integers": [1, 2],
            "sum": 3.0,
            "gather": [0, 1],
            "broadcast": {"from": 1},
            "any": True,
            "all": False,
        }


def test_a_file_continues_the_run_under_another_layout(found: Any) -> None:
    torch.manual_seed(1)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(10):
        optimizer.zero_grad()
        model(inputs(step)).pow(2).mean().backward()
        optimizer.step()
    for rank in found:
        for name, value in whole(model).items():
            assert (rank["checkpoint"][name] - value).abs().max().item() <= 1e-6, name


def test_data_is_divided(found: Any) -> None:
    assert [rank["data"] for rank in found] == [[0, 2, 4, 6], [1, 3, 5, 7]]
