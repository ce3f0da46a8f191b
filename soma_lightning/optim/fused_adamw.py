"""AdamW whose clipping, non-finite check and update are one step over the original gradients.

`torch.optim.AdamW`, then `clip_grad_norm_`, then a GradScaler-like check read every gradient three times and write it
once. Here the statistics are taken once, one decision is made on the device, and one update applies it; `.grad` keeps
its bits. State and `state_dict()` are torch.optim.AdamW's, so checkpoints move both ways.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW

from soma_kernels.optim.reference import VECTOR_SUMS, GradStats, decide
from soma_lightning.optim.clipping import ClipRule, check_norm_type
from soma_lightning.optim.control import Control, GradientMark, KnownStats
from soma_lightning.optim.groups import (
    GROUP_LIMIT,
    clip_groups,
    grouping,
    is_capturing,
    refuse_settings,
    unsupported_in_group,
)
from soma_lightning.optim.ownership import Ownership, global_vector
from soma_lightning.optim.reference_step import ReferenceStep, ReferenceWork
from soma_lightning.optim.shards import refuse_divided
from soma_lightning.optim.state import StateFormat, restore_precision, supported_state
from soma_lightning.optim.step_plan import grad_of
from soma_lightning.optim.triton_step import TritonStep, TritonWork, why_no_kernels

IMPLEMENTATIONS = ("auto", "triton", "reference")


class FusedAdamW(AdamW):
    """AdamW (decoupled weight decay, Loshchilov and Hutter 2019) with clipping and the non-finite check inside `step`.

    params: as in torch.optim.AdamW (tensors, named tensors or groups); groups may set lr, betas, eps, weight_decay.
    lr: number or 0-d tensor (a tensor on the device is never read by the host).
    A group may also set max_norm: it is then clipped by its own norm and does not count for the limit of the others.
    master_weights: keep fp32 copies of bf16 and fp16 parameters and fp32 moments for them; fp32 parameters get none.
    state_dtype: dtype of the moments without a master: None (the parameter's, as in torch) or torch.float32.
    implementation: "triton" (kernels), "reference" (plain torch) or "auto" (kernels on CUDA for fp32, bf16 and fp16).

    A step whose gradients hold a NaN or an infinity changes nothing (parameters, moments, step counters) and is counted
    in `skipped_steps`. Parameters without gradient or with requires_grad=False cost nothing and get no state.
    On an accelerator nothing synchronizes with the host, and every step but the first can be captured in a CUDA graph
    (a learning rate that moves must then be a 0-d tensor on the device).
    Raises ValueError naming a setting that has no fused counterpart (amsgrad, maximize, differentiable).
    """

    _control: Control

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        master_weights: bool = False,
        state_dtype: torch.dtype | None = None,
        implementation: str = "auto",
    ) -> None:
        self.begin_control(master_weights=master_weights, state_dtype=state_dtype, implementation=implementation)
        super().__init__(params, lr, betas, eps, weight_decay)

    def begin_control(
        self, *, master_weights: bool, state_dtype: torch.dtype | None = None, implementation: str = "auto"
    ) -> None:
        """Starts counting afresh; for an object that became a FusedAdamW after it was built."""
        if not isinstance(master_weights, bool):
            raise ValueError(f"master_weights={master_weights!r} must be True or False")
        if state_dtype not in (None, torch.float32):
            raise ValueError(f"state_dtype={state_dtype} is not supported; use None (the parameter's) or torch.float32")
        if implementation not in IMPLEMENTATIONS:
            raise ValueError(f"implementation={implementation!r} is unknown; use one of {', '.join(IMPLEMENTATIONS)}")
        self._control = Control(StateFormat(master_weights, state_dtype), implementation)

    # ------------------------------------------------------------------ what a user reads and sets

    @property
    def last_grad_norm(self) -> Tensor:
        """0-d: global gradient norm of the last step, after the normalizer, before clipping; NaN before the first."""
        return self._control.last_grad_norm

    @property
    def skipped_steps(self) -> Tensor:
        """0-d int64: how many steps were skipped because of non-finite gradients since this object was built."""
        return self._control.counters[0].clone()

    @property
    def consecutive_skips(self) -> Tensor:
        """0-d int64: how many of the latest steps were skipped in a row; 0 after a step that was taken."""
        return self._control.counters[1].clone()

    @property
    def found_nonfinite(self) -> Tensor:
        """0-d bool: whether the last step or `grad_norm()` found a NaN or an infinity, on any rank."""
        vector = self._control.last_vector
        if vector is None:
            return torch.zeros((), dtype=torch.bool, device="cpu")
        return (vector[0] > 0) | ~vector[VECTOR_SUMS:].sum().isfinite()

    @property
    def master_weights(self) -> bool:
        """Whether bf16 and fp16 parameters have fp32 masters."""
        return self._control.form.master_weights

    @property
    def ownership(self) -> Ownership | None:
        """Who counts which gradient when parameters are divided among ranks; None: this process counts all.

        With it every rank must call `step()` and `grad_norm()` equally often, also without any gradient, with the same
        limits and as many groups that have their own. ValueError for a parameter that no rank can own.
        """
        return self._control.ownership

    @ownership.setter
    def ownership(self, ownership: Ownership | None) -> None:
        if ownership is not None:
            ownership.refuse_unowned(self.param_groups)
            if self._control.rule is not None:
                ownership.refuse_normalizer(self._control.rule.normalizer)
        self._control.ownership = ownership
        self._control.forget()

    @property
    def path_description(self) -> str:
        """How this optimizer steps, with the reason if not by kernels; for reports."""
        path = self._control.path
        return (path or self._choose_path()).description

    @property
    def norm_type(self) -> float:
        """The norm of `last_grad_norm` and of `clip(max_norm=...)`: 2.0 or inf."""
        return self._control.norm_type

    @norm_type.setter
    def norm_type(self, norm_type: float) -> None:
        self._control.norm_type = check_norm_type(norm_type)

    @property
    def pending_clip(self) -> ClipRule | None:
        """What the next `step()` applies if the gradients stay as they are, or None."""
        return self._control.pending_rule(self._present_grads)

    def clip(
        self,
        max_norm: float | None = None,
        max_value: float | None = None,
        normalizer: float | Tensor | None = None,
        *,
        norm_type: float | None = None,
    ) -> None:
        """Sets what the next `step()` applies to its gradients; replaces an earlier call, reads no gradient.

        max_norm: limit of the global norm over all groups without a limit of their own. max_value: limit of every
        element. normalizer: gradients are divided by it before either; over several ranks each gives its own count and
        the sum of all divides. norm_type: 2.0 or inf; None means `self.norm_type`.
        Without arguments the pending rule is dropped. Raises ValueError when both limits are set, when one is not
        positive, and for a normalizer where ranks average their gradients.
        """
        rule = ClipRule(max_norm, max_value, normalizer, self.norm_type if norm_type is None else norm_type)
        if self.ownership is not None:
            self.ownership.refuse_normalizer(normalizer)
        self._control.rule = rule if rule.divides or max_norm is not None or max_value is not None else None
        self._control.bound = None

    def count(self, samples: float | Tensor) -> None:
        """Adds to how many samples stand behind the gradients; the next `step()` divides them by the sum of all ranks.

        samples: number or 0-d tensor, this rank's share of one backward pass of a loss sum. `zero_grad()` forgets it.
        Raises ValueError where ranks average their gradients.
        """
        if self.ownership is not None:
            self.ownership.refuse_normalizer(samples)
        before = self._control.counted
        self._control.counted = samples if before is None else before + samples

    def unscale(self, loss_scale: float | Tensor) -> None:
        """For a GradScaler: the gradients count as divided by `loss_scale` from now on, without a pass over them.

        loss_scale: number or 0-d tensor, equal on all ranks. `grad_norm()` and the next `step()` divide by it; if that
        step is skipped the scaler knows why, and it counts neither in `skipped_steps` nor in `consecutive_skips`.
        `zero_grad()` forgets it. Raises ValueError for anything else.
        """
        self._control.loss_scale = ClipRule(loss_scale=loss_scale).loss_scale

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self._control.counted, self._control.loss_scale = None, None
        if self._control.when_zeroed is not None:
            self._control.when_zeroed()

    def when_zeroed(self, call: Callable[[], None] | None) -> None:
        """`zero_grad()` calls `call` from now on; for whoever holds gradients that are not in `.grad` yet."""
        self._control.when_zeroed = call

    def clip_present(self, rule: ClipRule) -> None:
        """Like `clip`, for the gradients that exist now, as torch.nn.utils.clip_grad_norm_ would clip them.

        The rule is dropped with them: a step whose gradients are all new ones is not clipped. RuntimeError in the step
        when the gradients were written to in between: they would have been clipped before that, not after it.
        """
        if self.ownership is not None:
            self.ownership.refuse_normalizer(rule.normalizer)
        self._control.rule, self._control.bound = rule, GradientMark.of(self._present_grads())

    def _present_grads(self) -> list[Tensor]:
        params = chain.from_iterable(group["params"] for group in self.param_groups)
        return [grad for grad in map(grad_of, params) if grad is not None]

    def _take_rule(self) -> ClipRule:
        """What this step applies, with this rank's share of the normalizer; a pending rule is used up."""
        rule = self._control.take_rule(self._present_grads) or ClipRule(norm_type=self.norm_type)
        counted, self._control.counted = self._control.counted, None
        if counted is not None:
            if rule.normalizer is not None:
                raise ValueError(
                    f"this step has a normalizer from clip(), {rule.normalizer!r}, and samples from count(); use one"
                )
            rule = dataclasses.replace(rule, normalizer=counted)
        if self._control.loss_scale is not None:
            rule = dataclasses.replace(rule, loss_scale=self._control.loss_scale)
        if self.ownership is None:
            return rule
        return dataclasses.replace(rule, normalizer=self.ownership.share_of(rule.normalizer))

    @torch.no_grad()
    def grad_norm(self, norm_type: float | None = None) -> Tensor:
        """0-d: global norm of the present gradients; the next `step()` reuses the pass if they do not change.

        They count as divided by what `count()` and `unscale()` said. Changes in place are noticed, but not those by way
        of `.data`, by a replayed CUDA graph or by code outside torch: do not call it before such a change. Returns 0
        when there is no gradient. Over several ranks it is one more collective: what a rank finds again of its own pass
        must not decide whether it comes to the next one.
        """
        control, norm_type = self._control, self.norm_type if norm_type is None else norm_type
        normalizer = control.counted if self.ownership is None else self.ownership.share_of(control.counted)
        rule = ClipRule(normalizer=normalizer, norm_type=norm_type, loss_scale=control.loss_scale)
        work = self._collect(rule)
        if work is None:
            return torch.zeros((), device="cpu")
        stats = self._statistics(work, rule.norm_type)
        if not is_capturing(work.grads):
            control.known = KnownStats(GradientMark.of(work.grads), stats, grouping(self.param_groups))
        control.last_vector = vector = global_vector(stats.vector, rule, self.ownership)
        divides = control.counted is not None or control.loss_scale is not None
        return decide(stats._replace(vector=vector), normalize=divides).norm

    def first_nonfinite_parameter(self) -> Tensor | None:
        """The first parameter (group order) whose gradient was non-finite in the last step or `grad_norm()`, if any.

        Over several ranks: of this one's gradients; `explain_nonfinite` also asks the others.
        Synchronizes with the device: call it to explain a skipped step, not on every one.
        """
        control = self._control
        if control.last_stats is None or control.path is None or not control.last_params:
            return None
        first = control.path.first_nonfinite(control.last_stats)
        return None if first is None else control.last_params[first]

    # ------------------------------------------------------------------ the step

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates every parameter that has a gradient; returns what `closure` returned.

        A clipping rule set before the call or inside the closure applies to this step only.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        rule = self._take_rule()
        control, work = self._control, self._collect(rule)
        if work is not None:
            stats = self._statistics(work, rule.norm_type)
            control.known = None
            control.last_vector = vector = global_vector(stats.vector, rule, self.ownership)
            skips = None if control.loss_scale is None else control.counters.clone()
            work.update(self, stats._replace(vector=vector), rule)
            if skips is not None:
                found, now = self.found_nonfinite, control.counters_on(vector.device)
                now.copy_(torch.where(found, skips.to(now.device), now))
        control.loss_scale = None
        return loss

    def _choose_path(self) -> ReferenceStep | TritonStep:
        """How the next step is done. Raises ValueError if the kernels were asked for and cannot do it."""
        implementation = self._control.implementation
        if implementation == "reference":
            return ReferenceStep("asked for")
        params = [p for group in self.param_groups for p in group["params"]]
        params = [p for p in params if p.requires_grad] or params
        reason = why_no_kernels(params, interpreted=implementation == "triton")
        if reason is None:
            return TritonStep()
        if implementation == "triton":
            raise ValueError(f"implementation='triton' is not possible: {reason}; use 'auto'")
        return ReferenceStep(reason)

    def _collect(self, rule: ClipRule) -> ReferenceWork | TritonWork | None:
        """The gradients of this step; None if there is none and no other rank waits for this one."""
        control = self._control
        work: ReferenceWork | TritonWork | None = None
        if any(p.grad is not None for group in self.param_groups for p in group["params"]):
            refuse_settings(self.param_groups)
            if control.path is None or isinstance(control.path, ReferenceStep):
                if control.ownership is None:
                    refuse_divided(self.param_groups)
                control.path = self._choose_path()
            work = control.path.collect(self, rule)
        return ReferenceWork([], [], []) if work is None and control.ownership is not None else work

    def _statistics(self, work: ReferenceWork | TritonWork, norm_type: float) -> GradStats:
        """This process's statistics, from the last `grad_norm()` if nothing changed since."""
        control = self._control
        known = control.known
        # A captured step must take its own: it would replay these for whatever the gradients are then.
        reusable = known is not None and not is_capturing(work.grads)
        if known is not None and reusable and known.hold(work.grads, norm_type, grouping(self.param_groups)):
            return known.stats
        control.last_stats = work.statistics(self, norm_type)
        control.last_params = work.params
        return control.last_stats

    # ------------------------------------------------------------------ state

    @property
    def state(self) -> Any:
        """As in torch.optim.Optimizer: parameter -> its state.

        Whoever reads it may replace tensors in it; the next step looks.
        """
        control = self.__dict__.get("_control")
        if control is not None:
            control.state_was_seen = True
        if "state" not in self.__dict__:
            # Fabric's wrapper has none of its own and finds the optimizer's after an AttributeError.
            raise AttributeError(f"{type(self).__name__} has no attribute 'state' of its own")
        return self.__dict__["state"]

    @state.setter
    def state(self, state: Any) -> None:
        self.__dict__["state"] = state
        self._control.forget()

    @property
    def _states(self) -> Any:
        """The state for the step itself, which replaces nothing behind its own back."""
        return self.__dict__["state"]

    @torch.no_grad()
    def init_state(self) -> None:
        """Gives every trainable parameter the state of an optimizer that has not stepped, where it has none.

        torch.distributed.checkpoint makes missing state by a step with zero gradients, which counts as one: call this
        before it.
        """
        for param in chain.from_iterable(group["params"] for group in self.param_groups):
            if param.requires_grad and not self._states.get(param):
                self._control.ready_state(param, self._states[param])
        self._control.state_was_seen = True

    def recheck_masters(self) -> None:
        """Call after changing bf16 or fp16 parameters through `.data`: the next step starts from their new values.

        Changes in place under `torch.no_grad()` and `load_state_dict` of the module are noticed without it.
        """
        self._control.forget()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch.optim.AdamW; ValueError naming a setting or a parameter that is not supported."""
        super().add_param_group(param_group)
        try:
            reason = unsupported_in_group(self.param_groups[-1])
            if reason:
                raise ValueError(f"FusedAdamW does not support {reason}; use torch.optim.AdamW for it")
            refuse_settings(self.param_groups)
            clip_groups(self.param_groups)
            if self.ownership is not None:
                self.ownership.refuse_unowned(self.param_groups)
        except ValueError:
            self.param_groups.pop()
            raise

    @torch._disable_dynamo
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state of FusedAdamW or torch.optim.AdamW; parameters are matched by position.

        fp32 moments and masters keep their precision under bf16 parameters (torch alone would round them); a master
        that does not round to its parameter's current value is rebuilt from it at the next step.
        Raises ValueError for a state written with a setting that is not supported, before anything changes.
        """
        # Hooks may hand torch another state and read the loaded one: ours stand next to torch's own work.
        loaded: list[dict[str, Any]] = []
        own_limits = [group.get(GROUP_LIMIT) for group in self.param_groups]
        before = self.register_load_state_dict_pre_hook(lambda _, final: loaded.append(supported_state(final)))
        after = self.register_load_state_dict_post_hook(lambda _: self._restore(loaded[0]), prepend=True)
        try:
            super().load_state_dict(state_dict)
        finally:
            before.remove()
            after.remove()
        # A state that was trained without own limits does not take them away.
        for group, limit in zip(self.param_groups, own_limits, strict=True):
            if limit is not None:
                group.setdefault(GROUP_LIMIT, limit)
        self._control.forget()

    def _restore(self, loaded: dict[str, Any]) -> None:
        """Repairs what torch rounded when it loaded this state dict."""
        saved_ids = chain.from_iterable(group["params"] for group in loaded["param_groups"])
        live = chain.from_iterable(group["params"] for group in self.param_groups)
        for saved_id, param in zip(saved_ids, live, strict=True):
            saved = loaded["state"].get(saved_id)
            if saved is not None:
                restore_precision(param, self._states[param], saved, self._control.form)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_control": self._control.fresh()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.__dict__.setdefault("_control", Control())


class FP32MasterAdamW(FusedAdamW):
    """FusedAdamW with fp32 masters and moments for bf16 and fp16 parameters: tiny updates are not rounded away."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, master_weights=True)
