"""A flow-matching policy for environments of state observations: two small networks and nothing else.

For tasks such as point_reach, where a vision-language model would hide what an algorithm does.

Shape letters: B observations, S state dimensions, H action horizon, A_env action dimensions, A padded action width.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed import get_rank

from soma_lightning.contract import ACTION, STATE, EnvObservation
from soma_lightning.layout.full_state import gather, is_sharded
from soma_lightning.models.flow import euler_sample, interpolate
from soma_lightning.models.flow_policy import FlowPolicy
from soma_lightning.models.policy import Mode
from soma_lightning.models.tensor_files import write_safetensors
from soma_lightning.models.value_head import ValueHead

_FREQUENCIES = 8


@dataclass(frozen=True)
class FlowMLPConfig:
    """Sizes of the networks. action_width: of the flow, the robot's `action_dim` padded; hidden: of both networks."""

    state_dim: int
    action_dim: int
    chunk_size: int = 4
    action_width: int = 4
    hidden: int = 128
    num_inference_steps: int = 4
    n_action_steps: int = 4

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}={value!r} must be a whole number from 1")
        if self.action_dim > self.action_width:
            raise ValueError(f"action_dim={self.action_dim} is more than action_width={self.action_width}")
        if self.n_action_steps > self.chunk_size:
            raise ValueError(f"n_action_steps={self.n_action_steps} is more than chunk_size={self.chunk_size}")


class FlowMLPPolicy(FlowPolicy):
    """Velocity: an MLP of (state, noisy chunk, time). Value: an MLP of the state. Raw units, no normalisation."""

    def __init__(self, config: FlowMLPConfig) -> None:
        super().__init__()
        self.config = config
        width, chunk = config.hidden, config.chunk_size * config.action_width
        self.velocity_net = nn.Sequential(
            nn.Linear(config.state_dim + chunk + 2 * _FREQUENCIES, width),
            nn.SiLU(),
            nn.Linear(width, width),
            nn.SiLU(),
            nn.Linear(width, chunk),
        )
        self.value_head = ValueHead(config.state_dim, hidden=(width, width), activation="tanh")

    @property
    def noise_shape(self) -> tuple[int, int]:
        return self.config.chunk_size, self.config.action_width

    @property
    def env_action_dim(self) -> int:
        return self.config.action_dim

    def describe(self) -> dict[str, Any]:
        """The configuration as plain values."""
        return {"config": asdict(self.config)}

    def backbone_hash(self) -> str:
        """No part of this policy is frozen: the hash of nothing."""
        return hashlib.sha256().hexdigest()

    def report_facts(self) -> dict[str, Any]:
        """What a run report says about this policy (JSON-ready)."""
        return {"model": "flow_mlp", **asdict(self.config)}

    def record_observation(self, env_obs: EnvObservation) -> dict[str, Any]:
        states = torch.as_tensor(env_obs["states"], dtype=torch.float32, device=next(self.parameters()).device)
        if states.dim() != 2 or states.shape[1] != self.config.state_dim:
            raise ValueError(f"states must be [B, {self.config.state_dim}], got {list(states.shape)}")
        return {"states": states}

    def context_of(self, recorded: Mapping[str, Any]) -> Tensor:
        states: Tensor = recorded["states"]
        return states

    def velocity(self, context: Tensor, x_t: Tensor, time: Tensor) -> Tensor:
        inputs = torch.cat([context, x_t.flatten(1), _time_features(time)], dim=1)
        velocity: Tensor = self.velocity_net(inputs).view_as(x_t)
        return velocity

    def values_of(self, context: Tensor) -> Tensor:
        values: Tensor = self.value_head(context)
        return values

    def executable(self, x_0: Tensor, env_obs: EnvObservation) -> Tensor:
        return x_0[..., : self.config.action_dim].float()

    def sft_forward(  # type: ignore[override]
        self, batch: dict[str, Any], *, generator: torch.Generator | None = None
    ) -> dict[str, Tensor]:
        """Flow-matching loss (0-d mean) on `observation.state` [B, S] and `action` [B, H, A_env]; uniform times."""
        states, actions = batch[STATE], batch[ACTION]
        padded = nn.functional.pad(actions, (0, self.config.action_width - actions.shape[-1]))
        noise = torch.randn(padded.shape, generator=generator, device=padded.device)
        time = torch.rand(len(padded), generator=generator, device=padded.device)
        x_t, target = interpolate(padded, noise, time)
        return {"loss": (self.velocity(states, x_t, time) - target).square().mean()}

    def predict_action_batch(
        self,
        env_obs: EnvObservation,
        mode: Mode = "eval",
        compute_values: bool = True,
        num_steps: int | None = None,
        noise: Tensor | None = None,
        keys: Sequence[Sequence[int]] | None = None,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Action chunks float32 [B, H, A_env]; train mode as `FlowPolicy.explore`, with `keys`.

        num_steps, noise [B, H, A]: of eval mode, by default the configuration's steps and fresh noise.
        Raises ValueError for an unknown mode, and for arguments of the other one.
        """
        if mode not in ("eval", "train"):
            raise ValueError(f"mode must be 'eval' or 'train', got {mode!r}")
        if mode == "eval" and keys is not None:
            raise ValueError("keys are of mode='train'; pass noise")
        if mode == "train":
            if num_steps is not None or noise is not None:
                raise ValueError("num_steps and noise are of mode='eval'; explore_with and keys decide in train mode")
            return self.explore(env_obs, compute_values=compute_values, keys=keys)
        with torch.no_grad():
            states = self.record_observation(env_obs)["states"]
            start = torch.randn(len(states), *self.noise_shape) if noise is None else noise
            steps = self.config.num_inference_steps if num_steps is None else num_steps
            x = euler_sample(lambda x_t, time: self.velocity(states, x_t, time), start.to(states), steps)
            return self.executable(x, env_obs).cpu(), {"num_steps": steps}

    def save_pretrained(self, folder: str | Path) -> None:
        """Writes config.json and model.safetensors. A sharded policy is saved by all ranks together: rank 0 writes."""
        weights = gather(dict(self.state_dict()), keep=True)
        if is_sharded(self) and get_rank() != 0:
            return
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps({"type": "flow_mlp", **asdict(self.config)}, indent=2))
        write_safetensors(_weights(folder), weights)

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> FlowMLPPolicy:
        """Loads what `save_pretrained` wrote. Raises ValueError for a configuration or weights that do not fit."""
        config = json.loads((Path(folder) / "config.json").read_text())
        if config.pop("type", None) != "flow_mlp":
            raise ValueError(f"{folder} holds no flow_mlp policy")
        policy = cls(_config(config, f"{folder}/config.json"))
        try:
            policy.load_state_dict(load_file(_weights(Path(folder))))
        except RuntimeError as error:
            raise ValueError(f"the weights in {folder} do not fit its config.json: {error}") from error
        return policy


def build_flow_mlp(cfg: Any, torch_dtype: torch.dtype | None) -> FlowMLPPolicy:
    """Builder of model_type "flow_mlp": the checkpoint in `model_path`, or a new one of FlowMLPConfig's fields."""
    if torch_dtype not in (None, torch.float32):
        raise ValueError(f"flow_mlp computes in fp32; leave precision={cfg['precision']!r} out")
    sizes = {name: value for name, value in cfg.items() if name not in ("model_type", "model_path", "precision")}
    if cfg.get("model_path") is None:
        return FlowMLPPolicy(_config(sizes, "the model's configuration"))
    if sizes:
        raise ValueError(f"{sorted(sizes)} would be ignored: the checkpoint in model_path says them")
    return FlowMLPPolicy.from_pretrained(cfg["model_path"])


def _config(values: Mapping[str, Any], source: str) -> FlowMLPConfig:
    """ValueError, with `source`, for names that are missing or unknown."""
    known = {one.name: one.default is MISSING for one in fields(FlowMLPConfig)}
    unknown = sorted(set(values) - set(known))
    missing = [name for name, is_required in known.items() if is_required and name not in values]
    if unknown or missing:
        raise ValueError(f"{source} of a flow_mlp: unknown {unknown}, missing {missing}; known: {', '.join(known)}")
    return FlowMLPConfig(**values)


def _weights(folder: Path) -> Path:
    return folder / "model.safetensors"


def _time_features(time: Tensor) -> Tensor:
    """Sines and cosines of eight octaves: time [B] -> [B, 16]."""
    angles = time[:, None] * (2.0 ** torch.arange(_FREQUENCIES, device=time.device) * (math.pi / 2))
    return torch.cat([angles.sin(), angles.cos()], dim=1)
