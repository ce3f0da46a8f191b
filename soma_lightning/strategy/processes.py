"""How the processes of a run find each other and talk: the process group, reduce, broadcast, barrier.

One process has no group: every function here is then the identity.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

T = TypeVar("T")


def join_processes(
    *, rank: int, world_size: int, address: str, port: int, device: torch.device, seconds: float
) -> None:
    """Makes the process group of the run, or keeps the one that is there.

    seconds: how long a collective waits for a rank that does not come.
    """
    if dist.is_initialized():
        return
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = address, str(port)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=seconds),
        device_id=None if device.type == "cpu" else device,
    )


def reduce(value: T, group: Any, reduce_op: Any) -> T:
    """`value` over the ranks of `group` (None: all) in place; what is not a tensor is returned as it is.

    reduce_op: None, "mean", "avg", "sum", or a torch.distributed.ReduceOp. ValueError for another name.
    """
    if not isinstance(value, Tensor):
        return value
    tensor = value.full_tensor() if isinstance(value, DTensor) else value
    name = "mean" if reduce_op is None else reduce_op.lower() if isinstance(reduce_op, str) else None
    if name not in (None, "mean", "avg", "sum"):
        raise ValueError(f"reduce_op={reduce_op!r} is unknown; use 'mean', 'sum' or a torch.distributed.ReduceOp")
    averages = name in ("mean", "avg") or reduce_op == dist.ReduceOp.AVG
    dist.all_reduce(tensor, dist.ReduceOp.SUM if averages or name else reduce_op, group=group)
    if averages:  # as a division: gloo has no mean of integers
        size = dist.get_world_size(group)
        tensor = tensor.div_(size) if tensor.is_floating_point() else tensor.copy_(tensor / size)
    return tensor  # type: ignore[return-value]


def barrier(device: torch.device) -> None:
    """Waits until every rank is here."""
    dist.barrier(device_ids=[device.index] if device.type == "cuda" else None)


def broadcast(value: T, src: int) -> T:
    """The object that rank `src` passed, on every rank."""
    values = [value]
    dist.broadcast_object_list(values, src)
    return values[0]
