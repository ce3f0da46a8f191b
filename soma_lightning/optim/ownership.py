"""Who counts a gradient in the global norm when several processes hold it, and how their counts become one.

One process counts everything. A strategy that divides parameters gives `FusedAdamW.ownership` an object that knows
better.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor


class Ownership:
    """A shard counts on the ranks with coordinate 0 in every mesh dimension that it is not cut along."""

    def __init__(self, mesh: Any) -> None:
        self.place = dict(zip(mesh.mesh_dim_names, mesh.get_coordinate(), strict=True))

    @classmethod
    def from_mesh(cls, mesh: Any) -> Ownership:
        return cls(mesh)

    def counted(self, params: Sequence[Tensor]) -> Sequence[bool]:
        return [not any(place for name, place in self.place.items() if name not in _cut(p)) for p in params]

    def reduce(self, vector: Tensor, norm_type: float) -> Tensor:
        total = vector.clone()
        dist.all_reduce(total, dist.ReduceOp.SUM if norm_type == 2.0 else dist.ReduceOp.MAX)
        return total


def _cut(param: Any) -> set[str]:
    mesh = getattr(param, "device_mesh", None)
    if mesh is None:
        return set()
    return {n for n, p in zip(mesh.mesh_dim_names, param.placements, strict=True) if not p.is_replicate()}
