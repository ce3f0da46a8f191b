"""What an evaluation reports: the protocol, success at the end, videos, seeds, and which slot takes which episode."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from soma_lightning import plots
from soma_lightning.contract import TRAINING_FILE
from soma_lightning.envs.base import Episode, TaskSpec
from soma_lightning.envs.libero_suites import NUM_INIT_STATES
from soma_lightning.evaluation import EPISODES, LiberoProtocol, Rollout, evaluate, evaluate_seeds, summarize
from soma_lightning.evaluation.protocol import find_protocol
from soma_lightning.evaluation.results import table
from soma_lightning.evaluation.runner import EpisodeQueue
from soma_lightning.evaluation.videos import KeptVideos
from tests.evaluation.fakes import TASKS, CountingEnvs, NoisePolicy, settings


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pictures are not at stake here."""
    monkeypatch.setattr("soma_lightning.evaluation.run.draw", lambda out, results: None)
    monkeypatch.setattr(plots, "write_video", lambda frames, path, fps: path.write_bytes(bytes([len(frames)])))


def rollouts_of(out: Path) -> dict[tuple[str, int], Rollout]:
    lines = (out / EPISODES).read_text().splitlines()
    return {(one.task, one.init_state): one for one in (Rollout(**json.loads(line)) for line in lines)}


# -------------------------------------------------------------------- success


def test_success_at_the_end_is_measured_only_when_episodes_go_on(tmp_path: Path):
    """The fake leaves its goal again: an episode that reached it before its last chunk is no success at the end."""
    early = evaluate(NoisePolicy(), CountingEnvs(2), settings(), tmp_path / "early")
    late = evaluate(NoisePolicy(), CountingEnvs(2, to_the_limit=True), settings(until="limit"), tmp_path / "late")
    stopped, gone_on = rollouts_of(tmp_path / "early"), rollouts_of(tmp_path / "late")
    for key, one in gone_on.items():
        assert one.success_once == stopped[key].success_once
        assert one.success_at_end == (one.success_once and key[1] % 3 == 2)
        assert stopped[key].success_at_end is None
        assert one.steps == (2 * (key[1] % 3) + 1 if one.success_once else 6)
    at_end = sum(bool(one.success_at_end) for one in gone_on.values())
    assert 0 < at_end < late["overall"]["successes"]
    assert late["overall"]["success_at_end"] == at_end
    assert "success_at_end_note" not in late["overall"]
    assert early["overall"]["success_at_end"] is None
    assert "equal by construction" in early["overall"]["success_at_end_note"]
    assert {task["success_at_end"] for task in early["tasks"].values()} == {None}


def test_an_environment_that_does_not_tell_is_said_so():
    used = settings(tasks=("pick",), episodes=2, until="limit")
    summary = summarize(used, [Rollout("pick", 0, True, None, 4, 1.0), Rollout("pick", 1, False, False, 9, 0.0)])
    assert summary["overall"]["success_at_end"] is None
    assert "does not tell" in summary["overall"]["success_at_end_note"]


def test_the_table_has_a_row_a_task_and_the_average_over_tasks():
    used = settings(episodes=4)
    won = [Rollout("pick", k, k < 3, None, 10 + k, 1.0) for k in range(4)]
    won += [Rollout("push", k, k < 1, None, 20, 1.0) for k in range(4)]
    summary = summarize(used, won)
    assert summary["overall"]["mean_of_tasks"] == 0.5
    head, pick, push, total, average = table(summary).splitlines()
    assert head.split() == ["task", "success", "rate", "95", "%", "interval", "steps"]
    assert pick.split() == ["pick", "3/4", "0.750", "0.301", "to", "0.954", "11.0"]
    assert push.split()[:3] == ["push", "1/4", "0.250"]
    assert total.split()[:5] == ["all", "2", "tasks", "4/8", "0.500"]
    assert average == "average over tasks: 0.500"
    measured = [Rollout(one.task, one.init_state, one.success_once, False, 5, 0.0) for one in won]
    assert table(summarize(settings(episodes=4, until="limit"), measured)).splitlines()[1].split()[-1] == "0"


# -------------------------------------------------------------------- which slot takes which episode


@pytest.mark.parametrize(("slots", "most"), [(1, 10), (4, 13), (8, 19), (16, 30), (40, 60)])
def test_every_episode_once_and_few_changes_of_task(slots: int, most: int):
    """Task by task for all slots would build 10 simulators in each of them."""
    tasks = [f"task_{k}" for k in range(10)]
    queue = EpisodeQueue(Episode(task, state) for task in tasks for state in range(50))
    generator, taken, built, last = np.random.default_rng(0), Counter(), 0, {}
    ends = [(0.0, slot) for slot in range(slots)]
    while ends:
        now, slot = ends.pop(ends.index(min(ends)))
        episode = queue.next(slot)
        if episode is None:
            continue
        taken[episode] += 1
        built += last.get(slot) != episode.task
        last[slot] = episode.task
        ends.append((now + generator.uniform(1.0, 2.0), slot))
    assert len(taken) == 500
    assert set(taken.values()) == {1}
    assert built <= most, f"{built} simulators"


def test_slots_are_spread_over_the_tasks_from_the_start(tmp_path: Path):
    envs = CountingEnvs(2)
    evaluate(NoisePolicy(), envs, settings(), tmp_path)
    tasks = {slot: [episode.task for where, episode in envs.started if where == slot] for slot in range(2)}
    assert {names[0] for names in tasks.values()} == {"pick", "push"}
    assert all(sum(a != b for a, b in zip(names, names[1:], strict=False)) <= 1 for names in tasks.values())


# -------------------------------------------------------------------- videos


@pytest.mark.parametrize("slots", [1, 5])
def test_the_first_success_and_the_first_failure_of_each_task_are_kept(tmp_path: Path, slots: int):
    results = evaluate(NoisePolicy(), CountingEnvs(slots), settings(recorded=1), tmp_path)
    rollouts = rollouts_of(tmp_path)
    for task in TASKS:
        for outcome, success in (("success", True), ("failure", False)):
            first = min(k for (name, k), one in rollouts.items() if name == task and one.success_once is success)
            assert results["videos"][task][outcome] == [f"videos/{task}_{first:04d}_{outcome}.mp4"]
            with np.load(tmp_path / "videos" / f"{task}_{first:04d}_{outcome}.npz") as kept:
                looks = first % 3 + 1
                assert kept["frames"][:, 0, 0, 0].tolist() == [40 * (k + 1) for k in range(looks + 1)]
            video = tmp_path / "videos" / f"{task}_{first:04d}_{outcome}.mp4"
            assert video.read_bytes() == bytes([2 * looks + 20]), "real time, and the end for a second"
    assert len(list((tmp_path / "videos").iterdir())) == 8


def test_a_lower_state_takes_the_place_of_a_higher_one(tmp_path: Path):
    def keep(videos: KeptVideos, state: int) -> None:
        rollout = Rollout("pick", state, True, None, 4, 1.0)
        assert videos.wants(rollout)
        videos.keep(rollout, [np.zeros((8, 8, 3), np.uint8)] * 2)

    first = KeptVideos(tmp_path / "videos", 2, 5)
    for state in (7, 3, 5):
        keep(first, state)
    assert not first.wants(Rollout("pick", 9, True, None, 4, 1.0))
    assert first.wants(Rollout("pick", 9, False, None, 4, 1.0))
    resumed = KeptVideos(tmp_path / "videos", 2, 5, [Rollout("pick", k, True, None, 4, 1.0) for k in (7, 3, 5)])
    keep(resumed, 0)
    assert sorted(path.name for path in (tmp_path / "videos").glob("*.mp4")) == [
        "pick_0000_success.mp4",
        "pick_0003_success.mp4",
    ]
    assert resumed.listing(["pick"])["pick"]["success"][0] == "videos/pick_0000_success.mp4"
    assert not KeptVideos(tmp_path / "none", 0, 5).wants(Rollout("pick", 0, True, None, 4, 1.0))


# -------------------------------------------------------------------- control and seeds


def test_a_blind_policy_sees_black_and_its_video_does_not(tmp_path: Path):
    class Watching(NoisePolicy):
        seen: list[int] = []

        def predict_action_batch(self, observation, **options):
            self.seen.append(int(observation["main_images"].max()))
            assert observation["main_images"].shape[1:] == (8, 8, 3)
            return super().predict_action_batch(observation, **options)

    results = evaluate(Watching(), CountingEnvs(2), settings(blind=True, recorded=1), tmp_path)
    assert set(Watching.seen) == {0}
    assert results["settings"]["blind"] is True
    with np.load(next((tmp_path / "videos").glob("*.npz"))) as kept:
        assert kept["frames"].min() == 40


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"blind": True}, "blind=True takes the images away"),
        ({"recorded": 1}, "recorded=1 keeps what the policy sees"),
    ],
)
def test_an_environment_without_images(tmp_path: Path, change: dict, message: str):
    class Unseen(CountingEnvs):
        def observe(self, slots):
            return {**super().observe(slots), "main_images": None}

    with pytest.raises(ValueError, match=message):
        evaluate(NoisePolicy(), Unseen(2), settings(**change), tmp_path)


def test_seeds_give_a_mean_and_a_deviation(tmp_path: Path):
    summary = evaluate_seeds(NoisePolicy(), CountingEnvs(3), settings(), [0, 1, 2], tmp_path)
    alone = [evaluate(NoisePolicy(), CountingEnvs(3), settings(seed=k), tmp_path / f"{k}") for k in range(3)]
    rates = [one["tasks"]["pick"]["rate"] for one in alone]
    assert len(set(rates)) > 1
    assert summary["tasks"]["pick"]["rates"] == rates
    assert summary["tasks"]["pick"]["mean"] == pytest.approx(np.mean(rates))
    assert summary["tasks"]["pick"]["std"] == pytest.approx(np.std(rates, ddof=1))
    assert json.loads((tmp_path / "seeds.json").read_text()) == summary
    assert json.loads((tmp_path / "seed_2" / "results.json").read_text())["settings"]["seed"] == 2
    again = CountingEnvs(3)
    assert evaluate_seeds(NoisePolicy(), again, settings(), [0, 1, 2], tmp_path) == summary
    assert again.started == []
    with pytest.raises(ValueError, match=r"seeds=\[3\] must be two or more different ones"):
        evaluate_seeds(NoisePolicy(), again, settings(), [3], tmp_path)


# -------------------------------------------------------------------- what results.json says


def test_results_say_with_what_they_were_made(tmp_path: Path):
    checkpoint = tmp_path / "policy"
    checkpoint.mkdir()
    (checkpoint / TRAINING_FILE).write_text('{"step": 1200, "epoch": 3}')
    results = evaluate(NoisePolicy(), CountingEnvs(2), settings(policy=str(checkpoint)), tmp_path / "out")
    stored = json.loads((tmp_path / "out" / "results.json").read_text())
    assert stored == json.loads(json.dumps(results))
    assert results["policy"]["training"] == {"step": 1200, "epoch": 3}
    for damaged in ("{", "[]"):
        (checkpoint / TRAINING_FILE).write_text(damaged)
        with pytest.raises(ValueError, match=rf"{TRAINING_FILE} is no JSON object .*; restore it, or remove it"):
            evaluate(NoisePolicy(), CountingEnvs(2), settings(policy=str(checkpoint)), tmp_path / "more")
    assert len(results["policy"]["digest"]) == 64
    assert results["step_limits"] == {"pick": 12, "push": 12}
    assert results["simulator"] == {"counter": "1.0"}
    assert results["versions"]["torch"] == torch.__version__
    assert results["machine"]["device"] == "cpu"
    assert results["machine"]["slots"] == 2
    assert results["settings"]["executed_steps"] == 2
    assert results["settings"]["denoising_steps"] == 3
    assert results["protocol"] is None


def test_another_simulator_does_not_continue_an_evaluation(tmp_path: Path):
    class Newer(CountingEnvs):
        def facts(self) -> dict[str, str]:
            return {"counter": "1.1"}

    evaluate(NoisePolicy(), CountingEnvs(2), settings(), tmp_path)
    with pytest.raises(ValueError, match=r"other settings \(the simulator's versions or driver\)"):
        evaluate(NoisePolicy(), Newer(2), settings(), tmp_path)


# -------------------------------------------------------------------- LIBERO's protocol


def complete(**changes):
    tasks = tuple(f"task_{k}" for k in range(10))
    options = {"suite": "libero_goal", "max_steps": None, "settle_steps": 10, "hard_reset": True, "image_size": 224}
    return settings(**{"tasks": tasks, "episodes": 50, "protocol": "libero_goal", "env_options": options, **changes})


def test_a_complete_evaluation_may_be_claimed():
    statement = LiberoProtocol("libero_goal").statement(complete())
    assert statement["complete"] is True
    assert statement["statement"] == "libero_goal, 10 x 50: complete"


@pytest.mark.parametrize(
    ("change", "deviation"),
    [
        ({"episodes": 5}, "initial states 0..4 of 0..49"),
        ({"episodes": 20, "first_init_state": 30}, "initial states 30..49 of 0..49"),
        ({"tasks": ("task_3",)}, "1 of 10 tasks"),
        ({"blind": True}, "blind"),
        ({"env_options": {"max_steps": 100}}, "max_steps=100"),
        ({"env_options": {"hard_reset": False}}, "hard_reset=False"),
        ({"env_options": {"settle_steps": 50}}, "settle_steps=50"),
    ],
)
def test_less_is_called_less(change: dict, deviation: str):
    used = complete(**change)
    statement = LiberoProtocol("libero_goal").statement(used)
    assert statement["deviations"] == [deviation]
    assert statement["complete"] is False
    assert statement["statement"] == f"libero_goal, {len(used.tasks)} x {used.episodes}: no claims ({deviation})"


def test_impossible_protocols():
    with pytest.raises(ValueError, match="unknown protocol 'libero_gaol'.*Did you mean 'libero_goal'"):
        find_protocol("libero", "libero_gaol")
    with pytest.raises(
        ValueError, match="protocol=libero_goal is one of environment 'libero'; leave out env=somatable"
    ):
        find_protocol("somatable", "libero_goal")
    with pytest.raises(ValueError, match="env_options name the suite 'libero_10'"):
        LiberoProtocol("libero_goal").env_options({"suite": "libero_10"})
    assert LiberoProtocol("libero_goal").env_options({"image_size": 64}) == {"image_size": 64, "suite": "libero_goal"}


def test_initial_states_that_are_not_there_are_refused_before_anything_runs(tmp_path: Path):
    class Fixed(CountingEnvs):
        tasks = {name: TaskSpec(name, name, 12, num_init_states=NUM_INIT_STATES) for name in TASKS}

    envs = Fixed(2)
    with pytest.raises(
        ValueError, match=r"'pick' has the initial states 0\.\.49; episodes=21 from first_init_state=30"
    ):
        evaluate(NoisePolicy(), envs, settings(episodes=21, first_init_state=30), tmp_path)
    assert envs.started == []
