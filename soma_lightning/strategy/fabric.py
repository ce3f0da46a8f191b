"""`Fabric(strategy="somaspeed")`: the strategy for lightning.fabric."""

from __future__ import annotations

import contextlib
import weakref
from pathlib import Path
from typing import Any, Literal, TypeVar

from lightning.fabric.strategies import ParallelStrategy
from lightning.fabric.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from soma_lightning.layout.full_state import gather
from soma_lightning.layout.mesh import Layout
from soma_lightning.optim.clipping import clip_in_place
from soma_lightning.optim.fused_adamw import FusedAdamW
from soma_lightning.strategy import processes
from soma_lightning.strategy.checkpoint import refuse_directory
from soma_lightning.strategy.engine import Engine
from soma_lightning.strategy.loss_scale import share_loss_scale
from soma_lightning.strategy.memory import Activity
from soma_lightning.strategy.options import StrategyOptions
from soma_lightning.strategy.ranks import Ranks
from soma_lightning.strategy.report import build_report

T = TypeVar("T")


class FabricSomaSpeedStrategy(Ranks, ParallelStrategy):
    """SomaSpeedStrategy for Fabric: same arguments, same meaning, except that

    - `norm_type` is an argument of `fabric.clip_gradients` and must stay 2.0 here;
    - `log_grad_norm` must stay False: read `optimizer.last_grad_norm`;
    - `report` is printed when optimizers are set up, and written only where it names a .json file.

    `fabric.clip_gradients` returns the norm as a plain tensor and leaves `.grad` as it is; the limit is applied by the
    next `optimizer.step()`.
    Raises ValueError for a value that is unknown or not available, naming what is.
    """

    _in_fabric = True

    def __init__(
        self,
        layout: Layout | dict[str, Any] | str = "auto",
        wrap_policy: dict[str, list[str]] | None = None,
        mixed_precision: dict[str, Any] | None = None,
        wrappers: dict[str, dict[str, Any]] | None = None,
        mixed_precision_policies: dict[str, dict[str, Any]] | None = None,
        mixed_precision_rules: dict[str, str] | None = None,
        frozen: Literal["auto", "replicate", "shard"] = "auto",
        reshard_after_forward: bool | None = None,
        fused_optimizer: Literal["auto"] | bool = "auto",
        master_weights: Literal["auto"] | bool = "auto",
        keep_low_precision_grads: bool = False,
        nonfinite: Literal["skip", "raise"] = "skip",
        max_consecutive_skips: int | None = 10,
        norm_type: float = 2.0,
        compile: dict[str, Any] | None = None,
        activation_checkpointing: dict[str, Any] | None = None,
        save_format: Literal["auto", "file", "directory"] = "auto",
        async_save: bool = False,
        checkpoint_weights_only: bool | None = None,
        log_grad_norm: bool = False,
        report: bool | str | Path = True,
        tensor_parallel: dict[str, Any] | None = None,
        pipeline: dict[str, Any] | None = None,
        forward_methods: list[str] | None = None,
        cpu_offload: bool = False,
        timeout: float = 1800.0,
    ) -> None:
        if norm_type != 2.0:
            raise ValueError(f"norm_type={norm_type} is not used by Fabric; pass it to fabric.clip_gradients")
        if log_grad_norm:
            raise ValueError("log_grad_norm=True is not used by Fabric; log optimizer.last_grad_norm yourself")
        options = StrategyOptions(
            layout=layout,
            wrap_policy=wrap_policy,
            mixed_precision=mixed_precision,
            wrappers=wrappers,
            mixed_precision_policies=mixed_precision_policies,
            mixed_precision_rules=mixed_precision_rules,
            frozen=frozen,
            reshard_after_forward=reshard_after_forward,
            fused_optimizer=fused_optimizer,
            master_weights=master_weights,
            keep_low_precision_grads=keep_low_precision_grads,
            nonfinite=nonfinite,
            max_consecutive_skips=max_consecutive_skips,
            norm_type=norm_type,
            compile=compile,
            activation_checkpointing=activation_checkpointing,
            save_format=save_format,
            async_save=async_save,
            checkpoint_weights_only=checkpoint_weights_only,
            log_grad_norm=log_grad_norm,
            report=report,
            tensor_parallel=tensor_parallel,
            pipeline=pipeline,
            forward_methods=forward_methods,
            cpu_offload=cpu_offload,
            timeout=timeout,
        )
        self.engine = Engine(options)
        self._num_nodes = 1
        self._steps: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._last_module: weakref.ref[Module] | None = None
        super().__init__()
        self._backward_sync_control = _BackwardSync(self.engine)  # type: ignore[assignment]

    # ------------------------------------------------------------------ world

    def _set_world_ranks(self) -> None:
        self._number_ranks()

    def module_to_device(self, module: Module) -> None:
        with self._explained("set-up"):
            module.to(self.root_device)

    def _explained(self, activity: Activity) -> contextlib.AbstractContextManager[None]:
        """Inside, an error for want of memory says what would need less."""
        precision = str(self.precision.precision)
        return self.engine.explaining_memory(activity, device=self.root_device, precision=precision)

    def all_reduce(self, tensor: T, group: Any | None = None, reduce_op: Any = "mean") -> T:
        return processes.reduce(tensor, group, reduce_op) if self.is_distributed else tensor

    # ------------------------------------------------------------------ set-up

    def setup_module(self, module: Module) -> Module:
        if self.is_distributed:
            share_loss_scale(self.precision)
        with self._explained("set-up"):
            module = self.engine.setup_module(module, device=self.root_device, precision=str(self.precision.precision))
        self._last_module = weakref.ref(module)
        return module

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        self.engine.setup_optimizer(optimizer)
        module = None if self._last_module is None else self._last_module()
        if module is not None:
            self._report(module, [optimizer])
        return optimizer

    def setup_module_and_optimizers(
        self, module: Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[Module, list[Optimizer], Any]:
        module = self.setup_module(module)
        for optimizer in optimizers:
            self.engine.setup_optimizer(optimizer)
        self._report(module, optimizers)
        return module, optimizers, scheduler

    def load_checkpoint(
        self, path: str | Path, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        if weights_only is None:
            weights_only = self.engine.options.checkpoint_weights_only
        refuse_directory(path)
        return super().load_checkpoint(path, state, strict, weights_only)

    def save_checkpoint(
        self, path: str | Path, state: dict[str, Any], storage_options: Any = None, filter: Any = None
    ) -> None:
        """Every rank calls it; rank 0 gets the whole tensors, one at a time, and writes the file."""
        converted = self._convert_stateful_objects_in_state(state, filter=filter or {})
        if self.is_distributed:
            converted = gather(converted, keep=self.is_global_zero)
        super().save_checkpoint(path, converted, storage_options)

    def _report(self, module: Module, optimizers: list[Optimizer]) -> None:
        report = self.engine.options.report
        if report is False or not self.is_global_zero:
            return
        assert self.engine.layout is not None
        facts = build_report(
            module,
            [(optimizer, self.engine.path_of(optimizer).description) for optimizer in optimizers],
            clipping="by fabric.clip_gradients",
            precision=str(self.precision.precision),
            layout=self.engine.layout.mesh_shape(),
            device=self.root_device,
            sharded=self.engine.sharded(module),
        )
        rank_zero_info(facts.summary())
        if not isinstance(report, bool):
            facts.write(report)

    # ------------------------------------------------------------------ training

    def backward(self, tensor: Tensor, module: Module | None, *args: Any, **kwargs: Any) -> None:
        with self._explained("backward pass"):
            self.engine.before_backward()
            super().backward(tensor, module, *args, **kwargs)
            self.engine.after_backward()

    def optimizer_step(self, optimizer: Optimizer, **kwargs: Any) -> Any:  # type: ignore[override]
        with self._explained("optimizer step"):
            result = super().optimizer_step(optimizer, **kwargs)
        self._steps[optimizer] = self._steps.get(optimizer, 0) + 1
        self.engine.after_step(optimizer, where=f"step {self._steps[optimizer]} of this optimizer")
        return result

    def clip_gradients_norm(
        self,
        module: Module,
        optimizer: Optimizer,
        max_norm: float | int,
        norm_type: float | int = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Returns the global norm (0-d, before clipping); the next step clips with it.

        error_if_nonfinite: RuntimeError for a non-finite norm, before anything changes (reads the norm on the host).
        """
        if not isinstance(optimizer, FusedAdamW):
            self.precision.unscale_gradients(optimizer)
            params = self.precision.main_params(optimizer)
            return clip_in_place(params, float(max_norm), float(norm_type), error_if_nonfinite=error_if_nonfinite)
        self.precision.unscale_gradients(optimizer)
        norm = optimizer.grad_norm(norm_type)
        if error_if_nonfinite and not norm.isfinite():
            bad = optimizer.first_nonfinite_parameter()
            source = "" if bad is None else f"; the first non-finite gradient is that of {self.engine.name_of(bad)!r}"
            raise RuntimeError(
                f"the gradient norm (type {float(norm_type)}) is {norm.item()}{source}. Nothing was changed; "
                "error_if_nonfinite=False skips such steps instead"
            )
        self.engine.defer_clipping(optimizer, max_norm=float(max_norm), norm_type=float(norm_type))
        return norm

    def clip_gradients_value(self, module: Module, optimizer: Optimizer, clip_val: float | int) -> None:
        if not isinstance(optimizer, FusedAdamW):
            super().clip_gradients_value(module, optimizer, clip_val)
            return
        self.precision.unscale_gradients(optimizer)
        self.engine.defer_clipping(optimizer, max_value=float(clip_val))


class _BackwardSync:
    """What `fabric.no_backward_sync` calls once there is something to synchronize."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def no_backward_sync(self, module: Module, enabled: bool) -> contextlib.AbstractContextManager[None]:
        return self._engine.gradient_sync(module, enabled=not enabled)
