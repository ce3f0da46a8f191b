"""Which private corners of Lightning and torch this package leans on, in one place; `tests/canaries` tests them.

Lightning is imported inside the functions, so that importing this module costs nothing.
"""

from __future__ import annotations

import torch
from torch.amp.grad_scaler import GradScaler, OptState
from torch.nn import Module
from torch.optim import Optimizer


def unwrap_optimizer(optimizer: Optimizer) -> Optimizer:
    """The user's optimizer inside Lightning's wrapper, which imitates its class but not its state."""
    from lightning.pytorch.core.optimizer import LightningOptimizer

    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


def is_still_scaled(scaler: GradScaler | None, optimizer: Optimizer) -> bool:
    """Whether `scaler` has yet to unscale the gradients of `optimizer` for its next step."""
    if scaler is None or not scaler.is_enabled():
        return False
    states = scaler._per_optimizer_states
    return id(optimizer) not in states or states[id(optimizer)]["stage"] is OptState.READY


def count_as_single_device(strategy_class: type, *, fabric: bool) -> None:
    """Makes `isinstance(strategy, SingleDeviceStrategy)` true for a strategy of one process.

    Lightning asks this and nothing else: the Trainer before it accepts a `torch.compile`d module, Fabric before it
    lets a program go on without `launch()`. Both are right for one process and wrong for several.
    """
    if fabric:
        from lightning.fabric.strategies import SingleDeviceStrategy as FabricSingleDeviceStrategy

        FabricSingleDeviceStrategy.register(strategy_class)
    else:
        from lightning.pytorch.strategies import SingleDeviceStrategy

        SingleDeviceStrategy.register(strategy_class)


def keep_reduced_gradients_in(module: Module, dtype: torch.dtype) -> None:
    """Makes FSDP2 hand the reduced gradients of a unit to its parameters in `dtype` instead of the parameters' own.

    Every parameter of the unit must have `grad_dtype` set to `dtype`. Lasts until FSDP2 reads the unit's dtypes again
    (lazy initialization). Raises RuntimeError if this version of torch keeps the record elsewhere.
    """
    from torch.distributed.fsdp import fully_shard

    state = fully_shard.state(module)  # type: ignore[attr-defined]
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # torch < 2.12 has one group a unit
        groups = [group for group in [state._fsdp_param_group] if group is not None]
    for group in groups:
        if not hasattr(group, "_orig_dtype"):
            raise RuntimeError(
                f"torch {torch.__version__} cannot keep reduced gradients in {dtype}: FSDP2 does not record the "
                "original dtype where this version expects it; use keep_low_precision_grads=False"
            )
        group._orig_dtype = dtype


def completes_partial_units() -> bool:
    """Whether FSDP2 finishes the forward pass of `fully_shard([a, b])` when only one of the two ran.

    Before torch 2.13 it waits for the other one, in later passes too, and parameters stay as they were.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    return hasattr(FSDPState, "_force_complete_incomplete_states")
