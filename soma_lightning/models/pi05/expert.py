"""What turns noisy actions into a velocity? The action expert: a Gemma stream whose norms are steered by flow time.

Every layer attends to its own action tokens and to the keys and values that the prefix cached, in one softmax. The
prefix never sees the actions, so T draws of (noise, time) share one prefix.

Numerics: adaptive norms, time embedding and action projections run in fp32 whatever the matrix products use; angles
of the time embedding in float64 (the largest is 2 pi / 0.004 = 1571 rad).

Shape letters: B prefix rows, N = B * T action rows, H horizon, A action width, W width, D head size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soma_lightning.attention import ContextKV, attention, key_list
from soma_lightning.models.flow import time_embedding
from soma_lightning.models.pi05.config import PI05Config, StreamConfig
from soma_lightning.models.pi05.rotary import RotaryTable, rotary_table, rotate

if TYPE_CHECKING:
    from soma_lightning.models.pi05.prefix import PrefixCache

RMS_EPS = 1e-6


class AdaptiveRMSNorm(nn.Module):
    """RMSNorm whose scale, shift and residual gate come from the condition (adaRMS of pi0.5; no weight of its own)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, 3 * width)

    def forward(self, x: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
        """x [N, H, W], condition [N, W] -> (normed [N, H, W], gate [N, 1, W]), both in x's dtype.

        normed = x / rms(x) * (1 + scale) + shift, computed in fp32. The caller adds x + y * gate.
        """
        with torch.autocast(x.device.type, enabled=False):
            modulation = self.dense(condition.to(self.dense.weight.dtype)).float()
            scale, shift, gate = modulation[:, None].chunk(3, dim=-1)
            normed = F.rms_norm(x.float(), x.shape[-1:], eps=RMS_EPS)
            return torch.addcmul(shift, normed, 1.0 + scale).to(x.dtype), gate.to(x.dtype)


class ExpertAttention(nn.Module):
    """Grouped-query attention over the action tokens and the cached prefix; no bias anywhere."""

    def __init__(self, stream: StreamConfig) -> None:
        super().__init__()
        self.head_dim = stream.head_dim
        self.q_proj = nn.Linear(stream.width, stream.num_heads * stream.head_dim, bias=False)
        self.k_proj = nn.Linear(stream.width, stream.num_kv_heads * stream.head_dim, bias=False)
        self.v_proj = nn.Linear(stream.width, stream.num_kv_heads * stream.head_dim, bias=False)
        self.o_proj = nn.Linear(stream.num_heads * stream.head_dim, stream.width, bias=False)

    def forward(self, x: Tensor, rotary: RotaryTable, context: ContextKV) -> Tensor:
        """x [N, H, W] -> [N, H, W]."""
        q_NHGD, k_NHGD, v_NHGD = (
            proj(x).unflatten(-1, (-1, self.head_dim)) for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q_NHGD, rotary).transpose(1, 2), rotate(k_NHGD, rotary).transpose(1, 2)
        out = attention(q, k, v_NHGD.transpose(1, 2), context=context)
        merged: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return merged


class ExpertMLP(nn.Module):
    """Gated MLP with gelu-tanh."""

    def __init__(self, stream: StreamConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(stream.width, stream.mlp_width, bias=False)
        self.up_proj = nn.Linear(stream.width, stream.mlp_width, bias=False)
        self.down_proj = nn.Linear(stream.mlp_width, stream.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x [N, H, W] -> [N, H, W]."""
        out: Tensor = self.down_proj(F.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x))
        return out


class ExpertLayer(nn.Module):
    """Attention and MLP, each between an adaptive norm and a gated residual."""

    def __init__(self, stream: StreamConfig) -> None:
        super().__init__()
        self.input_layernorm = AdaptiveRMSNorm(stream.width)
        self.self_attn = ExpertAttention(stream)
        self.post_attention_layernorm = AdaptiveRMSNorm(stream.width)
        self.mlp = ExpertMLP(stream)

    def forward(self, x: Tensor, condition: Tensor, rotary: RotaryTable, context: ContextKV) -> Tensor:
        """x [N, H, W], condition [N, W] -> [N, H, W]."""
        n, gate = self.input_layernorm(x, condition)
        x = torch.addcmul(x, self.self_attn(n, rotary, context), gate)
        n, gate = self.post_attention_layernorm(x, condition)
        return torch.addcmul(x, self.mlp(n), gate)


class ActionExpert(nn.Module):
    """The trainable part of pi0.5: action and time projections around a stack of adaptive layers."""

    def __init__(self, config: PI05Config) -> None:
        super().__init__()
        stream = config.expert
        self.head_dim = stream.head_dim
        self.min_period, self.max_period = config.min_period, config.max_period
        self.action_in_proj = nn.Linear(config.max_action_dim, stream.width)
        self.time_mlp_in = nn.Linear(stream.width, stream.width)
        self.time_mlp_out = nn.Linear(stream.width, stream.width)
        self.layers = nn.ModuleList(ExpertLayer(stream) for _ in range(stream.depth))
        self.norm = AdaptiveRMSNorm(stream.width)
        self.action_out_proj = nn.Linear(stream.width, config.max_action_dim)

    def forward(self, prefix: PrefixCache, x_t: Tensor, time: Tensor) -> Tensor:
        """See `PI05Model.velocity`."""
        dtype = self.layers[0].self_attn.q_proj.weight.dtype  # type: ignore[union-attr]
        with torch.autocast(x_t.device.type, enabled=False):
            condition = self._condition(time)
            x = self.action_in_proj(x_t.to(self.action_in_proj.weight.dtype)).to(dtype)
        rotary = self._rotary(prefix, x)
        readable = key_list(prefix.mask)
        for layer, k, v in zip(self.layers, prefix.keys, prefix.values, strict=True):
            x = layer(x, condition, rotary, ContextKV(k, v, prefix.mask, readable))
        x, _ = self.norm(x, condition)  # the final gate has no residual to act on
        with torch.autocast(x.device.type, enabled=False):
            velocity: Tensor = self.action_out_proj(x.to(self.action_out_proj.weight.dtype))
            return velocity.float()

    def _condition(self, time: Tensor) -> Tensor:
        """What the adaptive norms are steered by: time [N] -> [N, W]."""
        width = self.time_mlp_in.in_features
        embedded = time_embedding(time, width, min_period=self.min_period, max_period=self.max_period)
        hidden = F.silu(self.time_mlp_in(embedded.to(self.time_mlp_in.weight.dtype)))
        return F.silu(self.time_mlp_out(hidden))

    def _rotary(self, prefix: PrefixCache, x: Tensor) -> RotaryTable:
        """Positions of the action tokens follow the readable prefix tokens; masked ones took no position."""
        N, H, _ = x.shape
        steps = torch.arange(H, device=x.device)
        if prefix.mask is None:  # every row is full, so all rows share one table
            return rotary_table(prefix.keys[0].shape[2] + steps[None], self.head_dim, x.dtype)
        starts = prefix.lengths.repeat_interleave(N // prefix.lengths.shape[0])
        return rotary_table(starts[:, None] + steps, self.head_dim, x.dtype)
