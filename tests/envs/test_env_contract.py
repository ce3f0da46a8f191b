"""The environment contract: state, batches, names, and what importing costs."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from soma_lightning.contract import batch_from_observation
from soma_lightning.envs import EnvSpec, make, make_group
from soma_lightning.envs.base import batch_observations, require_known, state_of
from soma_lightning.envs.vector import LocalEnvs


def observation(quaternion: list[float], size: int = 4) -> dict[str, np.ndarray]:
    return {
        "agentview_image": np.full((size, size, 3), 7, np.uint8),
        "robot0_eye_in_hand_image": np.full((size, size, 3), 9, np.uint8),
        "robot0_eef_pos": np.array([0.1, 0.2, 0.3]),
        "robot0_eef_quat": np.array(quaternion),
        "robot0_gripper_qpos": np.array([0.04, -0.03]),
    }


def quaternion_of(axis: list[float], angle: float) -> list[float]:
    return [*(np.sin(angle / 2) * np.array(axis)), np.cos(angle / 2)]


def test_state_is_position_axis_angle_fingers() -> None:
    state = state_of(observation(quaternion_of([0.0, 0.6, 0.8], 0.5)))
    assert state.dtype == np.float32
    np.testing.assert_allclose(state, [0.1, 0.2, 0.3, 0.0, 0.3, 0.4, 0.04, -0.03], atol=1e-6)


def test_rotation_beyond_pi_keeps_its_sign() -> None:
    state = state_of(observation(quaternion_of([1.0, 0.0, 0.0], 3.2)))  # w is negative here
    np.testing.assert_allclose(state[3:6], [3.2, 0.0, 0.0], atol=1e-6)


def test_no_rotation_is_zero_and_the_input_is_not_changed() -> None:
    given = observation([0.0, 0.0, 0.0, 1.0 + 1e-12])
    before = given["robot0_eef_quat"].copy()
    np.testing.assert_array_equal(state_of(given)[3:6], np.zeros(3))
    np.testing.assert_array_equal(given["robot0_eef_quat"], before)


def test_batch_has_the_contract_fields() -> None:
    one = observation([1.0, 0.0, 0.0, 0.0])
    batch = batch_observations([(one, "pick up the cube"), (one, "reach the cube")])
    assert batch["main_images"].shape == batch["wrist_images"].shape == (2, 4, 4, 3)
    assert batch["main_images"].dtype == np.uint8
    assert batch["states"].shape == (2, 8)
    assert batch["task_descriptions"] == ["pick up the cube", "reach the cube"]
    training = batch_from_observation(batch)
    assert training["observation.images.image"].shape == (2, 3, 4, 4)
    assert int(training["observation.images.image2"][1, 0, 0, 0]) == 9


def test_an_observation_that_is_no_batch_says_how_it_becomes_one() -> None:
    env = make("somatable", obs_type="state")
    env.reset("push", 0)
    with pytest.raises(KeyError, match="envs.batch_observations"):
        batch_from_observation(env.observe())  # type: ignore[arg-type]
    batch = batch_observations([(env.observe(), env.instruction)])
    env.close()
    assert set(batch_from_observation(batch)) == {"observation.state", "task"}


def test_batch_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no observation to batch"):
        batch_observations([])


def test_state_observations_make_a_batch_without_images() -> None:
    with LocalEnvs(EnvSpec("somatable", {"obs_type": "state"}), 2) as group:
        from soma_lightning.envs.base import Episode

        group.reset([0, 1], [Episode("push", 0), Episode("push", 1)])
        batch = group.observe([0, 1])
    assert batch["main_images"] is None
    assert batch["states"].shape == (2, 15)
    assert set(batch_from_observation(batch)) == {"observation.state", "task"}


def test_unknown_names_are_refused_with_the_nearest() -> None:
    with pytest.raises(
        ValueError,
        match=r"unknown environment 'somatabel'; known: somatable, libero, point_reach\. Did you mean 'somatable'",
    ):
        make("somatabel")
    with pytest.raises(
        ValueError, match=r"unknown setting of environment 'somatable' 'img_size'.*Did you mean 'image_size'"
    ):
        EnvSpec("somatable", {"img_size": 64})
    with pytest.raises(ValueError, match="'libero' needs suite=, one of libero_spatial, libero_object, "):
        EnvSpec("libero", {"image_size": 64})
    with pytest.raises(ValueError, match="cannot be imported: No module named 'no_such_package'"):
        EnvSpec("no_such_package.envs:Env")
    with pytest.raises(ValueError, match="is not a subclass of ManipulationEnv"):
        EnvSpec("collections:OrderedDict")
    with pytest.raises(ValueError, match=r"unknown colour 'zzz'; known: red, blue\.$"):
        require_known("colour", "zzz", ["red", "blue"])


def test_make_group_stays_in_this_process_without_workers() -> None:
    with make_group("somatable", {"obs_type": "state"}, num_slots=3) as group:
        assert isinstance(group, LocalEnvs)
        assert group.num_slots == 3
        assert list(group.tasks) == ["reach_cube", "reach_green", "reach_blue", "push", "pick"]


def test_a_state_environment_needs_neither_torch_nor_a_gl_context() -> None:
    code = """
import sys
from soma_lightning.envs import make
env = make("somatable", obs_type="state")
env.reset("pick", 0)
env.observe()
assert not {"torch", "lightning", "transformers", "triton"} & set(sys.modules), sorted(sys.modules)
assert "OpenGL.GL" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
