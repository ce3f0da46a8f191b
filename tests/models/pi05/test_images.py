"""Camera images: size, padding, rounding, range, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from soma_lightning.models.pi05.images import resize_with_padding


def bilinear_by_hand(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """[c, h, w] -> [c, height, width] in float64: half-pixel centres, edge pixels repeated."""
    h, w = image.shape[1:]
    ys = np.clip((np.arange(height) + 0.5) * h / height - 0.5, 0, h - 1)
    xs = np.clip((np.arange(width) + 0.5) * w / width - 0.5, 0, w - 1)
    y0, x0 = np.floor(ys).astype(int), np.floor(xs).astype(int)
    y1, x1 = np.minimum(y0 + 1, h - 1), np.minimum(x0 + 1, w - 1)
    fy, fx = (ys - y0)[:, None], (xs - x0)[None, :]
    top = image[:, y0][:, :, x0] * (1 - fx) + image[:, y0][:, :, x1] * fx
    bottom = image[:, y1][:, :, x0] * (1 - fx) + image[:, y1][:, :, x1] * fx
    return top * (1 - fy) + bottom * fy


@pytest.mark.parametrize(
    ("size", "fitted", "top_left"),
    [
        ((48, 64), (42, 56), (7, 0)),
        ((64, 48), (56, 42), (0, 7)),
        ((30, 41), (40, 56), (8, 0)),
        ((20, 27), (41, 56), (7, 0)),
    ],
)
def test_resize_matches_a_bilinear_reference_with_centred_black_padding(size, fitted, top_left):
    image = torch.rand(2, 3, *size, generator=torch.Generator().manual_seed(0))
    out = resize_with_padding(image, 56)
    assert out.shape == (2, 3, 56, 56)
    assert out.dtype == torch.float32
    (height, width), (top, left) = fitted, top_left
    expected = np.full((2, 3, 56, 56), -1.0)
    for b in range(2):
        inner = bilinear_by_hand(image[b].double().numpy(), height, width)
        expected[b, :, top : top + height, left : left + width] = inner * 2 - 1
    # torch computes pixel coordinates (up to 56) in fp32: two axes, and the range -1..1 doubles the pixel's error.
    np.testing.assert_allclose(out.numpy(), expected, atol=4 * 64 * 2**-24, rtol=0)


def test_odd_pixel_of_padding_goes_to_the_bottom():
    out = resize_with_padding(torch.ones(1, 3, 20, 27), 56)  # 41 rows: 7 above, 8 below
    black = (out[0, 0, :, 0] == -1).tolist()
    assert black == [True] * 7 + [False] * 41 + [True] * 8


def test_uint8_is_rounded_to_whole_levels_after_scaling():
    image = torch.randint(0, 256, (1, 3, 100, 100), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    levels = (resize_with_padding(image, 56) + 1) * 127.5
    exact = bilinear_by_hand(image[0].double().numpy(), 56, 56)
    assert (levels - levels.round()).abs().max() < 1e-4
    away_from_half = np.abs(exact % 1 - 0.5) > 0.01
    assert away_from_half.mean() > 0.9
    np.testing.assert_array_equal(levels[0].round().numpy()[away_from_half], np.round(exact)[away_from_half])


def test_images_of_the_right_size_keep_their_pixels():
    image = torch.arange(256, dtype=torch.uint8).repeat(48).reshape(1, 3, 64, 64)
    assert torch.equal(resize_with_padding(image, 64), image.float() / 255 * 2 - 1)
    floats = image.float() / 255
    before = floats.clone()
    assert torch.equal(resize_with_padding(floats, 64), before * 2 - 1)
    assert torch.equal(floats, before)


def test_float_images_are_clamped_when_they_are_scaled():
    out = resize_with_padding(torch.full((1, 3, 8, 8), 1.5), 4)
    assert torch.equal(out, torch.ones(1, 3, 4, 4))


def test_an_extreme_aspect_ratio_keeps_one_pixel():
    out = resize_with_padding(torch.ones(1, 3, 1, 300), 56)
    assert (out == 1).sum() == 3 * 56


@pytest.mark.parametrize("shape", [(3, 8, 8), (1, 8, 8, 3), (1, 4, 8, 8), (1, 3, 0, 8)])
def test_wrong_shapes_are_refused(shape):
    with pytest.raises(ValueError, match=r"must be \[B, 3, height, width\]"):
        resize_with_padding(torch.zeros(shape, dtype=torch.uint8), 56)


def test_wrong_dtype_is_refused():
    with pytest.raises(ValueError, match="uint8 .* or floating point .* got torch.int64"):
        resize_with_padding(torch.zeros(1, 3, 8, 8, dtype=torch.int64), 56)
