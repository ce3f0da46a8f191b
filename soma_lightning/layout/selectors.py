"""Which modules does a rule select? By class, by `_fsdp_wrap_name` tag, or by path; nothing selected is an error."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable, Sequence
from typing import Literal

from torch import nn

Selector = Literal["class", "tag", "path"]
#: A module and its name, relative to the root.
Named = tuple[str, nn.Module]

_PLURALS: dict[Selector, str] = {"class": "classes", "tag": "_fsdp_wrap_name tags", "path": "module paths"}


def select(root: nn.Module, kind: Selector, entries: Sequence[str], where: str) -> list[Named]:
    """The modules below `root` that any of `entries` selects, in the order of `root.named_modules()`.

    kind: "class" takes short or dotted class names and matches subclasses; "tag" takes values of `_fsdp_wrap_name`;
    "path" takes exact module paths or globs, whose `*` matches dots too.
    where: names the setting in errors. ValueError for an entry that selects nothing, with the nearest names.
    """
    check_entries(entries, where)
    # A module that is registered under several names can be selected by each of them.
    candidates = [(name, module) for name, module in root.named_modules(remove_duplicate=False) if name]
    chosen: set[nn.Module] = set()
    for entry in entries:
        matches = [module for name, module in candidates if _matches(kind, entry, name, module)]
        if not matches:
            known = sorted({key for name, module in candidates for key in _keys(kind, name, module)})
            near = near_misses(entry, known, count=3)
            shown = near or f"; there are {', '.join(known[:8])}{', ...' if len(known) > 8 else ''}"
            raise ValueError(
                f"{where} selects nothing with {entry!r}{shown if known else f': no module has {_PLURALS[kind]}'}"
            )
        chosen.update(matches)
    return [(name, module) for name, module in root.named_modules() if module in chosen]


def check_entries(entries: object, where: str) -> None:
    """ValueError unless `entries` is a list of names."""
    if not isinstance(entries, list | tuple) or not entries or not all(isinstance(entry, str) for entry in entries):
        raise ValueError(f"{where}={entries!r} must be a list of names with at least one entry")


def class_names(module: nn.Module) -> set[str]:
    """Short and dotted names of a module's class and its bases, up to nn.Module."""
    classes = [cls for cls in type(module).__mro__ if issubclass(cls, nn.Module) and cls is not nn.Module]
    return {name for cls in classes for name in (cls.__name__, f"{cls.__module__}.{cls.__qualname__}")}


def is_called(module: nn.Module) -> bool:
    """Whether a module has a forward of its own: hooks of a plain container (ModuleList, ModuleDict) never run."""
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward


def near_misses(name: object, known: Iterable[str], count: int = 1) -> str:
    """'; did you mean a, b?' with the known names nearest to `name`; empty when none is near."""
    near = difflib.get_close_matches(str(name), list(known), n=count)
    return f"; did you mean {', '.join(near)}?" if near else ""


def _matches(kind: Selector, entry: str, name: str, module: nn.Module) -> bool:
    if kind == "path":
        return fnmatch.fnmatchcase(name, entry)
    return entry in _keys(kind, name, module)


def _keys(kind: Selector, name: str, module: nn.Module) -> set[str]:
    if kind == "path":
        return {name}
    if kind == "class":
        return class_names(module)
    tag = getattr(module, "_fsdp_wrap_name", None)
    return set() if tag is None else {tag}
