"""Fabric(strategy="somaspeed") against Fabric(strategy="auto")."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812 (Lightning's own convention)
import pytest
import torch
from lightning.fabric.plugins.precision import MixedPrecision
from torch import nn

from soma_lightning import FabricSomaSpeedStrategy, FusedAdamW

Difference = Callable[..., float]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    model[0].bias.requires_grad_(False)
    return model


def fabric(strategy: Any, **settings: Any) -> L.Fabric:
    return L.Fabric(accelerator="cpu", devices=1, strategy=strategy, **settings)


def inputs(step: int) -> torch.Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(step))


def trained(
    strategy: Any, clip: dict[str, Any], *, separate: bool = False, accumulate: int = 1, **settings: Any
) -> tuple[nn.Module, Any, list[Any]]:
    fab = fabric(strategy, **settings)
    model = network()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    if separate:
        wrapped = fab.setup_module(model)
        optimizer = fab.setup_optimizers(optimizer)
    else:
        wrapped, optimizer, same = fab.setup(model, optimizer, scheduler=scheduler)
        assert same is scheduler
    norms = []
    for step in range(10):
        optimizer.zero_grad()
        for micro in range(accumulate):
            with fab.no_backward_sync(wrapped, enabled=micro < accumulate - 1):
                fab.backward(wrapped(inputs(10 * step + micro)).float().pow(2).sum())
        if clip:
            norms.append(fab.clip_gradients(wrapped, optimizer, **clip))
        optimizer.step()
        scheduler.step()
    return model, optimizer, norms


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize(
    "clip", [{}, {"max_norm": 0.5}, {"max_norm": 0.2, "norm_type": math.inf}, {"clip_val": 0.1}], ids=str
)
def test_ten_steps_equal_the_stock_strategy(difference: Difference, clip: dict[str, Any], separate: bool) -> None:
    theirs, _, their_norms = trained("auto", clip, separate=separate, accumulate=2)
    ours, optimizer, our_norms = trained("somaspeed", clip, separate=separate, accumulate=2)
    assert isinstance(optimizer.optimizer, FusedAdamW)
    assert difference(theirs, ours) <= (1e-6 if "max_norm" in clip else 0.0)
    if "max_norm" in clip:
        assert all(type(norm) is torch.Tensor and norm.shape == () for norm in our_norms)
        assert [n.item() for n in our_norms] == pytest.approx([n.item() for n in their_norms], rel=1e-6)
    else:
        assert our_norms == their_norms


@pytest.mark.parametrize("precision", ["bf16-mixed", "64-true"])
def test_other_precisions_equal_the_stock_strategy(difference: Difference, precision: Any) -> None:
    theirs, *_ = trained("auto", {"max_norm": 0.5}, precision=precision)
    ours, *_ = trained("somaspeed", {"max_norm": 0.5}, precision=precision)
    assert difference(theirs, ours) <= 1e-6


def test_bf16_true_has_masters(difference: Difference) -> None:
    model, optimizer, _ = trained("somaspeed", {"max_norm": 0.5}, precision="bf16-true")
    assert optimizer.state[model[2].weight]["soma_master"].dtype == torch.float32


@pytest.mark.parametrize("clip", [{"max_norm": 0.5}, {"clip_val": 0.05}])
def test_a_grad_scaler_works_as_usual(difference: Difference, clip: dict[str, Any]) -> None:
    models = []
    for strategy in ("auto", "somaspeed"):
        plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**10))
        models.append(trained(strategy, clip, plugins=[plugin])[0])
    assert difference(*models) <= 1e-6


def test_a_rule_does_not_outlive_a_step_that_the_scaler_skipped() -> None:
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    fab, model = fabric(FabricSomaSpeedStrategy(report=False), plugins=[plugin]), network()
    wrapped, optimizer = fab.setup(model, torch.optim.AdamW(model.parameters()))
    fab.backward(wrapped(inputs(0)).sum() * torch.inf)
    optimizer.clip(max_norm=0.1)
    optimizer.step()
    assert optimizer.pending_clip is None
    assert torch.equal(model[2].weight, network()[2].weight)


def with_gradients() -> tuple[L.Fabric, nn.Module, Any, Any]:
    fab = fabric(FabricSomaSpeedStrategy(report=False))
    model = network()
    wrapped, optimizer = fab.setup(model, torch.optim.AdamW(model.parameters()))
    fab.backward(wrapped(inputs(0)).sum())
    return fab, model, wrapped, optimizer


def test_clipping_changes_no_gradient_and_lasts_one_step() -> None:
    fab, model, wrapped, optimizer = with_gradients()
    before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    norm = fab.clip_gradients(wrapped, optimizer, max_norm=0.1)
    optimizer.step()
    assert norm.item() > 0.1
    assert torch.equal(optimizer.last_grad_norm, norm)
    assert optimizer.pending_clip is None
    assert all(
        torch.equal(a, b)
        for a, b in zip(before, (p.grad for p in model.parameters() if p.grad is not None), strict=True)
    )


def test_a_rule_set_through_the_wrapper_reaches_the_optimizer() -> None:
    fab, model, wrapped, optimizer = with_gradients()
    optimizer.clip(max_norm=0.1)
    optimizer.norm_type = math.inf
    assert optimizer.optimizer.pending_clip.max_norm == 0.1
    assert optimizer.optimizer.norm_type == math.inf


@pytest.mark.parametrize("limits", [(0.1, 0.3), (0.3, 0.1)])
@pytest.mark.parametrize("kind", ["max_norm", "clip_val"])
def test_of_two_limits_in_one_step_the_smaller_one_applies(
    difference: Difference, kind: str, limits: tuple[float, float]
) -> None:
    models = []
    for strategy in ("auto", "somaspeed"):
        fab, model = fabric(strategy), network()
        wrapped, optimizer = fab.setup(model, torch.optim.AdamW(model.parameters(), lr=0.02))
        for step in range(4):
            fab.backward(wrapped(inputs(step)).pow(2).sum())
            for limit in limits:
                fab.clip_gradients(wrapped, optimizer, **{kind: limit / 10})
            optimizer.step()
            optimizer.zero_grad()
        models.append(model)
    assert difference(*models) <= 1e-6


def test_both_kinds_of_limit_in_one_step_are_refused() -> None:
    fab, _, wrapped, optimizer = with_gradients()
    fab.clip_gradients(wrapped, optimizer, max_norm=0.5)
    with pytest.raises(ValueError, match="max_norm=0.5 and max_value=0.2 are both set"):
        fab.clip_gradients(wrapped, optimizer, clip_val=0.2)


def test_a_limit_does_not_outlive_gradients_that_were_thrown_away(difference: Difference) -> None:
    models = []
    for strategy in ("auto", "somaspeed"):
        fab, model = fabric(strategy), network()
        wrapped, optimizer = fab.setup(model, torch.optim.AdamW(model.parameters(), lr=0.02))
        for step in range(6):
            fab.backward(wrapped(inputs(step)).pow(2).sum())
            if step % 2:
                fab.clip_gradients(wrapped, optimizer, max_norm=0.01)
            else:
                optimizer.step()
            optimizer.zero_grad()
        models.append(model)
    assert difference(*models) == 0.0


def test_error_if_nonfinite_comes_before_any_change() -> None:
    fab, model, wrapped, optimizer = with_gradients()
    model[2].bias.grad[0] = math.inf
    weights = [p.clone() for p in model.parameters()]
    with pytest.raises(
        RuntimeError, match=r"norm \(type 2.0\) is inf; the first non-finite gradient is that of '2.bias'"
    ):
        fab.clip_gradients(wrapped, optimizer, max_norm=1.0)
    assert optimizer.pending_clip is None
    assert model[2].bias.grad[1].item() == 8.0
    norm = fab.clip_gradients(wrapped, optimizer, max_norm=1.0, error_if_nonfinite=False)
    optimizer.step()
    assert norm.item() == math.inf
    assert optimizer.skipped_steps.item() == 1
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))


def test_other_norms_are_refused_by_the_fused_step() -> None:
    fab, _, wrapped, optimizer = with_gradients()
    with pytest.raises(ValueError, match="norm_type=1.0 is not supported; use 2.0 or inf"):
        fab.clip_gradients(wrapped, optimizer, max_norm=1.0, norm_type=1.0)


def test_raise_names_step_and_parameter() -> None:
    fab = fabric(FabricSomaSpeedStrategy(nonfinite="raise"))
    model = network()
    wrapped, optimizer = fab.setup(model, torch.optim.AdamW(model.parameters()))
    for step in range(2):
        optimizer.zero_grad()
        fab.backward(wrapped(inputs(0) * (math.nan if step else 1.0)).sum())
        if step == 0:
            optimizer.step()
    with pytest.raises(RuntimeError, match="at step 2 of this optimizer: the gradient of '0.weight' holds a NaN"):
        optimizer.step()


def test_other_optimizers_keep_stock_clipping(difference: Difference) -> None:
    models = []
    for strategy in ("auto", "somaspeed"):
        fab, model = fabric(strategy), network()
        wrapped, optimizer = fab.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        fab.backward(wrapped(inputs(0)).sum())
        fab.clip_gradients(wrapped, optimizer, max_norm=0.1)
        optimizer.step()
        fab.clip_gradients(wrapped, optimizer, clip_val=0.01)
        optimizer.step()
        models.append(model)
    assert difference(*models) == 0.0


def test_no_backward_sync_of_the_strategy_leaves_gradients_flowing() -> None:
    fab, model, wrapped, _ = with_gradients()
    control = fab.strategy._backward_sync_control
    before = model[2].bias.grad.clone()
    for enabled in (True, False):
        with control.no_backward_sync(model, enabled):
            fab.backward(wrapped(inputs(0)).sum())
    fab.backward(wrapped(inputs(0)).sum())
    assert torch.equal(model[2].bias.grad, 4 * before)


def test_checkpoints_move_between_strategies(difference: Difference, tmp_path: Path) -> None:
    ends = []
    for target in ("auto", "somaspeed"):
        model, optimizer, _ = trained("somaspeed", {"max_norm": 0.5})
        fabric("somaspeed").save(tmp_path / "a.ckpt", {"model": model, "optimizer": optimizer})
        fab, fresh = fabric(target), network()
        wrapped, restored = fab.setup(fresh, torch.optim.AdamW(fresh.parameters(), lr=1.0))
        fab.load(tmp_path / "a.ckpt", {"model": wrapped, "optimizer": restored})
        fab.backward(wrapped(inputs(99)).sum())
        restored.step()
        ends.append(fresh)
    assert difference(*ends) <= 1e-6


def test_weights_only_of_the_strategy_is_the_default(tmp_path: Path) -> None:
    torch.save({"where": Path("anywhere")}, tmp_path / "a.ckpt")
    with pytest.raises(Exception, match="[Ww]eights.only"):
        fabric("somaspeed").load(tmp_path / "a.ckpt")
    loaded = fabric(FabricSomaSpeedStrategy(checkpoint_weights_only=False)).load(tmp_path / "a.ckpt")
    assert loaded == {"where": Path("anywhere")}


def test_launch_is_allowed_and_not_needed() -> None:
    fab = fabric("somaspeed")
    fab.launch()
    assert (fab.world_size, fab.strategy.launcher, fab.device) == (1, None, torch.device("cpu"))
    assert fab.all_reduce(torch.tensor(3.0), reduce_op="sum").item() == 3.0
    assert fab.broadcast("x") == "x"


def test_the_report_is_printed_and_written_where_asked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "deep" / "report.json"
    with caplog.at_level("INFO"):
        trained(FabricSomaSpeedStrategy(report=str(path)), {"max_norm": 0.5})
    assert caplog.text.count("SomaSpeed run report") == 1
    report = json.loads(path.read_text())
    assert report["clipping"] == "by fabric.clip_gradients"
    assert report["trainable"]["names"] == ["0.weight", "2.weight", "2.bias"]
    assert report["optimizers"][0]["name"] == "FusedAdamW"
