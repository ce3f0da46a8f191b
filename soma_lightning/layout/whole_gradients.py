"""How do gradients of parameters that are whole on every rank become those of all ranks?

They are summed after the backward pass, in buckets whose memory they keep: no copy back. A parameter may be without a
gradient on some ranks only, where a batch takes another branch; each bucket says who had one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

#: Large enough for the full rate of a link, small enough that a second copy does not matter.
BUCKET_BYTES = 64 * 2**20


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

    def before_backward(self, *, is_first_rank: bool) -> None:
        """Call before every backward pass: sums of the pass before are not summed again."""
        while self._guards:
            self._guards.pop().remove()
        # The next sum has them from the first rank. Frozen ones are not in it: they wait, whole on every rank.
        for param in [p for p in self._summed if p.requires_grad]:
            self._summed.discard(param)
            if param.grad is not None and not is_first_rank:
                param.grad.zero_()

    @torch.no_grad()
    def reduce(self, *, ranks: int, sums: bool) -> None:
        """Averages over `ranks`, or sums up, the gradients of those parameters that train. All ranks call it.

        ValueError for a sparse gradient.
        """
        works = []
        for params, dtype in self._buckets():
            bucket = _Bucket(params, dtype)
            works.append((bucket, dist.all_reduce(bucket.flat, async_op=True)))
        for bucket, work in works:
            work.wait()
            bucket.finish(1 if sums else ranks)
        if sums:
            self._summed.update(param for param in self._params if param.requires_grad)

    def _buckets(self) -> Iterator[tuple[list[Tensor], torch.dtype]]:
        """Parameters that are reduced together, and in which dtype."""
        by_kind: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for param in self._params:
            if param.requires_grad:
                dtype = self._reduce_dtypes.get(param, torch.promote_types(param.dtype, torch.float32))
                by_kind.setdefault((param.device, dtype), []).append(param)
        for (_, dtype), params in by_kind.items():
            bucket: list[Tensor] = []
            size = 0
            for param in params:
                bucket.append(param)
                size += param.numel() * dtype.itemsize
                if size >= BUCKET_BYTES:
                    yield bucket, dtype
                    bucket, size = [], 0
            if bucket:
                yield bucket, dtype


class _Bucket:
    """The gradients of `params` side by side in `flat`, and behind them who had one."""

    def __init__(self, params: list[Tensor], dtype: torch.dtype) -> None:
        self._params = params
        sizes = [param.numel() for param in params]
        self.flat = torch.empty(sum(sizes) + len(params), dtype=dtype, device=params[0].device)
        *parts, flags = torch.split(self.flat, [*sizes, len(params)])
        self._parts, self._flags = [part.view_as(p) for part, p in zip(parts, params, strict=True)], flags
        flags.fill_(1.0)
        self._missing = [index for index, param in enumerate(params) if param.grad is None]
        for index in self._missing:
            self._parts[index].zero_()
            flags[index] = 0.0
        found = [(part, p) for part, p in zip(self._parts, params, strict=True) if p.grad is not None]
        if found:
            torch._foreach_copy_([part for part, _ in found], [_dense_gradient(p) for _, p in found])
        for part, param in found:
            if _can_hold(param, part):  # the old gradient is free before the next bucket is made
                param.grad = part

    def finish(self, divisor: int) -> None:
        """Call when `flat` is the sum over the ranks."""
        if divisor > 1:
            self.flat /= divisor
        had_one = self._flags.tolist() if self._missing else []  # the host waits here, but seldom
        for index in self._missing:
            if had_one[index]:
                self._params[index].grad = self._parts[index].to(_dtype_of_gradients(self._params[index]))
        for part, param in zip(self._parts, self._params, strict=True):
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
