"""LIBERO with its real simulator: what the adapter hands out is what the benchmark itself would, bit for bit."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from soma_lightning.envs.base import Episode, state_of
from soma_lightning.envs.libero import LiberoEnv
from soma_lightning.envs.libero_suites import MAX_STEPS, NUM_INIT_STATES, LiberoSuite
from soma_lightning.envs.registry import EnvSpec
from soma_lightning.envs.spawned import SpawnedEnvs
from soma_lightning.envs.worker import WorkerError
from soma_lightning.imports import is_available

if os.environ.get("SOMA_REQUIRE_LIBERO") != "1" and not is_available("libero"):
    pytest.skip("needs `pip install 'soma-lightning[libero]'`", allow_module_level=True)

# One worker process of pytest runs the whole file: a simulator takes 2 GB.
pytestmark = pytest.mark.xdist_group("libero")

GOLDEN = Path(__file__).resolve().parents[1] / "goldens" / "libero" / "object0_start_32.npz"
SIZE = 128
FORWARD = np.array([1.0, 0, 0, 0, 0, 0, -1.0])
CAMERAS = ("agentview_image", "robot0_eye_in_hand_image")


@pytest.fixture(scope="module")
def table() -> Iterator[LiberoEnv]:
    env = LiberoEnv("libero_object", task_numbers=[0, 1], image_size=SIZE)
    yield env
    env.close()


@pytest.fixture(scope="module")
def goal() -> Iterator[LiberoEnv]:
    env = LiberoEnv("libero_goal", task_numbers=[8], cameras=[])
    yield env
    env.close()


def started(env: LiberoEnv, init_state: int = 0) -> dict[str, np.ndarray]:
    env.reset(next(iter(env.tasks)), init_state)
    return env.observe()


def moved(env: LiberoEnv, steps: int = 10) -> dict[str, np.ndarray]:
    for _ in range(steps):
        env.step(FORWARD)
    return env.observe()


def benchmark_itself(suite: str, seed: int = 7) -> Iterator[dict[str, np.ndarray]]:
    """The raw observations of the benchmark's own environment, after 10 settle steps and after each further step."""
    from libero.libero import benchmark, get_libero_path
    from libero.libero.envs import OffScreenRenderEnv

    with contextlib.redirect_stdout(io.StringIO()):
        tasks = benchmark.get_benchmark(suite)()
        task = tasks.get_task(0)
        env = OffScreenRenderEnv(
            bddl_file_name=os.path.join(get_libero_path("bddl_files"), task.problem_folder, task.bddl_file),
            camera_heights=SIZE,
            camera_widths=SIZE,
        )
    env.seed(seed)
    env.env.reset()
    raw = env.set_init_state(tasks.get_task_init_states(0)[0])
    for _ in range(10):
        raw = env.step([0.0] * 6 + [-1.0])[0]
    yield raw
    for _ in range(10):
        raw = env.step(FORWARD)[0]
    yield {**raw, "end": env.get_sim_state(), "late": env.sim.render(camera_name="agentview", width=SIZE, height=SIZE)}
    env.close()


def test_everything_equals_the_benchmarks_own_environment(table: LiberoEnv) -> None:
    """Drawn when looked at, not in every step, and yet the pixels are those of the benchmark's slightly old images."""
    ours = [started(table), moved(table)]
    end = table.simulator_state()
    theirs = list(benchmark_itself("libero_object"))
    for mine, raw in zip(ours, theirs, strict=True):
        assert set(mine) == {*CAMERAS, "robot0_eef_pos", "robot0_eef_quat", "robot0_gripper_qpos"}
        for key, value in mine.items():
            expected = raw[key][::-1, ::-1] if key in CAMERAS else raw[key]
            assert value.dtype == (np.uint8 if key in CAMERAS else np.float64)
            assert value.flags.c_contiguous
            np.testing.assert_array_equal(value, expected, err_msg=key)
    np.testing.assert_array_equal(end, theirs[1]["end"])
    # The test would notice a picture of the step's end: it differs.
    assert np.any(theirs[1]["late"] != theirs[1]["agentview_image"])


def test_the_scene_looks_right_and_actions_do_what_the_contract_says(table: LiberoEnv) -> None:
    """Mean grey catches MuJoCo's darker floors; the thumbnail catches every other turn or mirroring."""
    first = started(table)
    check_picture(first)
    check_motion(table, first)


def check_picture(first: dict[str, np.ndarray]) -> None:
    assert 130 < first["agentview_image"].mean() < 150
    golden = np.load(GOLDEN)
    for camera in CAMERAS:
        small = thumbnail(first[camera])
        assert distance(small, golden[camera]) < 8
        for wrong in (small[::-1, ::-1], small[::-1], small[:, ::-1]):
            assert distance(wrong, golden[camera]) > 8, camera


def thumbnail(image: np.ndarray) -> np.ndarray:
    return image.reshape(32, SIZE // 32, 32, SIZE // 32, 3).mean(axis=(1, 3))


def distance(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.abs(one - other).mean())


def test_two_runs_are_equal_bit_for_bit_and_leave_numpys_generator_alone(table: LiberoEnv) -> None:
    runs = []
    for draws in (1, 2):
        np.random.seed(0)  # noqa: NPY002
        np.random.random(draws)  # noqa: NPY002
        before = np.random.get_state()[2]  # noqa: NPY002
        started(table, init_state=3)
        assert np.random.get_state()[2] == before  # noqa: NPY002
        runs.append((moved(table), table.simulator_state()))
    for key, value in runs[0][0].items():
        np.testing.assert_array_equal(value, runs[1][0][key], err_msg=key)
    np.testing.assert_array_equal(runs[0][1], runs[1][1])


def check_motion(table: LiberoEnv, first: dict[str, np.ndarray]) -> None:
    state = state_of(first)
    assert state.shape == (8,)
    assert np.linalg.norm(state[3:6]) > 3.14  # beyond pi: the quaternion's sign was kept
    gone = moved(table)["robot0_eef_pos"] - first["robot0_eef_pos"]
    assert gone[0] == pytest.approx(0.10, abs=0.02)
    assert np.abs(gone[1:]).max() < 0.02
    opened = table.observe()["robot0_gripper_qpos"]
    assert opened[0] > 0.035
    assert opened[1] < -0.035
    for _ in range(15):
        outcome = table.step(np.array([0.0] * 6 + [1.0]))
    closed = table.observe()["robot0_gripper_qpos"]
    assert closed[0] < 0.005 < opened[0]
    assert (outcome.reward, outcome.success, outcome.done) == (0.0, False, False)


def test_a_spatial_task_without_mirror_images_and_smooth_edges_and_with_soft_resets() -> None:
    """Another suite beside the first in one process; the options change what they say and nothing else."""
    env = LiberoEnv("libero_spatial", task_numbers=[0], image_size=SIZE, hard_reset=False, cameras=["agentview"])
    first = started(env)
    assert set(first) == {"agentview_image", "robot0_eef_pos", "robot0_eef_quat", "robot0_gripper_qpos"}
    assert env._simulator is not None
    env._simulator._reflections = False
    dull = env.observe()
    assert 0 < distance(first["agentview_image"], dull["agentview_image"].astype(float)) < 60
    env._simulator._multisampling = False
    jagged = env.observe()
    assert 0.02 < (jagged["agentview_image"] != dull["agentview_image"]).any(axis=-1).mean() < 0.7
    assert 0 < distance(jagged["agentview_image"], dull["agentview_image"].astype(float)) < 10
    np.testing.assert_array_equal(jagged["agentview_image"], env.observe()["agentview_image"])
    np.testing.assert_array_equal(first["robot0_eef_pos"], jagged["robot0_eef_pos"])
    gone = moved(env)["robot0_eef_pos"] - first["robot0_eef_pos"]
    assert gone[0] == pytest.approx(0.10, abs=0.02)
    begin = time.monotonic()
    np.testing.assert_allclose(started(env)["robot0_eef_pos"], first["robot0_eef_pos"], atol=1e-3)
    assert time.monotonic() - begin < 5  # a hard reset draws and loads everything again
    env.close()


def test_fixtures_stand_where_the_episodes_number_puts_them(goal: LiberoEnv) -> None:
    """Cabinet, stove and rack are in no initial state; an episode has them where it always has them."""
    (task,) = goal.tasks

    def fixtures(init_state: int) -> np.ndarray:
        goal.reset(task, init_state)
        assert goal._simulator is not None
        return np.array(goal._simulator._control.env.sim.model.body_pos)

    goal._drop_simulator()
    before = np.random.get_state()[2]  # noqa: NPY002
    first, second, again = fixtures(0), fixtures(1), fixtures(0)
    np.testing.assert_array_equal(first, again)
    assert 0 < np.abs(first - second).max() < 0.05
    assert np.random.get_state()[2] == before  # noqa: NPY002 (building and resetting draw from a seed of their own)


def test_other_streams_draw_initial_states_that_the_benchmark_does_not_have(goal: LiberoEnv) -> None:
    (task,) = goal.tasks
    drawn = LiberoEnv("libero_goal", task_numbers=[8], cameras=[], settle_steps=0, stream=3)

    def place(env: LiberoEnv, number: int) -> np.ndarray:
        """Joint positions at the start."""
        env.reset(task, number)
        return env.simulator_state()[1:]

    stored = LiberoSuite("libero_goal").init_states(task)[:, 1:]
    first, far, again = place(drawn, 0), place(drawn, 1000), place(drawn, 0)
    np.testing.assert_array_equal(first, again)
    for state in (first, far):
        nearest = np.abs(stored - state).max(axis=1).min()
        assert 1e-4 < nearest < 0.1
    drawn.stream = 4
    assert np.abs(place(drawn, 0) - first).max() > 1e-4
    with pytest.raises(ValueError, match="init_state=-1 of task .* is negative"):
        drawn.reset(task, -1)
    drawn.close()


def test_a_reset_that_fails_raises_at_once_and_the_next_one_works(
    goal: LiberoEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    from robosuite.utils.errors import RandomizationError

    (task,) = goal.tasks
    calls: list[int] = []

    def break_reset(error: Exception) -> None:
        def reset() -> None:
            calls.append(1)
            raise error

        monkeypatch.setattr(goal._simulator_of(task)._control.env, "reset", reset)

    begin = time.monotonic()
    break_reset(FileNotFoundError("a mesh is gone"))
    with pytest.raises(FileNotFoundError, match="a mesh is gone"):
        goal.reset(task, 0)
    assert len(calls) == 1
    with pytest.raises(RuntimeError, match="no episode is running"):
        goal.observe()
    break_reset(RandomizationError("no place"))
    with pytest.raises(RuntimeError, match="found no free place for its objects in 10 attempts"):
        goal.reset(task, 0)
    assert len(calls) == 11
    assert time.monotonic() - begin < 60
    goal.reset(task, 0)  # builds a new simulator
    assert np.isfinite(goal.observe()["robot0_eef_pos"]).all()


def test_a_killed_worker_is_replaced_and_its_slot_starts_again() -> None:
    spec = EnvSpec("libero", {"suite": "libero_goal", "task_numbers": [8], "cameras": []})
    with SpawnedEnvs(spec, 2, 2, timeout_s=60) as group:
        (task,) = group.tasks
        group.reset([0, 1], [Episode(task, 0), Episode(task, 0)])
        actions = np.tile(FORWARD.astype(np.float32), (2, 3, 1))
        group.execute([0, 1], actions)
        before = group.observe([0, 1])
        np.testing.assert_array_equal(before["states"][0], before["states"][1])
        pid = group.worker_pids[1]
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkerError, match="worker 1 was killed by signal SIGKILL") as caught:
            group.execute([0, 1], actions)
        assert caught.value.slots == [1]
        assert caught.value.results[0].steps == 3
        group.reset([1], [Episode(task, 0)])
        group.execute([1], actions[:1])
        np.testing.assert_array_equal(group.observe([1])["states"][0], before["states"][1])


def test_a_forgotten_environment_ends_silently_and_leaves_the_home_alone(tmp_path: Path) -> None:
    """A fresh process with closed stdin that sees a GPU under a number that EGL does not know."""
    code = """
import os
from soma_lightning.envs import make
env = make("libero", suite="libero_goal", task_numbers=[8], image_size=32, cameras=["agentview"], settle_steps=0)
env.reset(next(iter(env.tasks)), 0)
assert env.observe()["agentview_image"].any()
print(os.environ["MUJOCO_EGL_DEVICE_ID"], os.environ["CUDA_VISIBLE_DEVICES"], os.environ.get("MUJOCO_GL"))
"""
    unset = ("MUJOCO_GL", "MUJOCO_EGL_DEVICE_ID", "DISPLAY", "LIBERO_CONFIG_PATH")
    kept = {name: value for name, value in os.environ.items() if name not in unset}
    settings = {"HOME": str(tmp_path), "CUDA_VISIBLE_DEVICES": "97", "MPLCONFIGDIR": str(tmp_path / "matplotlib")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        env={**kept, **settings, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "0 97 egl\n", ""), done.stderr
    assert {path.name for path in tmp_path.iterdir()} <= {"matplotlib"}


@pytest.mark.parametrize("suite", list(MAX_STEPS))
def test_every_task_of_every_suite_has_its_files(suite: str) -> None:
    tasks = LiberoSuite(suite).tasks
    assert len(tasks) == (90 if suite == "libero_90" else 10)
    assert [task.number for task in tasks.values()] == list(range(len(tasks)))
    for name, task in tasks.items():
        assert task.instruction
        assert task.instruction.replace(" ", "_") in name
        assert task.max_steps == MAX_STEPS[suite]
        text = Path(task.bddl_file).read_text().lower()
        assert "(:goal" in text.replace("( :goal", "(:goal")
        states = LiberoSuite(suite).init_states(name)
        assert states.dtype == np.float64
        assert states.shape[0] == NUM_INIT_STATES
        assert np.isfinite(states).all()


def test_wrong_episodes_are_refused_by_name(table: LiberoEnv) -> None:
    task = next(iter(table.tasks))
    with pytest.raises(ValueError, match=rf"init_state=50 of task '{task}' does not exist; it has 0\.\.49"):
        table.reset(task, 50)
    with pytest.raises(ValueError, match=r"unknown task 'pick_up_the_soup'.*Did you mean"):
        table.reset("pick_up_the_soup", 0)
    with pytest.raises(ValueError, match=r"unknown suite 'libero_spacial'.*Did you mean 'libero_spatial'"):
        LiberoEnv("libero_spacial")
    with pytest.raises(ValueError, match=r"task_numbers=\[10\] must be different numbers from 0\.\.9"):
        LiberoEnv("libero_goal", task_numbers=[10])
