"""Command line of the kernel benchmarks. From the root of the repository:

    PYTHONPATH=.:kernels python kernels/bench/run.py optim --out docs/benchmarks

writes `optimizer.json` and `optimizer.md` into the folder and prints a short table last; `attention` in its place does
the same for attention. Exit status 1, and no times, when a result is wrong; 2 for a wrong argument. Without a GPU:
`--sets tiny_dense,tiny_many,tiny_shards` and `--cases tiny_two,tiny_own,tiny_context`.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from bench import attention, attention_page, optim, optim_page
from bench.attention_cases import ATTENTION_CASES, LAYOUTS, TINY_ATTENTION_CASES, Layout
from bench.gate import BuildOurs, WrongResultError
from bench.peers import Implementation
from bench.registry import CASES, SETS, TINY_SETS, select
from bench.report import available_device, current_commit, environment, make_folder, write_json, write_text
from bench.timing import QUICK, Budget
from soma_lightning.attention import attention_path

LAUNCH = "PYTHONPATH=.:kernels python kernels/bench/run.py"


def main(arguments: Sequence[str] | None = None, *, build_ours: BuildOurs | None = None) -> int:
    """Runs the command line; returns the exit status. build_ours: see `optim.run`."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parser = _parser()
    chosen = parser.parse_args(arguments)
    try:
        settings = _attention_settings(chosen) if chosen.what == "attention" else _settings(chosen)
        commit = chosen.commit or current_commit()
        make_folder(chosen.out)
    except ValueError as error:
        parser.error(str(error))
    facts = environment(settings.device, commit=commit, command=f"{LAUNCH} {shlex.join(arguments)}")
    begin = time.perf_counter()

    def say(line: str) -> None:
        print(f"[{time.perf_counter() - begin:6.1f} s] {line}", file=sys.stderr, flush=True)

    try:
        if isinstance(settings, attention.AttentionSettings):
            bandwidth, attention_rows = attention.run(settings, say=say)
            name, what, implementation = chosen.name, "attention over a shared context", attention_path(settings.device)
            content = [row.to_dict() for row in attention_rows]
            page = attention_page.page(facts, bandwidth, attention_rows)
            table = attention_page.short_table(bandwidth, attention_rows)
        else:
            bandwidth, rows = optim.run(settings, say=say, build_ours=build_ours)
            name, what, implementation = "optimizer", "clipped AdamW step", settings.implementation
            content = [row.to_dict() for row in rows]
            page, table = optim_page.page(facts, bandwidth, rows), optim_page.short_table(bandwidth, rows)
    except WrongResultError as error:
        print(f"wrong result, no times: {error}", file=sys.stderr)
        return 1
    result = {
        "what": what,
        "environment": facts,
        "implementation": implementation,
        "copy_bytes_per_second": bandwidth,
        "seconds": round(time.perf_counter() - begin, 1),
        "rows": content,
    }
    write_json(chosen.out / f"{name}.json", result)
    write_text(chosen.out / f"{name}.md", page)
    print(table)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="run.py", description="Benchmarks of the kernels beside their peers.")
    commands = parser.add_subparsers(required=True, dest="what", metavar="optim|attention")
    optimizer = commands.add_parser("optim", help="the clipped AdamW step")
    optimizer.add_argument("--out", type=Path, required=True, help="folder for optimizer.json and optimizer.md")
    optimizer.add_argument("--sets", default="all", help=f"all, or a list of: {', '.join({**SETS, **TINY_SETS})}")
    optimizer.add_argument("--cases", default="all", help=f"all, or a list of: {', '.join(CASES)}")
    optimizer.add_argument("--quick", action="store_true", help="fewer repeats, no peers that loop over tensors")
    optimizer.add_argument("--implementation", choices=("triton", "reference"), help="default: triton on a GPU")
    attend = commands.add_parser("attention", help="attention over a shared context")
    attend.add_argument("--out", type=Path, required=True, help="folder for attention.json and attention.md")
    cases = ", ".join({**ATTENTION_CASES, **TINY_ATTENTION_CASES})
    attend.add_argument("--cases", default="all", help=f"all, or a list of: {cases}")
    attend.add_argument("--layouts", default="all", help=f"all, or a list of: {', '.join(LAYOUTS)}")
    attend.add_argument("--quick", action="store_true", help="fewer repeats")
    attend.add_argument("--name", default="attention", help="of the two files, for runs that share a folder")
    for command in (optimizer, attend):
        command.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
        command.add_argument("--commit", help="what the result says; default: asked from git")
    return parser


def _attention_settings(chosen: argparse.Namespace) -> attention.AttentionSettings:
    device = available_device(chosen.device)
    cases = select("case", chosen.cases, {**ATTENTION_CASES, **TINY_ATTENTION_CASES}, ATTENTION_CASES)
    large = [case.name for case in cases if case.name in ATTENTION_CASES]
    if device.type == "cpu" and large:
        tiny = ",".join(TINY_ATTENTION_CASES)
        raise ValueError(f"{', '.join(large)} on a CPU would say nothing; use --cases {tiny}")
    layouts: dict[str, Layout] = {layout: layout for layout in LAYOUTS}
    return attention.AttentionSettings(
        cases=cases,
        layouts=select("layout", chosen.layouts, layouts, layouts),
        device=device,
        budget=QUICK if chosen.quick else Budget(),
    )


def _settings(chosen: argparse.Namespace) -> optim.Settings:
    device = available_device(chosen.device)
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
