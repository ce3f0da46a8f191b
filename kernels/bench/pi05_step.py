"""What do a training step and action sampling of full-size pi0.5 cost on one GPU, ours and lerobot's, expert only?

    PYTHONPATH=.:kernels python kernels/bench/pi05_step.py --lerobot SITE --out docs/benchmarks

writes `pi05_step.json` and `pi05_step.md`. SITE is a folder of Python packages with lerobot and the transformers that
it needs: lerobot runs in processes of its own that see these first. All contenders load the same random weights (9 GB
in --scratch) and take the same batches; losses and gradient norms of the first step must agree before any time is
shown. Exit status 1 if they do not. Without SITE ours is measured alone; `--size tiny --device cpu` then takes seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from bench.pi05_step_worker import Job, Row
from bench.report import (
    ROOT,
    available_device,
    current_commit,
    environment,
    make_folder,
    markdown_table,
    measured_on,
    write_json,
    write_text,
)

LAUNCH = "PYTHONPATH=.:kernels python kernels/bench/pi05_step.py"
#: Relative differences to the first contender: both compute in bf16, in another order.
LOSS_BOUND, NORM_BOUND, ACTION_BOUND = 0.02, 0.10, 0.10


@dataclass(frozen=True)
class Contender:
    """kind, settings: of a `Job`. what: a sentence for the page."""

    kind: str
    settings: dict[str, Any]
    what: str


CONTENDERS = {
    "lerobot": Contender("lerobot", {}, "lerobot 0.6.1, eager, bf16 with its fp32 islands, torch's fused AdamW"),
    "lerobot compiled": Contender("lerobot", {"compile_mode": "default"}, "the same with `compile_model`"),
    "lerobot's islands": Contender(
        "ours", {"islands": "lerobot", "graphs": True}, "ours with the vision tower in fp32"
    ),
    "stock layers": Contender("ours", {"fused": False}, "ours, eager, frozen layers as stock modules in bf16"),
    "stock layers compiled": Contender("ours", {"fused": False, "bucket": 32}, "the same, every layer compiled"),
    "ours eager": Contender("ours", {}, "frozen layers by our kernels in bf16"),
    "ours": Contender("ours", {"graphs": True}, "the same, the expert's passes as CUDA graphs"),
    "ours fp8": Contender("ours", {"graphs": True, "fp8": True}, "the same, the frozen backbone in fp8"),
    "ours cached": Contender("ours", {"graphs": True, "cached": "device"}, "frozen features cached on the device"),
    "ours pinned": Contender("ours", {"graphs": True, "cached": "pinned"}, "frozen features in pinned host memory"),
    "ours on disk": Contender("ours", {"graphs": True, "cached": "disk"}, "in a folder, read from the page cache"),
}


def run(job: Job, packages: str | None, folder: Path, seconds: float) -> list[Row]:
    """The rows of one contender; one row with a note when its process failed."""
    asked, found = folder / f"{job.name}.job.json", folder / f"{job.name}.json"
    asked.write_text(json.dumps(asdict(job)))
    paths = [packages] if packages else []
    python_path = os.pathsep.join([*paths, str(ROOT), str(ROOT / "kernels")])
    command = [sys.executable, "-m", "bench.pi05_step_worker", str(asked), str(found)]
    more = {"PYTHONPATH": python_path, "HF_HUB_OFFLINE": "1"}
    try:
        ended = subprocess.run(
            command, cwd=ROOT, env={**os.environ, **more}, capture_output=True, text=True, timeout=seconds
        )
        problem = "" if ended.returncode == 0 else (ended.stderr.strip().splitlines() or ["no reason given"])[-1]
    except subprocess.TimeoutExpired:
        problem = f"not done after {seconds:.0f} s"
    rows = [Row(**row) for row in json.loads(found.read_text())] if found.exists() else []
    wanted = job.all_rows
    return [*rows, Row(wanted[len(rows)], note=problem[:200])] if problem and len(rows) < len(wanted) else rows


def disagreements(results: dict[str, list[Row]]) -> list[str]:
    """Whose first loss or gradient norm is not that of the first contender with the same rows."""
    wrong = []
    truth: dict[int, tuple[str, Row]] = {}
    for name, rows in results.items():
        for row in rows:
            if row.loss is None or row.grad_norm is None:
                continue
            first, wanted = truth.setdefault(row.rows, (name, row))
            assert wanted.loss is not None
            assert wanted.grad_norm is not None
            for what, got, expected, bound in (
                ("loss", row.loss, wanted.loss, LOSS_BOUND),
                ("gradient norm", row.grad_norm, wanted.grad_norm, NORM_BOUND),
            ):
                if not abs(got - expected) <= bound * abs(expected):
                    wrong.append(f"{name}, {row.rows} rows: {what} {got:.5g}, {first} has {expected:.5g}")
    for name, rows in results.items():
        wrong += [
            f"{name}, {row.rows} rows: actions are {row.action_error:.3g} off, relative"
            for row in rows
            if row.action_error is not None and not row.action_error <= ACTION_BOUND
        ]
    return wrong


def step_table(results: dict[str, list[Row]]) -> str:
    """Training steps: a row for each contender and batch size, with the speed over the first contender of that size."""
    base = {row.rows: median(row.step) for row in next(iter(results.values())) if row.step}
    lines = []
    for name, rows in results.items():
        for row in rows:
            if not row.step and row.note is None:
                continue
            if not row.step:
                lines.append([name, str(row.rows), *["-"] * 5, row.note or ""])
                continue
            step = median(row.step)
            over = f"{base[row.rows] / step:.2f}" if row.rows in base else "-"
            peak = "-" if row.peak is None else f"{row.peak / 2**30:.1f}"
            forward = f"{median(row.forward):.1f}"
            lines.append([name, str(row.rows), f"{step:.1f}", forward, f"{1e3 * row.rows / step:.1f}", over, peak, ""])
    headers = ["contender", "rows", "step ms", "forward ms", "samples/s", "over the first", "peak GiB", "note"]
    return markdown_table(headers, lines)


def sample_table(results: dict[str, list[Row]]) -> str:
    """Action sampling: times, and how far the actions are from the first contender's."""
    base = {row.rows: median(row.sample) for row in next(iter(results.values())) if row.sample}
    lines = []
    for name, rows in results.items():
        for row in rows:
            if row.sample:
                took = median(row.sample)
                over = f"{base[row.rows] / took:.2f}" if row.rows in base else "-"
                error = "-" if row.action_error is None else f"{row.action_error:.2g}"
                lines.append([name, str(row.rows), f"{took:.1f}", over, error])
    return markdown_table(["contender", "rows", "sampling ms", "over the first", "difference of actions"], lines)


def backbone_table(results: dict[str, list[Row]]) -> str:
    """Memory of the frozen parameters."""
    found = {name: rows[0].backbone for name, rows in results.items() if rows and rows[0].backbone is not None}
    return markdown_table(["contender", "frozen GiB"], [[name, f"{size / 2**30:.2f}"] for name, size in found.items()])


def page(facts: dict[str, str], results: dict[str, list[Row]]) -> str:
    """The Markdown page."""
    who = "\n".join(f"- **{name}**: {CONTENDERS[name].what}." for name in results)
    return f"""# Training steps and action sampling of full-size pi0.5

Generated by `kernels/bench/pi05_step.py`; every sample is in `pi05_step.json` beside it.

{measured_on(facts)}

Expert only, random weights, two cameras of 256 pixels and a prompt of 60 tokens (200 padded), 50 actions; the batch
lies on the device, tokenizing is not timed. A step is forward, backward, clipping at norm 1 and AdamW; forward alone is
without gradients. Medians; peak memory of the timed steps.

{step_table(results)}

Sampling is the prefix and ten Euler steps. The difference is relative, by root-mean-square, of actions from the same
noise.

{sample_table(results)}

{backbone_table(results)}

{who}
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, checks, writes; 1 when contenders disagree."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--lerobot", help="folder of Python packages with lerobot")
    parser.add_argument("--contenders", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    parser.add_argument("--size", choices=["base", "tiny"], default="base")
    parser.add_argument("--rows", nargs="+", type=int, default=[32, 8, 64])
    parser.add_argument("--sample-rows", nargs="*", type=int, default=[1, 8, 32], help="batch sizes of action sampling")
    parser.add_argument("--seconds", type=float, default=200.0, help="that one contender may take")
    parser.add_argument("--scratch", type=Path, help="folder for the weights; a temporary one when left out")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--commit", help="of the code, where git cannot say")
    chosen = parser.parse_args(arguments)
    device = available_device(chosen.device)
    make_folder(chosen.out)
    command = f"{LAUNCH} {shlex.join(sys.argv[1:] if arguments is None else arguments)}"
    facts = environment(device, commit=chosen.commit or current_commit(), command=command)
    results: dict[str, list[Row]] = {}
    with tempfile.TemporaryDirectory(dir=chosen.scratch) as folder:
        for name in chosen.contenders:
            contender = CONTENDERS[name]
            if contender.kind == "lerobot" and chosen.lerobot is None:
                continue
            job = Job(
                name,
                contender.kind,
                folder,
                chosen.rows,
                [] if contender.settings.get("cached") else chosen.sample_rows,
                chosen.size,
                chosen.device,
                contender.settings,
            )
            packages = chosen.lerobot if contender.kind == "lerobot" else None
            results[name] = run(job, packages, Path(folder), chosen.seconds)
            print("\n".join(step_table({name: results[name]}).splitlines()[2:]), file=sys.stderr, flush=True)
    if wrong := disagreements(results):
        print("\n".join(wrong))
        return 1
    write_json(
        chosen.out / "pi05_step.json",
        {"environment": facts, **{name: [asdict(row) for row in rows] for name, rows in results.items()}},
    )
    write_text(chosen.out / "pi05_step.md", page(facts, results))
    print(step_table(results), sample_table(results), backbone_table(results), sep="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
