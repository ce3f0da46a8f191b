"""What does a frozen backbone hand to the part that trains, sample by sample?

The same for every policy, so that a cache can keep it without knowing the network. Shape letters: S streams (such as
the keys and the values of every layer), B samples, P tokens of the longest sample, W numbers a token and stream.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class FrozenFeatures:
    """Features of B samples, which have different numbers of tokens.

    parts: {name: [S, B, P, W]}, on one device. Sample b has the first `lengths[b]` of the P tokens; the others may hold
    anything. lengths: B numbers, known without waiting for a device.
    """

    parts: Mapping[str, Tensor]
    lengths: tuple[int, ...]

    def sample(self, row: int) -> dict[str, Tensor]:
        """{name: [S, tokens, W]} of one sample, without padding: views."""
        return {name: values[:, row, : self.lengths[row]] for name, values in self.parts.items()}

    def lengths_on(self, device: torch.device) -> Tensor:
        """The lengths, int64 [B] on `device`, which is not waited for."""
        lengths = torch.tensor(self.lengths)
        return lengths.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else lengths.to(device)


def stack_samples(samples: Sequence[Mapping[str, Tensor]], device: torch.device) -> FrozenFeatures:
    """Samples as `FrozenFeatures.sample` gives them, padded to the longest one, on `device`.

    All have the same parts, streams and widths. Samples in pinned memory are not waited for.
    """
    lengths = tuple(next(iter(sample.values())).shape[1] for sample in samples)
    parts = {}
    for name, first in samples[0].items():
        streams, _, width = first.shape
        parts[name] = torch.empty(streams, len(samples), max(lengths), width, dtype=first.dtype, device=device)
        for row, sample in enumerate(samples):
            parts[name][:, row, : lengths[row]].copy_(sample[name], non_blocking=True)
    return FrozenFeatures(parts, lengths)
