"""How do the fp32 values of a file become an optimizer's masters, and how do masters become a file's values again?

A bf16 or fp16 parameter holds rounded values. Its master would start from those; here it starts from the values before
they were rounded, so that loading a checkpoint for low-precision training loses nothing of what trains.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.optim import Optimizer

from soma_lightning.layout.full_state import own_slice
from soma_lightning.optim.fused_adamw import FusedAdamW
from soma_lightning.optim.state import LOW_PRECISION, MASTER_KEY


def has_masters(optimizer: Optimizer) -> bool:
    """True when bf16 and fp16 parameters of `optimizer` have fp32 masters."""
    return isinstance(optimizer, FusedAdamW) and optimizer.master_weights


def named_low_precision(module: Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Parameters of `module` that `optimizer` trains by a master, by name. ValueError if it keeps no masters."""
    if not has_masters(optimizer):
        raise ValueError(
            f"{type(optimizer).__name__} keeps no fp32 masters; use FP32MasterAdamW, or FusedAdamW(master_weights=True)"
        )
    held = {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    return {n: p for n, p in module.named_parameters() if id(p) in held and p.dtype in LOW_PRECISION}


@torch.no_grad()
def seed_master(optimizer: Optimizer, param: Tensor, values: Tensor) -> None:
    """Starts the master of `param` at `values`: float32, the shape of the whole parameter; of a DTensor, its slice.

    An element counts only where it rounds to the parameter's: elsewhere the parameter was changed since. ValueError for
    another shape.
    """
    if values.shape != param.shape:
        raise ValueError(f"values of shape {tuple(values.shape)} cannot be those of a parameter {tuple(param.shape)}")
    fused = cast(FusedAdamW, optimizer)
    fused.init_state()
    whole_or_part, master = param, fused.state[param][MASTER_KEY]
    if isinstance(param, DTensor):
        values, whole_or_part, master = own_slice(values, param), param.to_local(), master.to_local()
    values = values.to(master.device, torch.float32)
    master.copy_(torch.where(values.to(param.dtype) == whole_or_part, values, whole_or_part.float()))


@torch.no_grad()
def master_values(module: Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """fp32 values of every parameter of `module` that `optimizer` trains by a master, by name, before rounding.

    A parameter that was changed by somebody else, or that has no master yet, counts for itself. ValueError if the
    optimizer keeps no masters.
    """
    found = {}
    state: Mapping[Tensor, dict[str, Tensor]] = optimizer.state
    for name, param in named_low_precision(module, optimizer).items():
        master = state[param].get(MASTER_KEY) if param in state else None
        found[name] = param.detach().float() if master is None else _valid(master, param.detach())
    return found


def _valid(master: Tensor, param: Tensor) -> Tensor:
    """`master` itself, no copy, unless somebody else changed the parameter."""
    is_current = master.to(param.dtype) == param
    return master if bool(is_current.all()) else torch.where(is_current, master, param.float())
