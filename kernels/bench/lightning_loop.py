"""What share of a Lightning training step is clipping and AdamW, with `strategy="auto"` and with "somaspeed"?

    PYTHONPATH=.:kernels python kernels/bench/lightning_loop.py --out docs/benchmarks

Both runs train the same transformer (fp32 parameters, bf16-mixed precision) from the same seed on the same batches with
`gradient_clip_val=1.0` and a plain `configure_optimizers`; "auto" gets torch.optim.AdamW(fused=True). Their losses must
agree, otherwise the exit status is 1. A small batch keeps the optimizer visible. Step times come from runs in the order
auto, somaspeed, somaspeed, auto, all before the first profile: a process launches more slowly once it was profiled.
`trace.py` says how device time is attributed. Without a GPU the shares are of host time.
Writes `lightning_loop.json` and `lightning_loop.md`. `--size tiny` runs on a CPU in seconds.
"""

from __future__ import annotations

import argparse
import gc
import shlex
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, Dataset

import soma_lightning  # noqa: F401 (registers strategy="somaspeed")
from bench.registry import CASES
from bench.report import (
    available_device,
    current_commit,
    environment,
    make_folder,
    markdown_table,
    measured_on,
    significant,
    write_json,
    write_text,
)
from bench.timing import Budget, Timing, copy_bandwidth
from bench.trace import END, GRADIENTS, START, StepProfile, mark, read_trace, step_profile
from bench.trainer import bare_trainer

LAUNCH = "PYTHONPATH=.:kernels python kernels/bench/lightning_loop.py"
STRATEGIES = ("auto", "somaspeed")
#: Batches that are cycled through: few enough that the loss falls.
DISTINCT_BATCHES = 8
#: Kernels of each run that the page lists; the JSON file has all.
KERNELS_SHOWN = 4


@dataclass(frozen=True)
class Size:
    """The model and the run. width, layers, heads, vocabulary: of the transformer. batch x length: tokens of a step.

    steps: optimizer steps of each run; the first `warmup` are not timed. profiled: the last steps of a profiled run.
    """

    width: int = 1280
    layers: int = 20
    heads: int = 20
    vocabulary: int = 8192
    batch: int = 32
    length: int = 64
    steps: int = 60
    warmup: int = 10
    profiled: int = 11

    def __post_init__(self) -> None:
        if self.steps < self.warmup + self.profiled + 3:
            raise ValueError(
                f"steps={self.steps} is too few for {self.warmup} of warm-up and {self.profiled} profiled ones; "
                f"give at least {self.warmup + self.profiled + 3}"
            )


SIZES = {
    "full": Size(),
    "tiny": Size(width=32, layers=2, heads=4, vocabulary=64, batch=2, length=16, steps=12, warmup=2, profiled=4),
}


class Tokens(Dataset[Tensor]):
    """`size.steps` batches of random sequences [length + 1] int64, which repeat after DISTINCT_BATCHES batches."""

    def __init__(self, size: Size) -> None:
        generator = torch.Generator().manual_seed(0)
        shape = (DISTINCT_BATCHES * size.batch, size.length + 1)
        self._sequences = torch.randint(size.vocabulary, shape, generator=generator)
        self._count = size.steps * size.batch

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Tensor:
        return self._sequences[index % len(self._sequences)]


class LanguageModel(pl.LightningModule):
    """A causal transformer as anybody writes it. losses: one 0-d tensor a step, on the device."""

    def __init__(self, size: Size, *, torch_fused: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            size.width, size.heads, 4 * size.width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.body = nn.TransformerEncoder(layer, size.layers, nn.LayerNorm(size.width), enable_nested_tensor=False)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        mask = nn.Transformer.generate_square_subsequent_mask(size.length)
        self.register_buffer("mask", mask, persistent=False)
        self.torch_fused = torch_fused
        self.losses: list[Tensor] = []

    def training_step(self, tokens_BL: Tensor, batch_index: int) -> Tensor:
        hidden_BLD = self.body(self.embedding(tokens_BL[:, :-1]), mask=self.mask, is_causal=True)
        loss = F.cross_entropy(self.head(hidden_BLD).flatten(0, 1), tokens_BL[:, 1:].flatten())
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-4, fused=self.torch_fused)
        # Lightning refuses to clip for AdamW(fused=True), because a GradScaler would leave unscaling to its step. There
        # is no scaler in bf16, so the mark that Lightning looks for says nothing here.
        optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]
        return optimizer


class Recorder(pl.Callback):
    """Marks the parts of each step, and times the steps after the warm-up or profiles the last ones.

    trace: where the profile goes; None times.
    """

    def __init__(self, size: Size, device: torch.device, trace: Path | None) -> None:
        self._size, self._cuda, self._trace = size, device.type == "cuda", trace
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._cuda else [])]
        self._profile = None if trace is None else profile(activities=activities)
        self._instants: list[Any] = []

    def on_train_batch_start(self, trainer: pl.Trainer, module: pl.LightningModule, batch: Any, index: int) -> None:
        if self._profile is None and index >= self._size.warmup:
            self._instants.append(self._now())
        if self._profile is not None and index == self._size.steps - self._size.profiled:
            self._synchronize()
            self._profile.start()
        mark(START)

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, module: pl.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        mark(GRADIENTS)

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, batch: Any, index: int
    ) -> None:
        mark(END)

    def on_train_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._synchronize()
        if self._profile is not None:
            self._profile.stop()
            self._profile.export_chrome_trace(str(self._trace))

    def step_times(self) -> Timing:
        """Milliseconds from the start of one step to the start of the next, loader included."""
        pairs = zip(self._instants, self._instants[1:], strict=False)
        if self._cuda:
            return Timing(tuple(first.elapsed_time(second) for first, second in pairs))
        return Timing(tuple((second - first) * 1e3 for first, second in pairs))

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _synchronize(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()


@dataclass(frozen=True)
class Run:
    """One training run. optimizer: the class that took the steps. losses: of every step."""

    strategy: str
    optimizer: str
    parameters: int
    step_ms: Timing
    profile: StepProfile
    losses: list[float]

    def optimizer_ms(self, device: torch.device) -> float:
        """Clipping and update: device time, or host time without a GPU."""
        return self.profile.optimizer_ms if device.type == "cuda" else self.profile.host_optimizer_ms

    def whole_ms(self, device: torch.device) -> float:
        """The profiled step: device time, or host time without a GPU."""
        return self.profile.device_ms if device.type == "cuda" else self.profile.host_ms

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "strategy": self.strategy,
            "optimizer": self.optimizer,
            "parameters": self.parameters,
            "step_ms": significant(self.step_ms.median),
            "step_ms_quartiles": [*map(significant, self.step_ms.quartiles)],
            "step_ms_samples": [*map(significant, self.step_ms.samples)],
            "profile": asdict(self.profile),
            "losses": self.losses,
        }


@dataclass(frozen=True)
class Trained:
    """What one call of `train` measured: step times, or a profile."""

    optimizer: str
    parameters: int
    losses: list[float]
    step_ms: Timing | None
    profile: StepProfile | None


def train(strategy: str, size: Size, device: torch.device, *, profiled: bool) -> Trained:
    """Trains once. RuntimeError when the strategy did not take the optimizer that the run is meant to measure."""
    pl.seed_everything(0, verbose=False)
    model = LanguageModel(size, torch_fused=strategy == "auto")
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json" if profiled else None
        recorder = Recorder(size, device, trace)
        trainer = bare_trainer(
            device,
            folder,
            size.steps,
            strategy=strategy,
            precision="bf16-mixed",
            gradient_clip_val=1.0,
            max_epochs=1,
            callbacks=[recorder],
        )
        trainer.fit(model, DataLoader(Tokens(size), batch_size=size.batch, pin_memory=device.type == "cuda"))
        measured = None if trace is None else step_profile(read_trace(trace))
    optimizer = type(trainer.optimizers[0]).__name__
    expected = {"auto": "AdamW", "somaspeed": "FusedAdamW"}[strategy]
    if optimizer != expected:
        raise RuntimeError(f"strategy {strategy!r} stepped {optimizer}, expected {expected}")
    if device.type == "cuda" and measured is not None and measured.optimizer_ms == 0:
        raise RuntimeError("the profile holds no device time of the optimizer; is the GPU's profiler available?")
    losses = torch.stack(model.losses).tolist()
    parameters = sum(p.numel() for p in model.parameters())
    return Trained(optimizer, parameters, losses, None if profiled else recorder.step_times(), measured)


def _combined(strategy: str, timed: Sequence[Trained], profiled: Trained) -> Run:
    samples = tuple(sample for one in timed if one.step_ms is not None for sample in one.step_ms.samples)
    assert profiled.profile is not None
    return Run(strategy, profiled.optimizer, profiled.parameters, Timing(samples), profiled.profile, profiled.losses)


def loss_difference(runs: Sequence[Run]) -> float:
    """Largest relative difference of the two runs' losses at one step."""
    first, second = runs
    return max(abs(a - b) / abs(a) for a, b in zip(first.losses, second.losses, strict=True))


def page(facts: Mapping[str, str], size: Size, runs: Sequence[Run], floor_ms: float, device: torch.device) -> str:
    """The Markdown page of one measurement."""
    auto, soma = runs
    setting = (
        f"{auto.parameters:,} fp32 parameters, bf16-mixed, {size.batch} x {size.length} tokens a step, clipped at 1.0; "
        f"{len(auto.step_ms.samples)} steps timed, {auto.profile.steps} profiled. Bytes that clipping and update "
        f"cannot avoid take {floor_ms:.2f} ms at the copy bandwidth of the same run."
    )
    result = (
        f"Speed-up: {auto.optimizer_ms(device) / soma.optimizer_ms(device):.2f} for clipping and update, "
        f"{auto.step_ms.median / soma.step_ms.median:.2f} for the whole step. Largest relative difference of the "
        f"losses at one step: {loss_difference(runs):.1e}."
    )
    parts = [
        "# Clipping and AdamW inside a Lightning training step",
        "Generated by `kernels/bench/lightning_loop.py`; every sample is in `lightning_loop.json` beside it.",
        measured_on(facts),
        setting,
        _shares(runs, device),
        result,
    ]
    if device.type == "cuda":
        parts += ["Device time of clipping and update by kernel, the largest:", _kernels(runs)]
    return "\n\n".join(parts) + "\n"


def _shares(runs: Sequence[Run], device: torch.device) -> str:
    on = "device" if device.type == "cuda" else "host"
    headers = ["run", "step ms [quartiles]", f"{on} ms", f"clip + AdamW {on} ms", "share", "launches", "loss"]
    cells = []
    for run in runs:
        first, third = run.step_ms.quartiles
        cells.append(
            [
                f'`strategy="{run.strategy}"`, {run.optimizer}',
                f"{run.step_ms.median:.2f} [{first:.2f}, {third:.2f}]",
                f"{run.whole_ms(device):.2f}",
                f"{run.optimizer_ms(device):.2f}",
                f"{100 * run.optimizer_ms(device) / run.whole_ms(device):.1f} %",
                f"{run.profile.optimizer_launches:.0f}",
                f"{run.losses[0]:.4f} to {run.losses[-1]:.4f}",
            ]
        )
    return markdown_table(headers, cells)


def _kernels(runs: Sequence[Run]) -> str:
    cells = []
    for run in runs:
        for name, ms in list(run.profile.kernels.items())[:KERNELS_SHOWN]:
            cells.append([run.strategy, "`" + name[:70].replace("|", " ") + "`", f"{ms:.3f}"])
    return markdown_table(["run", "kernel", "ms a step"], cells, text_columns=2)


def measure(size: Size, device: torch.device) -> tuple[list[Run], float]:
    """Both runs, and bytes per second of a device copy."""
    bandwidth = copy_bandwidth(device, Budget())
    timed: dict[str, list[Trained]] = {strategy: [] for strategy in STRATEGIES}
    for strategy in (*STRATEGIES, *reversed(STRATEGIES)):
        timed[strategy].append(_train_and_free(strategy, size, device, profiled=False))
    runs = [
        _combined(strategy, timed[strategy], _train_and_free(strategy, size, device, profiled=True))
        for strategy in STRATEGIES
    ]
    return runs, bandwidth


def _train_and_free(strategy: str, size: Size, device: torch.device, *, profiled: bool) -> Trained:
    trained = train(strategy, size, device, profiled=profiled)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return trained


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parser = _parser()
    chosen = parser.parse_args(arguments)
    given = {key: getattr(chosen, key) for key in ("batch", "length", "steps") if getattr(chosen, key) is not None}
    try:
        device = available_device(chosen.device)
        size = replace(SIZES[chosen.size], **given)
        commit = chosen.commit or current_commit()
        make_folder(chosen.out)
    except ValueError as error:
        parser.error(str(error))
    facts = environment(device, commit=commit, command=f"{LAUNCH} {shlex.join(arguments)}")
    runs, bandwidth = measure(size, device)
    difference = loss_difference(runs)
    if not difference <= chosen.tolerance:
        print(f"the losses differ by {difference:.2e}, more than {chosen.tolerance}; nothing written", file=sys.stderr)
        return 1
    floor_ms = runs[0].parameters * CASES["fp32"].floor_bytes_per_element() / bandwidth * 1e3
    content = {
        "what": "clipping and AdamW inside a Lightning training step",
        "environment": facts,
        "size": asdict(size),
        "copy_bytes_per_second": bandwidth,
        "optimizer_floor_ms": significant(floor_ms),
        "largest_relative_loss_difference": difference,
        "runs": [run.to_dict() for run in runs],
    }
    text = page(facts, size, runs, floor_ms, device)
    write_json(chosen.out / "lightning_loop.json", content)
    write_text(chosen.out / "lightning_loop.md", text)
    print(text)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lightning_loop.py", description="The optimizer's share of a training step.")
    parser.add_argument("--out", type=Path, required=True, help="folder for lightning_loop.json and lightning_loop.md")
    parser.add_argument("--size", choices=tuple(SIZES), default="full")
    parser.add_argument("--batch", type=int, help="sequences of one step")
    parser.add_argument("--length", type=int, help="tokens of one sequence")
    parser.add_argument("--steps", type=int, help="optimizer steps of each run")
    parser.add_argument("--tolerance", type=float, default=1e-2, help="largest relative difference of the losses")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--commit", help="what the result says; default: asked from git")
    return parser


if __name__ == "__main__":
    sys.exit(main())
