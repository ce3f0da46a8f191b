"""What every policy's LightningModule shares: frozen parts, optimizer and schedule, losses, validation, export."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from soma_lightning.contract import ACTION, ACTION_IS_PAD, TRAINING_FILE
from soma_lightning.layout.full_state import is_sharded
from soma_lightning.models.flow import keyed_generator
from soma_lightning.modules.ema import TrainableEMA
from soma_lightning.modules.schedule import fit_to_run, warmup_cosine
from soma_lightning.modules.timing import StepTimer
from soma_lightning.optim.masters import has_masters

TRAIN_STREAM, VALIDATION_STREAM, SAMPLE_STREAM = range(3)


@dataclass(frozen=True)
class TrainingConfig:
    """How a policy is fine-tuned. Defaults are the public pi0.5 recipe (LeRobot).

    lr, final_lr: peak and last learning rate. warmup_steps, decay_steps: shrunk in proportion in shorter runs.
    flow_draws: (noise, time) draws per sample, which share one prefix. state_noise: standard deviation added to the
    normalised state in training. ema_decay: average of the trained parameters, used in all but training.
    sample_batches: validation batches on which actions are sampled and compared with the recorded ones.
    export: write the policy to `<default_root_dir>/policy` when the fit ends.
    """

    lr: float = 2.5e-5
    final_lr: float = 2.5e-6
    warmup_steps: int = 1000
    decay_steps: int = 30000
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.01
    flow_draws: int = 1
    state_noise: float = 0.0
    ema_decay: float | None = None
    sample_batches: int = 1
    export: bool = True

    def __post_init__(self) -> None:
        for name in ("lr", "final_lr", "eps", "weight_decay", "state_noise"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name}={getattr(self, name)} must be a finite number")
        if self.lr <= 0 or not 0 <= self.final_lr <= self.lr:
            raise ValueError(f"lr={self.lr} must be positive and final_lr={self.final_lr} must lie in 0..lr")
        if self.flow_draws < 1:
            raise ValueError(f"flow_draws={self.flow_draws} must be at least 1")
        for name in ("sample_batches", "weight_decay", "eps"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas={self.betas} must be two numbers in [0, 1)")
        if self.state_noise < 0:
            raise ValueError(f"state_noise={self.state_noise} is a standard deviation and cannot be negative")
        if not 0 <= self.warmup_steps <= self.decay_steps or self.decay_steps < 1:
            raise ValueError(
                f"need 0 <= warmup_steps <= decay_steps and decay_steps >= 1, got warmup_steps={self.warmup_steps} "
                f"and decay_steps={self.decay_steps}"
            )


#: The defaults as one object (it is frozen, so sharing it is safe).
PUBLIC_RECIPE = TrainingConfig()


class PolicyModule(LightningModule):
    """Fine-tunes `policy`: a policy with `sft_forward`, `sample_actions`, `frozen_modules` and `save_pretrained`.

    `save_pretrained` also takes `optimizer`, whose fp32 masters it writes, if the policy trains in bf16, and `values`,
    averages by the names below `policy.model`, if it is trained with ema_decay. All ranks call it when it is sharded.

    Noise and flow times are drawn from a generator seeded by (torch's seed when the module was built, rank, epoch,
    batch), so a resumed run continues exactly and validation losses compare across epochs.
    """

    def __init__(self, policy: Any, training: TrainingConfig) -> None:
        super().__init__()
        self.policy = policy
        self.training_config = training
        self.draw_seed = torch.initial_seed()
        self._frozen: list[nn.Module] = policy.frozen_modules()  # as built: a callback that thaws one is caught
        self._ema = TrainableEMA(training.ema_decay) if training.ema_decay is not None else None
        self._feature_cache: Any = None  # the data module's, when it has one
        self._schedule: tuple[int, int] | None = None  # (warm-up, decay) steps of this run
        self._resumed_schedule: tuple[int, int] | None = None

    # -- frozen parts -----------------------------------------------------------------------------------------------

    def _check_frozen(self) -> None:
        """The policy keeps its frozen modules in eval mode and out of the optimizer; a callback may not."""
        optimized = {id(p) for o in self.trainer.optimizers for group in o.param_groups for p in group["params"]}
        for module in self._frozen:
            for name, p in module.named_parameters():
                if p.requires_grad or p.grad is not None or id(p) in optimized:
                    raise RuntimeError(
                        f"the frozen parameter {name} requires grad, holds a gradient or is in an optimizer; to train "
                        "more of the policy build it with trainable='all' instead of thawing parts of it"
                    )
            left = [name for name, part in module.named_modules() if part.training]
            if left:
                raise RuntimeError(f"frozen modules were switched to training mode: {left[:5]}")

    def on_train_start(self) -> None:
        self._check_frozen()
        if self._feature_cache is not None:  # before batches are loaded, so that what it has is not decoded
            with self.trainer.precision_plugin.forward_context():
                self._feature_cache.open(self.policy)
        if self._resumed_schedule is not None and self._resumed_schedule != self._schedule:
            rank_zero_warn(
                f"the checkpoint's learning rate followed a schedule of {self._resumed_schedule} (warm-up, decay) "
                f"steps and goes on with one of {self._schedule}, because this run has another length (max_steps, "
                "max_epochs, data or batch size); it extends the training but does not equal one run of this length"
            )

    def on_validation_model_train(self) -> None:
        super().on_validation_model_train()
        self._check_frozen()

    def check_precision(self) -> None:
        """Raises ValueError when the Trainer's precision would round what the policy keeps; here nothing is known."""

    # -- cached features --------------------------------------------------------------------------------------------

    def connect_features(self, data: Any) -> None:
        """Reads frozen features from the data module's cache, if it has one; call it in `setup`.

        Raises ValueError when a setting would change the features from one epoch to the next.
        """
        connect = getattr(data, "connect_features", None)
        self._feature_cache = None if connect is None else connect()
        if self._feature_cache is None:
            return
        self.policy.check_features_fixed()
        if noise := self.training_config.state_noise:
            raise ValueError(
                f"training.state_noise={noise} changes the prompts in every epoch, but feature_cache="
                f"{self._feature_cache.where!r} keeps what the backbone made of them; set one of them to 0 or null"
            )

    def _features(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The argument `features` of a policy's methods; none without a cache."""
        if self._feature_cache is None:
            return {}
        return {"features": self._feature_cache.features(self.policy, batch)}

    def fill_features(self, batch: Mapping[str, Any] | None) -> None:
        """Caches the features of a batch; None ends the filling, after which every rank sees what was written."""
        if batch is not None:
            self._features(batch)
            return
        self._feature_cache.flush()
        self.trainer.strategy.barrier("feature_cache")
        self._feature_cache.refresh()

    def on_train_epoch_end(self) -> None:
        if self._feature_cache is None:
            return
        self.fill_features(None)
        self.log("feature_hit_percent", self._feature_cache.take_hit_percent(), sync_dist=True)

    def teardown(self, stage: str) -> None:
        if self._feature_cache is not None:
            self._feature_cache.flush()

    # -- steps ------------------------------------------------------------------------------------------------------

    def _generator(self, stream: int, epoch: int, batch_idx: int) -> torch.Generator:
        return keyed_generator((self.draw_seed, stream, self.global_rank, epoch, batch_idx), self.device)

    def training_step(self, batch: Mapping[str, Any], batch_idx: int) -> Tensor:
        generator = self._generator(TRAIN_STREAM, self.current_epoch, batch_idx)
        config = self.training_config
        out = self.policy.sft_forward(
            batch,
            flow_draws=config.flow_draws,
            state_noise=config.state_noise,
            generator=generator,
            **self._features(batch),
        )
        self.log("train_loss", out["loss"].detach(), prog_bar=True, batch_size=len(batch[ACTION]))
        loss: Tensor = out["loss"]
        return loss

    def validation_step(self, batch: Mapping[str, Any], batch_idx: int) -> None:
        self._log_errors("val", batch, batch_idx, sample=batch_idx < self.training_config.sample_batches)

    def test_step(self, batch: Mapping[str, Any], batch_idx: int) -> None:
        self._log_errors("test", batch, batch_idx, sample=True)

    def predict_step(self, batch: Mapping[str, Any], batch_idx: int) -> Tensor:
        """Sampled action chunks [B, H, A] in the data's units."""
        generator = self._generator(SAMPLE_STREAM, 0, batch_idx)
        actions: Tensor = self.policy.sample_actions(batch, generator=generator, **self._features(batch))
        return actions

    def _log_errors(self, name: str, batch: Mapping[str, Any], batch_idx: int, *, sample: bool) -> None:
        size, features = len(batch[ACTION]), self._features(batch)
        out = self.policy.sft_forward(batch, generator=self._generator(VALIDATION_STREAM, 0, batch_idx), **features)
        self.log(f"{name}_loss", out["loss"], prog_bar=True, batch_size=size, sync_dist=True)
        if sample:
            error = self._sampled_error(batch, self._generator(SAMPLE_STREAM, 0, batch_idx), features)
            self.log(f"{name}_action_error", error, prog_bar=True, batch_size=size, sync_dist=True)

    def _sampled_error(
        self, batch: Mapping[str, Any], generator: torch.Generator, features: Mapping[str, Any]
    ) -> Tensor:
        """Mean absolute difference between sampled and recorded actions, in the data's units, padding left out."""
        actions_BHA = self.policy.sample_actions(batch, generator=generator, **features)
        recorded_BHA = batch[ACTION].to(actions_BHA)
        error_BH = (actions_BHA - recorded_BHA).abs().mean(-1)
        real_BH = ~batch[ACTION_IS_PAD] if ACTION_IS_PAD in batch else torch.ones_like(error_BH, dtype=torch.bool)
        mean: Tensor = error_BH[real_BH].mean()
        return mean

    # -- optimizer --------------------------------------------------------------------------------------------------

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        trainable = [p for p in self.policy.parameters() if p.requires_grad]
        config = self.training_config
        optimizer = torch.optim.AdamW(
            trainable, lr=config.lr, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay
        )
        total_steps = self.trainer.estimated_stepping_batches
        self._schedule = warmup, decay = fit_to_run(config.warmup_steps, config.decay_steps, total_steps)
        schedule = LambdaLR(optimizer, warmup_cosine(warmup, decay, config.final_lr / config.lr))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def configure_callbacks(self) -> list[Callback]:
        callbacks: list[Callback] = [StepTimer()]
        if self._ema is not None:
            callbacks.append(self._ema)
        return callbacks

    # -- checkpoint and export --------------------------------------------------------------------------------------

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        schedule = {} if self._schedule is None else {"schedule": list(self._schedule)}
        checkpoint["soma_policy"] = {**self._description(), **schedule, "draw_seed": self.draw_seed}

    def _description(self) -> dict[str, Any]:
        """What must be the same for a resumed run to continue: the policy's facts and how it is trained."""
        training = asdict(self.training_config)
        for without_effect in ("sample_batches", "export"):
            del training[without_effect]
        return {**self.policy.describe(), "training": {**training, "betas": list(training["betas"])}}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        saved = checkpoint.get("soma_policy")
        if not isinstance(saved, dict) or "draw_seed" not in saved:
            raise ValueError("this checkpoint was not written by a policy module: it has no whole 'soma_policy' entry")
        self.draw_seed = saved["draw_seed"]
        self._resumed_schedule = tuple(saved["schedule"]) if "schedule" in saved else None
        mine = self._description()
        found, wanted = set(checkpoint.get("state_dict", ())), set(self.state_dict())
        if found and found != wanted:  # a sharded checkpoint keeps its weights elsewhere, and checks them there
            raise ValueError(
                f"the checkpoint's weights do not fit this run's: missing {sorted(wanted - found)[:5]}, unexpected "
                f"{sorted(found - wanted)[:5]} ({len(found ^ wanted)} in all)"
            )
        continues = self._trainer is not None and self.trainer.state.fn == "fit"
        # Optimizer settings come out of the checkpoint, so a change of theirs would be ignored, the others not.
        for key in ("config", "statistics", *(["training"] if continues else [])):
            theirs = saved.get(key, {})
            if theirs != mine[key]:
                both = {**theirs, **mine[key]}
                changed = sorted(name for name in both if theirs.get(name) != mine[key].get(name))
                raise ValueError(
                    f"the checkpoint's {key} ({', '.join(changed)}) differs from this run's, so training would not "
                    "continue but change: resume with the data and settings it was trained on, or start a new run "
                    "from its exported policy folder (pretrained=...)"
                )

    def on_train_end(self) -> None:
        if not self.training_config.export or self.trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        folder = Path(self.trainer.default_root_dir) / "policy"
        if self.trainer.is_global_zero or is_sharded(self.policy):  # shards are gathered by all ranks
            self.export(folder, **self._exported_values())
        if self.trainer.is_global_zero:
            steps = {"step": self.trainer.global_step, "epoch": self.trainer.current_epoch}
            (folder / TRAINING_FILE).write_text(json.dumps(steps))
            rank_zero_info(f"policy written to {folder}")

    def export(self, folder: Path, **values: Any) -> None:
        """Writes what the run made; ranks with shards call it together. values: for `save_pretrained`."""
        self.policy.save_pretrained(folder, **values)

    def _exported_values(self) -> dict[str, Any]:
        """What is exported instead of rounded or raw parameters: averages, or an optimizer's fp32 masters."""
        if self._ema is not None:
            start = "policy.model."
            return {"values": {name.removeprefix(start): kept for name, kept in self._ema.shadow.items()}}
        found = next(filter(has_masters, self.trainer.optimizers), None)
        return {} if found is None else {"optimizer": found}

    def report_facts(self) -> dict[str, Any]:
        """What the run report says of the objective, beside the policy's own facts."""
        facts = {**self.policy.report_facts(), "training": asdict(self.training_config)}
        if self._schedule is not None:
            warmup, decay = self._schedule
            facts["schedule"] = f"warm-up over {warmup} steps, cosine down to step {decay}"
        return facts
