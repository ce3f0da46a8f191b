"""Which numbers describe the values of a feature: mean, spread, range and quantiles, computed, checked and found.

Quantiles are exact and pooled over all frames (`numpy.quantile`). LeRobot makes them of the episodes' own: release
0.6.1 takes their mean, weighted by frames, which can be far narrower than the data; its main branch the smallest q01
and the largest q99, which is wider. A file is taken as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from soma_lightning.contract import ACTION, STATE, Statistics

FloatArray = NDArray[np.float64]

QUANTILES = {"q01": 0.01, "q10": 0.1, "q50": 0.5, "q90": 0.9, "q99": 0.99}
#: Packaged recipes; statistics of whole workspaces lie beside them.
RECIPES = Path(__file__).parents[1] / "recipes"
#: What a policy needs of each feature; `count` is the number of frames behind the numbers.
REQUIRED = ("mean", "std", "min", "max", "q01", "q99")


class HasStatesAndActions(Protocol):
    """A data set that holds all its states float32 [N, S] and actions float32 [N, A] in memory."""

    @property
    def states(self) -> Tensor: ...

    @property
    def actions(self) -> Tensor: ...


class HasChunks(HasStatesAndActions, Protocol):
    """A data set that also says where its episodes end: `last_row` int64 [N] of each frame, and H."""

    @property
    def last_row(self) -> NDArray[np.int64]: ...

    @property
    def chunk_size(self) -> int: ...


def describe(values: NDArray[Any]) -> dict[str, NDArray[Any]]:
    """All numbers that LeRobot keeps of a feature.

    values: [N, D] numbers or booleans. Returns float64 [D] for min, max, mean, std (population) and the quantiles
    q01, q10, q50, q90, q99 (linear interpolation), and count int64 [1].
    """
    x_ND = np.asarray(values, dtype=np.float64)
    if x_ND.ndim != 2 or not len(x_ND):
        raise ValueError(f"statistics need values of shape [N, D] with N > 0, found {list(x_ND.shape)}")
    quantiles = np.quantile(x_ND, list(QUANTILES.values()), axis=0)
    return {
        "min": x_ND.min(axis=0),
        "max": x_ND.max(axis=0),
        "mean": x_ND.mean(axis=0),
        "std": x_ND.std(axis=0),
        **dict(zip(QUANTILES, quantiles, strict=True)),
        "count": np.array([len(x_ND)], dtype=np.int64),
    }


def describe_pixels(histogram: NDArray[np.int64], num_images: int) -> dict[str, NDArray[Any]]:
    """The same numbers of 8-bit images, exactly, from their histogram.

    histogram: [3, 256], how often each value occurs in each channel. num_images: what `count` says.
    Returns float64 [3, 1, 1] in 0..1 (pixel / 255).
    """
    levels = np.arange(256, dtype=np.float64) / 255.0
    total = histogram.sum(axis=1).astype(np.float64)
    mean = histogram @ levels / total
    variance = np.maximum(histogram @ levels**2 / total - mean**2, 0.0)
    present = histogram > 0
    numbers = {
        "min": levels[present.argmax(axis=1)],
        "max": levels[255 - present[:, ::-1].argmax(axis=1)],
        "mean": mean,
        "std": np.sqrt(variance),
        **{name: _histogram_quantile(histogram, levels, q) for name, q in QUANTILES.items()},
    }
    described: dict[str, NDArray[Any]] = {name: value.reshape(-1, 1, 1) for name, value in numbers.items()}
    described["count"] = np.array([num_images], dtype=np.int64)
    return described


def _histogram_quantile(histogram: NDArray[np.int64], levels: FloatArray, q: float) -> FloatArray:
    """`numpy.quantile` (linear) of the values that each row of `histogram` counts."""
    result = np.empty(len(histogram))
    for channel, counts in enumerate(histogram):
        cumulative = np.cumsum(counts)
        position = q * (int(cumulative[-1]) - 1)
        below = int(np.floor(position))
        low, high = np.searchsorted(cumulative, [below, min(below + 1, int(cumulative[-1]) - 1)], side="right")
        result[channel] = levels[low] + (position - below) * (levels[high] - levels[low])
    return result


def compute_statistics(source: HasStatesAndActions | Mapping[str, NDArray[Any]]) -> Statistics:
    """Exact statistics over all frames of a data set, or of arrays {feature: [N, D]}.

    Raises ValueError naming a feature whose values are not finite or not of shape [N, D].
    """
    arrays = source if isinstance(source, Mapping) else {STATE: source.states.numpy(), ACTION: source.actions.numpy()}
    statistics: Statistics = {}
    for feature, values in arrays.items():
        if not np.isfinite(values).all():
            raise ValueError(f"'{feature}' has values that are not finite; statistics would be meaningless")
        described = describe(values)
        statistics[feature] = {name: described[name] for name in (*REQUIRED, "count")}
    return statistics


def describe_deltas(parts: Sequence[HasChunks], dims: Sequence[int]) -> dict[str, NDArray[Any]]:
    """The numbers of `action` when its dimensions `dims` are relative to the state at the chunk's first step.

    Those dimensions pool the differences of every frame's chunk at all its offsets, without the repeated steps past an
    episode's end; the others pool the actions of all frames. `count` is the number of frames.
    """
    numbers = describe(np.concatenate([part.actions.numpy() for part in parts]))
    for dim in dims:  # one at a time: all chunks of a large data set at once would be H times its size
        described = describe(np.concatenate([_deltas(part, dim) for part in parts])[:, None])
        for name in (*REQUIRED, *QUANTILES):
            numbers[name][dim] = described[name][0]
    return {name: numbers[name] for name in (*REQUIRED, "count")}


def _deltas(part: HasChunks, dim: int) -> FloatArray:
    """action[n + h, dim] - state[n, dim] of every frame n and offset h inside its episode."""
    state, action = part.states.numpy()[:, dim], part.actions.numpy()[:, dim]
    rows = np.arange(len(state))
    pieces = []
    for offset in range(part.chunk_size):
        real = rows[rows + offset <= part.last_row]
        pieces.append(action[real + offset] - state[real])  # float32, as the policy computes it
    return np.concatenate(pieces)


def select_dimensions(numbers: Mapping[str, NDArray[Any]], indices: Sequence[int] | None) -> dict[str, NDArray[Any]]:
    """The numbers of one feature for some of its dimensions, in this order (None: all)."""
    wanted = {name: values for name, values in numbers.items() if name in REQUIRED}
    if indices is not None:
        wanted = {name: values[list(indices)] for name, values in wanted.items()}
    return wanted | ({"count": numbers["count"]} if "count" in numbers else {})


def constant_dimensions(statistics: Statistics, tolerance: float = 1e-6) -> dict[str, list[int]]:
    """{feature: dimensions whose values never leave a range of `tolerance`}; features without one are left out."""
    constant = {
        feature: [int(i) for i in np.flatnonzero(numbers["max"] - numbers["min"] <= tolerance)]
        for feature, numbers in statistics.items()
    }
    return {feature: dimensions for feature, dimensions in constant.items() if dimensions}


def check_statistics(statistics: Statistics, dimensions: Mapping[str, int], source: str) -> None:
    """Raises ValueError unless `statistics` has every number of every feature, finite and of the given length.

    dimensions: {feature: D}. source: where the statistics came from, for the message.
    """
    for feature, size in dimensions.items():
        if feature not in statistics:
            raise ValueError(f"{source} has no statistics of '{feature}'; it has {sorted(statistics)}")
        for name in REQUIRED:
            values = statistics[feature].get(name)
            if values is None:
                raise ValueError(
                    f"{source}: '{feature}' lacks '{name}'; it has {sorted(statistics[feature])}. "
                    "Use statistics='computed' to compute all of them from the data set"
                )
            if values.shape != (size,):
                raise ValueError(
                    f"{source}: '{feature}/{name}' has {list(values.shape)} values, the data set's '{feature}' "
                    f"has {size} dimensions"
                )
            if not np.isfinite(values).all():
                raise ValueError(f"{source}: '{feature}/{name}' has values that are not finite: {values.tolist()}")


def has_required(statistics: Statistics, features: Sequence[str]) -> bool:
    """Whether every number that a policy needs is there (files of LeRobot before v3.0 have no quantiles)."""
    return all(feature in statistics and set(REQUIRED) <= set(statistics[feature]) for feature in features)


def find_statistics(name: str | Path) -> Path:
    """The file of that path, or the packaged one of that name. Raises FileNotFoundError naming the packaged ones."""
    packaged = RECIPES / f"{name}.json"
    for path in (Path(name), packaged):
        if path.is_file():
            return path
    known = sorted(path.stem for path in RECIPES.glob("*statistics.json"))
    raise FileNotFoundError(
        f"no statistics file at '{name}', and no packaged one of that name (packaged: {known}); use "
        "statistics='dataset' to take the data set's own"
    )
