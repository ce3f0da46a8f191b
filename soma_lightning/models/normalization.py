"""How do raw states and actions become numbers of order one, and back? And how are the statistics stored?

Actions that a policy predicts relative to the state become differences first (`to_deltas`), then the formulas hold.

Formulas of the public checkpoints, per dimension:

    quantiles   y = 2 (x - q01) / spread - 1,  spread = q99 - q01     (openpi: + 1e-6)
    mean_std    y = (x - mean) / spread,       spread = std + 1e-8    (openpi: + 1e-6)

Nothing is clipped. A near-constant dimension (q99 - q01, or std, at most `CONSTANT_ABSOLUTE`, or `CONSTANT_RELATIVE`
of its own magnitude) would divide by almost nothing: a value 1e-3 off would become 1e5 in lerobot. Its spread is
replaced by `CONSTANT_SPREAD` times max(1, magnitude). The constant itself still maps to the public value (-1 for
quantiles, 0 for mean_std) and back to itself exactly; every other dimension keeps the public formula.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from soma_lightning.contract import ACTION, STATE, Statistics

NormalizationMode = Literal["quantiles", "mean_std"]
EpsilonOf = Literal["lerobot", "openpi"]
StatisticsLayout = Literal["lerobot", "openpi"]

CONSTANT_ABSOLUTE = 1e-5
CONSTANT_RELATIVE = 1e-4
CONSTANT_SPREAD = 1e-2

_STATS_OF_MODE: dict[str, tuple[str, str]] = {"quantiles": ("q01", "q99"), "mean_std": ("mean", "std")}
#: Added to every denominator. lerobot's quantiles add nothing: its epsilon replaces a denominator of exactly 0, which
#: the rule for near-constant dimensions already covers.
_ADDED_EPS = {
    ("quantiles", "lerobot"): 0.0,
    ("quantiles", "openpi"): 1e-6,
    ("mean_std", "lerobot"): 1e-8,
    ("mean_std", "openpi"): 1e-6,
}
_OPENPI_NAMES = {STATE: "state", ACTION: "actions"}


class Normalizer:
    """Affine map of one feature's raw values to model units and back.

    statistics: contract.Statistics. feature: "observation.state" or "action". mode: "quantiles" or "mean_std". eps:
    whose epsilon, "lerobot" or "openpi". Raises ValueError naming the feature and the statistic that is missing or
    unusable, and the way out.
    """

    def __init__(
        self, statistics: Statistics, feature: str, mode: NormalizationMode = "quantiles", eps: EpsilonOf = "lerobot"
    ) -> None:
        if (mode, eps) not in _ADDED_EPS:
            raise ValueError(f"unknown normalization {mode!r} with epsilon of {eps!r}; known: {sorted(_ADDED_EPS)}")
        self.feature, self.mode = feature, mode
        # float32 from here on, like the public code: bit-equal results decide which bin a discretised state falls in.
        first, second = (
            _statistic(statistics, feature, name, mode).astype(np.float32) for name in _STATS_OF_MODE[mode]
        )
        if first.shape != second.shape:
            raise ValueError(f"statistics of '{feature}' differ in length: {first.shape} and {second.shape}")
        spread = second - first if mode == "quantiles" else second
        if (spread < 0).any():
            what = "q99 < q01" if mode == "quantiles" else "std < 0"
            raise ValueError(
                f"statistics of '{feature}' have {what} in dimensions {np.flatnonzero(spread < 0).tolist()}"
            )
        magnitude = np.maximum(np.abs(first), np.abs(second)) if mode == "quantiles" else np.abs(first)
        constant = spread <= np.maximum(CONSTANT_ABSOLUTE, CONSTANT_RELATIVE * magnitude)
        guarded = CONSTANT_SPREAD * np.maximum(1, magnitude)
        spread = np.where(constant, guarded, spread + np.float32(_ADDED_EPS[mode, eps])).astype(np.float32)
        #: Dimensions whose spread the rule above replaced.
        self.constant_dimensions: tuple[int, ...] = tuple(np.flatnonzero(constant).tolist())
        self._values: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}
        self._low, self._spread = torch.from_numpy(first), torch.from_numpy(spread)

    @property
    def dim(self) -> int:
        """Number of dimensions that have statistics."""
        return self._low.shape[0]

    def normalize(self, x: Tensor) -> Tensor:
        """Raw units to model units. x [..., D], D >= dim; dimensions beyond `dim` pass through unchanged.

        Returns float32 (float64 for float64). Raises ValueError when D < dim.
        """
        x, low, spread = self._operands(x)
        y = x[..., : self.dim] - low
        y = 2.0 * y / spread - 1.0 if self.mode == "quantiles" else y / spread
        return self._with_rest(y, x)

    def unnormalize(self, y: Tensor) -> Tensor:
        """Inverse of `normalize`: same arguments, result in raw units."""
        y, low, spread = self._operands(y)
        x = y[..., : self.dim]
        x = (x + 1.0) * spread / 2.0 + low if self.mode == "quantiles" else x * spread + low
        return self._with_rest(x, y)

    def _operands(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if x.shape[-1] < self.dim:
            raise ValueError(
                f"'{self.feature}' has {x.shape[-1]} dimensions, but its statistics have {self.dim}; "
                "use the statistics of this data set"
            )
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        key = (x.device, dtype)
        if key not in self._values:
            self._values[key] = (self._low.to(x.device, dtype), self._spread.to(x.device, dtype))
        return (x.to(dtype), *self._values[key])

    def _with_rest(self, done: Tensor, source: Tensor) -> Tensor:
        return done if source.shape[-1] == self.dim else torch.cat([done, source[..., self.dim :]], dim=-1)


def to_deltas(actions: Tensor, state: Tensor, dims: Sequence[int]) -> Tensor:
    """Actions [B, H, A] whose dimensions `dims` are differences to the same dimensions of `state` [B, S]."""
    return _shifted(actions, state, dims, -1.0)


def from_deltas(actions: Tensor, state: Tensor, dims: Sequence[int]) -> Tensor:
    """Inverse of `to_deltas`: absolute actions [B, H, A]."""
    return _shifted(actions, state, dims, 1.0)


def _shifted(actions: Tensor, state: Tensor, dims: Sequence[int], sign: float) -> Tensor:
    shift_BA = torch.zeros_like(actions[:, 0])
    shift_BA[:, list(dims)] = sign * state[:, list(dims)].to(actions)
    return actions + shift_BA[:, None]


def _statistic(statistics: Statistics, feature: str, name: str, mode: str) -> np.ndarray:
    way_out = "compute them from the data set (LeRobotDataModule does) or load them from a JSON file"
    if feature not in statistics:
        raise ValueError(f"no statistics of '{feature}'; there are some of {sorted(statistics)}; {way_out}")
    if name not in statistics[feature]:
        raise ValueError(
            f"statistics of '{feature}' lack '{name}', which normalization={mode!r} needs; they have "
            f"{sorted(statistics[feature])}; {way_out}, or use another normalization"
        )
    value = np.asarray(statistics[feature][name], dtype=np.float64)
    if value.ndim != 1 or not np.isfinite(value).all():
        raise ValueError(f"'{name}' of '{feature}' must be a finite vector, got {value.tolist()}")
    return value


def load_statistics(path: str | Path, features: Sequence[str] = (STATE, ACTION)) -> Statistics:
    """Reads statistics of `features` from LeRobot's `stats.json` or openpi's `norm_stats.json`.

    The form is recognised by openpi's top-level key "norm_stats". Values come back as float64 vectors (count: int64);
    other features of the file are left out. Raises FileNotFoundError, or ValueError naming the file and what is wrong
    in it.
    """
    path = Path(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(content).__name__}")
    entries: dict[str, Any] = content
    if "norm_stats" in content:
        inner: Any = content["norm_stats"]
        if not isinstance(inner, dict):
            raise ValueError(f"{path}: 'norm_stats' must be an object of features, got {type(inner).__name__}")
        name_of = {theirs: ours for ours, theirs in _OPENPI_NAMES.items()}
        entries = {name_of.get(str(name), str(name)): stats for name, stats in inner.items()}
    statistics = {feature: _vectors(entries[feature], feature, path) for feature in features if feature in entries}
    if not statistics:
        wanted = " or ".join(repr(feature) for feature in features)
        raise ValueError(f"{path} has no statistics of {wanted}; it has {sorted(entries)}")
    return statistics


def _vectors(stats: Any, feature: str, path: Path) -> dict[str, np.ndarray]:
    if not isinstance(stats, Mapping):
        raise ValueError(f"{path}: '{feature}' must be an object of statistics, got {type(stats).__name__}")
    vectors: dict[str, np.ndarray] = {}
    for name, value in stats.items():
        if value is None:  # openpi writes null for quantiles that were not computed
            continue
        try:
            vector = np.asarray(value, dtype=np.int64 if name == "count" else np.float64)
        except (TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"{path}: '{name}' of '{feature}' is no vector of numbers: {error}") from error
        vectors[name] = np.atleast_1d(vector)
    lengths = {name: vector.shape for name, vector in vectors.items() if name != "count"}
    if len(set(lengths.values())) > 1 or any(len(shape) != 1 for shape in lengths.values()):
        raise ValueError(f"{path}: statistics of '{feature}' must be vectors of one length, got shapes {lengths}")
    return vectors


def save_statistics(statistics: Statistics, path: str | Path, layout: StatisticsLayout = "lerobot") -> None:
    """Writes statistics as LeRobot's `stats.json` or openpi's `norm_stats.json`; missing parent folders are made.

    openpi's form holds mean, std, q01 and q99 of state and actions only. Raises ValueError for an unknown layout, a
    feature that openpi has no name for, or missing mean or std there.
    """
    path = Path(path)
    if layout == "lerobot":
        content: dict[str, Any] = {
            feature: {name: np.asarray(value).tolist() for name, value in stats.items()}
            for feature, stats in statistics.items()
        }
    elif layout == "openpi":
        content = {"norm_stats": {}}
        for feature, stats in statistics.items():
            if feature not in _OPENPI_NAMES:
                raise ValueError(f"openpi statistics have no name for '{feature}'; known: {sorted(_OPENPI_NAMES)}")
            missing = [name for name in ("mean", "std") if name not in stats]
            if missing:
                raise ValueError(f"statistics of '{feature}' lack {missing}, which openpi's form needs")
            kept = {name: np.asarray(stats[name]).tolist() for name in ("mean", "std", "q01", "q99") if name in stats}
            content["norm_stats"][_OPENPI_NAMES[feature]] = kept
    else:
        raise ValueError(f"unknown statistics layout {layout!r}; known: lerobot, openpi")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n", encoding="utf-8")
