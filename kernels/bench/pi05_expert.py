"""What does pi0.5's action expert gain from the attention kernel? The whole expert, forward and backward, at full size.

    PYTHONPATH=.:kernels python kernels/bench/pi05_expert.py --out docs/benchmarks

writes `pi05_expert.json` and `pi05_expert.md` and prints a short table last. The same module runs with our attention
and with torch's (all back ends, heads folded by hand, or keys repeated): only the attention function of its layers is
exchanged. The prefix is frozen, 968 tokens with a prompt's padding. Random weights, bf16 with fp32 islands.
Nothing is timed before each gradient is as near to the module in float32 as torch's is. Exit status 1 if it is not.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from bench.attention_cases import AttentionCase, mask_of
from bench.attention_peers import AttentionPeer
from bench.gate import WrongResultError
from bench.optim import timing_dict
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
from bench.timing import Budget, Timing, captured, peak_extra_bytes, time_on_device, time_on_host
from soma_kernels.testing import FACTOR_OVER_TORCH, relative_rms
from soma_lightning.attention import ContextKV, attention_implementation, attention_path
from soma_lightning.models.pi05 import expert as expert_module
from soma_lightning.models.pi05.config import PI05Config
from soma_lightning.models.pi05.expert import ActionExpert
from soma_lightning.models.pi05.model import cast_to_islands
from soma_lightning.models.pi05.prefix import PrefixCache

LAUNCH = "PYTHONPATH=.:kernels python kernels/bench/pi05_expert.py"
#: {name: (configuration, prefix rows, prefix tokens)}
SIZES: dict[str, tuple[Callable[[], PI05Config], int, int]] = {
    "base": (PI05Config.base, 32, 968),
    "tiny": (PI05Config.tiny, 2, 40),
}
PEERS = tuple(AttentionPeer(kind, folds) for folds in (True, False) for kind in ("cudnn", "efficient", "math"))


@dataclass(frozen=True)
class Problem:
    """One step of the expert. case: the attention call of each layer."""

    expert: ActionExpert
    prefix: PrefixCache
    x_t: Tensor
    time: Tensor
    grad_out: Tensor
    case: AttentionCase

    def results(self) -> list[Tensor]:
        """Velocity and the gradient of every parameter."""
        velocity = self.expert(self.prefix, self.x_t, self.time)
        return [velocity.detach(), *torch.autograd.grad(velocity, list(self.expert.parameters()), self.grad_out)]


@dataclass(frozen=True)
class Row:
    """One attention inside the expert. Times of forward and backward; error: largest of all tensors."""

    name: str
    note: str | None = None
    error: float | None = None
    times: dict[str, Timing] | None = None
    extra: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        times = {key: timing_dict(timing) for key, timing in (self.times or {}).items()}
        error = None if self.error is None else significant(self.error)
        return {"name": self.name, "note": self.note, "error": error, **times, "extra_bytes": self.extra}


def make_problem(size: str, device: torch.device, dtype: torch.dtype) -> Problem:
    """Random weights and inputs, the same for every dtype."""
    make_config, rows, tokens = SIZES[size]
    config = make_config()
    stream, horizon = config.expert, config.chunk_size
    torch.manual_seed(0)
    expert = ActionExpert(config)
    for p in expert.parameters():
        torch.nn.init.normal_(p, std=0.02)
    expert.to(device)
    cast_to_islands(expert, dtype, config.islands)
    heads = (stream.num_heads, stream.num_kv_heads)
    trains = ("q", "k", "v")
    case = AttentionCase("expert", "", rows, 1, *heads, horizon, horizon, tokens, stream.head_dim, trains, True, dtype)
    mask = mask_of(case, device)
    assert mask is not None
    shape = (rows, stream.num_kv_heads, tokens, stream.head_dim)
    keys, values = ([torch.randn(shape).to(device, dtype) for _ in range(stream.depth)] for _ in range(2))
    x_t, grad_out = (torch.randn(rows, horizon, config.max_action_dim).to(device) for _ in range(2))
    return Problem(
        expert, PrefixCache(keys, values, mask, mask.sum(1)), x_t, torch.rand(rows).to(device), grad_out, case
    )


@contextmanager
def attention_of(peer: AttentionPeer | None, problem: Problem) -> Iterator[None]:
    """The expert's layers call `peer` inside the block; None: ours."""
    if peer is None:
        yield
        return
    call = peer.build(problem.case, problem.prefix.mask)

    def replacement(q: Tensor, k: Tensor, v: Tensor, *, context: ContextKV) -> Tensor:
        return call({"q": q, "k": k, "v": v, "ck": context.k, "cv": context.v})

    with patch.object(expert_module, "attention", replacement):
        yield


def errors(got: Sequence[Tensor], truth: Sequence[Tensor]) -> float:
    """The largest relative error over velocity and gradients."""
    return max(relative_rms(a, b) for a, b in zip(got, truth, strict=True))


def measure(size: str, device: torch.device, budget: Budget, say: Callable[[str], None]) -> list[Row]:
    """Ours first. WrongResultError, and no times, when its error exceeds twice the largest of torch's."""
    with attention_implementation("reference"):
        truth = make_problem(size, device, torch.float32).results()
    problem = make_problem(size, device, torch.bfloat16)
    rows, right = [], []
    for peer in (None, *PEERS):
        name = "ours" if peer is None else peer.name
        absent = None if peer is None else peer.why_absent(problem.case, device)
        if absent:
            rows.append(Row(name, absent))
            continue
        say(f"checking {name}")
        with attention_of(peer, problem):
            error = errors(problem.results(), truth)
        rows.append(Row(name, error=error))
        right.append(rows[-1])
    ours, *others = right
    bar = FACTOR_OVER_TORCH * statistics.median(row.error or 0.0 for row in others)
    if ours.error is None or not ours.error <= bar:
        raise WrongResultError(f"{ours.error} is more than twice the error of torch's attention, {bar / 2}")
    return [_timed(row, peer, problem, device, budget, say) for row, peer in zip(rows, (None, *PEERS), strict=True)]


def _timed(
    row: Row,
    peer: AttentionPeer | None,
    problem: Problem,
    device: torch.device,
    budget: Budget,
    say: Callable[[str], None],
) -> Row:
    if row.note is not None:
        return row
    say(f"timing {row.name}")

    def step() -> None:
        problem.results()

    with attention_of(peer, problem):
        times = {"eager_ms": time_on_device(step, device, budget), "host_us": time_on_host(step, device, budget)}
        extra = peak_extra_bytes(step, device)
        if device.type == "cuda":
            times["graph_ms"] = time_on_device(captured(step).replay, device, budget)
    return Row(row.name, None, row.error, times, extra)


def table(rows: Sequence[Row]) -> str:
    """Markdown: one line for each attention, and how many times ours is faster than it."""
    headers = ["attention", "largest error", "eager ms", "graph ms", "host ms", "extra MiB", "ours faster, graph"]
    ours = rows[0].times or {}
    cells = []
    for row in rows:
        if row.times is None:
            cells.append([f"{row.name} ({row.note})", *["-"] * 6])
            continue
        median = {key: timing.median for key, timing in row.times.items()}
        graph = median.get("graph_ms")
        cells.append(
            [
                *(row.name, f"{row.error:.2e}", f"{median['eager_ms']:.2f}", "-" if graph is None else f"{graph:.2f}"),
                *(f"{median['host_us'] / 1e3:.2f}", "-" if row.extra is None else f"{row.extra / 2**20:,.0f}"),
                "-" if graph is None else f"{graph / ours['graph_ms'].median:.2f}",
            ]
        )
    return markdown_table(headers, cells)


def page(size: str, facts: dict[str, str], rows: Sequence[Row]) -> str:
    """The Markdown page of a run."""
    _, num_rows, tokens = SIZES[size]
    return f"""# pi0.5's action expert, forward and backward

Generated by `kernels/bench/pi05_expert.py`; every sample is in `pi05_expert.json` beside it.

{measured_on(facts)}

{num_rows} observations, {tokens} prefix tokens with padding, frozen; all parameters of the expert train. Medians;
*graph* replays a captured step; *host* is the time inside the eager call with an empty queue; *extra* the peak beyond
what stays allocated; *largest error* is relative to the module in float32, over the velocity and every gradient.

{table(rows)}
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(prog="pi05_expert.py", description="pi0.5's expert with each attention.")
    parser.add_argument("--out", type=Path, required=True, help="folder for pi05_expert.json and pi05_expert.md")
    parser.add_argument("--size", choices=SIZES, default="base", help="tiny: for machines without a GPU")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--commit", help="what the result says; default: asked from git")
    chosen = parser.parse_args(arguments)
    try:
        device = available_device(chosen.device)
        commit = chosen.commit or current_commit()
        make_folder(chosen.out)
    except ValueError as error:
        parser.error(str(error))
    if chosen.size == "base" and device.type == "cpu":
        parser.error("the full size on a CPU would say nothing; use --size tiny")
    facts = environment(device, commit=commit, command=f"{LAUNCH} {shlex.join(arguments)}")
    try:
        rows = measure(chosen.size, device, Budget(), lambda line: print(line, file=sys.stderr, flush=True))
    except WrongResultError as error:
        print(f"wrong result, no times: {error}", file=sys.stderr)
        return 1
    result = {"what": "pi0.5 expert", "environment": facts, "implementation": attention_path(device)}
    write_json(chosen.out / "pi05_expert.json", {**result, "rows": [row.to_dict() for row in rows]})
    write_text(chosen.out / "pi05_expert.md", page(chosen.size, facts, rows))
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
