"""Which attention do the models call, and which implementation runs it?

One operator: queries attend, in one softmax, to their own keys and to a context that several query rows share. This
module is the only place that picks the implementation. Today that is the plain-torch reference on every device.

Shape letters: N query rows, Bc context rows, T = N // Bc query rows a context row, Hq query heads, Hkv key/value heads,
Lq queries, Lk own keys, Lc context keys, D head size.

`from soma_lightning import attention` gives this module, which is callable as the operator. Code that is compiled by
torch.compile imports the function itself: `from soma_lightning.attention import attention`.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from soma_kernels.attention.reference import attention_reference

__all__ = ["ContextKV", "attention", "attention_path"]

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class ContextKV(NamedTuple):
    """Keys and values that T query rows share, for example the frozen prefix of a VLA.

    k, v: [Bc, Hkv, Lc, D]. mask: bool [Bc, Lc], True = readable, or None when every key is readable. Masked entries of
    k and v may hold anything, NaN included.
    """

    k: Tensor
    v: Tensor
    mask: Tensor | None = None


def attention_path() -> str:
    """The implementation that `attention` runs, in words for the run report."""
    return "reference (torch)"


def attention(
    q: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    context: ContextKV | None = None,
    key_mask: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """softmax([q k^T, q ck^T] * scale) [v; cv], one softmax over the own and the context segment; not causal.

    q: [N, Hq, Lq, D] in float64, float32, bfloat16 or float16, any strides.
    k, v: own keys and values [N, Hkv, Lk, D], or None. Hq must be a multiple of Hkv.
    context: keys and values [Bc, Hkv, Lc, D] with N = Bc * T; query row n reads context row n // T.
    key_mask: bool [N, Lk], True = readable, masks the own segment.
    scale: factor of the scores; None means D ** -0.5.

    Returns [N, Hq, Lq, D] in q's dtype. A query row that can read nothing returns 0 and sends zero gradients. Softmax
    and sums run in float32 at least. The backward does work only for inputs that require grad; gradients of the
    context are summed over the T rows that share it; it cannot be differentiated twice. Under autocast the inputs are
    cast to the autocast dtype, as torch's scaled_dot_product_attention does.

    Raises ValueError when shapes, dtypes or devices do not fit together, TypeError for DTensors, for a context that is
    no ContextKV and for a tensor as scale.
    """
    tensors: dict[str, Tensor | None] = {"q": q, "k": k, "v": v}
    context_mask: Tensor | None = None
    if isinstance(scale, Tensor):
        raise TypeError("scale is a tensor, and no gradient flows to the scale; pass a number")
    if context is not None:
        if not isinstance(context, ContextKV):
            raise TypeError(f"context must be ContextKV(k, v, mask), got {type(context).__name__}")
        tensors |= {"context.k": context.k, "context.v": context.v}
        context_mask = context.mask
    _check_presence(tensors, context, key_mask)
    if torch.is_autocast_enabled(q.device.type):
        tensors = {name: _autocast(x) for name, x in tensors.items()}
    _check_tensors({name: x for name, x in tensors.items() if x is not None})
    _check_shapes(tensors)
    own_k, context_k = tensors["k"], tensors.get("context.k")
    _check_mask("key_mask", key_mask, own_k, q)
    _check_mask("context.mask", context_mask, context_k, q)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    queries = tensors["q"]
    assert queries is not None
    return attention_reference(
        queries, own_k, tensors["v"], context_k, tensors.get("context.v"), key_mask, context_mask, scale
    )


def _autocast(x: Tensor | None) -> Tensor | None:
    if x is None or not x.is_floating_point() or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))


def _check_presence(tensors: dict[str, Tensor | None], context: ContextKV | None, key_mask: Tensor | None) -> None:
    if (tensors["k"] is None) != (tensors["v"] is None):
        given, missing = ("k", "v") if tensors["v"] is None else ("v", "k")
        raise ValueError(f"attention got {given} without {missing}; pass both, or neither with a context")
    if context is None and tensors["k"] is None:
        raise ValueError("attention got no keys; pass k and v, or context=ContextKV(k, v, mask)")
    absent = [name for name in ("context.k", "context.v") if name in tensors and tensors[name] is None]
    if absent:
        raise ValueError(f"the context has no {' and no '.join(absent)}; pass ContextKV(k, v, mask), or context=None")
    if key_mask is not None and tensors["k"] is None:
        raise ValueError("key_mask masks the own keys, but k is None; the context's mask goes into ContextKV(mask=...)")


def _check_tensors(tensors: dict[str, Tensor]) -> None:
    distributed = sys.modules.get("torch.distributed.tensor")  # no DTensor can exist before this module is loaded
    q = tensors["q"]
    for name, x in tensors.items():
        if distributed is not None and isinstance(x, distributed.DTensor):
            raise TypeError(
                f"{name} is a DTensor; attention works on one rank's heads, so pass local tensors: {name}.to_local()"
            )
        if x.dim() != 4:
            raise ValueError(f"{name} must be [rows, heads, length, head size], got shape {tuple(x.shape)}")
        if x.dtype != q.dtype:
            raise ValueError(f"{name} has dtype {x.dtype}, but q has {q.dtype}; cast one of them")
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device}, but q is on {q.device}")
    if q.dtype not in _DTYPES:
        raise ValueError(f"q must be one of {', '.join(map(str, _DTYPES))}, got {q.dtype}")
    if q.shape[-1] == 0:
        raise ValueError(f"q has head size 0, shape {tuple(q.shape)}")


def _check_shapes(tensors: dict[str, Tensor | None]) -> None:
    q, k, ck = tensors["q"], tensors["k"], tensors.get("context.k")
    assert q is not None
    N, Hq, _, D = q.shape
    heads: dict[str, int] = {}
    for name, keys, values in (("", k, tensors["v"]), ("context.", ck, tensors.get("context.v"))):
        if keys is None or values is None:
            continue
        if keys.shape != values.shape:
            raise ValueError(
                f"{name}k and {name}v must have one shape, got {tuple(keys.shape)} and {tuple(values.shape)}"
            )
        if keys.shape[-1] != D:
            raise ValueError(f"{name}k has head size {keys.shape[-1]}, but q has {D}")
        Hkv = keys.shape[1]
        if Hkv == 0 or Hq % Hkv:
            raise ValueError(f"q's {Hq} heads are no multiple of the {Hkv} heads of {name}k")
        heads[f"{name}k"] = Hkv
    if len(set(heads.values())) > 1:
        raise ValueError(f"both segments must have the same number of heads, got {heads}")
    if k is not None and k.shape[0] != N:
        raise ValueError(f"k has {k.shape[0]} rows, but q has {N}; keys that several rows share go into context")
    if ck is not None and (N % ck.shape[0] if ck.shape[0] else N):
        raise ValueError(
            f"q's {N} rows are no multiple of the context's {ck.shape[0]}; query row n reads context row n // T"
        )


def _check_mask(name: str, mask: Tensor | None, keys: Tensor | None, q: Tensor) -> None:
    if mask is None:
        return
    assert keys is not None
    if mask.dtype != torch.bool:
        raise ValueError(f"{name} must be bool (True = readable), got {mask.dtype}")
    expected = (keys.shape[0], keys.shape[2])
    if tuple(mask.shape) != expected:
        raise ValueError(f"{name} must be [rows, keys] = {expected}, got {tuple(mask.shape)}")
    if mask.device != q.device:
        raise ValueError(f"{name} is on {mask.device}, but q is on {q.device}")


class _AttentionModule(ModuleType):
    """The module as an operator: the name `soma_lightning.attention` is both the module and the function."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor | None = None,
        v: Tensor | None = None,
        *,
        context: ContextKV | None = None,
        key_mask: Tensor | None = None,
        scale: float | None = None,
    ) -> Tensor:
        return attention(q, k, v, context=context, key_mask=key_mask, scale=scale)


sys.modules[__name__].__class__ = _AttentionModule
