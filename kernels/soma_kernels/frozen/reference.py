"""What do the kernels of a frozen forward pass compute? The same in plain torch.

Shape letters: M rows (tokens), W width, F width of the MLP, H heads, D head size.

fp8: a row is stored as float8_e4m3fn values and one float32 scale, value * scale; the scale maps the row's largest
magnitude to 448, the largest number of the format.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
#: Smallest scale, float32's smallest normal number: a row of zeros stays zeros.
MIN_SCALE = 2.0**-126


class Fp8Rows(NamedTuple):
    """values: float8_e4m3fn [M, W]; scales: float32 [M]. Row m is values[m] * scales[m]."""

    values: Tensor
    scales: Tensor


def quantize_rows_reference(x: Tensor) -> Fp8Rows:
    """float [M, W] -> fp8 rows."""
    x = x.float()
    scales = (x.abs().amax(dim=-1) / FP8_MAX).clamp(min=MIN_SCALE)
    return Fp8Rows((x / scales[:, None]).to(FP8), scales)


def dequantize_rows(rows: Fp8Rows) -> Tensor:
    """fp8 rows -> float32 [M, W]."""
    return rows.values.float() * rows.scales[:, None]


def add_norm_reference(
    x: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """See `norm.add_norm`; the second result in float32."""
    total = x if delta is None else x + delta
    wide = total.float()
    if bias is not None:
        return total, F.layer_norm(wide, wide.shape[-1:], weight.float(), bias.float(), eps)
    return total, F.rms_norm(wide, wide.shape[-1:], eps=eps) * (1.0 + weight.float())


def gelu_reference(gate: Tensor, up: Tensor | None) -> Tensor:
    """gelu-tanh of `gate`, times `up` if there is one: float32."""
    activated = F.gelu(gate.float(), approximate="tanh")
    return activated if up is None else activated * up.float()


def rotate_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [M, H * D] by angles [R, P, D / 2] (M = B * P; R = B, or 1 for all): rotated as Gemma does, in x's dtype."""
    _, length, half = cos.shape
    pairs = x.float().view(-1, length, x.shape[-1] // (2 * half), 2, half)
    low, high = pairs.unbind(-2)
    c, s = cos[:, :, None], sin[:, :, None]
    return torch.stack((low * c - high * s, high * c + low * s), dim=-2).view_as(x).to(x.dtype)
