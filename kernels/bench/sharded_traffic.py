"""What does a rank send in a step, which frozen parameters does it gather, and how long does the norm's sum take?

Measured in steps of their own, which nobody times: torch's collectives are wrapped while they run. FSDP2 is asked for
its gathered units (private names; torch 2.11 and 2.13 have them). DDP reduces in C++, where nothing can be wrapped: its
buckets are the gradients, so they are counted as one all-reduce of all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as groups

from bench.timing import synchronize
from soma_lightning.compat import fsdp_groups
from soma_lightning.optim.ownership import Ownership

#: The names of one collective in torch: the second one is that of torch 2.13.
_COLLECTIVES = {
    "all_gather": ("all_gather_into_tensor", "all_gather_single"),
    "reduce_scatter": ("reduce_scatter_tensor", "reduce_scatter_single"),
    "all_reduce": ("all_reduce",),
}
#: Calls of the norm's collective by itself, after the training.
ALONE_CALLS = 200


@dataclass
class Traffic:
    """Of one rank, over `steps` steps.

    sent: bytes over the link by collective, in one direction. calls: collectives. frozen_gathered: bytes of frozen
    parameters that FSDP2 gathered. frozen_held: most bytes of gathered frozen parameters at a gradient reduction.
    norm_us: of each call of the norm's sum, between two events on the device around it.
    """

    steps: int = 0
    sent: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)
    frozen_gathered: int = 0
    frozen_held: int = 0
    norm_us: list[float] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; bytes and calls of one step."""
        steps = max(self.steps, 1)
        return {
            "sent": {name: count / steps for name, count in self.sent.items()},
            "calls": {name: count / steps for name, count in self.calls.items()},
            "frozen_gathered": self.frozen_gathered / steps,
            "frozen_held": self.frozen_held,
            "norm_us": self.norm_us,
        }


@contextmanager
def counted(traffic: Traffic, root: nn.Module) -> Iterator[None]:
    """Counts in `traffic` what the steps inside send. root: the module that was sharded, or that holds it."""
    with ExitStack() as stack:
        for kind, names in _COLLECTIVES.items():
            for name in names:
                if hasattr(dist, name):
                    stack.enter_context(patch.object(dist, name, _counting(getattr(dist, name), kind, traffic)))
        stack.enter_context(patch.object(groups, "foreach_all_gather", _gathering(groups.foreach_all_gather, traffic)))
        sharded = [group for m in root.modules() if isinstance(m, FSDPModule) for group in fsdp_groups(m)]
        stack.enter_context(patch.object(groups, "foreach_reduce", _holding(groups.foreach_reduce, sharded, traffic)))
        stack.enter_context(patch.object(Ownership, "all_reduce_", _timing(Ownership.all_reduce_, traffic)))
        yield


def count_ddp(traffic: Traffic, trained: Iterable[nn.Parameter]) -> None:
    """Adds one step of DDP: one all-reduce of all gradients, in both of its halves."""
    sizes = sum(p.grad.numel() * p.grad.itemsize for p in trained if p.grad is not None)
    traffic.sent["all_reduce"] += int(2 * _share() * sizes)
    traffic.calls["all_reduce"] += 1


def _share(group: Any = None) -> float:
    size = dist.get_world_size(group)
    return (size - 1) / size


def _counting(original: Callable[..., Any], name: str, traffic: Traffic) -> Callable[..., Any]:
    def call(*args: Any, **named: Any) -> Any:
        # The larger of the two tensors: what is gathered, or what is divided.
        size = max(t.numel() * t.itemsize for t in (*args, *named.values()) if isinstance(t, Tensor))
        traffic.sent[name] += int(_share(named.get("group")) * size * (2 if name == "all_reduce" else 1))
        traffic.calls[name] += 1
        return original(*args, **named)

    return call


def _frozen_bytes(params: Iterable[Any]) -> int:
    frozen = (p for p in params if not p.sharded_param.requires_grad)
    return sum(p.sharded_param.numel() * (p.param_dtype or p.orig_dtype).itemsize for p in frozen)


def _gathering(original: Callable[..., Any], traffic: Traffic) -> Callable[..., Any]:
    def call(params: Any, *rest: Any, **named: Any) -> Any:
        traffic.frozen_gathered += _frozen_bytes(params)
        return original(params, *rest, **named)

    return call


def _holding(original: Callable[..., Any], sharded: list[Any], traffic: Traffic) -> Callable[..., Any]:
    def call(*args: Any, **named: Any) -> Any:
        # A gather that nobody waited for holds its buffer, too.
        held = [g.fsdp_params for g in sharded if g.is_unsharded or g._all_gather_result is not None]
        traffic.frozen_held = max(traffic.frozen_held, sum(map(_frozen_bytes, held)))
        return original(*args, **named)

    return call


def _timing(original: Callable[..., None], traffic: Traffic) -> Callable[..., None]:
    def call(ownership: Ownership, vector: Tensor, norm_type: float) -> None:
        if vector.device.type != "cuda":
            original(ownership, vector, norm_type)
            return
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        original(ownership, vector, norm_type)
        end.record()
        end.synchronize()
        traffic.norm_us.append(start.elapsed_time(end) * 1e3)

    return call


def norm_sum_alone_us(device: torch.device) -> float | None:
    """Microseconds of one sum of a vector of the norm's size, back to back on an idle device; None without ranks."""
    if not dist.is_initialized() or device.type != "cuda":
        return None
    vector = torch.zeros(4, device=device)
    for _ in range(20):
        dist.all_reduce(vector)
    synchronize(device)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(ALONE_CALLS):
        dist.all_reduce(vector)
    end.record()
    synchronize(device)
    return float(start.elapsed_time(end)) * 1e3 / ALONE_CALLS


def gather_bandwidth(device: torch.device) -> float | None:
    """Bytes a second that a rank receives in all-gathers of 256 MiB; None without ranks or on a CPU."""
    if not dist.is_initialized() or device.type != "cuda":
        return None
    part = torch.zeros(1 << 27, dtype=torch.bfloat16, device=device)
    whole = torch.empty(dist.get_world_size() * part.numel(), dtype=part.dtype, device=device)
    for _ in range(3):
        dist.all_gather_into_tensor(whole, part)
    synchronize(device)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(10):
        dist.all_gather_into_tensor(whole, part)
    end.record()
    synchronize(device)
    received = 10 * (dist.get_world_size() - 1) * part.numel() * part.itemsize
    return received / (float(start.elapsed_time(end)) / 1e3)
