"""How do gradients of parameters that are whole on every rank become those of all ranks?

They are summed in buckets whose memory they keep: no copy back. A bucket is on its way as soon as its last gradient is
there, while the backward pass goes on. A parameter may be without a gradient on some ranks only, where a batch takes
another branch; each bucket says who had one.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

#: Large enough for the full rate of a link, small enough that little is left to do after the backward pass.
BUCKET_BYTES = 32 * 2**20


class WholeGradients:
    """Reduces the gradients of `params`, which every rank holds in this order.

    reduce_dtypes: dtype of the sum where it is not fp32.
    """

    def __init__(self, params: Sequence[Tensor], reduce_dtypes: Mapping[Tensor, torch.dtype]) -> None:
        self._params, self._reduce_dtypes = params, reduce_dtypes
        #: Those whose gradients are sums over all ranks already.
        self._summed: set[Tensor] = set()
        #: Until the first backward pass that is told of: one that is not would leave each rank its own gradients.
        self._guards = [
            param.register_post_accumulate_grad_hook(_refuse_unseen_pass)  # type: ignore[no-untyped-call]
            for param in params
            if param.requires_grad
        ]
        #: The nodes that write gradients: a hook on one lives as long as the node.
        self._writers: dict[Tensor, Any] = {}
        #: Buckets of the present pass, in the order in which they are sent, and how many of them were.
        self._buckets: list[_Bucket] = []
        self._sent = 0
        self._bucket_of: dict[Tensor, _Bucket] = {}

    def before_backward(self, *, is_first_rank: bool, overlaps: bool) -> None:
        """Call before every backward pass: sums of the pass before are not summed again.

        overlaps: whether buckets are sent during the pass, which `reduce` must follow. Nothing else may then use the
        process group until `reduce`: ranks would not agree on an order.
        """
        while self._guards:
            self._guards.pop().remove()
        # The next sum has them from the first rank. Frozen ones are not in it: they wait, whole on every rank.
        for param in [p for p in self._summed if p.requires_grad]:
            self._summed.discard(param)
            if param.grad is not None and not is_first_rank:
                param.grad.zero_()
        self._buckets = self._make_buckets() if overlaps else []
        self._bucket_of = {param: bucket for bucket in self._buckets for param in bucket.params}
        self._sent = 0
        for param in self._bucket_of:
            self._watch(param)

    @torch.no_grad()
    def reduce(self, *, ranks: int, sums: bool) -> None:
        """Averages over `ranks`, or sums up, the gradients of those parameters that train. All ranks call it.

        ValueError for a sparse gradient.
        """
        buckets = self._buckets or self._make_buckets()
        for bucket in buckets[self._sent :]:
            bucket.send()
        for bucket in buckets:
            bucket.finish(1 if sums else ranks)
        self._buckets, self._bucket_of, self._sent = [], {}, 0
        if sums:
            self._summed.update(param for param in self._params if param.requires_grad)

    def _make_buckets(self) -> list[_Bucket]:
        """The last parameters come first, as in a backward pass."""
        buckets: list[_Bucket] = []
        open_buckets: dict[tuple[torch.device, torch.dtype], _Bucket] = {}
        for param in reversed(self._params):
            if not param.requires_grad:
                continue
            dtype = self._reduce_dtypes.get(param, torch.promote_types(param.dtype, torch.float32))
            kind = param.device, dtype
            if kind not in open_buckets:
                buckets.append(open_buckets.setdefault(kind, _Bucket(dtype)))
            open_buckets[kind].add(param)
            if open_buckets[kind].bytes >= BUCKET_BYTES:
                del open_buckets[kind]
        return buckets

    def _watch(self, param: Tensor) -> None:
        """Hooks of the user, on the tensor, run before those on the node."""
        if param not in self._writers:
            with torch.enable_grad():
                writer = param.expand_as(param).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
            assert writer is not None
            writer.register_hook(functools.partial(_tell, weakref.ref(self), param))
            self._writers[param] = writer

    @torch.no_grad()
    def arrived(self, param: Tensor) -> None:
        """Called when the gradient of `param` is there; RuntimeError if it was before."""
        bucket = self._bucket_of.get(param)
        if bucket is None:
            return
        if bucket.flat is not None:
            raise RuntimeError(
                f"a parameter of shape {tuple(param.shape)} got a second gradient in one backward pass, while ranks "
                "sum the first; activation checkpointing of parts that share it needs use_reentrant=False"
            )
        bucket.arrived.add(param)
        # In one order on all ranks, whatever order gradients come in.
        while self._sent < len(self._buckets) and self._buckets[self._sent].is_complete:
            self._buckets[self._sent].send()
            self._sent += 1


def _tell(reference: weakref.ref[WholeGradients], param: Tensor, *_: Any) -> None:
    if (gradients := reference()) is not None:
        gradients.arrived(param)


class _Bucket:
    """The gradients of `params` side by side in `flat`, and behind them who had one."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.params: list[Tensor] = []
        self.arrived: set[Tensor] = set()
        self.flat: Tensor | None = None
        self.bytes = 0
        self._dtype = dtype

    def add(self, param: Tensor) -> None:
        self.params.append(param)
        self.bytes += param.numel() * self._dtype.itemsize

    @property
    def is_complete(self) -> bool:
        return len(self.arrived) == len(self.params)

    def send(self) -> None:
        """Begins to sum over the ranks."""
        sizes = [param.numel() for param in self.params]
        self.flat = torch.empty(sum(sizes) + len(sizes), dtype=self._dtype, device=self.params[0].device)
        *parts, self._flags = torch.split(self.flat, [*sizes, len(sizes)])
        self._parts = [part.view_as(param) for part, param in zip(parts, self.params, strict=True)]
        self._flags.fill_(1.0)
        self._missing = [index for index, param in enumerate(self.params) if param.grad is None]
        for index in self._missing:
            self._parts[index].zero_()
            self._flags[index] = 0.0
        found = [(part, p) for part, p in zip(self._parts, self.params, strict=True) if p.grad is not None]
        if found:
            torch._foreach_copy_([part for part, _ in found], [_dense_gradient(p) for _, p in found])
        for part, param in found:
            if _can_hold(param, part):  # the old gradient is free before the next bucket is made
                param.grad = part
        self._work = dist.all_reduce(self.flat, async_op=True)

    def finish(self, divisor: int) -> None:
        """Waits for the sum and hands it to the parameters."""
        assert self.flat is not None
        self._work.wait()
        if divisor > 1:
            self.flat /= divisor
        had_one = self._flags.tolist() if self._missing else []  # the host waits here, but seldom
        for index in self._missing:
            if had_one[index]:
                self.params[index].grad = self._parts[index].to(_dtype_of_gradients(self.params[index]))
        for part, param in zip(self._parts, self.params, strict=True):
            if param.grad is not None and param.grad.data_ptr() != part.data_ptr():
                param.grad.copy_(part)


def _refuse_unseen_pass(_: Tensor) -> None:
    raise RuntimeError(
        "loss.backward() leaves gradients of parameters that are whole on every rank different on each rank; call "
        "self.manual_backward(loss), or fabric.backward(loss), which averages them"
    )


def _dense_gradient(param: Tensor) -> Tensor:
    assert param.grad is not None
    if param.grad.is_sparse:
        raise ValueError(f"a parameter of shape {tuple(param.shape)} has a sparse gradient; use sparse=False")
    return param.grad


def _dtype_of_gradients(param: Tensor) -> torch.dtype:
    """The parameter's own, unless keep_low_precision_grads says otherwise."""
    return getattr(param, "grad_dtype", None) or param.dtype


def _can_hold(param: Tensor, part: Tensor) -> bool:
    """Whether `part` can be the gradient of `param`: of its dtype and in the order of its elements."""
    return param.grad is not None and param.grad.dtype == part.dtype and param.is_contiguous()
