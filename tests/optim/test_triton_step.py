"""FusedAdamW by kernels, where it must look twice: layouts, addresses, and what changed since the last step."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR

from soma_kernels.testing import relative_rms
from soma_lightning import FusedAdamW
from soma_lightning.optim.ownership import DIMENSIONS, Ownership
from soma_lightning.optim.triton_step import TritonStep

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


def by_kernels(params: Any, **settings: Any) -> FusedAdamW:
    return FusedAdamW(params, implementation="triton", **settings)


def parameters(
    device: torch.device, shapes: Sequence[tuple[int, ...]] = ((8, 5), (7,), ()), dtype: torch.dtype = FP32
) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype)) for shape in shapes]


def gradient_of(param: Tensor, step: int, position: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + position)
    return torch.randn(param.shape, generator=generator).to(param.device, param.dtype)


def set_gradients(*columns: Sequence[nn.Parameter], step: int) -> None:
    for params in columns:
        for i, p in enumerate(params):
            p.grad = gradient_of(p, step, i)


def plans_made(optimizer: FusedAdamW) -> int:
    path = optimizer._control.path
    assert isinstance(path, TritonStep)
    return path.plans_made


def assert_same(ours: FusedAdamW, theirs: AdamW) -> None:
    """Both optimizers' parameters and states, in fp32, to a few roundings."""
    for group, other in zip(ours.param_groups, theirs.param_groups, strict=True):
        for p, q in zip(group["params"], other["params"], strict=True):
            torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)
            assert set(ours.state.get(p, {})) == set(theirs.state.get(q, {}))
            for key, value in theirs.state.get(q, {}).items():
                torch.testing.assert_close(ours.state[p][key], value.to(p.device), rtol=2e-6, atol=1e-7)


# ---------------------------------------------------------------------- memory layouts


def transposed(values: Tensor) -> Tensor:
    return values.transpose(0, -1).contiguous().transpose(0, -1)


def channels_last(values: Tensor) -> Tensor:
    return values.contiguous(memory_format=torch.channels_last)


def with_gaps(values: Tensor) -> Tensor:
    wide = torch.full((*values.shape[:-1], values.shape[-1] + 3), -77.0, dtype=values.dtype, device=values.device)
    return wide[..., : values.shape[-1]].copy_(values)


def transposed_with_gaps(values: Tensor) -> Tensor:
    return with_gaps(values.transpose(0, -1)).transpose(0, -1)


def at_odd_offset(values: Tensor) -> Tensor:
    flat = torch.full((values.numel() + 9,), -77.0, dtype=values.dtype, device=values.device)
    return flat[3 : 3 + values.numel()].view(values.shape).copy_(values)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": Tensor.contiguous,
    "transposed": transposed,
    "channels last": channels_last,
    "gaps": with_gaps,
    "transposed with gaps": transposed_with_gaps,
    "odd offset": at_odd_offset,
}


@pytest.mark.parametrize("grad_layout", ["contiguous", "channels last", "transposed with gaps", "odd offset"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_of_parameter_and_gradient_gives_the_same_values(
    device: torch.device, layout: str, grad_layout: str
) -> None:
    values = parameters(device, [(4, 3, 2, 5)])[0].detach()
    plain, other = nn.Parameter(values.clone()), nn.Parameter(LAYOUTS[layout](values))
    strides, address = other.stride(), other.data_ptr()
    ours, theirs = by_kernels([other], lr=0.1), by_kernels([plain], lr=0.1)
    for step in range(2):
        plain.grad = gradient_of(plain, step)
        grad = LAYOUTS[grad_layout](plain.grad)
        kept = plain.grad.clone()
        other.grad = grad
        ours.step()
        theirs.step()
        assert other.grad is grad
        assert torch.equal(grad, kept)
    assert (other.stride(), other.data_ptr()) == (strides, address)
    assert torch.equal(other, plain)
    for key, value in theirs.state[plain].items():
        assert torch.equal(ours.state[other][key], value), key
    if layout in ("gaps", "transposed with gaps", "odd offset"):
        memory = torch.as_strided(other.detach(), (other.untyped_storage().nbytes() // 4,), (1,), 0)
        assert (memory == -77.0).sum() == memory.numel() - other.numel(), "written between or around its elements"
    assert plans_made(ours) == 1


@pytest.mark.parametrize("layout", ["transposed", "transposed with gaps"])
def test_masters_follow_the_layout_of_their_parameters(device: torch.device, layout: str) -> None:
    values = parameters(device, [(6, 4, 2)], BF16)[0].detach()
    plain, other = nn.Parameter(values.clone()), nn.Parameter(LAYOUTS[layout](values))
    ours, theirs = by_kernels([other], lr=0.1, master_weights=True), by_kernels([plain], lr=0.1, master_weights=True)
    for step in range(2):
        plain.grad, other.grad = gradient_of(plain, step), gradient_of(plain, step)
        ours.step()
        theirs.step()
    assert torch.equal(other, plain)
    for key, value in theirs.state[plain].items():
        assert torch.equal(ours.state[other][key], value), key
    assert torch.equal(ours.state[other]["soma_master"].bfloat16(), other)


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "transposed with gaps"])
@pytest.mark.parametrize("state_layout", ["contiguous", "transposed", "gaps"])
def test_a_loaded_state_may_have_another_layout(device: torch.device, layout: str, state_layout: str) -> None:
    stock_param = parameters(device, [(6, 5)])[0]
    param = nn.Parameter(LAYOUTS[layout](stock_param.detach().clone()))
    stock, ours = AdamW([stock_param]), by_kernels([param])
    for step in range(3):
        stock_param.grad = gradient_of(stock_param, step)
        if step == 2:
            state = copy.deepcopy(stock.state_dict())
            for key in ("exp_avg", "exp_avg_sq"):
                state["state"][0][key] = LAYOUTS[state_layout](state["state"][0][key])
            ours.load_state_dict(state)
            param.data.copy_(stock_param.data)
            param.grad = gradient_of(stock_param, step)
            ours.step()
        stock.step()
    assert_same(ours, stock)


def test_gradients_are_views_of_one_buffer_that_moves_every_step(device: torch.device) -> None:
    """A sharded gradient is a view at any offset; a step must not trust the address of the last one."""
    shapes = [(1,), (3, 7), (2,), (0, 4), (5,)]
    a, b = parameters(device, shapes), parameters(device, shapes)
    ours, theirs = by_kernels(a), AdamW(b)
    buffers = []
    for step in range(3):
        buffer = torch.randn(1 + sum(p.numel() for p in a), device=device)
        buffers.append((buffer, buffer.clone()))
        offset = step % 2
        for p, q in zip(a, b, strict=True):
            p.grad = buffer[offset : offset + p.numel()].view(p.shape)
            q.grad = p.grad.clone()
            offset += p.numel()
        ours.step()
        theirs.step()
    assert_same(ours, theirs)
    assert all(torch.equal(buffer, kept) for buffer, kept in buffers)
    assert plans_made(ours) == 1


# ---------------------------------------------------------------------- dtypes


def test_fp32_bf16_and_fp16_parameters_share_one_step(device: torch.device) -> None:
    dtypes = (FP32, BF16, FP16, BF16)
    params = [parameters(device, [(9, 5)], dtype)[0] for dtype in dtypes]
    alone = [parameters(device, [(9, 5)], dtype)[0] for dtype in dtypes]
    together, single = by_kernels(params, state_dtype=FP32), [by_kernels([p], state_dtype=FP32) for p in alone]
    for step in range(3):
        set_gradients(params, alone, step=step)
        for optimizer in (together, *single):
            optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(params, alone, strict=True))
    squares = sum(optimizer.last_grad_norm.double().item() ** 2 for optimizer in single)
    assert together.last_grad_norm.item() == pytest.approx(math.sqrt(squares), rel=1e-6)
    assert plans_made(together) == 1


@pytest.mark.parametrize("master_weights", [False, True])
def test_a_gradient_may_have_another_dtype_than_its_parameter(device: torch.device, master_weights: bool) -> None:
    low, full = parameters(device, [(6, 5)], BF16)[0], parameters(device, [(6, 5)], BF16)[0]
    low.grad_dtype = FP32
    ours, theirs = (by_kernels([p], state_dtype=FP32, master_weights=master_weights) for p in (low, full))
    for step in range(2):
        full.grad = gradient_of(full, step)  # bf16 values: exact in fp32
        low.grad = full.grad.float()
        ours.step()
        theirs.step()
    assert torch.equal(low, full)
    assert torch.equal(ours.state[low]["exp_avg_sq"], theirs.state[full]["exp_avg_sq"])
    assert ours.last_grad_norm.item() == pytest.approx(theirs.last_grad_norm.item(), rel=1e-6)


def test_a_gradient_of_any_dtype_is_followed(device: torch.device) -> None:
    param, twin = (parameters(device, [(6, 5)], BF16)[0] for _ in range(2))
    param.grad_dtype = None
    ours, theirs = by_kernels([param], master_weights=True), by_kernels([twin], master_weights=True)
    for step, dtype in enumerate((BF16, FP32, BF16)):
        twin.grad = gradient_of(twin, step)
        param.grad = twin.grad.to(dtype)
        ours.step()
        theirs.step()
    assert torch.equal(param, twin)


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
def test_ten_clipped_steps_are_torchs_to_a_few_roundings(device: torch.device, dtype: torch.dtype) -> None:
    """The bound of docs/numerics.md: torch rounds the norm and the clipped gradients to their dtype, we do not."""
    shapes = [(40, 9), (30,)]
    a, b = parameters(device, shapes, dtype), parameters(device, shapes, dtype)
    # torch's fused CUDA kernel takes 1 - beta2 in fp32 and is off by 1.3e-5 in the second moment; the lists round after
    # every operation, which only fp32 can afford.
    ours, theirs = by_kernels(a, lr=1e-2), AdamW(b, lr=1e-2, fused=dtype != FP32, foreach=dtype == FP32)
    start = torch.cat([p.detach().flatten() for p in a])
    for step in range(10):
        set_gradients(a, b, step=step)
        ours.clip(max_norm=2.0)
        ours.step()
        norm = nn.utils.clip_grad_norm_(b, 2.0)
        theirs.step()
        assert norm.item() > 10, "the gradients are really clipped"
        assert ours.last_grad_norm.item() == pytest.approx(norm.item(), rel=2 * torch.finfo(dtype).eps)
    eps = torch.finfo(dtype).eps
    for key, roundings in (("exp_avg", 2), ("exp_avg_sq", 4)):
        mine, other = (torch.cat([o.state[p][key].flatten() for p in ps]) for o, ps in ((ours, a), (theirs, b)))
        assert relative_rms(mine, other) <= roundings * eps, key
    mine, other = (torch.cat([p.detach().flatten() for p in params]) for params in (a, b))
    assert relative_rms(mine, other) <= 2 * eps
    assert relative_rms(mine, start) > 3e-2, "the weights really moved"


# ---------------------------------------------------------------------- gradients that come and go


def test_parameters_take_part_when_they_have_a_gradient(device: torch.device) -> None:
    a, b = parameters(device), parameters(device)
    ours, theirs = by_kernels(a), AdamW(b)
    for step, present in enumerate(((0,), (1,), (0, 1, 2), (0, 2), (1,), (0,))):
        set_gradients(a, b, step=step)
        for params in (a, b):
            for i, p in enumerate(params):
                if i not in present:
                    p.grad = None
        before = a[0]._version, a[1]._version
        ours.step()
        theirs.step()
        after = a[0]._version, a[1]._version
        assert [x != y for x, y in zip(before, after, strict=True)] == [0 in present, 1 in present]
        assert_same(ours, theirs)
    assert plans_made(ours) == 3, "one for each parameter that is new, none for one that sits out"


def test_an_absent_parameter_with_gaps_is_not_written(device: torch.device) -> None:
    present, absent = parameters(device, [(4,)])[0], nn.Parameter(with_gaps(parameters(device, [(3, 4)])[0].detach()))
    ours = by_kernels([present, absent])
    set_gradients([present, absent], step=0)
    ours.step()
    absent.grad, version, values = None, absent._version, absent.detach().clone()
    present.grad = gradient_of(present, 1)
    ours.step()
    assert absent._version == version
    assert torch.equal(absent, values)


def test_a_frozen_parameter_with_an_old_gradient_rests(device: torch.device) -> None:
    a, b = parameters(device), parameters(device)
    ours, theirs = by_kernels(a), AdamW(b)
    for step, frozen in enumerate((False, True, True, False)):
        set_gradients(a, b, step=step)
        a[1].requires_grad_(not frozen)
        if frozen:
            a[1].grad = torch.full_like(a[1], math.nan)
            b[1].grad = None
        ours.step()
        theirs.step()
        norm = math.sqrt(sum(q.grad.double().square().sum().item() for q in b if q.grad is not None))
        assert ours.last_grad_norm.item() == pytest.approx(norm, rel=1e-6)
    assert_same(ours, theirs)
    assert ours.state[a[1]]["step"].item() == 2.0
    assert ours.skipped_steps.item() == 0


def test_a_parameter_frozen_at_first_joins_later(device: torch.device) -> None:
    a, b = parameters(device), parameters(device)
    ours, theirs = by_kernels(a), AdamW(b)
    a[0].requires_grad_(False)
    for step in range(4):
        if step == 2:
            a[0].requires_grad_(True)
        set_gradients(a, b, step=step)
        if step < 2:
            b[0].grad = None
        ours.step()
        theirs.step()
    assert_same(ours, theirs)
    assert plans_made(ours) == 2


def test_zeroed_gradients_are_gradients(device: torch.device) -> None:
    a, b = parameters(device), parameters(device)
    ours, theirs = by_kernels(a), AdamW(b)
    for step in range(4):
        for optimizer in (ours, theirs):
            optimizer.zero_grad(set_to_none=step == 3)
        if step != 2:
            for params in (a, b):
                for i, p in enumerate(params):
                    grad = gradient_of(p, step, i)
                    p.grad = grad if p.grad is None else p.grad.add_(grad)
        ours.step()
        theirs.step()
    assert_same(ours, theirs)
    assert ours.state[a[0]]["step"].item() == 4.0


def test_a_gradient_between_backward_passes_is_not_touched(device: torch.device) -> None:
    """Accumulation goes on in the same tensor: a step reads it and leaves it."""
    param = parameters(device, [(6,)])[0]
    ours = by_kernels([param])
    for step in range(1, 4):
        (3.0 * param).sum().backward()
        ours.clip(max_norm=0.1, normalizer=2.0)
        ours.step()
        assert param.grad is not None
        assert param.grad.tolist() == [3.0 * step] * 6


def test_an_old_graph_is_refused_after_the_step(device: torch.device) -> None:
    """The kernels write behind autograd's back; without a counted version this backward would be wrong in silence."""
    param, absent = parameters(device, [(4,), (4,)])
    ours = by_kernels([param, absent])
    set_gradients([param, absent], step=0)
    ours.step()
    stale, fresh = (param * param).sum(), (absent * absent).sum()
    param.grad, absent.grad = torch.ones_like(param), None
    ours.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stale.backward()
    fresh.backward()  # nobody wrote this parameter
    assert absent.grad is not None


# ---------------------------------------------------------------------- what makes a plan old


def test_an_undisturbed_loop_prepares_once(device: torch.device) -> None:
    params = parameters(device)
    ours = by_kernels(params, lr=torch.tensor(0.1, device=device))
    scheduler = LambdaLR(ours, lambda step: 0.9**step)
    for step in range(5):
        ours.zero_grad()
        set_gradients(params, step=step)
        ours.grad_norm()
        ours.clip(max_norm=1.0 if step % 2 else None)
        ours.step()
        scheduler.step()
        assert ours.state[params[0]]["step"].item() == step + 1  # looking at the state changes nothing
        ours.state_dict()
    assert plans_made(ours) == 1


def test_a_group_added_in_between_joins(device: torch.device) -> None:
    a, b = parameters(device), parameters(device)
    ours, theirs = by_kernels(a[:1]), AdamW(b[:1])
    for step in range(4):
        if step == 2:
            ours.add_param_group({"params": a[1:], "lr": 0.1, "weight_decay": 0.5})
            theirs.add_param_group({"params": b[1:], "lr": 0.1, "weight_decay": 0.5})
        set_gradients(a, b, step=step)
        ours.step()
        theirs.step()
    assert_same(ours, theirs)
    assert plans_made(ours) == 2


def test_hyperparameters_are_read_in_every_step(device: torch.device) -> None:
    a, b = parameters(device), parameters(device)
    ours, theirs = (cls([{"params": p[:1]}, {"params": p[1:]}]) for cls, p in ((by_kernels, a), (AdamW, b)))
    changes: list[dict[str, Any]] = [
        {},
        {"lr": 0.5},
        {"betas": (0.5, 0.6)},
        {"weight_decay": 0.7},
        {"eps": 1e-2},
        {"lr": torch.tensor(0.25)},
        {"betas": (0.0, 0.9)},
    ]
    for step, change in enumerate(changes):
        for optimizer in (ours, theirs):
            optimizer.param_groups[1].update(copy.deepcopy(change))
            optimizer.param_groups[1]["foreach"] = False  # torch's lists take no tensor as learning rate
        set_gradients(a, b, step=step)
        ours.step()
        theirs.step()
    assert_same(ours, theirs)
    assert plans_made(ours) == 1


def test_a_parameter_may_change_its_group(device: torch.device) -> None:
    a, b = parameters(device, [(4,), (5,), (6,)]), parameters(device, [(4,), (5,), (6,)])
    ours, theirs = (
        cls([{"params": p[:2], "lr": 0.1}, {"params": p[2:], "lr": 0.5}]) for cls, p in ((by_kernels, a), (AdamW, b))
    )
    for step in range(2):
        set_gradients(a, b, step=step)
        ours.step()
        theirs.step()
        for optimizer in (ours, theirs):
            first, second = (group["params"] for group in optimizer.param_groups)
            second[:0] = [first.pop()] if step == 0 else []
    assert_same(ours, theirs)


def used(optimizer: FusedAdamW, params: Sequence[nn.Parameter]) -> list[float]:
    """Norm of the gradient that the last step, a first one, used for each parameter."""
    weight = 1 - optimizer.param_groups[0]["betas"][0]
    return [(optimizer.state[p]["exp_avg"] / weight).norm().item() for p in params]


def two_limits(device: torch.device) -> tuple[list[nn.Parameter], FusedAdamW]:
    params = parameters(device, [(4,), (4,)])
    return params, by_kernels([{"params": [p]} for p in params], lr=0.0)


@pytest.mark.parametrize("before", [True, False])
def test_the_limit_of_a_group_may_come_and_go(device: torch.device, before: bool) -> None:
    params, ours = two_limits(device)
    if before:
        ours.param_groups[1]["max_norm"] = 0.25
    for limit in (0.25, None, 0.125):
        for p in params:
            p.grad = torch.ones_like(p)  # norm 2
        ours.state.clear()
        if limit is None:
            del ours.param_groups[1]["max_norm"]
        else:
            ours.param_groups[1]["max_norm"] = limit
        ours.clip(max_norm=1.0)
        ours.step()
        if limit is None:
            assert used(ours, params) == pytest.approx([0.5**0.5] * 2, rel=1e-5)
        else:
            assert used(ours, params) == pytest.approx([1.0, limit], rel=1e-5)
        assert ours.last_grad_norm.item() == pytest.approx(8**0.5, rel=1e-6)


@pytest.mark.parametrize("implementation", ["reference", "triton"])
@pytest.mark.parametrize("change", ["new group", "new limit", "other limit"])
def test_statistics_of_other_clip_groups_are_taken_again(
    device: torch.device, implementation: str, change: str
) -> None:
    """`grad_norm` before the step shares its pass with it, unless who is clipped with whom changed in between."""
    params = parameters(device, [(4,), (4,), (4,)])
    groups: list[dict[str, Any]] = [{"params": [params[0]]}, {"params": [params[1]]}]
    if change == "other limit":
        groups[0]["max_norm"] = 0.5
    ours = FusedAdamW(groups, lr=0.0, implementation=implementation)
    for p in params[:2]:
        p.grad = torch.ones_like(p)
    ours.grad_norm()
    if change == "new group":
        ours.add_param_group({"params": [params[2]], "max_norm": 0.125})
    else:
        groups_now = ours.param_groups
        groups_now[0].pop("max_norm", None)
        groups_now[1]["max_norm"] = 0.25
    ours.clip(max_norm=1.0)
    ours.step()
    expected = [0.5**0.5] * 2 if change == "new group" else [1.0, 0.25]
    assert used(ours, params[:2]) == pytest.approx(expected, rel=1e-5)


def test_a_parameter_that_moved_is_found(device: torch.device) -> None:
    a, b = parameters(device), parameters(device)
    ours, theirs = by_kernels(a), AdamW(b)
    old = []
    for step in range(4):
        if step == 2:
            old = [p.data for p in a]
            for p in a:
                p.data = p.data.clone()
            kept = [t.clone() for t in old]
        set_gradients(a, b, step=step)
        ours.step()
        theirs.step()
    assert_same(ours, theirs)
    assert all(torch.equal(t, k) for t, k in zip(old, kept, strict=True)), "the old memory belongs to somebody else"
    assert plans_made(ours) == 2


def test_a_converted_parameter_takes_its_state_along(device: torch.device) -> None:
    param = parameters(device, [(6, 5)])[0]
    ours = by_kernels([param])
    for step, dtype in enumerate((FP32, BF16, FP16, FP32)):
        param.grad = None
        param.data = param.data.to(dtype)
        param.grad_dtype = dtype
        param.grad = gradient_of(param, step)
        before = param.detach().double()
        ours.step()
        assert (param.dtype, ours.state[param]["exp_avg"].dtype) == (dtype, dtype)
        assert 1e-4 < (param.double() - before).abs().max() < 1e-2 + torch.finfo(dtype).eps * before.abs().max()
    assert ours.state[param]["step"].item() == 4.0


def test_replaced_state_tensors_are_used(device: torch.device) -> None:
    a, b = parameters(device), parameters(device)
    ours, theirs = by_kernels(a), AdamW(b)
    for step in range(4):
        if step == 2:
            for optimizer, params in ((ours, a), (theirs, b)):
                state = optimizer.state[params[0]]
                state["exp_avg"] = torch.full_like(params[0], 0.5).detach()
                state["step"] = state["step"] + 10
        set_gradients(a, b, step=step)
        ours.step()
        theirs.step()
    assert_same(ours, theirs)
    assert ours.state[a[0]]["step"].item() == 14.0
    assert plans_made(ours) == 2


def test_a_cleared_state_starts_afresh(device: torch.device) -> None:
    a, b = parameters(device), parameters(device)
    ours, theirs = by_kernels(a), AdamW(b)
    for step in range(4):
        if step == 2:
            ours.state.clear()
            theirs.state.clear()
        set_gradients(a, b, step=step)
        ours.step()
        theirs.step()
    assert_same(ours, theirs)
    assert ours.state[a[0]]["step"].item() == 2.0


@pytest.mark.parametrize("key", ["exp_avg", "exp_avg_sq", "soma_master"])
def test_a_state_of_another_shape_is_refused(device: torch.device, key: str) -> None:
    param = parameters(device, [(2, 3)], BF16)[0]
    ours = by_kernels([param], master_weights=True)
    param.grad = torch.ones_like(param)
    ours.step()
    ours.state[param][key] = torch.zeros(3, 2, device=device)
    before = param.detach().clone()
    with pytest.raises(
        ValueError, match=rf"parameter of shape \(2, 3\) has '{key}' of shape \(3, 2\); it was saved for"
    ):
        ours.step()
    assert torch.equal(param, before)


# ---------------------------------------------------------------------- checkpoints across implementations


@pytest.mark.parametrize("master_weights", [False, True])
def test_a_run_moves_between_kernels_and_plain_torch(device: torch.device, master_weights: bool) -> None:
    dtype = BF16 if master_weights else FP32
    through, moved = parameters(device, dtype=dtype), parameters(device, dtype=dtype)
    settings = {"lr": 1e-2, "master_weights": master_weights}
    reference = FusedAdamW(through, implementation="reference", **settings)
    current = by_kernels(moved, **settings)
    for step in range(6):
        if step in (2, 4):
            saved = copy.deepcopy(current.state_dict())
            current = FusedAdamW(moved, implementation="reference" if step == 2 else "triton", **settings)
            current.load_state_dict(saved)
        set_gradients(through, moved, step=step)
        current.step()
        reference.step()
    for p, q in zip(through, moved, strict=True):
        key = "soma_master" if master_weights else "exp_avg"
        torch.testing.assert_close(current.state[q][key], reference.state[p][key], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(p, q, rtol=0, atol=2**-7 if master_weights else 1e-6)
        assert current.state[q]["step"].item() == 6.0


def test_loading_in_between_restarts_from_the_loaded_state(device: torch.device) -> None:
    a, b = parameters(device), parameters(device)
    ours, theirs = by_kernels(a), AdamW(b)
    for step in range(2):
        set_gradients(a, b, step=step)
        ours.step()
        theirs.step()
    saved = copy.deepcopy(theirs.state_dict())
    ours.param_groups[0]["lr"] = 0.5
    set_gradients(a, step=7)
    ours.step()
    ours.load_state_dict(saved)
    for p, q in zip(a, b, strict=True):
        p.data.copy_(q.data)
    set_gradients(a, b, step=2)
    ours.step()
    theirs.step()
    assert_same(ours, theirs)


# ---------------------------------------------------------------------- non-finite steps


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("layout", ["transposed", "transposed with gaps"])
def test_a_skip_keeps_every_bit_whatever_the_layout(device: torch.device, layout: str, bad: float) -> None:
    values = [parameters(device, [(4, 5)], dtype)[0].detach() for dtype in (FP32, BF16)]
    params = [nn.Parameter(LAYOUTS[layout](v)) for v in values]
    ours = by_kernels(params, master_weights=True)
    set_gradients(params, step=0)
    ours.step()
    before = copy.deepcopy([[p.detach(), *ours.state[p].values()] for p in params])
    set_gradients(params, step=1)
    assert params[1].grad is not None
    params[1].grad[-1, -1] = bad
    kept = [p.grad.clone() for p in params if p.grad is not None]
    ours.clip(max_norm=1.0)
    ours.step()
    for p, grad, saved in zip(params, kept, before, strict=True):
        assert all(torch.equal(x, y) for x, y in zip([p.detach(), *ours.state[p].values()], saved, strict=True))
        assert torch.equal(p.grad.view(torch.int16), grad.view(torch.int16))  # type: ignore[union-attr]
    assert ours.skipped_steps.item() == 1
    assert ours.first_nonfinite_parameter() is params[1]
    set_gradients(params, step=2)
    ours.step()
    assert (ours.skipped_steps.item(), ours.consecutive_skips.item()) == (1, 0)
    assert ours.first_nonfinite_parameter() is None


def test_the_first_bad_parameter_is_named_among_absent_and_sorted_ones(device: torch.device) -> None:
    """Launches are sorted by dtype and absent parameters are left out; the name comes in group order."""
    params = [parameters(device, [(3,)], dtype)[0] for dtype in (FP32, FP16, FP32, BF16, FP32)]
    ours = by_kernels(params)
    set_gradients(params, step=0)
    params[0].grad = None
    for i in (4, 3, 2, 1):
        assert params[i].grad is not None
        params[i].grad[0] = math.nan
        ours.step()
        assert ours.first_nonfinite_parameter() is params[i]
    assert ours.skipped_steps.item() == 4
    ours.grad_norm()
    assert ours.first_nonfinite_parameter() is params[1]


def test_a_bad_parameter_is_named_although_the_order_of_launches_changed(device: torch.device) -> None:
    """`grad_norm` took the statistics by a plan in which this parameter's chunk stood elsewhere."""
    params = parameters(device, [(3,), (3,)])
    params[1].grad_dtype = None
    ours = by_kernels(params)
    set_gradients(params, step=0)
    params[0].grad[0] = math.nan  # type: ignore[index]
    ours.grad_norm()
    params[1].data = params[1].data.bfloat16()  # sorted before the first one from now on
    ours.step()
    assert plans_made(ours) == 2
    assert ours.skipped_steps.item() == 1
    assert ours.first_nonfinite_parameter() is params[0]


@pytest.mark.parametrize("normalizer", [0.0, -1.0, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_a_normalizer_that_makes_no_sense_skips(device: torch.device, normalizer: float, as_tensor: bool) -> None:
    params = parameters(device, [(3,)])
    before = params[0].detach().clone()
    ours = by_kernels(params)
    set_gradients(params, step=0)
    ours.clip(normalizer=torch.tensor(normalizer, device=device) if as_tensor else normalizer)
    ours.step()
    assert ours.skipped_steps.item() == 1
    assert torch.equal(params[0], before)


# ---------------------------------------------------------------------- learning rates


@pytest.mark.parametrize("shape", [(), (1,)])
def test_schedulers_move_numbers_and_tensors_alike(device: torch.device, shape: tuple[int, ...]) -> None:
    a, b, c = (parameters(device) for _ in range(3))
    by_tensor = by_kernels(a, lr=torch.full(shape, 0.1, device=device))
    by_number, stock = by_kernels(b, lr=0.1), AdamW(c, lr=0.1)
    schedulers = [CosineAnnealingLR(o, 5) for o in (by_tensor, by_number, stock)]
    for step in range(5):
        set_gradients(a, b, c, step=step)
        for optimizer, scheduler in zip((by_tensor, by_number, stock), schedulers, strict=True):
            optimizer.step()
            scheduler.step()
    assert_same(by_number, stock)
    assert_same(by_tensor, stock)
    assert isinstance(by_tensor.param_groups[0]["lr"], Tensor)


# ---------------------------------------------------------------------- which path, and refusals


def test_the_path_and_its_reason_can_be_read(device: torch.device) -> None:
    params = parameters(device)
    assert by_kernels(params).path_description == "Triton kernels"
    assert FusedAdamW(params, implementation="reference").path_description == "plain torch (asked for)"
    automatic = FusedAdamW(params)
    assert automatic.path_description == (
        "plain torch (no kernels for cpu)" if device.type == "cpu" else "Triton kernels"
    )
    double = FusedAdamW([nn.Parameter(torch.ones(2, 3, dtype=torch.float64, device=device))], implementation="triton")
    double.param_groups[0]["params"][0].grad = torch.ones(2, 3, dtype=torch.float64, device=device)
    with pytest.raises(ValueError, match=r"implementation='triton' is not possible: a parameter of shape \(2, 3\) has"):
        double.step()
    with pytest.raises(ValueError, match="implementation='fast' is unknown; use one of auto, triton, reference"):
        FusedAdamW(params, implementation="fast")
    with pytest.raises(ValueError, match="state_dtype=torch.float16 is not supported"):
        FusedAdamW(params, state_dtype=FP16)


def test_kernels_that_were_asked_for_need_triton_or_its_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("soma_lightning.optim.triton_step.is_interpreter", lambda: False)
    with pytest.raises(ValueError, match="implementation='triton' is not possible: no kernels for cpu; use 'auto'"):
        by_kernels(parameters(torch.device("cpu"))).path_description  # noqa: B018


def test_a_sparse_gradient_is_refused_beside_dense_ones(device: torch.device) -> None:
    embedding, linear = nn.Embedding(4, 2, sparse=True, device=device), nn.Linear(2, 2, device=device)
    ours = by_kernels([*embedding.parameters(), *linear.parameters()])
    linear(embedding(torch.tensor([1], device=device))).sum().backward()
    with pytest.raises(ValueError, match=r"a gradient of shape \(4, 2\) is sparse"):
        ours.step()
    dense = nn.Embedding(4, 2, device=device)
    ours = by_kernels(dense.parameters())
    dense(torch.tensor([1], device=device)).sum().backward()
    ours.step()
    dense.sparse = True
    ours.zero_grad()
    dense(torch.tensor([1], device=device)).sum().backward()
    with pytest.raises(ValueError, match="is sparse"):
        ours.step()


def test_a_frozen_parameter_elsewhere_does_not_choose_the_path(device: torch.device) -> None:
    elsewhere = nn.Parameter(torch.ones(2, device="meta"), requires_grad=False)
    wide = nn.Parameter(torch.ones(2, device=device, dtype=torch.float64), requires_grad=False)
    params = parameters(device, [(3,)])
    ours = by_kernels([elsewhere, wide, *params])
    params[0].grad = torch.ones_like(params[0])
    ours.step()
    assert ours.path_description == "Triton kernels"
    assert ours.state[params[0]]["step"].item() == 1.0


# ---------------------------------------------------------------------- several processes


@dataclass(frozen=True)
class Doubling(Ownership):
    """Two ranks with the same gradients and half of the normalizer each, of which this one counts every second."""

    reduced: list[tuple[Tensor, float]] = field(default_factory=list)

    def counted(self, params: Sequence[Tensor]) -> list[bool]:
        return [i % 2 == 0 for i in range(len(params))]

    def all_reduce_(self, vector: Tensor, norm_type: float) -> None:
        self.reduced.append((vector.clone(), norm_type))
        vector *= 2


@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_ownership_decides_who_counts_and_what_is_global(device: torch.device, implementation: str) -> None:
    params = parameters(device, [(4,), (4,), (4,)])
    ours = FusedAdamW(params, lr=0.0, implementation=implementation)
    ownership = Doubling(dict.fromkeys(DIMENSIONS, 0), device, sums=True)
    ours.ownership = ownership
    for step in range(2):
        ours.state.clear()
        for p in params:
            p.grad = torch.ones_like(p)
        ours.clip(max_norm=1.0, normalizer=1.0)
        ours.step()
        # Two of three gradients of 4 ones, in two processes, halved by the normalizer.
        assert ours.last_grad_norm.item() == pytest.approx(math.sqrt(2 * 2 * 4) / 2, rel=1e-6)
        assert used(ours, params) == pytest.approx([0.5] * 3, rel=1e-5)
        assert ownership.reduced[step][0].tolist() == pytest.approx([0.0, 1.0, 8.0])
        assert ownership.reduced[step][1] == 2.0
    params[1].grad = torch.full_like(params[1], math.nan)  # not counted here, and still a reason to skip
    ours.clip(normalizer=1.0)
    ours.step()
    assert ours.skipped_steps.item() == 1
    assert ours.first_nonfinite_parameter() is params[1]


@pytest.fixture
def one_process(device: torch.device, tmp_path: Any) -> Iterator[None]:
    backend = "nccl" if device.type == "cuda" else "gloo"
    torch.distributed.init_process_group(backend, init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("master_weights", [False, True])
def test_dtensors_are_updated_through_their_local_shards(device: torch.device, master_weights: bool) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh(device.type, (1,))
    dtype = BF16 if master_weights else FP32
    plain = parameters(device, [(6, 5), (4,)], dtype)
    placements = (Shard(0), Replicate())
    params = [
        nn.Parameter(distribute_tensor(p.detach().clone(), mesh, [placement]))
        for p, placement in zip(plain, placements, strict=True)
    ]
    ours, theirs = (by_kernels(p, lr=1e-2, master_weights=master_weights) for p in (params, plain))
    for step in range(3):
        set_gradients(plain, step=step)
        for p, q, placement in zip(params, plain, placements, strict=True):
            assert q.grad is not None
            p.grad = DTensor.from_local(q.grad.clone(), mesh, [placement])
        norm = ours.grad_norm()
        ours.clip(max_norm=1.0)
        theirs.clip(max_norm=1.0)
        ours.step()
        theirs.step()
        assert torch.equal(ours.last_grad_norm, theirs.last_grad_norm)
        assert norm.item() == pytest.approx(theirs.last_grad_norm.item(), rel=1e-6)
    assert plans_made(ours) == 1
    for p, q in zip(params, plain, strict=True):
        assert torch.equal(p.to_local(), q)
        for key, value in theirs.state[q].items():
            mine = ours.state[p][key]
            assert isinstance(mine, DTensor) == (key != "step")
            assert torch.equal(mine.to_local() if isinstance(mine, DTensor) else mine, value), key


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_a_gradient_divided_unlike_its_parameter_is_refused(device: torch.device, implementation: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

    mesh = init_device_mesh(device.type, (1,))
    param = nn.Parameter(distribute_tensor(torch.ones(4, 2, device=device), mesh, [Shard(0)]))
    param.grad = DTensor.from_local(torch.ones(4, 2, device=device), mesh, [Partial()])
    ours = FusedAdamW([param], implementation=implementation)
    with pytest.raises(ValueError, match=r"parameter 0 \(shape \(4, 2\)\) is placed as .*Partial.* as .*Shard"):
        ours.step()
