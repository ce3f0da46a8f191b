"""How one LIBERO task is built, reset in bounded time, stepped and drawn; conventions are left to `libero.py`.

LIBERO samples an observation inside the control step (after 24 of its 25 substeps) and shows geometry of the substep
before. Released policies and data sets hold these slightly old observations. Drawing only when somebody looks
must not change that: at the moment of sampling, where everything is gets noted (0.03 ms), and that is drawn later.
"""

from __future__ import annotations

import atexit
import contextlib
import weakref
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from soma_lightning.envs.libero_geometry import LiberoScene
from soma_lightning.envs.libero_package import import_simulator, quiet
from soma_lightning.envs.rendering import check_gl, choose_egl_device, import_mujoco

#: Placements that collide are drawn again at most this often; the fixed initial state replaces them anyhow.
MAX_RESET_ATTEMPTS = 10
_SNAPSHOT = "soma_snapshot"
_DRAWN = (
    "geom_xpos",
    "geom_xmat",
    "site_xpos",
    "site_xmat",
    "cam_xpos",
    "cam_xmat",
    "light_xpos",
    "light_xdir",
)
#: Simulators that nobody has closed yet.
_alive: weakref.WeakSet[LiberoSimulator] = weakref.WeakSet()


class LiberoSimulator:
    """The simulator of one task.

    bddl_file: the task's description. image_size: side of the square images, pixels; None builds no renderer and needs
    no OpenGL context. hard_reset: load the model anew in every reset, or keep it (ten times faster; later episodes
    drift by about 2e-5, and the same seed may place fixtures elsewhere). reflections: draw the table's mirror image.
    multisampling: smooth edges.
    """

    def __init__(
        self, bddl_file: str, *, image_size: int | None, hard_reset: bool, reflections: bool, multisampling: bool
    ) -> None:
        if not Path(bddl_file).is_file():
            raise FileNotFoundError(f"the task's description {bddl_file} is missing; reinstall LIBERO")
        self._image_size, self._reflections, self._multisampling = image_size, reflections, multisampling
        if image_size is not None:
            choose_egl_device()
            check_gl()
        self._mujoco = import_mujoco()
        wrapper = import_simulator()
        with _numpy_seeded(0), quiet():  # it places everything once, in vain after a hard reset
            self._control = wrapper.ControlEnv(
                bddl_file_name=bddl_file,
                has_offscreen_renderer=image_size is not None,
                use_camera_obs=False,
                ignore_done=True,
                hard_reset=hard_reset,
            )
        _alive.add(self)
        # Handlers run in reverse order: this one before the one that ends EGL, after which freeing prints tracebacks.
        atexit.unregister(_close_all)
        atexit.register(_close_all)
        self._seen: list[np.ndarray] = []  # `_drawn_arrays` at the last sampling
        if image_size is not None:
            self._sample_with_the_observables()

    def reset(self, init_state: np.ndarray | None, seed: int) -> dict[str, np.ndarray]:
        """Starts from `init_state` float64 [D] and returns the raw observation without images.

        init_state None: from what LIBERO draws. seed: of NumPy's global generator, from which LIBERO draws in any case
        the places of its fixtures (they are part of the model, not of the state); the generator is left as it was
        found. Raises RuntimeError when MAX_RESET_ATTEMPTS
        placements collide; any other error is passed on at once.
        """
        # Not `ControlEnv.reset`: it swallows every exception and tries again for ever.
        with _numpy_seeded(seed), quiet():
            collision = import_module("robosuite.utils.errors").RandomizationError
            for attempt in range(1, MAX_RESET_ATTEMPTS + 1):
                try:
                    self._control.env.reset()
                    break
                except collision as error:
                    if attempt == MAX_RESET_ATTEMPTS:
                        raise RuntimeError(
                            f"LIBERO found no free place for its objects in {attempt} attempts; use another seed"
                        ) from error
            drawn = self._control.get_sim_state() if init_state is None else init_state
            return dict(self._control.set_init_state(drawn))

    def step(self, action: np.ndarray) -> tuple[dict[str, np.ndarray], bool]:
        """Executes one control step of 50 ms; returns the raw observation and whether the goal holds now."""
        observation, _, done, _ = self._control.step(action)
        return dict(observation), bool(done)

    def picture(self, camera: str) -> np.ndarray:
        """The raw image of `camera` at the last sampling, uint8 [image_size, image_size, 3], upside down."""
        mujoco, size = self._mujoco, self._image_size
        assert size is not None, "built without a renderer"
        sim = self._control.env.sim
        context = sim._render_context_offscreen
        context.gl_ctx.make_current()  # another environment of this process may have drawn last
        if not self._multisampling and context.con.offSamples:  # once after every hard reset
            context.con.offSamples = 0
            mujoco.mjr_resizeOffscreen(size, size, context.con)  # another size makes the buffers anew
        if size > min(context.con.offWidth, context.con.offHeight):
            context.update_offscreen_size(max(size, context.con.offWidth), max(size, context.con.offHeight))
        context.scn.flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = int(self._reflections)
        context.cam.type = mujoco.mjtCamera.mjCAMERA_FIXED
        context.cam.fixedcamid = sim.model.camera_name2id(camera)
        model, data = sim.model._model, sim.data._data
        with self._as_sampled(model, data):
            everything = mujoco.mjtCatBit.mjCAT_ALL
            mujoco.mjv_updateScene(model, data, context.vopt, context.pert, context.cam, everything, context.scn)
        viewport = mujoco.MjrRect(0, 0, size, size)
        mujoco.mjr_render(viewport, context.scn, context.con)
        pixels = np.empty((size, size, 3), np.uint8)
        mujoco.mjr_readPixels(pixels, None, viewport, context.con)
        return pixels

    def state(self) -> np.ndarray:
        """Time, positions and velocities of everything, float64 [D]."""
        return np.array(self._control.get_sim_state())

    def scene(self) -> LiberoScene:
        """What scripted experts read; valid until the next reset."""
        env = self._control.env
        goal = tuple(tuple(predicate) for predicate in env.parsed_problem["goal_state"])
        return LiberoScene(env.sim.model._model, env.sim.data._data, dict(env.obj_body_id), goal)

    def close(self) -> None:
        """Frees model and OpenGL context; a second call does nothing."""
        if self._control is not None:
            with contextlib.suppress(AttributeError):  # what an interrupted reset has already taken down
                self._control.close()
            self._control = None

    def _sample_with_the_observables(self) -> None:
        """Adds an observable that notes what is drawn at the very moment at which the others are sampled."""
        observables = import_module("robosuite.utils.observables")

        @observables.sensor(modality=_SNAPSHOT)  # type: ignore[untyped-decorator]
        def snapshot(_: Any) -> np.ndarray:
            sim = self._control.env.sim
            self._seen = [np.array(array) for array in _drawn_arrays(sim.model._model, sim.data._data)]
            return np.zeros(1)

        rate = self._control.env.control_freq
        self._control.env.add_observable(observables.Observable(name=_SNAPSHOT, sensor=snapshot, sampling_rate=rate))

    @contextlib.contextmanager
    def _as_sampled(self, model: Any, data: Any) -> Iterator[None]:
        """Puts what was noted at the last sampling into the simulator, and takes it out again."""
        arrays = _drawn_arrays(model, data)
        now = [np.array(array) for array in arrays]
        try:
            for array, seen in zip(arrays, self._seen, strict=True):
                array[:] = seen
            yield
        finally:
            for array, kept in zip(arrays, now, strict=True):
                array[:] = kept


def _close_all() -> None:
    for simulator in list(_alive):
        simulator.close()


def _drawn_arrays(model: Any, data: Any) -> list[np.ndarray]:
    """All that a picture depends on and a control step changes, as views. A stove is lit by its sites' colour."""
    return [*(getattr(data, name) for name in _DRAWN), model.site_rgba]


@contextlib.contextmanager
def _numpy_seeded(seed: int) -> Iterator[None]:
    before = np.random.get_state()  # noqa: NPY002 (LIBERO draws from the global generator)
    np.random.seed(seed)  # noqa: NPY002
    try:
        yield
    finally:
        np.random.set_state(before)  # noqa: NPY002
