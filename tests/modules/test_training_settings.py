"""Does every training setting reach what it sets, and does every batch get its own noise?"""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch

from soma_lightning.models import PI05Policy
from soma_lightning.modules import PI05Module


@pytest.fixture
def spied_run(make_run, monkeypatch: pytest.MonkeyPatch):
    """Trains and returns the run with the arguments of every `sft_forward`, and whether it was training."""

    def run(**settings: Any) -> tuple[L.Trainer, list[tuple[bool, int, dict[str, Any]]]]:
        trainer, module, data = make_run("run", **settings)
        calls, forward = [], module.policy.sft_forward

        def spy(batch: Any, *, generator: torch.Generator, **arguments: Any) -> Any:
            calls.append((module.training, generator.initial_seed(), arguments))
            return forward(batch, generator=generator, **arguments)

        monkeypatch.setattr(module.policy, "sft_forward", spy)
        trainer.fit(module, data)
        return trainer, calls

    return run


def test_every_batch_of_every_epoch_has_its_own_draws_and_validation_always_the_same(spied_run):
    _, calls = spied_run(max_steps=-1, max_epochs=2, limit_train_batches=3, limit_val_batches=2, num_sanity_val_steps=0)
    training = [seed for is_training, seed, _ in calls if is_training]
    validation = [seed for is_training, seed, _ in calls if not is_training]
    assert len(training) == len(set(training)) == 6
    assert len(validation) >= 2
    assert validation[: len(validation) // 2] == validation[len(validation) // 2 :]
    assert len(set(validation)) == len(validation) // 2
    assert set(validation).isdisjoint(training)


def test_the_objective_gets_its_settings_in_training_only(spied_run):
    _, calls = spied_run(max_steps=2, training={"flow_draws": 3, "state_noise": 0.25})
    assert {is_training for is_training, _, _ in calls} == {True, False}
    for is_training, _, arguments in calls:
        assert arguments == ({"flow_draws": 3, "state_noise": 0.25} if is_training else {})


def test_optimizer_and_schedule_get_their_settings(make_run):
    settings = {"lr": 2e-3, "final_lr": 5e-5, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.3}
    trainer, module, data = make_run("run", max_steps=6, training={**settings, "warmup_steps": 1, "decay_steps": 6})
    rates = []

    class Watch(L.Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            rates.append(trainer.optimizers[0].param_groups[0]["lr"])

    trainer.callbacks.append(Watch())
    trainer.fit(module, data)
    (group,) = trainer.optimizers[0].param_groups
    assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.8, 0.9), 1e-6, 0.3)
    assert rates[0] == pytest.approx(1e-3)  # warm-up from lr / 2
    assert max(rates) == rates[1]
    assert group["lr"] == pytest.approx(5e-5)  # what the step after the last would take


def test_a_new_model_starts_ready_to_train_from_scratch():
    expert = PI05Module(size="tiny").policy.model.expert
    bias = expert.norm.dense.bias  # scale, shift, gate: the public start has all of it at zero
    assert bias[-bias.numel() // 3 :].eq(1.0).all()


def test_the_revision_reaches_the_hub(monkeypatch: pytest.MonkeyPatch):
    asked = []

    def from_pretrained(path: str, revision: str | None = None, **_: Any) -> None:
        asked.append((path, revision))
        raise RuntimeError("asked")

    monkeypatch.setattr(PI05Policy, "from_pretrained", from_pretrained)
    with pytest.raises(RuntimeError, match="asked"):
        PI05Module(pretrained="someone/pi05", revision="abc")
    assert asked == [("someone/pi05", "abc")]
