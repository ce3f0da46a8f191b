"""`soma demos`: from the command line to a data set that the reader accepts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from soma_lightning.cli.demos import build_parser, main
from soma_lightning.data.lerobot import LeRobotDataset
from soma_lightning.envs.recorder import Recorder


def arguments(out: Path, *more: str) -> list[str]:
    base = ["--env", "somatable", "--task", "reach_cube", "--task", "reach_green", "--episodes", "2"]
    return [*base, "--image_size", "32", "--workers", "1", "--out", str(out), *more]


def test_a_recording_reads_as_a_data_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "demos"
    assert main(arguments(out, "--seed", "5")) == 0
    printed = capsys.readouterr().out
    assert "reach_cube: 2/2 demonstrations of 2 attempts" in printed
    assert "reach_green: the expert solved 100% of 2 attempts" in printed
    assert f"written: {out}" in printed

    info = json.loads((out / "meta" / "info.json").read_text())
    assert (info["codebase_version"], info["fps"], info["robot_type"]) == ("v3.0", 20, "somatable")
    assert info["total_episodes"] == 4
    side = json.loads((out / "meta" / "soma_demos.json").read_text())
    assert (side["seed"], side["init_state_stream"], side["noise"]) == (5, 1_000_005, 0.25)
    assert [(task["task"], task["init_states"]) for task in side["tasks"]] == [
        ("reach_cube", [0, 1]),
        ("reach_green", [0, 1]),
    ]
    dataset = LeRobotDataset(out, chunk_size=4)
    assert len(dataset) == side["num_frames"]
    item = dataset[0]
    assert item["task"] == "reach the cube"
    assert item["observation.images.image"].shape == (3, 32, 32)
    assert item["observation.state"].shape == (8,)
    assert item["action"].shape == (4, 7)
    np.testing.assert_array_equal(np.asarray(item["action"])[:, 3:6], 0.0)


def test_videos_instead_of_images(tmp_path: Path) -> None:
    out = tmp_path / "demos"
    assert main(arguments(out, "--videos", "true")) == 0
    info = json.loads((out / "meta" / "info.json").read_text())
    cameras = ["observation.images.image", "observation.images.image2"]
    assert [info["features"][camera]["dtype"] for camera in cameras] == ["video", "video"]
    assert main(arguments(tmp_path / "images")) == 0
    videos, images = LeRobotDataset(out), LeRobotDataset(tmp_path / "images")
    assert len(videos) == len(images)
    for camera in cameras:
        difference = videos[7][camera].float() - images[7][camera].float()
        assert difference.abs().mean() < 4  # of 255: lossy, but the same picture


def test_an_existing_folder_is_only_replaced_when_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "demos"
    assert main(arguments(out)) == 0
    before = (out / "meta" / "soma_demos.json").read_text()
    capsys.readouterr()
    assert main(arguments(out, "--seed", "1")) == 2
    assert "is not empty" in capsys.readouterr().err
    assert (out / "meta" / "soma_demos.json").read_text() == before
    assert main(arguments(out, "--seed", "1", "--overwrite")) == 0
    assert (out / "meta" / "soma_demos.json").read_text() != before


def test_a_recording_that_was_stopped_goes_on_or_is_dropped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    original, numbers = Recorder.attempt, []

    def stops_once(self: Recorder, task: str, index: int) -> object:
        if len(numbers) == 3:
            numbers.append(-1)
            raise KeyboardInterrupt
        numbers.append(index)
        return original(self, task, index)

    monkeypatch.setattr(Recorder, "attempt", stops_once)
    with pytest.raises(KeyboardInterrupt):
        main(arguments(tmp_path / "demos"))
    assert [path.name for path in tmp_path.iterdir()] == [".demos.attempts"]
    assert main(arguments(tmp_path / "demos", "--seed", "1")) == 2
    assert "with seed=0 and not 1; repeat its settings to continue it, or pass --overwrite" in capsys.readouterr().err
    assert main(arguments(tmp_path / "demos")) == 0
    assert numbers == [0, 1, 0, -1, 1]
    assert [path.name for path in tmp_path.iterdir()] == ["demos"]
    assert main(arguments(tmp_path / "whole")) == 0
    for path in sorted((tmp_path / "whole" / "data").rglob("*.parquet")):
        assert path.read_bytes() == (tmp_path / "demos" / path.relative_to(tmp_path / "whole")).read_bytes()


def test_one_recording_at_a_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second one, of other settings too, is refused from the first moment on, and changes nothing."""
    original, others = Recorder.attempt, []

    def attempt(self: Recorder, task: str, index: int) -> object:
        if not others:
            others.append(0)
            others[0] = main(arguments(tmp_path / "demos", "--seed", "1", "--overwrite"))
        return original(self, task, index)

    monkeypatch.setattr(Recorder, "attempt", attempt)
    assert main(arguments(tmp_path / "demos")) == 0
    assert others == [2]
    assert f"another soma demos records into {tmp_path / 'demos'}; wait for it" in capsys.readouterr().err
    assert json.loads((tmp_path / "demos/meta/soma_demos.json").read_text())["seed"] == 0
    assert [path.name for path in tmp_path.iterdir()] == ["demos"]


def test_a_folder_that_cannot_be_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    assert main(arguments(tmp_path / "file" / "demos")) == 2
    assert f"the data set '{tmp_path / 'file' / 'demos'}' cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--env_options", '{"image_size": 64}'], "--env_options.image_size: both images have one size, --image_size"),
        (["--env_options", '{"stream": 1}'], "stream is set by the seed of the recording"),
        (["--task", "pich"], "unknown task with a scripted expert 'pich'"),
        (["--env", "somatabel"], "Did you mean 'somatable'"),
        (["--episodes", "0"], "episodes=0 must be at least 1"),
        (["--image_size", "4"], "image_size=4 is outside 16..1024"),
    ],
)
def test_mistakes_are_one_line_and_leave_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], message: str
) -> None:
    assert main(arguments(tmp_path / "demos", *more)) == 2
    error = capsys.readouterr().err
    assert error.startswith("soma demos: error: ")
    assert message in error
    assert list(tmp_path.iterdir()) == []


def test_overwrite_takes_a_flag_or_a_value() -> None:
    def overwrite(*more: str) -> bool:
        return bool(build_parser().parse_args(arguments(Path("out"), *more)).overwrite)

    assert [
        overwrite(),
        overwrite("--overwrite"),
        overwrite("--overwrite", "true"),
        overwrite("--overwrite=false"),
    ] == [
        False,
        True,
        True,
        False,
    ]


def test_unknown_options_and_missing_ones_end_with_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in (["--epsodes", "3"], ["--task", "push"]):
        with pytest.raises(SystemExit) as caught:
            main(wrong)
        assert caught.value.code == 2
    capsys.readouterr()
