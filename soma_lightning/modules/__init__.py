"""LightningModules that fine-tune the policies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from soma_lightning.imports import lazy_names

if TYPE_CHECKING:
    from soma_lightning.modules.pi05 import PI05Module as PI05Module

_HOME_OF_NAME = {"PI05Module": "soma_lightning.modules.pi05"}

__all__ = list(_HOME_OF_NAME)

__getattr__, __dir__ = lazy_names(__name__, _HOME_OF_NAME)
