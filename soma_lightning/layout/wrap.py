"""Which modules become sharding units, and which parameters stay out of them: a plan, made without processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy


@dataclass(frozen=True)
class Unit:
    """One `fully_shard` call. name: qualified name of the (first) module, "" for the root."""

    name: str
    modules: tuple[nn.Module, ...]
    mp: MixedPrecisionPolicy | None
    buffer_dtype: torch.dtype | None
    reshard_after_forward: bool | None
    trainable: bool
    keep_low_precision_grads: bool


@dataclass(frozen=True)
class UnitPlan:
    """units: inside-out, root last. replicated: qualified names of parameters that stay whole on every rank."""

    units: tuple[Unit, ...]
    replicated: tuple[str, ...]


def plan_units(root: nn.Module, options: Any, *, precision: str) -> UnitPlan:
    """Items of ModuleList and Sequential, and the root; frozen parameters are replicated unless frozen="shard"."""
    named = list(root.named_parameters())
    keep = [name for name, p in named if p.ndim == 0 or (not p.requires_grad and options.frozen != "shard")]
    out = {id(p) for name, p in named if name in set(keep)}
    units = [
        _unit(name, module, options.reshard_after_forward)
        for name, module in reversed(list(_items(root)))
        if any(id(p) not in out for p in module.parameters())
    ]
    return UnitPlan((*units, _unit("", root, None)), tuple(keep))


def _items(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in root.named_modules():
        parent = root.get_submodule(name.rpartition(".")[0])
        if name and isinstance(parent, nn.ModuleList | nn.Sequential):
            yield name, module


def _unit(name: str, module: nn.Module, reshard: bool | None) -> Unit:
    trainable = any(p.requires_grad for p in module.parameters())
    return Unit(name, (module,), None, None, reshard if trainable else True, trainable, False)
