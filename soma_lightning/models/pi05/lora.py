"""Which layers of pi0.5 get low-rank adapters (peft's), what trains then, and how is an adapter saved?

LoRA (Hu et al. 2021, arXiv:2106.09685, section 4.1): y = W x + (alpha / rank) B A x; A and B train, W is frozen. B
starts at zero, so the network starts as it was.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed import get_rank
from torch.optim import Optimizer

from soma_lightning.imports import require_package
from soma_lightning.layout.full_state import is_sharded
from soma_lightning.models.pi05.checkpoint import public_key
from soma_lightning.models.pi05.folder import ADAPTER_WEIGHTS, written_at_once
from soma_lightning.models.tensor_files import gather_in_turn, write_safetensors
from soma_lightning.optim.masters import master_values

if TYPE_CHECKING:
    from soma_lightning.models.pi05.model import PI05Model

#: Named sets of targets: regular expressions over the names of `PI05Model`'s modules.
TARGETS = {
    "expert": r"expert\.(layers\.\d+\.self_attn\.(q|v)_proj|action_(in|out)_proj)",  # lerobot's default
    "paligemma": r"prefix\..*\.((q|k|v|o|gate|up|down|out)_proj|fc1|fc2)",  # RLinf's list
    "openpi": r"(prefix\.paligemma\.language_model|expert)\.layers\.\d+\.(self_attn|mlp)\.\w+_proj",
}


@dataclass(frozen=True)
class LoRAConfig:
    """Low-rank adapters on linear layers; everything else is frozen, but for `full`.

    rank: columns of B and rows of A. alpha: the product is scaled by alpha / rank; None means alpha = rank.
    targets: "expert" (query and value of the expert's attention, action projections), "paligemma" (attention and MLP of
    vision tower and language model), "openpi" (attention and MLP of language model and expert), or a regular expression
    that matches the whole names of `PI05Model`'s linear layers. Those of the last prefix layer that feed nothing are
    left out. full: modules that train in full beside the adapters, e.g. ("expert",).
    dtype: of the adapters. init: how A starts, "kaiming" (uniform) or "gaussian" (standard deviation 1 / rank).
    """

    rank: int = 16
    alpha: float | None = None
    targets: str = "expert"
    full: tuple[str, ...] = ()
    dtype: Literal["float32", "bfloat16"] = "float32"
    init: Literal["kaiming", "gaussian"] = "kaiming"

    def __post_init__(self) -> None:
        if isinstance(self.full, str):
            raise ValueError(f"lora full={self.full!r} must be a list of modules: [{self.full!r}]")
        object.__setattr__(self, "full", tuple(self.full))
        if not isinstance(self.rank, int) or self.rank < 1:
            raise ValueError(f"lora rank={self.rank!r} must be a whole number, at least 1")
        if self.alpha is not None and not 0 < self.alpha < math.inf:
            raise ValueError(f"lora alpha={self.alpha} must be positive and finite; None means the rank")
        for name, known in (("dtype", ("float32", "bfloat16")), ("init", ("kaiming", "gaussian"))):
            if getattr(self, name) not in known:
                raise ValueError(f"lora {name}={getattr(self, name)!r} must be one of {list(known)}")
        try:
            re.compile(TARGETS.get(self.targets, self.targets))
        except re.error as error:
            raise ValueError(
                f"lora targets={self.targets!r} is none of {list(TARGETS)} and no regular expression: {error}"
            ) from error

    @property
    def scale(self) -> float:
        """Factor of B A."""
        return 1.0 if self.alpha is None else self.alpha / self.rank


def add_lora(model: PI05Model, config: LoRAConfig) -> list[str]:
    """Puts adapters on the layers that `config` names and freezes the rest; returns the layers' names.

    The model must have its weights. Raises ValueError when no layer fits, for layers in fp8, for names in `full` that
    no module has, and for a model that has adapters, trains more than its expert, or checkpoints its layers already;
    ImportError without peft.
    """
    require_package("peft", purpose="train pi0.5 with LoRA")
    from peft import LoraConfig, inject_adapter_in_model

    _check_model(model)
    full = _full_modules(model, config)
    names = _target_names(model, config, full)
    if model.graphs is not None and any(name.startswith("prefix.") for name in (*names, *config.full)):
        raise ValueError("CUDA graphs of the expert would send no gradients to adapters of the prefix; use one of them")
    settings = LoraConfig(
        r=config.rank,
        lora_alpha=config.rank * config.scale,  # type: ignore[arg-type]
        target_modules="|".join(map(re.escape, names)),
        init_lora_weights=True if config.init == "kaiming" else "gaussian",
    )
    inject_adapter_in_model(settings, model)  # freezes all but the adapters
    for name, p in model.named_parameters():
        if ".lora_" in name:
            p.data = p.data.to(getattr(torch, config.dtype))
    for module in full:
        module.requires_grad_(True)
    for module in model.prefix.unreached_modules():
        module.requires_grad_(False)
    model.lora = config
    model.train(model.training)
    return names


def lora_facts(model: PI05Model, config: LoRAConfig) -> dict[str, Any]:
    """What the run report says of the adapters."""
    adapted = sum(name.endswith(".lora_A.default.weight") for name, _ in model.named_parameters())
    return {
        "trainable_part": " and ".join(["LoRA", *config.full]),
        "lora": f"rank {config.rank}, scale {config.scale:g}, {config.dtype}, on {adapted} layers ({config.targets})",
    }


def save_adapter(
    model: PI05Model,
    folder: str | Path,
    base: str | None = None,
    *,
    optimizer: Optimizer | None = None,
    values: Mapping[str, Tensor] | None = None,
) -> None:
    """Writes the adapters in peft's format, under lerobot's names, for `PeftModel.from_pretrained(policy, folder)`.

    Modules that train in full go with them. base: checkpoint that the adapters belong to. optimizer, values:
    as in `PI05Policy.save_pretrained`. The folder appears whole or not at all. Raises ValueError for a model without
    adapters, FileExistsError for a folder with other files.
    """
    from peft import LoraConfig

    config = model.lora
    if config is None:
        raise ValueError("this model has no adapters to save; add_lora makes them")
    masters = {} if optimizer is None else master_values(model, optimizer)
    all_values = {**model.state_dict(), **masters, **(values or {})}
    trained = {name: all_values[name] for name in model.trainable_names()}
    adapted = sorted({name.split(".lora_")[0] for name in trained if ".lora_" in name})
    full = sorted({name.rpartition(".")[0] for name in trained if ".lora_" not in name})
    settings = LoraConfig(
        r=config.rank,
        lora_alpha=config.rank * config.scale,  # type: ignore[arg-type]
        target_modules=[f"model.{public_key(name)}" for name in adapted],
        modules_to_save=[f"model.{public_key(name)}" for name in full] or None,
        base_model_name_or_path=base,
        inference_mode=True,
    )
    tensors = {f"base_model.model.model.{public_key(name.replace('.default.', '.'))}": v for name, v in trained.items()}
    if is_sharded(model) and get_rank() != 0:
        gather_in_turn(tensors)
        return
    with written_at_once(Path(folder)) as new:
        settings.save_pretrained(str(new))
        write_safetensors(new / ADAPTER_WEIGHTS, tensors)


def _check_model(model: PI05Model) -> None:
    if model.lora is not None:
        raise ValueError("the model has adapters already; build another one")
    if model.config.trainable != "expert":
        raise ValueError(
            f"trainable={model.config.trainable!r} has no effect with lora, which says itself what trains (lora.full "
            "names modules that train in full); leave trainable at 'expert'"
        )
    if model.gradient_checkpointing:
        raise ValueError("add adapters before gradient_checkpointing_enable(): they decide which layers train")
    if any(p.is_meta for p in model.parameters()):
        raise ValueError("the model has no values yet (meta device); load its weights before adding adapters")


def _full_modules(model: PI05Model, config: LoRAConfig) -> list[nn.Module]:
    modules = dict(model.named_modules())
    unknown = [name for name in config.full if name not in modules or not name]
    if unknown:
        raise ValueError(f"lora full={unknown} are no modules of pi0.5; examples: 'expert', 'expert.action_in_proj'")
    found = [modules[name] for name in config.full]
    idle = {id(p) for top in model.prefix.unreached_modules() for p in top.parameters()}
    for name, module in zip(config.full, found, strict=True):
        if all(id(p) in idle for p in module.parameters()):
            raise ValueError(f"lora full={name!r} has nothing that the loss can reach; leave it out")
    if any(not p.is_floating_point() or p.dtype.itemsize == 1 for module in found for p in module.parameters()):
        raise ValueError(f"lora full={list(config.full)} has weights in fp8, which do not train; leave out fp8")
    return found


def _target_names(model: PI05Model, config: LoRAConfig, full: list[nn.Module]) -> list[str]:
    pattern = re.compile(TARGETS.get(config.targets, config.targets))
    unreached = {id(m) for top in model.prefix.unreached_modules() for m in top.modules()}
    found = {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "in_features") and pattern.fullmatch(name) and id(module) not in unreached
    }
    if not found:
        raise ValueError(f"lora targets={config.targets!r} fits no linear layer; known sets: {list(TARGETS)}")
    other = [name for name, module in found.items() if type(module) is not nn.Linear]
    if other:
        raise ValueError(
            f"lora targets={config.targets!r} fits {len(other)} layers that are no nn.Linear ({other[0]}: "
            f"{type(found[other[0]]).__name__}): a backbone with frozen_precision='fp8' takes no adapters; leave out "
            "frozen_precision, or adapt the expert only"
        )
    in_full = {id(m) for top in full for m in top.modules()}
    twice = [name for name, module in found.items() if id(module) in in_full]
    if twice:
        raise ValueError(f"{len(twice)} layers are both in lora targets and in full, the first is {twice[0]}")
    return list(found)
