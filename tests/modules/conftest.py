"""A small recorded data set and short runs on it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from soma_lightning.data import LeRobotDataModule
from soma_lightning.modules import PI05Module
from soma_lightning.modules.base import TrainingConfig
from tests.recordings import record_noise


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six episodes of twelve frames with random images, states and actions."""
    return record_noise(tmp_path_factory.mktemp("data") / "set", episodes=6, length=12)


@pytest.fixture
def make_run(recorded: Path, tmp_path: Path) -> Callable[..., tuple[L.Trainer, PI05Module, LeRobotDataModule]]:
    """Builds trainer, module and data module of a short seeded run."""

    def make(
        name: str,
        *,
        seed: int = 0,
        model: dict[str, Any] | None = None,
        training: dict[str, Any] | None = None,
        **trainer: Any,
    ) -> tuple[L.Trainer, PI05Module, LeRobotDataModule]:
        torch.set_num_threads(1)
        L.seed_everything(seed, verbose=False)
        values = {"lr": 1e-3, "final_lr": 1e-4, "warmup_steps": 2, "decay_steps": 20, **(training or {})}
        module = PI05Module(**{"size": "tiny", "training": TrainingConfig(**values), **(model or {})})
        defaults = {"max_steps": 4, "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        settings = {**defaults, "enable_checkpointing": False, "accelerator": "cpu", "devices": 1, **trainer}
        trainer_ = L.Trainer(strategy="somaspeed", default_root_dir=tmp_path / name, gradient_clip_val=1.0, **settings)
        return trainer_, module, LeRobotDataModule(str(recorded), batch_size=8, preload=True)

    return make
