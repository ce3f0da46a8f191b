"""A policy that is no flow at all: one Gaussian action chunk, as a user would write it after the policy contract."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributions import Normal

from soma_lightning import BasePolicy


class GaussianPolicy(BasePolicy):
    """State in, mean of a chunk of 4 actions out; the value beside it. Draws from torch's own generator."""

    def __init__(self, state_dim: int = 6, action_dim: int = 2, chunk: int = 4) -> None:
        super().__init__()
        self.action_dim, self.chunk = action_dim, chunk
        self.mean = nn.Sequential(nn.Linear(state_dim, 64), nn.Tanh(), nn.Linear(64, chunk * action_dim))
        self.value = nn.Sequential(nn.Linear(state_dim, 64), nn.Tanh(), nn.Linear(64, 1))
        self.log_std = nn.Parameter(torch.full((action_dim,), -1.0))

    def _distribution(self, states):
        return Normal(self.mean(states).unflatten(1, (self.chunk, self.action_dim)), self.log_std.exp())

    @torch.no_grad()
    def predict_action_batch(self, env_obs, mode="train", compute_values=True):
        states = torch.as_tensor(env_obs["states"])
        distribution = self._distribution(states)
        actions = distribution.sample() if mode == "train" else distribution.mean
        inputs = {"states": states, "action": actions.flatten(1)}
        if mode == "eval":
            return actions, {}
        replay = self.default_forward(inputs)
        result = {"prev_logprobs": replay["logprobs"], "forward_inputs": inputs}
        return actions, {**result, "prev_values": replay["values"]} if compute_values else result

    def default_forward(self, forward_inputs):
        states = forward_inputs["states"]
        distribution = self._distribution(states)
        actions = forward_inputs["action"].unflatten(1, (self.chunk, self.action_dim))
        return {
            "logprobs": distribution.log_prob(actions),
            "values": self.value(states)[:, 0],
            "entropy": distribution.entropy().mean((1, 2)),
        }


def build(cfg, torch_dtype):
    return GaussianPolicy()
