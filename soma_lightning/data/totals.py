"""How are the values of a whole data set described one block at a time: range, mean, spread, histogram?

Shape letters: n rows of a block, D dimensions. A block has finite rows only; memory does not depend on how many there
are. Counts and moments are merged pairwise (Chan, Golub, LeVeque, 1983, The American Statistician 37), in float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

NUM_BINS = 4000


@dataclass(frozen=True)
class Place:
    """Where a frame is: data file (relative to the root), episode, frame in it."""

    file: str
    episode: int
    frame: int


class Totals:
    """Range, mean and standard deviation (population) of a column, with the place of each smallest and largest value.

    low, high, mean: float64 [D]. low_place, high_place: one `Place` a dimension.
    """

    def __init__(self, size: int) -> None:
        self.count = 0
        self.low, self.high = np.full(size, np.inf), np.full(size, -np.inf)
        self.mean, self._squares = np.zeros(size), np.zeros(size)
        self.low_place: list[Place | None] = [None] * size
        self.high_place: list[Place | None] = [None] * size

    @property
    def std(self) -> FloatArray:
        return np.sqrt(self._squares / max(self.count, 1))

    def add(self, x_nD: FloatArray, file: str, episode_n: NDArray[np.int64], frame_n: NDArray[np.int64]) -> None:
        """Takes a block into account. episode_n, frame_n: where each row comes from."""
        if not len(x_nD):
            return
        for bound, places, rows, better in (
            (self.low, self.low_place, x_nD.argmin(axis=0), np.less),
            (self.high, self.high_place, x_nD.argmax(axis=0), np.greater),
        ):
            values = x_nD[rows, np.arange(x_nD.shape[1])]
            for d in np.flatnonzero(better(values, bound)).tolist():
                bound[d] = values[d]
                places[d] = Place(file, int(episode_n[rows[d]]), int(frame_n[rows[d]]))
        count, mean = len(x_nD), x_nD.mean(axis=0)
        total, delta = self.count + count, mean - self.mean
        self._squares += ((x_nD - mean) ** 2).sum(axis=0) + delta**2 * (self.count * count / total)
        self.mean += delta * (count / total)
        self.count = total


class Histogram:
    """How often values occur, in NUM_BINS bins of equal width a dimension between `low` and `high` [D].

    counts: int64 [D, NUM_BINS].
    """

    def __init__(self, low: FloatArray, high: FloatArray) -> None:
        self.low, self.high = low, high
        self.counts = np.zeros((len(low), NUM_BINS), np.int64)

    def add(self, x_nD: FloatArray) -> None:
        spread = np.where(self.high > self.low, self.high - self.low, 1.0)
        bin_nD = ((x_nD - self.low) / spread * NUM_BINS).astype(np.int64).clip(0, NUM_BINS - 1)
        flat = bin_nD + np.arange(len(self.low)) * NUM_BINS
        self.counts += np.bincount(flat.ravel(), minlength=self.counts.size).reshape(self.counts.shape)

    def quantile(self, q: float) -> FloatArray:
        """[D], right to the width of one bin: (high - low) / NUM_BINS."""
        cumulative = self.counts.cumsum(axis=1)
        wanted = q * cumulative[:, -1:]
        bin_D = (cumulative < wanted).sum(axis=1).clip(0, NUM_BINS - 1)
        rows = np.arange(len(self.low))
        inside = self.counts[rows, bin_D]
        below = cumulative[rows, bin_D] - inside
        share = np.where(inside > 0, (wanted[:, 0] - below) / np.maximum(inside, 1), 0.0)
        quantile: FloatArray = self.low + (bin_D + share) / NUM_BINS * (self.high - self.low)
        return quantile
