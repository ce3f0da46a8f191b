"""In which numbers are cached features kept: as they were computed, in bfloat16, or in fp8 with scales?

Shape letters: S streams, B samples, P tokens, W numbers a token.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

import torch
from torch import Tensor

from soma_lightning.frozen_layers import quantize_rows

StoredDtype = Literal["auto", "bfloat16", "float8_e4m3fn"]
_SCALE, _WAS = ".scale", ".was_"


def check_stored_dtype(stored: str) -> None:
    """Raises ValueError for a name that is unknown."""
    if stored not in get_args(StoredDtype):
        raise ValueError(f"feature_dtype={stored!r} is unknown; known: {', '.join(get_args(StoredDtype))}")


def encode_parts(parts: Mapping[str, Tensor], stored: StoredDtype) -> dict[str, Tensor]:
    """The parts {name: [S, B, P, W]} in the numbers that are kept; those that are no floating-point numbers unchanged.

    "auto": unchanged. "bfloat16": rounded. "float8_e4m3fn": every token of every stream has a scale of its own, kept as
    float32 [..., 1] in a part of its own. A rounded part's name says what it was.
    """
    encoded: dict[str, Tensor] = {}
    for name, values in parts.items():
        if stored == "auto" or not values.is_floating_point():
            encoded[name] = values
            continue
        rounded = f"{name}{_WAS}{str(values.dtype).removeprefix('torch.')}"
        if stored == "bfloat16":
            encoded[rounded] = values.bfloat16()
            continue
        rows = quantize_rows(values.flatten(0, -2))
        encoded[rounded] = rows.values.view(values.shape)
        encoded[rounded + _SCALE] = rows.scales.view(*values.shape[:-1], 1)
    return encoded


def decode_parts(parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What `encode_parts` was given, rounded, in the dtype that it had."""
    decoded = {}
    for stored_name, values in parts.items():
        name, was, dtype = stored_name.partition(_WAS)
        if not was:
            decoded[name] = values
        elif not stored_name.endswith(_SCALE):
            scale = parts.get(stored_name + _SCALE)
            decoded[name] = (values if scale is None else values.float() * scale).to(getattr(torch, dtype))
    return decoded
