"""Why a step was skipped, in words: which gradient held a NaN or an infinity, and on which rank."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from soma_lightning.optim.fused_adamw import FusedAdamW
from soma_lightning.optim.groups import label

_BAD = "holds a NaN or an infinity"


def explain_nonfinite(
    optimizer: FusedAdamW, name_of: Callable[[Tensor], str] | None = None, *, ask_all_ranks: bool = False
) -> str:
    """Why the last step of `optimizer` was skipped, as a clause for an error; waits for the device.

    name_of: words for a parameter; None: its number and shape.
    ask_all_ranks: a collective, for all ranks to call together: names rank and parameter to all of them. Without it a
    rank knows only that another one has the bad gradient.
    """
    bad = optimizer.first_nonfinite_parameter()
    name = None if bad is None else name_of(bad) if name_of is not None else label(bad, optimizer.param_groups)
    ownership, vector = optimizer.ownership, optimizer._control.last_vector
    if ownership is not None and ask_all_ranks:
        found = [(rank, text) for rank, text in ownership.gather(name) if text is not None]
        if found:
            rank, text = found[0]
            more = f", and so do gradients on {len(found) - 1} more ranks" if len(found) > 1 else ""
            return f"the gradient of {text} on rank {rank} {_BAD}{more}"
    elif name is not None:
        return f"the gradient of {name} {_BAD}"
    elif ownership is not None and vector is not None and vector[0] > 0:
        return f"a gradient on another rank {_BAD}"
    return "the norm is not finite or the normalizer not positive"
