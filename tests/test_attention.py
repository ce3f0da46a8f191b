"""The attention operator against a float64 loop that shares nothing with it, and what its backward may cost."""

from __future__ import annotations

import copy
import inspect
import itertools
import os
import pickle
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import soma_lightning
from soma_kernels.attention.call import PAD
from soma_kernels.runtime import device_facts
from soma_kernels.testing import assert_close, nan_filled_empty
from soma_lightning.attention import (
    ContextKV,
    KeyList,
    attention,
    attention_implementation,
    attention_path,
    key_list,
)

Inputs = dict[str, Tensor]
LQ, LK, LC, D = 3, 4, 5, 6


def loop(x: Inputs, key_mask: Tensor | None, context_mask: Tensor | None, scale: float) -> Tensor:
    """One softmax a query, over the list of keys that the query can read; masked keys are never touched."""
    q = x["q"]
    N, Hq, Lq, D = q.shape
    rows = []
    for n, h, i in itertools.product(range(N), range(Hq), range(Lq)):
        keys, values = [], []
        if "k" in x:
            g = h // (Hq // x["k"].shape[1])
            readable = torch.ones(x["k"].shape[2], dtype=torch.bool) if key_mask is None else key_mask[n]
            keys.append(x["k"][n, g][readable])
            values.append(x["v"][n, g][readable])
        if "ck" in x:
            g = h // (Hq // x["ck"].shape[1])
            b = n // (N // x["ck"].shape[0])
            readable = torch.ones(x["ck"].shape[2], dtype=torch.bool) if context_mask is None else context_mask[b]
            keys.append(x["ck"][b, g][readable])
            values.append(x["cv"][b, g][readable])
        key, value = torch.cat(keys), torch.cat(values)
        weights = torch.exp(key @ q[n, h, i] * scale)
        rows.append(weights @ value / weights.sum() if len(key) else 0.0 * q[n, h, i])
    return torch.stack(rows).reshape(N, Hq, Lq, D)


def make_inputs(
    own: bool, context: bool, T: int, Hq: int, Hkv: int, transposed: bool = False, Bc: int = 2, seed: int = 0
) -> Inputs:
    generator = torch.Generator().manual_seed(seed)

    def draw(rows: int, heads: int, length: int) -> Tensor:
        shape = (rows, length, heads, D) if transposed else (rows, heads, length, D)
        x = torch.randn(shape, generator=generator, dtype=torch.float64)
        return x.transpose(1, 2) if transposed else x

    N = Bc * T
    x = {"q": draw(N, Hq, LQ)}
    if own:
        x |= {"k": draw(N, Hkv, LK), "v": draw(N, Hkv, LK)}
    if context:
        x |= {"ck": draw(Bc, Hkv, LC), "cv": draw(Bc, Hkv, LC)}
    return x


def make_mask(kind: str, rows: int, length: int) -> Tensor | None:
    if kind == "none":
        return None
    if kind == "prefix":
        return torch.arange(length) < torch.arange(rows)[:, None] % length + 1
    mask = torch.rand(rows, length, generator=torch.Generator().manual_seed(7)) < 0.6
    if kind == "empty rows":
        mask[::2] = False
    return mask


def call(x: Inputs, key_mask: Tensor | None = None, context_mask: Tensor | None = None, **options: Any) -> Tensor:
    context = ContextKV(x["ck"], x["cv"], context_mask) if "ck" in x else None
    return attention(x["q"], x.get("k"), x.get("v"), context=context, key_mask=key_mask, **options)


def leaves(x: Inputs) -> Inputs:
    return {name: tensor.detach().requires_grad_() for name, tensor in x.items()}


def gradients(out: Tensor, x: Inputs, grad_out: Tensor) -> Inputs:
    return dict(zip(x, torch.autograd.grad(out, list(x.values()), grad_out), strict=True))


def assert_equals_loop(
    x: Inputs, key_mask: Tensor | None, context_mask: Tensor | None, dtype: torch.dtype = torch.float64
) -> None:
    x = {name: tensor.to(dtype) for name, tensor in x.items()}
    ours, truth = leaves(x), leaves({name: tensor.double() for name, tensor in x.items()})
    with nan_filled_empty():
        out = call(ours, key_mask, context_mask)
        grad_out = torch.randn(out.shape, dtype=dtype, generator=torch.Generator().manual_seed(3))
        got = gradients(out, ours, grad_out)
    expected = loop(truth, key_mask, context_mask, D**-0.5)
    assert out.dtype == dtype
    assert_close("out", out, expected.detach())
    for name, reference in gradients(expected, truth, grad_out.double()).items():
        assert got[name].dtype == dtype
        assert_close(f"d{name}", got[name], reference)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("Hq", "Hkv"), [(1, 1), (8, 1), (8, 4), (8, 8)])
@pytest.mark.parametrize("T", [1, 3])
@pytest.mark.parametrize(("own", "context"), [(True, False), (False, True), (True, True)])
def test_equals_the_loop(own: bool, context: bool, T: int, Hq: int, Hkv: int, transposed: bool) -> None:
    assert_equals_loop(make_inputs(own, context, T, Hq, Hkv, transposed), None, None)


@pytest.mark.parametrize("kind", ["prefix", "random", "empty rows"])
@pytest.mark.parametrize("T", [1, 3])
@pytest.mark.parametrize(("own", "context"), [(True, False), (False, True), (True, True)])
def test_equals_the_loop_with_masks(own: bool, context: bool, T: int, kind: str) -> None:
    x = make_inputs(own, context, T, Hq=4, Hkv=2)
    assert_equals_loop(x, make_mask(kind, 2 * T, LK) if own else None, make_mask(kind, 2, LC) if context else None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["none", "random"])
def test_lower_precision_stays_within_its_tolerance(dtype: torch.dtype, kind: str) -> None:
    x = make_inputs(True, True, T=3, Hq=4, Hkv=2)
    assert_equals_loop(x, make_mask(kind, 6, LK), make_mask(kind, 2, LC), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_worse_than_plain_torch_in_the_same_dtype(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "q": (4, 8, 50, 64),
        "k": (4, 2, 50, 64),
        "v": (4, 2, 50, 64),
        "ck": (2, 2, 130, 64),
        "cv": (2, 2, 130, 64),
    }
    inputs = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
    mask = make_mask("random", 2, 130)
    grad_out = torch.randn(shapes["q"], generator=generator).to(dtype)

    def plain(x: Inputs) -> Tensor:
        keys, values = (
            torch.cat([x[own], x[shared].repeat_interleave(2, 0)], 2).repeat_interleave(4, 1)
            for own, shared in (("k", "ck"), ("v", "cv"))
        )
        assert mask is not None
        readable = torch.cat([torch.ones(4, 50, dtype=torch.bool), mask.repeat_interleave(2, 0)], 1)
        scores = (x["q"] @ keys.mT * 64**-0.5).masked_fill(~readable[:, None, None], -torch.inf)
        return scores.softmax(-1) @ values

    ours, peer, truth = leaves(inputs), leaves(inputs), leaves({name: x.double() for name, x in inputs.items()})
    out, peer_out, true_out = call(ours, None, mask), plain(peer), plain(truth)
    assert_close("out", out, true_out.detach(), peer_out.detach())
    got, peers = gradients(out, ours, grad_out), gradients(peer_out, peer, grad_out)
    for name, reference in gradients(true_out, truth, grad_out.double()).items():
        assert_close(f"d{name}", got[name], reference, peers[name])


def test_only_one_segment_is_masked() -> None:
    x = make_inputs(True, True, T=2, Hq=4, Hkv=2)
    assert_equals_loop(x, None, torch.zeros(2, LC, dtype=torch.bool))
    assert_equals_loop(x, torch.zeros(4, LK, dtype=torch.bool), None)


def test_scale() -> None:
    x = make_inputs(True, True, T=2, Hq=2, Hkv=1)
    assert_close("out", call(x, scale=1.7), loop(x, None, None, 1.7))


def test_large_scores_do_not_overflow() -> None:
    x = {name: tensor.float() * 1e3 for name, tensor in make_inputs(True, True, T=2, Hq=2, Hkv=1).items()}
    out = call(leaves(x))
    joined = (
        torch.cat([x["k"], x["ck"].repeat_interleave(2, 0)], 2),
        torch.cat([x["v"], x["cv"].repeat_interleave(2, 0)], 2),
    )
    expected = (x["q"].double() @ joined[0].double().mT * D**-0.5).softmax(-1) @ joined[1].double()
    torch.testing.assert_close(out.detach(), expected.float(), rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), float("-inf")])
def test_masked_keys_may_hold_anything(garbage: float) -> None:
    key_mask, context_mask = make_mask("random", 6, LK), make_mask("random", 2, LC)
    assert key_mask is not None
    assert context_mask is not None
    clean = leaves(make_inputs(True, True, T=3, Hq=4, Hkv=2))
    dirty = leaves(make_inputs(True, True, T=3, Hq=4, Hkv=2))
    for name, mask in (("k", key_mask), ("v", key_mask), ("ck", context_mask), ("cv", context_mask)):
        dirty[name] = dirty[name].detach().masked_fill(~mask[:, None, :, None], garbage).requires_grad_()
    expected, out = call(clean, key_mask, context_mask), call(dirty, key_mask, context_mask)
    assert torch.equal(out, expected)
    grad_out = torch.randn_like(out)
    for name, got in gradients(out, dirty, grad_out).items():
        assert torch.equal(got, gradients(call(clean, key_mask, context_mask), clean, grad_out)[name]), name


def test_a_row_without_readable_key_is_zero_and_sends_zero_gradients() -> None:
    x = leaves(make_inputs(True, True, T=1, Hq=2, Hkv=1))
    key_mask, context_mask = torch.ones(2, LK, dtype=torch.bool), torch.ones(2, LC, dtype=torch.bool)
    key_mask[1] = context_mask[1] = False
    out = call(x, key_mask, context_mask)
    assert torch.equal(out[1], torch.zeros_like(out[1]))
    assert out[0].abs().min() > 0
    for name, grad in gradients(out, x, torch.ones_like(out)).items():
        assert torch.equal(grad[1], torch.zeros_like(grad[1])), name
        assert grad[0].abs().sum() > 0, name


@pytest.mark.parametrize(("own", "context"), [(True, False), (False, True), (True, True)])
def test_segments_of_length_zero(own: bool, context: bool) -> None:
    x = make_inputs(own, context, T=2, Hq=2, Hkv=1)
    empty = {name: tensor[:, :, :0] if name != "q" else tensor for name, tensor in x.items()}
    assert torch.equal(call(empty), torch.zeros_like(x["q"]))
    if own and context:
        half = leaves({**x, "k": x["k"][:, :, :0], "v": x["v"][:, :, :0]})
        out = call(half)
        assert_close("out", out, loop({name: half[name] for name in ("q", "ck", "cv")}, None, None, D**-0.5).detach())
        assert all(grad.isfinite().all() for grad in gradients(out, half, torch.ones_like(out)).values())


def test_no_rows_at_all() -> None:
    x = leaves({name: tensor[:0] for name, tensor in make_inputs(True, True, T=2, Hq=2, Hkv=1).items()})
    out = call(x)
    assert out.shape == (0, 2, LQ, D)
    assert {name: grad.shape for name, grad in gradients(out, x, torch.ones_like(out)).items()} == {
        name: tensor.shape for name, tensor in x.items()
    }


def test_gradcheck() -> None:
    x = leaves(make_inputs(True, True, T=2, Hq=2, Hkv=1))
    key_mask, context_mask = make_mask("random", 4, LK), make_mask("prefix", 2, LC)

    def function(*tensors: Tensor) -> Tensor:
        return call(dict(zip(x, tensors, strict=True)), key_mask, context_mask)

    assert torch.autograd.gradcheck(function, tuple(x.values()))


def test_twice_differentiating_is_refused() -> None:
    x = leaves(make_inputs(True, False, T=1, Hq=2, Hkv=1))
    out = call(x)
    (dq,) = torch.autograd.grad(out.square().sum(), x["q"], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dq.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):  # also where another way leads to the inputs
        torch.autograd.grad(out.sum() + dq.square().sum(), x["q"])


def test_blocks_of_several_threads_leave_nothing_behind() -> None:
    """They may end in another order than they began."""
    one, two = attention_implementation("kernel"), attention_implementation("reference")
    one.__enter__()
    two.__enter__()
    one.__exit__(None, None, None)
    assert attention_path("cpu") == "reference (torch), forced"
    two.__exit__(None, None, None)
    assert attention_path("cpu") == "reference (torch)"


def test_the_operator_can_be_kept_and_copied() -> None:
    from soma_lightning import attention as operator

    assert pickle.loads(pickle.dumps(copy.deepcopy({"attend": operator})))["attend"] is operator


@pytest.mark.parametrize("dynamic", [None, True])
def test_compiled_calls_of_several_head_sizes(dynamic: bool | None) -> None:
    compiled = torch.compile(lambda q, k: attention(q, k, k), fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for D in (48, 64):
        q, k = torch.randn(1, 2, 4, D), torch.randn(1, 1, 3, D)
        torch.testing.assert_close(compiled(q, k), attention(q, k, k))


class Operations(TorchDispatchMode):
    """Counts operations by name and remembers the largest tensor that one of them returned."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.count[func.overloadpacket.__name__] += 1
        if isinstance(out, Tensor):
            self.largest = max(self.largest, out.numel())
        return out


def backward_products(trainable: set[str], own: bool = True) -> int:
    """Matrix products of a backward in which only the named inputs require grad."""
    x = make_inputs(own, True, T=3, Hq=4, Hkv=2)
    x = {name: tensor.requires_grad_(name in trainable) for name, tensor in x.items()}
    out = call(x)
    with Operations() as operations:
        out.sum().backward()
    assert {name for name, tensor in x.items() if tensor.grad is not None} == trainable
    return operations.count["bmm"] + operations.count["mm"]


def test_the_backward_works_only_for_inputs_that_require_grad() -> None:
    # Products of one segment: scores again, dP = dO v^T, dq += dS k, dk = dS^T q, dv = P^T dO.
    assert backward_products({"q", "k", "v", "ck", "cv"}) == 10
    assert backward_products({"q", "k", "v"}) == 8  # a frozen context: no dck, no dcv
    assert backward_products({"q"}) == 6
    assert backward_products({"k", "v"}) == 4  # the context segment is not entered at all
    assert backward_products({"v"}) == 2
    assert backward_products({"cv"}, own=False) == 2


def test_frozen_inputs_have_no_autograd_edge() -> None:
    x = make_inputs(True, True, T=2, Hq=2, Hkv=1)
    for name in ("q", "k", "v"):
        x[name].requires_grad_()
    out = call(x)
    node: Any = out.grad_fn
    assert type(node).__name__ == "_AttentionBackward"
    assert [edge[0] is not None for edge in node.next_functions[:5]] == [True, True, True, False, False]
    assert not call({name: tensor.detach() for name, tensor in x.items()}).requires_grad


def test_keys_are_neither_repeated_nor_joined() -> None:
    x = make_inputs(True, True, T=3, Hq=2, Hkv=1)
    x = leaves({**x, "ck": torch.randn(2, 1, 50, D).double(), "cv": torch.randn(2, 1, 50, D).double()})
    scores = 6 * 2 * LQ * 50
    assert scores < 3 * x["ck"].numel() * 2  # a key repeated for each of T rows and two heads would stand out
    with Operations() as operations:
        call(x).sum().backward()
    assert operations.largest <= max(scores, x["ck"].numel())
    assert not {"cat", "repeat", "repeat_interleave", "stack", "index_select"} & set(operations.count)


def test_no_score_matrix_is_kept_for_the_backward() -> None:
    x = leaves(make_inputs(True, True, T=3, Hq=4, Hkv=1))
    saved: list[tuple[int, ...]] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        call(x, make_mask("random", 6, LK))
    inputs = {tuple(tensor.shape) for tensor in x.values()} | {(6, LK)}
    others = [shape for shape in saved if shape not in inputs]
    assert others
    assert all(shape[-1] == 1 for shape in others), others  # the log-sum-exp of each row


def test_inputs_are_not_written() -> None:
    x = leaves(make_inputs(True, True, T=2, Hq=4, Hkv=2))
    before = {name: tensor.detach().clone() for name, tensor in x.items()}
    versions = {name: tensor._version for name, tensor in x.items()}
    call(x, make_mask("random", 4, LK), make_mask("random", 2, LC)).sum().backward()
    assert all(torch.equal(before[name], tensor) for name, tensor in x.items())
    assert versions == {name: tensor._version for name, tensor in x.items()}


def test_autocast_lowers_the_inputs() -> None:
    x = leaves({name: tensor.float() for name, tensor in make_inputs(True, True, T=2, Hq=4, Hkv=2).items()})
    mixed = {**x, "k": x["k"].bfloat16()}  # autocast code often mixes dtypes
    with torch.autocast("cpu", torch.bfloat16):
        out = call(mixed)
    assert out.dtype == torch.bfloat16
    lowered = {name: tensor.detach().bfloat16() for name, tensor in x.items()}
    assert torch.equal(out, call(lowered))
    out.float().sum().backward()
    assert all(tensor.grad is not None and tensor.grad.dtype == torch.float32 for tensor in x.values())


def test_autocast_leaves_float64_alone() -> None:
    x = make_inputs(True, True, T=2, Hq=4, Hkv=2)
    with torch.autocast("cpu", torch.bfloat16):
        out = call(x)
    assert out.dtype == torch.float64
    assert torch.equal(out, call(x))


def test_a_backward_inside_autocast_has_the_same_bits() -> None:
    """Products of the backward run in fp32 whatever surrounds it."""
    grads = []
    for inside in (False, True):
        x = leaves({name: tensor.float() for name, tensor in make_inputs(True, True, T=2, Hq=4, Hkv=2).items()})
        out = call(x)
        with torch.autocast("cpu", torch.bfloat16, enabled=inside):
            out.square().sum().backward()
        grads.append({name: tensor.grad for name, tensor in x.items()})
    assert all(torch.equal(grads[0][name], grads[1][name]) for name in grads[0])


def test_compiles_into_one_graph() -> None:
    x = leaves({name: tensor.float() for name, tensor in make_inputs(True, True, T=2, Hq=4, Hkv=2).items()})
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    out, expected = compiled(x), call(x)
    torch.testing.assert_close(out, expected)
    grad_out = torch.randn_like(expected)
    for name, grad in gradients(out, x, grad_out).items():
        torch.testing.assert_close(grad, gradients(call(x), x, grad_out)[name])


def test_the_module_is_the_operator() -> None:
    x = make_inputs(True, True, T=2, Hq=2, Hkv=1)
    module: Any = soma_lightning.attention
    context = ContextKV(x["ck"], x["cv"])
    assert torch.equal(module(x["q"], x["k"], x["v"], context=context), call(x))
    own: dict[str, Any] = {"key_mask": make_mask("random", 4, LK), "scale": 0.3}
    expected = attention(x["q"], x["k"], x["v"], context=context, **own)
    assert torch.equal(module(x["q"], x["k"], x["v"], context=context, **own), expected)
    assert str(inspect.signature(module)) == str(inspect.signature(attention))
    assert module.ContextKV is soma_lightning.ContextKV
    assert "torch" in attention_path()


def wrong_calls() -> Iterator[tuple[str, dict[str, Any], str]]:
    x = make_inputs(True, True, T=3, Hq=4, Hkv=2)
    q, k, v, ck, cv = x.values()
    mask = torch.ones(2, LC, dtype=torch.bool)
    own = {"q": q, "k": k, "v": v}
    yield "k alone", {"q": q, "k": k}, "k without v"
    yield "v alone", {"q": q, "v": v, "context": ContextKV(ck, cv)}, "v without k"
    yield "no keys", {"q": q}, "no keys"
    yield "key_mask alone", {"q": q, "context": ContextKV(ck, cv), "key_mask": mask}, "k is None"
    yield "three dims", {**own, "q": q[0]}, r"q must be \[rows, heads, length, head size\]"
    yield "dtype", {**own, "k": k.float(), "v": v.float()}, "k has dtype torch.float32, but q has torch.float64"
    yield "integers", {name: tensor.long() for name, tensor in own.items()}, "q must be one of"
    yield "float8", {n: t.to(torch.float8_e4m3fn) for n, t in own.items()}, "torch.float16, got torch.float8_e4m3fn"
    yield "empty heads", {name: tensor[..., :0] for name, tensor in own.items()}, "head size 0"
    yield "empty context", {**own, "context": ContextKV(None, None)}, "no context.k and no context.v"  # type: ignore[arg-type]
    yield "half a context", {**own, "context": ContextKV(ck, None)}, "the context has no context.v"  # type: ignore[arg-type]
    yield "device", {**own, "v": v.to("meta")}, "v is on meta, but q is on cpu"
    yield "k and v", {**own, "v": v[:, :, :2]}, "k and v must have one shape"
    yield (
        "context shapes",
        {"q": q, "context": ContextKV(ck, cv[:, :, :2])},
        "context.k and context.v must have one shape",
    )
    yield "head size", {**own, "k": k[..., :2], "v": v[..., :2]}, "head size 2, but q has 6"
    yield "heads", {**own, "q": q[:, :3]}, "3 heads are no multiple of the 2 heads of k"
    yield "two head counts", {**own, "context": ContextKV(ck[:, :1], cv[:, :1])}, "same number of heads"
    yield "rows of k", {**own, "k": k[:2], "v": v[:2]}, "k has 2 rows, but q has 6"
    yield "rows of context", {"q": q[:5], "context": ContextKV(ck, cv)}, "5 rows are no multiple of the context's 2"
    yield "mask dtype", {"q": q, "context": ContextKV(ck, cv, mask.float())}, "context.mask must be bool"
    yield "mask shape", {"q": q, "context": ContextKV(ck, cv, mask[:, :2])}, r"context.mask must be .* = \(2, 5\)"
    yield "key_mask shape", {**own, "key_mask": mask}, r"key_mask must be .* = \(6, 4\)"
    yield "mask device", {"q": q, "context": ContextKV(ck, cv, mask.to("meta"))}, "context.mask is on meta"


@pytest.mark.parametrize(
    ("arguments", "message"), [case[1:] for case in wrong_calls()], ids=[c[0] for c in wrong_calls()]
)
def test_wrong_arguments_say_what_is_wrong(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attention(**arguments)


def test_arguments_of_another_kind_are_refused() -> None:
    x = make_inputs(True, True, T=1, Hq=2, Hkv=1)
    with pytest.raises(TypeError, match="context must be ContextKV.*got tuple"):
        attention(x["q"], context=(x["ck"], x["cv"]))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="scale must be a number, got Tensor; no gradient flows to it"):
        attention(x["q"], x["k"], x["v"], scale=torch.tensor(0.5, requires_grad=True))  # type: ignore[arg-type]


# -- which implementation runs -----------------------------------------------------------------------------------------


@pytest.fixture
def kernels() -> None:
    pytest.importorskip("triton")
    if not device_facts("cpu").triton:
        pytest.skip("kernels run on the CPU only with TRITON_INTERPRET=1")


def float_inputs(D: int = 16) -> Inputs:
    generator = torch.Generator().manual_seed(0)
    sizes = {"q": (4, 4, 3), "k": (4, 2, 4), "v": (4, 2, 4), "ck": (2, 2, 5), "cv": (2, 2, 5)}
    return {name: torch.randn(*size, D, generator=generator) for name, size in sizes.items()}


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("by", ["argument", "context"])
def test_a_forced_kernel_agrees_with_the_reference(by: str) -> None:
    x, mask = leaves(float_inputs()), make_mask("random", 2, LC)
    assert mask is not None
    expected = call(x, None, mask)
    if by == "argument":
        out = call(x, None, mask, implementation="kernel")
    else:
        with attention_implementation("kernel"):
            keys = key_list(mask)
            assert keys is not None
            assert attention_path().startswith("kernel (Triton 3.")
            out = attention(x["q"], x["k"], x["v"], context=ContextKV(x["ck"], x["cv"], mask, keys))
            assert torch.equal(call(x, None, mask, implementation="reference"), expected)
    assert not torch.equal(out, expected)  # another order of sums
    torch.testing.assert_close(out, expected)
    grad_out = torch.randn_like(out)
    for name, grad in gradients(out, x, grad_out).items():
        torch.testing.assert_close(grad, gradients(call(x, None, mask), x, grad_out)[name])


@pytest.mark.usefixtures("kernels")
def test_a_forced_kernel_compiles_into_one_graph() -> None:
    x, mask = leaves(float_inputs()), make_mask("random", 2, LC)

    def model(x: Inputs) -> Tensor:
        return call(x, None, mask, implementation="kernel")

    out = torch.compile(model, backend="aot_eager", fullgraph=True)(x)
    assert torch.equal(out, model(x))
    assert "soma_kernels" in type(out.grad_fn).__name__ or "Compiled" in type(out.grad_fn).__name__


@pytest.mark.usefixtures("kernels")
def test_a_kernel_that_cannot_run_says_why() -> None:
    x = make_inputs(True, True, T=2, Hq=2, Hkv=1)
    with pytest.raises(ValueError, match=r"cannot run its kernel: there are no kernels for torch.float64; pass impl"):
        call(x, implementation="kernel")
    small = {name: tensor.float() for name, tensor in x.items()}
    with pytest.raises(ValueError, match="its head sizes are 16 to 256, and this one is 6"):
        call(small, implementation="kernel")


@pytest.mark.parametrize("implementation", ["auto", "reference", "kernel"])
def test_meta_tensors_give_shapes(implementation: Any) -> None:
    if implementation == "kernel":
        pytest.importorskip("triton")
    x = leaves({name: tensor.to("meta") for name, tensor in float_inputs().items()})
    out = call(x, implementation=implementation)
    assert (out.shape, out.device.type) == (x["q"].shape, "meta")
    grads = gradients(out, x, torch.empty_like(out))
    assert {name: grad.shape for name, grad in grads.items()} == {name: tensor.shape for name, tensor in x.items()}


def test_without_triton_the_reference_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["soma_lightning.attention"]
    monkeypatch.setattr(module, "has_triton", lambda: False)
    module._why_no_kernel.cache_clear()  # type: ignore[attr-defined]
    try:
        with pytest.raises(ValueError, match="cannot run its kernel: Triton is not installed"):
            call(float_inputs(), implementation="kernel")
        assert attention_path("cpu") == "reference (torch)"
    finally:
        module._why_no_kernel.cache_clear()  # type: ignore[attr-defined]


def test_an_unchecked_gpu_runs_the_reference_and_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = sys.modules["soma_lightning.attention"]
    monkeypatch.setattr(module, "_why_no_kernel", lambda device_type, index: "its configurations are not checked")
    module._say_once.cache_clear()
    with pytest.warns(UserWarning, match="runs its slower reference instead of its kernel: its configurations are not"):
        assert not module._use_kernel("auto", "cuda", 0, torch.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not module._use_kernel("auto", "cuda", 0, torch.bfloat16)
    monkeypatch.setattr(module, "_why_no_kernel", lambda device_type, index: None)
    assert module._use_kernel("auto", "cuda", 0, torch.bfloat16)
    assert not module._use_kernel("auto", "cpu", None, torch.float32)
    assert not module._use_kernel("reference", "cuda", 0, torch.bfloat16)


def test_the_path_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = sys.modules["soma_lightning.attention"]
    monkeypatch.setattr(module, "_why_no_kernel", lambda device_type, index: None)
    monkeypatch.setattr(module, "version", lambda name: "3.6.0")
    assert attention_path("cuda") == "kernel (Triton 3.6.0)"
    assert attention_path("cpu") == "reference (torch)"
    with attention_implementation("reference"):
        assert attention_path("cuda") == "reference (torch), forced"
    monkeypatch.setattr(module, "_why_no_kernel", lambda device_type, index: "there is no CUDA device")
    assert attention_path("cuda") == "reference (torch), there is no CUDA device"


def test_wrong_choices_are_refused() -> None:
    x = make_inputs(True, True, T=2, Hq=2, Hkv=1)
    with pytest.raises(ValueError, match="implementation must be one of auto, kernel, reference, got 'triton'"):
        call(x, implementation="triton")
    with (
        pytest.raises(ValueError, match="must be one of auto, kernel, reference, got 'fast'"),
        attention_implementation("fast"),  # type: ignore[arg-type]
    ):
        pass
    assert key_list(None) is None
    assert key_list(torch.ones(2, 3, dtype=torch.bool)) is None  # the reference runs here
    with pytest.raises(ValueError, match=r"mask must be bool \[rows, keys\], got torch.float32 of shape \(2, 3\)"):
        key_list(torch.ones(2, 3))


def test_key_lists_of_other_masks_are_refused() -> None:
    x = make_inputs(True, True, T=2, Hq=2, Hkv=1)
    mask = torch.ones(2, LC, dtype=torch.bool)
    wrong = KeyList(torch.zeros(2, LC, dtype=torch.int32), torch.zeros(2, dtype=torch.int32))
    with pytest.raises(ValueError, match="context.keys is a list of a mask, but context.mask is None"):
        attention(x["q"], context=ContextKV(x["ck"], x["cv"], None, wrong))
    with pytest.raises(
        ValueError, match=r"belongs to another mask: it holds torch.int32 of shape \(2, 5\) .* pass key_list"
    ):
        attention(x["q"], context=ContextKV(x["ck"], x["cv"], mask, wrong))


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs Triton's interpreter")
def test_the_interpreter_refuses_bfloat16() -> None:
    x = torch.randn(1, 1, 4, 16, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="Triton's interpreter computes bfloat16 products wrongly"):
        attention(x, x, x, implementation="kernel")


def test_parts_of_key_lists_are_refused() -> None:
    x = make_inputs(True, True, T=2, Hq=2, Hkv=1)
    mask = torch.ones(2, LC, dtype=torch.bool)
    lines, readable = torch.zeros(4, LC + PAD, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    for part in (KeyList(lines[::2], readable[::2]), KeyList(lines[:1].expand(2, -1), readable[:1].expand(2))):
        with pytest.raises(ValueError, match="context.keys is a part of a list"):
            attention(x["q"], context=ContextKV(x["ck"], x["cv"], mask, part))
    for other in (KeyList(lines[:2].long(), readable[:2]), KeyList(lines[:2], readable), KeyList(lines, readable[:2])):
        with pytest.raises(ValueError, match=r"belongs to another mask: .* pass key_list"):
            attention(x["q"], context=ContextKV(x["ck"], x["cv"], mask, other))
    with pytest.raises(TypeError, match="context.keys must come from key_list.context.mask., got tuple"):
        attention(x["q"], context=ContextKV(x["ck"], x["cv"], mask, (lines[:2], readable[:2])))  # type: ignore[arg-type]


@pytest.mark.parametrize("empty", ["own", "context"])
def test_an_empty_segment_beside_a_masked_one_reads_nothing(empty: str) -> None:
    q, full, none = (torch.randn(1, 1, n, 16, requires_grad=True) for n in (2, 3, 0))
    nothing = torch.zeros(1, 3, dtype=torch.bool)
    if empty == "own":
        out = attention(q, none, none, context=ContextKV(full, full, nothing))
    else:
        out = attention(q, full, full, context=ContextKV(none, none), key_mask=nothing)
    assert torch.equal(out, torch.zeros_like(out))
    for grad in torch.autograd.grad(out.sum(), (q, full)):
        assert torch.equal(grad, torch.zeros_like(grad))


def test_distributed_tensors_are_refused() -> None:
    from torch.distributed.tensor import DTensor, Replicate, init_device_mesh

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        x = make_inputs(True, False, T=1, Hq=2, Hkv=1)
        k = DTensor.from_local(x["k"], init_device_mesh("cpu", (1,)), [Replicate()])
        with pytest.raises(TypeError, match=r"k is a DTensor.*k\.to_local\(\)"):
            attention(x["q"], k, x["v"])
        mask = DTensor.from_local(torch.ones(x["k"].shape[0], x["k"].shape[2], dtype=torch.bool), k.device_mesh)
        with pytest.raises(TypeError, match=r"key_mask is a DTensor.*key_mask\.to_local\(\)"):
            attention(x["q"], x["k"], x["v"], key_mask=mask)
    finally:
        torch.distributed.destroy_process_group()
