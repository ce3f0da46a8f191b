"""Every file of recipes/options goes over a recipe and does what its name says, in a run of two steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from soma_lightning.cli import main as soma
from soma_lightning.cli.fit import find_config, recipe_names

ROOT = Path(__file__).resolve().parents[2]
VISION, LANGUAGE, EXPERT = "paligemma.model.vision_tower.", "paligemma.model.language_model.", "gemma_expert."
#: What each option lets move, of these parts.
MOVES = {
    "all_but_vision": {LANGUAGE, EXPERT},
    "ema": {EXPERT},
    "full": {VISION, LANGUAGE, EXPERT},
    "gradient_checkpointing": {EXPERT},
    "lora_expert": {EXPERT},
    "lora_paligemma": {VISION, LANGUAGE, EXPERT},
}


def fit(recipe: str, data: Path, out: Path, *more: str) -> int:
    line = ["fit", "--config", recipe, *more, "--data.root", str(data), "--trainer.default_root_dir", str(out)]
    small = ["--data.batch_size", "8", "--trainer.accelerator", "cpu", "--trainer.max_steps", "2"]
    quiet = ["--trainer.limit_val_batches", "1", "--trainer.enable_progress_bar", "false"]
    return soma.main([*line, *small, *quiet, "--trainer.enable_model_summary", "false"])


@pytest.fixture(scope="session")
def option_base(reach_demos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("option_base")
    assert fit("pi05_somatable_base", reach_demos, out) == 0
    return out / "policy"


def test_every_option_is_known_here_and_found_by_name():
    assert {path.stem for path in ROOT.glob("recipes/options/*.yaml")} == set(MOVES)
    assert {name for name in recipe_names() if name.startswith("options/")} == {f"options/{name}" for name in MOVES}
    assert Path(find_config("options/ema")).samefile(ROOT / "recipes" / "options" / "ema.yaml")
    with pytest.raises(FileNotFoundError, match="Did you mean 'options/lora_expert'"):
        find_config("options/lora_exper")


@pytest.mark.parametrize("option", sorted(MOVES))
def test_an_option_trains_what_it_says(option: str, reach_demos: Path, option_base: Path, tmp_path: Path):
    if option.startswith("lora"):
        pytest.importorskip("peft", reason="needs `pip install 'soma-lightning[lora]'`")
    over = ["--config", f"options/{option}", "--model.pretrained", str(option_base)]
    assert fit("pi05_somatable", reach_demos, tmp_path, *over) == 0
    before, after = (load_file(folder / "model.safetensors") for folder in (option_base, tmp_path / "policy"))
    assert set(before) == set(after)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert {part for part in (VISION, LANGUAGE, EXPERT) if any(part in name for name in moved)} == MOVES[option]
    report = json.loads((tmp_path / "logs" / "version_0" / "run_report.json").read_text())
    assert report["model"]["memory_estimate"]["total"].endswith(" GiB")
    check(option, report, moved, tmp_path)


def check(option: str, report: dict[str, Any], moved: set[str], out: Path) -> None:
    """What an option does beside."""
    assert (out / "adapter" / "adapter_config.json").is_file() == option.startswith("lora")
    assert report["model"]["gradient_checkpointing"] == (option in ("full", "gradient_checkpointing"))
    assert report["model"]["training"]["ema_decay"] == (0.99 if option == "ema" else None)
    if option == "lora_expert":
        ends = ("self_attn.q_proj.weight", "self_attn.v_proj.weight", "action_in_proj.weight", "action_out_proj.weight")
        assert all(name.endswith(ends) for name in moved)
        assert report["trainable"]["parameters"] < 0.1 * report["frozen"]["parameters"]
