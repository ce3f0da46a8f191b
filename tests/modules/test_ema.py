"""The average of the trained parameters."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from soma_lightning.modules.ema import TrainableEMA


def make_module() -> nn.Module:
    module = nn.ModuleDict({"frozen": nn.Linear(2, 2), "head": nn.Linear(2, 1)})
    module["frozen"].requires_grad_(False)
    return module


def run_steps(average: TrainableEMA, module: nn.Module, values: list[float]) -> None:
    trainer = SimpleNamespace(global_step=0)
    average.on_train_start(trainer, module)
    for value in values:
        with torch.no_grad():
            module["head"].weight.fill_(value)
        trainer.global_step += 1
        average.on_train_batch_end(trainer, module, None, None, 0)


def test_average_follows_the_recursion_and_leaves_frozen_parts_out():
    module = make_module()
    with torch.no_grad():
        module["head"].weight.fill_(0.0)
    average = TrainableEMA(0.9)
    run_steps(average, module, [1.0, 2.0])
    assert set(average.shadow) == {"head.weight", "head.bias"}
    torch.testing.assert_close(average.shadow["head.weight"], torch.full((1, 2), 0.9 * 0.1 + 0.1 * 2.0))


def test_accumulating_batches_do_not_move_it():
    module, trainer = make_module(), SimpleNamespace(global_step=0)
    average = TrainableEMA(0.5)
    average.on_train_start(trainer, module)
    before = average.shadow["head.weight"].clone()
    with torch.no_grad():
        module["head"].weight.add_(1.0)
    average.on_train_batch_end(trainer, module, None, None, 0)
    assert torch.equal(average.shadow["head.weight"], before)
    trainer.global_step = 1
    for _ in range(3):  # one step, then two batches of the next window
        average.on_train_batch_end(trainer, module, None, None, 0)
    torch.testing.assert_close(average.shadow["head.weight"], before + 0.5)


def test_swap_returns_the_raw_bits():
    module = make_module()
    average = TrainableEMA(0.9)
    run_steps(average, module, [0.3, 0.7])
    raw = module["head"].weight.detach().clone()
    average.on_validation_start(None, module)
    assert torch.equal(module["head"].weight, average.shadow["head.weight"])
    average.on_validation_end(None, module)
    assert torch.equal(module["head"].weight, raw)


def test_state_survives_a_checkpoint():
    module = make_module()
    average = TrainableEMA(0.9)
    run_steps(average, module, [0.3])
    other = TrainableEMA(0.9)
    other.load_state_dict(average.state_dict())
    other.on_train_start(SimpleNamespace(global_step=1), make_module())
    assert torch.equal(other.shadow["head.weight"], average.shadow["head.weight"])


def test_a_changed_trainable_set_is_named():
    average = TrainableEMA(0.9)
    average.load_state_dict({"decay": 0.9, "shadow": {"other.weight": torch.zeros(1)}})
    with pytest.raises(RuntimeError, match=r"head\.bias"):
        average.on_train_start(SimpleNamespace(global_step=0), make_module())


@pytest.mark.parametrize("decay", [0.0, 1.0, -0.1])
def test_impossible_decay(decay: float):
    with pytest.raises(ValueError, match="ema_decay"):
        TrainableEMA(decay)
