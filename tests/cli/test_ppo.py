"""`soma ppo`: recipes run, files are left, an interrupted run goes on, mistakes are one line."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from soma_lightning.cli import main as soma
from soma_lightning.envs.somatable import SomaTable
from soma_lightning.models import PI05Config, PI05Policy, registry
from soma_lightning.models.flow_mlp import FlowMLPConfig, FlowMLPPolicy
from soma_lightning.rl.loop import LoopSettings
from soma_lightning.rl.outputs import RunFolder
from soma_lightning.rl.ppo import PPOConfig
from soma_lightning.rl.rollout import RolloutSettings
from tests.rl.gaussian import build

ROOT = Path(__file__).resolve().parents[2]
TWO = ["--loop.iterations", "2", "--loop.engine", "sync", "--loop.workers", "1", "--loop.fragments_per_update", "1"]
SMALL = [*TWO, "--rollout.envs_per_worker", "2", "--rollout.decisions", "6"]
FEW = ["--evaluation.episodes", "2", "--evaluation.num_envs", "2", "--evaluation.every", "1"]


@pytest.fixture
def start(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    FlowMLPPolicy(FlowMLPConfig(state_dim=6, action_dim=2, hidden=32)).save_pretrained(tmp_path / "start")
    return tmp_path / "start"


def ppo(start: Path, out: Path, *more: str) -> int:
    line = ["ppo", "--config", "ppo/point_reach", "--policy", str(start), "--out", str(out)]
    return soma.main([*line, *SMALL, *FEW, *more])


def test_a_run_leaves_its_files_and_a_policy_that_can_be_evaluated(start, tmp_path, capsys):
    out = tmp_path / "run"
    assert ppo(start, out) == 0
    printed = capsys.readouterr().out
    assert "iteration 2/2  held-out success" in printed
    for name in ("results.json", "learning_curve.png", "history.jsonl", "state.ckpt", "logs/version_0/metrics.csv"):
        assert (out / name).stat().st_size > 0, name
    assert list((out / "tensorboard").rglob("events*"))
    results = json.loads((out / "results.json").read_text())
    assert results["status"] == "finished"
    assert results["settings"]["rollout"]["envs_per_worker"] == 2
    assert results["last"]["iteration"] == 2
    rows = [json.loads(line) for line in (out / "history.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == [1, 2]
    assert {"start_success", "success", "env_steps_per_s", "lag", "logp_gap", "approx_kl"} <= set(rows[0])
    evaluated = ["eval", "--policy", str(out / "policy"), "--env", "point_reach", "--recorded", "0"]
    assert soma.main([*evaluated, "--episodes", "4", "--out", str(tmp_path / "eval")]) == 0
    assert json.loads((tmp_path / "eval" / "run_report.json").read_text())["policy"]["training"]["by"] == "ppo"


def test_a_run_goes_on_with_more_iterations(start, tmp_path, capsys):
    out = tmp_path / "run"
    assert ppo(start, out) == 0
    before = torch.load(out / "state.ckpt", weights_only=True)
    assert ppo(start, out, "--loop.iterations", "3") == 0
    assert "iteration 3/3" in capsys.readouterr().out
    after = torch.load(out / "state.ckpt", weights_only=True)
    assert (before["updates"], after["updates"]) == (2, 3)
    rows = [json.loads(line) for line in (out / "history.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == [1, 2, 3]


def test_a_run_of_other_settings_is_refused_and_can_be_overwritten(start, tmp_path, capsys):
    out = tmp_path / "run"
    assert ppo(start, out) == 0
    assert ppo(start, out, "--ppo.lr", "0.5") == 2
    assert "holds a run with other settings (ppo.lr)" in capsys.readouterr().err
    assert ppo(start, out, "--ppo.lr", "0.5", "--overwrite") == 0
    assert torch.load(out / "state.ckpt", weights_only=True)["updates"] == 2


def test_iterations_after_the_saved_state_are_noted_once(tmp_path):
    folder = RunFolder(tmp_path, {})
    for iteration in range(1, 5):
        folder.add(iteration, {"success": 0.1})
    folder.state.touch()
    folder.close()
    again = RunFolder(tmp_path, {})
    for iteration in (3, 4, 5):
        again.add(iteration, {"success": 0.5})
    again.close()
    rows = [json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()]
    assert [(row["iteration"], row["success"]) for row in rows] == [(1, 0.1), (2, 0.1), (3, 0.5), (4, 0.5), (5, 0.5)]


def test_results_that_say_nothing_are_refused(tmp_path):
    (tmp_path / "results.json").write_text("{")
    with pytest.raises(ValueError, match="does not say which run this was"):
        RunFolder(tmp_path, {})


def test_a_run_that_fails_at_its_start_leaves_nothing_in_the_way(start, tmp_path):
    assert ppo(start, tmp_path / "run", "--rollout.tasks", "[pick]") == 2
    assert ppo(start, tmp_path / "run", "--ppo.lr", "0.5") == 0


def test_a_policy_of_something_else_is_not_overwritten(start, tmp_path, capsys):
    shutil.copytree(start, tmp_path / "run" / "policy")
    for more in ([], ["--overwrite"]):
        assert ppo(start, tmp_path / "run", *more) == 2
        assert "was written by something else and would be lost" in capsys.readouterr().err
    assert ppo(tmp_path / "run" / "policy", tmp_path / "run") == 2
    assert "would replace the policy that the run starts from" in capsys.readouterr().err


def test_how_a_run_is_carried_out_may_change(start, tmp_path):
    assert ppo(start, tmp_path / "run") == 0
    changed = ["--loop.iterations", "3", "--loop.save_every", "2", "--evaluation.episodes", "3"]
    assert ppo(start, tmp_path / "run", *changed) == 0


def test_a_run_that_ends_early_says_so(start, tmp_path, monkeypatch, capsys):
    original = RunFolder.add

    def interrupted(self, iteration, row):
        original(self, iteration, row)
        raise KeyboardInterrupt

    monkeypatch.setattr(RunFolder, "add", interrupted)
    assert ppo(start, tmp_path / "run") == 130
    assert "goes on after the last iteration that was saved" in capsys.readouterr().err
    assert json.loads((tmp_path / "run" / "results.json").read_text())["status"] == "interrupted"
    monkeypatch.setattr(RunFolder, "add", original)
    assert ppo(start, tmp_path / "run") == 0
    printed = capsys.readouterr().out
    assert "iteration 2/2" in printed
    assert "iteration 1/2" not in printed


def test_a_policy_that_cannot_be_saved_is_refused_before_anything_is_collected(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(registry, "_models", dict(registry._models))
    registry.register_model("gaussian_test", build)
    line = ["ppo", "--config", "ppo/point_reach", "--policy", str(tmp_path), "--out", str(tmp_path / "run"), *SMALL]
    assert soma.main([*line, "--model_type", "gaussian_test", "--flow", "null", "--evaluation", "null"]) == 2
    assert "GaussianPolicy cannot be saved at the end" in capsys.readouterr().err


def test_two_runs_do_not_share_a_folder(tmp_path):
    folder = RunFolder(tmp_path / "run", {})
    with pytest.raises(ValueError, match="another run is writing into"):
        RunFolder(tmp_path / "run", {})
    folder.close()
    RunFolder(tmp_path / "run", {}).close()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--flow.num_steps", "0"], "num_steps=0"),
        (["--ppo.epochs", "0"], "epochs=0"),
        (["--ppo.lrr", "1"], "lrr"),
        (["--rollout.env", "point_rech"], "Did you mean 'point_reach'"),
        (["--rollout.tasks", "[push]"], "push"),
        (["--rollout.executed_steps", "5"], "executed_steps=5 is more than the 4 actions"),
        (["--loop.max_lag", "3"], "max_lag=3"),
        (["--loop.workers", "2"], "workers=2 has no effect"),
        (["--strategy", "ddp"], "strategy='ddp' must be one of somaspeed"),
        (["--ppo.minibatch_size", "2"], "error: micro_batch_size=256 is more than minibatch_size=2"),
        (["--evaluation.episodes", "0"], "evaluation.episodes=0"),
    ],
)
def test_mistakes_are_one_error(start, tmp_path, capsys, more, message):
    try:
        status = ppo(start, tmp_path / "run", *more)
    except SystemExit as left:
        status = left.code
    assert status == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_a_missing_policy_is_one_error(tmp_path, capsys):
    assert ppo(tmp_path / "nowhere", tmp_path / "run") == 2
    assert "there is no folder" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["somaspeed", "somaspeed_replicate"])
def test_two_ranks_learn_from_rollouts_beside_them(start, tmp_path, strategy):
    line = ["ppo", "--config", "ppo/point_reach", "--policy", str(start), "--out", str(tmp_path / "run"), *FEW]
    two = ["--devices", "2", "--accelerator", "cpu", "--strategy", strategy, "--loop.engine", "local"]
    small = ["--loop.iterations", "2", "--rollout.envs_per_worker", "4"]
    run = subprocess.run(
        [sys.executable, "-m", "soma_lightning.cli.main", *line, *two, *small], cwd=ROOT, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["world_size"] == 2
    assert results["last"]["iteration"] == 2
    learned, before = (FlowMLPPolicy.from_pretrained(folder) for folder in (tmp_path / "run" / "policy", start))
    assert not torch.equal(learned.velocity_net[0].weight, before.velocity_net[0].weight)


@pytest.fixture
def pi05(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    policy = PI05Policy(PI05Config.tiny(), SomaTable.statistics())
    policy.reset_parameters()
    policy.save_pretrained(tmp_path / "pi05")
    return tmp_path / "pi05"


def test_the_tiny_pi05_takes_an_iteration_on_images(pi05, tmp_path):
    line = ["ppo", "--config", "ppo/somatable", "--policy", str(pi05), "--out", str(tmp_path / "run"), *SMALL, *FEW]
    assert soma.main([*line, "--rollout.decisions", "2", "--loop.iterations", "1"]) == 0
    row = json.loads((tmp_path / "run" / "history.jsonl").read_text().splitlines()[0])
    assert row["logp_gap_max"] <= 1e-3
    assert (tmp_path / "run" / "policy" / "value_head.safetensors").is_file()
    for update in ("update_0000", "update_0001"):
        assert list((tmp_path / "run" / "videos" / update).glob("pick_*.mp4"))


def test_a_learner_that_never_acts_saves_the_backbone_it_did_not_hold(pi05, tmp_path):
    config = yaml.safe_load((ROOT / "recipes/ppo/somatable.yaml").read_text())
    del config["evaluation"]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    line = ["ppo", "--config", str(tmp_path / "config.yaml"), "--policy", str(pi05), "--out", str(tmp_path / "run")]
    assert soma.main([*line, *SMALL, "--rollout.decisions", "2", "--loop.iterations", "1"]) == 0
    before, after = (load_file(folder / "model.safetensors") for folder in (pi05, tmp_path / "run" / "policy"))
    assert set(before) == set(after)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert not [name for name in changed if "paligemma.model" in name]


@pytest.mark.parametrize("recipe", sorted((ROOT / "recipes/ppo").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_names_settings_that_exist(recipe: Path):
    config = yaml.safe_load(recipe.read_text())
    built = (LoopSettings(**config["loop"]), PPOConfig(**config["ppo"]), RolloutSettings(**config["rollout"]))
    for name, one in zip(("loop", "ppo", "rollout"), built, strict=True):
        assert {key: getattr(one, key) for key in config[name] if key != "tasks"} == {
            key: value for key, value in config[name].items() if key != "tasks"
        }
