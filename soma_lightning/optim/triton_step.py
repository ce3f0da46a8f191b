"""The optimizer step by Triton kernels: two passes over the gradients, and nothing that waits for the device."""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any

from torch import Tensor

from soma_kernels.optim.plan import Hyper
from soma_kernels.optim.reference import GradStats
from soma_kernels.runtime import KERNEL_DTYPES, device_facts, has_triton, is_interpreter
from soma_lightning.optim.clipping import ClipRule
from soma_lightning.optim.groups import clip_limits, is_capturing
from soma_lightning.optim.step_plan import StepPlan, grad_of, requires_grad

if TYPE_CHECKING:
    from soma_lightning.optim.fused_adamw import FusedAdamW
    from soma_lightning.optim.reference_step import ReferenceWork

#: Triton's own limit for bf16.
MIN_CAPABILITY = (8, 0)


def why_no_kernels(params: Sequence[Tensor], *, interpreted: bool) -> str | None:
    """Why these parameters cannot take the kernels, as words for the report; None if they can.

    interpreted: the interpreter on the CPU is welcome, if TRITON_INTERPRET=1 asks for it.
    """
    device = params[0].device
    if device.type != "cuda" and not (device.type == "cpu" and interpreted and has_triton() and is_interpreter()):
        return f"no kernels for {device.type}"
    facts = device_facts(device)
    if not facts.triton:
        return "Triton is not installed"
    if device.type == "cuda" and facts.capability < MIN_CAPABILITY:
        return f"compute capability {facts.capability} is below {MIN_CAPABILITY}"
    for param in params:
        for dtype in (param.dtype, param.dtype if param.grad is None else param.grad.dtype):
            if dtype not in KERNEL_DTYPES:
                return f"a parameter of shape {tuple(param.shape)} has dtype {dtype}"
    return None


@dataclass(frozen=True)
class TritonWork:
    """The gradients of one step. params: the plan's, with or without a gradient. absent: positions of those without.
    copies: of gradients whose memory is laid out unlike their parameter's.
    """

    plan: StepPlan
    grads: Sequence[Tensor]
    absent: Collection[int]
    copies: list[Tensor]

    @property
    def params(self) -> Sequence[Tensor]:
        return self.plan.params

    def statistics(self, optimizer: FusedAdamW, norm_type: float) -> GradStats:
        """One pass over the local gradients."""
        from soma_kernels.optim.grad_stats import grad_stats

        return grad_stats(self.plan.work, self.plan.table, norm_type=norm_type)

    def update(self, optimizer: FusedAdamW, stats: GradStats, rule: ClipRule) -> None:
        """Applies `rule` and AdamW, or counts a skipped step; the device decides."""
        from soma_kernels.optim.adamw_step import adamw_step_

        plan, control = self.plan, optimizer._control
        plan.stage_in()
        control.last_grad_norm = adamw_step_(
            plan.work,
            plan.states,
            plan.table,
            stats,
            control.counters_on(plan.work.device),
            normalize=rule.divides,
            max_value=rule.max_value,
        )
        plan.stage_out(self.absent)
        plan.count_update(self.absent)


class TritonStep:
    """Statistics, decision and update by `soma_kernels.optim`."""

    description = "Triton kernels"

    def __init__(self) -> None:
        self._plan: StepPlan | None = None
        #: How often something was prepared; an undisturbed training loop does it once.
        self.plans_made = 0

    def collect(self, optimizer: FusedAdamW, rule: ClipRule) -> TritonWork | ReferenceWork | None:
        """Reads where the gradients are and tells the device, with this step's hyperparameters and limits.

        None if no parameter has a gradient. Raises ValueError for a sparse gradient, RuntimeError if something must be
        prepared while a CUDA graph is captured.
        """
        limits = clip_limits(optimizer.param_groups, rule)
        everyone = list(chain.from_iterable(group["params"] for group in optimizer.param_groups))
        grads: list[Tensor | None] = list(map(grad_of, everyone))
        if not all(map(requires_grad, everyone)):
            grads = [g if p.requires_grad else None for p, g in zip(everyone, grads, strict=True)]
        if not any(map(operator.is_not, grads, repeat(None))):
            return None
        plan = self._plan
        if plan is None or not plan.fits(optimizer, everyone, grads):
            _refuse_in_capture(everyone)
            if plan is not None:
                optimizer._control.versions_of_masters.update(plan.versions_of_masters())
            path = optimizer._choose_path()
            if not isinstance(path, TritonStep):  # the parameters were moved or converted
                optimizer._control.path = path
                return path.collect(optimizer, rule)
            plan = self._plan = StepPlan(optimizer, everyone)
            self.plans_made += 1
            optimizer._control.known = None  # its partial sums are in the old plan's order
        present = grads if plan.complete else [grads[i] for i in plan.members]
        present_grads, addresses, copies = plan.read(present, optimizer.param_groups)
        plan.table.write(addresses, _hypers(optimizer.param_groups), limits)
        complete = len(present_grads) == len(present)
        absent = () if complete else {i for i, g in enumerate(present) if g is None}
        return TritonWork(plan, present_grads, absent, copies)

    def first_nonfinite(self, stats: GradStats) -> int | None:
        """Position of the first parameter whose gradient was not finite; waits for the device."""
        from soma_kernels.optim.grad_stats import tensor_of_first_nonfinite

        return None if self._plan is None else tensor_of_first_nonfinite(self._plan.work, stats.partials)


def _hypers(param_groups: Sequence[dict[str, Any]]) -> list[Hyper]:
    return [
        Hyper(
            _number_or_device_tensor(g["lr"]), float(g["betas"][0]), float(g["betas"][1]), g["eps"], g["weight_decay"]
        )
        for g in param_groups
    ]


def _number_or_device_tensor(value: float | Tensor) -> float | Tensor:
    return value.item() if isinstance(value, Tensor) and value.device.type == "cpu" else value


def _refuse_in_capture(params: Sequence[Tensor]) -> None:
    if is_capturing(params):
        raise RuntimeError(
            "this optimizer step has to prepare memory (it is the first one, or parameters, gradients or state changed "
            "since the last) and cannot be captured in a CUDA graph; run one step before the capture"
        )
