"""What others do to parameters, gradients and state between two steps, on every way FusedAdamW can step.

Each change here keeps something that a prepared step could trust: an object, an address, an order.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from soma_lightning import FusedAdamW
from soma_lightning.optim.control import GradientMark
from soma_lightning.optim.triton_step import TritonStep

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16

Make = Callable[..., FusedAdamW]


@pytest.fixture(params=["reference", "triton"])
def make(request: pytest.FixtureRequest, device: torch.device) -> Make:
    """FusedAdamW that steps in one of its ways; `device` makes sure that the kernels can run."""

    def fused(params: Any, **settings: Any) -> FusedAdamW:
        return FusedAdamW(params, implementation=request.param, **settings)

    return fused


def weights(device: torch.device, size: int = 64, dtype: torch.dtype = FP32) -> nn.Parameter:
    return nn.Parameter(torch.linspace(-1, 1, size, device=device).to(dtype))


def step_with(optimizer: FusedAdamW, param: nn.Parameter, value: float = 1.0) -> None:
    param.grad = torch.full_like(param, value)
    optimizer.step()


# ---------------------------------------------------------------------- parameters


def test_gradients_may_get_another_dtype_later(device: torch.device, make: Make) -> None:
    param = weights(device, dtype=BF16)
    optimizer = make([param], state_dtype=FP32, weight_decay=0.0)
    step_with(optimizer, param)
    optimizer.zero_grad()
    param.grad_dtype = FP32
    param.grad = torch.ones(64, device=device)
    optimizer.step()
    assert optimizer.last_grad_norm.item() == 8.0
    assert torch.allclose(optimizer.state[param]["exp_avg"], torch.full((64,), 0.19, device=device))


def test_another_dtype_at_the_same_address_is_noticed(device: torch.device, make: Make) -> None:
    """fp16 to fp32 to bf16 can end in the memory where it began."""
    param = weights(device, dtype=FP16)
    optimizer = make([param], lr=0.125, weight_decay=0.0, state_dtype=FP32)
    step_with(optimizer, param)
    values = param.detach().clone()
    param.grad = None
    param.data = param.data.view(BF16).copy_(values)
    before = param.detach().float()
    step_with(optimizer, param)
    assert optimizer.last_grad_norm.item() == 8.0
    assert torch.allclose(before - param.float(), torch.full((64,), 0.125, device=device), atol=5e-3)


def test_another_dtype_under_gradients_that_do_not_follow_is_noticed(device: torch.device, make: Make) -> None:
    param = weights(device, dtype=FP16)
    param.grad_dtype = FP32
    optimizer = make([param], lr=0.125, weight_decay=0.0, state_dtype=FP32)
    param.grad = torch.ones(64, device=device)
    optimizer.step()
    param.data = param.data.view(BF16).copy_(param.detach().clone())
    before = param.detach().float()
    optimizer.step()
    assert torch.allclose(before - param.float(), torch.full((64,), 0.125, device=device), atol=5e-3)


def test_a_parameter_cut_short_in_place_is_refused(device: torch.device, make: Make) -> None:
    """The part starts where the whole did: a step by the old size would write behind the parameter's end."""
    param = weights(device)
    optimizer = make([param])
    step_with(optimizer, param)
    whole = param.data
    kept = whole.clone()
    param.grad = None
    param.data = whole[:32]
    with pytest.raises(ValueError, match=r"parameter of shape \(32,\) has 'exp_avg' of shape \(64,\)"):
        step_with(optimizer, param)
    assert torch.equal(whole, kept)


def test_a_parameter_that_became_fp32_loses_its_master(device: torch.device, make: Make) -> None:
    """The old master would win over every value that the parameter is given from then on."""
    param = weights(device, dtype=BF16)
    optimizer = make([param], master_weights=True, weight_decay=0.0)
    step_with(optimizer, param)
    param.grad = None
    param.data = param.data.float()
    with torch.no_grad():
        param.fill_(100.0)
    step_with(optimizer, param)
    assert param.min().item() == pytest.approx(100.0, abs=0.01)
    assert set(optimizer.state[param]) == {"step", "exp_avg", "exp_avg_sq"}


def test_parameters_cut_from_one_buffer_keep_their_plan(device: torch.device) -> None:
    """They share a version counter, which moves once for each of them."""
    flat = torch.linspace(-1, 1, 96, device=device).bfloat16()
    params = [nn.Parameter(part) for part in (flat[:32], flat[32:64], flat[64:])]
    optimizer = FusedAdamW(params, implementation="triton", master_weights=True)
    for _ in range(3):
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
    path = optimizer._control.path
    assert isinstance(path, TritonStep)
    assert path.plans_made == 1
    with torch.no_grad():
        flat.zero_()
    for param in params:
        param.grad = torch.zeros_like(param)
    optimizer.step()
    assert not optimizer.state[params[0]]["soma_master"].abs().gt(0.01).any(), "a change of the buffer is noticed"


def test_expanded_parameters_are_refused(device: torch.device, make: Make) -> None:
    with pytest.raises(ValueError, match=r"expanded parameter \(shape \(4, 8\), strides \(1, 0\); clone it\)"):
        make([nn.Parameter(torch.zeros(4, 1, device=device).expand(4, 8))])


class Divided(nn.Parameter):
    """Looks like a DTensor of two processes."""

    device_mesh = SimpleNamespace(size=lambda: 2)


@pytest.mark.parametrize("late", [False, True])
def test_divided_parameters_need_an_owner(device: torch.device, make: Make, late: bool) -> None:
    """Without one, every process would clip by the norm of its own part."""
    plain, divided = weights(device), Divided(torch.ones(4, device=device))
    optimizer = make([plain])
    if late:
        step_with(optimizer, plain)
    optimizer.add_param_group({"params": [divided]})
    divided.grad = torch.ones_like(divided)
    before = plain.detach().clone()
    with pytest.raises(ValueError, match=r"parameter 1 .*is divided among 2 processes; set FusedAdamW.ownership"):
        step_with(optimizer, plain)
    assert torch.equal(plain, before)


# ---------------------------------------------------------------------- state


def test_state_moved_through_data_is_found(device: torch.device, make: Make) -> None:
    """`value.data = value.data.to(device)` over a state is how many programs offload it: the objects stay."""
    param = weights(device, dtype=BF16)
    optimizer = make([param], master_weights=True)
    step_with(optimizer, param)
    for value in optimizer.state[param].values():
        value.data = value.data.clone()
    before = {key: value.clone() for key, value in optimizer.state[param].items()}
    step_with(optimizer, param)
    for key, value in optimizer.state[param].items():
        assert not torch.equal(value, before[key]), key
    assert optimizer.state[param]["step"].item() == 2.0


def test_a_master_of_another_dtype_is_converted(device: torch.device, make: Make) -> None:
    param = weights(device, dtype=BF16)
    optimizer = make([param], master_weights=True, weight_decay=0.0)
    step_with(optimizer, param)
    state = optimizer.state[param]
    exact = state["soma_master"].clone()
    state["soma_master"] = exact.double()
    step_with(optimizer, param)
    assert state["soma_master"].dtype == FP32
    assert torch.allclose(state["soma_master"], exact - 1e-3, atol=1e-5)


def swapped(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    return {**state_dict, "state": {0: state_dict["state"][1], 1: state_dict["state"][0]}}


def test_a_hook_that_rewrites_the_loaded_state_has_the_last_word(device: torch.device, make: Make) -> None:
    a, b = weights(device, dtype=BF16), weights(device, dtype=BF16)
    saved = make([a, b], master_weights=True)
    a.grad, b.grad = torch.full_like(a, 1.001), torch.full_like(b, -3.003)
    saved.step()
    loaded = make([b, a], master_weights=True)
    loaded.register_load_state_dict_pre_hook(swapped)
    seen: list[Tensor] = []
    loaded.register_load_state_dict_post_hook(lambda optimizer: seen.append(optimizer.state[a]["exp_avg"]))
    loaded.load_state_dict(copy.deepcopy(saved.state_dict()))
    for param in (a, b):
        for key, value in saved.state[param].items():
            assert torch.equal(loaded.state[param][key], value), key
    assert seen[0].dtype == FP32, "a hook after loading sees what was loaded"
    assert len(loaded._optimizer_load_state_dict_pre_hooks) == len(loaded._optimizer_load_state_dict_post_hooks) == 1


def test_a_hook_that_hands_over_an_unsupported_state_is_caught_before_anything_changes(
    device: torch.device, make: Make
) -> None:
    param = weights(device)
    optimizer = make([param])
    step_with(optimizer, param)
    state = copy.deepcopy(optimizer.state_dict())

    def with_amsgrad(_: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        return {**state_dict, "param_groups": [{**group, "amsgrad": True} for group in state_dict["param_groups"]]}

    optimizer.register_load_state_dict_pre_hook(with_amsgrad)
    before = optimizer.state[param]["exp_avg"]
    with pytest.raises(ValueError, match="cannot continue a state that was saved with amsgrad=True"):
        optimizer.load_state_dict(state)
    assert optimizer.state[param]["exp_avg"] is before
    assert len(optimizer._optimizer_load_state_dict_pre_hooks) == 1
    assert not optimizer._optimizer_load_state_dict_post_hooks


def test_a_state_of_another_optimizer_is_refused_by_name(device: torch.device, make: Make) -> None:
    param = weights(device)
    momentum = torch.optim.SGD([param], momentum=0.9)
    param.grad = torch.ones_like(param)
    momentum.step()
    optimizer = make([param])
    with pytest.raises(ValueError, match="whose groups have no betas, eps; it was saved by another kind of optimizer"):
        optimizer.load_state_dict(momentum.state_dict())
    optimizer.state[param] = momentum.state[param]
    match = r"shape \(64,\) has 'momentum_buffer' but no 'step', 'exp_avg', 'exp_avg_sq'; it was saved by another kind"
    with pytest.raises(ValueError, match=match):
        optimizer.step()


@pytest.mark.parametrize("limit", [-1.0, 0.0, float("nan")])
def test_a_limit_of_a_group_that_makes_no_sense_later_is_refused(
    device: torch.device, make: Make, limit: float
) -> None:
    """A negative one would turn every gradient around."""
    a, b = weights(device), weights(device)
    optimizer = make([{"params": [a]}, {"params": [b]}])
    step_with(optimizer, b)
    before = b.detach().clone()
    optimizer.param_groups[1]["max_norm"] = limit
    with pytest.raises(ValueError, match=f"max_norm={limit} of parameter group 1 must be positive"):
        optimizer.step()
    assert torch.equal(b, before)


# ---------------------------------------------------------------------- gradients


def test_statistics_of_a_parameter_in_another_group_are_taken_again(device: torch.device, make: Make) -> None:
    """The gradients and their order are the same, and so are the limits; only who is clipped with whom is not."""
    a, b, c = (weights(device, 4) for _ in range(3))
    optimizer = make([{"params": [a, b]}, {"params": [c], "max_norm": 1.0}], lr=0.0)
    for param in (a, b, c):
        param.grad = torch.ones_like(param)  # norm 2
    optimizer.grad_norm()
    optimizer.param_groups[1]["params"].insert(0, optimizer.param_groups[0]["params"].pop())
    optimizer.step()
    used = [optimizer.state[param]["exp_avg"].norm().item() / 0.1 for param in (a, b, c)]
    assert used == pytest.approx([2.0, 0.5**0.5, 0.5**0.5], rel=1e-5)


def test_asking_for_the_norm_keeps_no_gradient_alive(device: torch.device, make: Make) -> None:
    param = weights(device)
    optimizer = make([param])
    step_with(optimizer, param)
    optimizer.grad_norm()
    gradient = weakref.ref(param.grad)
    optimizer.zero_grad()
    gc.collect()
    assert gradient() is None


def test_a_mark_tells_gradients_apart() -> None:
    param = nn.Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    mark = GradientMark.of([param.grad])
    gc.collect()
    assert mark.holds([param.grad])
    assert mark.shares_one_with([torch.ones(3), param.grad])
    param.grad.add_(1)
    assert not mark.holds([param.grad])
    assert mark.shares_one_with([param.grad])
    param.grad = torch.ones(3)
    assert not mark.holds([param.grad])
    assert not mark.shares_one_with([param.grad])


# ---------------------------------------------------------------------- settings at their ends


def test_parameters_that_share_memory_are_refused_by_kernels(device: torch.device) -> None:
    param = weights(device)
    tied, apart = nn.Parameter(param.data[10:20]), nn.Parameter(torch.ones(3, device=device))
    optimizer = FusedAdamW([param, tied, apart], implementation="triton")
    for p in (param, tied, apart):
        p.grad = torch.ones_like(p)
    with pytest.raises(ValueError, match=r"shapes \(64,\) and \(10,\) share memory; use one parameter in both places"):
        optimizer.step()


def test_without_a_first_moment_the_gradient_alone_decides(make: Make, device: torch.device) -> None:
    param = nn.Parameter(torch.zeros(3, device=device))
    optimizer = make([param], lr=1.0, betas=(0.0, 0.0), weight_decay=0.0)
    for value in (1e6, 1e-3):
        step_with(optimizer, param, value)
    assert optimizer.state[param]["exp_avg"].tolist() == pytest.approx([1e-3] * 3, rel=1e-6)
    assert param.tolist() == pytest.approx([-2.0] * 3, rel=1e-4)


def test_a_group_with_a_limit_is_not_clipped_by_value(make: Make, device: torch.device) -> None:
    param = weights(device)
    optimizer = make([{"params": [param], "max_norm": 0.5}])
    optimizer.clip(max_value=1.0)
    with pytest.raises(ValueError, match="max_value=1.0, but a parameter group has max_norm=0.5; clip by norm or by"):
        step_with(optimizer, param)
    assert not optimizer.state[param]


@pytest.mark.parametrize("setting", ["maximize", "amsgrad", "differentiable"])
def test_a_setting_that_is_switched_on_later_is_refused(make: Make, device: torch.device, setting: str) -> None:
    param = weights(device)
    optimizer = make([param])
    step_with(optimizer, param)
    kept = param.detach().clone()
    optimizer.param_groups[0][setting] = True
    with pytest.raises(ValueError, match=f"parameter group 0 has {setting}=True, which FusedAdamW does not support"):
        step_with(optimizer, param)
    assert torch.equal(param, kept)


@pytest.mark.parametrize(("setting", "value"), [("max_value", 1.0), ("master_weights", True), ("state_dtype", FP32)])
def test_settings_of_the_optimizer_are_refused_in_a_group(setting: str, value: object) -> None:
    with pytest.raises(
        ValueError, match=rf"group 0 has {setting}=.*, which is no setting of a group; give it to the op"
    ):
        FusedAdamW([{"params": [nn.Parameter(torch.ones(2))], setting: value}])


@pytest.mark.parametrize("value", ["False", "auto", None, 1])
def test_masters_are_wanted_or_not(value: Any) -> None:
    with pytest.raises(ValueError, match=f"master_weights={value!r} must be True or False"):
        FusedAdamW([nn.Parameter(torch.ones(2))], master_weights=value)


@pytest.mark.parametrize("limit", [-1.0, "1", True, float("nan")])
def test_a_limit_of_a_group_must_make_sense(limit: object) -> None:
    with pytest.raises(ValueError, match=f"max_norm={limit!r} of parameter group 0 must be positive; leave it out"):
        FusedAdamW([{"params": [nn.Parameter(torch.ones(2))], "max_norm": limit}])


def test_a_state_without_own_limits_takes_none_away(make: Make, device: torch.device) -> None:
    param = weights(device)
    stock = torch.optim.AdamW([param], lr=0.5)
    optimizer = make([{"params": [param], "max_norm": 0.25}])
    optimizer.load_state_dict(stock.state_dict())
    assert (optimizer.param_groups[0]["max_norm"], optimizer.param_groups[0]["lr"]) == (0.25, 0.5)
    other = make([{"params": [param], "max_norm": 3.0}])
    other.load_state_dict(optimizer.state_dict())
    assert other.param_groups[0]["max_norm"] == 0.25


def test_what_is_no_state_is_said(make: Make, device: torch.device) -> None:
    with pytest.raises(ValueError, match="it has no 'param_groups', so it is no optimizer's"):
        make([weights(device)]).load_state_dict(nn.Linear(2, 2).state_dict())


def test_a_limit_beyond_fp32_limits_nothing(make: Make, device: torch.device) -> None:
    params = [weights(device), weights(device)]
    for param, rule in zip(params, ({}, {"max_value": 1e300}), strict=True):
        optimizer = make([param])
        optimizer.clip(**rule)
        step_with(optimizer, param)
    assert torch.equal(*params)


def test_a_step_counter_of_one_element_is_a_number(make: Make, device: torch.device) -> None:
    param = weights(device)
    optimizer = make([param])
    step_with(optimizer, param)
    optimizer.state[param]["step"] = torch.ones(1)
    step_with(optimizer, param)
    assert optimizer.state[param]["step"].shape == ()
    assert optimizer.state[param]["step"].item() == 2.0


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_the_largest_magnitude_of_a_bad_gradient_is_not_a_number(make: Make, device: torch.device, bad: float) -> None:
    param = weights(device)
    optimizer = make([param])
    optimizer.norm_type = float("inf")
    step_with(optimizer, param, bad)
    assert optimizer.last_grad_norm.isnan()
    assert optimizer.skipped_steps.item() == 1


@pytest.mark.gpu
def test_a_captured_step_takes_its_own_statistics() -> None:
    """Those of a norm asked for before the capture would be replayed for whatever the gradients are then."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    param = weights(torch.device("cuda"))
    optimizer = FusedAdamW([param], implementation="triton")
    step_with(optimizer, param)
    optimizer.grad_norm()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    assert param.grad is not None
    param.grad.fill_(2.0)
    graph.replay()
    assert optimizer.last_grad_norm.item() == 16.0
    param.grad.fill_(float("nan"))
    graph.replay()
    assert optimizer.skipped_steps.item() == 1
    assert param.isfinite().all()


@pytest.mark.gpu
def test_a_captured_norm_is_not_taken_for_a_known_one() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    param = weights(torch.device("cuda"))
    optimizer = FusedAdamW([param], implementation="triton")
    step_with(optimizer, param)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        norm = optimizer.grad_norm()
    optimizer.step()  # nothing was replayed: the recorded norm has no value yet
    assert optimizer.last_grad_norm.item() == 8.0
    graph.replay()
    assert norm.item() == 8.0
