"""`soma fit|validate|test|predict`: LightningCLI with our recipes, defaults and error messages."""

from __future__ import annotations

import contextlib
import difflib
import importlib
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, ProgressBar, TQDMProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from soma_lightning.cli.parser import ShortErrors, explain
from soma_lightning.data.statistics import RECIPES
from soma_lightning.imports import is_available
from soma_lightning.models.registry import load_extensions
from soma_lightning.models.tensor_files import load_failure
from soma_lightning.modules.base import PolicyModule
from soma_lightning.plots import learning_curve


def recipe_names() -> list[str]:
    """Names of the packaged recipes, and of the options that go over them (`options/<name>`)."""
    return sorted(path.relative_to(RECIPES).with_suffix("").as_posix() for path in RECIPES.rglob("*.yaml"))


def find_config(value: str) -> str:
    """A file as it is, or the packaged recipe of that name. Raises FileNotFoundError naming the nearest recipe."""
    if Path(value).is_file():
        return value
    packaged = RECIPES / f"{value.removesuffix('.yaml')}.yaml"
    if packaged.is_file():
        return str(packaged)
    near = difflib.get_close_matches(value, recipe_names(), 1)
    hint = f" Did you mean '{near[0]}'?" if near else ""
    raise FileNotFoundError(
        f"--config {value}: no such file, and no recipe of that name.{hint} Recipes: {', '.join(recipe_names())}"
    )


def resolve_configs(argv: list[str]) -> Iterator[str]:
    """The command line with the value of every `--config` replaced by a path."""
    expect_value = False
    for argument in argv:
        if expect_value:
            yield find_config(argument)
            expect_value = False
        elif argument.startswith("--config="):
            yield "--config=" + find_config(argument.removeprefix("--config="))
        else:
            expect_value = argument in ("--config", "-c")
            yield argument


#: Values of --ckpt_path that are no file but Lightning's own words.
CHECKPOINT_WORDS = ("last", "best", "hpc")


def check_checkpoint(path: Path) -> None:
    """Says before anything is built that a checkpoint is missing (FileNotFoundError) or damaged (ValueError)."""
    if path.is_dir():  # a sharded one, whose parts the strategy checks
        return
    if not path.is_file():
        raise FileNotFoundError(f"--ckpt_path {path}: there is no such file; use last, or a file that a fit wrote")
    try:
        torch.load(path, map_location="meta", weights_only=True)  # structure only, no values are read
    except Exception as error:  # pickle and zip have errors of every kind
        raise ValueError(
            f"--ckpt_path {path} is no readable checkpoint; it may be damaged or cut short ({load_failure(error)})"
        ) from error


class SomaParser(ShortErrors, LightningArgumentParser):
    """LightningCLI's parser with short errors."""

    def help_command(self, source: Any) -> str:
        # The prog of a subcommand has "[options]" in it, that of a nested class's parser no subcommand.
        return f"soma {sys.argv[1]} --help"


class LearningCurve(Callback):
    """Draws learning_curve.png beside metrics.csv when a fit ends."""

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for logger in trainer.loggers:
            if logger.log_dir is None:
                continue
            metrics = Path(logger.log_dir) / "metrics.csv"
            if trainer.is_global_zero and metrics.is_file():
                picture = learning_curve(metrics, metrics.with_name("learning_curve.png"))
                rank_zero_info(f"learning curve written to {picture}")


def default_loggers(root: Path) -> list[Logger]:
    """CSV always, TensorBoard when it is installed; both under `root`."""
    loggers: list[Logger] = [CSVLogger(root, name="logs")]
    if is_available("tensorboard"):
        loggers.append(TensorBoardLogger(root, name="tensorboard", version=loggers[0].version))
    return loggers


def training_device(settings: Mapping[str, Any]) -> torch.device | None:
    """The CUDA device that this process will train on, by the Trainer's `accelerator` and `devices`; else None."""
    if settings["accelerator"] not in ("auto", "gpu", "cuda") or not torch.cuda.is_available():
        return None
    chosen = CUDAAccelerator.parse_devices(settings["devices"] if settings["devices"] != "auto" else -1)
    rank = int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")))
    return torch.device("cuda", chosen[rank]) if chosen is not None and rank < len(chosen) else None


class SomaCLI(LightningCLI):
    """LightningCLI whose logs and checkpoints live under `default_root_dir`, so that `--ckpt_path last` finds them."""

    def instantiate_classes(self) -> None:
        """A policy is built where it will train: loaded or drawn there, not on the host first."""
        device = training_device(self._get(self.config, "trainer")) if self._builds_policy() else None
        with contextlib.nullcontext() if device is None else device:
            super().instantiate_classes()

    def _builds_policy(self) -> bool:
        """Whether the model is one of ours; others may expect the host."""
        module, _, name = self._get(self.config, "model")["class_path"].rpartition(".")
        found = getattr(importlib.import_module(module), name)
        return isinstance(found, type) and issubclass(found, PolicyModule)

    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        with torch.device("cpu"):  # only the model is built elsewhere
            return self._with_our_folders(kwargs)

    def _with_our_folders(self, kwargs: dict[str, Any]) -> Trainer:
        settings = self._get(self.config_init, "trainer")
        root = Path(settings["default_root_dir"] or "outputs")
        kwargs["default_root_dir"] = str(root)
        if settings["logger"] in (None, True):
            kwargs["logger"] = default_loggers(root)
        configured = list(settings["callbacks"] or [])
        wants_bar = settings["enable_progress_bar"] is not False and not settings["barebones"]
        if wants_bar and not any(isinstance(callback, ProgressBar) for callback in configured):
            # A log file gets a line now and then, a terminal every step.
            kwargs["callbacks"] = [*configured, TQDMProgressBar(refresh_rate=1 if sys.stderr.isatty() else 50)]
        trainer = super().instantiate_trainer(**kwargs)
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint) and callback.dirpath is None:
                callback.dirpath = str((root / "checkpoints").resolve())
        return trainer

    def _parse_ckpt_path(self) -> None:
        """Checks the file. Lightning would replace the model's arguments by those in the checkpoint; here the command
        line says them all, and the module refuses a checkpoint of other ones."""
        subcommand = self.config.get("subcommand")
        chosen = self.config[subcommand].get("ckpt_path") if subcommand else None
        if chosen is not None and chosen not in CHECKPOINT_WORDS:
            check_checkpoint(Path(chosen))

    def before_fit(self) -> None:
        if isinstance(self.model, PolicyModule):  # its frozen parts are in eval mode on purpose, and it checks them
            warnings.filterwarnings("ignore", message=r"Found \d+ module\(s\) in eval mode")
        if self.config.fit.ckpt_path != "last":
            return
        checkpoint = self.trainer.checkpoint_callback
        folder = Path(getattr(checkpoint, "dirpath", None) or self.trainer.default_root_dir)
        found = list(folder.glob("last*.ckpt"))
        if not found:
            raise FileNotFoundError(
                f"--ckpt_path last: there is no last.ckpt under {folder}; leave ckpt_path out to start a new run"
            )
        check_checkpoint(max(found, key=lambda path: path.stat().st_mtime))  # the one that Lightning takes


def main(argv: list[str]) -> int:
    """argv[0] is the Lightning subcommand. Returns the exit status: 2 for a wrong command line or bad input, 143 after
    SIGTERM."""
    typed = sys.argv
    try:
        # Lightning starts further processes with sys.argv, so the resolved command line must stand there.
        sys.argv = [typed[0], *resolve_configs(argv)]
        load_extensions()
        SomaCLI(
            LightningModule,
            LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            parser_class=SomaParser,
            parser_kwargs={"allow_abbrev": False},
            save_config_kwargs={"overwrite": True},
            trainer_defaults={"callbacks": [LearningCurve()], "strategy": "somaspeed"},
            auto_configure_optimizers=False,
        )
    except (ValueError, OSError, ImportError, MisconfigurationException) as error:
        print(f"error: {explain(str(error), ())}", file=sys.stderr)
        return 2
    except SIGTERMException:  # a SystemExit without a status, which a shell would take for success
        print(f"soma {argv[0]}: terminated; --ckpt_path last goes on from the last checkpoint", file=sys.stderr)
        return 143
    finally:
        sys.argv = typed
    return 0
