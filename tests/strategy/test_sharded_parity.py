"""Ten optimizer steps on several ranks equal ten of torch's AdamW in one process on the concatenated batch."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import lightning as L  # noqa: N812 (Lightning's own convention)
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from tests.ranks import ranks_run, whole

#: One worker runs the file: starting its processes takes longest.
pytestmark = pytest.mark.xdist_group("sharded_parity")

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
    "manual, two optimizers": {"manual": True, "clip": None},
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

    def configure_model(self) -> None:
        """As code written for Lightning's ModelParallelStrategy asks."""
        if self.device_mesh is not None:
            data, tensor = self.device_mesh["data_parallel"], self.device_mesh["tensor_parallel"]
            self.aliases = (data.size(), data.get_local_rank(), tensor.size(), tensor.get_local_rank())

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


class Manual(Net):
    """Two optimizers in turn, one of them clipped, the other over two backward passes."""

    def __init__(self, case: dict[str, Any], seed: int = 7) -> None:
        super().__init__(case, seed)
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        body, head = self.optimizers()
        self.toggle_optimizer(body)
        body.zero_grad()
        self.manual_backward(self(batch).pow(2).mean())
        self.clip_gradients(body, gradient_clip_val=0.05)
        body.step()
        self.untoggle_optimizer(body)
        with head.toggle_model(sync_grad=False):
            self.manual_backward(self(batch).abs().mean())
        with head.toggle_model(sync_grad=True):
            self.manual_backward(self(batch).pow(2).mean())
        head.step()
        head.zero_grad()

    def configure_optimizers(self) -> Any:
        return two_optimizers(self)


def two_optimizers(module: nn.Module) -> list[torch.optim.AdamW]:
    named = list(module.named_parameters())
    return [
        torch.optim.AdamW([p for n, p in named if not n.startswith("head.")], lr=0.01),
        torch.optim.AdamW([p for n, p in named if n.startswith("head.")], lr=0.02),
    ]


def manual_single_process(case: dict[str, Any]) -> dict[str, Tensor]:
    model = Net(case)
    body, head = two_optimizers(model)
    for batch in samples().split(BATCH * 4):
        model.zero_grad()
        model(batch).pow(2).mean().backward()
        nn.utils.clip_grad_norm_(body.param_groups[0]["params"], 0.05)
        body.step()
        model.zero_grad()
        model(batch).abs().mean().backward()
        model(batch).pow(2).mean().backward()
        head.step()
    return whole(model)


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
        max_steps=STEPS * (2 if case.get("manual") else 1),  # every optimizer counts
        accumulate_grad_batches=case.get("accumulate", 1),
        gradient_clip_val=case.get("clip"),
        gradient_clip_algorithm=case.get("algorithm"),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )


def train(layouts: dict[str, list[str]]) -> dict[str, dict[str, Any]]:
    """On every rank: the whole parameters after each case of each layout, and what the strategy made of it."""
    return {layout: {case: one_run(layout, CASES[case]) for case in cases} for layout, cases in layouts.items()}


def one_run(layout: str, case: dict[str, Any]) -> dict[str, Any]:
    from soma_lightning import SomaSpeedStrategy

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    kind = Manual if case.get("manual") else Net
    model = kind(case, seed=7 + rank)  # other values on every rank: those of rank 0 count
    strategy = SomaSpeedStrategy(layout=layout, report=False, **case.get("options", {}))
    trainer = trainer_for(strategy, case, world_size)
    trainer.fit(model, part_of_batches(case, rank, world_size))
    return {
        "parameters": whole(model),
        "mesh": tuple(strategy.device_mesh.mesh.shape),
        "aliases": model.aliases,
        "optimizers": {type(optimizer).__name__ for optimizer in strategy.optimizers},
        "placements": {n: str(getattr(p, "placements", None)) for n, p in model.named_parameters()},
        "memory": {
            n: p.to_local().numel() if hasattr(p, "to_local") else p.numel() for n, p in model.named_parameters()
        },
    }


def single_process(case: dict[str, Any]) -> dict[str, Tensor]:
    """The same training with torch alone: AdamW, clip_grad_norm_, StepLR."""
    if case.get("manual"):
        return manual_single_process(case)
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


#: World size -> layouts and their cases, all in one set of processes: starting them takes longest.
RUNS: dict[int, dict[str, list[str]]] = {
    2: {"fsdp": list(CASES), "replicate": ["accumulation", "everything", "manual, two optimizers"]},
    4: {"fsdp": ["everything", "manual, two optimizers"], "hsdp": ["norm", "everything", "frozen prefix, sharded"]},
}
ALL = [(size, layout, case) for size, layouts in RUNS.items() for layout, cases in layouts.items() for case in cases]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], list[Any]]:
    """Results of `train` for a world size, computed once."""
    return functools.cache(
        lambda size: ranks_run(
            train, tmp_path_factory.mktemp("ranks"), world_size=size, arguments={"layouts": RUNS[size]}
        )
    )


@pytest.mark.parametrize(("world_size", "layout", "case"), ALL)
def test_ten_steps_equal_one_process(trained: Any, world_size: int, layout: str, case: str) -> None:
    expected = single_process(CASES[case])
    start = dict(Net(CASES[case]).named_parameters())
    assert (expected["head.weight"] - start["head.weight"]).abs().max() > 0.01
    for rank in trained(world_size):
        found = rank[layout][case]
        assert found["optimizers"] == {"AdamW" if case == "stock optimizer" else "FusedAdamW"}
        for name, value in expected.items():
            difference = (found["parameters"][name] - value).abs().max().item()
            assert difference <= 1e-6, f"{name} differs by {difference}"


def test_layouts_are_what_they_are_called(trained: Any) -> None:
    """Numbers alone would not tell: plain sharding gives the same."""
    two, four = trained(2)[0], trained(4)[0]
    assert two["fsdp"]["plain"]["mesh"] == (1, 1, 2, 1)
    assert two["replicate"]["everything"]["mesh"] == (1, 2, 1, 1)
    assert four["fsdp"]["everything"]["mesh"] == (1, 1, 4, 1)
    assert four["hsdp"]["norm"]["mesh"] == (1, 2, 2, 1)
    assert four["hsdp"]["norm"]["placements"]["head.weight"] == "(Replicate(), Shard(dim=0))"
    assert [rank["hsdp"]["norm"]["memory"]["norm.weight"] for rank in trained(4)] == [4, 4, 4, 4]
    assert [rank["fsdp"]["everything"]["memory"]["norm.weight"] for rank in trained(4)] == [2, 2, 2, 2]
    assert [rank["fsdp"]["everything"]["memory"]["head.bias"] for rank in trained(4)] == [1, 1, 1, 0]
    assert two["replicate"]["everything"]["memory"]["norm.weight"] == 8


def test_the_mesh_has_the_names_of_modelparallelstrategy(trained: Any) -> None:
    for size in (2, 4):
        for rank, found in enumerate(trained(size)):
            for layout, cases in found.items():
                assert {run["aliases"] for run in cases.values()} == {(size, rank, 1, 0)}, layout


def test_frozen_parameters_stay_whole_unless_told(trained: Any) -> None:
    placements = {case: trained(2)[0]["fsdp"][case]["placements"] for case in CASES}
    assert placements["frozen prefix"]["prefix.weight"] == placements["frozen prefix"]["blocks.1.bias"] == "None"
    assert placements["frozen prefix"]["blocks.0.bias"] == "(Shard(dim=0),)"
    assert placements["frozen prefix, sharded"]["blocks.1.bias"] == "(Shard(dim=0),)"
