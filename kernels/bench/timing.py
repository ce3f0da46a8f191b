"""How long a step takes on the device and on the host, what it allocates, and how fast this device copies memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

Step = Callable[[], None]

#: Larger than any L2: zeroed before every timed call, so that a call finds none of its data there.
FLUSH_BYTES = 256 << 20

#: Calls that may wait in the device's queue.
CALLS_AHEAD = 5


@dataclass(frozen=True)
class Budget:
    """How often a call is timed: until `repeats` calls and `seconds` have passed, or `limit` seconds.

    warmup: untimed calls before (state creation, compilation, handle creation).
    """

    repeats: int = 30
    seconds: float = 0.2
    limit: float = 1.0
    warmup: int = 3

    def goes_on(self, count: int, elapsed: float) -> bool:
        """Whether another call is timed after `count` calls in `elapsed` seconds."""
        return elapsed < self.limit and (count < self.repeats or elapsed < self.seconds)


QUICK = Budget(repeats=10, seconds=0.05, limit=0.3, warmup=2)


@dataclass(frozen=True)
class Timing:
    """Times of single calls, in the order they ran."""

    samples: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def quartiles(self) -> tuple[float, float]:
        """First and third quartile."""
        if len(self.samples) == 1:
            return self.samples[0], self.samples[0]
        first, _, third = statistics.quantiles(self.samples, n=4, method="inclusive")
        return first, third


def synchronize(device: torch.device) -> None:
    """Waits until everything queued on `device` has run."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_on_device(step: Step, device: torch.device, budget: Budget, *, prepare: Step | None = None) -> Timing:
    """Milliseconds of `step` between two events on the device, with a cold L2; on a CPU, of wall time.

    prepare: runs before each call, outside the timed region.
    """
    if device.type != "cuda":
        return _time_on_cpu(step, budget, prepare)
    for _ in range(budget.warmup):
        _prepare(prepare)
        step()
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)
    synchronize(device)
    pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    begin = time.perf_counter()
    while budget.goes_on(len(pairs), time.perf_counter() - begin):
        start, end = _event(), _event()
        _prepare(prepare)
        flush.zero_()
        start.record()
        step()
        end.record()
        pairs.append((start, end))
        if len(pairs) > CALLS_AHEAD:
            # The budget counts what the device has done; a queue that never drains keeps launch gaps out of the times.
            pairs[-CALLS_AHEAD][1].synchronize()
    synchronize(device)
    return Timing(tuple(start.elapsed_time(end) for start, end in pairs))


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _time_on_cpu(step: Step, budget: Budget, prepare: Step | None) -> Timing:
    timing = time_on_host(step, torch.device("cpu"), budget, prepare=prepare)
    return Timing(tuple(us / 1e3 for us in timing.samples))


def time_on_host(step: Step, device: torch.device, budget: Budget, *, prepare: Step | None = None) -> Timing:
    """Microseconds that the host spends inside `step`; the device's queue is empty at the start of each call."""
    for _ in range(budget.warmup):
        _prepare(prepare)
        step()
    samples: list[float] = []
    begin = time.perf_counter()
    while budget.goes_on(len(samples), time.perf_counter() - begin):
        _prepare(prepare)
        synchronize(device)
        start = time.perf_counter()
        step()
        samples.append((time.perf_counter() - start) * 1e6)
    synchronize(device)
    return Timing(tuple(samples))


def _prepare(prepare: Step | None) -> None:
    if prepare is not None:
        prepare()


def captured(step: Step) -> torch.cuda.CUDAGraph:
    """A CUDA graph of `step`, which is first run three times on the stream of the capture.

    Nodes that accumulate gradients remember the stream they were made on, and another one would invalidate the capture.
    """
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        step()
    return graph


def allocated_bytes(device: torch.device) -> int | None:
    """Device memory that tensors hold now; None on a CPU."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else None


def peak_extra_bytes(step: Step, device: torch.device) -> int | None:
    """Device memory that one call needs at its peak beyond what is allocated before it; None on a CPU.

    Call it after a first step, so that state which stays is not counted.
    """
    if device.type != "cuda":
        return None
    synchronize(device)
    resident = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    synchronize(device)
    return torch.cuda.max_memory_allocated(device) - resident


def copy_bandwidth(device: torch.device, budget: Budget) -> float:
    """Bytes read plus written per second by a copy of 4 GiB inside the device (64 MiB on a CPU)."""
    elements = (1 << 30) if device.type == "cuda" else (1 << 24)
    source = torch.randn(elements, device=device)
    target = torch.empty_like(source)
    timing = time_on_device(lambda: _copy(target, source), device, budget)
    return 2 * source.numel() * source.itemsize / (timing.median / 1e3)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source)
