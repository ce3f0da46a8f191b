"""Evaluation: seeded noise, slots that refill, resuming, intervals, files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from soma_lightning import plots
from soma_lightning.envs.base import ChunkOutcome, Episode
from soma_lightning.evaluation import EPISODES, Rollout, draw_noise, evaluate, summarize, wilson_interval
from tests.evaluation.fakes import CountingEnvs, NoisePolicy, settings


def outcome_of(results: dict) -> dict:
    return {name: (task["successful_init_states"], task["episodes"]) for name, task in results["tasks"].items()}


def test_outcome_does_not_depend_on_the_number_of_slots(tmp_path: Path):
    one = evaluate(NoisePolicy(), CountingEnvs(1), settings(), tmp_path / "one")
    five = evaluate(NoisePolicy(), CountingEnvs(5), settings(), tmp_path / "five")
    assert outcome_of(one) == outcome_of(five)
    assert one["overall"]["episodes"] == 14
    assert 0 < one["overall"]["successes"] < 14


class SlowStarts(CountingEnvs):
    """An episode runs from the third call of `ready` on, or when no other slot runs."""

    def __init__(self, num_slots: int) -> None:
        super().__init__(num_slots)
        self.calls_left: dict[int, int] = {}

    def start(self, slots: Sequence[int], episodes: Sequence[Episode]) -> None:
        super().start(slots, episodes)
        self.calls_left.update(dict.fromkeys(slots, 2))

    def ready(self, slots: Sequence[int]) -> list[int]:
        running = [slot for slot in slots if not self.calls_left[slot]]
        self.calls_left = {slot: max(0, left - 1) for slot, left in self.calls_left.items()}
        return running or self.ready(slots)

    def execute(self, slots, actions, record=None) -> list[ChunkOutcome]:
        assert not any(self.calls_left[slot] == 2 for slot in slots)
        return super().execute(slots, actions, record)


def test_slots_that_start_are_waited_for_by_none(tmp_path: Path):
    slow = SlowStarts(3)
    found = evaluate(NoisePolicy(), slow, settings(), tmp_path / "slow")
    assert outcome_of(found) == outcome_of(evaluate(NoisePolicy(), CountingEnvs(3), settings(), tmp_path / "fast"))
    assert {shape[0] for shape in slow.executed} == {1, 2, 3}


def test_a_task_does_as_well_alone_as_among_others(tmp_path: Path):
    together = evaluate(NoisePolicy(), CountingEnvs(3), settings(), tmp_path / "together")
    alone = evaluate(NoisePolicy(), CountingEnvs(3), settings(tasks=("push",)), tmp_path / "alone")
    assert outcome_of(alone)["push"] == outcome_of(together)["push"]


def test_outcome_is_what_the_noise_says(tmp_path: Path):
    used = settings(tasks=("push",), episodes=3)
    results = evaluate(NoisePolicy(), CountingEnvs(2), used, tmp_path)
    expected = []
    for k in range(3):
        noise = [draw_noise(used, Episode("push", k), look, (4, 7))[:2] for look in range(k % 3 + 1)]
        if torch.stack(noise).mean(dim=(1, 2)).sum() > 0:
            expected.append(k)
    assert results["tasks"]["push"]["successful_init_states"] == expected


def test_only_the_executed_steps_reach_the_environment(tmp_path: Path):
    envs = CountingEnvs(3)
    evaluate(NoisePolicy(), envs, settings(executed_steps=3), tmp_path)
    assert {shape[1:] for shape in envs.executed} == {(3, 7)}


def test_interrupted_evaluation_goes_on(tmp_path: Path):
    whole = evaluate(NoisePolicy(), CountingEnvs(2), settings(), tmp_path / "whole")
    with pytest.raises(RuntimeError, match="simulator died"):
        evaluate(NoisePolicy(), CountingEnvs(2, fail_after=5), settings(), tmp_path / "parts")
    log = tmp_path / "parts" / EPISODES
    kept = log.read_text()
    assert 0 < kept.count("\n") < 14
    log.write_text(kept + '{"task": "pick", "init_')  # killed while writing
    resumed = evaluate(NoisePolicy(), CountingEnvs(2), settings(), tmp_path / "parts")
    assert outcome_of(resumed) == outcome_of(whole)
    assert resumed["seconds"]["episodes_run"] == 14 - kept.count("\n")


def test_other_settings_are_refused_until_overwritten(tmp_path: Path):
    evaluate(NoisePolicy(), CountingEnvs(2), settings(), tmp_path)
    with pytest.raises(ValueError, match=r"other settings \(seed\).*--overwrite"):
        evaluate(NoisePolicy(), CountingEnvs(2), settings(seed=1), tmp_path)
    evaluate(NoisePolicy(), CountingEnvs(2), settings(seed=1), tmp_path, overwrite=True)
    assert json.loads((tmp_path / "results.json").read_text())["settings"]["seed"] == 1


def test_files(tmp_path: Path):
    evaluate(NoisePolicy(), CountingEnvs(2), settings(recorded=1), tmp_path)
    for name in ("run_report.json", "results.json", "success.png", "contact_sheet.png"):
        assert (tmp_path / name).stat().st_size > 0
    assert len(list((tmp_path / "videos").glob("*.mp4"))) == 4  # a success and a failure of each task
    assert json.loads((tmp_path / "results.json").read_text())["policy"]["kind"] == "noise"


def test_more_executed_steps_than_the_chunk(tmp_path: Path):
    with pytest.raises(ValueError, match="executed_steps=5 is more than the 4 actions"):
        evaluate(NoisePolicy(), CountingEnvs(1), settings(executed_steps=5), tmp_path)


def test_unknown_task(tmp_path: Path):
    with pytest.raises(ValueError, match=r"unknown task 'sweep'; known: push, pick"):
        evaluate(NoisePolicy(), CountingEnvs(1), settings(tasks=("sweep",)), tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"episodes": 0}, "episodes=0 must be at least 1"),
        ({"executed_steps": 0}, "executed_steps=0 must be at least 1"),
        ({"denoising_steps": 0}, "denoising_steps=0 must be at least 1"),
        ({"first_init_state": -1}, "first_init_state=-1 must not be negative"),
        ({"seed": -1}, "seed=-1 must not be negative"),
        ({"recorded": -1}, "recorded=-1 must not be negative"),
        ({"tasks": ()}, "no task given"),
        ({"tasks": ("push", "push")}, "name one task twice"),
    ],
)
def test_impossible_settings(change: dict, message: str):
    with pytest.raises(ValueError, match=message):
        settings(**change)


def test_other_weights_under_the_same_path_are_refused(tmp_path: Path):
    first = evaluate(NoisePolicy(), CountingEnvs(2), settings(), tmp_path)
    with pytest.raises(ValueError, match=r"other settings \(the policy's weights or statistics\)"):
        evaluate(NoisePolicy(weight=1.0), CountingEnvs(2), settings(), tmp_path)
    moved = evaluate(NoisePolicy(), CountingEnvs(2), settings(policy="elsewhere/p"), tmp_path)
    assert moved["seconds"] == first["seconds"], "nothing was run again, so the times are those of the run"
    assert outcome_of(moved) == outcome_of(first)


def files_of(out: Path) -> dict[str, bytes]:
    return {str(p.relative_to(out)): p.read_bytes() for p in out.rglob("*") if p.is_file()}


def test_overwrite_loses_nothing_before_there_is_something_new(tmp_path: Path):
    evaluate(NoisePolicy(), CountingEnvs(2), settings(), tmp_path)
    before = files_of(tmp_path)
    with pytest.raises(RuntimeError, match="simulator died"):
        evaluate(NoisePolicy(), CountingEnvs(2, fail_after=0), settings(seed=1), tmp_path, overwrite=True)
    assert files_of(tmp_path) == before


def test_overwrite_leaves_no_file_of_the_earlier_evaluation(tmp_path: Path):
    evaluate(NoisePolicy(), CountingEnvs(2), settings(recorded=2), tmp_path)
    (tmp_path / "videos" / "notes.txt").write_text("mine")
    evaluate(NoisePolicy(), CountingEnvs(2), settings(seed=1, recorded=1, tasks=("pick",)), tmp_path, overwrite=True)
    videos = sorted(path.name for path in (tmp_path / "videos").iterdir())
    assert len(videos) == 5
    assert {name.split("_")[0] for name in videos[1:]} == {"pick"}
    assert videos[0] == "notes.txt"


def test_recorded_frames_of_an_episode_that_was_not_finished_are_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    whole = evaluate(NoisePolicy(), CountingEnvs(1), settings(recorded=1, tasks=("pick",)), tmp_path / "whole")

    def killed(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(plots, "write_video", killed)
        with pytest.raises(KeyboardInterrupt):
            evaluate(NoisePolicy(), CountingEnvs(1), settings(recorded=1, tasks=("pick",)), tmp_path / "parts")
    resumed = evaluate(NoisePolicy(), CountingEnvs(1), settings(recorded=1, tasks=("pick",)), tmp_path / "parts")
    assert outcome_of(resumed) == outcome_of(whole)
    names = [sorted(path.name for path in (tmp_path / run / "videos").iterdir()) for run in ("whole", "parts")]
    assert names[0] == names[1]
    assert len(names[0]) == 4


def test_one_process_at_a_time(tmp_path: Path):
    class Nested(CountingEnvs):
        def reset(self, slots: Sequence[int], episodes: Sequence[Episode]) -> None:
            with pytest.raises(ValueError, match=r"another evaluation is writing into .*; wait for it"):
                evaluate(NoisePolicy(), CountingEnvs(2), settings(), tmp_path)
            super().reset(slots, episodes)

    evaluate(NoisePolicy(), Nested(2), settings(), tmp_path)
    assert len((tmp_path / EPISODES).read_text().splitlines()) == 14


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("settings.json", "{", r"settings.json is no valid JSON .*--overwrite"),
        ("settings.json", "[]", "settings.json holds no JSON object"),
        ("settings.json", None, r"episodes.jsonl lies there without settings.json"),
        (EPISODES, "{}\n", "episodes.jsonl, line 1 is no finished episode"),
        (EPISODES, '{"task": 1}{\n', "episodes.jsonl, line 1 is no finished episode"),
        (EPISODES, "twice", "episodes.jsonl holds an episode twice"),
    ],
)
def test_damaged_files_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, content: str | None, message: str
):
    monkeypatch.setattr(
        "soma_lightning.evaluation.run.draw", lambda out, results: None
    )  # pictures are not at stake here
    small = settings()
    evaluate(NoisePolicy(), CountingEnvs(2), small, tmp_path)
    path = tmp_path / file
    if content is None:
        path.unlink()
    else:
        path.write_text(2 * path.read_text() if content == "twice" else content)
    with pytest.raises(ValueError, match=message):
        evaluate(NoisePolicy(), CountingEnvs(2), small, tmp_path)
    assert evaluate(NoisePolicy(), CountingEnvs(2), small, tmp_path, overwrite=True)["seconds"]["episodes_run"] == 14


def test_a_folder_that_is_a_file(tmp_path: Path):
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "sub"):
        with pytest.raises(NotADirectoryError, match="the results cannot go into .*file"):
            evaluate(NoisePolicy(), CountingEnvs(2), settings(), out)


def test_a_policy_that_cannot_be_evaluated(tmp_path: Path):
    with pytest.raises(ValueError, match="SimpleNamespace cannot be evaluated: it has no predict_action_batch"):
        evaluate(SimpleNamespace(noise_shape=(4, 7)), CountingEnvs(2), settings(), tmp_path)


def test_the_chart_is_titled_by_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    titles = []
    monkeypatch.setattr(plots, "success_bars", lambda rows, path, title: titles.append(title))
    evaluate(NoisePolicy(), CountingEnvs(2), settings(policy="/runs/blind/policy"), tmp_path)
    assert titles == ["blind/policy"]


def test_ends_of_the_interval_are_exact(tmp_path: Path):
    for episodes in (1, 2, 3, 5, 7, 10, 33, 100):
        low, high = wilson_interval(0, episodes), wilson_interval(episodes, episodes)
        assert (low[0], high[1]) == (0.0, 1.0)
    rows = [("none", 0, 3, wilson_interval(0, 3)), ("all", 3, 3, wilson_interval(3, 3))]
    assert plots.success_bars(rows, tmp_path / "bars.png", "ends").stat().st_size > 0


def test_a_contact_sheet_labels_each_row_and_repeats_no_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    drawn: list[Any] = []
    monkeypatch.setattr(plots, "_save", lambda figure, path: drawn.append(figure))
    image = np.zeros((4, 4, 3), np.uint8)
    plots.contact_sheet(
        [("pick 0003 failure", [image] * 2), ("pick 0007 success", [image] * 30)], tmp_path / "sheet.png"
    )
    rows = drawn[0].subfigs
    assert [row.get_suptitle() for row in rows] == ["pick 0003 failure", "pick 0007 success"]
    titles = [[axes.get_title(loc="left") for axes in row.axes] for row in rows]
    assert titles[0] == ["image 1 of 2", "image 2 of 2", "", "", "", "", "", ""]
    assert (titles[1][0], titles[1][-1], len(set(titles[1]))) == ("image 1 of 30", "image 30 of 30", 8)


@pytest.mark.parametrize(
    ("successes", "episodes", "expected"),
    [(70, 100, (0.604, 0.781)), (0, 100, (0.0, 0.037)), (10, 100, (0.055, 0.174)), (50, 50, (0.929, 1.0))],
)
def test_wilson_interval(successes: int, episodes: int, expected: tuple[float, float]):
    assert wilson_interval(successes, episodes) == pytest.approx(expected, abs=5e-4)


def test_wilson_interval_refuses_impossible_counts():
    with pytest.raises(ValueError, match="no success count"):
        wilson_interval(3, 2)


def test_summary_keeps_the_state_ids():
    used = settings(tasks=("pick",), episodes=2, first_init_state=5)
    summary = summarize(used, [Rollout("pick", 6, True, None, 9, 1.0), Rollout("pick", 5, False, None, 20, 0.0)])
    assert summary["tasks"]["pick"]["init_states"] == [5, 6]
    assert summary["tasks"]["pick"]["mean_steps_of_successes"] == 9
