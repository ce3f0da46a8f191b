"""What does a policy answer to requests, and what does it tell about itself?

B requests, H predicted actions (chunk), K actions returned, A action dimensions.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from soma_lightning import __version__
from soma_lightning.models.flow import keyed_generator
from soma_lightning.models.policy import check_executed_steps
from soma_lightning.serving.observations import FIELD_OF_CAMERA, Observation, ObservationReader, stacked

#: What a policy must offer to be served.
POLICY_PARTS = ("predict_action_batch", "noise_shape", "config")


@dataclass(frozen=True)
class PolicySettings:
    """What decides the answers, beside the policy.

    executed_steps: K, actions of an answer; the policy's config.n_action_steps when None. denoising_steps: Euler steps
    of the flow; its config.num_inference_steps when None. seed: of the noise, see `draw_noise`. cameras: {name in a
    client's message: camera key}, in addition to the known names.
    """

    executed_steps: int | None = None
    denoising_steps: int | None = None
    seed: int = 0
    cameras: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, least in (("executed_steps", 1), ("denoising_steps", 1), ("seed", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name}={value} must be at least {least}")


@dataclass(frozen=True)
class ActionRequest:
    """What one client asks. number: answers that its connection got before."""

    observation: Observation
    number: int


def draw_noise(seed: int, number: int, shape: tuple[int, ...]) -> Tensor:
    """The noise a chunk starts from: a function of (seed, number of the connection's answers before) only."""
    return torch.randn(shape, generator=keyed_generator((seed, number)))


class ServedPolicy:
    """A policy that acts for clients.

    policy: has the POLICY_PARTS, as an evaluation needs them; config.cameras and config.state_dim, where it has them,
    say what a client must send. It is asked once here, on black images, so that what it lacks is told before a client
    comes; one that does not tell its cameras and state is first asked by a client.
    Raises ValueError for a policy that lacks a part, for more executed steps than it predicts, for cameras that have no
    place in an observation, and what the policy raises.
    """

    def __init__(self, policy: Any, model_type: str, settings: PolicySettings) -> None:
        if missing := [name for name in POLICY_PARTS if not hasattr(policy, name)]:
            raise ValueError(f"{type(policy).__name__} cannot be served: it has no {', '.join(missing)}")
        config = policy.config
        executed, denoising = settings.executed_steps, settings.denoising_steps
        self.policy, self.model_type, self.seed = policy, model_type, settings.seed
        self.executed_steps = config.n_action_steps if executed is None else executed
        self.denoising_steps = config.num_inference_steps if denoising is None else denoising
        check_executed_steps(policy, self.executed_steps)
        cameras, self.action_dim = getattr(config, "cameras", None), getattr(config, "action_dim", None)
        self.reader = ObservationReader(cameras, getattr(config, "state_dim", None), settings.cameras)
        if cameras is not None and self.reader.state_dim is not None:
            side = getattr(config, "image_resolution", 224)
            black = {FIELD_OF_CAMERA[camera]: np.zeros((side, side, 3), np.uint8) for camera in cameras}
            blank = Observation(black, np.zeros(self.reader.state_dim, np.float32), "pick up the cube")
            self.action_dim = self.answer([ActionRequest(blank, 0)])[0]["actions"].shape[1]

    @property
    def metadata(self) -> dict[str, Any]:
        """What a client is told first; None where the policy does not tell."""
        cameras = self.reader.cameras
        return {
            "server": f"soma-lightning {__version__}",
            "model_type": self.model_type,
            "action_dim": self.action_dim,
            "action_horizon": self.executed_steps,
            "chunk_size": self.policy.noise_shape[0],
            "cameras": None if cameras is None else list(cameras),
            "state_dim": self.reader.state_dim,
            "denoising_steps": self.denoising_steps,
            "seed": self.seed,
        }

    def answer(self, requests: Sequence[ActionRequest]) -> list[dict[str, Any]]:
        """One answer a request: `actions` float32 [K, A], and `server_timing` of the batch.

        Raises ValueError for actions that are not [B, H, A] or not finite, and what the policy raises.
        """
        begin = time.perf_counter()
        noise = [draw_noise(self.seed, request.number, self.policy.noise_shape) for request in requests]
        with torch.no_grad():
            actions, _ = self.policy.predict_action_batch(
                stacked([request.observation for request in requests]),
                mode="eval",
                compute_values=False,
                num_steps=self.denoising_steps,
                noise=torch.stack(noise),
            )
        chunks_BHA = np.asarray(actions, np.float32)
        if chunks_BHA.ndim != 3 or chunks_BHA.shape[:2] != (len(requests), self.policy.noise_shape[0]):
            raise ValueError(
                f"the policy predicts actions of shape {list(chunks_BHA.shape)}, not [{len(requests)}, "
                f"{self.policy.noise_shape[0]}, action dimensions]"
            )
        if not np.isfinite(chunks_BHA).all():
            raise ValueError("the policy predicts actions that are not finite")
        timing = {"infer_ms": 1e3 * (time.perf_counter() - begin), "batch_size": len(requests)}
        return [{"actions": chunk_HA[: self.executed_steps], "server_timing": timing} for chunk_HA in chunks_BHA]
