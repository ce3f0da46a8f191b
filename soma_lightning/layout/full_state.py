"""How the tensors of a checkpoint file and the shards of a run turn into each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn import Module
from torch.optim import Optimizer


@torch.no_grad()
def gather(tree: Any, *, keep: bool) -> Any:
    """`tree` (dicts, lists and tuples) with every tensor on the CPU, DTensors whole; other values as they are.

    A collective: every rank calls it with a tree of the same structure. One tensor is whole at a time; ranks with
    keep=False hold none and get None in their places, and plain tensors as they are.
    """
    if isinstance(tree, DTensor):
        whole = tree.full_tensor().detach()
        return whole.cpu() if keep else None
    if isinstance(tree, Tensor):
        return tree.cpu() if keep else tree
    if isinstance(tree, Mapping):
        items = {key: gather(value, keep=keep) for key, value in tree.items()}
        return items if type(tree) is dict else _like(tree, items)
    if type(tree) in (list, tuple):
        return type(tree)(gather(value, keep=keep) for value in tree)
    return tree


def _like(mapping: Any, items: dict[Any, Any]) -> Any:
    """A mapping of the same class (a state dict carries its versions as an attribute)."""
    if not any(items[key] is not value for key, value in mapping.items()):
        return mapping
    copied: Any = mapping.copy() if hasattr(mapping, "copy") else dict(mapping)
    copied.update(items)
    if hasattr(mapping, "_metadata"):
        copied._metadata = mapping._metadata
    return copied


def shard_like(whole: Tensor, target: Tensor) -> Tensor:
    """This rank's part of `whole` [the global shape of `target`], as a DTensor placed like `target`.

    Nothing is communicated: every rank has read the file. A tensor that fits a plain `target`, or that is a DTensor
    already, is returned as it is.
    """
    if not isinstance(target, DTensor) or isinstance(whole, DTensor) or whole.shape != target.shape:
        return whole
    return distribute_tensor(
        whole.detach().to(target.device), target.device_mesh, target.placements, src_data_rank=None
    )


def own_slice(whole: Tensor, target: DTensor) -> Tensor:
    """This rank's part of `whole` [the global shape of `target`], as a view: of a mapped file, nothing else is read.

    Raises ValueError for placements other than Shard and Replicate.
    """
    coordinate = target.device_mesh.get_coordinate()
    assert coordinate is not None
    part = whole
    for place, size, index in zip(target.placements, target.device_mesh.shape, coordinate, strict=True):
        if type(place) is Shard:
            length = part.shape[place.dim]
            step = -(-length // size)  # as torch.chunk: the last parts may be short or empty
            start = min(index * step, length)
            part = part.narrow(place.dim, start, min(step, length - start))
        elif not isinstance(place, Replicate):
            raise ValueError(f"a parameter is placed {place}; only Shard and Replicate can take a slice of a file")
    return part


def is_sharded(module: Module) -> bool:
    """Whether this rank holds parts of parameters of `module`, so that reading it whole takes all ranks."""
    return any(isinstance(p, DTensor) for p in module.parameters())


def show_shards(root: Module) -> None:
    """Frees parameters that a forward pass left gathered, so that those of `root` are its shards.

    What is written to a shard is then what the next forward pass gathers.
    """
    for module in root.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def accept_full_tensors(root: Module) -> None:
    """Lets `load_state_dict` of `root` and of every module in it take whole tensors."""
    for module in root.modules():
        module.register_load_state_dict_pre_hook(_shard_own_parameters)  # type: ignore[no-untyped-call]


def _shard_own_parameters(module: Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    for name, parameter in module._parameters.items():
        value = state_dict.get(prefix + name)
        if parameter is not None and isinstance(value, Tensor):
            state_dict[prefix + name] = shard_like(value, parameter)


def accept_full_state(optimizer: Optimizer) -> None:
    """Lets `load_state_dict` of `optimizer` take a state of whole tensors; parameters are matched by position."""
    optimizer.register_load_state_dict_pre_hook(_shard_state)


def _shard_state(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    live = [p for group in optimizer.param_groups for p in group["params"]]
    ids = [i for group in state_dict.get("param_groups", []) for i in group["params"]]
    if len(ids) != len(live):
        return state_dict  # the optimizer itself says what does not fit
    target = dict(zip(ids, live, strict=True))
    state = {
        i: {key: shard_like(v, target[i]) if isinstance(v, Tensor) else v for key, v in entry.items()}
        if i in target
        else entry
        for i, entry in state_dict["state"].items()
    }
    return {**state_dict, "state": state}
