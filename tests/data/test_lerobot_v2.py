"""LeRobot v2.1 and v2.0: the same samples as the v3.0 data set they were made from, statistics, every refusal."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from soma_lightning.data import LeRobotDataModule
from soma_lightning.data.lerobot import LeRobotDataset
from soma_lightning.data.lerobot_format import DatasetFormatError
from soma_lightning.data.lerobot_writer import LeRobotWriter
from soma_lightning.data.statistics import describe
from tests.data.videos import HEIGHT, WIDTH, decode, encode, moving_square, steady

CAMERA = "observation.images.image"
FPS = 10
LENGTHS = (6, 9, 4)
TASKS = ("pick up the cube", "reach the green disc")


def episode_frames(episode: int, length: int) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(episode)
    return {
        CAMERA: moving_square(length, episode),
        "observation.state": (draw.normal(size=(length, 3)) + 100 * episode).astype(np.float32),
        "action": draw.normal(size=(length, 2)).astype(np.float32),
        "grasped": np.arange(length) > 2,
    }


def record_v3(root: Path, dtype: str) -> None:
    features = {
        CAMERA: {"dtype": dtype, "shape": [HEIGHT, WIDTH, 3]},
        "observation.state": {"dtype": "float32", "shape": [3]},
        "action": {"dtype": "float32", "shape": [2]},
        "grasped": {"dtype": "bool", "shape": [1]},
    }
    with LeRobotWriter(root, fps=FPS, features=features, robot_type="panda") as writer:
        for episode, length in enumerate(LENGTHS):
            writer.add_episode(episode_frames(episode, length), TASKS[episode % 2])


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_v2(source: Path, root: Path, version: str = "v2.1", *, chunk: int = 2, lists: bool = True) -> None:
    """Rewrites a v3.0 data set of this file in the layout of `version`, `chunk` episodes a folder."""
    info = json.loads((source / "meta/info.json").read_text())
    video = info["features"][CAMERA]["dtype"] == "video"
    info |= {
        "codebase_version": version,
        "chunks_size": chunk,
        "data_path": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
        "video_path": "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4" if video else None,
    }
    (root / "meta").mkdir(parents=True)
    (root / "meta/info.json").write_text(json.dumps(info))
    write_lines(root / "meta/tasks.jsonl", [{"task_index": i, "task": task} for i, task in enumerate(TASKS)])
    rows = [{"episode_index": e, "tasks": [TASKS[e % 2]], "length": n} for e, n in enumerate(LENGTHS)]
    write_lines(root / "meta/episodes.jsonl", rows)
    table = pq.read_table(source / "data/chunk-000/file-000.parquet")
    if lists:
        for key in ("observation.state", "action"):
            column = pa.array(table[key].to_pylist(), pa.list_(pa.float32()))
            table = table.set_column(table.column_names.index(key), key, column)
    start = 0
    for episode, length in enumerate(LENGTHS):
        path = root / info["data_path"].format(episode_chunk=episode // chunk, episode_index=episode)
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table.slice(start, length), path)
        start += length
        if video:
            target = root / info["video_path"].format(
                episode_chunk=episode // chunk, episode_index=episode, video_key=CAMERA
            )
            target.parent.mkdir(parents=True, exist_ok=True)
            encode(target, moving_square(length, episode), steady(length, FPS), FPS, crf="5")
    if version == "v2.0":
        stats = json.loads((source / "meta/stats.json").read_text())
        kept = ("min", "max", "mean", "std")
        stats = {key: {name: numbers[name] for name in kept} for key, numbers in stats.items()}
        (root / "meta/stats.json").write_text(json.dumps(stats))
    else:
        write_lines(root / "meta/episodes_stats.jsonl", [episode_statistics(e, n) for e, n in enumerate(LENGTHS)])


def episode_statistics(episode: int, length: int) -> dict[str, Any]:
    frames = episode_frames(episode, length)
    numbers = {key: describe(frames[key]) for key in ("observation.state", "action")}
    kept = ("min", "max", "mean", "std", "count")
    stats = {key: {name: described[name].tolist() for name in kept} for key, described in numbers.items()}
    return {"episode_index": episode, "stats": stats}


Make = Callable[..., tuple[Path, Path]]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def build(dtype: str = "image", version: str = "v2.1", **settings: Any) -> tuple[Path, Path]:
        record_v3(tmp_path / "v3", dtype)
        make_v2(tmp_path / "v3", tmp_path / "v2", version, **settings)
        return tmp_path / "v3", tmp_path / "v2"

    return build


@pytest.mark.parametrize("lists", [True, False])
@pytest.mark.parametrize("version", ["v2.1", "v2.0"])
def test_the_same_samples_as_in_v3(make: Make, version: str, lists: bool) -> None:
    new, old = (LeRobotDataset(root, chunk_size=4) for root in make("image", version, lists=lists))
    assert (old.info.version, old.fps, old.num_episodes, old.tasks) == (version, FPS, 3, new.tasks)
    rows = list(range(sum(LENGTHS)))
    ours, theirs = old.batch(rows), new.batch(rows)
    assert list(ours) == list(theirs)
    for key, values in theirs.items():
        assert torch.equal(ours[key], values) if isinstance(values, torch.Tensor) else ours[key] == values, key
    part = LeRobotDataset(old.root, chunk_size=4, episodes=[2], preload=True)
    assert torch.equal(part.batch([3])[CAMERA], theirs[CAMERA][[18]])
    assert part.batch([0])["index"].tolist() == [15]


@pytest.mark.parametrize("preload", [False, True])
def test_videos_of_single_episodes(make: Make, preload: bool) -> None:
    _, root = make("video")
    files = [f"videos/chunk-00{e // 2}/{CAMERA}/episode_00000{e}.mp4" for e in range(3)]
    expected = np.concatenate([np.stack(list(decode(root / file).values())) for file in files])
    data = LeRobotDataset(root, preload=preload)
    order = np.random.default_rng(0).permutation(len(data)).tolist()
    np.testing.assert_array_equal(data.batch(order)[CAMERA], expected[order])
    (root / files[1]).unlink()
    with pytest.raises(DatasetFormatError, match=f"{files[1]} is missing; .* episode 1 of camera '{CAMERA}' is in it"):
        LeRobotDataset(root)
    assert len(LeRobotDataset(root, episodes=[0, 2], preload=preload)) == 10


def test_statistics_of_episodes_are_pooled(make: Make) -> None:
    new, old = make()
    data = LeRobotDataset(old, state_indices=[2, 0])
    stored = data.stored_statistics
    exact = describe(data.states.numpy())
    assert set(stored["observation.state"]) == {"min", "max", "mean", "std", "count"}
    for name in ("min", "max", "count"):
        np.testing.assert_array_equal(stored["observation.state"][name], exact[name])
    for name in ("mean", "std"):  # the spread between episodes counts: their means are 100 apart
        np.testing.assert_allclose(stored["observation.state"][name], exact[name], rtol=1e-9)
    assert stored["action"]["mean"].shape == (2,)
    np.testing.assert_allclose(LeRobotDataset(new).stored_statistics["action"]["q99"], describe(data.actions)["q99"])


@pytest.mark.parametrize("version", ["v2.1", "v2.0"])
def test_quantiles_are_computed_where_the_files_have_none(make: Make, version: str) -> None:
    _, root = make("image", version)
    data = LeRobotDataModule(str(root), batch_size=2, chunk_size=2, val_fraction=0.3)
    assert data.statistics_source == f"computed from 19 frames of ['{root}']"
    every = LeRobotDataset(root)
    np.testing.assert_array_equal(data.statistics["action"]["q01"], describe(every.actions.numpy())["q01"])
    assert next(iter(data.train_dataloader()))[CAMERA].shape == (2, 3, HEIGHT, WIDTH)
    stored = every.stored_statistics["observation.state"]
    assert ("count" in stored) == (version == "v2.1")
    np.testing.assert_allclose(stored["std"], describe(every.states.numpy())["std"], rtol=1e-9)


def test_a_folder_without_statistics(make: Make) -> None:
    _, root = make()
    (root / "meta/episodes_stats.jsonl").unlink()
    assert LeRobotDataset(root).stored_statistics == {}


def test_lines_out_of_order_and_empty_ones(make: Make) -> None:
    _, root = make()
    for name in ("episodes", "tasks"):
        lines = (root / f"meta/{name}.jsonl").read_text().splitlines()
        (root / f"meta/{name}.jsonl").write_text("\n".join(["", *lines[::-1], ""]))
    data = LeRobotDataset(root)
    assert data.tasks == list(TASKS)
    assert [data[i]["task"] for i in (0, 6, 15)] == [TASKS[0], TASKS[1], TASKS[0]]


def rewrite(name: str, text: str) -> Callable[[Path], None]:
    return lambda root: (root / "meta" / name).write_text(text)


def edit_info(**changes: Any) -> Callable[[Path], None]:
    def edit(root: Path) -> None:
        info = {**json.loads((root / "meta/info.json").read_text()), **changes}
        (root / "meta/info.json").write_text(json.dumps(info))

    return edit


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (rewrite("episodes.jsonl", "{"), "meta/episodes.jsonl: line 1 is no valid JSON"),
        (rewrite("episodes.jsonl", "[1]"), "episodes.jsonl: line 1 holds a list, expected an object"),
        (rewrite("episodes.jsonl", "\n"), "episodes.jsonl is empty"),
        (rewrite("episodes.jsonl", '{"length": 3}'), "episodes.jsonl: row 0 describes episode None"),
        (rewrite("episodes.jsonl", '{"episode_index": 0, "length": 0}'), "episode 0 has length 0"),
        (
            rewrite("episodes.jsonl", '{"episode_index": 0, "length": 6}'),
            "counts 3 episodes and 19 frames, meta/episodes.jsonl 1 and 6; the data set is incomplete",
        ),
        (lambda root: (root / "meta/episodes.jsonl").unlink(), "meta/episodes.jsonl is missing"),
        (
            rewrite("tasks.jsonl", '{"task_index": 0}'),
            "tasks.jsonl: line 1 needs a 'task_index' of its own and a 'task'",
        ),
        (rewrite("tasks.jsonl", '{"task_index": 1, "task": "x"}'), r"must count 0, 1, 2, ..., found \[1\]"),
        (
            lambda root: shutil.rmtree(root / "data/chunk-001"),
            "data/chunk-001/episode_000002.parquet is missing; meta/episodes says episode 2 is in it",
        ),
        (
            edit_info(data_path="data/{chunk_index}.parquet"),
            "data_path=.* is no pattern of episode_chunk and episode_in",
        ),
        (edit_info(chunks_size=0), "chunks_size=0 must be a positive integer"),
    ],
)
def test_refusals(make: Make, damage: Callable[[Path], None], message: str) -> None:
    _, root = make()
    damage(root)
    with pytest.raises(DatasetFormatError, match=message):
        LeRobotDataset(root)


def test_incomplete_statistics_of_an_episode(make: Make) -> None:
    _, root = make()
    rows = [episode_statistics(e, n) for e, n in enumerate(LENGTHS)]
    del rows[1]["stats"]["action"]["std"]
    write_lines(root / "meta/episodes_stats.jsonl", rows)
    with pytest.raises(DatasetFormatError, match=r"statistics of 'action' are incomplete .*statistics='computed'"):
        _ = LeRobotDataset(root).stored_statistics
