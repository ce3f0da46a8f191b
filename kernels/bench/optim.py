"""Measures the clipped AdamW step and its peers on every parameter set and dtype; the caller checks them first."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bench.gate import BuildOurs, Verdict, check
from bench.peers import OURS, PEERS, TORCH_FUSED, Hyper, Implementation, Ours, Peer
from bench.registry import Case, ParameterSet
from bench.report import significant
from bench.timing import (
    Budget,
    Timing,
    allocated_bytes,
    captured,
    copy_bandwidth,
    peak_extra_bytes,
    time_on_device,
    time_on_host,
)
from bench.workload import Workload

Say = Callable[[str], None]

#: Samples of one cell that the JSON file keeps (the first ones): every figure stays checkable in a file under 1 MB.
KEPT_SAMPLES = 200


@dataclass(frozen=True)
class Settings:
    """What is measured. loops: also peers that launch kernels for each tensor."""

    sets: Sequence[ParameterSet]
    cases: Sequence[Case]
    device: torch.device
    implementation: Implementation
    budget: Budget
    loops: bool = True

    def combinations(self) -> list[tuple[ParameterSet, Case]]:
        """Every set in every case."""
        return list(itertools.product(self.sets, self.cases))


@dataclass(frozen=True)
class PeerResult:
    """One contender on one set and case.

    note: why there are no times, or what it computes differently. eager, graphed: milliseconds on the device.
    host: microseconds inside the eager call. state: device bytes that stay between steps. extra: device bytes at the
    peak of an eager step beyond those; both None on a CPU.
    """

    name: str
    note: str | None = None
    eager: Timing | None = None
    graphed: Timing | None = None
    host: Timing | None = None
    state: int | None = None
    extra: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, with medians, quartiles and samples of each timing."""
        times = {"eager_ms": self.eager, "graphed_ms": self.graphed, "host_us": self.host}
        measured = {key: timing_dict(timing) for key, timing in times.items() if timing is not None}
        return {"name": self.name, "note": self.note, **measured, "state_bytes": self.state, "extra_bytes": self.extra}


@dataclass(frozen=True)
class Row:
    """Everything measured for one set and case. floor_ms: fewest bytes over the copy bandwidth of the same run."""

    set: ParameterSet
    case: Case
    floor_ms: float
    verdict: Verdict
    peers: Sequence[PeerResult]

    def peer(self, name: str) -> PeerResult:
        """The result of `name`, which is always there, with or without times."""
        return next(peer for peer in self.peers if peer.name == name)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "set": self.set.name,
            "case": self.case.name,
            "tensors": self.set.tensors,
            "parameters": self.set.parameters,
            "floor_bytes": self.set.parameters * self.case.floor_bytes_per_element(),
            "floor_ms": significant(self.floor_ms),
            "errors_ours_torch": {key: [*map(significant, pair)] for key, pair in self.verdict.errors.items()},
            "norm_error": significant(self.verdict.norm_error),
            "peers": [peer.to_dict() for peer in self.peers],
        }


def timing_dict(timing: Timing) -> dict[str, Any]:
    """JSON-ready: median, quartiles, how many calls, and the first KEPT_SAMPLES of them."""
    return {
        "median": significant(timing.median),
        "quartiles": [*map(significant, timing.quartiles)],
        "calls": len(timing.samples),
        "samples": [*map(significant, timing.samples[:KEPT_SAMPLES])],
    }


def run(
    settings: Settings, *, say: Say, keep: Callable[[float, list[Row]], None], build_ours: BuildOurs | None = None
) -> None:
    """Gives `keep` bytes per second of a device copy and the rows so far, after each set and case.

    Nothing is timed before everything has passed the gate: WrongResultError otherwise. build_ours: another step under
    test in place of FusedAdamW, for checking the gate.
    """
    combinations = settings.combinations()
    verdicts = [_gate(settings, *combination, say, build_ours) for combination in combinations]
    bandwidth = copy_bandwidth(settings.device, settings.budget)
    rows: list[Row] = []
    for (parameter_set, case), verdict in zip(combinations, verdicts, strict=True):
        floor_ms = parameter_set.parameters * case.floor_bytes_per_element() / bandwidth * 1e3
        say(f"timing {parameter_set.name}, {case.name}")
        rows.append(Row(parameter_set, case, floor_ms, verdict, _measure(settings, parameter_set, case)))
        _free(settings.device)
        keep(bandwidth, rows)


def _gate(
    settings: Settings, parameter_set: ParameterSet, case: Case, say: Say, build_ours: BuildOurs | None
) -> Verdict:
    say(f"checking {parameter_set.name}, {case.name}")
    build = build_ours or (lambda params, case, hyper: Ours(params, case, hyper, settings.implementation))
    verdict = check(parameter_set, case, settings.device, build)
    _free(settings.device)
    return verdict


def _measure(settings: Settings, parameter_set: ParameterSet, case: Case) -> list[PeerResult]:
    workload = Workload(parameter_set, case, settings.device)
    results = []
    for peer in PEERS:
        absent = _why_not(settings, workload, peer)
        results.append(PeerResult(peer.name, absent) if absent else _measure_peer(settings, workload, peer))
        _free(settings.device)
    return results


def _why_not(settings: Settings, workload: Workload, peer: Peer) -> str | None:
    if peer.loops and not (settings.loops and workload.set.loops):
        return "not run"
    return peer.why_absent(workload.case)


def _measure_peer(settings: Settings, workload: Workload, peer: Peer) -> PeerResult:
    device, budget, case = settings.device, settings.budget, workload.case
    before = allocated_bytes(device)
    stepper = peer.build(workload.params, case, Hyper(), implementation=settings.implementation, captured=False)
    turns = itertools.cycle(range(len(workload.gradients)))

    def next_gradients() -> None:
        workload.assign(next(turns))

    eager = time_on_device(stepper.step, device, budget, prepare=next_gradients)
    host = None
    if peer in (OURS, TORCH_FUSED):
        host = time_on_host(stepper.step, device, budget, prepare=next_gradients)
    after, extra = allocated_bytes(device), peak_extra_bytes(stepper.step, device)
    state = None if before is None or after is None else after - before
    del stepper
    graphed = _measure_graph(settings, workload, peer) if peer.graphs and device.type == "cuda" else None
    return PeerResult(peer.name, peer.unlike_ours(case), eager, graphed, host, state, extra)


def _measure_graph(settings: Settings, workload: Workload, peer: Peer) -> Timing:
    _free(settings.device)
    workload.assign(0)
    stepper = peer.build(workload.params, workload.case, Hyper(), implementation=settings.implementation, captured=True)
    graph = captured(stepper.step)
    return time_on_device(graph.replay, settings.device, settings.budget)


def _free(device: torch.device) -> None:
    """Returns what nobody holds any more: the next measurement starts from an empty allocator."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
