"""BatchNorm on several ranks: synchronized statistics equal one process; without that each rank has its own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812 (Lightning's own convention)
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins import LayerSync
from torch import Tensor, nn
from torch.distributed.nn.functional import all_reduce
from torch.utils.data import DataLoader, DistributedSampler

from tests.ranks import ranks_run, whole

#: One worker runs the file: starting its processes takes longest.
pytestmark = pytest.mark.xdist_group("batchnorm")

STEPS, BATCH = 5, 8


class RanksBatchNorm(nn.BatchNorm1d):
    """BatchNorm over the samples of all ranks; torch's SyncBatchNorm trains on GPUs only."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        count = x.shape[0] * dist.get_world_size()
        mean, square = all_reduce(torch.stack([x.sum(0), x.square().sum(0)])) / count
        var = square - mean.square()
        with torch.no_grad():
            assert self.momentum is not None
            self.running_mean.lerp_(mean, self.momentum)  # type: ignore[union-attr, operator]
            self.running_var.lerp_(var * count / (count - 1), self.momentum)  # type: ignore[union-attr, operator]
        return (x - mean) * (var + self.eps).rsqrt() * self.weight + self.bias


class SyncOnCPU(LayerSync):
    """What Trainer(sync_batchnorm=True) does with torch's class."""

    def apply(self, model: nn.Module) -> nn.Module:
        for name, child in model.named_children():
            if isinstance(child, nn.BatchNorm1d):
                synced = RanksBatchNorm(child.num_features)
                synced.load_state_dict(child.state_dict())
                setattr(model, name, synced)
            else:
                self.apply(child)
        return model

    def revert(self, model: nn.Module) -> nn.Module:
        raise NotImplementedError


class Net(L.LightningModule):
    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        # No bias in front of a BatchNorm: its gradient is rounding noise, which AdamW makes large.
        self.body = nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh())
        self.head = nn.Linear(8, 3)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.head(self.body(batch)).pow(2).mean()

    validation_step = training_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.02)


def samples() -> Tensor:
    return torch.randn(STEPS * BATCH, 6, generator=torch.Generator().manual_seed(3))


def part() -> DataLoader[Any]:
    data: Any = samples()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return DataLoader(data, BATCH // world_size, sampler=DistributedSampler(data, world_size, rank, shuffle=False))


def trainer(**settings: Any) -> L.Trainer:
    from soma_lightning import SomaSpeedStrategy

    return L.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy=SomaSpeedStrategy(report=False),
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        **settings,
    )


def every_rank(folder: Path) -> dict[str, Any]:
    synced, plain = Net(), Net()
    trainer(plugins=[SyncOnCPU()]).fit(synced, part())
    own = trainer()
    own.fit(plain, part())
    own.save_checkpoint(folder / "plain.ckpt")
    again = Net(seed=1)
    trainer(limit_train_batches=0).fit(again, part(), ckpt_path=folder / "plain.ckpt", weights_only=False)
    converted = Net()
    one_batch = trainer(sync_batchnorm=True)
    one_batch.limit_val_batches = 1
    one_batch.validate(converted, part(), verbose=False)
    return {
        "synced": whole(synced) | buffers(synced),
        "plain": buffers(plain),
        "file": torch.load(folder / "plain.ckpt", weights_only=True)["state_dict"],
        "again": buffers(again),
        "converted": type(converted.body[1]).__name__,
        "sharded": type(converted.body[1].weight).__name__,
    }


def buffers(module: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.clone() for name, buffer in module.named_buffers() if buffer.is_floating_point()}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    return ranks_run(every_rank, folder, arguments={"folder": folder})


def test_synchronized_statistics_equal_one_process(found: Any) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for batch in samples().split(BATCH):
        optimizer.zero_grad()
        model.training_step(batch, 0).backward()
        optimizer.step()
    for rank in found:
        for name, value in (whole(model) | buffers(model)).items():
            assert (rank["synced"][name] - value).abs().max().item() <= 1e-5, name


def test_plain_statistics_are_those_of_each_rank(found: Any) -> None:
    first, second = (rank["plain"]["body.1.running_mean"] for rank in found)
    assert not torch.allclose(first, second, atol=1e-3)


def test_a_checkpoint_has_the_statistics_of_rank_0_and_all_ranks_load_them(found: Any) -> None:
    for rank in found:
        for name, buffer in found[0]["plain"].items():
            assert torch.equal(rank["file"][name], buffer)
            assert torch.equal(rank["again"][name], buffer)


def test_sync_batchnorm_comes_before_sharding(found: Any) -> None:
    assert {(rank["converted"], rank["sharded"]) for rank in found} == {("SyncBatchNorm", "DTensor")}
