"""What is evaluated, how, with which versions and on which machine."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from soma_lightning import __version__
from soma_lightning.attention import attention_path
from soma_lightning.contract import TRAINING_FILE
from soma_lightning.envs.base import EnvGroup
from soma_lightning.evaluation.protocol import find_protocol
from soma_lightning.evaluation.settings import EvaluationSettings

#: What a policy must offer to be evaluated.
POLICY_PARTS = ("predict_action_batch", "noise_shape", "report_facts", "describe", "state_dict", "backbone_hash")


def policy_digest(policy: Any) -> str:
    """SHA-256 of all that decides a policy's actions: its description (configuration, statistics) and its weights."""
    digest = hashlib.sha256(json.dumps(policy.describe(), sort_keys=True).encode())
    for name, tensor in sorted(policy.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def check_policy_parts(policy: Any) -> None:
    """Raises ValueError for a policy that lacks one of the POLICY_PARTS."""
    missing = [name for name in POLICY_PARTS if not hasattr(policy, name)]
    if missing:
        raise ValueError(f"{type(policy).__name__} cannot be evaluated: it has no {', '.join(missing)}")


def run_report(
    policy: Any, settings: EvaluationSettings, envs: EnvGroup, *, digest: str, simulator: Mapping[str, str]
) -> dict[str, Any]:
    """What is evaluated and how, in plain types. digest: of `policy_digest`. simulator: facts of the environment."""
    states = settings.init_states
    protocol = find_protocol(settings.env, settings.protocol)
    return {
        "settings": asdict(settings),
        "protocol": None if protocol is None else protocol.statement(settings),
        "init_states": {task: [states[0], states[-1]] for task in settings.tasks},
        "step_limits": {task: envs.tasks[task].max_steps for task in settings.tasks},
        "simulator": dict(simulator),
        "policy": {
            "path": settings.policy,
            "digest": digest,
            "training": training_of(Path(settings.policy)),
            "backbone_hash": policy.backbone_hash(),
            **policy.report_facts(),
        },
        "attention": attention_path(),
        "versions": {
            "soma_lightning": __version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
        "machine": {
            "device": device_name(policy),
            "cpu_cores": os.cpu_count(),
            "slots": envs.num_slots,
            "system": platform.platform(),
        },
    }


def training_of(policy: Path) -> dict[str, Any] | None:
    """What `soma fit` noted beside the policy's weights, such as its step; None for a policy from elsewhere."""
    file = policy / TRAINING_FILE
    if not file.is_file():
        return None
    try:
        training = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(training, dict):
            return training
        error: object = f"it holds a {type(training).__name__}"
    except ValueError as invalid:
        error = invalid
    raise ValueError(f"{file} is no JSON object ({error}); restore it, or remove it to do without what it says")


def device_name(policy: Any) -> str:
    """Where the policy computes: the GPU's name, or the type of device."""
    device = next((tensor.device for tensor in policy.state_dict().values()), torch.device("cpu"))
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
