"""The commands from a recording to a compared evaluation. Bad input gives one clear error and status 2.

All tests share one recorded data set and one policy that was trained for two steps.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file

from soma_lightning.cli.main import main
from soma_lightning.data.lerobot_writer import LeRobotWriter
from soma_lightning.envs.rendering import RenderingUnavailableError

DATA_FILE = "data/chunk-000/file-000.parquet"
QUIET = [
    "--trainer.accelerator",
    "cpu",
    "--trainer.enable_progress_bar",
    "false",
    "--trainer.enable_model_summary",
    "false",
]
TINY = [
    "--data.batch_size",
    "8",
    "--data.preload",
    "false",
    "--trainer.max_steps",
    "2",
    "--trainer.limit_val_batches",
    "1",
]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("recorded") / "reach"
    assert main(["demos", "--task", "reach_cube", "--episodes", "2", "--workers", "1", "--out", str(out)]) == 0
    return out


def fit(data: Path, out: Path, *more: str) -> int:
    run = ["--data.root", str(data), "--trainer.default_root_dir", str(out)]
    return main(["fit", "--config", "pi05_somatable_base", *run, *QUIET, *TINY, *more])


def evaluate(policy: Path, out: Path, *more: str) -> int:
    small = ["--episodes", "2", "--num_envs", "2", "--recorded", "0"]
    task = [] if "--task" in more else ["--task", "reach_cube"]
    return main(["eval", "--policy", str(policy), "--out", str(out), "--device", "cpu", *small, *task, *more])


@pytest.fixture(scope="module")
def trained(recorded: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("trained") / "with space ü"
    assert fit(recorded, out) == 0
    return out


@pytest.fixture(scope="module")
def policy(trained: Path) -> Path:
    return trained / "policy"


@pytest.fixture
def check_refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., None]:
    """Runs a command that must end with status 2 and one error that contains all of `messages`."""

    def check(command: Callable[..., int], *arguments: Any, messages: tuple[str, ...]) -> None:
        capsys.readouterr()
        try:
            status: Any = command(*arguments)
        except SystemExit as stop:  # the parser's own way out
            status = stop.code
        error = capsys.readouterr().err
        assert status == 2, error
        assert error.count("error: ") == 1, error
        assert "Traceback" not in error
        told = error[error.index("error: ") :]
        assert all(message in told for message in messages), told

    return check


def results(out: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((out / "results.json").read_text())
    return read


# -- the good path ----------------------------------------------------------------------------------------------------


def test_an_evaluation_is_the_same_however_it_runs(policy: Path, tmp_path: Path) -> None:
    """Again, with other slots, in worker processes, and resumed: every episode ends alike, to the last bit."""
    tasks = ["--task", "reach_cube", "--task", "reach_green"]
    ways = {
        "first": ["--recorded", "1"],
        "again": ["--recorded", "1"],
        "workers": ["--num_envs", "3", "--workers", "2"],
    }
    for name, more in ways.items():
        assert evaluate(policy, tmp_path / name, *tasks, *more) == 0
    episodes = {name: sorted((tmp_path / name / "episodes.jsonl").read_text().splitlines()) for name in ways}
    assert len(episodes["first"]) == 4
    assert episodes["again"] == episodes["first"] == episodes["workers"]
    assert results(tmp_path / "again")["tasks"] == results(tmp_path / "first")["tasks"]
    for name in ("success.png", "contact_sheet.png"):
        assert (tmp_path / "first" / name).stat().st_size > 0
    assert sorted(path.suffix for path in (tmp_path / "first" / "videos").iterdir()) == [".mp4"] * 2 + [".npz"] * 2

    log = tmp_path / "again" / "episodes.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(lines[:3]) + lines[3][:20])  # killed while writing the last line
    (tmp_path / "again" / "results.json").unlink()
    assert evaluate(policy, tmp_path / "again", *tasks, "--recorded", "1") == 0
    assert sorted(log.read_text().splitlines()) == episodes["first"]
    assert results(tmp_path / "again")["seconds"]["episodes_run"] == 1


@pytest.mark.parametrize("steps", [1, 8])
def test_executed_steps_from_one_to_the_whole_chunk(policy: Path, tmp_path: Path, steps: int) -> None:
    assert evaluate(policy, tmp_path, "--episodes", "1", "--executed_steps", str(steps)) == 0
    assert results(tmp_path)["settings"]["executed_steps"] == steps
    assert results(tmp_path)["overall"]["episodes"] == 1


def test_what_was_written_is_named(policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    always = ("results.json", "success.png")
    for recorded, names in ((0, always), (1, (*always, "contact_sheet.png", "videos"))):
        out = tmp_path / str(recorded)
        assert evaluate(policy, out, "--episodes", "1", "--recorded", str(recorded)) == 0
        last = capsys.readouterr().out.splitlines()[-1]
        assert last == f"written: {', '.join(str(out / name) for name in names)}"


def test_comparison(policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # relative paths
    assert evaluate(policy, Path("one"), "--episodes", "1") == 0
    assert main(["compare", "a=one", "b=one", "--out", "bars.png", "--claim_best", "a"]) == 1
    assert Path("bars.png").stat().st_size > 0


def test_a_fit_goes_on_from_a_checkpoint_file(trained: Path, recorded: Path, tmp_path: Path) -> None:
    checkpoint = trained / "checkpoints" / "last.ckpt"
    assert fit(recorded, tmp_path, "--ckpt_path", str(checkpoint), "--trainer.max_steps", "3") == 0
    after = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)
    assert after["global_step"] == 3


def test_images_of_another_size_and_shape_train_and_roll_out(tmp_path: Path) -> None:
    """One episode of one frame, 20 x 33 pixels, an instruction in another script, no validation episode."""
    image = {"dtype": "image", "shape": [20, 33, 3]}
    names = ("observation.images.image", "observation.images.image2")
    features: dict[str, Any] = {
        **dict.fromkeys(names, image),
        "observation.state": {"dtype": "float32", "shape": [8]},
        "action": {"dtype": "float32", "shape": [7]},
    }
    with LeRobotWriter(tmp_path / "odd", features=features) as writer:
        frames: dict[str, Any] = {name: np.zeros((1, 20, 33, 3), np.uint8) for name in names}
        frames |= {"observation.state": np.zeros((1, 8), np.float32), "action": np.zeros((1, 7), np.float32)}
        writer.add_episode(frames, "拿起 kocka")
    assert fit(tmp_path / "odd", tmp_path / "run", "--data.batch_size", "1", "--data.statistics", "dataset") == 0
    state_48 = ["--env_options", '{"image_size": 48}']
    assert evaluate(tmp_path / "run" / "policy", tmp_path / "eval", "--episodes", "1", *state_48) == 0


# -- evaluation: what is refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "messages"),
    [
        (["--executed_steps", "9"], ("executed_steps=9 is more than the 8 actions", "use at most 8")),
        (["--executed_steps", "0"], ("executed_steps=0 must be at least 1",)),
        (["--denoising_steps", "0"], ("denoising_steps=0 must be at least 1",)),
        (["--episodes", "0"], ("episodes=0 must be at least 1",)),
        (["--seed", "-1"], ("seed=-1 must not be negative",)),
        (["--num_envs", "0"], ("num_envs=0 must be at least 1",)),
        (["--workers", "3"], ("workers=3 must lie in 0..num_envs",)),
        (["--timeout_s", "5"], ("timeout_s=5.0 has no effect without workers",)),
        (["--task", "reach_cub"], ("unknown task 'reach_cub'", "Did you mean 'reach_cube'?")),
        (["--task", "push", "--task", "push"], ("name one task twice",)),
        (["--env", "somatabel"], ("unknown environment 'somatabel'", "Did you mean 'somatable'?")),
        (["--env_options", '{"image_sise": 64}'], ("'image_sise'", "Did you mean 'image_size'?")),
        (["--env_options", '{"image_size": 63.5}'], ("image_size=63.5 must be a whole number",)),
        (["--env_options", '{"obs_type": "state"}'], ("cameras do not fit", "found []")),
        (["--device", "gpu"], ("device='gpu' is unknown; use auto, cpu or cuda",)),
        (["--model_type", "pi0"], ("unknown model_type 'pi0'", "did you mean 'pi05'?")),
        (["--polcy", "x"], ("unknown option 'polcy'", "did you mean 'policy' or 'policy_options'?")),
    ],
)
def test_evaluations_that_cannot_be(
    policy: Path, tmp_path: Path, check_refused: Callable[..., None], more: list[str], messages: tuple[str, ...]
) -> None:
    check_refused(evaluate, policy, tmp_path / "out", *more, messages=messages)
    left = [path.name for path in tmp_path.rglob("*") if path.is_file() and path.name != ".lock"]
    assert left == []


def cut(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:9999])


def without_a_key(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.action_in_proj.bias"]
    save_file(tensors, folder / "model.safetensors")


def with_another_key(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "model.surplus": torch.zeros(2)}, folder / "model.safetensors")


def with_nan(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.action_out_proj.bias"].fill_(float("nan"))
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("damage", "messages"),
    [
        (cut, ("model.safetensors is no readable safetensors file", "damaged or cut short")),
        (without_a_key, ("does not fit the network", "1 missing: action_in_proj.bias")),
        (with_another_key, ("does not fit the network", "1 unexpected: model.surplus")),
        (with_nan, ("the actions for slots [0, 1] hold NaN or infinity",)),
        (lambda folder: (folder / "model.safetensors").unlink(), ("there is no", "model.safetensors")),
        (lambda folder: (folder / "statistics.json").unlink(), ("has no statistics to normalise observation.state",)),
        (lambda folder: (folder / "statistics.json").write_text("{"), ("statistics.json is no valid JSON",)),
        (lambda folder: (folder / "tokenizer.json").unlink(), ("tokenizer.json is missing",)),
        (lambda folder: (folder / "config.json").write_text("{"), ("config.json is no valid JSON",)),
        (lambda folder: (folder / "config.json").write_text("[]"), ("config.json must hold a JSON object, not list",)),
        (lambda folder: (folder / "config.json").unlink(), ("holds no config.json, so it is no checkpoint",)),
        (shutil.rmtree, ("there is no folder ",)),
    ],
)
def test_damaged_checkpoints(
    policy: Path,
    tmp_path: Path,
    check_refused: Callable[..., None],
    damage: Callable[[Path], Any],
    messages: tuple[str, ...],
) -> None:
    broken = tmp_path / "policy"
    shutil.copytree(policy, broken)
    damage(broken)
    check_refused(evaluate, broken, tmp_path / "out", messages=messages)
    assert not (tmp_path / "out" / "settings.json").exists()


def test_results_are_not_mixed_and_not_lost(policy: Path, tmp_path: Path, check_refused: Callable[..., None]) -> None:
    mine = tmp_path / "policy"
    shutil.copytree(policy, mine)
    out = tmp_path / "out"
    assert evaluate(mine, out, "--episodes", "1") == 0
    before = (out / "results.json").read_bytes()
    check_refused(evaluate, mine, out, "--episodes", "2", messages=("other settings (episodes)", "--overwrite"))
    with_nan(mine)  # trained again into the same folder
    check_refused(
        evaluate, mine, out, "--episodes", "1", messages=("other settings (the policy's weights or statistics)",)
    )
    check_refused(evaluate, mine, out, "--episodes", "1", "--overwrite", messages=("NaN",))
    assert (out / "results.json").read_bytes() == before
    (tmp_path / "file").write_text("")
    for bad in ("file", "file/sub"):
        check_refused(evaluate, policy, tmp_path / bad, messages=("the results cannot go into", "file"))


def test_no_rendering(
    policy: Path, tmp_path: Path, check_refused: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`soma demos` in a process where rendering is off; `soma eval` gets the same error before it loads the policy."""
    line = [sys.executable, "-m", "soma_lightning.cli.main", "demos", "--task", "reach_cube", "--episodes", "1"]
    root = str(Path(__file__).resolve().parents[2])
    environment = {**os.environ, "MUJOCO_GL": "disable", "PYTHONPATH": os.pathsep.join([root, f"{root}/kernels"])}
    line += ["--workers", "2", "--out", str(tmp_path / "demos")]
    ended = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2
    assert "Traceback" not in ended.stderr
    assert "cannot render images" in ended.stderr
    assert "apt-get install" in ended.stderr
    assert list(tmp_path.iterdir()) == []

    def no_gl() -> None:
        raise RenderingUnavailableError("cannot render images: apt-get install ...")

    monkeypatch.setattr("soma_lightning.envs.somatable.check_gl", no_gl)
    cut_policy = tmp_path / "policy"
    shutil.copytree(policy, cut_policy)
    cut(cut_policy)
    check_refused(evaluate, cut_policy, tmp_path / "out", messages=("cannot render images: apt-get install",))


# -- training: what is refused ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "messages"),
    [
        (["--data.cameras", '{"observation.images.imag": "x"}'], ("cameras names ['observation.images.imag']",)),
        (
            ["--data.cameras", '{"observation.images.image": "observation.images.front"}'],
            (
                "cameras do not fit the policy",
                "missing ['observation.images.image'",
                "extra ['observation.images.front']",
            ),
        ),
        (["--data.statistics", "nowhere"], ("no statistics file at 'nowhere'", "somatable_statistics")),
        (["--model.statistics", "checkpoint"], ("statistics='checkpoint' needs pretrained",)),
        (["--model.config", '{"max_action_dim": 6}'], ("action_dim=7 is larger than the model's max_action_dim=6",)),
        (["--model.config", '{"tokenizer_max_length": 16}'], ("('reach the cube') has 21 tokens", "on_long_prompt")),
        (["--model.config", '{"n_action_steps": 9}'], ("n_action_steps=9 must lie in 1..chunk_size=8",)),
        (["--model.config", '{"dtype": "float16"}'], ("dtype='float16' must be one of",)),
        (["--model.config", '{"chunk_sise": 9}'], ("no configuration field 'chunk_sise'", "chunk_size")),
        (["--model.size", "null", "--model.pretrained", "nowhere"], ("there is no checkpoint folder nowhere",)),
        (["--model.training.lr", "-1"], ("lr=-1.0 must be positive",)),
        (["--data.batch_size", "100000"], ("fewer than batch_size=100000",)),
        (["--data.batch_size", "0"], ("batch_size=0 must be at least 1",)),
        (["--data.chunk_size", "9"], ("data.chunk_size=9 differs from the policy's chunk_size=8",)),
        (["--data.root", "nowhere"], ("no data set at 'nowhere'", "soma demos")),
        (["--ckpt_path", "nowhere.ckpt"], ("--ckpt_path nowhere.ckpt: there is no such file",)),
        (["--ckpt_path", "last"], ("there is no last.ckpt",)),
        (["--trainer.max_step", "3"], ("unknown option 'trainer.max_step'", "'trainer.max_steps'")),
    ],
)
def test_fits_that_cannot_be(
    recorded: Path, tmp_path: Path, check_refused: Callable[..., None], more: list[str], messages: tuple[str, ...]
) -> None:
    check_refused(fit, recorded, tmp_path, "--trainer.logger", "false", *more, messages=messages)
    assert not (tmp_path / "policy").exists()
    assert not (tmp_path / "checkpoints").exists()


def rewrite_info(**changes: Any) -> Callable[[Path], Any]:
    def damage(root: Path) -> None:
        path = root / "meta" / "info.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return damage


def nan_action(root: Path) -> None:
    table = pq.read_table(root / DATA_FILE)
    actions = np.stack(table["action"].to_numpy(zero_copy_only=False)).astype(np.float32)
    actions[3, 2] = float("nan")
    column = pa.FixedSizeListArray.from_arrays(pa.array(actions.ravel()), actions.shape[1])
    pq.write_table(table.set_column(table.column_names.index("action"), "action", column), root / DATA_FILE)


@pytest.mark.parametrize(
    ("damage", "messages"),
    [
        (
            rewrite_info(codebase_version="v1.6"),
            ("codebase_version 'v1.6' cannot be read", "record it anew"),
        ),
        (rewrite_info(codebase_version="v4.0"), ("codebase_version 'v4.0' cannot be read; supported: v3.0",)),
        (rewrite_info(features=[]), ("info.json: features=[] must be an object",)),
        (lambda root: (root / DATA_FILE).unlink(), (f"{DATA_FILE} is missing", "episode 0")),
        (lambda root: (root / DATA_FILE).write_bytes(b"PAR1"), (f"{DATA_FILE} cannot be read as parquet",)),
        (lambda root: (root / "meta/tasks.parquet").unlink(), ("meta/tasks.parquet is missing",)),
        (nan_action, (DATA_FILE, "episode 0, column 'action': frame 3 is not finite")),
    ],
)
def test_damaged_data_sets(
    recorded: Path,
    tmp_path: Path,
    check_refused: Callable[..., None],
    damage: Callable[[Path], Any],
    messages: tuple[str, ...],
) -> None:
    broken = tmp_path / "data"
    shutil.copytree(recorded, broken)
    damage(broken)
    check_refused(fit, broken, tmp_path / "run", "--trainer.logger", "false", messages=messages)


def changed(path: Path, target: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    checkpoint = torch.load(path, weights_only=True)
    change(checkpoint)
    torch.save(checkpoint, target)
    return target


@pytest.mark.parametrize(
    ("change", "more", "messages"),
    [
        (lambda ckpt: ckpt["state_dict"].popitem(), [], ("weights do not fit this run's: missing ['policy.model",)),
        (lambda ckpt: ckpt["state_dict"].update(surplus=torch.zeros(1)), [], ("unexpected ['surplus']",)),
        (lambda ckpt: ckpt.pop("soma_policy"), [], ("not written by a policy module",)),
        (lambda ckpt: None, ["--model.config", '{"n_action_steps": 2}'], ("config (n_action_steps) differs",)),
    ],
)
def test_checkpoints_that_do_not_fit(
    trained: Path,
    recorded: Path,
    tmp_path: Path,
    check_refused: Callable[..., None],
    change: Callable[[dict[str, Any]], Any],
    more: list[str],
    messages: tuple[str, ...],
) -> None:
    path = changed(trained / "checkpoints" / "last.ckpt", tmp_path / "changed.ckpt", change)
    check_refused(
        fit, recorded, tmp_path / "run", "--trainer.logger", "false", "--ckpt_path", str(path), *more, messages=messages
    )


def test_damaged_training_checkpoints(
    trained: Path, recorded: Path, tmp_path: Path, check_refused: Callable[..., None]
) -> None:
    whole = (trained / "checkpoints" / "last.ckpt").read_bytes()
    for content in (b"", b"abc" * 100, whole[: len(whole) // 2]):
        (tmp_path / "cut.ckpt").write_bytes(content)
        check_refused(
            fit, recorded, tmp_path, "--ckpt_path", str(tmp_path / "cut.ckpt"), messages=("is no readable checkpoint",)
        )


def test_folders_that_cannot_take_a_run(recorded: Path, tmp_path: Path, check_refused: Callable[..., None]) -> None:
    (tmp_path / "file").write_text("")
    check_refused(fit, recorded, tmp_path / "file", messages=("Not a directory", "file"))
    (tmp_path / "run" / "policy").mkdir(parents=True)
    (tmp_path / "run" / "policy" / "mine.txt").write_text("mine")
    check_refused(fit, recorded, tmp_path / "run", "--trainer.logger", "false", messages=("policy holds ['mine.txt']",))
    assert not (tmp_path / "run" / "checkpoints").exists()
