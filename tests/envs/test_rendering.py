"""Rendering: the back end that is chosen, the one message when there is none, and Triton's order of loading."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from soma_lightning.envs import rendering

APT = "apt-get install -y --no-install-recommends libegl1 libegl-mesa0 libgl1-mesa-dri libgl1 libglib2.0-0"


def run_python(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {
        name: value for name, value in os.environ.items() if name not in ("MUJOCO_GL", "DISPLAY", "WAYLAND_DISPLAY")
    }
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**kept, "PYTHONPATH": os.pathsep.join(sys.path), **variables},
    )


def test_the_module_reports_a_working_back_end() -> None:
    done = run_python("-m", "soma_lightning.envs.rendering")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("rendering works: mujoco ")
    assert done.stdout.strip().endswith("MUJOCO_GL=egl")


@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"MUJOCO_GL": "disable"}, "MuJoCo was imported with rendering switched off; MUJOCO_GL=disable"),
        ({"MUJOCO_GL": "egl", "MUJOCO_EGL_DEVICE_ID": "99"}, "no OpenGL context"),
        ({"MUJOCO_GL": "glfw"}, "no OpenGL context"),
        ({"MUJOCO_GL": "no_such_back_end"}, "MuJoCo cannot be imported"),
    ],
)
def test_without_a_back_end_there_is_one_message_with_the_apt_line(variables: dict[str, str], reason: str) -> None:
    done = run_python("-m", "soma_lightning.envs.rendering", **variables)
    assert done.returncode == 1
    assert done.stdout == ""
    assert f"cannot render images: {reason}" in done.stderr
    assert done.stderr.count(APT) == 1


def test_a_missing_gl_library_is_said_and_state_observations_still_work(tmp_path: Path) -> None:
    """No libEGL: the image environment names the apt line; the state environment runs."""
    code = """
import ctypes
real = ctypes.CDLL
def without_egl(name, *arguments, **options):
    if name and "EGL" in str(name):
        raise OSError(f"{name}: cannot open shared object file")
    return real(name, *arguments, **options)
ctypes.CDLL = without_egl
from soma_lightning.envs import make
env = make("somatable", obs_type="state")
env.reset("reach_cube", 0)
print(sorted(env.observe()))
try:
    make("somatable")
except RuntimeError as error:
    print(error)
"""
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr
    assert "'object-state'" in done.stdout
    assert "libEGL.so.1 cannot be loaded" in done.stdout
    assert APT in done.stdout


def test_missing_mujoco_names_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("soma_lightning.imports.find_spec", lambda name: None)
    with pytest.raises(
        ImportError, match=r"mujoco is needed to simulate the table.*pip install 'soma-lightning\[sim\]'"
    ):
        rendering.import_mujoco()


def test_a_back_end_chosen_by_the_user_is_kept() -> None:
    code = """
import os
from soma_lightning.envs.rendering import import_mujoco
import_mujoco()
print(os.environ["MUJOCO_GL"])
"""
    assert run_python("-c", code, MUJOCO_GL="disable").stdout.strip() == "disable"
    assert run_python("-c", code).stdout.strip() == "egl"


def test_the_first_optimizer_works_beside_a_living_context() -> None:
    """A fresh process: picture first, torch's first optimizer second. Without the load order it is a crash."""
    code = """
from soma_lightning.envs import make
env = make("somatable", image_size=32)
env.reset("pick", 0)
before = env.observe()["agentview_image"].sum()
import torch
weight = torch.nn.Parameter(torch.ones(3))
weight.grad = torch.ones(3)
torch.optim.AdamW([weight]).step()
assert env.observe()["agentview_image"].sum() == before
print("alive")
"""
    done = run_python("-c", code)
    assert (done.returncode, done.stdout.strip()) == (0, "alive"), done.stderr


def test_nothing_is_printed_at_exit_when_an_environment_was_not_closed() -> None:
    code = """
from soma_lightning.envs import make
env = make("somatable", image_size=32)
env.reset("pick", 0)
env.observe()
"""
    done = run_python("-c", code)
    assert (done.returncode, done.stderr) == (0, "")
