"""A sharded module starts equal everywhere, gathers only what is needed, and reduces whatever trains."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from soma_lightning.layout.mesh import Layout, WorldMesh
from soma_lightning.layout.shard import ShardedModule, shard_module, sharded_module
from soma_lightning.layout.wrap import Unit, UnitPlan
from tests.ranks import ranks_run

#: One worker runs the file: starting its processes takes longest.
pytestmark = pytest.mark.xdist_group("shard")

BLOCKS = 4
BF16_FP32 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Interleaved(nn.Module):
    """Each trainable block reads the frozen block beside it, as an expert reads its backbone."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.ModuleList([nn.Linear(8, 8) for _ in range(BLOCKS)])
        self.trained = nn.ModuleList([nn.Linear(8, 8) for _ in range(BLOCKS)])
        self.frozen.requires_grad_(False)
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("scale", torch.tensor(1.0, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for frozen, trained in zip(self.frozen, self.trained, strict=True):
            x = torch.tanh(frozen(x))
            y = torch.tanh(trained(y + x))
        return y

    def half(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return self(x) / 2


def world() -> WorldMesh:
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return WorldMesh.build(Layout().resolve(int(os.environ["WORLD_SIZE"])), "cpu")


def plan(model: nn.Module, *, shard_frozen: bool, mp: MixedPrecisionPolicy | None = None) -> UnitPlan:
    """Every block of a ModuleList its own unit, resharded after forward; then the root."""

    def unit(name: str, module: nn.Module, reshard: bool | None) -> Unit:
        trains = any(p.requires_grad for p in module.parameters())
        return Unit(name, (module,), mp, None, reshard, trains, False)

    names = [n for n, m in model.named_modules() if isinstance(m, nn.Linear)]
    kept = [n for n, p in model.named_parameters() if not p.requires_grad and not shard_frozen]
    names = [n for n in names if f"{n}.weight" not in kept]
    units = [unit(n, model.get_submodule(n), True) for n in reversed(names)]
    return UnitPlan((*units, unit("", model, None)), tuple(kept))


def sharded(mesh: WorldMesh, *, shard_frozen: bool, mp: MixedPrecisionPolicy | None = None, **settings: Any) -> Any:
    torch.manual_seed(int(os.environ["RANK"]))
    model = Interleaved()
    units = plan(model, shard_frozen=shard_frozen, mp=mp)
    return model, shard_module(model, units, mesh, device=torch.device("cpu"), **settings)


@contextmanager
def recorded(model: nn.Module) -> Iterator[dict[str, Any]]:
    """What FSDP2 gathers and reduces, in order, and which units hold a gathered buffer at each reduction."""
    import torch.distributed.fsdp._fully_shard._fsdp_param_group as groups

    gather, reduce = groups.foreach_all_gather, groups.foreach_reduce
    log: dict[str, Any] = {"gathers": [], "reduces": [], "held": [], "reduce_dtype": []}

    def unit_of(params: Any) -> str:
        return str(params[0]._param_fqn.rpartition(".")[0])

    def all_gather(params: Any, *args: Any, **settings: Any) -> Any:
        log["gathers"].append(unit_of(params))
        return gather(params, *args, **settings)

    def reduce_scatter(params: Any, grads: Any, *args: Any, **settings: Any) -> Any:
        log["reduces"].append(unit_of(params))
        log["reduce_dtype"].append(args[4])
        held = [fully_shard.state(m)._fsdp_param_group for m in model.modules() if isinstance(m, FSDPModule)]  # type: ignore[attr-defined]
        log["held"].append([unit_of(g.fsdp_params) for g in held if g is not None and g._all_gather_result is not None])
        return reduce(params, grads, *args, **settings)

    groups.foreach_all_gather, groups.foreach_reduce = all_gather, reduce_scatter
    try:
        yield log
    finally:
        groups.foreach_all_gather, groups.foreach_reduce = gather, reduce


def step(model: nn.Module, handle: ShardedModule, x: Tensor) -> None:
    loss = model(x).pow(2).mean()
    handle.before_backward()
    loss.backward()
    handle.after_backward()


def inputs() -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(5))


def my_part() -> Tensor:
    return inputs()[int(os.environ["RANK"]) :: int(os.environ["WORLD_SIZE"])]


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def every_rank() -> dict[str, Any]:
    mesh = world()
    return {
        "gathers": {name: gathers(mesh, name) for name in ("shard", "replicate", "stock")},
        "start": start(mesh),
        "thaw": {kind: thaw(mesh, shard_frozen=kind == "shard") for kind in ("shard", "replicate")},
        "forward_method": forward_method(mesh),
        "child_first": child_first(mesh),
        "loading": loading(mesh),
        "grouped": grouped(mesh),
        "freed": freed(mesh),
        "refused": refused(mesh),
    }


def gathers(mesh: WorldMesh, kind: str) -> dict[str, Any]:
    """The second step of a run; "stock" is FSDP2 alone on the same units."""
    torch.manual_seed(0)
    if kind == "stock":
        model = Interleaved()
        for block in (*model.frozen, *model.trained):
            fully_shard(block, mesh=mesh.data)
        fully_shard(model, mesh=mesh.data)
        one = lambda: model(my_part()).pow(2).mean().backward()  # noqa: E731
    else:
        model, handle = sharded(mesh, shard_frozen=kind == "shard")
        one = lambda: step(model, handle, my_part())  # noqa: E731
    one()
    with torch.no_grad():
        model(my_part())  # an evaluation in between
    with recorded(model) as log:
        one()
    return log


def start(mesh: WorldMesh) -> dict[str, Tensor]:
    model, _ = sharded(mesh, shard_frozen=False)
    return {name: whole(tensor) for name, tensor in model.state_dict().items()}


def thaw(mesh: WorldMesh, *, shard_frozen: bool) -> dict[str, Any]:
    """A forward pass while frozen, then the last frozen block trains."""
    # Whole parameters are outside FSDP2, which therefore does not cast them.
    model, handle = sharded(mesh, shard_frozen=shard_frozen, mp=BF16_FP32 if shard_frozen else None)
    step(model, handle, my_part())
    model.zero_grad()
    model.frozen[1].requires_grad_(True)
    with recorded(model) as log:
        step(model, handle, my_part())
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {"log": log, "dtypes": {g.dtype for g in grads.values()}, "grads": {n: whole(g) for n, g in grads.items()}}


def forward_method(mesh: WorldMesh) -> Tensor:
    model, _ = sharded(mesh, shard_frozen=True, forward_methods=["half"])
    with torch.no_grad():
        return model.half(inputs()) - model(inputs()) / 2


def child_first(mesh: WorldMesh) -> Tensor:
    model, handle = sharded(mesh, shard_frozen=False)
    model.trained[0](inputs())
    step(model, handle, my_part())
    return whole(model.trained[0].weight.grad)


def loading(mesh: WorldMesh) -> list[bool]:
    """Whole tensors go into the module and into a part of it."""
    model, _ = sharded(mesh, shard_frozen=False)
    torch.manual_seed(11)
    other = Interleaved()
    model.trained.load_state_dict(other.trained.state_dict())
    part = torch.equal(whole(model.trained[2].bias), other.trained[2].bias)
    model.load_state_dict(other.state_dict())
    return [
        part,
        *(
            torch.equal(whole(a), b)
            for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True)
        ),
    ]


def grouped(mesh: WorldMesh) -> list[str]:
    """Two blocks in one unit are gathered together."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    units = [Unit(f"{i}", (model[i], model[i + 1]), None, None, True, True, False) for i in (2, 0)]
    root = Unit("", (model,), None, None, None, True, False)
    handle = shard_module(model, UnitPlan((*units, root), ()), mesh, device=torch.device("cpu"))
    step(model, handle, my_part())
    with recorded(model) as log:
        step(model, handle, my_part())
    return list(log["gathers"])


def freed(mesh: WorldMesh) -> bool:
    model, handle = sharded(mesh, shard_frozen=False)
    step(model, handle, my_part())
    reference = weakref.ref(model)
    assert sharded_module(model) is handle
    del model, handle
    gc.collect()
    return reference() is None


def refused(mesh: WorldMesh) -> dict[str, str]:
    def message(change: Callable[[Interleaved], Any], **settings: Any) -> str:
        model = Interleaved()
        change(model)
        with pytest.raises(ValueError) as caught:  # noqa: PT011 (the messages are compared)
            shard_module(model, plan(model, shard_frozen=True), mesh, device=torch.device("cpu"), **settings)
        return str(caught.value)

    def transposed(model: Interleaved) -> None:
        model.trained[1].weight = nn.Parameter(torch.zeros(8, 8).t()[:, :8].as_strided((8, 8), (1, 8)))

    keep = lambda model: None  # noqa: E731
    return {
        "meta": message(lambda model: model.trained[0].to("meta")),
        "lazy": message(lambda model: model.add_module("late", nn.LazyLinear(4))),
        "strides": message(transposed),
        "twice": message(lambda model: fully_shard(model.trained[3], mesh=mesh.data)),
        "no module": message(keep, forward_methods=["policy.sample"]),
        "no method": message(keep, forward_methods=["sample"]),
        "no unit": message(keep, forward_methods=["trained.forward"]),
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return ranks_run(every_rank, tmp_path_factory.mktemp("ranks"))


def names(kind: str, *numbers: int) -> list[str]:
    return [f"{kind}.{number}" for number in numbers]


def test_no_gather_is_useless_and_none_is_held(found: Any) -> None:
    forward = [name for i in range(BLOCKS) for name in (f"frozen.{i}", f"trained.{i}")]
    backward = names("trained", 3, 2, 1, 0)
    for rank in found:
        ours, replicated, stock = (rank["gathers"][kind] for kind in ("shard", "replicate", "stock"))
        assert ours["gathers"] == forward + backward
        assert replicated["gathers"] == names("trained", 0, 1, 2, 3) + backward
        for log in (ours, replicated):
            assert log["reduces"] == backward
            assert log["held"] == [["trained.2"], ["trained.1"], ["trained.0"], []]
        # What it is about: FSDP2 alone gathers frozen units in backward and keeps them.
        assert [name for name in stock["gathers"][2 * BLOCKS :] if name.startswith("frozen")] != []
        assert any(name.startswith("frozen") for held in stock["held"] for name in held)


def test_all_ranks_start_from_the_first_one(found: Any) -> None:
    torch.manual_seed(0)
    first = Interleaved().state_dict()
    for rank in found:
        assert all(torch.equal(rank["start"][name], value) for name, value in first.items())


@pytest.mark.parametrize("kind", ["shard", "replicate"])
def test_what_is_unfrozen_later_reduces_in_fp32(found: Any, kind: str) -> None:
    torch.manual_seed(0)
    model = Interleaved()
    model.frozen[1].requires_grad_(True)
    model(inputs()).pow(2).mean().backward()
    expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    for rank in found:
        thawed = rank["thaw"][kind]
        assert thawed["dtypes"] == {torch.float32}
        assert set(thawed["log"]["reduce_dtype"]) == {torch.float32 if kind == "shard" else None}
        assert ("frozen.1" in thawed["log"]["reduces"]) is (kind == "shard")
        assert thawed["grads"].keys() == expected.keys()
        for name, grad in thawed["grads"].items():
            torch.testing.assert_close(grad, expected[name], rtol=0.1, atol=2e-3)  # bf16 computes
            assert torch.equal(grad, found[0]["thaw"][kind]["grads"][name])


def test_a_registered_method_gathers_like_forward(found: Any) -> None:
    assert all(rank["forward_method"].abs().max() == 0 for rank in found)


def test_a_child_may_be_called_before_the_root(found: Any) -> None:
    torch.manual_seed(0)
    model = Interleaved()
    model(inputs()).pow(2).mean().backward()
    for rank in found:
        torch.testing.assert_close(rank["child_first"], model.trained[0].weight.grad)


def test_whole_tensors_can_be_loaded(found: Any) -> None:
    assert all(all(rank["loading"]) for rank in found)


def test_modules_of_one_unit_are_gathered_together(found: Any) -> None:
    assert all(rank["grouped"] == ["0", "2", "2", "0"] for rank in found)


def test_a_module_that_is_dropped_is_freed(found: Any) -> None:
    assert all(rank["freed"] for rank in found)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("meta", "'trained.0.weight' is on the meta device; give it memory and values before training"),
        ("lazy", "'late.weight' has no shape yet (a lazy module); run one forward pass before training"),
        ("strides", "'trained.1.weight' has strides (1, 8); FSDP2 shards contiguous parameters only"),
        ("twice", "'trained.3' is already sharded, by configure_model or by hand; leave sharding to the strategy"),
        ("no module", "forward_methods: there is no module 'policy' in Interleaved"),
        ("no method", "forward_methods: 'Interleaved' has no method 'sample'"),
        ("no unit", "forward_methods: 'trained' is no sharding unit, so 'trained.forward' cannot gather"),
    ],
)
def test_what_cannot_be_sharded_is_named(found: Any, case: str, message: str) -> None:
    assert all(rank["refused"][case].startswith(message) for rank in found), found[0]["refused"][case]
