"""The run report tells the truth at the start of training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812 (Lightning's own convention)
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.loggers import CSVLogger

from soma_kernels.runtime import is_interpreter
from soma_lightning import FusedAdamW, SomaSpeedStrategy, __version__


def written(path: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((path / "run_report.json").read_text())
    return report


def test_the_facts(net: Any, make_trainer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        make_trainer("somaspeed", max_steps=1, gradient_clip_val=0.5).fit(net())
    assert written(tmp_path) == {
        "trainable": {
            "names": ["body.weight", "body.bias", "head.weight", "head.bias"],
            "tensors": 4,
            "parameters": 99,
            "dtypes": {"float32": 99},
        },
        "frozen": {
            "names": ["prefix.weight", "prefix.bias"],
            "tensors": 2,
            "parameters": 56,
            "dtypes": {"float32": 56},
        },
        "unoptimized": [],
        "optimizers": [
            {
                "name": "FusedAdamW",
                "path": "FusedAdamW: clipping and update in one step, by plain torch (no kernels for cpu)",
                "groups": [
                    {"lr": 0.01, "weight_decay": 0.0, "parameters": 27},
                    {"lr": 0.02, "weight_decay": 0.01, "parameters": 72},
                ],
            }
        ],
        "clipping": "by norm 0.5 (norm type 2.0)",
        "precision": "32-true",
        "attention": "reference (torch)",
        "layout": {"pp": 1, "dp_replicate": 1, "dp_shard": 1, "tp": 1},
        "device": "cpu",
        "versions": written(tmp_path)["versions"],
        "sharding": {},
        "model": {},
        "data": {},
    }
    versions = written(tmp_path)["versions"]
    assert versions["torch"] == torch.__version__
    assert versions["lightning"] == L.__version__
    assert versions["soma_lightning"] == __version__
    text = caplog.text
    assert "trainable:  99 parameters in 4 tensors (float32 99) body.weight, body.bias, head.weight, ..." in text
    assert text.count("SomaSpeed run report") == 1
    assert "prefix.weight, prefix.bias" in text


class FreezeBody(BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.body)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        return None


def test_freezing_by_a_callback_and_at_the_last_moment_counts(net: Any, make_trainer: Any, tmp_path: Path) -> None:
    class Late(net):  # type: ignore[misc, valid-type]
        def on_train_start(self) -> None:
            self.head.bias.requires_grad_(False)

    make_trainer("somaspeed", max_steps=1, callbacks=[FreezeBody()]).fit(Late())
    assert written(tmp_path)["trainable"]["names"] == ["head.weight"]
    assert written(tmp_path)["frozen"]["tensors"] == 5


@pytest.mark.parametrize(
    ("implementation", "path"), [("triton", "Triton kernels"), ("reference", "plain torch (asked for)")]
)
def test_the_report_says_how_the_optimizer_steps(
    net: Any, make_trainer: Any, tmp_path: Path, implementation: str, path: str
) -> None:
    if implementation == "triton":
        pytest.importorskip("triton")
        if not is_interpreter():
            pytest.skip("kernels run on the CPU only with TRITON_INTERPRET=1")

    class Chosen(net):  # type: ignore[misc, valid-type]
        def make_optimizer(self) -> torch.optim.Optimizer:
            return FusedAdamW(self.head.parameters(), master_weights=True, implementation=implementation)

    make_trainer("somaspeed", max_steps=1).fit(Chosen())
    assert written(tmp_path)["optimizers"][0]["path"] == (f"FusedAdamW: clipping and update in one step, by {path}")


def test_the_report_says_that_there_are_no_masters_and_which_limits(
    net: Any, make_trainer: Any, tmp_path: Path
) -> None:
    class Low(net):  # type: ignore[misc, valid-type]
        def make_optimizer(self) -> torch.optim.Optimizer:
            return FusedAdamW([{"params": list(self.head.parameters()), "max_norm": 0.5}])

    trainer = make_trainer("somaspeed", max_steps=1, precision="bf16-true", gradient_clip_val=-1.0)
    trainer.fit(Low())
    facts = written(tmp_path)
    assert facts["optimizers"][0]["path"].endswith(", no fp32 masters for bf16/fp16 parameters")
    assert facts["optimizers"][0]["groups"][0]["max_norm"] == 0.5
    assert facts["clipping"] == "none"


def test_trainable_parameters_without_optimizer_are_named(
    net: Any, make_trainer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class HeadOnly(net):  # type: ignore[misc, valid-type]
        def make_optimizer(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.head.parameters(), lr=0.1)

    with caplog.at_level("INFO"):
        make_trainer("somaspeed", max_steps=1).fit(HeadOnly())
    assert written(tmp_path)["unoptimized"] == ["body.weight", "body.bias"]
    assert written(tmp_path)["optimizers"][0]["path"] == "torch (SGD): SGD is not torch.optim.AdamW"
    assert "in no optimizer: body.weight, body.bias" in caplog.text


def test_module_and_data_module_add_their_facts(
    net: Any, make_trainer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {f"setting_{number}": number for number in range(20)}

    class Facts(net):  # type: ignore[misc, valid-type]
        def report_facts(self) -> dict[str, Any]:
            return {"chunk length": 50, "executed steps": 10, "training": settings}

    class Data(L.LightningDataModule):
        def train_dataloader(self) -> Any:
            return net().loader()

        def report_facts(self) -> dict[str, Any]:
            return {"statistics": "computed", "episodes": list(range(200))}

    with caplog.at_level("INFO"):
        make_trainer("somaspeed", max_steps=1).fit(Facts(), datamodule=Data())
    assert written(tmp_path)["model"] == {"chunk length": 50, "executed steps": 10, "training": settings}
    assert written(tmp_path)["data"]["episodes"] == list(range(200))
    assert "executed steps: 10" in caplog.text
    assert all(f"setting_{number} {number}" in caplog.text for number in range(20))  # settings are never cut
    (episodes,) = [line for line in caplog.text.splitlines() if line.lstrip().startswith("episodes:")]
    assert episodes.endswith("...")
    assert len(episodes) < 120


def test_facts_that_json_cannot_hold_are_named(net: Any, make_trainer: Any) -> None:
    model = net()
    model.report_facts = lambda: {"norm": torch.tensor(1.0)}
    with pytest.raises(TypeError, match=r"Net.report_facts\(\) must return JSON values: .*Tensor"):
        make_trainer("somaspeed").fit(model)


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({}, "none"),
        ({"gradient_clip_val": 0.5, "gradient_clip_algorithm": "value"}, "by value 0.5"),
        ({"gradient_clip_val": 1}, "by norm 1 (norm type 2.0)"),
    ],
)
def test_the_clipping_rule(net: Any, make_trainer: Any, tmp_path: Path, settings: dict[str, Any], rule: str) -> None:
    make_trainer("somaspeed", max_steps=1, **settings).fit(net())
    assert written(tmp_path)["clipping"] == rule


def test_an_overridden_clipping_hook_is_said(net: Any, make_trainer: Any, tmp_path: Path) -> None:
    class Own(net):  # type: ignore[misc, valid-type]
        def configure_gradient_clipping(self, optimizer: Any, **settings: Any) -> None:
            self.clip_gradients(optimizer, gradient_clip_val=0.1)

    make_trainer("somaspeed", max_steps=1).fit(Own())
    assert written(tmp_path)["clipping"] == "by the module's configure_gradient_clipping"


def test_masters_are_said(net: Any, make_trainer: Any, tmp_path: Path) -> None:
    make_trainer("somaspeed", max_steps=1, precision="bf16-true").fit(net())
    assert written(tmp_path)["optimizers"][0]["path"].endswith("fp32 masters for bf16/fp16 parameters")
    assert written(tmp_path)["trainable"]["dtypes"] == {"bfloat16": 99}


def test_the_file_goes_beside_the_logs(net: Any, make_trainer: Any, tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, name="run", version=3)
    make_trainer("somaspeed", max_steps=1, logger=logger).fit(net())
    assert written(tmp_path / "run" / "version_3")["device"] == "cpu"


@pytest.mark.parametrize("kind", [str, Path])
def test_the_file_goes_where_it_was_asked_for(net: Any, make_trainer: Any, tmp_path: Path, kind: Any) -> None:
    make_trainer(SomaSpeedStrategy(report=kind(tmp_path / "x" / "own.json")), max_steps=1).fit(net())
    assert json.loads((tmp_path / "x" / "own.json").read_text())["precision"] == "32-true"
    assert not (tmp_path / "run_report.json").exists()


@pytest.mark.parametrize(
    ("strategy", "settings", "printed"),
    [
        (SomaSpeedStrategy(report=False), {}, 0),
        ("somaspeed", {"barebones": True}, 0),
        ("somaspeed", {"fast_dev_run": 1}, 1),
    ],
    ids=["report=False", "barebones", "fast_dev_run"],
)
def test_nothing_is_written_when_nothing_should_be(
    net: Any,
    make_trainer: Any,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    strategy: Any,
    settings: dict[str, Any],
    printed: int,
) -> None:
    if "barebones" in settings:
        settings = {**settings, "logger": None, "limit_val_batches": None}
    with caplog.at_level("INFO"):
        make_trainer(strategy, max_steps=1, **settings).fit(net())
    assert caplog.text.count("SomaSpeed run report") == printed
    assert not list(tmp_path.glob("*.json"))
