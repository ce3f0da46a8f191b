"""A small LightningModule with the features users have, and a Trainer that runs it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812 (Lightning's own convention)
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

SAMPLES, BATCH = 48, 4


class Net(L.LightningModule):
    """Frozen prefix, two groups with own settings, step-wise scheduler."""

    def __init__(self, *, frozen: bool = True, two_groups: bool = True, scheduler: bool = True) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.prefix = nn.Linear(6, 8)
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)
        self.two_groups, self.scheduler = two_groups, scheduler
        self.losses: list[float] = []
        if frozen:
            self.prefix.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(torch.tanh(self.prefix(x)))))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self(batch).float().pow(2).sum()
        self.log("loss", loss)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self(batch).float().pow(2).mean())

    test_step = validation_step

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch)

    def make_optimizer(self) -> torch.optim.Optimizer:
        trainable = [p for p in self.parameters() if p.requires_grad]
        if not self.two_groups:
            return torch.optim.AdamW(trainable, lr=0.02)
        rest = [p for name, p in self.named_parameters() if p.requires_grad and not name.startswith("head.")]
        return torch.optim.AdamW(
            [
                {"params": list(self.head.parameters()), "lr": 0.01, "weight_decay": 0.0},
                {"params": rest, "betas": (0.8, 0.95)},
            ],
            lr=0.02,
        )

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer()
        if not self.scheduler:
            return optimizer
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def loader(self) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(3)
        return DataLoader(torch.randn(SAMPLES, 6, generator=generator), batch_size=BATCH)  # type: ignore[arg-type]

    train_dataloader = val_dataloader = test_dataloader = predict_dataloader = loader


@pytest.fixture
def net() -> type[Net]:
    return Net


@pytest.fixture
def make_trainer(tmp_path: Path) -> Callable[..., L.Trainer]:
    """Trainer(strategy, **overrides) on the CPU: 10 optimizer steps, nothing written outside tmp_path."""

    def make(strategy: Any, **overrides: Any) -> L.Trainer:
        settings: dict[str, Any] = {
            "accelerator": "cpu",
            "devices": 1,
            "max_steps": 10,
            "max_epochs": -1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "limit_val_batches": 0,
            "default_root_dir": tmp_path,
        }
        return L.Trainer(strategy=strategy, **{**settings, **overrides})

    return make


def largest_difference(a: nn.Module, b: nn.Module) -> float:
    return max((p - q).abs().max().item() for p, q in zip(a.parameters(), b.parameters(), strict=True))


@pytest.fixture
def difference() -> Callable[[nn.Module, nn.Module], float]:
    return largest_difference
