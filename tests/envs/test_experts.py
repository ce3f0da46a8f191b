"""The scripted experts solve their tasks as often as measured."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from soma_lightning.envs.experts import expert_action
from soma_lightning.envs.somatable import SomaTable


@pytest.fixture(scope="module")
def env() -> Iterator[SomaTable]:
    table = SomaTable(obs_type="state")
    yield table
    table.close()


def successes(env: SomaTable, task: str, episodes: int) -> tuple[int, float]:
    solved, steps = 0, 0
    for k in range(episodes):
        env.reset(task, k)
        while True:
            outcome = env.step(expert_action(task, env.table_state()))
            steps += 1
            if outcome.done:
                break
        solved += outcome.success
    return solved, steps / episodes


@pytest.mark.parametrize("task", ["reach_cube", "reach_green", "reach_blue"])
def test_reach_always_succeeds_in_about_25_steps(env: SomaTable, task: str) -> None:
    solved, steps = successes(env, task, 20)
    assert solved == 20
    assert 20 < steps < 32


def test_pick_succeeds_without_noise(env: SomaTable) -> None:
    solved, steps = successes(env, "pick", 20)
    assert solved >= 18
    assert 42 < steps < 60


def test_push_succeeds_in_most_states(env: SomaTable) -> None:
    solved, _ = successes(env, "push", 20)
    assert solved >= 14  # 75 to 87 % where it was measured


def test_actions_are_valid_and_depend_on_the_scene_alone(env: SomaTable) -> None:
    env.reset("pick", 0)
    state = env.table_state()
    first, again = expert_action("pick", state), expert_action("pick", state)
    np.testing.assert_array_equal(first, again)
    assert first.dtype == np.float32
    assert first.shape == (7,)
    assert (np.abs(first) <= 1.0).all()
    np.testing.assert_array_equal(first[3:6], np.zeros(3))


def test_unknown_task_names_the_nearest(env: SomaTable) -> None:
    env.reset("pick", 0)
    with pytest.raises(ValueError, match=r"unknown task with a scripted expert 'pik'.*Did you mean 'pick'"):
        expert_action("pik", env.table_state())
