"""Recording demonstrations: labels, disturbances, and the same result whatever the number of workers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from soma_lightning.envs import demos
from soma_lightning.envs.attempts import AttemptStore
from soma_lightning.envs.base import DisturbanceModel
from soma_lightning.envs.demos import demonstration_features, record_demonstrations, recording_identity
from soma_lightning.envs.recorder import Disturbance, Recorder
from soma_lightning.envs.registry import EnvSpec, expert_class
from soma_lightning.envs.worker import WorkerError

SPEC = EnvSpec("somatable", {"image_size": 32})


class ListWriter:
    def __init__(self) -> None:
        self.episodes: list[tuple[dict[str, np.ndarray], str]] = []

    def add_episode(self, frames: Mapping[str, np.ndarray], task: str) -> None:
        self.episodes.append((dict(frames), task))


def record(workers: int, seed: int = 0, noise: float = 0.25) -> tuple[ListWriter, dict[str, object], list[str]]:
    writer, lines = ListWriter(), []
    summary = record_demonstrations(
        SPEC,
        ["reach_green", "push"],
        episodes=3,
        writer=writer,
        seed=seed,
        noise=noise,
        workers=workers,
        report=lines.append,
    )
    return writer, summary.to_dict(), lines


@pytest.fixture(scope="module")
def alone() -> tuple[ListWriter, dict[str, object], list[str]]:
    return record(workers=1)


def test_two_workers_record_what_one_process_records(alone: tuple[ListWriter, dict[str, object], list[str]]) -> None:
    writer, summary, _ = alone
    spread, spread_summary, _ = record(workers=2)
    assert summary == spread_summary
    assert len(writer.episodes) == len(spread.episodes) == 6
    for (one, task), (other, other_task) in zip(writer.episodes, spread.episodes, strict=True):
        assert task == other_task
        for key, values in one.items():
            np.testing.assert_array_equal(values, other[key])


def test_episodes_match_the_announced_features(alone: tuple[ListWriter, dict[str, object], list[str]]) -> None:
    writer, summary, lines = alone
    features = demonstration_features(32)
    for frames, _ in writer.episodes:
        assert set(frames) == set(features)
        length = len(frames["action"])
        assert 10 < length <= 120
        for key, feature in features.items():
            assert frames[key].shape == (length, *feature["shape"])
            assert frames[key].dtype == ("uint8" if feature["dtype"] == "image" else feature["dtype"])
        assert np.abs(frames["action"]).max() <= 1.0
        np.testing.assert_array_equal(frames["action"][:, 3:6], 0.0)
    assert [task for _, task in writer.episodes] == ["reach the green disc"] * 3 + [
        "push the cube to the green disc"
    ] * 3
    assert summary["num_frames"] == sum(len(frames["action"]) for frames, _ in writer.episodes)
    reach, push = summary["tasks"]  # type: ignore[misc]
    assert reach["init_states"] == [0, 1, 2]
    assert push["success_rate"] == 3 / push["attempts"]
    assert any(line.startswith("push: 3/3 demonstrations of") for line in lines)


def test_a_recording_that_was_stopped_goes_on(
    alone: tuple[ListWriter, dict[str, object], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, made = Recorder.attempt, []

    def stops_at_the_fourth(self: Recorder, task: str, index: int) -> object:
        if len(made) == 4:
            raise KeyboardInterrupt
        made.append((task, index))
        return original(self, task, index)

    def store() -> AttemptStore:
        return AttemptStore(tmp_path / "attempts", recording_identity(SPEC, seed=0, noise=0.25))

    def run() -> tuple[ListWriter, dict[str, object]]:
        writer = ListWriter()
        tasks = ["reach_green", "push"]
        summary = record_demonstrations(SPEC, tasks, episodes=3, writer=writer, store=store(), report=lambda line: None)
        return writer, summary.to_dict()

    monkeypatch.setattr(Recorder, "attempt", stops_at_the_fourth)
    with pytest.raises(KeyboardInterrupt):
        run()
    before = len(made)
    monkeypatch.setattr(Recorder, "attempt", lambda *call: made.append(call[1:]) or original(*call))
    writer, summary = run()
    assert summary == alone[1]
    assert len(set(made)) == len(made) > before, "no attempt is made twice"
    for (one, _), (other, _) in zip(alone[0].episodes, writer.episodes, strict=True):
        for key, values in one.items():
            assert values.dtype == other[key].dtype
            np.testing.assert_array_equal(values, other[key])
    store().remove()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("change", [{"seed": 1}, {"noise": 0.0}])
def test_attempts_of_other_settings_are_refused(tmp_path: Path, change: dict[str, object]) -> None:
    settings: dict[str, Any] = {"seed": 0, "noise": 0.25}
    AttemptStore(tmp_path / "attempts", recording_identity(SPEC, **settings)).save("push", 0, None)
    ((name, value),) = change.items()
    with pytest.raises(ValueError, match=rf"with {name}={settings[name]} and not {value}; repeat its settings"):
        AttemptStore(tmp_path / "attempts", recording_identity(SPEC, **{**settings, **change}))


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("recording.json", b"{", r"recording.json is no valid JSON .*--overwrite"),
        ("push/000000.npz", b"", r"push/000000.npz cannot be read .*; delete it, and it is recorded anew"),
        ("push/000000.npz", b"PK\x03\x04 cut", r"push/000000.npz cannot be read "),
    ],
)
def test_attempts_that_are_damaged_are_named(tmp_path: Path, file: str, content: bytes, message: str) -> None:
    identity = recording_identity(SPEC, seed=0, noise=0.25)
    store = AttemptStore(tmp_path / "attempts", identity)
    store.save("push", 0, None)
    (tmp_path / "attempts" / file).write_bytes(content)
    (tmp_path / "attempts/push/notes.npz").touch()
    assert store.known("push") == {0}
    with pytest.raises(ValueError, match=message):
        AttemptStore(tmp_path / "attempts", identity).load("push", 0)


def test_another_seed_gives_other_scenes(alone: tuple[ListWriter, dict[str, object], list[str]]) -> None:
    other, summary, _ = record(workers=1, seed=1)
    assert summary["init_state_stream"] == 1_000_001
    first, second = alone[0].episodes[0][0]["observation.state"][0], other.episodes[0][0]["observation.state"][0]
    assert not np.allclose(first[:3], second[:3])


def test_labels_are_the_experts_own_actions() -> None:
    """The disturbance moves the hand, not the label: a label is what the expert says in the recorded state."""
    recorder = Recorder(SPEC, seed=0, noise=0.25)
    rollout = recorder.attempt("reach_cube", 0)
    assert rollout is not None
    env = recorder._env
    env.reset("reach_cube", 0)
    target = env.table_state().cube + [0, 0, 0.06]
    velocity = (target - rollout.states[:, :3]) * 15.0
    velocity /= np.maximum(1.0, np.abs(velocity).max(axis=1, keepdims=True))
    np.testing.assert_allclose(rollout.actions[:, :3], velocity, atol=2e-4)
    assert (rollout.actions[:, 6] == -1.0).all()
    recorder.close()

    clean = Recorder(SPEC, seed=0, noise=0.0)
    undisturbed = clean.attempt("reach_cube", 0)
    assert undisturbed is not None
    assert not np.allclose(undisturbed.states[5], rollout.states[5], atol=1e-4)
    clean.close()


def disturbed(model: DisturbanceModel, steps: int, *, may_be_pushed: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Draws [steps, 6] of noise 0.25, and which of them hold a push."""
    disturbance = Disturbance(0.25, np.random.default_rng(0), model)
    drawn, pushed = np.empty((steps, 6)), np.empty(steps, bool)
    for step in range(steps):
        drawn[step] = disturbance.draw(may_be_pushed=may_be_pushed)
        pushed[step] = np.abs(drawn[step] - disturbance._correlated).max() > 0.0
    return drawn, pushed


def test_disturbance_has_the_stated_size() -> None:
    """Without pushes, AR(1) with 0.8 and 0.6 keeps the standard deviation of its input: 0.6 / sqrt(1 - 0.64) = 1."""
    drawn, pushed = disturbed(DisturbanceModel(), 20000)
    assert np.std(drawn[~pushed, :3]) == pytest.approx(0.25, rel=0.05)
    assert np.mean(pushed) == pytest.approx(0.03 * 5 / (1 + 0.03 * 4), rel=0.15)
    np.testing.assert_array_equal(drawn[:, 3:], 0.0)
    silent = Disturbance(0.0, np.random.default_rng(0), DisturbanceModel())
    np.testing.assert_array_equal(silent.draw(), np.zeros(6))


def test_a_model_turns_the_hand_and_pushes_it_as_often_as_it_says() -> None:
    drawn, pushed = disturbed(DisturbanceModel(rotation=0.2, push_probability=0.02), 20000)
    assert np.std(drawn[:, 3:]) == pytest.approx(0.25 * 0.2, rel=0.05)
    assert np.mean(pushed) == pytest.approx(0.02 * 5 / (1 + 0.02 * 4), rel=0.15)
    begins = np.flatnonzero(pushed[1:] & ~pushed[:-1])
    assert all(pushed[begin + 1 : begin + 6].all() for begin in begins), "a push lasts 5 steps"
    assert not disturbed(DisturbanceModel(), 20000, may_be_pushed=False)[1].any()


def test_a_push_begins_only_where_the_expert_allows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer is asked for before the action, because the action may end its phase."""
    asked: list[str] = []
    original = expert_class("somatable")
    act = original.act
    monkeypatch.setattr(original, "disturbance", DisturbanceModel(push_probability=1.0))
    monkeypatch.setattr(original, "may_be_pushed", lambda self: bool(asked.append("push")))
    monkeypatch.setattr(original, "act", lambda self: asked.append("act") or act(self))
    monkeypatch.setattr(Disturbance, "draw", _without_pushes(Disturbance.draw))
    recorder = Recorder(SPEC, seed=0)
    assert recorder.attempt("reach_green", 0) is not None
    recorder.close()
    assert asked == ["push", "act"] * (len(asked) // 2)


def _without_pushes(draw: Any) -> Any:
    def checked(self: Disturbance, **settings: bool) -> np.ndarray:
        drawn = draw(self, **settings)
        np.testing.assert_array_equal(drawn, self._correlated)
        return drawn

    return checked


def test_noise_is_the_experts_own_unless_it_is_given() -> None:
    assert recording_identity(SPEC, seed=0, noise=None)["noise"] == 0.25
    assert recording_identity(SPEC, seed=0, noise=0.1)["noise"] == 0.1
    libero = EnvSpec("libero", {"suite": "libero_goal"})
    assert recording_identity(libero, seed=0, noise=None)["noise"] == 0.2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tasks": ["pus"]}, r"unknown task with a scripted expert 'pus'.*Did you mean 'push'"),
        ({"tasks": []}, "no task was named"),
        ({"tasks": ["push", "push"]}, "name one task twice"),
        ({"episodes": 0}, "episodes=0 must be at least 1"),
        ({"seed": -1}, "seed=-1 must be at least 0"),
        ({"noise": -0.1}, "noise=-0.1 must be at least 0"),
        ({"workers": 0}, "workers=0 must be at least 1"),
        ({"timeout_s": 0.0, "workers": 2}, "timeout_s=0.0 must be above 0 seconds"),
        ({"timeout_s": 5.0}, "timeout_s=5.0 .* works with workers above 1"),
        ({"spec": SPEC.replace(stream=3)}, "stream is set by the seed of the recording"),
        ({"spec": SPEC.replace(obs_type="state")}, "demonstrations hold images"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {"spec": SPEC, "tasks": ["push"], "episodes": 1, "writer": ListWriter()} | changes
    with pytest.raises(ValueError, match=message):
        record_demonstrations(**arguments)  # type: ignore[arg-type]


def test_an_environment_without_expert_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_env.py").write_text(
        "from soma_lightning.envs.somatable import SomaTable\nclass Own(SomaTable):\n    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        ValueError, match="environment 'own_env:Own' has no scripted expert; those with one: somatable, libero"
    ):
        record_demonstrations(EnvSpec("own_env:Own"), ["push"], episodes=1, writer=ListWriter())


def test_no_attempt_is_begun_in_vain() -> None:
    """All numbers of one call may be under way at once, so a call asks for as many as are still missing."""
    asked: list[list[int]] = []
    solved = {0, 3, 5, 6}

    def attempts_of(task: str, numbers: Iterable[int]) -> Iterator[object]:
        asked.append(list(numbers))
        return (object() if number in solved else None for number in asked[-1])

    results = list(demos._first_successes("push", 4, 100, attempts_of))  # type: ignore[arg-type]
    assert asked == [[0, 1, 2, 3], [4, 5], [6]]
    assert [result is not None for result in results] == [number in solved for number in range(7)]
    asked.clear()
    assert len(list(demos._first_successes("push", 4, 5, attempts_of))) == 5  # type: ignore[arg-type]


def test_a_task_that_hardly_ever_succeeds_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("soma_lightning.envs.demos._MIN_ATTEMPTS", 1)
    message = "only 0 of 5 attempts of task 'pick' succeeded, 1 were asked for; lower the noise"
    with pytest.raises(RuntimeError, match=message):
        record_demonstrations(SPEC, ["pick"], episodes=1, writer=ListWriter(), noise=8.0, report=lambda line: None)


def test_a_failing_worker_stops_the_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUJOCO_GL", "egl")
    monkeypatch.setenv("MUJOCO_EGL_DEVICE_ID", "99")
    with pytest.raises(
        WorkerError, match=r"recording stopped: worker \d raised in building its environment:\ncannot render"
    ):
        record_demonstrations(SPEC, ["push"], episodes=1, writer=ListWriter(), workers=2)
