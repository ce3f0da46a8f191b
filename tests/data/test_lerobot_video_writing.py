"""Videos that we write: files, metadata, sizes, bits, statistics of images."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from soma_lightning.data import lerobot_video_writer
from soma_lightning.data.lerobot import LeRobotDataset
from soma_lightning.data.lerobot_writer import LeRobotWriter
from tests.data.videos import (
    CAMERA,
    EPISODES_FILE,
    FPS,
    LENGTHS,
    VIDEO_FILE,
    WRIST,
    decode,
    features,
    frames,
    record_noise,
)

GOLDEN = Path(__file__).parents[1] / "goldens/lerobot_videos"

Record = Callable[..., Path]


def test_what_is_written(record_video: Record) -> None:
    cameras = {CAMERA: "video", WRIST: "image"}
    root = record_video(cameras=cameras)
    info = json.loads((root / "meta/info.json").read_text())
    assert info["video_path"] == "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
    assert info["features"][WRIST] == {"dtype": "image", "shape": [16, 24, 3], "names": ["height", "width", "channel"]}
    described = info["features"][CAMERA]["info"]
    theirs = json.loads((GOLDEN / "h264/meta/info.json").read_text())["features"][CAMERA]["info"]
    assert set(described) == set(theirs)
    same = ("video.codec", "video.pix_fmt", "video.channels", "has_audio", "is_depth_map", "video.g")
    assert {key: described[key] for key in same} == {key: theirs[key] for key in same}
    assert (described["video.height"], described["video.width"], described["video.fps"]) == (16, 24, FPS)
    assert CAMERA not in pq.read_schema(root / "data/chunk-000/file-000.parquet").names

    schema = {field.name: str(field.type) for field in pq.read_schema(root / EPISODES_FILE)}
    columns = ("chunk_index", "file_index", "from_timestamp", "to_timestamp")
    assert [schema[f"videos/{CAMERA}/{name}"] for name in columns] == ["int64", "int64", "double", "double"]
    rows = pq.read_table(root / EPISODES_FILE).to_pylist()
    spans = [tuple(row[f"videos/{CAMERA}/{name}"] for name in columns) for row in rows]
    assert spans == [(0, 0, 0.0, 1.2), (0, 0, 1.2, 2.9), (0, 0, 2.9, 3.8)]
    assert rows[0][f"stats/{CAMERA}/count"] == [12]
    assert f"videos/{WRIST}/file_index" not in schema

    decoded = decode(root / VIDEO_FILE)
    step = 10240 // FPS  # ticks of a frame
    assert list(decoded) == [step * i for i in range(38)]
    raw = np.concatenate([frames(e, n, cameras)[CAMERA] for e, n in enumerate(LENGTHS)]).transpose(0, 3, 1, 2)
    # Colours have half the resolution, which blurs the square's edges; away from them a few levels remain.
    assert np.median(np.abs(np.stack(list(decoded.values())).astype(int) - raw)) <= 4


def test_a_file_is_closed_before_it_is_too_large_or_too_long(
    record_video: Record, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    record_noise(tmp_path / "noise", episodes=14, video_file_size_mb=1)
    sizes = [path.stat().st_size for path in sorted((tmp_path / "noise" / VIDEO_FILE).parent.iterdir())]
    assert len(sizes) > 1
    assert max(sizes) < 2**20
    assert len(LeRobotDataset(tmp_path / "noise", preload=True)) == 280

    monkeypatch.setattr(lerobot_video_writer, "MAX_DURATION_S", 3)
    rows = pq.read_table(record_video((12, 18, 1, 30)) / EPISODES_FILE).to_pylist()
    assert [row[f"videos/{CAMERA}/file_index"] for row in rows] == [0, 0, 1, 2]
    assert [row[f"videos/{CAMERA}/from_timestamp"] for row in rows] == [0.0, 1.2, 0.0, 0.0]
    with pytest.raises(
        ValueError, match="episode 1, column .*: 31 frames at 10 per second are longer than a video's 3 s"
    ):
        record_video((5, 31), name="long")
    assert not (tmp_path / "long").exists()


def test_the_same_episodes_give_the_same_bits(record_video: Record) -> None:
    first, second = record_video(name="first"), record_video(name="second")
    assert (first / VIDEO_FILE).read_bytes() == (second / VIDEO_FILE).read_bytes()


def test_a_dropped_recording_leaves_nothing(tmp_path: Path) -> None:
    writer = LeRobotWriter(tmp_path / "data", fps=FPS, features=features({CAMERA: "video"}))
    writer.add_episode(frames(0, 5, {CAMERA: "video"}), "pick")
    assert list(tmp_path.glob(f".*/{VIDEO_FILE}"))
    writer.discard()
    assert not list(tmp_path.iterdir())


def test_large_images_are_counted_at_about_150_pixels(tmp_path: Path) -> None:
    images = np.zeros((2, 300, 302, 3), np.uint8)
    images[:, ::2, ::2] = 255  # every second pixel of every second line: all that is counted
    with LeRobotWriter(tmp_path / "data", fps=FPS, features=features({CAMERA: "image"}, 300, 302)) as writer:
        writer.add_episode({**frames(0, 2, {CAMERA: "image"}), CAMERA: images}, "pick")
    stats = json.loads((tmp_path / "data/meta/stats.json").read_text())[CAMERA]
    assert stats["mean"] == [[[1.0]]] * 3
