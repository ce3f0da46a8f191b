"""What the optimizer keeps for one parameter, in which dtype, and that it is ready where the next step needs it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from soma_lightning.optim.groups import unsupported_in_group

#: State key of the fp32 copy of a bf16 or fp16 parameter.
MASTER_KEY = "soma_master"

LOW_PRECISION = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class StateFormat:
    """Which state a parameter gets.

    master_weights: fp32 copies of bf16 and fp16 parameters, with fp32 moments. state_dtype: dtype of the moments of
    every other parameter; None: the parameter's, as in torch.
    """

    master_weights: bool = False
    state_dtype: torch.dtype | None = None

    def needs_master(self, param: Tensor) -> bool:
        return self.master_weights and param.dtype in LOW_PRECISION

    def moment_dtype(self, param: Tensor) -> torch.dtype:
        if self.needs_master(param):
            return torch.float32
        # fp32 moments are for parameters of lower precision; an fp64 parameter keeps its own.
        return param.dtype if self.state_dtype is None or param.dtype == torch.float64 else self.state_dtype


def ready_state(param: Tensor, state: dict[str, Any], form: StateFormat, *, master_is_current: bool) -> dict[str, Any]:
    """Creates what is missing in `state` and moves or converts what is elsewhere; returns `state`.

    master_is_current: nobody but the optimizer changed the parameter since its master was written.
    Raises ValueError for a state without step or moments and for a tensor of another shape than the parameter's.
    """
    dtype = form.moment_dtype(param)
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
        state["exp_avg"] = torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)
        state["exp_avg_sq"] = torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)
    missing = [key for key in ("step", "exp_avg", "exp_avg_sq") if key not in state]
    if missing:
        raise ValueError(
            f"the optimizer state of a parameter of shape {tuple(param.shape)} has {', '.join(map(repr, state))} "
            f"but no {', '.join(map(repr, missing))}; it was saved by another kind of optimizer"
        )
    for key in ("exp_avg", "exp_avg_sq", MASTER_KEY):
        if key in state and state[key].shape != param.shape:
            raise ValueError(
                f"the optimizer state of a parameter of shape {tuple(param.shape)} has {key!r} of shape "
                f"{tuple(state[key].shape)}; it was saved for other parameters or in another order"
            )
    # torch.optim.AdamW keeps `step` on the CPU, and so does a checkpoint of it.
    state["step"] = state["step"].to(param.device, torch.float32).reshape(())
    for key in ("exp_avg", "exp_avg_sq"):
        state[key] = state[key].to(param.device, dtype)
    if form.needs_master(param):
        master = state.get(MASTER_KEY)
        if master is None:
            master = param.detach().to(torch.float32)
        master = master.to(param.device, torch.float32)
        if not master_is_current:
            # Somebody loaded or changed the parameter: a master is valid where it rounds to its parameter.
            master = torch.where(master.to(param.dtype) == param, master, param.detach().to(torch.float32))
        state[MASTER_KEY] = master
    else:
        state.pop(MASTER_KEY, None)  # of a parameter that was converted: it would win over the parameter's own values
    return state


def restore_precision(param: Tensor, state: dict[str, Any], saved: dict[str, Any], form: StateFormat) -> None:
    """Undoes the rounding of torch's `load_state_dict` to the parameter's dtype, from the values as they were saved."""
    state.pop(MASTER_KEY, None)
    for key in ("exp_avg", "exp_avg_sq"):
        if key in saved and form.moment_dtype(param) != param.dtype:
            state[key] = saved[key].detach().to(param.device, torch.float32, copy=True)
    # A master of lower precision was rounded by another optimizer on its way: it says nothing new.
    if form.needs_master(param) and MASTER_KEY in saved and saved[MASTER_KEY].dtype == torch.float32:
        state[MASTER_KEY] = saved[MASTER_KEY].detach().to(param.device, torch.float32, copy=True)


def supported_state(state_dict: dict[str, Any]) -> dict[str, Any]:
    """`state_dict`; ValueError if it was written with a setting that is not supported, or by another optimizer."""
    if "param_groups" not in state_dict:
        raise ValueError("FusedAdamW cannot load this state: it has no 'param_groups', so it is no optimizer's")
    for group in state_dict["param_groups"]:
        missing = [key for key in ("lr", "betas", "eps", "weight_decay") if key not in group]
        if missing:
            raise ValueError(
                f"FusedAdamW cannot continue a state whose groups have no {', '.join(missing)}; "
                "it was saved by another kind of optimizer"
            )
        reason = unsupported_in_group({**group, "params": []})
        if reason:
            raise ValueError(f"FusedAdamW cannot continue a state that was saved with {reason}")
    return state_dict
