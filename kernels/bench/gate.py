"""Is the step right on exactly what is about to be timed? Three clipped steps against float64, all on the device.

The rule is that of `soma_kernels.testing.assert_close`, written with batched operations: a billion parameters are
compared where they are. Plain torch in the same dtypes takes the same steps; our error over the whole set may be
FACTOR_OVER_TORCH times torch's. One tensor alone may be small, and its mean then scatters: it is held to the dtype's
TOLERANCE with a margin for few elements, and each element to ELEMENT_FACTOR times that, unless torch is further off.
All values of a quantity are drawn alike, so its RMS over the set is the scale of every error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from bench.peers import Hyper, Ours, TorchAdamW
from bench.registry import Case, ParameterSet
from bench.workload import Workload, chunks
from soma_kernels.testing import ELEMENT_FACTOR, FACTOR_OVER_TORCH, TOLERANCE, nan_filled_empty
from soma_lightning.optim.state import MASTER_KEY

#: Gradient norm of each step: clipped, not clipped, clipped hard.
NORMS = (2.0, 0.5, 50.0)
#: A learning rate and a decay that move a bf16 parameter by many units in the last place.
HYPER = Hyper(lr=1e-3, weight_decay=0.1)
#: The clip coefficient is one rounded fp32 number for all elements; the second moment squares it.
SHARED_ROUNDING = 2 * torch.finfo(torch.float32).eps

BuildOurs = Callable[[Sequence[Parameter], Case, Hyper], Ours]


class WrongResultError(Exception):
    """The step under test is wrong: no time of it may be shown."""


@dataclass
class Verdict:
    """What was compared for one set and case.

    errors: {quantity: (our relative RMS error, torch's)}. norm_error: largest relative error of our gradient norm.
    """

    set: str
    case: str
    errors: dict[str, tuple[float, float]] = field(default_factory=dict)
    norm_error: float = 0.0

    @property
    def shared(self) -> float:
        """Error that every element inherits from the norm, which has its own bound."""
        return SHARED_ROUNDING + 2 * self.norm_error


class Float64AdamW:
    """AdamW (Loshchilov and Hutter 2019, algorithm 2) after clipping by the global norm, on one flat vector."""

    def __init__(self, params: Sequence[Tensor], hyper: Hyper) -> None:
        self._hyper, self._steps = hyper, 0
        self.param = torch.cat([_flat(p) for p in params]).double()
        self.exp_avg, self.exp_avg_sq = torch.zeros_like(self.param), torch.zeros_like(self.param)

    def step(self, gradients: Sequence[Tensor]) -> float:
        """Takes one step and returns the norm before clipping."""
        h = self._hyper
        self._steps += 1
        squares = [torch.cat([_flat(gradients[i]) for i in run]).double().square_().sum() for run in chunks(gradients)]
        norm = torch.stack(squares).sum().sqrt()
        coefficient = (h.max_norm / (norm + 1e-6)).clamp(max=1.0)
        start = 0
        for run in chunks(gradients):
            g = torch.cat([_flat(gradients[i]) for i in run]).double().mul_(coefficient)
            p, m, v = (x[start : start + g.numel()] for x in (self.param, self.exp_avg, self.exp_avg_sq))
            start += g.numel()
            p.mul_(1 - h.lr * h.weight_decay)
            m.mul_(h.beta1).add_(g, alpha=1 - h.beta1)
            v.mul_(h.beta2).addcmul_(g, g, value=1 - h.beta2)
            denominator = (v / (1 - h.beta2**self._steps)).sqrt_().add_(h.eps)
            p.addcdiv_(m, denominator, value=-h.lr / (1 - h.beta1**self._steps))
        return norm.item()


def _flat(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1)


@torch.no_grad()
def check(parameter_set: ParameterSet, case: Case, device: torch.device, build_ours: BuildOurs = Ours) -> Verdict:
    """Three steps of ours, of torch and of float64 from the same start; raises WrongResultError naming what is off.

    Memory that our step allocates is filled with NaN first, and gradients must keep their bits.
    """
    verdict = Verdict(parameter_set.name, case.name)
    workload = Workload(parameter_set, case, device, num_gradient_sets=1, seed=1)
    gradients = workload.gradients[0]
    theirs = [Parameter(p.detach().clone()) for p in workload.params]
    truth = Float64AdamW(workload.params, HYPER)
    ours = build_ours(workload.params, case, HYPER)
    widened = case.state != case.param
    plain = TorchAdamW(theirs, HYPER, "foreach", fp32_targets=widened, rounded=widened and not case.master)
    for step, norm in enumerate(NORMS, start=1):
        workload.draw_gradients(0, std=norm / math.sqrt(parameter_set.parameters))
        kept = [g.clone() for g in gradients]
        expected_norm = truth.step(gradients)
        with nan_filled_empty():
            ours.step()
        _check_gradients(verdict, step, gradients, kept)
        _check_norm(verdict, step, ours.optimizer.last_grad_norm.item(), expected_norm)
        for p, g in zip(theirs, kept, strict=True):
            p.grad = g
        plain.step()
    _check_state(verdict, workload.params, ours, theirs, plain, truth)
    return verdict


def _check_gradients(verdict: Verdict, step: int, gradients: Sequence[Tensor], kept: Sequence[Tensor]) -> None:
    bits = {4: torch.int32, 2: torch.int16}[gradients[0].itemsize]
    for run in chunks(gradients):
        now, before = (torch.cat([_flat(tensors[i]) for i in run]).view(bits) for tensors in (gradients, kept))
        if not torch.equal(now, before):
            raise _wrong(verdict, f"step {step} wrote into a gradient")


def _check_norm(verdict: Verdict, step: int, got: float, expected: float) -> None:
    error = abs(got - expected) / expected
    verdict.norm_error = max(verdict.norm_error, error)
    if not error <= TOLERANCE[torch.float32]:
        raise _wrong(verdict, f"the norm of step {step} is {got:.9g}, float64 has {expected:.9g}")


def _check_state(
    verdict: Verdict,
    params: Sequence[Tensor],
    ours: Ours,
    theirs: Sequence[Tensor],
    plain: TorchAdamW,
    truth: Float64AdamW,
) -> None:
    our_state = [ours.optimizer.state[p] for p in params]
    torch_state = [plain.optimizer.state[t] for t in plain.targets]
    counted = torch.stack([s["step"].reshape(()) for s in our_state])
    if not (counted == len(NORMS)).all():
        raise _wrong(verdict, f"a step counter is not {len(NORMS)} after {len(NORMS)} steps")
    _compare(verdict, "parameter", params, theirs, truth.param)
    for key, reference in (("exp_avg", truth.exp_avg), ("exp_avg_sq", truth.exp_avg_sq)):
        _compare(verdict, key, [s[key] for s in our_state], [s[key] for s in torch_state], reference)
    if ours.optimizer.master_weights:
        masters = [s[MASTER_KEY] for s in our_state]
        _compare(verdict, "master", masters, plain.targets, truth.param)
        for run in chunks(params):
            held, master = (torch.cat([_flat(tensors[i]) for i in run]) for tensors in (params, masters))
            if not torch.equal(held, master.to(held.dtype)):
                raise _wrong(verdict, "a parameter is not its master, rounded")


class _Errors(NamedTuple):
    """[n] float64 on the host, one value for each non-empty tensor, in units of the truth's RMS over the whole set.

    ours, torch: RMS error. worst: our largest error of one element, over the sum of its size and the RMS.
    numel: elements.
    """

    ours: Tensor
    torch: Tensor
    worst: Tensor
    numel: Tensor

    def of_set(self, errors: Tensor) -> float:
        """RMS over all elements of all tensors."""
        return float(((errors.square() * self.numel).sum() / self.numel.sum()).sqrt())


def _compare(
    verdict: Verdict, quantity: str, ours: Sequence[Tensor], theirs: Sequence[Tensor], truth_flat: Tensor
) -> None:
    """Holds `ours` to the three bounds of this file and writes the errors into `verdict`."""
    dtype = ours[0].dtype
    if dtype != theirs[0].dtype:
        raise _wrong(verdict, f"{quantity} has dtype {dtype}, expected {theirs[0].dtype}")
    positions: list[int] = []
    columns: list[Tensor] = []
    rms = float(truth_flat.norm()) / math.sqrt(truth_flat.numel())
    start = 0
    for run in chunks(ours):
        sizes = [ours[i].numel() for i in run]
        truth = list(torch.split(truth_flat[start : start + sum(sizes)], sizes))
        start += sum(sizes)
        positions += run
        columns.append(_errors_on_device([ours[i] for i in run], [theirs[i] for i in run], truth, rms))
    errors = _Errors(*torch.cat(columns, dim=1).cpu())
    _judge_set(verdict, quantity, dtype, errors)
    _judge_tensors(verdict, quantity, dtype, errors, [f"{i}, shape {tuple(ours[i].shape)}" for i in positions])


def _errors_on_device(ours: Sequence[Tensor], theirs: Sequence[Tensor], truth: list[Tensor], rms: float) -> Tensor:
    """[4, n] float64: the rows of `_Errors`. rms: of the truth over the whole set."""
    numel = torch.tensor([t.numel() for t in truth], dtype=torch.float64, device=truth[0].device)
    torch_error = torch.stack(torch._foreach_norm(torch._foreach_sub([_flat(x).double() for x in theirs], truth)))
    difference = torch._foreach_sub([_flat(x).double() for x in ours], truth)
    error = torch.stack(torch._foreach_norm(difference))
    share = torch._foreach_div(torch._foreach_abs(difference), torch._foreach_add(torch._foreach_abs(truth), rms))
    worst = torch.stack(torch._foreach_norm(share, math.inf))
    scale = rms * numel.sqrt()
    return torch.stack([error / scale, torch_error / scale, worst, numel])


def _judge_set(verdict: Verdict, quantity: str, dtype: torch.dtype, errors: _Errors) -> None:
    ours, plain = errors.of_set(errors.ours), errors.of_set(errors.torch)
    verdict.errors[quantity] = (ours, plain)
    limit = max(FACTOR_OVER_TORCH * plain, torch.finfo(dtype).eps / 4) + verdict.shared
    if not ours <= limit:  # NaN is not either
        raise _wrong(verdict, f"{quantity}: relative RMS error {ours:.3e} exceeds {limit:.3e}; torch has {plain:.3e}")


def _judge_tensors(verdict: Verdict, quantity: str, dtype: torch.dtype, errors: _Errors, names: Sequence[str]) -> None:
    few = 1 + 4 / errors.numel.sqrt()  # how far a mean of so many squared errors may scatter
    limits = torch.maximum(FACTOR_OVER_TORCH * errors.torch, TOLERANCE[dtype] * few) + verdict.shared
    for measure, values, bounds in (
        ("relative RMS error", errors.ours, limits),
        ("largest error of one element over its scale", errors.worst, ELEMENT_FACTOR * limits),
    ):
        bad = (~(values <= bounds)).nonzero().flatten().tolist()
        if bad:
            raise _wrong(
                verdict,
                f"{quantity} of tensor {names[bad[0]]}: {measure} {values[bad[0]].item():.3e} exceeds "
                f"{bounds[bad[0]].item():.3e}; {len(bad)} of {len(names)} tensors are off",
            )


def _wrong(verdict: Verdict, message: str) -> WrongResultError:
    return WrongResultError(f"{verdict.set}, {verdict.case}: {message}")
