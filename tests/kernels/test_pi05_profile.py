"""The profile of a training step: kinds of kernels, FLOPs by formula, and the page on a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from bench import pi05_profile
from bench.pi05_step_worker import SHAPES, Ours, make_inputs
from soma_lightning.models.pi05.config import PI05Config


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("nvjet_tst_256x128_64x4_1x2_h_bz_coopA_TNT", "products"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x256x64", "products"),
        ("_add_norm_kernel", "norms, gates, rotations"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<...>>", "attention"),
        ("_adamw_step_kernel", "optimizer"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        ("void at::native::vectorized_elementwise_kernel<4, ...>", "other"),
    ],
)
def test_kinds_of_kernels(kernel: str, kind: str) -> None:
    assert pi05_profile.kind_of(kernel) == kind


def test_kinds_add_up_to_the_device_time() -> None:
    found = pi05_profile.summarize("ours", 2, {"nvjet_a": 3.0, "_add_norm_kernel": 1.0, "else": 0.5}, 1e12)
    assert found.device_ms == sum(found.kinds.values()) == 4.5
    assert list(found.largest) == ["nvjet_a", "_add_norm_kernel", "else"]
    assert "22%" in pi05_profile.table([found])  # 1e12 FLOPs in 4.5 ms are 222 TFLOP/s


def test_flops_are_those_that_torch_counts(tmp_path: Path) -> None:
    """Products of a cached and a live step; attention's part is small and counted in another way."""
    ours = Ours(tmp_path, "tiny", torch.device("cpu"))
    inputs = make_inputs(SHAPES["tiny"], 3, torch.device("cpu"))
    with FlopCounterMode(display=False) as counter:
        ours.loss(inputs).backward()
    tokens = 2 * ours.model.config.image_tokens + SHAPES["tiny"].prompt[0]
    wanted = pi05_profile.step_flops(ours.model.config, 3, tokens, cached=False)
    assert counter.get_total_flops() == pytest.approx(wanted, rel=0.2)


def test_full_size_flops_are_those_of_the_parameters() -> None:
    """Twice the parameters of the language layers (1.9 billion) for each of 32 * 572 tokens are the most of it."""
    total = pi05_profile.step_flops(PI05Config.base(), 32, 572, cached=False)
    assert 7e13 < total < 1e14
    assert pi05_profile.step_flops(PI05Config.base(), 32, 572, cached=True) < 0.06 * total


@pytest.mark.gpu
def test_the_page(tmp_path: Path) -> None:
    size = ["--size", "tiny", "--rows", "2", "--contenders", "ours", "ours cached", "--commit", "abc"]
    assert pi05_profile.main(["--out", str(tmp_path), *size]) == 0
    found = json.loads((tmp_path / "pi05_profile.json").read_text())
    assert all(p["kinds"]["products"] > 0 and p["device_ms"] > 0 for p in found["profiles"])
