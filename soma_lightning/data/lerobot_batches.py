"""How do several data sets answer as one, a whole batch at a time?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from soma_lightning.data import lerobot_format as fmt
from soma_lightning.data.lerobot import LeRobotDataset


class FrameBatches(Dataset[dict[str, Any]]):
    """The frames of several data sets one after the other.

    `__getitems__` answers with ONE dictionary, the finished batch, so a DataLoader needs `collate_fn=as_is`. `index`
    and `episode_index` count on over the data sets.

    Raises ValueError naming two data sets that do not fit together (rate, cameras, image sizes, dimensions).
    """

    def __init__(self, parts: Sequence[LeRobotDataset]) -> None:
        self.parts = list(parts)
        for part in self.parts[1:]:
            check_compatible(self.parts[0], part)
        self._starts = np.cumsum([0, *(len(part) for part in self.parts)])
        self._index_offsets = np.cumsum([0, *(part.info.total_frames for part in self.parts)]).tolist()
        self._episode_offsets = np.cumsum([0, *(part.info.total_episodes for part in self.parts)]).tolist()

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {key: values[0] for key, values in self.__getitems__([index]).items()}

    def __getitems__(self, indices: Sequence[int]) -> dict[str, Any]:
        """The batch of these frames, in their order; see `LeRobotDataset.batch`."""
        if len(self.parts) == 1:
            return self.parts[0].batch(indices)
        row_B = np.asarray(indices, dtype=np.int64)
        part_B = np.searchsorted(self._starts, row_B, side="right") - 1
        pieces, slots = [], []
        for number in np.unique(part_B).tolist():
            slot = np.flatnonzero(part_B == number)
            piece = self.parts[number].batch((row_B[slot] - self._starts[number]).tolist())
            piece[fmt.INDEX] = piece[fmt.INDEX] + self._index_offsets[number]
            piece[fmt.EPISODE_INDEX] = piece[fmt.EPISODE_INDEX] + self._episode_offsets[number]
            pieces.append(piece)
            slots.append(slot)
        return _merge(pieces, np.argsort(np.concatenate(slots)))


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


def _merge(pieces: Sequence[dict[str, Any]], order: np.ndarray[Any, Any]) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for key, first in pieces[0].items():
        if isinstance(first, Tensor):
            merged[key] = torch.from_numpy(np.concatenate([piece[key].numpy() for piece in pieces])[order])
        else:
            joined = [value for piece in pieces for value in piece[key]]
            merged[key] = [joined[i] for i in order.tolist()]
    return merged
