"""Everything an optimizer step leaves behind or picks up, in one object that wrappers of the optimizer share."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from soma_kernels.optim.reference import GradStats
from soma_lightning.optim.clipping import ClipRule
from soma_lightning.optim.ownership import Ownership
from soma_lightning.optim.shards import version_of, versions_of
from soma_lightning.optim.state import StateFormat, ready_state

if TYPE_CHECKING:
    from soma_lightning.optim.reference_step import ReferenceStep
    from soma_lightning.optim.triton_step import TritonStep


class GradientMark(NamedTuple):
    """Some gradients and how often each had been written: has anybody replaced or changed them since?

    A tensor's version counts in-place writes. Weak references keep no gradient alive, and tell an old tensor from a new
    one in its place. A DTensor is marked itself: the object of its part may be another one at every look.
    """

    grads: list[weakref.ref[Tensor]]
    versions: list[int]

    @classmethod
    def of(cls, grads: Sequence[Tensor]) -> GradientMark:
        return cls(list(map(weakref.ref, grads)), versions_of(grads))

    def holds(self, grads: Sequence[Tensor]) -> bool:
        """True if `grads` are these tensors, unwritten."""
        same = len(grads) == len(self.grads) and all(map(operator.is_, grads, map(operator.call, self.grads)))
        return same and versions_of(grads) == self.versions

    def shares_one_with(self, grads: Sequence[Tensor]) -> bool:
        """True if at least one of `grads` is among these tensors."""
        alive = (grad() for grad in self.grads)
        return not {id(grad) for grad in alive if grad is not None}.isdisjoint(map(id, grads))


class KnownStats(NamedTuple):
    """Statistics of the gradients under `mark`. grouping: of the parameters when they were taken."""

    mark: GradientMark
    stats: GradStats
    grouping: tuple[list[int], list[int]]

    def hold(self, grads: Sequence[Tensor], norm_type: float, grouping: tuple[list[int], list[int]]) -> bool:
        """True if they are what a new pass over `grads` would find."""
        same = norm_type == self.stats.norm_type and grouping == self.grouping
        return same and self.mark.holds(grads)


@dataclass
class Control:
    """One object, because Lightning and Fabric hand users a wrapper of the optimizer: an attribute set on the wrapper
    never reaches the optimizer, a change inside this shared object does.

    counters: [2] int64, skipped steps in all and in a row. state_was_seen: somebody had the optimizer's `state` in
    hands since the last step, so that tensors in it can have been replaced. known: statistics that the next step can
    use. last_stats, last_params: what the latest statistics were taken of.
    """

    form: StateFormat = field(default_factory=StateFormat)
    implementation: str = "auto"
    norm_type: float = 2.0
    ownership: Ownership | None = None
    rule: ClipRule | None = None
    bound: GradientMark | None = None
    #: Samples behind the gradients that wait for the next step, as counted by this rank.
    counted: Tensor | float | None = None
    #: What those gradients are still multiplied by.
    loss_scale: Tensor | float | None = None
    #: Called when the gradients are zeroed: somebody may hold more of them than `.grad` does.
    when_zeroed: Callable[[], None] | None = None
    path: ReferenceStep | TritonStep | None = None
    state_was_seen: bool = False
    last_grad_norm: Tensor = field(default_factory=lambda: torch.tensor(float("nan"), device="cpu"))
    counters: Tensor = field(default_factory=lambda: torch.zeros(2, dtype=torch.int64, device="cpu"))
    known: KnownStats | None = None
    last_stats: GradStats | None = None
    last_params: Sequence[Tensor] = ()
    #: Of the latest step or `grad_norm()`, over all ranks.
    last_vector: Tensor | None = None
    #: Parameter -> its version when its master was last written: in-place changes by anybody else show up in it.
    versions_of_masters: dict[Tensor, int] = field(default_factory=dict)

    def fresh(self) -> Control:
        """The settings of this object without anything that a step left behind."""
        return Control(self.form, self.implementation, self.norm_type, self.ownership)

    def forget(self) -> None:
        """Drops what was derived from parameters, gradients and state that may no longer be what they were."""
        self.path, self.known, self.last_stats, self.last_params, self.last_vector = None, None, None, (), None
        self.versions_of_masters.clear()

    def pending_rule(self, grads: Callable[[], Sequence[Tensor]]) -> ClipRule | None:
        """The rule of the next step if the gradients stay as they are. grads: looks at them; asked only if needed."""
        if self.rule is None or self.bound is None:
            return self.rule
        present = grads()
        # Some of the same, or none as before: a rank without gradients must keep what the others keep.
        return self.rule if self.bound.shares_one_with(present) or self.bound.holds(present) else None

    def take_rule(self, grads: Callable[[], Sequence[Tensor]]) -> ClipRule | None:
        """The rule of this step, which uses it up; RuntimeError if it is bound to gradients that changed since."""
        rule, self.rule = self.rule, None
        bound, self.bound = self.bound, None
        if rule is None or bound is None:
            return rule
        present = grads()
        if bound.holds(present):
            return rule
        if bound.shares_one_with(present):
            raise RuntimeError(
                "gradients were changed between clipping and step(); clipping happens inside the step here, so it "
                "would act on the changed ones: clip last, or keep torch's step with fused_optimizer=False"
            )
        return None

    def ready_state(self, param: Tensor, state: dict[str, Any]) -> dict[str, Any]:
        """`state` of `param` as the next step needs it; the master of a parameter that somebody changed is checked."""
        current = self.versions_of_masters.get(param) == version_of(param)
        return ready_state(param, state, self.form, master_is_current=current)

    def counters_on(self, device: torch.device) -> Tensor:
        """`counters`, moved to `device` if a step there needs them, without a synchronizing copy."""
        if self.counters.device != device:
            if self.counters.device.type == "cpu" and not self.counters.any():
                self.counters = torch.zeros(2, dtype=torch.int64, device=device)
            else:
                self.counters = self.counters.to(device)
        return self.counters
