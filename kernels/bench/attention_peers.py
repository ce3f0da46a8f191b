"""Who computes attention: ours, and everything torch offers, each behind one call of the same inputs?

Torch's attention takes one segment of keys. The peers get the context and the own keys concatenated, as a user must do
it when the own keys train, and either repeat the context for each query row ("repeat", what public ports do) or fold
query rows and heads that share keys into the query axis ("fold", what a careful user can do by hand).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.attention_cases import AttentionCase
from soma_kernels.attention.call import KeyList
from soma_lightning.attention import ContextKV, attention, key_list

Call = Callable[[dict[str, Tensor]], Tensor]

_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


@dataclass(frozen=True)
class AttentionPeer:
    """One contender. kind: "ours", "flex", "eager" or a back end of SDPA. folds: by hand, else keys are repeated."""

    kind: str
    folds: bool = False

    @property
    def name(self) -> str:
        if self.kind == "ours":
            return "ours"
        kind = f"sdpa {self.kind}" if self.kind in _BACKENDS else self.kind
        return f"{kind} {'fold' if self.folds else 'repeat'}"

    def why_absent(self, case: AttentionCase, device: torch.device) -> str | None:
        """Why this peer is not measured on `case`, as a phrase for its cell; None if it is."""
        if device.type != "cuda" and self.kind not in ("ours", "math", "eager"):
            return "needs a GPU"
        if self.folds and case.T > 1 and case.Lk:
            return "own keys forbid folding query rows"
        if self.folds and case.T == 1 and case.Hq == case.Hkv:
            return "nothing to fold"
        return None

    def unlike_ours(self, case: AttentionCase) -> str | None:
        """What it computes differently, as a phrase for a footnote; None when nothing."""
        return "takes no mask: wrong result" if self.kind == "flash" and case.masked else None

    def build(self, case: AttentionCase, mask: Tensor | None) -> Call:
        """The call; `mask` [Bc, Lc] of the context."""
        if self.kind == "ours":
            keys: KeyList | None = key_list(mask)  # as a model does: once for all its layers
            return lambda x: _ours(x, mask, keys)
        joined = _joined_mask(case, None if self.kind == "flash" else mask, self.folds)
        inner = self._inner(joined)
        return lambda x: _torch(case, x, self.folds, inner)

    def _inner(self, mask: Tensor | None) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        if self.kind == "eager":
            return lambda q, k, v: _eager(q, k, v, mask)
        if self.kind == "flex":
            return _flex(mask)
        backend = _BACKENDS[self.kind]

        def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                grouped = q.shape[1] != k.shape[1]
                if grouped and backend is SDPBackend.EFFICIENT_ATTENTION:  # it has no grouped heads
                    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
                    grouped = False
                return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)

        return sdpa


def _ours(x: dict[str, Tensor], mask: Tensor | None, keys: KeyList | None) -> Tensor:
    context = ContextKV(x["ck"], x["cv"], mask, keys) if "ck" in x else None
    return attention(x["q"], x.get("k"), x.get("v"), context=context)


def _joined_mask(case: AttentionCase, mask: Tensor | None, folds: bool) -> Tensor | None:
    """bool [rows, 1, 1, Lc + Lk] for a call of torch's."""
    if mask is None:
        return None
    rows = mask if folds else mask.repeat_interleave(case.T, 0)
    return F.pad(rows, (0, case.Lk), value=True)[:, None, None]


def _torch(
    case: AttentionCase, x: dict[str, Tensor], folds: bool, inner: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> Tensor:
    segments = [(x[k], x[v]) for k, v in (("ck", "cv"), ("k", "v")) if k in x]
    if not folds and case.T > 1 and "ck" in x:
        segments[0] = tuple(t.repeat_interleave(case.T, 0) for t in segments[0])  # type: ignore[assignment]
    k, v = segments[0] if len(segments) == 1 else (torch.cat(pair, 2) for pair in zip(*segments, strict=True))
    if not folds:
        return inner(x["q"], k, v)
    return _folded(case, x["q"], k, v, inner)


def _folded(
    case: AttentionCase, q: Tensor, k: Tensor, v: Tensor, inner: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> Tensor:
    """Query rows and heads that share keys become queries, in memory order where that makes the fold a view."""
    B, T, H, G, Lq, D = case.Bc, case.T, case.Hkv, case.Hq // case.Hkv, case.Lq, case.D
    split = q.reshape(B, T, H, G, Lq, D)
    order = (0, 2, 1, 4, 3, 5) if q.stride(1) < q.stride(2) else (0, 2, 1, 3, 4, 5)
    moved = split.permute(order)
    out = inner(moved.reshape(B, H, T * G * Lq, D), k, v).reshape(moved.shape)
    back = [order.index(dim) for dim in range(6)]
    return out.permute(back).reshape(q.shape)


def _eager(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """As the public ports write it: scores stored, softmax in float32."""
    if q.shape[1] != k.shape[1]:
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = (q @ k.mT).float() * q.shape[-1] ** -0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, torch.finfo(torch.float32).min)
    out: Tensor = scores.softmax(-1).to(q.dtype) @ v
    return out


def _flex(mask: Tensor | None) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

    block: BlockMask | None = None
    torch._dynamo.reset()  # past its limit of recompilations it would run uncompiled
    compiled = torch.compile(flex_attention, dynamic=False)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        nonlocal block
        if mask is not None and block is None:
            rows = mask[:, 0, 0]
            block = create_block_mask(lambda b, h, i, j: rows[b, j], q.shape[0], None, q.shape[2], k.shape[2], q.device)
        out: Tensor = compiled(q, k, v, block_mask=block, enable_gqa=q.shape[1] != k.shape[1])
        return out

    return call


OURS_ATTENTION = AttentionPeer("ours")
ATTENTION_PEERS = (
    OURS_ATTENTION,
    *(AttentionPeer(kind, folds) for folds in (True, False) for kind in (*_BACKENDS, "flex", "eager")),
)
