"""What does a training step of full-size pi0.5 cost, ours against lerobot's, expert only, on one GPU?

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
LOSS_BOUND, NORM_BOUND = 0.02, 0.10


@dataclass(frozen=True)
class Contender:
    """kind, settings: of a `Job`. what: a sentence for the page."""

    kind: str
    settings: dict[str, Any]
    what: str


CONTENDERS = {
    "lerobot": Contender("lerobot", {}, "lerobot 0.6.1, eager, bf16 with its fp32 islands, torch's fused AdamW"),
    "lerobot compiled": Contender("lerobot", {"compile_mode": "default"}, "the same with `compile_model`"),
    "ours, lerobot islands": Contender("ours", {}, "the same dtypes: vision tower and norms in fp32"),
    "ours": Contender("ours", {"islands": "openpi"}, "openpi's dtypes: the vision tower's layers in bf16, too"),
    "ours, compiled": Contender(
        "ours", {"islands": "openpi", "bucket": 32}, "the layers compiled, prompts padded to 64 of the 200 tokens"
    ),
    "ours, cached": Contender("ours", {"islands": "openpi", "cached": True}, "frozen features on the device"),
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
    return [*rows, Row(job.rows[len(rows)], note=problem[:200])] if problem and len(rows) < len(job.rows) else rows


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
    return wrong


def table(results: dict[str, list[Row]]) -> str:
    """A row for each contender and batch size, with the speed over the first contender of that size."""
    base = {row.rows: median(row.step) for row in next(iter(results.values())) if row.step}
    lines = []
    for name, rows in results.items():
        for row in rows:
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


def page(facts: dict[str, str], results: dict[str, list[Row]]) -> str:
    """The Markdown page."""
    who = "\n".join(f"- **{name}**: {CONTENDERS[name].what}." for name in results)
    return f"""# A training step of full-size pi0.5

Generated by `kernels/bench/pi05_step.py`; every sample is in `pi05_step.json` beside it.

{measured_on(facts)}

Expert only, random weights, two cameras of 256 pixels and a prompt of 60 tokens (200 padded), 50 actions; the batch
lies on the device, tokenizing is not timed. A step is forward, backward, clipping at norm 1 and AdamW; forward alone is
without gradients. Medians; peak memory of the timed steps.

{table(results)}

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
            job = Job(name, contender.kind, folder, chosen.rows, chosen.size, chosen.device, contender.settings)
            packages = chosen.lerobot if contender.kind == "lerobot" else None
            results[name] = run(job, packages, Path(folder), chosen.seconds)
            print(table({name: results[name]}).splitlines()[-len(results[name])], file=sys.stderr, flush=True)
    if wrong := disagreements(results):
        print("\n".join(wrong))
        return 1
    write_json(
        chosen.out / "pi05_step.json",
        {"environment": facts, **{name: [asdict(row) for row in rows] for name, rows in results.items()}},
    )
    write_text(chosen.out / "pi05_step.md", page(facts, results))
    print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
