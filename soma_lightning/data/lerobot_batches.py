"""How do several data sets answer as one, a whole batch at a time?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from soma_lightning.contract import IMAGE_PREFIX
from soma_lightning.data import lerobot_format as fmt
from soma_lightning.data.feature_cache import SAMPLES
from soma_lightning.data.lerobot import LeRobotDataset


class FrameBatches(Dataset[dict[str, Any]]):
    """The frames of several data sets one after the other.

    `__getitems__` answers with ONE dictionary, the finished batch, so a DataLoader needs `collate_fn=as_is`. `index`
    and `episode_index` count on over the data sets.

    Raises ValueError naming two data sets that do not fit together (rate, cameras, image sizes, dimensions).
    """

    def __init__(self, parts: Sequence[LeRobotDataset]) -> None:
        self.parts = list(parts)
        self._known: Tensor | None = None
        self._sample_starts: list[int] = []
        for part in self.parts[1:]:
            check_compatible(self.parts[0], part)
        self._starts = np.cumsum([0, *(len(part) for part in self.parts)])
        self._index_offsets = np.cumsum([0, *(part.info.total_frames for part in self.parts)]).tolist()
        self._episode_offsets = np.cumsum([0, *(part.info.total_episodes for part in self.parts)]).tolist()

    def leave_out(self, known: Tensor, starts: Sequence[int]) -> None:
        """From now on a batch has images only of samples that are not known, and says which samples it is of.

        known: uint8 [samples], 1 = known, read for every batch (`FeatureCache.present`). starts: the number of each
        part's first sample (`sample_starts`). Black images stand for the known frames of a batch; a batch of nothing
        else has no images. `feature_cache.SAMPLES` is added.
        """
        self._known, self._sample_starts = known, list(starts)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {key: values[0] for key, values in self.__getitems__([index]).items()}

    def __getitems__(self, indices: Sequence[int]) -> dict[str, Any]:
        """The batch of these frames, in their order; see `LeRobotDataset.batch`."""
        row_B = np.asarray(indices, dtype=np.int64)
        if len(self.parts) == 1:
            return self._batch(0, row_B)
        part_B = np.searchsorted(self._starts, row_B, side="right") - 1
        pieces, slots = [], []
        for number in np.unique(part_B).tolist():
            slot = np.flatnonzero(part_B == number)
            piece = self._batch(number, row_B[slot] - self._starts[number])
            piece[fmt.INDEX] = piece[fmt.INDEX] + self._index_offsets[number]
            piece[fmt.EPISODE_INDEX] = piece[fmt.EPISODE_INDEX] + self._episode_offsets[number]
            pieces.append(piece)
            slots.append(slot)
        if self._known is not None:
            _add_black_images(pieces)
        return _merge(pieces, np.argsort(np.concatenate(slots)))

    def _batch(self, number: int, row_B: NDArray[np.int64]) -> dict[str, Any]:
        """The batch of one part's rows."""
        part = self.parts[number]
        if self._known is None:
            return part.batch(row_B.tolist())
        samples_B = part.frames.index[row_B] + self._sample_starts[number]
        batch = part.batch(row_B.tolist(), with_images=self._known.numpy()[samples_B] == 0)
        return {**batch, SAMPLES: samples_B.tolist()}


def as_is(batch: Any) -> Any:
    """`collate_fn` for data that come as whole batches."""
    return batch


def check_compatible(first: LeRobotDataset, second: LeRobotDataset) -> None:
    """Raises ValueError naming both data sets and what differs."""
    facts = [
        {
            "fps": data.fps,
            "cameras": sorted(data.cameras.values()),
            "image sizes": {data.cameras[key]: size for key, size in data.image_sizes.items()},
            "state dimension": data.state_dim,
            "action dimension": data.action_dim,
        }
        for data in (first, second)
    ]
    ways_out = {
        "fps": "resample one of them",
        "cameras": "map each source's cameras to the same names (cameras)",
        "image sizes": "resize the images of one of them",
        "state dimension": "choose the same dimensions of each source (state_indices)",
        "action dimension": "choose the same dimensions of each source (action_indices)",
    }
    for name, value in facts[0].items():
        if value != facts[1][name]:
            raise ValueError(
                f"the data sets '{first.root}' and '{second.root}' cannot be trained on together: {name} {value} and "
                f"{facts[1][name]}; {ways_out[name]}"
            )


def _add_black_images(pieces: Sequence[dict[str, Any]]) -> None:
    """Pieces without images get black ones where others have some, so that they can be merged."""
    shapes = {key: v.shape[1:] for piece in pieces for key, v in piece.items() if key.startswith(IMAGE_PREFIX)}
    for piece in pieces:
        size = len(piece[fmt.INDEX])
        missing = {key: torch.zeros(size, *shape, dtype=torch.uint8) for key, shape in shapes.items()}
        piece.update({key: images for key, images in missing.items() if key not in piece})


def _merge(pieces: Sequence[dict[str, Any]], order: np.ndarray[Any, Any]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for key, first in pieces[0].items():
        if isinstance(first, Tensor):
            merged[key] = torch.from_numpy(np.concatenate([piece[key].numpy() for piece in pieces])[order])
        else:
            joined = [value for piece in pieces for value in piece[key]]
            merged[key] = [joined[i] for i in order.tolist()]
    return merged
