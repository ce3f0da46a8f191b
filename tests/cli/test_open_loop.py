"""`soma open-loop`: predicted chunks against recorded actions, with policies whose error is known."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from soma_lightning.cli.open_loop import main
from soma_lightning.contract import batch_from_observation
from soma_lightning.data import LeRobotDataset, LeRobotWriter
from soma_lightning.data.open_loop import (
    OpenLoopSettings,
    draw_noise,
    observation_from_batch,
    predict_episodes,
    summarize,
)
from soma_lightning.models import registry

CAMERA = "observation.images.image"
LENGTHS = (9, 14, 7)
H, A = 4, 3


def action_of(episode: np.ndarray, frame: np.ndarray) -> np.ndarray:
    """Whole numbers, so that errors are exact: [..., A]."""
    return np.stack([8 * episode + frame, frame % 5 - 2, np.full_like(frame, 3)], axis=-1).astype(np.float32)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """States and pixels say which episode and frame they belong to."""
    folder = tmp_path_factory.mktemp("open_loop") / "data"
    features = {
        CAMERA: {"dtype": "image", "shape": [8, 8, 3]},
        "observation.state": {"dtype": "float32", "shape": [2]},
        "action": {"dtype": "float32", "shape": [A], "names": ["x", "y", "gripper"]},
    }
    with LeRobotWriter(folder, fps=10, features=features) as writer:
        for episode, length in enumerate(LENGTHS):
            frame = np.arange(length)
            numbers = np.full(length, episode)
            pixels = np.stack([numbers, frame, frame], axis=-1).astype(np.uint8)
            frames = {
                CAMERA: np.broadcast_to(pixels[:, None, None], (length, 8, 8, 3)).copy(),
                "observation.state": np.stack([numbers, frame], axis=-1).astype(np.float32),
                "action": action_of(numbers, frame),
            }
            writer.add_episode(frames, f"task {episode}")
    return folder


class RecordedPolicy(torch.nn.Module):
    """Predicts what was recorded plus `offset` [A]; keeps what it was shown and the noise it was given."""

    noise_shape = (H, 5)
    config = SimpleNamespace(n_action_steps=2, num_inference_steps=6)

    def __init__(self, offset: Any = 0.0, dims: int = A) -> None:
        super().__init__()
        self.offset, self.dims = np.float32(offset), dims
        self.calls: list[tuple[int, int]] = []
        self.noise: dict[tuple[int, int], torch.Tensor] = {}

    def predict_action_batch(self, observation, *, mode, compute_values, num_steps, noise):
        assert (mode, compute_values) == ("eval", False)
        state = np.asarray(observation["states"]).astype(int)
        pixels = np.asarray(observation["main_images"])
        assert pixels.shape == (len(state), 8, 8, 3)
        assert (pixels[:, 0, 0, :2] == state).all(), "the images are those of the frame"
        assert observation["task_descriptions"] == [f"task {episode}" for episode in state[:, 0]]
        assert noise.shape == (len(state), *self.noise_shape)
        self.calls.append((len(state), num_steps))
        self.noise |= {tuple(place): draw for place, draw in zip(state.tolist(), noise, strict=True)}
        actions = action_of(state[:, :1] + np.zeros((1, H), int), state[:, 1:] + np.arange(H))
        return (actions + self.offset)[..., : self.dims], {}

    def backbone_hash(self) -> str:
        return "none"

    def describe(self) -> dict:
        return {}

    def report_facts(self) -> dict:
        return {"kind": "recorded"}


def settings(**changes: Any) -> OpenLoopSettings:
    return OpenLoopSettings(**{"executed_steps": 2, "denoising_steps": 6, **changes})


def predict(root: Path, policy: RecordedPolicy, episodes=(0, 1, 2), **changes: Any):
    data = LeRobotDataset(root)
    return predict_episodes(policy, data, settings(**changes), episodes, report=lambda line: None)


def errors_of(root: Path, policy: RecordedPolicy, **changes: Any) -> dict[str, Any]:
    actions = LeRobotDataset(root).actions.numpy()
    return summarize(predict(root, policy, **changes), actions, ["x", "y", "gripper"])


def test_recorded_actions_have_no_error(root: Path) -> None:
    for executed_steps in range(1, H + 1):
        found = errors_of(root, RecordedPolicy(), executed_steps=executed_steps)
        assert found["mae"] == [0.0] * A
        assert found["normalized"] == 0.0
        assert found["normalized_by_step"] == [0.0] * H
        assert found["frames"] == sum(LENGTHS)
        assert found["chunks"] == sum(-(-length // executed_steps) for length in LENGTHS)


def test_an_offset_is_the_error(root: Path) -> None:
    found = errors_of(root, RecordedPolicy([0.5, -0.25, 2.0]))
    assert found["mae"] == [0.5, 0.25, 2.0]
    actions = LeRobotDataset(root).actions.numpy()
    half = (np.quantile(actions, 0.99, axis=0) - np.quantile(actions, 0.01, axis=0)) / 2
    assert found["constant_dimensions"] == [2], "a constant has no range to measure an error with"
    assert found["normalized"] == pytest.approx(np.mean([0.5 / half[0], 0.25 / half[1]]), rel=1e-6)
    assert found["normalized_by_step"] == pytest.approx([found["normalized"]] * H, rel=1e-6)
    assert [episode["mae"] for episode in found["episodes"]] == [[0.5, 0.25, 2.0]] * 3
    mean = np.abs(actions - actions.mean(0, dtype=np.float64)).mean(0)
    np.testing.assert_allclose(found["mean_action"]["mae"], mean, rtol=1e-6)


def test_each_frame_counts_once_and_late_steps_by_their_own(root: Path) -> None:
    """Only the fourth step of a chunk is wrong: with 2 executed steps it is never used, with 4 every fourth time."""
    late = np.zeros((H, A), np.float32)
    late[3] = 8.0
    assert errors_of(root, RecordedPolicy(late), executed_steps=2)["mae"] == [0.0] * A
    found = errors_of(root, RecordedPolicy(late), executed_steps=4)
    used = sum(length // 4 for length in LENGTHS)
    assert found["mae"] == pytest.approx([8.0 * used / sum(LENGTHS)] * A)
    assert found["normalized_by_step"][:3] == [0.0] * 3
    assert found["normalized_by_step"][3] > 0


def test_batches_change_nothing_and_noise_depends_on_the_frame_alone(root: Path) -> None:
    one, many = RecordedPolicy(), RecordedPolicy()
    first = predict(root, one, batch_size=1)
    second = predict(root, many, batch_size=7, episodes=(2, 1))
    assert {size for size, _ in one.calls} == {1}
    assert [size for size, _ in many.calls] == [7, 4]
    assert {steps for _, steps in many.calls} == {6}
    assert [p.episode for p in second] == [2, 1]
    np.testing.assert_array_equal(second[1].chunks, first[1].chunks)
    for place, noise in many.noise.items():
        assert torch.equal(noise, one.noise[place])
        assert torch.equal(noise, draw_noise(0, *place, (H, 5)))
    assert not torch.equal(draw_noise(0, 1, 2, (H, 5)), draw_noise(1, 1, 2, (H, 5)))
    for place in ((0, 2), (1, 1), (2, 1)):
        assert not torch.equal(draw_noise(0, 1, 2, (H, 5)), draw_noise(0, *place, (H, 5)))


def test_an_observation_is_the_inverse_of_its_batch() -> None:
    wrist = "observation.images.image2"
    draw = torch.Generator().manual_seed(0)
    batch = {key: torch.randint(0, 256, (3, 3, 4, 6), generator=draw, dtype=torch.uint8) for key in (CAMERA, wrist)}
    batch |= {"observation.state": torch.rand(3, 2, generator=draw), "task": ["a", "b", "c"]}
    again = batch_from_observation(observation_from_batch(batch))
    assert torch.equal(again[CAMERA], batch[CAMERA])
    assert torch.equal(again[wrist], batch[wrist])
    assert torch.equal(again["observation.state"], batch["observation.state"])
    assert again["task"] == batch["task"]


@pytest.mark.parametrize(
    ("policy", "changes", "message"),
    [
        (RecordedPolicy(), {"executed_steps": 5}, "executed_steps=5 is more than the 4 actions"),
        (RecordedPolicy(), {"seed": -1}, "seed=-1 must be at least 0"),
        (RecordedPolicy(), {"batch_size": 0}, "batch_size=0 must be at least 1"),
        (RecordedPolicy(dims=2), {}, r"shape \[15, 4, 2\], the data set needs \[15, 4, 3\]"),
        (RecordedPolicy(np.nan), {}, "actions that are not finite"),
    ],
)
def test_what_does_not_fit(root: Path, policy: RecordedPolicy, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        predict(root, policy, **changes, **({} if "batch_size" in changes else {"batch_size": 15}))


def test_cameras_without_a_place(root: Path) -> None:
    data = LeRobotDataset(root, cameras={CAMERA: "observation.images.top"})
    with pytest.raises(ValueError, match=r"\['observation.images.top'\] have no place in an observation; map them to"):
        predict_episodes(RecordedPolicy(), data, settings(), [0])


# -------------------------------------------------------------------- the command


@pytest.fixture
def run(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    monkeypatch.setattr(registry, "_models", dict(registry._models))
    registry.register_model("recorded", lambda cfg, dtype: RecordedPolicy([0.5, 0, 0]))
    registry.register_model("linear", lambda cfg, dtype: torch.nn.Linear(1, 1))

    def call(*more: str) -> int:
        base = [str(root), "--policy", str(tmp_path / "policy"), "--model_type", "recorded", "--device", "cpu"]
        return main([*base, "--out", str(tmp_path / "out"), *more])

    return call


def test_the_command(run: Callable[..., int], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--episodes", "0,2", "--seed", "3") == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "16 frames of 2 episodes, 9 chunks, 2 steps each, noise seed 3"
    assert printed[2].split()[:2] == ["x", "0.5"]
    out = tmp_path / "out"
    stored = json.loads((out / "open_loop.json").read_text())
    assert stored["mae"] == [0.5, 0.0, 0.0]
    assert (stored["settings"]["seed"], stored["settings"]["executed_steps"], stored["frames"]) == (3, 2, 16)
    assert stored["policy"]["kind"] == "recorded"
    with open(out / "open_loop.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 16 * A
    last = [row for row in rows if row["episode"] == "2" and row["frame"] == "6"]
    assert [(row["dimension"], float(row["recorded"]), float(row["predicted"])) for row in last] == [
        ("x", 22.0, 22.5),
        ("y", -1.0, -1.0),
        ("gripper", 3.0, 3.0),
    ]
    assert sum(float(row["absolute_error"]) for row in rows) == 16 * 0.5
    pictures = sorted(path.name for path in out.glob("*.png"))
    assert pictures == ["episode_000000.png", "episode_000002.png"]
    for name in pictures:
        with Image.open(out / name) as image:
            assert np.asarray(image.convert("L")).std() > 5


def test_other_steps_and_dimensions(run: Callable[..., int], tmp_path: Path) -> None:
    assert run("--executed_steps", "4", "--denoising_steps", "1", "--episodes", "all") == 0
    stored = json.loads((tmp_path / "out/open_loop.json").read_text())
    assert stored["settings"] == {"executed_steps": 4, "denoising_steps": 1, "seed": 0, "batch_size": 32}
    assert stored["chunks"] == 3 + 4 + 2


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--episodes", "0-3"], "--episodes='0-3' must be numbers such as 0,3, or all"),
        (["--episodes", "1,7"], "--episodes: [7] are not in the data set, which has the episodes 0 to 2"),
        (["--episodes", "1,1"], "--episodes=1,1 names one twice"),
        (["--executed_steps", "9"], "executed_steps=9 is more than the 4 actions"),
        (["--action_indices", "[0,1]"], "action dimensions); choose the dimensions"),
        (["--model_type", "linear"], "Linear cannot be evaluated: it has no predict_action_batch"),
        (["--out", "{root}"], "lies in the data set"),
        (["--device", "cuba"], "device='cuba' is unknown"),
    ],
)
def test_mistakes_are_one_line(
    run: Callable[..., int], root: Path, capsys: pytest.CaptureFixture[str], more: list[str], message: str
) -> None:
    assert run(*(word.format(root=root) for word in more)) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("error: ")
    assert message in error
