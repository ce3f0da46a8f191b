"""Which dtypes does a sharding unit compute, reduce and buffer in? Precision flags, the user's policies, their errors.

A policy follows FSDP2's MixedPrecisionPolicy (param_dtype, reduce_dtype, cast_forward_inputs) and adds `buffer_dtype`
and `keep_low_precision_grads` of FSDP1. It never changes in which dtype parameters are stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from soma_lightning.layout.selectors import near_misses

DTYPES: dict[str, torch.dtype] = {
    **dict.fromkeys(("fp32", "float32", "torch.float32"), torch.float32),
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), torch.bfloat16),
    **dict.fromkeys(("fp16", "float16", "torch.float16"), torch.float16),
}
_DTYPE_KEYS = ("param_dtype", "reduce_dtype", "buffer_dtype")
_POLICY_KEYS = (*_DTYPE_KEYS, "cast_forward_inputs", "keep_low_precision_grads")
_GLOBAL_KEYS = (*_POLICY_KEYS, "cast_root_forward_inputs")


@dataclass(frozen=True)
class Precision:
    """Dtypes of one unit; None means "as stored".

    param_dtype: of the weights while the unit computes, hence of its products and of its local gradients.
    reduce_dtype: of the gradients while they are summed over ranks; None means param_dtype.
    buffer_dtype: of floating-point buffers while the unit computes.
    cast_forward_inputs: floating-point inputs are cast to param_dtype on entry.
    keep_low_precision_grads: see `grad_dtype`.
    explicit: a user wrote it; otherwise it comes from the precision flag, under which autocast casts operations.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    cast_forward_inputs: bool = True
    keep_low_precision_grads: bool = False
    explicit: bool = False

    def fsdp_policy(self) -> MixedPrecisionPolicy | None:
        """The same for `fully_shard`; None when it would change nothing."""
        if self.param_dtype is None and self.reduce_dtype is None:
            return None
        return MixedPrecisionPolicy(
            param_dtype=self.param_dtype,
            reduce_dtype=self.reduce_dtype,
            cast_forward_inputs=self.cast_forward_inputs and self.param_dtype is not None,
        )


#: What sharding adds to each of Lightning's precision flags. Under "-mixed", autocast goes on casting operations.
FLAGS: dict[str, Precision] = {
    "32-true": Precision(),
    "64-true": Precision(),
    "bf16-true": Precision(reduce_dtype=torch.float32),
    "16-true": Precision(reduce_dtype=torch.float32),
    "bf16-mixed": Precision(torch.bfloat16, torch.float32, cast_forward_inputs=False),
    "16-mixed": Precision(torch.float16, torch.float32, cast_forward_inputs=False),
}
#: Dtypes that a policy may compute in under each flag: fp16 needs a loss scaler, and autocast knows one low dtype.
_COMPUTE_DTYPES: dict[str, tuple[torch.dtype, ...]] = {
    "32-true": (torch.float32, torch.bfloat16),
    "64-true": (),
    "bf16-true": (torch.float32, torch.bfloat16),
    "16-true": (torch.float32, torch.float16),
    "bf16-mixed": (torch.float32, torch.bfloat16),
    "16-mixed": (torch.float32, torch.float16),
}


class PrecisionOptions(Protocol):
    """The settings read here; `StrategyOptions` and `WrapOptions` have them."""

    @property
    def mixed_precision(self) -> dict[str, Any] | None: ...
    @property
    def wrappers(self) -> dict[str, dict[str, Any]] | None: ...
    @property
    def mixed_precision_policies(self) -> dict[str, dict[str, Any]] | None: ...
    @property
    def mixed_precision_rules(self) -> dict[str, str] | None: ...
    @property
    def keep_low_precision_grads(self) -> bool: ...


@dataclass(frozen=True)
class PrecisionRules:
    """What the settings say: `unbound` for units without a rule, `root` for the root, `bound` by wrapper name.

    autocast_dtype: what the flag's autocast computes in; None without autocast.
    """

    unbound: Precision
    root: Precision
    bound: Mapping[str, Precision]
    autocast_dtype: torch.dtype | None

    def of_wrapper(self, name: str) -> Precision:
        return self.bound.get(name, self.unbound)


def read_precision(options: PrecisionOptions, precision: str | None) -> PrecisionRules:
    """The rules that the settings mean under Lightning's flag `precision` ("32-true", "bf16-mixed", ...).

    None, where the flag is not known yet, finds the mistakes that do not depend on it. ValueError names the entry and
    the way out.
    """
    if precision is not None and precision not in FLAGS:
        raise ValueError(f"precision={precision!r} cannot be sharded; use one of {', '.join(FLAGS)}")
    unbound, root = _global_precision(options, precision)
    policies = {
        name: _read_policy(f"mixed_precision_policies.{name}", policy, precision)
        for name, policy in (options.mixed_precision_policies or {}).items()
    }
    rules = options.mixed_precision_rules or {}
    for wrapper, policy in rules.items():
        where = f"mixed_precision_rules.{wrapper}={policy}"
        _check_known(where, "wrapper", wrapper, options.wrappers or {})
        if not isinstance(policy, str):
            raise ValueError(f"{where} must be the name of one of mixed_precision_policies")
        _check_known(where, "policy", policy, policies)
    unused = [name for name in policies if name not in rules.values()]
    if unused:
        raise ValueError(
            f"mixed_precision_policies.{unused[0]} is bound to no wrapper; add `WRAPPER: {unused[0]}` to "
            "mixed_precision_rules, or remove the policy"
        )
    autocast_dtype = FLAGS[precision].param_dtype if precision else None
    return PrecisionRules(unbound, root, {w: policies[p] for w, p in rules.items()}, autocast_dtype)


def grad_dtype(precision: Precision, original: torch.dtype, *, replicated: bool) -> torch.dtype:
    """Dtype in which the optimizer finds the gradient of a parameter that is stored in `original`.

    keep_low_precision_grads=False: `original`. True: the compute dtype on sharded layouts, the reduction dtype on
    replicated ones (one process included), where every rank holds the whole reduced gradient.
    """
    if not precision.keep_low_precision_grads:
        return original
    compute = precision.param_dtype or original
    return precision.reduce_dtype or compute if replicated else compute


def _global_precision(options: PrecisionOptions, precision: str | None) -> tuple[Precision, Precision]:
    """The precision of units without a rule and that of the root."""
    keep = options.keep_low_precision_grads
    settings = options.mixed_precision
    if settings is None:
        default = replace(FLAGS[precision or "32-true"], keep_low_precision_grads=keep)
        return default, default
    if not settings:
        raise ValueError("mixed_precision is empty; name at least one dtype or leave it out")
    if keep and settings.get("keep_low_precision_grads") is False:
        raise ValueError(
            "keep_low_precision_grads=True contradicts mixed_precision.keep_low_precision_grads=false; leave one out"
        )
    without_root = {key: value for key, value in settings.items() if key != "cast_root_forward_inputs"}
    unbound = _read_policy("mixed_precision", without_root, precision, named=False)
    unbound = replace(unbound, keep_low_precision_grads=keep or unbound.keep_low_precision_grads)
    casts = _read_bool("mixed_precision", settings, "cast_root_forward_inputs", default=True)
    useless = [k for k in ("cast_forward_inputs", "cast_root_forward_inputs") if settings.get(k)]
    if unbound.param_dtype is None and useless:
        raise ValueError(f"mixed_precision.{useless[0]}=true has no effect without mixed_precision.param_dtype; set it")
    if precision in ("bf16-mixed", "16-mixed") and unbound.param_dtype is torch.float32:
        raise ValueError(
            f"mixed_precision.param_dtype=fp32 would turn off all that precision={precision!r} asks for; use '32-true'"
        )
    return unbound, replace(unbound, cast_forward_inputs=casts)


def _read_policy(where: str, policy: Mapping[str, Any], precision: str | None, *, named: bool = True) -> Precision:
    if not isinstance(policy, Mapping):
        raise ValueError(f"{where}={policy!r} must be a mapping with {', '.join(_POLICY_KEYS)}")
    known = _POLICY_KEYS if named else _GLOBAL_KEYS
    for key in policy:
        if key not in known:
            raise ValueError(f"{where} has no key {key!r}{near_misses(key, known)}; it has {', '.join(known)}")
    missing = [key for key in _DTYPE_KEYS if policy.get(key) is None]
    if named and missing:
        raise ValueError(f"{where} lacks {', '.join(missing)}; a named policy states all three dtypes")
    dtypes = {key: _read_dtype(f"{where}.{key}", policy.get(key)) for key in _DTYPE_KEYS}
    compute, allowed = dtypes["param_dtype"], _COMPUTE_DTYPES.get(precision or "", ())
    if precision is not None and compute is not None and compute not in allowed:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in allowed) or "no policy at all"
        raise ValueError(
            f"{where}.param_dtype={policy['param_dtype']} does not go with precision={precision!r}, which allows "
            f"{names}; change one of the two"
        )
    return Precision(
        **dtypes,
        cast_forward_inputs=_read_bool(where, policy, "cast_forward_inputs", default=True),
        keep_low_precision_grads=_read_bool(where, policy, "keep_low_precision_grads", default=False),
        explicit=True,
    )


def _read_dtype(where: str, value: object) -> torch.dtype | None:
    if value is None or (isinstance(value, torch.dtype) and value in DTYPES.values()):
        return value
    if str(value) not in DTYPES:
        raise ValueError(f"{where}={value!r} is no dtype; use fp32, bf16 or fp16, or their long forms")
    return DTYPES[str(value)]


def _read_bool(where: str, policy: Mapping[str, Any], key: str, *, default: bool) -> bool:
    value = policy.get(key, default)
    if not isinstance(value, bool):
        raise ValueError(f"{where}.{key}={value!r} must be true or false")
    return value


def _check_known(where: str, kind: str, name: str, known: Mapping[str, object]) -> None:
    if name not in known:
        has = ", ".join(known) or "none"
        raise ValueError(f"{where}: there is no {kind} {name!r}{near_misses(name, known)}; defined: {has}")
