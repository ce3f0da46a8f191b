"""What is a state worth? The critic: a small MLP in float32 on what a backbone says of an observation.

Shape letters: B observations, P tokens, W width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

_ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "tanh": nn.Tanh}


class ValueHead(nn.Module):
    """MLP from `width` features to one value; sizes and start values of RLinf's value head by default.

    Hidden layers start Kaiming-normal (fan out), the last one at N(0, 0.02), biases at 0. It computes in float32
    whatever the model around it does.
    """

    def __init__(
        self,
        width: int,
        hidden: Sequence[int] = (1024, 512, 256),
        activation: Literal["relu", "tanh"] = "relu",
    ) -> None:
        super().__init__()
        if activation not in _ACTIVATIONS:
            raise ValueError(f"activation={activation!r} is unknown; known: {', '.join(_ACTIVATIONS)}")
        sizes = (width, *hidden)
        layers: list[nn.Module] = []
        for inner, outer in zip(sizes[:-1], sizes[1:], strict=True):
            linear = nn.Linear(inner, outer)
            nn.init.kaiming_normal_(linear.weight, mode="fan_out", nonlinearity=activation)
            layers += [linear, _ACTIVATIONS[activation]()]
        last = nn.Linear(sizes[-1], 1)
        nn.init.normal_(last.weight, std=0.02)
        self.layers = nn.Sequential(*layers, last)
        for module in self.layers:
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    def forward(self, features: Tensor) -> Tensor:
        """features [B, W] of any dtype -> float32 [B]."""
        with torch.autocast(features.device.type, enabled=False):
            values: Tensor = self.layers(features.float())
            return values[:, 0]


def pool_tokens(hidden: Tensor, mask: Tensor | None) -> Tensor:
    """Mean over the tokens that `mask` (bool [B, P]; None: all) names: [B, P, W] -> float32 [B, W].

    Masked tokens may hold anything, NaN included.
    """
    if mask is None:
        return hidden.float().mean(dim=1)
    kept = torch.where(mask[..., None], hidden.float(), 0.0)
    return kept.sum(dim=1) / mask.sum(dim=1, keepdim=True)
