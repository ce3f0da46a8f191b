"""Where the time of a training step goes: data, forward, backward, optimizer, and samples per second."""

from __future__ import annotations

import time
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from soma_lightning.contract import TASK

PHASES = ("data", "forward", "backward", "optimizer")


class _Mark:
    """A point in time on the device: the host's clock, or an event on the CUDA stream (recorded without a sync)."""

    def __init__(self, device: torch.device) -> None:
        self.event: Any = None
        if device.type == "cuda":
            self.event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self.event.record()
        self.host = time.perf_counter()

    def seconds_until(self, later: _Mark) -> float:
        if self.event is not None and later.event is not None:
            later.event.synchronize()
            return float(self.event.elapsed_time(later.event)) / 1e3
        return later.host - self.host


class StepTimer(Callback):
    """Logs `samples_per_s` and `<phase>_ms`, averaged over the micro-batches since the last log.

    Data time is the host's wait for the next batch; the other phases are device time on CUDA and host time elsewhere.
    Marks are read when they are logged, so a step is never synchronised for its own sake. The first batch of an epoch
    is left out: it pays for start-up and validation.
    """

    def __init__(self) -> None:
        self._marks: list[_Mark] = []
        self._steps: list[list[_Mark]] = []
        self._samples = 0
        self._last_end: _Mark | None = None

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._last_end = None

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._last_end = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._marks = [_Mark(pl_module.device)]

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        self._marks.append(_Mark(pl_module.device))

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._marks.append(_Mark(pl_module.device))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        end = _Mark(pl_module.device)
        if self._last_end is not None and len(self._marks) == 3:
            self._steps.append([self._last_end, *self._marks, end])
            self._samples += len(batch[TASK]) * trainer.world_size
        self._last_end = end
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if self._steps and trainer.global_step % every == 0:
            self._log(pl_module)

    def _log(self, module: LightningModule) -> None:
        seconds = dict.fromkeys(PHASES, 0.0)
        for last_end, start, forward, backward, end in self._steps:
            seconds["data"] += start.host - last_end.host
            seconds["forward"] += start.seconds_until(forward)
            seconds["backward"] += forward.seconds_until(backward)
            seconds["optimizer"] += backward.seconds_until(end)
        wall = self._steps[-1][-1].host - self._steps[0][0].host
        module.log("samples_per_s", self._samples / wall, prog_bar=True, batch_size=1)
        for phase, total in seconds.items():
            module.log(f"{phase}_ms", 1e3 * total / len(self._steps), prog_bar=True, batch_size=1)
        self._steps, self._samples = [], 0
