"""`soma cache`: computes the frozen features of every frame of a config's data ahead of training, into a folder."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningArgumentParser
from torch.utils.data import DataLoader

from soma_lightning.cli.fit import SomaCLI, SomaParser, resolve_configs
from soma_lightning.cli.parser import explain
from soma_lightning.data.datamodule import LeRobotDataModule
from soma_lightning.data.feature_cache import MEMORIES
from soma_lightning.locks import sole_writer
from soma_lightning.models.registry import load_extensions
from soma_lightning.modules.base import PolicyModule


class CacheFiller(LightningModule):
    """Runs the frozen backbone of a policy module on each batch of the predict loop, and keeps what comes out."""

    def __init__(self, module: PolicyModule) -> None:
        super().__init__()
        self.module = module

    def setup(self, stage: str) -> None:
        self.module.setup(stage)

    def on_predict_start(self) -> None:
        self.module.check_precision()

    def predict_step(self, batch: Mapping[str, Any], batch_idx: int, dataloader_idx: int = 0) -> None:
        self.module.fill_features(batch)

    def on_predict_epoch_end(self) -> None:
        self.module.fill_features(None)


class EveryFrame(LightningDataModule):
    """The frames of both splits of a data module, each once; everything else is the data module's own."""

    def __init__(self, data: LeRobotDataModule) -> None:
        super().__init__()
        self.data = data

    def setup(self, stage: str) -> None:
        self.data.setup(stage)

    def predict_dataloader(self) -> list[DataLoader[Any]]:
        return self.data.every_frame_dataloaders()

    def __getattr__(self, name: str) -> Any:  # what a policy's module asks of its data
        return getattr(self.__dict__.get("data"), name)


class CacheParser(SomaParser):
    """The parser of this command."""

    def help_command(self, source: Any) -> str:
        return "soma cache --help"


class CacheCLI(SomaCLI):
    """The classes of a `soma fit` config, with the data module's features going to `--out`."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument("--out", type=str, required=True, help="folder of the features, new or begun")

    def before_instantiate_classes(self) -> None:
        data = self.config["data"]
        if self.config["out"] in MEMORIES:
            raise ValueError(
                f"--out {self.config['out']}: features in memory are gone when this command ends; name a folder, or "
                f"train with --data.feature_cache {self.config['out']}"
            )
        chosen = data["init_args"].get("feature_cache")
        if chosen not in (None, self.config["out"]):
            raise ValueError(
                f"data.feature_cache={chosen!r} and --out {self.config['out']!r} differ; leave feature_cache out"
            )
        data["init_args"]["feature_cache"] = self.config["out"]


def parse() -> CacheCLI:
    """Builds what the command line says. Raises ValueError for another kind of module or data module."""
    cli = CacheCLI(
        LightningModule,
        LightningDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        parser_class=CacheParser,
        parser_kwargs={"allow_abbrev": False},
        save_config_callback=None,
        trainer_defaults={"strategy": "somaspeed", "logger": False},
        auto_configure_optimizers=False,
        run=False,
    )
    if not isinstance(cli.model, PolicyModule) or not isinstance(cli.datamodule, LeRobotDataModule):
        raise ValueError(
            f"soma cache needs a policy module and a LeRobotDataModule, got {type(cli.model).__name__} and "
            f"{type(cli.datamodule).__name__}"
        )
    return cli


def fill(cli: CacheCLI) -> None:
    """Runs the backbone over every frame that the folder lacks."""
    module, data = cast(PolicyModule, cli.model), cast(LeRobotDataModule, cli.datamodule)
    out = cli.config["out"]
    busy = f"another soma cache fills {out}; wait for it, or choose another --out"  # both would compute every frame
    with sole_writer(Path(out), busy) if cli.trainer.is_global_zero else nullcontext():
        cli.trainer.predict(CacheFiller(module), datamodule=EveryFrame(data), return_predictions=False)
    if cli.trainer.is_global_zero and data.features is not None:
        facts = data.features.report_facts()
        print(f"{facts['where']}: {facts['stored_samples']:,} of {facts['expected_samples']:,} samples")


def main(argv: list[str]) -> int:
    """Returns the exit status: 2 for a wrong command line or bad input."""
    typed = sys.argv
    try:
        resolved = list(resolve_configs(argv))
        sys.argv = [typed[0], *resolved]
        load_extensions()
        cli = parse()
        sys.argv = [typed[0], "cache", *resolved]  # what Lightning starts further processes with
        fill(cli)
    except (ValueError, OSError, ImportError, MisconfigurationException) as error:
        print(f"error: {explain(str(error), ())}", file=sys.stderr)
        return 2
    finally:
        sys.argv = typed
    return 0
