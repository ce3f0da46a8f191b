"""Which rank counts which part, as arithmetic for meshes of any size, and what is refused."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from soma_lightning import FusedAdamW
from soma_lightning.optim.clipping import ClipRule
from soma_lightning.optim.ownership import DIMENSIONS, Ownership, global_vector, owns

CPU = torch.device("cpu")


def places(sizes: tuple[int, ...]) -> list[dict[str, int]]:
    return [dict(zip(DIMENSIONS, at, strict=True)) for at in itertools.product(*map(range, sizes))]


def subsets() -> list[tuple[str, ...]]:
    return [names for r in range(5) for names in itertools.combinations(DIMENSIONS, r)]


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (1, 8, 8, 1), (2, 2, 4, 2), (4, 1, 3, 5)])
@pytest.mark.parametrize("divided_over", subsets())
def test_every_part_is_counted_by_exactly_one_of_its_holders(sizes: tuple[int, ...], divided_over: tuple[str]) -> None:
    def part_of(place: dict[str, int]) -> tuple[int, ...]:
        return tuple(place[name] for name in divided_over)

    held = {part_of(place) for place in places(sizes)}
    counted = Counter(part_of(place) for place in places(sizes) if owns(place, divided_over))
    assert counted == dict.fromkeys(held, 1)


def test_samples_are_counted_once_for_each_data_parallel_rank() -> None:
    shares = [Ownership(place, CPU, sums=True).share_of(1.0) for place in places((2, 2, 3, 4))]
    assert sum(shares) == 2 * 3  # type: ignore[arg-type]
    assert all(Ownership(place, CPU, sums=True).share_of(None) == 0.0 for place in places((2, 2, 3, 4)))


def test_a_parameter_of_one_stage_is_counted_there_and_shared_ones_on_the_first() -> None:
    alone, shared = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    for stage in range(3):
        place = {"pp": stage, "dp_replicate": 0, "dp_shard": 0, "tp": 0}
        ownership = Ownership(place, CPU, on_one_stage=lambda p: p is alone)
        assert ownership.counted([alone, shared]) == [True, stage == 0]
        assert ownership.counted([alone, alone]) == [True, False]


@pytest.mark.parametrize("names", [(), ("dp_shard",), ("data", "tensor")])
def test_a_mesh_without_the_four_names_is_refused(names: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=r"needs pp, dp_replicate, dp_shard, tp"):
        Ownership(dict.fromkeys(names, 0), CPU)


def test_a_normalizer_of_averages_is_refused_before_the_step() -> None:
    ours = FusedAdamW([nn.Parameter(torch.ones(2))])
    ours.clip(normalizer=3.0)
    averaged = Ownership(dict.fromkeys(DIMENSIONS, 0), CPU)
    with pytest.raises(ValueError, match=r"normalizer=3.0, but gradients are averaged .*sums=True"):
        ours.ownership = averaged
    ours.clip()
    ours.ownership = averaged
    with pytest.raises(ValueError, match=r"normalizer=2, but gradients are averaged"):
        ours.clip(max_norm=1.0, normalizer=2)
    assert ours.pending_clip is None


def test_the_reduced_vector_is_a_new_aligned_one_in_fp32() -> None:
    class Alone(Ownership):
        def all_reduce_(self, vector: Tensor, norm_type: float) -> None:
            assert (vector.dtype, vector.is_contiguous(), vector.data_ptr() % 16) == (torch.float32, True, 0)
            vector += 1

    statistics = torch.arange(11, dtype=torch.float64)[1:5]
    alone = Alone(dict.fromkeys(DIMENSIONS, 0), CPU)
    total = global_vector(statistics, ClipRule(normalizer=torch.tensor(5), loss_scale=3), alone)
    assert (total.dtype, total.data_ptr() % 16) == (torch.float32, 0)
    assert total.tolist() == [2, 6 * 3, 4, 5]
    assert global_vector(statistics, ClipRule(loss_scale=3), alone).tolist() == [2, 3, 4, 5]
    assert statistics.tolist() == [1, 2, 3, 4]
    assert global_vector(statistics, ClipRule(max_norm=1.0), None) is statistics


class Placed(nn.Parameter):
    """Looks like a DTensor over two ranks of one mesh dimension."""

    device_mesh: Any
    placements: Any


@pytest.mark.parametrize(
    ("name", "partial", "words"),
    [
        ("tp", True, r"parameter 1 \('head', shape \(2,\)\) is a partial sum over mesh dimension 'tp'"),
        ("cp", False, r"parameter 1 \('head', shape \(2,\)\) lies on mesh dimension 'cp', which is none of pp"),
    ],
)
@pytest.mark.parametrize("late", [False, True])
def test_a_parameter_that_nobody_can_own_is_named(name: str, partial: bool, words: str, late: bool) -> None:
    from types import SimpleNamespace

    from torch.distributed.tensor import Partial, Replicate

    placed = Placed(torch.ones(2))
    placed.device_mesh = SimpleNamespace(mesh_dim_names=(name,), ndim=1, shape=(2,), size=lambda: 2)
    placed.placements = (Partial() if partial else Replicate(),)
    ownership = Ownership(dict.fromkeys(DIMENSIONS, 0), CPU)
    if late:
        ours = FusedAdamW([("body", nn.Parameter(torch.ones(3)))])
        ours.ownership = ownership
        with pytest.raises(ValueError, match=words):
            ours.add_param_group({"params": [("head", placed)]})
        assert len(ours.param_groups) == 1
    else:
        ours = FusedAdamW([("body", nn.Parameter(torch.ones(3))), ("head", placed)])
        with pytest.raises(ValueError, match=words):
            ours.ownership = ownership
        assert ours.ownership is None
