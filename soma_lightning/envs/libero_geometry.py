"""What is where in a MuJoCo scene: boxes of collision geometry, the rims of bowls, goal regions.

World axes, metres. Nothing here is special to one object: a table of sizes would be wrong for the next object. This
module needs a model and its data only, whoever made them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

_RIM_DEPTH_M = 0.008  # the rim: what lies this little below an object's highest vertex, in the object's own axes
_CIRCLE = np.linspace(0.0, 2.0 * np.pi, 16, endpoint=False)
_CORNERS = np.array([[x, y, z] for x in (-1.0, 1.0) for y in (-1.0, 1.0) for z in (-1.0, 1.0)])

# mujoco.mjtGeom; the numbers are part of MuJoCo's file format
_SPHERE, _CAPSULE, _ELLIPSOID, _CYLINDER, _BOX, _MESH = 2, 3, 4, 5, 6, 7


@dataclass(frozen=True)
class LiberoScene:
    """The running episode's model and state, both live, and what the task is about.

    model, data: MuJoCo's own. bodies: name of an object or fixture -> body id. goal: the task's predicates, such as
    (("on", "plate_1", "table"),). A hard reset replaces model and data, so a scene is valid for one episode.
    """

    model: Any
    data: Any
    bodies: Mapping[str, int]
    goal: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Box:
    """An axis-aligned box; low, high: float64 [3], m."""

    low: np.ndarray
    high: np.ndarray

    @property
    def centre(self) -> np.ndarray:
        return np.asarray((self.low + self.high) / 2.0)

    @property
    def size(self) -> np.ndarray:
        return np.asarray(self.high - self.low)

    def is_below_or_above(self, point: np.ndarray) -> bool:
        """Whether the vertical line through `point` [2 or 3] meets the box."""
        return bool((self.low[:2] < point[:2]).all() and (point[:2] < self.high[:2]).all())

    def sideways_distance(self, point: np.ndarray) -> float:
        """Horizontal distance of `point` [2 or 3] from the box, the larger of its x and y parts; 0 inside."""
        outside = point[:2] - np.clip(point[:2], self.low[:2], self.high[:2])
        return float(np.abs(outside).max())


def box_around(vertices: np.ndarray) -> Box:
    """The smallest box that holds `vertices` [V, 3]."""
    return Box(vertices.min(axis=0), vertices.max(axis=0))


def collision_geoms(model: Any, body: int) -> list[int]:
    """The geoms of `body` and of all bodies that hang on it, without those that are only drawn."""
    tree = {body}
    for child in range(body + 1, model.nbody):  # MuJoCo numbers parents before their children
        if model.body_parentid[child] in tree:
            tree.add(child)
    return [geom for geom in range(model.ngeom) if model.geom_bodyid[geom] in tree and model.geom_contype[geom]]


def vertices_of(model: Any, data: Any, geoms: Sequence[int]) -> np.ndarray:
    """The vertices of `geoms`, float64 [V, 3]; round ones as 16-sided prisms, spheres by their corners.

    ValueError for a geom without vertices, such as a plane.
    """
    worlds = []
    for geom in geoms:
        turn = data.geom_xmat[geom].reshape(3, 3)
        worlds.append(_own_vertices(model, geom) @ turn.T + data.geom_xpos[geom])
    return np.concatenate(worlds)


def _own_vertices(model: Any, geom: int) -> np.ndarray:
    """Vertices of one geom in its own axes, [V, 3]."""
    kind, size = int(model.geom_type[geom]), model.geom_size[geom]
    if kind == _MESH:
        mesh = model.geom_dataid[geom]
        begin = model.mesh_vertadr[mesh]
        return np.asarray(model.mesh_vert[begin : begin + model.mesh_vertnum[mesh]], np.float64)
    if kind in (_BOX, _ELLIPSOID):
        return np.asarray(_CORNERS * size)
    if kind == _SPHERE:
        return np.asarray(_CORNERS * size[0])
    if kind in (_CYLINDER, _CAPSULE):
        half = size[1] + (size[0] if kind == _CAPSULE else 0.0)
        circle = size[0] * np.stack([np.cos(_CIRCLE), np.sin(_CIRCLE)], axis=1)
        return np.concatenate([np.insert(circle, 2, z, axis=1) for z in (-half, half)])
    raise ValueError(f"geom {geom} of MuJoCo's type {kind} has no vertices, so nothing can be grasped there")


class Shape:
    """The collision geometry of one object or fixture, wherever it is now."""

    def __init__(self, scene: LiberoScene, name: str) -> None:
        self._model, self._data = scene.model, scene.data
        self._body = scene.bodies[name]
        self._geoms = collision_geoms(scene.model, self._body)

    def box(self) -> Box:
        """The box around it now."""
        return box_around(vertices_of(self._model, self._data, self._geoms))

    def rim(self) -> np.ndarray:
        """Its upper edge now, float64 [V, 3]: highest in its own axes, so that it stays the rim when it is tilted."""
        vertices = vertices_of(self._model, self._data, self._geoms)
        own = (vertices - self._data.xpos[self._body]) @ self._data.xmat[self._body].reshape(3, 3)
        return np.asarray(vertices[own[:, 2] > own[:, 2].max() - _RIM_DEPTH_M])


def site_box(scene: LiberoScene, name: str) -> Box:
    """The goal region `name`, a site whose axes are the world's."""
    site = scene.model.site(name).id
    position, half = np.array(scene.data.site_xpos[site]), scene.model.site_size[site]
    return Box(position - half, position + half)
