"""The decision over two GPUs: NCCL, compiled kernels, and plain torch beside them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

WORLD, DEVICE = 2, "cuda"
NAMES = [
    f"{check}_{layout}_{case}"
    for layout in ("1x2x1", "2x1x1", "1x1x2")
    for check, case in (
        ("equal", "fp32_2.0_triton"),
        ("equal", "masters_2.0_triton"),
        ("equal", "masters_inf_triton"),
        ("equal", "fp32_2.0_reference"),
        ("nan", "2.0_triton"),
        ("nan", "inf_triton"),
    )
] + ["normalizer_1x2x1", "normalizer_2x1x1", "normalizer_1x1x2"]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < WORLD, reason="needs two CUDA devices"),
]


@pytest.mark.parametrize("name", NAMES)
def test_on_two_gpus(name: str, passes_on_all_ranks: Callable[[str], None]) -> None:
    assert name
    passes_on_all_ranks(name)
