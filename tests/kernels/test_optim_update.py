"""Pass 2 of the optimizer step (`soma_kernels.optim.adamw_step`) against AdamW in float64 and against torch's own."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from soma_kernels.optim.plan import EMPTY_GRADIENT, Hyper, StateTable, StepTable, Tiles, Variant, WorkList
from soma_kernels.testing import TOLERANCE, assert_close, relative_rms

pytest.importorskip("triton")

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
#: What a training run uses: (parameter, gradient, moments, master).
COMMON = (
    Variant(FP32, FP32, FP32, False),
    Variant(BF16, BF16, BF16, False),
    Variant(FP16, FP16, FP16, False),
    Variant(BF16, BF16, FP32, False),
    Variant(BF16, BF16, FP32, True),
    Variant(BF16, FP32, FP32, True),
    Variant(FP16, FP16, FP32, True),
    Variant(FP32, BF16, FP32, False),
)
#: Everything that the kernels accept.
ALL = tuple(
    Variant(param, grad, moment, master)
    for param, grad in itertools.product((FP32, BF16, FP16), repeat=2)
    for moment, master in ((param, False), (FP32, False), (FP32, True))
    if param != FP32 or (moment, master) == (FP32, False)
)
ALL = tuple(dict.fromkeys(ALL))
HYPER = Hyper(lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
#: Elements on each side of a tensor that must keep their values.
GUARD = 16
CANARY = -77.0


class Guarded:
    """A tensor of `values` at an element offset of a larger buffer, with canaries around it."""

    def __init__(self, values: Tensor, offset: int) -> None:
        self.start = GUARD + offset
        self.buffer = torch.full((self.start + values.numel() + GUARD,), CANARY, dtype=values.dtype).to(values.device)
        self.tensor = self.buffer[self.start : self.start + values.numel()].copy_(values)

    def assert_intact(self, name: str) -> None:
        outside = torch.cat([self.buffer[: self.start], self.buffer[self.start + self.tensor.numel() :]])
        assert (outside == CANARY).all(), f"{name}: written outside the tensor"


class Problem:
    """n tensors with everything that one step reads and writes, each in a guarded buffer of its own."""

    def __init__(
        self,
        sizes: Sequence[int],
        variants: Sequence[Variant],
        device: torch.device,
        tiles: Tiles | None,
        *,
        offset: int = 0,
        seed: int = 0,
        groups: Sequence[int] | None = None,
        num_groups: int = 1,
        clips: Sequence[int] | None = None,
        num_clips: int = 1,
        start: float | None = None,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.sizes, self.variants, self.device = sizes, variants, device
        self.groups, self.clips = groups or [0] * len(sizes), clips or [0] * len(sizes)
        self.params, self.grads, self.exp_avgs, self.exp_avg_sqs = [], [], [], []
        self.masters: list[Guarded | None] = []
        for size, variant in zip(sizes, variants, strict=True):
            values = torch.randn(size, generator=generator) if start is None else torch.full((size,), start)
            values = values.to(device, variant.param)
            self.params.append(Guarded(values, offset))
            self.grads.append(Guarded(torch.zeros(size, dtype=variant.grad, device=device), offset))
            for column in (self.exp_avgs, self.exp_avg_sqs):
                column.append(Guarded(torch.zeros(size, dtype=variant.moment, device=device), offset))
            self.masters.append(Guarded(values.float(), offset) if variant.master else None)
        self.steps = [torch.zeros((), device=device) for _ in sizes]
        self.counters = torch.zeros(2, dtype=torch.int64, device=device)
        self.work = WorkList.build(
            sizes, variants, device, groups=groups, num_groups=num_groups, clips=clips, num_clips=num_clips, tiles=tiles
        )
        self.table = StepTable(self.work)
        self.states = StateTable(*self._columns(), self.steps)
        self.num_clips = num_clips

    def _columns(self) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor | None]]:
        return (
            [p.tensor for p in self.params],
            [m.tensor for m in self.exp_avgs],
            [v.tensor for v in self.exp_avg_sqs],
            [None if w is None else w.tensor for w in self.masters],
        )

    def everything(self) -> list[Tensor]:
        """All that a step may write, gradients and step counters included."""
        written = [t for column in self._columns() for t in column if t is not None]
        return [*written, *self.steps, *(g.tensor for g in self.grads)]

    def bits(self) -> list[Tensor]:
        return [_as_integers(t).clone() for t in self.everything()]

    def fill_gradients(self, step: int, scale: float = 1.0) -> None:
        generator = torch.Generator().manual_seed(1000 + step)
        for g in self.grads:
            g.tensor.copy_(scale * torch.randn(g.tensor.shape, generator=generator))

    def step(
        self,
        hypers: Sequence[Hyper] = (HYPER,),
        *,
        max_norms: Sequence[float | None] | None = None,
        normalizer: float | None = None,
        max_value: float | None = None,
        norm_type: float = 2.0,
        absent: Sequence[int] = (),
    ) -> Tensor:
        from soma_kernels.optim.adamw_step import adamw_step_
        from soma_kernels.optim.grad_stats import grad_stats

        addresses = [g.tensor.data_ptr() if g.tensor.numel() else EMPTY_GRADIENT for g in self.grads]
        for i in absent:
            addresses[i] = 0
        self.table.write(np.array(addresses, dtype=np.int64), hypers, max_norms or [None] * self.num_clips)
        stats = grad_stats(self.work, self.table, norm_type=norm_type)
        if normalizer is not None:
            stats.vector[1] = normalizer
        return adamw_step_(
            self.work,
            self.states,
            self.table,
            stats,
            self.counters,
            normalize=normalizer is not None,
            max_value=max_value,
        )

    def assert_nothing_outside_was_written(self) -> None:
        for name in ("params", "grads", "exp_avgs", "exp_avg_sqs", "masters"):
            for i, guarded in enumerate(getattr(self, name)):
                if guarded is not None:
                    guarded.assert_intact(f"{name}[{i}]")


def _as_integers(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int32)


class Truth:
    """AdamW (Loshchilov and Hutter 2019, algorithm 2) in float64, by its formula."""

    def __init__(self, param: Tensor) -> None:
        self.param = param.double()
        self.exp_avg, self.exp_avg_sq = torch.zeros_like(self.param), torch.zeros_like(self.param)
        self.steps = 0

    def step(self, grad: Tensor, hyper: Hyper) -> None:
        self.steps += 1
        lr = float(hyper.lr)
        self.exp_avg = hyper.beta1 * self.exp_avg + (1 - hyper.beta1) * grad
        self.exp_avg_sq = hyper.beta2 * self.exp_avg_sq + (1 - hyper.beta2) * grad**2
        m_hat = self.exp_avg / (1 - hyper.beta1**self.steps)
        v_hat = self.exp_avg_sq / (1 - hyper.beta2**self.steps)
        self.param = self.param - lr * hyper.weight_decay * self.param - lr * m_hat / (v_hat.sqrt() + hyper.eps)


class TorchAdamW:
    """What torch does with the same dtypes: its AdamW in the moments' dtype, rounded into the parameter.

    In low precision its fused form, which rounds once; in fp32 its lists, which keep 1 - beta2 more exactly.
    """

    def __init__(self, param: Tensor, variant: Variant) -> None:
        self.variant, self.param = variant, param.clone()
        self.target = torch.nn.Parameter(self.param.to(variant.moment))
        self.optimizer = torch.optim.AdamW([self.target], fused=variant.moment != FP32, foreach=variant.moment == FP32)

    def step(self, grad: Tensor, hyper: Hyper) -> None:
        self.optimizer.param_groups[0].update(hyper._asdict(), betas=(hyper.beta1, hyper.beta2))
        self.target.grad = grad.to(self.variant.moment)
        if not self.variant.master:
            self.target.data.copy_(self.param)
        self.optimizer.step()
        self.param = self.target.detach().to(self.variant.param)

    def __getitem__(self, key: str) -> Tensor:
        return self.optimizer.state[self.target][key]


def clip_scales(problem: Problem, grads: Sequence[Tensor], limits: Sequence[float | None]) -> list[float]:
    """torch's clip coefficient of each tensor, from float64 norms of the clip groups."""
    scales = []
    for clip, limit in enumerate(limits):
        members = [g.flatten() for g, c in zip(grads, problem.clips, strict=True) if c == clip]
        norm = torch.cat(members).norm().item() if members else 0.0
        scales.append(1.0 if limit is None else min(1.0, limit / (norm + 1e-6)))
    return [scales[c] for c in problem.clips]


# ---------------------------------------------------------------------- against float64


@pytest.mark.usefixtures("unwritten_is_nan")
def test_a_hundred_steps_of_all_common_variants_in_one_call(device: torch.device, tiles: Tiles) -> None:
    """Two hyperparameter groups, two clip groups, clipping at work; the bar is torch with the same dtypes."""
    # The interpreter needs 20 ms for one tensor's step: there, what `test_every_combination` does with few steps too.
    variants = COMMON if device.type == "cuda" else [COMMON[i] for i in (0, 1, 3, 5)]
    sizes = [tiles.update_tile + 7 + i for i in range(len(variants))]
    groups = [i % 2 for i in range(len(variants))]
    problem = Problem(sizes, variants, device, tiles, groups=groups, num_groups=2, clips=groups, num_clips=2, offset=1)
    hypers = [HYPER, Hyper(lr=3e-3, beta1=0.8, beta2=0.99, eps=1e-6, weight_decay=0.0)]
    truths = [Truth(p.tensor) for p in problem.params]
    bars = [TorchAdamW(p.tensor, v) for p, v in zip(problem.params, variants, strict=True)]
    clipped = 0
    for step in range(100):
        problem.fill_gradients(step, scale=2.0 ** (step % 5 - 2))
        kept = [g.tensor.clone() for g in problem.grads]
        limits = [9.0, None if step % 2 else 3.0]
        norm = problem.step(hypers, max_norms=limits)
        grads = [g.double() for g in kept]
        assert norm.item() == pytest.approx(torch.cat(grads).norm().item(), rel=1e-6)
        scales = clip_scales(problem, grads, limits)
        clipped += sum(scale < 1 for scale in scales)
        for truth, bar, grad, scale, group in zip(truths, bars, grads, scales, groups, strict=True):
            truth.step(grad * scale, hypers[group])
            bar.step((grad * scale).float(), hypers[group])
        assert all(torch.equal(g.tensor, k) for g, k in zip(problem.grads, kept, strict=True))
    assert 0.1 < clipped / (100 * len(variants)) < 0.9
    assert problem.counters.tolist() == [0, 0]
    for i, (truth, bar, variant) in enumerate(zip(truths, bars, variants, strict=True)):
        name = f"{variant}"
        assert problem.steps[i].item() == 100
        assert_close(f"exp_avg of {name}", problem.exp_avgs[i].tensor, truth.exp_avg, bar["exp_avg"])
        assert_close(f"exp_avg_sq of {name}", problem.exp_avg_sqs[i].tensor, truth.exp_avg_sq, bar["exp_avg_sq"])
        assert_close(f"param of {name}", problem.params[i].tensor, truth.param, bar.param)
        master = problem.masters[i]
        if master is not None:
            assert_close(f"master of {name}", master.tensor, truth.param, bar.target)
            assert torch.equal(master.tensor.to(variant.param), problem.params[i].tensor)
    problem.assert_nothing_outside_was_written()


@pytest.mark.usefixtures("unwritten_is_nan")
def test_every_combination_of_dtypes_in_one_call(device: torch.device, tiles: Tiles) -> None:
    problem = Problem([tiles.update_tile + 3] * len(ALL), ALL, device, tiles)
    assert len(problem.work.update.launches) == len(ALL) == 21
    truths = [Truth(p.tensor) for p in problem.params]
    bars = [TorchAdamW(p.tensor, v) for p, v in zip(problem.params, ALL, strict=True)]
    for step in range(3):
        problem.fill_gradients(step)
        problem.step()
        for truth, bar, grad in zip(truths, bars, problem.grads, strict=True):
            truth.step(grad.tensor.double(), HYPER)
            bar.step(grad.tensor.float(), HYPER)
    for i, (truth, bar, variant) in enumerate(zip(truths, bars, ALL, strict=True)):
        assert_close(f"param of {variant}", problem.params[i].tensor, truth.param, bar.param)
        assert_close(f"exp_avg of {variant}", problem.exp_avgs[i].tensor, truth.exp_avg, bar["exp_avg"])
        assert_close(f"exp_avg_sq of {variant}", problem.exp_avg_sqs[i].tensor, truth.exp_avg_sq, bar["exp_avg_sq"])
    problem.assert_nothing_outside_was_written()


def sizes_around(tiles: Tiles) -> list[int]:
    tile, chunk = tiles.update_tile, tiles.update_chunk
    return [1, 0, 2, tile - 1, tile, tile + 1, chunk - 1, chunk, chunk + 1, 2 * chunk + tile + 5]


@pytest.mark.usefixtures("unwritten_is_nan")
@pytest.mark.parametrize("variant", [COMMON[0], COMMON[1], COMMON[4], COMMON[5]], ids=str)
def test_every_size_at_every_alignment(device: torch.device, tiles: Tiles, variant: Variant) -> None:
    """All five streams at the same odd offset; where memory starts changes no bit, and nothing around it is written."""
    sizes = sizes_around(tiles)
    runs = []
    for offset in (0, 1, 3, 7):
        problem = Problem(sizes, [variant] * len(sizes), device, tiles, offset=offset)
        truths = [Truth(p.tensor) for p in problem.params]
        for step in range(2 if device.type == "cuda" else 1):
            problem.fill_gradients(step)
            problem.step()
            for truth, grad in zip(truths, problem.grads, strict=True):
                truth.step(grad.tensor.double(), HYPER)
        problem.assert_nothing_outside_was_written()
        for i, truth in enumerate(truths):
            tolerance = 4 * TOLERANCE[variant.param]  # one element has no mean to lean on
            assert relative_rms(problem.params[i].tensor, truth.param) <= tolerance, (offset, sizes[i])
        runs.append(problem.bits())
    for run in runs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(run, runs[0], strict=True))


@pytest.mark.parametrize("unaligned", ["params", "grads", "exp_avgs", "exp_avg_sqs", "masters"])
def test_one_unaligned_stream_is_enough_to_read_all_with_care(
    device: torch.device, tiles: Tiles, unaligned: str
) -> None:
    variant, size = Variant(BF16, BF16, FP32, True), 2 * tiles.update_chunk + 5
    results = []
    for offset in (0, 1):
        problem = Problem([size], [variant], device, tiles)
        column = getattr(problem, unaligned)
        column[0] = Guarded(column[0].tensor, offset)
        problem.states = StateTable(*problem._columns(), problem.steps)
        for step in range(2):
            problem.fill_gradients(step)
            problem.step(max_norms=[1.0])
        problem.assert_nothing_outside_was_written()
        results.append(problem.bits())
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# ---------------------------------------------------------------------- clipping, normalizer, hyperparameters


def moved_by(problem: Problem, **settings: object) -> tuple[Tensor, Tensor]:
    """The norm that a first step reports, and the gradients that it used: exp_avg / (1 - beta1)."""
    norm = problem.step([HYPER._replace(beta1=0.5)], **settings)  # type: ignore[arg-type]
    return norm, torch.cat([2 * m.tensor for m in problem.exp_avgs])


@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
@pytest.mark.parametrize("normalizer", [None, 48.0, 0.25])
def test_gradients_are_normalized_then_clipped(
    device: torch.device, tiles: Tiles, norm_type: float, max_norm: float, normalizer: float | None
) -> None:
    problem = Problem([70, 5], [COMMON[0]] * 2, device, tiles)
    problem.fill_gradients(0)
    grads = torch.cat([g.tensor for g in problem.grads]).double() / (normalizer or 1.0)
    norm, used = moved_by(problem, max_norms=[max_norm], normalizer=normalizer, norm_type=norm_type)
    expected = torch.linalg.vector_norm(grads, norm_type)
    assert norm.shape == ()
    assert norm.item() == pytest.approx(expected.item(), rel=1e-6)
    assert_close("gradients", used, grads * min(1.0, max_norm / (expected.item() + 1e-6)))


def test_values_are_clamped_after_scaling(device: torch.device, tiles: Tiles) -> None:
    problem = Problem([70], [COMMON[0]], device, tiles)
    problem.fill_gradients(0)
    grads = problem.grads[0].tensor.double()
    norm, used = moved_by(problem, max_value=0.25, normalizer=2.0)
    assert norm.item() == pytest.approx(grads.norm().item() / 2, rel=1e-6), "the norm is that before clamping"
    assert used.abs().max() == 0.25
    assert_close("gradients", used, (grads / 2).clamp(-0.25, 0.25))


def test_a_coefficient_of_one_changes_no_bit(device: torch.device, tiles: Tiles) -> None:
    results = []
    for settings in ({}, {"max_norms": [1e9]}, {"normalizer": 1.0}, {"max_value": 1e9}):
        problem = Problem([100], [COMMON[0]], device, tiles)
        problem.fill_gradients(0)
        problem.step(**settings)  # type: ignore[arg-type]
        results.append(problem.bits())
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))


@pytest.mark.parametrize(
    "hyper",
    [
        HYPER._replace(beta1=0.0),
        HYPER._replace(beta2=0.0),
        HYPER._replace(lr=0.0),
        HYPER._replace(weight_decay=0.0),
        HYPER._replace(eps=0.1),
    ],
    ids=["beta1=0", "beta2=0", "lr=0", "no decay", "large eps"],
)
def test_hyperparameters_at_the_edge(device: torch.device, tiles: Tiles, hyper: Hyper) -> None:
    problem = Problem([70], [COMMON[0]], device, tiles)
    truth = Truth(problem.params[0].tensor)
    for step in range(4):
        problem.fill_gradients(step)
        truth.step(problem.grads[0].tensor.double(), hyper)
        problem.step([hyper])
    assert_close("param", problem.params[0].tensor, truth.param)
    assert_close("exp_avg", problem.exp_avgs[0].tensor, truth.exp_avg)
    assert_close("exp_avg_sq", problem.exp_avg_sqs[0].tensor, truth.exp_avg_sq)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_learning_rate_on_the_device_is_the_number(device: torch.device, tiles: Tiles, dtype: torch.dtype) -> None:
    results = []
    for lrs in ((0.125, 0.5), (torch.tensor(0.125, dtype=dtype, device=device), torch.tensor(0.5, device=device))):
        hypers = [HYPER._replace(lr=lr) for lr in lrs]
        problem = Problem([70, 40, 9], [COMMON[0]] * 3, device, tiles, groups=[1, 0, 1], num_groups=2)
        problem.fill_gradients(0)
        problem.step(hypers)
        results.append(problem.bits())
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_late_steps_have_exact_bias_corrections(device: torch.device, tiles: Tiles) -> None:
    """beta2 ** step near 1 loses its digits in fp32: 1 - 0.9999 ** 1 would be off by 3e-4."""
    hyper = HYPER._replace(beta2=0.9999, weight_decay=0.0)
    for steps_before in (0, 1, 1000, 2_000_000):
        problem = Problem([70], [COMMON[0]], device, tiles)
        before = problem.params[0].tensor.double()
        problem.fill_gradients(0)
        problem.steps[0].fill_(steps_before)
        problem.step([hyper])
        step, grad = steps_before + 1, problem.grads[0].tensor.double()
        m_hat = (1 - hyper.beta1) * grad / (1 - hyper.beta1**step)
        v_hat = (1 - hyper.beta2) * grad**2 / (1 - hyper.beta2**step)
        assert problem.steps[0].item() == step
        expected = before - float(hyper.lr) * m_hat / (v_hat.sqrt() + hyper.eps)
        assert_close(f"param after {steps_before} steps", problem.params[0].tensor, expected)


def test_groups_keep_their_own_hyperparameters_and_limits(device: torch.device, tiles: Tiles) -> None:
    groups, clips = [2, 0, 1, 0], [1, 0, 2, 0]
    hypers = [HYPER._replace(lr=10.0**-i, beta1=0.5 + 0.1 * i, eps=10.0 ** (-i - 4)) for i in range(3)]
    limits = [None, 0.25, 1.5]
    problem = Problem(
        [33, 70, 5, 1], [COMMON[0]] * 4, device, tiles, groups=groups, num_groups=3, clips=clips, num_clips=3
    )
    truths = [Truth(p.tensor) for p in problem.params]
    problem.fill_gradients(0)
    grads = [g.tensor.double() for g in problem.grads]
    problem.step(hypers, max_norms=limits)
    for truth, grad, scale, group in zip(truths, grads, clip_scales(problem, grads, limits), groups, strict=True):
        truth.step(grad * scale, hypers[group])
    for i, truth in enumerate(truths):
        assert_close(f"exp_avg {i}", problem.exp_avgs[i].tensor, truth.exp_avg)
        assert_close(f"param {i}", problem.params[i].tensor, truth.param)


# ---------------------------------------------------------------------- steps that are not taken


def spoil_gradient(value: float) -> Callable[[Problem], dict[str, float]]:
    def spoil(problem: Problem) -> dict[str, float]:
        problem.grads[1].tensor[-1] = value
        return {}

    return spoil


def overflow(problem: Problem) -> dict[str, float]:
    problem.grads[0].tensor.fill_(1e19)
    return {}


def normalizer(value: float) -> Callable[[Problem], dict[str, float]]:
    return lambda problem: {"normalizer": value}


REASONS = {
    "nan": spoil_gradient(math.nan),
    "inf": spoil_gradient(math.inf),
    "-inf": spoil_gradient(-math.inf),
    "overflow": overflow,
    "normalizer 0": normalizer(0.0),
    "normalizer -2": normalizer(-2.0),
    "normalizer nan": normalizer(math.nan),
    "normalizer inf": normalizer(math.inf),
    "normalizer -inf": normalizer(-math.inf),
}


@pytest.mark.usefixtures("unwritten_is_nan")
@pytest.mark.parametrize("norm_type", [2.0, math.inf])
@pytest.mark.parametrize("reason", REASONS)
def test_a_bad_step_changes_no_bit_and_the_next_continues(
    device: torch.device, tiles: Tiles, reason: str, norm_type: float
) -> None:
    if (reason, norm_type) == ("overflow", math.inf):
        pytest.skip("the largest magnitude does not overflow")
    sizes = [tiles.update_chunk + 3, 9, 0]
    variants = [COMMON[0], COMMON[4], COMMON[3]]
    problem, undisturbed = (Problem(sizes, variants, device, tiles, offset=1) for _ in range(2))
    for p in (problem, undisturbed):
        p.fill_gradients(0)
        p.step(max_norms=[1.0], norm_type=norm_type)
    for skips in (1, 2):
        problem.fill_gradients(1)
        settings = REASONS[reason](problem)
        before = problem.bits()
        problem.step(max_norms=[1.0], norm_type=norm_type, **settings)  # type: ignore[arg-type]
        assert all(torch.equal(a, b) for a, b in zip(problem.bits(), before, strict=True))
        assert problem.counters.tolist() == [skips, skips]
    for p in (problem, undisturbed):
        p.fill_gradients(2)
        p.step(max_norms=[1.0], norm_type=norm_type)
    assert problem.counters.tolist() == [2, 0]
    assert all(torch.equal(a, b) for a, b in zip(problem.bits(), undisturbed.bits(), strict=True))
    problem.assert_nothing_outside_was_written()


def test_a_tensor_without_gradient_keeps_its_bits_and_its_step(device: torch.device, tiles: Tiles) -> None:
    problem = Problem([50, tiles.update_chunk + 1, 7], [COMMON[0], COMMON[4], COMMON[1]], device, tiles)
    for step, absent in enumerate(((), (1,), (0, 2), ())):
        problem.fill_gradients(step)
        before = problem.bits()
        problem.step(absent=absent)
        after = problem.bits()
        for i in range(3):
            assert torch.equal(before[i], after[i]) == (i in absent)  # the parameters come first
    assert [t.item() for t in problem.steps] == [3, 3, 3]
    problem.fill_gradients(9)
    problem.grads[1].tensor[0] = math.nan
    problem.step(absent=(1,))
    assert problem.counters.tolist() == [0, 0], "nobody reads an absent gradient"
    assert [t.item() for t in problem.steps] == [4, 3, 4]


def test_tensors_without_elements_still_count_their_steps(device: torch.device, tiles: Tiles) -> None:
    problem = Problem([0, 0], [COMMON[0], COMMON[1]], device, tiles)
    norm = problem.step(max_norms=[1.0])
    assert norm.item() == 0.0
    assert [t.item() for t in problem.steps] == [1.0, 1.0]
    assert problem.counters.tolist() == [0, 0]


# ---------------------------------------------------------------------- many, long, large


@pytest.mark.parametrize("count", [150, pytest.param(6000, marks=pytest.mark.gpu)])
def test_thousands_of_small_tensors_are_one_step(device: torch.device, tiles: Tiles, count: int) -> None:
    """More tensors than the preparing program takes at once; each has its own scalars."""
    if count > 1000 and device.type == "cpu":
        pytest.skip("too many programs for the interpreter")
    sizes = [i % 3 + 1 for i in range(count)]
    groups = [i % 5 for i in range(count)]
    hypers = [HYPER._replace(lr=0.01 * (i + 1)) for i in range(5)]
    problem = Problem(sizes, [COMMON[0]] * count, device, tiles, groups=groups, num_groups=5)
    truths = [Truth(p.tensor) for p in problem.params]
    problem.fill_gradients(0)
    norm = problem.step(hypers)
    grads = [g.tensor.double() for g in problem.grads]
    assert norm.item() == pytest.approx(torch.cat(grads).norm().item(), rel=1e-6)
    for truth, grad, group in zip(truths, grads, groups, strict=True):
        truth.step(grad, hypers[group])
    assert_close("params", torch.cat([p.tensor for p in problem.params]), torch.cat([t.param for t in truths]))
    assert {t.item() for t in problem.steps} == {1.0}


@pytest.mark.parametrize("steps", [40, pytest.param(1000, marks=pytest.mark.gpu)])
def test_masters_move_where_bf16_stands_still(device: torch.device, tiles: Tiles, steps: int) -> None:
    """At lr 1e-6 a bf16 weight of 1 never changes; its master follows float64."""
    if steps > 100 and device.type == "cpu":
        pytest.skip("too many steps for the interpreter")
    hyper = Hyper(lr=1e-6, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0)
    size = 17
    problem = Problem([size, size], [Variant(BF16, BF16, FP32, True), COMMON[1]], device, tiles, start=1.0)
    truth = Truth(problem.params[0].tensor)
    for step in range(steps):
        problem.fill_gradients(step % 7)
        for g in problem.grads:
            g.tensor.abs_()
        problem.step([hyper])
        truth.step(problem.grads[0].tensor.double(), hyper)
    assert (problem.params[1].tensor == 1.0).all(), "the control: pure bf16 stands still"
    master = problem.masters[0]
    assert master is not None
    moved = truth.param - 1.0
    assert moved.max().item() < -0.4e-6 * steps
    # Each step rounds the master to a multiple of 6e-8 (just below 1): an error of at most 3e-8.
    assert ((master.tensor.double() - truth.param).abs() <= 3.1e-8 * steps).all()
    assert relative_rms(master.tensor.double() - 1.0, moved) < 0.02


@pytest.mark.gpu
@pytest.mark.slow
def test_a_tensor_past_two_to_the_31_elements() -> None:
    if not torch.cuda.is_available() or torch.cuda.get_device_properties(0).total_memory < 40 * 2**30:
        pytest.skip("needs a CUDA device of 40 GiB")
    device, size, edge = torch.device("cuda"), 2**31 + 1029, 5000
    variant = Variant(BF16, BF16, BF16, False)
    params, grads, exp_avgs, exp_avg_sqs = ([torch.zeros(size, dtype=BF16, device=device)] for _ in range(4))
    places = [slice(0, edge), slice(2**31 - edge, size)]  # the second one crosses the border; the rest stays zero
    for place in places:
        params[0][place].normal_()
        grads[0][place].normal_()
    truths = [Truth(params[0][place]) for place in places]
    bars = [TorchAdamW(params[0][place], variant) for place in places]
    steps, counters = [torch.zeros((), device=device)], torch.zeros(2, dtype=torch.int64, device=device)
    work = WorkList.build([size], [variant], device)
    table, states = StepTable(work), StateTable(params, exp_avgs, exp_avg_sqs, [None], steps)

    from soma_kernels.optim.adamw_step import adamw_step_
    from soma_kernels.optim.grad_stats import grad_stats

    table.write(np.array([grads[0].data_ptr()], dtype=np.int64), [HYPER], [None])
    norm = adamw_step_(work, states, table, grad_stats(work, table), counters)
    assert norm.item() == pytest.approx(torch.cat([grads[0][p] for p in places]).double().norm().item(), rel=1e-6)
    for place, truth, bar in zip(places, truths, bars, strict=True):
        truth.step(grads[0][place].double(), HYPER)
        bar.step(grads[0][place], HYPER)
        assert_close(f"param at {place}", params[0][place], truth.param, bar.param)
        assert_close(f"exp_avg_sq at {place}", exp_avg_sqs[0][place], truth.exp_avg_sq, bar["exp_avg_sq"])
    middle = params[0][2**30 : 2**30 + 1000]
    assert not middle.any(), "a zero with a zero gradient stays zero"
    grads[0][-1] = math.nan
    table.write(np.array([grads[0].data_ptr()], dtype=np.int64), [HYPER], [None])
    before = params[0][places[1]].clone()
    adamw_step_(work, states, table, grad_stats(work, table), counters)
    assert counters.tolist() == [1, 1]
    assert torch.equal(params[0][places[1]], before)
