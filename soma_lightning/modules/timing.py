"""Where the time of a training step goes: data, forward, backward, optimizer; is the run waiting for data?"""

from __future__ import annotations

import time
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from soma_lightning.contract import TASK

#: A run that waits for longer than this is told so, after at least `ADVICE_STEPS` micro-batches.
DATA_BOUND_PERCENT = 25.0
ADVICE_STEPS = 10
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
    """Logs `samples_per_s`, `<phase>_ms` and `data_percent`, averaged over the micro-batches since the last log.

    Data time is the host's, from one step to the next: the wait for a batch, its transfer and augmentation, and the
    loop's own work; the other phases are device time on CUDA and host time elsewhere. data_percent is the share of time
    lost by waiting for batches: that wait alone where the loader measures it (`waited_s`), and on CUDA no more than the
    device was idle, since a batch that comes before the queued work is done delays nothing. Above
    `DATA_BOUND_PERCENT` a warning says once what would help (the data module's `loading_advice()`).
    Marks are read when they are logged, so a step is never synchronised for its own sake. The first batch of an epoch
    is left out: it pays for start-up and validation.
    """

    def __init__(self) -> None:
        self._marks: list[_Mark] = []
        self._steps: list[tuple[float, list[_Mark]]] = []  # seconds of waiting for the loader, marks
        self._waited = 0.0  # the loader's count at the last step's end, seconds
        self._wait = 0.0  # for the current batch, seconds
        self._samples = 0
        self._last_end: _Mark | None = None
        self._waits: list[tuple[float, float]] | None = []  # (wait, step) seconds until the advice; None afterwards

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._last_end = None

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._last_end = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._marks = [_Mark(pl_module.device)]
        self._wait = _waited(trainer) - self._waited

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        self._marks.append(_Mark(pl_module.device))

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._marks.append(_Mark(pl_module.device))

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        end = _Mark(pl_module.device)
        if self._last_end is not None and len(self._marks) == 3:
            self._steps.append((self._wait, [self._last_end, *self._marks, end]))
            self._samples += len(batch[TASK]) * trainer.world_size
        self._last_end, self._waited = end, _waited(trainer)
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if self._steps and trainer.global_step % every == 0:
            self._log(pl_module)

    def _log(self, module: LightningModule) -> None:
        seconds = dict.fromkeys(PHASES, 0.0)
        waits = []
        for wait, (last_end, start, forward, backward, end) in self._steps:
            seconds["data"] += start.host - last_end.host
            seconds["forward"] += start.seconds_until(forward)
            seconds["backward"] += forward.seconds_until(backward)
            seconds["optimizer"] += backward.seconds_until(end)
            lost = min(wait, start.host - last_end.host, last_end.seconds_until(start))
            waits.append((lost, end.host - last_end.host))
        wall = sum(step for _, step in waits)
        module.log("samples_per_s", self._samples / wall, prog_bar=True, batch_size=1)
        module.log("data_percent", _percent(waits), prog_bar=True, batch_size=1)
        for phase, total in seconds.items():
            module.log(f"{phase}_ms", 1e3 * total / len(self._steps), prog_bar=True, batch_size=1)
        self._steps, self._samples = [], 0
        self._advise(module.trainer, waits)

    def _advise(self, trainer: Trainer, waits: list[tuple[float, float]]) -> None:
        if self._waits is None:
            return
        self._waits += waits
        if len(self._waits) < ADVICE_STEPS:
            return
        percent, self._waits = _percent(self._waits), []
        if percent > DATA_BOUND_PERCENT:
            advice = getattr(getattr(trainer, "datamodule", None), "loading_advice", None)
            rank_zero_warn(
                f"this run waits for data {percent:.0f} % of the time; "
                f"{advice() if advice is not None else 'load batches with more workers'}"
            )
            self._waits = None


def _waited(trainer: Trainer) -> float:
    """Seconds that the loader has waited so far; the host's clock where it does not measure, an upper bound."""
    waited: float | None = getattr(trainer.train_dataloader, "waited_s", None)
    return time.perf_counter() if waited is None else waited


def _percent(waits: list[tuple[float, float]]) -> float:
    return 100.0 * sum(wait for wait, _ in waits) / sum(step for _, step in waits)
