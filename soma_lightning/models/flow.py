"""How does noise become an action? Flow matching: times, interpolation, velocity target, Euler steps.

One convention for every model, pi0.5's (Black et al., 2024): t = 1 is noise, t = 0 is data,

    x_t = t * noise + (1 - t) * actions,    d x_t / d t = noise - actions.

A model whose time runs the other way (GR00T, MolmoAct2) converts at its boundary: t -> 1 - t, velocity -> -velocity.

Shape letters: B observations, T flow draws an observation, N = B * T rows, H action horizon, A action width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

#: velocity_fn(x_t [N, H, A], time float32 [N]) -> d x_t / d t, [N, H, A]
VelocityFn = Callable[[Tensor, Tensor], Tensor]


def sample_time(
    num: int,
    *,
    alpha: float = 1.5,
    beta: float = 1.0,
    scale: float = 0.999,
    offset: float = 0.001,
    generator: torch.Generator | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Training times t = offset + scale * Beta(alpha, beta); the defaults are those of pi0 and pi0.5.

    With beta = 1 (alpha = 1) the Beta distribution has the closed inverse U ** (1 / alpha) (1 - U ** (1 / beta));
    otherwise it is the ratio X / (X + Y) of Gamma(alpha) and Gamma(beta) draws. torch's own Beta takes no generator.

    generator: source of randomness; draws happen on its device. device: where the result lives (default: the
    generator's device, else the CPU). Returns float32 [num] in [offset, offset + scale].
    Raises ValueError for non-positive alpha or beta, and times outside 0..1.
    """
    if alpha <= 0 or beta <= 0:
        raise ValueError(f"Beta({alpha}, {beta}) does not exist; alpha and beta must be positive")
    if not (offset >= 0 and scale >= 0 and offset + scale <= 1 + 1e-9):
        raise ValueError(
            f"times must lie in 0..1, but offset={offset} and scale={scale} give {offset}..{offset + scale}"
        )
    source = generator.device if generator is not None else torch.device("cpu" if device is None else device)
    if beta == 1 or alpha == 1:
        uniform = torch.rand(num, generator=generator, device=source)
        fraction = uniform ** (1 / alpha) if beta == 1 else 1 - uniform ** (1 / beta)
    else:
        shapes = torch.tensor([[alpha], [beta]], device=source, dtype=torch.float64).expand(2, num)
        x, y = torch._standard_gamma(shapes, generator)
        fraction = (x / (x + y)).float()
    time = offset + scale * fraction
    return time if device is None else time.to(device)


def keyed_generator(key: Sequence[int], device: torch.device | str = "cpu") -> torch.Generator:
    """A generator whose numbers depend on `key` (none of it negative) and the kind of device alone."""
    seed = np.random.SeedSequence(list(key)).generate_state(1, np.uint64)[0]
    return torch.Generator(device).manual_seed(int(seed >> 1))


def interpolate(actions: Tensor, noise: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
    """Point on the path and its velocity: x_t = t * noise + (1 - t) * actions, target = noise - actions.

    actions [B, H, A]; noise [N, H, A] with N = B * T, row n belongs to actions row n // T; time [N].
    Returns (x_t, target), both [N, H, A]. Raises ValueError when the shapes do not fit.
    """
    if noise.shape[1:] != actions.shape[1:] or actions.shape[0] == 0 or noise.shape[0] % actions.shape[0]:
        raise ValueError(
            f"noise {tuple(noise.shape)} must have the shape of actions {tuple(actions.shape)}, or T times its rows"
        )
    if time.shape != noise.shape[:1]:
        raise ValueError(f"time must be [{noise.shape[0]}], one per row of noise, got {tuple(time.shape)}")
    if noise.shape[0] != actions.shape[0]:
        actions = actions.repeat_interleave(noise.shape[0] // actions.shape[0], dim=0)
    t = time.to(noise.dtype).view(-1, *[1] * (noise.dim() - 1))
    target = noise - actions
    return t * noise + (1 - t) * actions, target


def euler_times(num_steps: int, device: torch.device | str | None = None) -> Tensor:
    """t_k = 1 - k / num_steps, float32 [num_steps]. Raises ValueError when num_steps is less than 1."""
    if not isinstance(num_steps, int) or num_steps < 1:
        raise ValueError(f"num_steps={num_steps} must be a whole number, at least 1")
    return (1 - torch.arange(num_steps, dtype=torch.float64) / num_steps).to(torch.float32).to(device)


def euler_sample(velocity_fn: VelocityFn, noise: Tensor, num_steps: int, times: Tensor | None = None) -> Tensor:
    """Integrates from noise (t = 1) to data (t = 0): x <- x - v(x, t_k) / num_steps at t_k = 1 - k / num_steps.

    noise [N, H, A]; `velocity_fn` gets x and float32 times [N]. times: `euler_times` on the device of the noise; made
    here when None. Gradients flow when grad mode is on. Raises ValueError when num_steps is less than 1.
    """
    x = noise
    for time in euler_times(num_steps, noise.device) if times is None else times:
        x = x - velocity_fn(x, time.expand(noise.shape[0])) / num_steps
    return x


def time_embedding(time: Tensor, dim: int, *, min_period: float = 4e-3, max_period: float = 4.0) -> Tensor:
    """Sinusoidal embedding: concat(sin, cos) of 2 pi t / period, periods geometric from min_period to max_period.

    Angles reach 2 pi / 0.004 = 1571 rad, where float32 has an error of 1e-4 rad, so they are computed in float64.
    time: [N]. dim: even width. Returns float32 [N, dim]. Raises ValueError for an odd dim or unordered periods.
    """
    if dim < 4 or dim % 2:
        raise ValueError(
            f"dim={dim} must be even and at least 4: one sine and one cosine a period, two periods or more"
        )
    if not 0 < min_period < max_period:
        raise ValueError(f"need 0 < min_period < max_period, got {min_period} and {max_period}")
    exponent = torch.linspace(0, 1, dim // 2, dtype=torch.float64, device=time.device)
    periods = min_period * (max_period / min_period) ** exponent
    angles = time.to(torch.float64)[:, None] * (2 * math.pi / periods)
    return torch.cat([angles.sin(), angles.cos()], dim=-1).to(torch.float32)
