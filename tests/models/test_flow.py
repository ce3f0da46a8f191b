"""Flow matching against closed forms: times, path, Euler steps, time embedding."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from soma_lightning.models.flow import euler_sample, interpolate, sample_time, time_embedding


def beta_cdf(x: Tensor, alpha: float, beta: float) -> Tensor:
    """Cumulative Beta distribution by fine trapezoids of its density."""
    u = torch.linspace(0, 1, 200_001, dtype=torch.float64)
    density = u ** (alpha - 1) * (1 - u) ** (beta - 1)
    area = torch.cumulative_trapezoid(density, u)
    area = torch.cat([torch.zeros(1, dtype=torch.float64), area]) / area[-1]
    return area[(x.double() * 200_000).round().long()]


@pytest.mark.parametrize(("alpha", "beta"), [(1.5, 1.0), (1.0, 2.0), (1.5, 2.5), (3.0, 1.2)])
def test_times_follow_the_beta_distribution(alpha: float, beta: float) -> None:
    n = 20_000
    time = sample_time(n, alpha=alpha, beta=beta, generator=torch.Generator().manual_seed(0))
    assert time.dtype == torch.float32
    fraction = ((time.double() - 0.001) / 0.999).clamp(0, 1).sort().values
    distance = (beta_cdf(fraction, alpha, beta) - (torch.arange(n) + 0.5) / n).abs().max().item()
    assert distance < 1.63 / n**0.5  # Kolmogorov-Smirnov at 1 %
    assert fraction.mean().item() == pytest.approx(alpha / (alpha + beta), abs=0.01)


def test_times_stay_in_their_range_and_are_reproducible() -> None:
    time = sample_time(50_000, generator=torch.Generator().manual_seed(1))
    assert time.min() >= 0.001
    assert time.max() <= 1.0
    assert torch.equal(time, sample_time(50_000, generator=torch.Generator().manual_seed(1)))
    assert not torch.equal(time, sample_time(50_000, generator=torch.Generator().manual_seed(2)))
    general = [sample_time(5, beta=2.0, generator=torch.Generator().manual_seed(1)) for _ in range(2)]
    assert torch.equal(*general)


def test_times_leave_the_global_generator_alone_when_given_their_own() -> None:
    state = torch.get_rng_state()
    sample_time(7, generator=torch.Generator().manual_seed(0))
    sample_time(7, beta=2.0, generator=torch.Generator().manual_seed(0))
    assert torch.equal(state, torch.get_rng_state())
    sample_time(7)
    assert not torch.equal(state, torch.get_rng_state())


def test_times_land_on_the_requested_device() -> None:
    assert sample_time(3, device="meta", generator=torch.Generator()).device.type == "meta"
    assert sample_time(3, scale=0.5, offset=0.25, generator=torch.Generator().manual_seed(0)).max() <= 0.75


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": 0.0}, r"Beta\(0.0, 1.0\) does not exist"),
        ({"beta": -1.0}, "must be positive"),
        ({"scale": 1.0, "offset": 0.1}, "offset=0.1 and scale=1.0"),
        ({"offset": -0.1}, "times must lie in 0..1"),
    ],
)
def test_impossible_times_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sample_time(3, **options)  # type: ignore[arg-type]


def test_interpolation_runs_from_data_to_noise() -> None:
    actions, noise = torch.full((3, 2, 4), 2.0), torch.full((3, 2, 4), -1.0)
    x_t, target = interpolate(actions, noise, torch.tensor([0.0, 0.25, 1.0]))
    assert torch.equal(x_t[:, 0, 0], torch.tensor([2.0, 1.25, -1.0]))
    assert torch.equal(target, torch.full((3, 2, 4), -3.0))


def test_draws_share_the_actions_of_their_row() -> None:
    actions = torch.arange(2.0)[:, None, None].expand(2, 3, 1)
    noise, time = torch.randn(6, 3, 1), torch.rand(6)
    x_t, target = interpolate(actions, noise, time)
    for n in range(6):
        alone = interpolate(actions[n // 3 : n // 3 + 1], noise[n : n + 1], time[n : n + 1])
        assert torch.equal(x_t[n], alone[0][0])
        assert torch.equal(target[n], alone[1][0])


def test_interpolation_refuses_shapes_that_do_not_fit() -> None:
    actions = torch.zeros(2, 3, 4)
    with pytest.raises(ValueError, match=r"noise \(3, 3, 4\) must have the shape of actions \(2, 3, 4\)"):
        interpolate(actions, torch.zeros(3, 3, 4), torch.zeros(3))
    with pytest.raises(ValueError, match=r"noise \(2, 3, 1\)"):
        interpolate(actions, torch.zeros(2, 3, 1), torch.zeros(2))
    with pytest.raises(ValueError, match=r"time must be \[4\]"):
        interpolate(actions, torch.zeros(4, 3, 4), torch.zeros(2))


def test_euler_visits_the_grid_from_one_downwards() -> None:
    times: list[float] = []

    def velocity(x: Tensor, time: Tensor) -> Tensor:
        assert time.shape == (2,)
        assert time.dtype == torch.float32
        times.append(time[0].item())
        return torch.ones_like(x)

    out = euler_sample(velocity, torch.full((2, 1, 1), 5.0), 10)
    assert times == pytest.approx([1 - k / 10 for k in range(10)], abs=1e-7)
    assert out.flatten().tolist() == pytest.approx([4.0, 4.0], abs=1e-6)


@pytest.mark.parametrize("steps", [1, 5, 10])
def test_euler_closed_forms(steps: int) -> None:
    noise = torch.randn(3, 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    # dx/dt = x: each step multiplies by 1 - 1/N.
    torch.testing.assert_close(euler_sample(lambda x, t: x, noise, steps), noise * (1 - 1 / steps) ** steps)
    # dx/dt = t: the sum of t_k / N = (N + 1) / (2 N).
    moved = euler_sample(lambda x, t: t.double()[:, None, None].expand_as(x), noise, steps)
    torch.testing.assert_close(moved, noise - (steps + 1) / (2 * steps), rtol=0, atol=1e-6)
    # The exact velocity of one data point (noise - data) leads to it in any number of steps.
    data = torch.full_like(noise, 0.7)
    torch.testing.assert_close(euler_sample(lambda x, t: noise - data, noise, steps), data)


def test_euler_carries_gradients_and_leaves_its_input() -> None:
    noise = torch.ones(1, 1, 1, requires_grad=True)
    euler_sample(lambda x, t: x, noise, 2).sum().backward()
    assert noise.grad is not None
    assert noise.grad.item() == 0.25
    assert noise.item() == 1.0
    with pytest.raises(ValueError, match="num_steps=0"):
        euler_sample(lambda x, t: x, noise, 0)


def test_time_embedding_values() -> None:
    embedded = time_embedding(torch.tensor([0.0, 0.3]), 6, min_period=0.01, max_period=1.0)
    assert embedded.dtype == torch.float32
    assert embedded[0].tolist() == [0, 0, 0, 1, 1, 1]
    time = torch.tensor(0.3).item()  # the float32 value
    angles = [2 * math.pi * time / period for period in (0.01, 0.1, 1.0)]
    expected = [*(math.sin(a) for a in angles), *(math.cos(a) for a in angles)]
    assert embedded[1].tolist() == pytest.approx(expected, abs=1e-7)


def test_time_embedding_of_pi05_needs_its_float64_angles() -> None:
    time = torch.rand(64, generator=torch.Generator().manual_seed(0))
    embedded = time_embedding(time, 1024)
    assert embedded.shape == (64, 1024)
    periods = [4e-3 * 1000 ** (i / 511) for i in range(512)]
    expected = torch.tensor(
        [[math.sin(2 * math.pi * t / p) for p in periods] for t in time.tolist()], dtype=torch.float64
    )
    assert (embedded[:, :512] - expected).abs().max() < 1e-7
    single = torch.sin(2 * math.pi * time[:, None] / torch.tensor(periods))
    assert (single - expected).abs().max() > 1e-5


def test_time_embedding_refuses_odd_widths_and_unordered_periods() -> None:
    with pytest.raises(ValueError, match="dim=5"):
        time_embedding(torch.zeros(1), 5)
    with pytest.raises(ValueError, match="min_period"):
        time_embedding(torch.zeros(1), 4, min_period=2.0, max_period=1.0)
