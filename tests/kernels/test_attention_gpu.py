"""The attention kernels on a GPU: graphs, streams, no waiting, huge tensors, and the models that call them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from soma_kernels.attention.function import attention_kernel  # noqa: E402
from soma_kernels.attention.reference import attention_reference  # noqa: E402
from soma_kernels.testing import assert_close  # noqa: E402
from soma_lightning.attention import ContextKV, attention, attention_implementation, attention_path, key_list  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

BF16 = torch.bfloat16
NAMES = ("q", "k", "v", "ck", "cv")


@pytest.fixture(autouse=True)
def forced() -> Iterator[None]:
    """The kernels run whether or not this GPU is in the table of checked ones: these tests are part of the check."""
    from soma_lightning import attention as module

    unpatched: Any = module._why_no_kernel
    module._why_no_kernel = lambda device_type, index: None  # type: ignore[assignment]
    try:
        with attention_implementation("kernel"):
            yield
    finally:
        module._why_no_kernel = unpatched


def draw(
    Bc: int = 4, T: int = 2, Hq: int = 8, Hkv: int = 2, Lq: int = 20, Lk: int = 10, Lc: int = 150, D: int = 64
) -> dict[str, Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    sizes = {
        "q": (Bc * T, Hq, Lq),
        "k": (Bc * T, Hkv, Lk),
        "v": (Bc * T, Hkv, Lk),
        "ck": (Bc, Hkv, Lc),
        "cv": (Bc, Hkv, Lc),
    }
    return {
        name: torch.randn(*size, D, device="cuda", dtype=BF16, generator=generator).requires_grad_()
        for name, size in sizes.items()
        if size[2]
    }


def call(x: dict[str, Tensor], mask: Tensor | None) -> Tensor:
    context = ContextKV(x["ck"], x["cv"], mask, key_list(mask))
    return attention(x["q"], x.get("k"), x.get("v"), context=context)


def truth(x: dict[str, Tensor], mask: Tensor | None, grad_out: Tensor) -> dict[str, Tensor]:
    exact = {name: tensor.detach().double().requires_grad_(tensor.requires_grad) for name, tensor in x.items()}
    q, k, v, ck, cv = (exact.get(name) for name in NAMES)
    assert q is not None
    out = attention_reference(q, k, v, ck, cv, None, mask, q.shape[-1] ** -0.5)
    wanted = [name for name, tensor in exact.items() if tensor.requires_grad]
    grads = torch.autograd.grad(out, [exact[name] for name in wanted], grad_out.double())
    return {"out": out.detach(), **dict(zip(wanted, grads, strict=True))}


@pytest.mark.parametrize("kind", ["rows and sum", "keys", "one pass", "one pass, two groups", "own"])
def test_one_shape_per_kernel(kind: str) -> None:
    """Small enough for compute-sanitizer: every kernel runs once, with a mask."""
    x = {
        "rows and sum": draw(Bc=2, T=1, Hq=8, Hkv=1, Lq=20, D=256, Lc=100),
        "keys": draw(Bc=2, T=2, Hq=2, Hkv=2, Lq=50, Lk=0),
        "one pass": draw(Bc=2, T=1, Hq=2, Hkv=2, Lq=41, Lk=0, D=48),
        "one pass, two groups": draw(Bc=2, T=8, Hq=2, Hkv=2, Lq=10, Lk=0, D=96),
        "own": draw(Bc=2, T=1, Hq=2, Hkv=2, Lq=10, Lk=10, Lc=1, D=96),
    }[kind]
    mask: Tensor | None = None
    if kind == "own":
        x = {name: x[name] for name in ("q", "k", "v")}
        out = attention(x["q"], x["k"], x["v"])
    else:
        if kind == "rows and sum":
            x["ck"], x["cv"] = x["ck"].detach(), x["cv"].detach()
        mask = torch.rand(2, x["ck"].shape[2], device="cuda") < 0.7
        out = call(x, mask)
    grad_out = torch.randn_like(out)
    wanted = [name for name, tensor in x.items() if tensor.requires_grad]
    grads = torch.autograd.grad(out, [x[name] for name in wanted], grad_out)
    for name, true in truth(x, mask, grad_out).items():
        assert_close(name, out if name == "out" else grads[wanted.index(name)], true)


def test_a_graph_follows_the_contents_of_its_mask() -> None:
    x, mask = draw(), torch.ones(4, 150, dtype=torch.bool, device="cuda")
    grad_out = torch.randn_like(x["q"])

    def step() -> tuple[Tensor, ...]:
        out = call(x, mask)
        return (out.detach(), *torch.autograd.grad(out, list(x.values()), grad_out))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        results = step()
    for seed in range(3):
        mask.copy_(torch.rand(4, 150, generator=torch.Generator().manual_seed(seed)) < 0.3 * (seed + 1))
        graph.replay()
        for got, expected in zip(results, step(), strict=True):
            assert torch.equal(got, expected)


def test_nothing_waits_for_the_device() -> None:
    """A call that waits raises; one that does not gives the bits of a call that may."""
    x, mask = draw(), torch.rand(4, 150, device="cuda") < 0.5

    def step() -> tuple[Tensor, ...]:
        out = call(x, mask)
        return (out.detach(), *torch.autograd.grad(out.sum(), list(x.values())))

    expected = step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for name, got, before in zip(("out", *x), results, expected, strict=True):
        assert torch.equal(got, before), name


def test_it_runs_on_the_current_stream() -> None:
    x = {name: tensor.detach() for name, tensor in draw().items()}
    expected = call(x, None)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)
        late = {name: tensor.clone() for name, tensor in x.items()}
        out = call(late, None)
    stream.synchronize()
    assert torch.equal(out, expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_it_runs_on_another_device() -> None:
    x = draw()
    expected = call(x, None)
    moved = {name: tensor.detach().to("cuda:1").requires_grad_() for name, tensor in x.items()}
    out = call(moved, None)
    out.sum().backward()
    assert torch.equal(out.cpu(), expected.cpu())
    assert all(tensor.grad is not None and tensor.grad.device.index == 1 for tensor in moved.values())


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["NHLD", "NLHD"])
def test_tensors_past_two_to_the_31_elements(layout: str) -> None:
    """Rows at the far end of a 4.5 GB tensor, in its rows and inside one of them."""
    N, H, L, D = (2200, 32, 512, 64) if layout == "NHLD" else (2, 32, 550_000, 64)
    shape = (N, H, L, D) if layout == "NHLD" else (N, L, H, D)
    q = torch.randn(shape, device="cuda", dtype=BF16)
    q = q if layout == "NHLD" else q.transpose(1, 2)
    assert q.numel() > 2**31
    keys = torch.randn(2, N, H, 16, D, device="cuda", dtype=BF16)
    out = attention_kernel(q, None, None, keys[0], keys[1], None, None, 0.125)
    tail = q[-1:, -1:, -40:].double()
    expected = attention_reference(
        tail, None, None, keys[0, -1:, -1:].double(), keys[1, -1:, -1:].double(), None, None, 0.125
    )
    assert_close("out", out[-1:, -1:, -40:], expected)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_the_pi05_expert_agrees_with_the_reference(dtype: torch.dtype) -> None:
    from soma_lightning.models.pi05.config import PI05Config
    from soma_lightning.models.pi05.expert import ActionExpert
    from soma_lightning.models.pi05.prefix import PrefixCache

    torch.manual_seed(0)
    config = PI05Config.tiny()
    expert = ActionExpert(config).cuda().to(dtype)
    for p in expert.parameters():
        torch.nn.init.normal_(p, std=0.1)
    stream, P, B = config.expert, 70, 3
    shape = (B, stream.num_kv_heads, P, stream.head_dim)
    keys, values = ([torch.randn(shape, device="cuda", dtype=dtype) for _ in range(stream.depth)] for _ in range(2))
    mask = torch.rand(B, P, device="cuda") < 0.6
    prefix = PrefixCache(keys=keys, values=values, mask=mask, lengths=mask.sum(1))
    x_t = torch.randn(B, 10, config.max_action_dim, device="cuda")
    time = torch.rand(B, device="cuda")

    def run(implementation: Any) -> list[Tensor]:
        with attention_implementation(implementation):
            velocity = expert(prefix, x_t, time)
        return [velocity, *torch.autograd.grad(velocity.square().sum(), list(expert.parameters()))]

    bound = 1e-5 if dtype == torch.float32 else 3e-2
    for ours, reference in zip(run("kernel"), run("reference"), strict=True):
        error = (ours - reference).float().square().mean().sqrt() / (reference.float().square().mean().sqrt() + 1e-12)
        assert error < bound


def test_the_report_names_the_kernel() -> None:
    assert attention_path("cuda").startswith("kernel (Triton ")
