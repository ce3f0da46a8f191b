"""One clipping decision on four ranks, in every layout, against torch's step over whole parameters and gradients."""

from __future__ import annotations

import functools
import math
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

from soma_lightning import FusedAdamW
from soma_lightning.optim.nonfinite import explain_nonfinite
from soma_lightning.optim.ownership import DIMENSIONS, Ownership

WORLD = 4
#: Where the tests of this file run; `run_checks` sets where the ranks of this process compute.
DEVICE = "cpu"
pytestmark = pytest.mark.xdist_group("optim_ranks")

#: dp_replicate, dp_shard, tp
Sizes = tuple[int, int, int]
LAYOUTS: tuple[Sizes, ...] = ((1, 4, 1), (2, 2, 1), (1, 2, 2), (2, 1, 2), (1, 1, 4))
LAYOUTS_OF_TWO: tuple[Sizes, ...] = ((1, 2, 1), (2, 1, 1), (1, 1, 2))
WIDTH = 12
LR, LIMIT, HEAD_LIMIT = 1e-2, 0.3, 0.05


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.down = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.up(self.norm(x))))


class Net(nn.Module):
    """Tied weights, a frozen layer, a parameter for replication, and rows that four ranks cannot divide evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.tied = nn.Linear(WIDTH, WIDTH)
        self.tied.weight = self.first.weight
        self.blocks = nn.ModuleList([Block()])
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.head = nn.Linear(WIDTH, 5)
        self.value = nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.tied(self.first(self.frozen(x)))
        for block in self.blocks:
            x = block(x)
        return self.value(self.head(x * self.scale))


@functools.cache
def mesh_of(sizes: Sizes) -> DeviceMesh:
    return init_device_mesh(DEVICE, (1, *sizes), mesh_dim_names=DIMENSIONS)


def distributed_net(sizes: Sizes, *, dtype: torch.dtype = torch.float32, sums: bool = False) -> Net:
    mesh = mesh_of(sizes)
    torch.manual_seed(0)
    with torch.device("cpu"):  # the same weights on every kind of device
        net = Net()
    net = net.to(DEVICE, dtype)
    if sizes[2] > 1:
        for block in net.blocks:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    settings: dict[str, Any] = {
        "mesh": mesh["dp_replicate", "dp_shard"] if sizes[0] > 1 else mesh["dp_shard"],
        "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32),
    }
    for block in net.blocks:
        fully_shard(block, **settings)
    fully_shard(net, ignored_params={net.scale}, **settings)
    if sums:
        for module in net.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
    return net


def data_rank(sizes: Sizes) -> int:
    return dist.get_rank() // sizes[2]


def backward(net: Net, sizes: Sizes, step: int, *, sums: bool = False) -> None:
    """Each data-parallel rank has its own samples; the replicated parameter is reduced as a strategy would do it."""
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step), device="cpu").to(net.scale)
    net(x.chunk(sizes[0] * sizes[1])[data_rank(sizes)]).square().mean().backward()
    dist.all_reduce(net.scale.grad)
    net.scale.grad /= sizes[2] if sums else math.prod(sizes)


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def part(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def groups_of(net: nn.Module) -> list[dict[str, Any]]:
    """Three groups, one with its own limit and one with its own learning rate; a frozen parameter among them."""
    named = dict(net.named_parameters())
    limited = [p for name, p in named.items() if name.startswith("head")]
    fast = [p for name, p in named.items() if name.startswith("blocks.0.n")]
    rest = [p for p in named.values() if not any(p is q for q in limited + fast)]
    return [{"params": rest}, {"params": fast, "lr": 3 * LR}, {"params": limited, "max_norm": HEAD_LIMIT}]


def with_ownership(net: nn.Module, sizes: Sizes, *, sums: bool = False, **settings: Any) -> FusedAdamW:
    optimizer = FusedAdamW(groups_of(net), lr=LR, **settings)
    optimizer.ownership = Ownership.from_mesh(mesh_of(sizes), sums=sums)
    return optimizer


def params_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _own_limit(group: dict[str, Any]) -> dict[str, float]:
    return {"max_norm": group["max_norm"]} if "max_norm" in group else {}


class Truth:
    """torch.optim.AdamW in fp32 over whole tensors, with torch's clipping."""

    def __init__(self, ours: FusedAdamW) -> None:
        copies = [
            {
                **{k: group[k] for k in ("lr", "max_norm") if k in group},
                "params": list(map(self._copy, group["params"])),
            }
            for group in ours.param_groups
        ]
        self.optimizer = torch.optim.AdamW(copies, lr=LR)
        self.params = params_of(self.optimizer)

    @staticmethod
    def _copy(param: Tensor) -> nn.Parameter:
        return nn.Parameter(full(param.detach()).float().clone(), requires_grad=param.requires_grad)

    def step(self, ours: FusedAdamW, norm_type: float, *, divisor: float = 1.0) -> float:
        """One step with the gradients that `ours` has now; returns their global norm from float64."""
        for truth, param in zip(self.params, params_of(ours), strict=True):
            truth.grad = None if param.grad is None else full(param.grad).float() / divisor
        grads = [p.grad.double() for p in self.params if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g, norm_type) for g in grads]), norm_type)
        groups = self.optimizer.param_groups
        together = [p for group in groups if "max_norm" not in group for p in group["params"]]
        nn.utils.clip_grad_norm_(together, LIMIT, norm_type)
        nn.utils.clip_grad_norm_(groups[2]["params"], HEAD_LIMIT, norm_type)
        self.optimizer.step()
        return norm.item()


def assert_equal_truth(ours: FusedAdamW, truth: Truth) -> None:
    for i, (param, expected) in enumerate(zip(params_of(ours), truth.params, strict=True)):
        master = ours.state[param].get("soma_master", param) if param in ours.state else param
        got = full(master.detach())
        torch.testing.assert_close(got.float(), expected.detach(), rtol=0, atol=1e-6, msg=f"parameter {i}")
        assert torch.equal(full(param.detach()), got.to(param.dtype))


# ---------------------------------------------------------------------- checks that every rank runs


def check_equal(sizes: Sizes, norm_type: float, dtype: torch.dtype, implementation: str) -> None:
    net = distributed_net(sizes, dtype=dtype)
    ours = with_ownership(net, sizes, master_weights=dtype != torch.float32, implementation=implementation)
    truth = Truth(ours)
    for step in range(2):
        net.zero_grad()
        backward(net, sizes, step)
        before = [None if p.grad is None else part(p.grad).clone() for p in params_of(ours)]
        ours.clip(max_norm=LIMIT, norm_type=norm_type)
        norm = truth.step(ours, norm_type)
        with CommDebugMode() as communication:
            ours.step()
        assert communication.get_total_counts() == (1 if norm_type == 2.0 else 2)
        assert ours.last_grad_norm.item() == pytest.approx(norm, rel=1e-6)
        assert norm > LIMIT, "a step that is not clipped proves little"
        for param, grad in zip(params_of(ours), before, strict=True):
            assert (param.grad is None) == (grad is None)
            assert grad is None or torch.equal(part(param.grad), grad)
        assert_equal_truth(ours, truth)
    assert ours.skipped_steps == 0
    assert net.frozen.weight not in ours.state
    if sizes == (1, 4, 1):
        assert any(part(p).numel() == 0 for p in net.parameters()) == (dist.get_rank() > 0)


def snapshot(optimizer: FusedAdamW) -> list[Tensor]:
    tensors = params_of(optimizer)
    tensors += [value for p in tensors for _, value in sorted(optimizer.state.get(p, {}).items())]
    return [part(t).detach().clone() for t in tensors]


def check_nan(sizes: Sizes, norm_type: float, implementation: str) -> None:
    """Whoever has the NaN, owner or replica: nothing changes anywhere, and everybody can say whose it was."""
    net = distributed_net(sizes, dtype=torch.bfloat16)
    ours = with_ownership(net, sizes, master_weights=True, implementation=implementation)
    names = {p: name for name, p in net.named_parameters()}
    backward(net, sizes, 0)
    ours.clip(max_norm=LIMIT, norm_type=norm_type)
    ours.step()
    skips = 0
    for victim in [math.prod(sizes) - 1] if implementation == "triton" else range(WORLD):
        for bad, name in ((math.nan, "blocks.0.up.weight"), (math.inf, "scale")):
            net.zero_grad()
            backward(net, sizes, 1)
            if dist.get_rank() == victim:
                param = next(p for p in names if names[p] == name)
                part(param.grad).view(-1)[-1:] = bad
            before = snapshot(ours)
            ours.clip(max_norm=LIMIT, norm_type=norm_type)
            with CommDebugMode() as communication:
                ours.step()
            assert communication.get_total_counts() == (1 if norm_type == 2.0 else 2)
            skips += 1
            assert (ours.skipped_steps, ours.consecutive_skips) == (skips, skips)
            assert all(map(torch.equal, snapshot(ours), before))
            mine = ours.first_nonfinite_parameter()
            assert (mine is not None and names[mine] == name) if dist.get_rank() == victim else mine is None
            alone = f"the gradient of {name} holds" if dist.get_rank() == victim else "a gradient on another rank holds"
            assert explain_nonfinite(ours, names.__getitem__).startswith(alone)
            everywhere = explain_nonfinite(ours, names.__getitem__, ask_all_ranks=True)
            assert everywhere == f"the gradient of {name} on rank {victim} holds a NaN or an infinity"
    net.zero_grad()
    backward(net, sizes, 1)
    ours.step()
    assert (ours.skipped_steps, ours.consecutive_skips) == (skips, 0)


def check_normalizer(sizes: Sizes) -> None:
    """Unequal counts, one rank without any: one division by the global count, as in one process."""
    net = distributed_net(sizes, sums=True)
    ours = with_ownership(net, sizes, sums=True)
    truth = Truth(ours)
    ranks = sizes[0] * sizes[1]
    counts: list[float | Tensor | None] = [3, torch.tensor(0.5), None, 2.25][:ranks]
    for step in range(2):
        net.zero_grad()
        backward(net, sizes, step, sums=True)
        ours.clip(max_norm=LIMIT, normalizer=counts[data_rank(sizes)])
        if step:
            ours.unscale(4.0)
        divisor = sum(float(count) for count in counts if count is not None) * (4.0 if step else 1.0)
        norm = truth.step(ours, 2.0, divisor=divisor)
        with CommDebugMode() as communication:
            ours.step()
        assert communication.get_total_counts() == 1
        assert ours.last_grad_norm.item() == pytest.approx(norm, rel=1e-6)
        assert_equal_truth(ours, truth)
    before = snapshot(ours)
    ours.step()  # nobody counted a sample
    assert (ours.skipped_steps, ours.consecutive_skips) == (1, 1)
    ours.clip(normalizer=math.nan if dist.get_rank() == 0 else 1.0)
    ours.step()
    assert (ours.skipped_steps, ours.consecutive_skips) == (2, 2)
    assert all(map(torch.equal, snapshot(ours), before))
    assert explain_nonfinite(ours, ask_all_ranks=True) == "the norm is not finite or the normalizer not positive"


def check_partial(sizes: Sizes) -> None:
    net = distributed_net(sizes)
    ours = with_ownership(net, sizes)
    backward(net, sizes, 0)
    grad = net.head.weight.grad
    partial = [Partial()] * grad.device_mesh.ndim
    net.head.weight.grad = DTensor.from_local(torch.ones(5, WIDTH), grad.device_mesh, partial, run_check=False)
    with pytest.raises(ValueError, match=r"the gradient of parameter \d+ \(shape \(5, 12\)\) is placed as \(Partial"):
        ours.step()


def check_layouts_agree() -> None:
    """The same gradients on every layout: the same parameters to rounding, and to the bit on the same layout."""
    results = []
    for sizes in (*LAYOUTS, LAYOUTS[2]):
        net = distributed_net(sizes)
        ours = with_ownership(net, sizes)
        backward(net, sizes, 0)
        generator = torch.Generator().manual_seed(1)
        for param in params_of(ours):
            if param.grad is None:
                continue
            whole = torch.randn(param.shape, generator=generator)
            if isinstance(param, DTensor):
                source = DTensor.from_local(whole, param.device_mesh, run_check=False)
                part(param.grad).copy_(part(source.redistribute(placements=param.placements)))
            else:
                param.grad.copy_(whole)
        for _ in range(2):
            ours.clip(max_norm=LIMIT)
            ours.step()
        results.append({name: full(p.detach()) for name, p in net.named_parameters()})
    for result in results[1:]:
        for name, value in results[0].items():
            torch.testing.assert_close(result[name], value, rtol=0, atol=1e-7, msg=name)
    assert all(torch.equal(results[2][name], value) for name, value in results[-1].items())


def check_seen_pass() -> None:
    """What one rank alone changed between grad_norm() and step() must not decide who comes to the collective."""
    sizes = LAYOUTS[1]
    net = distributed_net(sizes)
    ours = with_ownership(net, sizes)
    backward(net, sizes, 0)
    first = ours.grad_norm()
    pass_of_norm = ours._control.last_stats
    ours.clip(max_norm=LIMIT)
    changes = dist.get_rank() == 1  # the first replica's second shard, which counts
    if changes:
        with torch.no_grad():
            net.head.weight.grad.mul_(1.0)  # the wrapper notices it
            part(net.first.weight.grad).zero_()  # its part notices it
    with CommDebugMode() as communication:
        ours.step()
    assert communication.get_total_counts() == 1
    assert (ours._control.last_stats is pass_of_norm) == (not changes)
    assert ours.last_grad_norm < first


def check_masters_follow_changes(implementation: str) -> None:
    """A parameter that somebody rewrote, through the wrapper or through its part, is not undone by its master."""
    sizes = LAYOUTS[0]
    net = distributed_net(sizes, dtype=torch.bfloat16)
    ours = with_ownership(net, sizes, master_weights=True, implementation=implementation)
    backward(net, sizes, 0)
    ours.step()
    rewritten = [net.first.weight, net.head.weight]
    with torch.no_grad():
        rewritten[0].mul_(2)
        part(rewritten[1]).mul_(2)
    changed = [full(p.detach()).float() for p in rewritten]
    ours.step()
    for param, before in zip(rewritten, changed, strict=True):
        moved = full(param.detach()).float() - before
        assert moved.abs().max() <= 2 * LR + 0.01 * before.abs().max()


# ---------------------------------------------------------------------- ranks with different parameters


def stages() -> DeviceMesh:
    return init_device_mesh("cpu", (WORLD, 1, 1, 1), mesh_dim_names=DIMENSIONS)


def stage_optimizer(norm_type: float) -> tuple[FusedAdamW, nn.Parameter, nn.Parameter]:
    """Each rank has its own parameter, and one that all of them hold; rank 2 trains nothing, rank 3 has no gradient."""
    rank = dist.get_rank()
    own, shared = nn.Parameter(torch.ones(rank + 1)), nn.Parameter(torch.ones(2))
    if rank == 2:
        own.requires_grad_(False)
    ours = FusedAdamW([{"params": [own]}, {"params": [shared], "max_norm": 1.0}], lr=LR, weight_decay=0.0)
    ours.norm_type = norm_type
    ours.ownership = Ownership.from_mesh(stages(), on_one_stage=lambda p: p is own)
    if rank < 2:
        own.grad = torch.full_like(own, 3.0)
        shared.grad = torch.full_like(shared, 2.0)
    return ours, own, shared


def check_rank_without_gradients(norm_type: float) -> None:
    ours, own, shared = stage_optimizer(norm_type)
    collectives = 1 if norm_type == 2.0 else 2
    expected = math.sqrt(3 * 9 + 2 * 4) if norm_type == 2.0 else 3.0
    with CommDebugMode() as communication:
        assert ours.grad_norm().item() == pytest.approx(expected)
    assert communication.get_total_counts() == collectives
    ours.clip_present(_rule(ours, max_norm=0.5))
    assert ours.pending_clip is not None  # on every rank, also where there is nothing to clip
    with CommDebugMode() as communication:
        ours.step()
    assert communication.get_total_counts() == collectives
    assert ours.last_grad_norm.item() == pytest.approx(expected)
    own_norm = math.sqrt(27) if norm_type == 2.0 else 3.0
    if dist.get_rank() < 2:
        assert ours.state[own]["exp_avg"].tolist() == pytest.approx([0.1 * 3 * 0.5 / own_norm] * own.numel(), rel=1e-5)
        limited = 1 / (math.sqrt(8) if norm_type == 2.0 else 2.0)
        assert ours.state[shared]["exp_avg"].tolist() == pytest.approx([0.1 * 2 * limited] * 2, rel=1e-5)
    else:
        assert torch.equal(own.detach(), torch.ones_like(own))
    # A NaN of a rank reaches those that have nothing to update.
    if dist.get_rank() == 1:
        shared.grad[0] = math.nan
    ours.step()
    assert (ours.skipped_steps, ours.consecutive_skips) == (1, 1)
    assert "parameter 1 (shape (2,)) on rank 1" in explain_nonfinite(ours, ask_all_ranks=True)
    # A rank that had no gradient until now gets one, and one that had some loses them.
    own.grad = torch.ones_like(own) if dist.get_rank() == 3 else None
    shared.grad = None
    ours.step()
    assert ours.last_grad_norm.item() == pytest.approx(2.0 if norm_type == 2.0 else 1.0)
    assert (ours.skipped_steps, ours.consecutive_skips) == (1, 0)
    own.grad = None
    ours.step()  # nobody has any
    assert ours.last_grad_norm.item() == 0.0


def _rule(ours: FusedAdamW, **limits: float) -> Any:
    from soma_lightning.optim.clipping import ClipRule

    return ClipRule(norm_type=ours.norm_type, **limits)


def check_mixed_dtypes() -> None:
    """A rank with fp64 gradients, one with bf16 ones: the vector has one dtype."""
    dtype = [torch.float64, torch.bfloat16, torch.float32, torch.float16][dist.get_rank()]
    param = nn.Parameter(torch.ones(4, dtype=dtype))
    ours = FusedAdamW([param], lr=LR)
    ours.ownership = Ownership.from_mesh(stages(), on_one_stage=lambda _: True)
    param.grad = torch.ones_like(param)
    ours.clip(max_norm=1.0)
    assert ours.step(lambda: 7) == 7
    assert ours.last_grad_norm.item() == 4.0
    assert ours.last_grad_norm.dtype == torch.float32


def check_mesh_is_refused() -> None:
    half = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["a"]
    with pytest.raises(ValueError, match="the mesh covers 2 of 4 ranks"):
        Ownership.from_mesh(half)
    with pytest.raises(ValueError, match="the mesh has the dimensions a, b; it needs pp"):
        Ownership.from_mesh(init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b")))


def check_initial_state() -> None:
    """The checkpoint helper of torch finds state after init_state() and takes no step; a round trip changes nothing."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    sizes = LAYOUTS[2]
    results = []
    for resumed in (False, True):
        net = distributed_net(sizes, dtype=torch.bfloat16)
        ours = with_ownership(net, sizes, master_weights=True)
        ours.init_state()
        with CommDebugMode() as communication:
            saved = get_optimizer_state_dict(net, ours)
        assert communication.get_comm_counts().get(torch.ops.c10d.allreduce_, 0) == 0, "a step was taken"
        assert saved["state"]["first.weight"]["step"] == 0
        assert ours.last_grad_norm.isnan()
        for step in range(4):
            if resumed and step == 2:
                saved = get_optimizer_state_dict(net, ours)
                ours = with_ownership(net, sizes, master_weights=True)
                ours.init_state()
                set_optimizer_state_dict(net, ours, saved)
            net.zero_grad()
            backward(net, sizes, step)
            ours.clip(max_norm=LIMIT)
            ours.step()
        results.append([part(p).clone() for p in net.parameters()])
        state = ours.state[net.blocks[0].up.weight]
        assert all(state[key].placements == net.blocks[0].up.weight.placements for key in state if key != "step")
        assert state["step"] == 4
    assert all(map(torch.equal, *results))


def check_step_of_the_checkpoint_helper() -> None:
    """Without init_state() the helper steps with zero gradients: no parameter moves."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    sizes = LAYOUTS[0]
    net = distributed_net(sizes, dtype=torch.bfloat16)
    ours = with_ownership(net, sizes, master_weights=True)
    before = [part(p).clone() for p in net.parameters()]
    saved = get_optimizer_state_dict(net, ours)
    assert all(map(torch.equal, [part(p) for p in net.parameters()], before))
    assert saved["state"]["first.weight"]["exp_avg"].full_tensor().count_nonzero() == 0
    assert (ours.skipped_steps, ours.param_groups[0]["lr"]) == (0, LR)


def all_checks() -> Iterator[tuple[str, Callable[[], None]]]:
    fp32, bf16 = torch.float32, torch.bfloat16
    for sizes in (*LAYOUTS, *LAYOUTS_OF_TWO):
        at = "x".join(map(str, sizes))
        for how in ("reference", "triton"):
            for norm_type in (2.0, math.inf):
                for dtype, word in ((fp32, "fp32"), (bf16, "masters")):
                    check = functools.partial(check_equal, sizes, norm_type, dtype, how)
                    yield f"equal_{at}_{word}_{norm_type}_{how}", check
                yield f"nan_{at}_{norm_type}_{how}", functools.partial(check_nan, sizes, norm_type, how)
        yield f"normalizer_{at}", functools.partial(check_normalizer, sizes)
        yield f"partial_{at}", functools.partial(check_partial, sizes)
    for how in ("reference", "triton"):
        yield f"masters_follow_changes_{how}", functools.partial(check_masters_follow_changes, how)
    for norm_type in (2.0, math.inf):
        yield f"no_gradients_{norm_type}", functools.partial(check_rank_without_gradients, norm_type)
    yield "layouts_agree", check_layouts_agree
    yield "seen_pass", check_seen_pass
    yield "mixed_dtypes", check_mixed_dtypes
    yield "mesh_is_refused", check_mesh_is_refused
    yield "initial_state", check_initial_state
    yield "step_of_the_checkpoint_helper", check_step_of_the_checkpoint_helper


CHECKS = dict(all_checks())


def run_checks(names: list[str], device: str) -> dict[str, str]:
    """On every rank: check -> "ok" or a traceback; the first that fails ends them, and breaks those of its peers."""
    global DEVICE
    DEVICE = device
    if device == "cuda":
        torch.set_default_device(f"cuda:{dist.get_rank()}")
    outcomes: dict[str, str] = {}
    for name in names:
        torch.manual_seed(0)
        try:
            CHECKS[name]()
            dist.barrier()
            outcomes[name] = "ok"
        except BaseException:
            outcomes[name] = traceback.format_exc()
            break
    return outcomes


def chosen() -> Iterator[str]:
    """Every layout with every norm and dtype in plain torch; kernels have a file of their own, and so have GPUs."""
    for sizes in LAYOUTS:
        at = "x".join(map(str, sizes))
        yield from (f"equal_{at}_{case}_reference" for case in ("fp32_2.0", "fp32_inf", "masters_2.0"))
        yield from (f"nan_{at}_{'inf' if sizes[1] == 2 else 2.0}_reference", f"normalizer_{at}", f"partial_{at}")
    yield from (
        "layouts_agree",
        "seen_pass",
        "masters_follow_changes_reference",
        "no_gradients_2.0",
        "no_gradients_inf",
    )
    yield from ("no_gradients_2.0", "no_gradients_inf", "mixed_dtypes", "mesh_is_refused")
    yield from ("initial_state", "step_of_the_checkpoint_helper")


NAMES = list(chosen())


@pytest.mark.parametrize("name", NAMES)
def test_on_four_ranks(name: str, passes_on_all_ranks: Callable[[str], None]) -> None:
    assert name in CHECKS
    passes_on_all_ranks(name)
