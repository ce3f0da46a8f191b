"""What `soma eval` makes of its options before a policy is loaded."""

from __future__ import annotations

import os
from collections.abc import Mapping

import pytest

from soma_lightning.cli import eval as command
from soma_lightning.envs.base import TaskSpec
from soma_lightning.envs.vector import LocalEnvs


def test_going_on_to_the_limit_is_a_setting_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert command.options_until("somatable", {"image_size": 64}, "success") == {"image_size": 64}
    assert command.options_until("libero", {}, "limit") == {"end_on_success": False}
    with pytest.raises(ValueError, match="env_options.end_on_success is set by until=success or until=limit"):
        command.options_until("libero", {"end_on_success": False}, "limit")
    monkeypatch.setattr(command, "effective_settings", lambda env, given: {})
    with pytest.raises(ValueError, match="until=limit needs an environment with the setting end_on_success; 'own' has"):
        command.options_until("own", {}, "limit")


@pytest.mark.parametrize(
    ("env", "cores", "memory_gb", "given", "expected"),
    [
        ("somatable", 2, 4.0, (None, None), (100, 0)),
        ("somatable", 2, 4.0, (6, 2), (6, 2)),
        ("libero", 16, 100.0, (None, None), (16, 16)),
        ("libero", 16, 11.0, (None, None), (4, 4)),
        ("libero", 16, 1.0, (None, None), (1, 1)),
        ("libero", 16, 100.0, (3, None), (3, 3)),
        ("libero", 16, 100.0, (3, 0), (3, 0)),
    ],
)
def test_as_many_simulators_as_cores_and_memory_allow(
    monkeypatch: pytest.MonkeyPatch,
    env: str,
    cores: int,
    memory_gb: float,
    given: tuple[int | None, int | None],
    expected: tuple[int, int],
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)), raising=False)
    monkeypatch.setattr(command, "available_memory_gb", lambda: memory_gb)
    assert command.side_by_side(env, *given) == expected


@pytest.mark.parametrize("given", [(2, 3), (0, None), (4, -1)])
def test_impossible_numbers_of_simulators(given: tuple[int, int | None]) -> None:
    with pytest.raises(ValueError, match=rf"num_envs={given[0]} must be at least 1, and workers=.* must lie in"):
        command.side_by_side("somatable", *given)


def test_memory_is_read_from_the_system() -> None:
    assert 0.05 < command.available_memory_gb() < 1e5


def test_all_initial_states_are_run_when_nothing_else_is_asked_for() -> None:
    class Group(LocalEnvs):
        def __init__(self, **numbers: int | None) -> None:
            self.named = {name: TaskSpec(name, name, 9, num_init_states=number) for name, number in numbers.items()}

        @property
        def tasks(self) -> Mapping[str, TaskSpec]:
            return self.named

    assert command.all_episodes(Group(a=50, b=None), ("a", "b"), 0) == 50
    assert command.all_episodes(Group(a=50, b=20), ("a", "b"), 5) == 15
    assert command.all_episodes(Group(a=50, b=20), ("a",), 0) == 50
    assert command.all_episodes(Group(a=None), ("a",), 7) == 100


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"protocol": "libero_gaol"}, "unknown protocol 'libero_gaol'"),
        ({"protocol": "libero_goal", "env": "somatable"}, "leave out env=somatable"),
        ({"seed": 1, "seeds": [1, 2]}, r"seed=1 and seeds=\[1, 2\] exclude each other"),
        ({"timeout_s": 9.0}, "timeout_s=9.0 has no effect without workers"),
    ],
)
def test_options_that_contradict_each_other(more: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        command.evaluate_policy("p", "o", **more)  # type: ignore[arg-type]
