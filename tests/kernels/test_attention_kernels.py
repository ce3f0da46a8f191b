"""The attention kernels against float64: in Triton's interpreter in float32, and compiled on a GPU in every dtype."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

triton = pytest.importorskip("triton")

from soma_kernels.attention import backward as backward_module  # noqa: E402
from soma_kernels.attention import tiles  # noqa: E402
from soma_kernels.attention.backward import MAX_PARTS, Needs, run_backward  # noqa: E402
from soma_kernels.attention.call import PAD  # noqa: E402
from soma_kernels.attention.forward import run_forward  # noqa: E402
from soma_kernels.attention.function import attention_kernel  # noqa: E402
from soma_kernels.attention.keys import key_list  # noqa: E402
from soma_kernels.attention.reference import attention_reference  # noqa: E402
from soma_kernels.attention.tiles import TABLE, Entry, find_tile, why_unsupported  # noqa: E402
from soma_kernels.launch import Prepared  # noqa: E402
from soma_kernels.runtime import KERNEL_DTYPES, DeviceFacts  # noqa: E402
from soma_kernels.testing import (  # noqa: E402
    FACTOR_OVER_TORCH,
    TOLERANCE,
    assert_close,
    nan_filled_empty,
    relative_rms,
)

NAMES = ("q", "k", "v", "ck", "cv")
LENGTHS = (1, 2, 3, 10, 50, 63, 129, 483, 968)
#: Gradients come from a rounded output and log-sum-exp, torch's from stored probabilities: see docs/numerics.md.
GRADIENT_SLACK = 1.5
HEAD_SIZES = (16, 20, 32, 48, 64, 72, 80, 96, 128, 160, 256)


class Place(NamedTuple):
    """Where a test runs and in which dtype: the interpreter's bf16 products are wrong, so there it is float32."""

    device: torch.device
    dtype: torch.dtype

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"


@pytest.fixture(
    params=[
        pytest.param(("cpu", torch.float32), id="cpu"),
        *(pytest.param(("cuda", d), id=str(d)[6:], marks=pytest.mark.gpu) for d in KERNEL_DTYPES),
    ]
)
def place(request: pytest.FixtureRequest) -> Place:
    device, dtype = request.param
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("kernels run on the CPU only with TRITON_INTERPRET=1")
    return Place(torch.device(device), dtype)


class Shape(NamedTuple):
    """Sizes of one call. Lk or Lc 0: no such segment."""

    Bc: int = 2
    T: int = 1
    Hkv: int = 1
    G: int = 1
    Lq: int = 5
    Lk: int = 0
    Lc: int = 0
    D: int = 16


Inputs = dict[str, Tensor | None]


def draw(shape: Shape, place: Place, layout: str = "NHLD") -> Inputs:
    """Random q, k, v, ck, cv. layout: memory order, or "sliced": every tensor a part of a larger one."""
    Bc, T, Hkv, G, Lq, Lk, Lc, D = shape
    generator = torch.Generator().manual_seed(0)

    def tensor(rows: int, heads: int, length: int) -> Tensor | None:
        if length == 0:
            return None
        sizes = (rows, length, heads, D) if layout != "NHLD" else (rows, heads, length, D)
        x = torch.randn(sizes, generator=generator).to(place.device, place.dtype)
        if layout == "sliced":
            x = torch.cat([x, torch.full_like(x, torch.nan)], -1)[..., :D]
        return x if layout == "NHLD" else x.transpose(1, 2)

    N = Bc * T
    own, context = (N, Hkv, Lk), (Bc, Hkv, Lc)
    q = tensor(N, Hkv * G, Lq)
    return dict(zip(NAMES, (q, tensor(*own), tensor(*own), tensor(*context), tensor(*context)), strict=True))


def draw_mask(kind: str, rows: int, length: int, place: Place) -> Tensor | None:
    """kind: none, random, empty (some rows read nothing), prefix, blocks (scattered runs of 16)."""
    if kind == "none" or length == 0:
        return None
    generator = torch.Generator().manual_seed(1)
    if kind == "prefix":
        mask = torch.arange(length) <= torch.randint(0, length, (rows, 1), generator=generator)
    elif kind == "blocks":
        mask = (torch.rand(rows, -(-length // 16), generator=generator) < 0.4).repeat_interleave(16, 1)[:, :length]
    else:
        mask = torch.rand(rows, length, generator=generator) < 0.6
    if kind == "empty":
        mask[::2] = False
    return mask.to(place.device)


def leaves(x: Inputs, wanted: tuple[str, ...], dtype: torch.dtype | None = None) -> Inputs:
    return {
        name: None if t is None else t.detach().to(dtype or t.dtype).requires_grad_(name in wanted)
        for name, t in x.items()
    }


def plain(
    x: Inputs, masks: tuple[Tensor | None, Tensor | None], scale: float, *, normalizer_moves: bool = True
) -> Tensor:
    """Attention as plain torch writes it, in the dtype of q: keys repeated and joined, scores and softmax stored.

    Where the sum of a softmax does not move, scores get P * dP as gradients, and not the difference P * (dP - dO . O).
    """
    q = x["q"]
    assert q is not None
    N, Hq = q.shape[:2]
    keys, values, readable = [], [], []
    for k, v, mask in ((x["k"], x["v"], masks[0]), (x["ck"], x["cv"], masks[1])):
        if k is None or v is None:
            continue
        T = N // k.shape[0]
        mask = torch.ones(k.shape[0], k.shape[2], dtype=torch.bool, device=k.device) if mask is None else mask
        for joined, tensor in ((keys, k), (values, v)):
            joined.append(tensor.repeat_interleave(T, 0).repeat_interleave(Hq // k.shape[1], 1))
        readable.append(mask.repeat_interleave(T, 0))
    mask = torch.cat(readable, 1)[:, None, None]
    scores = (q @ torch.cat(keys, 2).mT * scale).masked_fill(~mask, -torch.inf)
    if normalizer_moves:
        probs = torch.softmax(scores, -1).masked_fill(~mask.any(-1, keepdim=True), 0.0)
    else:
        total = scores.detach().logsumexp(-1, keepdim=True)
        probs = (scores - total.where(total > -torch.inf, 0.0)).exp()
    return probs @ torch.cat(values, 2)


class Result(NamedTuple):
    """One output or gradient of the kernels, the float64 reference's and plain torch's in the same dtype.

    terms: float64, what a gradient is before the part of it is taken away that the softmax's sum adds.
    """

    ours: Tensor
    truth: Tensor
    by_torch: Tensor
    terms: Tensor


def results(
    shape: Shape,
    place: Place,
    *,
    wanted: tuple[str, ...] = NAMES,
    own_mask: str = "none",
    context_mask: str = "none",
    layout: str = "NHLD",
    scale: float | None = None,
) -> dict[str, Result]:
    """The output and the wanted gradients by name; memory that the kernels leave unwritten is NaN."""
    x = draw(shape, place, layout)
    wanted = tuple(name for name in wanted if x[name] is not None)
    N = shape.Bc * shape.T
    masks = (draw_mask(own_mask, N, shape.Lk, place), draw_mask(context_mask, shape.Bc, shape.Lc, place))
    factor = shape.D**-0.5 if scale is None else scale
    ours, exact, peer = leaves(x, wanted), leaves(x, wanted, torch.float64), leaves(x, wanted)
    with nan_filled_empty():
        out = attention_kernel(*ours.values(), *masks, factor)  # type: ignore[arg-type]
        grad_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(place.device, place.dtype)
        grads = torch.autograd.grad(out, [ours[name] for name in wanted], grad_out)
    truth = attention_reference(*exact.values(), *masks, factor)  # type: ignore[arg-type]
    true_grads = torch.autograd.grad(truth, [exact[name] for name in wanted], grad_out.double())
    by_torch = plain(peer, masks, factor)
    torch_grads = torch.autograd.grad(by_torch, [peer[name] for name in wanted], grad_out)
    apart = leaves(x, wanted, torch.float64)
    still = plain(apart, masks, factor, normalizer_moves=False)
    terms = torch.autograd.grad(still, [apart[name] for name in wanted], grad_out.double())
    found = {"out": Result(out.detach(), truth.detach(), by_torch.detach(), truth.detach())}
    columns = zip(grads, true_grads, torch_grads, terms, strict=True)
    return found | {f"d{name}": Result(*column) for name, column in zip(wanted, columns, strict=True)}


def assert_as_good(found: dict[str, Result]) -> None:
    """Each within its dtype's tolerance, or within twice plain torch's error where that is larger.

    Gradients get 1.5 times the tolerance, and are measured by the terms whose difference they are: docs/numerics.md."""
    assert len(found) > 1, "an output and at least one gradient"
    for name, (ours, truth, by_torch, terms) in found.items():
        assert ours.dtype == by_torch.dtype, name
        slack = 1.0 if name == "out" else GRADIENT_SLACK
        if FACTOR_OVER_TORCH * relative_rms(by_torch, truth, terms) > slack * TOLERANCE[ours.dtype]:
            assert_close(name, ours, truth, by_torch, terms=terms)
        else:
            assert_close(name, ours, truth, slack=slack, terms=terms)


# -- results ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("own_mask", ["none", "random"])
@pytest.mark.parametrize("context_mask", ["none", "random", "empty", "prefix", "blocks"])
@pytest.mark.parametrize("T", [1, 3])
def test_two_segments(place: Place, T: int, context_mask: str, own_mask: str) -> None:
    shape = Shape(T=T, Hkv=2, G=2, Lq=10, Lk=7, Lc=70)
    assert_as_good(results(shape, place, own_mask=own_mask, context_mask=context_mask))


@pytest.mark.parametrize("context_mask", ["none", "random", "empty", "prefix", "blocks"])
@pytest.mark.parametrize(("T", "Lq"), [(1, 10), (3, 10), (3, 30)])
def test_context_only(place: Place, T: int, Lq: int, context_mask: str) -> None:
    """One pass up to its tile of folded queries, two kernels beyond."""
    assert_as_good(results(Shape(T=T, Hkv=2, Lq=Lq, Lc=70), place, context_mask=context_mask))


@pytest.mark.parametrize("own_mask", ["none", "random", "empty", "prefix"])
@pytest.mark.parametrize("L", [1, 10, 41, 70])
def test_own_only(place: Place, L: int, own_mask: str) -> None:
    assert_as_good(results(Shape(Hkv=2, Lq=L, Lk=L), place, own_mask=own_mask))


def covering(values: tuple[int, ...], is_gpu: bool) -> list[tuple[int, int, int]]:
    """(Lq, Lc, T): the product on a GPU; in the interpreter every length once on each side, T in turn."""
    if is_gpu:
        return list(itertools.product(values, values, (1, 3, 8)))
    small = [n for n in values if n < 200]
    return [(a, b, (1, 3)[i % 2]) for i, (a, b) in enumerate(zip(small, reversed(small), strict=True))]


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("queries", LENGTHS)
def test_lengths(place: Place, queries: int, own: bool) -> None:
    """On a GPU the whole product of lengths and T, masks and layouts in turn."""
    kinds = itertools.cycle(itertools.product(("none", "random", "prefix", "blocks", "empty"), ("NHLD", "NLHD")))
    cases = [case for case in covering(LENGTHS, place.is_gpu) if case[0] == queries]
    if not cases:
        pytest.skip("long rows take too long in the interpreter")
    for (Lq, Lc, T), (mask, layout) in zip(cases, kinds, strict=False):
        shape = Shape(T=T, Hkv=1, G=2, Lq=Lq, Lk=min(Lq, 60) if own else 0, Lc=Lc, D=64 if place.is_gpu else 16)
        assert_as_good(results(shape, place, context_mask=mask, layout=layout))


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("Lc", [7, 33, 64])
@pytest.mark.parametrize("D", HEAD_SIZES)
def test_head_sizes(place: Place, D: int, Lc: int, own: bool) -> None:
    """With less than one step of keys, with a step that is not full, and with full ones only."""
    if not place.is_gpu and Lc != 33:
        pytest.skip("the interpreter runs one of them")
    mask = "none" if Lc == 64 else "random"
    assert_as_good(results(Shape(Bc=1, T=2, G=2, Lq=9, Lk=9 if own else 0, Lc=Lc, D=D), place, context_mask=mask))


@pytest.mark.parametrize(("Hkv", "G"), [(1, 1), (1, 8), (4, 2), (8, 1)])
def test_head_groups(place: Place, Hkv: int, G: int) -> None:
    assert_as_good(results(Shape(Bc=1, T=2, Hkv=Hkv, G=G, Lq=3, Lk=4, Lc=20), place))


@pytest.mark.parametrize("layout", ["NHLD", "NLHD", "sliced"])
@pytest.mark.parametrize("own", [False, True])
def test_layouts(place: Place, layout: str, own: bool) -> None:
    shape = Shape(T=2, Hkv=2, G=2, Lq=6, Lk=5 if own else 0, Lc=20)
    assert_as_good(results(shape, place, layout=layout, context_mask="random", own_mask="random"))


def test_odd_strides(place: Place) -> None:
    """Columns that are not side by side, an expanded tensor, a start that is no multiple of 16 bytes, k unlike v."""
    x = draw(Shape(Bc=2, Hkv=2, Lq=6, Lc=20), place)
    q, ck, cv = x["q"], x["ck"], x["cv"]
    assert q is not None
    assert ck is not None
    assert cv is not None
    shifted = torch.empty(q.numel() + 1, dtype=q.dtype, device=q.device)[1:].view(q.shape).copy_(q)
    odd = {
        "q": shifted,
        "ck": ck.transpose(2, 3).contiguous().transpose(2, 3),
        "cv": cv[:1, :1].expand(2, 2, -1, -1),
    }
    ours = leaves(odd, ("q", "ck", "cv"))
    truth = leaves(odd, ("q", "ck", "cv"), torch.float64)
    grad_out = torch.ones((), dtype=q.dtype, device=q.device).expand(q.shape)
    out = attention_kernel(ours["q"], None, None, ours["ck"], ours["cv"], None, None, 0.3)  # type: ignore[arg-type]
    expected = attention_reference(truth["q"], None, None, truth["ck"], truth["cv"], None, None, 0.3)  # type: ignore[arg-type]
    assert_close("out", out, expected.detach())
    grads = torch.autograd.grad(out, list(ours.values()), grad_out)
    for name, got, true in zip(
        odd, grads, torch.autograd.grad(expected, list(truth.values()), grad_out.double()), strict=True
    ):
        assert_close(f"d{name}", got, true)


def test_one_tensor_in_several_places(place: Place) -> None:
    """Queries that are also keys, where operands are copied (an expanded gradient) and where they are not."""
    x = draw(Shape(Lq=6, Lk=6, Lc=20), place)
    for columns_apart in (False, True):
        q = x["q"]
        assert q is not None
        q = q.transpose(2, 3).contiguous().transpose(2, 3) if columns_apart else q
        ours, truth = leaves({**x, "q": q}, NAMES), leaves({**x, "q": q}, NAMES, torch.float64)
        with nan_filled_empty():
            out = attention_kernel(ours["q"], ours["q"], ours["v"], ours["ck"], ours["cv"], None, None, 0.3)  # type: ignore[arg-type]
            grads = torch.autograd.grad(out.sum(), [ours[name] for name in ("q", "v", "ck", "cv")])
        expected = attention_reference(truth["q"], truth["q"], truth["v"], truth["ck"], truth["cv"], None, None, 0.3)  # type: ignore[arg-type]
        assert_close("out", out, expected.detach())
        true_grads = torch.autograd.grad(expected.sum(), [truth[name] for name in ("q", "v", "ck", "cv")])
        for name, got, true in zip(("q", "v", "ck", "cv"), grads, true_grads, strict=True):
            assert_close(f"d{name}", got, true, slack=GRADIENT_SLACK)


def test_a_row_out_of_reach_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from soma_kernels.attention import call

    monkeypatch.setattr(call, "REACH", 100)
    q = torch.randn(1, 1, 3, 16)
    with pytest.raises(ValueError, match="one row of a tensor of shape .* has 128 elements, and the kernels reach 100"):
        run_forward(q, None, None, torch.randn(1, 1, 8, 16), torch.randn(1, 1, 8, 16), None, None, 0.25)


def test_many_tiles_of_own_keys(place: Place) -> None:
    """Beyond MAX_PARTS tiles the own keys take a pass of their own."""
    tile = find_tile("rows", 16, place.dtype, rows=1, keys=1, own=True)
    assert tile is not None
    shape = Shape(Bc=1, G=2, Lq=(MAX_PARTS + 1) * tile.rows // 2, Lk=20, Lc=20)
    assert_as_good(results(shape, place, own_mask="random", context_mask="random"))


@pytest.mark.parametrize("scale", [0.0, -0.5, 3.0])
def test_scales(place: Place, scale: float) -> None:
    assert_as_good(results(Shape(Lq=4, Lk=5, Lc=20), place, scale=scale, context_mask="random"))


def entry_shape(entry: Entry) -> Shape:
    """A small call that the entry's tile can run, with more than one program a head where the kernel allows it."""
    D, rows = entry.heads[1], entry.rows[0]
    own = entry.own is not False and entry.kernel in ("forward", "rows")
    keys = min(entry.keys, entry.tile.keys + 3)
    return Shape(Bc=1, G=1, Lq=rows + 1 if entry.kernel == "one_pass" else rows + 3, Lk=5 if own else 0, Lc=keys, D=D)


@pytest.mark.parametrize("entry", TABLE, ids=[f"{e.kernel}-{e.heads[1]}-{e.tile.rows}x{e.tile.keys}" for e in TABLE])
def test_every_tile_of_the_table(place: Place, entry: Entry) -> None:
    """In the interpreter also the tiles of 16-bit dtypes run in float32: their index arithmetic is the same."""
    if place.is_gpu and entry.wide != (place.dtype == torch.float32):
        pytest.skip("a tile of another dtype")
    shape = entry_shape(entry)
    x, mask = draw(shape, place), draw_mask("none" if entry.listed is False else "random", shape.Bc, shape.Lc, place)
    keys = None if mask is None else key_list(mask)
    q, k, v, ck, cv = x.values()
    assert q is not None
    assert ck is not None
    assert cv is not None
    scale = shape.D**-0.5
    with nan_filled_empty():
        forward_tile = entry.tile if entry.kernel == "forward" else None
        out, lse = run_forward(q, k, v, ck, cv, None, keys, scale, tile=forward_tile)
        needs = Needs(True, k is not None, k is not None, entry.kernel != "rows", entry.kernel != "rows")
        if entry.kernel == "keys":
            needs = needs._replace(q=False)
        given = None if entry.kernel == "forward" else {entry.kernel: entry.tile}
        got = run_backward(torch.ones_like(out), q, k, v, ck, cv, None, keys, out, lse, scale, needs, tiles=given)
    wanted = tuple(name for name, needed in zip(NAMES, needs, strict=True) if needed)
    truth = leaves(x, wanted, torch.float64)
    expected = attention_reference(*truth.values(), None, mask, scale)  # type: ignore[arg-type]
    assert_close("out", out, expected.detach())
    true = torch.autograd.grad(expected, [truth[name] for name in wanted], torch.ones_like(expected))
    for name, grad in zip(wanted, true, strict=True):
        result = got[NAMES.index(name)]
        assert result is not None
        assert_close(f"d{name}", result, grad)


# -- masked keys and empty calls --------------------------------------------------------------------------------------


@pytest.mark.parametrize("garbage", [float("nan"), float("-inf")])
@pytest.mark.parametrize(("Lq", "Lc", "D"), [(10, 40, 16), (20, 40, 16), (10, 9, 16), (5, 9, 96)])
def test_masked_keys_may_hold_anything(place: Place, Lq: int, Lc: int, D: int, garbage: float) -> None:
    """Also where a row reads nothing, and where all keys are one block."""
    shape = Shape(T=2, Hkv=1, Lq=Lq, Lk=7, Lc=Lc, D=D)
    x = draw(shape, place)
    key_mask, context_mask = draw_mask("empty", 4, 7, place), draw_mask("empty", 2, Lc, place)
    dirty = dict(x)
    for name, mask in (("k", key_mask), ("v", key_mask), ("ck", context_mask), ("cv", context_mask)):
        tensor = x[name]
        assert tensor is not None
        assert mask is not None
        dirty[name] = tensor.masked_fill(~mask[:, None, :, None], garbage)
    for segments in (NAMES, ("q", "ck", "cv"), ("q", "k", "v")):
        results = []
        for inputs in (x, dirty):
            chosen = leaves({name: t if name in segments else None for name, t in inputs.items()}, segments)
            masks = (key_mask if "k" in segments else None, context_mask if "ck" in segments else None)
            out = attention_kernel(*chosen.values(), *masks, 0.25)  # type: ignore[arg-type]
            results.append((out, *torch.autograd.grad(out.sum(), [chosen[name] for name in segments])))
        for name, clean, ours in zip(("out", *segments), *results, strict=True):
            assert torch.equal(clean, ours), name


def test_rows_that_read_nothing_are_zero(place: Place) -> None:
    x = leaves(draw(Shape(Lq=4, Lk=5, Lc=20), place), NAMES)
    key_mask = torch.ones(2, 5, dtype=torch.bool, device=place.device)
    context_mask = torch.ones(2, 20, dtype=torch.bool, device=place.device)
    key_mask[1] = context_mask[1] = False
    out = attention_kernel(*x.values(), key_mask, context_mask, 0.25)  # type: ignore[arg-type]
    assert torch.equal(out[1], torch.zeros_like(out[1]))
    assert out[0].abs().min() > 0
    for name, grad in zip(NAMES, torch.autograd.grad(out.sum(), list(x.values())), strict=True):
        assert torch.equal(grad[1], torch.zeros_like(grad[1])), name
        assert grad[0].abs().sum() > 0, name


@pytest.mark.parametrize("empty", ["rows", "queries", "own", "context", "keys"])
def test_empty_calls(place: Place, empty: str) -> None:
    x = draw(Shape(T=2, Lq=4, Lk=5, Lc=6), place)
    cut = {"rows": NAMES, "queries": ("q",), "own": ("k", "v"), "context": ("ck", "cv"), "keys": NAMES[1:]}[empty]
    x = {n: t if n not in cut or t is None else (t[:0] if empty == "rows" else t[:, :, :0]) for n, t in x.items()}
    x = leaves(x, NAMES)
    out = attention_kernel(*x.values(), None, None, 0.25)  # type: ignore[arg-type]
    expected = attention_reference(*x.values(), None, None, 0.25)  # type: ignore[arg-type]
    torch.testing.assert_close(out, expected)
    for tensor, grad in zip(x.values(), torch.autograd.grad(out.sum(), list(x.values())), strict=True):
        assert tensor is not None
        assert grad.shape == tensor.shape
        assert grad.isfinite().all()


@pytest.mark.parametrize("kind", ["random", "empty", "prefix", "blocks"])
@pytest.mark.parametrize("length", [1, 17, 130, 2100])
def test_key_list(place: Place, kind: str, length: int) -> None:
    mask = draw_mask(kind, 3, length, place)
    assert mask is not None
    with nan_filled_empty():
        lines, readable = key_list(mask)
    assert readable.tolist() == mask.sum(1).tolist()
    for row, flags, count in zip(lines.tolist(), mask.tolist(), readable.tolist(), strict=True):
        named = [i for i, flag in enumerate(flags) if flag]
        assert row[:count] == named
        assert row[count : count + PAD] == [named[-1] if named else 0] * PAD
        assert row[count + PAD :] == [i for i, flag in enumerate(flags) if not flag]


# -- what frozen inputs cost ------------------------------------------------------------------------------------------


class Costs:
    """Counts launches by kernel and allocations by number of elements."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launches: list[str] = []
        self.allocated: list[int] = []
        launch = Prepared.__call__

        def counting(prepared: Any, programs: int, *arguments: Any) -> None:
            self.launches.append(prepared._kernel.__name__.removeprefix("attention_").removesuffix("_kernel"))
            launch(prepared, programs, *arguments)

        monkeypatch.setattr(Prepared, "__call__", counting)
        for name in ("empty", "empty_like", "zeros", "zeros_like", "empty_strided"):
            monkeypatch.setattr(torch, name, self._counting(getattr(torch, name)))

    def _counting(self, allocate: Any) -> Any:
        def counted(*args: Any, **kwargs: Any) -> Tensor:
            x: Tensor = allocate(*args, **kwargs)
            self.allocated.append(x.numel())
            return x

        return counted

    def reset(self) -> None:
        self.launches.clear()
        self.allocated.clear()


def combinations(names: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for size in range(1, len(names) + 1):
        yield from itertools.combinations(names, size)


def expected_launches(wanted: set[str], shape: Shape, is_one_pass: bool) -> list[str]:
    if shape.Lk == 0 and is_one_pass and wanted & {"ck", "cv"}:
        return ["backward_one_pass"]
    rows = ["backward_rows"] if wanted & {"q", "k", "v"} else []
    sums = ["sum_parts"] if wanted & {"k", "v"} else []
    return [*rows, *sums, *(["backward_keys"] if wanted & {"ck", "cv"} else [])]


@pytest.mark.parametrize(("own", "Lq"), [(True, 20), (False, 10), (False, 40)])
def test_frozen_inputs_cost_nothing(place: Place, own: bool, Lq: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every combination: the launches, and one allocation for each wanted gradient (twice for parts of dk and dv)."""
    shape = Shape(Bc=1, G=2, Lq=Lq * (2 if place.dtype != torch.float32 else 1), Lk=5 if own else 0, Lc=20)
    tile = find_tile("one_pass", 16, place.dtype, rows=2 * shape.Lq, keys=20)
    x = draw(shape, place)
    for wanted in combinations(NAMES if own else ("q", "ck", "cv")):
        inputs = leaves(x, wanted)
        out = attention_kernel(*inputs.values(), None, None, 0.25)  # type: ignore[arg-type]
        grad_out = torch.ones_like(out)
        with monkeypatch.context() as patch:
            costs = Costs(patch)
            grads = torch.autograd.grad(out, [inputs[name] for name in wanted], grad_out)
        assert costs.launches == expected_launches(set(wanted), shape, tile is not None), wanted
        parts = [n for n in costs.allocated if n not in {g.numel() for g in grads}]
        assert len(costs.allocated) == len(wanted) + len({"k", "v"} & set(wanted)), wanted
        assert len(parts) == len({"k", "v"} & set(wanted)), wanted
        node: Any = out.grad_fn
        given = [name for name in NAMES if x[name] is not None]
        assert [edge[0] is not None for edge in node.next_functions] == [name in wanted for name in given]


@pytest.mark.parametrize("wanted", list(combinations(NAMES)), ids="-".join)
def test_every_combination_of_frozen_inputs(place: Place, wanted: tuple[str, ...]) -> None:
    assert_as_good(results(Shape(Bc=1, G=2, Lq=20, Lk=5, Lc=20), place, wanted=wanted, context_mask="random"))


@pytest.mark.parametrize("Lq", [5, 40])
@pytest.mark.parametrize("wanted", list(combinations(("q", "ck", "cv"))), ids="-".join)
def test_every_combination_without_own_keys(place: Place, wanted: tuple[str, ...], Lq: int) -> None:
    assert_as_good(results(Shape(Bc=1, G=2, Lq=Lq, Lc=20), place, wanted=wanted, context_mask="random"))


def test_a_frozen_context_is_not_even_read_for_own_gradients(place: Place) -> None:
    x = leaves(draw(Shape(Lq=4, Lk=5, Lc=20), place), ("k", "v"))
    out = attention_kernel(*x.values(), None, None, 0.25)  # type: ignore[arg-type]
    expected = torch.autograd.grad(out.sum(), [x["k"], x["v"]], retain_graph=True)
    for name in ("ck", "cv"):
        tensor = x[name]
        assert tensor is not None
        tensor.data.fill_(torch.nan)
    for got, before in zip(torch.autograd.grad(out.sum(), [x["k"], x["v"]]), expected, strict=True):
        assert torch.equal(got, before)


def test_only_the_log_sum_exp_is_saved(place: Place) -> None:
    x = leaves(draw(Shape(Lq=4, Lk=5, Lc=20), place), NAMES)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        out = attention_kernel(*x.values(), None, None, 0.25)  # type: ignore[arg-type]
    known = {t.data_ptr() for t in (*x.values(), out) if t is not None}
    assert [tuple(t.shape) for t in saved if t.data_ptr() not in known] == [(2, 1, 4)]


def test_plans_are_made_once(place: Place) -> None:
    x = leaves(draw(Shape(Lq=4, Lk=5, Lc=20), place), NAMES)
    before = backward_module._plan.cache_info()
    for _ in range(3):
        out = attention_kernel(*x.values(), None, None, 0.25)  # type: ignore[arg-type]
        out.backward(torch.ones_like(out))
    after = backward_module._plan.cache_info()
    assert after.misses - before.misses <= 1
    assert after.hits - before.hits >= 2


# -- autograd, compilers and modes ------------------------------------------------------------------------------------


def example(place: Place, wanted: tuple[str, ...] = NAMES) -> tuple[Inputs, Tensor]:
    x = leaves(draw(Shape(T=2, G=2, Lq=4, Lk=5, Lc=20), place), wanted)
    mask = draw_mask("random", 2, 20, place)
    assert mask is not None
    return x, mask


def test_operators_pass_opcheck(place: Place) -> None:
    x, mask = example(place)
    lines, readable = key_list(mask)
    ops = torch.ops.soma_kernels
    frozen = [None if t is None else t.detach() for t in x.values()]
    out, lse = ops.attention_forward(*frozen, None, lines, readable, 0.25)
    needs = [True, False, True, True, False]
    for operator, arguments in (
        (ops.attention_forward, (*x.values(), None, lines, readable, 0.25)),
        (ops.attention_key_list, (mask,)),
        (ops.attention_backward, (torch.ones_like(out), *frozen, None, lines, readable, out, lse, 0.25, needs)),
    ):
        assert set(torch.library.opcheck(operator, arguments).values()) == {"SUCCESS"}, operator


@pytest.mark.parametrize("wanted", [NAMES, ("q", "k", "v"), ("v", "ck")])
def test_compiles_into_one_graph(place: Place, wanted: tuple[str, ...]) -> None:
    x, mask = example(place, wanted)

    def call(*tensors: Tensor | None) -> Tensor:
        return attention_kernel(*tensors, None, mask, 0.25) * 2  # type: ignore[arg-type, misc]

    compiled = torch.compile(call, backend="inductor" if place.is_gpu else "aot_eager", fullgraph=True)
    out, expected = compiled(*x.values()), call(*x.values())
    assert torch.equal(out, expected)
    tensors = [x[name] for name in wanted]
    for got, true in zip(
        torch.autograd.grad(out.sum(), tensors), torch.autograd.grad(expected.sum(), tensors), strict=True
    ):
        assert torch.equal(got, true)


def test_the_dispatcher_gives_the_same_bits(place: Place) -> None:
    """Calls that a mode watches go through the operators."""
    from torch.utils.flop_counter import FlopCounterMode

    x, mask = example(place)
    eager = attention_kernel(*x.values(), None, mask, 0.25)  # type: ignore[arg-type]
    with FlopCounterMode(display=False):
        watched = attention_kernel(*x.values(), None, mask, 0.25)  # type: ignore[arg-type]
        grads = torch.autograd.grad(watched.sum(), list(x.values()))
    assert torch.equal(eager, watched)
    assert all(
        torch.equal(a, b) for a, b in zip(grads, torch.autograd.grad(eager.sum(), list(x.values())), strict=True)
    )
    assert type(eager.grad_fn) is not type(watched.grad_fn)


def test_meta_tensors(place: Place) -> None:
    real, _ = example(place)
    x = {name: None if t is None else t.detach().to("meta").requires_grad_() for name, t in real.items()}
    out = attention_kernel(*x.values(), None, torch.ones(2, 20, dtype=torch.bool, device="meta"), 0.25)  # type: ignore[arg-type]
    expected = attention_kernel(*real.values(), None, None, 0.25)  # type: ignore[arg-type]
    assert (out.shape, out.stride(), out.dtype) == (expected.shape, expected.stride(), expected.dtype)
    grads = torch.autograd.grad(out.sum(), list(x.values()))
    for got, true in zip(grads, torch.autograd.grad(expected.sum(), list(real.values())), strict=True):
        assert (got.shape, got.stride(), got.device.type) == (true.shape, true.stride(), "meta")


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(place: Place, reentrant: bool) -> None:
    x, mask = example(place)
    call: Any = attention_kernel
    out = checkpoint(call, *x.values(), None, mask, 0.25, use_reentrant=reentrant)
    expected = attention_kernel(*x.values(), None, mask, 0.25)  # type: ignore[arg-type]
    tensors = list(x.values())
    out.sum().backward()
    for tensor, true in zip(tensors, torch.autograd.grad(expected.sum(), tensors), strict=True):
        assert tensor is not None
        assert tensor.grad is not None
        assert torch.equal(tensor.grad, true)


def test_differentiating_twice_is_refused(place: Place) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    x, mask = example(place)
    for watched in (False, True):
        with FlopCounterMode(display=False) if watched else torch.enable_grad():
            out = attention_kernel(*x.values(), None, mask, 0.25)  # type: ignore[arg-type]
            (dq,) = torch.autograd.grad(out.square().sum(), x["q"], create_graph=True)
            with pytest.raises(RuntimeError, match="once_differentiable"):
                dq.sum().backward(retain_graph=True)
            with pytest.raises(RuntimeError, match="once_differentiable"):
                torch.autograd.grad(out.sum() + dq.square().sum(), x["q"])


def test_forward_mode_is_refused(place: Place) -> None:
    x, mask = example(place)
    q, k, v, ck, cv = (None if t is None else t.detach() for t in x.values())
    assert q is not None

    def call(q: Tensor) -> Tensor:
        return attention_kernel(q, k, v, ck, cv, None, mask, 0.25)

    with pytest.raises(RuntimeError, match="no forward-mode derivative"):
        torch.func.jvp(call, (q,), (torch.ones_like(q),))
    with (
        pytest.raises(RuntimeError, match="no forward-mode derivative"),
        torch.autograd.forward_ad.dual_level(),
    ):
        call(torch.autograd.forward_ad.make_dual(q, torch.ones_like(q)))


def test_a_saved_log_sum_exp_may_come_back_with_other_strides(place: Place) -> None:
    x, mask = example(place)
    expected = torch.autograd.grad(attention_kernel(*x.values(), None, mask, 0.25).sum(), list(x.values()))  # type: ignore[arg-type]

    def elsewhere(t: Tensor) -> Tensor:
        return t.mT.contiguous().mT if t.dim() == 3 else t

    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, elsewhere):
        out = attention_kernel(*x.values(), None, mask, 0.25)  # type: ignore[arg-type]
        grads = torch.autograd.grad(out.sum(), list(x.values()))
    assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))


def test_inputs_are_not_written_and_runs_are_bit_equal(place: Place) -> None:
    x, mask = example(place)
    before = {name: None if t is None else t.detach().clone() for name, t in x.items()}
    runs = []
    for _ in range(2):
        out = attention_kernel(*x.values(), None, mask, 0.25)  # type: ignore[arg-type]
        runs.append((out, *torch.autograd.grad(out.square().sum(), list(x.values()))))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    for name, tensor in x.items():
        assert tensor is not None
        assert tensor._version == 0
        assert torch.equal(tensor, before[name])  # type: ignore[arg-type]


# -- the table --------------------------------------------------------------------------------------------------------


def test_the_table_has_a_tile_for_every_call() -> None:
    for kernel, D, dtype, rows, keys in itertools.product(
        ("forward", "rows", "keys"), range(16, 257), KERNEL_DTYPES, (1, 16, 17, 64, 96, 97, 5000), (1, 64, 65, 4000)
    ):
        for own, listed, aligned in itertools.product((False, True), repeat=3):
            facts = {"own": own, "listed": listed, "aligned": aligned}
            tile = find_tile(kernel, D, dtype, rows=rows, keys=keys, **facts)  # type: ignore[arg-type]
            assert tile is not None, (kernel, D, dtype, rows, keys, facts)
            assert tile.width + tile.rest >= D
            assert not (own and tile.rest)
            assert max(tile.keys, tile.own_keys) <= PAD


def test_narrow_parts_of_a_head_and_of_own_keys_stay_out_of_what_compiles_wrongly() -> None:
    """See the head of tiles.py. Found on an H200: illegal addresses, and dk alone off by a factor."""
    for entry in TABLE:
        assert not entry.tile.rest or entry.aligned
        assert entry.wide or entry.kernel != "rows" or entry.tile.own_keys == 64
    for kernel, rows in (("forward", 64), ("one_pass", 64)):
        tile = find_tile(kernel, 96, torch.bfloat16, rows=rows, keys=300, aligned=False)  # type: ignore[arg-type]
        assert tile is not None
        assert (tile.width, tile.rest) == (128, 0)


def test_one_pass_tiles_hold_their_rows() -> None:
    for entry in TABLE:
        if entry.kernel == "one_pass":
            assert entry.rows[1] <= entry.tile.rows + entry.tile.more_rows


@pytest.mark.parametrize("listed", [False, True])
def test_the_forward_fits_the_shared_memory_of_hopper(listed: bool) -> None:
    """The queries stay, and keys and values are there once a stage; a list takes one stage for itself."""
    for D, rows, keys in itertools.product(range(16, 257), (1, 16, 17, 64, 65, 96, 97, 5000), (64, 4000)):
        for own in (False, True):
            tile = find_tile("forward", D, torch.bfloat16, rows=rows, keys=keys, own=own, listed=listed)
            assert tile is not None
            buffers = max(1, tile.stages - listed)
            held = 2 * (tile.width + tile.rest) * (tile.rows + 2 * buffers * tile.keys)
            assert held <= 227 * 1024, (D, rows, keys, own, tile)


@pytest.mark.parametrize("entry", TABLE, ids=[f"{i}" for i in range(len(TABLE))])
def test_every_entry_can_win(entry: Entry) -> None:
    rows, keys = entry.rows[0], min(entry.keys, 4000)
    found = {
        find_tile(
            entry.kernel, D, torch.float32 if entry.wide else torch.bfloat16, rows=r, keys=keys, own=own, listed=listed
        )
        for D in entry.heads
        for r in (rows, min(entry.rows[1], 5000))
        for own in (False, True)
        for listed in (False, True)
    }
    assert entry.tile in found


def test_only_checked_gpus_run_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = DeviceFacts("cuda:0", triton=True, interpreter=False, capability=(9, 0))
    monkeypatch.setattr(tiles, "CHECKED", frozenset())
    assert "not checked for Triton 3.6 on sm_90 (checked: none)" in str(why_unsupported(gpu, "3.6.0"))
    monkeypatch.setattr(tiles, "CHECKED", frozenset({("3.6", (9, 0))}))
    assert why_unsupported(gpu, "3.6.1") is None
    assert why_unsupported(gpu, None) == "Triton is not installed"
    assert "not checked for Triton 3.60 on sm_90" in str(why_unsupported(gpu, "3.60.0"))
    old = DeviceFacts("cuda:0", triton=True, interpreter=False, capability=(8, 0))
    assert "Triton 3.6 on sm_80 (checked: Triton 3.6 on sm_90)" in str(why_unsupported(old, "3.6.0"))
    assert why_unsupported(DeviceFacts("cpu", triton=True, interpreter=True), "3.9.0") is None
    assert "does not compile for cpu" in str(
        why_unsupported(DeviceFacts("cpu", triton=False, interpreter=False), "3.9")
    )
