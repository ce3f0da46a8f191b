"""How does a flow-matching policy explore, and how is what it did computed again? The same for every such model.

The mathematics is in flow_sde.py; a model adds how an observation is encoded, its velocity and its value.

Shape letters: B observations, K denoising steps, H action horizon, A action width of the model, A_env of the robot.
"""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from soma_lightning.contract import EnvObservation
from soma_lightning.models.flow_sde import FlowSDE
from soma_lightning.models.policy import BasePolicy

#: Entry of `forward_inputs` for FrozenFeatures; all others are tensors.
FEATURES = "features"
#: Entries of `forward_inputs` that every flow policy records, beside those of its own observations.
CHAINS, DENOISE_INDS, NOISE_LEVEL = "chains", "denoise_inds", "noise_level"
ACTION, MODEL_ACTION = "action", "model_action"


class FlowPolicy(BasePolicy):
    """A policy whose actions are integrated from noise; explores by stochastic denoising steps (Flow-SDE).

    flow_sde: how it explores; None until `explore_with` is called, and then it cannot act in train mode.
    """

    flow_sde: FlowSDE | None = None

    def explore_with(self, flow_sde: FlowSDE) -> None:
        """Sets the stochastic process that train mode samples from and `default_forward` replays.

        Raises ValueError for flow_noise: a policy here has no network that its deviation could come from.
        """
        if flow_sde.is_joint:
            raise ValueError(
                f"{type(self).__name__} has no noise network, which flow_noise needs; use flow_sde or flow_cps"
            )
        self.flow_sde = flow_sde

    # -- what a model adds --------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def noise_shape(self) -> tuple[int, int]:
        """(H, A): shape of one sample's flow noise."""

    @property
    @abstractmethod
    def env_action_dim(self) -> int:
        """A_env: the leading action dimensions that reach the robot, and count in log-probabilities."""

    @abstractmethod
    def record_observation(self, env_obs: EnvObservation) -> dict[str, Any]:
        """What velocity and value read, row by row, so that both can be computed again: batched entries."""

    @abstractmethod
    def context_of(self, recorded: Mapping[str, Any]) -> Any:
        """What `velocity` reads, from recorded entries (more entries than its own are there and left alone)."""

    @abstractmethod
    def velocity(self, context: Any, x_t: Tensor, time: Tensor) -> Tensor:
        """d x_t / d t, float32 [B, H, A]; time float32 [B], 1 = noise."""

    @abstractmethod
    def values_of(self, context: Any) -> Tensor:
        """State values, float32 [B]."""

    @abstractmethod
    def executable(self, x_0: Tensor, env_obs: EnvObservation) -> Tensor:
        """Actions float32 [B, H, A_env] in the environment's units; x_0 [B, H, A] as the flow ended."""

    # -- acting and replay --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def explore(
        self, env_obs: EnvObservation, *, compute_values: bool = True, keys: Sequence[Sequence[int]] | None = None
    ) -> tuple[Tensor, dict[str, Any]]:
        """Train mode of `predict_action_batch`: samples with stochastic steps and records what replay needs.

        keys: one key of non-negative integers an observation, on which its randomness alone depends; drawn from
        torch's generator when None. Returns (actions float32 [B, H, A_env] on the CPU, result): prev_logprobs
        [B, H, A_env], prev_values [B] and forward_inputs with chains [B, K + 1, H, A], denoise_inds int64 [B, K] (the
        stochastic step, in every column), noise_level [B], action, model_action and the recorded observation.
        Raises RuntimeError before `explore_with`.
        """
        sde = self._sde()
        recorded = self.record_observation(env_obs)
        context = self.context_of(recorded)
        rows = len(env_obs["task_descriptions"])
        keys = torch.randint(0, 2**62, (rows, 1)).tolist() if keys is None else keys
        device = next(self.parameters()).device
        draws = sde.draw(keys, self.noise_shape, device)
        chains = sde.sample(lambda x, time: self.velocity(context, x, time), draws)
        actions = self.executable(chains[:, -1], env_obs)
        inputs = {
            **recorded,
            CHAINS: chains,
            DENOISE_INDS: draws.steps[:, None].repeat(1, sde.num_steps),
            NOISE_LEVEL: torch.full((rows,), sde.noise_level, device=device),
            ACTION: actions.flatten(1),
            MODEL_ACTION: chains[:, -1].flatten(1),
        }
        replay = self._replay(inputs, context, with_values=compute_values)
        result = {"prev_logprobs": replay["logprobs"], "forward_inputs": inputs}
        if compute_values:
            result["prev_values"] = replay["values"]
        return actions.cpu(), result

    def default_forward(self, forward_inputs: dict[str, Any]) -> dict[str, Tensor]:
        """Log-probabilities [B, H, A_env] of the recorded stochastic step, values [B] and entropy [B], with gradients.

        Log-probabilities are elementwise and in float32: which actions were executed, and so count, is the learner's.
        Raises RuntimeError before `explore_with`.
        """
        self._sde()  # before anything is computed
        return self._replay(forward_inputs, self.context_of(forward_inputs), with_values=True)

    @torch.no_grad()
    def predict_values(self, env_obs: EnvObservation) -> Tensor:
        return self.values_of(self.context_of(self.record_observation(env_obs)))

    def _replay(self, inputs: Mapping[str, Any], context: Any, *, with_values: bool) -> dict[str, Tensor]:
        log_prob, entropy = self._sde().log_prob(
            lambda x, time: self.velocity(context, x, time),
            inputs[CHAINS],
            inputs[DENOISE_INDS][:, 0],
            inputs[NOISE_LEVEL],
        )
        replay = {
            "logprobs": log_prob[..., : self.env_action_dim],
            "entropy": entropy[..., : self.env_action_dim].mean((1, 2)),
        }
        return {**replay, "values": self.values_of(context)} if with_values else replay

    def _sde(self) -> FlowSDE:
        if self.flow_sde is None:
            raise RuntimeError(
                f"{type(self).__name__} explores by stochastic steps: call explore_with(FlowSDE(num_steps=...)) first"
            )
        return self.flow_sde


def takes_keys(policy: Any) -> bool:
    """Whether `predict_action_batch` of `policy` takes `keys`, so that exploration is reproducible."""
    parameters = inspect.signature(policy.predict_action_batch).parameters
    return "keys" in parameters
