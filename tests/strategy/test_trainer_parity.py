"""Ten optimizer steps under "somaspeed" equal ten under "auto" with torch's AdamW and torch's clipping."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from soma_lightning import FusedAdamW

CLIP: dict[str, dict[str, Any]] = {
    "no clipping": {},
    "norm": {"gradient_clip_val": 0.5},
    "value": {"gradient_clip_val": 0.2, "gradient_clip_algorithm": "value"},
}


@pytest.mark.parametrize("scheduler", [False, True], ids=["constant", "scheduler"])
@pytest.mark.parametrize("two_groups", [False, True], ids=["one group", "two groups"])
@pytest.mark.parametrize("frozen", [False, True], ids=["all train", "frozen prefix"])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("clip", CLIP)
def test_ten_steps_equal_the_stock_strategy(
    net: Any,
    make_trainer: Any,
    difference: Callable[..., float],
    clip: str,
    accumulate: int,
    frozen: bool,
    two_groups: bool,
    scheduler: bool,
) -> None:
    models = {}
    for strategy in ("auto", "somaspeed"):
        models[strategy] = net(frozen=frozen, two_groups=two_groups, scheduler=scheduler)
        trainer = make_trainer(strategy, accumulate_grad_batches=accumulate, **CLIP[clip])
        trainer.fit(models[strategy])
        assert trainer.global_step == 10
    assert type(trainer.optimizers[0]) is FusedAdamW
    assert difference(models["auto"], models["somaspeed"]) <= (1e-6 if clip == "norm" else 0.0)
    assert models["somaspeed"].losses == pytest.approx(models["auto"].losses, rel=1e-5)
    untouched = net(frozen=frozen)
    assert difference(untouched.body, models["somaspeed"].body) > 0.01
    assert (difference(untouched.prefix, models["somaspeed"].prefix) == 0.0) is frozen


def test_a_schedule_of_accumulation_is_followed(net: Any, make_trainer: Any, difference: Callable[..., float]) -> None:
    models = []
    for strategy in ("auto", "somaspeed"):
        models.append(net())
        callback = GradientAccumulationScheduler({0: 1, 1: 5})  # 12 batches an epoch: the last window is short
        make_trainer(strategy, callbacks=[callback], max_steps=18, gradient_clip_val=0.5).fit(models[-1])
    assert difference(*models) <= 1e-6


@pytest.mark.parametrize("precision", ["bf16-mixed", "64-true"])
def test_other_precisions_equal_the_stock_strategy(
    net: Any, make_trainer: Any, difference: Callable[..., float], precision: str
) -> None:
    models = []
    for strategy in ("auto", "somaspeed"):
        models.append(net())
        make_trainer(strategy, precision=precision, gradient_clip_val=0.5).fit(models[-1])
    assert difference(*models) <= 1e-6


def test_bf16_true_equals_the_stock_strategy_without_masters(
    net: Any, make_trainer: Any, difference: Callable[..., float]
) -> None:
    from soma_lightning import SomaSpeedStrategy

    class Foreach(net):  # type: ignore[misc, valid-type]
        def make_optimizer(self) -> torch.optim.Optimizer:
            optimizer = super().make_optimizer()
            for group in optimizer.param_groups:
                group["foreach"] = True  # torch's two implementations differ in the last bit of bf16
            return optimizer

    models = []
    for strategy in ("auto", SomaSpeedStrategy(master_weights=False)):
        models.append(Foreach())
        make_trainer(strategy, precision="bf16-true").fit(models[-1])
    assert models[1].body.weight.dtype == torch.bfloat16
    assert difference(*models) == 0.0


def test_bf16_true_has_masters_by_default(net: Any, make_trainer: Any) -> None:
    trainer = make_trainer("somaspeed", precision="bf16-true", gradient_clip_val=0.5)
    model = net()
    trainer.fit(model)
    state = trainer.optimizers[0].state[model.body.weight]
    assert state["soma_master"].dtype == state["exp_avg"].dtype == torch.float32
    assert torch.equal(state["soma_master"].bfloat16(), model.body.weight)
