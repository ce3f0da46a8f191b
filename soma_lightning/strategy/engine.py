"""What the Trainer's and Fabric's strategy do alike: set up the module, take over optimizers, guard every step.

Sharding belongs in `setup_module`, which runs before optimizers exist (Trainer) or are taken over (Fabric).
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from soma_lightning.layout.mesh import Layout, resolve_layout
from soma_lightning.optim.adoption import adopt, why_not_adopted
from soma_lightning.optim.clipping import ClipRule
from soma_lightning.optim.fused_adamw import FusedAdamW
from soma_lightning.optim.state import LOW_PRECISION
from soma_lightning.strategy.options import StrategyOptions


@dataclass(frozen=True)
class OptimizerPath:
    """How an optimizer steps: `fused` or not, and in words why."""

    fused: bool
    description: str


class _SkipWatch:
    """Reads a device counter some steps late instead of waiting for the device."""

    def __init__(self) -> None:
        self._host: Tensor | None = None
        self._copied: torch.cuda.Event | None = None
        self._latest = 0

    def read(self, counter: Tensor) -> int:
        if counter.device.type != "cuda":
            return int(counter)
        if self._host is None or self._copied is None:
            self._host = torch.zeros((), dtype=torch.int64, pin_memory=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        elif not self._copied.query():  # type: ignore[no-untyped-call]
            return self._latest
        else:
            self._latest = int(self._host)
        self._host.copy_(counter, non_blocking=True)
        self._copied.record(torch.cuda.current_stream(counter.device))
        return self._latest


class Engine:
    """The strategy without Lightning around it."""

    def __init__(self, options: StrategyOptions) -> None:
        self.options = options
        self.layout: Layout | None = None
        self._modules: weakref.WeakSet[Module] = weakref.WeakSet()
        self._paths: weakref.WeakKeyDictionary[Optimizer, OptimizerPath] = weakref.WeakKeyDictionary()
        self._watches: weakref.WeakKeyDictionary[Optimizer, _SkipWatch] = weakref.WeakKeyDictionary()

    # ------------------------------------------------------------------ set-up

    def setup_world(self, *, devices: int, num_nodes: int, processes: int) -> None:
        """Fixes the layout for `devices` times `num_nodes` in a world that a launcher started with `processes`.

        ValueError if the layout does not fit, or for more than one process.
        """
        if devices * num_nodes > 1:
            raise ValueError(
                f"strategy 'somaspeed' runs one process in this version, but {devices * num_nodes} were asked for "
                f"(num_nodes={num_nodes}); use devices=1, num_nodes=1"
            )
        if processes > 1:
            raise ValueError(
                f"strategy 'somaspeed' runs one process in this version, but this is one of {processes} that a "
                "launcher (torchrun, srun, mpirun) started; start a single one"
            )
        self.layout = resolve_layout(self.options.layout, world_size=1, num_nodes=num_nodes)

    def setup_module(self, module: Module) -> Module:
        """Prepares a module that is on its device, before any optimizer is taken over. May be called again."""
        self._modules.add(module)
        return module

    def setup_optimizer(self, optimizer: Optimizer) -> OptimizerPath:
        """Gives a plain AdamW the fused step, in place; other optimizers stay as they are.

        Raises ValueError if the settings ask for something that this optimizer cannot do.
        """
        path = self._fuse(optimizer)
        if not path.fused:
            self.options.refuse_without_fused_step(path.description)
        self._paths[optimizer] = path
        return path

    def path_of(self, optimizer: Optimizer) -> OptimizerPath:
        """How `optimizer` steps, as decided by `setup_optimizer`."""
        return self._paths[optimizer]

    def _fuse(self, optimizer: Optimizer) -> OptimizerPath:
        options = self.options
        if isinstance(optimizer, FusedAdamW):
            if options.master_weights != "auto" and options.master_weights != optimizer.master_weights:
                raise ValueError(
                    f"the strategy has master_weights={options.master_weights}, but the optimizer was built with "
                    f"master_weights={optimizer.master_weights}; leave one of them out"
                )
            if options.fused_optimizer is False:
                raise ValueError(
                    f"fused_optimizer=False, but the optimizer is a {type(optimizer).__name__}; build a "
                    "torch.optim.AdamW instead"
                )
            optimizer.norm_type = options.norm_type
            return OptimizerPath(True, _described(optimizer))
        if options.fused_optimizer is False:
            return OptimizerPath(False, f"torch ({type(optimizer).__name__}): fused_optimizer=False")
        reason = why_not_adopted(optimizer)
        if reason:
            if options.fused_optimizer is True:
                raise ValueError(f"fused_optimizer=True, but {reason}; use 'auto' to let such optimizers step as usual")
            return OptimizerPath(False, f"torch ({type(optimizer).__name__}): {reason}")
        low = any(p.dtype in LOW_PRECISION for group in optimizer.param_groups for p in group["params"])
        fused = adopt(optimizer, master_weights=low if options.master_weights == "auto" else options.master_weights)
        fused.norm_type = options.norm_type
        return OptimizerPath(True, _described(fused))

    # ------------------------------------------------------------------ every step

    def defer_clipping(
        self,
        optimizer: FusedAdamW,
        *,
        max_norm: float | None = None,
        max_value: float | None = None,
        norm_type: float | None = None,
    ) -> None:
        """Adds a limit to what the optimizer's next step does to the present gradients; of two, the smaller one wins.

        norm_type: None means the optimizer's. ValueError for a limit by norm and one by value together.
        """
        rule = ClipRule(max_norm, max_value, norm_type=optimizer.norm_type if norm_type is None else norm_type)
        pending = optimizer.pending_clip
        optimizer.clip_present(rule if pending is None else pending.tightened(rule))

    def after_step(self, optimizer: Optimizer, *, where: str) -> None:
        """Applies the non-finite policy. `where` names the step in an error, for example "global_step 12"."""
        if not isinstance(optimizer, FusedAdamW):
            return
        # A GradScaler that skips the step leaves the rule behind; it belonged to the gradients of this step.
        optimizer.clip()
        limit = 1 if self.options.nonfinite == "raise" else self.options.max_consecutive_skips
        if limit is None:
            return
        if self.options.nonfinite == "raise":
            skips = int(optimizer.consecutive_skips)
        else:
            skips = self._watches.setdefault(optimizer, _SkipWatch()).read(optimizer.consecutive_skips)
        if skips >= limit:
            self._stop(optimizer, skips, where)

    def _stop(self, optimizer: FusedAdamW, skips: int, where: str) -> None:
        bad = optimizer.first_nonfinite_parameter()
        # Without a bad gradient it is their sum, or the normalizer.
        cause = "the norm is not finite or the normalizer not positive"
        if bad is not None:
            cause = f"the gradient of {self.name_of(bad)!r} holds a NaN or an infinity"
        if self.options.nonfinite == "raise":
            raise RuntimeError(
                f"non-finite gradients at {where}: {cause} (nonfinite='raise'); the step changed nothing"
            )
        raise RuntimeError(
            f"{skips} optimizer steps in a row were skipped because of non-finite gradients, the last one at {where}: "
            f"{cause} (max_consecutive_skips={self.options.max_consecutive_skips}); "
            "no skipped step changed anything"
        )

    def name_of(self, param: Tensor) -> str:
        """Qualified name of a parameter in the modules that were set up, or its shape."""
        for module in self._modules:
            for name, candidate in module.named_parameters():
                if candidate is param:
                    return name
        return f"a parameter of shape {tuple(param.shape)}"

    @contextlib.contextmanager
    def gradient_sync(self, module: Module, *, enabled: bool) -> Iterator[None]:
        """Backward passes inside do not reduce gradients unless `enabled`; after it they do again.

        With one process there is nothing to reduce.
        """
        yield


def _described(optimizer: FusedAdamW) -> str:
    low = any(p.dtype in LOW_PRECISION for group in optimizer.param_groups for p in group["params"])
    masters = f", {'' if optimizer.master_weights else 'no '}fp32 masters for bf16/fp16 parameters" if low else ""
    return f"{type(optimizer).__name__}: clipping and update in one step, by {optimizer.path_description}{masters}"
