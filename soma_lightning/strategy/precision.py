"""How gradient clipping reaches the optimizer step: every route of the Trainer ends in the precision plugin.

`Trainer(gradient_clip_val=...)`, an overridden `configure_gradient_clipping` and `self.clip_gradients(...)` all call
`precision_plugin.clip_gradients`. There the limit is handed to the fused optimizer instead of rewriting gradients.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, cast

from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch.optim import Optimizer

from soma_lightning.compat import is_still_scaled, unwrap_optimizer
from soma_lightning.optim.clipping import clip_in_place
from soma_lightning.optim.fused_adamw import FusedAdamW

if TYPE_CHECKING:
    from soma_lightning.strategy.engine import Engine

_CLIPPING_METHODS = ("clip_gradients", "clip_grad_by_norm", "clip_grad_by_value", "main_params")


class DeferredClipping(Precision):
    """In front of a plugin's own class: clips fused optimizers inside their step, others as the plugin does."""

    soma_engine: Engine

    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: float | int = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        target = unwrap_optimizer(optimizer)
        # In manual optimization a GradScaler unscales in the step, after this call: what is asked for is a limit of the
        # scaled gradients.
        if not isinstance(target, FusedAdamW) or is_still_scaled(getattr(self, "scaler", None), target):
            super().clip_gradients(optimizer, clip_val, gradient_clip_algorithm)
        elif clip_val > 0 and gradient_clip_algorithm == GradClipAlgorithmType.VALUE:
            self.soma_engine.defer_clipping(target, max_value=float(clip_val))
        elif clip_val > 0:
            self.soma_engine.defer_clipping(target, max_norm=float(clip_val))

    def clip_grad_by_norm(self, optimizer: Optimizer, clip_val: float | int) -> None:
        norm_type = self.soma_engine.options.norm_type
        clip_in_place(self.main_params(optimizer), float(clip_val), norm_type)


def with_deferred_clipping(plugin: Precision, engine: Engine) -> Precision:
    """`plugin` itself, with `DeferredClipping` in front of its class; a plugin that clips in its own way is left alone.

    The new class keeps the old one's `__qualname__`: Lightning stores a plugin's state under it in checkpoints.
    ValueError if norm_type would be ignored by a plugin that clips in its own way.
    """
    cls = type(plugin)
    if not issubclass(cls, DeferredClipping):
        own = [name for name in _CLIPPING_METHODS if not getattr(cls, name).__module__.startswith("lightning.")]
        if own:
            if engine.options.norm_type != 2.0:
                raise ValueError(
                    f"norm_type={engine.options.norm_type} would be ignored: {cls.__qualname__} has its own {own[0]}"
                )
            return plugin
        plugin.__class__ = _mixed(cls)  # type: ignore[arg-type]
    cast(DeferredClipping, plugin).soma_engine = engine
    return plugin


@functools.cache
def _mixed(cls: type[Precision]) -> type[Precision]:
    return type(cls.__name__, (DeferredClipping, cls), {"__qualname__": cls.__qualname__, "__module__": cls.__module__})
