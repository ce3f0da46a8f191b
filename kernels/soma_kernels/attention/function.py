"""How do the attention kernels enter autograd, torch.compile, CUDA graphs and meta tensors?

Two custom operators, `soma_kernels::attention_forward` and `soma_kernels::attention_backward`, have fake and autograd
formulas: compilers, fake tensors and dispatch modes see them. Eager calls of plain tensors run the same functions
inside one autograd.Function, because a pass through the dispatcher in Python costs the host more than the launches.

The operators know a context and, beside it, own keys; own keys alone are a context that nobody shares.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from soma_kernels.attention.backward import Needs, empty_gradients, run_backward
from soma_kernels.attention.call import KeyList, empty_result
from soma_kernels.attention.forward import run_forward
from soma_kernels.attention.keys import key_list
from soma_kernels.attention.reference import ONCE, attention_reference

_INPUTS = "Tensor q, Tensor? k, Tensor? v, Tensor ck, Tensor cv, Tensor? key_mask, Tensor? index, Tensor? count"
_library = torch.library.Library("soma_kernels", "FRAGMENT")
_library.define(f"attention_forward({_INPUTS}, float scale) -> (Tensor, Tensor)")
_library.define(
    f"attention_backward(Tensor grad_out, {_INPUTS}, Tensor out, Tensor lse, float scale, bool[] needs) -> Tensor[]"
)


def _keys(index: Tensor | None, count: Tensor | None) -> tuple[Tensor, Tensor] | None:
    return None if index is None or count is None else (index, count)


def _forward(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    ck: Tensor,
    cv: Tensor,
    key_mask: Tensor | None,
    index: Tensor | None,
    count: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    return run_forward(q, k, v, ck, cv, key_mask, _keys(index, count), scale)


def _forward_fake(q: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return empty_result(q), torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)


def _backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    ck: Tensor,
    cv: Tensor,
    key_mask: Tensor | None,
    index: Tensor | None,
    count: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    needs: list[bool],
) -> list[Tensor]:
    """The wanted gradients only, in the order q, k, v, ck, cv."""
    grads = run_backward(grad_out, q, k, v, ck, cv, key_mask, _keys(index, count), out, lse, scale, Needs(*needs))
    return [grad for grad in grads if grad is not None]


def _backward_fake(
    grad_out: Tensor, q: Tensor, k: Tensor | None, v: Tensor | None, ck: Tensor, *rest: Any
) -> list[Tensor]:
    return [grad for grad in empty_gradients(q, k, ck, Needs(*rest[-1])) if grad is not None]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])


def _formula(ctx: Any, grad_out: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    needs = list(ctx.needs_input_grad[:5])
    wanted = iter(torch.ops.soma_kernels.attention_backward.default(grad_out, *ctx.saved_tensors, ctx.scale, needs))
    return (*(next(wanted) if needed else None for needed in needs), None, None, None, None)


def _refuse(ctx: Any, *_: Any) -> None:
    raise RuntimeError(ONCE)


for _key in ("CUDA", "CPU"):  # on a CPU: Triton's interpreter
    _library.impl("attention_forward", _forward, _key)
    _library.impl("attention_backward", _backward, _key)
torch.library.register_fake("soma_kernels::attention_forward", _forward_fake, lib=_library)
torch.library.register_fake("soma_kernels::attention_backward", _backward_fake, lib=_library)
torch.library.register_autograd("soma_kernels::attention_forward", _formula, setup_context=_setup, lib=_library)
torch.library.register_autograd("soma_kernels::attention_backward", _refuse, lib=_library)


class _Attention(torch.autograd.Function):
    """The operators' formulas without the dispatcher."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        out, lse = _forward(*inputs)
        *tensors, ctx.scale = inputs
        ctx.save_for_backward(*tensors, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph=True: the operator refuses to be differentiated again
            return _formula(ctx, grad_out, None)
        return _gradients(ctx, grad_out)


def _gradients(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, ck, cv, key_mask, index, count, out, lse = ctx.saved_tensors
    needs = Needs(*ctx.needs_input_grad[:5])
    grads = run_backward(grad_out, q, k, v, ck, cv, key_mask, _keys(index, count), out, lse, ctx.scale, needs)
    return (*grads, None, None, None, None)


#: Without the wrapper for functorch's transforms, in which `_is_plain` does not hold.
_apply = super(torch.autograd.Function, _Attention).apply


def _refuse_forward_mode(*tensors: Tensor | None) -> None:
    """RuntimeError where forward-mode derivatives are asked for: they would be lost without a word."""
    stack = torch._C._functorch.get_interpreter_stack() or ()
    is_dual = forward_ad._current_level >= 0 and any(
        x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors
    )
    if is_dual or any(level.key() == torch._C._functorch.TransformType.Jvp for level in stack):
        raise RuntimeError("attention has no forward-mode derivative; use reverse mode, or implementation='reference'")


def _is_plain(*tensors: Tensor | None) -> bool:
    """Whether real data meets nothing but autograd: no compiler, dispatch mode, tensor subclass or transform."""
    return (
        not torch.compiler.is_compiling()
        and not any(x is not None and x.is_meta for x in tensors)
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and all(x is None or type(x) in (Tensor, torch.nn.Parameter) for x in tensors)
    )


def attention_kernel(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    ck: Tensor | None,
    cv: Tensor | None,
    key_mask: Tensor | None,
    context_mask: Tensor | None,
    scale: float,
    keys: KeyList | None = None,
) -> Tensor:
    """Context attention by Triton kernels; arguments and result are those of `attention_reference`.

    keys: the list of `context_mask`; made here when None. dtype float32, bfloat16 or float16, head size 16 to 256.
    """
    if not all(x is None or x.numel() for x in (q, k, ck)):
        # An empty segment or no queries: the reference gives the right zeros, also as gradients.
        return attention_reference(q, k, v, ck, cv, key_mask, context_mask, scale)
    if ck is None or cv is None:  # own keys alone
        k, v, ck, cv, key_mask, context_mask = None, None, k, v, None, key_mask
    assert ck is not None
    assert cv is not None
    if keys is None and context_mask is not None:
        keys = key_list(context_mask)
    index, count = (None, None) if keys is None else keys
    inputs = (q, k, v, ck, cv, key_mask, index, count)
    if not torch.compiler.is_compiling() and (
        forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None
    ):
        _refuse_forward_mode(*inputs[:5])
    if _is_plain(*inputs):
        if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs[:5]):
            return _apply(*inputs, scale)  # type: ignore[no-any-return]
        return _forward(q, k, v, ck, cv, key_mask, index, count, scale)[0]
    out: Tensor = torch.ops.soma_kernels.attention_forward.default(*inputs, scale)[0]
    return out
