"""LIBERO's scripted expert in the real simulator; slower statistics are in docs/libero.md."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest

from soma_lightning.envs.demos import check_recording
from soma_lightning.envs.libero import LiberoEnv
from soma_lightning.envs.libero_expert import EXPERT_TASKS, LiberoExpert, Phase
from soma_lightning.envs.registry import EnvSpec
from soma_lightning.imports import is_available

if os.environ.get("SOMA_REQUIRE_LIBERO") != "1" and not is_available("libero"):
    pytest.skip("needs `pip install 'soma-lightning[libero]'`", allow_module_level=True)

# One worker process of pytest runs the whole file: a simulator takes 2 GB.
pytestmark = pytest.mark.xdist_group("libero")

BOWL_ON_PLATE = "put_the_bowl_on_the_plate"


@pytest.fixture(scope="module")
def goal() -> Iterator[LiberoEnv]:
    env = LiberoEnv("libero_goal", task_numbers=[8, 0], cameras=[])
    yield env
    env.close()


def attempt(env: LiberoEnv, expert: LiberoExpert, task: str) -> tuple[bool, np.ndarray, np.ndarray]:
    """Success, actions [T, 7] and the simulator's last state of one episode from init state 0."""
    env.reset(task, 0)
    expert.reset()
    actions = []
    while True:
        phase = expert._running().phase
        assert expert.may_be_pushed() == (phase in (Phase.HOVER, Phase.DOWN, Phase.LIFT, Phase.CARRY))
        actions.append(expert.act())
        outcome = env.step(actions[-1])
        if outcome.done:
            return outcome.success, np.stack(actions), env.simulator_state()


def test_the_expert_puts_the_bowl_on_the_plate_twice_the_same_way(goal: LiberoEnv) -> None:
    expert = LiberoExpert(goal)
    solved, actions, end = attempt(goal, expert, BOWL_ON_PLATE)
    assert solved
    assert 70 < len(actions) < 130  # it succeeds at the first grasp
    assert actions.dtype == np.float32
    assert np.abs(actions).max() <= 1.0
    again, repeated, end_again = attempt(goal, expert, BOWL_ON_PLATE)
    assert again
    np.testing.assert_array_equal(actions, repeated)
    np.testing.assert_array_equal(end, end_again)


def test_other_tasks_are_refused_by_name() -> None:
    """Before a simulator is built."""
    for numbers, task in ([0, 8], "open_the_middle_drawer_of_the_cabinet"), ([8], "put_the_bowl_on_the_stove"):
        spec = EnvSpec("libero", {"suite": "libero_goal", "task_numbers": numbers})
        message = f"unknown task with a scripted expert '{task}'; known: {BOWL_ON_PLATE}"
        with pytest.raises(ValueError, match=message):
            check_recording(spec, [task], episodes=1, seed=0, noise=0.2, workers=1)


@pytest.mark.parametrize(
    ("setting", "message"),
    [({"cameras": []}, "demonstrations hold both cameras"), ({"hard_reset": False}, "depend on those before it")],
)
def test_recordings_need_both_cameras_and_hard_resets(setting: dict[str, object], message: str) -> None:
    spec = EnvSpec("libero", {"suite": "libero_goal", **setting})
    with pytest.raises(ValueError, match=message):
        check_recording(spec, [BOWL_ON_PLATE], episodes=1, seed=0, noise=0.2, workers=1)


def test_the_expert_refuses_a_running_task_that_it_cannot_do(goal: LiberoEnv, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EXPERT_TASKS, "libero_goal", (1, 2))
    goal.reset(BOWL_ON_PLATE, 0)
    expert = LiberoExpert(goal)
    message = f"unknown task of libero_goal with a scripted expert '{BOWL_ON_PLATE}'; known: put_the_bowl_on_the_stove"
    with pytest.raises(ValueError, match=message):
        expert.reset()
    with pytest.raises(RuntimeError, match="no episode was started"):
        expert.act()


@pytest.mark.parametrize(("suite", "number"), [(suite, len(numbers)) for suite, numbers in EXPERT_TASKS.items()])
def test_every_task_with_an_expert_is_one_pick_and_place(suite: str, number: int) -> None:
    from libero.libero.envs.bddl_utils import robosuite_parse_problem

    from soma_lightning.envs.libero_suites import LiberoSuite

    tasks = LiberoExpert.tasks({"suite": suite})
    assert len(tasks) == number
    for name in tasks:
        ((relation, _, _),) = robosuite_parse_problem(LiberoSuite(suite).tasks[name].bddl_file)["goal_state"]
        assert relation in ("on", "in")


def test_a_suite_without_an_expert_says_so() -> None:
    assert LiberoExpert.tasks({"suite": "libero_10"}) == {}
    for settings in ({"suite": "libero_10"}, {"suite": "libero_goal", "task_numbers": [0]}):
        with pytest.raises(ValueError, match=r"no task of environment 'libero' .* has a scripted expert; choose"):
            check_recording(EnvSpec("libero", settings), ["any"], episodes=1, seed=0, noise=None, workers=1)
