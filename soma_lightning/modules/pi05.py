"""Fine-tuning of pi0.5 as a LightningModule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from soma_lightning.models.pi05.config import PI05Config, Trainable, changed_config
from soma_lightning.models.pi05.folder import check_replaceable
from soma_lightning.models.pi05.lora import LoRAConfig, add_lora, lora_facts, save_adapter
from soma_lightning.models.pi05.memory import Batch, MemoryEstimate, estimate_memory
from soma_lightning.models.pi05.policy import PI05Policy
from soma_lightning.models.tensor_files import whole
from soma_lightning.modules.base import PUBLIC_RECIPE, PolicyModule, TrainingConfig
from soma_lightning.optim.masters import has_masters


class PI05Module(PolicyModule):
    """Trains the action expert of pi0.5 (or all of it) on batches of a `LeRobotDataModule`.

    pretrained: folder or hub id of a checkpoint (any public layout); None starts from random weights.
    revision: hub revision of `pretrained`.
    size: "base" (public sizes, also what None means) or "tiny"; only for a model without `pretrained`.
    config: changes to the configuration of the checkpoint or size, e.g. {"dtype": "bfloat16"}.
    trainable: "expert" (expert, action and time projections), "all_but_vision" (the vision tower is frozen) or "all".
    lora: adapters that train instead of what `trainable` says; needs peft. The run leaves the merged policy, as always,
    and beside it `adapter` in peft's format.
    frozen_precision: "fp8" stores the frozen backbone of `pretrained` in fp8 and runs its products there.
    cuda_graphs: the expert's passes are recorded once a shape and replayed, so that a GPU does not wait for the host.
    gradient_checkpointing: layers that train keep only their inputs and run twice: less memory, more time.
    statistics: "data" takes the data module's, "checkpoint" keeps those saved with `pretrained`.
    training: optimizer, schedule and objective.
    """

    def __init__(
        self,
        pretrained: str | None = None,
        revision: str | None = None,
        size: Literal["base", "tiny"] | None = None,
        config: dict[str, Any] | None = None,
        trainable: Trainable = "expert",
        lora: LoRAConfig | None = None,
        frozen_precision: Literal["fp8"] | None = None,
        cuda_graphs: bool = False,
        gradient_checkpointing: bool = False,
        statistics: Literal["data", "checkpoint"] = "data",
        training: TrainingConfig = PUBLIC_RECIPE,
    ) -> None:
        if "trainable" in (config or {}):
            raise ValueError("config must not say what trains: set trainable itself, e.g. trainable='all'")
        changes = {**(config or {}), "trainable": trainable}
        if pretrained is None and revision is not None:
            raise ValueError(f"revision={revision!r} has no effect without pretrained; set pretrained to a hub id")
        if pretrained is not None and size is not None:
            raise ValueError(f"size={size!r} has no effect with pretrained={pretrained!r}; leave one of them out")
        if pretrained is None and frozen_precision is not None:
            raise ValueError(f"frozen_precision={frozen_precision!r} needs pretrained, from which it is saved again")
        if pretrained is None and statistics == "checkpoint":
            raise ValueError("statistics='checkpoint' needs pretrained; use statistics='data' for a new model")
        if pretrained is not None:
            policy = PI05Policy.from_pretrained(
                pretrained, revision=revision, frozen_precision=frozen_precision, changes=changes
            )
        else:
            sizes = {"base": PI05Config.base(), "tiny": PI05Config.tiny()}
            policy = PI05Policy(changed_config(sizes[size or "base"], changes))
            policy.reset_parameters()
        if lora is not None:
            add_lora(policy.model, lora)
        if cuda_graphs and (gradient_checkpointing or policy.model.prefix_trains):
            raise ValueError(
                "cuda_graphs=true records the expert alone, without recomputation: it needs a frozen backbone "
                "(trainable='expert', lora targets='expert') and gradient_checkpointing=false"
            )
        if gradient_checkpointing:
            policy.model.gradient_checkpointing_enable()
        super().__init__(policy, training)
        self.statistics_from = statistics
        self.cuda_graphs = cuda_graphs
        self.save_hyperparameters({"pretrained": pretrained, "revision": revision, "size": size, "config": config})

    def setup(self, stage: str) -> None:
        """Takes statistics and dimensions from the data module before anything is trained or loaded."""
        data = getattr(self.trainer, "datamodule", None)
        if data is not None and hasattr(data, "connect_policy"):
            data.connect_policy(self.policy.config)  # first: statistics of delta actions depend on the chunk
        if self.statistics_from == "data":
            if data is None or not hasattr(data, "statistics"):
                raise ValueError(
                    "statistics='data' needs a data module with `statistics` (LeRobotDataModule); pass one, or set "
                    "statistics='checkpoint'"
                )
            self.policy.set_statistics(data.statistics, source=data.statistics_source)
        self.policy.processor.prepare()  # a tokenizer that cannot be had is reported now, not at the first batch
        if data is not None and hasattr(data, "cameras") and hasattr(data, "tasks"):
            self.policy.processor.check_data(data.cameras, data.tasks)
        self.connect_features(data)
        if stage == "fit" and self.training_config.export:
            root = Path(self.trainer.default_root_dir)
            for name in ("policy",) if self.policy.model.lora is None else ("policy", "adapter"):
                check_replaceable(root / name)

    def on_fit_start(self) -> None:
        self._start()
        if self.policy.loaded_from is not None and self.trainer.ckpt_path is None:  # a resumed run has its masters
            for optimizer in filter(has_masters, self.trainer.optimizers):
                self.policy.seed_masters(optimizer)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        super().on_load_checkpoint(checkpoint)
        if self.policy.frozen_precision is not None:
            self._check_backbone(checkpoint.get("state_dict", {}))

    def _check_backbone(self, weights: Mapping[str, Tensor]) -> None:
        """What an export would copy from `pretrained` is the backbone that the checkpoint was trained on."""
        mine, start = self.state_dict(), "policy.model.prefix."
        for name, theirs in weights.items():
            if name.startswith(start) and not _same_bits(theirs, whole(mine[name])):
                raise ValueError(
                    f"the checkpoint was trained on another backbone than that of {self.policy.loaded_from} "
                    f"({name.removeprefix(start)} differs), which an export would take; name the pretrained folder of "
                    "that run, unchanged"
                )

    def export(self, folder: Path, **values: Any) -> None:
        """The policy, and its adapters in `adapter` beside it."""
        super().export(folder, **values)
        if self.policy.model.lora is not None:
            base = None if self.policy.loaded_from is None else str(self.policy.loaded_from)
            save_adapter(self.policy.model, folder.with_name("adapter"), base, **values)

    def report_facts(self) -> dict[str, Any]:
        facts, lora = super().report_facts(), self.policy.model.lora
        facts["gradient_checkpointing"] = self.policy.model.gradient_checkpointing
        if lora is not None:
            facts |= lora_facts(self.policy.model, lora)
        estimate = self.memory_estimate()
        return facts if estimate is None else {**facts, "memory_estimate": estimate.facts()}

    def memory_estimate(self) -> MemoryEstimate | None:
        """Of a training step on this rank's device; None when no data module says how large its batches are."""
        data: Any = None if self._trainer is None else getattr(self.trainer, "datamodule", None)
        if not all(hasattr(data, name) for name in ("batch_size", "cameras", "tasks")):
            return None
        cache = self._feature_cache
        is_stored = cache is not None and cache.where == "device"
        batch = Batch(
            rows=data.batch_size,
            cameras=len(data.cameras),
            prompt_tokens=self.policy.processor.longest_prompt(data.tasks),
            flow_draws=self.training_config.flow_draws,
            features_cached=cache is not None,
            stored_samples=cache.expected if is_stored else 0,
            stored_bytes=cache.bytes_a_number if is_stored else None,
        )
        masters = any(has_masters(optimizer) for optimizer in self.trainer.optimizers)
        return estimate_memory(self.policy.model, batch, masters=masters, average=self._ema is not None)

    def _description(self) -> dict[str, Any]:
        description, lora = super()._description(), self.policy.model.lora
        if lora is not None:
            description["config"]["lora"] = {**asdict(lora), "full": list(lora.full)}
        return description

    def check_precision(self) -> None:
        self.policy.model.check_dtypes()

    def _start(self) -> None:
        """Before anything runs: the Trainer has placed the policy and applied its precision by now."""
        self.check_precision()
        if not self.cuda_graphs:
            return
        if self.policy.model.graphs is None:
            self.policy.model.use_cuda_graphs()
        with self.trainer.precision_plugin.forward_context():
            self.policy.model.graphs.check()

    def on_validation_start(self) -> None:
        self._start()

    def on_test_start(self) -> None:
        self._start()

    def on_predict_start(self) -> None:
        self._start()


def _same_bits(one: Tensor, other: Tensor) -> bool:
    bits = (x.contiguous().view(-1).view(torch.uint8) for x in (one.to(other.device), other))
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*bits)
