"""Policies and what they are built from. Public names are resolved when they are first used."""

from __future__ import annotations

from typing import TYPE_CHECKING

from soma_lightning.imports import lazy_names

if TYPE_CHECKING:
    from soma_lightning.models.pi05.config import PI05Config as PI05Config
    from soma_lightning.models.pi05.policy import PI05Policy as PI05Policy

_HOME_OF_NAME = {
    "PI05Config": "soma_lightning.models.pi05.config",
    "PI05Policy": "soma_lightning.models.pi05.policy",
}

__all__ = list(_HOME_OF_NAME)

__getattr__, __dir__ = lazy_names(__name__, _HOME_OF_NAME)
