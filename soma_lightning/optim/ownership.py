"""Who counts a gradient in the global norm when several ranks hold it, and how their counts become one decision.

Every rank adds up what it owns, one small vector is summed over all of them, and each takes the same decision from it.
So every rank must come to the collective in every step, with zeros if it has no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from soma_kernels.optim.reference import VECTOR_SUMS
from soma_lightning.optim.clipping import ClipRule
from soma_lightning.optim.groups import GROUP_LIMIT, label

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

#: Mesh dimensions: pipeline stages, replicas, shards, tensor parallelism.
DIMENSIONS = ("pp", "dp_replicate", "dp_shard", "tp")

#: Dimensions whose ranks read different samples; peers along the others read the same.
DATA_DIMENSIONS = frozenset({"dp_replicate", "dp_shard"})


def owns(coordinates: Mapping[str, int], divided_over: Collection[str]) -> bool:
    """Whether the rank at `coordinates` counts its part of a tensor; exactly one holder of each part does.

    coordinates: mesh dimension -> position of the rank. divided_over: dimensions along which ranks hold different
    parts; along all others they hold copies, and the first one counts.
    """
    return all(position == 0 for name, position in coordinates.items() if name not in divided_over)


def _on_every_stage(_: Tensor) -> bool:
    return False


@dataclass(frozen=True)
class Ownership:
    """What `FusedAdamW` asks when its parameters live on several ranks.

    coordinates: mesh dimension -> position of this rank, for all of `DIMENSIONS`.
    device: of the collective, for a rank that has no gradient to take it from.
    sums: False: gradients are already averaged over the data-parallel ranks, and `clip(normalizer=...)` is refused.
    True: they are sums, every step divides them by the sum of the normalizers of all data-parallel ranks, and a rank
    that gave none counts 0.
    on_one_stage: whether a parameter exists on this pipeline stage only; the others exist on every stage.
    group: the ranks that step together; None: all.
    """

    coordinates: Mapping[str, int]
    device: torch.device
    sums: bool = False
    on_one_stage: Callable[[Tensor], bool] = _on_every_stage
    group: dist.ProcessGroup | None = None

    def __post_init__(self) -> None:
        if set(self.coordinates) != set(DIMENSIONS):
            raise ValueError(
                f"the mesh has the dimensions {', '.join(self.coordinates) or 'None'}; it needs "
                f"{', '.join(DIMENSIONS)} (of size 1 where nothing is divided)"
            )

    @classmethod
    def from_mesh(
        cls, mesh: DeviceMesh, *, sums: bool = False, on_one_stage: Callable[[Tensor], bool] = _on_every_stage
    ) -> Ownership:
        """For the mesh over all ranks, with the names `DIMENSIONS` in any order.

        ValueError if the mesh has other dimensions or does not cover all ranks.
        """
        if mesh.size() != dist.get_world_size():
            raise ValueError(
                f"the mesh covers {mesh.size()} of {dist.get_world_size()} ranks; the decision about a step needs the "
                "mesh over all of them"
            )
        position = mesh.get_coordinate()
        assert position is not None, "a rank of the world is in the mesh"
        coordinates = dict(zip(mesh.mesh_dim_names or (), position, strict=False))
        return cls(coordinates, _current_device(mesh.device_type), sums, on_one_stage)

    def why_not_counted(self, param: Tensor) -> str | None:
        """Why nobody can own a part of `param`, as the end of a sentence; None if somebody can."""
        for name, size, placement in _layout(param):
            if size > 1 and placement.is_partial():
                return f"is a partial sum over mesh dimension {name!r}; reduce it before the step"
            if size > 1 and name not in self.coordinates:
                return f"lies on mesh dimension {name!r}, which is none of {', '.join(self.coordinates)}"
        return None

    def refuse_unowned(self, param_groups: Sequence[dict[str, Any]]) -> None:
        """ValueError naming a parameter of which nobody can own a part."""
        for param in chain.from_iterable(group["params"] for group in param_groups):
            reason = self.why_not_counted(param)
            if reason:
                raise ValueError(f"{label(param, param_groups)} {reason}")

    def refuse_unlike_groups(self, param_groups: Sequence[dict[str, Any]]) -> None:
        """ValueError on all ranks if they clip by unlike groups: their sums would meet in vectors of unlike size.

        A collective: every rank calls it, once its groups are there.
        """
        limits = [None if group.get(GROUP_LIMIT) is None else float(group[GROUP_LIMIT]) for group in param_groups]
        found = dict(self.gather(str(limits)))
        (first, theirs), *others = found.items()
        for rank, limit in others:
            if limit != theirs:
                raise ValueError(
                    f"the parameter groups have {GROUP_LIMIT} {theirs} on rank {first} and {limit} on rank {rank}; "
                    "ranks decide together: give all of them the same groups and limits"
                )

    def counted(self, params: Sequence[Tensor]) -> list[bool]:
        """For each parameter: does this rank add its part to the global norm? The second of two equal ones does not."""
        seen: set[int] = set()
        result = []
        for param in params:
            result.append(id(param) not in seen and owns(self.coordinates, self._divided_over(param)))
            seen.add(id(param))
        return result

    def _divided_over(self, param: Tensor) -> set[str]:
        # torch's _StridedShard is no Shard, and says so when it is asked.
        names = {str(name) for name, size, placement in _layout(param) if size > 1 and not placement.is_replicate()}
        return names | {"pp"} if self.on_one_stage(param) else names

    def share_of(self, normalizer: float | Tensor | None) -> float | Tensor | None:
        """What this rank adds to the global normalizer if it counted `normalizer` samples; None: nothing is divided.

        Tensor-parallel and pipeline peers counted the same samples, and one of them says so.
        """
        if not self.sums:
            return None
        return 0.0 if normalizer is None or not owns(self.coordinates, DATA_DIMENSIONS) else normalizer

    def refuse_normalizer(self, normalizer: float | Tensor | None) -> None:
        """ValueError for a normalizer of gradients that are averages already."""
        if normalizer is not None and not self.sums:
            raise ValueError(
                f"normalizer={normalizer!r}, but gradients are averaged over the data-parallel ranks already; leave it "
                "out, or let the ranks sum and use Ownership.from_mesh(mesh, sums=True)"
            )

    def all_reduce_(self, vector: Tensor, norm_type: float) -> None:
        """Makes the fp32 statistics vector of `soma_kernels.optim.reference.GradStats` global, in place.

        One collective for norm_type 2.0; two for inf, whose maxima need another operation than the counts. The host
        waits for neither on an accelerator.
        """
        if norm_type == 2.0:
            dist.all_reduce(vector, group=self.group)
            return
        dist.all_reduce(vector[:VECTOR_SUMS], group=self.group)
        dist.all_reduce(vector[VECTOR_SUMS:], op=dist.ReduceOp.MAX, group=self.group)

    def gather(self, text: str | None) -> list[tuple[int, str | None]]:
        """(rank, its `text`) of every rank, on every rank; waits for all of them."""
        found: list[tuple[int, str | None]] = [(0, None)] * dist.get_world_size(self.group)
        dist.all_gather_object(found, (dist.get_rank(), text), group=self.group)
        return found


def global_vector(vector: Tensor, rule: ClipRule, ownership: Ownership | None) -> Tensor:
    """The statistics vector of `soma_kernels.optim.reference.GradStats` over all ranks, with the rule's divisors.

    rule: with this rank's share of the normalizer. `vector` itself if there is nothing to do, else a new tensor.
    """
    if ownership is None and not rule.divides:
        return vector
    # One dtype on all ranks, whatever gradients a rank has.
    vector = vector.to(vector.dtype if ownership is None else torch.float32, copy=True)
    if rule.normalizer is not None:
        _write(vector[1], rule.normalizer)
    if ownership is not None:
        ownership.all_reduce_(vector, rule.norm_type)
    if rule.loss_scale is not None:
        if rule.normalizer is None:
            vector[1].fill_(1.0)
        vector[1].mul_(rule.loss_scale)
    return vector


def _write(target: Tensor, value: float | Tensor) -> None:
    """Sets a 0-d tensor; the host reads a value that is its own, and never one on a device."""
    if isinstance(value, Tensor) and value.device.type != "cpu":
        target.copy_(value)
    else:
        target.fill_(float(value))


def _layout(param: Tensor) -> list[tuple[str | None, int, torch.distributed.tensor.Placement]]:
    """(name, size, placement) of each dimension of a DTensor's mesh; nothing for a plain tensor."""
    mesh = getattr(param, "device_mesh", None)
    if mesh is None:
        return []
    names = mesh.mesh_dim_names or [None] * mesh.ndim
    return list(zip(names, mesh.shape, param.placements, strict=True))  # type: ignore[attr-defined]


def _current_device(device_type: str) -> torch.device:
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, torch.get_device_module(device_type).current_device())
