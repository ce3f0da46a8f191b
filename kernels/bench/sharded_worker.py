"""One rank of one contender: trains, and writes what it measured. Started by `sharded_jobs.py`, as torchrun would.

    python -m bench.sharded_worker JOB RESULT

It imports everything, and touches no device before a line on its standard input: so the next contender can be loaded
while this one is measured.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader

import soma_lightning  # noqa: F401 (registers strategy="somaspeed")
from bench.sharded_contenders import BASELINES, CONTENDERS, MAX_NORM, Contender, Training
from bench.sharded_models import MODELS, Problem, batches, build
from bench.sharded_trace import busy_times
from bench.sharded_traffic import Traffic, count_ddp, counted, gather_bandwidth, norm_sum_alone_us
from bench.timing import synchronize
from bench.trace import read_trace
from bench.trainer import bare_trainer


@dataclass(frozen=True)
class Steps:
    """How many steps of each kind, in this order.

    checked: the first ones, whose losses and norms are compared; not timed. timed. counted: whose traffic is counted.
    profiled.
    """

    checked: int
    timed: int
    counted: int
    profiled: int

    @property
    def timed_from(self) -> int:
        return self.checked

    @property
    def counted_from(self) -> int:
        return self.checked + self.timed

    @property
    def profiled_from(self) -> int:
        return self.checked + self.timed + self.counted

    @property
    def total(self) -> int:
        return self.profiled_from + self.profiled


@dataclass(frozen=True)
class Job:
    """What a worker is asked to do. device: "cuda" or "cpu". world: number of ranks."""

    model: str
    size: str
    contender: str
    device: str
    world: int
    steps: Steps

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Job:
        return cls(**{**values, "steps": Steps(**values["steps"])})

    def find_contender(self) -> Contender:
        return {**CONTENDERS, **BASELINES}[self.contender]


class Recorder(pl.Callback):
    """Times, counts and profiles the steps of each kind; ends the training after the last one."""

    def __init__(self, steps: Steps, device: torch.device, trace: Path) -> None:
        self._steps, self._device, self._trace = steps, device, trace
        self._instants: list[Any] = []
        self._stack = ExitStack()
        self._profile = profile(activities=[ProfilerActivity.CUDA]) if device.type == "cuda" else None
        self.traffic = Traffic()
        self.memory: dict[str, int] = {}
        self.afterwards: dict[str, Any] = {}

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, index: int) -> None:
        assert isinstance(module, Training)
        steps = self._steps
        if index == 0 and self._device.type == "cuda":
            torch.cuda.empty_cache()  # what building and dividing the network left behind is not the training's
        if index == steps.timed_from:
            module.keeps_norms = False
            self._begin_memory()
        if steps.timed_from <= index <= steps.counted_from:
            self._instants.append(self._now())
        if index == steps.counted_from:
            self._end_memory()
            self._stack.enter_context(counted(self.traffic, module))
        if index == steps.profiled_from:
            self._stack.close()
            if self._profile is not None:
                synchronize(self._device)
                self._profile.start()

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, index: int
    ) -> None:
        assert isinstance(module, Training)
        module.after_step(trainer.optimizers[0])
        if self._steps.counted_from <= index < self._steps.profiled_from:
            self.traffic.steps += 1
            if isinstance(trainer.strategy, pl.strategies.DDPStrategy):
                count_ddp(self.traffic, module.trained())

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        """What needs the device and the other ranks, before the strategy leaves them."""
        assert isinstance(module, Training)
        if self._profile is not None:
            synchronize(self._device)
            self._profile.stop()
            self._profile.export_chrome_trace(str(self._trace))
        self.afterwards = {
            "losses": torch.stack(module.losses).float().tolist(),
            "norms": [float(_whole(norm)) for norm in module.norms],
            "moment_squares": moment_squares(trainer.optimizers[0]),
            "norm_alone_us": norm_sum_alone_us(self._device),
            "gather_bytes_per_second": gather_bandwidth(self._device),
        }

    def busy(self) -> dict[str, Any] | None:
        """Device time of the profiled steps; None without a GPU."""
        busy = None if self._profile is None else busy_times(read_trace(self._trace), self._steps.profiled)
        return None if busy is None else asdict(busy)

    def step_ms(self) -> list[float]:
        """From the start of one timed step to the start of the next."""
        pairs = zip(self._instants, self._instants[1:], strict=False)
        if self._device.type == "cuda":
            return [first.elapsed_time(second) for first, second in pairs]
        return [(second - first) * 1e3 for first, second in pairs]

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _begin_memory(self) -> None:
        if self._device.type == "cuda":
            synchronize(self._device)
            self.memory["resident"] = torch.cuda.memory_allocated(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)

    def _end_memory(self) -> None:
        if self._device.type == "cuda":
            synchronize(self._device)
            self.memory["peak"] = torch.cuda.max_memory_allocated(self._device)
            self.memory["reserved"] = torch.cuda.max_memory_reserved(self._device)


def run(job: Job, problem: Problem, rank: int) -> dict[str, Any]:
    """Trains `job.steps` steps; what this rank saw, JSON-ready."""
    device = torch.device(job.device, rank) if job.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    contender = job.find_contender()
    module = contender.module(problem, build(problem, device), batches(problem, rank, device))
    counts = {
        "trained": sum(p.numel() for p in module.trained()),
        "frozen_bytes": sum(p.numel() * p.itemsize for p in module.parameters() if not p.requires_grad),
    }
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(job.steps, device, Path(folder) / "trace.json")
        trainer = bare_trainer(
            device,
            folder,
            job.steps.total,
            strategy=contender.strategy(problem),
            devices=job.world,
            precision="bf16-mixed",
            gradient_clip_val=MAX_NORM,
            max_epochs=1,
            callbacks=[recorder],
            use_distributed_sampler=False,
        )
        trainer.fit(module, DataLoader(range(job.steps.total), batch_size=1))  # type: ignore[arg-type]
        busy = recorder.busy()
    return {
        **counts,
        "optimizer": type(trainer.optimizers[0]).__name__,
        "step_ms": recorder.step_ms(),
        "memory": recorder.memory,
        "traffic": recorder.traffic.to_dict(),
        "busy": busy,
        **recorder.afterwards,
    }


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def moment_squares(optimizer: torch.optim.Optimizer) -> float:
    """Sum of squares of AdamW's first moments that this rank holds: it moves with every clipped gradient."""
    total = 0.0
    for group in optimizer.param_groups:
        for p in group["params"]:
            moment = optimizer.state[p].get("exp_avg") if p in optimizer.state else None
            if moment is not None:
                local = moment.to_local() if isinstance(moment, DTensor) else moment
                total += float(local.double().square().sum())
    return total


def main() -> None:
    """Runs the job of the command line and writes its result."""
    job = Job.from_dict(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    torch.set_num_threads(1)
    problem = MODELS[job.size][job.model]()
    if sys.stdin.readline().strip() != "go":
        return  # the parent gave up
    result = run(job, problem, int(os.environ.get("RANK", "0")))
    Path(sys.argv[2]).write_text(json.dumps(result), encoding="utf-8")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
