"""What the Trainer's and Fabric's strategy do alike: set up the module, take over optimizers, guard every step.

Modules are sharded in `setup_module`, before optimizers exist (Trainer) or are taken over (Fabric). One process has no
process group and nothing is sharded.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from soma_lightning.layout.casting import apply_precision, keep_gradient_dtypes
from soma_lightning.layout.full_state import accept_full_state
from soma_lightning.layout.mesh import Layout, WorldMesh, resolve_layout
from soma_lightning.layout.precision import read_precision
from soma_lightning.layout.shard import ShardedModule, entry_points, is_divided, shard_module, sharded_module
from soma_lightning.layout.wrap import UnitPlan, plan_units
from soma_lightning.optim.adoption import adopt, refuse_local_decisions, why_not_adopted
from soma_lightning.optim.clipping import ClipRule
from soma_lightning.optim.fused_adamw import FusedAdamW
from soma_lightning.optim.nonfinite import explain_nonfinite
from soma_lightning.optim.ownership import Ownership
from soma_lightning.optim.state import LOW_PRECISION
from soma_lightning.strategy import processes
from soma_lightning.strategy.effective_batch import any_rank_counts, count_of
from soma_lightning.strategy.faults import FailureWatch
from soma_lightning.strategy.memory import Activity, Situation, explaining
from soma_lightning.strategy.options import StrategyOptions
from soma_lightning.strategy.relink import ParameterNames


@dataclass(frozen=True)
class OptimizerPath:
    """How an optimizer steps: `fused` or not, and in words why."""

    fused: bool
    description: str


class _SkipWatch:
    """Reads a device counter late instead of waiting for the device.

    waits: exactly one step late, so that all ranks read the same and stop at the same step; else when it has arrived.
    """

    def __init__(self, *, waits: bool) -> None:
        self._waits = waits
        self._host: Tensor | None = None
        self._copied: torch.cuda.Event | None = None
        self._latest = 0

    def read(self, counter: Tensor) -> int:
        if counter.device.type != "cuda":
            return int(counter)
        if self._host is None or self._copied is None:
            self._host = torch.zeros((), dtype=torch.int64, pin_memory=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        elif not self._waits and not self._copied.query():  # type: ignore[no-untyped-call]
            return self._latest
        else:
            self._copied.synchronize()  # type: ignore[no-untyped-call]
            self._latest = int(self._host)
        self._host.copy_(counter, non_blocking=True)
        self._copied.record(torch.cuda.current_stream(counter.device))
        return self._latest


class Engine:
    """The strategy without Lightning around it."""

    # Of the process: a module that one Trainer sharded may be given to another one, and so may its optimizer.
    _names = ParameterNames()
    _relinked: weakref.WeakSet[Optimizer] = weakref.WeakSet()
    _with_precision: weakref.WeakSet[Module] = weakref.WeakSet()

    def __init__(self, options: StrategyOptions) -> None:
        self.options = options
        self.layout: Layout | None = None
        self.world_size = 1
        self.mesh: WorldMesh | None = None
        self._failures: FailureWatch | None = None
        # In the order of set-up on all ranks, as their collectives must be: a set has none.
        self._modules: weakref.WeakKeyDictionary[Module, None] = weakref.WeakKeyDictionary()
        self._paths: weakref.WeakKeyDictionary[Optimizer, OptimizerPath] = weakref.WeakKeyDictionary()
        self._watches: weakref.WeakKeyDictionary[Optimizer, _SkipWatch] = weakref.WeakKeyDictionary()
        #: Whether the step divides by counts of samples; None before the first backward pass tells.
        self._counts: bool | None = None

    # ------------------------------------------------------------------ set-up

    def setup_world(self, *, devices: int, num_nodes: int, processes: int) -> None:
        """Fixes the layout for `devices` times `num_nodes` in a world that a launcher started with `processes`.

        ValueError if the layout does not fit, or if a launcher started another number of processes.
        """
        asked = devices * num_nodes
        if processes != asked:
            raise ValueError(
                f"{asked} processes were asked for (devices={devices} x num_nodes={num_nodes}), but this is one of "
                f"{processes} that a launcher (torchrun, srun, mpirun) started; make both the same"
            )
        layout = resolve_layout(self.options.layout, world_size=asked, num_nodes=num_nodes)
        for name in ("tensor", "pipeline"):
            if getattr(layout, name) > 1:
                raise ValueError(
                    f"Layout({name}={getattr(layout, name)}) is not available in this version; leave {name}=1 and use "
                    "replicate and shard"
                )
        if asked > 1 and layout.shard == 1:
            self._refuse_without_shards(layout)
        self.layout, self.world_size = layout, asked

    def _refuse_without_shards(self, layout: Layout) -> None:
        if self.options.frozen == "shard":
            setting = "frozen='shard'"
        elif self.options.reshard_after_forward is not None:
            setting = f"reshard_after_forward={self.options.reshard_after_forward}"
        else:
            return
        raise ValueError(
            f"{setting} has no effect with replicate={layout.replicate}, shard=1, which keeps every parameter whole on "
            "each rank; leave it out, or use layout='fsdp'"
        )

    def join_processes(self, *, rank: int, address: str, port: int, device: torch.device) -> None:
        """Makes the process group and the mesh; nothing for one process. May be called again."""
        if self.world_size == 1 or self.mesh is not None:
            return
        assert self.layout is not None
        processes.join_processes(
            rank=rank,
            world_size=self.world_size,
            address=address,
            port=port,
            device=device,
            seconds=self.options.timeout,
        )
        self.mesh = WorldMesh.build(self.layout, device.type)
        self._failures = FailureWatch.of_this_process(rank, self.world_size, address)

    def report_failure(self, error: BaseException) -> None:
        """Tells the other ranks that this one fails, so that none waits for it."""
        if self._failures is not None:
            self._failures.report(error)

    def explaining_memory(
        self,
        activity: Activity,
        *,
        device: torch.device,
        precision: str,
        where: str = "",
        accumulate: int | None = None,
    ) -> contextlib.AbstractContextManager[None]:
        """A torch.OutOfMemoryError inside gets a note with what would need less; arguments as in `Situation`."""
        assert self.layout is not None
        situation = Situation(
            activity,
            where,
            device,
            self.layout,
            precision,
            frozen=self.options.frozen,
            reshard_after_forward=self.options.reshard_after_forward,
            accumulate=accumulate,
        )
        return explaining(situation, self._modules)

    def is_sharded(self, module: Module) -> bool:
        return sharded_module(module) is not None

    def sharded(self, module: Module) -> ShardedModule | None:
        """How `module` was sharded, None with one process."""
        return sharded_module(module)

    def setup_module(
        self, module: Module, *, device: torch.device, precision: str, thawed_by: str | None = None
    ) -> Module:
        """Prepares a module before any optimizer is taken over. May be called again.

        precision: Lightning's flag. With several processes the module's parameters are divided in place.
        thawed_by: who will let frozen parameters train later; they are sharded then. ValueError if the settings forbid
        it.
        """
        self._modules[module] = None
        self._counts = None
        before = sharded_module(module)
        if before is not None:
            self._refuse_other_layout(module, before)
            return module
        if self.mesh is None:
            self._apply_precision(module, precision)
            return module
        self._names.remember(module)
        options = self.options
        if thawed_by is not None:
            if options.frozen == "replicate" and is_divided(self.mesh):
                raise ValueError(
                    f"frozen='replicate', but {thawed_by} trains frozen parameters later, and compares whole ones with "
                    "shards; use frozen='auto' or 'shard'"
                )
            options = replace(options, frozen="shard")
        if is_divided(self.mesh) or options.plans_units:
            plan = plan_units(module, options, precision=precision)
        else:  # as on one process: without units, FSDP2's demands on them (one dtype each) are none
            read_precision(options, precision)
            plan = UnitPlan(units=(), replicated=())
        methods = self.options.forward_methods or ()
        shard_module(module, plan, self.mesh, device=device, forward_methods=methods)
        self._names.follow(module)
        return module

    def _apply_precision(self, module: Module, precision: str) -> None:
        """One process: settings of units, if there are any, are checked and mean the same dtypes as with sharding."""
        methods = entry_points(module, self.options.forward_methods)
        if module in self._with_precision or not self.options.plans_units:
            return
        self._with_precision.add(module)
        plan = plan_units(module, self.options, precision=precision)
        apply_precision(module, plan, sharded=False, forward_methods=methods)
        keep_gradient_dtypes(module, plan, sharded=False, replicated=True)

    def _refuse_other_layout(self, module: Module, before: ShardedModule) -> None:
        if before.mesh.layout != self.layout:
            raise ValueError(
                f"{type(module).__name__} was sharded as {before.mesh.layout} by an earlier run of this process and "
                f"cannot become {self.layout}; use the same layout, or load its checkpoint into a new object"
            )

    def _sharded_modules(self) -> list[ShardedModule]:
        return [sharded for module in self._modules if (sharded := sharded_module(module)) is not None]

    def setup_optimizer(self, optimizer: Optimizer) -> OptimizerPath:
        """Gives a plain AdamW the fused step, in place; other optimizers stay as they are.

        With several processes an optimizer that holds parameters from before sharding gets today's.
        Raises ValueError if the settings ask for something that this optimizer cannot do, or if it holds parameters
        of no module that was set up.
        """
        if self.mesh is not None:
            refuse_local_decisions(optimizer)
            self._names.relink(optimizer)
            if optimizer not in self._relinked:
                accept_full_state(optimizer)
                self._relinked.add(optimizer)
        path = self._fuse(optimizer)
        if not path.fused:
            self.options.refuse_without_fused_step(path.description)
        elif self.mesh is not None and isinstance(optimizer, FusedAdamW):
            ownership = Ownership.from_mesh(self.mesh.device_mesh, sums=self._counts is True)
            ownership.refuse_unlike_groups(optimizer.param_groups)
            optimizer.ownership = ownership
            optimizer.when_zeroed(functools.partial(self._drop_unreduced, weakref.ref(optimizer)))
        self._paths[optimizer] = path
        return path

    def _drop_unreduced(self, reference: weakref.ref[FusedAdamW]) -> None:
        optimizer = reference()
        assert optimizer is not None, "it calls this"
        holders = [sharded for sharded in self._sharded_modules() if sharded.may_hold_unreduced]
        if holders:  # seldom, and the parameters are many
            params = {p for group in optimizer.param_groups for p in group["params"]}
            for sharded in holders:
                sharded.drop_unreduced(params)

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
            watch = self._watches.setdefault(optimizer, _SkipWatch(waits=self.mesh is not None))
            skips = watch.read(optimizer.consecutive_skips)
        if skips >= limit:
            self._stop(optimizer, skips, where)

    def _stop(self, optimizer: FusedAdamW, skips: int, where: str) -> None:
        cause = explain_nonfinite(optimizer, lambda p: repr(self.name_of(p)), ask_all_ranks=self.mesh is not None)
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
        return self._names.name_of(param) or f"a parameter of shape {tuple(param.shape)}"

    def before_backward(self, *, loss_divisor: int = 1) -> None:
        """Call before every backward pass. loss_divisor: what the loss of a window of micro-batches is divided by."""
        self._count_samples(loss_divisor)
        modules = self._sharded_modules()
        for sharded in modules:
            sharded.before_backward(alone=len(modules) == 1)

    def _count_samples(self, loss_divisor: int) -> None:
        """Hands the module's count of samples to the optimizers; ranks agree once whether there are counts at all."""
        count = count_of(self._modules)
        if self._counts is None:
            self._counts = count is not None
            if self.mesh is not None:
                self._counts = any_rank_counts(self._counts, torch.device(self.mesh.device_mesh.device_type))
                self._sum_gradients(self._counts)
        if count is None and not self._counts:
            return
        if count is None:
            raise ValueError(
                "soma_normalizer is not set before this backward pass, but some rank set it before the first one, so "
                "gradients are sums; set it before every backward pass, to 0 where a rank has no valid sample"
            )
        if not self._counts:
            raise ValueError(
                "soma_normalizer was not set in the first training step of this run, so gradients are averages; set it "
                "from the first step on, to 0 where a rank has no valid sample"
            )
        for optimizer, path in self._paths.items():
            if not isinstance(optimizer, FusedAdamW):
                raise ValueError(f"soma_normalizer needs the fused optimizer step, which is off: {path.description}")
            optimizer.count(count / loss_divisor)

    def _sum_gradients(self, sums: bool) -> None:
        held = Counter(param for sharded in self._sharded_modules() for param in sharded.replicated)
        shared = next((param for param, count in held.items() if count > 1), None)
        if sums and shared is not None:
            raise ValueError(
                f"{self.name_of(shared)!r} belongs to two modules that were set up, and each would sum its gradient "
                "over the ranks; with soma_normalizer, set up one module that holds both"
            )
        for sharded in self._sharded_modules():
            sharded.set_sums(sums)
        for optimizer in self._paths:
            if isinstance(optimizer, FusedAdamW) and optimizer.ownership is not None:
                optimizer.ownership = replace(optimizer.ownership, sums=sums)

    def after_backward(self) -> None:
        """Call after every backward pass."""
        for sharded in self._sharded_modules():
            sharded.after_backward()

    def after_evaluation(self) -> None:
        """Call when an evaluation loop is over: hooks that follow must see shards, not gathered parameters."""
        for sharded in self._sharded_modules():
            sharded.reshard()

    @contextlib.contextmanager
    def gradient_sync(self, module: Module, *, enabled: bool) -> Iterator[None]:
        """Backward passes inside do not reduce gradients unless `enabled`; after it they do again.

        With one process there is nothing to reduce.
        """
        sharded = sharded_module(module)
        if sharded is None:
            yield
            return
        sharded.set_gradient_sync(enabled)
        try:
            yield
        finally:
            sharded.set_gradient_sync(True)


def _described(optimizer: FusedAdamW) -> str:
    low = any(p.dtype in LOW_PRECISION for group in optimizer.param_groups for p in group["params"])
    masters = f", {'' if optimizer.master_weights else 'no '}fp32 masters for bf16/fp16 parameters" if low else ""
    return f"{type(optimizer).__name__}: clipping and update in one step, by {optimizer.path_description}{masters}"
