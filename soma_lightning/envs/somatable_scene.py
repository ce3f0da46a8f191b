"""What stands on SomaTable's table, and how a picture of it is drawn.

One MJCF string holds the whole scene: table, cube, two contact-free discs, a floating parallel gripper welded to a
mocap body, two cameras. A `TableScene` is what any number of environments share: the compiled model and one renderer.
"""

from __future__ import annotations

import atexit
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np

from soma_lightning.envs.rendering import check_gl, import_mujoco

#: Simulator camera of each observation key's camera; the names are LIBERO's.
MAIN_CAMERA = "agentview"
WRIST_CAMERA = "robot0_eye_in_hand"

TIMESTEP_S = 0.004
TABLE_TOP_M = 0.90
DISC_HEIGHT_M = 0.901
CUBE_REST_M = 0.922  # centre of the resting cube, half edge 22 mm

# Shadows, reflections and multisampling are off: a pair of 64 px images costs 1.4 to 2.5 ms on one CPU core.
_MJCF = """
<mujoco model="somatable">
  <compiler angle="radian"/>
  <option timestep="{timestep}" integrator="implicitfast" cone="elliptic" impratio="10"/>
  <visual>
    <global offwidth="{image_size}" offheight="{image_size}"/>
    <quality shadowsize="0" offsamples="0"/>
  </visual>
  <asset>
    <texture name="sky" type="skybox" builtin="gradient" rgb1=".8 .85 .9" rgb2=".5 .5 .55" width="64" height="64"/>
    <texture name="wood" type="2d" builtin="checker" rgb1=".75 .62 .45" rgb2=".7 .57 .4" width="64" height="64"/>
    <material name="table" texture="wood" texrepeat="6 6"/>
  </asset>
  <worldbody>
    <light pos="0.3 0 2.5" dir="-.1 0 -1" castshadow="false"/>
    <geom name="floor" type="plane" size="2 2 .1" rgba=".4 .4 .42 1"/>
    <body name="table" pos="0 0 .45">
      <geom name="table_top" type="box" size=".5 .6 .45" material="table"/>
    </body>
    <body name="green_disc" mocap="true" pos=".1 .15 .901">
      <geom name="green_disc" type="cylinder" size=".045 .001" rgba="0 .75 .15 1" contype="0" conaffinity="0"/>
    </body>
    <body name="blue_disc" mocap="true" pos=".1 -.15 .901">
      <geom name="blue_disc" type="cylinder" size=".045 .001" rgba=".1 .25 .9 1" contype="0" conaffinity="0"/>
    </body>
    <body name="hand_target" mocap="true" pos="-.2 0 1.17" quat="0 1 0 0"/>
    <body name="hand" pos="-.2 0 1.17" quat="0 1 0 0" gravcomp="1">
      <freejoint name="hand"/>
      <inertial pos="0 0 0" mass="1" diaginertia=".01 .01 .01"/>
      <geom type="box" size=".03 .05 .025" rgba=".2 .2 .2 1" contype="0" conaffinity="0"/>
      <geom type="cylinder" size=".035 .15" pos="0 0 -.17" rgba=".85 .85 .85 1" contype="0" conaffinity="0"/>
      <site name="grip" pos="0 0 .09" size=".004"/>
      <camera name="robot0_eye_in_hand" pos=".06 0 0" quat="0 .7071 .7071 0" fovy="75"/>
      <!-- At joint value 0 the inner faces touch; fingers that start in one place cross and never open. -->
      <body name="left_finger" pos="0 .008 .06" gravcomp="1">
        <joint name="left_finger" type="slide" axis="0 1 0" range="0 .04" damping="5"/>
        <geom name="left_finger" type="box" size=".01 .008 .04" mass=".03" rgba=".1 .1 .1 1" friction="1.5 .05 .001"/>
      </body>
      <body name="right_finger" pos="0 -.008 .06" gravcomp="1">
        <joint name="right_finger" type="slide" axis="0 1 0" range="-.04 0" damping="5"/>
        <geom name="right_finger" type="box" size=".01 .008 .04" mass=".03" rgba=".1 .1 .1 1" friction="1.5 .05 .001"/>
      </body>
    </body>
    <body name="cube" pos="0 0 .925">
      <freejoint name="cube"/>
      <geom name="cube" type="box" size=".022 .022 .022" mass=".05" rgba=".85 .15 .1 1" friction="1 .01 .001"/>
    </body>
    <camera name="agentview" pos="0.9 0 1.6" xyaxes="0 1 0 -.61 0 .79" fovy="38"/>
  </worldbody>
  <equality>
    <weld body1="hand_target" body2="hand" solref=".02 1" solimp=".9 .95 .001"/>
  </equality>
  <actuator>
    <position name="left_finger" joint="left_finger" kp="200" ctrlrange="0 .04" forcerange="-20 20"/>
    <position name="right_finger" joint="right_finger" kp="200" ctrlrange="-.04 0" forcerange="-20 20"/>
  </actuator>
</mujoco>
"""


@dataclass(frozen=True)
class TableState:
    """Where everything is, in metres and world axes: what predicates, rewards and scripted experts read.

    grip: float64 [3], between the finger tips. cube: float64 [3], its centre. green, blue: float64 [2], disc centres.
    opening: distance between the fingers' inner faces.
    """

    grip: np.ndarray
    cube: np.ndarray
    green: np.ndarray
    blue: np.ndarray
    opening: float


class TableScene:
    """The compiled model and the renderer that the environments of one process and thread share.

    The renderer, and with it the OpenGL context, is made when the first picture is asked for; it is freed when the
    last environment has called `release`, at the latest at interpreter exit. Use it from one thread only.
    """

    def __init__(self, image_size: int) -> None:
        self.mujoco = import_mujoco()
        self.image_size = image_size
        self.model = self.mujoco.MjModel.from_xml_string(_MJCF.format(timestep=TIMESTEP_S, image_size=image_size))
        model = self.model
        self.grip_site: int = model.site("grip").id
        self.cube_body: int = model.body("cube").id
        self.hand_body: int = model.body("hand").id
        self.hand_target: int = model.body("hand_target").mocapid[0]
        self.green_disc: int = model.body("green_disc").mocapid[0]
        self.blue_disc: int = model.body("blue_disc").mocapid[0]
        self.cube_qpos: int = model.joint("cube").qposadr[0]
        self.hand_qpos: int = model.joint("hand").qposadr[0]
        self.finger_qpos = [model.joint(f"{side}_finger").qposadr[0] for side in ("left", "right")]
        self._users = 0
        self._renderer: Any = None

    def acquire(self) -> TableScene:
        """Counts one more environment that uses this scene."""
        self._users += 1
        return self

    def release(self) -> None:
        """Counts one environment less; the last one frees the renderer."""
        self._users -= 1
        if self._users == 0 and self._renderer is not None:
            self._renderer.close()
            self._renderer = None

    def picture(self, data: Any, camera: str) -> np.ndarray:
        """One camera's image, uint8 [h, w, 3], upright and mirrored left to right as LIBERO's policies want it.

        Raises RenderingUnavailableError when no OpenGL context can be made.
        """
        if self._renderer is None:
            check_gl()
            self._renderer = self.mujoco.Renderer(self.model, self.image_size, self.image_size, max_geom=64)
            # Registered after MuJoCo's own hook, so it runs before that one ends the display under a living context.
            atexit.register(_close_renderer, weakref.ref(self._renderer))
        self._renderer.update_scene(data, camera)
        flags = self._renderer.scene.flags
        flags[self.mujoco.mjtRndFlag.mjRND_SHADOW] = 0
        flags[self.mujoco.mjtRndFlag.mjRND_REFLECTION] = 0
        return np.ascontiguousarray(self._renderer.render()[:, ::-1])


def _close_renderer(reference: weakref.ref[Any]) -> None:
    renderer = reference()
    if renderer is not None:
        renderer.close()
