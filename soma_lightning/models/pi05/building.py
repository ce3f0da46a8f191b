"""How does the registry build pi0.5 from a configuration?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from soma_lightning.models.pi05.config import PI05Config, changed_config
from soma_lightning.models.pi05.lora import LoRAConfig, add_lora
from soma_lightning.models.pi05.policy import PI05Policy


def build_pi05(cfg: Mapping[str, Any], torch_dtype: torch.dtype | None) -> PI05Policy:
    """Builder of model_type "pi05" for the registry.

    cfg: model_path (folder or hub id; None builds a fresh policy), revision, size ("base" or "tiny", without
    model_path), device (by default torch's default device), frozen_precision ("fp8", with model_path), cuda_graphs
    (true records the expert's passes), is_lora (adapters of rank lora_rank, 32 if unset, on PaliGemma, while the expert
    trains in full; lora_rank alone does nothing), and any field of PI05Config. torch_dtype: float32, bfloat16, or None
    for the checkpoint's. Raises ValueError for anything else.
    """
    settings = dict(cfg)
    _check_flags(settings)
    if settings.pop("cuda_graphs", False):
        policy = build_pi05(settings, torch_dtype)
        policy.model.use_cuda_graphs()
        return policy
    frozen_precision = settings.pop("frozen_precision", None)
    for handled in ("model_type", "precision"):
        settings.pop(handled, None)
    path, revision, size, device = (settings.pop(name, None) for name in ("model_path", "revision", "size", "device"))
    is_lora, rank = settings.pop("is_lora", False), settings.pop("lora_rank", 32)
    if is_lora:
        policy = build_pi05({**cfg, "is_lora": False}, torch_dtype)
        add_lora(policy.model, LoRAConfig(rank, targets="paligemma", full=("expert",), init="gaussian"))
        return policy
    if torch_dtype is not None:
        if torch_dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"pi0.5 runs in float32 or bfloat16, not {torch_dtype}; set precision to fp32 or bf16")
        named = str(torch_dtype).removeprefix("torch.")
        if settings.setdefault("dtype", named) != named:
            raise ValueError(f"precision ({named}) and dtype={settings['dtype']!r} contradict each other; set one")
    if path is not None:
        if size is not None:
            raise ValueError(f"size={size!r} has no effect with model_path={path!r}; leave one of them out")
        return PI05Policy.from_pretrained(
            path, revision=revision, device=device, frozen_precision=frozen_precision, changes=settings
        )
    if frozen_precision is not None:
        raise ValueError(f"frozen_precision={frozen_precision!r} has no effect without model_path")
    if revision is not None:
        raise ValueError(f"revision={revision!r} has no effect without model_path; set model_path to a hub id")
    sizes = {None: PI05Config.base, "base": PI05Config.base, "tiny": PI05Config.tiny}
    if size not in sizes:
        raise ValueError(f"size={size!r} is unknown; known: base, tiny")
    with torch.device(torch.get_default_device() if device is None else device):
        return PI05Policy(changed_config(sizes[size](), settings))


def _check_flags(settings: Mapping[str, Any]) -> None:
    for name in ("cuda_graphs", "is_lora"):
        if not isinstance(settings.get(name, False), bool):
            raise ValueError(f"{name}={settings[name]!r} must be true or false")
