"""FusedAdamW on one CUDA device: equal to torch, bits kept on a skip, and never waiting for the device."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW

from soma_lightning import FP32MasterAdamW, FusedAdamW

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SHAPES = [(64, 33), (33,), (0, 7), (5, 3, 2), ()]


def parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to("cuda", dtype)) for shape in SHAPES]


def set_gradients(params: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to("cuda", p.dtype)


@pytest.fixture
def no_synchronization() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("tensor_lr", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ten_clipped_steps_equal_torch(dtype: torch.dtype, tensor_lr: bool) -> None:
    ours, theirs = parameters(dtype), parameters(dtype)
    lr = torch.tensor(0.05, device="cuda", dtype=torch.float64) if tensor_lr else 0.05
    fused, stock = FusedAdamW(ours, lr=lr), AdamW(theirs, lr=0.05)
    for step in range(10):
        set_gradients(ours, step)
        set_gradients(theirs, step)
        norm = nn.utils.clip_grad_norm_(theirs, 1.0)
        stock.step()
        fused.clip(max_norm=1.0)
        fused.step()
        assert fused.last_grad_norm.item() == pytest.approx(norm.item(), rel=1e-6)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_masters_have_the_bits_of_an_fp32_run() -> None:
    low, full = parameters(torch.bfloat16), parameters(torch.float32)
    for a, b in zip(low, full, strict=True):
        b.data.copy_(a.data)
    masters, reference = FP32MasterAdamW(low, lr=1e-4), AdamW(full, lr=1e-4, fused=True)
    for step in range(20):
        set_gradients(low, step)
        for a, b in zip(low, full, strict=True):
            assert a.grad is not None
            b.grad = a.grad.float()
        masters.step()
        reference.step()
    for a, b in zip(low, full, strict=True):
        assert torch.equal(masters.state[a]["soma_master"], b.detach())
        assert torch.equal(a.detach(), masters.state[a]["soma_master"].bfloat16())


@pytest.mark.parametrize("cls", [FusedAdamW, FP32MasterAdamW])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_nonfinite_step_changes_no_bit(cls: type[FusedAdamW], dtype: torch.dtype) -> None:
    params = parameters(dtype)
    fused = cls(params)
    set_gradients(params, 0)
    fused.step()

    def everything() -> list[Tensor]:
        states = [value for p in params for _, value in sorted(fused.state[p].items())]
        return [t.detach().clone() for t in (*params, *states)]

    before = everything()
    set_gradients(params, 1)
    assert params[1].grad is not None
    params[1].grad[3] = math.nan
    fused.clip(max_norm=1.0)
    fused.step()
    assert all(torch.equal(a, b) for a, b in zip(before, everything(), strict=True))
    assert (fused.skipped_steps.item(), fused.consecutive_skips.item()) == (1, 1)
    assert fused.first_nonfinite_parameter() is params[1]
    assert [s["step"].item() for s in fused.state.values()] == [1.0] * len(SHAPES)


@pytest.mark.usefixtures("no_synchronization")
@pytest.mark.parametrize("cls", [FusedAdamW, FP32MasterAdamW])
@pytest.mark.parametrize("rule", [{}, {"max_norm": 1.0}, {"max_value": 0.1}])
def test_a_step_never_waits_for_the_device(cls: type[FusedAdamW], rule: dict[str, float]) -> None:
    torch.cuda.set_sync_debug_mode("default")
    params = parameters(torch.bfloat16)
    fused = cls(params)
    for step in range(3):
        set_gradients(params, step)
        torch.cuda.set_sync_debug_mode("error")
        fused.clip(**rule)
        fused.step()
        torch.cuda.set_sync_debug_mode("default")
    assert fused.state[params[0]]["step"].item() == 3.0


def test_a_checkpoint_with_steps_on_the_cpu_continues() -> None:
    ours, theirs = parameters(torch.float32), parameters(torch.float32)
    stock, fused = AdamW(theirs), FusedAdamW(ours)
    for step in range(3):
        set_gradients(theirs, step)
        stock.step()
    for a, b in zip(ours, theirs, strict=True):
        a.data.copy_(b.data)
    fused.load_state_dict({**stock.state_dict()})
    for step in range(3, 6):
        set_gradients(ours, step)
        set_gradients(theirs, step)
        fused.step()
    assert fused.state[ours[0]]["step"].item() == 6.0
    assert fused.state[ours[0]]["step"].device.type == "cuda"
