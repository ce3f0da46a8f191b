"""What the strategy does to a run besides its numbers: hooks, clipping routes, non-finite steps, loops, devices."""

from __future__ import annotations

import copy
import csv
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812 (Lightning's own convention)
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from torch import Tensor, nn

from soma_lightning import FusedAdamW, SomaSpeedStrategy


def recorded(cls: type, calls: list[str]) -> Any:
    """A subclass whose `on_*`, step and clipping hooks write their names down."""
    names = [name for name in dir(cls) if name.startswith("on_") or name.endswith("_step")]
    names += ["configure_gradient_clipping", "backward", "configure_optimizers"]

    def wrapper(name: str) -> Callable[..., Any]:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            calls.append(f"{cls.__name__}.{name}")
            return getattr(super(recording, self), name)(*args, **kwargs)

        return method

    recording: type = type(cls.__name__, (cls,), {name: wrapper(name) for name in names if hasattr(cls, name)})
    return recording


def test_hooks_run_in_the_order_of_the_stock_strategy(net: Any, make_trainer: Any) -> None:
    orders = []
    for strategy in ("auto", "somaspeed"):
        calls: list[str] = []
        trainer = make_trainer(
            strategy,
            max_steps=3,
            limit_val_batches=1,
            gradient_clip_val=0.1,
            accumulate_grad_batches=2,
            callbacks=[recorded(Callback, calls)()],
        )
        trainer.fit(recorded(net, calls)())
        orders.append(calls)
    assert orders[0] == orders[1]
    assert {"Net.on_before_optimizer_step", "Callback.on_train_batch_end", "Net.optimizer_step"} <= set(orders[1])


def test_an_overridden_clipping_hook_decides(net: Any, make_trainer: Any, difference: Callable[..., float]) -> None:
    class OwnClipping(net):  # type: ignore[misc, valid-type]
        def configure_gradient_clipping(self, optimizer: Any, **settings: Any) -> None:
            if self.global_step % 3 != 1:  # not on every step: a rule must not outlive its own
                self.clip_gradients(optimizer, gradient_clip_val=0.1 * (1 + self.global_step))

    models = []
    for strategy in ("auto", "somaspeed"):
        models.append(OwnClipping())
        make_trainer(strategy).fit(models[-1])
    assert difference(*models) <= 1e-6


def test_two_limits_in_one_step_keep_the_smaller(net: Any, make_trainer: Any, difference: Callable[..., float]) -> None:
    class Twice(net):  # type: ignore[misc, valid-type]
        def configure_gradient_clipping(self, optimizer: Any, **settings: Any) -> None:
            for limit in (0.1, 0.3):
                self.clip_gradients(optimizer, gradient_clip_val=limit)

    models = []
    for strategy in ("auto", "somaspeed"):
        models.append(Twice())
        make_trainer(strategy).fit(models[-1])
    assert difference(*models) <= 1e-6


def test_both_kinds_of_limit_in_one_step_are_refused(net: Any, make_trainer: Any) -> None:
    class Both(net):  # type: ignore[misc, valid-type]
        def configure_gradient_clipping(self, optimizer: Any, **settings: Any) -> None:
            self.clip_gradients(optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            self.clip_gradients(optimizer, gradient_clip_val=0.2, gradient_clip_algorithm="value")

    with pytest.raises(ValueError, match="max_norm=0.5 and max_value=0.2 are both set"):
        make_trainer("somaspeed").fit(Both())


class Gan(L.LightningModule):
    """Two optimizers in manual optimization, clipped by norm and by value, with toggling."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.automatic_optimization = False
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        clips = ({"gradient_clip_val": 0.3}, {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"})
        for optimizer, sign, clip in zip(self.optimizers(), (1, -1), clips, strict=True):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(sign * self.b(self.a(batch).tanh()).pow(2).mean())
            self.clip_gradients(optimizer, **clip)
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.AdamW(part.parameters(), lr=0.05) for part in (self.a, self.b)]


def test_manual_optimization_with_two_optimizers(net: Any, make_trainer: Any, difference: Callable[..., float]) -> None:
    models = []
    for strategy in ("auto", "somaspeed"):
        models.append(Gan())
        trainer = make_trainer(strategy)
        trainer.fit(models[-1], net().loader())
    assert [type(optimizer) for optimizer in trainer.optimizers] == [FusedAdamW, FusedAdamW]
    assert difference(*models) <= 1e-6
    assert difference(Gan(), models[1]) > 0.05


def test_gradients_keep_their_bits_through_the_step(net: Any, make_trainer: Any) -> None:
    class Watch(Callback):
        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            self.before = {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}

        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            after = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
            assert after.keys() == self.before.keys()
            assert all(torch.equal(after[name], self.before[name]) for name in after)
            self.checked = True

    watch = Watch()
    make_trainer("somaspeed", gradient_clip_val=0.01, callbacks=[watch]).fit(net())
    assert watch.checked


class Poison(Callback):
    """Puts a NaN into one gradient on the given steps."""

    def __init__(self, *steps: int) -> None:
        self.steps = steps
        self.weights: dict[int, dict[str, Tensor]] = {}

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        self.weights[trainer.global_step] = copy.deepcopy(module.state_dict())
        if trainer.global_step in self.steps:
            module.head.bias.grad[0] = math.nan


def test_a_nan_gradient_skips_the_step_and_is_counted(net: Any, make_trainer: Any) -> None:
    poison = Poison(3, 6)
    trainer = make_trainer("somaspeed", gradient_clip_val=0.5, callbacks=[poison])
    model = net()
    with pytest.warns(UserWarning, match="2 optimizer steps were skipped because of non-finite gradients"):
        trainer.fit(model)
    assert trainer.global_step == 10
    assert trainer.optimizers[0].skipped_steps.item() == 2
    for step in range(9):
        same = all(torch.equal(v, poison.weights[step + 1][n]) for n, v in poison.weights[step].items())
        assert same is (step in poison.steps)
    assert trainer.optimizers[0].state[model.head.bias]["step"].item() == 8
    assert all(p.isfinite().all() for p in model.parameters())


def test_a_forward_method_that_does_not_exist_is_refused_on_one_process_too(net: Any, make_trainer: Any) -> None:
    for name, message in (("nope", "has no method 'nope'"), ("policy.sample", "there is no module 'policy'")):
        with pytest.raises(ValueError, match=f"forward_methods: .*{message}"):
            make_trainer(SomaSpeedStrategy(forward_methods=[name]), max_steps=1).fit(net())


def test_raise_names_step_and_parameter(net: Any, make_trainer: Any) -> None:
    poison = Poison(3)
    model = net()
    message = r"non-finite gradients at global_step 3: the gradient of 'head.bias' holds a NaN"
    with pytest.raises(RuntimeError, match=message):
        make_trainer(SomaSpeedStrategy(nonfinite="raise"), callbacks=[poison]).fit(model)
    assert all(torch.equal(value, poison.weights[3][name]) for name, value in model.state_dict().items())


def test_too_many_skips_in_a_row_stop_the_run(net: Any, make_trainer: Any) -> None:
    strategy = SomaSpeedStrategy(max_consecutive_skips=3)
    with pytest.raises(RuntimeError, match=r"3 optimizer steps in a row .* global_step 7: the gradient of 'head.bias'"):
        make_trainer(strategy, callbacks=[Poison(1, 2, 5, 6, 7)]).fit(net())


def test_skips_without_limit_never_stop_the_run(net: Any, make_trainer: Any) -> None:
    trainer = make_trainer(SomaSpeedStrategy(max_consecutive_skips=None), callbacks=[Poison(*range(20))], max_steps=15)
    with pytest.warns(UserWarning, match="15 optimizer steps were skipped"):
        trainer.fit(net())
    assert trainer.optimizers[0].skipped_steps.item() == 15


def test_a_run_without_skips_warns_of_none(net: Any, make_trainer: Any, recwarn: pytest.WarningsRecorder) -> None:
    make_trainer("somaspeed").fit(net())
    assert not [warning for warning in recwarn if "were skipped" in str(warning.message)]


def rows_of(logger: CSVLogger) -> list[dict[str, str]]:
    with open(Path(logger.log_dir) / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def test_the_logged_norm_is_the_one_before_clipping(net: Any, make_trainer: Any, tmp_path: Any) -> None:
    class Norms(Callback):
        def __init__(self) -> None:
            self.torch: list[float] = []
            self.asked: list[float] = []

        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            grads = [p.grad for p in module.parameters() if p.grad is not None]
            self.torch.append(nn.utils.get_total_norm(grads).item())
            self.asked.append(trainer.strategy.grad_norm(optimizer).item())

    norms, logger = Norms(), CSVLogger(tmp_path)
    trainer = make_trainer(
        SomaSpeedStrategy(log_grad_norm=True),
        gradient_clip_val=0.1,
        callbacks=[norms],
        logger=logger,
        log_every_n_steps=2,
        accumulate_grad_batches=3,
    )
    trainer.fit(net())
    logged = [float(row["grad_norm"]) for row in rows_of(logger) if row["grad_norm"]]
    assert norms.asked == pytest.approx(norms.torch, rel=1e-6)
    assert logged == pytest.approx(norms.torch[1::2], rel=1e-6)


def test_two_optimizers_log_two_norms(net: Any, make_trainer: Any, tmp_path: Any) -> None:
    logger = CSVLogger(tmp_path)
    trainer = make_trainer(SomaSpeedStrategy(log_grad_norm=True), logger=logger, log_every_n_steps=1)
    trainer.fit(Gan(), net().loader())
    assert {"grad_norm_0", "grad_norm_1"} <= set(rows_of(logger)[0])


def test_the_inf_norm_clips_fused_and_stock_optimizers(
    net: Any, make_trainer: Any, difference: Callable[..., float]
) -> None:
    class Reference(net):  # type: ignore[misc, valid-type]
        def configure_gradient_clipping(self, optimizer: Any, **settings: Any) -> None:
            nn.utils.clip_grad_norm_(self.parameters(), 0.2, norm_type=math.inf)

    reference, fused, stock = Reference(), net(), net()
    make_trainer("auto").fit(reference)
    make_trainer(SomaSpeedStrategy(norm_type=math.inf), gradient_clip_val=0.2).fit(fused)
    unfused = SomaSpeedStrategy(norm_type=math.inf, fused_optimizer=False)
    make_trainer(unfused, gradient_clip_val=0.2).fit(stock)
    assert difference(reference, fused) <= 1e-6
    assert difference(reference, stock) == 0.0


def test_the_norm_type_reaches_a_users_own_fused_optimizer(
    net: Any, make_trainer: Any, difference: Callable[..., float]
) -> None:
    class Own(net):  # type: ignore[misc, valid-type]
        def make_optimizer(self) -> torch.optim.Optimizer:
            return FusedAdamW([p for p in self.parameters() if p.requires_grad], lr=0.02)

    models = []
    for norm_type in (2.0, math.inf):
        models.append(Own())
        trainer = make_trainer(SomaSpeedStrategy(norm_type=norm_type), gradient_clip_val=0.2)
        trainer.fit(models[-1])
        assert trainer.optimizers[0].norm_type == norm_type
    assert difference(*models) > 1e-4


def test_the_wrapper_of_manual_optimization_is_of_the_fused_class(net: Any, make_trainer: Any) -> None:
    class Asking(Gan):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            super().training_step(batch, batch_idx)
            kinds.extend(isinstance(optimizer, FusedAdamW) for optimizer in self.optimizers())

    kinds: list[bool] = []
    make_trainer("somaspeed", max_steps=2).fit(Asking(), net().loader())
    assert kinds == [True, True]


def other_optimizer(net: Any, make: Callable[[Any], torch.optim.Optimizer]) -> Any:
    class Other(net):  # type: ignore[misc, valid-type]
        def make_optimizer(self) -> torch.optim.Optimizer:
            return make([p for p in self.parameters() if p.requires_grad])

    return Other()


@pytest.mark.parametrize(
    "make",
    [lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9), lambda p: torch.optim.AdamW(p, lr=0.02, amsgrad=True)],
    ids=["SGD", "amsgrad"],
)
def test_other_optimizers_keep_stock_step_and_clipping(
    net: Any, make_trainer: Any, difference: Callable[..., float], make: Any
) -> None:
    models = []
    for strategy in ("auto", "somaspeed"):
        models.append(other_optimizer(net, make))
        trainer = make_trainer(strategy, gradient_clip_val=0.3)
        trainer.fit(models[-1])
    assert not isinstance(trainer.optimizers[0], FusedAdamW)
    assert difference(*models) == 0.0
    with pytest.raises(TypeError, match="has no fused step; use lightning.pytorch.utilities.grad_norm"):
        trainer.strategy.grad_norm(trainer.optimizers[0])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fused_optimizer": True}, "fused_optimizer=True, but SGD is not torch.optim.AdamW; use 'auto'"),
        ({"master_weights": True}, "master_weights=True needs the fused optimizer step.*SGD is not torch.optim.AdamW"),
        ({"nonfinite": "raise"}, "nonfinite='raise' needs the fused optimizer step"),
        ({"log_grad_norm": True}, "log_grad_norm=True needs the fused optimizer step"),
    ],
)
def test_settings_that_another_optimizer_would_ignore_are_refused(
    net: Any, make_trainer: Any, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_trainer(SomaSpeedStrategy(**settings)).fit(other_optimizer(net, lambda p: torch.optim.SGD(p, lr=0.1)))


def test_a_users_own_fused_optimizer_is_used_and_contradictions_are_named(net: Any, make_trainer: Any) -> None:
    model = other_optimizer(net, lambda p: FusedAdamW(p, master_weights=True))
    trainer = make_trainer("somaspeed")
    trainer.fit(model)
    assert trainer.optimizers[0].master_weights
    with pytest.raises(ValueError, match="master_weights=False, but the optimizer was built with master_weights=True"):
        make_trainer(SomaSpeedStrategy(master_weights=False)).fit(model)
    with pytest.raises(ValueError, match="fused_optimizer=False, but the optimizer is a FusedAdamW"):
        make_trainer(SomaSpeedStrategy(fused_optimizer=False)).fit(model)


def test_fused_optimizer_false_leaves_adamw_alone(net: Any, make_trainer: Any, difference: Any) -> None:
    models = []
    for strategy in ("auto", SomaSpeedStrategy(fused_optimizer=False)):
        models.append(net())
        trainer = make_trainer(strategy, gradient_clip_val=0.5)
        trainer.fit(models[-1])
    assert type(trainer.optimizers[0]) is torch.optim.AdamW
    assert difference(*models) == 0.0


def scaler_plugin() -> MixedPrecision:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=4)
    return MixedPrecision("16-mixed", "cpu", scaler)


def test_a_grad_scaler_unscales_clips_and_skips_as_usual(
    net: Any, make_trainer: Any, difference: Callable[..., float]
) -> None:
    models, scales = [], []
    for strategy in ("auto", "somaspeed"):
        models.append(net())
        trainer = make_trainer(strategy, plugins=[scaler_plugin()], gradient_clip_val=0.5, callbacks=[Poison(4)])
        trainer.fit(models[-1])
        scales.append(trainer.precision_plugin.scaler.get_scale())
    assert type(trainer.optimizers[0]) is FusedAdamW
    assert trainer.optimizers[0].pending_clip is None
    assert scales[0] == scales[1] != 2.0**20
    assert difference(*models) <= 1e-6


def test_a_plugin_keeps_its_name_in_checkpoints(net: Any, make_trainer: Any, tmp_path: Any) -> None:
    files = {}
    for strategy in ("auto", "somaspeed"):
        trainer = make_trainer(strategy, plugins=[scaler_plugin()], max_steps=2)
        trainer.fit(net())
        trainer.save_checkpoint(tmp_path / f"{strategy}.ckpt")
        files[strategy] = torch.load(tmp_path / f"{strategy}.ckpt", weights_only=True)
    assert files["auto"].keys() == files["somaspeed"].keys()
    assert files["somaspeed"]["MixedPrecision"] == files["auto"]["MixedPrecision"]


class OwnClipping(Precision):
    """A plugin that clips in its own way."""

    calls = 0

    def clip_grad_by_norm(self, optimizer: Any, clip_val: Any) -> None:
        type(self).calls += 1


def test_a_plugin_with_its_own_clipping_is_left_alone(net: Any, make_trainer: Any) -> None:
    trainer = make_trainer("somaspeed", plugins=[OwnClipping()], gradient_clip_val=0.5, max_steps=4)
    trainer.fit(net())
    assert OwnClipping.calls == 4
    with pytest.raises(ValueError, match="norm_type=inf would be ignored: OwnClipping has its own clip_grad_by_norm"):
        make_trainer(SomaSpeedStrategy(norm_type=math.inf), plugins=[OwnClipping()])


def test_every_loop_and_a_second_fit_work(net: Any, make_trainer: Any, difference: Callable[..., float]) -> None:
    models = []
    for strategy in ("auto", "somaspeed"):
        models.append(model := net())
        trainer = make_trainer(strategy, limit_val_batches=2, gradient_clip_val=0.5)
        trainer.fit(model)
        results = [trainer.validate(model, verbose=False), trainer.test(model, verbose=False)]
        predictions = trainer.predict(model)
        trainer.fit_loop.epoch_loop.max_steps = 15
        trainer.fit(model)
        assert trainer.global_step == 15
    assert difference(*models) <= 1e-6
    assert len(predictions) == 12
    assert results[0][0].keys() == {"val_loss"}


def test_the_same_optimizer_object_may_come_back(net: Any, make_trainer: Any) -> None:
    model = net(scheduler=False)
    optimizer = model.make_optimizer()
    model.configure_optimizers = lambda: optimizer
    make_trainer("somaspeed").fit(model)
    make_trainer("somaspeed").fit(model)
    assert optimizer.state[model.head.bias]["step"].item() == 20


def test_a_compiled_module_is_accepted(net: Any, make_trainer: Any) -> None:
    class Quiet(net):  # type: ignore[misc, valid-type]
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self(batch).pow(2).sum()

    model = Quiet()
    make_trainer("somaspeed", max_steps=2).fit(torch.compile(model, backend="eager"))
    assert model.global_step == 2


def test_one_process_needs_no_launcher_and_no_sampler(net: Any, make_trainer: Any) -> None:
    trainer = make_trainer("somaspeed")
    strategy = trainer.strategy
    assert strategy.launcher is None
    assert (trainer.world_size, trainer.global_rank, trainer.is_global_zero) == (1, 0, True)
    assert strategy.root_device == torch.device("cpu")
    assert strategy.is_distributed is False
    assert strategy.distributed_sampler_kwargs == {"num_replicas": 1, "rank": 0}
    assert strategy.reduce_boolean_decision(True) is True
    assert strategy.broadcast("x") == "x"
    value = torch.tensor(2.0)
    assert strategy.all_gather(value) is strategy.reduce(value, reduce_op="sum") is value


def test_the_root_device_is_the_device_that_was_asked_for() -> None:
    strategy = SomaSpeedStrategy()
    strategy.parallel_devices = [torch.device("cuda", 1)]
    assert strategy.root_device == torch.device("cuda", 1)
