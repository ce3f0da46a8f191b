"""Prepared launches: the same result whether Triton dispatches or not, and profilers still hear of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

triton = pytest.importorskip("triton")

from soma_kernels.attention.keys import key_list  # noqa: E402


def test_later_launches_do_what_the_first_did(device: torch.device) -> None:
    for seed in range(3):
        mask = torch.rand(3, 77, generator=torch.Generator().manual_seed(seed)) < 0.5
        lines, readable = key_list(mask.to(device))
        for row in range(3):
            expected = mask[row].nonzero()[:, 0].int()
            assert torch.equal(lines[row, : readable[row]].cpu(), expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs one CUDA device")
def test_a_profiler_hears_of_every_launch() -> None:
    mask = torch.ones(2, 33, dtype=torch.bool, device="cuda")
    key_list(mask)
    heard: list[Any] = []
    listen, hook = heard.append, triton.knobs.runtime.launch_enter_hook
    hook.add(listen)
    try:
        key_list(mask)
    finally:
        hook.remove(listen)
    key_list(mask)
    assert len(heard) == 1
