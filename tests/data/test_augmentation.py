"""Image augmentation against a plain loop in float64, marked pixels, and runs that resume."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import yaml
from jsonargparse import ArgumentParser
from lightning.pytorch.callbacks import ModelCheckpoint

from soma_lightning.data import DataSource, ImageAugmentation, LeRobotDataModule
from soma_lightning.data.augmentation import PRESETS, make_augmenter, uniform_draws

Record = Callable[..., Path]
CAMERA, WRIST = "observation.images.image", "observation.images.image2"
#: Columns of the draws.
SHIFT_X, SHIFT_Y, CROP_X, CROP_Y, ROTATION, BRIGHTNESS, CONTRAST, SATURATION = range(8)


def draws(size: int = 1, **columns: float) -> torch.Tensor:
    made = torch.zeros(size, 8)
    for name, value in columns.items():
        made[:, globals()[name]] = value
    return made


def reference(image: np.ndarray, settings: ImageAugmentation, draw: np.ndarray, is_wrist: bool) -> np.ndarray:
    """One image float64 [3, h, w] in 0..255, pixel by pixel, as the definitions say."""
    _, height, width = image.shape
    dx, dy = (int((draw[i] + 1) / 2 * (2 * settings.shift_px + 1)) - settings.shift_px for i in (SHIFT_X, SHIFT_Y))
    shifted = np.empty_like(image)
    for y in range(height):
        for x in range(width):
            shifted[:, y, x] = image[:, min(max(y - dy, 0), height - 1), min(max(x - dx, 0), width - 1)]
    warped = shifted
    if not is_wrist and (settings.crop < 1 or settings.rotation_deg):
        warped = np.empty_like(image)
        angle = np.deg2rad(draw[ROTATION] * settings.rotation_deg)
        slack_x, slack_y = (1 - settings.crop) * width / 2, (1 - settings.crop) * height / 2
        for y in range(height):
            for x in range(width):
                # Pixel centres lie at half numbers; first undo the rotation, then find the place in the crop.
                px, py = x + 0.5 - width / 2, y + 0.5 - height / 2
                rx, ry = np.cos(angle) * px - np.sin(angle) * py, np.sin(angle) * px + np.cos(angle) * py
                sx = width / 2 + settings.crop * rx + draw[CROP_X] * slack_x
                sy = height / 2 + settings.crop * ry + draw[CROP_Y] * slack_y
                warped[:, y, x] = bilinear(shifted, sx - 0.5, sy - 0.5)
    pixels = warped * (1 + settings.brightness * draw[BRIGHTNESS])
    pixels = pixels.mean() + (pixels - pixels.mean()) * (1 + settings.contrast * draw[CONTRAST])
    gray = pixels.mean(axis=0)
    pixels = gray + (pixels - gray) * (1 + settings.saturation * draw[SATURATION])
    return np.clip(pixels, 0, 255)


def bilinear(image: np.ndarray, x: float, y: float) -> np.ndarray:
    """The value at (x, y) between pixel centres at whole numbers; 0 outside."""
    left, top = int(np.floor(x)), int(np.floor(y))
    value = np.zeros(3)
    for column, wx in ((left, left + 1 - x), (left + 1, x - left)):
        for row, wy in ((top, top + 1 - y), (top + 1, y - top)):
            if 0 <= column < image.shape[2] and 0 <= row < image.shape[1]:
                value += wx * wy * image[:, row, column]
    return value


SETTINGS = {
    **PRESETS,
    "all": ImageAugmentation(shift_px=2, crop=0.6, rotation_deg=40, brightness=0.9, contrast=0.9, saturation=0.9),
    "crop": ImageAugmentation(crop=0.5),
}


@pytest.mark.parametrize("name", sorted(SETTINGS))
@pytest.mark.parametrize("is_wrist", [False, True])
def test_equals_a_plain_loop(name: str, is_wrist: bool):
    settings, size = SETTINGS[name], 3
    images = torch.randint(0, 256, (size, 3, 11, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    drawn = uniform_draws(5, 1, 2, CAMERA, torch.arange(size))
    expected = np.stack(
        [
            reference(i.double().numpy(), settings, d, is_wrist)
            for i, d in zip(images, drawn.double().numpy(), strict=True)
        ]
    )
    got = settings(images, drawn, is_wrist=is_wrist)
    assert (got.dtype, got.shape) == (torch.uint8, images.shape)
    assert np.abs(got.double().numpy() - expected).max() < 0.5 + 1e-3
    floats = settings(images.float() / 255, drawn, is_wrist=is_wrist)
    assert floats.dtype == torch.float32
    np.testing.assert_allclose(255 * floats.double().numpy(), expected, rtol=0, atol=2e-3)


def test_without_ranges_nothing_changes():
    images = torch.randint(0, 256, (4, 3, 9, 7), dtype=torch.uint8)
    drawn = uniform_draws(0, 0, 0, CAMERA, torch.arange(4))
    assert torch.equal(ImageAugmentation()(images, drawn), images)
    for settings in PRESETS.values():
        still = draws(4, SHIFT_X=0.0, SHIFT_Y=0.0)
        if settings.crop == 1:
            assert torch.equal(settings(images, still), images)


def test_a_marked_pixel_moves_as_described():
    image = torch.zeros(1, 3, 21, 21, dtype=torch.uint8)
    image[..., 10, 15] = 255  # 5 to the right of the centre

    def brightest(settings: ImageAugmentation, **columns: float) -> tuple[int, int]:
        out = settings(image, draws(**columns))[0, 0]
        return divmod(int(out.argmax()), 21)

    quarter = ImageAugmentation(rotation_deg=90)
    assert brightest(quarter, ROTATION=1.0) == (5, 10), "counter-clockwise: right goes up"
    assert brightest(quarter, ROTATION=-1.0) == (15, 10)
    half = ImageAugmentation(crop=0.5)
    assert brightest(half) == (10, 20), "twice as far from the centre"
    assert brightest(half, CROP_X=5 / 5.25) == (10, 10), "a crop moves by up to a quarter of 21 pixels"
    assert brightest(half, CROP_X=0.9, CROP_Y=-0.9)[0] == 19, "a crop further up shows the mark further down"
    shift = ImageAugmentation(shift_px=3)
    assert brightest(shift, SHIFT_X=0.99, SHIFT_Y=-1.0) == (7, 18)


def test_draws_are_uniform_and_of_their_key_alone():
    frames = torch.arange(20_000)
    drawn = uniform_draws(3, 1, 7, CAMERA, frames).numpy()
    assert drawn.min() >= -1
    assert drawn.max() < 1
    np.testing.assert_allclose(drawn.mean(0), 0, atol=0.02)
    np.testing.assert_allclose(drawn.var(0), 1 / 3, rtol=0.03)
    assert np.abs(np.corrcoef(drawn.T) - np.eye(8)).max() < 0.03
    part = frames[[5, 17, 4]]
    np.testing.assert_array_equal(uniform_draws(3, 1, 7, CAMERA, part), drawn[part.numpy()])
    for key in ((4, 1, 7, CAMERA), (3, 2, 7, CAMERA), (3, 1, 8, CAMERA), (3, 1, 7, WRIST), (1, 3, 7, CAMERA)):
        other = uniform_draws(*key, frames).numpy()
        assert np.abs([np.corrcoef(drawn[:, k], other[:, k])[0, 1] for k in range(8)]).max() < 0.03


def test_wrist_cameras():
    names = (CAMERA, WRIST, "observation.images.left_wrist_0_rgb")
    images = torch.full((2, 3, 8, 8), 200, dtype=torch.uint8)
    batch: dict[str, Any] = {"index": torch.arange(2), "task": ["a", "b"], **dict.fromkeys(names, images)}
    turning = ImageAugmentation(rotation_deg=45)

    def turned(wrist: list[str] | None) -> set[str]:
        augmenter = make_augmenter(turning, wrist, 0)
        out = augmenter(augmenter.draw(batch, 0, 0))
        assert out["task"] is batch["task"]
        assert list(out) == list(batch)
        return {name for name in names if not torch.equal(out[name], images)}

    assert turned(None) == {CAMERA}
    assert turned([CAMERA]) == set(names) - {CAMERA}
    assert turned([]) == set(names)
    assert all(torch.equal(batch[name], torch.full_like(images, 200)) for name in names), "the input was written to"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"augment": "strong"}, "augment='strong' is unknown; known: off, light, openpi, or an ImageAugmentation"),
        ({"augment": "light", "wrist_cameras": [CAMERA]}, "has no effect with augment='light', which neither crops"),
        ({"wrist_cameras": [CAMERA]}, "has no effect with augment='off'"),
        ({"augment": True}, "augment=True is unknown"),
    ],
)
def test_settings_that_do_not_fit(arguments: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        LeRobotDataModule("data", **arguments)


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        ({"crop": 0.0}, r"crop=0.0 .* must lie in \(0, 1\]"),
        ({"brightness": 1.5}, "brightness=1.5 must lie in 0..1"),
        ({"rotation_deg": -1.0}, "rotation_deg=-1.0 must lie in 0..180"),
        ({"shift_px": -1}, "shift_px=-1 must not be negative"),
    ],
)
def test_ranges_that_do_not_fit(ranges: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        ImageAugmentation(**ranges)


def test_a_configuration_file_can_say_it():
    """YAML reads a bare off as False."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(LeRobotDataModule, "data")
    for text, expected in (
        ("off", None),
        ("openpi", PRESETS["openpi"]),
        ("{crop: 0.9, brightness: 0.2}", ImageAugmentation(crop=0.9, brightness=0.2)),
    ):
        settings = yaml.safe_load(f"{{root: data, augment: {text}}}")
        config = parser.parse_object(
            {"data": {"class_path": "soma_lightning.data.LeRobotDataModule", "init_args": settings}}
        )
        build = parser.instantiate if hasattr(parser, "instantiate") else parser.instantiate_classes
        augmenter = build(config).data.augmenter
        assert (augmenter and augmenter.augmentation) == expected


def test_a_wrist_camera_that_is_not_there(record: Record):
    data = LeRobotDataModule(str(record()), batch_size=2, chunk_size=1, augment="openpi", wrist_cameras=["hand"])
    with pytest.raises(ValueError, match=r"wrist_cameras names \['hand'\]; the data's cameras are"):
        data.setup()


class Watcher(pl.LightningModule):
    """Writes down a digest of every batch's images."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.trained: list[tuple[list[int], bytes]] = []
        self.steps: list[tuple[int, int, torch.Tensor, torch.Tensor]] = []
        self.validated: list[torch.Tensor] = []

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        self.trained.append((batch["index"].tolist(), batch[CAMERA].numpy().tobytes()))
        self.steps.append((self.current_epoch, batch_idx, batch["index"], batch[CAMERA].clone()))
        return self.weight * 1.0

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        self.validated.append(batch[CAMERA].clone())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def fit(source: DataSource, folder: Path, steps: int, *, ckpt_path: Path | None = None, **settings: Any) -> Watcher:
    model = Watcher()
    trainer = pl.Trainer(
        max_steps=steps,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(folder, filename="{step}", every_n_train_steps=4, save_top_k=-1)],
        val_check_interval=2,
        check_val_every_n_epoch=None,
    )
    data = LeRobotDataModule(source, batch_size=4, chunk_size=2, **settings)
    trainer.fit(model, datamodule=data, ckpt_path=ckpt_path, weights_only=False)
    return model


def test_training_is_augmented_alike_after_a_resume_and_validation_is_not(record: Record, tmp_path: Path):
    source = DataSource(str(record((9, 7, 8))))
    settings = {"augment": ImageAugmentation(shift_px=2, brightness=0.9), "val_fraction": 0.3}
    whole = fit(source, tmp_path / "a", 9, **settings)
    again = fit(source, tmp_path / "b", 9, ckpt_path=tmp_path / "a" / "step=4.ckpt", **settings)
    plain = fit(source, tmp_path / "c", 9, val_fraction=0.3)
    assert len(whole.trained) == 9
    assert again.trained == whole.trained[4:]
    assert [index for index, _ in plain.trained] == [index for index, _ in whole.trained]
    assert all(one != other for (_, one), (_, other) in zip(plain.trained, whole.trained, strict=True))
    assert len(whole.validated) == len(plain.validated) > 0
    assert all(torch.equal(a, b) for a, b in zip(whole.validated, plain.validated, strict=True))
    for (epoch, batch_idx, frames, varied), (*_, raw) in zip(whole.steps, plain.steps, strict=True):
        draws = uniform_draws(0, epoch, batch_idx, CAMERA, frames)
        assert torch.equal(varied, settings["augment"](raw, draws)), (epoch, batch_idx)


def test_facts(record: Record):
    data = LeRobotDataModule(str(record(cameras=(CAMERA, WRIST))), batch_size=2, chunk_size=1, augment="openpi")
    facts = data.report_facts()["augmentation"]
    assert (facts["crop"], facts["wrist_cameras"]) == (0.95, [WRIST])
    assert LeRobotDataModule(str(record(name="b")), batch_size=2, chunk_size=1).report_facts()["augmentation"] == "off"
