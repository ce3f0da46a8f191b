"""Private corners of torch's FSDP2 and process groups that this package leans on; one rank shows whether they moved."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from soma_lightning.compat import (
    begin_fsdp,
    drop_unreduced_gradients,
    follow_requires_grad,
    fsdp_groups,
    gather_as_stored,
    gather_for_backward_only_what_it_visits,
    name_submesh,
    renew_fsdp_dtypes,
    separate_store,
)


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,), mesh_dim_names=("dp_shard",))
    finally:
        dist.destroy_process_group()


def units(mesh: DeviceMesh, **settings: Any) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    for layer in model:
        fully_shard(layer, mesh=mesh, **settings)
    fully_shard(model, mesh=mesh)
    begin_fsdp(model)
    return model


def test_lazy_initialization_fixes_the_root(mesh: DeviceMesh) -> None:
    model = units(mesh)
    assert fully_shard.state(model)._is_root is True  # type: ignore[attr-defined]
    assert fully_shard.state(model[0])._is_root is False  # type: ignore[attr-defined]


def test_a_unit_has_groups_with_parameters(mesh: DeviceMesh) -> None:
    (group,) = fsdp_groups(units(mesh)[0])
    assert [p.sharded_param.shape for p in group.fsdp_params] == [(2, 2), (2,)]
    assert list(inspect.signature(group.post_forward).parameters) == ["module", "input", "output"]


def test_gradients_wait_where_they_can_be_dropped(mesh: DeviceMesh) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for settings in ({}, {"mp_policy": policy}):
        model: Any = units(mesh, **settings)
        (group,) = fsdp_groups(model[0])
        assert group._partial_reduce_output is None
        model.set_requires_gradient_sync(False)
        model(torch.ones(1, 2)).sum().backward()
        waiting = [p.unsharded_accumulated_grad for p in group.fsdp_params] + [
            p._unsharded_param.grad for p in group.fsdp_params
        ]
        assert sum(grad is not None for grad in waiting) == len(group.fsdp_params)
        drop_unreduced_gradients(model[0], set(model.parameters()))
        assert not any(p.unsharded_accumulated_grad is not None for p in group.fsdp_params)
        assert not any(p._unsharded_param.grad is not None for p in group.fsdp_params)


def test_a_parameter_is_gathered_as_stored_beside_others(mesh: DeviceMesh) -> None:
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    gather_as_stored(model, set(model[0].parameters()))
    begin_fsdp(model)
    (group,) = fsdp_groups(model)
    for _ in range(2):  # the accumulation of the second pass is one of sums
        for synchronizes in (False, True):
            model.set_requires_gradient_sync(synchronizes)  # type: ignore[operator]
            with torch.autocast("cpu", dtype=torch.bfloat16):
                model(torch.arange(8.0).view(2, 4)).sum().backward()
        dtypes = [p._unsharded_param.dtype for p in group.fsdp_params]
        assert dtypes == [torch.float32, torch.float32, torch.bfloat16, torch.bfloat16]
        assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.float32}
        torch.testing.assert_close(model[1].bias.grad.full_tensor(), torch.full((4,), 4.0))  # type: ignore[union-attr]
        model.zero_grad()
    group._init_mp_dtypes()
    assert [p.param_dtype for p in group.fsdp_params] == [None, None, torch.bfloat16, torch.bfloat16]


def test_the_backward_order_holds_what_backward_visits(mesh: DeviceMesh) -> None:
    model = units(mesh)
    for layer in model:
        gather_for_backward_only_what_it_visits(layer)
    first, second = (fsdp_groups(layer)[0] for layer in model)
    with torch.no_grad():
        model(torch.ones(1, 2))
    assert first.comm_ctx.post_forward_order == []
    model[0].requires_grad_(False)
    loss = model(torch.ones(1, 2)).sum()
    assert first.comm_ctx.post_forward_order == [second]
    assert (first._post_forward_indices, second._post_forward_indices) == ([], [0])
    loss.backward()
    assert first.comm_ctx.post_forward_order == []


def test_a_unit_without_trainable_parameters_has_no_dtypes(mesh: DeviceMesh) -> None:
    model = nn.Sequential(nn.Linear(2, 2).requires_grad_(False), nn.Linear(2, 2))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model[0], mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh)
    begin_fsdp(model)
    (group,) = fsdp_groups(model[0])
    assert (group._orig_dtype, group._reduce_dtype) == (None, None)
    model[0].requires_grad_(True)
    renew_fsdp_dtypes(model[0])
    assert (group._orig_dtype, group._reduce_dtype) == (torch.float32, torch.float32)


def test_gathered_parameters_have_a_requires_grad_of_their_own(mesh: DeviceMesh) -> None:
    model = units(mesh)
    model[0].unshard()  # type: ignore[operator]
    (group,) = fsdp_groups(model[0])
    shard = group.fsdp_params[0].sharded_param
    shard.requires_grad_(False)
    assert group.is_unsharded
    assert model[0].weight.requires_grad
    follow_requires_grad(model[0])
    assert not model[0].weight.requires_grad


def test_a_tensor_is_cut_without_communication(mesh: DeviceMesh) -> None:
    part = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)], src_data_rank=None)
    assert isinstance(part, DTensor)
    assert part.to_local().tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_part_of_a_mesh_gets_another_name(mesh: DeviceMesh) -> None:
    world = init_device_mesh("cpu", (1, 1, 1), mesh_dim_names=("a", "b", "c"))
    name_submesh(world, ("a", "b"), "first")
    name_submesh(world, ("c",), "second")
    assert [world[name].mesh_dim_names for name in ("first", "second")] == [("first",), ("second",)]
    assert [world[name].size() for name in ("first", "second")] == [1, 1]
    assert world.mesh_dim_names == ("a", "b", "c")
    assert world["a", "b"].ndim == 2


def test_load_hooks_see_the_state_dict_before_it_is_copied() -> None:
    layer, seen = nn.Linear(2, 2), []
    layer.register_load_state_dict_pre_hook(lambda module, state, prefix, *_: seen.append((module, prefix)))
    nn.Sequential(layer).load_state_dict({"0.weight": torch.ones(2, 2), "0.bias": torch.ones(2)})
    assert seen == [(layer, "0.")]


@pytest.mark.usefixtures("mesh")
def test_the_store_of_the_group_can_be_asked_from_a_second_connection() -> None:
    store, other = separate_store(), separate_store()
    assert store.compare_set("key", "", "first") == b"first"
    assert other.compare_set("key", "", "second") == b"first"
    assert other.check(["key"])
    assert not other.check(["nothing"])
    assert other.add("count", 1) == 1
