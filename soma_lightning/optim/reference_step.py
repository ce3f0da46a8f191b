"""The optimizer step in plain torch: for the CPU, for fp64, and wherever the kernels do not run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from soma_kernels.optim.reference import VECTOR_SUMS, Decision, GradStats, adamw_step_, decide, grad_stats
from soma_lightning.optim.clipping import ClipRule
from soma_lightning.optim.groups import GroupWork, clip_groups, clip_limits, present_work
from soma_lightning.optim.shards import local, local_grad, version_of
from soma_lightning.optim.state import MASTER_KEY

if TYPE_CHECKING:
    from soma_lightning.optim.fused_adamw import FusedAdamW


@dataclass(frozen=True)
class ReferenceWork:
    """The gradients of one step, by group, and all of them with their parameters; with ownership there may be none."""

    groups: list[GroupWork]
    params: list[Tensor]
    grads: list[Tensor]

    def statistics(self, optimizer: FusedAdamW, norm_type: float) -> GradStats:
        """One pass over the local gradients."""
        ids, limits = clip_groups(optimizer.param_groups)
        clips = [ids[w.position] for w in self.groups for _ in w.params]
        ownership = optimizer.ownership
        if ownership is not None and not self.grads:
            return _empty_stats(1 + len(limits), ownership.device, norm_type)
        counted = None if ownership is None else ownership.counted(self.params)
        grads = [local_grad(p, g, optimizer.param_groups) for p, g in zip(self.params, self.grads, strict=True)]
        return grad_stats(grads, norm_type=norm_type, clips=clips, num_clips=1 + len(limits), counted=counted)

    def update(self, optimizer: FusedAdamW, stats: GradStats, rule: ClipRule) -> None:
        """Applies `rule` and AdamW, or counts a skipped step."""
        limits = clip_limits(optimizer.param_groups, rule)
        normalize = rule.divides
        decision = decide(stats, max_norm=limits, normalize=normalize)
        self._record(optimizer, decision)
        scaled = normalize or any(limit is not None for limit in limits)
        if decision.take.device.type != "cpu":
            self._update(optimizer, decision.scale if scaled else None, rule.max_value, take=decision.take)
        elif decision.take:
            # Reading a CPU scalar costs no synchronization, and a coefficient of exactly 1 then costs no pass at all.
            self._update(optimizer, decision.scale if scaled else None, rule.max_value, take=None)

    def _record(self, optimizer: FusedAdamW, decision: Decision) -> None:
        control = optimizer._control
        control.last_grad_norm = decision.norm
        counters = control.counters_on(decision.norm.device)
        skipped = (~decision.take).to(torch.int64)
        counters.copy_(torch.stack([counters[0] + skipped, (counters[1] + 1) * skipped]))

    def _update(
        self,
        optimizer: FusedAdamW,
        scales: Tensor | None,
        max_value: float | None,
        *,
        take: Tensor | None,
    ) -> None:
        ids, _ = clip_groups(optimizer.param_groups)
        for position, group, params, grads in self.groups:
            states = [optimizer._control.ready_state(p, optimizer._states[p]) for p in params]
            beta1, beta2 = group["betas"]
            scale: float | Tensor | None = None if scales is None else scales[ids[position]]
            if take is None and isinstance(scale, Tensor):
                scale = None if scale.item() == 1.0 else scale.item()
            adamw_step_(
                [local(p) for p in params],
                [local_grad(p, g, optimizer.param_groups) for p, g in zip(params, grads, strict=True)],
                [local(s["exp_avg"]) for s in states],
                [local(s["exp_avg_sq"]) for s in states],
                [s["step"] for s in states],
                lr=group["lr"],
                beta1=float(beta1),
                beta2=float(beta2),
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                masters=[local(s[MASTER_KEY]) if MASTER_KEY in s else None for s in states],
                scale=scale,
                max_value=max_value,
                take=take,
            )
            # A write to its part does not count on a DTensor, and an older graph that saved it must be refused.
            torch.autograd.graph.increment_version([p for p in params if local(p) is not p])
            optimizer._control.versions_of_masters |= {
                p: version_of(p) for p, s in zip(params, states, strict=True) if MASTER_KEY in s
            }


def _empty_stats(num_clips: int, device: torch.device, norm_type: float) -> GradStats:
    """The statistics of no gradient at all, which other ranks wait for."""
    vector = torch.zeros(VECTOR_SUMS + num_clips, dtype=torch.float32, device=device)
    return GradStats(vector.new_empty(0), vector, norm_type)


class ReferenceStep:
    """Statistics, decision and update with torch's operations. reason: why it is not the kernels, for the report."""

    def __init__(self, reason: str) -> None:
        self.description = f"plain torch ({reason})"

    def collect(self, optimizer: FusedAdamW, rule: ClipRule) -> ReferenceWork | None:
        """The parameters that have a gradient now; None if there is none."""
        groups = present_work(optimizer.param_groups)
        params = [p for work in groups for p in work.params]
        grads = [g for work in groups for g in work.grads]
        return ReferenceWork(groups, params, grads) if params else None

    def first_nonfinite(self, stats: GradStats) -> int | None:
        """Position of the first gradient that was not finite; waits for the device."""
        bad = (~stats.partials.isfinite()).nonzero().flatten().tolist()
        return bad[0] if bad else None
