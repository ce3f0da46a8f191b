"""Stochastic denoising steps against closed forms, other ways of writing them, and Monte-Carlo."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from soma_lightning.models.flow import euler_sample
from soma_lightning.models.flow_sde import FlowDraws, FlowSDE, to_noise_time

H, A = 2, 3


def keys(rows: int) -> list[tuple[int, int]]:
    return [(7, row) for row in range(rows)]


def velocity(x: Tensor, time: Tensor) -> Tensor:
    """A field that is no function of its row's position in the batch, elementwise, hence the same in any batch."""
    return torch.sin(3 * x) + time[:, None, None] * x


def wide(*values: float) -> Tensor:
    """[N, 1, 1]."""
    return torch.tensor(values, dtype=torch.float64)[:, None, None]


# -- a single transition ----------------------------------------------------------------------------------------------


def sigma_of(i: int, num_steps: int, level: float) -> float:
    """a sqrt(t / (1 - t)) at t = 1 - i/K, with the next step's denominator at t = 1."""
    t = 1 - i / num_steps
    return level * math.sqrt(t / (1 / num_steps if i == 0 else 1 - t))


def endpoint_form(x: float, v: float, i: int, num_steps: int, level: float) -> tuple[float, float]:
    delta, t, sigma = 1 / num_steps, 1 - i / num_steps, sigma_of(i, num_steps, level)
    after = t - delta
    data, noise = x - t * v, x + (1 - t) * v
    return data * (1 - after) + noise * (after - sigma**2 * delta / (2 * t)), sigma * math.sqrt(delta)


def euler_maruyama_form(x: float, v: float, i: int, num_steps: int, level: float) -> tuple[float, float]:
    """dx = [v + sigma^2 / (2 t) (x + (1 - t) v)] dt + sigma dW with dt = -1/K."""
    delta, t, sigma = 1 / num_steps, 1 - i / num_steps, sigma_of(i, num_steps, level)
    drift = v + sigma**2 / (2 * t) * (x + (1 - t) * v)
    return x - delta * drift, sigma * math.sqrt(delta)


def data_time_form(x: float, v: float, i: int, num_steps: int, level: float) -> tuple[float, float]:
    """Written for s = i / K from noise (0) to data (1), u = data - noise: GR00T's convention."""
    delta, s, u = 1 / num_steps, i / num_steps, -v
    sigma = level * math.sqrt((1 - s) / (delta if i == 0 else s))
    noise, data = x - s * u, x + (1 - s) * u
    after = s + delta
    weight = 1 - after - sigma**2 * delta / (2 * (1 - s))
    return data * after + noise * weight, sigma * math.sqrt(delta)


FORMS = [endpoint_form, euler_maruyama_form, data_time_form]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("num_steps", [1, 2, 3, 4, 5, 10])
@pytest.mark.parametrize("level", [0.2, 0.5, 0.8])
def test_a_transition_equals_its_other_forms(form: Callable[..., Any], num_steps: int, level: float) -> None:
    sde = FlowSDE(num_steps, level)
    steps = torch.arange(num_steps)
    x, v = torch.full((num_steps, 1, 1), 1.3, dtype=torch.float64), torch.full((num_steps, 1, 1), -0.7).double()
    mean, std = sde.transition(x, v, steps, steps >= 0)
    expected = [form(1.3, float(v[0]), i, num_steps, level) for i in range(num_steps)]
    assert mean.flatten().tolist() == pytest.approx([one[0] for one in expected], abs=1e-12)
    assert std.flatten().tolist() == pytest.approx([one[1] for one in expected], abs=1e-12)


@pytest.mark.parametrize(
    ("i", "std", "mean", "log_prob"),
    [(0, 0.5, 0.741667, -0.232597), (1, 0.408248, 0.725, -0.039934), (2, 0.204124, 0.7875, 0.668213)],
)
def test_reference_values_of_one_transition(i: int, std: float, mean: float, log_prob: float) -> None:
    sde = FlowSDE(3, 0.5)
    step = torch.tensor([i])
    found_mean, found_std = sde.transition(torch.ones(1, 1, 1), torch.full((1, 1, 1), 0.4), step, step >= 0)
    assert found_mean.item() == pytest.approx(mean, abs=1e-6)
    assert found_std.item() == pytest.approx(std, abs=1e-6)
    chains = torch.ones(1, 4, 1, 1)
    chains[:, i + 1] = 0.8
    found, entropy = sde.log_prob(lambda x, time: torch.full_like(x, 0.4), chains, step)
    assert found.item() == pytest.approx(log_prob, abs=2e-6)
    assert entropy.item() == pytest.approx(0.5 * math.log(2 * math.pi * math.e * std**2), abs=1e-5)


@pytest.mark.parametrize(
    ("num_steps", "expected"),
    [
        (3, [0.5, 0.4082, 0.2041]),
        (4, [0.5, 0.4330, 0.2500, 0.1443]),
        (5, [0.5, 0.4472, 0.2739, 0.1826, 0.1118]),
        (10, [0.5, 0.4743, 0.3162, 0.2415, 0.1936, 0.1581, 0.1291, 0.1035, 0.0791, 0.0527]),
    ],
)
def test_deviations_of_all_steps(num_steps: int, expected: list[float]) -> None:
    steps = torch.arange(num_steps)
    zeros = torch.zeros(num_steps, 1, 1)
    _, std = FlowSDE(num_steps, 0.5).transition(zeros, zeros, steps, steps >= 0)
    assert std.flatten().tolist() == pytest.approx(expected, abs=5e-5)


@pytest.mark.parametrize("num_steps", [3, 4, 10])
def test_sensitivity_of_the_mean_to_the_velocity(num_steps: int) -> None:
    """|d mean / d v| = 1/K in the first step, (1 + a^2 / 2) / K in all others, 1/K in an Euler step."""
    steps = torch.arange(num_steps).repeat(2)
    stochastic = torch.arange(2 * num_steps) < num_steps
    v = torch.zeros(2 * num_steps, 1, 1, dtype=torch.float64, requires_grad=True)
    FlowSDE(num_steps, 0.5).transition(torch.ones_like(v), v, steps, stochastic)[0].sum().backward()
    assert v.grad is not None
    expected = [1 / num_steps] + [(1 + 0.125) / num_steps] * (num_steps - 1) + [1 / num_steps] * num_steps
    assert v.grad.abs().flatten().tolist() == pytest.approx(expected, abs=1e-12)


def test_a_row_that_is_not_stochastic_takes_an_euler_step() -> None:
    x, v = torch.randn(4, H, A, dtype=torch.float64), torch.randn(4, H, A, dtype=torch.float64)
    mean, std = FlowSDE(4).transition(x, v, torch.arange(4), torch.zeros(4, dtype=torch.bool))
    torch.testing.assert_close(mean, x - v / 4)
    assert std.abs().max() == 0


@pytest.mark.parametrize("level", [0.3, 0.5, 0.9])
def test_cps_keeps_the_noise_coefficient(level: float) -> None:
    """Noise weight and deviation form a right triangle over t', so the variance of a unit Gaussian's noise is t'^2."""
    K = 4
    sde = FlowSDE(K, level, "flow_cps")
    steps, zeros = torch.arange(K), torch.zeros(K, 1, 1, dtype=torch.float64)
    time = 1 - steps.double()[:, None, None] / K
    after = time - 1 / K
    # x is all noise: data = 0, noise = 1, so x = t and v = 1.
    weight, std = sde.transition(time, zeros + 1, steps, steps >= 0)
    torch.testing.assert_close(weight, after * math.cos(math.pi * level / 2))
    torch.testing.assert_close(std, after * math.sin(math.pi * level / 2))
    torch.testing.assert_close(weight**2 + std**2, after**2)
    # x is all data: data = 1, noise = 0, so x = 1 - t and v = -1.
    data_weight, _ = sde.transition(1 - time, zeros - 1, steps, steps >= 0)
    torch.testing.assert_close(data_weight, 1 - after)


def test_noise_level_of_each_row() -> None:
    levels = torch.tensor([0.2, 0.5, 0.8])
    x, v, steps = torch.randn(3, H, A), torch.randn(3, H, A), torch.tensor([0, 1, 2])
    mean, std = FlowSDE(3).transition(x, v, steps, steps >= 0, levels)
    for row, level in enumerate(levels.tolist()):
        alone = FlowSDE(3, level).transition(x[[row]], v[[row]], steps[[row]], torch.tensor([True]))
        torch.testing.assert_close(mean[[row]], alone[0])
        torch.testing.assert_close(std[[row]], alone[1])
    chains = FlowSDE(3).sample(velocity, FlowSDE(3).draw(keys(3), (H, A)), levels)
    found, _ = FlowSDE(3).log_prob(velocity, chains, steps, levels)
    single, _ = FlowSDE(3, 0.8).log_prob(velocity, chains[2:], steps[2:])
    torch.testing.assert_close(found[2:], single)


# -- a Gaussian flow, whose moments are known -------------------------------------------------------------------------

MEAN, VARIANCE = 0.7, 0.09


def exact_velocity(x: Tensor, time: Tensor) -> Tensor:
    """E[noise - data | x_t = x] for data ~ N(.7, .09) and noise ~ N(0, 1)."""
    slope, offset = exact_line(time[:, None, None])
    return slope * x + offset


def exact_line(t: Any) -> tuple[Any, Any]:
    """(slope, offset) of the exact velocity."""
    total = (1 - t) ** 2 * VARIANCE + t**2
    slope = (t - (1 - t) * VARIANCE) / total
    return slope, -slope * (1 - t) * MEAN - MEAN


def moments(sde: FlowSDE, stochastic: set[int]) -> tuple[float, float, list[tuple[float, float]]]:
    """(mean, variance, all steps' (mean, variance)) at the end: each transition of the code is linear in x."""
    mean, variance, history = 0.0, 1.0, []
    for i in range(sde.num_steps):
        slope, offset = exact_line(1 - i / sde.num_steps)
        x = wide(0.0, 1.0)
        found, std = sde.transition(x, slope * x + offset, torch.tensor([i, i]), torch.tensor([i in stochastic] * 2))
        at_zero, at_one = found.flatten().tolist()
        factor = at_one - at_zero
        mean, variance = factor * mean + at_zero, factor**2 * variance + float(std[0]) ** 2
        history.append((mean, variance))
    return mean, variance, history


@pytest.mark.parametrize(
    ("num_steps", "ode", "every", "first", "last"),
    [
        (3, 0.01991, 0.05733, 0.02434, 0.05015),
        (4, 0.03142, 0.05666, 0.03578, 0.04330),
        (10, 0.06094, 0.07311, 0.06400, 0.06165),
        (100, 0.08660, 0.08884, 0.08820, 0.08660),
        (1000, 0.08965, 0.09033, 0.09108, 0.08965),
    ],
)
def test_final_variance_of_the_gaussian_flow(
    num_steps: int, ode: float, every: float, first: float, last: float
) -> None:
    sde = FlowSDE(num_steps, 0.5)
    cases = [(ode, set()), (every, set(range(num_steps))), (first, {0}), (last, {num_steps - 1})]
    for expected, stochastic in cases:
        mean, variance, _ = moments(sde, stochastic)
        assert mean == pytest.approx(MEAN, abs=1e-6)
        assert variance == pytest.approx(expected, abs=6e-6)


def test_moments_of_every_step() -> None:
    _, _, history = moments(FlowSDE(4, 0.5), {0, 1, 2, 3})
    expected = [(0.175, 0.64062), (0.35, 0.35731), (0.525, 0.14072), (0.7, 0.05666)]
    for found, known in zip(history, expected, strict=True):
        assert found == pytest.approx(known, abs=6e-6)


@pytest.mark.parametrize("level", [0.3, 0.5, 0.8])
@pytest.mark.parametrize("num_steps", [4, 1000])
def test_the_clamped_first_step_adds_a_quarter_of_a_to_the_fourth(level: float, num_steps: int) -> None:
    """However small the steps: a draw of step 0 ends with a larger variance than the flow has."""
    K = num_steps
    _, variance, history = moments(FlowSDE(K, level), {0})
    # At t = 1 the exact velocity is x - .7, so the step is .7/K + ((K-1)/K - a^2/2) x plus noise of deviation a.
    assert history[0][1] == pytest.approx(((K - 1) / K - level**2 / 2) ** 2 + level**2, abs=1e-7)
    assert variance > moments(FlowSDE(K, level), set())[1]
    if K == 1000:
        assert history[0][1] == pytest.approx(1 + level**4 / 4, abs=3e-3)


@pytest.mark.parametrize("step", [0, 1, 2, 3])
def test_samples_have_the_moments(step: int) -> None:
    rows = 200_000
    generator = torch.Generator().manual_seed(step)
    noise, step_noise = torch.randn(2, rows, 1, 1, generator=generator, dtype=torch.float64)
    sde = FlowSDE(4, 0.5)
    draws = FlowDraws(noise, torch.full((rows,), step), step_noise)
    x = sde.sample(lambda x, time: exact_velocity(x, time.double()), draws)[:, -1].flatten()
    mean, variance, _ = moments(sde, {step})
    assert abs(x.mean().item() - mean) < 4 * math.sqrt(variance / rows)
    assert abs(x.var().item() - variance) < 4 * variance * math.sqrt(2 / rows)


def test_samples_of_drawn_steps_have_the_mixed_moments() -> None:
    """The steps of `draw` are uniform, so variances mix with equal weights."""
    rows = 20_000
    sde = FlowSDE(4, 0.5)
    draws = sde.draw([(3, row) for row in range(rows)], (1, 1))
    counts = torch.bincount(draws.steps, minlength=4)
    assert (counts - rows / 4).abs().max().item() < 4 * math.sqrt(rows * 3 / 16)
    x = sde.sample(exact_velocity, draws)[:, -1].flatten()
    variance = sum(moments(sde, {step})[1] for step in range(4)) / 4
    assert abs(x.mean().item() - MEAN) < 4 * math.sqrt(variance / rows)
    assert x.var().item() == pytest.approx(variance, rel=4 * math.sqrt(2.2 / rows))


# -- sampling and replay ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_steps", [1, 3, 10])
def test_without_a_stochastic_step_the_end_is_eulers_bit_for_bit(num_steps: int) -> None:
    noise = torch.randn(5, H, A)
    draws = FlowDraws(noise, torch.full((5,), -1), torch.randn(5, H, A))
    chains = FlowSDE(num_steps).sample(velocity, draws)
    assert torch.equal(chains[:, 0], noise)
    assert torch.equal(chains[:, -1], euler_sample(velocity, noise, num_steps))


@pytest.mark.parametrize("method", ["flow_sde", "flow_cps"])
def test_only_the_drawn_step_is_stochastic(method: Any) -> None:
    sde = FlowSDE(4, 0.5, method)
    draws = sde.draw(keys(12), (H, A))
    chains = sde.sample(velocity, draws)
    times = 1 - torch.arange(4) / 4
    for row, drawn in enumerate(draws.steps.tolist()):
        for i, time in enumerate(times.tolist()):
            x = chains[[row], i]
            euler = x - velocity(x, torch.tensor([time])) / 4
            assert torch.equal(chains[[row], i + 1], euler) == (i != drawn)


def test_draws_depend_on_the_key_alone() -> None:
    sde = FlowSDE(5)
    together = sde.draw([(1, 2), (3, 4), (5, 6)], (H, A))
    alone = sde.draw([(3, 4)], (H, A))
    for name in ("noise", "steps", "step_noise"):
        assert torch.equal(getattr(together, name)[1:2], getattr(alone, name))
    state = torch.get_rng_state()
    sde.draw([(1,)], (H, A))
    assert torch.equal(state, torch.get_rng_state())
    assert together.steps.dtype == torch.int64
    assert not torch.equal(together.noise[0], together.noise[1])


def test_one_row_depends_on_no_other() -> None:
    sde = FlowSDE(4, 0.5)
    draws = sde.draw(keys(6), (H, A))
    chains = sde.sample(velocity, draws)
    log_prob, _ = sde.log_prob(velocity, chains, draws.steps)
    for row in range(6):
        one = FlowDraws(draws.noise[[row]], draws.steps[[row]], draws.step_noise[[row]])
        alone = sde.sample(velocity, one)
        torch.testing.assert_close(alone, chains[[row]], rtol=0, atol=1e-6)
        found, _ = sde.log_prob(velocity, alone, one.steps)
        torch.testing.assert_close(found, log_prob[[row]], rtol=0, atol=1e-5)


@pytest.mark.parametrize(("ignore_last", "method"), [(True, "flow_sde"), (False, "flow_cps")])
def test_the_last_step_is_left_out_where_it_must_be(ignore_last: bool, method: Any) -> None:
    sde = FlowSDE(3, 0.5, method, ignore_last=ignore_last)
    assert sde.num_drawn == 2
    assert set(sde.draw(keys(60), (H, A)).steps.tolist()) == {0, 1}
    assert set(FlowSDE(3).draw(keys(60), (H, A)).steps.tolist()) == {0, 1, 2}


class Network(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(H * A + 1, 64), torch.nn.Tanh(), torch.nn.Linear(64, H * A))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        found: Tensor = self.layers(torch.cat([x.flatten(1), time[:, None]], 1)).view_as(x)
        return found


@pytest.mark.parametrize("method", ["flow_sde", "flow_cps", "flow_noise"])
def test_replay_is_exact_in_the_same_batch_and_close_in_a_split_one(method: Any) -> None:
    sde, network = FlowSDE(4, method=method), Network()
    std_fn = (lambda x, time: 0.1 + 0.05 * torch.sigmoid(x)) if sde.is_joint else None
    draws = sde.draw(keys(64), (H, A))
    chains = sde.sample(network, draws, std_fn=std_fn)
    with torch.no_grad():
        old, _ = sde.log_prob(network, chains, draws.steps, std_fn=std_fn)
    new, _ = sde.log_prob(network, chains, draws.steps, std_fn=std_fn)
    assert torch.equal((new.detach().sum((1, 2)) - old.sum((1, 2))).exp(), torch.ones(64))
    parts = [
        sde.log_prob(network, part, steps, std_fn=std_fn)[0]
        for part, steps in zip(chains.split(7), draws.steps.split(7), strict=True)
    ]
    ratio = (torch.cat(parts).sum((1, 2)) - old.sum((1, 2))).exp()
    assert (ratio - 1).abs().max().item() <= 1e-4
    new.sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in network.parameters())


@pytest.mark.parametrize("method", ["flow_sde", "flow_cps"])
def test_the_log_probability_is_that_of_the_noise_that_was_drawn(method: Any) -> None:
    sde = FlowSDE(4, 0.5, method)
    draws = sde.draw(keys(30), (H, A))
    chains = sde.sample(velocity, draws)
    steps = draws.steps
    _, std = sde.transition(chains[:, 0], chains[:, 0], steps, steps >= 0)
    expected = -0.5 * draws.step_noise**2 - std.log() - 0.5 * math.log(2 * math.pi)
    found, entropy = sde.log_prob(velocity, chains, steps)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-4)
    expected_entropy = 0.5 * (2 * math.pi * math.e * std**2).log()
    torch.testing.assert_close(entropy, expected_entropy.expand_as(entropy), rtol=0, atol=1e-5)
    assert entropy.shape == found.shape == (30, H, A)


def test_dimensions_that_do_not_count_get_no_gradient() -> None:
    sde = FlowSDE(3)
    draws = sde.draw(keys(4), (H, A))
    chains = sde.sample(velocity, draws)
    v = torch.randn(4, H, A, requires_grad=True)
    found, _ = sde.log_prob(lambda x, time: v, chains, draws.steps)
    found[:, :1, :2].sum().backward()
    assert v.grad is not None
    counted = torch.zeros(H, A, dtype=torch.bool)
    counted[:1, :2] = True
    assert v.grad[:, ~counted].abs().max() == 0
    assert v.grad[:, counted].abs().min() > 0


def test_a_step_without_deviation_says_nothing() -> None:
    """The last step of CPS has deviation 0; its log-probability, entropy and gradient are 0, not NaN."""
    sde = FlowSDE(3, 0.5, "flow_cps")
    chains = torch.randn(2, 4, H, A)
    v = torch.randn(2, H, A, requires_grad=True)
    found, entropy = sde.log_prob(lambda x, time: v, chains, torch.tensor([2, 0]))
    assert found[0].abs().max() == 0
    assert entropy[0].abs().max() == 0
    assert found[1].abs().min() > 0
    found.sum().backward()
    assert v.grad is not None
    assert v.grad[0].abs().max() == 0
    assert v.grad.isfinite().all()


def test_a_chain_that_was_kept_in_bf16() -> None:
    """Old and new scores read the same rounded points, so they agree exactly; the rounding itself costs a little."""
    sde = FlowSDE(4)
    draws = sde.draw(keys(16), (H, A))
    chains = sde.sample(velocity, draws)
    kept = chains.bfloat16()
    first, _ = sde.log_prob(velocity, kept, draws.steps)
    again, _ = sde.log_prob(velocity, kept, draws.steps)
    exact, _ = sde.log_prob(velocity, chains, draws.steps)
    assert first.dtype == torch.float32
    assert torch.equal(first, again)
    assert 0 < (first - exact).abs().max().item() < 0.5


def test_a_model_whose_time_runs_from_noise_to_data() -> None:
    seen: list[float] = []

    def data_time(x: Tensor, time: Tensor) -> Tensor:
        seen.append(time[0].item())
        return -velocity(x, 1 - time)

    sde = FlowSDE(4)
    draws = sde.draw(keys(5), (H, A))
    assert torch.equal(sde.sample(to_noise_time(data_time), draws), sde.sample(velocity, draws))
    assert seen == [0.0, 0.25, 0.5, 0.75]


def test_a_chain_of_another_number_of_steps_is_refused() -> None:
    chains = FlowSDE(4).sample(velocity, FlowSDE(4).draw(keys(2), (H, A)))
    with pytest.raises(ValueError, match="chains have 4 steps, this process 3"):
        FlowSDE(3).log_prob(velocity, chains, torch.zeros(2, dtype=torch.int64))


# -- Flow-Noise -------------------------------------------------------------------------------------------------------


def std_of(x: Tensor, time: Tensor) -> Tensor:
    return 0.08 + 0.08 * torch.sigmoid(x + time[:, None, None])


def test_flow_noise_scores_the_whole_chain() -> None:
    """The mean over start and K steps of the densities, each written with torch.distributions."""
    sde = FlowSDE(3, method="flow_noise")
    draws = sde.draw(keys(8), (H, A))
    assert draws.step_noise.shape == (8, 3, H, A)
    chains = sde.sample(velocity, draws, std_fn=std_of)
    terms = [torch.distributions.Normal(0, 1).log_prob(chains[:, 0])]
    entropies = [torch.full((8, H, A), 0.5 * math.log(2 * math.pi * math.e))]
    for i in range(3):
        x, time = chains[:, i], torch.full((8,), 1 - i / 3)
        step = torch.distributions.Normal(x - velocity(x, time) / 3, std_of(x, time))
        torch.testing.assert_close(chains[:, i + 1], step.mean + step.stddev * draws.step_noise[:, i])
        terms.append(step.log_prob(chains[:, i + 1]))
        entropies.append(step.entropy())
    found, entropy = sde.log_prob(velocity, chains, draws.steps, std_fn=std_of)
    torch.testing.assert_close(found, torch.stack(terms).mean(0), rtol=0, atol=1e-5)
    torch.testing.assert_close(entropy, torch.stack(entropies).mean(0), rtol=0, atol=1e-5)


def test_flow_noise_without_noise_is_euler() -> None:
    sde = FlowSDE(3, method="flow_noise")
    noise = torch.randn(4, H, A)
    draws = FlowDraws(noise, torch.full((4,), -1), torch.randn(4, 3, H, A))
    chains = sde.sample(velocity, draws, std_fn=std_of)
    assert torch.equal(chains[:, -1], euler_sample(velocity, noise, 3))


def test_flow_noise_needs_its_network_and_the_others_refuse_one() -> None:
    joint, single = FlowSDE(3, method="flow_noise"), FlowSDE(3)
    with pytest.raises(ValueError, match="'flow_noise' needs std_fn"):
        joint.sample(velocity, joint.draw(keys(2), (H, A)))
    with pytest.raises(ValueError, match="'flow_noise' needs std_fn"):
        joint.log_prob(velocity, torch.zeros(2, 4, H, A), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match="'flow_sde' takes no std_fn"):
        single.sample(velocity, single.draw(keys(2), (H, A)), std_fn=std_of)


# -- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "sde"}, "method='sde' is unknown; known: flow_sde, flow_cps, flow_noise"),
        ({"num_steps": 0}, "num_steps=0 must be a whole number from 1"),
        ({"num_steps": 2.0}, "num_steps=2.0 must be a whole number"),
        ({"num_steps": True}, "num_steps=True must be a whole number"),
        ({"noise_level": 0.0}, "noise_level=0.0 must be above 0"),
        ({"noise_level": -0.5}, "noise_level=-0.5 must be above 0"),
        ({"noise_level": math.nan}, "noise_level=nan must be above 0"),
        ({"noise_level": math.inf}, "noise_level=inf must be above 0"),
        ({"method": "flow_noise", "noise_range": (0.2, 0.1)}, "0 < low < high"),
        ({"method": "flow_noise", "noise_range": (0.0, 0.1)}, "0 < low < high"),
        ({"method": "flow_noise", "noise_level": 0.3}, "noise_level and ignore_last have no effect"),
        ({"method": "flow_noise", "ignore_last": True}, "noise_level and ignore_last have no effect"),
        ({"noise_range": (0.1, 0.2)}, r"noise_range=\(0.1, 0.2\) has no effect with method='flow_sde'"),
        ({"method": "flow_cps", "noise_level": 1.0}, "noise_level=1.0 must be below 1 with flow_cps"),
        ({"method": "flow_cps", "num_steps": 1}, "num_steps=1 leaves no step to draw"),
        ({"ignore_last": True, "num_steps": 1}, "num_steps=1 leaves no step to draw"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FlowSDE(**{"num_steps": 4, **settings})
