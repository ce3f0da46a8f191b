"""Checkpoints are plain Lightning files: they resume exactly and move between this strategy and the stock one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from soma_lightning import SomaSpeedStrategy

Difference = Callable[..., float]


#: A whole epoch, saved where ModelCheckpoint saves: elsewhere Lightning itself repeats batches after a resume.
SAVED, TOTAL = 12, 18


def saved_after_one_epoch(net: Any, make_trainer: Any, path: Path, strategy: Any, **settings: Any) -> None:
    class Save(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == SAVED:
                trainer.save_checkpoint(path)

    make_trainer(strategy, max_steps=SAVED, gradient_clip_val=0.5, callbacks=[Save()], **settings).fit(net())


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-mixed"])
def test_resuming_continues_exactly(
    net: Any, make_trainer: Any, difference: Difference, tmp_path: Path, precision: str
) -> None:
    saved_after_one_epoch(net, make_trainer, tmp_path / "a.ckpt", "somaspeed", precision=precision)
    through, resumed = net(), net()
    make_trainer("somaspeed", gradient_clip_val=0.5, precision=precision, max_steps=TOTAL).fit(through)
    trainer = make_trainer("somaspeed", gradient_clip_val=0.5, precision=precision, max_steps=TOTAL)
    trainer.fit(resumed, ckpt_path=tmp_path / "a.ckpt")
    assert trainer.global_step == TOTAL
    assert len(resumed.losses) == 6
    assert difference(through, resumed) == 0.0


@pytest.mark.parametrize(("source", "target"), [("auto", "somaspeed"), ("somaspeed", "auto")])
def test_checkpoints_move_between_strategies(
    net: Any, make_trainer: Any, difference: Difference, tmp_path: Path, source: str, target: str
) -> None:
    saved_after_one_epoch(net, make_trainer, tmp_path / "a.ckpt", source)
    through, moved = net(), net()
    make_trainer("auto", gradient_clip_val=0.5, max_steps=TOTAL).fit(through)
    make_trainer(target, gradient_clip_val=0.5, max_steps=TOTAL).fit(moved, ckpt_path=tmp_path / "a.ckpt")
    assert difference(through, moved) <= 1e-6


def test_the_file_has_the_stock_layout(net: Any, make_trainer: Any, tmp_path: Path) -> None:
    files = []
    for name in ("auto", "somaspeed"):
        saved_after_one_epoch(net, make_trainer, tmp_path / f"{name}.ckpt", name)
        files.append(torch.load(tmp_path / f"{name}.ckpt", weights_only=True))
    assert files[0].keys() == files[1].keys()
    stock, ours = (file["optimizer_states"][0] for file in files)
    assert stock["param_groups"] == ours["param_groups"]
    assert {i: {k: (v.dtype, v.shape) for k, v in s.items()} for i, s in stock["state"].items()} == {
        i: {k: (v.dtype, v.shape) for k, v in s.items()} for i, s in ours["state"].items()
    }


def test_model_checkpoint_and_last_work(net: Any, make_trainer: Any, difference: Difference, tmp_path: Path) -> None:
    def callback() -> ModelCheckpoint:
        return ModelCheckpoint(tmp_path / "ckpt", every_n_train_steps=6, save_last=True, save_top_k=-1)

    make_trainer("somaspeed", enable_checkpointing=True, callbacks=[callback()], max_steps=SAVED).fit(net())
    assert len(list((tmp_path / "ckpt").glob("*step=*.ckpt"))) == 2
    through, resumed = net(), net()
    make_trainer("somaspeed", max_steps=TOTAL).fit(through)
    resuming = make_trainer("somaspeed", enable_checkpointing=True, callbacks=[callback()], max_steps=TOTAL)
    resuming.fit(resumed, ckpt_path="last")
    assert len(resumed.losses) == 6
    assert difference(through, resumed) == 0.0


def test_weights_only_of_the_strategy_is_the_default_of_fit(net: Any, make_trainer: Any, tmp_path: Path) -> None:
    class Remembering(net):  # type: ignore[misc, valid-type]
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["where"] = Path("anywhere")  # refused by weights_only=True

    path = tmp_path / "a.ckpt"
    saved_after_one_epoch(Remembering, make_trainer, path, "somaspeed")
    with pytest.raises(Exception, match="[Ww]eights.only"):
        make_trainer("somaspeed").fit(net(), ckpt_path=path)
    model = net()
    make_trainer(SomaSpeedStrategy(checkpoint_weights_only=False), max_steps=TOTAL).fit(model, ckpt_path=path)
    assert len(model.losses) == 6
    with pytest.raises(Exception, match="[Ww]eights.only"):
        make_trainer(SomaSpeedStrategy(checkpoint_weights_only=False)).fit(net(), ckpt_path=path, weights_only=True)
