"""How a plan of units becomes a sharded module: same weights on all ranks, then FSDP2 unit by unit, inside out."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from soma_lightning.compat import (
    begin_fsdp,
    drop_unreduced_gradients,
    follow_requires_grad,
    gather_as_stored,
    gather_for_backward_only_what_it_visits,
    renew_fsdp_dtypes,
    set_divide_factor,
)
from soma_lightning.layout.casting import apply_precision, keep_gradient_dtypes
from soma_lightning.layout.full_state import accept_full_tensors
from soma_lightning.layout.mesh import WorldMesh
from soma_lightning.layout.whole_gradients import WholeGradients
from soma_lightning.layout.wrap import Unit, UnitPlan

#: Entry points of a LightningModule that run like its forward.
STEP_METHODS = ("training_step", "validation_step", "test_step", "predict_step")

_RECORD = "_soma_lightning_sharded"


@dataclass(frozen=True)
class UnitFacts:
    """One unit as it was built. parameters: elements over all ranks. dtypes: as stored, gathered and reduced."""

    name: str
    parameters: int
    trainable: bool
    dtype: str
    param_dtype: str
    reduce_dtype: str


class ShardedModule:
    """A module whose parameters are divided over the data ranks, and what has to be done around its backward passes.

    replicated: parameters that stay whole on every rank: with a shard dimension of one rank, all of them. They are
    outside FSDP2: `after_backward` averages the gradients of those that train.
    """

    def __init__(
        self, root: Module, mesh: WorldMesh, plan: UnitPlan, units: list[UnitFacts], replicated: Sequence[Tensor]
    ) -> None:
        self.mesh = mesh
        self._root = root
        self._plan = plan
        self.units = units
        self.replicated = replicated
        self._gradients = WholeGradients(replicated, {} if is_divided(mesh) else _reduce_dtypes(root, plan))
        #: The first module of every unit of FSDP2, root last.
        self._heads = [unit.modules[0] for unit in plan.units] if is_divided(mesh) else []
        self._reduces = True
        self._sums = False
        #: Whether FSDP2 may hold gradients that no rank has in `.grad`; see `drop_unreduced`.
        self.may_hold_unreduced = False

    def facts(self) -> dict[str, Any]:
        """Plain values for a report: this rank's place, the units, and what is whole on every rank."""
        return {
            "ranks": self.mesh.device_mesh.size(),
            "coordinate": self.mesh.coordinate,
            "units": [asdict(unit) for unit in self.units if unit.parameters],
            "whole on every rank": {
                "frozen": sum(p.numel() for p in self.replicated if not p.requires_grad),
                "trainable": sum(p.numel() for p in self.replicated if p.requires_grad),
            },
        }

    def set_sums(self, sums: bool) -> None:
        """Whether gradients are summed over the data ranks instead of averaged, from the next backward pass on."""
        self._sums = sums
        for head in self._heads:
            # None: FSDP2 divides by the number of ranks itself.
            set_divide_factor(head, 1.0 if sums else None)

    def set_gradient_sync(self, enabled: bool) -> None:
        """Whether the next backward passes reduce gradients.

        With replicas of shards the reduce-scatter goes on and only the all-reduce waits: a whole gradient is held
        nowhere.
        """
        self._reduces = enabled
        for head in self._heads[-1:]:
            assert isinstance(head, FSDPModule)
            if self.mesh.layout.replicate > 1:
                head.set_requires_all_reduce(enabled)
            else:
                head.set_requires_gradient_sync(enabled)

    def before_backward(self, *, alone: bool = True) -> None:
        """Call before every backward pass: units that were frozen and train now reduce in their own dtype, and sums of
        the pass before are not summed again. alone: whether no other sharded module takes part in the pass."""
        overlaps = alone and self._reduces and not self._heads
        self._gradients.before_backward(is_first_rank=self.mesh.dp_rank == 0, overlaps=overlaps)
        if any([renew_fsdp_dtypes(head) for head in self._heads]):
            self.keep_gradient_dtypes()

    def keep_gradient_dtypes(self) -> None:
        """Call after FSDP2 took the dtypes of a unit from its parameters."""
        divided = is_divided(self.mesh)
        keep_gradient_dtypes(self._root, self._plan, sharded=divided, replicated=not divided)

    def after_backward(self) -> None:
        """Call after every backward pass: averages, or sums up, what FSDP2 does not know."""
        if self._reduces:
            self._gradients.reduce(ranks=self.mesh.dp_size, sums=self._sums)
        else:
            self.may_hold_unreduced = bool(self._heads)

    def drop_unreduced(self, params: Collection[Tensor]) -> None:
        """Call when the gradients of `params` are zeroed: what was accumulated without reduction goes with them."""
        for head in self._heads:
            drop_unreduced_gradients(head, params)

    def follow_requires_grad(self) -> None:
        """Call after `requires_grad` of shards changed in the middle of a pass, while parameters are gathered."""
        for head in self._heads:
            follow_requires_grad(head)

    def reshard(self) -> None:
        """Frees gathered parameters; the module's parameters are the shards again. For the end of an evaluation."""
        for head in self._heads:
            assert isinstance(head, FSDPModule)
            head.reshard()


def sharded_module(root: Module) -> ShardedModule | None:
    """How `shard_module` divided `root`, in this process; None if it did not."""
    return root.__dict__.get(_RECORD)


def shard_module(
    root: Module, plan: UnitPlan, mesh: WorldMesh, *, device: torch.device, forward_methods: Sequence[str] = ()
) -> ShardedModule:
    """Divides the parameters of `root` in place; all ranks start from the values of the first one.

    forward_methods: qualified names of methods of units that run like `forward` ("decode", "policy.sample").
    Optimizers built before this call hold parameters that no longer exist; what was set as an attribute of a parameter
    is on the new one.
    Raises ValueError naming a parameter that has no memory yet, is not contiguous or has a gradient hook, an embedding
    with max_norm, a module that is already sharded, and a forward method that does not exist or belongs to no unit.
    """
    divided = is_divided(mesh)
    _refuse_unshardable(root, divided=divided)
    methods = entry_points(root, forward_methods)
    names = dict(root.named_parameters())
    # In this order on every rank.
    replicated = [names[name] for name in plan.replicated] if divided else list(names.values())
    ignored = set(replicated)
    _refuse_hooks({name: param for name, param in names.items() if param not in ignored})
    _refuse_renormalizing(root, ignored)
    if divided:
        facts = _divide(root, plan, mesh, device, ignored)
        _register_forward_methods(root, forward_methods)
    else:
        facts = []
        _take_values_of_first_rank(chain(root.parameters(), root.buffers()), device, set())
    apply_precision(root, plan, sharded=divided, forward_methods=methods)
    if divided:
        begin_fsdp(root)
        for unit in plan.units:
            gather_for_backward_only_what_it_visits(unit.modules[0])
        accept_full_tensors(root)
    # On the module itself: a table of modules would keep them alive, since the record holds the module.
    root.__dict__[_RECORD] = sharded = ShardedModule(root, mesh, plan, facts, replicated)
    sharded.keep_gradient_dtypes()
    return sharded


def is_divided(mesh: WorldMesh) -> bool:
    """Whether a rank holds parts of parameters; else FSDP2 would gather for nothing, and has no place."""
    return mesh.layout.mesh_shape()["dp_shard"] > 1


def _divide(
    root: Module, plan: UnitPlan, mesh: WorldMesh, device: torch.device, ignored: set[torch.nn.Parameter]
) -> list[UnitFacts]:
    """Unit by unit."""
    names = dict(root.named_parameters(remove_duplicate=False))
    done: set[int] = set()
    facts = []
    for unit in plan.units:
        facts.append(_facts(unit, ignored))
        for module in unit.modules:
            _take_values_of_first_rank(chain(module.parameters(), module.buffers()), device, done)
        fully_shard(
            list(unit.modules) if len(unit.modules) > 1 else unit.modules[0],  # type: ignore[call-overload]
            mesh=mesh.data,
            reshard_after_forward=unit.reshard_after_forward,
            mp_policy=unit.mp or MixedPrecisionPolicy(),
            ignored_params=ignored,
        )
    present = dict(root.named_parameters(remove_duplicate=False))
    for name, param in present.items():
        if param is not names[name]:
            vars(param).update(vars(names[name]))
    for unit in plan.units:
        gather_as_stored(unit.modules[0], {present[name] for name in unit.as_stored})
    return facts


def _reduce_dtypes(root: Module, plan: UnitPlan) -> dict[Tensor, torch.dtype]:
    """Where a unit's precision asks for another dtype of the sum than fp32."""
    params = dict(root.named_parameters(remove_duplicate=False))
    low: dict[Tensor, torch.dtype] = {}
    for unit in plan.units:
        dtype = unit.precision.reduce_dtype or unit.precision.param_dtype
        if unit.precision.explicit and dtype is not None:
            low.update({params[name]: dtype for name in unit.parameters})
    return low


def _refuse_unshardable(root: Module, *, divided: bool) -> None:
    for name, module in root.named_modules():
        if isinstance(module, FSDPModule):
            raise ValueError(
                f"{name or type(root).__name__!r} is already sharded, by configure_model or by hand; leave sharding to "
                "the strategy, or use Lightning's ModelParallelStrategy"
            )
    for name, tensor in chain(root.named_parameters(), root.named_buffers()):
        if isinstance(tensor, DTensor):
            raise ValueError(f"{name!r} is already a DTensor; leave sharding to the strategy")
        if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
            raise ValueError(f"{name!r} has no shape yet (a lazy module); run one forward pass before training")
        if tensor.is_meta:
            raise ValueError(f"{name!r} is on the meta device; give it memory and values before training")
        if divided and isinstance(tensor, torch.nn.Parameter) and not tensor.is_contiguous():
            raise ValueError(
                f"{name!r} has strides {tensor.stride()}; FSDP2 shards contiguous parameters only: store it with "
                "memory_format=torch.contiguous_format"
            )


def _refuse_hooks(sharded: dict[str, torch.nn.Parameter]) -> None:
    for name, param in sharded.items():
        if param._backward_hooks or param._post_accumulate_grad_hooks:
            raise ValueError(
                f"{name!r} has a gradient hook, which would never run: sharding replaces the parameter, and FSDP2 "
                "writes the gradient of its part itself; change gradients in on_before_optimizer_step, or in a hook of "
                "the module (register_full_backward_hook)"
            )


def _refuse_renormalizing(root: Module, ignored: set[torch.nn.Parameter]) -> None:
    for name, module in root.named_modules():
        if not isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) or module.max_norm is None:
            continue
        if module.weight not in ignored:
            raise ValueError(
                f"{name!r} has max_norm={module.max_norm}: its forward writes to its weight, and FSDP2 forgets what is "
                "written to gathered parameters; normalize the rows that it returns instead"
            )


def _facts(unit: Unit, ignored: set[torch.nn.Parameter]) -> UnitFacts:
    params = {p for module in unit.modules for p in module.parameters() if p not in ignored}
    own = [p for p in params if not isinstance(p, DTensor)]
    dtypes = sorted({_name(p.dtype) for p in own})
    policy = unit.mp or MixedPrecisionPolicy()
    kept = ", ".join(dtypes) or "none"
    gathered = _name(policy.param_dtype) if policy.param_dtype else kept
    if unit.as_stored:
        some = len(unit.as_stored) < len(unit.parameters)
        gathered = f"{gathered}, {len(unit.as_stored)} of {len(unit.parameters)} tensors {kept}" if some else kept
    reduced = _name(policy.reduce_dtype) if policy.reduce_dtype else gathered
    trainable = any(p.requires_grad for p in own)
    return UnitFacts(unit.name, sum(p.numel() for p in own), trainable, kept, gathered, reduced)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@torch.no_grad()
def _take_values_of_first_rank(tensors: Iterable[Tensor], device: torch.device, done: set[int]) -> None:
    """Moves what was not moved yet and copies it from rank 0. Objects stay the same, so tied ones stay tied."""
    for tensor in tensors:
        if id(tensor) in done or isinstance(tensor, DTensor):
            continue
        done.add(id(tensor))
        tensor.data = tensor.data.to(device)
        stored = tensor.data
        for dim, stride in enumerate(stored.stride()):
            if stride == 0 and stored.shape[dim] > 1:  # expanded: one element stands for many
                stored = stored.narrow(dim, 0, 1)
        # As bytes: every dtype, bit by bit.
        dense = stored.contiguous()
        dist.broadcast(dense.reshape(-1).view(torch.uint8), src=0)
        if dense.data_ptr() != stored.data_ptr():
            stored.copy_(dense)


def entry_points(root: Module, forward_methods: Sequence[str] | None) -> list[str]:
    """Qualified names of the methods that run like forward: the step methods of `root` and `forward_methods`.

    ValueError for a name in `forward_methods` that `root` does not have.
    """
    for name in forward_methods or ():
        path, _, method = name.rpartition(".")
        try:
            owner = root.get_submodule(path)
        except AttributeError as error:
            raise ValueError(f"forward_methods: there is no module {path!r} in {type(root).__name__}") from error
        if not callable(getattr(owner, method, None)):
            raise ValueError(f"forward_methods: {path or type(root).__name__!r} has no method {method!r}")
    return [*(name for name in STEP_METHODS if hasattr(root, name)), *(forward_methods or ())]


def _register_forward_methods(root: Module, names: Sequence[str]) -> None:
    for name in STEP_METHODS:
        if hasattr(root, name):
            register_fsdp_forward_method(root, name)
    for name in names:
        path, _, method = name.rpartition(".")
        owner = root.get_submodule(path)
        if not isinstance(owner, FSDPModule):
            raise ValueError(
                f"forward_methods: {path!r} is no sharding unit, so {name!r} cannot gather its parameters; give "
                f"{type(root).__name__} a method that calls it, and name that one"
            )
        register_fsdp_forward_method(owner, method)
