"""Which samples does a feature cache number, and are they still the same data?"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from soma_lightning.data import lerobot_format as fmt
from soma_lightning.data.lerobot import LeRobotDataset

#: Bytes at the end of every file that are looked at: a parquet file's footer tells sizes and places of all columns.
TAIL_BYTES = 2**16


def sample_starts(sources: Sequence[LeRobotDataset]) -> list[int]:
    """The number of each source's first sample, and behind them the number of samples.

    A source has as many samples as its data set has frames, whichever were chosen, and numbers them by `index`: the
    same frame has the same number under any filter and in both splits.
    """
    return [0, *np.cumsum([source.info.total_frames for source in sources]).tolist()]


def check_numbering(data: LeRobotDataset) -> None:
    """Raises ValueError for a data set whose frames are not numbered from 0 to the last."""
    numbers, total = data.frames.index, data.info.total_frames
    if len(np.unique(numbers)) != len(numbers) or numbers.min() < 0 or numbers.max() >= total:
        raise ValueError(
            f"feature_cache knows frames by column '{fmt.INDEX}', which does not number those of '{data.root}' from 0 "
            f"to {total - 1}; leave feature_cache out"
        )


def data_identity(sources: Sequence[LeRobotDataset]) -> dict[str, Any]:
    """What the numbers of samples mean, as JSON values: for each source its content and how observations are read.

    Neither paths nor filters nor anything of actions enters. The content is told by name, size and last
    `TAIL_BYTES` of every data and video file, and of the metadata on episodes and tasks: cheap, and another recording,
    order or encoding of the frames changes it.
    """
    return {
        f"source {number}": {
            "frames": source.info.total_frames,
            "content": _content(source.root),
            "cameras": {policy_key: key for key, policy_key in sorted(source.cameras.items())},
            "state": list(source.state_reading),
        }
        for number, source in enumerate(sources)
    }


def _content(root: Path) -> str:
    digest = hashlib.sha256()
    patterns = ("data/**/*", "videos/**/*", "meta/info.json", "meta/tasks*", "meta/episodes*", "meta/episodes/**/*")
    for path in sorted({path for pattern in patterns for path in root.glob(pattern) if path.is_file()}):
        size = path.stat().st_size
        with path.open("rb") as file:
            file.seek(max(0, size - TAIL_BYTES))
            digest.update(f"{path.relative_to(root).as_posix()} {size} ".encode())
            digest.update(hashlib.sha256(file.read()).digest())
    return digest.hexdigest()
