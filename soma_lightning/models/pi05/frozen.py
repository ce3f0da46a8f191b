"""How is a frozen prefix computed fast? Vision and language layers with few passes over memory, no gradients.

The same arithmetic as the stock modules, from their own parameters; sums of residuals, norms, gates and rotations are
fused (soma_lightning/frozen_layers.py), and q, k, v and gate, up are one product each. Rounding differs: what is fused
is rounded once, at its end (docs/numerics.md).

Shape letters: B observations, P tokens, M = B * P rows, W width, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from soma_lightning.attention import attention
from soma_lightning.frozen_layers import Fp8Linear, add_norm, gelu, has_kernels, product, quantize_rows, split_heads
from soma_lightning.models.pi05.rotary import rotary_table


def why_stock(layers: nn.ModuleList, device: torch.device) -> str | None:
    """Why these frozen layers run as stock modules, as a phrase; None when they run fused."""
    for layer in layers:
        if isinstance(layer, FSDPModule):
            return "they are sharded"
        if layer._forward_hooks or layer._forward_pre_hooks:
            return "they have hooks"
    kinds = {type(m) for layer in layers for m in layer.modules() if hasattr(m, "in_features")}
    if kinds == {Fp8Linear}:
        return None
    if not has_kernels(device):
        return f"there are no kernels for {device.type}"
    if kinds != {nn.Linear}:
        return f"their products are {', '.join(sorted(kind.__name__ for kind in kinds))}"
    if any(
        p.dtype not in (torch.bfloat16, torch.float16) for layer in layers for p in layer.parameters() if p.dim() > 1
    ):
        return "their products are in fp32"
    return None


def run_language(layers: Sequence[Any], x: Tensor, positions: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Keys (after RoPE) and values of all layers, [2 * layers, B, P, Hkv * D], keys before values of each layer.

    Beside them the last layer's input [B, P, W]. x: [B, P, W]. positions: int64 [B or 1, P]. mask: bool [B, P],
    True = readable; None when all are. Of the last layer only keys and values are computed.
    """
    B, P, W = x.shape
    first = layers[0]
    fp8 = isinstance(first.self_attn.q_proj, Fp8Linear)
    cos, sin = (t[:, :, 0].contiguous() for t in rotary_table(positions, first.head_dim, torch.float32))
    kv_width = first.self_attn.k_proj.out_features
    streams = torch.empty(2 * len(layers), B * P, kv_width, dtype=x.dtype, device=x.device)
    rows, delta = x.reshape(B * P, W).contiguous(), None
    for i, layer in enumerate(layers):
        rows, n = _norm(layer.input_layernorm, rows, delta, fp8)
        attn = layer.self_attn
        qkv = product(n, (attn.q_proj, attn.k_proj, attn.v_proj))
        q, k, v = torch.split(qkv, [attn.q_proj.out_features, kv_width, kv_width], dim=1)
        q = split_heads(q, k, v, cos, sin, streams[2 * i], streams[2 * i + 1])
        if i == len(layers) - 1:
            break
        out = _attended(q, streams[2 * i], streams[2 * i + 1], (B, P), layer.head_dim, mask)
        rows, n = _norm(layer.post_attention_layernorm, rows, _projected(out, attn.o_proj), fp8)
        gate_up = product(n, (layer.mlp.gate_proj, layer.mlp.up_proj))
        gate, up = gate_up.chunk(2, dim=1)
        delta = product(gelu(gate, up, quantize=fp8), (layer.mlp.down_proj,))
    return streams.view(-1, B, P, kv_width), rows.view(B, P, W)


def run_vision(layers: Sequence[Any], x: Tensor) -> Tensor:
    """SigLIP's encoder layers: [N, P, W] -> [N, P, W]."""
    N, P, W = x.shape
    fp8 = isinstance(layers[0].self_attn.q_proj, Fp8Linear)
    rows, delta = x.reshape(N * P, W).contiguous(), None
    for layer in layers:
        rows, n = _norm(layer.layer_norm1, rows, delta, fp8)
        attn = layer.self_attn
        qkv = product(n, (attn.q_proj, attn.k_proj, attn.v_proj)).view(N, P, 3, -1, attn.head_dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, scale=attn.scale).transpose(1, 2).reshape(N * P, W)
        rows, n = _norm(layer.layer_norm2, rows, _projected(out, attn.out_proj), fp8)
        h = product(n, (layer.mlp.fc1,))
        delta = product(gelu(h, None, quantize=fp8), (layer.mlp.fc2,))
    assert delta is not None
    return (rows + delta).view(N, P, W)


def _norm(norm: Any, rows: Tensor, delta: Tensor | None, fp8: bool) -> Any:
    return add_norm(rows, delta, norm.weight, getattr(norm, "bias", None), norm.eps, quantize=fp8)


def _projected(rows: Tensor, linear: Any) -> Tensor:
    return product(quantize_rows(rows) if isinstance(linear, Fp8Linear) else rows, (linear,))


def _attended(q: Tensor, k: Tensor, v: Tensor, shape: tuple[int, int], head_dim: int, mask: Tensor | None) -> Tensor:
    """[M, Hq * D]: every token reads all readable tokens of its observation."""
    q, k, v = (x.view(*shape, -1, head_dim).transpose(1, 2) for x in (q, k, v))
    return attention(q, k, v, key_mask=mask).transpose(1, 2).reshape(shape[0] * shape[1], -1)
