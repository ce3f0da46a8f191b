"""`soma cache` ahead of `soma fit`: the run then decodes no image and runs no backbone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from soma_lightning.cli.main import main
from soma_lightning.data.lerobot_images import EncodedImages
from soma_lightning.data.lerobot_writer import LeRobotWriter
from soma_lightning.locks import sole_writer
from soma_lightning.models import PI05Config, PI05Policy
from soma_lightning.models.normalization import load_statistics
from soma_lightning.models.pi05.prefix import PI05Prefix

IMAGE = {"dtype": "image", "shape": [64, 64, 3]}
FEATURES = {
    "observation.images.image": IMAGE,
    "observation.images.image2": IMAGE,
    "observation.state": {"dtype": "float32", "shape": [8]},
    "action": {"dtype": "float32", "shape": [7]},
}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recording, `data`, and an untrained tiny policy, `policy`."""
    root, draw = tmp_path_factory.mktemp("prepared"), np.random.default_rng(0)
    with LeRobotWriter(root / "data", features=FEATURES) as writer:
        for _ in range(3):
            frames = {key: draw.integers(0, 256, (8, 64, 64, 3), dtype=np.uint8) for key in list(FEATURES)[:2]}
            state, action = draw.normal(size=(8, 8)), np.tanh(draw.normal(size=(8, 7)))
            frames |= {"observation.state": state.astype(np.float32), "action": action.astype(np.float32)}
            writer.add_episode(frames, "pick up the cube")
    statistics = load_statistics(root / "data" / "meta" / "stats.json")
    PI05Policy(PI05Config.tiny(), statistics).save_pretrained(root / "policy")
    return root


def soma(command: str, prepared: Path, out: Path, *more: str) -> int:
    run = ["--model.pretrained", str(prepared / "policy"), "--data.root", str(prepared / "data")]
    run += ["--data.batch_size", "4", "--data.preload", "false", "--trainer.default_root_dir", str(out)]
    run += ["--trainer.accelerator", "cpu", "--trainer.enable_progress_bar", "false"]
    return main([command, "--config", "pi05_somatable", *run, "--trainer.enable_model_summary", "false", *more])


def test_a_fit_on_a_folder_made_ahead_computes_nothing(prepared, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "features"
    assert soma("cache", prepared, tmp_path / "a", "--out", str(folder)) == 0
    assert "24 of 24 samples" in capsys.readouterr().out

    def refuse(*arguments: object) -> None:
        raise AssertionError("computed again")

    monkeypatch.setattr(PI05Prefix, "forward", refuse)
    fit = ["--trainer.max_steps", "6", "--trainer.val_check_interval", "3", "--data.feature_cache", str(folder)]
    assert soma("fit", prepared, tmp_path / "b", *fit) == 0
    report = json.loads(next((tmp_path / "b").rglob("run_report.json")).read_text())
    assert report["data"]["features"]["where"] == str(folder)
    assert report["data"]["features"]["stored_samples"] == 24

    decoded: list[int] = []
    original = EncodedImages.fetch

    def fetch(self: EncodedImages, camera: str, rows: Sequence[int]) -> object:
        decoded.extend(rows)
        return original(self, camera, rows)

    monkeypatch.setattr(EncodedImages, "fetch", fetch)
    assert soma("fit", prepared, tmp_path / "c", *fit) == 0
    assert decoded == []


def test_a_second_filling_computes_nothing_and_other_features_are_refused(prepared, tmp_path, monkeypatch, capsys):
    folder = str(tmp_path / "features")
    assert soma("cache", prepared, tmp_path / "a", "--out", folder) == 0
    calls: list[int] = []
    original = PI05Prefix.forward
    monkeypatch.setattr(PI05Prefix, "forward", lambda *arguments: calls.append(1) or original(*arguments))
    assert soma("cache", prepared, tmp_path / "a", "--out", folder) == 0
    assert calls == []
    assert soma("cache", prepared, tmp_path / "a", "--out", folder, "--data.feature_dtype", "float8_e4m3fn") == 2
    assert 'features.dtype ("auto" there, "float8_e4m3fn" here)' in capsys.readouterr().err
    assert soma("cache", prepared, tmp_path / "a", "--out", folder, "--model.config", "{zero_images: true}") == 2
    assert "policy.zero_images (false there, true here)" in capsys.readouterr().err


def test_a_folder_that_is_named_twice_is_refused(prepared, tmp_path, capsys):
    other = ["--out", str(tmp_path / "x"), "--data.feature_cache", str(tmp_path / "y")]
    assert soma("cache", prepared, tmp_path / "a", *other) == 2
    assert "differ; leave feature_cache out" in capsys.readouterr().err


def test_a_folder_that_another_command_fills_is_left_to_it(prepared, tmp_path, capsys):
    folder = tmp_path / "features"
    with sole_writer(folder, "busy"):
        assert soma("cache", prepared, tmp_path / "a", "--out", str(folder)) == 2
    assert f"another soma cache fills {folder}; wait for it" in capsys.readouterr().err
    assert not folder.exists()
    assert soma("cache", prepared, tmp_path / "a", "--out", str(folder)) == 0
    assert [path.name for path in tmp_path.iterdir() if path.name != "a"] == ["features"]


def test_features_are_not_made_for_a_memory_that_ends_with_the_command(prepared, tmp_path, capsys):
    assert soma("cache", prepared, tmp_path / "a", "--out", "device") == 2
    assert "--out device: features in memory are gone when this command ends" in capsys.readouterr().err
