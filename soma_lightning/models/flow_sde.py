"""How does a flow policy explore, and how likely was what it did? Denoising steps that are drawn instead of computed.

A deterministic Euler step of the flow has no density, so nothing could be reinforced. Flow-SDE (Flow-GRPO, Liu et al.
2025, arXiv 2505.05470; piRL, arXiv 2510.25889) replaces one step of each sample by a transition of the stochastic
differential equation with the same marginals. With t from 1 (noise) to 0 (data), K steps of size 1 / K, velocity
v = noise - data, endpoint estimates x0 = x - t v and x1 = x + (1 - t) v, and sigma(t) = a sqrt(t / (1 - t)) (at t = 1
with the denominator of the next step), a step from t to t' = t - 1/K is the Gaussian

    mean = (1 - t') x0 + (t' - sigma^2 / (2 K t)) x1,    std = sigma / sqrt(K).

On the uniform grid, t = 1 - i/K, the factors of x0 and x1 and the deviation have the closed forms of `_tables`. A model
whose time runs the other way is adapted by `to_noise_time`.

Shape letters: N rows, K denoising steps, H action horizon, A action width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from soma_lightning.models.flow import VelocityFn, euler_times, keyed_generator

Method = Literal["flow_sde", "flow_cps", "flow_noise"]
#: std_fn(x_t [N, H, A], time [N]) -> standard deviation [N, H, A]: the noise network of Flow-Noise.
StdFn = Callable[[Tensor, Tensor], Tensor]

_HALF_LOG_TWO_PI = 0.5 * math.log(2 * math.pi)


@dataclass(frozen=True)
class FlowDraws:
    """The randomness of N samples. noise: float32 [N, H, A], where the flow starts. steps: int64 [N], the stochastic
    step k of each sample, -1 for none. step_noise: float32 [N, H, A] of that step; [N, K, H, A] of all for flow_noise.
    """

    noise: Tensor
    steps: Tensor
    step_noise: Tensor


@dataclass(frozen=True)
class FlowSDE:
    """The stochastic process that a flow policy samples from while it learns.

    num_steps: K. noise_level: a. method: "flow_sde"; "flow_cps" keeps the noise coefficient of the flow exact (arXiv
    2509.05952; its last step is deterministic and never drawn); "flow_noise" makes every step stochastic with a
    deviation from a network of the model, within noise_range, around the Euler step (piRL). ignore_last: never draws
    the last step, whose noise lands on the executed action. noise_range: of "flow_noise" alone.
    Raises ValueError for values out of range and for those that the method would ignore.
    """

    num_steps: int
    noise_level: float = 0.5
    method: Method = "flow_sde"
    ignore_last: bool = False
    noise_range: tuple[float, float] = (0.08, 0.16)

    def __post_init__(self) -> None:
        if self.method not in get_args(Method):
            raise ValueError(f"method={self.method!r} is unknown; known: {', '.join(get_args(Method))}")
        if isinstance(self.num_steps, bool) or not isinstance(self.num_steps, int) or self.num_steps < 1:
            raise ValueError(f"num_steps={self.num_steps!r} must be a whole number from 1")
        if not (math.isfinite(self.noise_level) and self.noise_level > 0):
            raise ValueError(
                f"noise_level={self.noise_level} must be above 0; a policy acts without noise in eval mode"
            )
        low, high = self.noise_range
        if not 0 < low < high:
            raise ValueError(f"noise_range={self.noise_range} must be two deviations, 0 < low < high")
        if self.method == "flow_noise":
            if self.noise_level != 0.5 or self.ignore_last:
                raise ValueError(
                    "flow_noise takes its deviation from a network: noise_level and ignore_last have no effect"
                )
        elif tuple(self.noise_range) != (0.08, 0.16):
            raise ValueError(f"noise_range={self.noise_range} has no effect with method={self.method!r}")
        if self.method == "flow_cps" and self.noise_level >= 1:
            raise ValueError(f"noise_level={self.noise_level} must be below 1 with flow_cps, whose angle is a pi / 2")
        if self.num_drawn < 1:
            raise ValueError(f"num_steps={self.num_steps} leaves no step to draw; use at least 2")

    @property
    def num_drawn(self) -> int:
        """Steps from which the stochastic one is drawn: 0..num_drawn - 1."""
        return self.num_steps - (1 if self.ignore_last or self.method == "flow_cps" else 0)

    @property
    def is_joint(self) -> bool:
        """Whether every step is stochastic, and the log-probability one of the whole chain."""
        return self.method == "flow_noise"

    def draw(
        self, keys: Sequence[Sequence[int]], shape: tuple[int, int], device: torch.device | str = "cpu"
    ) -> FlowDraws:
        """Draws for rows of `shape` (H, A). Row n is a function of keys[n] (non-negative integers) alone."""
        noise, steps, step_noise = [], [], []
        for key in keys:
            generator = keyed_generator(key)
            noise.append(torch.randn(shape, generator=generator))
            steps.append(int(torch.randint(self.num_drawn, (), generator=generator)))
            of_steps = (self.num_steps, *shape) if self.is_joint else shape
            step_noise.append(torch.randn(of_steps, generator=generator))
        return FlowDraws(
            torch.stack(noise).to(device), torch.tensor(steps, device=device), torch.stack(step_noise).to(device)
        )

    def transition(
        self,
        x: Tensor,
        velocity: Tensor,
        step: Tensor,
        stochastic: Tensor,
        noise_level: Tensor | None = None,
        std: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """One step of every row: (mean [N, H, A], standard deviation [N, 1, 1], 0 where not stochastic).

        x, velocity: [N, H, A]. step: int64 [N], 0..K - 1. stochastic: bool [N]. noise_level: float32 [N], by default
        this process's. std: [N, H, A] of flow_noise, which is returned. Nothing depends on values on the host.
        """
        K, i = self.num_steps, step.to(x.dtype)
        if std is not None:
            mean = x - velocity / K
            return mean, torch.where(_wide(stochastic), std, 0.0)
        level = torch.full_like(i, self.noise_level) if noise_level is None else noise_level.to(x.dtype)
        noise_weight, deviation = self._tables(i, level)
        noise_weight = torch.where(stochastic, noise_weight, (K - 1 - i) / K)
        deviation = torch.where(stochastic, deviation, 0.0)
        time = _wide(1 - i / K)
        data, noise = x - time * velocity, x + (1 - time) * velocity
        return _wide((i + 1) / K) * data + _wide(noise_weight) * noise, _wide(deviation)

    def _tables(self, i: Tensor, level: Tensor) -> tuple[Tensor, Tensor]:
        """(weight of the noise estimate, deviation) of a stochastic step i, [N] each."""
        K = self.num_steps
        if self.method == "flow_cps":
            after = (K - 1 - i) / K
            return after * torch.cos(level * (math.pi / 2)), after * torch.sin(level * (math.pi / 2))
        # At i = 0 the denominator 1 - t is that of the next step, so that sigma stays finite.
        safe = i.clamp(min=1)
        deviation = level * ((K - i) / (safe * K)).sqrt()
        return (K - 1 - i) / K - level.square() / (2 * safe), deviation

    @torch.no_grad()
    def sample(
        self,
        velocity_fn: VelocityFn,
        draws: FlowDraws,
        noise_level: Tensor | None = None,
        std_fn: StdFn | None = None,
    ) -> Tensor:
        """All points of the chain, float32 [N, K + 1, H, A]: from the noise to the actions, chains[:, -1].

        Rows with step -1 take Euler steps only and end exactly where `flow.euler_sample` does. std_fn: of flow_noise.
        """
        self._check_std(std_fn)
        x = draws.noise
        chain = [x]
        for i, time in enumerate(euler_times(self.num_steps, x.device)):
            velocity = velocity_fn(x, time.expand(x.shape[0]))
            step = torch.full_like(draws.steps, i)
            stochastic = draws.steps >= 0 if self.is_joint else draws.steps == i
            std = None if std_fn is None else std_fn(x, time.expand(x.shape[0]))
            mean, deviation = self.transition(x, velocity, step, stochastic, noise_level, std)
            noise = draws.step_noise[:, i] if self.is_joint else draws.step_noise
            x = torch.where(_wide(stochastic), mean + deviation * noise, x - velocity / self.num_steps)
            chain.append(x)
        return torch.stack(chain, dim=1)

    def log_prob(
        self,
        velocity_fn: VelocityFn,
        chains: Tensor,
        steps: Tensor,
        noise_level: Tensor | None = None,
        std_fn: StdFn | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(log-probability, entropy) of the recorded stochastic steps, elementwise, float32 [N, H, A], with gradients.

        chains: [N, K + 1, H, A] of `sample`, in the dtype in which they were kept. steps: int64 [N], all 0..K - 1. One
        call of `velocity_fn` with every row at its own time. flow_noise takes K calls, and the mean over the K
        transitions and the start, as RLinf's joint log-probability. ValueError for chains of another number of steps.
        """
        self._check_std(std_fn)
        if chains.shape[1] != self.num_steps + 1:
            raise ValueError(
                f"chains have {chains.shape[1] - 1} steps, this process {self.num_steps}: replay with the num_steps of "
                "sampling"
            )
        chains = chains.float()
        if self.is_joint:
            return self._joint_log_prob(velocity_fn, chains, std_fn)
        rows = torch.arange(chains.shape[0], device=chains.device)
        x, x_next = chains[rows, steps], chains[rows, steps + 1]
        time = euler_times(self.num_steps, chains.device)[steps]
        mean, std = self.transition(x, velocity_fn(x, time), steps, steps >= 0, noise_level)
        return _gaussian(x_next, mean, std.expand_as(mean))

    def _joint_log_prob(self, velocity_fn: VelocityFn, chains: Tensor, std_fn: StdFn | None) -> tuple[Tensor, Tensor]:
        rows, device = chains.shape[0], chains.device
        every_row = torch.ones(rows, dtype=torch.bool, device=device)
        found = [_gaussian(chains[:, 0], torch.zeros_like(chains[:, 0]), torch.ones_like(chains[:, 0]))]
        assert std_fn is not None
        for i, time in enumerate(euler_times(self.num_steps, device)):
            x, at = chains[:, i], time.expand(rows)
            step = torch.full((rows,), i, device=device)
            mean, std = self.transition(x, velocity_fn(x, at), step, every_row, std=std_fn(x, at))
            found.append(_gaussian(chains[:, i + 1], mean, std))
        log_probs, entropies = zip(*found, strict=True)
        return torch.stack(log_probs).mean(0), torch.stack(entropies).mean(0)

    def _check_std(self, std_fn: StdFn | None) -> None:
        if self.is_joint != (std_fn is not None):
            raise ValueError(f"method={self.method!r} {'needs' if self.is_joint else 'takes no'} std_fn")


def to_noise_time(velocity_fn: VelocityFn) -> VelocityFn:
    """Adapts a model whose time runs from noise, 0, to data, 1, with data - noise as velocity (GR00T, MolmoAct2).

    1 - time is exact to float32 only: a model that cuts its time to whole buckets must round it first.
    """
    return lambda x, time: -velocity_fn(x, 1 - time)


def _gaussian(x: Tensor, mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
    """(log-density, entropy), elementwise; both 0 where std is 0: a step without noise says nothing."""
    drawn = std > 0
    safe = torch.where(drawn, std, 1.0)
    log_prob = -0.5 * ((x - mean) / safe).square() - safe.log() - _HALF_LOG_TWO_PI
    entropy = safe.log() + (0.5 + _HALF_LOG_TWO_PI)
    return torch.where(drawn, log_prob, 0.0), torch.where(drawn, entropy, 0.0).expand_as(log_prob)


def _wide(values: Tensor) -> Tensor:
    """[N] -> [N, 1, 1]."""
    return values[:, None, None]
