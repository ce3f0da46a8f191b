"""How does a command load the policy that its options name?"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from soma_lightning.models.registry import get_model


def load_policy(
    policy: str, model_type: str, device: torch.device, policy_options: Mapping[str, Any] | None = None
) -> Any:
    """The policy of a checkpoint folder on `device`, in eval mode. policy_options: further entries for `get_model`."""
    check_policy_options(policy_options)
    model: Any = get_model({"model_type": model_type, "model_path": policy, **(policy_options or {})})
    return model.to(device).eval()


def check_policy_options(policy_options: Mapping[str, Any] | None) -> None:
    """Raises ValueError for options that name the model or its device, which other options do."""
    if set(policy_options or {}) & {"model_type", "model_path"}:
        raise ValueError(f"policy_options={policy_options} must not name the model: that is --policy and --model_type")
    if "device" in (policy_options or {}):
        raise ValueError(f"policy_options={policy_options} must not name the device: that is --device")


def stored_type(policy: Path) -> str:
    """The model type that a checkpoint folder names in its config.json."""
    config = policy / "config.json"
    if not policy.is_dir():
        raise FileNotFoundError(f"there is no folder {policy}; pass the `policy` folder that soma fit wrote")
    if not config.is_file():
        raise FileNotFoundError(
            f"{policy} holds no config.json, so it is no checkpoint; pass the `policy` folder that soma fit wrote"
        )
    try:
        stored = json.loads(config.read_text())
    except ValueError as error:
        raise ValueError(f"{config} is no valid JSON: {error}") from error
    if not isinstance(stored, dict):
        raise ValueError(f"{config} must hold a JSON object, not {type(stored).__name__}")
    return str(stored.get("type", "pi05"))
