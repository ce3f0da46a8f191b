"""Which parameters are sharded together, in which dtypes, and which stay out? The plan of units for `fully_shard`.

Nothing here talks to other processes: every rank makes the same plan from the same module.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from soma_lightning.compat import completes_partial_units
from soma_lightning.layout.boundaries import Boundary, BoundaryOptions, check_wrap_settings, find_boundaries
from soma_lightning.layout.islands import fp32_islands
from soma_lightning.layout.precision import Precision, PrecisionRules, grad_dtype, read_precision
from soma_lightning.layout.selectors import Named, is_called


class PlanOptions(BoundaryOptions, Protocol):
    """The settings that make a plan; `StrategyOptions` and `WrapOptions` have them."""

    @property
    def frozen(self) -> Literal["auto", "replicate", "shard"]: ...
    @property
    def reshard_after_forward(self) -> bool | None: ...


@dataclass(frozen=True)
class WrapOptions:
    """The settings of a plan without the rest of the strategy; meanings are those of `SomaSpeedStrategy`."""

    wrap_policy: dict[str, list[str]] | None = None
    mixed_precision: dict[str, Any] | None = None
    wrappers: dict[str, dict[str, Any]] | None = None
    mixed_precision_policies: dict[str, dict[str, Any]] | None = None
    mixed_precision_rules: dict[str, str] | None = None
    frozen: Literal["auto", "replicate", "shard"] = "auto"
    reshard_after_forward: bool | None = None
    keep_low_precision_grads: bool = False


@dataclass(frozen=True)
class Unit:
    """What is gathered, computed and reduced together.

    name: path of the (first) module, "" for the root. modules: one, or several for one `fully_shard([...])`, whose
    inputs `casting.apply_precision` casts.
    mp: policy for `fully_shard`; None leaves dtypes alone. buffer_dtype: of float buffers while the unit computes.
    reshard_after_forward: as in `fully_shard`; always True for frozen units, which backward seldom needs, and never for
    the root, whose methods call each other.
    trainable: whether any of `parameters` trains. parameters: paths of what the unit shards.
    precision: where mp and buffer_dtype come from. autocast: what the unit does to an enclosing autocast while it
    computes: False turns it off, True on again, None leaves it. as_stored: those of `parameters` that `mp` does not
    cast: the fp32 islands of a mixed flag.
    """

    name: str
    modules: tuple[nn.Module, ...]
    mp: MixedPrecisionPolicy | None
    buffer_dtype: torch.dtype | None
    reshard_after_forward: bool | None
    trainable: bool
    keep_low_precision_grads: bool
    parameters: tuple[str, ...] = ()
    precision: Precision = field(default_factory=Precision)
    autocast: bool | None = None
    as_stored: tuple[str, ...] = ()


@dataclass(frozen=True)
class UnitPlan:
    """What to shard, in order, and what to leave out.

    units: inside-out, the root last; for `fully_shard`. replicated: paths of parameters that no unit shards: pass them
    as `ignored_params` of every call. They are frozen, 0-d or empty (FSDP2 cannot shard those; the gradient of a
    trainable one must be reduced by the caller). unsharded: units with a precision of their own whose parameters are
    all replicated; `casting.apply_precision` serves them. autocast_dtype: what the flag's autocast computes in, if it
    has.
    """

    units: tuple[Unit, ...]
    replicated: tuple[str, ...]
    unsharded: tuple[Unit, ...] = ()
    autocast_dtype: torch.dtype | None = None


def check_settings(options: PlanOptions) -> None:
    """ValueError for what is wrong whatever the model and the precision flag are."""
    if options.frozen not in ("auto", "replicate", "shard"):
        raise ValueError(f"frozen={options.frozen!r} is unknown; use 'auto', 'replicate' or 'shard'")
    for name in ("wrap_policy", "wrappers", "mixed_precision", "mixed_precision_policies", "mixed_precision_rules"):
        if not isinstance(value := getattr(options, name), Mapping | None):
            raise ValueError(f"{name}={value!r} must be a dict or None; docs/precision.md shows its keys")
    check_wrap_settings(options)
    read_precision(options, None)


def plan_units(root: nn.Module, options: PlanOptions, *, precision: str) -> UnitPlan:
    """The plan for `root` under Lightning's flag `precision` ("32-true", "bf16-mixed", ...).

    Parameters tied over several modules belong to the lowest unit that holds all of them. Trainable parameters of a
    unit share one stored dtype (FSDP2 demands it): modules that differ become a unit of their own inside. The fp32
    islands of a mixed flag (`islands.fp32_islands`) stay in their unit as they are stored; with
    keep_low_precision_grads, which gives a unit one dtype of gradients, they become units too. Frozen parameters are
    replicated (`frozen="auto"`, "replicate") or become units without trainable ones ("shard"); only wrap_mode subtree
    and combined mix the two.
    ValueError for each setting that is wrong or would be ignored.
    """
    check_settings(options)
    rules = read_precision(options, precision)
    boundaries = find_boundaries(root, options, rules)
    _merge_tied(root, boundaries)
    islands = fp32_islands(root) if rules.autocast_dtype and not rules.unbound.explicit else set[nn.Module]()
    planner = _Planner(root, options, rules, boundaries, islands)
    plan = planner.plan()
    _refuse_useless_keep(root, plan)
    return plan


# -------------------------------------------------------------------- tied weights


def _merge_tied(root: nn.Module, boundaries: dict[nn.Module, Boundary]) -> None:
    """Removes boundaries until every parameter lies behind one only."""
    while True:
        owners: dict[nn.Parameter, dict[nn.Module, str]] = {}
        for boundary in boundaries.values():
            for name, module in modules_behind(boundary.name, boundary.module, boundaries):
                for key, param in module.named_parameters(name, recurse=False):
                    owners.setdefault(param, {}).setdefault(boundary.module, key)
        tied = next((places for places in owners.values() if len(places) > 1), None)
        if tied is None:
            return
        for module in tied:
            if set(tied) <= set(module.modules()):
                continue
            boundary = boundaries.pop(module)
            if boundary.wrapper is not None:
                raise ValueError(
                    f"wrappers.{boundary.wrapper} selects {boundary.name!r}, but {' and '.join(tied.values())} are one "
                    "tied parameter, which belongs to one unit; select a module that holds all of them, with "
                    "wrap_mode: subtree"
                )


def modules_behind(name: str, module: nn.Module, stops: dict[nn.Module, Any]) -> Iterator[Named]:
    """`module` and what lies below it, without what lies behind another boundary."""
    yield name, module
    for key, child in module.named_children():
        if child not in stops:
            yield from modules_behind(f"{name}.{key}" if name else key, child, stops)


# -------------------------------------------------------------------- from boundaries to units


@dataclass(frozen=True)
class _Key:
    """Parameters with one key can be sharded together; frozen ones of several dtypes can, too (dtype None)."""

    trainable: bool
    dtype: torch.dtype | None
    precision: Precision


@dataclass(frozen=True)
class _Part:
    """A module with parameters of its own: the least that can become a unit."""

    name: str
    module: nn.Module
    parameters: dict[str, nn.Parameter]
    key: _Key


class _Planner:
    def __init__(
        self,
        root: nn.Module,
        options: PlanOptions,
        rules: PrecisionRules,
        boundaries: dict[nn.Module, Boundary],
        islands: set[nn.Module],
    ) -> None:
        self._root, self._options, self._rules = root, options, rules
        self._boundaries = boundaries
        apart = options.keep_low_precision_grads
        self._islands_apart = islands if apart else set[nn.Module]()
        self._as_stored = set[nn.Parameter]() if apart else {p for island in islands for p in island.parameters()}
        closed = [boundary.module for boundary in boundaries.values() if boundary.closed]
        together = [m for m in closed if any(p.requires_grad for p in m.parameters())]
        self._mixed = {p for module in together for p in module.parameters()}
        self._replicated = tuple(name for name, p in root.named_parameters() if self._is_replicated(p))

    def plan(self) -> UnitPlan:
        while self._promote():
            continue
        units: list[Unit] = []
        unsharded: list[Unit] = []
        for boundary in reversed(list(self._boundaries.values())):
            inner, base = self._units_of(boundary)
            units += inner
            if base.parameters or boundary.module is self._root:
                units.append(base)
            elif base.precision.explicit:
                unsharded.append(base)
        return UnitPlan(tuple(units), self._replicated, tuple(unsharded), self._rules.autocast_dtype)

    def _is_replicated(self, param: nn.Parameter) -> bool:
        if param.dim() == 0 or param.numel() == 0:
            return True
        return not param.requires_grad and self._options.frozen != "shard" and param not in self._mixed

    def _promote(self) -> bool:
        """Makes the first part that must leave its unit but holds others a boundary; True if there was one."""
        for boundary in self._boundaries.values():
            parts = self._parts(boundary)
            base = self._base_key(boundary, parts)
            keys = {part.module: part.key for part in parts}
            for part in parts:
                below = [keys[m] for _, m in modules_behind("", part.module, self._boundaries) if m in keys]
                if part.key != base and any(key != part.key for key in below):
                    promoted = Boundary(part.name, part.module, self._below(boundary, part.key.precision))
                    with_it = {**self._boundaries, part.module: promoted}
                    self._boundaries = {m: with_it[m] for m in self._root.modules() if m in with_it}
                    return True
        return False

    def _units_of(self, boundary: Boundary) -> tuple[list[Unit], Unit]:
        """Units inside the boundary for what differs from the rest, then the boundary's own."""
        parts = self._parts(boundary)
        base = self._base_key(boundary, parts)
        groups: dict[_Key, list[_Part]] = {base: []}
        for part in parts:
            groups.setdefault(part.key, []).append(part)
        own = groups.pop(base)
        inner = [
            self._unit(
                together[0].name, tuple(p.module for p in together), together, self._below(boundary, key.precision)
            )
            for key, group in groups.items()
            for together in ([group] if completes_partial_units() else reversed(_sharing_parameters(group)))
        ]
        return inner, self._unit(boundary.name, (boundary.module,), own, base.precision)

    def _below(self, boundary: Boundary, precision: Precision) -> Precision:
        """The precision of a part as a unit of its own: below the root, no longer that of the root."""
        return self._rules.unbound if precision == self._rules.root and boundary.module is self._root else precision

    def _unit(self, name: str, modules: tuple[nn.Module, ...], parts: list[_Part], precision: Precision) -> Unit:
        trainable = any(p.requires_grad for part in parts for p in part.parameters.values())
        reshard = self._options.reshard_after_forward if trainable else True
        if modules[0] is self._root:
            reshard = False if self._options.reshard_after_forward is False else None
        mp = precision.fsdp_policy()
        if mp is not None and len(modules) > 1:  # torch < 2.13 casts inputs of the first module only
            mp = replace(mp, cast_forward_inputs=False)
        parameters = {name: p for part in parts for name, p in part.parameters.items()}
        return Unit(
            name=name,
            modules=modules,
            mp=mp,
            buffer_dtype=precision.buffer_dtype,
            reshard_after_forward=reshard,
            trainable=trainable,
            keep_low_precision_grads=precision.keep_low_precision_grads,
            parameters=tuple(parameters),
            precision=precision,
            autocast=self._autocast(modules[0], precision),
            as_stored=() if precision.explicit else tuple(n for n, p in parameters.items() if p in self._as_stored),
        )

    def _autocast(self, module: nn.Module, precision: Precision) -> bool | None:
        """Autocast would compute a unit of fp32 in its own dtype; units right inside one need it back."""
        if self._rules.autocast_dtype is None or _is_full(precision):
            return None if self._rules.autocast_dtype is None else False
        around = [b for b in self._boundaries.values() if b.module is not module and module in set(b.module.modules())]
        return True if around and _is_full(around[-1].precision) else None

    # ------------------------------------------------------------------ parts and keys

    def _parts(self, boundary: Boundary) -> list[_Part]:
        """Modules behind the boundary with sharded parameters of their own; a closed boundary is one part."""
        if boundary.closed:
            return self._closed_part(boundary)
        parts = []
        seen: set[nn.Module] = set()
        for name, module in modules_behind(boundary.name, boundary.module, self._boundaries):
            if module in seen:
                continue
            precision, whole = boundary.precision, isinstance(module, nn.MultiheadAttention)
            if module in self._islands_apart and not precision.explicit:
                precision, whole = replace(precision, param_dtype=None), True
            inside = list(modules_behind(name, module, self._boundaries)) if whole else [(name, module)]
            seen.update(m for _, m in inside)
            parameters = self._sharded(inside)
            if parameters:
                parts.append(_Part(name, module, parameters, self._one_key(name, parameters, precision)))
        return parts

    def _closed_part(self, boundary: Boundary) -> list[_Part]:
        name, module = boundary.name, boundary.module
        parameters = self._sharded(list(modules_behind(name, module, {})))
        if not parameters:
            return []
        by_dtype = {p.dtype: name for name, p in parameters.items()}
        if len(by_dtype) > 1:
            raise ValueError(_mixed_dtypes(boundary, by_dtype))
        trainable = any(p.requires_grad for p in parameters.values())
        return [_Part(name, module, parameters, _Key(trainable, next(iter(by_dtype)), boundary.precision))]

    def _sharded(self, modules: list[Named]) -> dict[str, nn.Parameter]:
        named = ((key, p) for name, m in modules for key, p in m.named_parameters(name, recurse=False))
        return {key: p for key, p in named if not self._is_replicated(p)}

    def _one_key(self, name: str, parameters: dict[str, nn.Parameter], precision: Precision) -> _Key:
        """ValueError if the module cannot be in one unit as a whole."""
        keys = {
            path: _Key(p.requires_grad, p.dtype if p.requires_grad else None, precision)
            for path, p in parameters.items()
        }
        first = next(iter(keys))
        other = next((path for path in keys if keys[path] != keys[first]), None)
        if other is not None:
            one, two = (f"{path!r} ({_state(parameters[path])})" for path in (first, other))
            raise ValueError(
                f"one module, {name!r}, owns {one} and {two}, which FSDP2 cannot keep in units of their own; store "
                "them in one dtype and, if one is frozen, use frozen='replicate' or a wrapper with wrap_mode: subtree"
            )
        return keys[first]

    def _base_key(self, boundary: Boundary, parts: list[_Part]) -> _Key:
        """What the boundary's own unit holds: its direct parameters, else what has most elements and trains."""
        if not parts:
            return _Key(False, None, boundary.precision)
        fixed = [part for part in parts if part.module is boundary.module or not is_called(part.module)]
        if any(part.key != fixed[0].key for part in fixed):
            other = next(part for part in fixed if part.key != fixed[0].key)
            raise ValueError(
                f"{next(iter(fixed[0].parameters))!r} and {next(iter(other.parameters))!r} differ in dtype or in "
                f"whether they train, and must both belong to the unit of {boundary.name!r}, because what owns them is "
                "never called; give them one dtype and one requires_grad"
            )
        sizes: Counter[_Key] = Counter()
        for part in parts:
            sizes[part.key] += sum(p.numel() for p in part.parameters.values())
        suited = [key for key in sizes if key.precision == boundary.precision]
        base = max(suited, key=lambda key: (key.trainable, sizes[key]), default=_Key(False, None, boundary.precision))
        base = fixed[0].key if fixed else base
        if boundary.wrapper is not None:
            by_dtype = {key.dtype: next(iter(p.parameters)) for p in parts if (key := p.key).trainable}
            if len(by_dtype) > 1:
                raise ValueError(_mixed_dtypes(boundary, by_dtype))
        return base


def _sharing_parameters(parts: list[_Part]) -> list[list[_Part]]:
    """One list a part, but those that share a parameter are in one."""
    lists: list[list[_Part]] = []
    for part in parts:
        own = set(part.parameters.values())
        sharing = next((known for known in lists if any(own & set(p.parameters.values()) for p in known)), None)
        if sharing is None:
            lists.append([part])
        else:
            sharing.append(part)
    return lists


def _state(param: nn.Parameter) -> str:
    return f"{'trainable' if param.requires_grad else 'frozen'}, {param.dtype}"


def _is_full(precision: Precision) -> bool:
    return precision.explicit and precision.param_dtype is torch.float32


def _mixed_dtypes(boundary: Boundary, by_dtype: dict[Any, str]) -> str:
    found = " and ".join(f"{name!r} ({dtype})" for dtype, name in by_dtype.items())
    return (
        f"wrappers.{boundary.wrapper} makes {boundary.name!r} one unit, but it holds {found}; parameters of one unit "
        "share their stored dtype: cast them, or select the parts by wrappers of their own"
    )


def _refuse_useless_keep(root: nn.Module, plan: UnitPlan) -> None:
    parameters = dict(root.named_parameters(remove_duplicate=False))
    keeping = [unit for unit in plan.units if unit.keep_low_precision_grads and unit.trainable]
    dtypes = {
        grad_dtype(unit.precision, parameters[name].dtype, replicated=replicated)
        for unit in keeping
        for name in unit.parameters
        for replicated in (True, False)
    }
    if keeping and dtypes <= {torch.float32, torch.float64}:
        raise ValueError(
            f"keep_low_precision_grads has no effect: all gradients of {keeping[0].name or 'the root'!r} are "
            "computed in fp32; set param_dtype: bf16 where it applies, use precision='bf16-true', or leave it out"
        )
