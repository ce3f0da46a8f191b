"""How long do saving and loading full-size pi0.5 take, and how much memory does the host need? Weights are random.

    PYTHONPATH=.:kernels python kernels/bench/pi05_checkpoint.py --folder SCRATCH --out docs/benchmarks

builds the network on the device, writes it into SCRATCH, reads it back onto the device, compares every bit, and writes
`pi05_checkpoint.json` and `pi05_checkpoint.md`. SCRATCH needs 9.3 GB for bfloat16 and 14 GB for float32, one file at a
time, which are removed. The file that is read was just written: where memory allows, it comes from the page cache, and
the times are those of this code, not of a disk. Exit status 1 when a bit differs.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from bench.report import (
    available_device,
    current_commit,
    environment,
    make_folder,
    markdown_table,
    measured_on,
    write_json,
    write_text,
)
from soma_lightning.models.pi05.checkpoint import load_weights, save_weights
from soma_lightning.models.pi05.config import PI05Config
from soma_lightning.models.pi05.model import PI05Model

LAUNCH = "PYTHONPATH=.:kernels python kernels/bench/pi05_checkpoint.py"
#: (dtype of the file, dtype that it is loaded in)
CASES = (("bfloat16", "bfloat16"), ("float32", "bfloat16"), ("float32", "float32"))


@dataclass(frozen=True)
class Step:
    """seconds: until the device is done. host_mb: resident memory of the process at its peak, beyond its start."""

    seconds: float
    host_mb: float


@dataclass(frozen=True)
class Case:
    """saved, loaded: dtypes of the matrices. largest_mb: the largest tensor of the file."""

    saved: str
    loaded: str
    file_gb: float
    largest_mb: float
    save: Step
    load: Step
    equal_bits: bool


class PeakMemory:
    """Samples this process's resident memory from a thread: the kernel's own peak cannot be set back everywhere."""

    def __enter__(self) -> PeakMemory:
        self.start = self.peak = _resident()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._over.wait(0.005):
            self.peak = max(self.peak, _resident())


def _resident() -> int:
    """Bytes of this process in memory, mapped files included (Linux)."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def measured(call: Callable[[], object], device: torch.device) -> Step:
    """One call, no warm-up: a checkpoint is loaded once."""
    _wait(device)
    with PeakMemory() as memory:
        start = time.perf_counter()
        call()
        _wait(device)
        seconds = time.perf_counter() - start
    return Step(seconds, (memory.peak - memory.start) / 1e6)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def build(config: PI05Config, device: torch.device, *, seed: int) -> PI05Model:
    """Random values in every parameter, drawn on the device."""
    with torch.device("meta"):
        model = PI05Model(config)
    model.to_empty(device=device)
    model.prefix.reset_buffers()
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(generator=generator)
    return model


def same_bits(saved: PI05Model, loaded: PI05Model) -> bool:
    """Whether every loaded parameter is the saved one, rounded once to its own dtype; buffers equal."""
    pairs = zip(saved.named_parameters(), loaded.named_parameters(), strict=True)
    weights = all(n == m and torch.equal(p.to(q.dtype), q) for (n, p), (m, q) in pairs)
    buffers = zip(saved.named_buffers(), loaded.named_buffers(), strict=True)
    return weights and all(n == m and torch.equal(p, q) for (n, p), (m, q) in buffers)


def measure(size: str, dtypes: tuple[str, str], scratch: Path, device: torch.device) -> Case:
    """Writes one file, reads it onto the device and compares."""
    make = {"base": PI05Config.base, "tiny": PI05Config.tiny}[size]
    saved = build(make(dtype=dtypes[0]), device, seed=0)
    largest = max(p.nbytes for p in saved.parameters())
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        file = Path(folder) / "model.safetensors"
        save = measured(lambda: save_weights(saved, file), device)
        with torch.device("meta"):
            loaded = PI05Model(make(dtype=dtypes[1]))
        load = measured(lambda: load_weights(loaded, file, device), device)
        return Case(*dtypes, file.stat().st_size / 1e9, largest / 1e6, save, load, same_bits(saved, loaded))


def page(facts: dict[str, str], size: str, cases: Sequence[Case]) -> str:
    """The Markdown page."""
    headers = ["file", "loaded as", "file GB", "save s", "GB/s", "host MB", "load s", "GB/s", "host MB", "largest MB"]
    rows = []
    for case in cases:
        timed = [
            text
            for step in (case.save, case.load)
            for text in (f"{step.seconds:.2f}", f"{case.file_gb / step.seconds:.2f}", f"{step.host_mb:.0f}")
        ]
        rows.append([case.saved, case.loaded, f"{case.file_gb:.3f}", *timed, f"{case.largest_mb:.0f}"])
    equal = "every bit came back" if all(case.equal_bits for case in cases) else "SOME BITS DIFFER"
    return f"""# Saving and loading pi0.5 ({size})

Generated by `kernels/bench/pi05_checkpoint.py`; exact figures in `pi05_checkpoint.json` beside it.

{measured_on(facts)}

{markdown_table(headers, rows, text_columns=2)}

- Random weights on the device, one file of lerobot's layout, both language heads included; {equal}.
- *file*, *loaded as*: dtype of the matrices; lerobot's fp32 islands are fp32 in both.
- *host MB*: growth of the process's resident memory at its peak, the mapped pages of the file included, and on the CPU
  the loaded network too; *largest MB*: the largest tensor. The file is read right after it was written, from the page
  cache where memory allows.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and writes; 1 when a bit differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="where the checkpoint is written; by default the temporary folder")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--size", choices=["base", "tiny"], default="base")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--commit", help="of the code, where git cannot say")
    chosen = parser.parse_args(arguments)
    device = available_device(chosen.device)
    make_folder(chosen.out)
    command = f"{LAUNCH} {shlex.join(sys.argv[1:] if arguments is None else arguments)}"
    facts = environment(device, commit=chosen.commit or current_commit(), command=command)
    cases = [measure(chosen.size, dtypes, chosen.folder, device) for dtypes in CASES]
    text = page(facts, chosen.size, cases)
    write_json(chosen.out / "pi05_checkpoint.json", {"environment": facts, "cases": [asdict(case) for case in cases]})
    write_text(chosen.out / "pi05_checkpoint.md", text)
    print("\n".join(line for line in text.splitlines() if line.startswith("|")))
    return 0 if all(case.equal_bits for case in cases) else 1


if __name__ == "__main__":
    sys.exit(main())
