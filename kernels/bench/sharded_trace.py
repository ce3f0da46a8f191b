"""How long is a rank's device busy with collectives, and for how long with nothing else? From a torch.profiler trace.

A collective's kernel also runs while it waits for the other rank; what is counted as communication includes that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

_DEVICE_WORK = {"kernel", "gpu_memcpy", "gpu_memset"}
_COLLECTIVE = "nccl"

Interval = tuple[float, float]


@dataclass(frozen=True)
class Busy:
    """Device milliseconds of one step. compute: any kernel or copy but collectives. communication: any collective.

    exposed: communication while nothing computes. idle: neither, between the first and the last kernel of the steps.
    kernels: of each kind of collective kernel, summed.
    """

    compute: float
    communication: float
    exposed: float
    idle: float
    kernels: dict[str, float] = field(default_factory=dict)


def busy_times(events: Iterable[Mapping[str, Any]], steps: int) -> Busy | None:
    """Means over the `steps` steps of a Chrome trace (times in microseconds); None if it holds no device work."""
    work = [event for event in events if event.get("cat") in _DEVICE_WORK]
    if not work:
        return None
    collectives = [event for event in work if event["name"].startswith(_COLLECTIVE)]
    compute = merged(_interval(event) for event in work if not event["name"].startswith(_COLLECTIVE))
    communication = merged(map(_interval, collectives))
    union = merged([*compute, *communication])
    kernels: Counter[str] = Counter()
    for event in collectives:
        kernels["_".join(event["name"].split("(")[0].split("_")[:2])] += event["dur"]
    scale = 1e3 * steps
    return Busy(
        compute=_length(compute) / scale,
        communication=_length(communication) / scale,
        exposed=(_length(union) - _length(compute)) / scale,
        idle=(union[-1][1] - union[0][0] - _length(union)) / scale,
        kernels={name: us / scale for name, us in kernels.most_common()},
    )


def _interval(event: Mapping[str, Any]) -> Interval:
    return event["ts"], event["ts"] + event["dur"]


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The union of `intervals` as disjoint ones, in order."""
    union: list[Interval] = []
    for start, end in sorted(intervals):
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], end))
        else:
            union.append((start, end))
    return union


def _length(union: Iterable[Interval]) -> float:
    return sum(end - start for start, end in union)
