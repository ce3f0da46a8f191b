"""How does a LeRobot data set become training samples: images, state, a chunk of actions and its padding mask?

Shape letters as in `contract`: B batch, H chunk, A action and S state dimensions, h/w image size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from soma_lightning.contract import ACTION, ACTION_IS_PAD, IMAGE_PREFIX, STATE, TASK, Statistics
from soma_lightning.data import lerobot_format as fmt
from soma_lightning.data import lerobot_v2
from soma_lightning.data.lerobot_frames import read_frames
from soma_lightning.data.lerobot_images import (
    DecodedImages,
    EncodedImages,
    ImageSource,
    check_memory,
    decode_all,
    memory_needed,
)
from soma_lightning.data.lerobot_metadata import load_episodes, load_tasks
from soma_lightning.data.lerobot_videos import TOLERANCE_S, VideoImages
from soma_lightning.data.statistics import check_statistics, has_required, select_dimensions
from soma_lightning.models.normalization import load_statistics


class LeRobotDataset(Dataset[dict[str, Any]]):
    """Frames of a LeRobot data set (v3.0, v2.1, v2.0; images or videos), each with the H actions that start at it.

    root: folder with `meta` and `data`. chunk_size: H. episodes: which ones (None: all); frames keep the data set's
    order. cameras: {key in the data set: key that the policy knows}; None takes every camera under its own name.
    state_key, action_key: columns to read as `observation.state` and `action`. state_indices, action_indices:
    dimensions to keep, in this order. action_scale, action_offset: one number a kept action dimension; actions become
    `action * scale + offset`. preload: decode all images once into memory; the error names the size when they
    take more than `preload_limit_gib`. image_cache_mib: embedded images that each process keeps otherwise.
    tolerance_s: how far a video's frame may be from its time, seconds.

    An item is one entry of `contract.TRAINING_BATCH`: images uint8 [3, h, w], `observation.state` float32 [S],
    `action` float32 [H, A], `action_is_pad` bool [H], `task` str, and `index`, `episode_index` as int64 0-d tensors.
    Past the episode's end the last action is repeated and marked as padding.

    Raises FileNotFoundError when there is no data set, DatasetFormatError (a ValueError) naming file, episode and
    column of what is wrong in it, ValueError for arguments that do not fit it, ImportError when a camera is stored as
    video and PyAV is missing.
    """

    def __init__(
        self,
        root: str | Path,
        chunk_size: int = 1,
        *,
        episodes: Sequence[int] | None = None,
        cameras: Mapping[str, str] | None = None,
        state_key: str = STATE,
        action_key: str = ACTION,
        state_indices: Sequence[int] | None = None,
        action_indices: Sequence[int] | None = None,
        action_scale: Sequence[float] | None = None,
        action_offset: Sequence[float] | None = None,
        preload: bool = False,
        preload_limit_gib: float = 8.0,
        image_cache_mib: int = 256,
        tolerance_s: float = TOLERANCE_S,
    ) -> None:
        self.root = Path(root)
        self.info = fmt.load_info(self.root)
        self.chunk_size = chunk_size
        self.cameras = _choose_cameras(self.root, self.info, cameras)
        self.image_sizes = {key: self.info.features[key].image_size for key in self.cameras}
        for argument, key in (("state_key", state_key), ("action_key", action_key)):
            if key not in self.info.features:
                raise ValueError(f"{argument}='{key}' is no column of '{self.root}'; it has {list(self.info.features)}")

        videos = [key for key in self.cameras if key in self.info.video_keys]
        self.tasks = load_tasks(self.root, self.info)
        rows = load_episodes(self.root, self.info, videos)
        self.episodes = check_episodes(self.root, episodes, len(rows))
        chosen = [rows[i] for i in self.episodes]
        self._keys = {STATE: (state_key, state_indices)}
        if action_scale is None and action_offset is None:
            self._keys[ACTION] = (action_key, action_indices)
        self.frames = read_frames(self.root, self.info, chosen, rows, len(self.tasks), state_key, action_key)
        self._states = _choose_dimensions(self.frames.states, "state_indices", state_indices)
        self._actions = _scaled(
            _choose_dimensions(self.frames.actions, "action_indices", action_indices), action_scale, action_offset
        )
        if preload:
            check_memory(len(self.frames), self.image_sizes, preload_limit_gib)
        sizes = {key: self.image_sizes[key] for key in self.cameras if key not in videos}
        self._images = self._open_images(sizes, preload, image_cache_mib)
        sizes = {key: self.image_sizes[key] for key in videos}
        self._images |= self._open_videos(sizes, chosen, preload, tolerance_s)

    def _open_images(
        self, sizes: dict[str, tuple[int, int]], preloaded: bool, cache_mib: int
    ) -> dict[str, ImageSource]:
        if not sizes:
            return {}
        decoded = DecodedImages(decode_all(self.frames, sizes)) if preloaded else None
        return dict.fromkeys(sizes, decoded or EncodedImages(self.frames, sizes, cache_mib))

    def _open_videos(
        self,
        sizes: dict[str, tuple[int, int]],
        episodes: Sequence[fmt.EpisodeRow],
        preloaded: bool,
        tolerance_s: float,
    ) -> dict[str, ImageSource]:
        if not sizes:
            return {}
        source = VideoImages(self.root, self.fps, episodes, self.frames, sizes, tolerance_s)
        return dict.fromkeys(sizes, DecodedImages(source.decode_all()) if preloaded else source)

    @property
    def chunk_size(self) -> int:
        """H, actions per sample; may be set anew before loading begins."""
        return self._chunk_size

    @chunk_size.setter
    def chunk_size(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"chunk_size={size} must be at least 1")
        self._chunk_size = size

    @property
    def states(self) -> Tensor:
        """All states, float32 [N, S]."""
        return torch.from_numpy(self._states)

    @property
    def actions(self) -> Tensor:
        """The action of every frame, float32 [N, A]."""
        return torch.from_numpy(self._actions)

    @cached_property
    def stored_statistics(self) -> Statistics:
        """Statistics of `observation.state` and `action` that the data set's files hold; none without such a file.

        `meta/stats.json`, or in v2.1 the statistics of the episodes pooled (min, max, mean, std, count; quantiles
        cannot be pooled). Over all its episodes, whichever were chosen, in the dimensions that samples have; not of
        actions that are scaled. Raises ValueError naming the file for numbers that do not fit the data set.
        """
        names = [key for key, _ in self._keys.values()]
        path = self.root / fmt.STATS_FILE
        if path.is_file():
            stored = load_statistics(path, names)
            if has_required(stored, names):
                check_statistics(stored, {key: self.info.features[key].shape[0] for key in names}, str(path))
        elif (self.root / lerobot_v2.EPISODES_STATS_FILE).is_file():
            stored = lerobot_v2.pool_statistics(self.root, names)
        else:
            return {}
        return {
            feature: select_dimensions(stored[key], indices)
            for feature, (key, indices) in self._keys.items()
            if key in stored
        }

    @property
    def state_reading(self) -> tuple[str, list[int] | None]:
        """The column that the state is read from, and the dimensions that are kept (None: all)."""
        key, indices = self._keys[STATE]
        return key, None if indices is None else list(indices)

    @property
    def last_row(self) -> NDArray[np.int64]:
        """Row of the last frame of each frame's episode, int64 [N]."""
        return self.frames.last_row

    @property
    def fps(self) -> int:
        """Control rate of the recording, frames per second."""
        return self.info.fps

    @property
    def state_dim(self) -> int:
        """S."""
        return int(self._states.shape[1])

    @property
    def action_dim(self) -> int:
        """A."""
        return int(self._actions.shape[1])

    @property
    def num_episodes(self) -> int:
        return len(self.episodes)

    @property
    def decoded_bytes(self) -> int:
        """Memory that `preload=True` takes, in bytes."""
        return memory_needed(len(self), self.image_sizes)

    def __len__(self) -> int:
        return len(self.frames)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Samples of many frames, gathered at once; the tensors are views of one batch."""
        batch = self.batch(indices)
        return [{key: values[i] for key, values in batch.items()} for i in range(len(indices))]

    def batch(self, indices: Sequence[int], with_images: NDArray[np.bool_] | None = None) -> dict[str, Any]:
        """A whole batch (`contract.TRAINING_BATCH`, plus `index` and `episode_index` int64 [B]) of these frames.

        with_images: bool [B], frames whose images are read; those of the others are black, and without any the batch
        has no images. Raises IndexError for a frame that is not there.
        """
        # All copies are numpy's: they are too short to be worth waking torch's threads, which costs milliseconds when
        # the cores are busy.
        frames = self.frames
        row_B = np.asarray(self._check_indices(indices), dtype=np.int64)
        step_BH = row_B[:, None] + np.arange(self.chunk_size)
        last_B1 = frames.last_row[row_B][:, None]
        batch: dict[str, Any] = {}
        if with_images is None or with_images.any():
            batch = {policy_key: self._fetch(key, row_B, with_images) for key, policy_key in self.cameras.items()}
        arrays = {
            STATE: self._states[row_B],
            ACTION: self._actions[np.minimum(step_BH, last_B1)],
            ACTION_IS_PAD: step_BH > last_B1,
            fmt.INDEX: frames.index[row_B],
            fmt.EPISODE_INDEX: frames.episode_index[row_B],
        }
        batch |= {key: torch.from_numpy(array) for key, array in arrays.items()}
        batch[TASK] = [self.tasks[task] for task in frames.task_index[row_B].tolist()]
        return batch

    def _fetch(self, camera: str, row_B: NDArray[np.int64], wanted: NDArray[np.bool_] | None) -> Tensor:
        if wanted is None or wanted.all():
            return self._images[camera].fetch(camera, row_B.tolist())
        images = torch.zeros(len(row_B), 3, *self.image_sizes[camera], dtype=torch.uint8)
        images[torch.from_numpy(wanted)] = self._images[camera].fetch(camera, row_B[wanted].tolist())
        return images

    def _check_indices(self, indices: Sequence[int]) -> list[int]:
        size = len(self)
        for index in indices:
            if not -size <= index < size:
                raise IndexError(f"frame {index} is out of range; '{self.root}' has {size} frames here")
        return [index % size for index in indices]


def _choose_cameras(root: Path, info: fmt.DatasetInfo, cameras: Mapping[str, str] | None) -> dict[str, str]:
    """{data set key: policy key}, checked."""
    known = [key for key, feature in info.features.items() if feature.is_camera]
    wanted = dict.fromkeys(known) if cameras is None else cameras
    if unknown := [key for key in wanted if key not in known]:
        raise ValueError(f"cameras names {unknown}; '{root}' has the image features {known}")
    if depth := [key for key in wanted if info.features[key].is_depth_map]:
        raise ValueError(f"{depth} of '{root}' are depth maps, which no policy reads; choose the others with cameras")
    chosen = {key: wanted[key] or key for key in wanted}
    for key, policy_key in chosen.items():
        if not policy_key.startswith(IMAGE_PREFIX):
            raise ValueError(
                f"camera '{key}' of '{root}' would reach the policy as '{policy_key}'; camera keys begin with "
                f"'{IMAGE_PREFIX}', so map it: cameras={{'{key}': '{IMAGE_PREFIX}image'}}"
            )
        if list(chosen.values()).count(policy_key) > 1:
            raise ValueError(f"cameras maps several cameras to '{policy_key}': {chosen}")
    return chosen


def check_episodes(root: Path, episodes: Sequence[int] | None, count: int) -> list[int]:
    """The episode numbers, sorted (None: all `count`). Raises ValueError for one that is not there or named twice."""
    if episodes is None:
        return list(range(count))
    if not len(episodes):
        raise ValueError(f"episodes is empty; '{root}' has the episodes 0 to {count - 1}")
    if wrong := sorted({episode for episode in episodes if not 0 <= episode < count}):
        raise ValueError(f"episodes {wrong} are not in '{root}', which has the episodes 0 to {count - 1}")
    if len(set(episodes)) != len(episodes):
        raise ValueError(f"episodes names one twice: {list(episodes)}")
    return sorted(int(episode) for episode in episodes)


def _choose_dimensions(
    values: NDArray[np.float32], argument: str, indices: Sequence[int] | None
) -> NDArray[np.float32]:
    if indices is None:
        return values
    size = values.shape[1]
    if not indices or any(not 0 <= index < size for index in indices):
        raise ValueError(f"{argument}={list(indices)} must name dimensions 0 to {size - 1}")
    if len(set(indices)) != len(indices):
        raise ValueError(f"{argument}={list(indices)} names a dimension twice")
    return np.ascontiguousarray(values[:, list(indices)])


def _scaled(
    actions: NDArray[np.float32], scale: Sequence[float] | None, offset: Sequence[float] | None
) -> NDArray[np.float32]:
    for argument, values in (("action_scale", scale), ("action_offset", offset)):
        if values is not None and (len(values) != actions.shape[1] or not np.isfinite(values).all()):
            raise ValueError(f"{argument}={list(values)} must hold {actions.shape[1]} finite numbers, one a dimension")
    if scale is not None and 0 in scale:
        raise ValueError(f"action_scale={list(scale)} has a 0; leave that dimension out with action_indices")
    if scale is not None:
        actions = actions * np.asarray(scale, np.float32)
    return actions if offset is None else actions + np.asarray(offset, np.float32)
