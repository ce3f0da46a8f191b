"""What do the reports of the ranks say together, and did all contenders train alike? No times before they did.

Three things are compared with a reference contender: the mean loss of every step, the gradient norm before clipping of
the first steps, and the norm of AdamW's first moments after the last step, which moves with every clipped gradient.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bench.gate import WrongResultError
from bench.report import significant
from bench.sharded_contenders import Contender
from bench.sharded_jobs import Reports
from bench.timing import Timing

#: Largest relative difference from the reference. Gradients are computed in bf16 (8 bits), and some contenders round
#: the weights of norms to bf16; a rank that trains by itself is off by tens of percent.
LOSS_BOUND, NORM_BOUND, MOMENT_BOUND = 1e-2, 5e-2, 5e-2


@dataclass(frozen=True)
class Result:
    """One contender on one model. reason: why there are no reports. Values are over the ranks of `reports`."""

    model: str
    contender: Contender
    reports: Reports
    reason: str | None = None

    @property
    def step_ms(self) -> Timing:
        """The slower rank of every timed step."""
        return Timing(tuple(max(times) for times in zip(*self._each("step_ms"), strict=True)))

    @property
    def losses(self) -> list[float]:
        """Mean over the ranks, of every step."""
        return [statistics.fmean(losses) for losses in zip(*self._each("losses"), strict=True)]

    @property
    def norms(self) -> list[float]:
        """Of the checked steps; all ranks have the same."""
        norms: list[float] = self.reports[0]["norms"]
        return norms

    @property
    def moment_norm(self) -> float:
        squares = self._each("moment_squares")
        return math.sqrt(sum(squares) if self.contender.divided else squares[0])

    @property
    def norm_us(self) -> list[float]:
        """The norm's sum in every counted step, of the rank that came last: the other one waits inside of it."""
        return [min(times) for times in zip(*(r["traffic"]["norm_us"] for r in self.reports), strict=True)]

    def memory(self, kind: str) -> int | None:
        """Bytes of the rank that needs most: "resident" between steps, "peak" of what tensors hold, "reserved"."""
        found = [report["memory"].get(kind) for report in self.reports]
        return None if None in found else max(found)

    def sent(self) -> dict[str, float]:
        """Bytes of one step over the link, in one direction, of rank 0."""
        sent: dict[str, float] = self.reports[0]["traffic"]["sent"]
        return sent

    def busy(self, key: str) -> float | None:
        """Device milliseconds of one step (`sharded_trace.Busy`), of the rank that waited less for the other."""
        found = [report["busy"] for report in self.reports]
        if None in found:
            return None
        best = min(found, key=lambda busy: busy["communication"])
        return float(best[key])

    def _each(self, key: str) -> list[Any]:
        return [report[key] for report in self.reports]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        head: dict[str, Any] = {"model": self.model, "contender": self.contender.name, "reason": self.reason}
        if self.reason is not None:
            return head
        timing = self.step_ms
        return {
            **head,
            "ranks": len(self.reports),
            "step_ms": significant(timing.median),
            "step_ms_quartiles": [*map(significant, timing.quartiles)],
            "step_ms_samples": [*map(significant, timing.samples)],
            "losses": [*map(significant, self.losses)],
            "norms": [*map(significant, self.norms)],
            "moment_norm": significant(self.moment_norm),
            "reports": [{k: v for k, v in r.items() if k not in ("step_ms", "losses", "norms")} for r in self.reports],
        }


def told(result: Result) -> str:
    """One line for whoever watches the run: how it trained, without any time."""
    head = f"{result.model}: {result.contender.name}: "
    if result.reason is not None:
        return head + result.reason
    values = (*result.losses[:: len(result.losses) - 1], *result.norms[:: len(result.norms) - 1], result.moment_norm)
    return head + "loss {:.5f} to {:.5f}, gradient norm {:.4f} to {:.4f}, moments {:.5f}".format(*values)


def results_of(
    found: Mapping[tuple[str, str], Reports | str], model: str, contenders: Sequence[Contender]
) -> list[Result]:
    """Results on `model` in the order of `contenders`."""
    results = []
    for contender in contenders:
        report = found[model, contender.name]
        reason = report if isinstance(report, str) else None
        results.append(Result(model, contender, [] if isinstance(report, str) else report, reason))
    return results


def without_lonely(results: Sequence[Result]) -> list[Result]:
    """`results`, but a contender that ran alone has no times: there is nobody to compare its training with."""
    ran = [result for result in results if result.reason is None]
    if len(ran) != 1:
        return list(results)
    reason = "ran, but nobody else did, so that its training was compared with nothing"
    return [replace(result, reason=reason, reports=[]) if result is ran[0] else result for result in results]


@dataclass(frozen=True)
class Agreement:
    """Largest relative differences of one contender from `reference`."""

    contender: str
    reference: str
    loss: float
    norm: float
    moment: float


def check(results: Sequence[Result]) -> list[Agreement]:
    """How far each contender is from the reference: "ddp", else the first that ran.

    WrongResultError when one is further than the bounds or is not finite.
    """
    ran = [result for result in results if result.reason is None]
    if not ran:
        return []
    reference = next((result for result in ran if result.contender.name == "ddp"), ran[0])
    agreements = []
    for result in ran:
        if result is reference:
            continue
        agreement = Agreement(
            result.contender.name,
            reference.contender.name,
            _largest(result.losses, reference.losses),
            _largest(result.norms, reference.norms),
            _largest([result.moment_norm], [reference.moment_norm]),
        )
        _judge(result.model, agreement)
        agreements.append(agreement)
    return agreements


def _largest(got: Sequence[float], expected: Sequence[float]) -> float:
    differences = [abs(a - b) / abs(b) if b else math.nan for a, b in zip(got, expected, strict=True)]
    # `max` would lose a NaN that is not first.
    return math.nan if not differences or any(map(math.isnan, differences)) else max(differences)


def _judge(model: str, agreement: Agreement) -> None:
    for what, value, bound in (
        ("losses", agreement.loss, LOSS_BOUND),
        ("gradient norms", agreement.norm, NORM_BOUND),
        ("norm of the first moments", agreement.moment, MOMENT_BOUND),
    ):
        if not value <= bound:  # NaN is not either
            raise WrongResultError(
                f"{model}: the {what} of {agreement.contender} differ from {agreement.reference} by {value:.2e}, "
                f"more than {bound:.0e}"
            )
