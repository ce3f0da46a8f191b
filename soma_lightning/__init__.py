"""SomaSpeed for PyTorch Lightning: `Trainer(strategy="somaspeed")`.

Importing this package registers the strategy names and loads nothing heavy: every public name is resolved when it is
first used (PEP 562), because the `torch.backends` entry point imports us while torch itself is still loading.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from soma_lightning._autoload import install as _register_strategies

if TYPE_CHECKING:
    from soma_lightning.attention import ContextKV as ContextKV
    from soma_lightning.attention import attention as attention
    from soma_lightning.layout.mesh import Layout as Layout
    from soma_lightning.models.policy import BasePolicy as BasePolicy
    from soma_lightning.models.policy import ForwardType as ForwardType
    from soma_lightning.models.registry import get_model as get_model
    from soma_lightning.models.registry import register_model as register_model
    from soma_lightning.optim.fused_adamw import FP32MasterAdamW as FP32MasterAdamW
    from soma_lightning.optim.fused_adamw import FusedAdamW as FusedAdamW
    from soma_lightning.strategy.fabric import FabricSomaSpeedStrategy as FabricSomaSpeedStrategy
    from soma_lightning.strategy.trainer import SomaSpeedStrategy as SomaSpeedStrategy

__version__ = "0.1.0"

_HOME_OF_NAME = {
    "SomaSpeedStrategy": "soma_lightning.strategy.trainer",
    "FabricSomaSpeedStrategy": "soma_lightning.strategy.fabric",
    "Layout": "soma_lightning.layout.mesh",
    "FusedAdamW": "soma_lightning.optim.fused_adamw",
    "FP32MasterAdamW": "soma_lightning.optim.fused_adamw",
    "ContextKV": "soma_lightning.attention",
    "register_model": "soma_lightning.models.registry",
    "get_model": "soma_lightning.models.registry",
    "BasePolicy": "soma_lightning.models.policy",
    "ForwardType": "soma_lightning.models.policy",
}

__all__ = ["__version__", "attention", *_HOME_OF_NAME]


def __getattr__(name: str) -> Any:
    if name == "attention":
        # Importing the submodule binds it to this name, so the module itself is callable as the operator.
        return import_module("soma_lightning.attention")
    if name in _HOME_OF_NAME:
        return getattr(import_module(_HOME_OF_NAME[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


_register_strategies()
