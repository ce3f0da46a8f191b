"""How does a unit compute in its dtypes where `fully_shard` does not see to it? Casts on entry, undone on exit.

FSDP2 casts the parameters that it shards, and the inputs of units of one module. The rest is done here: buffers,
replicated parameters, autocast, and everything on one process, so that the same rules mean the same dtypes with and
without sharding.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from soma_lightning.compat import keep_reduced_gradients_in
from soma_lightning.layout.precision import grad_dtype
from soma_lightning.layout.selectors import Named
from soma_lightning.layout.wrap import Unit, UnitPlan, modules_behind


def apply_precision(
    root: nn.Module, plan: UnitPlan, *, sharded: bool, forward_methods: Iterable[str] = ()
) -> list[UnitCasts]:
    """Makes every unit with a precision of its own compute in it; call it once, after `fully_shard` if that is used.

    sharded: whether `fully_shard` was applied to plan.units. forward_methods: qualified names of methods that enter
    their module's unit as forward does ("training_step", "policy.sample_actions"); those of other modules need nothing.
    Units that follow the precision flag need nothing either: Lightning's plugin does what it does without sharding.
    Returns what `remove()` undoes. AttributeError for a method that does not exist.
    """
    parameters = dict(root.named_parameters(remove_duplicate=False))
    unsharded = {parameters[name] for name in plan.replicated} if sharded else set(parameters.values())
    starts = {module: None for unit in (*plan.units, *plan.unsharded) for module in unit.modules}
    paths = {module: name for name, module in root.named_modules()}
    methods = [(name.rpartition(".")[0], name.rpartition(".")[2]) for name in forward_methods]
    applied = []
    for unit in (*plan.units, *plan.unsharded):
        if not unit.precision.explicit and unit.autocast is None:
            continue
        own = [named for module in unit.modules for named in modules_behind(paths[module], module, starts)]
        by_fsdp = sharded and unit in plan.units and len(unit.modules) == 1
        casts = UnitCasts(unit, own, unsharded, plan.autocast_dtype, inputs=not by_fsdp)
        casts.install((root.get_submodule(path), method) for path, method in methods)
        applied.append(casts)
    return applied


def keep_gradient_dtypes(root: nn.Module, plan: UnitPlan, *, sharded: bool, replicated: bool) -> None:
    """Lets gradients of units with keep_low_precision_grads reach the optimizer in the dtype of `grad_dtype`.

    sharded: whether `fully_shard` was applied; call it after the units' lazy initialization, and again after another.
    replicated: whether each rank holds whole parameters (a shard dimension of one rank, or one process).
    RuntimeError if this version of torch gives a parameter only gradients of its own dtype.
    """
    parameters = dict(root.named_parameters(remove_duplicate=False))
    for unit in plan.units:
        if not unit.keep_low_precision_grads or not unit.trainable:
            continue
        trainable = [p for name in unit.parameters if (p := parameters[name]).requires_grad]
        dtype = grad_dtype(unit.precision, trainable[0].dtype, replicated=replicated)
        if dtype == trainable[0].dtype:
            continue
        if not hasattr(torch.Tensor, "grad_dtype"):
            raise RuntimeError(
                f"torch {torch.__version__} gives parameters of {trainable[0].dtype} no gradients of {dtype}; store "
                "them in the low dtype with master_weights=True, or leave keep_low_precision_grads out"
            )
        for param in trainable:
            param.grad_dtype = dtype
        if sharded:
            keep_reduced_gradients_in(unit.modules[0], dtype)


class UnitCasts:
    """The casts of one unit. Between entry and exit its modules hold cast copies; the originals never change.

    A method that calls another of the same unit (training_step calls forward) enters twice and casts once.
    """

    def __init__(
        self,
        unit: Unit,
        own: list[Named],
        unsharded: set[nn.Parameter],
        autocast_dtype: torch.dtype | None,
        *,
        inputs: bool,
    ) -> None:
        """own: the unit's modules. unsharded: parameters to cast here. inputs: whether inputs are cast here too."""
        self._modules = unit.modules
        # Without a precision of its own, a unit is here for its autocast, which casts weights where they are used.
        self._param_dtype = unit.precision.param_dtype if unit.precision.explicit else None
        self._buffer_dtype = unit.buffer_dtype
        self._input_dtype = self._param_dtype if inputs and unit.precision.cast_forward_inputs else None
        self._autocast, self._autocast_dtype = unit.autocast, autocast_dtype
        self._parameters = [
            (module, key) for _, module in own for key, param in module._parameters.items() if param in unsharded
        ]
        self._buffers = [(module, key) for _, module in own for key in module._buffers]
        self._depth = 0
        self._swapped: list[tuple[dict[str, Any], str, Tensor, Tensor]] = []
        self._context: torch.autocast | None = None
        self._undo: list[Callable[[], None]] = []

    def install(self, forward_methods: Iterable[tuple[nn.Module, str]]) -> None:
        for module in self._modules:
            before = module.register_forward_pre_hook(self.on_entry, with_kwargs=True, prepend=True)
            after = module.register_forward_hook(self.on_exit, always_call=True)
            self._undo += [before.remove, after.remove]
        for module, name in forward_methods:
            if module in self._modules:
                self._wrap(module, name)

    def remove(self) -> None:
        """Takes hooks and wrapped methods away."""
        while self._undo:
            self._undo.pop()()

    def _wrap(self, module: nn.Module, name: str) -> None:
        replaced = vars(module).get(name)
        setattr(module, name, _CastMethod(self, module, getattr(module, name)))

        def undo() -> None:
            delattr(module, name)
            if replaced is not None:
                setattr(module, name, replaced)

        self._undo.append(undo)

    # ------------------------------------------------------------------ entry and exit

    def on_entry(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Forward pre-hook: returns the inputs as the unit shall see them."""
        self._depth += 1
        if self._depth == 1:
            self._cast(self._parameters, "_parameters", self._param_dtype)
            self._cast(self._buffers, "_buffers", self._buffer_dtype)
            self._enter_autocast(module)
        if self._input_dtype is None:
            return args, kwargs
        return cast_floating(args, self._input_dtype), cast_floating(kwargs, self._input_dtype)

    def on_exit(self, module: nn.Module, args: Any, output: Any) -> None:
        """Forward hook, run after exceptions too: puts the originals back."""
        if self._depth == 0:  # another hook raised before ours was entered
            return
        self._depth -= 1
        if self._depth:
            return
        if self._context is not None:
            self._context.__exit__(None, None, None)
            self._context = None
        while self._swapped:
            _restore(*self._swapped.pop())

    def _cast(self, places: list[tuple[nn.Module, str]], kind: str, dtype: torch.dtype | None) -> None:
        if dtype is None:
            return
        for module, key in places:
            store = getattr(module, kind)
            original = store.get(key)
            if original is not None and original.is_floating_point() and original.dtype != dtype:
                store[key] = original.to(dtype)
                self._swapped.append((store, key, original, store[key]))

    def _enter_autocast(self, module: nn.Module) -> None:
        if self._autocast is None:
            return
        tensors = (*module.parameters(), *module.buffers())
        device = tensors[0].device.type if tensors else "cpu"
        self._context = torch.autocast(device, dtype=self._autocast_dtype, enabled=self._autocast)
        self._context.__enter__()  # type: ignore[no-untyped-call]


class _CastMethod:
    """A method that enters its unit; an object, so that a deep copy of the module calls the copy."""

    def __init__(self, casts: UnitCasts, module: nn.Module, method: Callable[..., Any]) -> None:
        functools.update_wrapper(self, method)
        self._casts, self._module, self._method = casts, module, method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self._casts.on_entry(self._module, args, kwargs)
        try:
            return self._method(*args, **kwargs)
        finally:
            self._casts.on_exit(self._module, args, None)


@torch.no_grad()
def _restore(store: dict[str, Any], key: str, original: Tensor, cast: Tensor) -> None:
    """Puts the original back, with what the forward wrote to a buffer (running statistics)."""
    present = store.get(key)
    if present is not cast and present is not None:  # replaced by the forward
        store[key] = present.to(original.dtype)
        return
    if present is not None and not isinstance(original, nn.Parameter):
        # Entries that were not written keep their bits: the cast rounded them. Batch norm writes unseen by `_version`.
        original.copy_(torch.where(present == original.to(cast.dtype), original, present.to(original.dtype)))
    store[key] = original


def cast_floating(value: Any, dtype: torch.dtype) -> Any:
    """`value` with every floating-point tensor in it cast: in dicts, lists, tuples and dataclasses, nested."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, Mapping):
        items = {key: cast_floating(item, dtype) for key, item in value.items()}
        return items if type(value) is dict else type(value)(items)  # type: ignore[call-arg]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(cast_floating(item, dtype) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(cast_floating(item, dtype) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value) if field.init]
        return dataclasses.replace(value, **{name: cast_floating(getattr(value, name), dtype) for name in fields})
    return value
