"""The pure functions of one optimizer step against float64 truth and torch.optim.AdamW."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from soma_kernels.optim import reference
from soma_kernels.optim.reference import adamw_step_, decide, grad_stats

SHAPES = [(3, 4), (0, 5), (7,), (), (2, 3, 2)]
HYPER = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1}


def tensors(seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def flat64(values: list[Tensor]) -> Tensor:
    return torch.cat([v.double().flatten() for v in values])


def bits(values: list[Tensor]) -> list[Tensor]:
    return [v.clone().view(torch.int16 if v.element_size() == 2 else torch.int32) for v in values]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_the_norm_is_that_of_all_elements_in_fp32(dtype: torch.dtype, norm_type: float) -> None:
    grads = tensors(0, dtype)
    norm = decide(grad_stats(grads, norm_type=norm_type)).norm
    truth = torch.linalg.vector_norm(flat64(grads), norm_type)
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(truth.item(), rel=3e-7)


def test_gradients_of_several_dtypes_are_summed_together() -> None:
    grads = [torch.tensor([3.0]), torch.tensor([4.0], dtype=torch.bfloat16), torch.tensor([12.0], dtype=torch.float64)]
    stats = grad_stats(grads)
    assert stats.partials.tolist() == [9.0, 16.0, 144.0]
    assert stats.partials.dtype == torch.float64
    assert decide(stats).norm.item() == 13.0


def test_the_norm_of_only_empty_gradients_is_zero() -> None:
    for norm_type in (2.0, math.inf):
        decision = decide(grad_stats([torch.zeros(0, 3)], norm_type=norm_type), max_norm=1.0)
        assert (decision.norm.item(), decision.scale.item(), decision.take.item()) == (0.0, 1.0, True)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e20])
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
def test_a_nonfinite_or_overflowing_gradient_is_counted_and_located(bad: float, norm_type: float) -> None:
    grads = [torch.ones(3), torch.tensor([1.0, bad]), torch.ones(2)]
    stats = grad_stats(grads, norm_type=norm_type)
    overflows_only_when_squared = bad == 1e20 and norm_type == math.inf
    assert stats.nonfinite.item() == (0 if overflows_only_when_squared else 1)
    assert decide(stats).take.item() is overflows_only_when_squared
    assert stats.partials.isfinite().tolist() == [True, overflows_only_when_squared, True]


def test_an_unknown_norm_is_refused() -> None:
    with pytest.raises(ValueError, match="norm_type=1.0 is not supported; use 2.0 or inf"):
        grad_stats([torch.ones(1)], norm_type=1.0)


def test_the_clip_coefficient_is_the_one_of_torch() -> None:
    stats = grad_stats([torch.tensor([3.0, 4.0])])
    assert decide(stats, max_norm=1.0).scale.item() == pytest.approx(1.0 / (5.0 + 1e-6), rel=1e-7)
    assert decide(stats, max_norm=50.0).scale.item() == 1.0
    assert decide(stats).scale.item() == 1.0


def test_the_normalizer_divides_before_the_norm() -> None:
    stats = grad_stats([torch.tensor([3.0, 4.0])])
    stats.vector[1] = 10.0
    for limits in (0.25, [0.25]):
        decision = decide(stats, max_norm=limits, normalize=True)
        assert decision.norm.item() == pytest.approx(0.5)
        assert decision.scale.item() == pytest.approx(0.1 * 0.25 / 0.5, rel=1e-5)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("gradient", [0.0, 1.0])
def test_a_step_with_an_unusable_normalizer_is_not_taken(value: float, gradient: float) -> None:
    stats = grad_stats([torch.full((2,), gradient)])
    assert decide(stats, normalize=True).take
    stats.vector[1] = value
    assert not decide(stats, normalize=True).take


def test_a_sum_of_squares_that_overflows_over_all_gradients_is_not_taken() -> None:
    stats = grad_stats([torch.tensor([1.5e19]), torch.tensor([1.5e19])])  # 2.25e38 each; fp32 ends at 3.4e38
    assert stats.nonfinite == 0
    assert not decide(stats, max_norm=1.0).take


def run_steps(
    take: Tensor | None, *, steps: int, dtype: torch.dtype = torch.float32, **settings: object
) -> list[Tensor]:
    params = tensors(1, dtype)
    m, v = [torch.zeros_like(p) for p in params], [torch.zeros_like(p) for p in params]
    t = [torch.zeros(()) for _ in params]
    for i in range(steps):
        adamw_step_(params, tensors(10 + i, dtype), m, v, t, take=take, **{"lr": 0.05, **HYPER, **settings})  # type: ignore[arg-type]
    assert [s.item() for s in t] == [float(steps)] * len(t)
    return params


def torch_steps(*, steps: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    params = [torch.nn.Parameter(p) for p in tensors(1, dtype)]
    optimizer = torch.optim.AdamW(params, lr=0.05, weight_decay=0.1)
    for i in range(steps):
        for p, g in zip(params, tensors(10 + i, dtype), strict=True):
            p.grad = g
        optimizer.step()
    return [p.detach() for p in params]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_update_in_place_has_the_bits_of_torch(dtype: torch.dtype) -> None:
    for ours, theirs in zip(run_steps(None, steps=5, dtype=dtype), torch_steps(steps=5, dtype=dtype), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12), (torch.bfloat16, 2e-2)]
)
def test_the_update_decided_on_the_device_equals_torch(dtype: torch.dtype, tolerance: float) -> None:
    ours = run_steps(torch.tensor(True), steps=5, dtype=dtype)
    for a, b in zip(ours, torch_steps(steps=5, dtype=dtype), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def test_splitting_into_chunks_changes_no_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run_steps(torch.tensor(True), steps=3)
    monkeypatch.setattr(reference, "CHUNK_ELEMENTS", 8)
    for a, b in zip(whole, run_steps(torch.tensor(True), steps=3), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("take", [None, torch.tensor(True)])
def test_a_tensor_learning_rate_equals_a_number(take: Tensor | None) -> None:
    number = run_steps(take, steps=3)
    tensor = run_steps(take, steps=3, lr=torch.tensor(0.05, dtype=torch.float64))
    for a, b in zip(number, tensor, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_not_taken_on_the_device_changes_no_bit(dtype: torch.dtype) -> None:
    params = [torch.tensor([1.0, -0.0, 2.0], dtype=dtype)]
    moments = [[torch.tensor([0.5, -0.0, 0.25], dtype=dtype)], [torch.tensor([0.5, 0.0, 0.25], dtype=dtype)]]
    steps = [torch.tensor(3.0)]
    everything = [*params, *moments[0], *moments[1], *steps]
    before = bits(everything)
    grads = [torch.tensor([math.nan, math.inf, 1.0], dtype=dtype)]
    adamw_step_(params, grads, *moments, steps, lr=0.1, scale=torch.tensor(math.nan), take=torch.tensor(False), **HYPER)
    assert all(torch.equal(a, b) for a, b in zip(bits(everything), before, strict=True))


@pytest.mark.parametrize("take", [None, torch.tensor(True)])
def test_scale_and_clamp_apply_to_copies_of_the_gradients(take: Tensor | None) -> None:
    grad = torch.tensor([1.0, -8.0, 4.0])
    plain, scaled = [torch.zeros(3)], [torch.zeros(3)]
    for params, g, extra in (
        (plain, torch.tensor([0.5, -1.5, 1.5]), {}),
        (scaled, grad, {"scale": 0.5, "max_value": 1.5}),
    ):
        adamw_step_(
            params, [g], [torch.zeros(3)], [torch.zeros(3)], [torch.zeros(())], lr=0.1, take=take, **HYPER, **extra
        )  # type: ignore[arg-type]
    assert torch.equal(plain[0], scaled[0])
    assert grad.tolist() == [1.0, -8.0, 4.0]


@pytest.mark.parametrize("take", [None, torch.tensor(True)])
def test_a_master_moves_where_the_parameter_cannot(take: Tensor | None) -> None:
    param, master = torch.ones(4, dtype=torch.bfloat16), torch.ones(4)
    m, v, t = torch.zeros(4), torch.zeros(4), torch.zeros(())
    for _ in range(3):
        adamw_step_(
            [param],
            [torch.ones(4, dtype=torch.bfloat16)],
            [m],
            [v],
            [t],
            lr=1e-4,
            beta1=0.9,
            beta2=0.999,
            eps=1e-8,
            weight_decay=0.0,
            masters=[master],
            take=take,
        )
    assert master.tolist() == pytest.approx([1 - 3e-4] * 4, rel=1e-6)
    assert torch.equal(param, master.bfloat16())


def test_a_gradient_with_another_memory_layout_is_used_right() -> None:
    grad = torch.arange(6.0).reshape(2, 3)
    results = []
    for g in (grad, grad.t().contiguous().t()):
        param, m, v = torch.ones(2, 3), torch.zeros(2, 3), torch.zeros(2, 3)
        adamw_step_([param], [g], [m], [v], [torch.zeros(())], lr=0.1, take=torch.tensor(True), **HYPER)
        results.append(param)
    assert torch.equal(*results)


@pytest.mark.parametrize("scale", [0.5, torch.tensor(0.5)])
def test_scaling_keeps_the_dtype_of_a_scalar_gradient(scale: float | Tensor) -> None:
    param, m, v = (torch.ones((), dtype=torch.bfloat16) for _ in range(3))
    grad = torch.tensor(2.0, dtype=torch.bfloat16)
    adamw_step_([param], [grad], [m], [v], [torch.zeros(())], lr=0.5, scale=scale, take=torch.tensor(True), **HYPER)
    assert param.item() < 1.0
    assert grad.item() == 2.0
