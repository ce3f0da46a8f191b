"""An exponential moving average of the trained parameters only."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from soma_lightning.layout.full_state import shard_like, show_shards


class TrainableEMA(Callback):
    """Keeps `shadow = decay * shadow + (1 - decay) * parameter` in fp32 for parameters that require grad.

    Lightning's `EMAWeightAveraging` copies the whole module, a frozen backbone of several gigabytes included. Here
    frozen parameters cost nothing. Validation, test, prediction and the exported policy use the averaged weights;
    training goes on with the raw ones. The shadow is saved with the checkpoint and restored from it.
    """

    def __init__(self, decay: float) -> None:
        if not 0.0 < decay < 1.0:
            raise ValueError(f"ema_decay={decay} must lie between 0 and 1 (exclusive); leave it unset for no average")
        self.decay = decay
        self.shadow: dict[str, Tensor] = {}
        self._raw: dict[str, Tensor] = {}
        self._last_step = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        live = {name: p for name, p in pl_module.named_parameters() if p.requires_grad}
        if self.shadow and set(self.shadow) != set(live):
            changed = sorted(set(self.shadow) ^ set(live))[:5]
            raise RuntimeError(f"the checkpoint's average covers other parameters than this run trains, e.g. {changed}")
        for name, parameter in live.items():
            kept = self.shadow.get(name, parameter.detach())  # whole, from a file, or a shard
            kept = shard_like(kept, parameter)
            self.shadow[name] = kept.to(parameter.device, torch.float32, copy=True)
        self._last_step = trainer.global_step

    @torch.no_grad()
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self._last_step:  # accumulating: the parameters did not move
            return
        self._last_step = trainer.global_step
        parameters = dict(pl_module.named_parameters())
        shadows = [self.shadow[name] for name in self.shadow]
        torch._foreach_lerp_(shadows, [parameters[name].detach().float() for name in self.shadow], 1 - self.decay)

    @torch.no_grad()
    def swap_in(self, module: LightningModule) -> None:
        """Puts the averaged weights into the module; `swap_out` brings the raw ones back."""
        if self._raw:
            raise RuntimeError("the averaged weights are already in the module; call swap_out first")
        show_shards(module)
        for name, parameter in module.named_parameters():
            if name in self.shadow:
                self._raw[name] = parameter.detach().clone()
                parameter.copy_(shard_like(self.shadow[name], parameter))  # from a file, if no fit has begun

    @torch.no_grad()
    def swap_out(self, module: LightningModule) -> None:
        show_shards(module)  # the strategy does so after the callbacks
        for name, parameter in module.named_parameters():
            if name in self._raw:
                parameter.copy_(self._raw[name])
        self._raw = {}

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.shadow:
            self.swap_in(pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._raw:
            self.swap_out(pl_module)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.on_validation_start(trainer, pl_module)

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.on_validation_end(trainer, pl_module)

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.on_validation_start(trainer, pl_module)

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.on_validation_end(trainer, pl_module)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self._raw:
            self.swap_out(pl_module)

    def state_dict(self) -> dict[str, Any]:
        return {"decay": self.decay, "shadow": self.shadow}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.shadow = dict(state_dict["shadow"])
