"""What does a Lightning run train on: which data sets, episodes, cameras and statistics, in which batches?"""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import lightning.pytorch as pl
import numpy as np
import torch
from torch.utils.data import DataLoader

from soma_lightning.contract import ACTION, STATE, Statistics
from soma_lightning.data import lerobot_format as fmt
from soma_lightning.data import statistics as stats
from soma_lightning.data.augmentation import DRAWS, ImageAugmentation, make_augmenter
from soma_lightning.data.facts import recording_facts, source_facts
from soma_lightning.data.feature_cache import FeatureCache, check_feature_settings
from soma_lightning.data.feature_dtypes import StoredDtype
from soma_lightning.data.feature_identity import check_numbering, data_identity, sample_starts
from soma_lightning.data.lerobot import LeRobotDataset
from soma_lightning.data.lerobot_batches import FrameBatches, as_is
from soma_lightning.data.lerobot_images import GIB
from soma_lightning.data.lerobot_videos import TOLERANCE_S
from soma_lightning.data.sampling import EpochSampler, MixtureSampler, ResumableDataLoader, split_episodes
from soma_lightning.data.sources import DataSource, as_sources, check_disjoint, choose_episodes
from soma_lightning.models.normalization import load_statistics


class PolicyShape(Protocol):
    """What the data need to know of a policy's configuration."""

    @property
    def chunk_size(self) -> int: ...


class LeRobotDataModule(pl.LightningDataModule):
    """One or several LeRobot v3.0 data sets, split into training and validation by episode.

    root: folder or `DataSource` (filters, weight, maps of its own), or a list of them. Without weights an epoch draws
    every frame once, so a data set's share is proportional to its frames; with weights an epoch has as many samples.
    batch_size: frames per rank.
    chunk_size: H, actions per sample; None takes the policy's (`connect_policy`).
    statistics: "dataset" reads `meta/stats.json` of a single data set when it has quantiles and computes exact
    statistics otherwise; "computed" always computes; anything else is a JSON file of that form, by path or as the name
    of a packaged one ("somatable_statistics").
    val_fraction: share of each data set's episodes for validation, 0 for none. max_episodes: use only the first ones
    of each data set; sources may say their own. seed: decides the split and the order of every epoch.
    drop_last: leave out the last, smaller training batch.
    preload: decode all images once into memory (up to preload_limit_gib GiB). tolerance_s: as in `LeRobotDataset`.
    augment: "off", "light", "openpi" or an `ImageAugmentation`: varies the images of training batches on their device.
    wrist_cameras: the policy's names of the cameras that are neither cropped nor rotated (see `BatchAugmenter`).
    cameras, state_key, action_key, state_indices, action_indices: as in `LeRobotDataset`; sources may say their own.
    feature_cache: keep what the policy's frozen backbone computes: on the "device", in "pinned" memory, or in a folder.
    feature_dtype: the numbers that are kept (see `FeatureCache`).

    Batches: `contract.TRAINING_BATCH` plus `index` and `episode_index` int64 [B], which count on over the data sets.
    The order of an epoch depends on (seed, epoch) alone, and a run resumed inside an epoch sees its remaining batches.
    """

    def __init__(
        self,
        root: str | DataSource | list[str | DataSource],
        batch_size: int = 32,
        chunk_size: int | None = None,
        cameras: dict[str, str] | None = None,
        statistics: str = "dataset",
        val_fraction: float = 0.1,
        num_workers: int = 0,
        preload: bool = False,
        seed: int = 0,
        drop_last: bool = True,
        max_episodes: int | None = None,
        state_key: str = STATE,
        action_key: str = ACTION,
        state_indices: list[int] | None = None,
        action_indices: list[int] | None = None,
        preload_limit_gib: float = 8.0,
        augment: str | bool | ImageAugmentation = "off",
        wrist_cameras: list[str] | None = None,
        tolerance_s: float = TOLERANCE_S,
        feature_cache: str | None = None,
        feature_dtype: StoredDtype = "auto",
    ) -> None:
        super().__init__()
        for name, value, least in (
            ("batch_size", batch_size, 1),
            ("num_workers", num_workers, 0),
            ("seed", seed, 0),
            ("max_episodes", 1 if max_episodes is None else max_episodes, 1),
            ("chunk_size", 1 if chunk_size is None else chunk_size, 1),
        ):
            if value < least:
                raise ValueError(f"{name}={value} must be at least {least}")
        self.augmenter = make_augmenter(augment, wrist_cameras, seed)
        check_feature_settings(feature_cache, feature_dtype, augments=self.augmenter is not None)
        self.feature_cache, self.feature_dtype = feature_cache, feature_dtype
        self._feature_policy_connected = False
        split_episodes(2, val_fraction, seed)  # refuses a bad fraction here, not after the data were read
        self.sources = [
            source.with_defaults(
                max_episodes=max_episodes,
                cameras=cameras,
                state_key=state_key,
                action_key=action_key,
                state_indices=state_indices,
                action_indices=action_indices,
            )
            for source in as_sources(root)
        ]
        self.roots = [source.root for source in self.sources]
        unfiltered = [Path(source.root).resolve() for source in self.sources if not source.filters]
        if len(set(unfiltered)) != len(unfiltered):
            raise ValueError(f"root names a data set twice, so its frames would count twice: {self.roots}")
        self.batch_size = batch_size
        self.chunk_size = chunk_size
        self.statistics_choice = statistics
        self.val_fraction = val_fraction
        self.num_workers = num_workers
        self.preload = preload
        self.preload_limit_gib = preload_limit_gib
        self.tolerance_s = tolerance_s
        self.seed = seed
        self.drop_last = drop_last
        self.delta_actions: tuple[int, ...] = ()  # the policy's

    def setup(self, stage: str | None = None) -> None:
        """Reads the data sets once. Raises what `LeRobotDataset` raises, and ValueError when no batch would be full."""
        if self.drop_last and len(self.train_data) < self.batch_size:
            raise ValueError(
                f"the training episodes of {self.roots} have {len(self.train_data)} frames, fewer than "
                f"batch_size={self.batch_size}, so drop_last=True leaves no batch; use a smaller batch_size"
            )
        self._train_order()
        if self.augmenter is not None:
            self.augmenter.check(self.cameras)
        _ = self.statistics

    def connect_policy(self, config: PolicyShape) -> None:
        """Takes the chunk size from the policy's configuration, unless it was given here, and its `delta_actions`.

        Raises ValueError when the chunk size given here is another.
        """
        if self.chunk_size is None:
            self.chunk_size = config.chunk_size
        elif self.chunk_size != config.chunk_size:
            raise ValueError(
                f"data.chunk_size={self.chunk_size} differs from the policy's chunk_size={config.chunk_size}; leave "
                "the data module's out to take the policy's"
            )
        deltas = tuple(getattr(config, "delta_actions", ()))
        if deltas != self.delta_actions:
            self.delta_actions = deltas
            self.__dict__.pop("_statistics_and_source", None)

    def connect_features(self) -> FeatureCache | None:
        """The cache that a policy's module must read features from; None when none is wanted."""
        self._feature_policy_connected = True
        return self.features

    @cached_property
    def features(self) -> FeatureCache | None:
        """The cache of the data sets' frames; None when none is wanted.

        Raises ValueError for a data set whose frames are not numbered from 0.
        """
        if self.feature_cache is None:
            return None
        for part in self._parts:
            check_numbering(part)
        sources = self.train_data.parts
        starts = sample_starts(sources)
        cache = FeatureCache(
            self.feature_cache,
            starts[-1],
            expected=self.num_frames,
            data=lambda: data_identity(sources),
            dtype=self.feature_dtype,
        )
        self.train_data.leave_out(cache.present, starts)
        if self.val_data is not None:
            has_val = [bool(val) for _, val in self.splits]
            self.val_data.leave_out(cache.present, [s for s, has in zip(starts, has_val, strict=False) if has])
        return cache

    def _check_features_read(self) -> None:
        if self.feature_cache is not None and not self._feature_policy_connected:
            raise ValueError(
                f"feature_cache={self.feature_cache!r} would be ignored: this LightningModule reads no features; leave "
                "it out, or train a policy module (PI05Module)"
            )

    def _prepare_chunks(self) -> None:
        if self.chunk_size is None:
            raise ValueError("chunk_size is not set; pass chunk_size=..., or call connect_policy(policy.config)")
        for part in self._parts:
            part.chunk_size = self.chunk_size

    @cached_property
    def splits(self) -> list[tuple[list[int], list[int]]]:
        """(training episodes, validation episodes) of each data set."""
        chosen = [choose_episodes(source) for source in self.sources]
        check_disjoint(self.sources, chosen)
        splits = []
        for episodes in chosen:
            train, val = split_episodes(len(episodes), self.val_fraction, self.seed)
            splits.append(([episodes[i] for i in train], [episodes[i] for i in val]))
        return splits

    @cached_property
    def train_data(self) -> FrameBatches:
        """Frames of the training episodes."""
        return FrameBatches([self._open(s, train) for s, (train, _) in zip(self.sources, self.splits, strict=True)])

    @cached_property
    def val_data(self) -> FrameBatches | None:
        """Frames of the validation episodes; None when there are none."""
        parts = [self._open(s, val) for s, (_, val) in zip(self.sources, self.splits, strict=True) if val]
        return FrameBatches(parts) if parts else None

    def _open(self, source: DataSource, episodes: list[int]) -> LeRobotDataset:
        with torch.inference_mode(False):  # validation may open the data first; training must be able to use it
            return LeRobotDataset(
                source.root,
                self.chunk_size or 1,
                episodes=episodes,
                preload=self.preload,
                preload_limit_gib=self.preload_limit_gib,
                tolerance_s=self.tolerance_s,
                **source.reading,
            )

    @property
    def _parts(self) -> list[LeRobotDataset]:
        return self.train_data.parts + (self.val_data.parts if self.val_data is not None else [])

    def train_dataloader(self) -> ResumableDataLoader:
        """Shuffled batches of the training episodes; its `state_dict` makes a run resumable inside an epoch."""
        self.setup("fit")
        self._prepare_chunks()
        self._check_features_read()
        return ResumableDataLoader(
            self.train_data,
            batch_size=self.batch_size,
            sampler=self._train_order(),
            drop_last=self.drop_last,
            num_workers=self.num_workers,
            collate_fn=as_is,
            pin_memory=torch.cuda.is_available(),
            multiprocessing_context=self._worker_start,
            persistent_workers=self.num_workers > 0,
        )

    def _train_order(self) -> EpochSampler:
        weights = [source.weight for source in self.sources if source.weight is not None]
        if not weights:
            return EpochSampler(self.train_data, self.seed)
        return MixtureSampler([len(part) for part in self.train_data.parts], weights, self.seed)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Draws how the images of a training batch are varied."""
        if self.augmenter is None or self.trainer is None or not self.trainer.training:
            return batch
        # The loop counts this batch only after the transfer.
        return self.augmenter.draw(batch, self.trainer.current_epoch, self.trainer.fit_loop.epoch_loop.batch_idx + 1)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Varies the images of a training batch; validation sees them as they are."""
        return self.augmenter(batch) if self.augmenter is not None and DRAWS in batch else batch

    def val_dataloader(self) -> DataLoader[Any] | list[DataLoader[Any]]:
        """Batches of the validation episodes in order; an empty list when there are none."""
        self._prepare_chunks()
        self._check_features_read()
        if self.val_data is None:
            return []
        return self._in_order(self.val_data)

    def _in_order(self, data: FrameBatches) -> DataLoader[Any]:
        return DataLoader(
            data,
            batch_size=self.batch_size,
            num_workers=self.num_workers,
            collate_fn=as_is,
            pin_memory=torch.cuda.is_available(),
            multiprocessing_context=self._worker_start,
            persistent_workers=self.num_workers > 0,
        )

    def every_frame_dataloaders(self) -> list[DataLoader[Any]]:
        """The batches of the training and of the validation episodes, in order."""
        self._prepare_chunks()
        return [self._in_order(data) for data in (self.train_data, self.val_data) if data is not None]

    def test_dataloader(self) -> DataLoader[Any] | list[DataLoader[Any]]:
        """The validation batches: a data set has no third split."""
        return self.val_dataloader()

    def predict_dataloader(self) -> DataLoader[Any] | list[DataLoader[Any]]:
        """The validation batches."""
        return self.val_dataloader()

    @property
    def _worker_start(self) -> str | None:
        # A forked copy of a process that runs CUDA, OpenGL or Arrow threads can hang.
        return "spawn" if self.num_workers > 0 else None

    @property
    def statistics(self) -> Statistics:
        """Of `observation.state` and `action`, in the dimensions that batches have."""
        return self._statistics_and_source[0]

    @property
    def statistics_source(self) -> str:
        """Where the statistics came from."""
        return self._statistics_and_source[1]

    @cached_property
    def _statistics_and_source(self) -> tuple[Statistics, str]:
        dimensions = {STATE: self.state_dim, ACTION: self.action_dim}
        if self.statistics_choice not in ("dataset", "computed"):
            statistics = load_statistics(stats.find_statistics(self.statistics_choice))
            source = f"file '{self.statistics_choice}'"
        elif self.delta_actions:
            statistics, source = self._delta_statistics()
        elif (stored := self._stored_statistics()) is not None:
            statistics, source = stored, f"{fmt.STATS_FILE} of '{self.roots[0]}', all its episodes"
        else:
            frames = {
                STATE: torch.cat([part.states for part in self._parts]).numpy(),
                ACTION: torch.cat([part.actions for part in self._parts]).numpy(),
            }
            statistics = stats.compute_statistics(frames)
            source = f"computed from {len(frames[STATE])} frames of {self.roots}"
        stats.check_statistics(statistics, dimensions, source)
        return {feature: statistics[feature] for feature in dimensions}, source

    def _delta_statistics(self) -> tuple[Statistics, str]:
        if self.statistics_choice == "dataset":
            raise ValueError(
                f"statistics='dataset' are of absolute actions, but the policy has delta_actions="
                f"{list(self.delta_actions)}; set statistics='computed', or name a file with those of the differences"
            )
        self._prepare_chunks()
        statistics = stats.compute_statistics({STATE: torch.cat([part.states for part in self._parts]).numpy()})
        statistics[ACTION] = stats.describe_deltas(self._parts, self.delta_actions)
        source = f"computed from {self.num_frames} frames of {self.roots}, dimensions {list(self.delta_actions)} of "
        return statistics, f"{source}action relative to the state over chunks of {self.chunk_size}"

    def _stored_statistics(self) -> Statistics | None:
        """Those of the data set's own file, when it is one data set and the file has all that a policy needs."""
        if self.statistics_choice == "computed" or len(self.sources) > 1:
            return None
        stored = self.train_data.parts[0].stored_statistics
        return stored if stats.has_required(stored, (STATE, ACTION)) else None

    @property
    def state_dim(self) -> int:
        """S, dimensions of `observation.state` in a batch."""
        return self.train_data.parts[0].state_dim

    @property
    def action_dim(self) -> int:
        """A, dimensions of `action` in a batch."""
        return self.train_data.parts[0].action_dim

    @property
    def fps(self) -> int:
        """Control rate of the recordings, frames per second."""
        return self.train_data.parts[0].fps

    @property
    def cameras(self) -> list[str]:
        """Camera keys of a batch."""
        return list(self.train_data.parts[0].cameras.values())

    @property
    def tasks(self) -> list[str]:
        """Instructions that occur in the chosen episodes."""
        return sorted({part.tasks[i] for part in self._parts for i in np.unique(part.frames.task_index)})

    @property
    def num_episodes(self) -> int:
        """Training and validation episodes together."""
        return sum(part.num_episodes for part in self._parts)

    @property
    def num_frames(self) -> int:
        """Training and validation frames together."""
        return sum(len(part) for part in self._parts)

    def report_facts(self) -> dict[str, Any]:
        """What a run report says about the data (JSON-ready)."""
        val = self.val_data
        order = self._train_order()
        sizes = [len(part) for part in self.train_data.parts]
        counts = order.counts if isinstance(order, MixtureSampler) else sizes
        return {
            "data_sets": [str(root) for root in self.roots],
            "sources": source_facts(self.sources, sizes, counts),
            "train_episodes": sum(len(train) for train, _ in self.splits),
            "val_episodes": sum(len(val_episodes) for _, val_episodes in self.splits),
            "train_frames": len(self.train_data),
            "val_frames": 0 if val is None else len(val),
            "split_seed": self.seed,
            "tasks": self.tasks,
            "fps": self.fps,
            "cameras": self.cameras,
            "image_sizes": [list(size) for size in self.train_data.parts[0].image_sizes.values()],
            "state_dim": self.state_dim,
            "action_dim": self.action_dim,
            "chunk_size": self.chunk_size,
            "batch_size": self.batch_size,
            "statistics_source": self.statistics_source,
            "delta_actions": list(self.delta_actions),
            "constant_dimensions": stats.constant_dimensions(self.statistics),
            "images_in_memory": self.preload,
            "features": "computed for every batch" if self.features is None else self.features.report_facts(),
            "augmentation": self.augmenter.report_facts(self.cameras) if self.augmenter is not None else "off",
            **recording_facts(self.roots),
        }

    def loading_advice(self) -> str:
        """What would make batches come faster, for a run that waits for them."""
        ways = [f"raise data.num_workers (now {self.num_workers}; this machine has {os.cpu_count()} cores)"]
        needed = sum(part.decoded_bytes for part in self._parts) / GIB
        if not self.preload:
            ways.append(f"set data.preload=true (the decoded images take {needed:.1f} GiB in every process)")
        if any(key in part.info.video_keys for part in self.train_data.parts for key in part.cameras):
            ways.append("store embedded images (dtype 'image') instead of videos, which take longer to decode")
        return ", or ".join(ways)
