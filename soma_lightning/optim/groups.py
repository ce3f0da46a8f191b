"""What the parameter groups of an optimizer say: which parameters have a gradient, and who is clipped with whom."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from soma_lightning.optim.clipping import ClipRule

#: Group setting: the group is clipped by its own norm to this limit, and does not count in the norm of the others.
GROUP_LIMIT = "max_norm"

#: Group settings of torch.optim.AdamW that change the mathematics or the state and have no fused counterpart.
UNSUPPORTED_SETTINGS = ("amsgrad", "maximize", "differentiable")

#: Settings of the whole optimizer or of one step, which a group would ignore.
NOT_OF_A_GROUP = ("max_value", "normalizer", "norm_type", "master_weights", "state_dtype", "implementation")


class GroupWork(NamedTuple):
    """The parameters of one group that a step updates, with their gradients. position: of the group."""

    position: int
    group: dict[str, Any]
    params: list[Tensor]
    grads: list[Tensor]


def present_work(param_groups: Sequence[dict[str, Any]]) -> list[GroupWork]:
    """Every trainable parameter that has a gradient now.

    Raises ValueError for a sparse gradient, and when the parameters live on several devices.
    """
    work = []
    for position, group in enumerate(param_groups):
        params = [p for p in group["params"] if p.grad is not None and p.requires_grad]
        if params:
            work.append(GroupWork(position, group, params, [p.grad for p in params]))
    for w in work:
        for grad in w.grads:
            refuse_sparse(grad)
    refuse_several_devices([p for w in work for p in w.params])
    return work


def refuse_several_devices(params: Sequence[Tensor]) -> None:
    """ValueError unless all parameters are on one device."""
    devices = {p.device for p in params}
    if len(devices) > 1:
        raise ValueError(
            f"the parameters live on several devices ({', '.join(sorted(map(str, devices)))}); "
            "use one FusedAdamW per device or torch.optim.AdamW"
        )


def is_capturing(tensors: Sequence[Tensor]) -> bool:
    """Whether work on these tensors' device is recorded into a CUDA graph now."""
    return bool(tensors) and tensors[0].device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def refuse_sparse(grad: Tensor) -> None:
    """ValueError for a gradient that is not dense."""
    if grad.layout != torch.strided:
        raise ValueError(
            f"a gradient of shape {tuple(grad.shape)} is sparse; AdamW needs dense gradients "
            "(for an embedding: sparse=False)"
        )


def label(param: Tensor, param_groups: Sequence[dict[str, Any]]) -> str:
    """For errors: "parameter 3 ('head.weight', shape (4, 2))", its number in `state_dict()` and its name if known."""
    first = 0
    for group in param_groups:
        for i, candidate in enumerate(group["params"]):
            if candidate is param:
                name = f"{group['param_names'][i]!r}, " if "param_names" in group else ""
                return f"parameter {first + i} ({name}shape {tuple(param.shape)})"
        first += len(group["params"])
    return f"a parameter of shape {tuple(param.shape)}"


def clip_groups(param_groups: Sequence[dict[str, Any]]) -> tuple[list[int], list[float]]:
    """Clip group of each parameter group, and the limits of the clip groups after the first.

    Clip group 0 holds every group without a limit of its own. Raises ValueError for a limit that is not positive.
    """
    ids, limits = [], []
    for position, group in enumerate(param_groups):
        own = group.get(GROUP_LIMIT)
        if own is not None:
            if isinstance(own, bool | str) or not own > 0:
                raise ValueError(
                    f"{GROUP_LIMIT}={own!r} of parameter group {position} must be positive; "
                    "leave it out for the global limit"
                )
            limits.append(float(own))
        ids.append(0 if own is None else len(limits))
    return ids, limits


def _unsupported_setting(group: dict[str, Any]) -> str | None:
    """The first unsupported setting that is switched on."""
    return next((f"{setting}=True" for setting in UNSUPPORTED_SETTINGS if group.get(setting)), None)


def refuse_settings(param_groups: Sequence[dict[str, Any]]) -> None:
    """ValueError for a setting that was put into a group after the optimizer was built and would be ignored."""
    for position, group in enumerate(param_groups):
        unsupported = _unsupported_setting(group)
        if unsupported:
            raise ValueError(
                f"parameter group {position} has {unsupported}, which FusedAdamW does not support; use "
                "torch.optim.AdamW for it"
            )
        for setting in NOT_OF_A_GROUP:
            if setting in group:
                raise ValueError(
                    f"parameter group {position} has {setting}={group[setting]!r}, which is no setting of a group; "
                    "give it to the optimizer or to clip()"
                )


def grouping(param_groups: Sequence[dict[str, Any]]) -> tuple[list[int], list[int]]:
    """What decides which parameter has which hyperparameters and who is clipped with whom: sizes, clip groups."""
    return [len(group["params"]) for group in param_groups], clip_groups(param_groups)[0]


def clip_limits(param_groups: Sequence[dict[str, Any]], rule: ClipRule) -> list[float | None]:
    """The limit of each clip group under `rule`; ValueError if it clips by value and a group by norm."""
    own = clip_groups(param_groups)[1]
    if own and rule.max_value is not None:
        raise ValueError(
            f"max_value={rule.max_value}, but a parameter group has {GROUP_LIMIT}={own[0]}; clip by norm or by value, "
            "not both"
        )
    return [rule.max_norm, *own]


def unsupported_in_group(group: dict[str, Any]) -> str | None:
    """The setting or parameter of a param group that has no fused counterpart, as words for an error; None if none."""
    unsupported = _unsupported_setting(group)
    if unsupported:
        return unsupported
    if not group.get("decoupled_weight_decay", True):
        return "decoupled_weight_decay=False (L2 regularization)"
    if any(isinstance(beta, Tensor) and beta.device.type != "cpu" for beta in group.get("betas", ())):
        return "betas as device tensors"
    for param in group["params"]:
        if not param.is_floating_point():
            return f"a parameter of dtype {param.dtype} (shape {tuple(param.shape)})"
        if _is_expanded(param):
            return f"an expanded parameter (shape {tuple(param.shape)}, strides {param.stride()}; clone it)"
    return None


def _is_expanded(param: Tensor) -> bool:
    """Whether several elements are one place in memory."""
    return param.numel() > 0 and any(s == 0 and n > 1 for s, n in zip(param.stride(), param.shape, strict=True))
