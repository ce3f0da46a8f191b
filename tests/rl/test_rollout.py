"""What a collector writes down: rows in the order of time, ends of episodes, values for cut returns, lost fragments."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from soma_lightning.envs.registry import make_group
from soma_lightning.envs.worker import WorkerError
from soma_lightning.models.flow_sde import FlowSDE
from soma_lightning.rl.engine import FragmentLostError
from soma_lightning.rl.loop import build_policy
from soma_lightning.rl.records import Fragment
from soma_lightning.rl.rollout import CollectorSpec, PolicyCollector, RolloutSettings
from tests.rl.gaussian import GaussianPolicy


@pytest.fixture
def collector(start, rollout):
    with make_group("point_reach", rollout.env_options, num_slots=rollout.envs_per_worker) as group:
        yield PolicyCollector(build_policy(start, FlowSDE(4)), group, rollout)


def fragment_of(collector: PolicyCollector, index: int = 0) -> Fragment:
    found = collector.collect(index, 0)
    return Fragment.unpack(found.tensors, found.facts, 0)


def test_rows_follow_each_environment_through_time(collector):
    one = fragment_of(collector)
    states = one.inputs["states"].view(4, 6, 6)
    actions = one.inputs["action"].view(4, 6, 4, 2).clamp(-1, 1)
    moved = states[:-1, :, :2] + 0.12 * actions[:-1].sum(2)
    goes_on = ~(one.timeline.terminated | one.timeline.truncated)[:-1]
    assert goes_on.all()  # 4 decisions of 4 steps end before the limit of 24
    assert torch.allclose(states[1:, :, :2], moved, atol=1e-5)
    assert torch.equal(states[1:, :, 2:4], states[:-1, :, 2:4])


def test_an_episode_that_is_cut_off_is_bootstrapped_and_the_next_one_begins(collector):
    fragment_of(collector)
    one = fragment_of(collector, 1)
    cut = one.timeline.truncated
    assert cut[1].sum() >= 5  # decision 6 of an untrained policy meets the limit
    states = one.inputs["states"].view(4, 6, 6)
    assert (states[2][cut[1], :2] == 0).all()
    assert (one.timeline.bootstrap_values[cut] != 0).all()
    assert (one.timeline.bootstrap_values[~cut] == 0).all()
    assert len(one.episodes) == int((cut | one.timeline.terminated).sum())
    assert all(end.steps == 24 for end in one.episodes if not end.success)
    # Value of the last observation, which is not that of the next episode's first one.
    assert not torch.allclose(one.timeline.bootstrap_values[1][cut[1]], one.timeline.values[2][cut[1]])


def test_the_next_fragment_goes_on_where_the_last_one_stopped(collector):
    first, second = fragment_of(collector), fragment_of(collector, 1)
    assert torch.equal(first.timeline.values[-1], second.timeline.values[0])


def test_values_of_the_record_are_the_policys(collector):
    one = fragment_of(collector)
    replay = collector.policy(forward_inputs=one.inputs)
    assert torch.allclose(replay["values"], one.timeline.values[:-1].flatten(), atol=1e-6)
    assert torch.allclose(replay["logprobs"], one.log_probs, atol=1e-4)


def test_what_an_environment_does_depends_on_no_other(start, rollout):
    """Six environments in one process act as the same six in two processes."""

    def chains(envs: int, worker: int, num_workers: int) -> torch.Tensor:
        settings = replace(rollout, envs_per_worker=envs)
        with make_group("point_reach", rollout.env_options, num_slots=envs) as group:
            policy = build_policy(start, FlowSDE(4))
            one = fragment_of(PolicyCollector(policy, group, settings, worker=worker, num_workers=num_workers))
        return one.inputs["chains"].unflatten(0, (4, envs))

    together = chains(6, 0, 1)
    halves = torch.cat([chains(3, worker, 2) for worker in (0, 1)], dim=1)
    assert torch.allclose(together, halves, atol=1e-5)


def test_a_cursor_goes_on_with_the_next_episodes(start, rollout):
    def collected(cursor=None, fragments=1):
        with make_group("point_reach", rollout.env_options, num_slots=6) as group:
            one = PolicyCollector(build_policy(start, FlowSDE(4)), group, rollout, cursor=cursor)
            return [one.collect(index, 0) for index in range(fragments)]

    first = collected(fragments=1)[0]
    assert first.facts["cursor"] == [(1, 4)] * 6
    again = collected(first.facts["cursor"])[0]
    goals = [found.tensors["inputs.states"][:6, 2:4] for found in (first, again)]
    assert not torch.equal(*goals)
    noise = [found.tensors["inputs.chains"][:6, 0] for found in (first, again)]
    assert not torch.equal(*noise)
    with pytest.raises(ValueError, match="had 2 environments a rollout process, this one has 6"):
        collected([(1, 4)] * 2)


def test_a_policy_of_ones_own_that_is_no_flow_is_collected(rollout):
    torch.manual_seed(0)
    with make_group("point_reach", rollout.env_options, num_slots=6) as group:
        policy = GaussianPolicy()
        one = fragment_of(PolicyCollector(policy, group, rollout))
    assert set(one.inputs) == {"states", "action"}
    assert one.log_probs.shape == (24, 4, 2)
    assert torch.equal(policy(forward_inputs=one.inputs)["logprobs"], one.log_probs)


@pytest.mark.parametrize("entry", ["prev_logprobs", "prev_values", "forward_inputs"])
def test_a_policy_that_records_too_little_is_named(rollout, monkeypatch, entry):
    policy = GaussianPolicy()
    act = policy.predict_action_batch

    def forgetful(env_obs, mode="train", compute_values=True):
        actions, result = act(env_obs, mode, compute_values)
        del result[entry]
        return actions, result

    monkeypatch.setattr(policy, "predict_action_batch", forgetful)
    with make_group("point_reach", rollout.env_options, num_slots=6) as group:
        collector = PolicyCollector(policy, group, rollout)
        with pytest.raises(ValueError, match=f"GaussianPolicy.* returned no {entry}"):
            collector.collect(0, 0)


def test_a_lost_simulator_costs_one_fragment(collector, monkeypatch):
    fragment_of(collector)
    execute, calls = collector.envs.execute, []

    def breaks_once(slots, actions, record=None):
        calls.append(1)
        if len(calls) == 2:
            raise WorkerError("worker 0 died", slots=[0], episodes={}, results={})
        return execute(slots, actions, record)

    monkeypatch.setattr(collector.envs, "execute", breaks_once)
    with pytest.raises(FragmentLostError, match="worker 0 died"):
        collector.collect(1, 0)
    one = fragment_of(collector, 2)
    assert (one.inputs["states"].view(4, 6, 6)[0, :, :2] == 0).all()  # all begin a new episode


def test_images_are_asked_for_once_a_decision(collector, monkeypatch):
    observe, looks = collector.envs.observe, []
    monkeypatch.setattr(collector.envs, "observe", lambda slots: looks.append(len(slots)) or observe(slots))
    fragment_of(collector)
    assert looks == [6] * 5  # four decisions, and the value after the cut
    fragment_of(collector, 1)
    # Its first look was the last one of the fragment before; all six episodes are cut off once, and looked at then.
    assert looks[5:] == [6] * (3 + 1 + 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decisions": 0}, "decisions=0"),
        ({"executed_steps": True}, "executed_steps=True"),
        ({"seed": -1}, "seed=-1 is negative"),
    ],
)
def test_settings_out_of_range_are_named(rollout, changes, message):
    with pytest.raises(ValueError, match=message):
        replace(rollout, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"executed_steps": 9}, "executed_steps=9 is more than the 4 actions"),
        ({"tasks": ("push",)}, r"tasks \['push'\] do not exist"),
        ({"env_options": {"streem": 1}}, "streem"),
    ],
)
def test_a_collector_that_does_not_fit_says_so_and_closes_its_environments(start, changes, message):
    settings = RolloutSettings("point_reach", **{"env_options": {}, **changes})
    with pytest.raises(ValueError, match=message):
        CollectorSpec(lambda: build_policy(start, FlowSDE(4)), settings)(0)


def test_environments_run_in_processes_of_their_own(start, rollout):
    settings = replace(rollout, env_workers=2)
    collector = CollectorSpec(lambda: build_policy(start, FlowSDE(4)), settings)(0)
    pids = collector.envs.worker_pids
    found = collector.collect(0, 0)
    collector.close()
    assert len(pids) == 2
    here = CollectorSpec(lambda: build_policy(start, FlowSDE(4)), rollout)(0)
    assert np.array_equal(found.tensors["inputs.chains"], here.collect(0, 0).tensors["inputs.chains"])
