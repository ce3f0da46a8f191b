"""The check of a data set: every kind of fault is found, named exactly, and does not hide the others."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from soma_lightning.data import LeRobotWriter
from soma_lightning.data import lerobot_format as fmt
from soma_lightning.data.findings import Findings
from soma_lightning.data.frame_scan import FrameScan, Progress
from soma_lightning.data.inspection import Inspection, inspect_dataset
from soma_lightning.data.lerobot import LeRobotDataset
from soma_lightning.data.lerobot_format import DatasetFormatError
from soma_lightning.data.statistics import compute_statistics
from soma_lightning.data.totals import Histogram, Totals

CAMERA = "observation.images.image"
DATA_FILE = "data/chunk-000/file-000.parquet"
EPISODES_FILE = "meta/episodes/chunk-000/file-000.parquet"
STATS = "meta/stats.json"
#: Where the episodes of `record`'s data set begin (lengths 5, 7, 4, 6).
START = (0, 5, 12, 16)

Record = Callable[..., Path]
Change = Callable[[Path], None]


def inspect(root: Path, **arguments: Any) -> Inspection:
    return inspect_dataset(root, report=lambda line: None, **arguments)


def problems(root: Path, **arguments: Any) -> list[str]:
    return [str(finding) for finding in inspect(root, **arguments).problems]


def warnings(root: Path, **arguments: Any) -> list[str]:
    return [str(finding) for finding in inspect(root, **arguments).warnings]


# -------------------------------------------------------------------- how a data set is spoilt


def edit_table(name: str, change: Callable[[pa.Table], pa.Table], row_group_size: int | None = None) -> Change:
    def spoil(root: Path) -> None:
        table = pq.read_table(root / name)
        metadata = table.schema.metadata
        pq.write_table(change(table).replace_schema_metadata(metadata), root / name, row_group_size=row_group_size)

    return spoil


def put(column: str, row: int, value: Any) -> Change:
    """Another value in one row of a column of the data file."""

    def change(table: pa.Table) -> pa.Table:
        values = table[column].to_pylist()
        values[row] = value
        type_ = table[column].type
        if column in ("action", "observation.state"):
            type_ = pa.list_(pa.float32())  # so that a row may have another length
        return table.set_column(table.column_names.index(column), column, pa.array(values, type_))

    return edit_table(DATA_FILE, change)


def put_all(column: str, values: Any) -> Change:
    return edit_table(DATA_FILE, lambda t: t.set_column(t.column_names.index(column), column, values(t)))


def edit_stats(column: str, name: str, change: Callable[[list[Any]], Any]) -> Change:
    def spoil(root: Path) -> None:
        content = json.loads((root / STATS).read_text())
        content[column][name] = change(content[column][name])
        (root / STATS).write_text(json.dumps(content))

    return spoil


def first(value: Any) -> Callable[[list[Any]], list[Any]]:
    return lambda values: [value, *values[1:]]


def cut_file(root: Path) -> None:
    content = (root / DATA_FILE).read_bytes()
    (root / DATA_FILE).write_bytes(content[: len(content) // 2])


def spoil_page(root: Path) -> None:
    """Flips the bytes of a page of `action` in the second row group."""
    chunk = pq.ParquetFile(root / DATA_FILE).metadata.row_group(1)
    column = next(chunk.column(i) for i in range(chunk.num_columns) if chunk.column(i).path_in_schema[:6] == "action")
    content = bytearray((root / DATA_FILE).read_bytes())
    start = column.dictionary_page_offset or column.data_page_offset
    for i in range(start, start + column.total_compressed_size):
        content[i] ^= 0xFF
    (root / DATA_FILE).write_bytes(bytes(content))


NAN = float("nan")
PNG_OF_4 = (
    b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR\x00\x00\x00\x01\x00\x00\x00\x01\x08\x00\x00\x00\x00:~\x9bU"
    b"\x00\x00\x00\nIDATx\x9cc`\x00\x00\x00\x02\x00\x01H\xaf\xa4q\x00\x00\x00\x00IEND\xaeB`\x82"
)

#: (name, what is spoilt, every problem line that it gives)
FAULTS: list[tuple[str, Change, list[str]]] = [
    (
        "not finite",
        put("action", START[1] + 3, [NAN, 2.0]),
        [f"{DATA_FILE}: episode 1, column 'action': frame 3: a value is missing or not finite: [nan, 2]"],
    ),
    (
        "null",
        put("observation.state", START[2], [None, 1.0, 2.0]),
        [f"{DATA_FILE}: episode 2, column 'observation.state': frame 0: a value is missing or not finite: [nan, 1, 2]"],
    ),
    (
        "length of a row",
        put("action", START[0] + 1, [1.0, 2.0, 3.0]),
        [f"{DATA_FILE}: episode 0, column 'action': frame 1: a row that is not 2 numbers"],
    ),
    (
        "type of a column",
        put_all("action", lambda t: t["action"].cast(pa.list_(pa.float64(), 2))),
        [
            f"{DATA_FILE}: column 'action': holds fixed_size_list<element: double>[2], but meta/info.json declares "
            "float32 [2]"
        ],
    ),
    (
        "timestamp",
        put("timestamp", START[3] + 2, 0.25),
        [f"{DATA_FILE}: episode 3, column 'timestamp': frame 2: 0.25 s, must be frame_index / fps = 0.2 s"],
    ),
    (
        "frame_index",
        put("frame_index", START[1] + 2, 9),
        [f"{DATA_FILE}: episode 1, column 'frame_index': frame 2: 9, must be 2"],
    ),
    (
        "index",
        put_all("index", lambda t: pa.array([*range(12), *range(13, 23)])),
        [
            f"{DATA_FILE}: episode 2, column 'index': frame 0: 13, must be 12 (and 3 frames more)",
            f"{DATA_FILE}: episode 3, column 'index': frame 0: 17, must be 16 (and 5 frames more)",
        ],
    ),
    (
        "task_index",
        put("task_index", START[0] + 4, 2),
        [
            f"{DATA_FILE}: episode 0, column 'task_index': frame 4: task 2 is not in meta/tasks.parquet, which has 2 "
            "tasks"
        ],
    ),
    (
        "episode_index of nothing",
        put("episode_index", START[1] + 6, 7),
        [
            f"{DATA_FILE}: episode 7, column 'episode_index': 1 frames of an episode that meta/episodes does not place "
            "in this file",
            f"{DATA_FILE}: episode 1, column 'episode_index': 6 frames, meta/episodes says 7",
        ],
    ),
    (
        "order of episodes",
        edit_table(DATA_FILE, lambda t: pa.concat_tables([t.slice(5, 7), t.slice(0, 5), t.slice(12)])),
        [
            f"{DATA_FILE}: episode 0, column 'episode_index': its frames follow those of episode 1; frames must be in "
            "order and in one piece"
        ],
    ),
    (
        "lost frames",
        edit_table(DATA_FILE, lambda t: t.slice(0, 20)),
        [f"{DATA_FILE}: episode 3, column 'episode_index': 4 frames, meta/episodes says 6"],
    ),
    (
        "type of episode_index",
        put_all("episode_index", lambda t: t["episode_index"].cast(pa.float64())),
        [f"{DATA_FILE}: column 'episode_index': must be int64 without nulls, found double (0 nulls)"]
        + [
            f"{DATA_FILE}: episode {i}, column 'episode_index': 0 frames, meta/episodes says {n}"
            for i, n in enumerate((5, 7, 4, 6))
        ],
    ),
    (
        "image that is none",
        put(CAMERA, START[1] + 1, {"bytes": b"no image", "path": "x"}),
        [
            f"{DATA_FILE}: episode 1, column '{CAMERA}': frame 1: the image cannot be decoded: "
            "cannot identify image file"
        ],
    ),
    (
        "image without bytes",
        put(CAMERA, START[3] + 5, {"bytes": None, "path": "x"}),
        [f"{DATA_FILE}: episode 3, column '{CAMERA}': frame 5: the image is not embedded (no bytes)"],
    ),
    (
        "image size",
        put(CAMERA, START[2] + 2, {"bytes": PNG_OF_4, "path": "x"}),
        [
            f"{DATA_FILE}: episode 2, column '{CAMERA}': frame 2: the image is 1x1, meta/info.json declares 8x8 "
            "(height x width)"
        ],
    ),
    (
        "row group",
        spoil_page,
        [
            f"{DATA_FILE}: row group 1 cannot be read: ",
            f"{DATA_FILE}: episode 1, column 'episode_index': 0 frames, meta/episodes says 7",
        ],
    ),
    ("minimum", edit_stats("action", "min", first(-1.0)), ["min of dimension 0 is -1, the data have 0"]),
    (
        "maximum",
        edit_stats("observation.state", "max", first(3.0000005)),
        ["max of dimension 0 is 3.0000005, the data have 3"],
    ),
    ("mean", edit_stats("action", "mean", lambda v: [v[0] + 0.2, v[1]]), ["mean of dimension 0 is "]),
    ("std", edit_stats("action", "std", first(113.0)), ["std of dimension 0 is 113, the data have "]),
    (
        "quantiles",
        edit_stats("action", "q99", first(999.0)),
        ["dimension 0: q99 999 is above the data's maximum 305"],
    ),
    (
        "order of quantiles",
        edit_stats("action", "q10", first(250.0)),
        ["dimension 0: q10 250 is above q50 "],
    ),
    ("count", edit_stats("action", "count", first(21)), ["count is 21, the data have 22 frames with finite values"]),
    ("length", edit_stats("action", "mean", lambda v: v[:1]), ["mean must be 2 finite numbers, found ["]),
    ("NaN", edit_stats("action", "std", first(NAN)), ["std must be 2 finite numbers, found [nan, "]),
    ("no numbers", edit_stats("action", "q01", lambda v: "low"), ["q01 must be 2 finite numbers, found low"]),
]
OF_STATISTICS = [name for name, *_ in FAULTS].index("minimum")


@pytest.mark.parametrize(
    ("spoil", "expected"), [pytest.param(change, lines, id=name) for name, change, lines in FAULTS[:OF_STATISTICS]]
)
def test_every_fault_of_the_files_is_named(record: Record, spoil: Change, expected: list[str]) -> None:
    root = record()
    spoil(root)
    found = [line for line in problems(root) if not line.startswith(STATS)]
    assert len(found) == len(expected), found
    for line, wanted in zip(found, expected, strict=True):
        # Texts of other libraries follow these two.
        assert line.startswith(wanted) if wanted.endswith(("file", "read: ")) else line == wanted


@pytest.mark.parametrize(
    ("spoil", "expected"), [pytest.param(change, lines, id=name) for name, change, lines in FAULTS[OF_STATISTICS:]]
)
def test_every_fault_of_the_statistics_is_named(record: Record, spoil: Change, expected: list[str]) -> None:
    root = record()
    spoil(root)
    column = "observation.state" if "3.0000005" in expected[0] else "action"
    found = problems(root)
    assert len(found) == 1, found
    assert found[0].startswith(f"{STATS}: column '{column}': {expected[0]}")


def test_a_sound_data_set_has_no_problem(record: Record, golden_root: Path) -> None:
    assert problems(record()) == []
    assert problems(golden_root) == []


def test_all_faults_at_once(record: Record) -> None:
    root = record()
    put("timestamp", START[3] + 2, 0.25)(root)
    put("action", START[1] + 3, [NAN, 2.0])(root)
    put(CAMERA, START[1] + 1, {"bytes": b"no image", "path": "x"})(root)
    edit_stats("action", "q99", first(999.0))(root)
    found = [f"{finding.episode} {finding.column}" for finding in inspect(root).problems]
    assert {"3 timestamp", "1 action", f"1 {CAMERA}", "None action"} <= set(found)


def test_metadata_that_cannot_be_read_are_one_error(record: Record, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="the folder does not exist"):
        inspect(tmp_path / "nothing")
    root = record()
    (root / "meta/tasks.parquet").unlink()
    with pytest.raises(DatasetFormatError, match=r"meta/tasks.parquet is missing"):
        inspect(root)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"images": -1}, "images=-1 must not be negative"),
        ({"state_key": "pose"}, r"state_key='pose' is no vector of numbers in .*'observation.state', 'action'"),
        ({"action_key": CAMERA}, f"action_key='{CAMERA}' is no vector of numbers"),
    ],
)
def test_arguments_that_do_not_fit(record: Record, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        inspect(record(), **arguments)


def test_files_that_are_missing_cut_or_unknown(record: Record) -> None:
    root = record()
    (root / "data/chunk-000/file-003.parquet").write_bytes((root / DATA_FILE).read_bytes())
    assert problems(root)[0] == "data/chunk-000/file-003.parquet: meta/episodes knows nothing of this file"
    (root / "data/chunk-000/file-003.parquet").unlink()
    cut_file(root)
    found = problems(root)
    assert found[0].startswith(f"{DATA_FILE}: cannot be read as parquet: ")
    assert f"{DATA_FILE}: episode 2, column 'episode_index': 0 frames, meta/episodes says 4" in found
    (root / DATA_FILE).unlink()
    assert problems(root)[0] == f"{DATA_FILE}: the file is missing; meta/episodes says episodes 0 to 3 are in it"


def test_a_missing_column(record: Record) -> None:
    root = record()
    info = json.loads((root / "meta/info.json").read_text())
    info["features"]["note"] = {"dtype": "string", "shape": [1], "names": None}
    (root / "meta/info.json").write_text(json.dumps(info))
    edit_table(DATA_FILE, lambda t: t.drop_columns(["action", CAMERA]))(root)
    found = problems(root)
    there = "['observation.state', 'timestamp', 'frame_index', 'episode_index', 'index', 'task_index']"
    for column in ("action", CAMERA, "note"):
        assert f"{DATA_FILE}: column '{column}': the column is missing; the file has {there}" in found


# -------------------------------------------------------------------- warnings


def write(root: Path, actions: list[np.ndarray], names: list[str] | None = None, states: bool = True) -> Path:
    """A data set without images whose actions [T, A] are given; states count up unless they are to be equal."""
    size = actions[0].shape[1]
    features = {
        "observation.state": {"dtype": "float32", "shape": [2]},
        "action": {"dtype": "float32", "shape": [size], "names": names},
    }
    with LeRobotWriter(root, fps=10, features=features) as writer:
        for number, action in enumerate(actions):
            steps = np.arange(len(action), dtype=np.float32)
            state = np.stack([steps, steps + number * states], axis=1)
            writer.add_episode({"observation.state": state, "action": action.astype(np.float32)}, "move")
    return root


def noise(length: int, size: int = 2, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(-1, 1, (length, size))


def test_nothing_to_warn_of(tmp_path: Path) -> None:
    assert warnings(write(tmp_path / "a", [noise(30, seed=i) for i in range(4)], ["x", "gripper"])) == []


def test_constant_dimensions(tmp_path: Path) -> None:
    actions = [np.stack([noise(20, 1, i)[:, 0], np.full(20, 0.5)], axis=1) for i in range(2)]
    root = write(tmp_path / "a", actions, ["x", "rz"])
    assert warnings(root) == ["column 'action': rz (dimension 1) stays at 0.5 in all frames"]
    assert inspect(root).summary["columns"]["action"]["constant"] == [1]


def test_outliers_name_the_farthest_frame(tmp_path: Path) -> None:
    actions = [noise(200, seed=i) for i in range(2)]
    actions[1][17, 1] = -40.0
    found = warnings(write(tmp_path / "a", actions, ["x", "y"]))
    assert len(found) == 1
    column = inspect(tmp_path / "a").columns["action"]
    low, high = column.q01[1], column.q99[1]
    assert found[0] == (
        f"{DATA_FILE}: episode 1, column 'action': frame 17: y is -40, which becomes "
        f"{2 * (-40 - low) / (high - low) - 1:.3g} when q01..q99 = {low:.6g}..{high:.6g} becomes -1..1"
    )


def test_noise_around_a_constant_is_no_outlier(tmp_path: Path) -> None:
    """The normaliser spreads near-constant dimensions, so that a policy never sees what is off by a thousandth."""
    actions = [np.stack([noise(200, 1, i)[:, 0], 3.14 + 1e-6 * noise(200, 1, i)[:, 0]], axis=1) for i in range(2)]
    actions[0][9, 1] = 3.13
    assert warnings(write(tmp_path / "a", actions)) == []
    actions[0][9, 1] = 3.0
    assert "frame 9: 1 is 3, which becomes -9.9" in warnings(write(tmp_path / "b", actions))[0]


def test_duplicates_short_and_unchanging_episodes(tmp_path: Path) -> None:
    actions = [noise(30, seed=i) for i in range(3)] + [noise(30, seed=1), np.full((30, 2), 0.1), noise(5, seed=9)]
    assert warnings(write(tmp_path / "a", actions, states=False)) == [
        "episode 1: has the same states and actions as episode 3",
        f"{DATA_FILE}: episode 5: is very short: 5 frames, the median is 30",
        f"{DATA_FILE}: episode 4, column 'action': never changes",
    ]


@pytest.mark.parametrize(("low", "high", "warned"), [(-1, 1, False), (0, 1, True), (-1, 100, True)])
def test_gripper_range(tmp_path: Path, low: float, high: float, warned: bool) -> None:
    actions = [noise(30, seed=i) for i in range(2)]
    for action in actions:
        action[:, 1] = np.where(action[:, 1] > 0, high, low)
    found = warnings(write(tmp_path / "a", actions, ["x", "gripper.pos"]))
    line = f"column 'action': gripper.pos (dimension 1) has values in {low}..{high}; our environments take -1 (open) to"
    assert [text.startswith(line) for text in found] == [True] * warned


def test_quantiles_that_leave_frames_out(tmp_path: Path) -> None:
    root = write(tmp_path / "a", [noise(200, seed=i) for i in range(3)])
    edit_stats("action", "q99", first(0.5))(root)
    edit_stats("action", "q90", first(0.4))(root)
    assert warnings(root) == [
        f"{STATS}: column 'action': more than 2% of the frames lie beyond q99 of dimension 0 (0.5); "
        "statistics='computed' takes exact quantiles"
    ]
    edit_stats("action", "q99", first(1.0))(root)  # wider than exact ones, as LeRobot's
    assert warnings(root) == []


def test_statistics_that_are_not_there(record: Record) -> None:
    root = record()
    content = json.loads((root / STATS).read_text())
    del content["action"]["q99"], content["observation.state"]
    (root / STATS).write_text(json.dumps(content))
    missing = "the data module computes statistics itself"
    assert [line for line in warnings(root) if line.startswith(STATS)] == [
        f"{STATS}: column 'observation.state': lacks ['max', 'mean', 'min', 'q01', 'q99', 'std']; {missing}",
        f"{STATS}: column 'action': lacks ['q99']; {missing}",
    ]
    (root / STATS).unlink()
    assert f"{STATS}: is missing; {missing}" in warnings(root)
    (root / STATS).write_text("{")
    assert problems(root)[0].startswith(f"{STATS}: is no valid JSON")
    (root / STATS).write_text('{"action": -1}')
    assert problems(root) == [f"{STATS}: column 'action': -1 is no object of numbers"]


def test_other_warnings(record: Record) -> None:
    root = record()
    edit_table(DATA_FILE, lambda t: t.append_column("note", pa.array(["x"] * len(t))))(root)
    put_all("task_index", lambda t: pa.array([0] * len(t)))(root)
    found = warnings(root)
    assert f"{DATA_FILE}: column 'note': meta/info.json does not declare this column" in found
    assert "meta/tasks.parquet: task 1 ('reach the green disc') has no frame" in found
    assert f"column '{CAMERA}': 22 of 22 decoded images are of a single colour" in found


# -------------------------------------------------------------------- the summary, and how it is read


def test_summary(golden_root: Path) -> None:
    summary = inspect(golden_root).summary
    assert (summary["version"], summary["episodes"], summary["frames"]) == ("v3.0", 3, 38)
    assert summary["hours"] == 38 / summary["fps"] / 3600
    assert [(task["episodes"], task["frames"]) for task in summary["tasks"]] == [(2, 21), (1, 17)]
    assert [(c["height"], c["width"], c["dtype"], c["codec"], c["decoded"]) for c in summary["cameras"]] == [
        (32, 32, "image", "png", 38)
    ] * 2
    assert summary["bytes"] == sum(path.stat().st_size for path in golden_root.rglob("*") if path.is_file())
    assert {"q01", "q99", "mean"} <= set(summary["statistics"]["action"])
    json.dumps(inspect(golden_root).to_dict(), allow_nan=False)


def test_a_codec_that_the_metadata_do_not_say_is_unknown(record_video: Record) -> None:
    root = record_video()
    info = json.loads((root / "meta/info.json").read_text())
    for said in (-1, {}, ["h264"]):
        info["features"][CAMERA]["info"] = said
        (root / "meta/info.json").write_text(json.dumps(info))
        assert inspect(root).summary["cameras"][0]["codec"] == "unknown"


@pytest.mark.parametrize(("images", "decoded"), [(None, 22), (0, 0), (4, 14), (100, 22)])
def test_a_sample_of_the_images(record: Record, images: int | None, decoded: int) -> None:
    """4 evenly spaced frames, 0, 7, 14 and 21, and what the contact sheet shows of each episode."""
    root = record()
    check = inspect(root, images=images).cameras[CAMERA]
    assert (check.total, check.checked, check.broken) == (22, decoded, 0)
    if images != 0:
        assert set(check.sheet) == {(e, f) for e, n in enumerate((5, 7, 4, 6)) for f in (0, (n - 1) // 2, n - 1)}
        assert all((image[..., 0] == e).all() and (image[..., 1] == f).all() for (e, f), image in check.sheet.items())


def test_row_groups_and_files_change_nothing(record: Record) -> None:
    root = record()
    expected = inspect(root)
    table, episodes = pq.read_table(root / DATA_FILE), pq.read_table(root / EPISODES_FILE)
    pq.write_table(table.slice(0, 12), root / DATA_FILE, row_group_size=100)
    pq.write_table(table.slice(12), root / "data/chunk-000/file-001.parquet", row_group_size=3)
    place = episodes.column_names.index("data/file_index")
    pq.write_table(episodes.set_column(place, "data/file_index", pa.array([0, 0, 1, 1])), root / EPISODES_FILE)
    found = inspect(root)
    assert found.problems == []
    assert [str(w) for w in found.warnings] == [str(w) for w in expected.warnings]
    for key, column in expected.columns.items():
        np.testing.assert_array_equal(found.columns[key].histogram.counts, column.histogram.counts)


def test_totals_and_histograms_are_those_of_all_values() -> None:
    x = np.random.default_rng(0).normal(size=(997, 3)) * [1, 100, 1e-3] + [0, 5, 2]
    totals = Totals(3)
    for start in range(0, len(x), 100):
        part = x[start : start + 100]
        row = np.arange(start, start + len(part))
        totals.add(part, "f", row // 10, row % 10)
    np.testing.assert_allclose(totals.mean, x.mean(0), rtol=1e-12)
    np.testing.assert_allclose(totals.std, x.std(0), rtol=1e-12)
    np.testing.assert_array_equal(totals.high, x.max(0))
    place = totals.high_place[1]
    assert place is not None
    assert 10 * place.episode + place.frame == x[:, 1].argmax()
    histogram = Histogram(totals.low, totals.high)
    for start in range(0, len(x), 100):
        histogram.add(x[start : start + 100])
    assert histogram.counts.sum(1).tolist() == [997] * 3
    width = (totals.high - totals.low) / histogram.counts.shape[1]
    exact = compute_statistics({"x": x})["x"]
    for q, name in ((0.01, "q01"), (0.99, "q99")):
        gap = np.abs(np.sort(x, 0)[[int(q * 996), int(q * 996) + 1]] - exact[name]).max(0)
        assert (np.abs(histogram.quantile(q) - exact[name]) <= 2 * width + gap).all()


def test_memory_does_not_grow_with_the_data_set(tmp_path: Path) -> None:
    """Twenty times the row groups: the peak of the check stays within a few numbers an episode."""

    def peak(name: str, episodes: int) -> int:
        root = write(tmp_path / name, [noise(400, 7, i) for i in range(episodes)])
        info = LeRobotDataset(root).info
        rows = fmt.load_episodes(root, info)
        tracemalloc.start()
        scan = FrameScan(root, info, rows, 1, ("observation.state", "action"), Findings())
        scan.check(Progress(lambda line: None))
        scan.histograms(Progress(lambda line: None))
        used = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return used

    few, many = peak("few", 3), peak("many", 60)
    assert many - few < 57 * 4000, (few, many)  # holding the frames would take 57 * 400 * 9 * 8 bytes


def test_only_the_episodes_to_blame_go_unchecked(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    """A camera's file that is missing for one episode is a fault of that episode alone."""
    original = LeRobotDataset.__init__

    def refuse(self: LeRobotDataset, root: Path, *arguments: Any, **settings: Any) -> None:
        if 2 in settings["episodes"]:
            raise DatasetFormatError("videos/episode_000002.mp4 is missing")
        original(self, root, *arguments, **settings)

    root = record()
    monkeypatch.setattr(LeRobotDataset, "__init__", refuse)
    found = inspect(root)
    assert [str(finding) for finding in found.problems] == [
        f"episode 2, column '{CAMERA}': its images were not checked: videos/episode_000002.mp4 is missing"
    ]
    assert found.cameras[CAMERA].checked == 22 - 4


def test_a_sample_leaves_out_episodes_that_are_not_sound(record: Record) -> None:
    root = record()
    put("frame_index", START[1] + 2, 9)(root)
    check = inspect(root).cameras[CAMERA]
    assert (check.total, check.checked) == (15, 15)
    assert {episode for episode, _ in check.sheet} == {0, 2, 3}
    assert inspect(root, images=3).cameras[CAMERA].checked == 9 + 1, "the middle one is frame 2 of episode 2"
    assert inspect(root, images=4).cameras[CAMERA].checked == 9, "all four begin or end an episode"
