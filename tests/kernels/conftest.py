"""What the kernel tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from soma_kernels.optim.plan import Tiles
from soma_kernels.testing import nan_filled_empty

SMALL_TILES = Tiles(stats_chunk=256, stats_tile=64, update_chunk=128, update_tile=32)


@pytest.fixture
def unwritten_is_nan() -> Iterator[None]:
    """Memory that nobody wrote reads as NaN during the test."""
    with nan_filled_empty():
        yield


@pytest.fixture
def tiles(device: torch.device) -> Tiles:
    """Sizes that the optimizer kernels are tested with: the real ones on a GPU, small ones in the slow interpreter."""
    return SMALL_TILES if device.type == "cpu" else Tiles()
