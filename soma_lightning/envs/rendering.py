"""Can this process render, and with which OpenGL back end?

Every import of MuJoCo goes through `import_mujoco`, because MUJOCO_GL is read once, at that import. Every first OpenGL
context goes through `check_gl`, because Triton's native library must be loaded before it. Run this module to see the
state: `python -m soma_lightning.envs.rendering` exits with 1 and prints what to install when rendering is impossible.
"""

from __future__ import annotations

import ctypes
import os
import sys
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

from soma_lightning.imports import is_available, require_package

APT_LINE = "apt-get install -y --no-install-recommends libegl1 libegl-mesa0 libgl1-mesa-dri libgl1 libglib2.0-0"
_EGL_LIBRARY = "libEGL.so.1"
#: Mesa's software rasterizer starts one thread per core in every process; workers share the cores among themselves.
WORKER_ENVIRONMENT = {"LP_NUM_THREADS": "1"}


class RenderingUnavailableError(RuntimeError):
    """No OpenGL context can be made in this process; the message says why and what to install or set."""


@dataclass(frozen=True)
class RenderingState:
    """What `check_gl` found: MuJoCo's version, the back end that gave a context, and the driver that draws."""

    backend: str
    mujoco_version: str
    renderer: str = "unknown"

    def __str__(self) -> str:
        return f"rendering works: mujoco {self.mujoco_version}, MUJOCO_GL={self.backend}"


def import_mujoco() -> Any:
    """Imports MuJoCo with a back end that suits this machine and returns the module.

    A MUJOCO_GL set by the user is never changed. When it is unset on Linux without a display, `egl` is chosen if its
    library can be loaded, else rendering is switched off so that state observations still work.
    Raises ImportError with the install line when MuJoCo is missing, RenderingUnavailableError when the chosen back end
    cannot be imported.
    """
    require_package("mujoco", purpose="simulate the table")
    if "mujoco" not in sys.modules and not os.environ.get("MUJOCO_GL") and _is_headless_linux():
        os.environ["MUJOCO_GL"] = "egl" if _can_load(_EGL_LIBRARY) else "disable"
    try:
        return import_module("mujoco")
    except Exception as error:  # the back ends raise ImportError, AttributeError, RuntimeError or OSError alike
        raise _unavailable(f"MuJoCo cannot be imported ({error})") from error


@cache
def check_gl() -> RenderingState:
    """Makes one small OpenGL context and drops it; remembers success for this process.

    Raises RenderingUnavailableError with the apt line when no context can be made.
    """
    if is_available("triton"):
        # Mesa's llvmpipe and Triton bring an LLVM each. Loading Triton's beside a live context is a segmentation
        # fault (triton 3.9 with Mesa 22.3); the other order works. torch's first optimizer imports triton by itself.
        import_module("triton._C.libtriton")
    mujoco = import_mujoco()
    if not hasattr(mujoco.gl_context, "GLContext"):
        raise _unavailable("MuJoCo was imported with rendering switched off")
    try:
        # A whole renderer, because GLFW without a display hands out an empty context that only fails when it is used.
        drawn_by = mujoco.Renderer(mujoco.MjModel.from_xml_string("<mujoco/>"), 8, 8, max_geom=1)
        renderer = _driver()
        drawn_by.close()
    except Exception as error:  # every back end has exception classes of its own
        raise _unavailable(f"no OpenGL context ({error})") from error
    return RenderingState(os.environ.get("MUJOCO_GL") or "glfw", mujoco.__version__, renderer)


def choose_egl_device(turn: int = 0) -> None:
    """Sets MUJOCO_EGL_DEVICE_ID from CUDA_VISIBLE_DEVICES for worker number `turn`; a value that is set is kept.

    The two count differently: EGL lists every GPU that the container shows, whatever CUDA_VISIBLE_DEVICES says. Does
    nothing where CUDA_VISIBLE_DEVICES is not set or another back end than EGL draws.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or os.environ.get("MUJOCO_EGL_DEVICE_ID") or not is_available("mujoco"):
        return
    import_mujoco()
    if os.environ.get("MUJOCO_GL") == "egl":
        count = len(import_module("mujoco.egl.egl_ext").eglQueryDevicesEXT())
        os.environ["MUJOCO_EGL_DEVICE_ID"] = str(egl_device(visible, turn, count))


def egl_device(visible: str, turn: int, count: int) -> int:
    """Index among `count` EGL devices for worker `turn`: inside the `visible` devices, in turn.

    visible: as CUDA_VISIBLE_DEVICES. Numbers that all are EGL indices are taken as such. Names, and numbers of a host
    of which the container shows less, count from 0. Without a visible device it is 0, the first one.
    """
    names = [name.strip() for name in visible.split(",") if name.strip()]
    numbers = [int(name) for name in names if name.isdigit()]
    if len(numbers) != len(names) or any(number >= count for number in numbers):
        numbers = list(range(min(len(names), count)))
    return numbers[turn % len(numbers)] if numbers else 0


def main() -> int:
    """Prints the state of rendering; returns 0 when it works and 1 when it does not."""
    try:
        print(check_gl())
    except (RenderingUnavailableError, ImportError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _driver() -> str:
    """Name of the driver behind the current context, such as "llvmpipe (LLVM 15.0.6, 256 bits)"."""
    name = import_module("OpenGL.GL").glGetString(0x1F01)  # GL_RENDERER
    return name.decode() if name else "unknown"


def _unavailable(reason: str) -> RenderingUnavailableError:
    backend = os.environ.get("MUJOCO_GL")
    shown = f"MUJOCO_GL={backend}" if backend else "MUJOCO_GL is not set"
    if not _can_load(_EGL_LIBRARY):
        reason += f"; {_EGL_LIBRARY} cannot be loaded"
    then = "" if backend == "egl" else "Set MUJOCO_GL=egl before mujoco is first imported. "
    if device := os.environ.get("MUJOCO_EGL_DEVICE_ID"):
        shown += f", MUJOCO_EGL_DEVICE_ID={device}: unset it if there is no such device"
    return RenderingUnavailableError(
        f"cannot render images: {reason}; {shown}. On Debian or Ubuntu, software rendering is installed with:\n"
        f"  {APT_LINE}\n{then}Observations without images (somatable obs_type=state, libero cameras=[]) "
        "need no rendering: MUJOCO_GL=disable."
    )


def _is_headless_linux() -> bool:
    return sys.platform == "linux" and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def _can_load(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
