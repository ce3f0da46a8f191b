"""The Trainer of a benchmark: one that does nothing beside training."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch


def bare_trainer(device: torch.device, folder: str, max_steps: int, **settings: Any) -> pl.Trainer:
    """Trains `max_steps` on devices like `device`: no logger, checkpoint, progress bar or summary.

    folder: where it may write. settings: further ones of the Trainer; one device unless they say otherwise.
    """
    return pl.Trainer(
        accelerator="gpu" if device.type == "cuda" else "cpu",
        max_steps=max_steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        **{"devices": 1, **settings},
    )
