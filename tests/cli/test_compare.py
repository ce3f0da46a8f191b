"""`soma compare` reads evaluations, draws them and checks a claim."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from soma_lightning.cli import compare
from soma_lightning.evaluation import wilson_interval


def write_evaluation(folder: Path, successes: int, episodes: int = 100, first: int = 0, **settings: object) -> Path:
    folder.mkdir()
    settings = {"env": "somatable", "env_options": {}, **settings}
    task = {
        "successes": successes,
        "episodes": episodes,
        "wilson95": list(wilson_interval(successes, episodes)),
        "init_states": list(range(first, first + episodes)),
    }
    content = {"tasks": {"pick": task}, "policy": {"backbone_hash": "0"}, "settings": settings}
    (folder / "results.json").write_text(json.dumps(content))
    return folder


def run(tmp_path: Path, entries: list[str], *more: str) -> int:
    return compare.main([*entries, "--out", str(tmp_path / "bars.png"), *more])


@pytest.mark.parametrize(("second", "status"), [(10, 0), (60, 1)])
def test_claim_decides_the_exit_status(tmp_path: Path, second: int, status: int):
    entries = [f"ours={write_evaluation(tmp_path / 'a', 70)}", f"blind={write_evaluation(tmp_path / 'b', second)}"]
    assert run(tmp_path, entries, "--claim_best", "ours") == status
    verdict = json.loads((tmp_path / "bars.json").read_text())["claim"]
    assert verdict["holds"] is (status == 0)
    assert (tmp_path / "bars.png").stat().st_size > 0


def test_errors_name_the_way_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    good = f"a={write_evaluation(tmp_path / 'a', 3)}"
    assert run(tmp_path, [good, "b"]) == 2
    assert "not LABEL=FOLDER" in capsys.readouterr().err
    assert run(tmp_path, [good, f"b={tmp_path / 'missing'}"]) == 2
    assert "run soma eval" in capsys.readouterr().err
    assert run(tmp_path, [good], "--claim_best", "c") == 2
    assert "none of the labels ['a']" in capsys.readouterr().err
    assert run(tmp_path, [good], "--task", "push") == 2
    assert "has no task 'push'" in capsys.readouterr().err
    other = f"b={write_evaluation(tmp_path / 'b', 3, first=50)}"
    assert run(tmp_path, [good, other]) == 2
    assert "different initial states" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"env": "libero"}, "a and b used different values of env ('somatable' and 'libero')"),
        ({"env_options": {"stream": 1000}}, "a and b used different values of stream (None and 1000)"),
        ({"env_options": {"image_size": 64}}, None),
    ],
)
def test_other_episodes_are_not_compared_but_other_images_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], settings: dict, message: str | None
):
    entries = [f"a={write_evaluation(tmp_path / 'a', 3)}", f"b={write_evaluation(tmp_path / 'b', 3, **settings)}"]
    assert run(tmp_path, entries) == (0 if message is None else 2)
    assert (message or "") in capsys.readouterr().err


def test_a_claim_needs_something_to_beat(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert run(tmp_path, [f"a={write_evaluation(tmp_path / 'a', 3)}"], "--claim_best", "a") == 2
    assert "claim_best='a' needs another evaluation" in capsys.readouterr().err


def test_files_that_cannot_be_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = write_evaluation(tmp_path / "a", 3)
    with pytest.raises(SystemExit) as stop:
        run(tmp_path, [])
    assert stop.value.code == 2
    assert "required: results" in capsys.readouterr().err
    assert run(tmp_path, [f"a={folder}", f"a={folder}"]) == 2
    assert "name one evaluation twice" in capsys.readouterr().err
    assert compare.main([f"a={folder}", "--out", str(tmp_path / "bars.json")]) == 2
    assert "must end in .png" in capsys.readouterr().err
    for content in ("{", "[]", "{}", '{"tasks": 3}', '{"tasks": {"pick": {}}, "policy": {}}'):
        (folder / "results.json").write_text(content)
        assert run(tmp_path, [f"a={folder}"]) == 2
        assert "results.json was not written whole" in capsys.readouterr().err
    assert not (tmp_path / "bars.png").exists()
