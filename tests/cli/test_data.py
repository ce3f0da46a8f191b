"""`soma data`: what it prints, writes and returns."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from soma_lightning.cli.data import main
from soma_lightning.data import LeRobotWriter

CAMERA = "observation.images.image"
DATA_FILE = "data/chunk-000/file-000.parquet"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    draw = np.random.default_rng(0)
    features = {
        CAMERA: {"dtype": "image", "shape": [16, 16, 3]},
        "observation.state": {"dtype": "float32", "shape": [2], "names": ["x", "<y>"]},
        "action": {"dtype": "float32", "shape": [2]},
    }
    with LeRobotWriter(tmp_path / "pick", fps=10, features=features, robot_type="arm") as writer:
        for _ in range(3):
            frames = {
                CAMERA: draw.integers(0, 256, (20, 16, 16, 3), dtype=np.uint8),
                "observation.state": draw.normal(size=(20, 2)).astype(np.float32),
                "action": draw.uniform(-1, 1, (20, 2)).astype(np.float32),
            }
            writer.add_episode(frames, "pick up the cube")
    return tmp_path / "pick"


def spoil(root: Path) -> None:
    table = pq.read_table(root / DATA_FILE)
    times = table["timestamp"].to_numpy().copy()
    times[[3, 50]] += 1
    place = table.column_names.index("timestamp")
    pq.write_table(table.set_column(place, "timestamp", pa.array(times)), root / DATA_FILE)


def test_a_sound_data_set(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(root)]) == 0
    printed = capsys.readouterr().out
    for line in (
        "robot:      arm, 10 frames per second",
        "size:       3 episodes, 60 frames, 6.0 seconds",
        "task:       pick up the cube (3 episodes, 60 frames)",
        f"camera:     {CAMERA}, 16x16 image, png; decoded 60 of 60 frames, 0 broken",
        "column:     observation.state, float32 [2]: x, <y>",
        "problems:   none",
        "warnings:   none",
    ):
        assert line in printed.splitlines()
    assert {path.name for path in root.parent.iterdir()} == {"pick"}, "nothing is written without --out"


def test_problems_end_with_status_1_and_the_page_holds_everything(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(root)
    out = root.parent / "deep" / "report"
    assert main([str(root), "--out", str(out), "--images", "5"]) == 1
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    expected = [
        f"{DATA_FILE}: episode 0, column 'timestamp': frame 3: 1.3 s, must be frame_index / fps = 0.3 s",
        f"{DATA_FILE}: episode 2, column 'timestamp': frame 10: 2 s, must be frame_index / fps = 1 s",
    ]
    assert [line for line in lines if line.startswith(DATA_FILE)] == expected
    found = json.loads((out / "report.json").read_text())["problems"]
    assert [(p["file"], p["episode"], p["column"]) for p in found[:2]] == [
        (DATA_FILE, 0, "timestamp"),
        (DATA_FILE, 2, "timestamp"),
    ]
    page = (out / "index.html").read_text()
    assert "episode 2, column &#x27;timestamp&#x27;: frame 10: 2 s" in page
    assert "x, &lt;y&gt;" in page
    assert not re.search(r'(src|href)="(?!data:)', page), "the page needs nothing beside it"
    pictures = {
        "episode_lengths.png",
        "histogram_observation_state.png",
        "histogram_action.png",
        "camera_observation_images_image.png",
    }
    assert {path.name for path in out.iterdir()} == pictures | {"index.html", "report.json"}
    embedded = re.findall(r'src="data:image/png;base64,([^"]+)"', page)
    assert {base64.b64decode(data) for data in embedded} == {(out / name).read_bytes() for name in pictures}
    for name in pictures:
        with Image.open(out / name) as image:
            assert np.asarray(image.convert("L")).std() > 5, f"{name} is empty"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--images", "some"], "--images='some' must be 'all' or a number of frames"),
        (["--images", "-3"], "--images='-3' must be"),
        (["--action_key", "act"], "action_key='act' is no vector of numbers"),
        (["--out", "{root}/report"], "lies in the data set; choose a folder outside of it"),
    ],
)
def test_mistakes_are_one_line(root: Path, capsys: pytest.CaptureFixture[str], more: list[str], message: str) -> None:
    assert main([str(root), *(word.format(root=root) for word in more)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert message in error
    assert not (root / "report").exists()


def test_no_data_set_at_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path / "nothing")]) == 2
    assert "the folder does not exist" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        main([])
    assert stop.value.code == 2
