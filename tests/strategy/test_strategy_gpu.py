"""One CUDA device under the Trainer and Fabric: device, parity, non-finite policy without waiting for the device."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import lightning as L  # noqa: N812 (Lightning's own convention)
import pytest
import torch
from lightning.pytorch.callbacks import Callback

from soma_lightning import FusedAdamW, SomaSpeedStrategy

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CUDA = {"accelerator": "cuda", "devices": [0]}


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_ten_steps_equal_the_stock_strategy(
    net: Any, make_trainer: Any, difference: Callable[..., float], precision: str
) -> None:
    models = []
    for strategy in ("auto", "somaspeed"):
        models.append(net())
        trainer = make_trainer(strategy, precision=precision, gradient_clip_val=0.5, **CUDA)
        trainer.fit(models[-1])
    assert trainer.strategy.root_device == torch.device("cuda", 0)
    assert type(trainer.optimizers[0]) is FusedAdamW
    assert trainer.optimizers[0].path_description == "Triton kernels"
    assert difference(*models) <= 1e-6


def test_too_many_skips_stop_the_run_a_little_later(net: Any, make_trainer: Any) -> None:
    class Poison(Callback):
        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            module.head.bias.grad.fill_(math.nan)

    trainer = make_trainer(SomaSpeedStrategy(max_consecutive_skips=3), callbacks=[Poison()], max_steps=200, **CUDA)
    with pytest.raises(RuntimeError, match="steps in a row were skipped .* the gradient of 'head.bias' holds a NaN"):
        trainer.fit(net())


def test_raise_stops_at_once(net: Any, make_trainer: Any) -> None:
    class Poison(Callback):
        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            if trainer.global_step == 2:
                module.head.bias.grad.fill_(math.inf)

    trainer = make_trainer(SomaSpeedStrategy(nonfinite="raise"), callbacks=[Poison()], **CUDA)
    with pytest.raises(RuntimeError, match="non-finite gradients at global_step 2: the gradient of 'head.bias'"):
        trainer.fit(net())


def test_fabric(net: Any, difference: Callable[..., float]) -> None:
    models = []
    for strategy in ("auto", "somaspeed"):
        fabric = L.Fabric(strategy=strategy, **CUDA)
        model = net()
        wrapped, optimizer = fabric.setup(model, model.make_optimizer())
        for step in range(10):
            optimizer.zero_grad()
            batch = torch.randn(8, 6, generator=torch.Generator().manual_seed(step)).to(fabric.device)
            fabric.backward(wrapped(batch).pow(2).sum())
            norm = fabric.clip_gradients(wrapped, optimizer, max_norm=0.5)
            optimizer.step()
        assert norm.device.type == "cuda"
        models.append(model)
    assert difference(*models) <= 1e-6
