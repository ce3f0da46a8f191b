"""Which attention do the models call, and which implementation runs it?

One operator: queries attend, in one softmax, to their own keys and to a context that several query rows share. This
module is the only place that picks the implementation: Triton kernels on the GPUs that have confirmed them, the
plain-torch reference elsewhere.

Shape letters: N query rows, Bc context rows, T = N // Bc query rows a context row, Hq query heads, Hkv key/value heads,
Lq queries, Lk own keys, Lc context keys, D head size.

`from soma_lightning import attention` gives this module, which is callable as the operator. Code that is compiled by
torch.compile imports the function itself: `from soma_lightning.attention import attention`.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from soma_kernels.attention.call import PAD, KeyList
from soma_kernels.attention.reference import attention_reference
from soma_kernels.attention.tiles import MAX_HEAD_SIZE, MIN_HEAD_SIZE, why_unsupported
from soma_kernels.runtime import KERNEL_DTYPES, device_facts, has_triton

__all__ = ["ContextKV", "KeyList", "attention", "attention_implementation", "attention_path", "key_list"]

Implementation = Literal["auto", "kernel", "reference"]

#: What the checks look at in a tensor: type, shape, dtype and device.
Fact = tuple[type, torch.Size, torch.dtype, torch.device]

#: Types whose shapes are numbers: facts about them can be looked up.
_PLAIN = (Tensor, torch.nn.Parameter)

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class ContextKV(NamedTuple):
    """Keys and values that T query rows share, for example the frozen prefix of a VLA.

    k, v: [Bc, Hkv, Lc, D]. mask: bool [Bc, Lc], True = readable, or None when every key is readable. Masked entries of
    k and v may hold anything, NaN included. keys: `key_list(mask)`, which several calls with one mask can share; None:
    each call makes its own where it needs one. The list holds what the mask was when it was made, and kernels read the
    list: make a new one when the mask changes.
    """

    k: Tensor
    v: Tensor
    mask: Tensor | None = None
    keys: KeyList | None = None


@dataclass(eq=False)
class _Block:
    """One `attention_implementation` block."""

    implementation: Implementation


#: Blocks that are open now, in any thread; the one that was opened last decides.
_blocks: list[_Block] = []


def _default() -> Implementation:
    """What calls with implementation="auto" run."""
    return _blocks[-1].implementation if _blocks else "auto"


@contextmanager
def attention_implementation(implementation: Implementation) -> Iterator[None]:
    """Inside the block, calls of `attention` that leave the choice open run this implementation; for all threads.

    "kernel" also runs on a CPU, in Triton's interpreter, if TRITON_INTERPRET=1.
    """
    block = _Block(_check_implementation(implementation))
    _blocks.append(block)
    try:
        yield
    finally:
        _blocks.remove(block)


def _check_implementation(implementation: Implementation) -> Implementation:
    if implementation not in get_args(Implementation):
        raise ValueError(f"implementation must be one of {', '.join(get_args(Implementation))}, got {implementation!r}")
    return implementation


def attention_path(device: torch.device | str | None = None) -> str:
    """The implementation that `attention` runs, in words for the run report.

    device: where; None means a GPU if there is one.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    forced = _default()
    if forced == "reference":
        return "reference (torch), forced"
    why_not = _why_no_kernel(device.type, device.index)
    if why_not is not None and forced == "kernel":
        return f"kernel, forced, so calls raise: {why_not}"
    if why_not is None and (device.type == "cuda" or forced == "kernel"):
        return f"kernel (Triton {_triton_version()})"
    return f"reference (torch), {why_not}" if device.type == "cuda" else "reference (torch)"


def _triton_version() -> str:
    """Without importing it, unless its distribution has another name."""
    try:
        return version("triton")
    except PackageNotFoundError:
        return str(importlib.import_module("triton").__version__)


@lru_cache
def _why_no_kernel(device_type: str, device_index: int | None) -> str | None:
    """Why no kernel can run on this device, as a phrase; None if one can."""
    if device_type == "cuda" and not torch.cuda.is_available():
        return "there is no CUDA device"
    if device_type == "meta" and has_triton():  # shapes only: nothing is launched
        return None
    if device_type not in ("cuda", "cpu"):
        return f"there are no kernels for {device_type}"
    facts = device_facts(device_type if device_index is None else f"{device_type}:{device_index}")
    return why_unsupported(facts, _triton_version() if has_triton() else None)


def _why_not_kernel(device_type: str, device_index: int | None, dtype: torch.dtype) -> str | None:
    """Why a call cannot take the kernels, whatever its head size, as a phrase; None if it can."""
    why_not = _why_no_kernel(device_type, device_index)
    if why_not is None and dtype not in KERNEL_DTYPES:
        why_not = f"there are no kernels for {dtype}"
    if why_not is None and dtype == torch.bfloat16 and device_type == "cpu":
        why_not = "Triton's interpreter computes bfloat16 products wrongly"
    return why_not


# Inside torch.compile this runs while tracing, as a function of constants that Dynamo guards on.
@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _use_kernel(
    wanted: Implementation, device_type: str, device_index: int | None, dtype: torch.dtype, misfit: int | None = None
) -> bool:
    """misfit: a head size that the kernels do not take. One that they take is not told: torch.compile may have made it
    a symbol, and this function takes constants."""
    if wanted == "reference" or (wanted == "auto" and device_type != "cuda"):
        return False
    why_not = _why_not_kernel(device_type, device_index, dtype)
    if why_not is None and misfit is not None:
        why_not = f"its head sizes are {MIN_HEAD_SIZE} to {MAX_HEAD_SIZE}, and this one is {misfit}"
    if why_not is not None and wanted == "kernel":
        raise ValueError(f"attention cannot run its kernel: {why_not}; pass implementation='auto' or 'reference'")
    if why_not is not None:
        _say_once(why_not)
    return why_not is None


@lru_cache
def _say_once(why_not: str) -> None:
    warnings.warn(f"attention runs its slower reference instead of its kernel: {why_not}", stacklevel=2)


def key_list(mask: Tensor | None) -> KeyList | None:
    """The list of a context's readable keys for `ContextKV.keys`: made once, shared by every layer of a step.

    mask: bool [Bc, Lc], True = readable. Returns None where no list is needed: without a mask, and where the reference
    runs. Inside a CUDA graph the list is made again at every replay, so it follows the mask's contents. Raises
    ValueError when the mask is no such mask.
    """
    if mask is None:
        return None
    if mask.dtype != torch.bool or mask.dim() != 2:
        raise ValueError(f"mask must be bool [rows, keys], got {mask.dtype} of shape {tuple(mask.shape)}")
    # Neither dtype nor head size is known yet; a call that runs the reference all the same ignores the list.
    if not mask.numel() or not _use_kernel(_default(), mask.device.type, mask.device.index, torch.float32):
        return None
    from soma_kernels.attention.keys import key_list as list_keys  # needs Triton

    return list_keys(mask)


def attention(
    q: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    context: ContextKV | None = None,
    key_mask: Tensor | None = None,
    scale: float | None = None,
    implementation: Implementation = "auto",
) -> Tensor:
    """softmax([q k^T, q ck^T] * scale) [v; cv], one softmax over the own and the context segment; not causal.

    q: [N, Hq, Lq, D] in float64, float32, bfloat16 or float16, any strides.
    k, v: own keys and values [N, Hkv, Lk, D], or None. Hq must be a multiple of Hkv.
    context: keys and values [Bc, Hkv, Lc, D] with N = Bc * T; query row n reads context row n // T.
    key_mask: bool [N, Lk], True = readable, masks the own segment.
    scale: factor of the scores; None means D ** -0.5.
    implementation: "kernel" or "reference" forces one; "auto" leaves it to `attention_implementation` and the device.

    Returns [N, Hq, Lq, D] in q's dtype. A query row that can read nothing returns 0 and sends zero gradients. Softmax
    and sums run in float32 at least. The backward does work only for inputs that require grad; gradients of the
    context are summed over the T rows that share it; it cannot be differentiated twice. Under autocast the inputs are
    cast to the autocast dtype, as torch's scaled_dot_product_attention does.

    Raises ValueError when shapes, dtypes or devices do not fit together or a forced kernel cannot run, TypeError for
    DTensors, for a context that is no ContextKV and for a tensor as scale.
    """
    if scale is not None and (isinstance(scale, bool) or not isinstance(scale, int | float)):
        raise TypeError(f"scale must be a number, got {type(scale).__name__}; no gradient flows to it")
    if context is not None and not isinstance(context, ContextKV):
        raise TypeError(f"context must be ContextKV(k, v, mask), got {type(context).__name__}")
    ck, cv, context_mask, keys = (None, None, None, None) if context is None else context
    if torch.amp.is_autocast_available(q.device.type) and torch.is_autocast_enabled(q.device.type):
        q, k, v, ck, cv = (_autocast(x) for x in (q, k, v, ck, cv))  # type: ignore[assignment]
    lines, readable = (None, None) if keys is None else _parts_of(keys)
    operands = (q, k, v, ck, cv, key_mask, context_mask, lines, readable)
    facts = [None if x is None else (type(x), x.shape, x.dtype, x.device) for x in operands]
    # Most calls repeat one of the same shapes, and checking them again would cost the host more than a launch.
    if not torch.compiler.is_compiling() and all(fact is None or fact[0] in _PLAIN for fact in facts):
        _check(context is not None, *facts)
    else:
        _check.__wrapped__(context is not None, *facts)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)  # one type for the kernels
    wanted = _default() if implementation == "auto" else _check_implementation(implementation)
    misfit = None
    if not MIN_HEAD_SIZE <= q.shape[-1] <= MAX_HEAD_SIZE:
        misfit = q.shape[-1]
    if not _use_kernel(wanted, q.device.type, q.device.index, q.dtype, misfit):
        return attention_reference(q, k, v, ck, cv, key_mask, context_mask, scale)
    from soma_kernels.attention.function import attention_kernel  # needs Triton

    return attention_kernel(q, k, v, ck, cv, key_mask, context_mask, scale, keys)


def _autocast(x: Tensor | None) -> Tensor | None:
    if x is None or not x.is_floating_point() or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))


@lru_cache(maxsize=4096)
def _check(
    has_context: bool,
    q: Fact | None,
    k: Fact | None,
    v: Fact | None,
    ck: Fact | None,
    cv: Fact | None,
    key_mask: Fact | None,
    context_mask: Fact | None,
    lines: Fact | None,
    readable: Fact | None,
) -> None:
    """Raises for arguments that do not fit together; what fits is remembered."""
    assert q is not None
    _check_presence((k, v), (ck, cv) if has_context else None, key_mask)
    named = {"q": q, "k": k, "v": v, "context.k": ck, "context.v": cv}
    _refuse_dtensors({**named, "key_mask": key_mask, "context.mask": context_mask})
    _check_tensors({name: fact for name, fact in named.items() if fact is not None})
    _check_shapes(q, {"": (k, v), "context.": (ck, cv)})
    _check_mask("key_mask", key_mask, k, q)
    _check_mask("context.mask", context_mask, ck, q)
    _check_keys(lines, readable, context_mask)


def _check_presence(
    own: tuple[Fact | None, Fact | None], context: tuple[Fact | None, Fact | None] | None, key_mask: Fact | None
) -> None:
    k, v = own
    if (k is None) != (v is None):
        given, missing = ("k", "v") if v is None else ("v", "k")
        raise ValueError(f"attention got {given} without {missing}; pass both, or neither with a context")
    if context is None and k is None:
        raise ValueError("attention got no keys; pass k and v, or context=ContextKV(k, v, mask)")
    absent = [name for name, fact in zip(("context.k", "context.v"), context or (), strict=False) if fact is None]
    if absent:
        raise ValueError(f"the context has no {' and no '.join(absent)}; pass ContextKV(k, v, mask), or context=None")
    if key_mask is not None and k is None:
        raise ValueError("key_mask masks the own keys, but k is None; the context's mask goes into ContextKV(mask=...)")


def _refuse_dtensors(facts: dict[str, Fact | None]) -> None:
    distributed = sys.modules.get("torch.distributed.tensor")  # no DTensor can exist before this module is loaded
    for name, fact in facts.items():
        if distributed is not None and fact is not None and issubclass(fact[0], distributed.DTensor):
            raise TypeError(
                f"{name} is a DTensor; attention works on one rank's heads, so pass local tensors: {name}.to_local()"
            )


def _check_tensors(facts: dict[str, Fact]) -> None:
    _, q_shape, q_dtype, q_device = facts["q"]
    for name, (_, shape, dtype, device) in facts.items():
        if len(shape) != 4:
            raise ValueError(f"{name} must be [rows, heads, length, head size], got shape {tuple(shape)}")
        if dtype != q_dtype:
            raise ValueError(f"{name} has dtype {dtype}, but q has {q_dtype}; cast one of them")
        if device != q_device:
            raise ValueError(f"{name} is on {device}, but q is on {q_device}")
    if q_dtype not in _DTYPES:
        raise ValueError(f"q must be one of {', '.join(map(str, _DTYPES))}, got {q_dtype}")
    if q_shape[-1] == 0:
        raise ValueError(f"q has head size 0, shape {tuple(q_shape)}")


def _check_shapes(q: Fact, segments: dict[str, tuple[Fact | None, Fact | None]]) -> None:
    N, Hq, _, D = q[1]
    heads: dict[str, int] = {}
    for name, (keys, values) in segments.items():
        if keys is None or values is None:
            continue
        if keys[1] != values[1]:
            raise ValueError(f"{name}k and {name}v must have one shape, got {tuple(keys[1])} and {tuple(values[1])}")
        rows, Hkv, _, head_size = keys[1]
        if head_size != D:
            raise ValueError(f"{name}k has head size {head_size}, but q has {D}")
        if Hkv == 0 or Hq % Hkv:
            raise ValueError(f"q's {Hq} heads are no multiple of the {Hkv} heads of {name}k")
        heads[f"{name}k"] = Hkv
        if not name and rows != N:
            raise ValueError(f"k has {rows} rows, but q has {N}; keys that several rows share go into context")
        if name and (N % rows if rows else N):
            raise ValueError(
                f"q's {N} rows are no multiple of the context's {rows}; query row n reads context row n // T"
            )
    if len(set(heads.values())) > 1:
        raise ValueError(f"both segments must have the same number of heads, got {heads}")


def _check_mask(name: str, mask: Fact | None, keys: Fact | None, q: Fact) -> None:
    if mask is None:
        return
    assert keys is not None
    _, shape, dtype, device = mask
    if dtype != torch.bool:
        raise ValueError(f"{name} must be bool (True = readable), got {dtype}")
    expected = (keys[1][0], keys[1][2])
    if tuple(shape) != expected:
        raise ValueError(f"{name} must be [rows, keys] = {expected}, got {tuple(shape)}")
    if device != q[3]:
        raise ValueError(f"{name} is on {device}, but q is on {q[3]}")


def _parts_of(keys: KeyList) -> tuple[Tensor, Tensor]:
    if not isinstance(keys, KeyList):
        raise TypeError(f"context.keys must come from key_list(context.mask), got {type(keys).__name__}")
    if not (keys.lines.is_contiguous() and keys.readable.is_contiguous()):
        raise ValueError("context.keys is a part of a list, or an expanded one; pass key_list(context.mask)")
    return keys.lines, keys.readable


def _check_keys(lines: Fact | None, readable: Fact | None, mask: Fact | None) -> None:
    if lines is None or readable is None:
        return
    if mask is None:
        raise ValueError("context.keys is a list of a mask, but context.mask is None; pass both, or neither")
    rows, length = mask[1]
    for found, shape in ((lines, (rows, length + PAD)), (readable, (rows,))):
        if tuple(found[1]) != shape or found[2] != torch.int32 or found[3] != mask[3]:
            raise ValueError(
                f"context.keys belongs to another mask: it holds {found[2]} of shape {tuple(found[1])} on {found[3]}, "
                f"expected torch.int32 of shape {shape} on {mask[3]}; pass key_list(context.mask)"
            )


class _AttentionModule(ModuleType):
    """The module as an operator: the name `soma_lightning.attention` is both the module and the function."""

    def __reduce__(self) -> tuple[Callable[[str], ModuleType], tuple[str]]:
        """Modules that keep the operator as an attribute can be copied and pickled."""
        return importlib.import_module, (__name__,)

    def __call__(
        self,
        q: Tensor,
        k: Tensor | None = None,
        v: Tensor | None = None,
        *,
        context: ContextKV | None = None,
        key_mask: Tensor | None = None,
        scale: float | None = None,
        implementation: Implementation = "auto",
    ) -> Tensor:
        return attention(q, k, v, context=context, key_mask=key_mask, scale=scale, implementation=implementation)


sys.modules[__name__].__class__ = _AttentionModule
