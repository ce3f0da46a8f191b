"""The reader: what lerobot's own reader sees, chunks and padding, camera and dimension maps, and every refusal."""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch.utils.data import DataLoader

from soma_lightning.data.lerobot import LeRobotDataset
from soma_lightning.data.lerobot_format import DatasetFormatError
from soma_lightning.data.lerobot_images import GIB

GOLDEN = Path(__file__).parents[1] / "goldens/lerobot_dataset/lerobot_reading.json"
CAMERA, WRIST = "observation.images.image", "observation.images.image2"
DATA_FILE = "data/chunk-000/file-000.parquet"
EPISODES_FILE = "meta/episodes/chunk-000/file-000.parquet"

Record = Callable[..., Path]


def sha256(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()


def edit_table(path: Path, change: Callable[[pa.Table], pa.Table]) -> None:
    table = pq.read_table(path)
    pq.write_table(change(table).replace_schema_metadata(table.schema.metadata), path)


def edit_info(root: Path, **changes: Any) -> None:
    path = root / "meta/info.json"
    info = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in info.items() if value is not None}))


def set_column(name: str, values: Any) -> Callable[[pa.Table], pa.Table]:
    return lambda table: table.set_column(table.column_names.index(name), name, values)


@pytest.mark.parametrize("preload", [False, True])
def test_reads_what_lerobot_reads(golden_root: Path, golden_module: ModuleType, preload: bool) -> None:
    golden = json.loads(GOLDEN.read_text())
    data = LeRobotDataset(golden_root, golden_module.CHUNK_SIZE, preload=preload)
    assert len(data) == len(golden["frames"])
    assert (data.fps, data.num_episodes, data.info.robot_type) == (
        golden["fps"],
        golden["total_episodes"],
        golden["robot_type"],
    )
    assert data.tasks == golden["tasks"]
    for item, expected in zip(data, golden["frames"], strict=False):
        assert item["action_is_pad"].tolist() == expected["action_is_pad"]
        assert sha256(item["action"]) == expected["action"]
        assert sha256(item["observation.state"]) == expected["state"]
        assert {key: sha256(item[key]) for key in golden_module.CAMERAS} == expected["images"]
        assert (item["task"], int(item["index"]), int(item["episode_index"])) == (
            expected["task"],
            expected["index"],
            expected["episode_index"],
        )


def test_our_statistics_are_what_lerobot_reads(golden_root: Path) -> None:
    stored = json.loads((golden_root / "meta/stats.json").read_text())
    for key, numbers in json.loads(GOLDEN.read_text())["statistics"].items():
        for name, values in numbers.items():
            np.testing.assert_allclose(stored[key][name], values, rtol=1e-12, err_msg=f"{key}/{name}")


def test_item_and_batch_fit_the_contract(record: Record) -> None:
    data = LeRobotDataset(record(size=8), chunk_size=4)
    item = data[2]
    assert {key: (value.dtype, list(value.shape)) for key, value in item.items() if key != "task"} == {
        CAMERA: (torch.uint8, [3, 8, 8]),
        "observation.state": (torch.float32, [3]),
        "action": (torch.float32, [4, 2]),
        "action_is_pad": (torch.bool, [4]),
        "index": (torch.int64, []),
        "episode_index": (torch.int64, []),
    }
    assert item["task"] == "pick up the cube"
    batch = data.batch([2, 6, 21])
    assert batch[CAMERA].shape == (3, 3, 8, 8)
    assert batch["task"] == ["pick up the cube", "reach the green disc", "reach the green disc"]
    assert batch["index"].tolist() == [2, 6, 21]
    assert batch["episode_index"].tolist() == [0, 1, 3]
    assert batch["observation.state"][:, 1].tolist() == [2.0, 1.0, 5.0]
    assert batch[CAMERA][:, :, 0, 0].tolist() == [[0, 2, 2], [1, 1, 1], [3, 5, 5]]
    for slot, row in enumerate([2, 6, 21]):
        for key, values in data[row].items():
            assert (
                torch.equal(batch[key][slot], values)
                if isinstance(values, torch.Tensor)
                else values == batch[key][slot]
            )


def test_chunks_repeat_the_last_action_past_the_end(record: Record) -> None:
    data = LeRobotDataset(record((5, 7)), chunk_size=3)
    assert data[1]["action"][:, 0].tolist() == [1, 2, 3]
    assert data[1]["action_is_pad"].tolist() == [False, False, False]
    assert data[3]["action"][:, 0].tolist() == [3, 4, 4]
    assert data[3]["action_is_pad"].tolist() == [False, False, True]
    assert data[4]["action"][:, 0].tolist() == [4, 4, 4]
    assert data[4]["action_is_pad"].tolist() == [False, True, True]
    assert data[5]["action"][:, 0].tolist() == [100, 101, 102]
    data.chunk_size = 20  # longer than any episode
    assert data[5]["action"][:, 0].tolist() == [100, 101, 102, 103, 104, 105, *[106] * 14]
    assert data[5]["action_is_pad"].sum() == 13


def test_default_collate_works_with_the_fast_path(record: Record) -> None:
    data = LeRobotDataset(record(), chunk_size=3)
    batch = next(iter(DataLoader(data, batch_size=4)))
    expected = data.batch(range(4))
    assert batch["task"] == expected["task"]
    for key in (CAMERA, "action", "action_is_pad", "observation.state", "index"):
        assert torch.equal(batch[key], expected[key]), key


def test_episodes_choose_frames_and_keep_global_numbers(record: Record) -> None:
    data = LeRobotDataset(record((5, 7, 4, 6)), chunk_size=2, episodes=[3, 1])
    assert (len(data), data.num_episodes, data.episodes) == (13, 2, [1, 3])
    assert [int(item["index"]) for item in data] == [*range(5, 12), *range(16, 22)]
    assert data[7]["action"][:, 0].tolist() == [300, 301]
    assert data[-1]["action_is_pad"].tolist() == [False, True]
    assert data[7][CAMERA][0, 0, 0] == 3


@pytest.mark.parametrize("preload", [False, True])
def test_many_files_and_a_small_cache_change_nothing(record: Record, preload: bool) -> None:
    """Episodes spread over files, several in one row group, images from a cache that holds next to nothing."""
    root = record((5, 7, 4, 6))
    rows = [21, 0, 13, 5, 11, 12, 0]
    expected = LeRobotDataset(root, chunk_size=3).batch(rows)
    table, episodes = pq.read_table(root / DATA_FILE), pq.read_table(root / EPISODES_FILE)
    pq.write_table(table.slice(0, 12), root / DATA_FILE, row_group_size=100)
    pq.write_table(table.slice(12), root / "data/chunk-000/file-001.parquet", row_group_size=7)
    pq.write_table(set_column("data/file_index", pa.array([0, 0, 1, 1]))(episodes), root / EPISODES_FILE)
    split = LeRobotDataset(root, chunk_size=3, preload=preload, image_cache_mib=0)
    found = split.batch(rows)
    for key in (CAMERA, "action", "action_is_pad", "index", "episode_index", "observation.state"):
        assert torch.equal(found[key], expected[key]), key
    subset = LeRobotDataset(root, chunk_size=3, episodes=[1, 2])
    assert [int(item["episode_index"]) for item in subset] == [1] * 7 + [2] * 4


def test_plain_lists_read_like_fixed_size_lists(record: Record) -> None:
    root = record()
    expected = LeRobotDataset(root, chunk_size=2).batch([3, 8])
    edit_table(
        root / DATA_FILE,
        lambda t: set_column("action", t["action"].cast(pa.list_(pa.float32())))(t),
    )
    assert torch.equal(LeRobotDataset(root, chunk_size=2).batch([3, 8])["action"], expected["action"])


def test_one_dimensional_features_are_plain_columns(record: Record) -> None:
    root = record()
    info = json.loads((root / "meta/info.json").read_text())["features"]
    edit_info(root, features={**info, "gripper": {"dtype": "float64", "shape": [1], "names": None}})
    edit_table(root / DATA_FILE, lambda t: t.append_column("gripper", pa.array(np.linspace(0, 1, len(t)))))
    data = LeRobotDataset(root, state_key="gripper")
    assert data.states.dtype == torch.float32
    assert data.states.shape == (22, 1)
    assert data[21]["observation.state"].tolist() == [1.0]


def test_camera_and_dimension_maps(record: Record) -> None:
    root = record(cameras=("observation.images.top", WRIST))
    data = LeRobotDataset(root, cameras={"observation.images.top": CAMERA}, state_indices=[1, 0], action_indices=[1])
    item = data[6]
    assert {key for key in item if key.startswith("observation.images.")} == {CAMERA}
    assert item["observation.state"].tolist() == [1.0, 1.0]
    assert data[8]["observation.state"].tolist() == [3.0, 1.0]
    assert data[8]["action"].tolist() == [[-3.0]]
    assert (data.state_dim, data.action_dim) == (2, 1)
    swapped = LeRobotDataset(root, state_key="action", action_key="observation.state")
    assert (swapped.state_dim, swapped.action_dim) == (2, 3)
    assert "observation.images.top" not in LeRobotDataset(root, cameras={})[0]


def test_preload_says_what_it_needs(record: Record) -> None:
    root = record(size=8)
    assert LeRobotDataset(root).decoded_bytes == 22 * 3 * 8 * 8
    limit = 22 * 3 * 8 * 8 / GIB
    assert LeRobotDataset(root, preload=True, preload_limit_gib=limit)[0][CAMERA].shape == (3, 8, 8)
    with pytest.raises(ValueError, match=r"22 frames of 1 cameras into 0.00 GiB, more than preload_limit_gib="):
        LeRobotDataset(root, preload=True, preload_limit_gib=limit * 0.99)


def test_a_copy_in_another_process_reads_on(record: Record) -> None:
    data = LeRobotDataset(record(), chunk_size=2)
    first = data[7]
    copy = pickle.loads(pickle.dumps(data))  # what a spawned worker receives
    assert torch.equal(copy[7][CAMERA], first[CAMERA])


def test_image_shapes_may_be_declared_channels_first(record: Record) -> None:
    root = record(size=8)
    features = json.loads((root / "meta/info.json").read_text())["features"]
    for names in (["channels", "height", "width"], None):
        edit_info(root, features={**features, CAMERA: {"dtype": "image", "shape": [3, 8, 8], "names": names}})
        assert LeRobotDataset(root).image_sizes == {CAMERA: (8, 8)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"chunk_size": 0}, "chunk_size=0 must be at least 1"),
        ({"episodes": []}, "episodes is empty"),
        ({"episodes": [0, 9]}, r"episodes \[9\] are not in .* 0 to 3"),
        ({"episodes": [1, 1]}, "episodes names one twice"),
        ({"cameras": {"observation.images.top": CAMERA}}, rf"cameras names \['observation.images.top'\].*'{CAMERA}'"),
        ({"cameras": {CAMERA: "top"}}, "would reach the policy as 'top'"),
        ({"cameras": {CAMERA: CAMERA, WRIST: CAMERA}}, "several cameras to"),
        ({"state_key": "observation.pose"}, "state_key='observation.pose' is no column"),
        ({"action_indices": [2]}, r"action_indices=\[2\] must name dimensions 0 to 1"),
        ({"action_indices": [0, 0]}, r"action_indices=\[0, 0\] names a dimension twice"),
        ({"state_indices": [1, 2, 1]}, r"state_indices=\[1, 2, 1\] names a dimension twice"),
        ({"state_indices": []}, r"state_indices=\[\]"),
        ({"state_key": CAMERA}, f"column '{CAMERA}' is declared as image"),
    ],
)
def test_arguments_that_do_not_fit(record: Record, arguments: dict[str, Any], message: str) -> None:
    root = record(cameras=(CAMERA, WRIST))
    with pytest.raises(ValueError, match=message):
        LeRobotDataset(root, **arguments)


def test_frames_out_of_range(record: Record) -> None:
    data = LeRobotDataset(record((5,)))
    for index in (5, -6):
        with pytest.raises(IndexError, match=f"frame {index} is out of range"):
            data[index]


def test_no_data_set_says_how_to_record_one(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"the folder does not exist.*meta/info.json.*soma demos"):
        LeRobotDataset(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError, match="is no LeRobot data set: .*meta/info.json is missing.*soma demos"):
        LeRobotDataset(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"codebase_version": "v4.0"},
            "'v4.0' cannot be read; supported: v3.0, v2.1, v2.0$",
        ),
        (
            {"codebase_version": "v1.6"},
            "'v1.6' cannot be read; supported: .*; convert .*or record it anew",
        ),
        ({"codebase_version": None}, "codebase_version None"),
        ({"fps": None}, "info.json has no 'fps'"),
        ({"fps": 0}, "fps=0 must be a positive integer"),
        ({"fps": float("inf")}, "fps=inf must be a positive integer"),
        ({"fps": float("nan")}, "fps=nan must be a positive integer"),
        ({"fps": True}, "fps=True must be a positive integer"),
        ({"total_episodes": 10**30}, "total_episodes=1000000000000000000000000000000 must be a positive integer"),
        ({"data_path": 7}, "info.json: data_path=7 is no pattern"),
        ({"data_path": ["x"]}, "data_path=.* is no pattern"),
        ({"data_path": "{oops}.parquet"}, "data_path='{oops}.parquet' is no pattern"),
        ({"data_path": "{chunk_index"}, "data_path='{chunk_index' is no pattern"),
        ({"features": []}, r"info.json: features=\[\] must be an object"),
        ({"features": "action"}, "features='action' must be an object"),
        (
            {"features": {CAMERA: {"dtype": "image", "shape": []}}},
            r"image feature '.*' has shape \[\], expected 3 sizes",
        ),
        ({"features": {CAMERA: {"dtype": "image", "shape": [8, -1, 3]}}}, "expected a list of positive integers"),
        ({"features": {CAMERA: {"dtype": "image", "shape": [8, True, 3]}}}, "expected a list of positive integers"),
        ({"features": {CAMERA: {"dtype": "image", "shape": [8, 10**30, 3]}}}, "expected a list of positive integers"),
        (
            {"features": {CAMERA: {"dtype": "iamge", "shape": [8, 8, 3]}}},
            "has dtype 'iamge', expected 'image' or 'video'",
        ),
        ({"total_frames": 23}, "counts 4 episodes and 23 frames, meta/episodes 4 and 22; the data set is incomplete"),
        ({"features": {"action": {"shape": [2]}}}, "feature 'action' needs 'dtype' and 'shape'"),
        ({"features": {"action": {"dtype": "float32", "shape": "2"}}}, "feature 'action' has shape '2'"),
    ],
)
def test_metadata_that_cannot_be_read(record: Record, changes: dict[str, Any], message: str) -> None:
    root = record()
    edit_info(root, **changes)
    with pytest.raises(DatasetFormatError, match=message):
        LeRobotDataset(root)


def test_info_that_is_no_json(record: Record) -> None:
    root = record()
    (root / "meta/info.json").write_text("{")
    with pytest.raises(DatasetFormatError, match="info.json is no valid JSON"):
        LeRobotDataset(root)
    (root / "meta/info.json").write_text("[]")
    with pytest.raises(DatasetFormatError, match="holds a list, expected an object"):
        LeRobotDataset(root)


def test_missing_files(record: Record) -> None:
    root = record()
    (root / DATA_FILE).rename(root / "data/chunk-000/file-007.parquet")
    with pytest.raises(DatasetFormatError, match=f"{DATA_FILE} is missing; meta/episodes says episode 0 is in it"):
        LeRobotDataset(root)
    (root / "data/chunk-000/file-007.parquet").rename(root / DATA_FILE)
    (root / "data/chunk-000/file-001.parquet").write_bytes((root / DATA_FILE).read_bytes())
    with pytest.raises(DatasetFormatError, match=r"knows nothing of \['data/chunk-000/file-001.parquet'\]"):
        LeRobotDataset(root)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("meta/tasks.parquet", "meta/tasks.parquet is missing"),
        (EPISODES_FILE, "meta/episodes holds no parquet file"),
    ],
)
def test_missing_metadata(record: Record, file: str, message: str) -> None:
    root = record()
    (root / file).unlink()
    with pytest.raises(DatasetFormatError, match=message):
        LeRobotDataset(root)


@pytest.mark.parametrize("file", [DATA_FILE, "meta/tasks.parquet"])
def test_files_that_are_no_parquet(record: Record, file: str) -> None:
    root = record()
    (root / file).write_bytes(b"PAR1 is not enough PAR1")
    with pytest.raises(DatasetFormatError, match=f"{file} cannot be read as parquet"):
        LeRobotDataset(root)


@pytest.mark.parametrize("file", [DATA_FILE, EPISODES_FILE, "meta/tasks.parquet"])
def test_damage_in_the_name_of_a_column(record: Record, file: str) -> None:
    root = record()
    name = b"length" if file == EPISODES_FILE else b"task_index"
    (root / file).write_bytes((root / file).read_bytes().replace(name, name[:-1] + b"\x96"))
    with pytest.raises(DatasetFormatError, match=f"{file} cannot be read as parquet"):
        LeRobotDataset(root)


@pytest.mark.parametrize("column", ["action", "observation.state", CAMERA, "task_index", "frame_index"])
def test_missing_columns(record: Record, column: str) -> None:
    root = record()
    edit_table(root / DATA_FILE, lambda t: t.drop_columns([column]))
    with pytest.raises(DatasetFormatError, match=rf"{DATA_FILE} \(episodes 0 to 3\) has no column '{column}'"):
        LeRobotDataset(root)


def vectors(rows: int, size: int, dtype: Any = np.float32) -> Any:
    return pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(rows * size, dtype)), size)


def rows_with(row: int, value: Any, count: int = 22) -> list[Any]:
    """Actions [0, 0] with one other row (row 6 is frame 1 of episode 1)."""
    return [value if i == row else [0.0, 0.0] for i in range(count)]


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("action", vectors(22, 2, np.float64), "column 'action' holds double, but meta/info.json declares float32"),
        ("action", vectors(22, 5), "episode 0, column 'action': row 0 has 5 values, meta/info.json declares 2"),
        (
            "action",
            pa.array(rows_with(6, [1.0]), pa.list_(pa.float32())),
            "episode 1, column 'action': row 6 has 1 values, meta/info.json declares 2",
        ),
        (
            "action",
            pa.array(rows_with(6, None), pa.list_(pa.float32())),
            "episode 1, column 'action': row 6 has 0 values",
        ),
        (
            "action",
            pa.array(rows_with(6, [1.0, None]), pa.list_(pa.float32())),
            "episode 1, column 'action': row 6 has a null value",
        ),
        (
            "action",
            pa.array(rows_with(6, [1.0, float("nan")]), pa.list_(pa.float32(), 2)),
            r"episode 1, column 'action': frame 1 is not finite \(\[1.0, nan\]\)",
        ),
        ("action", pa.array(["left"] * 22), "column 'action' holds string, but meta/info.json declares float32"),
        ("task_index", pa.array([0.0] * 22), "column 'task_index' must be int64 without nulls, found double"),
        ("task_index", pa.array([0] * 21 + [7]), "episode 3, column 'task_index': task 7 is not in .* 2 tasks"),
        ("episode_index", pa.array([0] * 5 + [1] * 6 + [2] * 5 + [3] * 6), "episode 1 has 6 frames in .* says 7"),
        (
            "episode_index",
            pa.array([1] * 7 + [0] * 5 + [2] * 4 + [3] * 6),
            "episode 0, column 'episode_index': found 0 where 1 must follow",
        ),
        (
            "frame_index",
            pa.array([*range(5), 0, 1, 3, 2, 4, 5, 6, *range(4), *range(6)]),
            "episode 1, column 'frame_index': found 3 where 2 must follow; the frames are out of order",
        ),
        ("index", pa.array([*range(21), 30]), "episode 3, column 'index': found 30 where 21 must follow"),
    ],
)
def test_columns_that_are_wrong(record: Record, column: str, values: Any, message: str) -> None:
    root = record((5, 7, 4, 6))
    edit_table(root / DATA_FILE, set_column(column, values))
    with pytest.raises(DatasetFormatError, match=message) as caught:
        LeRobotDataset(root)
    assert DATA_FILE in str(caught.value)


def images_with(row: int, value: Any) -> Callable[[pa.Table], pa.Table]:
    def change(table: pa.Table) -> pa.Table:
        images = table[CAMERA].to_pylist()
        images[row] = {"bytes": value, "path": "frame.png"}
        return set_column(CAMERA, pa.array(images, table.schema.field(CAMERA).type))(table)

    return change


@pytest.mark.parametrize("preload", [False, True])
@pytest.mark.parametrize(
    ("value", "message"),
    [
        (b"\x89PNG\r\n\x1a\n and then nothing", "the image cannot be decoded"),
        (None, "the image is not embedded"),
    ],
)
def test_bad_images(record: Record, preload: bool, value: bytes | None, message: str) -> None:
    root = record((5, 7, 4, 6))
    edit_table(root / DATA_FILE, images_with(6, value))

    def read() -> None:
        LeRobotDataset(root, preload=preload)[6]

    with pytest.raises(DatasetFormatError, match=f"{DATA_FILE}: episode 1, column '{CAMERA}', frame 1: {message}"):
        read()


def test_truncated_and_wrong_sized_images(record: Record) -> None:
    root = record((5, 7, 4, 6))
    good = pq.read_table(root / DATA_FILE)[CAMERA][6].as_py()["bytes"]
    edit_table(root / DATA_FILE, images_with(6, good[: len(good) // 2]))
    with pytest.raises(DatasetFormatError, match="episode 1, .*the image cannot be decoded"):
        LeRobotDataset(root)[6]
    large = pq.read_table(record((1,), name="large", size=9) / DATA_FILE)[CAMERA][0].as_py()["bytes"]
    edit_table(root / DATA_FILE, images_with(6, large))
    with pytest.raises(DatasetFormatError, match="the image is 9x9, meta/info.json declares 8x8"):
        LeRobotDataset(root)[6]


def test_image_columns_of_another_type(record: Record) -> None:
    root = record()
    edit_table(root / DATA_FILE, set_column(CAMERA, pa.array(["frame.png"] * 22)))
    with pytest.raises(DatasetFormatError, match=f"column '{CAMERA}' must hold struct<bytes: binary, path: string>"):
        LeRobotDataset(root)[0]


def test_tasks_that_cannot_be_read(record: Record) -> None:
    root = record()
    path = root / "meta/tasks.parquet"
    pq.write_table(pa.table({"task_index": [0, 1], "__index_level_0__": ["pick", "push"]}), path)
    assert LeRobotDataset(root).tasks == ["pick", "push"]
    for table, message in (
        ({"task_index": [0, 1]}, "needs the columns 'task_index' and 'task'"),
        ({"task_index": [1, 0], "task": ["a", "b"]}, "must count 0, 1, 2"),
        ({"task_index": [0, 1], "task": [5, 6]}, "task 0 is 5, expected the instruction"),
    ):
        pq.write_table(pa.table(table), path)
        with pytest.raises(DatasetFormatError, match=message):
            LeRobotDataset(root)
    latin = pa.array([b"pick", b"sch\xf6n"]).cast(pa.string(), safe=False)
    pq.write_table(pa.table({"task_index": [0, 1], "task": latin}), path)
    with pytest.raises(DatasetFormatError, match="tasks.parquet cannot be read as parquet: .*UTF8"):
        LeRobotDataset(root)


def test_episode_metadata_that_cannot_be_read(record: Record) -> None:
    root = record()
    table = pq.read_table(root / EPISODES_FILE)
    for changed, message in (
        (table.drop_columns(["length"]), r"lacks the columns \['length'\]"),
        (
            set_column("episode_index", pa.array([0, 2, 1, 3]))(table),
            "row 1 describes episode 2; rows must be in order",
        ),
        (set_column("length", pa.array([5, 0, 4, 6]))(table), "episode 1 has length 0"),
        (
            set_column("data/chunk_index", pa.array([0, None, 0, 0]))(table),
            "episode 1: data has chunk None and file 0",
        ),
        (set_column("data/file_index", pa.array(["0"] * 4))(table), "episode 0: data has chunk 0 and file '0'"),
        (set_column("data/file_index", pa.array([-1] * 4))(table), "episode 0: data has chunk 0 and file -1"),
    ):
        pq.write_table(changed, root / EPISODES_FILE)
        with pytest.raises(DatasetFormatError, match=message):
            LeRobotDataset(root)


def test_episodes_that_alternate_between_files(record: Record) -> None:
    root = record((5, 7, 4, 6))
    table, episodes = pq.read_table(root / DATA_FILE), pq.read_table(root / EPISODES_FILE)
    pq.write_table(pa.concat_tables([table.slice(0, 5), table.slice(12)]), root / DATA_FILE)
    pq.write_table(table.slice(5, 7), root / "data/chunk-000/file-001.parquet")
    pq.write_table(set_column("data/file_index", pa.array([0, 1, 0, 0]))(episodes), root / EPISODES_FILE)
    with pytest.raises(
        DatasetFormatError, match="the frames of episode 1 do not follow those of the episode before it"
    ):
        LeRobotDataset(root)


def test_a_file_that_changes_while_it_is_read(record: Record) -> None:
    root = record()
    data = LeRobotDataset(root)
    edit_table(root / DATA_FILE, lambda t: t)  # one row group where there were four
    with pytest.raises(DatasetFormatError, match=f"{DATA_FILE}: row group 3 cannot be read"):
        data[21]
