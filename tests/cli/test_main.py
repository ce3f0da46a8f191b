"""The `soma` command picks subcommands and explains wrong ones."""

from __future__ import annotations

import os
import signal
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException

import soma_lightning
from soma_lightning.cli import demos, fit
from soma_lightning.cli import main as cli
from soma_lightning.cli.fit import SomaCLI, find_config, recipe_names, resolve_configs
from soma_lightning.cli.parser import explain, options_of
from soma_lightning.modules.base import PolicyModule


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in cli.COMMANDS)


def test_unknown_command_names_the_nearest(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["evla"]) == 2
    assert "did you mean 'eval'" in capsys.readouterr().err


def test_version_and_the_help_of_doctor(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"soma-lightning {soma_lightning.__version__}\n"
    assert cli.main(["doctor", "--help"]) == 0
    assert "off-screen rendering" in capsys.readouterr().out
    assert cli.main(["doctor", "--all"]) == 2
    assert "takes no options" in capsys.readouterr().err


def test_recipe_names_resolve_to_packaged_files():
    assert "pi05_somatable" in recipe_names()
    assert find_config("pi05_somatable").endswith("recipes/pi05_somatable.yaml")
    line = ["fit", "--config", "pi05_somatable", "--config=pi05_somatable_base", "--trainer.max_steps", "3"]
    resolved = list(resolve_configs(line))
    assert resolved[2].endswith("pi05_somatable.yaml")
    assert resolved[3].startswith("--config=/")
    assert resolved[4:] == ["--trainer.max_steps", "3"]


def test_missing_config_names_the_nearest_recipe():
    with pytest.raises(FileNotFoundError, match="Did you mean 'pi05_somatable'"):
        find_config("pi05_somatabel")


@pytest.mark.parametrize(
    ("message", "nearest"),
    [
        (
            "given class_path 'soma_lightning.modules.base.TrainingConfig':\n Option 'lrr' is not accepted",
            "lr",
        ),
        ("Subcommand 'fit' does not accept option 'modell.class_path'", "model"),
        ("unrecognized arguments: --trainer.max_step=3", "trainer.max_steps"),
    ],
)
def test_unknown_options_name_the_nearest(message: str, nearest: str):
    assert f"'{nearest}'" in explain(message, ["model", "data", "trainer.max_steps", "trainer.max_epochs"])


def test_the_cause_alone_is_told_of_a_class_that_cannot_be_built():
    told = (
        "Does not validate against any of the Union subtypes\nSubtypes: [<class 'Module'>, <class 'NoneType'>]\n"
        "Errors:\n  - batch_size=0 must be at least 1\n    or more\n  - Expected a <class 'NoneType'>\n"
        "Given value type: <class 'Namespace'>"
    )
    assert explain(told, []) == "batch_size=0 must be at least 1\n    or more"


def test_other_messages_stay_as_they_are():
    assert explain("Expected a <class 'int'>. Got value: abc", []) == "Expected a <class 'int'>. Got value: abc"


def test_options_of_a_class_include_dataclass_fields():
    assert {"pretrained", "training", "training.lr", "training.flow_draws"} <= set(
        options_of("soma_lightning.modules.PI05Module")
    )


def test_ctrl_c_and_termination_end_a_command_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def interrupted(argv: list[str]) -> int:
        raise KeyboardInterrupt

    def terminated(argv: list[str]) -> int:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)  # the signal arrives before this ends
        finally:
            print("cleaned up")
        return 0

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(demos, "main", interrupted)
    assert cli.main(["demos"]) == 130
    assert capsys.readouterr().err == "soma demos: interrupted\n"
    monkeypatch.setattr(demos, "main", terminated)
    with pytest.raises(SystemExit) as caught:
        cli.main(["demos"])
    assert caught.value.code == 143
    assert capsys.readouterr().out == "cleaned up\n"
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_terminated_fit_is_no_success(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def terminated(*arguments: object, **options: object) -> None:
        raise SIGTERMException

    monkeypatch.setattr(fit, "SomaCLI", terminated)
    assert cli.main(["fit"]) == 143
    assert "--ckpt_path last goes on" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments", [["--model.trainable", "some"], ["--trainer.max_step", "5"], ["--data.batch_size", "many"]]
)
def test_every_error_of_fit_names_the_command_that_lists_its_options(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as caught:
        cli.main(["fit", "--config", "pi05_somatable", *arguments])
    assert caught.value.code == 2
    assert capsys.readouterr().err.endswith("\nsoma fit --help lists every option.\n")


@pytest.mark.parametrize("ours", [True, False])
def test_frozen_parts_in_eval_mode_are_no_warning_but_other_modules_are(ours: bool):
    model = PolicyModule.__new__(PolicyModule) if ours else torch.nn.Module()
    command = SimpleNamespace(model=model, config=SimpleNamespace(fit=SimpleNamespace(ckpt_path=None)))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        SomaCLI.before_fit(command)
        warnings.warn("Found 9 module(s) in eval mode at the start of training.", stacklevel=1)
    assert len(seen) == (0 if ours else 1)


@pytest.mark.parametrize(
    ("settings", "rank", "expected"),
    [
        ({"accelerator": "auto", "devices": "auto"}, None, 0),
        ({"accelerator": "gpu", "devices": 2}, "1", 1),
        ({"accelerator": "cuda", "devices": [3, 1]}, "0", 3),
        ({"accelerator": "gpu", "devices": "1,2"}, "1", 2),
        ({"accelerator": "cpu", "devices": 1}, None, None),
    ],
)
def test_a_policy_is_built_on_the_device_that_this_process_trains_on(
    monkeypatch: pytest.MonkeyPatch, settings: dict, rank: str | None, expected: int | None
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr("lightning.fabric.accelerators.cuda.num_cuda_devices", lambda: 4)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("LOCAL_RANK", rank)
    assert fit.training_device(settings) == (None if expected is None else torch.device("cuda", expected))


def test_only_the_policy_is_built_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    elsewhere = torch.device("cpu", 0)  # another device than the default one, as far as names go
    places = {}

    def building(self: PolicyModule, *arguments: object, start=PolicyModule.__init__) -> None:
        places["model"] = torch.get_default_device()
        start(self, *arguments)

    def loggers(root: Path) -> list:
        places["trainer"] = torch.get_default_device()
        return []

    monkeypatch.setattr(fit, "training_device", lambda settings: elsewhere)
    monkeypatch.setattr(PolicyModule, "__init__", building)
    monkeypatch.setattr(fit, "default_loggers", loggers)
    monkeypatch.setattr(fit.SomaCLI, "_run_subcommand", lambda self, name: None)
    given = ["--config", "pi05_somatable_base", "--data.root", str(tmp_path), "--trainer.logger", "true"]
    assert cli.main(["fit", *given, "--trainer.default_root_dir", str(tmp_path)]) == 0
    assert places == {"model": elsewhere, "trainer": torch.device("cpu")}
    assert torch.get_default_device() == torch.device("cpu")
