"""Where do sharding units begin? At what `wrappers` and `wrap_policy` select, else at a model's own units and by size.

A boundary is a module that becomes a unit together with everything below it, except what lies behind another boundary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from soma_lightning.layout.precision import Precision, PrecisionOptions, PrecisionRules
from soma_lightning.layout.selectors import Named, Selector, check_entries, class_names, is_called, near_misses, select

#: Items of a list become units above this number of parameters, and single modules (embeddings, heads) above that one.
MIN_LAYER_PARAMETERS = 1_000_000
MIN_LEAF_PARAMETERS = 10_000_000

_SELECTORS: dict[str, Selector] = {"wrap_names": "tag", "module_classes": "class", "module_names": "path"}
_WRAP_MODES = ("individual", "subtree", "combined")
_WRAP_POLICY: dict[str, Selector] = {
    "transformer_layer_cls_to_wrap": "class",
    "module_classes_to_wrap": "class",
    "no_split_names": "tag",
}


class BoundaryOptions(PrecisionOptions, Protocol):
    """The settings read here; `StrategyOptions` and `WrapOptions` have them."""

    @property
    def wrap_policy(self) -> dict[str, list[str]] | None: ...


@dataclass(frozen=True)
class Boundary:
    """Where a unit begins.

    closed: the whole subtree is one unit, trainable and frozen parameters alike. wrapper: who asked for it, if anyone.
    """

    name: str
    module: nn.Module
    precision: Precision
    closed: bool = False
    wrapper: str | None = None


def check_wrap_settings(options: BoundaryOptions) -> None:
    """ValueError for what is wrong in `wrap_policy` and `wrappers` whatever the model is."""
    for key, entries in (options.wrap_policy or {}).items():
        if key not in _WRAP_POLICY:
            raise ValueError(f"wrap_policy has no key {key!r}{near_misses(key, _WRAP_POLICY)}; it has {_keys()}")
        check_entries(entries, f"wrap_policy.{key}")
    if options.wrap_policy is not None and not options.wrap_policy:
        raise ValueError(f"wrap_policy is empty; use {_keys()}, or leave it out")
    for name, wrapper in (options.wrappers or {}).items():
        _read_wrapper(name, wrapper)


def find_boundaries(root: nn.Module, options: BoundaryOptions, rules: PrecisionRules) -> dict[nn.Module, Boundary]:
    """Boundaries by module, the root's included, in the order of `root.named_modules()`.

    `wrappers` come first; then `wrap_policy`, or without one the classes and tags that a model declares
    (`_no_split_modules`, `_no_split_names`) and, where it declares none, layers and leaves by size.
    ValueError for a selection without effect, a container, or boundaries that overlap.
    """
    found = {root: Boundary("", root, rules.root)}
    for name, wrapper in (options.wrappers or {}).items():
        _add_wrapper(found, root, name, wrapper, rules.of_wrapper(name))
    closed = [boundary for boundary in found.values() if boundary.closed]
    _refuse_overlaps(found.values(), closed)
    inside = {module for boundary in closed for module in boundary.module.modules()}
    by_policy = _from_wrap_policy(root, options.wrap_policy) if options.wrap_policy else _from_model(root)
    for name, module in by_policy:
        if module not in inside and module not in found:
            found[module] = Boundary(name, module, rules.unbound)
    return {module: found[module] for module in root.modules() if module in found}


# -------------------------------------------------------------------- wrappers


def _read_wrapper(name: str, wrapper: Mapping[str, Any]) -> tuple[str, str]:
    """The one selector key of a wrapper and its mode."""
    where = f"wrappers.{name}"
    known = (*_SELECTORS, "wrap_mode")
    if not isinstance(wrapper, Mapping):
        raise ValueError(f"{where}={wrapper!r} must be a mapping with one of {', '.join(_SELECTORS)}")
    for key in wrapper:
        if key not in known:
            raise ValueError(f"{where} has no key {key!r}{near_misses(key, known)}; it has {', '.join(known)}")
    selectors = [key for key in _SELECTORS if key in wrapper]
    if len(selectors) != 1:
        given = " and ".join(selectors) or "none"
        raise ValueError(f"{where} needs exactly one of {', '.join(_SELECTORS)}, got {given}; use a wrapper for each")
    check_entries(wrapper[selectors[0]], f"{where}.{selectors[0]}")
    mode = wrapper.get("wrap_mode", "individual")
    if mode not in _WRAP_MODES:
        raise ValueError(f"{where}.wrap_mode={mode!r} is unknown; use one of {', '.join(_WRAP_MODES)}")
    return selectors[0], mode


def _add_wrapper(
    found: dict[nn.Module, Boundary], root: nn.Module, name: str, wrapper: Mapping[str, Any], precision: Precision
) -> None:
    key, mode = _read_wrapper(name, wrapper)
    where = f"wrappers.{name}.{key}"
    matches = select(root, _SELECTORS[key], wrapper[key], where)
    if mode == "combined":
        matches = [_common_parent(root, matches, where)]
    for fqn, module in matches:
        _refuse_container(fqn, module, where)
        if module in found:
            raise ValueError(
                f"{where} selects {fqn!r}, which wrapper {found[module].wrapper!r} selects too; keep it in one of them"
            )
        found[module] = Boundary(fqn, module, precision, closed=mode != "individual", wrapper=name)


def _common_parent(root: nn.Module, matches: Sequence[Named], where: str) -> Named:
    if len(matches) == 1:
        raise ValueError(f"{where} selects only {matches[0][0]!r}; combined joins several, use wrap_mode: subtree")
    paths = [name.split(".")[:-1] for name, _ in matches]
    shared = 0
    while all(len(path) > shared and path[shared] == paths[0][shared] for path in paths):
        shared += 1
    parent = ".".join(paths[0][:shared])
    if not parent:
        names = ", ".join(repr(name) for name, _ in matches[:4])
        raise ValueError(
            f"{where}: the common parent of {names} is the root, which is a unit already; set its precision in "
            "mixed_precision, or use wrap_mode: individual"
        )
    return parent, root.get_submodule(parent)


def _refuse_overlaps(boundaries: Iterable[Boundary], closed: Sequence[Boundary]) -> None:
    chosen = {boundary.module: boundary for boundary in boundaries if boundary.wrapper}
    for outer in closed:
        for module in outer.module.modules():
            inner = chosen.get(module)
            if inner is not None and inner is not outer:
                raise ValueError(
                    f"wrappers.{outer.wrapper} makes all of {outer.name!r} one unit, but wrappers.{inner.wrapper} "
                    f"selects {inner.name!r} inside it; select outside of it, or use wrap_mode: individual"
                )


def _refuse_container(name: str, module: nn.Module, where: str) -> None:
    if not is_called(module):
        raise ValueError(
            f"{where}: {name!r} is a {type(module).__name__}, whose forward is never called, so that it cannot be a "
            "unit; select its items or the module that holds it"
        )


# -------------------------------------------------------------------- wrap_policy, the model, sizes


def _from_wrap_policy(root: nn.Module, policy: Mapping[str, Sequence[str]]) -> list[Named]:
    found = []
    for key, entries in policy.items():
        for name, module in select(root, _WRAP_POLICY[key], entries, f"wrap_policy.{key}"):
            _refuse_container(name, module, f"wrap_policy.{key}")
            found.append((name, module))
    return found


def _from_model(root: nn.Module) -> list[Named]:
    """What models in the tree declare; elsewhere, but never inside such a unit, layers and leaves by size."""
    whole: set[nn.Module] = set()
    for model in root.modules():
        classes = set(getattr(model, "_no_split_modules", None) or ())
        tags = set(getattr(model, "_no_split_names", None) or ())
        for module in model.modules() if classes or tags else ():
            tagged = getattr(module, "_fsdp_wrap_name", None) in tags
            if module is not root and is_called(module) and (tagged or classes & class_names(module)):
                whole.add(module)
    found = [(name, module) for name, module in root.named_modules() if module in whole]
    _add_by_size(root, "", whole, found)
    return found


def _add_by_size(module: nn.Module, prefix: str, whole: set[nn.Module], found: list[Named]) -> None:
    children = dict(module.named_children())
    alike = Counter(type(child) for child in children.values())
    in_list = isinstance(module, (nn.ModuleList, nn.Sequential))
    for key, child in children.items():
        name = f"{prefix}{key}"
        size = sum(p.numel() for p in child.parameters())
        is_layer = in_list and alike[type(child)] > 1 and size > MIN_LAYER_PARAMETERS
        is_leaf = not any(True for _ in child.children()) and size > MIN_LEAF_PARAMETERS
        if child in whole:
            continue
        if is_called(child) and (is_layer or is_leaf):
            found.append((name, child))
        else:
            _add_by_size(child, f"{name}.", whole, found)


def _keys() -> str:
    return ", ".join(_WRAP_POLICY)
