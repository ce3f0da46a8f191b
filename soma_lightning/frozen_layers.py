"""How does a frozen network run forward? Norms, gates, rotations and products without gradients, in bf16 or in fp8.

Between two matrix products of a frozen layer everything is one kernel that reads its inputs once. This module is the
only place that picks Triton kernels (on GPUs) or plain torch. With fp8, activations are quantized row by row in the
kernel that makes them, and weights once, output row by output row (torch's scaled matrix products).

Shape letters: M rows (tokens), K and N widths of a product, F width of the MLP, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soma_kernels.frozen.reference import (
    FP8,
    Fp8Rows,
    add_norm_reference,
    gelu_reference,
    quantize_rows_reference,
    rotate_reference,
)
from soma_kernels.runtime import device_facts

__all__ = [
    "Fp8Embedding",
    "Fp8Linear",
    "Fp8Rows",
    "Rows",
    "add_norm",
    "compute_dtype",
    "gelu",
    "has_kernels",
    "product",
    "quantize_linears",
    "quantize_rows",
    "split_heads",
    "stack_rows",
    "why_no_fp8",
]

#: Inputs of a product: [M, K] in the network's dtype, or in fp8 with a scale a row.
Rows = Tensor | Fp8Rows


def has_kernels(device: torch.device) -> bool:
    """Whether Triton kernels run on this device; the CPU's interpreter is for tests, which call kernels themselves."""
    return device.type == "cuda" and device_facts(device).triton


def add_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, *, quantize: bool
) -> tuple[Tensor, Rows]:
    """(x + delta, its norm) of contiguous rows [M, W]: LayerNorm with bias, without it Gemma's RMSNorm."""
    if has_kernels(x.device):
        from soma_kernels.frozen.norm import add_norm as kernel  # needs Triton

        return kernel(x, delta, weight, bias, eps, quantize=quantize)
    total, normed = add_norm_reference(x, delta, weight, bias, eps)
    return total, quantize_rows_reference(normed) if quantize else normed.to(x.dtype)


def gelu(gate: Tensor, up: Tensor | None, *, quantize: bool) -> Rows:
    """gelu-tanh of `gate` [M, F], times `up` [M, F] if there is one."""
    if has_kernels(gate.device):
        from soma_kernels.frozen.activation import gelu as kernel  # needs Triton

        return kernel(gate, up, quantize=quantize)
    out = gelu_reference(gate, up)
    return quantize_rows_reference(out) if quantize else out.to(gate.dtype)


def quantize_rows(x: Tensor) -> Fp8Rows:
    """x [M, K] as fp8 rows."""
    if has_kernels(x.device):
        from soma_kernels.frozen.activation import quantize_rows as kernel  # needs Triton

        return kernel(x)
    return quantize_rows_reference(x)


def split_heads(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Rotates q [M, Hq * D] and k [M, Hkv * D] by angles [R, P, D / 2] (float32, R = B or 1; M = B * P).

    Returns the queries; rotated keys and the values are written to `keys` and `values` [M, Hkv * D], contiguous.
    """
    if has_kernels(q.device):
        from soma_kernels.frozen.rotary import split_heads as kernel  # needs Triton

        return kernel(q, k, v, cos, sin, keys, values)
    keys.copy_(rotate_reference(k, cos, sin))
    values.copy_(v)
    return rotate_reference(q, cos, sin)


class Fp8Linear(nn.Module):
    """A frozen linear layer whose weight [N, K] is float8_e4m3fn, with a float32 scale an output row [N].

    Takes float [..., K] or `Fp8Rows` [M, K]; returns bfloat16. Half the memory of a bf16 layer.
    """

    scale: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        weight = quantize_rows_reference(linear.weight.detach())
        self.weight = nn.Parameter(weight.values, requires_grad=False)
        self.register_buffer("scale", weight.scales)
        bias = None if linear.bias is None else linear.bias.detach().to(torch.bfloat16)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """float [..., K] -> bfloat16 [..., N]."""
        rows = quantize_rows(x.reshape(-1, self.in_features))
        return _scaled_product(rows, self.weight, self.scale, self.bias).view(*x.shape[:-1], -1)


class Fp8Embedding(nn.Module):
    """A frozen embedding [V, W] in float8_e4m3fn with a float32 scale a row; returns bfloat16, times `embed_scale`."""

    scale: Tensor

    def __init__(self, embedding: nn.Embedding, embed_scale: float) -> None:
        super().__init__()
        weight = quantize_rows_reference(embedding.weight.detach())
        self.weight = nn.Parameter(weight.values, requires_grad=False)
        self.register_buffer("scale", weight.scales)
        self.scalar_embed_scale = embed_scale

    def forward(self, tokens: Tensor) -> Tensor:
        """int64 [...] -> bfloat16 [..., W]."""
        values = self.weight.view(torch.uint8)[tokens].view(self.weight.dtype).float()
        return (values * (self.scale[tokens, None] * self.scalar_embed_scale)).to(torch.bfloat16)


def compute_dtype(linear: nn.Module) -> torch.dtype:
    """In which dtype a layer takes and gives activations: its weight's, or bfloat16 where that is fp8."""
    dtype = linear.weight.dtype
    assert isinstance(dtype, torch.dtype)
    return torch.bfloat16 if dtype == FP8 else dtype


def quantize_linears(module: nn.Module) -> None:
    """Replaces every `nn.Linear` below `module` by its `Fp8Linear`, one after the other."""
    for name, child in module.named_children():
        if type(child) is nn.Linear:
            setattr(module, name, Fp8Linear(child))
        else:
            quantize_linears(child)


def why_no_fp8(device: torch.device) -> str | None:
    """Why scaled fp8 products cannot run on this device, as a phrase; plain torch serves for the CPU."""
    if device.type == "cpu" or (device.type == "cuda" and device_facts(device).capability >= (8, 9)):
        return None
    return f"{device} has no fp8 matrix products (CUDA devices of compute capability 8.9 and later do)"


def product(rows: Rows, linears: Sequence[Any]) -> Tensor:
    """rows [M, K] times the weights of frozen layers that share this input, one matrix product: [M, N1 + N2 + ...].

    linears: `nn.Linear` for a Tensor, `Fp8Linear` for `Fp8Rows`, all with a bias or none.
    """
    weight = stack_rows([linear.weight for linear in linears])
    biases = [linear.bias for linear in linears]
    bias = None if biases[0] is None else stack_rows(biases)
    if isinstance(rows, Fp8Rows):
        scale = stack_rows([linear.scale for linear in linears])
        return _scaled_product(rows, weight, scale, bias)
    return F.linear(rows, weight, bias)


def stack_rows(tensors: Sequence[Tensor]) -> Tensor:
    """The tensors, all contiguous, as one whose rows follow each other; where they lie apart, they are moved together.

    They keep their values and become views of the result, which costs no memory; moving a module apart and together
    again is found out by the next call.
    """
    first = tensors[0]
    if len(tensors) == 1:
        return first.detach()
    end = first.data_ptr()
    for tensor in tensors:
        if tensor.data_ptr() != end or tensor.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            break
        end += tensor.nbytes
    else:
        shape = (sum(len(tensor) for tensor in tensors), *first.shape[1:])
        return first.detach().as_strided(shape, first.stride())
    with torch.no_grad():
        stacked = torch.cat([tensor.detach() for tensor in tensors])
        for tensor, part in zip(tensors, torch.split(stacked, [len(tensor) for tensor in tensors]), strict=True):
            tensor.data = part
    return stacked


def _scaled_product(rows: Fp8Rows, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """bfloat16 [M, N]."""
    if rows.values.device.type == "cuda":
        return torch._scaled_mm(
            rows.values,
            weight.t(),
            scale_a=rows.scales[:, None],
            scale_b=scale[None],
            bias=bias,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )
    # Products of fp8 numbers are exact in fp32; the same sums, elsewhere.
    out = (rows.values.float() @ weight.float().t()) * rows.scales[:, None] * scale
    return (out if bias is None else out + bias.float()).to(torch.bfloat16)
