"""Which private corners of Lightning and torch this package leans on, in one place; `tests/canaries` tests them.

Lightning is imported inside the functions, so that importing this module costs nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Collection
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler, OptState
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import Module
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

T = TypeVar("T")


def unwrap_optimizer(optimizer: Optimizer) -> Optimizer:
    """The user's optimizer inside Lightning's wrapper, which imitates its class but not its state."""
    from lightning.pytorch.core.optimizer import LightningOptimizer

    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


def is_still_scaled(scaler: GradScaler | None, optimizer: Optimizer) -> bool:
    """Whether `scaler` has yet to unscale the gradients of `optimizer` for its next step."""
    if scaler is None or not scaler.is_enabled():
        return False
    states = scaler._per_optimizer_states
    return id(optimizer) not in states or states[id(optimizer)]["stage"] is OptState.READY


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Whether `register_step_pre_hook` gave somebody a look at the gradients before each step of `optimizer`."""
    return bool(optimizer._optimizer_step_pre_hooks)


@functools.cache
def one_process_class(strategy_class: type[T], *, fabric: bool) -> type[T]:
    """The class of a strategy that runs one process: `isinstance(strategy, SingleDeviceStrategy)` is true for it.

    Lightning asks this and nothing else: the Trainer before it accepts a `torch.compile`d module, Fabric before it
    lets a program go on without `launch()`. Both are right for one process and wrong for several, so that only an
    object that knows it is alone becomes one.
    """
    single: Any
    if fabric:
        from lightning.fabric.strategies import SingleDeviceStrategy as FabricSingleDeviceStrategy

        single = FabricSingleDeviceStrategy
    else:
        from lightning.pytorch.strategies import SingleDeviceStrategy

        single = SingleDeviceStrategy
    names = {"__module__": strategy_class.__module__, "__qualname__": strategy_class.__qualname__}
    make: Any = type(strategy_class)
    cls = make(strategy_class.__name__, (strategy_class,), names)
    single.register(cls)
    return cls  # type: ignore[no-any-return]


def script_launcher(environment: Any, processes: int, num_nodes: int, *, fabric: bool) -> Any:
    """Lightning's launcher that starts the running script once more for every further local rank."""
    package = "fabric" if fabric else "pytorch"
    module = importlib.import_module(f"lightning.{package}.strategies.launchers.subprocess_script")
    return module._SubprocessScriptLauncher(environment, processes, num_nodes)


def set_rank_of_messages(rank: int) -> None:
    """Only rank 0 prints and logs what Lightning marks `rank_zero_only`."""
    for package in ("fabric", "pytorch"):
        module = importlib.import_module(f"lightning.{package}.utilities.rank_zero")
        module.rank_zero_only.rank = rank


def turn_inference_mode_off(trainer: Any) -> None:
    """All evaluation loops of the Trainer run under `no_grad`.

    A parameter that FSDP2 gathers for the first time under inference mode stays an inference tensor, and the first
    training step fails on it.
    """
    loops = (trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop, trainer.predict_loop)
    for loop in loops:
        loop.inference_mode = False


def move_device_records(root: Module, device: torch.device) -> None:
    """What `root.to(device)` does besides parameters and buffers: `self.device` and the states of torchmetrics."""
    from lightning.fabric.utilities.device_dtype_mixin import _update_properties
    from torchmetrics import Metric

    _update_properties(root, device=device)
    for module in root.modules():
        if isinstance(module, Metric):
            module.to(device)


def separate_store() -> Any:
    """The store that the process group was made with, through a connection of its own: a thread can use it."""
    from torch.distributed.distributed_c10d import _get_default_store

    store = _get_default_store()
    return store.clone() if hasattr(store, "clone") else store


def name_submesh(mesh: Any, dims: tuple[str, ...], name: str) -> None:
    """Makes `mesh[name]` the dimensions `dims` of a device mesh as a single one; all ranks call it."""
    mesh[dims]._flatten(name)


# ---------------------------------------------------------------------- FSDP2


def fsdp_groups(module: Module) -> list[Any]:
    """What FSDP2 gathers and reduces together for a module that `fully_shard` was called on."""
    state = fully_shard.state(module)  # type: ignore[attr-defined]
    # Several groups in a unit came after torch 2.11.
    groups = state._fsdp_param_groups if hasattr(state, "_fsdp_param_groups") else [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def begin_fsdp(root: Module) -> None:
    """Ends the set-up now: a unit that is called before `root`, by a hook for example, would else become a root."""
    fully_shard.state(root)._lazy_init()  # type: ignore[attr-defined]


def gather_for_backward_only_what_it_visits(module: Module) -> None:
    """Keeps a forward pass that backward will not visit (a frozen unit, `no_grad`) out of FSDP2's backward order.

    While one unit computes its gradients, FSDP2 gathers the one that ran before it. A frozen unit in that place is
    gathered for nothing and held to the end of backward, and the unit that is needed next is gathered late.
    """
    for group in fsdp_groups(module):
        group.post_forward = functools.partial(_post_forward, group, group.post_forward)


def _post_forward(group: Any, original: Any, module: Any, inputs: Any, output: Any) -> Any:
    order = group.comm_ctx.post_forward_order
    before = len(order)
    output = original(module, inputs, output)
    if len(order) > before and not _leads_to_backward(output):
        order.pop()
        group._post_forward_indices.pop()
    return output


def _leads_to_backward(output: Any) -> bool:
    return torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in tree_leaves(output))


def set_divide_factor(module: Module, factor: float | None) -> None:
    """What FSDP2 divides the gradients of a unit by: 1.0 for plain sums; None, the number of ranks.

    Its public setters serve one unit at a time too, and cannot go back.
    """
    for group in fsdp_groups(module):
        group.gradient_divide_factor = factor
        group.force_sum_reduction_for_comms = factor is not None


def renew_fsdp_dtypes(module: Module) -> bool:
    """Lets a unit that was frozen when training began, and is not any more, reduce in its policy's dtype.

    FSDP2 takes the dtypes of a unit from its trainable parameters, once; without any it has none. Returns whether it
    took them now.
    """
    renewed = False
    for group in fsdp_groups(module):
        if group._orig_dtype is None and any(p.sharded_param.requires_grad for p in group.fsdp_params):
            group._init_mp_dtypes()
            renewed = True
    return renewed


def drop_unreduced_gradients(module: Module, params: Collection[Tensor]) -> None:
    """Forgets what a unit has accumulated without reduction for those of its parameters that are in `params`.

    RuntimeError if it is summed inside a replica already, together with gradients of other parameters that train.
    """
    for group in fsdp_groups(module):
        mine = [param for param in group.fsdp_params if param.sharded_param in params]
        for param in mine:
            param.unsharded_accumulated_grad = None
            if hasattr(param, "_unsharded_param"):
                param._unsharded_param.grad = None
        if not mine or group._partial_reduce_output is None:
            continue
        if any(p.sharded_param.requires_grad and p not in mine for p in group.fsdp_params):
            raise RuntimeError(
                "zero_grad() of one of two optimizers that share a sharding unit, while gradients wait for their sum "
                "over replicas; call it after a backward pass that synchronizes, or give each optimizer its own units"
            )
        group._partial_reduce_output = None


def follow_requires_grad(module: Module) -> None:
    """Gives the gathered parameters of a unit the `requires_grad` of their shards, which may have changed meanwhile."""
    for group in fsdp_groups(module):
        if group.is_unsharded:
            for param in group.fsdp_params:
                param._unsharded_param.requires_grad_(param.sharded_param.requires_grad)


def gather_as_stored(module: Module, params: Collection[Tensor]) -> None:
    """Keeps `params` of a unit out of its policy's param_dtype, without a unit and collectives of their own.

    FSDP2 has one param_dtype a unit, but gathers what differs as bytes. Gradients that differ it refuses to reduce, so
    those in param_dtype are brought to reduce_dtype before. Call it before lazy initialization.
    """
    for group in fsdp_groups(module):
        kept = [param for param in group.fsdp_params if param.sharded_param in params]
        for param in kept:
            param.init_dtype_attrs = functools.partial(_init_as_stored, param.init_dtype_attrs)
        if 0 < len(kept) < len(group.fsdp_params):
            group.post_backward = functools.partial(_post_backward, group, group.post_backward)


def _init_as_stored(original: Any, policy: MixedPrecisionPolicy) -> None:
    original(dataclasses.replace(policy, param_dtype=None))


def _post_backward(group: Any, original: Any, *unused: Any) -> None:
    for param in group.fsdp_params:
        if hasattr(param, "_unsharded_param"):
            param.accumulate_unsharded_grad_if_needed()
            param.to_accumulated_grad_if_needed()
    original(*unused)


def keep_reduced_gradients_in(module: Module, dtype: torch.dtype) -> None:
    """Makes FSDP2 hand the reduced gradients of a unit to its parameters in `dtype` instead of the parameters' own.

    Every parameter of the unit must have `grad_dtype` set to `dtype`. Lasts until FSDP2 reads the unit's dtypes again
    (lazy initialization). Raises RuntimeError if this version of torch keeps the record elsewhere.
    """
    for group in fsdp_groups(module):
        if not hasattr(group, "_orig_dtype"):
            raise RuntimeError(
                f"torch {torch.__version__} cannot keep reduced gradients in {dtype}: FSDP2 does not record the "
                "original dtype where this version expects it; use keep_low_precision_grads=False"
            )
        group._orig_dtype = dtype


def completes_partial_units() -> bool:
    """Whether FSDP2 finishes the forward pass of `fully_shard([a, b])` when only one of the two ran.

    Before torch 2.13 it waits for the other one, in later passes too, and parameters stay as they were.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    return hasattr(FSDPState, "_force_complete_incomplete_states")
