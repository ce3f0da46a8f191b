"""The start policy of recipes/ppo/point_reach.yaml: imitates a demonstrator that steers beside the goal.

Plain Fabric, two seconds: python recipes/ppo/point_reach_start.py OUT [SEED]
"""

import sys

import numpy as np
import torch
from lightning.fabric import Fabric, seed_everything

from soma_lightning.envs.base import Episode
from soma_lightning.envs.point_reach import demonstrate
from soma_lightning.envs.registry import make_group
from soma_lightning.models.flow_mlp import FlowMLPConfig, FlowMLPPolicy

ENVS, DECISIONS, ROUNDS, CHUNK = 256, 6, 4, 4


def demonstrations(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """States [N, 6] and action chunks [N, 4, 2] on goals that neither evaluation nor PPO uses."""
    rng, states, chunks = np.random.default_rng(seed), [], []
    with make_group("point_reach", {"stream": 9, "end_on_success": False}, num_slots=ENVS) as group:
        for turn in range(ROUNDS):
            group.reset(range(ENVS), [Episode("reach", turn * ENVS + slot) for slot in range(ENVS)])
            for _ in range(DECISIONS):
                states.append(np.asarray(group.observe(range(ENVS))["states"]))
                chunks.append(demonstrate(states[-1], CHUNK, rng))
                group.execute(range(ENVS), chunks[-1])
    return torch.from_numpy(np.concatenate(states)), torch.from_numpy(np.concatenate(chunks))


def main(out: str, seed: int = 0) -> None:
    seed_everything(seed, verbose=False)
    states, chunks = demonstrations(seed)
    policy = FlowMLPPolicy(FlowMLPConfig(state_dim=6, action_dim=2, chunk_size=CHUNK))
    policy.value_head.requires_grad_(False)
    fabric = Fabric(accelerator="cpu", devices=1, strategy="somaspeed")
    module, optimizer = fabric.setup(policy, torch.optim.AdamW(policy.velocity_net.parameters(), lr=1e-3))
    for _ in range(1500):
        rows = torch.randint(0, len(states), (256,))
        loss = module("sft", batch={"observation.state": states[rows], "action": chunks[rows]})["loss"]
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()
    policy.save_pretrained(out)
    print(f"loss {loss.item():.3f}, written: {out}")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
