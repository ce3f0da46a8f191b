"""LightningModules that fine-tune the policies."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from soma_lightning.modules.pi05 import PI05Module as PI05Module

_HOME_OF_NAME = {"PI05Module": "soma_lightning.modules.pi05"}

__all__ = ["PI05Module"]


def __getattr__(name: str) -> Any:
    if name in _HOME_OF_NAME:
        return getattr(import_module(_HOME_OF_NAME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
