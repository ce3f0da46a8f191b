"""A torch.optim.AdamW that becomes a FusedAdamW in place, with everything that holds on to it."""

from __future__ import annotations

import warnings
from types import MethodType
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW
from torch.optim.lr_scheduler import StepLR

from soma_lightning import FusedAdamW
from soma_lightning.optim.adoption import adopt, why_not_adopted


def parameter() -> nn.Parameter:
    return nn.Parameter(torch.tensor([1.0, 2.0]))


def test_the_object_stays_the_same_and_so_does_the_training() -> None:
    ours, theirs = parameter(), parameter()
    optimizer, stock = AdamW([ours], lr=0.1), AdamW([theirs], lr=0.1)
    for step in range(6):
        if step == 3:
            assert adopt(optimizer) is optimizer
        ours.grad = theirs.grad = torch.tensor([0.5, step - 2.0])
        optimizer.step()
        stock.step()
    assert type(optimizer) is FusedAdamW
    assert torch.equal(ours, theirs)
    assert optimizer.last_grad_norm.item() == pytest.approx(torch.tensor([0.5, 3.0]).norm().item())


def test_the_new_step_runs_under_a_scheduler_that_patched_the_old_one() -> None:
    param = parameter()
    optimizer = AdamW([param], lr=0.1)
    scheduler = StepLR(optimizer, 1)
    adopt(optimizer)
    param.grad = torch.ones(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.clip(max_norm=0.1)
        optimizer.step()
        scheduler.step()
    assert optimizer.pending_clip is None, "the class's own step ran"
    assert optimizer.skipped_steps.item() == 0
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


def test_a_scheduler_still_notices_that_it_came_first() -> None:
    optimizer = AdamW([parameter()])
    scheduler = StepLR(optimizer, 1)
    adopt(optimizer)
    with pytest.warns(UserWarning, match="lr_scheduler.step"):
        scheduler.step()


def test_step_hooks_survive() -> None:
    param = parameter()
    optimizer = AdamW([param])
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    adopt(optimizer)
    param.grad = torch.ones(2)
    optimizer.step()
    assert calls == ["before", "after"]


def test_torchs_fused_flag_no_longer_keeps_the_scaler_away() -> None:
    optimizer = AdamW([parameter()], fused=True)
    assert optimizer._step_supports_amp_scaling
    adopt(optimizer)
    assert not hasattr(optimizer, "_step_supports_amp_scaling")


@pytest.mark.parametrize("setting", ["capturable", "fused", "foreach"])
def test_settings_that_only_choose_an_implementation_are_adopted(setting: str) -> None:
    ours, theirs = parameter(), parameter()
    optimizer, stock = AdamW([ours], **{setting: True}), AdamW([theirs])
    assert why_not_adopted(optimizer) is None
    adopt(optimizer)
    for step in range(3):
        ours.grad = theirs.grad = torch.tensor([0.5, step - 2.0])
        optimizer.step()
        stock.step()
    assert torch.equal(ours, theirs)


def test_adam_with_decoupled_decay_is_adamw() -> None:
    ours, theirs = parameter(), parameter()
    optimizer = adopt(Adam([ours], weight_decay=0.1, decoupled_weight_decay=True))
    stock = AdamW([theirs], weight_decay=0.1)
    ours.grad = theirs.grad = torch.ones(2)
    optimizer.step()
    stock.step()
    assert torch.equal(ours, theirs)


class MyAdamW(AdamW):
    """A subclass may compute anything."""


def replaced_step() -> AdamW:
    optimizer = AdamW([parameter()])
    optimizer.step = MethodType(lambda self, closure=None: None, optimizer)  # type: ignore[method-assign]
    return optimizer


@pytest.mark.parametrize(
    ("optimizer", "reason"),
    [
        (SGD([parameter()]), "SGD is not torch.optim.AdamW"),
        (MyAdamW([parameter()]), "MyAdamW is not torch.optim.AdamW"),
        (Adam([parameter()]), "Adam uses decoupled_weight_decay=False (L2 regularization)"),
        (AdamW([parameter()], amsgrad=True), "AdamW uses amsgrad=True"),
        (AdamW([parameter()], maximize=True), "AdamW uses maximize=True"),
        (AdamW([parameter()], differentiable=True), "AdamW uses differentiable=True"),
        (
            AdamW([nn.Parameter(torch.ones(1, dtype=torch.complex64))]),
            "AdamW uses a parameter of dtype torch.complex64 (shape (1,))",
        ),
        (
            AdamW([parameter(), nn.Parameter(torch.ones(1, device="meta"))]),
            "its parameters live on several devices (cpu, meta)",
        ),
        (replaced_step(), "AdamW.step was replaced on the object"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_others_are_left_alone_and_the_reason_is_given(optimizer: Any, reason: str) -> None:
    kind = type(optimizer)
    assert why_not_adopted(optimizer) == reason
    with pytest.raises(ValueError, match="this optimizer cannot take the fused step") as error:
        adopt(optimizer)
    assert str(error.value).endswith(reason)
    assert type(optimizer) is kind
