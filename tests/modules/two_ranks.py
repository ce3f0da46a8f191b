"""A short training of the tiny pi0.5 on two ranks, called on each of them (tests/ranks.py starts the processes)."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch

from bench.trainer import bare_trainer
from soma_lightning.data import LeRobotDataModule
from soma_lightning.modules import PI05Module
from soma_lightning.modules.base import TrainingConfig


def fit_on_two(
    root: str, folder: str, model: dict[str, Any], training: TrainingConfig, strategy: Any = "somaspeed", steps: int = 2
) -> tuple[L.Trainer, PI05Module]:
    """Trains on the data set `root` and exports below `folder`."""
    torch.set_num_threads(1)
    L.seed_everything(0, verbose=False)
    module = PI05Module(size="tiny", training=training, **model)
    trainer = bare_trainer(torch.device("cpu"), folder, steps, strategy=strategy, devices=2, limit_val_batches=0)
    trainer.fit(module, LeRobotDataModule(root, batch_size=4, preload=True))
    return trainer, module
