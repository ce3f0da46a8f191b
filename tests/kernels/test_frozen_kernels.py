"""The kernels of a frozen forward pass against float64, in odd shapes, with memory that shows what was not written."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from soma_kernels.frozen.activation import gelu, quantize_rows
from soma_kernels.frozen.norm import add_norm
from soma_kernels.frozen.reference import (
    FP8_MAX,
    MIN_SCALE,
    Fp8Rows,
    dequantize_rows,
    quantize_rows_reference,
)
from soma_kernels.frozen.rotary import split_heads
from soma_kernels.testing import assert_close, nan_filled_empty

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
#: Rounding to 3 bits of mantissa: half a step of the largest number of a row, whatever the number.
FP8_STEP = 2.0**-4


def assert_quantized(name: str, rows: Fp8Rows, reference: torch.Tensor) -> None:
    """Every number within half a step of its own size, or of the smallest step of its row; each row fills its range."""
    largest = reference.abs().amax(1, keepdim=True)
    scale = largest.clamp(min=MIN_SCALE * FP8_MAX) / FP8_MAX
    error = (dequantize_rows(rows).double() - reference).abs()
    bound = reference.abs() * FP8_STEP * 1.01 + scale * 2.0**-9
    assert (error <= bound).all(), f"{name}: {float((error / bound).max()):.3f} times the bound"
    assert_close(f"scales of {name}", rows.scales, scale[:, 0].double(), slack=8e3)  # of a largest number in bf16
    full = rows.values.float().abs().amax(1)
    assert full[largest[:, 0] > 0].eq(FP8_MAX).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(3, 96), (1, 1152), (5, 2048), (2, 33)])
@pytest.mark.parametrize("with_delta", [True, False])
@pytest.mark.parametrize("with_bias", [True, False])
def test_add_norm_is_the_norm_of_the_sum(device, dtype, rows, width, with_delta, with_bias):
    x = torch.randn(rows, width, device=device).to(dtype)
    delta = torch.randn(rows, width, device=device).to(dtype) if with_delta else None
    weight, bias = torch.randn(width, device=device), torch.randn(width, device=device) if with_bias else None
    with nan_filled_empty():
        total, normed = add_norm(x, delta, weight, bias, 1e-6, quantize=False)
        _, quantized = add_norm(x, delta, weight, bias, 1e-6, quantize=True)
    wanted_total = x if delta is None else x + delta
    assert torch.equal(total, wanted_total)
    wide = wanted_total.double()
    if bias is not None:
        wanted = F.layer_norm(wide, (width,), weight.double(), bias.double(), 1e-6)
    else:
        wanted = wide * (wide.square().mean(1, keepdim=True) + 1e-6).rsqrt() * (1 + weight.double())
    assert_close("normed", normed, wanted)
    assert_quantized("fp8", quantized, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(3, 192), (1, 4304), (2, 5000), (2, 17)])
@pytest.mark.parametrize("gated", [True, False])
def test_gelu_of_a_gate(device, dtype, rows, width, gated):
    both = 3 * torch.randn(rows, 2 * width, device=device).to(dtype)
    gate, up = both[:, :width], both[:, width:] if gated else None
    with nan_filled_empty():
        out, quantized = gelu(gate, up, quantize=False), gelu(gate, up, quantize=True)
    wanted = F.gelu(gate.double(), approximate="tanh") * (1.0 if up is None else up.double())
    assert_close("gelu", out, wanted)
    assert_quantized("fp8", quantized, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
def test_quantized_rows_keep_zero_and_are_those_of_the_reference(device, dtype):
    x = torch.randn(4, 200, device=device).to(dtype)
    x[1] = 0
    x[2] *= 1e-3
    with nan_filled_empty():
        rows = quantize_rows(x[:, :160])
    assert_quantized("rows", rows, x[:, :160].double())
    reference = quantize_rows_reference(x[:, :160])
    assert torch.equal(rows.values.float(), reference.values.float())
    assert_close("scales", rows.scales, reference.scales.double())
    assert not dequantize_rows(rows)[1].any()


def test_a_row_with_nan_stays_nan(device):
    x = torch.randn(2, 64, device=device)
    x[0, 3] = torch.nan
    rows = dequantize_rows(quantize_rows(x))
    assert rows[0].isnan().any()
    assert rows[1].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("batch", "length", "heads", "size"), [(2, 5, (8, 1), 256), (1, 3, (6, 2), 24), (3, 2, (4, 4), 32)]
)
@pytest.mark.parametrize("one_table", [True, False])
def test_split_heads_rotates_queries_and_keys_and_moves_values(device, dtype, batch, length, heads, size, one_table):
    q_width, kv_width = heads[0] * size, heads[1] * size
    product = torch.randn(batch * length, q_width + 2 * kv_width, device=device).to(dtype)
    q, k, v = product.split([q_width, kv_width, kv_width], dim=1)
    angles = torch.rand(1 if one_table else batch, length, size // 2, device=device) * 6
    keys, values = (torch.full((batch * length, kv_width), torch.nan, device=device, dtype=dtype) for _ in range(2))
    with nan_filled_empty():
        queries = split_heads(q, k, v, angles.cos(), angles.sin(), keys, values)
    turn = torch.polar(torch.ones_like(angles, dtype=torch.float64), angles.double())[:, :, None]

    def rotated(x: torch.Tensor, count: int) -> torch.Tensor:
        low, high = x.double().view(batch, length, count, 2, -1).unbind(-2)
        z = torch.complex(low, high) * turn
        return torch.stack((z.real, z.imag), dim=-2).reshape(x.shape)

    assert_close("queries", queries, rotated(q, heads[0]))
    assert_close("keys", keys, rotated(k, heads[1]))
    assert torch.equal(values, v)
