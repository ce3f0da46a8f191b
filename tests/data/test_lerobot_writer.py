"""The recorder: layout on disk, exact statistics, all-or-nothing, and what it refuses."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from soma_lightning.data.lerobot import LeRobotDataset
from soma_lightning.data.lerobot_format import load_tasks
from soma_lightning.data.lerobot_writer import LeRobotWriter

CAMERA = "observation.images.image"
FEATURES: dict[str, Any] = {
    CAMERA: {"dtype": "image", "shape": [4, 6, 3]},
    "action": {"dtype": "float32", "shape": [2], "names": ["x", "y"]},
    "success": {"dtype": "bool", "shape": [1], "names": None},
}


def frames(length: int = 3, **changes: Any) -> dict[str, Any]:
    rng = np.random.default_rng(length)
    return {
        CAMERA: rng.integers(0, 256, (length, 4, 6, 3), dtype=np.uint8),
        "action": rng.normal(size=(length, 2)).astype(np.float32),
        "success": np.arange(length) == length - 1,
        **changes,
    }


def test_layout_on_disk(tmp_path: Path) -> None:
    root = tmp_path / "set"
    with LeRobotWriter(root, fps=20, features=FEATURES, robot_type="panda") as writer:
        writer.add_episode(frames(3), "pick")
        writer.add_episode(frames(5), "push")
        writer.add_episode(frames(2), "pick")
        assert (writer.num_episodes, writer.num_frames) == (3, 10)
        assert not root.exists()
    assert sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()) == [
        "data/chunk-000/file-000.parquet",
        "meta/episodes/chunk-000/file-000.parquet",
        "meta/info.json",
        "meta/stats.json",
        "meta/tasks.parquet",
    ]
    info = json.loads((root / "meta/info.json").read_text())
    bookkeeping = ["timestamp", "frame_index", "episode_index", "index", "task_index"]
    assert list(info["features"]) == [*FEATURES, *bookkeeping]
    assert info["features"][CAMERA] == {"dtype": "image", "shape": [4, 6, 3], "names": ["height", "width", "channel"]}
    assert {key: info[key] for key in ("codebase_version", "fps", "robot_type", "video_path", "splits")} == {
        "codebase_version": "v3.0",
        "fps": 20,
        "robot_type": "panda",
        "video_path": None,
        "splits": {"train": "0:3"},
    }
    assert (info["total_episodes"], info["total_frames"], info["total_tasks"]) == (3, 10, 2)
    assert not list(tmp_path.glob(".*"))

    file = pq.ParquetFile(root / "data/chunk-000/file-000.parquet")
    assert [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)] == [3, 5, 2]
    assert {field.name: str(field.type) for field in file.schema_arrow} == {
        CAMERA: "struct<bytes: binary, path: string>",
        "action": "fixed_size_list<element: float>[2]",
        "success": "bool",
        "timestamp": "float",
        **dict.fromkeys(bookkeeping[1:], "int64"),
    }
    table = file.read()
    assert table["index"].to_pylist() == list(range(10))
    assert table["frame_index"].to_pylist() == [0, 1, 2, 0, 1, 2, 3, 4, 0, 1]
    assert table["task_index"].to_pylist() == [0, 0, 0, 1, 1, 1, 1, 1, 0, 0]
    assert table["timestamp"].to_numpy().tolist() == (np.array(table["frame_index"]) / 20).astype(np.float32).tolist()
    stored = table[CAMERA][4].as_py()
    assert stored["path"] == "frame-000001.png"
    np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(stored["bytes"]))), frames(5)[CAMERA][1])

    episodes = pq.read_table(root / "meta/episodes/chunk-000/file-000.parquet").to_pylist()
    assert [row["length"] for row in episodes] == [3, 5, 2]
    assert [row["tasks"] for row in episodes] == [["pick"], ["push"], ["pick"]]
    assert [(row["dataset_from_index"], row["dataset_to_index"]) for row in episodes] == [(0, 3), (3, 8), (8, 10)]
    assert episodes[1]["stats/action/count"] == [5]
    np.testing.assert_allclose(
        episodes[1]["stats/action/q99"], np.quantile(frames(5)["action"], 0.99, axis=0), rtol=1e-6
    )


def test_tasks_are_a_pandas_index(tmp_path: Path) -> None:
    with LeRobotWriter(tmp_path / "set", features=FEATURES) as writer:
        writer.add_episode(frames(), "pick")
    schema = pq.read_schema(tmp_path / "set/meta/tasks.parquet")
    pandas = json.loads(schema.metadata[b"pandas"])
    assert pandas["index_columns"] == ["task"]
    assert [column["name"] for column in pandas["columns"]] == ["task_index", "task"]


def test_pooled_statistics_are_exact(tmp_path: Path) -> None:
    with LeRobotWriter(tmp_path / "set", features=FEATURES) as writer:
        for length in (3, 8, 5):
            writer.add_episode(frames(length), "pick")
    stored = json.loads((tmp_path / "set/meta/stats.json").read_text())
    pool = {key: np.concatenate([frames(length)[key] for length in (3, 8, 5)]) for key in FEATURES}
    expected = {"action": pool["action"].astype(np.float64), "success": pool["success"][:, None].astype(np.float64)}
    for key, values in expected.items():
        for name, want in (
            ("mean", values.mean(0)),
            ("std", values.std(0)),
            ("min", values.min(0)),
            ("max", values.max(0)),
            *((f"q{q:02d}", np.quantile(values, q / 100, axis=0)) for q in (1, 10, 50, 90, 99)),
        ):
            assert stored[key][name] == want.tolist(), (key, name)
        assert stored[key]["count"] == [16]
    pixels = pool[CAMERA].astype(np.float64) / 255
    for name, want in (
        ("mean", pixels.mean((0, 1, 2))),
        ("std", pixels.std((0, 1, 2))),
        ("min", pixels.min((0, 1, 2))),
        ("q01", np.quantile(pixels, 0.01, (0, 1, 2))),
        ("q50", np.quantile(pixels, 0.5, (0, 1, 2))),
        ("q99", np.quantile(pixels, 0.99, (0, 1, 2))),
    ):
        assert np.shape(stored[CAMERA][name]) == (3, 1, 1)
        np.testing.assert_allclose(np.ravel(stored[CAMERA][name]), want, rtol=0, atol=1e-12, err_msg=name)
    assert stored["index"]["max"] == [15.0]


def test_images_of_long_episodes_are_sampled(tmp_path: Path) -> None:
    with LeRobotWriter(tmp_path / "set", features=FEATURES) as writer:
        writer.add_episode(frames(700), "pick")
    stored = json.loads((tmp_path / "set/meta/stats.json").read_text())
    assert stored[CAMERA]["count"] == [int(700**0.75)]
    assert stored["action"]["count"] == [700]


def test_a_file_is_closed_before_it_grows_past_the_limit(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    features = {"action": {"dtype": "float64", "shape": [2000], "names": None}}
    episodes = [{"action": rng.normal(size=(20, 2000))} for _ in range(5)]  # 320 kB: two fit into one MB
    root = tmp_path / "set"
    with LeRobotWriter(root, features=features, data_file_size_mb=1) as writer:
        for episode in episodes:
            writer.add_episode(episode, "pick")
    files = sorted((root / "data/chunk-000").iterdir())
    assert [pq.read_metadata(file).num_rows for file in files] == [40, 40, 20]
    assert all(file.stat().st_size <= 1024**2 for file in files)
    rows = pq.read_table(root / "meta/episodes/chunk-000/file-000.parquet")
    assert rows["data/file_index"].to_pylist() == [0, 0, 1, 1, 2]


def test_file_numbers_roll_over_into_the_next_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("soma_lightning.data.lerobot_format.FILES_PER_CHUNK", 2)
    features = {
        "action": {"dtype": "float64", "shape": [2000], "names": None},
        "observation.state": {"dtype": "float32", "shape": [1], "names": None},
    }
    rng = np.random.default_rng(0)
    with LeRobotWriter(tmp_path / "set", features=features, data_file_size_mb=1) as writer:
        for episode in range(3):
            state = np.full(60, episode, np.float32)
            writer.add_episode({"action": rng.normal(size=(60, 2000)), "observation.state": state}, "pick")
    files = sorted(path.relative_to(tmp_path).as_posix() for path in (tmp_path / "set/data").rglob("*.parquet"))
    assert files == [
        "set/data/chunk-000/file-000.parquet",
        "set/data/chunk-000/file-001.parquet",
        "set/data/chunk-001/file-000.parquet",
    ]
    data = LeRobotDataset(tmp_path / "set")
    assert [data[row]["observation.state"].item() for row in (0, 59, 60, 120, 179)] == [0, 0, 1, 2, 2]


def test_an_error_leaves_nothing_behind(tmp_path: Path) -> None:
    def record() -> None:
        with LeRobotWriter(tmp_path / "set", features=FEATURES) as writer:
            writer.add_episode(frames(), "pick")
            raise RuntimeError("simulator died")

    with pytest.raises(RuntimeError, match="simulator died"):
        record()
    assert not list(tmp_path.iterdir())


def test_a_killed_recording_does_not_read_as_a_data_set(tmp_path: Path) -> None:
    writer = LeRobotWriter(tmp_path / "set", features=FEATURES)
    writer.add_episode(frames(), "pick")
    (left,) = tmp_path.iterdir()
    with pytest.raises(FileNotFoundError, match="no LeRobot data set"):
        LeRobotDataset(left)
    writer.discard()
    assert not list(tmp_path.iterdir())


def test_overwrite_replaces_a_data_set_and_nothing_else(tmp_path: Path) -> None:
    root = tmp_path / "set"
    for episodes in (3, 1):
        with LeRobotWriter(root, features=FEATURES, overwrite=episodes == 1) as writer:
            for _ in range(episodes):
                writer.add_episode(frames(), "pick")
    assert json.loads((root / "meta/info.json").read_text())["total_episodes"] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["set"]

    with pytest.raises(FileExistsError, match="overwrite=True"):
        LeRobotWriter(root, features=FEATURES)
    other = tmp_path / "documents"
    other.mkdir()
    (other / "thesis.txt").write_text("years of work")
    with pytest.raises(FileExistsError, match="no LeRobot data set"):
        LeRobotWriter(other, features=FEATURES, overwrite=True)
    assert (other / "thesis.txt").read_text() == "years of work"


def test_a_failed_overwrite_keeps_the_old_data_set(tmp_path: Path) -> None:
    root = tmp_path / "set"
    with LeRobotWriter(root, features=FEATURES) as writer:
        writer.add_episode(frames(), "pick")
    with (
        pytest.raises(ValueError, match="no episode was added"),
        LeRobotWriter(root, features=FEATURES, overwrite=True),
    ):
        pass
    assert json.loads((root / "meta/info.json").read_text())["total_frames"] == 3
    assert [path.name for path in tmp_path.iterdir()] == ["set"]


def test_a_recording_does_not_replace_one_that_finished_meanwhile(tmp_path: Path) -> None:
    root = tmp_path / "set"
    with LeRobotWriter(root, features=FEATURES) as slow:
        slow.add_episode(frames(3), "slow")
        with LeRobotWriter(root, features=FEATURES) as quick:
            quick.add_episode(frames(2), "quick")
        with pytest.raises(FileExistsError, match=r"is not empty; .*whole and kept in '(.*)'$") as caught:
            slow.finish()
        slow.discard()
    assert load_tasks(root) == ["quick"]
    assert str(tmp_path / ".set.partial-") in str(caught.value)


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "real", target_is_directory=True)
    for task in ("first", "second"):
        with LeRobotWriter(tmp_path / "link", features=FEATURES, overwrite=True) as writer:
            writer.add_episode(frames(2), task)
        assert (tmp_path / "link").is_symlink()
        assert load_tasks(tmp_path / "real") == [task]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "real"]


def test_targets_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for overwrite in (False, True):
        with pytest.raises(FileExistsError, match="file' is a file; choose another name"):
            LeRobotWriter(tmp_path / "file", features=FEATURES, overwrite=overwrite)
    with pytest.raises(OSError, match=r"the data set '.*/file/sub' cannot be written"):
        LeRobotWriter(tmp_path / "file" / "sub", features=FEATURES)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_an_empty_folder_is_a_fine_target(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    with LeRobotWriter(tmp_path / "set", features=FEATURES) as writer:
        writer.add_episode(frames(), "pick")
    assert (tmp_path / "set/meta/info.json").is_file()


def test_side_files_appear_with_the_data_set(tmp_path: Path) -> None:
    with LeRobotWriter(tmp_path / "set", features=FEATURES) as writer:
        writer.add_episode(frames(), "pick")
        writer.write_side_file("soma_demos.json", {"seed": 3})
        for name in ("info.json", "../escape.json", "notes.txt"):
            with pytest.raises(ValueError, match=r"plain file name|belongs to the LeRobot format"):
                writer.write_side_file(name, {})
    assert json.loads((tmp_path / "set/meta/soma_demos.json").read_text()) == {"seed": 3}


def test_finished_writers_take_no_more(tmp_path: Path) -> None:
    writer = LeRobotWriter(tmp_path / "set", features=FEATURES)
    writer.add_episode(frames(), "pick")
    writer.finish()
    writer.finish()
    with pytest.raises(RuntimeError, match="is finished"):
        writer.add_episode(frames(), "pick")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"action": np.zeros((3, 2))}, "episode 1, column 'action': dtype float64, expected float32"),
        ({"action": np.zeros((3, 5), np.float32)}, r"episode 1, column 'action': shape \[3, 5\], expected \[T, 2\]"),
        ({"action": np.zeros((2, 2), np.float32)}, f"episode 1, column 'action': 2 frames, but '{CAMERA}' has 3"),
        ({"action": np.array([[0, 0], [0, np.nan], [0, 0]], np.float32)}, "column 'action': frame 1 is not finite"),
        ({"action": [[0, 0]] * 3}, "episode 1, column 'action': expected a numpy array, found list"),
        ({CAMERA: np.zeros((3, 4, 6, 3), np.float32)}, f"episode 1, column '{CAMERA}': dtype float32, expected uint8"),
        ({CAMERA: np.zeros((3, 3, 4, 6), np.uint8)}, r"shape \[3, 3, 4, 6\], expected \[T, 4, 6, 3\]"),
        ({CAMERA: np.zeros((0, 4, 6, 3), np.uint8)}, r"shape \[0, 4, 6, 3\]"),
        ({"reward": np.zeros(3)}, r"missing columns \[\], unknown columns \['reward'\]"),
    ],
)
def test_frames_that_do_not_fit(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with LeRobotWriter(tmp_path / "set", features=FEATURES) as writer:
        writer.add_episode(frames(3), "pick")
        with pytest.raises(ValueError, match=message):
            writer.add_episode(frames(3, **changes), "pick")
        writer.add_episode(frames(4), "pick")
    assert len(pq.read_table(tmp_path / "set/data/chunk-000/file-000.parquet")) == 7


def test_missing_columns_and_empty_tasks(tmp_path: Path) -> None:
    writer = LeRobotWriter(tmp_path / "set", features=FEATURES)
    with pytest.raises(ValueError, match=r"episode 0: missing columns \['observation.images.image', 'success'\]"):
        writer.add_episode({"action": frames()["action"]}, "pick")
    with pytest.raises(ValueError, match="episode 0: task='  ' must be an instruction"):
        writer.add_episode(frames(), "  ")
    with pytest.raises(ValueError, match="no episode was added"):
        writer.finish()


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ({}, "features is empty"),
        ({"index": {"dtype": "int64", "shape": [1]}}, "'index', which the writer fills itself"),
        ({"a/b": {"dtype": "int64", "shape": [1]}}, "allows no '/'"),
        ({"action": {"dtype": "float32"}}, "needs dtype, shape"),
        ({"action": {"dtype": "float32", "shape": [2, 3]}}, "numeric features have one axis"),
        ({"action": {"dtype": "float8", "shape": [2]}}, "dtype 'float8'"),
        ({CAMERA: {"dtype": "video", "shape": [8, 7, 3]}}, "height and width must be even"),
        ({CAMERA: {"dtype": "video", "shape": [8, 8]}}, r"an image is \[height, width, 3\]"),
        ({CAMERA: {"dtype": "image", "shape": [3, 8, 8]}}, r"an image is \[height, width, 3\]"),
    ],
)
def test_features_that_cannot_be_written(tmp_path: Path, features: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LeRobotWriter(tmp_path / "set", features=features)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("argument", "value"), [("fps", 0), ("fps", 2.5), ("data_file_size_mb", 0)])
def test_numbers_out_of_range(tmp_path: Path, argument: str, value: Any) -> None:
    with pytest.raises(ValueError, match=argument):
        LeRobotWriter(tmp_path / "set", features=FEATURES, **{argument: value})
