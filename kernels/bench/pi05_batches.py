"""What does full-size pi0.5 cost on recorded batches, and does the loader keep up? No weights are needed.

    PYTHONPATH=.:kernels python kernels/bench/pi05_batches.py --data DEMOS --out docs/benchmarks

fine-tunes the action expert (random weights, frozen backbone) with `Trainer(strategy="somaspeed")` for a few steps on a
LeRobot data set, for example one of `soma demos`, and writes `pi05_batches.json` and `pi05_batches.md`. The first step
is left out: it compiles and starts the loader. Exit status 1 when the loss is not finite.
"""

from __future__ import annotations

import argparse
import math
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch

from bench.report import available_device, current_commit, environment, make_folder, measured_on, write_json, write_text
from bench.trainer import bare_trainer
from soma_lightning.data.datamodule import LeRobotDataModule
from soma_lightning.modules.base import TrainingConfig
from soma_lightning.modules.pi05 import PI05Module
from soma_lightning.modules.timing import PHASES

LAUNCH = "PYTHONPATH=.:kernels python kernels/bench/pi05_batches.py"
COLUMNS = ("step_ms", *(f"{phase}_ms" for phase in PHASES), "data_percent")


@dataclass(frozen=True)
class Step:
    """One training step: step_ms from one start to the next, on the host; data_percent: share lost by waiting."""

    step_ms: float
    data_ms: float
    forward_ms: float
    backward_ms: float
    optimizer_ms: float
    data_percent: float
    loss: float


class Steps(pl.Callback):
    """Keeps what `StepTimer` logs at the end of each step but the first; that log waits for the device."""

    def __init__(self, wanted: int) -> None:
        self.steps: list[Step] = []
        self._wanted = wanted
        self._started: float | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.num_training_batches <= self._wanted:
            raise ValueError(
                f"{self._wanted} steps and the first need more than the {trainer.num_training_batches} batches of this "
                "data set's epoch; use a larger data set, a smaller --batch_size or fewer --steps"
            )

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._keep(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._keep(trainer)

    def _keep(self, trainer: pl.Trainer) -> None:
        now = time.perf_counter()
        logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
        if self._started is not None and "data_ms" in logged:
            phases = {name: logged[name] for name in COLUMNS[1:]}
            self.steps.append(Step(1e3 * (now - self._started), **phases, loss=logged["train_loss"]))
        self._started = now


@dataclass(frozen=True)
class Measured:
    """trained, frozen: parameters. peak: most bytes of the device in training; None on the CPU."""

    trained: int
    frozen: int
    dtypes: list[str]
    optimizer: str
    steps: list[Step]
    peak: int | None

    def median(self, name: str) -> float:
        """Of all steps but the first one."""
        return statistics.median([float(getattr(step, name)) for step in self.steps])


def train(size: Literal["base", "tiny"], chosen: argparse.Namespace, device: torch.device) -> Measured:
    """Trains `chosen.steps` + 1 steps of `chosen.batch_size` rows."""
    pl.seed_everything(0, verbose=False)
    config: dict[str, Any] = {"tokenizer": "builtin", "dtype": "bfloat16"}
    with torch.device(device):  # random weights are drawn where they stay: 3.4 billion take a minute on a CPU
        module = PI05Module(size=size, config=config, training=TrainingConfig(sample_batches=0, export=False))
    data = LeRobotDataModule(
        chosen.data, batch_size=chosen.batch_size, num_workers=chosen.num_workers, statistics="computed"
    )
    recorder = Steps(chosen.steps)
    with tempfile.TemporaryDirectory() as folder:
        trainer = bare_trainer(
            device,
            folder,
            chosen.steps + 1,
            strategy="somaspeed",
            gradient_clip_val=1.0,
            limit_val_batches=0,
            log_every_n_steps=1,
            callbacks=[recorder],
        )
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        trainer.fit(module, data)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    trained = [p for p in module.parameters() if p.requires_grad]
    frozen = [p for p in module.parameters() if not p.requires_grad]
    dtypes = sorted({f"trained {p.dtype}" for p in trained} | {f"frozen {p.dtype}" for p in frozen})
    return Measured(
        sum(p.numel() for p in trained),
        sum(p.numel() for p in frozen),
        [name.replace("torch.", "") for name in dtypes],
        type(trainer.optimizers[0]).__name__,
        recorder.steps,
        peak,
    )


def page(facts: dict[str, str], chosen: argparse.Namespace, measured: Measured) -> str:
    """The Markdown page."""
    medians = " | ".join(f"{measured.median(name):.1f}" for name in COLUMNS)
    memory = "not measured" if measured.peak is None else f"{measured.peak / 2**30:.2f} GiB"
    return f"""# Full-size pi0.5 on recorded batches

Generated by `kernels/bench/pi05_batches.py`; every step is in `pi05_batches.json` beside it.

{measured_on(facts)}

Random weights, {measured.trained:,} parameters train, {measured.frozen:,} are frozen ({", ".join(measured.dtypes)}),
{measured.optimizer}; batches of {chosen.batch_size} recorded frames from {chosen.num_workers} loading workers.
The median of {len(measured.steps)} steps, the first left out:

| {" | ".join(name.replace("_", " ").replace("percent", "%") for name in COLUMNS)} | peak memory |
| {" | ".join("---:" for _ in COLUMNS)} | ---: |
| {medians} | {memory} |

- *step*: host time from one step's start to the next, with a log after each, which waits for the device.
- *data*: the wait for a batch, its transfer, and the loop's own work; *data %*: the share lost by waiting for batches.
- *forward*, *backward*, *optimizer*: device time, the processor (resizing, normalisation, prompts) in *forward*.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and writes; 1 when a loss was not finite."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="folder of a LeRobot data set")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--size", choices=["base", "tiny"], default="base")
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--num_workers", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--commit", help="of the code, where git cannot say")
    chosen = parser.parse_args(arguments)
    device = available_device(chosen.device)
    make_folder(chosen.out)
    command = f"{LAUNCH} {shlex.join(sys.argv[1:] if arguments is None else arguments)}"
    measured = train(chosen.size, chosen, device)
    facts = environment(device, commit=chosen.commit or current_commit(), command=command)
    text = page(facts, chosen, measured)
    write_json(chosen.out / "pi05_batches.json", {"environment": facts, **asdict(measured)})
    write_text(chosen.out / "pi05_batches.md", text)
    print("\n".join(line for line in text.splitlines() if line.startswith("|")))
    return 0 if all(math.isfinite(step.loss) for step in measured.steps) else 1


if __name__ == "__main__":
    sys.exit(main())
