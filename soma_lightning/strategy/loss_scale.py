"""How ranks keep one loss scale for fp16: the decision of the optimizer step tells the GradScaler what it found.

A GradScaler alone reads and writes every gradient to unscale it and look for infinities, and each rank sees only its
own. `FusedAdamW` divides and looks inside its step, and its one collective answers for all ranks.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from soma_lightning.compat import has_step_hooks
from soma_lightning.optim.fused_adamw import FusedAdamW
from soma_lightning.optim.shards import local


class SharedGradScaler(GradScaler):
    """A GradScaler whose ranks skip the same steps and hence keep the same scale; all of them step together.

    Gradients of a `FusedAdamW` keep their bits and are divided in its step, unless somebody looks at them before it.
    """

    #: Whether a hook between unscaling and step may look at gradients.
    soma_in_place: bool = False

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        fused = isinstance(optimizer, FusedAdamW)
        in_place = not fused or self.soma_in_place or has_step_hooks(optimizer)
        if isinstance(optimizer, FusedAdamW):
            assert self._scale is not None
            optimizer.unscale(1.0 if in_place else self._scale)
        if in_place:
            _unscale_(optimizer, inv_scale, found_inf, allow_fp16)
        if not fused:
            dist.all_reduce(found_inf, op=dist.ReduceOp.MAX)
        return {found_inf.device: found_inf}

    def _maybe_opt_step(self, optimizer: Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if not isinstance(optimizer, FusedAdamW):
            return super()._maybe_opt_step(optimizer, optimizer_state, *args, **kwargs)
        result = optimizer.step(*args, **kwargs)
        for found_inf in optimizer_state["found_inf_per_device"].values():
            found_inf.copy_(optimizer.found_nonfinite)
        return result


def _unscale_(optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool) -> None:
    """Divides this rank's gradients in place; sets `found_inf` to 1 where one is not finite."""
    grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for grad in grads:
        if grad.dtype == torch.float16 and not allow_fp16:
            raise ValueError(
                "a gradient is fp16, and dividing it by the loss scale would lose what the scale saved; keep fp32 "
                "parameters with precision='16-mixed' and keep_low_precision_grads=False"
            )
        by_dtype.setdefault(grad.dtype, []).append(local(grad))
    for same in by_dtype.values():
        torch._amp_foreach_non_finite_check_and_unscale_(same, found_inf, inv_scale)
    # A write to its part does not count on a DTensor.
    torch.autograd.graph.increment_version([grad for grad in grads if local(grad) is not grad])


def share_loss_scale(plugin: Any, *, in_place: bool = False) -> None:
    """Gives the GradScaler of a Lightning precision plugin, if it has one, the answers of all ranks. May be repeated.

    in_place: gradients are divided before the step, in one more pass, because a hook looks at them.
    ValueError for a scaler of an own class, which each rank would update by itself.
    """
    scaler = getattr(plugin, "scaler", None)
    if scaler is None:
        return
    if not isinstance(scaler, SharedGradScaler):
        cls = type(scaler)
        if not (issubclass(cls, GradScaler) and cls.__module__ in _TORCH_SCALERS):
            raise ValueError(
                f"{cls.__qualname__} decides on each rank by itself whether a step is skipped; with several processes "
                "use torch.amp.GradScaler, or precision='bf16-mixed', which needs none"
            )
        scaler.__class__ = _shared(cls)  # type: ignore[arg-type]
    scaler.soma_in_place = in_place


#: Where torch keeps its GradScaler and the same one under older names.
_TORCH_SCALERS = ("torch.amp.grad_scaler", "torch.cuda.amp.grad_scaler", "torch.cpu.amp.grad_scaler")


@functools.cache
def _shared(cls: type[GradScaler]) -> type[SharedGradScaler]:
    return type(cls.__name__, (SharedGradScaler, cls), {"__qualname__": cls.__qualname__, "__module__": cls.__module__})
