"""Every recipe trains for a few steps, prints its whole configuration, continues exactly, and refuses wrong keys."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from soma_lightning.cli import main as soma

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted(ROOT.glob("recipes/*.yaml"))
#: How each recipe gets what an earlier step of the main job would have left.
NEEDS_BASE = {"pi05_libero": True, "pi05_libero_base": False, "pi05_somatable": True, "pi05_somatable_base": False}


def fit(recipe: str, data: Path, out: Path, *more: str) -> int:
    small = ["--data.batch_size", "8", "--trainer.accelerator", "cpu", "--trainer.enable_progress_bar", "false"]
    quiet = [
        "--trainer.enable_model_summary",
        "false",
        "--trainer.limit_val_batches",
        "1",
        "--trainer.log_every_n_steps",
        "1",
    ]
    line = ["fit", "--config", recipe, "--data.root", str(data), "--trainer.default_root_dir", str(out)]
    return soma.main([*line, *small, *quiet, *more])


@pytest.fixture(scope="session")
def base(reach_demos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("base")
    assert fit("pi05_somatable_base", reach_demos, out, "--trainer.max_steps", "2") == 0
    return out / "policy"


def test_every_recipe_is_known_here():
    assert {path.stem for path in RECIPES} == set(NEEDS_BASE)


@pytest.mark.parametrize("recipe", sorted(NEEDS_BASE))
def test_recipe_trains_and_leaves_its_files(recipe: str, reach_demos: Path, base: Path, tmp_path: Path):
    pretrained = ["--model.pretrained", str(base)] if NEEDS_BASE[recipe] else []
    assert fit(recipe, reach_demos, tmp_path, "--trainer.max_steps", "2", *pretrained) == 0
    log = tmp_path / "logs" / "version_0"
    for name in ("metrics.csv", "config.yaml", "run_report.json", "learning_curve.png"):
        assert (log / name).stat().st_size > 0, name
    assert (tmp_path / "checkpoints" / "last.ckpt").exists()
    assert list((tmp_path / "tensorboard").rglob("events*"))
    report = json.loads((log / "run_report.json").read_text())
    assert ("expert" if NEEDS_BASE[recipe] else "all") in json.dumps(report)
    recorded = json.loads((reach_demos / "meta" / "soma_demos.json").read_text())["tasks"][0]["init_states"]
    assert report["data"]["demonstration_init_states"] == [f"reach_cube {state}" for state in recorded]
    if NEEDS_BASE[recipe]:
        before, after = (load_file(folder / "model.safetensors") for folder in (base, tmp_path / "policy"))
        moved = {name for name in before if not torch.equal(before[name], after[name])}
        assert moved
        assert {name for name in moved if "paligemma." in name} == set()


@pytest.mark.parametrize("recipe", sorted(NEEDS_BASE))
def test_printed_configuration_is_complete_and_reads_back(
    recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    def printed(*line: str) -> str:
        with pytest.raises(SystemExit) as stop:
            soma.main(["fit", *line, "--print_config"])
        assert stop.value.code in (0, None)
        return capsys.readouterr().out

    first = printed("--config", recipe, "--model.training.lr", "0.5")
    values = yaml.safe_load(first)
    assert values["trainer"]["strategy"] == "somaspeed"
    assert values["model"]["init_args"]["training"]["lr"] == 0.5
    assert values["model"]["init_args"]["training"]["weight_decay"] == 0.01  # a default, not in the recipe
    (tmp_path / "whole.yaml").write_text(first)
    assert printed("--config", str(tmp_path / "whole.yaml")) == first


@pytest.mark.parametrize(
    ("option", "nearest"),
    [
        ("--model.training.lrr", "training.lr"),
        ("--trainer.max_step", "trainer.max_steps"),
        ("--data.batch_sise", "batch_size"),
        ("--model.pretraned", "pretrained"),
        ("--trainr.max_steps", "trainer.max_steps"),
    ],
)
def test_unknown_options_are_refused_with_the_nearest(option: str, nearest: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as stop:
        soma.main(["fit", "--config", "pi05_somatable_base", f"{option}=1"])
    assert stop.value.code == 2
    assert f"'{nearest}'" in capsys.readouterr().err


def test_unknown_keys_of_a_file_are_refused_with_the_nearest(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    values = yaml.safe_load((ROOT / "recipes" / "pi05_somatable_base.yaml").read_text())
    values["model"]["init_args"]["training"]["flow_drows"] = 2
    (tmp_path / "wrong.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(SystemExit):
        soma.main(["fit", "--config", str(tmp_path / "wrong.yaml")])
    assert "'training.flow_draws'" in capsys.readouterr().err


def test_ckpt_path_last_continues_exactly(reach_demos: Path, tmp_path: Path):
    every = ["--trainer.callbacks.init_args.every_n_train_steps", "3", "--trainer.max_steps"]
    assert fit("pi05_somatable_base", reach_demos, tmp_path / "whole", *every, "6") == 0
    # The schedule follows the length of the run, so the interrupted run has the same one and is stopped from outside.
    stop = "soma_lightning_test_stop.StopAt"
    (tmp_path / "soma_lightning_test_stop.py").write_text(
        "from lightning.pytorch import Callback\n"
        "class StopAt(Callback):\n"
        "    def on_train_batch_end(self, trainer, *rest):\n"
        "        trainer.should_stop = trainer.global_step >= 3\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        assert (
            fit("pi05_somatable_base", reach_demos, tmp_path / "parts", *every, "6", f"--trainer.callbacks+={stop}")
            == 0
        )
    assert fit("pi05_somatable_base", reach_demos, tmp_path / "parts", *every, "6", "--ckpt_path", "last") == 0
    whole, parts = (load_file(tmp_path / name / "policy" / "model.safetensors") for name in ("whole", "parts"))
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_ckpt_path_last_without_a_checkpoint_is_an_error(
    reach_demos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert fit("pi05_somatable_base", reach_demos, tmp_path, "--ckpt_path", "last") == 2
    assert "there is no last.ckpt" in capsys.readouterr().err
