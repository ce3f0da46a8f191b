"""How does a token's position enter its query and key? Rotary position embedding (RoPE), shared by both streams.

Gemma rotates the pair (x[i], x[i + D/2]) by the angle position * theta^(-2i/D). The prefix and the action expert use
the same absolute positions, so that the expert's queries fit the prefix's cached keys.

Shape letters: B rows, L tokens, H heads, D head size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

THETA = 10_000.0


class RotaryTable(NamedTuple):
    """Cosines and sines of all rotation angles, each [B or 1, L, 1, D/2]."""

    cos: Tensor
    sin: Tensor


def rotary_table(positions: Tensor, head_dim: int, dtype: torch.dtype) -> RotaryTable:
    """positions: integer [B or 1, L]. Angles are computed in float32, the table is returned in `dtype`."""
    # No buffer holds the frequencies: they cost nothing to compute, and a model built on the meta device keeps working.
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device) / head_dim
    angles = positions[..., None, None].float() * (1.0 / THETA**exponents)
    return RotaryTable(angles.cos().to(dtype), angles.sin().to(dtype))


def rotate(x_BLHD: Tensor, table: RotaryTable) -> Tensor:
    """Rotates queries or keys [B, L, H, D] by the table; keeps shape and dtype."""
    cos, sin = table.cos.to(x_BLHD.dtype), table.sin.to(x_BLHD.dtype)  # under autocast x may be narrower than the table
    low, high = x_BLHD.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)
