"""How an optimizer that was built before sharding finds the parameters that took the place of its own.

Sharding replaces every Parameter object. An optimizer made in `__init__`, or handed to `fabric.setup`, would go on
updating tensors that no module holds.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from soma_lightning.layout.full_state import shard_like


class ParameterNames:
    """Who is who before and after sharding, over all modules of a run. Keeps no parameter alive."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[weakref.ref[Tensor], weakref.ref[Module], str]] = {}
        self._modules: weakref.WeakSet[Module] = weakref.WeakSet()
        self._live: weakref.WeakKeyDictionary[Module, dict[str, Tensor]] = weakref.WeakKeyDictionary()

    def remember(self, module: Module) -> None:
        """Call before `module` is sharded."""
        self._before = {key: entry for key, entry in self._before.items() if entry[0]() is not None}
        for name, param in module.named_parameters():
            self._before[id(param)] = (weakref.ref(param), weakref.ref(module), name)

    def follow(self, module: Module) -> None:
        """Call after `module` was sharded."""
        self._live[module] = dict(module.named_parameters())

    def name_of(self, param: Tensor) -> str | None:
        """Qualified name of a parameter of today, None for a stranger."""
        for live in self._live.values():
            for name, candidate in live.items():
                if candidate is param:
                    return name
        return None

    def relink(self, optimizer: Optimizer) -> int:
        """Puts today's parameters in the place of those from before, with their state; returns how many there were.

        Raises ValueError for parameters that belong to no module of the run, naming what is known of them.
        """
        live = {id(param) for params in self._live.values() for param in params.values()}
        replaced: dict[Tensor, Tensor] = {}
        strangers = []
        for param in (p for group in optimizer.param_groups for p in group["params"]):
            if id(param) in live:
                continue
            today = self._today(param)
            if today is None:
                strangers.append(param)
            else:
                replaced[param] = today
        if strangers:
            raise ValueError(self._refusal(optimizer, strangers))
        for group in optimizer.param_groups:
            group["params"] = [replaced.get(p, p) for p in group["params"]]
        for old, new in replaced.items():
            if old in optimizer.state:
                state = optimizer.state.pop(old)
                optimizer.state[new] = {
                    key: shard_like(value, new) if isinstance(value, Tensor) else value for key, value in state.items()
                }
        return len(replaced)

    def _today(self, param: Tensor) -> Tensor | None:
        reference, module_reference, name = self._before.get(id(param), (None, None, ""))
        if reference is None or module_reference is None or reference() is not param:
            return None
        module = module_reference()
        return None if module is None else self._live.get(module, {}).get(name)

    def _refusal(self, optimizer: Optimizer, strangers: Sequence[Tensor]) -> str:
        named = {}
        for reference, _, name in self._before.values():
            if (param := reference()) is not None:
                named[id(param)] = name
        shown = ", ".join(named.get(id(p)) or f"a tensor of shape {tuple(p.shape)}" for p in strangers[:5])
        more = f" and {len(strangers) - 5} more" if len(strangers) > 5 else ""
        return (
            f"{type(optimizer).__name__} holds {len(strangers)} parameters that are in no module of this run: {shown}"
            f"{more}; several processes cannot keep them equal. Set the module up before its optimizer, and build the "
            "optimizer from parameters of that module"
        )
