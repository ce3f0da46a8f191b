"""Ten optimizer steps on several ranks equal ten of torch's AdamW in one process on the concatenated batch."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import lightning as L  # noqa: N812 (Lightning's own convention)
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

STEPS, BATCH = 10, 4

#: name -> what differs from the plain run
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "norm": {"clip": 0.05},
    "value": {"clip": 0.01, "algorithm": "value"},
    "accumulation": {"accumulate": 3, "clip": 0.05},
    "two groups and StepLR": {"two_groups": True, "scheduler": True, "clip": 0.05},
    "frozen prefix": {"frozen": True, "clip": 0.05},
    "frozen prefix, sharded": {"frozen": True, "clip": 0.05, "options": {"frozen": "shard"}},
    "everything": {"accumulate": 3, "clip": 0.05, "two_groups": True, "scheduler": True, "frozen": True},
    "own clipping hook": {"own_hook": 0.05},
    "stock optimizer": {"options": {"fused_optimizer": False}, "accumulate": 3, "clip": 0.05},
    "reshard": {"options": {"reshard_after_forward": True}, "accumulate": 3},
    "no reshard": {"options": {"reshard_after_forward": False}},
}


class Net(L.LightningModule):
    """A scalar and tied weights beside the usual; rows that no world size divides."""

    def __init__(self, case: dict[str, Any], seed: int = 7) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.case = case
        self.prefix = nn.Linear(6, 8)
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))
        if case.get("frozen"):
            self.prefix.requires_grad_(False)
            self.blocks[1].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.prefix(x))
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(self.norm(x)) * self.scale

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch).pow(2).mean()

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **settings: Any) -> None:
        limit = self.case.get("own_hook")
        if limit is None:
            super().configure_gradient_clipping(optimizer, *args, **settings)
        elif self.global_step % 3 != 1:
            self.clip_gradients(optimizer, gradient_clip_val=limit * (1 + self.global_step))

    def configure_optimizers(self) -> Any:
        optimizer = make_optimizer(self, self.case)
        if not self.case.get("scheduler"):
            return optimizer
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def make_optimizer(module: nn.Module, case: dict[str, Any]) -> torch.optim.AdamW:
    trainable = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
    if not case.get("two_groups"):
        return torch.optim.AdamW([p for _, p in trainable], lr=0.02)
    head = [p for n, p in trainable if n.startswith("head.")]
    rest = [p for n, p in trainable if not n.startswith("head.")]
    groups: list[dict[str, Any]] = [
        {"params": head, "lr": 0.01, "weight_decay": 0.0},
        {"params": rest, "betas": (0.8, 0.95)},
    ]
    return torch.optim.AdamW(groups, lr=0.02)


def samples(accumulate: int = 1) -> Tensor:
    return torch.randn(STEPS * accumulate * BATCH * 4, 6, generator=torch.Generator().manual_seed(3))


def part_of_batches(case: dict[str, Any], rank: int, world_size: int) -> DataLoader[Any]:
    data: Any = samples(case.get("accumulate", 1))
    in_order = DistributedSampler(data, world_size, rank, shuffle=False)
    return DataLoader(data, batch_size=BATCH * 4 // world_size, sampler=in_order)


def trainer_for(strategy: Any, case: dict[str, Any], world_size: int, **settings: Any) -> L.Trainer:
    return L.Trainer(
        accelerator="cpu",
        devices=world_size,
        strategy=strategy,
        max_steps=STEPS,
        accumulate_grad_batches=case.get("accumulate", 1),
        gradient_clip_val=case.get("clip"),
        gradient_clip_algorithm=case.get("algorithm"),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )


def whole(module: nn.Module) -> dict[str, Tensor]:
    return {n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for n, p in module.named_parameters()}


def train(layout: str, cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """On every rank: the whole parameters after each case, and what the strategy made of it."""
    from soma_lightning import SomaSpeedStrategy

    found = {}
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for name, case in cases.items():
        model = Net(case, seed=7 + rank)  # other values on every rank: those of rank 0 count
        trainer = trainer_for(SomaSpeedStrategy(layout=layout, report=False, **case.get("options", {})), case, world_size)
        trainer.fit(model, part_of_batches(case, rank, world_size))
        mesh = trainer.strategy.device_mesh
        found[name] = {
            "parameters": whole(model),
            "mesh": (mesh.mesh_dim_names, tuple(mesh.mesh.shape)),
            "optimizer": type(trainer.optimizers[0]).__name__,
            "head": (type(model.head.weight).__name__, str(getattr(model.head.weight, "placements", None))),
            "prefix": type(model.prefix.weight).__name__,
        }
    return found


def single_process(case: dict[str, Any]) -> dict[str, Tensor]:
    """The same training with torch alone: AdamW, clip_grad_norm_, StepLR."""
    model = Net(case)
    optimizer = make_optimizer(model, case)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
    accumulate = case.get("accumulate", 1)
    batches = samples(accumulate).split(BATCH * 4)
    for step in range(STEPS):
        optimizer.zero_grad()
        for batch in batches[step * accumulate : (step + 1) * accumulate]:
            (model(batch).pow(2).mean() / accumulate).backward()
        limit = case.get("clip")
        if case.get("own_hook") and step % 3 != 1:
            limit = case["own_hook"] * (1 + step)
        if case.get("algorithm") == "value":
            nn.utils.clip_grad_value_(model.parameters(), limit)
        elif limit is not None:
            nn.utils.clip_grad_norm_(model.parameters(), limit)
        optimizer.step()
        if case.get("scheduler"):
            schedule.step()
    return whole(model)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], list[Any]]:
    """Results of `train` for a layout, computed once."""
    from tests.conftest import ranks_run

    known: dict[tuple[str, int], list[Any]] = {}

    def results(layout: str, world_size: int) -> list[Any]:
        key = (layout, world_size)
        if key not in known:
            folder = tmp_path_factory.mktemp("ranks")
            settings: Any = {"layout": layout, "world_size": world_size, "cases": CASES}
            known[key] = ranks_run(train, folder, **settings)
        return known[key]

    return results


LAYOUTS = [("fsdp", 2), ("replicate", 2), ("fsdp", 4), ("hsdp", 4)]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("layout", "world_size"), LAYOUTS)
def test_ten_steps_equal_one_process(trained: Any, layout: str, world_size: int, case: str) -> None:
    expected = single_process(CASES[case])
    start = dict(Net(CASES[case]).named_parameters())
    assert (expected["head.weight"] - start["head.weight"]).abs().max() > 0.01
    for found in trained(layout, world_size):
        assert found[case]["optimizer"] == ("AdamW" if case == "stock optimizer" else "FusedAdamW")
        for name, value in expected.items():
            difference = (found[case]["parameters"][name] - value).abs().max().item()
            assert difference <= 1e-6, f"{name} differs by {difference}"
