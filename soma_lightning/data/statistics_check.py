"""Does `meta/stats.json` agree with the data, and do the data have values that training would stumble over?

Stated tolerances, per dimension: minimum and maximum equal in the column's dtype; |mean - mean'| <= 1e-3 std + 1e-6 m;
|std^2 - std'^2| <= 2e-3 std^2 + 5e-7 m^2, where m is the largest magnitude (what float32 sums of squares can lose).
Quantiles may be exact or LeRobot's (`statistics`), so they must only be in order between minimum and maximum.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from soma_lightning.data import lerobot_format as fmt
from soma_lightning.data.findings import Findings
from soma_lightning.data.statistics import QUANTILES, REQUIRED
from soma_lightning.data.totals import FloatArray, Histogram, Place, Totals
from soma_lightning.models.normalization import CONSTANT_ABSOLUTE, CONSTANT_RELATIVE, CONSTANT_SPREAD

#: A value that is normalised (q01..q99 to -1..1) to more than this is called an outlier.
OUTLIER = 5.0
#: Twice what 1 % quantiles leave out on each side, exact or wider ones.
MOST_BEYOND_QUANTILE = 0.02
CONSTANT_RANGE = 1e-6


def check_stored(
    root: Path,
    features: Mapping[str, fmt.Feature],
    totals: Mapping[str, Totals],
    histograms: Mapping[str, Histogram],
    findings: Findings,
) -> dict[str, dict[str, FloatArray]]:
    """Compares the file with what was read; returns {column: {number: [D]}} of what it holds for numeric columns.

    totals: of every column of `features`. histograms: of state and action.
    """
    path = root / fmt.STATS_FILE
    if not path.is_file():
        findings.warning("is missing; the data module computes statistics itself", fmt.STATS_FILE)
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        findings.problem(f"is no valid JSON: {error}", fmt.STATS_FILE)
        return {}
    if not isinstance(content, dict):
        findings.problem(f"must hold a JSON object, not {type(content).__name__}", fmt.STATS_FILE)
        return {}
    for key in histograms:
        numbers = content.get(key)
        if missing := sorted({*REQUIRED} - set(numbers if isinstance(numbers, dict) else ())):
            findings.warning(f"lacks {missing}; the data module computes statistics itself", fmt.STATS_FILE, None, key)
    stored = {}
    for key, feature in features.items():
        if content.get(key) is not None:
            stored[key] = _read_vectors(content[key], feature, findings)
            if totals[key].count:
                _compare(feature, stored[key], totals[key], findings)
    for key, histogram in histograms.items():
        _check_quantile_share(key, stored.get(key, {}), histogram, findings)
    return stored


def _read_vectors(numbers: Any, feature: fmt.Feature, findings: Findings) -> dict[str, FloatArray]:
    if not isinstance(numbers, dict):
        findings.problem(f"{numbers!r} is no object of numbers", fmt.STATS_FILE, None, feature.key)
        return {}
    vectors: dict[str, FloatArray] = {}
    for name in ("min", "max", "mean", "std", *QUANTILES, "count"):
        if numbers.get(name) is None:
            continue
        size = 1 if name == "count" else feature.shape[0]
        try:
            vector = np.atleast_1d(np.asarray(numbers[name], np.float64))
        except (TypeError, ValueError):
            vector = np.empty(0)
        if vector.shape != (size,) or not np.isfinite(vector).all():
            what = f"{name} must be {size} finite numbers, found {numbers[name]}"
            findings.problem(what, fmt.STATS_FILE, None, feature.key)
        else:
            vectors[name] = vector
    return vectors


def _compare(feature: fmt.Feature, stored: Mapping[str, FloatArray], totals: Totals, findings: Findings) -> None:
    key = feature.key

    def complain(name: str, wrong: np.ndarray, due: FloatArray) -> None:
        for d in np.flatnonzero(wrong).tolist():
            what = f"{name} of dimension {d} is {stored[name][d]:.9g}, the data have {due[d]:.9g}"
            findings.problem(what, fmt.STATS_FILE, None, key)

    dtype = np.dtype(feature.dtype)
    for name, due in (("min", totals.low), ("max", totals.high)):
        if name in stored:
            complain(name, stored[name].astype(dtype) != due.astype(dtype), due)
    magnitude = np.maximum(np.abs(totals.low), np.abs(totals.high))
    std = totals.std
    if "mean" in stored:
        complain("mean", np.abs(stored["mean"] - totals.mean) > 1e-3 * std + 1e-6 * magnitude, totals.mean)
    if "std" in stored:
        slack = 2e-3 * std**2 + 5e-7 * magnitude**2
        complain("std", (stored["std"] < 0) | (np.abs(stored["std"] ** 2 - std**2) > slack), std)
    if "count" in stored and stored["count"][0] != totals.count:
        what = f"count is {stored['count'][0]:.0f}, the data have {totals.count} frames with finite values"
        findings.problem(what, fmt.STATS_FILE, None, key)
    _check_order(key, stored, totals, findings)


def _check_order(key: str, stored: Mapping[str, FloatArray], totals: Totals, findings: Findings) -> None:
    """min <= q01 <= q10 <= ... <= max, with room for float32 rounding."""
    slack = 1e-6 * np.maximum(np.abs(totals.low), np.abs(totals.high))
    chain = [("the data's minimum", totals.low)]
    chain += [(name, stored[name]) for name in QUANTILES if name in stored]
    chain += [("the data's maximum", totals.high)]
    for (low_name, low), (high_name, high) in zip(chain, chain[1:], strict=False):
        for d in np.flatnonzero(low > high + slack).tolist():
            what = f"dimension {d}: {low_name} {low[d]:.9g} is above {high_name} {high[d]:.9g}"
            findings.problem(what, fmt.STATS_FILE, None, key)


def _check_quantile_share(key: str, stored: Mapping[str, FloatArray], histogram: Histogram, findings: Findings) -> None:
    """Exact quantiles and wider ones leave at most 1 % of the frames on each side, and one frame more."""
    share = min(0.5, MOST_BEYOND_QUANTILE + 1 / histogram.counts[0].sum())
    inner = {"q01": histogram.quantile(share), "q99": histogram.quantile(1 - share)}
    width = (histogram.high - histogram.low) / histogram.counts.shape[1]
    narrow = []
    for name, sign in (("q01", 1), ("q99", -1)):
        if name in stored:
            dimensions = np.flatnonzero(sign * (stored[name] - inner[name]) > width)
            narrow += [f"{name} of dimension {d} ({stored[name][d]:.6g})" for d in dimensions]
    if narrow:
        what = f"more than {MOST_BEYOND_QUANTILE:.0%} of the frames lie beyond {', '.join(narrow)}; "
        findings.warning(f"{what}statistics='computed' takes exact quantiles", fmt.STATS_FILE, None, key)


def quantile_range(stored: Mapping[str, FloatArray], histogram: Histogram) -> tuple[FloatArray, FloatArray, str]:
    """(q01, q99, where they are from): the file's, or the histogram's to the width of a bin."""
    if "q01" in stored and "q99" in stored:
        return stored["q01"], stored["q99"], fmt.STATS_FILE
    return histogram.quantile(0.01), histogram.quantile(0.99), "the histogram"


def constant(totals: Totals) -> list[int]:
    """Dimensions that keep one value (to CONSTANT_RANGE) in the whole data set."""
    return np.flatnonzero(totals.high - totals.low <= CONSTANT_RANGE).tolist() if totals.count else []


def warn_of_outliers(
    key: str, names: Sequence[str], totals: Totals, low: FloatArray, high: FloatArray, findings: Findings
) -> None:
    """Values that a policy would see far outside -1..1; the farthest of a dimension on each side stands for all.

    low, high: q01 and q99 [D], mapped to -1 and 1; near-constant dimensions are spread as `Normalizer` does.
    """
    spread, magnitude = high - low, np.maximum(np.abs(low), np.abs(high))
    near_constant = spread <= np.maximum(CONSTANT_ABSOLUTE, CONSTANT_RELATIVE * magnitude)
    spread = np.where(near_constant, CONSTANT_SPREAD * np.maximum(1, magnitude), spread)
    for value, places in ((totals.low, totals.low_place), (totals.high, totals.high_place)):
        normalized = 2 * (value - low) / spread - 1
        for d in np.flatnonzero(np.abs(normalized) > OUTLIER).tolist():
            place: Place | None = places[d]
            if place is not None:
                what = (
                    f"frame {place.frame}: {names[d]} is {value[d]:.6g}, which becomes {normalized[d]:.3g} when "
                    f"q01..q99 = {low[d]:.6g}..{high[d]:.6g} becomes -1..1"
                )
                findings.warning(what, place.file, place.episode, key)


def warn_of_gripper(key: str, names: Sequence[str], totals: Totals, findings: Findings) -> None:
    """An action's dimension that is named gripper has the range -1 (opens) to 1 (closes) and uses both sides."""
    for d, name in enumerate(names):
        if "gripper" not in name.lower() or d in constant(totals):
            continue
        low, high = totals.low[d], totals.high[d]
        if low < -1 - CONSTANT_RANGE or high > 1 + CONSTANT_RANGE or low >= 0 or high <= 0:
            what = f"{name} (dimension {d}) has values in {low:.6g}..{high:.6g}"
            findings.warning(f"{what}; our environments take -1 (open) to 1 (close)", None, None, key)
