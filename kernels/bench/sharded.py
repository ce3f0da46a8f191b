"""What do the layouts of "somaspeed" cost and save on two GPUs, beside DDP, FSDP and FSDP2 by hand?

    PYTHONPATH=.:kernels python kernels/bench/sharded.py --out docs/benchmarks

trains the same networks with each contender, two processes at a time, and writes `sharded.json` and `sharded.md`.
Losses, gradient norms and moments must agree before any time of a model is shown; exit status 1 if they do not. A
contender that fails or runs out of memory is a row that says why. `--size tiny` runs in seconds, with `--device cpu`
over gloo. Multicast over NVLink stays off (NCCL_NVLS_ENABLE=0) unless the environment says otherwise.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from bench.gate import WrongResultError
from bench.report import current_commit, environment, make_folder, write_json, write_text
from bench.sharded_contenders import BASELINES, CONTENDERS, DEFAULT_CONTENDERS
from bench.sharded_jobs import NO_MULTICAST, run_waves
from bench.sharded_models import MODELS
from bench.sharded_page import Section, page, short_table
from bench.sharded_results import check, results_of, told, without_lonely
from bench.sharded_worker import Job, Steps

LAUNCH = "PYTHONPATH=.:kernels python kernels/bench/sharded.py"
RANKS = 2
STEPS = {
    "full": Steps(checked=10, timed=20, counted=4, profiled=2),
    "tiny": Steps(checked=4, timed=4, counted=2, profiled=1),
}
#: Models of a run that names none, and who is compared on a model of which only that matters.
DEFAULT_MODELS = ("pi05", "interleaved", "transformer")
ONLY = {"interleaved": ("model_parallel", "somaspeed")}


def contenders_of(model: str, asked: Sequence[str] | None) -> list[str]:
    """Who is compared on `model`: those that were asked for, else the usual ones."""
    return list(asked if asked is not None else ONLY.get(model, DEFAULT_CONTENDERS))


def waves_of(models: Sequence[str], asked: Sequence[str] | None, size: str, device: str) -> list[list[Job]]:
    """Jobs that run one after the other; those of one process run side by side, one on each GPU."""
    waves = []
    for model in models:
        names = contenders_of(model, asked)
        alone = dict.fromkeys(CONTENDERS[name].baseline for name in names)
        waves.append([Job(model, size, name, device, 1, STEPS[size]) for name in alone])
        waves += [[Job(model, size, name, device, RANKS, STEPS[size])] for name in names]
    return waves


def say(line: str) -> None:
    """Tells whoever watches."""
    print(line, file=sys.stderr, flush=True)


def measure(chosen: argparse.Namespace, device: str) -> tuple[list[Section], list[str]]:
    """One section a model, and why others have none: contenders, or the two baselines, that did not train alike."""
    waves = waves_of(chosen.models, chosen.contenders, chosen.size, device)
    with tempfile.TemporaryDirectory() as folder:
        found = run_waves(waves, Path(folder), chosen.seconds, say)
    sections, wrong = [], []
    for model in chosen.models:
        contenders = [CONTENDERS[name] for name in contenders_of(model, chosen.contenders)]
        results = without_lonely(results_of(found, model, contenders))
        baselines = results_of(found, model, [b for b in BASELINES.values() if (model, b.name) in found])
        if len(baselines) > 1:
            baselines = without_lonely(baselines)
        for result in (*results, *baselines):
            say(told(result))
        try:
            agreements = [*check(results), *check(baselines)]
        except WrongResultError as error:
            wrong.append(str(error))
            continue
        if any(result.reason is None for result in results):
            sections.append(Section(MODELS[chosen.size][model](), results, baselines, agreements))
        else:
            wrong.append(f"{model}: no two contenders ran")
    return sections, wrong


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parser = _parser()
    chosen = parser.parse_args(arguments)
    device = chosen.device
    try:
        _check(chosen)
        commit = chosen.commit or current_commit()
        make_folder(chosen.out)
    except ValueError as error:
        parser.error(str(error))
    facts = environment(torch.device(device), commit=commit, command=f"{LAUNCH} {shlex.join(arguments)}")
    if device == "cuda":
        multicast = os.environ.get("NCCL_NVLS_ENABLE", NO_MULTICAST["NCCL_NVLS_ENABLE"])
        facts |= {"devices": str(RANKS), "backend": f"NCCL with NCCL_NVLS_ENABLE={multicast}"}
    else:
        facts["backend"] = "gloo"
    sections, wrong = measure(chosen, device)
    for reason in wrong:
        print(f"wrong result, no times: {reason}", file=sys.stderr)
    if sections:
        write(chosen, facts, sections)
        print(short_table(sections))
    return 1 if wrong else 0


def write(chosen: argparse.Namespace, facts: dict[str, str], sections: list[Section]) -> None:
    """`sharded.json` and `sharded.md`."""
    rows = [result.to_dict() for s in sections for result in (*s.results, *s.baselines)]
    agreements = [{"model": s.model, **asdict(a)} for s in sections for a in s.agreements]
    flops = {section.model: section.problem.flops for section in sections}
    head = {"what": "training on two GPUs", "environment": facts, "steps": asdict(STEPS[chosen.size])}
    content = {**head, "flops_of_a_rank": flops, "agreements": agreements, "rows": rows}
    write_json(chosen.out / "sharded.json", content)
    write_text(chosen.out / "sharded.md", page(facts, sections))


def _check(chosen: argparse.Namespace) -> None:
    devices = torch.cuda.device_count()
    if chosen.device == "cuda" and devices < RANKS:
        raise ValueError(f"this machine has {devices} CUDA devices, {RANKS} are needed; use --size tiny --device cpu")
    if chosen.device == "cpu" and chosen.size == "full":
        raise ValueError("the full size on a CPU would say nothing; use --size tiny")
    for what, names, known in (
        ("--models", chosen.models, MODELS[chosen.size]),
        ("--contenders", chosen.contenders or (), CONTENDERS),
    ):
        unknown = [name for name in names if name not in known]
        if unknown:
            raise ValueError(f"{what} {unknown[0]} is unknown; use some of {','.join(known)}")
    if chosen.contenders is not None and len(set(chosen.contenders)) < 2:
        raise ValueError(f"--contenders {','.join(chosen.contenders)} leaves nobody to compare with; name two or more")


def _names(text: str) -> list[str]:
    return text.split(",")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sharded.py", description="Training on two GPUs, and its peers.")
    parser.add_argument("--out", type=Path, required=True, help="folder for sharded.json and sharded.md")
    parser.add_argument("--models", type=_names, default=list(DEFAULT_MODELS), help="default: all")
    parser.add_argument("--contenders", type=_names, help=f"default: {','.join(DEFAULT_CONTENDERS)}")
    parser.add_argument("--size", choices=tuple(MODELS), default="full", help="tiny: for a quick look")
    device = "cuda" if torch.cuda.device_count() >= RANKS else "cpu"
    parser.add_argument("--device", choices=("cuda", "cpu"), default=device)
    parser.add_argument("--seconds", type=float, default=290.0, help="no contender is started after so many")
    parser.add_argument("--commit", help="what the result says; default: asked from git")
    return parser


if __name__ == "__main__":
    sys.exit(main())
