"""Who is measured: our clipped AdamW step and the others' for the same parameters, each behind one `step()`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW

from bench.registry import Case
from soma_lightning.optim.fused_adamw import FusedAdamW

Implementation = Literal["auto", "triton", "reference"]
TorchKind = Literal["fused", "foreach", "for-loop"]


@dataclass(frozen=True)
class Hyper:
    """Hyperparameters of every measured step."""

    lr: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.01
    max_norm: float = 1.0

    def adamw(self) -> dict[str, Any]:
        """What every AdamW takes, under torch's names."""
        return {
            "lr": self.lr,
            "betas": (self.beta1, self.beta2),
            "eps": self.eps,
            "weight_decay": self.weight_decay,
        }


class Stepper(Protocol):
    """An optimizer bound to its parameters: `step` clips their `.grad` by the global norm and updates them."""

    def step(self) -> None: ...


class Ours:
    """FusedAdamW in the dtypes of `case`; gradients keep their bits."""

    def __init__(
        self, params: Sequence[Parameter], case: Case, hyper: Hyper, implementation: Implementation = "auto"
    ) -> None:
        widened = case.state != case.param and not case.master
        self._max_norm = hyper.max_norm
        self.optimizer = FusedAdamW(
            params,
            **hyper.adamw(),
            master_weights=case.master,
            state_dtype=case.state if widened else None,
            implementation=implementation,
        )

    def step(self) -> None:
        self.optimizer.clip(max_norm=self._max_norm)
        self.optimizer.step()


class TorchAdamW:
    """torch.nn.utils.clip_grad_norm_ and torch.optim.AdamW; clips the gradients in place.

    fp32_targets: the optimizer works on fp32 copies of low-precision parameters and their gradients, the usual recipe
    for masters; torch itself keeps moments in the dtype of what it updates. rounded: the copies are rounded to the
    parameters after every step, which leaves fp32 moments and no masters.
    capturable: step counters on the device, so that a CUDA graph can hold the step.
    """

    def __init__(
        self,
        params: Sequence[Parameter],
        hyper: Hyper,
        kind: TorchKind,
        *,
        fp32_targets: bool = False,
        rounded: bool = False,
        capturable: bool = False,
    ) -> None:
        self._params: list[Tensor] = list(params)
        self._max_norm, self._rounded, self._foreach = hyper.max_norm, rounded, kind != "for-loop"
        self.targets = self._params
        if fp32_targets:
            self.targets = [p.detach().to(torch.float32, copy=True) for p in params]
            for target in self.targets:
                target.grad = torch.empty_like(target)
        self.optimizer = AdamW(
            self.targets,
            **hyper.adamw(),
            fused=kind == "fused",
            foreach=kind == "foreach",
            capturable=capturable,
        )

    @torch.no_grad()
    def step(self) -> None:
        copied = self.targets is not self._params
        if copied:
            torch._foreach_copy_(_gradients(self.targets), _gradients(self._params))
        clip_grad_norm_(self.targets, self._max_norm, foreach=self._foreach)
        self.optimizer.step()
        if copied:
            torch._foreach_copy_(self._params, self.targets)
        if self._rounded:
            torch._foreach_copy_(self.targets, self._params)


def _gradients(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [t.grad for t in tensors if t.grad is not None]


class _Library:
    """A library's optimizer behind its own or torch's clipping."""

    def __init__(self, params: Sequence[Parameter], hyper: Hyper, optimizer: Any, clip: Any) -> None:
        self._params, self._max_norm, self._optimizer, self._clip = list(params), hyper.max_norm, optimizer, clip

    def step(self) -> None:
        self._clip(self._params, self._max_norm)
        self._optimizer.step()


def _apex(params: Sequence[Parameter], case: Case, hyper: Hyper) -> Stepper:
    # FusedAdam keeps fp32 moments; it accepts masters only in its capturable form.
    optimizer = import_module("apex.optimizers").FusedAdam(
        list(params),
        **hyper.adamw(),
        adam_w_mode=True,
        capturable=case.master,
        master_weights=case.master,
    )
    return _Library(params, hyper, optimizer, import_module("apex.contrib.clip_grad").clip_grad_norm_)


def _bitsandbytes(params: Sequence[Parameter], case: Case, hyper: Hyper) -> Stepper:
    optimizer = import_module("bitsandbytes.optim").AdamW(list(params), **hyper.adamw(), optim_bits=32)
    return _Library(params, hyper, optimizer, clip_grad_norm_)


@dataclass(frozen=True)
class Peer:
    """One contender. graphs: its step can be captured in a CUDA graph. loops: launches kernels for each tensor."""

    name: str
    graphs: bool = False
    loops: bool = False

    def build(
        self, params: Sequence[Parameter], case: Case, hyper: Hyper, *, implementation: Implementation, captured: bool
    ) -> Stepper:
        """A fresh optimizer on `params`. captured: it will run inside a CUDA graph."""
        if self.name == "ours":
            return Ours(params, case, hyper, implementation)
        if self.name == "apex":
            return _apex(params, case, hyper)
        if self.name == "bitsandbytes":
            return _bitsandbytes(params, case, hyper)
        kind: dict[str, TorchKind] = {
            "torch fused": "fused",
            "torch foreach": "foreach",
            "torch for-loop": "for-loop",
        }
        return TorchAdamW(params, hyper, kind[self.name], fp32_targets=case.master, capturable=captured)

    def why_absent(self, case: Case) -> str | None:
        """Why this peer cannot be measured here in `case`, as a phrase for its cell; None if it can."""
        if self.name.startswith("torch") and case.param == torch.float16 and not case.master:
            # torch keeps moments in the parameter's dtype. Squares of clipped gradients are below float16's smallest
            # number, and parameters then become infinite within a few steps.
            return "float16 moments underflow"
        needed = {"apex": ("apex", "apex.optimizers"), "bitsandbytes": ("bitsandbytes", "bitsandbytes.optim")}
        for module in needed.get(self.name, ()):
            # PyPI's `apex` is another project: NVIDIA's has `apex.optimizers`.
            if find_spec(module) is None:
                return "not installed"
        return None

    def unlike_ours(self, case: Case) -> str | None:
        """What this peer computes differently in `case`, as a phrase for a footnote; None when nothing."""
        widened = case.state != case.param and not case.master
        if self.name.startswith("torch") and widened:
            return f"moments in {str(case.param).removeprefix('torch.')}, fewer bytes"
        if self.name in ("apex", "bitsandbytes") and case.state != torch.float32:
            return "moments in float32, more bytes"
        if self.name == "bitsandbytes" and case.master:
            return "no masters, fewer bytes"
        return None


OURS = Peer("ours", graphs=True)
TORCH_FUSED = Peer("torch fused", graphs=True)
PEERS = (
    OURS,
    TORCH_FUSED,
    Peer("torch foreach", graphs=True),
    Peer("torch for-loop", graphs=True, loops=True),
    Peer("apex"),
    Peer("bitsandbytes", loops=True),
)
