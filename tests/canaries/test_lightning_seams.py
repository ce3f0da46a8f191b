"""Private corners of Lightning and torch that this package leans on: a new version that moves one fails here first."""

from __future__ import annotations

import inspect
from typing import Any

import lightning as L  # noqa: N812 (Lightning's own convention)
import pytest
import torch
from lightning.fabric.connector import _Connector as FabricConnector
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.strategies import STRATEGY_REGISTRY, SingleDeviceStrategy
from lightning.fabric.strategies.strategy import Strategy as FabricStrategy
from lightning.fabric.utilities.rank_zero import rank_zero_only as fabric_rank_zero_only
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.loops.utilities import _no_grad_context
from lightning.pytorch.plugins.layer_sync import TorchSyncBatchNorm
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import ParallelStrategy, StrategyRegistry
from lightning.pytorch.strategies import SingleDeviceStrategy as TrainerSingleDeviceStrategy
from lightning.pytorch.strategies.strategy import Strategy
from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector as TrainerConnector
from lightning.pytorch.utilities.compile import _verify_strategy_supports_compile
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import StepLR

from soma_lightning.compat import (
    has_step_hooks,
    is_still_scaled,
    script_launcher,
    set_rank_of_messages,
    turn_inference_mode_off,
    unwrap_optimizer,
)


def parameter() -> nn.Parameter:
    return nn.Parameter(torch.ones(2))


def test_both_connectors_end_with_configure_launcher() -> None:
    """`_configure_launcher` runs when devices and nodes are known; the world is checked there."""
    for base in (Strategy, FabricStrategy):
        assert list(inspect.signature(base._configure_launcher).parameters) == ["self"]
    for connector in (TrainerConnector, FabricConnector):
        source = inspect.getsource(connector._lazy_init_strategy)
        assert source.index("set_world_ranks()") < source.index("self.strategy._configure_launcher()")


def test_setup_goes_through_setup_model_before_optimizers() -> None:
    source = inspect.getsource(Strategy.setup)
    assert source.index("self._setup_model(") < source.index("self.setup_optimizers(")


def test_the_precision_setter_is_the_one_way_in() -> None:
    source = inspect.getsource(Strategy)
    assert "self.precision_plugin = precision_plugin" in inspect.getsource(Strategy.__init__)
    assert source.count("self._precision_plugin =") == 1 + source.count("self._precision_plugin = None")
    assert isinstance(ParallelStrategy.precision_plugin, property)


def test_clipping_ends_in_the_plugins_clip_gradients() -> None:
    signature = inspect.signature(Precision.clip_gradients)
    assert list(signature.parameters) == ["self", "optimizer", "clip_val", "gradient_clip_algorithm"]
    assert "self.trainer.precision_plugin.clip_gradients(" in inspect.getsource(L.LightningModule.clip_gradients)
    assert "self.clip_grad_by_norm(optimizer, clip_val)" in inspect.getsource(Precision.clip_gradients)


def test_checkpoints_name_a_plugin_by_its_qualname() -> None:
    from lightning.pytorch.trainer.connectors.checkpoint_connector import _CheckpointConnector

    assert "prec_plugin.__class__.__qualname__" in inspect.getsource(_CheckpointConnector)


def test_a_lightning_optimizer_imitates_the_class_and_holds_the_object() -> None:
    optimizer = AdamW([parameter()])
    wrapper = LightningOptimizer(optimizer)
    assert isinstance(wrapper, AdamW)
    assert unwrap_optimizer(wrapper) is optimizer
    assert unwrap_optimizer(optimizer) is optimizer


def test_a_scheduler_leaves_a_marked_step_on_the_object() -> None:
    optimizer = AdamW([parameter()])
    scheduler = StepLR(optimizer, 1)
    assert hasattr(optimizer.__dict__["step"], "_wrapped_by_lr_sched")
    optimizer._opt_called = True  # type: ignore[attr-defined]
    scheduler.step()


def test_patch_step_function_hooks_a_new_class() -> None:
    class Other(AdamW):
        def step(self, closure: Any = None) -> Any:
            return "other"

    optimizer = AdamW([parameter()])
    optimizer.__class__ = Other
    optimizer._patch_step_function()
    assert Other.step.hooked is True  # type: ignore[attr-defined]
    assert optimizer.step() == "other"


def test_torchs_fused_flag_is_an_attribute_of_the_object() -> None:
    assert AdamW([parameter()], fused=True).__dict__["_step_supports_amp_scaling"] is True


def test_tensors_count_their_writes() -> None:
    tensor = torch.ones(2)
    before = tensor._version
    tensor.mul_(2)
    assert tensor._version > before


@pytest.mark.parametrize(("fabric", "single"), [(False, TrainerSingleDeviceStrategy), (True, SingleDeviceStrategy)])
def test_one_process_counts_as_a_single_device(fabric: bool, single: type) -> None:
    build: Any = L.Fabric if fabric else L.Trainer
    alone = build(strategy="somaspeed", accelerator="cpu", devices=1).strategy
    assert isinstance(alone, single)
    assert type(alone).__name__ == ("FabricSomaSpeedStrategy" if fabric else "SomaSpeedStrategy")
    assert not isinstance(build(strategy="somaspeed", accelerator="cpu", devices=2).strategy, single)
    asks = L.Fabric._validate_launched if fabric else _verify_strategy_supports_compile
    assert "SingleDeviceStrategy" in inspect.getsource(asks)


@pytest.mark.parametrize("fabric", [False, True])
def test_the_script_launcher_takes_environment_processes_and_nodes(fabric: bool) -> None:
    launcher = script_launcher(LightningEnvironment(), 2, 3, fabric=fabric)
    assert (launcher.num_processes, launcher.num_nodes) == (2, 3)


def test_messages_follow_the_rank() -> None:
    from lightning.pytorch.utilities.rank_zero import rank_zero_only

    before = rank_zero_only.rank
    try:
        set_rank_of_messages(3)
        assert (rank_zero_only.rank, fabric_rank_zero_only.rank) == (3, 3)
        assert rank_zero_only(lambda: "printed")() is None
    finally:
        set_rank_of_messages(before)


def test_evaluation_loops_ask_for_their_inference_mode() -> None:
    trainer = L.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    loops = (trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop)
    assert any(loop.inference_mode for loop in loops)
    turn_inference_mode_off(trainer)
    assert not any(loop.inference_mode for loop in loops)
    assert "self.inference_mode" in inspect.getsource(_no_grad_context)


def test_a_module_finds_its_mesh_where_the_strategy_puts_it() -> None:
    module = L.LightningModule()
    module._device_mesh = "mesh"  # type: ignore[assignment]
    assert module.device_mesh == "mesh"


def test_the_layer_sync_is_handed_to_the_strategy() -> None:
    trainer = L.Trainer(accelerator="cpu", devices=1, strategy="somaspeed", sync_batchnorm=True, logger=False)
    assert isinstance(trainer.strategy._layer_sync, TorchSyncBatchNorm)


def test_registries_take_any_callable_and_hand_it_the_fixed_arguments() -> None:
    for registry in (StrategyRegistry, STRATEGY_REGISTRY):
        registry.register("soma_canary", lambda layout: f"built {layout}", layout="auto")
        try:
            assert "soma_canary" in registry.available_strategies()
            assert registry.get("soma_canary") == "built auto"
        finally:
            registry.remove("soma_canary")


def test_foreach_norm_takes_an_accumulation_dtype() -> None:
    (norm,) = torch._foreach_norm([torch.ones(4, dtype=torch.bfloat16)], 2.0, dtype=torch.float32)
    assert norm.dtype == torch.float32
    assert norm.item() == 2.0


def test_a_grad_scaler_tells_whether_it_has_unscaled() -> None:
    weight, scaler = parameter(), torch.amp.GradScaler("cpu")
    optimizer = AdamW([weight])
    assert not is_still_scaled(None, optimizer)
    assert not is_still_scaled(torch.amp.GradScaler("cpu", enabled=False), optimizer)
    for _ in range(2):
        scaler.scale(weight.sum()).backward()
        assert is_still_scaled(scaler, optimizer)
        scaler.unscale_(optimizer)
        assert not is_still_scaled(scaler, optimizer)
        scaler.step(optimizer)
        scaler.update()


def test_a_grad_scaler_asks_its_own_methods_to_unscale_and_to_step() -> None:
    """The two that ranks answer together: `soma_lightning.strategy.loss_scale`."""
    weight, calls = parameter(), []

    class Asked(torch.amp.GradScaler):
        def _unscale_grads_(self, optimizer: Any, inv_scale: Any, found_inf: Any, allow_fp16: bool) -> Any:
            calls.append((inv_scale.item(), allow_fp16))
            return {found_inf.device: found_inf}

        def _maybe_opt_step(self, optimizer: Any, optimizer_state: Any, *args: Any, **kwargs: Any) -> Any:
            (found_inf,) = optimizer_state["found_inf_per_device"].values()
            found_inf.fill_(1.0)

    scaler = Asked("cpu", init_scale=4.0)
    scaler.scale(weight.sum()).backward()
    optimizer = AdamW([weight])
    scaler.step(optimizer)
    scaler.update()
    assert calls == [(0.25, False)]
    assert scaler.get_scale() == 2.0


def test_an_optimizer_tells_whether_it_has_step_hooks() -> None:
    optimizer = AdamW([parameter()])
    assert not has_step_hooks(optimizer)
    handle = optimizer.register_step_pre_hook(lambda *_: None)
    assert has_step_hooks(optimizer)
    handle.remove()
    assert not has_step_hooks(optimizer)
