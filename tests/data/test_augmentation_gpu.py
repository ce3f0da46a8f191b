"""Augmentation on a CUDA device: no wait for the device, and the CPU's images."""

from __future__ import annotations

import pytest
import torch

from soma_lightning.data.augmentation import ImageAugmentation, make_augmenter

CAMERA = "observation.images.image"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_device_is_never_waited_for_and_draws_the_same():
    batch = {"index": torch.arange(32), CAMERA: torch.randint(0, 256, (32, 3, 224, 224), dtype=torch.uint8)}
    settings = ImageAugmentation(shift_px=4, crop=0.9, rotation_deg=5, brightness=0.3, contrast=0.4, saturation=0.5)
    augmenter = make_augmenter(settings, None, 0)
    drawn = augmenter.draw(batch, 1, 2)
    there = {key: value.pin_memory().to("cuda", non_blocking=True) for key, value in drawn.items()}
    augmenter(there)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        varied = augmenter(there)[CAMERA]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    difference = (varied.cpu().int() - augmenter(drawn)[CAMERA].int()).abs()
    assert int(difference.max()) <= 1
    assert float((difference > 0).float().mean()) < 0.01
