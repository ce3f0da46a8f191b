"""The decision over four ranks again, with the kernels of the step in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

WORLD, DEVICE = 4, "cpu"
NAMES = [
    "equal_1x4x1_fp32_2.0_triton",
    "equal_1x2x2_masters_inf_triton",
    "nan_1x2x2_2.0_triton",
    "masters_follow_changes_triton",
]
pytestmark = pytest.mark.xdist_group("optim_rank_kernels")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_kernels_on_four_ranks(name: str, device: torch.device, passes_on_all_ranks: Callable[[str], None]) -> None:
    assert device.type == DEVICE
    passes_on_all_ranks(name)
