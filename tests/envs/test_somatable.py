"""SomaTable: layout, action conventions, pictures, rewards, determinism."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from soma_lightning.envs.base import Episode
from soma_lightning.envs.experts import expert_action
from soma_lightning.envs.somatable import TASKS, SomaTable
from soma_lightning.envs.vector import LocalEnvs

RECIPES = Path(__file__).parents[2] / "recipes"
OPEN = np.array([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0])
CLOSE = -OPEN


@pytest.fixture(scope="module")
def env() -> Iterator[SomaTable]:
    table = SomaTable(obs_type="state")
    yield table
    table.close()


@pytest.fixture(scope="module")
def camera_env() -> Iterator[SomaTable]:
    table = SomaTable(image_size=64)
    yield table
    table.close()


def along(axis: int, value: float) -> np.ndarray:
    action = OPEN.copy()
    action[axis] = value
    return action


def test_tasks_have_english_instructions_and_limits() -> None:
    assert {name: (task.instruction, task.max_steps) for name, task in TASKS.items()} == {
        "reach_cube": ("reach the cube", 60),
        "reach_green": ("reach the green disc", 60),
        "reach_blue": ("reach the blue disc", 60),
        "push": ("push the cube to the green disc", 120),
        "pick": ("pick up the cube", 90),
    }


def test_init_states_lie_in_their_ranges_and_differ(env: SomaTable) -> None:
    cubes, hands = [], []
    for k in range(50):
        env.reset("push", k)
        state = env.table_state()
        cubes.append(state.cube)
        hands.append(state.grip)
        assert 0.10 < np.linalg.norm(state.cube[:2] - state.green) < 0.23
    cubes_K3, hands_K3 = np.stack(cubes), np.stack(hands)
    assert (cubes_K3[:, :2] > [-0.121, -0.201]).all()
    assert (cubes_K3[:, :2] < [0.201, 0.201]).all()
    np.testing.assert_allclose(cubes_K3[:, 2], 0.922, atol=2e-3)
    assert len(np.unique(cubes_K3[:, 0].round(5))) == 50
    assert (np.ptp(cubes_K3[:, :2], axis=0) > [0.2, 0.25]).all()
    assert (hands_K3 > [-0.241, -0.101, 1.02]).all()
    assert (hands_K3 < [-0.159, 0.101, 1.10]).all()


def test_streams_and_tasks_have_init_states_of_their_own(env: SomaTable) -> None:
    def cube(table: SomaTable, task: str, init_state: int) -> tuple[float, ...]:
        table.reset(task, init_state)
        return tuple(table.table_state().cube)

    other = SomaTable(obs_type="state", stream=1)
    seen = {cube(table, task, k) for table in (env, other) for task in ("pick", "reach_cube") for k in (0, 1, 1000)}
    assert len(seen) == 12
    other.close()


def test_only_named_objects_are_on_the_table(camera_env: SomaTable) -> None:
    for task, spec in TASKS.items():
        camera_env.reset(task, 3)
        image = camera_env.observe()["agentview_image"].astype(int)
        red, green, blue = image[..., 0], image[..., 1], image[..., 2]
        seen = {
            "cube": int(((red > 2 * green) & (red > 2 * blue) & (red > 80)).sum()),
            "green": int(((green > 2 * red) & (green > 2 * blue) & (green > 60)).sum()),
            "blue": int(((blue > 1.5 * red) & (blue > 1.5 * green) & (blue > 80)).sum()),
        }
        assert {name for name, pixels in seen.items() if pixels > 4} == set(spec.objects), (task, seen)
        assert all(pixels == 0 for name, pixels in seen.items() if name not in spec.objects), (task, seen)


@pytest.mark.parametrize(("axis", "sign"), [(0, 1), (0, -1), (1, 1), (1, -1), (2, 1)])
def test_ten_full_steps_move_the_hand_ten_centimetres(env: SomaTable, axis: int, sign: int) -> None:
    env.reset("reach_cube", 4)
    start = env.observe()["robot0_eef_pos"]
    for _ in range(10):
        env.step(along(axis, float(sign)))
    moved = env.observe()["robot0_eef_pos"] - start
    assert moved[axis] * sign == pytest.approx(0.103, abs=0.006)
    assert np.abs(np.delete(moved, axis)).max() < 2e-3


def test_actions_are_clipped_to_one(env: SomaTable) -> None:
    ends = []
    for value in (1.0, 5.0):
        env.reset("reach_cube", 4)
        env.step(along(1, value))
        ends.append(env.observe()["robot0_eef_pos"])
    np.testing.assert_array_equal(ends[0], ends[1])


def test_the_hand_stays_in_the_workspace(env: SomaTable) -> None:
    env.reset("push", 0)
    for _ in range(60):
        env.step(along(1, -1.0))
    assert -0.57 < env.observe()["robot0_eef_pos"][1] < -0.53


def test_gripper_closes_opens_and_holds(env: SomaTable) -> None:
    def fingers() -> np.ndarray:
        return env.observe()["robot0_gripper_qpos"]

    env.reset("reach_green", 0)
    np.testing.assert_allclose(fingers(), [0.04, -0.04], atol=2e-3)
    for _ in range(8):
        env.step(CLOSE)
    np.testing.assert_allclose(fingers(), [0.0, 0.0], atol=2e-3)
    for _ in range(4):
        env.step(np.zeros(7))  # 0 holds
    np.testing.assert_allclose(fingers(), [0.0, 0.0], atol=2e-3)
    for _ in range(8):
        env.step(OPEN)
    np.testing.assert_allclose(fingers(), [0.04, -0.04], atol=2e-3)


def test_rotation_is_locked_unless_asked_for() -> None:
    turned = []
    for lock in (True, False):
        table = SomaTable(obs_type="state", lock_rotation=lock)
        table.reset("reach_green", 0)
        for _ in range(10):
            table.step(along(5, 0.5))
        w = abs(table.observe()["robot0_eef_quat"] @ np.array([1.0, 0.0, 0.0, 0.0]))
        turned.append(2 * np.arccos(min(1.0, w)))
        table.close()
    assert turned[0] < 1e-3
    assert turned[1] == pytest.approx(10 * 0.5 * 0.145 * 0.71, rel=0.1)  # the weld lags as it does in translation


def test_state_dimensions_and_orientation(env: SomaTable) -> None:
    from soma_lightning.envs.base import state_of

    env.reset("pick", 0)
    observation = env.observe()
    assert set(observation) == {"robot0_eef_pos", "robot0_eef_quat", "robot0_gripper_qpos", "object-state"}
    assert observation["object-state"].shape == (7,)
    state = state_of(observation)
    assert state.shape == (8,)
    np.testing.assert_allclose(state[3:6], [np.pi, 0.0, 0.0], atol=2e-3)


@pytest.mark.parametrize(
    ("camera", "key"), [("agentview", "agentview_image"), ("robot0_eye_in_hand", "robot0_eye_in_hand_image")]
)
def test_pictures_are_upright_and_mirrored(camera_env: SomaTable, camera: str, key: str) -> None:
    """The cube's red pixels lie where a pinhole camera puts its centre, columns mirrored."""
    env, checked = camera_env, 0
    for k in range(8):
        env.reset("pick", k)
        for _ in range(20):  # over the cube, so that the wrist camera sees it; beside it, so that the arm hides nothing
            state = env.table_state()
            goal = state.cube + [-0.09, 0.02, 0.12]
            env.step(np.append(np.clip((goal - state.grip) * 15, -1, 1), [0, 0, 0, -1.0]))
        data, model = env._data, env._scene.model
        number = model.camera(camera).id
        x, y, z = data.cam_xmat[number].reshape(3, 3).T @ (env.table_state().cube - data.cam_xpos[number])
        focal = 32 / np.tan(np.deg2rad(model.cam_fovy[number]) / 2)
        column, row = 63 - (31.5 + focal * x / -z), 31.5 - focal * y / -z
        image = env.observe()[key].astype(int)
        assert image.shape == (64, 64, 3)
        rows, columns = np.nonzero((image[..., 0] > 2 * image[..., 1]) & (image[..., 0] > 2 * image[..., 2]))
        if len(rows) < 4 or {0, 63} & {*rows, *columns}:
            continue
        checked += 1
        assert columns.mean() == pytest.approx(column, abs=2.0)
        assert rows.mean() == pytest.approx(row, abs=2.5)
    assert checked >= 5


def test_main_picture_follows_the_cube(camera_env: SomaTable) -> None:
    """Nearer to the camera (+x) is lower in the picture; the robot's left (+y) is left, as in LIBERO's pictures."""
    centres = []
    for k in range(12):
        camera_env.reset("pick", k)
        image = camera_env.observe()["agentview_image"].astype(int)
        rows, columns = np.nonzero((image[..., 0] > 2 * image[..., 1]) & (image[..., 0] > 2 * image[..., 2]))
        cube = camera_env.table_state().cube
        centres.append((cube[0], cube[1], rows.mean(), columns.mean()))
    x, y, row, column = np.array(centres).T
    assert np.corrcoef(x, row)[0, 1] > 0.95
    assert np.corrcoef(y, column)[0, 1] < -0.95


def test_the_same_init_state_gives_the_same_trajectory(camera_env: SomaTable) -> None:
    actions = np.random.default_rng(0).uniform(-1, 1, (30, 7))

    def run(table: SomaTable) -> list[np.ndarray]:
        table.reset("push", 7)
        seen = []
        for action in actions:
            table.step(action)
            seen.append(np.concatenate([value.ravel().astype(np.float64) for value in table.observe().values()]))
        return seen

    first = run(camera_env)
    camera_env.reset("pick", 1)  # what ran in between leaves nothing behind
    for _ in range(5):
        camera_env.step(actions[0])
    other = SomaTable(image_size=64)
    sibling = camera_env.sibling()
    for again in (run(camera_env), run(other), run(sibling)):
        np.testing.assert_array_equal(np.stack(first), np.stack(again))
    other.close()
    sibling.close()
    assert run(camera_env)[0].shape == first[0].shape  # closing a sibling leaves the shared renderer alone


def test_success_ends_the_episode_and_pays_once(env: SomaTable) -> None:
    env.reset("reach_cube", 0)
    rewards = []
    while True:
        state = env.table_state()
        step = (state.cube + [0, 0, 0.06] - state.grip) * 15
        outcome = env.step(np.append(np.clip(step, -1, 1), [0, 0, 0, -1.0]))
        rewards.append(outcome.reward)
        if outcome.done:
            break
    assert (outcome.success, outcome.terminated, outcome.truncated) == (True, True, False)
    assert rewards == [0.0] * (len(rewards) - 1) + [1.0]
    with pytest.raises(RuntimeError, match=r"episode of task 'reach_cube' has ended after \d+ steps; reset first"):
        env.step(OPEN)


def test_an_episode_is_cut_off_at_its_limit(env: SomaTable) -> None:
    env.reset("reach_cube", 0)
    outcomes = [env.step(OPEN) for _ in range(60)]
    assert not any(outcome.done for outcome in outcomes[:-1])
    assert (outcomes[-1].success, outcomes[-1].terminated, outcomes[-1].truncated) == (False, False, True)


def test_shaped_reward_is_the_difference_of_progress() -> None:
    env = SomaTable(obs_type="state", shaped_reward=True)
    env.reset("reach_cube", 2)

    def progress() -> float:
        state = env.table_state()
        return 1.0 - np.tanh(5.0 * np.linalg.norm(state.grip - state.cube - [0, 0, 0.06]))

    begin = progress()
    there = sum(env.step(along(0, 1.0)).reward for _ in range(5))
    assert there == pytest.approx(progress() - begin)
    assert there > 0
    back = sum(env.step(along(0, -1.0)).reward for _ in range(5))
    assert back < 0
    for task in ("push", "pick"):
        env.reset(task, 0)
        assert env.step(along(0, 1.0)).reward != 0.0
    env.close()


def test_fixed_statistics_agree_with_the_recipe_file() -> None:
    stored = json.loads((RECIPES / "somatable_statistics.json").read_text())
    computed = SomaTable.statistics()
    assert set(stored) == set(computed) == {"observation.state", "action"}
    for feature, statistics in computed.items():
        assert set(stored[feature]) == set(statistics)
        for name, values in statistics.items():
            np.testing.assert_allclose(stored[feature][name], values, atol=1e-11)
    np.testing.assert_array_equal(computed["action"]["q01"], -np.ones(7))
    np.testing.assert_array_equal(computed["action"]["q99"], np.ones(7))


def test_states_stay_within_the_fixed_range(env: SomaTable) -> None:
    from soma_lightning.envs.base import state_of

    low, high = (SomaTable.statistics()["observation.state"][q] for q in ("q01", "q99"))
    for k in range(20):
        env.reset("pick", k)
        state = state_of(env.observe())
        assert (state >= low).all()
        assert (state <= high).all()


def test_wrong_use_is_refused() -> None:
    with pytest.raises(ValueError, match="image_size=8 is outside 16..1024 pixels"):
        SomaTable(image_size=8)
    with pytest.raises(ValueError, match=r"unknown obs_type 'images'.*Did you mean 'image'"):
        SomaTable(obs_type="images")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="stream=-1 is negative"):
        SomaTable(stream=-1)
    for name in ("shaped_reward", "end_on_success", "lock_rotation"):
        with pytest.raises(ValueError, match=f"{name}='false' must be True or False"):
            SomaTable(obs_type="state", **{name: "false"})
    env = SomaTable(obs_type="state")
    with pytest.raises(RuntimeError, match=r"no episode is running; call reset\(task, init_state\) first"):
        env.observe()
    with pytest.raises(ValueError, match=r"unknown task 'reach_gren'.*Did you mean 'reach_green'"):
        env.reset("reach_gren", 0)
    with pytest.raises(ValueError, match="init_state=-2 of task 'pick' is negative"):
        env.reset("pick", -2)
    env.reset("pick", 0)
    with pytest.raises(ValueError, match="an action must be 7 finite numbers"):
        env.step(np.zeros(4))
    with pytest.raises(ValueError, match="an action must be 7 finite numbers"):
        env.step(np.full(7, np.nan))
    with pytest.raises(RuntimeError, match="obs_type='state' renders no images"):
        env.frame()
    env.close()
    env.close()
    with pytest.raises(RuntimeError, match="this SomaTable is closed"):
        env.reset("pick", 0)


def test_an_episode_that_goes_on_after_its_success_says_whether_it_lasts() -> None:
    """The hand reaches the point above the disc, and is then driven away from it."""
    env = SomaTable(obs_type="state", end_on_success=False)
    assert env.sibling().end_on_success is False
    env.reset("reach_green", 0)
    outcomes = []
    while not (outcomes and outcomes[-1].success):
        outcomes.append(env.step(expert_action("reach_green", env.table_state())))
    assert (outcomes[-1].at_goal, outcomes[-1].done) == (True, False)
    while not outcomes[-1].done:
        outcomes.append(env.step(along(2, 1.0)))
    assert len(outcomes) == TASKS["reach_green"].max_steps
    assert (outcomes[-1].success, outcomes[-1].at_goal) == (True, False)
    assert (outcomes[-1].terminated, outcomes[-1].truncated) == (False, True)
    assert sum(outcome.reward for outcome in outcomes) == 1.0
    env.close()


def test_a_chunk_says_when_the_goal_was_first_reached() -> None:
    env = SomaTable(obs_type="state", end_on_success=False)
    with LocalEnvs(lambda: env, 1) as group:
        assert set(group.facts()) == {"mujoco", "gl"}
        group.reset([0], [Episode("reach_green", 0)])
        outcome = None
        while outcome is None or not outcome.success:
            towards = expert_action("reach_green", env.table_state())
            (outcome,) = group.execute([0], np.stack([[towards, towards, along(2, 1.0)]]))
        assert outcome.steps == 3
        assert outcome.steps_to_success in (1, 2)  # the third action leads away
        (outcome,) = group.execute([0], np.stack([[along(2, 1.0)] * 20]))
        assert (outcome.success, outcome.at_goal, outcome.steps_to_success) == (True, False, 1)
