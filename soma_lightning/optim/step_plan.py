"""What a step by kernels prepares once (work list, addresses of parameters and state), and whether it still fits.

Everything that would make the prepared addresses wrong is looked at in every step: other parameters or groups, a
parameter in another place, a master whose parameter somebody changed, a gradient that was never there, and state
tensors that may have been replaced, if anybody had `optimizer.state` in hands.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Collection, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from soma_kernels.optim.plan import EMPTY_GRADIENT, StateTable, StepTable, Variant, WorkList
from soma_lightning.optim.groups import clip_groups, grouping, refuse_several_devices, refuse_sparse
from soma_lightning.optim.shards import local, local_grad, refuse_divided, version_reader
from soma_lightning.optim.state import MASTER_KEY

if TYPE_CHECKING:
    from soma_lightning.optim.fused_adamw import FusedAdamW

_ALWAYS_THERE = ("exp_avg", "exp_avg_sq", "step")
#: State keys in the order of a StateTable, after the parameter.
_TABLE_KEYS = ("exp_avg", "exp_avg_sq", MASTER_KEY, "step")

# Read for every tensor in every step: `map` with these takes a third less time than a comprehension.
grad_of = operator.attrgetter("grad")
requires_grad = operator.attrgetter("requires_grad")
_dtype_of = operator.attrgetter("dtype")
_bytes_of = operator.attrgetter("nbytes")


class StepPlan:
    """The prepared part of the step for the parameters that have a gradient or a state when it is made.

    members: positions of these parameters among all of the optimizer's. Their state is created or made ready here.
    """

    def __init__(self, optimizer: FusedAdamW, everyone: Sequence[Tensor]) -> None:
        states = optimizer._states
        self.everyone = everyone
        self.members = [i for i, p in enumerate(everyone) if p.requires_grad and (p.grad is not None or states.get(p))]
        self.complete = len(self.members) == len(everyone)
        self.params = [everyone[i] for i in self.members]
        refuse_several_devices(self.params)
        if optimizer.ownership is None:
            refuse_divided(optimizer.param_groups)
        self._make_state_ready(optimizer)
        self._locals = [local(p) for p in self.params]
        self._distributed = any(map(operator.is_not, self.params, self._locals))
        self._find_irregular()
        exp_avgs, exp_avg_sqs, steps = ([local(states[p][key]) for p in self.params] for key in _ALWAYS_THERE)
        masters = [_local_or_none(states[p].get(MASTER_KEY)) for p in self.params]
        targets = [self.staged.get(i, p) for i, p in enumerate(self._locals)]
        self.states = StateTable(targets, exp_avgs, exp_avg_sqs, masters, steps)
        self._addresses = list(map(Tensor.data_ptr, self._locals))
        self._bytes = list(map(_bytes_of, self._locals))
        self._refuse_overlap()
        #: Parameters cut from one buffer share a version counter.
        self._own_versions = len({p.untyped_storage().data_ptr() for p in self._locals}) == len(self._locals)
        self._mastered = [p for p, master in zip(self.params, masters, strict=True) if master is not None]
        self._version_of = version_reader(self._mastered)
        self._versions = list(map(self._version_of, self._mastered))
        self._grouping = grouping(optimizer.param_groups)
        self.work = self._work_list(optimizer)
        self.table = StepTable(self.work)

    def _make_state_ready(self, optimizer: FusedAdamW) -> None:
        for param in self.params:
            _lay_out_like(param, optimizer._control.ready_state(param, optimizer._states[param]))

    def _work_list(self, optimizer: FusedAdamW) -> WorkList:
        groups = optimizer.param_groups
        group_of = [i for i, group in enumerate(groups) for _ in group["params"]]
        clip_ids, own_limits = clip_groups(groups)
        params, exp_avgs, _, masters, _ = self.states.tensors
        variants = [
            Variant(p.dtype, dtype, m.dtype, master is not None)
            for p, dtype, m, master in zip(params, self._grad_dtypes, exp_avgs, masters, strict=True)
        ]
        return WorkList.build(
            [p.numel() for p in self._locals],
            variants,
            self._locals[0].device,
            groups=[group_of[i] for i in self.members],
            num_groups=len(groups),
            clips=[clip_ids[group_of[i]] for i in self.members],
            num_clips=1 + len(own_limits),
            counted=None if optimizer.ownership is None else optimizer.ownership.counted(self.params),
        )

    def _refuse_overlap(self) -> None:
        """ValueError if two parameters share memory: programs that run at once would both write it."""
        spans = [
            (address, address + size, i)
            for i, (address, size) in enumerate(zip(self._addresses, self._bytes, strict=True))
            if size and i not in self.staged
        ]
        spans.sort()
        for (_, end, i), (start, _, j) in itertools.pairwise(spans):
            if start < end:
                first, second = (tuple(self.params[k].shape) for k in (i, j))
                raise ValueError(
                    f"parameters of shapes {first} and {second} share memory; use one parameter in both places, or "
                    "implementation='reference'"
                )

    def _find_irregular(self) -> None:
        """Parameters that need a second look in every step."""
        self._grad_dtypes = [p.dtype if p.grad is None else p.grad.dtype for p in self.params]
        #: The dtypes of these parameters do not show in their gradients.
        self._unlike = [
            (p, p.dtype) for p, dtype in zip(self.params, self._grad_dtypes, strict=True) if p.dtype != dtype
        ]
        self._empty = [i for i, p in enumerate(self._locals) if p.numel() == 0]
        #: Dense stand-ins for parameters whose memory has gaps: copied in before the update and out after it.
        self.staged = {
            i: torch.empty_like(p)
            for i, p in enumerate(self._locals)
            if torch.empty_like(p, device="meta").stride() != p.stride()
        }
        layouts = [self.staged.get(i, p) for i, p in enumerate(self._locals)]
        #: Strides of parameters that are dense in another order; their moments and masters have the same.
        self._strides = {i: p.stride() for i, p in enumerate(layouts) if not p.is_contiguous()}

    # ------------------------------------------------------------------ does it still fit?

    def fits(self, optimizer: FusedAdamW, everyone: Sequence[Tensor], grads: Sequence[Tensor | None]) -> bool:
        """Whether this step can use the plan. grads: of `everyone`, None where there is none or it does not count."""
        if len(everyone) != len(self.everyone) or not all(map(operator.is_, everyone, self.everyone)):
            return False
        if grouping(optimizer.param_groups) != self._grouping:
            return False
        present = grads if self.complete else [grads[i] for i in self.members]
        if not self.complete and _count_present(grads) != _count_present(present):
            return False
        if not self._dtypes_fit(present):
            return False
        control = optimizer._control
        if control.state_was_seen and not self._state_is_in_place(optimizer):
            return False
        control.state_was_seen = False
        if self._mastered and list(map(self._version_of, self._mastered)) != self._versions:
            return False
        now = [local(p) for p in self.params] if self._distributed else self._locals
        # A part of a parameter, or another dtype in memory that was free again, can start where the parameter did.
        return list(map(Tensor.data_ptr, now)) == self._addresses and list(map(_bytes_of, now)) == self._bytes

    def _dtypes_fit(self, grads: Sequence[Tensor | None]) -> bool:
        present = [grad for grad in grads if grad is not None]
        expected: Sequence[torch.dtype] = self._grad_dtypes
        if len(present) != len(grads):
            expected = [dtype for grad, dtype in zip(grads, expected, strict=True) if grad is not None]
        return list(map(_dtype_of, present)) == expected and all(p.dtype == dtype for p, dtype in self._unlike)

    def _state_is_in_place(self, optimizer: FusedAdamW) -> bool:
        columns = list(zip(_TABLE_KEYS, self.states.tensors[1:], self.states.rows[1:], strict=True))
        for i, param in enumerate(self.params):
            state = optimizer._states.get(param) or {}
            for key, tensors, addresses in columns:
                tensor = _local_or_none(state.get(key))
                # The same object can have been moved through `.data`.
                if tensor is not tensors[i] or (tensor is not None and tensor.data_ptr() != addresses[i]):
                    return False
        return True

    # ------------------------------------------------------------------ every step

    def read(
        self, grads: Sequence[Tensor | None], param_groups: Sequence[dict[str, Any]]
    ) -> tuple[Sequence[Tensor], np.ndarray, list[Tensor]]:
        """Those of the members' gradients that are there, the addresses of all ([n] int64), and the copies that stand
        for some of them.

        A gradient whose memory is laid out unlike its parameter's is copied into the parameter's layout.
        Raises ValueError for a sparse gradient, and for one that is divided unlike its parameter.
        """
        found = dense = [g for g in grads if g is not None]
        if self._distributed:
            pairs = zip(self.params, grads, strict=True)
            grads = [None if g is None else local_grad(p, g, param_groups) for p, g in pairs]
            dense = [g for g in grads if g is not None]
        if len(dense) == len(grads) and not self._strides and _all_contiguous(dense):
            addresses = _addresses_of(dense)
            copies: list[Tensor] = []
        else:
            kept = [None if g is None else self._in_layout(i, g) for i, g in enumerate(grads)]
            copies = [k for k, g in zip(kept, grads, strict=True) if k is not None and k is not g]
            addresses = np.array([0 if g is None else g.data_ptr() for g in kept], dtype=np.int64)
        for i in self._empty:
            addresses[i] = 0 if grads[i] is None else EMPTY_GRADIENT
        return found, addresses, copies

    def _in_layout(self, i: int, grad: Tensor) -> Tensor:
        refuse_sparse(grad)
        stride = self._strides.get(i)
        if grad.is_contiguous() if stride is None else grad.stride() == stride:
            return grad
        layout = self.states.params[i]
        return torch.empty_like(layout, dtype=grad.dtype, memory_format=torch.preserve_format).copy_(grad)

    def stage_in(self) -> None:
        """Copies parameters with gaps into their stand-ins."""
        for i, dense in self.staged.items():
            dense.copy_(self._locals[i])

    def stage_out(self, absent: Collection[int]) -> None:
        """Copies the stand-ins back, but for members without a gradient."""
        for i, dense in self.staged.items():
            if i not in absent:
                self._locals[i].copy_(dense)

    def count_update(self, absent: Collection[int]) -> None:
        """Tells autograd that the kernels wrote: a later backward through an older graph must still be refused.

        absent: positions of the members without a gradient, which keep their values.
        """
        written = [p for i, p in enumerate(self.params) if i not in absent] if absent else self.params
        torch.autograd.graph.increment_version(written)
        # A stand-in's copy counts by itself; everything else that was written moved by one.
        by_one = self._own_versions and not absent and not self.staged
        self._versions = [v + 1 for v in self._versions] if by_one else list(map(self._version_of, self._mastered))

    def versions_of_masters(self) -> dict[Tensor, int]:
        """Parameter -> its version when its master was last written."""
        return dict(zip(self._mastered, self._versions, strict=True))


def _lay_out_like(param: Tensor, state: dict[str, Any]) -> None:
    """A loaded state can have other strides than its parameter; the kernels walk all of them with one index."""
    stride = torch.empty_like(local(param), device="meta").stride()
    for key in ("exp_avg", "exp_avg_sq", MASTER_KEY):
        if key in state and local(state[key]).stride() != stride:
            state[key] = torch.empty_like(param, dtype=state[key].dtype).copy_(state[key])


def _local_or_none(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else local(tensor)


def _count_present(grads: Sequence[Tensor | None]) -> int:
    return sum(map(operator.is_not, grads, repeat(None)))


def _all_contiguous(grads: Sequence[Tensor]) -> bool:
    try:
        return all(map(Tensor.is_contiguous, grads))
    except RuntimeError:  # a sparse tensor has no strides to ask for
        return False


def _addresses_of(tensors: Sequence[Tensor]) -> np.ndarray:
    return np.fromiter(map(Tensor.data_ptr, tensors), dtype=np.int64, count=len(tensors))
