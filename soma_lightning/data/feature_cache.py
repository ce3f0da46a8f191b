"""Which frozen features are known already, and where do they come from: computed now, or kept from an earlier epoch?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal, Protocol, cast

import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

from soma_lightning.data.feature_dtypes import StoredDtype, check_stored_dtype, decode_parts, encode_parts
from soma_lightning.data.feature_memory import MemoryStore
from soma_lightning.data.feature_shards import FolderStore
from soma_lightning.data.lerobot_images import GIB
from soma_lightning.models.features import FrozenFeatures, stack_samples

#: Places that are no folder, and what else they might be called.
MEMORIES = ("device", "pinned")
_OTHER_NAMES = ("gpu", "cuda", "cpu", "host", "memory", "ram")
#: Key of a batch's sample numbers: a list of B ints, which stays on the host.
SAMPLES = "feature_samples"


def check_feature_settings(where: str | None, dtype: StoredDtype, *, augments: bool) -> None:
    """Raises ValueError for settings of a data module that contradict each other, or mean something else."""
    check_stored_dtype(dtype)
    if where is not None:
        _check_place(where)
    if where is None and dtype != "auto":
        raise ValueError(f"feature_dtype={dtype!r} has no effect without feature_cache; set feature_cache, too")
    if where is not None and augments:
        raise ValueError(
            f"feature_cache={where!r} keeps the features of each image, but augment varies the images in every epoch; "
            "set augment='off', or leave feature_cache out"
        )


def _check_place(where: str) -> None:
    """A slip in "device" or "pinned" would be the name of a folder, and fill the disk."""
    if not where:
        raise ValueError("feature_cache='' names no place; use 'device', 'pinned', a folder, or leave it out")
    if "://" in where:
        raise ValueError(f"feature_cache={where!r} must be a folder that this machine can map, not an address")
    if where in MEMORIES or "/" in where or Path(where).is_dir():
        return
    if get_close_matches(where.lower(), [*MEMORIES, *_OTHER_NAMES], 1, cutoff=0.7):
        raise ValueError(
            f"feature_cache={where!r} is neither 'device' nor 'pinned'; for a folder of that name write './{where}'"
        )


class FeaturePolicy(Protocol):
    """What a policy with a frozen backbone offers so that its features can be cached.

    Its `sft_forward` and `sample_actions` take the features as `features=`, with the same result as without.
    """

    @property
    def device(self) -> torch.device: ...

    def check_features_fixed(self) -> None:
        """Raises ValueError when `encode_features` may change in training, or cannot run on one rank alone."""
        ...

    def feature_identity(self) -> dict[str, Any]:
        """Everything but the observations that decides what `encode_features` returns, as JSON values."""
        ...

    def encode_features(self, batch: Mapping[str, Any]) -> FrozenFeatures:
        """What the frozen backbone computes for the observations of a batch."""
        ...


class FeatureStore(Protocol):
    """Where samples are kept, by number."""

    def keys(self) -> Iterable[int]: ...
    def put(self, key: int, sample: Mapping[str, Tensor]) -> None: ...
    def get(self, key: int) -> Mapping[str, Tensor]: ...
    def flush(self) -> None: ...
    def refresh(self) -> None: ...
    def free_bytes(self) -> int: ...


class FeatureCache:
    """Features of the samples of a data set: computed when a sample is met for the first time, read afterwards.

    where: "device" (the training device), "pinned" (host memory), or a folder. num_samples: samples have the numbers
    0..num_samples - 1. expected: how many of them this run draws from; the memory that they need is printed, and asked
    for, before anything is stored. data: gives facts that say which samples these are, as JSON values (for a folder).
    dtype: "auto" keeps the numbers that the backbone computed; "bfloat16" and "float8_e4m3fn" round them, also in the
    epoch that computes them, so that all epochs see the same.

    Every rank keeps the samples that it meets; what others computed is seen only in a folder, from the next epoch on.
    Raises ValueError for an unknown dtype.
    """

    def __init__(
        self,
        where: str,
        num_samples: int,
        *,
        expected: int | None = None,
        data: Callable[[], Mapping[str, Any]] | None = None,
        dtype: StoredDtype = "auto",
    ) -> None:
        check_stored_dtype(dtype)
        self.where = where
        self.dtype: StoredDtype = dtype
        self.expected = num_samples if expected is None else expected
        self._data = data
        #: uint8 [num_samples], 1 = stored. Shared with loading processes, which then leave its images out.
        self.present: Tensor = torch.zeros(num_samples, dtype=torch.uint8).share_memory_()  # type: ignore[no-untyped-call]
        self._store: FeatureStore | None = None
        self._sample_bytes = 0.0
        self.hits = self.lookups = 0

    def features(self, policy: FeaturePolicy, batch: Mapping[str, Any]) -> FrozenFeatures:
        """Of every sample of a batch (with `SAMPLES`), on the policy's device; computes and stores those it lacks.

        Raises ValueError when the policy's features cannot be cached, when they do not fit the memory, and for a folder
        of other features.
        """
        with torch.inference_mode(False), torch.no_grad():  # validation may fill it, and training must be able to read
            store = self.open(policy)
            keys: Sequence[int] = batch[SAMPLES]
            missing = [row for row, key in enumerate(keys) if not self._is_present(key)]
            self.hits, self.lookups = self.hits + len(keys) - len(missing), self.lookups + len(keys)
            if missing:
                rows = batch if len(missing) == len(keys) else _rows(batch, missing)
                self._add(store, [keys[row] for row in missing], policy.encode_features(rows))
            found = stack_samples([store.get(key) for key in keys], policy.device)
            return FrozenFeatures(decode_parts(found.parts), found.lengths)

    def open(self, policy: FeaturePolicy) -> FeatureStore:
        """Finds what a folder has already; only the first call does, and in the precision that it is made in."""
        if self._store is None:
            self._store = self._opened(policy)
        return self._store

    def flush(self) -> None:
        """Writes what a folder does not have yet."""
        if self._store is not None:
            self._store.flush()

    def refresh(self) -> None:
        """Finds what other ranks have written since."""
        if self._store is not None:
            self._store.refresh()
            self._mark(self._store.keys())

    @property
    def num_present(self) -> int:
        """Samples that are stored."""
        return int(self.present.sum())

    @property
    def bytes_a_number(self) -> float | None:
        """What `dtype` takes, without scales; None for the policy's own numbers."""
        return {"auto": None, "bfloat16": 2.0, "float8_e4m3fn": 1.0}[self.dtype]

    def take_hit_percent(self) -> float:
        """Share of the samples since the last call that were there already; starts counting anew."""
        percent = 100.0 * self.hits / max(1, self.lookups)
        self.hits = self.lookups = 0
        return percent

    def report_facts(self) -> dict[str, Any]:
        """Where features come from, how many samples are there, and their size (0 when none was computed yet)."""
        return {
            "where": self.where,
            "dtype": self.dtype,
            "stored_samples": self.num_present,
            "expected_samples": self.expected,
            "bytes_per_sample": round(self._sample_bytes),
        }

    def _opened(self, policy: FeaturePolicy) -> FeatureStore:
        policy.check_features_fixed()
        if self.where in MEMORIES:
            return MemoryStore(cast(Literal["device", "pinned"], self.where), policy.device)
        kind = policy.device.type
        computing = {"autocast": str(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else None}
        store = FolderStore(
            Path(self.where),
            {
                "policy": {**policy.feature_identity(), **computing},
                "data": {} if self._data is None else self._data(),
                "features": {"dtype": self.dtype},
            },
        )
        self._mark(store.keys())
        rank_zero_info(f"feature cache ({self.where}): {self.num_present:,} of {self.expected:,} samples are there")
        return store

    def _is_present(self, key: int) -> bool:
        return bool(self.present.numpy()[key])

    def _mark(self, keys: Iterable[int]) -> None:
        self.present.numpy()[np.fromiter(keys, np.int64)] = 1

    def _add(self, store: FeatureStore, keys: Sequence[int], features: FrozenFeatures) -> None:
        stored = FrozenFeatures(encode_parts(features.parts, self.dtype), features.lengths)
        if not self._sample_bytes:
            self._check_room(store, stored)
        for row, key in enumerate(keys):
            if not self._is_present(key):  # a mixture may draw a frame twice
                store.put(key, stored.sample(row))
                self._mark([key])

    def _check_room(self, store: FeatureStore, features: FrozenFeatures) -> None:
        """Says what the whole cache will take, from the first batch; raises ValueError when that is not there."""
        rows = range(len(features.lengths))
        sizes = [sum(values.nbytes for values in features.sample(row).values()) for row in rows]
        self._sample_bytes = sum(sizes) / len(sizes)
        needed = self._sample_bytes * max(0, self.expected - self.num_present)
        free = store.free_bytes()
        text = (
            f"{self._sample_bytes:,.0f} bytes a sample ({self.dtype}); {self.expected:,} samples, {self.num_present:,} "
            f"of them there, need {needed / GIB:,.2f} GiB more of the {free / GIB:,.2f} GiB that are free"
        )
        if needed > free:
            raise ValueError(
                f"feature_cache={self.where!r} does not fit: {text}; use feature_dtype='float8_e4m3fn' (half of "
                "bfloat16), fewer episodes, or a folder on a larger disk"
            )
        rank_zero_info(f"feature cache ({self.where}): {text}")


def _rows(batch: Mapping[str, Any], rows: Sequence[int]) -> dict[str, Any]:
    """Some samples of a batch."""
    return {
        key: values[rows] if isinstance(values, Tensor) else [values[row] for row in rows]
        for key, values in batch.items()
    }
