"""How are features kept in memory: on the training device, or pinned on the host?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

import torch
from torch import Tensor

#: Bytes that are allocated at once. Allocators round single samples up, pinned ones to a power of two.
BLOCK_BYTES = 256 * 2**20
_ALIGNMENT = 256


class MemoryStore:
    """Samples in blocks of one memory; what is stored stays until the store goes.

    where: "device" or "pinned". Raises ValueError for pinned memory without a CUDA device.
    """

    def __init__(self, where: Literal["device", "pinned"], device: torch.device) -> None:
        if where == "pinned" and device.type != "cuda":
            raise ValueError(
                f"feature_cache='pinned' serves a CUDA device, and this run is on {device.type}; use 'device', which "
                "is this machine's memory here"
            )
        self._pinned = where == "pinned"
        self._device = torch.device("cpu") if self._pinned else device
        self._samples: dict[int, dict[str, Tensor]] = {}
        self._block = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def keys(self) -> Iterable[int]:
        """The samples that are there."""
        return self._samples.keys()

    def put(self, key: int, sample: Mapping[str, Tensor]) -> None:
        """Keeps a copy of `sample`."""
        self._samples[key] = {name: self._kept(values) for name, values in sample.items()}

    def get(self, key: int) -> Mapping[str, Tensor]:
        """The sample of this number; nobody may write to it."""
        return self._samples[key]

    def flush(self) -> None:
        """Nothing is held back."""

    def refresh(self) -> None:
        """Nobody else writes here."""

    def free_bytes(self) -> int:
        """Memory that is free now."""
        if self._device.type == "cuda":
            return int(torch.cuda.mem_get_info(self._device)[0])
        return available_host_bytes()

    def _kept(self, values: Tensor) -> Tensor:
        size = -(-values.nbytes // _ALIGNMENT) * _ALIGNMENT
        if self._used + size > self._block.numel():
            self._block = torch.empty(
                max(size, BLOCK_BYTES), dtype=torch.uint8, device=self._device, pin_memory=self._pinned
            )
            self._used = 0
        room = self._block[self._used : self._used + values.nbytes].view(values.dtype).view(values.shape)
        room.copy_(values)
        self._used += size
        return room


def available_host_bytes() -> int:
    """Memory of this machine that programs can still take (Linux: MemAvailable of /proc/meminfo)."""
    with open("/proc/meminfo") as facts:
        line = next(line for line in facts if line.startswith("MemAvailable"))
    return int(line.split()[1]) * 1024
