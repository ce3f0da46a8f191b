"""Batches and statistics for the tests of pi0.5's processor and policy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from soma_lightning.contract import Statistics
from soma_lightning.models import PI05Config, PI05Policy


def _of_feature(dim: int, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    low = rng.normal(size=dim)
    high = low + rng.uniform(0.5, 2.0, size=dim)
    return {
        "mean": (low + high) / 2,
        "std": rng.uniform(0.1, 1.0, size=dim),
        "min": low - 0.1,
        "max": high + 0.1,
        "q01": low,
        "q99": high,
        "count": np.array([100]),
    }


@pytest.fixture
def make_statistics():
    def make(state_dim: int = 8, action_dim: int = 7) -> Statistics:
        return {"observation.state": _of_feature(state_dim, 0), "action": _of_feature(action_dim, 1)}

    return make


@pytest.fixture
def make_batch():
    def make(
        size: int = 3, *, horizon: int = 8, state_dim: int = 8, action_dim: int = 7, side: int = 64
    ) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(3)
        batch: dict[str, Any] = {
            f"observation.images.{name}": torch.randint(
                0, 256, (size, 3, side, side), dtype=torch.uint8, generator=generator
            )
            for name in ("image", "image2")
        }
        batch["observation.state"] = torch.randn(size, state_dim, generator=generator)
        batch["action"] = torch.randn(size, horizon, action_dim, generator=generator)
        batch["action_is_pad"] = torch.zeros(size, horizon, dtype=torch.bool)
        batch["task"] = ["pick up the cube", "reach the green disc", "push_the cube\n"][:size]
        return batch

    return make


@pytest.fixture
def make_policy(make_statistics):
    def make(**changes) -> PI05Policy:
        torch.manual_seed(0)
        policy = PI05Policy(PI05Config.tiny(**changes), make_statistics())
        policy.reset_parameters()
        return policy

    return make
