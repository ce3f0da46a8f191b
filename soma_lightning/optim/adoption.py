"""How a torch.optim.AdamW becomes a FusedAdamW without anyone who holds it noticing."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, cast

from torch.optim import LBFGS, Adam, AdamW, Optimizer

from soma_lightning.optim.fused_adamw import FusedAdamW
from soma_lightning.optim.groups import unsupported_in_group


def why_not_adopted(optimizer: Optimizer) -> str | None:
    """Why `adopt` refuses `optimizer`, as the end of a sentence; None if it takes it.

    Exact types only: a subclass may compute something else.
    """
    name = type(optimizer).__name__
    if type(optimizer) not in (AdamW, Adam):
        return f"{name} is not torch.optim.AdamW"
    for group in optimizer.param_groups:
        reason = unsupported_in_group(group)
        if reason:
            return f"{name} uses {reason}"
    devices = {p.device for group in optimizer.param_groups for p in group["params"]}
    if len(devices) > 1:
        return f"its parameters live on several devices ({', '.join(sorted(map(str, devices)))})"
    step = optimizer.__dict__.get("step")
    if step is not None and not hasattr(step, "_wrapped_by_lr_sched"):
        return f"{name}.step was replaced on the object"
    return None


def refuse_local_decisions(optimizer: Optimizer) -> None:
    """ValueError for an optimizer that goes wrong, unseen, when its parameters are divided over several ranks."""
    if isinstance(optimizer, LBFGS):
        raise ValueError(
            f"{type(optimizer).__name__} decides by sums over all parameters, and each rank would take them of its own "
            "part; use devices=1 or another optimizer"
        )


def adopt(optimizer: Optimizer, *, master_weights: bool = False) -> FusedAdamW:
    """Turns a torch.optim.AdamW into a FusedAdamW in place: every reference to it stays valid.

    LR schedulers, wrappers and user attributes hold the object itself, and a scheduler has put a `step` on it that
    calls the old class: that one is replaced by an equivalent for the new class. Existing state is kept.
    Raises ValueError with the reason of `why_not_adopted`.
    """
    reason = why_not_adopted(optimizer)
    if reason:
        raise ValueError(f"this optimizer cannot take the fused step: {reason}")
    scheduled = optimizer.__dict__.pop("step", None) is not None
    # Set by AdamW(fused=True): GradScaler would leave the gradients scaled and Lightning would refuse to clip.
    optimizer.__dict__.pop("_step_supports_amp_scaling", None)
    optimizer.__class__ = FusedAdamW
    fused = cast(FusedAdamW, optimizer)
    fused.begin_control(master_weights=master_weights)
    fused._patch_step_function()
    if scheduled:
        _count_steps_for_scheduler(fused)
    return fused


def _count_steps_for_scheduler(optimizer: FusedAdamW) -> None:
    """What torch.optim.lr_scheduler does to an optimizer: it warns when no step was counted before its own."""
    reference = weakref.ref(optimizer)
    function = type(optimizer).step

    @functools.wraps(function)
    def step(closure: Callable[[], Any] | None = None) -> Any:
        target = reference()
        assert target is not None
        target._opt_called = True  # type: ignore[attr-defined]
        return function(target, closure)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = step  # type: ignore[method-assign]
