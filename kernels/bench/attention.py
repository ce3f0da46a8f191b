"""Measures attention and its peers on every case and layout; the caller gets no time before ours is right."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bench.attention_cases import AttentionCase, Floor, Layout, draw, mask_of, readable_keys
from bench.attention_peers import OURS_ATTENTION, AttentionPeer, Call
from bench.gate import WrongResultError
from bench.optim import timing_dict
from bench.report import significant
from bench.timing import (
    Budget,
    Timing,
    captured,
    copy_bandwidth,
    peak_extra_bytes,
    synchronize,
    time_on_device,
    time_on_host,
)
from soma_kernels.attention.reference import attention_reference
from soma_kernels.testing import TOLERANCE, assert_close, nan_filled_empty, relative_rms

#: Replays of a graph in one timed region with a hot L2.
HOT_REPLAYS = 20
#: A peer is called wrong when its error is this many times the dtype's tolerance.
WRONG = 10.0


@dataclass(frozen=True)
class AttentionSettings:
    """What is measured. peers: ours among them."""

    cases: Sequence[AttentionCase]
    layouts: Sequence[Layout]
    peers: Sequence[AttentionPeer]
    device: torch.device
    budget: Budget

    def combinations(self) -> list[tuple[AttentionCase, Layout]]:
        return list(itertools.product(self.cases, self.layouts))


@dataclass(frozen=True)
class AttentionResult:
    """One contender on one case and layout. Times in milliseconds on the device, host in microseconds.

    note: why there are no times, or what it computes differently. graph_*: replay of a CUDA graph with a cold L2;
    hot_both: back to back. both: forward and backward. errors: relative RMS against float64. extra: peak bytes.
    """

    name: str
    note: str | None = None
    times: Mapping[str, Timing] | None = None
    errors: Mapping[str, float] | None = None
    extra: int | None = None
    no_graph: str | None = None

    def median(self, key: str) -> float | None:
        """Median of one of `times`; None without it."""
        return self.times[key].median if self.times and key in self.times else None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        times = {key: timing_dict(timing) for key, timing in (self.times or {}).items()}
        errors = {key: significant(value) for key, value in (self.errors or {}).items()}
        return {
            "name": self.name,
            "note": self.note or self.no_graph,
            **times,
            "errors": errors,
            "extra_bytes": self.extra,
        }


@dataclass(frozen=True)
class AttentionRow:
    """Everything measured for one case and layout. floors: microseconds of forward and backward."""

    case: AttentionCase
    layout: Layout
    floors: tuple[float, float]
    peers: Sequence[AttentionResult]

    @property
    def ours(self) -> AttentionResult:
        return next(peer for peer in self.peers if peer.name == OURS_ATTENTION.name)

    def best(self, key: str) -> AttentionResult | None:
        """The fastest contender that computes the same, ours aside."""
        others = [p for p in self.peers if p is not self.ours and p.note is None and p.median(key) is not None]
        return min(others, key=lambda p: p.median(key) or 0.0, default=None)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        c = self.case
        sizes = {name: getattr(c, name) for name in ("Bc", "T", "Hq", "Hkv", "Lq", "Lk", "Lc", "D")}
        return {
            "case": c.name,
            "layout": self.layout,
            **sizes,
            "dtype": str(c.dtype).removeprefix("torch."),
            "trains": list(c.trains),
            "masked": c.masked,
            "floor_us": [*map(significant, self.floors)],
            "peers": [peer.to_dict() for peer in self.peers],
        }


def run(
    settings: AttentionSettings,
    *,
    say: Callable[[str], None],
    keep: Callable[[float, list[AttentionRow]], None],
) -> None:
    """Gives `keep` bytes per second of a device copy and the rows so far, after each case and layout.

    Nothing is timed before ours has passed on everything: WrongResultError otherwise.
    """
    for case, layout in settings.combinations():
        say(f"checking {case.name}, {layout}")
        _gate(case, layout, settings.device)
    bandwidth = copy_bandwidth(settings.device, settings.budget)
    rows: list[AttentionRow] = []
    for case, layout in settings.combinations():
        rows.append(_row(settings, case, layout, bandwidth, say))
        keep(bandwidth, rows)


def _gate(case: AttentionCase, layout: Layout, device: torch.device) -> None:
    x, mask = draw(case, layout, device), mask_of(case, device)
    try:
        with nan_filled_empty():
            got = _results(case, OURS_ATTENTION.build(case, mask), x)
        for name, truth in _truth(case, x, mask).items():
            assert_close(name, got[name], truth)
    except AssertionError as error:
        raise WrongResultError(f"{case.name}, {layout}: {error}") from error


def _grad_out(x: Mapping[str, Tensor]) -> Tensor:
    return torch.randn(
        x["q"].shape, dtype=x["q"].dtype, device=x["q"].device, generator=torch.Generator(x["q"].device).manual_seed(1)
    )


def _results(case: AttentionCase, call: Call, x: dict[str, Tensor]) -> dict[str, Tensor]:
    out = call(x)
    grads = torch.autograd.grad(out, [x[name] for name in case.trains], _grad_out(x))
    return {"out": out.detach(), **{f"d{name}": grad for name, grad in zip(case.trains, grads, strict=True)}}


def _truth(case: AttentionCase, x: dict[str, Tensor], mask: Tensor | None) -> dict[str, Tensor]:
    """The output and the gradients in float64, by the names of `_results`."""
    exact = {name: t.detach().double().requires_grad_(name in case.trains) for name, t in x.items()}
    k, v, ck, cv = (exact.get(name) for name in ("k", "v", "ck", "cv"))
    truth = attention_reference(exact["q"], k, v, ck, cv, None, mask, case.D**-0.5)
    wanted = [exact[name] for name in case.trains]
    grads = torch.autograd.grad(truth, wanted, _grad_out(x).double())
    return {"out": truth.detach(), **{f"d{name}": grad for name, grad in zip(case.trains, grads, strict=True)}}


def _row(
    settings: AttentionSettings,
    case: AttentionCase,
    layout: Layout,
    bandwidth: float,
    say: Callable[[str], None],
) -> AttentionRow:
    mask = mask_of(case, settings.device)
    readable = readable_keys(case, mask)
    floors: tuple[Floor, Floor] = (case.forward_floor(readable), case.backward_floor(readable))
    truth = _truth(case, draw(case, layout, settings.device), mask)
    results = []
    for peer in settings.peers:
        say(f"timing {case.name}, {layout}: {peer.name}")
        absent = peer.why_absent(case, settings.device)
        results.append(
            AttentionResult(peer.name, absent) if absent else _measure(settings, case, layout, peer, mask, truth)
        )
        gc.collect()
        if settings.device.type == "cuda":
            torch.cuda.empty_cache()
    forward, backward = (floor.microseconds(bandwidth) for floor in floors)
    return AttentionRow(case, layout, (forward, backward), results)


def _measure(
    settings: AttentionSettings,
    case: AttentionCase,
    layout: Layout,
    peer: AttentionPeer,
    mask: Tensor | None,
    truth: Mapping[str, Tensor],
) -> AttentionResult:
    x = draw(case, layout, settings.device)
    call = peer.build(case, mask)
    try:
        got = _results(case, call, x)
    except (RuntimeError, ValueError, NotImplementedError) as error:
        # What a back end of torch's does not support is a finding about it; ours has passed the gate.
        if peer == OURS_ATTENTION:
            raise
        return AttentionResult(peer.name, f"refused: {str(error).strip().splitlines()[0][:80]}")
    errors = {name: relative_rms(got[name], true) for name, true in truth.items()}
    note = peer.unlike_ours(case)
    if note is None and max(errors.values()) > WRONG * TOLERANCE[case.dtype]:
        note = "wrong result"
    del got
    grad_out, leaves = _grad_out(x), [x[name] for name in case.trains]

    def forward() -> None:
        call(x)

    def both() -> None:
        torch.autograd.grad(call(x), leaves, grad_out)

    device, budget = settings.device, settings.budget
    times = {"eager_both_ms": time_on_device(both, device, budget), "host_both_us": time_on_host(both, device, budget)}
    extra, no_graph = peak_extra_bytes(both, device), None
    if device.type == "cuda":
        try:
            times |= _graphed(forward, both, device, budget)
        except RuntimeError as error:
            if peer == OURS_ATTENTION:
                raise
            no_graph = f"no CUDA graph: {str(error).strip().splitlines()[0][:80]}"
    return AttentionResult(peer.name, note, times, errors, extra, no_graph)


def _graphed(
    forward: Callable[[], None], both: Callable[[], None], device: torch.device, budget: Budget
) -> dict[str, Timing]:
    first, whole = captured(forward), captured(both)

    def hot() -> None:
        for _ in range(HOT_REPLAYS):
            whole.replay()

    repeated = time_on_device(hot, device, budget)
    synchronize(device)
    return {
        "graph_forward_ms": time_on_device(first.replay, device, budget),
        "graph_both_ms": time_on_device(whole.replay, device, budget),
        "hot_both_ms": Timing(tuple(ms / HOT_REPLAYS for ms in repeated.samples)),
    }
