"""Geometry and phases of LIBERO's expert in small scenes of our own, without LIBERO."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from soma_lightning.envs.libero_expert import PickAndPlace, grasp_of_bowl, grasp_of_solid
from soma_lightning.envs.libero_geometry import Box, LiberoScene, Shape, collision_geoms, site_box, vertices_of
from soma_lightning.envs.rendering import import_mujoco

mujoco = import_mujoco()

TURNED = "0.70710678 0 0 0.70710678"  # 90 degrees about z
DOWN = "0 0.70710678 0.70710678 0"  # how LIBERO's hand points down


def scene_of(body: str, goal: tuple[tuple[str, ...], ...] = ()) -> LiberoScene:
    model = mujoco.MjModel.from_xml_string(f"<mujoco><worldbody>{body}</worldbody></mujoco>")
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    bodies = {model.body(i).name: i for i in range(1, model.nbody) if not model.body(i).name.startswith("_")}
    return LiberoScene(model, data, bodies, goal)


def check_box(box: Box, low: list[float], high: list[float]) -> None:
    np.testing.assert_allclose(box.low, low, atol=1e-6)
    np.testing.assert_allclose(box.high, high, atol=1e-6)


def test_the_box_holds_what_collides_of_a_body_and_its_children() -> None:
    scene = scene_of(
        f"""<body name="cabinet" pos="1 0 0" quat="{TURNED}">
              <geom type="box" size=".3 .1 .2"/>
              <geom type="box" size="2 2 2" contype="0" conaffinity="0"/>
              <body name="_drawer" pos="0 0 1"><geom type="box" size=".05 .05 .05"/></body>
            </body>
            <body name="other"><geom type="sphere" size="5"/></body>"""
    )
    check_box(Shape(scene, "cabinet").box(), [0.9, -0.3, -0.2], [1.1, 0.3, 1.05])


@pytest.mark.parametrize(
    ("geom", "half"),
    [
        ('type="sphere" size=".2"', [0.2, 0.2, 0.2]),
        ('type="ellipsoid" size=".2 .3 .4"', [0.2, 0.3, 0.4]),
        ('type="cylinder" size=".2 .5"', [0.2, 0.2, 0.5]),
        ('type="capsule" size=".2 .5"', [0.2, 0.2, 0.7]),
    ],
)
def test_round_geoms_have_their_extent(geom: str, half: list[float]) -> None:
    scene = scene_of(f'<body name="thing" pos="0 0 1"><geom {geom}/></body>')
    check_box(Shape(scene, "thing").box(), [-half[0], -half[1], 1 - half[2]], [half[0], half[1], 1 + half[2]])


def test_a_plane_cannot_be_grasped() -> None:
    scene = scene_of('<geom type="plane" size="1 1 1"/>')
    with pytest.raises(ValueError, match="geom 0 of MuJoCo's type 0 has no vertices"):
        vertices_of(scene.model, scene.data, collision_geoms(scene.model, 0))


def test_the_rim_stays_the_rim_when_the_bowl_is_tilted() -> None:
    floor, wall = '<geom type="box" size=".02 .02 .01"/>', '<geom type="box" size=".01 .05 .01" pos="{} 0 .05"/>'
    walls = wall.format(-0.06) + wall.format(0.06)
    scene = scene_of(f'<body name="bowl" euler="0 60 0">{floor}{walls}</body>')
    rim = Shape(scene, "bowl").rim()
    own = rim @ scene.data.xmat[1].reshape(3, 3)
    np.testing.assert_allclose(own[:, 2], 0.06, atol=1e-6)
    assert len(rim) == 8  # four corners of each wall's upper face, also of the lower wall
    assert np.ptp(rim[:, 2]) > 0.1


def test_a_goal_region_is_where_its_site_is() -> None:
    site = '<site name="plate" type="box" pos=".5 0 0" size=".1 .2 .01"/>'
    scene = scene_of(f'<body name="stove" pos="0 0 1">{site}</body>')
    check_box(site_box(scene, "plate"), [0.4, -0.2, 0.99], [0.6, 0.2, 1.01])


def test_a_box_knows_what_is_above_it_and_how_far_beside_it() -> None:
    box = Box(np.array([0.0, 0, 0]), np.array([2.0, 1, 1]))
    assert box.is_below_or_above(np.array([1.0, 0.5, 7]))
    assert not box.is_below_or_above(np.array([1.0, 1.5, 0.5]))
    assert box.sideways_distance(np.array([2.3, 1.1])) == pytest.approx(0.3)
    assert box.sideways_distance(np.array([1.0, 0.5, 9])) == 0.0


@pytest.mark.parametrize(
    ("size", "above_bottom", "turned"),
    [
        ((0.08, 0.043, 0.018), 0.009, False),  # flat: around its middle
        ((0.06, 0.06, 0.20), 0.17, False),  # tall: the palm stays above its top
        ((0.04, 0.12, 0.10), 0.07, True),  # too wide for the fingers, so across its other side
        ((0.20, 0.12, 0.05), 0.025, False),
    ],
)
def test_solid_objects_are_held_across_their_narrow_side(
    size: tuple[float, float, float], above_bottom: float, turned: bool
) -> None:
    low = np.array([0.1, 0.2, 0.9])
    grasp = grasp_of_solid(Box(low, low + size))
    np.testing.assert_allclose(grasp.point, [0.1 + size[0] / 2, 0.2 + size[1] / 2, 0.9 + above_bottom])
    assert (grasp.yaw != 0.0) is turned
    assert grasp.below == pytest.approx(above_bottom)
    assert grasp.top == pytest.approx(0.9 + size[2])


ANGLES = np.linspace(0, 2 * np.pi, 64, endpoint=False)
RIM = np.stack([0.06 * np.cos(ANGLES), 0.06 * np.sin(ANGLES), np.full(64, 0.95)], axis=1)
BOWL = Box(np.array([-0.06, -0.06, 0.9]), np.array([0.06, 0.06, 0.95]))


def block(low: list[float], high: list[float]) -> Box:
    return Box(np.array([*low, 0.9]), np.array([*high, 1.1]))


LEFT, RIGHT = block([-0.1, 0.09], [0.1, 0.2]), block([-0.1, -0.2], [0.1, -0.09])


@pytest.mark.parametrize(
    ("others", "point", "turned"),
    [
        ({}, [0, 0.055, 0.93], False),
        ({"can_1": LEFT}, [0, -0.055, 0.93], False),
        ({"can_1": LEFT, "can_2": RIGHT}, [0.055, 0, 0.93], True),
        ({"wooden_cabinet_1": block([-0.2, -0.2], [0.2, 0.2])}, [0.055, 0, 0.938], True),
        ({"plate_1": Box(np.array([-0.2, 0.06, 0.9]), np.array([0.2, 0.3, 0.91]))}, [0, 0.055, 0.93], False),  # low
    ],
)
def test_bowls_are_pinched_where_there_is_space(others: Mapping[str, Box], point: list[float], turned: bool) -> None:
    grasp = grasp_of_bowl(BOWL, RIM, others, np.array([-0.5, 0.0]))
    np.testing.assert_allclose(grasp.point, point, atol=1e-9)
    assert (grasp.yaw != 0.0) is turned


@pytest.mark.parametrize(("base", "point"), [(-0.70, [0, 0.055]), (-0.78, [-0.055, 0])])
def test_a_bowl_at_arms_length_is_pinched_at_its_near_side(base: float, point: list[float]) -> None:
    np.testing.assert_allclose(grasp_of_bowl(BOWL, RIM, {}, np.array([base, 0.0])).point[:2], point, atol=1e-9)


class Puppet:
    """A hand that moves as it is told, and a can that follows while the fingers hold it."""

    def __init__(self) -> None:
        self.scene = scene_of(
            f"""<body name="_hand" mocap="true" pos="0 0 1.2" quat="{DOWN}"><site name="gripper0_grip_site"/></body>
                <body name="can" mocap="true" pos=".1 .1 .05"><geom type="cylinder" size=".03 .05"/></body>
                <body name="plate" pos="-.1 -.1 .01"><geom type="box" size=".08 .08 .01"/></body>""",
            (("on", "can", "plate"),),
        )
        self.expert = PickAndPlace(self.scene)
        self.grip_fails = 0  # so many closings hold nothing
        self.phases: list[str] = []
        self.actions: list[np.ndarray] = []

    def step(self) -> None:
        data, before = self.scene.data, self.expert.phase
        action = self.expert.act()
        hand, can = data.mocap_pos
        near = np.abs(hand - can).max() < 0.05
        if near and action[6] > 0 and not (self.grip_fails and before.value in ("close", "lift")):
            data.mocap_pos[1] += 0.0125 * action[:3]
        data.mocap_pos[0] += 0.0125 * action[:3]
        mujoco.mj_forward(self.scene.model, data)
        if before.value == "lift" and self.expert.phase is not before and self.grip_fails:
            self.grip_fails -= 1
        self.actions.append(action)
        if not self.phases or self.phases[-1] != before.value:
            self.phases.append(before.value)

    def run(self, steps: int) -> None:
        while len(self.actions) < steps and self.expert.phase.value != "retreat":
            self.step()


ONCE = ["hover", "down", "close", "lift", "carry", "lower", "open"]


def test_the_phases_bring_an_object_to_its_goal() -> None:
    puppet = Puppet()
    puppet.run(300)
    assert puppet.phases == ONCE
    can = puppet.scene.data.mocap_pos[1]
    np.testing.assert_allclose(can[:2], [-0.1, -0.1], atol=0.01)
    assert 0.02 < can[2] - 0.05 < 0.05  # let go a little above the plate, whose top is at 2 cm
    actions = np.stack(puppet.actions)
    assert np.abs(actions).max() <= 1.0
    np.testing.assert_allclose(actions[:, 3:6], 0.0, atol=1e-6)  # it points down already
    # Far away it moves at full speed in the exact direction of its target, the point above the can.
    np.testing.assert_allclose(actions[0, :2] / np.abs(actions[0, :2]).max(), [1.0, 1.0], atol=1e-5)


def test_a_can_that_slipped_away_is_grasped_again() -> None:
    puppet = Puppet()
    puppet.grip_fails = 1
    puppet.run(400)
    assert puppet.phases == [*ONCE[:4], *ONCE]
    np.testing.assert_allclose(puppet.scene.data.mocap_pos[1][:2], [-0.1, -0.1], atol=0.01)


def test_two_experts_of_one_scene_act_alike() -> None:
    first, second = Puppet(), Puppet()
    first.run(300)
    second.run(300)
    np.testing.assert_array_equal(np.stack(first.actions), np.stack(second.actions))
