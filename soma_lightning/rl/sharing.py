"""How do all ranks of a learner get the fragments that rank 0 received?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import Tensor

from soma_lightning.rl.records import Fragment


def share_fragments(fabric: Fabric, receive: Callable[[], Sequence[Fragment]]) -> Sequence[Fragment]:
    """`receive()` of rank 0, on every rank; with one rank without a copy.

    An error of `receive` is raised on every rank: on the others as a RuntimeError with its message, so that none waits
    for data that will not come.
    """
    if fabric.world_size == 1:
        return receive()
    if fabric.global_rank != 0:
        plan: dict[str, Any] = fabric.broadcast({})
        if "error" in plan:
            raise RuntimeError(f"the rank that receives fragments failed: {plan['error']}")
        return [_received(fabric, entry) for entry in plan["fragments"]]
    try:
        fragments = receive()
    except BaseException as error:
        fabric.broadcast({"error": f"{type(error).__name__}: {error}"})
        raise
    packed = [(*fragment.pack(), fragment.version) for fragment in fragments]
    fabric.broadcast({"fragments": [_described(*one) for one in packed]})
    for tensors, _, _ in packed:
        for tensor in tensors.values():
            _broadcast(fabric, tensor)
    return fragments


def _described(tensors: dict[str, Tensor], facts: dict[str, Any], version: int) -> dict[str, Any]:
    layout = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    return {"layout": layout, "facts": facts, "version": version}


def _received(fabric: Fabric, entry: dict[str, Any]) -> Fragment:
    tensors = {
        name: _broadcast(fabric, torch.empty(shape, dtype=dtype)) for name, (shape, dtype) in entry["layout"].items()
    }
    return Fragment.unpack(tensors, entry["facts"], entry["version"])


def _broadcast(fabric: Fabric, tensor: Tensor) -> Tensor:
    """Rank 0's `tensor`, on the CPU. As bytes: not every back end sends every dtype."""
    place = fabric.device
    sent = tensor.contiguous().reshape(-1).view(torch.uint8).to(place)
    dist.broadcast(sent, src=0)
    return sent.cpu().view(tensor.dtype).reshape(tensor.shape)
