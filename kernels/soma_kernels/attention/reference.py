"""What context attention computes, in plain torch: the ground truth of the kernels and the path of every CPU.

N query rows, Bc context rows, T = N // Bc query rows that share one context row, Hq query heads, Hkv key/value heads,
G = Hq // Hkv, Lq queries, Lk own keys, Lc context keys, L either of the two, D head size, R = G * Lq folded rows.

The heads of one group and the T rows of one context row are folded into the query axis, so that keys and values are
never repeated. The two segments are never joined: each has its own matrix products, and one running maximum and one
sum of exponentials make them a single softmax. Only the output and the log-sum-exp of each row are kept for the
backward, as in FlashAttention-2 (Dao, 2023, algorithms 1 and 2); the probabilities are computed again there.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

#: Said when a gradient of attention is differentiated.
ONCE = "attention is once_differentiable: its backward has no gradient of its own"


class _Rows(NamedTuple):
    """How queries are folded: [N, Hq, Lq, D] <-> [Bc, T, Hkv, R, D]."""

    Bc: int
    T: int
    Hkv: int
    G: int
    Lq: int
    heads_inside: bool  # memory order of q is [N, Lq, Hq, D], so folding (Lq, G) instead of (G, Lq) copies nothing

    def fold(self, x_NHLD: Tensor) -> Tensor:
        Bc, T, Hkv, G, Lq, heads_inside = self
        x = x_NHLD.reshape(Bc, T, Hkv, G, Lq, x_NHLD.shape[-1])
        return (x.transpose(3, 4) if heads_inside else x).reshape(Bc, T, Hkv, G * Lq, x.shape[-1])

    def unfold(self, x_BTHRD: Tensor) -> Tensor:
        """Inverse of `fold`; at most one copy happens between here and a caller who merges the heads."""
        Bc, T, Hkv, G, Lq, heads_inside = self
        D = x_BTHRD.shape[-1]
        if not heads_inside:
            return x_BTHRD.reshape(Bc * T, Hkv * G, Lq, D)
        x_BTLHGD = x_BTHRD.reshape(Bc, T, Hkv, Lq, G, D).transpose(2, 3)
        return x_BTLHGD.reshape(Bc * T, Lq, Hkv * G, D).transpose(1, 2)

    def join(self, x_BTHRD: Tensor) -> Tensor:
        """[Bc, T, Hkv, R, D] -> [Bc, Hkv, T * R, D]: all rows that read one context row."""
        return x_BTHRD.transpose(1, 2).reshape(self.Bc, self.Hkv, self.T * self.G * self.Lq, x_BTHRD.shape[-1])

    def split(self, x_BHRD: Tensor) -> Tensor:
        """Inverse of `join`."""
        return x_BHRD.reshape(self.Bc, self.Hkv, self.T, self.G * self.Lq, x_BHRD.shape[-1]).transpose(1, 2)


class _Segment(NamedTuple):
    """Keys and values of one segment as a matrix product takes them, masked entries zeroed where that matters.

    own: k, v [Bc, T, Hkv, Lk, D], mask [Bc, T, 1, 1, Lk]. context: k, v [Bc, Hkv, Lc, D], mask [Bc, 1, 1, Lc].
    """

    k: Tensor
    v: Tensor
    mask: Tensor | None
    is_context: bool


def _segment(
    k: Tensor, v: Tensor, mask: Tensor | None, rows: _Rows, dtype: torch.dtype, is_context: bool, is_backward: bool
) -> _Segment:
    k, v = k.to(dtype), v.to(dtype)
    if not is_context:
        k, v = (x.reshape(rows.Bc, rows.T, *x.shape[1:]) for x in (k, v))
        mask = None if mask is None else mask.reshape(rows.Bc, rows.T, -1)
    if mask is None:
        return _Segment(k, v, None, is_context)
    # A masked key may hold anything, NaN included, and 0 * NaN is NaN: zero it before any product that sums over keys.
    # The scores do not: their masked columns are overwritten. So the forward needs k as it is.
    readable = mask[..., None, :, None]
    k = k.where(readable, 0.0) if is_backward else k
    return _Segment(k, v.where(readable, 0.0), mask[..., None, None, :], is_context)


def _segments(
    tensors: tuple[Tensor | None, ...],
    masks: tuple[Tensor | None, Tensor | None],
    rows: _Rows,
    dtype: torch.dtype,
    is_backward: bool,
) -> list[_Segment]:
    k, v, ck, cv = tensors
    segments = []
    if k is not None and v is not None:
        segments.append(_segment(k, v, masks[0], rows, dtype, False, is_backward))
    if ck is not None and cv is not None:
        segments.append(_segment(ck, cv, masks[1], rows, dtype, True, is_backward))
    return segments


def _scores(q_BTHRD: Tensor, segment: _Segment, rows: _Rows) -> Tensor:
    """Scores of a segment, [Bc, T, Hkv, R, L]; `q_BTHRD` is already scaled."""
    scores = (rows.join(q_BTHRD) if segment.is_context else q_BTHRD) @ segment.k.mT
    if segment.mask is not None:
        scores.masked_fill_(~segment.mask, -torch.inf)
    return rows.split(scores) if segment.is_context else scores


def _times_keys(x_BTHRL: Tensor, matrix: Tensor, segment: _Segment, rows: _Rows) -> Tensor:
    """x @ (k or v or their transpose) per segment, [Bc, T, Hkv, R, *]."""
    if segment.is_context:
        return rows.split(rows.join(x_BTHRL) @ matrix)
    return x_BTHRL @ matrix


def _key_gradient(x_BTHRL: Tensor, y_BTHRD: Tensor, segment: _Segment, rows: _Rows) -> Tensor:
    """x^T @ y: the gradient of k or v, summed over the G heads and, for the context, over the T rows that share it."""
    if segment.is_context:
        return rows.join(x_BTHRL).mT @ rows.join(y_BTHRD)
    return (x_BTHRL.mT @ y_BTHRD).flatten(0, 1)


def _forward(q_BTHRD: Tensor, segments: list[_Segment], rows: _Rows, with_lse: bool) -> tuple[Tensor, Tensor | None]:
    """Output [Bc, T, Hkv, R, D] and log-sum-exp [Bc, T, Hkv, R, 1]; `q_BTHRD` is already scaled."""
    scores = [_scores(q_BTHRD, segment, rows) for segment in segments]
    tops = [s.amax(-1, keepdim=True) for s in scores if s.shape[-1]]
    if not tops:  # every segment has length 0: all rows are empty
        lse = torch.full_like(q_BTHRD[..., :1], torch.finfo(q_BTHRD.dtype).min)
        return torch.zeros_like(q_BTHRD), lse
    top = torch.maximum(*tops) if len(tops) == 2 else tops[0]
    can_be_empty = all(segment.mask is not None or not segment.k.shape[-2] for segment in segments)
    if can_be_empty:  # an empty row has top = -inf; a finite one makes its exponentials exp(-inf) = 0, not exp(NaN)
        top = top.clamp_min_(torch.finfo(top.dtype).min)
    probs = [s.sub_(top).exp_() for s in scores]
    total = probs[0].sum(-1, keepdim=True)
    for p in probs[1:]:
        total = total + p.sum(-1, keepdim=True)
    if can_be_empty:  # a row that reads anything has total >= exp(top - top) = 1, so this changes empty rows only
        total = total.clamp_min_(1.0)
    out = _times_keys(probs[0], segments[0].v, segments[0], rows)
    for p, segment in zip(probs[1:], segments[1:], strict=True):
        out = out + _times_keys(p, segment.v, segment, rows)
    return out / total, (total.log_().add_(top) if with_lse else None)


def _backward(
    saved: tuple[Tensor, Tensor, Tensor, Tensor],
    segments: list[_Segment],
    rows: _Rows,
    needs: tuple[bool, dict[bool, tuple[bool, bool]]],
) -> tuple[Tensor | None, dict[bool, tuple[Tensor | None, Tensor | None]]]:
    """Gradients of the scaled q, and per segment (own: False, context: True) of k and v; None where not needed."""
    q, out, lse, grad_out = saved
    needs_q, needs_kv = needs
    delta = (grad_out * out).sum(-1, keepdim=True)
    dq: Tensor | None = None
    dkv: dict[bool, tuple[Tensor | None, Tensor | None]] = {}
    for segment in segments:
        needs_k, needs_v = needs_kv[segment.is_context]
        if not (needs_q or needs_k or needs_v):
            continue
        probs = _scores(q, segment, rows).sub_(lse).exp_()
        dv = _key_gradient(probs, grad_out, segment, rows) if needs_v else None
        dk = None
        if needs_q or needs_k:
            d_scores = _times_keys(grad_out, segment.v.mT, segment, rows).sub_(delta).mul_(probs)
            dk = _key_gradient(d_scores, q, segment, rows) if needs_k else None
            if needs_q:
                part = _times_keys(d_scores, segment.k, segment, rows)
                dq = part if dq is None else dq + part
        dkv[segment.is_context] = (dk, dv)
    return dq, dkv


def _without_autocast(device_type: str) -> AbstractContextManager[Any]:
    """Switches autocast off where the device has any; meta tensors have none."""
    if torch.amp.is_autocast_available(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


class _Once(torch.autograd.Function):
    """Hands on `count` gradients and ties them to what they were made of, so that differentiating them is refused.

    torch's own `once_differentiable` refuses only a graph that ends at the gradients; one that goes on to the inputs
    would lose this part of it.
    """

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple(None if grad is None else grad.view_as(grad) for grad in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise RuntimeError(ONCE)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        ck: Tensor | None,
        cv: Tensor | None,
        key_mask: Tensor | None,
        context_mask: Tensor | None,
        scale: float,
    ) -> Tensor:
        out, lse, rows = _run(q, (k, v, ck, cv), (key_mask, context_mask), scale, with_lse=True)
        ctx.save_for_backward(q, k, v, ck, cv, key_mask, context_mask, out, lse)
        ctx.rows, ctx.scale = rows, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        with torch.no_grad():
            grads = _Attention._gradients(ctx, grad_out)
        if torch.is_grad_enabled():  # create_graph=True
            grads = _Once.apply(len(grads), *grads, grad_out, *ctx.saved_tensors[:5])  # type: ignore[no-untyped-call]
        return (*grads, None, None, None)

    @staticmethod
    def _gradients(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, ck, cv, key_mask, context_mask, out, lse = ctx.saved_tensors
        rows: _Rows = ctx.rows
        dtype = lse.dtype
        needs_q, needs_k, needs_v, needs_ck, needs_cv = ctx.needs_input_grad[:5]
        with _without_autocast(q.device.type):
            segments = _segments((k, v, ck, cv), (key_mask, context_mask), rows, dtype, is_backward=True)
            scaled_q = rows.fold(q.to(dtype) * ctx.scale)
            folded = (scaled_q, rows.fold(out.to(dtype)), lse, rows.fold(grad_out.to(dtype)))
            needs = (needs_q, {False: (needs_k, needs_v), True: (needs_ck, needs_cv)})
            dq, dkv = _backward(folded, segments, rows, needs)
        if dq is not None:
            dq = rows.unfold(dq.mul_(ctx.scale)).to(q.dtype)
        own, shared = dkv.get(False, (None, None)), dkv.get(True, (None, None))
        return (dq, *(None if g is None else g.to(q.dtype) for g in (*own, *shared)))


def _run(
    q: Tensor,
    tensors: tuple[Tensor | None, ...],
    masks: tuple[Tensor | None, Tensor | None],
    scale: float,
    with_lse: bool,
) -> tuple[Tensor, Tensor | None, _Rows]:
    N, Hq, Lq, _ = q.shape
    own_k, context_k = tensors[0], tensors[2]
    keys = own_k if own_k is not None else context_k
    assert keys is not None
    Bc = N if context_k is None else context_k.shape[0]
    Hkv = keys.shape[1]
    rows = _Rows(Bc, N // Bc if Bc else 1, Hkv, Hq // Hkv, Lq, q.stride(1) < q.stride(2))
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    with _without_autocast(q.device.type):
        segments = _segments(tensors, masks, rows, dtype, is_backward=False)
        out, lse = _forward(rows.fold(q.to(dtype) * scale), segments, rows, with_lse)
    # The view comes last: torch 2.11's Dynamo loses the gradient of a Function whose output is a no-op `.to` or an
    # in-place result (pytorch issue 180642; right again in 2.13).
    return rows.unfold(out.to(q.dtype)), lse, rows


def attention_reference(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    ck: Tensor | None,
    cv: Tensor | None,
    key_mask: Tensor | None,
    context_mask: Tensor | None,
    scale: float,
) -> Tensor:
    """Context attention; `soma_lightning.attention.attention` is the public form and checks the arguments.

    q [N, Hq, Lq, D]; own k, v [N, Hkv, Lk, D] or None; context ck, cv [Bc, Hkv, Lc, D] or None, N = Bc * T; key_mask
    [N, Lk] and context_mask [Bc, Lc] bool, True = readable. All floating tensors share one dtype; products and softmax
    run in float32 (float64 for float64 inputs). Returns [N, Hq, Lq, D] in q's dtype.
    """
    inputs = (q, k, v, ck, cv)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs):
        return _Attention.apply(q, k, v, ck, cv, key_mask, context_mask, scale)  # type: ignore[no-any-return,no-untyped-call]
    return _run(q, inputs[1:], (key_mask, context_mask), scale, with_lse=False)[0]
