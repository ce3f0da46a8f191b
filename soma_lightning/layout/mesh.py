"""How many ranks each parallel dimension gets: the `Layout` a user writes, and the mesh it means for a world size.

Mesh dimensions, outermost first: pp (pipeline), dp_replicate, dp_shard, tp (tensor). Layouts are pure arithmetic; torch
is imported when a mesh is built.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

#: Names of the mesh dimensions, outermost first; tensor-parallel ranks are neighbours.
MESH_DIMS = ("pp", "dp_replicate", "dp_shard", "tp")

#: Names that Lightning's ModelParallelStrategy gives to parts of its mesh.
ALIASES = {"data_parallel": ("dp_replicate", "dp_shard"), "tensor_parallel": ("tp",)}

#: Layouts that have a name; `auto` and `fsdp` shard over all ranks, `hsdp` shards inside a node and replicates across.
NAMED_LAYOUTS = ("auto", "fsdp", "hsdp", "replicate")


@dataclass(frozen=True)
class Layout:
    """Ranks per parallel dimension; their product is the world size.

    shard="auto" takes all ranks that the other dimensions leave. Raises ValueError for a size that is not a positive
    integer.
    """

    pipeline: int = 1
    replicate: int = 1
    shard: int | Literal["auto"] = "auto"
    tensor: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            size = getattr(self, field.name)
            if field.name == "shard" and size == "auto":
                continue
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                also = ' or "auto"' if field.name == "shard" else ""
                raise ValueError(f"Layout.{field.name}={size!r} must be a positive integer{also}")

    def resolve(self, world_size: int) -> Layout:
        """The same layout with `shard` as a number; ValueError unless the product is `world_size`."""
        others = self.pipeline * self.replicate * self.tensor
        if self.shard == "auto":
            if world_size % others:
                raise ValueError(
                    f"pipeline={self.pipeline} x replicate={self.replicate} x tensor={self.tensor} = {others} does not "
                    f"divide the world size {world_size}"
                )
            return Layout(self.pipeline, self.replicate, world_size // others, self.tensor)
        if others * self.shard != world_size:
            raise ValueError(
                f"pipeline={self.pipeline} x replicate={self.replicate} x shard={self.shard} x tensor={self.tensor} = "
                f"{others * self.shard} ranks, but the world size is {world_size}"
            )
        return self

    def mesh_shape(self) -> dict[str, int]:
        """Mesh dimension -> ranks, outermost first, for a resolved layout."""
        assert isinstance(self.shard, int), "resolve() first"
        return dict(zip(MESH_DIMS, (self.pipeline, self.replicate, self.shard, self.tensor), strict=True))


def resolve_layout(layout: Layout | Mapping[str, Any] | str, *, world_size: int, num_nodes: int = 1) -> Layout:
    """The layout that `layout` means on `world_size` ranks over `num_nodes` nodes.

    `hsdp` replicates across nodes and shards inside one; on a single node it makes two replicas. With one rank every
    name means the same: nothing is split. Raises ValueError for an unknown name or key, or sizes that do not fit.
    """
    if isinstance(layout, Layout):
        return layout.resolve(world_size)
    if isinstance(layout, str):
        return _named(layout, world_size, num_nodes).resolve(world_size)
    if not isinstance(layout, Mapping):
        raise TypeError(f"layout={layout!r} must be a Layout, a dict or one of {', '.join(NAMED_LAYOUTS)}")
    known = [field.name for field in fields(Layout)]
    unknown = [key for key in layout if key not in known]
    if unknown:
        raise ValueError(f"layout has no dimension {unknown[0]!r}; it has {', '.join(known)}")
    return Layout(**layout).resolve(world_size)


def _named(name: str, world_size: int, num_nodes: int) -> Layout:
    if name not in NAMED_LAYOUTS:
        raise ValueError(f"layout={name!r} is unknown; use one of {', '.join(NAMED_LAYOUTS)}, a dict or a Layout")
    if name == "replicate":
        return Layout(replicate=world_size, shard=1)
    if name == "hsdp" and world_size > 1:
        replicas = num_nodes if num_nodes > 1 else 2
        if world_size % replicas:
            raise ValueError(
                f"layout='hsdp' needs a world size that {replicas} replicas divide, not {world_size}; "
                f"use layout='fsdp' or name the sizes: Layout(replicate=..., shard=...)"
            )
        return Layout(replicate=replicas)
    return Layout()


@dataclass(frozen=True)
class WorldMesh:
    """The ranks of a run as a 4-D mesh with the names of `MESH_DIMS`, size-1 dimensions included.

    `device_mesh["data_parallel"]` and `["tensor_parallel"]`, 1-D, are what ModelParallelStrategy calls so.
    data: the submesh that parameters are divided over: ("dp_replicate", "dp_shard") with replicas, else ("dp_shard",).
    It is one object, because DTensors compare their meshes.
    """

    device_mesh: DeviceMesh
    data: DeviceMesh
    layout: Layout

    @classmethod
    def build(cls, layout: Layout, device_type: str) -> WorldMesh:
        """Makes the process groups of a resolved layout, or finds them; all ranks call it, once the world's exists."""
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        from soma_lightning.compat import name_submesh

        world, known = _BUILT.get((layout, device_type), (None, None))
        if known is not None and world is dist.group.WORLD:
            return known
        shape = layout.mesh_shape()
        mesh = init_device_mesh(device_type, tuple(shape.values()), mesh_dim_names=MESH_DIMS)
        for name, dims in ALIASES.items():
            name_submesh(mesh, dims, name)
        data = mesh["dp_replicate", "dp_shard"] if layout.replicate > 1 else mesh["dp_shard"]
        built = cls(mesh, data, layout)
        _BUILT[layout, device_type] = (dist.group.WORLD, built)
        return built

    @property
    def coordinate(self) -> dict[str, int]:
        """Mesh dimension -> this rank's place on it."""
        coordinate = self.device_mesh.get_coordinate()
        assert coordinate is not None, "a rank outside the mesh"
        return dict(zip(MESH_DIMS, coordinate, strict=True))

    @property
    def dp_size(self) -> int:
        """How many parts the data is divided into."""
        shape = self.layout.mesh_shape()
        return shape["dp_replicate"] * shape["dp_shard"]

    @property
    def dp_rank(self) -> int:
        """Which part of the data this rank reads; the same for ranks that differ in tp or pp only."""
        place = self.coordinate
        return place["dp_replicate"] * self.layout.mesh_shape()["dp_shard"] + place["dp_shard"]


#: Meshes of this process, with the group of the world that they were made in.
_BUILT: dict[tuple[Layout, str], tuple[Any, WorldMesh]] = {}
