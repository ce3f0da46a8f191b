"""How does a camera image become what the vision tower sees: square, R by R, in [-1, 1]?

Follows openpi's resize with centred padding and lerobot's port of it (models/pi05.md section 4); torch only.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

BLACK = -1.0


def resize_with_padding(images: Tensor, resolution: int) -> Tensor:
    """Scales images to fit a square of R = `resolution` pixels, keeps their aspect ratio, and pads with black.

    images: [B, 3, h, w], uint8 0..255 or floating point 0..1. Returns float32 [B, 3, R, R] in [-1, 1].
    Bilinear with `align_corners=False`. The scaled size is truncated to whole pixels. The padding is centred; an odd
    pixel goes to the right or to the bottom. uint8 images are rounded to whole levels after scaling, float ones
    are clamped to 0..1. Images that already are R by R keep their pixels.
    Raises ValueError for another shape, dtype, or an empty image.
    """
    if images.ndim != 4 or images.shape[1] != 3 or 0 in images.shape[2:]:
        raise ValueError(f"images must be [B, 3, height, width], got {tuple(images.shape)}")
    if images.dtype != torch.uint8 and not images.is_floating_point():
        raise ValueError(f"images must be uint8 (0..255) or floating point (0..1), got {images.dtype}")
    whole_levels = images.dtype == torch.uint8
    pixels = images.float()
    height, width = _fitted_size(images.shape[2], images.shape[3], resolution)
    if tuple(images.shape[2:]) != (resolution, resolution):
        pixels = functional.interpolate(pixels, size=(height, width), mode="bilinear", align_corners=False)
        pixels = pixels.round_() if whole_levels else pixels.clamp_(0.0, 1.0)
    # x / 127.5 is x / 255 * 2 to the last bit: doubling is exact.
    pixels = pixels / 127.5 - 1.0 if whole_levels else pixels * 2.0 - 1.0
    if (height, width) == (resolution, resolution):
        return pixels
    top, left = (resolution - height) // 2, (resolution - width) // 2
    right, bottom = resolution - width - left, resolution - height - top
    return functional.pad(pixels, (left, right, top, bottom), value=BLACK)


def _fitted_size(height: int, width: int, resolution: int) -> tuple[int, int]:
    """Largest (height, width) of the same aspect ratio inside the square; at least one pixel."""
    ratio = max(width / resolution, height / resolution)
    return max(1, int(height / ratio)), max(1, int(width / ratio))
