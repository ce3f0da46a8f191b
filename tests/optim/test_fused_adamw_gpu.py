"""FusedAdamW on one CUDA device: never waiting for it, inside CUDA graphs, in every variant, and for fp64 in torch."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR

from soma_kernels.testing import assert_close
from soma_lightning import FP32MasterAdamW, FusedAdamW
from soma_lightning.optim.triton_step import TritonStep

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SHAPES = [(64, 33), (33,), (0, 7), (5, 3, 2), ()]
FP32, BF16, FP16, FP64 = torch.float32, torch.bfloat16, torch.float16, torch.float64

#: Parameter dtypes of one optimizer and its settings: every kind of launch there is.
VARIANTS: dict[str, tuple[Sequence[torch.dtype], dict[str, Any]]] = {
    "fp32": ([FP32], {}),
    "bf16": ([BF16], {}),
    "fp16": ([FP16], {}),
    "bf16, fp32 moments": ([BF16], {"state_dtype": FP32}),
    "bf16, masters": ([BF16], {"master_weights": True}),
    "mixed, masters": ([FP32, BF16, FP16], {"master_weights": True}),
    "fp64 in torch": ([FP64], {}),
}
RULES: dict[str, dict[str, Any]] = {
    "no rule": {},
    "norm": {"max_norm": 1.0},
    "inf norm": {"max_norm": 0.5, "norm_type": math.inf},
    "value": {"max_value": 0.1},
    "normalizer": {"max_norm": 1.0, "normalizer": 3.0},
}


def parameters(*dtypes: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [
        nn.Parameter(torch.randn(shape, generator=generator).to("cuda", dtype)) for dtype in dtypes for shape in SHAPES
    ]


def gradients(params: Sequence[Tensor], step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(p.shape, generator=generator).to("cuda", p.dtype) for p in params]


def set_gradients(params: Sequence[nn.Parameter], step: int) -> None:
    for p, grad in zip(params, gradients(params, step), strict=True):
        p.grad = grad


def everything(params: Sequence[nn.Parameter], optimizer: FusedAdamW) -> list[Tensor]:
    states = [value for p in params for _, value in sorted(optimizer.state[p].items())]
    return [t.detach().clone() for t in (*params, *states)]


def equal(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.fixture
def forbidding() -> Iterator[Callable[[bool], None]]:
    """Call it with True: from then on, waiting for the device is an error."""
    yield lambda on: torch.cuda.set_sync_debug_mode("error" if on else "default")
    torch.cuda.set_sync_debug_mode("default")


# ---------------------------------------------------------------------- values


@pytest.mark.parametrize("tensor_lr", [False, True])
@pytest.mark.parametrize("dtype", [FP32, FP64])
def test_ten_clipped_steps_equal_torch(dtype: torch.dtype, tensor_lr: bool) -> None:
    ours, theirs = parameters(dtype), parameters(dtype)
    lr = torch.tensor(0.05, device="cuda", dtype=FP64) if tensor_lr else 0.05
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
    expected = (
        "Triton kernels" if dtype == FP32 else "plain torch (a parameter of shape (64, 33) has dtype torch.float64)"
    )
    assert fused.path_description == expected


def test_masters_are_as_good_as_an_fp32_run() -> None:
    low, full, exact = parameters(BF16), parameters(FP32), parameters(FP64)
    for a, b, c in zip(low, full, exact, strict=True):
        b.data.copy_(a.data)
        c.data.copy_(a.data)
    masters, plain, truth = FP32MasterAdamW(low, lr=1e-4), AdamW(full, lr=1e-4, foreach=True), AdamW(exact, lr=1e-4)
    for step in range(20):
        set_gradients(low, step)
        for a, b, c in zip(low, full, exact, strict=True):
            assert a.grad is not None
            b.grad, c.grad = a.grad.float(), a.grad.double()
        for optimizer in (masters, plain, truth):
            optimizer.step()
    assert all(torch.equal(p, masters.state[p]["soma_master"].bfloat16()) for p in low)
    ours, bar, truth64 = (
        torch.cat([t.detach().flatten() for t in tensors])
        for tensors in ([masters.state[p]["soma_master"] for p in low], full, exact)
    )
    assert_close("masters", ours, truth64, bar)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_nonfinite_step_changes_no_bit(variant: str, bad: float) -> None:
    dtypes, settings = VARIANTS[variant]
    params = parameters(*dtypes)
    fused = FusedAdamW(params, **settings)
    set_gradients(params, 0)
    fused.step()
    before = everything(params, fused)
    set_gradients(params, 1)
    assert params[1].grad is not None
    params[1].grad[3] = bad
    fused.clip(max_norm=1.0)
    fused.step()
    assert equal(before, everything(params, fused))
    assert (fused.skipped_steps.item(), fused.consecutive_skips.item()) == (1, 1)
    assert fused.first_nonfinite_parameter() is params[1]
    assert {s["step"].item() for s in fused.state.values()} == {1.0}


# ---------------------------------------------------------------------- the host never waits


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_no_step_waits_for_the_device(forbidding: Callable[[bool], None], variant: str, rule: str) -> None:
    dtypes, settings = VARIANTS[variant]
    params = parameters(*dtypes)
    lr = torch.tensor(0.1, device="cuda")
    steps = [gradients(params, step) for step in range(4)]
    steps[2][0][0, 0] = math.nan
    normalizer = torch.tensor(3.0, device="cuda")
    fused = FusedAdamW(params, lr=lr, **settings)
    for step, grads in enumerate(steps):
        for p, grad in zip(params, grads, strict=True):
            p.grad = grad
        forbidding(True)  # the first step, which prepares, included
        how = dict(RULES[rule])
        if "normalizer" in how and step % 2:
            how["normalizer"] = normalizer
        fused.clip(**how)
        if step == 3:
            fused.grad_norm()
        fused.step()
        fused.zero_grad()
        forbidding(False)
    assert fused.skipped_steps.item() == 1
    assert fused.state[params[0]]["step"].item() == 3.0


def test_a_step_with_gaps_frozen_and_absent_parameters_does_not_wait(forbidding: Callable[[bool], None]) -> None:
    params = parameters(BF16)
    params.append(nn.Parameter(torch.randn(6, 9, device="cuda")[:, :5].t()))
    fused = FP32MasterAdamW(params)
    for step in range(4):
        set_gradients(params, step)
        params[step % 2].grad = None
        params[3].requires_grad_(step != 2)
        forbidding(True)
        fused.step()
        forbidding(False)
    assert fused.state[params[5]]["step"].item() == 4.0


def test_a_scheduler_on_a_device_tensor_does_not_make_the_step_wait(forbidding: Callable[[bool], None]) -> None:
    ours, theirs = parameters(FP32), parameters(FP32)
    fused, stock = FusedAdamW(ours, lr=torch.tensor(0.1, device="cuda")), AdamW(theirs, lr=0.1)
    schedulers = [CosineAnnealingLR(o, 5) for o in (fused, stock)]
    for step in range(5):
        set_gradients(ours, step)
        set_gradients(theirs, step)
        forbidding(True)
        fused.step()
        forbidding(False)
        stock.step()
        for scheduler in schedulers:
            scheduler.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_a_checkpoint_with_steps_on_the_cpu_continues() -> None:
    ours, theirs = parameters(FP32), parameters(FP32)
    stock, fused = AdamW(theirs), FusedAdamW(ours)
    for step in range(3):
        set_gradients(theirs, step)
        stock.step()
    for a, b in zip(ours, theirs, strict=True):
        a.data.copy_(b.data)
    fused.load_state_dict(copy.deepcopy(stock.state_dict()))
    for step in range(3, 6):
        set_gradients(ours, step)
        set_gradients(theirs, step)
        fused.step()
        stock.step()
    assert fused.state[ours[0]]["step"].item() == 6.0
    assert fused.state[ours[0]]["step"].device.type == "cuda"
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_the_current_device_need_not_be_the_parameters_one() -> None:
    params = [nn.Parameter(torch.ones(5, device="cuda:1")), nn.Parameter(torch.ones(3, device="cuda:1"))]
    fused = FusedAdamW(params, lr=0.5, weight_decay=0.0)
    with torch.cuda.device(0):
        for p in params:
            p.grad = torch.ones_like(p)
        fused.clip(max_norm=1.0)
        fused.step()
        assert torch.cuda.current_device() == 0
    assert fused.last_grad_norm.device == torch.device("cuda:1")
    assert all(torch.allclose(p, torch.full_like(p, 0.5)) for p in params)


def test_gradients_of_another_stream_are_waited_for() -> None:
    """The step runs on the current stream, like every operation of torch."""
    ours, theirs = parameters(FP32), parameters(FP32)
    fused, stock = FusedAdamW(ours), AdamW(theirs)
    stream = torch.cuda.Stream()
    for step in range(3):
        grads = gradients(ours, step)
        for q, grad in zip(theirs, grads, strict=True):
            q.grad = grad.clone()
        stock.step()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for p, grad in zip(ours, grads, strict=True):
                torch.cuda._sleep(1_000_000)
                p.grad = grad * 1.0
            fused.step()
        torch.cuda.current_stream().wait_stream(stream)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


# ---------------------------------------------------------------------- CUDA graphs


class Captured:
    """One optimizer step in a CUDA graph that reads its gradients from fixed memory."""

    def __init__(self, params: list[nn.Parameter], fused: FusedAdamW, rule: dict[str, Any]) -> None:
        self.params, self.fused = params, fused
        for p in params:
            p.grad = torch.zeros_like(p)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            fused.clip(**rule)
            fused.step()

    def step(self, grads: Sequence[Tensor]) -> None:
        for p, grad in zip(self.params, grads, strict=True):
            assert p.grad is not None
            p.grad.copy_(grad)
        self.graph.replay()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("variant", [v for v in VARIANTS if v != "fp64 in torch"])
def test_replays_are_eager_steps_with_a_moving_learning_rate(variant: str, rule: str) -> None:
    dtypes, settings = VARIANTS[variant]
    eager, captured = parameters(*dtypes), parameters(*dtypes)
    lr = torch.tensor(0.1, device="cuda")
    one = FusedAdamW(eager, lr=lr.item(), **settings)
    two = FusedAdamW(captured, lr=lr, **settings)
    for params, optimizer in ((eager, one), (captured, two)):
        set_gradients(params, 0)
        optimizer.clip(**RULES[rule])
        optimizer.step()
    replays = Captured(captured, two, RULES[rule])
    assert equal(everything(eager, one), everything(captured, two)), "a capture runs nothing"
    for step in range(1, 6):
        grads = gradients(eager, step)
        if step == 3:
            grads[0][1, 1] = math.nan
        lr.fill_(0.1 / step)
        one.param_groups[0]["lr"] = lr.item()
        for p, grad in zip(eager, grads, strict=True):
            p.grad = grad
        one.clip(**RULES[rule])
        one.step()
        replays.step(grads)
        assert torch.equal(one.last_grad_norm, two.last_grad_norm) or step == 3
        counts = (two.skipped_steps.item(), two.consecutive_skips.item())
        assert counts == (one.skipped_steps.item(), one.consecutive_skips.item())
        assert counts == (int(step >= 3), int(step == 3))
    assert equal(everything(eager, one), everything(captured, two))


def test_eager_steps_between_replays_disturb_nothing() -> None:
    eager, captured = parameters(FP32), parameters(FP32)
    one, two = FusedAdamW(eager), FusedAdamW(captured)
    for params, optimizer in ((eager, one), (captured, two)):
        set_gradients(params, 0)
        optimizer.step()
    replays = Captured(captured, two, {})
    fixed = [p.grad for p in captured]
    for step in range(1, 7):
        grads = gradients(eager, step)
        for p, grad in zip(eager, grads, strict=True):
            p.grad = grad
        one.step()
        if step % 2:
            for p, grad in zip(captured, grads, strict=True):
                p.grad = grad.clone()
            two.step()
        else:
            for p, grad in zip(captured, fixed, strict=True):
                p.grad = grad
            replays.step(grads)
    assert equal(everything(eager, one), everything(captured, two))


def test_a_bad_replay_names_its_parameter() -> None:
    params = parameters(FP32)
    fused = FusedAdamW(params)
    set_gradients(params, 0)
    fused.step()
    replays = Captured(params, fused, {"max_norm": 1.0})
    grads = gradients(params, 1)
    grads[3][0, 0, 0] = math.inf
    replays.step(grads)
    assert fused.first_nonfinite_parameter() is params[3]
    replays.step(gradients(params, 2))
    assert fused.first_nonfinite_parameter() is None
    assert (fused.skipped_steps.item(), fused.consecutive_skips.item()) == (1, 0)


def test_a_training_step_with_its_backward_can_be_captured() -> None:
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).cuda() for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [FusedAdamW(model.parameters(), lr=0.1) for model in models]
    static = torch.zeros(16, 6, device="cuda")

    def train(position: int, x: Tensor) -> None:
        models[position](x).square().sum().backward()
        optimizers[position].clip(max_norm=1.0)
        optimizers[position].step()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        train(1, static)
    side.synchronize()
    train(0, static)
    optimizers[1].zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        train(1, static)
    for _ in range(4):
        x = torch.randn(16, 6, device="cuda")
        optimizers[0].zero_grad()
        train(0, x)
        static.copy_(x)
        graph.replay()
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("disturbance", ["first", "state", "group"])
def test_a_capture_that_would_have_to_prepare_is_refused(disturbance: str) -> None:
    params = parameters(FP32)
    fused = FusedAdamW(params)
    set_gradients(params, 0)
    if disturbance != "first":
        fused.step()
    if disturbance == "state":
        fused.load_state_dict(fused.state_dict())
    if disturbance == "group":
        fused.add_param_group({"params": [nn.Parameter(torch.ones(3, device="cuda"))]})
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    before = [p.detach().clone() for p in params]
    with pytest.raises(RuntimeError, match="cannot be captured in a CUDA graph; run one step before the capture"):  # noqa: SIM117
        with torch.cuda.graph(graph):
            fused.step()
    torch.cuda.synchronize()
    assert equal(before, [p.detach() for p in params])
    fused.step()  # an eager step still works
    assert fused.state[params[0]]["step"].item() == (1.0 if disturbance == "first" else 2.0)


# ---------------------------------------------------------------------- size


def test_six_thousand_parameters_are_one_plan() -> None:
    generator = torch.Generator(device="cuda").manual_seed(0)
    shapes = [(1 + i % 37, 1 + i % 11) for i in range(6000)]
    ours = [nn.Parameter(torch.randn(shape, generator=generator, device="cuda")) for shape in shapes]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    fused, stock = FusedAdamW(ours, lr=0.01), AdamW(theirs, lr=0.01, fused=True)
    for _ in range(3):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn(p.shape, generator=generator, device="cuda")
            q.grad = p.grad.clone()
        norm = nn.utils.clip_grad_norm_(theirs, 1.0)
        stock.step()
        fused.clip(max_norm=1.0)
        fused.step()
        assert fused.last_grad_norm.item() == pytest.approx(norm.item(), rel=1e-5)
    a, b = (torch.cat([p.detach().flatten() for p in params]) for params in (ours, theirs))
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    path = fused._control.path
    assert isinstance(path, TritonStep)
    assert path.plans_made == 1


@pytest.mark.slow
def test_a_parameter_past_two_to_the_31_elements() -> None:
    if torch.cuda.get_device_properties(0).total_memory < 40 * 2**30:
        pytest.skip("needs 40 GiB of device memory")
    size, edge = 2**31 + 1029, 4096
    param = nn.Parameter(torch.zeros(size, dtype=BF16, device="cuda"))
    param.grad = torch.zeros_like(param)
    places = [slice(0, edge), slice(size - edge, size)]
    for place in places:
        param.data[place].normal_()
        param.grad[place].normal_()
    expected = []
    for place in places:
        exact, low = (nn.Parameter(param.detach()[place].to(d)) for d in (FP64, BF16))
        exact.grad, low.grad = param.grad[place].double(), param.grad[place].clone()
        for twin in (exact, low):
            AdamW([twin], lr=0.1, fused=True).step()
        expected.append((exact.detach(), low.detach()))
    FusedAdamW([param], lr=0.1).step()
    for place, (exact, low) in zip(places, expected, strict=True):
        assert_close(f"parameter at {place}", param.detach()[place], exact, low)
    assert not param.detach()[size // 2 : size // 2 + 1000].any()
