"""AdamW whose clipping, non-finite check and update are one step over the original gradients.

`torch.optim.AdamW`, then `clip_grad_norm_`, then a GradScaler-like check read every gradient three times and write it
once. Here the statistics are taken once, one decision is made on the device, and one update applies it; `.grad` keeps
its bits. State and `state_dict()` are torch.optim.AdamW's, so checkpoints move both ways.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import AdamW

from soma_kernels.optim.reference import Decision, GradStats, adamw_step_, decide, grad_stats
from soma_lightning.optim.clipping import ClipRule, check_norm_type

#: Group settings of torch.optim.AdamW that change the mathematics or the state and have no fused counterpart.
UNSUPPORTED_SETTINGS = ("amsgrad", "maximize", "differentiable", "capturable")

#: State key of the fp32 copy of a bf16 or fp16 parameter.
MASTER_KEY = "soma_master"

LOW_PRECISION = (torch.bfloat16, torch.float16)


@dataclass
class _Control:
    """Everything a step leaves behind or picks up.

    One object, because Lightning and Fabric hand users a wrapper of the optimizer: an attribute set on the wrapper
    never reaches the optimizer, a change inside this shared object does.
    """

    master_weights: bool = False
    norm_type: float = 2.0
    rule: ClipRule | None = None
    bound: _Bound | None = None
    last_grad_norm: Tensor = field(default_factory=lambda: torch.tensor(float("nan")))
    skipped_steps: Tensor = field(default_factory=lambda: torch.tensor(0))
    consecutive_skips: Tensor = field(default_factory=lambda: torch.tensor(0))
    stats: GradStats | None = None
    grads_of_stats: list[Tensor] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    params_of_stats: list[Tensor] = field(default_factory=list)
    #: Parameter -> its version when its master was last written: in-place changes by anybody else show up in it.
    versions_of_masters: dict[Tensor, int] = field(default_factory=dict)


class _Bound(NamedTuple):
    """The gradients that a clipping rule is meant for, and their versions at that moment."""

    grads: list[Tensor]
    versions: list[int]


class _Work(NamedTuple):
    """The parameters of one group that this step updates, with their gradients."""

    group: dict[str, Any]
    params: list[Tensor]
    grads: list[Tensor]


class FusedAdamW(AdamW):
    """AdamW (decoupled weight decay, Loshchilov and Hutter 2019) with clipping and the non-finite check inside `step`.

    params: as in torch.optim.AdamW (tensors, named tensors or groups); groups may set lr, betas, eps, weight_decay.
    lr: number or 0-d tensor (a tensor on the device is never read by the host).
    master_weights: keep fp32 copies of bf16 and fp16 parameters and fp32 moments for them; fp32 parameters get none.

    A step whose gradients hold a NaN or an infinity changes nothing (parameters, moments, step counters) and is counted
    in `skipped_steps`. Parameters without gradient or with requires_grad=False cost nothing and get no state.
    On an accelerator nothing synchronizes with the host.
    Raises ValueError naming a setting that has no fused counterpart (amsgrad, maximize, differentiable, capturable).
    """

    _control: _Control

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        master_weights: bool = False,
    ) -> None:
        self.begin_control(master_weights=master_weights)
        super().__init__(params, lr, betas, eps, weight_decay)

    def begin_control(self, *, master_weights: bool) -> None:
        """Starts counting afresh; for an object that became a FusedAdamW after it was built."""
        self._control = _Control(master_weights=master_weights)

    # ------------------------------------------------------------------ what a user reads and sets

    @property
    def last_grad_norm(self) -> Tensor:
        """0-d: global gradient norm of the last step, after the normalizer, before clipping; NaN before the first."""
        return self._control.last_grad_norm

    @property
    def skipped_steps(self) -> Tensor:
        """0-d int64: how many steps were skipped because of non-finite gradients since this object was built."""
        return self._control.skipped_steps

    @property
    def consecutive_skips(self) -> Tensor:
        """0-d int64: how many of the latest steps were skipped in a row; 0 after a step that was taken."""
        return self._control.consecutive_skips

    @property
    def master_weights(self) -> bool:
        """Whether bf16 and fp16 parameters have fp32 masters."""
        return self._control.master_weights

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
        bound = self._control.bound
        if bound is not None and {id(g) for g in bound.grads}.isdisjoint(map(id, self._present_grads())):
            return None
        return self._control.rule

    def clip(
        self,
        max_norm: float | None = None,
        max_value: float | None = None,
        normalizer: float | Tensor | None = None,
        *,
        norm_type: float | None = None,
    ) -> None:
        """Sets what the next `step()` applies to its gradients; replaces an earlier call, reads no gradient.

        max_norm: limit of the global norm over all groups. max_value: limit of every element.
        normalizer: gradients are divided by it before either. norm_type: 2.0 or inf; None means `self.norm_type`.
        Without arguments the pending rule is dropped. Raises ValueError when both limits are set or one is not
        positive.
        """
        rule = ClipRule(max_norm, max_value, normalizer, self.norm_type if norm_type is None else norm_type)
        self._control.rule = None if max_norm is None and max_value is None and normalizer is None else rule
        self._control.bound = None

    def clip_present(self, rule: ClipRule) -> None:
        """Like `clip`, for the gradients that exist now, as torch.nn.utils.clip_grad_norm_ would clip them.

        The rule is dropped with them: a step whose gradients are all new ones is not clipped. RuntimeError in the step
        when the gradients were written to in between: they would have been clipped before that, not after it.
        """
        grads = self._present_grads()
        self._control.rule, self._control.bound = rule, _Bound(grads, [g._version for g in grads])

    def _present_grads(self) -> list[Tensor]:
        return [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]

    def _take_rule(self) -> ClipRule | None:
        """What this step applies; it is used up."""
        control = self._control
        rule, control.rule = control.rule, None
        bound, control.bound = control.bound, None
        if rule is None or bound is None:
            return rule
        grads = self._present_grads()
        if {id(g) for g in bound.grads}.isdisjoint(map(id, grads)):
            return None
        same = len(grads) == len(bound.grads) and all(map(operator.is_, grads, bound.grads))
        if not same or [g._version for g in grads] != bound.versions:
            raise RuntimeError(
                "gradients were changed between clipping and step(); clipping happens inside the step here, so it "
                "would act on the changed ones: clip last, or keep torch's step with fused_optimizer=False"
            )
        return rule

    def grad_norm(self, norm_type: float | None = None) -> Tensor:
        """0-d: global norm of the gradients as they are now; the next `step()` reuses the pass if they do not change.

        Returns 0 when there is no gradient.
        """
        work = self._collect()
        if not work:
            return torch.zeros(())
        return decide(self._statistics(work, self.norm_type if norm_type is None else norm_type)).norm

    def first_nonfinite_parameter(self) -> Tensor | None:
        """The first parameter (group order) whose gradient was non-finite in the last step or `grad_norm()`, if any.

        Synchronizes with the device: call it to explain a skipped step, not on every one.
        """
        if self._control.stats is None:
            return None
        bad = (~self._control.stats.partials.isfinite()).nonzero().flatten().tolist()
        return self._control.params_of_stats[bad[0]] if bad else None

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
        control = self._control
        rule = self._take_rule()
        work = self._collect()
        if not work:
            return loss
        rule = rule if rule is not None else ClipRule(norm_type=control.norm_type)
        stats = self._statistics(work, rule.norm_type)
        decision = decide(stats, max_norm=rule.max_norm, normalizer=rule.normalizer)
        self._record(decision)
        scaled = rule.max_norm is not None or rule.normalizer is not None
        if decision.take.device.type == "cpu":
            # Reading a CPU scalar costs no synchronization, and a coefficient of exactly 1 then costs no pass at all.
            scale = decision.scale.item() if scaled else 1.0
            if decision.take:
                self._update(work, None if scale == 1.0 else scale, rule.max_value, take=None)
        else:
            self._update(work, decision.scale if scaled else None, rule.max_value, take=decision.take)
        control.grads_of_stats = []
        return loss

    def _collect(self) -> list[_Work]:
        work = []
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None and p.requires_grad]
            if params:
                work.append(_Work(group, params, [p.grad for p in params]))
        for grad in chain.from_iterable(w.grads for w in work):
            if grad.layout != torch.strided:
                raise ValueError(
                    f"a gradient of shape {tuple(grad.shape)} is sparse; AdamW needs dense gradients "
                    "(for an embedding: sparse=False)"
                )
        devices = {p.device for w in work for p in w.params}
        if len(devices) > 1:
            raise ValueError(
                f"the parameters live on several devices ({', '.join(sorted(map(str, devices)))}); "
                "use one FusedAdamW per device or torch.optim.AdamW"
            )
        return work

    def _statistics(self, work: list[_Work], norm_type: float) -> GradStats:
        grads = [g for w in work for g in w.grads]
        control = self._control
        # A tensor's version counts in-place writes: the pass is reused only for the same tensors, unwritten since.
        # Holding them (until the step) keeps a new gradient from taking an old one's place in memory.
        versions = [g._version for g in grads]
        same = len(grads) == len(control.grads_of_stats) and all(map(operator.is_, grads, control.grads_of_stats))
        if control.stats is None or not same or (norm_type, versions) != (control.stats.norm_type, control.versions):
            control.stats = grad_stats(grads, norm_type=norm_type)
            control.grads_of_stats, control.versions = grads, versions
            control.params_of_stats = [p for w in work for p in w.params]
        return control.stats

    def _record(self, decision: Decision) -> None:
        control = self._control
        control.last_grad_norm = decision.norm
        skipped = (~decision.take).to(torch.int64)
        control.skipped_steps = _counter_on(skipped.device, control.skipped_steps) + skipped
        control.consecutive_skips = (_counter_on(skipped.device, control.consecutive_skips) + 1) * skipped

    def _update(
        self, work: list[_Work], scale: float | Tensor | None, max_value: float | None, *, take: Tensor | None
    ) -> None:
        for group, params, grads in work:
            states = [self._ready_state(p) for p in params]
            beta1, beta2 = group["betas"]
            adamw_step_(
                params,
                grads,
                [s["exp_avg"] for s in states],
                [s["exp_avg_sq"] for s in states],
                [s["step"] for s in states],
                lr=group["lr"],
                beta1=float(beta1),
                beta2=float(beta2),
                eps=group["eps"],
                weight_decay=group["weight_decay"],
                masters=[s.get(MASTER_KEY) for s in states],
                scale=scale,
                max_value=max_value,
                take=take,
            )
            self._control.versions_of_masters |= {
                p: p._version for p, s in zip(params, states, strict=True) if MASTER_KEY in s
            }

    # ------------------------------------------------------------------ state

    def _needs_master(self, param: Tensor) -> bool:
        return self.master_weights and param.dtype in LOW_PRECISION

    def _ready_state(self, param: Tensor) -> dict[str, Any]:
        """The parameter's state, created or moved to where this step needs it."""
        state: dict[str, Any] = self.state[param]
        dtype = torch.float32 if self._needs_master(param) else param.dtype
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
            state["exp_avg"] = torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)
        # torch.optim.AdamW keeps `step` on the CPU, and so does a checkpoint of it.
        state["step"] = state["step"].to(param.device, torch.float32)
        for key in ("exp_avg", "exp_avg_sq"):
            state[key] = state[key].to(param.device, dtype)
        if self._needs_master(param):
            state[MASTER_KEY] = self._ready_master(param, state.get(MASTER_KEY))
        return state

    def _ready_master(self, param: Tensor, master: Tensor | None) -> Tensor:
        if master is None:
            return param.detach().to(torch.float32)
        if self._control.versions_of_masters.get(param) != param._version:
            # Somebody loaded or changed the parameter: a master is valid where it rounds to its parameter.
            master = torch.where(master.to(param.dtype) == param, master, param.detach().to(torch.float32))
        return master

    def recheck_masters(self) -> None:
        """Call after changing bf16 or fp16 parameters through `.data`: the next step starts from their new values.

        Changes in place under `torch.no_grad()` and `load_state_dict` of the module are noticed without it.
        """
        self._control.versions_of_masters.clear()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch.optim.AdamW; ValueError naming a setting or a parameter that is not supported."""
        super().add_param_group(param_group)
        reason = unsupported_in_group(self.param_groups[-1])
        if reason:
            self.param_groups.pop()
            raise ValueError(f"FusedAdamW does not support {reason}; use torch.optim.AdamW for it")

    @torch._disable_dynamo
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state of FusedAdamW or torch.optim.AdamW; parameters are matched by position.

        fp32 moments and masters keep their precision under bf16 parameters (torch alone would round them); a master
        that does not round to its parameter's current value is rebuilt from it at the next step.
        Raises ValueError for a state written with a setting that is not supported, before anything changes.
        """
        for group in state_dict["param_groups"]:
            reason = unsupported_in_group({**group, "params": []})
            if reason:
                raise ValueError(f"FusedAdamW cannot continue a state that was saved with {reason}")
        super().load_state_dict(state_dict)
        saved_ids = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        live = chain.from_iterable(group["params"] for group in self.param_groups)
        for saved_id, param in zip(saved_ids, live, strict=True):
            saved = state_dict["state"].get(saved_id)
            if saved is not None:
                self._restore_precision(param, saved)
        self.recheck_masters()
        self._control.stats, self._control.grads_of_stats, self._control.params_of_stats = None, [], []

    def _restore_precision(self, param: Tensor, saved: dict[str, Any]) -> None:
        state = self.state[param]
        state.pop(MASTER_KEY, None)
        if not self._needs_master(param):
            return
        for key in ("exp_avg", "exp_avg_sq", MASTER_KEY):
            # A master of lower precision was rounded by another optimizer on its way: it says nothing new.
            if key in saved and (key != MASTER_KEY or saved[key].dtype == torch.float32):
                state[key] = saved[key].detach().to(param.device, torch.float32, copy=True)

    def __getstate__(self) -> dict[str, Any]:
        control = _Control(master_weights=self.master_weights, norm_type=self.norm_type)
        return {**super().__getstate__(), "_control": control}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self.__dict__.setdefault("_control", _Control())


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


def _counter_on(device: torch.device, counter: Tensor) -> Tensor:
    """The counter on `device`; one that starts on the CPU gets there without a synchronizing copy."""
    if counter.device.type == "cpu" and device.type != "cpu":
        return torch.full((), int(counter), dtype=counter.dtype, device=device)
    return counter.to(device)


def unsupported_in_group(group: dict[str, Any]) -> str | None:
    """The setting or parameter of a param group that has no fused counterpart, as words for an error; None if none."""
    for setting in UNSUPPORTED_SETTINGS:
        if group.get(setting):
            return f"{setting}=True"
    if not group.get("decoupled_weight_decay", True):
        return "decoupled_weight_decay=False (L2 regularization)"
    if any(isinstance(beta, Tensor) and beta.device.type != "cpu" for beta in group.get("betas", ())):
        return "betas as device tensors"
    for param in group["params"]:
        if not param.is_floating_point():
            return f"a parameter of dtype {param.dtype} (shape {tuple(param.shape)})"
    return None
