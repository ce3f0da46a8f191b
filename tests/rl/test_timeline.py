"""What is written down of a stretch of acting: rewards, ends, values, and randomness that belongs to an environment."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from soma_lightning.envs.base import Episode
from soma_lightning.envs.point_reach import MAX_STEPS
from soma_lightning.envs.registry import make_group
from soma_lightning.models.flow_mlp import FlowMLPConfig, FlowMLPPolicy
from soma_lightning.models.flow_sde import FlowSDE
from soma_lightning.rl.records import Fragment
from soma_lightning.rl.rollout import PolicyCollector, RolloutSettings
from tests.rl.gaussian import GaussianPolicy

DECISIONS = 7


class Homing(GaussianPolicy):
    """Heads for the goal where it lies on the right, stands still otherwise; values are the distance."""

    @torch.no_grad()
    def predict_action_batch(self, env_obs: Any, mode: str = "train", compute_values: bool = True) -> Any:
        states = torch.as_tensor(env_obs["states"])
        offset = states[:, 4:6]
        heading = offset / offset.norm(dim=1, keepdim=True) * (states[:, 2:3] > 0)
        actions = heading[:, None].repeat(1, 4, 1)
        inputs = {"states": states, "action": actions.flatten(1)}
        return actions, {
            "prev_logprobs": torch.zeros(actions.shape),
            "prev_values": offset.norm(dim=1),
            "forward_inputs": inputs,
        }


def fragments(policy: Any, envs: int, *, count: int = 1, worker: int = 0, workers: int = 1, **changes: Any) -> Any:
    settings = RolloutSettings("point_reach", **{"envs_per_worker": envs, "decisions": DECISIONS, **changes})
    with make_group("point_reach", {}, num_slots=envs) as group:
        collector = PolicyCollector(policy, group, settings, worker=worker, num_workers=workers)
        found = [collector.collect(index, 5) for index in range(count)]
    return [Fragment.unpack(one.tensors, one.facts, 5) for one in found]


def goals(envs: int, episode: int = 0) -> Tensor:
    """Goals [envs, 2] of the first (or a later) episode of each environment."""
    with make_group("point_reach", {}, num_slots=envs) as group:
        group.reset(range(envs), [Episode("reach", env + envs * episode) for env in range(envs)])
        return torch.as_tensor(group.observe(range(envs))["states"])[:, 2:4]


def test_the_timeline_of_episodes_that_succeed_and_of_those_that_run_out() -> None:
    envs = 8
    one = fragments(Homing(), envs)[0]
    line, states = one.timeline, one.inputs["states"].view(DECISIONS, envs, 6)
    goes = goals(envs)[:, 0] > 0
    assert torch.equal(states[0, :, 2:4], goals(envs))
    assert 0 < int(goes.sum()) < envs
    for env in range(envs):
        end = int((line.terminated | line.truncated)[:, env].nonzero()[0])
        assert bool(line.terminated[end, env]) == bool(goes[env])
        assert bool(line.truncated[end, env]) == (not goes[env])
        assert line.rewards[: end + 1, env].tolist() == [0.0] * end + [float(goes[env])]
        assert line.valid_steps[:end, env].tolist() == [4] * end
        assert end == MAX_STEPS // 4 - 1 or goes[env]
        following = states[end + 1, env] if end + 1 < DECISIONS else None
        if following is not None:
            assert torch.equal(following[2:4], goals(envs, episode=1)[env])
            assert following[:2].tolist() == [0, 0]
    assert one.version == 5


def test_values_of_the_cut_and_of_episodes_that_ran_out() -> None:
    envs = 8
    first, second = fragments(Homing(), envs, count=2)
    states = first.inputs["states"].view(DECISIONS, envs, 6)
    torch.testing.assert_close(first.timeline.values[:-1], states[..., 4:6].norm(dim=2))
    # The row behind the cut is what the next fragment begins with.
    assert torch.equal(first.timeline.values[-1], second.timeline.values[0])
    # A point that stood still is where it was, so its last observation has the value of all others.
    cut = first.timeline.truncated
    torch.testing.assert_close(first.timeline.bootstrap_values[cut], first.timeline.values[:-1][cut])
    assert first.timeline.bootstrap_values[~cut].abs().max() == 0


def test_ends_are_told_with_the_steps_of_whole_episodes() -> None:
    envs = 4
    parts = fragments(Homing(), envs, count=4, decisions=2)
    ends = [end for part in parts for end in part.episodes]
    ran_out = [end for end in ends if not end.success]
    assert ran_out
    assert all(end.steps == MAX_STEPS for end in ran_out)  # six decisions: three fragments
    assert all(0 < end.steps < MAX_STEPS for end in ends if end.success)
    assert len({end.init_state for end in ends}) == len(ends)
    executed = sum(int(part.timeline.valid_steps.sum()) for part in parts)
    assert sum(end.steps for end in ends) <= executed


def flow_policy() -> FlowMLPPolicy:
    torch.manual_seed(0)
    policy = FlowMLPPolicy(FlowMLPConfig(state_dim=6, action_dim=2, hidden=16))
    policy.explore_with(FlowSDE(4))
    return policy


def test_a_run_repeats_and_another_seed_differs() -> None:
    first, again, other = (fragments(flow_policy(), 3, seed=seed)[0] for seed in (0, 0, 1))
    assert torch.equal(first.inputs["chains"], again.inputs["chains"])
    assert not torch.equal(first.inputs["chains"], other.inputs["chains"])
    noise = first.inputs["chains"][:, 0].flatten(1)
    assert len(noise.unique(dim=0)) == len(noise)
