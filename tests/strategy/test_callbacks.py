"""Lightning's callbacks and tools that reach into optimizers and weights work as under the stock strategy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    EMAWeightAveraging,
    LearningRateMonitor,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner

from soma_lightning import FusedAdamW


class UnfreezeLater(BaseFinetuning):
    """Trains the head alone for one epoch, then adds the body as a new group."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.body)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.body, optimizer, lr=0.01)


@pytest.mark.parametrize(
    ("make_callback", "two_groups"),
    [
        (lambda: StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1), True),
        (lambda: EMAWeightAveraging(decay=0.9), True),
        (UnfreezeLater, False),
    ],
    ids=["stochastic weight averaging", "exponential moving average", "finetuning"],
)
def test_callbacks_that_change_weights_or_groups(
    net: Any, make_trainer: Any, difference: Callable[..., float], make_callback: Any, two_groups: bool
) -> None:
    models = []
    for strategy in ("auto", "somaspeed"):
        models.append(net(two_groups=two_groups, scheduler=False))
        callbacks = [make_callback()]
        trainer = make_trainer(strategy, callbacks=callbacks, max_epochs=3, max_steps=-1, gradient_clip_val=0.5)
        trainer.fit(models[-1])
    assert type(trainer.optimizers[0]) is FusedAdamW
    assert difference(*models) <= 1e-6


def test_the_learning_rate_finder_finds_the_same_rate(net: Any, make_trainer: Any) -> None:
    suggestions = []
    for strategy in ("auto", "somaspeed"):
        model = net(two_groups=False, scheduler=False)
        model.lr = 1e-3
        model.make_optimizer = lambda model=model: torch.optim.AdamW(model.head.parameters(), lr=model.lr)
        finder = Tuner(make_trainer(strategy, max_steps=-1, max_epochs=5)).lr_find(model, num_training=20)
        suggestions.append((finder.suggestion(), finder.results["loss"][-1]))
    assert suggestions[0] == pytest.approx(suggestions[1], rel=1e-5)


def test_the_learning_rate_monitor_names_the_fused_class(net: Any, make_trainer: Any, tmp_path: Any) -> None:
    monitor = LearningRateMonitor()
    trainer = make_trainer(
        "somaspeed", callbacks=[monitor], logger=CSVLogger(tmp_path), log_every_n_steps=1, profiler="simple"
    )
    trainer.fit(net())
    assert list(monitor.lrs) == ["lr-FusedAdamW/pg1", "lr-FusedAdamW/pg2"]
    assert [values[3] for values in monitor.lrs.values()] == pytest.approx([0.005, 0.01])


def test_a_module_without_optimizer_runs(net: Any, make_trainer: Any) -> None:
    model = net()
    model.configure_optimizers = lambda: None
    make_trainer("somaspeed", limit_train_batches=2, max_epochs=1, max_steps=-1).fit(model)
    assert len(model.losses) == 2
