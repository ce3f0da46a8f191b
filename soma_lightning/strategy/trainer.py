"""`Trainer(strategy="somaspeed")`: the strategy for lightning.pytorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar

import lightning.pytorch as pl
from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from soma_lightning.compat import move_device_records, turn_inference_mode_off, unwrap_optimizer
from soma_lightning.layout.full_state import gather
from soma_lightning.layout.mesh import Layout
from soma_lightning.optim.fused_adamw import FusedAdamW
from soma_lightning.strategy import processes
from soma_lightning.strategy.checkpoint import refuse_directory
from soma_lightning.strategy.engine import Engine
from soma_lightning.strategy.hooks import (
    follow_toggles,
    hooks_see_gradients,
    refuse_copies_of_the_module,
    thawing_callback,
)
from soma_lightning.strategy.loss_scale import share_loss_scale
from soma_lightning.strategy.memory import Activity
from soma_lightning.strategy.options import StrategyOptions
from soma_lightning.strategy.precision import with_deferred_clipping
from soma_lightning.strategy.ranks import Ranks
from soma_lightning.strategy.report import RunReport, build_report

T = TypeVar("T")


class SomaSpeedStrategy(Ranks, ParallelStrategy):  # type: ignore[misc]
    """Trains an unchanged LightningModule with one fused statistics, clipping and AdamW step.

    Several processes divide its parameters, gradients and optimizer state with FSDP2; one process divides nothing.

    layout: a `Layout`, a dict of its fields, or "auto", "fsdp" (one copy over all ranks), "hsdp" (copies over nodes,
        two on a single node), "replicate" (a copy on each rank). Tensor and pipeline sizes must stay 1.
    frozen: frozen parameters are whole on every rank ("replicate") or divided ("shard"); "auto" is the first, but the
        second when a BaseFinetuning callback will train them.
    reshard_after_forward: whether gathered parameters are freed between forward and backward; None: FSDP2's default.
    forward_methods: names of methods, of the module or of a unit in it, that gather parameters as forward does.
    timeout: seconds that a collective waits for a rank that does not come.
    fused_optimizer: "auto" gives every plain torch.optim.AdamW the fused step, in place, and leaves other optimizers
        as they are (the run report says why); True makes such an optimizer an error; False never does it.
    master_weights: fp32 masters and moments for bf16 and fp16 parameters; "auto": when there are such parameters.
    nonfinite: a step with non-finite gradients changes nothing; "skip" goes on, "raise" stops the run naming step and
        parameter (reads one value from the device every step).
    max_consecutive_skips: "skip" stops the run after this many skipped steps in a row; None never does.
    norm_type: norm of `gradient_clip_val` and of the logged norm, 2.0 or inf.
    save_format: "auto" and "file" write ordinary Lightning checkpoints.
    checkpoint_weights_only: `weights_only` for loading checkpoints when `fit(..., weights_only=)` is not given.
    log_grad_norm: logs `grad_norm` (before clipping; `grad_norm_<i>` with several optimizers) every
        `log_every_n_steps`; costs no extra pass.
    report: True prints a run report when training starts and writes `run_report.json` into `trainer.log_dir`; the path
        of a .json file writes it there; False does neither.

    What a program can notice: `.grad` after the step holds unclipped gradients; LearningRateMonitor writes
    `lr-FusedAdamW` instead of `lr-AdamW`. With a GradScaler (16-mixed) one process unscales gradients in place before
    the step, as without this strategy; several divide inside the step. A step that the scaler skips is not counted in
    `skipped_steps`.
    Raises ValueError for a value that is unknown or not available, naming what is.
    """

    strategy_name = "somaspeed"
    _in_fabric = False

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
        super().__init__()

    # ------------------------------------------------------------------ world

    def set_world_ranks(self) -> None:
        self._number_ranks()

    def setup_environment(self) -> None:
        super().setup_environment()
        if self.is_distributed:
            reset_seed()
            assert self.lightning_module is not None
            self.lightning_module._device_mesh = self.device_mesh

    def model_to_device(self) -> None:
        assert self.model is not None
        if not self.is_distributed:  # else sharding moves it, one unit after the other
            self.model.to(self.root_device)

    def reduce(self, tensor: T, group: Any | None = None, reduce_op: Any = "mean") -> T:
        return processes.reduce(tensor, group, reduce_op) if self.is_distributed else tensor

    # ------------------------------------------------------------------ set-up

    @property
    def precision_plugin(self) -> Precision:
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        self._precision_plugin = None if plugin is None else with_deferred_clipping(plugin, self.engine)

    def setup(self, trainer: pl.Trainer) -> None:
        if self.is_distributed:
            turn_inference_mode_off(trainer)
            refuse_copies_of_the_module(trainer)
            share_loss_scale(self.precision_plugin, in_place=hooks_see_gradients(trainer))
        precision = str(self.precision_plugin.precision)
        with self.engine.explaining_memory("set-up", device=self.root_device, precision=precision):
            super().setup(trainer)

    def _setup_model(self, model: Module) -> Module:
        if self._layer_sync is not None and self.is_distributed and not self.engine.is_sharded(model):
            model = self._layer_sync.apply(model)
        if self.is_distributed:  # what sharding does not move
            move_device_records(model, self.root_device)
        first_time = not self.engine.is_sharded(model)
        module = self.lightning_module
        model = self.engine.setup_module(
            model,
            device=self.root_device,
            precision=str(self.precision_plugin.precision),
            thawed_by=None if module is None else thawing_callback(module.trainer),
        )
        sharded = self.engine.sharded(model)
        if sharded is not None and first_time:
            follow_toggles(model, sharded)
        return model

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        super().setup_optimizers(trainer)
        for optimizer in self.optimizers:
            self.engine.setup_optimizer(unwrap_optimizer(optimizer))
        # Wrappers copy the class of what they wrap: rebuild them around the new one.
        self.optimizers = self.optimizers

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        if weights_only is None:
            weights_only = self.engine.options.checkpoint_weights_only
        refuse_directory(checkpoint_path)
        return super().load_checkpoint(checkpoint_path, weights_only=weights_only)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        """Every rank calls it; rank 0 gets the whole tensors, one at a time, and writes the file."""
        if self.is_distributed:
            checkpoint = gather(checkpoint, keep=self.is_global_zero)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    # ------------------------------------------------------------------ training

    def pre_backward(self, closure_loss: Tensor) -> None:
        module = self.lightning_module
        assert module is not None
        divisor = module.trainer.accumulate_grad_batches if module.automatic_optimization else 1
        self.engine.before_backward(loss_divisor=divisor)

    def post_backward(self, closure_loss: Tensor) -> None:
        self.engine.after_backward()

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | Module | None = None,
        **kwargs: Any,
    ) -> Any:
        with self._explained("optimizer step"):
            result = super().optimizer_step(optimizer, closure, model, **kwargs)
        module = self.lightning_module
        assert module is not None
        self.engine.after_step(optimizer, where=f"global_step {module.trainer.global_step}")
        if self.engine.options.log_grad_norm:
            self._log_grad_norm(module, optimizer)
        return result

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._explained("forward pass"):
            return super().training_step(*args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._explained("evaluation"):
            return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._explained("evaluation"):
            return super().test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._explained("evaluation"):
            return super().predict_step(*args, **kwargs)

    def backward(self, *args: Any, **kwargs: Any) -> Tensor:
        with self._explained("backward pass"):
            return super().backward(*args, **kwargs)

    def _explained(self, activity: Activity) -> AbstractContextManager[None]:
        """Inside, an error for want of memory says what would need less."""
        module = self.lightning_module
        assert module is not None
        return self.engine.explaining_memory(
            activity,
            device=self.root_device,
            precision=str(self.precision_plugin.precision),
            where=f"global_step {module.trainer.global_step}",
            accumulate=module.trainer.accumulate_grad_batches if module.automatic_optimization else None,
        )

    def _log_grad_norm(self, module: pl.LightningModule, optimizer: Optimizer) -> None:
        optimizers = [unwrap_optimizer(candidate) for candidate in self.optimizers]
        suffix = "" if len(optimizers) == 1 else f"_{optimizers.index(optimizer)}"
        assert isinstance(optimizer, FusedAdamW)
        # A tensor is logged as it is: Lightning reads it only on steps that are written to the loggers.
        module.log(f"grad_norm{suffix}", optimizer.last_grad_norm, on_step=True, on_epoch=False, batch_size=1)

    def grad_norm(self, optimizer: Optimizer) -> Tensor:
        """0-d: gradient norm (`norm_type`) before the step, for `on_before_optimizer_step`; the step reuses the pass.

        TypeError for an optimizer without the fused step.
        """
        target = unwrap_optimizer(optimizer)
        if not isinstance(target, FusedAdamW):
            raise TypeError(f"{type(target).__name__} has no fused step; use lightning.pytorch.utilities.grad_norm")
        return target.grad_norm()

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        assert self.model is not None
        with self.engine.gradient_sync(self.model, enabled=False):
            yield

    def on_validation_end(self) -> None:
        super().on_validation_end()
        self.engine.after_evaluation()

    def on_test_end(self) -> None:
        super().on_test_end()
        self.engine.after_evaluation()

    def on_predict_end(self) -> None:
        super().on_predict_end()
        self.engine.after_evaluation()

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        self.engine.report_failure(exception)

    def teardown(self) -> None:
        """Leaves shards on their device: whole modules only go to the CPU."""
        if not self.is_distributed:
            super().teardown()
            return
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    def on_train_end(self) -> None:
        """Says how many steps the run lost: skips that do not follow each other never stop it."""
        super().on_train_end()
        for optimizer in map(unwrap_optimizer, self.optimizers):
            if isinstance(optimizer, FusedAdamW) and optimizer.skipped_steps:
                count = int(optimizer.skipped_steps)
                steps = "1 optimizer step was" if count == 1 else f"{count} optimizer steps were"
                rank_zero_warn(
                    f"{steps} skipped because of non-finite gradients and changed nothing; "
                    "nonfinite='raise' stops at the first one and names the parameter"
                )

    # ------------------------------------------------------------------ report

    def on_train_start(self) -> None:
        """Last of all `on_train_start` hooks: whatever was frozen by then is frozen in the report."""
        super().on_train_start()
        module = self.lightning_module
        assert module is not None
        trainer = module.trainer
        report = self.engine.options.report
        if report is False or trainer.barebones:
            return
        # Every rank asks for it: the Trainer takes rank 0's answer.
        folder = trainer.log_dir or trainer.default_root_dir
        if not self.is_global_zero:
            return
        facts = self._build_report(trainer, module)
        rank_zero_info(facts.summary())
        if not isinstance(report, bool):
            facts.write(report)
        elif not getattr(trainer, "fast_dev_run", False):
            facts.write(Path(folder) / "run_report.json")

    def _build_report(self, trainer: pl.Trainer, module: pl.LightningModule) -> RunReport:
        assert self.engine.layout is not None
        optimizers = [unwrap_optimizer(optimizer) for optimizer in self.optimizers]
        return build_report(
            module,
            [(optimizer, self.engine.path_of(optimizer).description) for optimizer in optimizers],
            clipping=self._clipping_rule(trainer, module),
            precision=str(self.precision_plugin.precision),
            layout=self.engine.layout.mesh_shape(),
            device=self.root_device,
            data=getattr(trainer, "datamodule", None),
            sharded=self.engine.sharded(module),
        )

    def _clipping_rule(self, trainer: pl.Trainer, module: pl.LightningModule) -> str:
        if not module.automatic_optimization:
            return "by the module (manual optimization)"
        if is_overridden("configure_gradient_clipping", module):
            return "by the module's configure_gradient_clipping"
        if not trainer.gradient_clip_val or trainer.gradient_clip_val < 0:  # Lightning clips by positive values only
            return "none"
        algorithm = str(getattr(trainer.gradient_clip_algorithm, "value", None) or "norm")
        norm = f" (norm type {self.engine.options.norm_type})" if algorithm == "norm" else ""
        return f"by {algorithm} {trainer.gradient_clip_val}{norm}"
