"""What the user's module and callbacks do around a step that the strategy has to know, or cannot allow."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BaseFinetuning, StochasticWeightAveraging, WeightAveraging
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.nn import Module

from soma_lightning.layout.shard import ShardedModule


def thawing_callback(trainer: pl.Trainer) -> str | None:
    """Name of a callback that trains frozen parameters later, if there is one."""
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    return next((type(c).__name__ for c in callbacks if isinstance(c, BaseFinetuning)), None)


def hooks_see_gradients(trainer: pl.Trainer) -> bool:
    """Whether a hook of the user stands between a GradScaler's unscaling and the step."""
    module = trainer.lightning_module
    own = any(is_overridden(hook, module) for hook in ("on_before_optimizer_step", "configure_gradient_clipping"))
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    return own or any(is_overridden("on_before_optimizer_step", c, parent=pl.Callback) for c in callbacks)


def follow_toggles(module: Module, sharded: ShardedModule) -> None:
    """`toggle_optimizer` acts on the optimizer's parameters, the shards; inside a step the gathered ones compute."""
    for name in ("toggle_optimizer", "untoggle_optimizer"):
        toggle = getattr(module, name)

        @functools.wraps(toggle)
        def toggle_and_follow(*args: Any, _toggle: Callable[..., None] = toggle, **kwargs: Any) -> None:
            _toggle(*args, **kwargs)
            sharded.follow_requires_grad()

        setattr(module, name, toggle_and_follow)


def refuse_copies_of_the_module(trainer: pl.Trainer) -> None:
    """ValueError for a callback whose copy of the module was made before its parameters were divided."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, StochasticWeightAveraging | WeightAveraging):
            raise ValueError(
                f"{type(callback).__name__} copies the module before its parameters are divided over "
                f"{trainer.world_size} processes and cannot average them; use devices=1, or a callback that averages "
                "the parameters it finds in on_train_start"
            )
