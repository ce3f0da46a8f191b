"""Which tasks and episodes has a data set, whatever version of the format it is in?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from soma_lightning.data import lerobot_format as fmt
from soma_lightning.data import lerobot_v2


def load_tasks(root: Path, info: fmt.DatasetInfo) -> list[str]:
    """The instruction of each task index. Raises DatasetFormatError naming the file of what is wrong."""
    return lerobot_v2.load_tasks(root) if _has_episode_files(info) else fmt.load_tasks(root)


def load_episodes(root: Path, info: fmt.DatasetInfo, videos: Sequence[str] = ()) -> list[fmt.EpisodeRow]:
    """Every episode in order, with the place of its frames in the videos of the cameras `videos`.

    Raises DatasetFormatError when rows are missing, unordered or disagree with `info`.
    """
    load = lerobot_v2.load_episodes if _has_episode_files(info) else fmt.load_episodes
    return load(root, info, videos)


def _has_episode_files(info: fmt.DatasetInfo) -> bool:
    return info.version in fmt.EPISODE_FILE_VERSIONS
