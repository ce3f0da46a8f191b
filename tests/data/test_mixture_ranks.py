"""Two ranks train on one weighted, augmented mixture: together what one process reads, and the same after a resume."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from soma_lightning.data import DataSource, LeRobotDataModule, LeRobotDataset
from soma_lightning.data.augmentation import PRESETS, uniform_draws
from tests.ranks import ranks_run

CAMERA = "observation.images.image"


class Recorder(pl.LightningModule):
    """Writes down (step, frame) -> pixels of every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[tuple[int, list[int], torch.Tensor]] = []

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        self.seen.append((self.global_step, batch["index"].tolist(), batch[CAMERA].clone()))
        return self.weight * batch["action"].mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def fit(roots: list[str], folder: str, world_size: int, ckpt_path: str | None = None) -> list[Any]:
    model = Recorder()
    trainer = pl.Trainer(
        strategy="somaspeed",
        accelerator="cpu",
        devices=world_size,
        max_steps=18,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(folder, filename="{step}", every_n_train_steps=5, save_top_k=-1)],
    )
    sources = [DataSource(root, weight=weight) for root, weight in zip(roots, (3.0, 1.0), strict=True)]
    data = LeRobotDataModule(sources, batch_size=4 // world_size, chunk_size=2, val_fraction=0, augment="light")
    trainer.fit(model, datamodule=data, ckpt_path=ckpt_path, weights_only=False)
    return model.seen


@pytest.mark.slow
def test_two_ranks_read_what_one_process_reads(record: Callable[..., Path], tmp_path: Path) -> None:
    """36 frames, 9 steps an epoch. Lightning divides an epoch over ranks in an order of its own, so epochs compare."""
    roots = [str(record((6, 6), name="a")), str(record((12, 12), name="b"))]
    one = fit(roots, str(tmp_path / "one"), 1)
    arguments = {"roots": roots, "folder": str(tmp_path / "two"), "world_size": 2}
    for name in ("whole", "rest"):
        (tmp_path / name).mkdir()
    ranks = ranks_run(fit, tmp_path / "whole", arguments=arguments)
    epochs = [slice(0, 9), slice(9, 18)]
    for epoch in epochs:
        together = Counter(i for rank in ranks for _, frames, _ in rank[epoch] for i in frames)
        assert together == Counter(i for _, frames, _ in one[epoch] for i in frames)
        assert sum(count for i, count in together.items() if i < 12) == 27
    raw = torch.cat([next(iter(DataLoader(LeRobotDataset(root), batch_size=99)))[CAMERA] for root in roots])
    for run in (one, *ranks):
        for step, frames, images in run:
            draws = uniform_draws(0, *divmod(step, 9), CAMERA, torch.tensor(frames))
            assert torch.equal(images, PRESETS["light"](raw[frames], draws)), f"step {step}"
    arguments |= {"folder": str(tmp_path / "three"), "ckpt_path": str(tmp_path / "two" / "step=5.ckpt")}
    resumed = ranks_run(fit, tmp_path / "rest", arguments=arguments)
    for rank, whole in zip(resumed, ranks, strict=True):
        assert [(step, frames) for step, frames, _ in rank] == [(step, frames) for step, frames, _ in whole[5:]]
        assert all(torch.equal(a, b) for (*_, a), (*_, b) in zip(rank, whole[5:], strict=True))
