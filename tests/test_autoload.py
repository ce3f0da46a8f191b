"""The strategy names are registered with and without importing this package (one subprocess per environment)."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

QUIET = """
import logging, warnings
warnings.filterwarnings("ignore", category=UserWarning)
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
CPU = {"accelerator": "cpu", "devices": 1}
def trainer(**settings):
    import lightning
    return lightning.Trainer(logger=False, enable_checkpointing=False, enable_progress_bar=False, **CPU, **settings)
"""


def python(tmp_path: Path, code: str, *, entry_point: str | None, **variables: str) -> str:
    """Runs `code` in a new interpreter; `entry_point` is what an installed `torch.backends` entry would name."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PL_", "LT_", "SOMA_", "TORCH_DEVICE"))}
    path = [str(tmp_path), str(ROOT), str(ROOT / "kernels")]
    if entry_point is not None:
        info = tmp_path / "soma_hook_test-0.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: soma-hook-test\nVersion: 0\n")
        (info / "entry_points.txt").write_text(f"[torch.backends]\nsoma_hook_test = {entry_point}\n")
    script = tmp_path / "script.py"
    script.write_text(QUIET + textwrap.dedent(code))
    result = subprocess.run(
        [sys.executable, str(script)],
        env={**environment, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1", **variables},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout + result.stderr


HOOK = "soma_lightning._autoload:install"

CONFIG = """
    import json, sys
    from lightning.pytorch.cli import LightningCLI
    from lightning.pytorch.demos.boring_classes import BoringModel

    def cli(*arguments, **settings):
        defaults = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, **CPU}
        return LightningCLI(BoringModel, args=list(arguments), run=False, save_config_callback=None,
                            trainer_defaults=defaults, **settings)
"""


def test_the_hook_registers_without_any_import_of_ours(tmp_path: Path) -> None:
    code = """
    import torch, sys
    assert "lightning" not in sys.modules
    import lightning
    assert "soma_lightning.strategy" not in sys.modules, "only the names are registered"
    from lightning.fabric import Fabric
    assert type(trainer(strategy="somaspeed").strategy).__name__ == "SomaSpeedStrategy"
    assert trainer(strategy="somaspeed_hsdp").strategy.engine.options.layout == "hsdp"
    assert trainer(strategy="somaspeed_replicate").strategy.engine.options.layout == "replicate"
    assert type(Fabric(strategy="somaspeed", **CPU).strategy).__name__ == "FabricSomaSpeedStrategy"

    import os
    os.environ["PL_TRAINER_STRATEGY"] = "somaspeed_hsdp"
    assert trainer().strategy.engine.options.layout == "hsdp"
    del os.environ["PL_TRAINER_STRATEGY"]
    os.environ.update(LT_CLI_USED="1", LT_STRATEGY="somaspeed", LT_ACCELERATOR="cpu", LT_DEVICES="1")
    assert type(Fabric().strategy).__name__ == "FabricSomaSpeedStrategy"

    from lightning.fabric.cli import _get_supported_strategies
    assert {"somaspeed", "somaspeed_hsdp", "somaspeed_replicate"} <= set(_get_supported_strategies())

    import pytorch_lightning, lightning_fabric
    for registry, package in (
        (pytorch_lightning.strategies.StrategyRegistry, "lightning.pytorch instead of pytorch_lightning"),
        (lightning_fabric.strategies.STRATEGY_REGISTRY, "lightning.fabric instead of lightning_fabric"),
    ):
        try:
            registry.get("somaspeed")
        except ImportError as error:
            assert f"import from {package} everywhere" in str(error), error
        else:
            raise AssertionError("a foreign registry must refuse")

    finders = [finder for finder in sys.meta_path if type(finder).__name__ == "_RegistryFinder"]
    import soma_lightning
    from soma_lightning._autoload import install
    install()
    assert [f for f in sys.meta_path if type(f).__name__ == "_RegistryFinder"] == finders and len(finders) == 1
    assert type(lightning.pytorch.strategies.__loader__).__name__ == "SourceFileLoader"
    print("done")
    """
    assert "done" in python(tmp_path, code, entry_point=HOOK)


def test_without_the_hook_an_import_registers_and_a_class_path_needs_none(tmp_path: Path) -> None:
    (tmp_path / "by_class.yaml").write_text(
        "trainer:\n  strategy:\n    class_path: soma_lightning.SomaSpeedStrategy\n"
        "    init_args:\n      layout: {shard: 1}\n      master_weights: true\n      norm_type: .inf\n"
    )
    (tmp_path / "by_name.yaml").write_text("trainer:\n  strategy: somaspeed\n")
    code = (
        CONFIG
        + """
    import contextlib, io, lightning
    try:
        trainer(strategy="somaspeed")
    except ValueError as error:
        assert "invalid strategy name" in str(error)
    else:
        raise AssertionError("the name must be unknown here")

    options = cli("--config=by_class.yaml").trainer.strategy.engine.options
    assert (options.master_weights, options.norm_type, options.nonfinite) == (True, float("inf"), "skip")
    strategy = "--trainer.strategy=soma_lightning.SomaSpeedStrategy"
    assert cli(strategy, "--trainer.strategy.layout=hsdp").trainer.strategy.engine.options.layout == "hsdp"

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        try:
            cli("--config=by_class.yaml", "--print_config")
        except SystemExit:
            pass
    assert "class_path: soma_lightning" in printed.getvalue()
    assert "max_consecutive_skips: 10" in printed.getvalue()
    open("printed.yaml", "w").write(printed.getvalue())
    assert cli("--config=printed.yaml").trainer.strategy.engine.options == options

    for arguments, words in (
        (["--trainer.strategy.nonfinite=sometimes"], ("nonfinite", "sometimes")),
        (["--trainer.strategy.lay_out=hsdp"], ("lay_out",)),
    ):
        errors = io.StringIO()
        with contextlib.redirect_stderr(errors):
            try:
                cli(strategy, *arguments)
            except SystemExit:
                pass
        assert all(word in errors.getvalue() for word in words), errors.getvalue()

    import soma_lightning  # after lightning
    assert isinstance(cli("--config=by_name.yaml").trainer.strategy, soma_lightning.SomaSpeedStrategy)
    assert isinstance(trainer(strategy="somaspeed").strategy, soma_lightning.SomaSpeedStrategy)
    print("done")
    """
    )
    variables = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    assert "done" in python(tmp_path, code, entry_point=HOOK, **variables)


def test_our_own_switch_turns_off_the_hook_but_not_an_import(tmp_path: Path) -> None:
    code = """
    import torch, sys
    assert not any(name.startswith("soma_lightning") for name in sys.modules)
    assert not any(type(finder).__name__ == "_RegistryFinder" for finder in sys.meta_path)
    import soma_lightning  # before lightning
    assert isinstance(trainer(strategy="somaspeed").strategy, soma_lightning.SomaSpeedStrategy)
    print("done")
    """
    assert "done" in python(tmp_path, code, entry_point=HOOK, SOMA_LIGHTNING_AUTOLOAD="0")


@pytest.mark.parametrize("damage", ["meta_path", "registry"])
def test_a_damaged_hook_breaks_neither_torch_nor_lightning(tmp_path: Path, damage: str) -> None:
    (tmp_path / "damaged.py").write_text(
        textwrap.dedent(
            """
            import sys
            from soma_lightning import _autoload

            def boom(*arguments, **settings):
                raise RuntimeError("damaged")

            def install():
                sys.meta_path[:] = [f for f in sys.meta_path if not isinstance(f, _autoload._RegistryFinder)]
                setattr(_autoload, DAMAGE, boom)
                _autoload.install()
            """
        ).replace("DAMAGE", {"meta_path": "'_RegistryFinder'", "registry": "'_register'"}[damage])
    )
    code = """
    import torch
    assert torch.ones(2).sum().item() == 2
    DAMAGED
    print("done")
    """
    lightning = "import lightning; assert type(trainer(strategy='auto').strategy).__name__ == 'SingleDeviceStrategy'"
    # One interpreter loads all of lightning: a registry that no longer takes names must not stop its import.
    code = code.replace("DAMAGED", lightning if damage == "registry" else "")
    output = python(tmp_path, code, entry_point="damaged:install")
    assert "done" in output
    assert "soma_lightning could not register its strategies" in output
