"""Fine-tuning pi0.5: what trains, what stays, how a run goes on, what it leaves behind."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from safetensors.torch import load_file

from soma_lightning.contract import TRAINING_FILE
from soma_lightning.models import PI05Config, PI05Policy
from soma_lightning.modules import PI05Module
from soma_lightning.modules.base import TrainingConfig


def weights_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in module.named_parameters()}


class StopAt(L.Callback):
    """Ends a run early, as an interruption would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        trainer.should_stop = trainer.global_step >= self.step


def test_only_the_expert_moves(make_run):
    trainer, module, data = make_run("run")
    before, backbone = weights_of(module), module.policy.backbone_hash()
    trainer.fit(module, data)
    moved = {name for name, p in module.named_parameters() if not torch.equal(p, before[name])}
    trainable = {name for name, p in module.named_parameters() if p.requires_grad}
    assert moved <= trainable
    assert len(moved) > 0.9 * len(trainable)
    assert all(".expert." in name for name in trainable)
    assert module.policy.backbone_hash() == backbone
    assert {id(p) for g in trainer.optimizers[0].param_groups for p in g["params"]} == {
        id(p) for p in module.parameters() if p.requires_grad
    }


def test_full_training_moves_the_prefix(make_run):
    trainer, module, data = make_run("run", model={"trainable": "all"})
    before = weights_of(module)
    trainer.fit(module, data)
    moved = [name for name, p in module.named_parameters() if not torch.equal(p, before[name])]
    assert any("vision_tower" in name for name in moved)
    assert any("language_model" in name for name in moved)


def test_frozen_parts_stay_in_eval_mode_after_validation(make_run):
    trainer, module, data = make_run("run", val_check_interval=2, check_val_every_n_epoch=None, limit_val_batches=1)
    seen = []

    class Watch(L.Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            seen.append(any(part.training for m in module.policy.frozen_modules() for part in m.modules()))

    trainer.callbacks.append(Watch())
    trainer.fit(module, data)
    assert seen == [False] * 4
    assert module.policy.model.expert.training


def thaw(module: PI05Module) -> None:
    module.policy.model.prefix.requires_grad_(True)


def add_to_optimizer(module: PI05Module) -> None:
    module.trainer.optimizers[0].add_param_group({"params": list(module.policy.model.prefix.parameters())})


@pytest.mark.parametrize(("damage", "message"), [(thaw, "requires grad"), (add_to_optimizer, "is in an optimizer")])
@pytest.mark.parametrize("moment", ["on_fit_start", "on_validation_end"])
def test_a_callback_that_thaws_the_backbone_is_caught(make_run, damage, message: str, moment: str):
    trainer, module, data = make_run("run", val_check_interval=2, check_val_every_n_epoch=None, limit_val_batches=1)
    callback = L.Callback()
    setattr(callback, moment, lambda trainer, module: damage(module))
    trainer.callbacks.insert(0, callback)
    with pytest.raises(RuntimeError, match=message):
        trainer.fit(module, data)


def test_a_backbone_in_training_mode_is_caught(make_run):
    trainer, module, data = make_run("run")
    callback = L.Callback()
    callback.on_train_start = lambda trainer, module: module.policy.model.prefix.paligemma.vision_tower.encoder.train()
    trainer.callbacks.insert(0, callback)
    with pytest.raises(RuntimeError, match="switched to training mode"):
        trainer.fit(module, data)


def test_a_resumed_run_equals_one_that_never_stopped(make_run, tmp_path: Path):
    whole, module, data = make_run("whole", max_steps=9, training={"ema_decay": 0.9, "state_noise": 0.1})
    whole.fit(module, data)
    saver = ModelCheckpoint(dirpath=tmp_path, filename="five", every_n_train_steps=5, monitor=None)
    first, part, data = make_run(
        "first",
        max_steps=9,
        training={"ema_decay": 0.9, "state_noise": 0.1},
        enable_checkpointing=True,
        callbacks=[saver, StopAt(6)],
    )
    first.fit(part, data)
    assert first.global_step == 6
    second, rest, data = make_run("second", max_steps=9, seed=1, training={"ema_decay": 0.9, "state_noise": 0.1})
    second.fit(rest, data, ckpt_path=tmp_path / "five.ckpt", weights_only=True)
    for name, p in module.named_parameters():
        assert torch.equal(p, dict(rest.named_parameters())[name]), name
    assert torch.equal(*(run._ema.shadow["policy.model.expert.norm.dense.weight"] for run in (module, rest)))


def test_a_checkpoint_of_other_data_is_refused(make_run, tmp_path: Path):
    trainer, module, data = make_run("first")
    trainer.fit(module, data)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    trainer, module, data = make_run("second", max_steps=8)
    statistics = {key: {k: v + 1 for k, v in stats.items()} for key, stats in data.statistics.items()}

    class Shifted(type(data)):
        @property
        def statistics(self):
            return statistics

    data.__class__ = Shifted
    with pytest.raises(ValueError, match=r"checkpoint's statistics \(action, observation.state\) differs"):
        trainer.fit(module, data, ckpt_path=tmp_path / "a.ckpt", weights_only=True)


@pytest.mark.parametrize("change", [{"lr": 2e-3}, {"betas": (0.9, 0.9)}, {"ema_decay": 0.5}, {"flow_draws": 2}])
def test_a_changed_training_setting_is_refused_on_resume(make_run, change: dict, tmp_path: Path):
    trainer, module, data = make_run("first")
    trainer.fit(module, data)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    trainer, module, data = make_run("second", max_steps=8, training=change)
    with pytest.raises(ValueError, match=rf"checkpoint's training \({next(iter(change))}\) differs"):
        trainer.fit(module, data, ckpt_path=tmp_path / "a.ckpt", weights_only=True)
    trainer.validate(module, data, ckpt_path=tmp_path / "a.ckpt", weights_only=True, verbose=False)
    trainer, module, data = make_run("third", max_steps=5, training={"sample_batches": 0, "export": False})
    trainer.fit(module, data, ckpt_path=tmp_path / "a.ckpt", weights_only=True)
    assert trainer.global_step == 5


def test_a_resumed_run_of_another_length_says_that_its_schedule_changed(make_run, tmp_path: Path):
    trainer, module, data = make_run("first", max_steps=4)
    trainer.fit(module, data)
    assert module.report_facts()["schedule"] == "warm-up over 0 steps, cosine down to step 4"
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    trainer, module, data = make_run("longer", max_steps=10)
    with pytest.warns(UserWarning, match=r"schedule of \(0, 4\) .* goes on with one of \(1, 10\)"):
        trainer.fit(module, data, ckpt_path=tmp_path / "a.ckpt", weights_only=True)
    trainer, module, data = make_run("same", max_steps=4)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*schedule of")
        trainer.fit(module, data, ckpt_path=tmp_path / "a.ckpt", weights_only=True)


def test_export_is_the_trained_policy(make_run, tmp_path: Path):
    trainer, module, data = make_run("run")
    trainer.fit(module, data)
    loaded = PI05Policy.from_pretrained(tmp_path / "run" / "policy")
    for (name, p), (_, q) in zip(module.policy.named_parameters(), loaded.named_parameters(), strict=True):
        assert torch.equal(p, q), name
    assert loaded.describe()["statistics"] == module.policy.describe()["statistics"]
    noted = json.loads((tmp_path / "run" / "policy" / TRAINING_FILE).read_text())
    assert noted["step"] == trainer.global_step > 0


def test_export_holds_the_average(make_run, tmp_path: Path):
    trainer, module, data = make_run("run", training={"ema_decay": 0.5})
    trainer.fit(module, data)
    loaded = dict(PI05Policy.from_pretrained(tmp_path / "run" / "policy").named_parameters())
    name = "model.expert.norm.dense.weight"
    assert torch.equal(loaded[name], module._ema.shadow[f"policy.{name}"])
    assert not torch.equal(loaded[name], module.policy.model.expert.norm.dense.weight)


def test_logged_values(make_run):
    trainer, module, data = make_run(
        "run", max_steps=6, log_every_n_steps=3, val_check_interval=3, check_val_every_n_epoch=None
    )
    trainer.fit(module, data)
    logged = trainer.logged_metrics
    for name in ("train_loss", "val_loss", "val_action_error", "samples_per_s", "data_ms", "forward_ms", "backward_ms"):
        assert logged[name] >= 0, name
    assert trainer.progress_bar_metrics["optimizer_ms"] > 0


def test_validation_loss_does_not_depend_on_the_moment(make_run):
    losses = []
    for _ in range(2):
        trainer, module, data = make_run("run")
        torch.randn(len(losses) + 1)
        losses.append(trainer.validate(module, data, verbose=False)[0]["val_loss"])
    assert losses[0] == losses[1]


def test_test_and_predict_use_the_validation_episodes(make_run):
    trainer, module, data = make_run("run", training={"sample_batches": 99})
    validated = trainer.validate(module, data, verbose=False)[0]
    tested = trainer.test(module, data, verbose=False)[0]
    assert tested == {name.replace("val_", "test_"): value for name, value in validated.items()}
    batches = list(data.val_dataloader())
    predicted = trainer.predict(module, data)
    assert [p.shape for p in predicted] == [batch["action"].shape for batch in batches]
    error = [
        (p - batch["action"]).abs().mean(-1)[~batch["action_is_pad"]]
        for p, batch in zip(predicted, batches, strict=True)
    ]
    weights = [len(batch["action"]) for batch in batches]
    mean = sum(e.mean() * w for e, w in zip(error, weights, strict=True)) / sum(weights)
    assert tested["test_action_error"] == pytest.approx(mean.item(), rel=1e-5)


def test_run_report(make_run, tmp_path: Path):
    trainer, module, data = make_run("run")
    trainer.fit(module, data)
    report = json.loads((tmp_path / "run" / "run_report.json").read_text())
    text = json.dumps(report)
    for fact in (
        "policy.model.expert.norm.dense.weight",
        "FusedAdamW",
        "reference (torch)",
        "chunk_size",
        "statistics",
    ):
        assert fact in text, fact


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"revision": "main"}, "no effect without pretrained"),
        ({"statistics": "checkpoint"}, "needs pretrained"),
        ({"size": "tiny", "pretrained": "somewhere"}, "size='tiny' has no effect with pretrained='somewhere'"),
        ({"size": "tiny", "config": {"chunk_sise": 3}}, "chunk_size"),
        ({"size": "tiny", "config": {"n_action_steps": 9}}, "n_action_steps=9"),
        ({"size": "tiny", "config": {"trainable": "all"}}, "config must not say what trains"),
    ],
)
def test_bad_arguments(arguments: dict, message: str):
    with pytest.raises(ValueError, match=message):
        PI05Module(**arguments)


def test_data_statistics_need_a_data_module(make_run):
    trainer, module, _ = make_run("run")
    with pytest.raises(ValueError, match="statistics='data' needs a data module"):
        trainer.fit(module, [])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lr": 0}, "lr=0"),
        ({"final_lr": 1.0}, "final_lr"),
        ({"flow_draws": 0}, "flow_draws"),
        ({"warmup_steps": 99999}, "warmup"),
    ],
)
def test_bad_training_settings(change: dict, message: str):
    with pytest.raises(ValueError, match=message):
        TrainingConfig(**change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sample_batches": -1}, "sample_batches=-1 must not be negative"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1 must not be negative"),
        ({"eps": -1.0}, "eps=-1.0 must not be negative"),
        ({"betas": (0.9, 1.0)}, r"betas=\(0.9, 1.0\) must be two numbers in"),
        ({"betas": (0.9, 0.9, 0.9)}, "must be two numbers in"),
        ({"lr": math.inf}, "lr=inf must be a finite number"),
        ({"state_noise": math.nan}, "state_noise=nan must be a finite number"),
        ({"weight_decay": math.nan}, "weight_decay=nan must be a finite number"),
        ({"eps": math.inf}, "eps=inf must be a finite number"),
    ],
)
def test_impossible_training_settings(change: dict, message: str):
    with pytest.raises(ValueError, match=message):
        TrainingConfig(**change)


def test_an_export_that_would_replace_other_files_is_refused_before_training(make_run):
    trainer, module, data = make_run("first")
    folder = Path(trainer.default_root_dir) / "policy"
    folder.mkdir(parents=True)
    (folder / "mine.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=r"policy holds \['mine.txt'\]"):
        trainer.fit(module, data)
    assert trainer.global_step == 0


@pytest.mark.parametrize("settings", [{"precision": "bf16-mixed"}, {"model": {"config": {"dtype": "bfloat16"}}}])
def test_low_precision_trains_with_its_islands_in_fp32(make_run, settings: dict):
    trainer, module, data = make_run("run", **settings)
    before = weights_of(module)
    trainer.fit(module, data)
    assert torch.isfinite(trainer.callback_metrics["train_loss"])
    module.policy.model.check_dtypes()
    moved = [name for name, p in module.named_parameters() if p.requires_grad and not torch.equal(p, before[name])]
    assert len(moved) > 0.9 * sum(p.requires_grad for p in module.parameters())


@pytest.mark.parametrize("precision", ["bf16-true", "16-true", "64-true"])
@pytest.mark.parametrize("loop", ["fit", "validate", "test", "predict"])
def test_a_precision_that_casts_the_islands_is_refused(make_run, precision: str, loop: str):
    trainer, module, data = make_run("run", precision=precision)
    with pytest.raises(ValueError, match="parameters were cast away from config.dtype='float32'"):
        getattr(trainer, loop)(module, data)


@pytest.mark.parametrize("loop", ["validate", "test", "predict"])
def test_graphs_are_never_left_out(make_run, loop: str):
    trainer, module, data = make_run("run", model={"cuda_graphs": True})
    with pytest.raises(ValueError, match="CUDA graphs need a CUDA device"):
        getattr(trainer, loop)(module, data)


def test_delta_actions_are_trained_sampled_and_exported(make_run, tmp_path: Path):
    """The module tells the data module; the exported policy needs no further setting."""
    trainer, module, data = make_run("run", model={"config": {"delta_actions": [0, 1, 2]}})
    with pytest.raises(ValueError, match="statistics='dataset' are of absolute actions"):
        trainer.fit(module, data)
    trainer, module, data = make_run("again", model={"config": {"delta_actions": [0, 1, 2]}})
    data.statistics_choice = "computed"
    trainer.fit(module, data)
    assert "relative to the state over chunks of 8" in module.policy.statistics_source
    policy = PI05Policy.from_pretrained(tmp_path / "again" / "policy")
    assert policy.config.delta_actions == (0, 1, 2)
    batch = next(iter(data.val_dataloader()))
    noise = torch.randn(len(batch["task"]), *policy.noise_shape)
    shifted = {**batch, "observation.state": batch["observation.state"].clone()}
    # The prompt spells the state, too; the same prompt leaves the shift alone.
    policy.processor._bins = lambda *args: torch.zeros(len(batch["task"]), 8, dtype=torch.int64)
    still = policy.sample_actions(batch, noise)
    shifted["observation.state"][:, 1] += 2.0
    torch.testing.assert_close(policy.sample_actions(shifted, noise)[..., 1], still[..., 1] + 2.0, rtol=0, atol=1e-5)


def test_fp32_values_of_a_checkpoint_survive_bf16_training(make_run, tmp_path: Path):
    """A learning rate too small for fp32: the export must hold the bits that training started from."""
    PI05Policy(PI05Config.tiny()).save_pretrained(tmp_path / "fp32")
    model = {"size": None, "pretrained": str(tmp_path / "fp32"), "config": {"dtype": "bfloat16"}}
    training = {"lr": 1e-30, "final_lr": 0.0, "sample_batches": 0}
    trainer, module, data = make_run("run", model=model, training=training, max_steps=1, limit_val_batches=0)
    trainer.fit(module, data)
    assert type(trainer.optimizers[0]).__name__ == "FusedAdamW"
    files = [load_file(path / "model.safetensors") for path in (tmp_path / "fp32", tmp_path / "run" / "policy")]
    name = "model.paligemma_with_expert.gemma_expert.model.layers.0.self_attn.q_proj.weight"
    assert files[1][name].dtype == torch.float32
    assert torch.equal(files[0][name], files[1][name])
    assert not torch.equal(module.policy.model.expert.layers[0].self_attn.q_proj.weight.float(), files[1][name])


FP8 = {"frozen_precision": "fp8", "config": {"dtype": "bfloat16", "islands": "openpi"}, "size": None}


def test_a_backbone_in_fp8_stays_and_the_exported_policy_has_it_unrounded(make_run, tmp_path):
    make_run("base")[1].policy.save_pretrained(tmp_path / "start")
    model = {"pretrained": str(tmp_path / "start"), **FP8}
    trainer, module, data = make_run("run", model=model, enable_checkpointing=True)
    before, backbone = weights_of(module), module.policy.backbone_hash()
    trainer.fit(module, data)
    moved = {name for name, p in module.named_parameters() if not torch.equal(p, before[name])}
    assert moved
    assert all(".expert." in name for name in moved)
    assert module.policy.backbone_hash() == backbone
    start = load_file(tmp_path / "start" / "model.safetensors")
    exported = load_file(tmp_path / "run" / "policy" / "model.safetensors")
    key = "model.paligemma_with_expert.paligemma.model.language_model.layers.0.mlp.up_proj.weight"
    assert torch.equal(exported[key], start[key])

    trainer.save_checkpoint(tmp_path / "half.ckpt")
    trainer, resumed, data = make_run("resumed", model=model, max_steps=6)
    trainer.fit(resumed, data, ckpt_path=tmp_path / "half.ckpt", weights_only=False)
    assert resumed.policy.backbone_hash() == backbone
    trainer, other, data = make_run("other", model={**model, "frozen_precision": None}, max_steps=6)
    with pytest.raises(ValueError, match="weights do not fit this run's"):
        trainer.fit(other, data, ckpt_path=tmp_path / "half.ckpt", weights_only=False)


def test_fp8_needs_a_checkpoint():
    with pytest.raises(ValueError, match="frozen_precision='fp8' needs pretrained"):
        PI05Module(size="tiny", frozen_precision="fp8")


def test_an_fp8_run_does_not_go_on_with_another_backbone(make_run, tmp_path: Path):
    trainer, module, data = make_run("base", max_steps=1)
    trainer.fit(module, data)
    base = tmp_path / "base" / "policy"
    module.policy.model.prefix.paligemma.language_model.layers[0].self_attn.k_proj.weight.data[0] += 0.1
    module.policy.save_pretrained(tmp_path / "other")

    def run(name: str, pretrained: Path, steps: int):
        bf16 = {"dtype": "bfloat16", "islands": "openpi"}
        model = {"size": None, "pretrained": str(pretrained), "frozen_precision": "fp8", "config": bf16}
        return make_run(name, model=model, max_steps=steps)

    trainer, module, data = run("first", base, 2)
    trainer.fit(module, data)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    trainer, module, data = run("second", tmp_path / "other", 4)
    with pytest.raises(ValueError, match=r"another backbone than that of .*other \(.*k_proj.weight differs\)"):
        trainer.fit(module, data, ckpt_path=tmp_path / "a.ckpt", weights_only=True)
    trainer, module, data = run("third", base, 4)
    trainer.fit(module, data, ckpt_path=tmp_path / "a.ckpt", weights_only=True)
    assert trainer.global_step == 4


def test_cuda_graphs_without_a_gpu_are_refused_before_the_first_batch(make_run):
    trainer, module, data = make_run("run", model={"cuda_graphs": True})
    with pytest.raises(ValueError, match="CUDA graphs need a CUDA device, and the model is on cpu"):
        trainer.fit(module, data)
