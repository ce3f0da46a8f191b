"""Which builder makes a `model_type`, and how do other packages add theirs to every process?

A builder is `builder(cfg, torch_dtype) -> nn.Module`. Built-in models are named by dotted path and imported when they
are first built. A package of the user's own registers its models in a module named by the environment variable
SOMA_EXT_MODULE; every process that builds a model imports that module first, whoever launched the process.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from soma_lightning.imports import EXTENSION_VARIABLE, extension_modules

ModelBuilder = Callable[[Any, Any], nn.Module]  # (ModelSettings, torch.dtype | None)

#: "embodied": a policy that acts (models/policy.py); "reasoning": a language model that only generates.
CATEGORIES = ("embodied", "reasoning")

_DTYPE_OF_PRECISION = {
    **dict.fromkeys(("fp32", "float32", "32", "32-true"), torch.float32),
    **dict.fromkeys(("bf16", "bfloat16", "bf16-true"), torch.bfloat16),
    **dict.fromkeys(("fp16", "float16", "16", "16-true", "half"), torch.float16),
}


@dataclass(frozen=True)
class _Entry:
    builder: ModelBuilder | str  # a string is "module:function", imported at the first use
    category: str


_BUILTIN = {
    "pi05": _Entry("soma_lightning.models.pi05.building:build_pi05", "embodied"),
    "flow_mlp": _Entry("soma_lightning.models.flow_mlp:build_flow_mlp", "embodied"),
}
_models: dict[str, _Entry] = dict(_BUILTIN)
_loaded_extensions: set[str] = set()


class ModelSettings(dict[str, Any]):
    """What a builder gets as `cfg`: a dictionary whose keys are attributes too, nested dictionaries included."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__({str(key): _settings(value) for key, value in values.items()})

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(f"the model's configuration has no '{name}'{_nearest(name, self)}; it has {sorted(self)}")


def _settings(value: Any) -> Any:
    if isinstance(value, argparse.Namespace | SimpleNamespace):
        value = vars(value)
    if isinstance(value, Mapping):
        return ModelSettings(value)
    return [_settings(item) for item in value] if isinstance(value, list) else value


def register_model(model_type: str, builder: ModelBuilder, category: str = "embodied", force: bool = False) -> None:
    """Makes `model_type` valid in configurations and lets `get_model` build it.

    builder: `builder(cfg, torch_dtype) -> nn.Module`; cfg is the whole configuration (ModelSettings: keys as items and
    as attributes), torch_dtype None when no precision was set. category: see CATEGORIES. force: override a registered
    name, built-in models included.
    Raises ValueError for a name that is taken or unusable and for an unknown category, TypeError for a builder that
    cannot be called.
    """
    if not isinstance(model_type, str) or not model_type.strip():
        raise ValueError(f"model_type must be a name, got {model_type!r}")
    if not callable(builder):
        raise TypeError(f"the builder of '{model_type}' must be callable as builder(cfg, torch_dtype), got {builder!r}")
    if category not in CATEGORIES:
        raise ValueError(f"category {category!r} of '{model_type}' is unknown; known: {list(CATEGORIES)}")
    if model_type in _models and not force:
        raise ValueError(f"model_type '{model_type}' is registered already; pass force=True to override it")
    _models[model_type] = _Entry(builder, category)


def registered_models() -> dict[str, str]:
    """{model_type: category} of every model that `get_model` can build here, extensions loaded."""
    load_extensions()
    return {name: _models[name].category for name in sorted(_models)}


def get_model(cfg: Any) -> nn.Module:
    """Builds the model that a configuration describes.

    cfg: dict, dataclass, Namespace or OmegaConf node with `model_type`, and optionally `precision` (fp32, bf16, fp16 or
    a long form), `model_path`, `is_lora` and whatever the builder wants. The builder gets all of it, and the dtype that
    `precision` names: None when it is left out, for the checkpoint's or the builder's own.
    Raises ValueError for an unknown model_type (naming the nearest) or precision, TypeError for a cfg of another kind
    and for a builder that returns no module; errors of `load_extensions`.
    """
    load_extensions()
    settings = ModelSettings(_as_mapping(cfg))
    model_type = settings.get("model_type")
    if not model_type:
        raise ValueError(f"the model's configuration has no model_type; known: {sorted(_models)}")
    if model_type not in _models:
        raise ValueError(
            f"unknown model_type {model_type!r}{_nearest(str(model_type), _models)}; known: {sorted(_models)}. "
            f"A model of your own needs register_model(), called in a module that {EXTENSION_VARIABLE} names"
        )
    precision = settings.get("precision")
    dtype = None if precision is None else torch_dtype(precision)
    model = _resolve(_models[model_type])(settings, dtype)
    if not isinstance(model, nn.Module):
        raise TypeError(f"the builder of '{model_type}' must return an nn.Module, got {type(model).__name__}")
    return model


def torch_dtype(precision: object) -> torch.dtype:
    """Parameter dtype of a `precision` setting: "fp32", "bf16", "fp16", their long forms, or a floating torch.dtype.

    Raises ValueError for anything else; mixed precision is a setting of the strategy, not of the model.
    """
    known = set(_DTYPE_OF_PRECISION.values())
    if isinstance(precision, torch.dtype) and precision in known:
        return precision
    dtype = _DTYPE_OF_PRECISION.get(str(precision).removeprefix("torch.").lower())
    if dtype is None or isinstance(precision, bool):
        raise ValueError(f"unknown precision {precision!r}; known: {sorted(_DTYPE_OF_PRECISION)}")
    return dtype


def pick_device(device: str) -> torch.device:
    """Where a policy runs; "auto" takes a GPU where there is one.

    Raises ValueError for a device that torch does not know or does not see.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"device={device!r}, but torch sees no CUDA device; use device=cpu")
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device={device!r} is unknown; use auto, cpu or cuda") from error


def load_extensions() -> tuple[str, ...]:
    """Imports the modules that SOMA_EXT_MODULE names and calls `register()` of each that has one.

    Each module once per process; calling again costs nothing. Returns the module names. Raises ImportError naming the
    module that cannot be found; errors inside a module keep their own type and gain a note that names it.
    """
    names = extension_modules()
    for name in names:
        if name not in _loaded_extensions:
            _load_extension(name)
    return names


def subprocess_environment() -> dict[str, str]:
    """Variables that a child process needs to know the same models: merge them into its environment.

    Loads the extensions here first, so that a missing module fails before any child starts. Empty without extensions.
    """
    names = load_extensions()
    return {EXTENSION_VARIABLE: ",".join(names)} if names else {}


def _load_extension(name: str) -> None:
    _loaded_extensions.add(name)  # before register(), which may itself build a model
    try:
        register = getattr(import_module(name), "register", None)
        if register is not None:
            register()
    except BaseException as error:
        _loaded_extensions.discard(name)
        if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            raise ImportError(
                f"{EXTENSION_VARIABLE} names '{name}', but there is no module '{error.name}'; install it, or add its "
                "folder to PYTHONPATH"
            ) from error
        error.add_note(f"while loading '{name}', which {EXTENSION_VARIABLE} names")
        raise


def _resolve(entry: _Entry) -> ModelBuilder:
    if not isinstance(entry.builder, str):
        return entry.builder
    module, function = entry.builder.split(":")
    builder: ModelBuilder = getattr(import_module(module), function)
    return builder


def _as_mapping(cfg: Any) -> Mapping[str, Any]:
    omegaconf = sys.modules.get("omegaconf")  # a node cannot exist before its package is loaded
    if omegaconf is not None and omegaconf.OmegaConf.is_config(cfg):
        cfg = omegaconf.OmegaConf.to_container(cfg, resolve=True)
    if isinstance(cfg, Mapping):
        return cfg
    if is_dataclass(cfg) and not isinstance(cfg, type):
        return {field.name: getattr(cfg, field.name) for field in fields(cfg)}
    if isinstance(cfg, argparse.Namespace | SimpleNamespace):
        return dict(vars(cfg))
    raise TypeError(f"get_model needs a dict, a dataclass, a Namespace or an OmegaConf node, got {type(cfg).__name__}")


def _nearest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean '{close[0]}'?" if close else ""
