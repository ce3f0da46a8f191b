"""Which settings both strategies take, and which of them this version refuses instead of ignoring."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from soma_lightning.layout.mesh import Layout
from soma_lightning.layout.wrap import WrapOptions, check_settings
from soma_lightning.optim.clipping import check_norm_type

#: Settings whose feature comes later: only their defaults are accepted.
_ONLY_DEFAULT = (
    "compile",
    "activation_checkpointing",
    "async_save",
    "tensor_parallel",
    "pipeline",
    "cpu_offload",
)

_CHOICES: dict[str, tuple[object, ...]] = {
    "fused_optimizer": ("auto", True, False),
    "master_weights": ("auto", True, False),
    "nonfinite": ("skip", "raise"),
    "checkpoint_weights_only": (None, True, False),
    "log_grad_norm": (True, False),
    "save_format": ("auto", "file"),
    "frozen": ("auto", "replicate", "shard"),
    "reshard_after_forward": (None, True, False),
    "keep_low_precision_grads": (True, False),
}


@dataclass(frozen=True)
class StrategyOptions(WrapOptions):
    """The settings of `SomaSpeedStrategy` and `FabricSomaSpeedStrategy`; meanings are documented there.

    Raises ValueError for a value that is not known, or that this version cannot honor, naming what can be used.
    """

    layout: Layout | dict[str, Any] | str = "auto"
    fused_optimizer: Literal["auto"] | bool = "auto"
    master_weights: Literal["auto"] | bool = "auto"
    nonfinite: Literal["skip", "raise"] = "skip"
    max_consecutive_skips: int | None = 10
    norm_type: float = 2.0
    compile: dict[str, Any] | None = None
    activation_checkpointing: dict[str, Any] | None = None
    save_format: Literal["auto", "file", "directory"] = "auto"
    async_save: bool = False
    checkpoint_weights_only: bool | None = None
    log_grad_norm: bool = False
    report: bool | str | Path = True
    tensor_parallel: dict[str, Any] | None = None
    pipeline: dict[str, Any] | None = None
    forward_methods: list[str] | None = None
    cpu_offload: bool = False
    timeout: float = 1800.0

    def __post_init__(self) -> None:
        defaults = {field.name: field.default for field in fields(self)}
        for name in _ONLY_DEFAULT:
            value = getattr(self, name)
            if value != defaults[name]:
                raise ValueError(f"{name}={value!r} is not available in this version; leave it at {defaults[name]!r}")
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if not any(value is choice or (isinstance(choice, str) and value == choice) for choice in choices):
                raise ValueError(f"{name}={value!r} is not available; use one of {', '.join(map(repr, choices))}")
        skips = self.max_consecutive_skips
        if skips is not None and (isinstance(skips, bool) or not isinstance(skips, int) or skips < 1):
            raise ValueError(
                f"max_consecutive_skips={skips!r} must be an integer of at least 1; None never stops the run"
            )
        if not isinstance(self.report, bool) and not str(self.report).endswith(".json"):
            raise ValueError(f"report={self.report!r} must be True, False or the path of a .json file")
        check_norm_type(self.norm_type)
        check_settings(self)
        if (
            isinstance(self.timeout, bool)
            or not isinstance(self.timeout, int | float)
            or not 0 < self.timeout < math.inf
        ):
            raise ValueError(f"timeout={self.timeout!r} must be a positive number of seconds")
        if self.forward_methods is not None and (
            not isinstance(self.forward_methods, list | tuple)
            or not all(isinstance(name, str) for name in self.forward_methods)
        ):
            raise ValueError(
                f"forward_methods={self.forward_methods!r} must be a list of names, for example ['sample_actions']"
            )
        if self.fused_optimizer is False:
            self.refuse_without_fused_step("fused_optimizer=False")

    @property
    def plans_units(self) -> bool:
        """Whether a setting is about units or their dtypes, so that one process has to look at it too."""
        wraps = self.wrap_policy or self.wrappers or self.mixed_precision_policies
        return bool(wraps or self.mixed_precision or self.mixed_precision_rules or self.keep_low_precision_grads)

    def refuse_without_fused_step(self, reason: str) -> None:
        """ValueError if a setting needs the fused optimizer step; `reason` says why that is off."""
        needs = {
            "master_weights=True": self.master_weights is True,
            "nonfinite='raise'": self.nonfinite == "raise",
            "log_grad_norm=True": self.log_grad_norm,
        }
        for setting, is_set in needs.items():
            if is_set:
                raise ValueError(f"{setting} needs the fused optimizer step, which is off here: {reason}")
