"""Command line of the kernel benchmarks. From the root of the repository:

    PYTHONPATH=.:kernels python kernels/bench/run.py optim --out docs/benchmarks

writes `optimizer.json` and `optimizer.md` into the folder and prints a short table last. Exit status 1, and no times,
when a result is wrong; 2 for a wrong argument. `--sets tiny_dense,tiny_many,tiny_shards` runs without a GPU.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from bench import optim, optim_page
from bench.gate import BuildOurs, WrongResultError
from bench.peers import Implementation
from bench.registry import CASES, SETS, TINY_SETS, select
from bench.report import current_commit, environment, write_json, write_text
from bench.timing import QUICK, Budget

LAUNCH = "PYTHONPATH=.:kernels python kernels/bench/run.py"


def main(arguments: Sequence[str] | None = None, *, build_ours: BuildOurs | None = None) -> int:
    """Runs the command line; returns the exit status. build_ours: see `optim.run`."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parser = _parser()
    chosen = parser.parse_args(arguments)
    try:
        settings = _settings(chosen)
        commit = chosen.commit or current_commit()
    except ValueError as error:
        parser.error(str(error))
    facts = environment(settings.device, commit=commit, command=f"{LAUNCH} {shlex.join(arguments)}")
    begin = time.perf_counter()

    def say(line: str) -> None:
        print(f"[{time.perf_counter() - begin:6.1f} s] {line}", file=sys.stderr, flush=True)

    try:
        bandwidth, rows = optim.run(settings, say=say, build_ours=build_ours)
    except WrongResultError as error:
        print(f"wrong result, no times: {error}", file=sys.stderr)
        return 1
    content = {
        "what": "clipped AdamW step",
        "environment": facts,
        "implementation": settings.implementation,
        "copy_bytes_per_second": bandwidth,
        "seconds": round(time.perf_counter() - begin, 1),
        "rows": [row.to_dict() for row in rows],
    }
    write_json(chosen.out / "optimizer.json", content)
    write_text(chosen.out / "optimizer.md", optim_page.page(facts, bandwidth, rows))
    print(optim_page.short_table(bandwidth, rows))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="run.py", description="Benchmarks of the kernels beside their peers.")
    commands = parser.add_subparsers(required=True, metavar="optim")
    optimizer = commands.add_parser("optim", help="the clipped AdamW step")
    optimizer.add_argument("--out", type=Path, required=True, help="folder for optimizer.json and optimizer.md")
    optimizer.add_argument("--sets", default="all", help=f"all, or a list of: {', '.join({**SETS, **TINY_SETS})}")
    optimizer.add_argument("--cases", default="all", help=f"all, or a list of: {', '.join(CASES)}")
    optimizer.add_argument("--quick", action="store_true", help="fewer repeats, no peers that loop over tensors")
    optimizer.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    optimizer.add_argument("--implementation", choices=("triton", "reference"), help="default: triton on a GPU")
    optimizer.add_argument("--commit", help="what the result says; default: asked from git")
    return parser


def _settings(chosen: argparse.Namespace) -> optim.Settings:
    device = torch.device(chosen.device)
    sets = select("set", chosen.sets, {**SETS, **TINY_SETS}, SETS)
    large = [s.name for s in sets if s.name in SETS]
    if device.type == "cpu" and large:
        raise ValueError(f"{', '.join(large)} on a CPU would say nothing; use --sets {','.join(TINY_SETS)}")
    implementation: Implementation = chosen.implementation or ("triton" if device.type == "cuda" else "reference")
    return optim.Settings(
        sets=sets,
        cases=select("case", chosen.cases, CASES, CASES),
        device=device,
        implementation=implementation,
        budget=QUICK if chosen.quick else Budget(),
        loops=not chosen.quick,
    )


if __name__ == "__main__":
    sys.exit(main())
