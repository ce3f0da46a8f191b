"""Replicas hold plain parameters; their gradients become the mean of all ranks, whoever had one."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from soma_lightning.layout import whole_gradients
from soma_lightning.layout.mesh import Layout, WorldMesh
from soma_lightning.layout.shard import ShardedModule, shard_module
from soma_lightning.layout.wrap import WrapOptions, plan_units
from tests.ranks import ranks_run

#: One worker runs the file: starting its processes takes longest.
pytestmark = pytest.mark.xdist_group("whole_gradients")

RANKS = 2


class Branches(nn.Module):
    """Rank r uses branch r only; nobody uses the last one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Conv2d(3, 4, 2)
        self.branch = nn.ModuleList(nn.Linear(4, 2) for _ in range(RANKS + 1))
        self.temperature = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor, branch: int) -> Tensor:
        return self.branch[branch](self.trunk(x).mean((2, 3))).mul(self.temperature).square().sum()


def batch(rank: int) -> Tensor:
    return torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(rank))


def sharded(model: nn.Module, flag: str = "32-true", **settings: Any) -> ShardedModule:
    mesh = WorldMesh.build(Layout(replicate=RANKS, shard=1), "cpu")
    plan = plan_units(model, WrapOptions(**settings), precision=flag)
    return shard_module(model, plan, mesh, device=torch.device("cpu"))


def backward(record: ShardedModule, loss: Tensor) -> None:
    record.before_backward()
    loss.backward()
    record.after_backward()


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def every_rank() -> dict[str, Any]:
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    sums: list[tuple[int, torch.dtype]] = []
    original = dist.all_reduce

    def watched(tensor: Tensor, **settings: Any) -> Any:
        sums.append((tensor.numel(), tensor.dtype))
        return original(tensor, **settings)

    whole_gradients.dist.all_reduce = watched  # type: ignore[attr-defined]
    found: dict[str, Any] = {"sums": {}}
    for name, run in (("plain", plain), ("small buckets", small_buckets), ("several passes", several_passes)):
        sums.clear()
        found[name] = run(rank)
        found["sums"][name] = list(sums)
    for name, (flag, settings) in LOW.items():
        model = nn.Linear(4, 2).to(torch.bfloat16 if flag == "bf16-true" else torch.float32)
        record = sharded(model, flag, **settings)
        sums.clear()
        backward(record, model(torch.ones(1, 4, dtype=model.weight.dtype)).float().sum())
        found["sums"][name] = [*sums, model.weight.grad.dtype]  # type: ignore[union-attr]
    sums.clear()
    found["sent early"] = sent_early(rank, sums)
    found["twice"] = twice()
    found["freed"] = freed(rank)
    found["sparse"] = sparse()
    found["frozen between"] = frozen_between(rank)
    found["kept low"] = kept_low(rank)
    found["unseen"] = unseen(rank)
    found["expanded"] = expanded(rank)
    return found


LOW = {
    "stored low": ("bf16-true", {}),
    "reduced low": ("32-true", {"mixed_precision": {"param_dtype": "bf16", "reduce_dtype": "bf16"}}),
}


def plain(rank: int) -> dict[str, Any]:
    model = Branches().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    calls: list[Tensor] = []
    model.temperature.register_post_accumulate_grad_hook(calls.append)
    record = sharded(model)
    backward(record, model(batch(rank), rank))
    return {"gradients": gradients(model), "hook": len(calls), "divided": divided(model), "facts": record.facts()}


def small_buckets(rank: int) -> dict[str, Tensor | None]:
    before, whole_gradients.BUCKET_BYTES = whole_gradients.BUCKET_BYTES, 16
    model = Branches().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    backward(sharded(model), model(batch(rank), rank))
    whole_gradients.BUCKET_BYTES = before
    return gradients(model)


def several_passes(rank: int) -> list[dict[str, Tensor | None]]:
    """One that waits and one that reduces; two that sum."""
    model = Branches()
    record = sharded(model)
    record.set_gradient_sync(False)
    backward(record, model(batch(rank), rank))
    record.set_gradient_sync(True)
    backward(record, model(batch(RANKS + rank), rank))
    averaged = gradients(model)
    model.zero_grad()
    record.set_sums(True)
    backward(record, model(batch(rank), rank))
    backward(record, model(batch(RANKS + rank), rank))
    return [averaged, gradients(model)]


def sent_early(rank: int, sums: list[tuple[int, torch.dtype]]) -> list[int]:
    """How many buckets were on their way when a layer got its gradient, last layer first; in the end all are."""
    before, whole_gradients.BUCKET_BYTES = whole_gradients.BUCKET_BYTES, 16
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(4)))
    seen: list[int] = []
    for layer in model:
        layer.weight.register_post_accumulate_grad_hook(lambda _: seen.append(len(sums)))
    backward(sharded(model), model(batch(rank).flatten()[:4]).sum())
    whole_gradients.BUCKET_BYTES = before
    return [*seen, len(sums)]


def twice() -> str:
    """Reentrant checkpoints write the gradient of what they share once for each."""
    shared = nn.Linear(4, 4)
    record = sharded(shared)
    x = torch.ones(4, requires_grad=True)
    for _ in range(2):
        x = checkpoint(shared, x, use_reentrant=True)
    with pytest.raises(RuntimeError, match="second gradient") as error:
        backward(record, x.sum())
    return str(error.value)


def freed(rank: int) -> bool:
    model = Branches()
    backward(sharded(model), model(batch(rank), rank))
    reference = weakref.ref(model)
    del model
    gc.collect()
    return reference() is None


def frozen_between(rank: int) -> list[dict[str, Tensor | None]]:
    """Sums; the trunk is frozen in the second of three passes, as by `toggle_optimizer`."""
    model = Branches()
    record = sharded(model)
    record.set_sums(True)
    found = []
    for trains in (True, False, True):
        model.trunk.requires_grad_(trains)
        backward(record, model(batch(rank), rank))
        found.append(gradients(model))
    return found


def kept_low(rank: int) -> dict[str, Tensor | None]:
    """Gradients stay bf16, and some are of the other rank only."""
    low = {"param_dtype": "bf16", "reduce_dtype": "bf16", "keep_low_precision_grads": True}
    model = nn.ModuleList(nn.Linear(4, 2) for _ in range(RANKS))
    module = _Chosen(model)
    record = sharded(module, mixed_precision=low)
    backward(record, module(torch.ones(1, 4), rank).float().sum())
    return gradients(module)


class _Chosen(nn.Module):
    def __init__(self, branches: nn.ModuleList) -> None:
        super().__init__()
        self.branches = branches

    def forward(self, x: Tensor, branch: int) -> Tensor:
        return self.branches[branch](x)


def unseen(rank: int) -> bool:
    """A backward pass past the strategy: each rank would go on with its own gradients."""
    model = Branches()
    record = sharded(model)
    with pytest.raises(RuntimeError, match=r"call self\.manual_backward\(loss\)"):
        model(batch(rank), rank).backward()
    model.zero_grad()
    backward(record, model(batch(rank), rank))
    return model.trunk.weight.grad is not None


def expanded(rank: int) -> Tensor:
    model = Branches()
    model.register_buffer("mask", torch.full((1, 2), float(rank + 1)).expand(3, 2))
    sharded(model)
    return model.mask


def sparse() -> str:
    model = nn.Embedding(4, 2, sparse=True)
    record = sharded(model)
    with pytest.raises(ValueError, match="sparse") as error:
        backward(record, model(torch.tensor([1])).sum())
    return str(error.value)


def divided(model: nn.Module) -> bool:
    return any(isinstance(p, DTensor) for p in model.parameters())


def alone(batches: Callable[[int], list[Tensor]]) -> dict[str, Tensor | None]:
    """Sum over what the ranks compute."""
    model = Branches()
    for rank in range(RANKS):
        for x in batches(rank):
            model(x, rank).backward()
    return gradients(model)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return ranks_run(every_rank, tmp_path_factory.mktemp("ranks"), world_size=RANKS)


def assert_gradients(got: dict[str, Tensor | None], expected: dict[str, Tensor | None], divisor: int) -> None:
    for name, value in expected.items():
        if value is None:
            assert got[name] is None, f"{name} was used by nobody"
        else:
            assert got[name] is not None, f"{name} was used by some rank"
            torch.testing.assert_close(got[name], value / divisor, msg=lambda text, n=name: f"{n}: {text}")


def test_a_branch_of_one_rank_has_a_gradient_on_all(ranks: list[dict[str, Any]]) -> None:
    expected = alone(lambda rank: [batch(rank)])
    assert expected["branch.2.weight"] is None
    for rank in ranks:
        assert not rank["plain"]["divided"]
        assert_gradients(rank["plain"]["gradients"], expected, RANKS)
        assert rank["plain"]["hook"] == 1
    first, second = (rank["plain"]["gradients"] for rank in ranks)
    assert all(second[name] is None if g is None else torch.equal(g, second[name]) for name, g in first.items())


def test_buckets_change_no_bit(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        for name, gradient in rank["plain"]["gradients"].items():
            other = rank["small buckets"][name]
            assert other is None if gradient is None else torch.equal(gradient, other)
    numel = sum(p.numel() for p in Branches().parameters())
    count = len(list(Branches().parameters()))
    assert ranks[0]["sums"]["plain"] == [(numel + count, torch.float32)]
    assert len(ranks[0]["sums"]["small buckets"]) > 4


def test_passes_that_wait_and_passes_that_sum(ranks: list[dict[str, Any]]) -> None:
    expected = alone(lambda rank: [batch(rank), batch(RANKS + rank)])
    for rank in ranks:
        averaged, summed = rank["several passes"]
        assert_gradients(averaged, expected, RANKS)
        assert_gradients(summed, expected, 1)
    assert len(ranks[0]["sums"]["several passes"]) == 3


def test_buckets_are_sent_while_the_backward_pass_goes_on(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["sent early"] == [0, 1, 2, 3, 4]


def test_a_second_gradient_in_one_pass_is_refused(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["twice"].startswith("a parameter of shape (4,) got a second gradient in one backward pass")
    assert ranks[0]["twice"].endswith("needs use_reentrant=False")


def test_a_module_that_is_dropped_is_freed(ranks: list[dict[str, Any]]) -> None:
    assert all(rank["freed"] for rank in ranks)


def test_a_sum_outlives_a_pass_in_which_its_parameter_is_frozen(ranks: list[dict[str, Any]]) -> None:
    once = alone(lambda rank: [batch(rank)])
    for rank in ranks:
        for got, trunk, others in zip(rank["frozen between"], (1, 1, 2), (1, 2, 3), strict=True):
            for name, value in once.items():
                times = trunk if name.startswith("trunk") else others
                assert (got[name] is None) == (value is None)
                if value is not None:
                    torch.testing.assert_close(got[name], value * times)


def test_gradients_that_stay_low_come_to_ranks_that_had_none(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        for name, gradient in rank["kept low"].items():
            assert gradient is not None, name
            assert gradient.dtype == torch.bfloat16
            assert torch.equal(gradient, torch.full_like(gradient, 1 / RANKS))


def test_a_backward_pass_past_the_strategy_is_refused(ranks: list[dict[str, Any]]) -> None:
    assert all(rank["unseen"] for rank in ranks)


def test_expanded_buffers_take_the_values_of_the_first_rank(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert torch.equal(rank["expanded"], torch.ones(3, 2))


def test_sums_are_in_fp32_unless_told(ranks: list[dict[str, Any]]) -> None:
    size = 4 * 2 + 2 + 2
    assert ranks[0]["sums"]["stored low"] == [(size, torch.float32), torch.bfloat16]
    assert ranks[0]["sums"]["reduced low"] == [(size, torch.bfloat16), torch.float32]


def test_a_sparse_gradient_is_refused(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["sparse"] == "a parameter of shape (4, 2) has a sparse gradient; use sparse=False"


def test_the_report_counts_what_is_whole(ranks: list[dict[str, Any]]) -> None:
    facts = ranks[1]["plain"]["facts"]
    assert facts["units"] == []
    assert facts["whole on every rank"] == {"frozen": 0, "trainable": sum(p.numel() for p in Branches().parameters())}
