"""Command line of the kernel benchmarks. From the root of the repository:

    PYTHONPATH=.:kernels python kernels/bench/run.py optim --out docs/benchmarks

writes `optimizer.json` and `optimizer.md` into the folder, anew after each row, and prints a short table last;
`attention` in its place does the same for attention. Exit status 1, and no times, when a result is wrong; 2 for a wrong
argument. Without a GPU: `--sets tiny_dense,tiny_many,tiny_shards` and `--cases tiny_two,tiny_own,tiny_context`.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench import attention, attention_page, optim, optim_page
from bench.attention_cases import ATTENTION_CASES, ATTENTION_SWEEP, LAYOUTS, TINY_ATTENTION_CASES, Layout
from bench.attention_peers import ATTENTION_PEERS, OURS_ATTENTION, AttentionPeer
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
    is_attention = isinstance(settings, attention.AttentionSettings)
    pages: Any = attention_page if is_attention else optim_page
    facts = environment(settings.device, commit=commit, command=f"{LAUNCH} {shlex.join(arguments)}")
    begin, table = time.perf_counter(), ""

    def say(line: str) -> None:
        print(f"[{time.perf_counter() - begin:6.1f} s] {line}", file=sys.stderr, flush=True)

    def keep(bandwidth: float, rows: Sequence[Any]) -> None:
        """Writes what there is, so that a run that is ended early has it."""
        nonlocal table
        result = {
            "what": "attention over a shared context" if is_attention else "clipped AdamW step",
            "environment": facts,
            "implementation": attention_path(settings.device) if is_attention else settings.implementation,  # type: ignore[union-attr]
            "copy_bytes_per_second": bandwidth,
            "seconds": round(time.perf_counter() - begin, 1),
            "rows": [row.to_dict() for row in rows],
        }
        write_json(chosen.out / f"{chosen.name}.json", result)
        write_text(chosen.out / f"{chosen.name}.md", pages.page(facts, bandwidth, rows))
        table = pages.short_table(bandwidth, rows)

    try:
        if isinstance(settings, attention.AttentionSettings):
            attention.run(settings, say=say, keep=keep)
        else:
            optim.run(settings, say=say, keep=keep, build_ours=build_ours)
    except WrongResultError as error:
        print(f"wrong result, no times: {error}", file=sys.stderr)
        return 1
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
    cases = ", ".join({**ATTENTION_CASES, **ATTENTION_SWEEP, **TINY_ATTENTION_CASES})
    attend.add_argument("--cases", default="all", help=f"all, sweep, or a list of: {cases}")
    peers = ", ".join(peer.name for peer in ATTENTION_PEERS)
    attend.add_argument("--peers", default="all", help=f"all, or a list of: {peers}; ours is always there")
    attend.add_argument("--layouts", default="all", help=f"all, or a list of: {', '.join(LAYOUTS)}")
    attend.add_argument("--quick", action="store_true", help="fewer repeats")
    for command, name in ((optimizer, "optimizer"), (attend, "attention")):
        command.add_argument("--name", default=name, help="of the two files, for runs that share a folder")
        command.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
        command.add_argument("--commit", help="what the result says; default: asked from git")
    return parser


def _attention_settings(chosen: argparse.Namespace) -> attention.AttentionSettings:
    device = available_device(chosen.device)
    known = {**ATTENTION_CASES, **ATTENTION_SWEEP, **TINY_ATTENTION_CASES}
    sweeps = chosen.cases == "sweep"
    cases = select("case", "all" if sweeps else chosen.cases, known, ATTENTION_SWEEP if sweeps else ATTENTION_CASES)
    large = [case.name for case in cases if case.name not in TINY_ATTENTION_CASES]
    if device.type == "cpu" and large:
        tiny = ",".join(TINY_ATTENTION_CASES)
        raise ValueError(f"{', '.join(large)} on a CPU would say nothing; use --cases {tiny}")
    layouts: dict[str, Layout] = {layout: layout for layout in LAYOUTS}
    return attention.AttentionSettings(
        cases=cases,
        layouts=select("layout", chosen.layouts, layouts, layouts),
        peers=_peers(chosen.peers),
        device=device,
        budget=QUICK if chosen.quick else Budget(),
    )


def _peers(names: str) -> list[AttentionPeer]:
    peers = {peer.name: peer for peer in ATTENTION_PEERS}
    chosen = select("peer", names, peers, peers)
    return [OURS_ATTENTION, *(peer for peer in chosen if peer != OURS_ATTENTION)]


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
