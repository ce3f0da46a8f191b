"""What a layout means on a world size: arithmetic only."""

from __future__ import annotations

import re
from typing import Any

import pytest

from soma_lightning.layout.mesh import Layout, resolve_layout


def shape(layout: Any, world_size: int, num_nodes: int = 1) -> tuple[int, ...]:
    mesh = resolve_layout(layout, world_size=world_size, num_nodes=num_nodes).mesh_shape()
    assert list(mesh) == ["pp", "dp_replicate", "dp_shard", "tp"]
    return tuple(mesh.values())


@pytest.mark.parametrize(
    ("layout", "world_size", "num_nodes", "expected"),
    [
        ("auto", 1, 1, (1, 1, 1, 1)),
        ("hsdp", 1, 1, (1, 1, 1, 1)),
        ("replicate", 1, 1, (1, 1, 1, 1)),
        ("auto", 4, 1, (1, 1, 4, 1)),
        ("fsdp", 8, 2, (1, 1, 8, 1)),
        ("hsdp", 4, 1, (1, 2, 2, 1)),
        ("hsdp", 16, 2, (1, 2, 8, 1)),
        ("replicate", 4, 1, (1, 4, 1, 1)),
        ({"tensor": 2}, 8, 1, (1, 1, 4, 2)),
        (Layout(pipeline=2, replicate=2, tensor=2), 16, 1, (2, 2, 2, 2)),
        (Layout(shard=8), 8, 1, (1, 1, 8, 1)),
    ],
)
def test_layouts_resolve_to_a_mesh(layout: Any, world_size: int, num_nodes: int, expected: tuple[int, ...]) -> None:
    assert shape(layout, world_size, num_nodes) == expected


@pytest.mark.parametrize(
    ("layout", "world_size", "message"),
    [
        ("zero3", 1, "layout='zero3' is unknown; use one of auto, fsdp, hsdp, replicate"),
        ("hsdp", 3, "layout='hsdp' needs a world size that 2 replicas divide, not 3"),
        ({"shards": 2}, 2, "layout has no dimension 'shards'; it has pipeline, replicate, shard, tensor"),
        (Layout(tensor=3), 4, "= 3 does not divide the world size 4"),
        (Layout(shard=2), 4, "= 2 ranks, but the world size is 4"),
    ],
)
def test_layouts_that_do_not_fit_are_refused(layout: Any, world_size: int, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        resolve_layout(layout, world_size=world_size)


@pytest.mark.parametrize("sizes", [{"tensor": 0}, {"pipeline": True}, {"shard": "all"}, {"replicate": "auto"}])
def test_sizes_must_be_positive_integers(sizes: dict[str, Any]) -> None:
    (name, value), *_ = sizes.items()
    with pytest.raises(ValueError, match=f"Layout.{name}={value!r} must be a positive integer"):
        Layout(**sizes)


def test_other_types_are_refused() -> None:
    with pytest.raises(TypeError, match="layout=4 must be a Layout, a dict or one of auto"):
        resolve_layout(4, world_size=4)  # type: ignore[arg-type]
