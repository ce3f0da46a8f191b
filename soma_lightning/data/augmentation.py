"""How are training images varied, and which variation does a sample get?

Per camera and sample, in this order: shift; crop, resize to the old size and rotation, as one bilinear warp;
brightness; contrast; saturation; one clamp to the range of pixels. What is drawn depends on (seed, epoch, batch number,
camera, frame) alone: neither on ranks, workers, device nor the other frames of the batch, and a resumed run draws the
same.

Shape letters: B batch, h/w image size, K draws a sample.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from soma_lightning.contract import CAMERA_OF_OBSERVATION, IMAGE_PREFIX
from soma_lightning.data.lerobot_format import INDEX

#: Key of a batch's draws on their way to the device.
DRAWS = "augmentation_draws"
_DRAWS = ("shift_x", "shift_y", "crop_x", "crop_y", "rotation", "brightness", "contrast", "saturation")


@dataclass(frozen=True)
class ImageAugmentation:
    """Ranges of the uniform draws; the defaults change nothing.

    shift_px: up to so many whole pixels in each direction; the border is repeated. crop: share of each side that is
    kept, at a random place. rotation_deg: to both sides, around the centre; what lies outside the image is black.
    Wrist cameras are neither cropped nor rotated: they move with the hand, and so would what they show of it.
    brightness, contrast, saturation: factors 1 - value to 1 + value on the pixels, on their distance from the image's
    mean, and on their distance from the mean of their channels.

    Raises ValueError for values out of range.
    """

    shift_px: int = 0
    crop: float = 1.0
    rotation_deg: float = 0.0
    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.crop <= 1:
            raise ValueError(f"crop={self.crop} is the share of each side that is kept and must lie in (0, 1]")
        if self.shift_px < 0:
            raise ValueError(f"shift_px={self.shift_px} must not be negative")
        for name, most in (("rotation_deg", 180.0), ("brightness", 1.0), ("contrast", 1.0), ("saturation", 1.0)):
            if not 0 <= getattr(self, name) <= most:
                raise ValueError(f"{name}={getattr(self, name)} must lie in 0..{most:g}")

    @property
    def warps(self) -> bool:
        """Whether it crops or rotates."""
        return self.crop < 1 or self.rotation_deg > 0

    def __call__(self, images: Tensor, draws: Tensor, *, is_wrist: bool = False) -> Tensor:
        """Varied images of the same shape and dtype (uint8 is rounded).

        images: uint8 or float (0..1) [B, 3, h, w]. draws: float32 [B, K] in -1..1 on their device (`uniform_draws`).
        """
        amount = dict(zip(_DRAWS, draws.unbind(1), strict=True))
        if self.shift_px:
            images = self._shifted(images, amount)
        warps = self.warps and not is_wrist
        if not (warps or self.brightness or self.contrast or self.saturation):
            return images
        limit = 1.0 if images.is_floating_point() else 255.0
        pixels = images.float()
        if warps:
            pixels = self._warped(pixels, amount)
        pixels = self._coloured(pixels, amount).clamp(0.0, limit)
        return pixels.to(images.dtype) if images.is_floating_point() else pixels.round_().to(images.dtype)

    def _shifted(self, images: Tensor, amount: Mapping[str, Tensor]) -> Tensor:
        """out[y, x] = in[y - dy, x - dx], coordinates kept inside the image."""
        height, width = images.shape[2:]
        rows_Bh = self._moved(height, amount["shift_y"])
        columns_Bw = self._moved(width, amount["shift_x"])
        pixel_BN = (rows_Bh[:, :, None] * width + columns_Bw[:, None, :]).flatten(1)
        source_BCN = pixel_BN[:, None].expand(-1, images.shape[1], -1)
        return images.flatten(2).gather(2, source_BCN).view_as(images)

    def _moved(self, length: int, draw: Tensor) -> Tensor:
        """Where each of `length` coordinates is read, int64 [B, length]; all 2 * shift_px + 1 shifts equally likely."""
        shift = ((draw + 1) / 2 * (2 * self.shift_px + 1)).floor().long() - self.shift_px
        return (torch.arange(length, device=draw.device) - shift[:, None]).clamp(0, length - 1)

    def _warped(self, pixels: Tensor, amount: Mapping[str, Tensor]) -> Tensor:
        """Output pixel p shows the input at crop centre + crop * R(p), p from the image's centre (y points down)."""
        height, width = pixels.shape[2:]
        angle = amount["rotation"] * math.radians(self.rotation_deg)
        cos, sin = self.crop * angle.cos(), self.crop * angle.sin()
        # In grid_sample's units half a side is 1; a positive angle turns the picture counter-clockwise.
        x = torch.stack([cos, -sin * height / width, (1 - self.crop) * amount["crop_x"]], dim=1)
        y = torch.stack([sin * width / height, cos, (1 - self.crop) * amount["crop_y"]], dim=1)
        grid = functional.affine_grid(torch.stack([x, y], dim=1), list(pixels.shape), align_corners=False)
        return functional.grid_sample(pixels, grid, mode="bilinear", padding_mode="zeros", align_corners=False)

    def _coloured(self, pixels: Tensor, amount: Mapping[str, Tensor]) -> Tensor:
        def factor(name: str) -> Tensor:
            spread: float = getattr(self, name)
            return (1 + spread * amount[name]).view(-1, 1, 1, 1)

        if self.brightness:
            pixels = pixels * factor("brightness")
        if self.contrast:
            pixels = torch.lerp(pixels.mean(dim=(1, 2, 3), keepdim=True), pixels, factor("contrast"))
        if self.saturation:
            pixels = torch.lerp(pixels.mean(dim=1, keepdim=True), pixels, factor("saturation"))
        return pixels


PRESETS = {
    "light": ImageAugmentation(shift_px=4, brightness=0.1),
    "openpi": ImageAugmentation(crop=0.95, rotation_deg=5.0, brightness=0.3, contrast=0.4, saturation=0.5),
}


def uniform_draws(seed: int, epoch: int, batch_idx: int, camera: str, frames: Tensor) -> Tensor:
    """Numbers in [-1, 1), float32 [B, K] on the CPU, of the frames with these indices, int64 [B] on the CPU."""
    state = np.zeros((len(frames), 1), np.uint64)
    for value in (seed, epoch, batch_idx, crc32(camera.encode()), frames.numpy()[:, None], np.arange(len(_DRAWS))):
        state = _mixed(state + np.asarray(value, np.uint64))
    # The 24 leading bits are exact in float32, so that no draw is rounded up to 1.
    return torch.from_numpy((state >> np.uint64(40)).astype(np.float32) * np.float32(2.0**-23) - np.float32(1.0))


def _mixed(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """One step of SplitMix64 (Steele, Lea, Flood 2014): equal inputs agree, others have nothing in common."""
    state = state + np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


class BatchAugmenter:
    """Varies every camera of a batch (`contract.TRAINING_BATCH` with `index`): `augmenter(augmenter.draw(batch, ...))`.

    Draws are made on the host, where the frame numbers are; they move to the device with the batch, so that it is never
    waited for. wrist_cameras: camera keys; None takes those with "wrist" in their name, and the contract's wrist
    camera.
    """

    def __init__(self, augmentation: ImageAugmentation, wrist_cameras: Sequence[str] | None, seed: int) -> None:
        self.augmentation, self.wrist_cameras, self.seed = augmentation, wrist_cameras, seed

    def draw(self, batch: Mapping[str, Any], epoch: int, batch_idx: int) -> dict[str, Any]:
        """The batch (on the CPU) with its draws: float32 [B, cameras, K] under `DRAWS`."""
        cameras = [key for key in batch if key.startswith(IMAGE_PREFIX)]
        drawn = [uniform_draws(self.seed, epoch, batch_idx, camera, batch[INDEX]) for camera in cameras]
        return {**batch, DRAWS: torch.stack(drawn, dim=1)} if cameras else dict(batch)

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The batch with other images and without draws, on its device; everything else is the same object."""
        cameras = [key for key in batch if key.startswith(IMAGE_PREFIX)]
        varied = {
            camera: self.augmentation(batch[camera], batch[DRAWS][:, i], is_wrist=self.is_wrist(camera))
            for i, camera in enumerate(cameras)
        }
        return {key: varied.get(key, value) for key, value in batch.items() if key != DRAWS}

    def check(self, cameras: Sequence[str]) -> None:
        """Raises ValueError for a wrist camera that the data do not have."""
        if unknown := sorted(set(self.wrist_cameras or ()) - set(cameras)):
            raise ValueError(f"wrist_cameras names {unknown}; the data's cameras are {list(cameras)}")

    def report_facts(self, cameras: Sequence[str]) -> dict[str, Any]:
        """The ranges, and the cameras that are left upright and whole."""
        return {**asdict(self.augmentation), "wrist_cameras": [camera for camera in cameras if self.is_wrist(camera)]}

    def is_wrist(self, camera: str) -> bool:
        if self.wrist_cameras is not None:
            return camera in self.wrist_cameras
        return "wrist" in camera or camera == CAMERA_OF_OBSERVATION["wrist_images"]


def make_augmenter(
    augment: str | bool | ImageAugmentation, wrist_cameras: Sequence[str] | None, seed: int
) -> BatchAugmenter | None:
    """None for "off". Raises ValueError for unknown presets, and for wrist cameras that make no difference."""
    chosen: ImageAugmentation | None = None
    if isinstance(augment, ImageAugmentation):
        chosen = augment
    elif isinstance(augment, str) and augment in PRESETS:
        chosen = PRESETS[augment]
    elif augment not in ("off", False):  # YAML reads off as False
        raise ValueError(f"augment={augment!r} is unknown; known: off, {', '.join(PRESETS)}, or an ImageAugmentation")
    if wrist_cameras is not None and not (chosen and chosen.warps):
        raise ValueError(
            f"wrist_cameras={list(wrist_cameras)} has no effect with augment={augment!r}, which neither crops nor "
            "rotates; leave it out"
        )
    return BatchAugmenter(chosen, wrist_cameras, seed) if chosen else None
