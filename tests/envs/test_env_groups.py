"""Groups of environments: local and spawned agree, and a worker that fails costs only its own slots."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from soma_lightning.envs.base import Episode
from soma_lightning.envs.registry import EnvSpec
from soma_lightning.envs.spawned import SpawnedEnvs
from soma_lightning.envs.vector import LocalEnvs
from soma_lightning.envs.worker import WorkerError

IMAGES = EnvSpec("somatable", {"image_size": 32})
STATES = EnvSpec("somatable", {"obs_type": "state"})
EPISODES = [Episode("reach_cube", 3), Episode("push", 1), Episode("pick", 0)]

TROUBLED = '''
import os
import time
from soma_lightning.envs.somatable import SomaTable

class Troubled(SomaTable):
    """Misbehaves when the gripper component or the number of the initial state says so."""

    def __init__(self, *, broken: bool = False) -> None:
        if broken:
            raise OSError("the simulator's license server is asleep")
        super().__init__(obs_type="state")

    def reset(self, task, init_state):
        while init_state == 91 and not os.path.exists(os.environ["GATE"]):
            time.sleep(0.01)
        if init_state == 92:
            raise ArithmeticError("the objects fell through the table")
        if init_state == 93:
            time.sleep(1000)
        super().reset(task, init_state)

    def step(self, action):
        if action[6] == 0.25:
            raise ArithmeticError("the simulation diverged")
        if action[6] == 0.75:
            os._exit(7)
        return super().step(action)

    def sibling(self):
        return Troubled()
'''


@pytest.fixture
def troubled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EnvSpec:
    (tmp_path / "troubled_env.py").write_text(TROUBLED)
    monkeypatch.syspath_prepend(tmp_path)  # spawned workers inherit the path
    return EnvSpec("troubled_env:Troubled")


@pytest.fixture(scope="module")
def local() -> Iterator[LocalEnvs]:
    with LocalEnvs(STATES, 3) as group:
        yield group


def chunk(num_slots: int, steps: int, gripper: float = -1.0) -> np.ndarray:
    actions = np.zeros((num_slots, steps, 7), np.float32)
    actions[..., 6] = gripper
    return actions


def test_spawned_equals_local_bit_for_bit() -> None:
    generator = np.random.default_rng(0)
    with LocalEnvs(IMAGES, 3) as here, SpawnedEnvs(IMAGES, 3, 2) as there:
        assert here.tasks == there.tasks
        for group in (here, there):
            group.reset([0, 1, 2], EPISODES)
        for slots in ([0, 1, 2], [2, 0]):
            actions = generator.uniform(-1, 1, (len(slots), 5, 7)).astype(np.float32)
            record = [True, *[False] * (len(slots) - 1)]
            for one, other in zip(
                here.execute(slots, actions, record), there.execute(slots, actions, record), strict=True
            ):
                assert (one.success, one.done, one.steps, one.reward) == (
                    other.success,
                    other.done,
                    other.steps,
                    other.reward,
                )
                assert (one.frames is None) == (other.frames is None)
                if one.frames is not None and other.frames is not None:
                    assert len(one.frames) == 5
                    np.testing.assert_array_equal(np.stack(one.frames), np.stack(other.frames))
        first, second = here.observe([1, 0, 2]), there.observe([1, 0, 2])
        assert first["task_descriptions"] == second["task_descriptions"]
        assert first["task_descriptions"][0] == "push the cube to the green disc"
        for field in ("main_images", "wrist_images", "states"):
            assert first[field].shape[0] == 3
            assert first[field].dtype == second[field].dtype
            np.testing.assert_array_equal(first[field], second[field])


def test_a_chunk_stops_where_the_episode_ends(local: LocalEnvs) -> None:
    local.reset([0], [Episode("reach_cube", 0)])
    (outcome,) = local.execute([0], chunk(1, 70))
    assert (outcome.done, outcome.success, outcome.steps, outcome.frames) == (True, False, 60, None)
    assert local.observe([0])["states"].shape == (1, 15)  # the last observation can still be read
    with pytest.raises(RuntimeError, match=r"episode Episode\(task='reach_cube', init_state=0\) of slot 0 has ended"):
        local.execute([0], chunk(1, 1))
    local.reset([0], [Episode("pick", 1)])
    assert local.execute([0], chunk(1, 2))[0].steps == 2


def test_wrong_calls_are_refused_by_name(local: LocalEnvs) -> None:
    with LocalEnvs(STATES, 3) as fresh, pytest.raises(RuntimeError, match="slot 1 has no episode; reset it first"):
        fresh.observe([1])
    with pytest.raises(ValueError, match=r"slots \[3\] do not exist; this group has slots 0..2"):
        local.reset([3], [Episode("pick", 0)])
    with pytest.raises(ValueError, match="name one slot twice"):
        local.reset([1, 1], [Episode("pick", 0)] * 2)
    with pytest.raises(ValueError, match="2 slots were given 1 episodes"):
        local.reset([0, 1], [Episode("pick", 0)])
    with pytest.raises(ValueError, match=r"unknown task 'pock'.*Did you mean 'pick'"):
        local.reset([0], [Episode("pock", 0)])
    local.reset([0, 1], [Episode("pick", 0)] * 2)
    with pytest.raises(ValueError, match=r"actions have shape \[2, 7\]; 2 slots need \[2, K >= 1, 7\]"):
        local.execute([0, 1], np.zeros((2, 7), np.float32))
    bad = chunk(2, 3)
    bad[1, 2, 0] = np.nan
    with pytest.raises(ValueError, match=r"the actions for slots \[1\] hold NaN or infinity"):
        local.execute([0, 1], bad)
    with pytest.raises(ValueError, match="record has 1 entries for 2 slots"):
        local.execute([0, 1], chunk(2, 3), [True])
    with pytest.raises(ValueError, match="num_slots=0"):
        LocalEnvs(STATES, 0)
    with pytest.raises(ValueError, match="num_workers=3 must be between 1 and num_slots=2"):
        SpawnedEnvs(STATES, 2, 3)
    with pytest.raises(ValueError, match="timeout_s=0 and start_timeout_s=120"):
        SpawnedEnvs(STATES, 2, 1, 0)
    with pytest.raises(ValueError, match="gl_devices is empty"):
        SpawnedEnvs(STATES, 2, 1, gl_devices=[])
    with pytest.raises(TypeError, match="must be picklable.*use EnvSpec"):
        SpawnedEnvs(lambda: STATES(), 2, 1)


def test_killed_hung_and_raising_workers(troubled: EnvSpec) -> None:
    """One pool, one misfortune after the other; the slots of the other worker are never disturbed."""
    with SpawnedEnvs(troubled, 3, 2, timeout_s=2.0) as group:
        pids = list(group.worker_pids)
        group.reset([0, 1, 2], EPISODES)

        # raising: worker 1 (slot 1) reports its traceback and lives on
        actions = chunk(3, 2)
        actions[1, 1, 6] = 0.25
        with pytest.raises(
            WorkerError,
            match=r"worker 1 raised in 'execute':\nTraceback[\s\S]*ArithmeticError: the simulation diverged",
        ) as caught:
            group.execute([0, 1, 2], actions)
        assert caught.value.slots == [1]
        assert caught.value.episodes == {1: Episode("push", 1)}
        assert {slot: outcome.steps for slot, outcome in caught.value.results.items()} == {0: 2, 2: 2}
        assert group.worker_pids == pids
        with pytest.raises(RuntimeError, match="slot 1 has no episode"):
            group.observe([1])
        group.reset([1], [Episode("push", 2)])

        # hung: worker 0 (slots 0 and 2) is stopped, ended and replaced
        os.kill(pids[0], signal.SIGSTOP)
        begin = time.monotonic()
        with pytest.raises(
            WorkerError, match=r"worker 0 gave no answer to 'execute' within 2 s and was ended\nlost with it: slot 0"
        ) as caught:
            group.execute([0, 1], chunk(2, 1))
        assert time.monotonic() - begin < 20
        assert caught.value.slots == [0, 2]
        assert caught.value.results[1].steps == 1
        assert group.worker_pids[0] != pids[0]
        assert group.worker_pids[1] == pids[1]

        # killed: worker 1 dies between two calls
        os.kill(pids[1], signal.SIGKILL)
        time.sleep(0.1)
        with pytest.raises(WorkerError, match=r"worker 1 was killed by signal SIGKILL during 'observe'") as caught:
            group.observe([1])
        assert caught.value.episodes == {1: Episode("push", 2)}

        # ended by itself, within a call
        group.reset([0, 1, 2], EPISODES)
        with pytest.raises(WorkerError, match="worker 0 ended with exit status 7 during 'execute'"):
            group.execute([0], chunk(1, 1, gripper=0.75))

        # and the pool still works
        group.reset([0, 2], [EPISODES[0], EPISODES[2]])
        with LocalEnvs(STATES, 3) as reference:
            reference.reset([0, 1, 2], EPISODES)
            np.testing.assert_array_equal(group.observe([0, 1, 2])["states"], reference.observe([0, 1, 2])["states"])
        last = [pid for pid in group.worker_pids if pid is not None]
    assert group.worker_pids == [None, None]
    with pytest.raises(RuntimeError, match="worker 0 does not run; its group is closed"):
        group.reset([0], [EPISODES[0]])
    assert not any(os.path.exists(f"/proc/{pid}") for pid in last)


def test_a_slot_that_starts_holds_up_no_other(
    troubled: EnvSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, slow = tmp_path / "gate", Episode("push", 91)
    monkeypatch.setenv("GATE", str(gate))  # before the workers start
    with SpawnedEnvs(troubled, 3, 2, timeout_s=60) as group, LocalEnvs(STATES, 3) as reference:
        group.reset([0, 1, 2], EPISODES)
        group.start([0], [slow])
        for _ in range(3):  # slot 2 lives in the worker that is busy
            assert group.ready([0, 1, 2]) == [1]
            assert group.execute([1], chunk(1, 2))[0].steps == 2
            group.observe([1])
        gate.touch()
        assert group.ready([0]) == [0]
        assert group.ready([2, 1, 0]) == [2, 1, 0]
        reference.reset([0, 1, 2], [slow, *EPISODES[1:]])
        reference.execute([1], chunk(1, 6))
        np.testing.assert_array_equal(group.observe([0, 1, 2])["states"], reference.observe([0, 1, 2])["states"])

        group.start([0], [EPISODES[0]])  # whatever comes next waits
        group.start([0, 1], [slow, slow])
        np.testing.assert_array_equal(group.observe([0])["states"], reference.observe([0])["states"])
        assert group.facts() == reference.facts()
        assert group.ready([0, 1, 2]) == [0, 1, 2]


def test_a_slot_that_does_not_start_is_named(troubled: EnvSpec) -> None:
    with SpawnedEnvs(troubled, 2, 2, timeout_s=2.0) as group:
        group.reset([0, 1], EPISODES[:2])
        group.start([0], [Episode("push", 92)])
        with pytest.raises(WorkerError, match=r"worker 0 raised in 'reset':[\s\S]*fell through the table") as caught:
            group.ready([0])
        assert caught.value.slots == [0]
        assert caught.value.episodes == {0: Episode("push", 92)}
        assert "lost with it: slot 0: Episode(task='push', init_state=92)" in str(caught.value)
        with pytest.raises(RuntimeError, match="slot 0 has no episode"):
            group.observe([0])

        pids = list(group.worker_pids)
        group.start([0, 1], [Episode("push", 93), EPISODES[1]])
        assert group.ready([1]) == [1]
        with pytest.raises(WorkerError, match=r"worker 0 gave no answer to 'reset' within 2 s and was ended") as caught:
            group.ready([0])
        assert caught.value.episodes == {0: Episode("push", 93)}
        assert group.worker_pids[0] != pids[0]
        assert group.worker_pids[1] == pids[1]

        os.kill(pids[1], signal.SIGKILL)
        time.sleep(0.1)
        group.start([0, 1], EPISODES[:2])
        with pytest.raises(WorkerError, match="worker 1 was killed by signal SIGKILL during 'reset'"):
            group.ready([0, 1])
        assert group.ready([0]) == [0]
        group.reset([1], [EPISODES[1]])
        assert group.ready([0, 1]) == [0, 1]


def test_an_environment_that_cannot_be_built_says_why(troubled: EnvSpec) -> None:
    with pytest.raises(
        WorkerError, match=r"worker 0 raised in building its environment:[\s\S]*license server is asleep"
    ):
        SpawnedEnvs(troubled.replace(broken=True), 1, 1)


def test_a_wrong_setting_is_told_without_a_traceback() -> None:
    with pytest.raises(WorkerError) as caught:
        SpawnedEnvs(EnvSpec("somatable", {"obs_type": "state", "image_size": 5}), 2, 2)
    message = str(caught.value)
    assert message == "worker 0 raised in building its environment:\nimage_size=5 is outside 16..1024 pixels"
    assert not any(caught.value.episodes.values())


def test_workers_get_their_gl_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An EGL device that does not exist reaches the worker and comes back as the rendering message, once."""
    monkeypatch.setenv("MUJOCO_GL", "egl")
    with pytest.raises(WorkerError, match=r"cannot render images: no OpenGL context[\s\S]*apt-get install") as caught:
        SpawnedEnvs(IMAGES, 1, 1, gl_devices=[99])
    assert "99" in str(caught.value)
    assert "Traceback" not in str(caught.value)
