"""Policies and what they are built from. Public names are resolved when they are first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from soma_lightning.models.pi05.config import PI05Config as PI05Config
    from soma_lightning.models.pi05.policy import PI05Policy as PI05Policy

_HOME_OF_NAME = {
    "PI05Config": "soma_lightning.models.pi05.config",
    "PI05Policy": "soma_lightning.models.pi05.policy",
}

__all__ = [*_HOME_OF_NAME]


def __getattr__(name: str) -> Any:
    if name in _HOME_OF_NAME:
        return getattr(import_module(_HOME_OF_NAME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
