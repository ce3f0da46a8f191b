"""Which part of a tensor this process holds when several divide it, and how often anybody wrote to it.

A DTensor is a wrapper around this process's part. Writes through either count on that one only, and going through
`to_local()` costs more than the rest of a small tensor's step: so both are read here, and only here.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from soma_lightning.optim.groups import label

#: Types of tensors that nobody divides.
_WHOLE = frozenset({Tensor, torch.nn.Parameter})

_version = operator.attrgetter("_version")


def local(tensor: Tensor) -> Tensor:
    """This process's part of a DTensor, no copy; a plain tensor as it is."""
    part = getattr(tensor, "_local_tensor", None)
    if part is None:
        return tensor
    if type(part) is not Tensor and hasattr(part, "wait"):  # a collective that may still be under way
        return cast(Tensor, part.wait())
    return cast(Tensor, part)


def version_of(tensor: Tensor) -> int:
    """A number that moves with every write that torch notices, through a DTensor or through its part."""
    part = getattr(tensor, "_local_tensor", None)
    return tensor._version if part is None else tensor._version + part._version


def version_reader(tensors: Sequence[Tensor]) -> Callable[[Tensor], int]:
    """`version_of`, or what does the same in a third of the time if all tensors are plain."""
    return _version if _WHOLE.issuperset(map(type, tensors)) else version_of


def versions_of(tensors: Sequence[Tensor]) -> list[int]:
    """`version_of` of each."""
    return list(map(version_reader(tensors), tensors))


def local_grad(param: Tensor, grad: Tensor, param_groups: Sequence[dict[str, Any]]) -> Tensor:
    """This process's part of a gradient. param_groups: name the parameter in an error.

    Raises ValueError for a gradient that is divided unlike its parameter, for example a partial sum.
    """
    # FSDP2 gives both the same object.
    same = getattr(grad, "_spec", None) is getattr(param, "_spec", None)
    if not same and _placements(grad) != _placements(param):
        raise ValueError(
            f"the gradient of {label(param, param_groups)} is placed as {_placements(grad)}, the parameter as "
            f"{_placements(param)}; redistribute the gradient before the step"
        )
    return local(grad)


def _placements(tensor: Tensor) -> Any:
    return getattr(tensor, "placements", None)


def refuse_divided(param_groups: Sequence[dict[str, Any]]) -> None:
    """ValueError for a DTensor of several processes: without an owner for each part their norm would be wrong."""
    for group in param_groups:
        for param in group["params"]:
            if hasattr(type(param), "device_mesh") and param.device_mesh.size() > 1:
                raise ValueError(
                    f"{label(param, param_groups)} is divided among {param.device_mesh.size()} processes; "
                    "set FusedAdamW.ownership = Ownership.from_mesh(mesh), which says who counts which part in the norm"
                )
