"""point_reach: rules of the task, goals, and that a group of them runs in this process and in workers."""

from __future__ import annotations

import math

import numpy as np
import pytest

from soma_lightning.envs.base import Episode
from soma_lightning.envs.point_reach import MAX_STEPS, PointReach, demonstrate
from soma_lightning.envs.registry import make_group


def straight(env: PointReach) -> np.ndarray:
    state = env.observe()["state"]
    return np.asarray(state[4:6] / np.linalg.norm(state[4:6]))


def test_straight_to_the_goal_is_rewarded_once():
    env = PointReach()
    env.reset("reach", 3)
    distance = float(np.linalg.norm(env.observe()["state"][2:4]))
    rewards = []
    while True:
        outcome = env.step(straight(env))
        rewards.append(outcome.reward)
        if outcome.done:
            break
    assert outcome.terminated
    assert outcome.success
    assert not outcome.truncated
    assert rewards == [0.0] * (len(rewards) - 1) + [1.0]
    assert len(rewards) == math.ceil((distance - 0.10) / 0.12)


def test_the_limit_truncates():
    env = PointReach()
    env.reset("reach", 0)
    outcomes = [env.step(np.zeros(2)) for _ in range(MAX_STEPS)]
    assert [outcome.truncated for outcome in outcomes] == [False] * (MAX_STEPS - 1) + [True]
    assert not outcomes[-1].terminated
    assert not outcomes[-1].success
    with pytest.raises(RuntimeError, match="has ended after 24 steps"):
        env.step(np.zeros(2))


def test_actions_are_clipped():
    env = PointReach()
    env.reset("reach", 0)
    env.step(np.array([5.0, -5.0]))
    assert env.observe()["state"][:2] == pytest.approx([0.12, -0.12])


def test_without_end_on_success_the_reward_is_still_paid_once():
    env = PointReach(end_on_success=False)
    env.reset("reach", 1)
    outcomes = [env.step(straight(env)) for _ in range(MAX_STEPS)]
    assert sum(outcome.reward for outcome in outcomes) == 1.0
    assert outcomes[-1].truncated
    assert outcomes[-1].success


def test_goals_lie_on_the_ring_and_follow_stream_and_number():
    def goals(stream: int) -> np.ndarray:
        env = PointReach(stream=stream)
        found = []
        for number in range(500):
            env.reset("reach", number)
            found.append(env.observe()["state"][2:4])
        return np.stack(found)

    first = goals(0)
    radii = np.linalg.norm(first, axis=1)
    assert radii.min() >= 0.8
    assert radii.max() <= 1.2
    assert np.histogram(np.arctan2(first[:, 1], first[:, 0]), bins=4, range=(-math.pi, math.pi))[0].min() > 90
    assert np.array_equal(first, goals(0))
    assert not np.array_equal(first, goals(1))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: PointReach(stream=-1), "stream=-1"),
        (lambda: PointReach(end_on_success="no"), "end_on_success='no'"),
        (lambda: PointReach().reset("push", 0), "unknown task 'push'"),
        (lambda: PointReach().reset("reach", -1), "init_state=-1"),
        (lambda: PointReach().step(np.zeros(2)), "no episode is running"),
        (lambda: PointReach().frame(), "draws no images"),
    ],
)
def test_mistakes_are_named(call, message):
    with pytest.raises((ValueError, RuntimeError), match=message):
        call()


def test_a_bad_action_is_named():
    env = PointReach()
    env.reset("reach", 0)
    for action in (np.zeros(7), np.array([0.0, np.nan])):
        with pytest.raises(ValueError, match="2 finite numbers"):
            env.step(action)


def test_workers_do_what_this_process_does():
    actions = np.random.default_rng(0).uniform(-1, 1, (3, 4, 2)).astype(np.float32)
    seen = []
    for workers in (0, 2):
        with make_group("point_reach", {}, num_slots=3, num_workers=workers) as group:
            assert group.action_dim == 2
            group.reset([0, 1, 2], [Episode("reach", number) for number in range(3)])
            with pytest.raises(ValueError, match=r"slots need \[3, K >= 1, 2\]"):
                group.execute([0, 1, 2], np.zeros((3, 1, 7), np.float32))
            group.execute([0, 1, 2], actions)
            observation = group.observe([0, 1, 2])
            assert observation["main_images"] is None
            seen.append(observation["states"])
    assert np.array_equal(seen[0], seen[1])
    assert seen[0].shape == (3, 6)


def test_the_group_says_that_an_episode_was_cut_off():
    with make_group("point_reach", {}, num_slots=1) as group:
        group.reset([0], [Episode("reach", 0)])
        for _ in range(5):
            assert not group.execute([0], np.zeros((1, 4, 2), np.float32))[0].truncated
        outcome = group.execute([0], np.zeros((1, 9, 2), np.float32))[0]
        assert outcome.done
        assert outcome.truncated
        assert outcome.steps == 4


def test_the_demonstrator_steers_beside_the_goal():
    states = np.array([[0.0, 0.0, 1.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 2.0, 0.0, 2.0]])
    chunks = demonstrate(states, 4, np.random.default_rng(0), noise=0.0)
    turned = 0.6 * math.sqrt(0.5)
    assert chunks.shape == (2, 4, 2)
    assert chunks.dtype == np.float32
    assert chunks[0, 3] == pytest.approx([turned, turned], abs=1e-6)
    assert chunks[1, 0] == pytest.approx([-turned, turned], abs=1e-6)
