"""What a run really does, told at its start: what trains, what is frozen, by which paths and in which versions."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from soma_lightning.attention import attention_path
from soma_lightning.layout.shard import ShardedModule
from soma_lightning.optim.shards import local
from soma_lightning.optim.state import LOW_PRECISION

#: Names printed from a longer list; the JSON file has all of them.
_NAMES_SHOWN = 3


@dataclass(frozen=True)
class ParameterFacts:
    """One set of parameters: qualified names, how many tensors and elements, and elements by dtype."""

    names: list[str]
    tensors: int
    parameters: int
    dtypes: dict[str, int]

    @classmethod
    def of(cls, named: Iterable[tuple[str, Tensor]]) -> ParameterFacts:
        pairs = list(named)
        dtypes: Counter[str] = Counter()
        for _, param in pairs:
            dtypes[str(param.dtype).removeprefix("torch.")] += param.numel()
        return cls([name for name, _ in pairs], len(pairs), sum(dtypes.values()), dict(dtypes))

    def summary(self) -> str:
        shown = ", ".join(self.names[:_NAMES_SHOWN]) + (", ..." if len(self.names) > _NAMES_SHOWN else "")
        dtypes = ", ".join(f"{dtype} {count:,}" for dtype, count in self.dtypes.items())
        return f"{self.parameters:,} parameters in {self.tensors} tensors ({dtypes or 'none'}) {shown}".rstrip()


@dataclass(frozen=True)
class OptimizerFacts:
    """One optimizer: class, how it steps and why; per group learning rate, weight decay, own limit, elements."""

    name: str
    path: str
    groups: list[dict[str, float]]

    @classmethod
    def of(cls, optimizer: Optimizer, path: str) -> OptimizerFacts:
        groups = [
            {key: float(group[key]) for key in ("lr", "weight_decay", "max_norm") if group.get(key) is not None}
            | {"parameters": sum(p.numel() for p in group["params"] if p.requires_grad)}
            for group in optimizer.param_groups
        ]
        return cls(type(optimizer).__name__, path, groups)


@dataclass(frozen=True)
class RunReport:
    """The facts of one run; `summary()` is printed, `write()` saves everything as JSON.

    trainable, frozen: by `requires_grad`. unoptimized: trainable names that no optimizer holds.
    sharding: with several processes, `ShardedModule.facts()` and `bytes of a rank`: what it holds between steps;
    gathered units and activations come on top.
    model, data: what `report_facts()` of the module and the data module return.
    """

    trainable: ParameterFacts
    frozen: ParameterFacts
    unoptimized: list[str]
    optimizers: list[OptimizerFacts]
    clipping: str
    precision: str
    attention: str
    layout: dict[str, int]
    device: str
    versions: dict[str, str]
    sharding: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)

    def summary(self) -> str:
        lines = [
            f"trainable:  {self.trainable.summary()}",
            f"frozen:     {self.frozen.summary()}",
            *(f"optimizer:  {optimizer.path}" for optimizer in self.optimizers),
            f"clipping:   {self.clipping}",
            f"precision:  {self.precision}",
            f"attention:  {self.attention}",
            f"layout:     {' x '.join(f'{dim} {size}' for dim, size in self.layout.items())} on {self.device}",
            *self._sharding_lines(),
            f"versions:   {', '.join(f'{name} {version}' for name, version in self.versions.items())}",
            *(f"{f'{key}:':<11} {_short(value)}" for key, value in {**self.model, **self.data}.items()),
        ]
        if self.unoptimized:
            lines.insert(2, f"in no optimizer: {_short(self.unoptimized)}")
        return "\n".join(["SomaSpeed run report", *(f"  {line}" for line in lines)])

    def _sharding_lines(self) -> list[str]:
        if not self.sharding:
            return []
        units = self.sharding["units"]
        kinds = Counter((u["trainable"], u["dtype"], u["param_dtype"], u["reduce_dtype"]) for u in units)
        described = [
            f"{count} {'trainable' if trains else 'frozen'} ({stored}, gathered in {gathered}, reduced in {reduced})"
            for (trains, stored, gathered, reduced), count in kinds.items()
        ]
        whole = self.sharding["whole on every rank"]
        memory = {key: f"{size / 2**20:,.1f} MiB" for key, size in self.sharding["bytes of a rank"].items()}
        return [
            f"units:      {f'{len(units)}: ' if units else ''}{'; '.join(described) or 'none, nothing is divided'}",
            f"whole:      {whole['frozen']:,} frozen and {whole['trainable']:,} trainable parameters on every rank",
            f"memory:     about {', '.join(f'{key} {size}' for key, size in memory.items())} on rank 0",
        ]

    def write(self, path: str | Path) -> None:
        """Writes the whole report as JSON, replacing an older file in one step."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        unfinished.write_text(json.dumps(asdict(self), indent=2) + "\n")
        unfinished.replace(path)


def build_report(
    module: Module,
    optimizers: Sequence[tuple[Optimizer, str]],
    *,
    clipping: str,
    precision: str,
    layout: dict[str, int],
    device: torch.device,
    data: object = None,
    sharded: ShardedModule | None = None,
) -> RunReport:
    """Collects the facts now. optimizers: pairs of optimizer and how it steps. data: the data module, if any.

    sharded: how `module` was divided over several processes.

    Raises TypeError when a `report_facts()` returns something that JSON cannot hold.
    """
    named = list(module.named_parameters())
    optimized = {id(p) for optimizer, _ in optimizers for group in optimizer.param_groups for p in group["params"]}
    return RunReport(
        trainable=ParameterFacts.of((name, p) for name, p in named if p.requires_grad),
        frozen=ParameterFacts.of((name, p) for name, p in named if not p.requires_grad),
        unoptimized=[name for name, p in named if p.requires_grad and id(p) not in optimized],
        optimizers=[OptimizerFacts.of(optimizer, path) for optimizer, path in optimizers],
        clipping=clipping,
        precision=precision,
        attention=attention_path(),
        layout=layout,
        device=_device_name(device),
        versions=_versions(),
        sharding={} if sharded is None else {**sharded.facts(), "bytes of a rank": _bytes(module, optimizers)},
        model=_own_facts(module),
        data=_own_facts(data),
    )


def _bytes(module: Module, optimizers: Sequence[tuple[Optimizer, str]]) -> dict[str, int]:
    """What this rank holds between steps, moments of AdamW included."""
    params = [(p, local(p).nbytes) for p in module.parameters()]
    state = 0
    for optimizer, _ in optimizers:
        held = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        for p in held:
            has_master = getattr(optimizer, "master_weights", False) and p.dtype in LOW_PRECISION
            state += local(p).numel() * (12 if has_master else 2 * p.element_size())
    return {
        "parameters": sum(size for _, size in params),
        "gradients": sum(size for p, size in params if p.requires_grad),
        "optimizer": state,
    }


def _own_facts(source: object) -> dict[str, Any]:
    report_facts = getattr(source, "report_facts", None)
    if report_facts is None:
        return {}
    facts = report_facts()
    try:
        json.dumps(facts)
    except TypeError as error:
        raise TypeError(f"{type(source).__name__}.report_facts() must return JSON values: {error}") from error
    return dict(facts)


def _device_name(device: torch.device) -> str:
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else str(device)


def _versions() -> dict[str, str]:
    """Versions of what is loaded: nothing is imported to ask for its version."""
    names = ("torch", "lightning", "transformers", "triton", "soma_lightning")
    return {name: str(sys.modules[name].__version__) for name in names if hasattr(sys.modules.get(name), "__version__")}


def _short(value: object) -> str:
    """Lists are cut, because names may be many; settings are shown whole."""
    if isinstance(value, dict):
        return ", ".join(f"{key} {setting}" for key, setting in value.items()) or "none"
    if isinstance(value, list) and value and all(isinstance(one, dict) for one in value):
        return "; ".join(map(_short, value))
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if len(text) <= 100 else f"{text[:97]}..."
