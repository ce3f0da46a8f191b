"""Which device time belongs to which part of a training step, from a torch.profiler trace.

Three instants are marked in every step on the host: its start, the moment its gradients are complete, its end. A kernel
belongs to the part in which the host launched it: the trace gives each kernel and the launch that caused it one
correlation number. This holds for kernels of any library (Triton's own launcher appears in no torch operator) and
whenever the device runs them. Between "gradients complete" and "end" Lightning clips, steps the optimizer and calls
schedulers, and nothing else; the backward pass has been launched by then.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from torch.profiler import record_function

START, GRADIENTS, END = "bench::step start", "bench::gradients complete", "bench::step end"

_LAUNCHES = {"cuda_runtime", "cuda_driver"}
_DEVICE_WORK = {"kernel", "gpu_memcpy", "gpu_memset"}


def mark(instant: str) -> None:
    """Marks START, GRADIENTS or END in a running profile."""
    with record_function(instant):
        pass


class _Step(NamedTuple):
    """Host times in microseconds."""

    start: float
    gradients: float
    end: float


@dataclass(frozen=True)
class StepProfile:
    """Mean of several steps.

    device_ms: time of all kernels and copies on the device. optimizer_ms: of those launched for clipping and update.
    optimizer_launches: how many those are. host_optimizer_ms, host_ms: the host's time for the same part and the step.
    kernels: {name: device milliseconds in one step} of the optimizer part, largest first.
    unmatched: device events whose launch is not in the trace.
    """

    steps: int
    device_ms: float
    optimizer_ms: float
    optimizer_launches: float
    host_ms: float
    host_optimizer_ms: float
    unmatched: int = 0
    kernels: dict[str, float] = field(default_factory=dict)


def read_trace(path: Path) -> list[dict[str, Any]]:
    """The events of a file that `profile.export_chrome_trace` wrote."""
    events: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8", errors="replace"))["traceEvents"]
    return events


def step_profile(events: Iterable[Mapping[str, Any]]) -> StepProfile:
    """Means over the marked steps without the first, which carries the profiler's own start.

    events: of a Chrome trace; times in microseconds. ValueError when fewer than two steps are marked completely.
    """
    events = list(events)
    steps = _steps(events)[1:]
    if not steps:
        raise ValueError("the trace must hold at least two marked steps: the first one is left out")
    starts = [step.start for step in steps]
    launched_at = {
        event["args"]["correlation"]: event["ts"]
        for event in events
        if event.get("cat") in _LAUNCHES and "correlation" in event.get("args", {})
    }
    device_us, unmatched, launches = 0.0, 0, 0
    optimizer: Counter[str] = Counter()
    for event in events:
        if event.get("cat") not in _DEVICE_WORK:
            continue
        launch = launched_at.get(event.get("args", {}).get("correlation"))
        if launch is None:
            unmatched += 1
            continue
        step = steps[max(bisect_right(starts, launch) - 1, 0)]
        if step.start <= launch < step.end:
            device_us += event["dur"]
        if step.gradients <= launch < step.end:
            optimizer[event["name"]] += event["dur"]
            launches += 1
    per_step_ms = 1e3 * len(steps)
    return StepProfile(
        steps=len(steps),
        device_ms=device_us / per_step_ms,
        optimizer_ms=optimizer.total() / per_step_ms,
        optimizer_launches=launches / len(steps),
        host_ms=sum(step.end - step.start for step in steps) / per_step_ms,
        host_optimizer_ms=sum(step.end - step.gradients for step in steps) / per_step_ms,
        unmatched=unmatched,
        kernels={name: us / per_step_ms for name, us in optimizer.most_common()},
    )


def _steps(events: Iterable[Mapping[str, Any]]) -> list[_Step]:
    """The steps whose three marks are there, in order."""
    marks = sorted(
        (event["ts"], event["name"])
        for event in events
        if event.get("cat") == "user_annotation" and event["name"] in (START, GRADIENTS, END)
    )
    names = [name for _, name in marks]
    return [
        _Step(*(ts for ts, _ in marks[i : i + 3]))
        for i in range(len(marks) - 2)
        if names[i : i + 3] == [START, GRADIENTS, END]
    ]
