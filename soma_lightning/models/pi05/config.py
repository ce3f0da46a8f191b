"""Which numbers define a pi0.5 policy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from difflib import get_close_matches
from math import inf
from types import UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

#: What trains (see `PI05Config`).
Trainable = Literal["expert", "all_but_vision", "all"]


@dataclass(frozen=True)
class VisionConfig:
    """SigLIP vision tower (pre-LN ViT, learned positions, gelu-tanh, final LayerNorm, no pooling head)."""

    width: int = 1152
    depth: int = 27
    num_heads: int = 16
    mlp_width: int = 4304
    patch_size: int = 14


@dataclass(frozen=True)
class StreamConfig:
    """One Gemma stream: the language model of the prefix, or the action expert."""

    width: int
    mlp_width: int
    depth: int = 18
    num_heads: int = 8
    num_kv_heads: int = 1
    head_dim: int = 256


@dataclass(frozen=True)
class PI05Config:
    """Everything that a pi0.5 checkpoint needs besides weights, statistics and tokenizer. Defaults: the public base.

    cameras: camera keys of a batch, in slot order. empty_cameras: further slots that are always masked.
    action_dim / state_dim: real dimensions of the robot; None until the data or a checkpoint says them.
    max_action_dim: width the actions are zero-padded to (the network's own action width).
    delta_actions: action dimensions that the network sees relative to the state's dimension of the same number at the
    chunk's first step; batches and executed actions stay absolute, and statistics are of the differences.
    prompt: "state" spells the discretised state in the prompt, "task" does not (two public families).
    normalization: "quantiles" maps q01..q99 to -1..1, "mean_std" standardises; normalization_eps says whose epsilon.
    loss_dims: "real" averages over action_dim (lerobot), "padded" over max_action_dim (openpi).
    pad_actions: "mask" leaves steps past the episode's end out of the loss, "repeat" trains on them (both ports).
    dtype: compute and storage of the matrix products; the fp32 islands follow `islands`.
    trainable: "expert" freezes the prefix, "all_but_vision" the vision tower alone, "all" trains the whole network.
    zero_images: the policy sees black images (a control that shows whether vision is used).
    """

    vision: VisionConfig = field(default_factory=VisionConfig)
    language: StreamConfig = field(default_factory=lambda: StreamConfig(width=2048, mlp_width=16384))
    expert: StreamConfig = field(default_factory=lambda: StreamConfig(width=1024, mlp_width=4096))
    vocab_size: int = 257152
    cameras: tuple[str, ...] = ("observation.images.image", "observation.images.image2")
    empty_cameras: int = 1
    image_resolution: int = 224
    tokenizer: str = "google/paligemma-3b-pt-224"
    tokenizer_max_length: int = 200
    prompt: Literal["state", "task"] = "state"
    normalization: Literal["quantiles", "mean_std"] = "quantiles"
    normalization_eps: Literal["lerobot", "openpi"] = "lerobot"
    action_dim: int | None = None
    state_dim: int | None = None
    max_action_dim: int = 32
    delta_actions: tuple[int, ...] = ()
    chunk_size: int = 50
    n_action_steps: int = 50
    num_inference_steps: int = 10
    time_beta_alpha: float = 1.5
    time_beta_beta: float = 1.0
    time_scale: float = 0.999
    time_offset: float = 0.001
    min_period: float = 4e-3
    max_period: float = 4.0
    loss_dims: Literal["real", "padded"] = "real"
    pad_actions: Literal["mask", "repeat"] = "mask"
    dtype: Literal["float32", "bfloat16"] = "float32"
    islands: Literal["lerobot", "openpi"] = "lerobot"
    trainable: Trainable = "expert"
    zero_images: bool = False

    def __post_init__(self) -> None:
        for name, kind in (("vision", VisionConfig), ("language", StreamConfig), ("expert", StreamConfig)):
            value = getattr(self, name)
            if isinstance(value, dict):
                _check_fields(name, value, kind)
                object.__setattr__(self, name, kind(**value))
            _check_types(getattr(self, name), f"{name}.")
        for name in ("cameras", "delta_actions"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
        _check_types(self, "")
        self._check()

    def _check(self) -> None:
        if self.expert.head_dim != self.language.head_dim or self.expert.num_kv_heads != self.language.num_kv_heads:
            raise ValueError(
                f"the expert attends the prefix's keys, so head_dim and num_kv_heads must agree: expert "
                f"{self.expert.head_dim}/{self.expert.num_kv_heads}, language "
                f"{self.language.head_dim}/{self.language.num_kv_heads}"
            )
        if self.expert.depth != self.language.depth:
            raise ValueError(f"expert.depth={self.expert.depth} must equal language.depth={self.language.depth}")
        if not 1 <= self.n_action_steps <= self.chunk_size:
            raise ValueError(f"n_action_steps={self.n_action_steps} must lie in 1..chunk_size={self.chunk_size}")
        if self.action_dim is not None and self.action_dim > self.max_action_dim:
            raise ValueError(
                f"action_dim={self.action_dim} is larger than the model's max_action_dim={self.max_action_dim}; "
                "select fewer action dimensions, or build a model with a larger max_action_dim"
            )
        if self.image_resolution % self.vision.patch_size:
            raise ValueError(
                f"image_resolution={self.image_resolution} is no multiple of patch_size={self.vision.patch_size}"
            )
        widths = {"action_dim": self.action_dim or self.max_action_dim, "state_dim": self.state_dim}
        for name, width in widths.items():
            if width is not None and any(not 0 <= dim < width for dim in self.delta_actions):
                raise ValueError(
                    f"delta_actions={list(self.delta_actions)} must lie in 0..{width - 1}: {name}={width}; an action "
                    "dimension is relative to the state dimension of the same number, so order both with "
                    "state_indices and action_indices in the data module"
                )
        if len(set(self.delta_actions)) != len(self.delta_actions):
            raise ValueError(f"delta_actions={list(self.delta_actions)} names a dimension twice")
        self._check_numbers()
        if not self.cameras:
            raise ValueError("cameras is empty; a pi0.5 policy needs at least one camera")

    def _check_numbers(self) -> None:
        for name in ("time_beta_alpha", "time_beta_beta", "min_period", "max_period"):
            if not 0 < getattr(self, name) < inf:
                raise ValueError(f"{name}={getattr(self, name)} must be positive and finite")
        last = self.time_offset + self.time_scale
        if not 0 <= self.time_offset <= last <= 1 + 1e-9:
            raise ValueError(
                f"time_offset={self.time_offset} and time_scale={self.time_scale} put flow times into "
                f"{self.time_offset}..{last}, beyond 0..1"
            )
        if self.min_period >= self.max_period:
            raise ValueError(f"min_period={self.min_period} must be shorter than max_period={self.max_period}")

    @property
    def image_tokens(self) -> int:
        """Tokens of one camera."""
        return (self.image_resolution // self.vision.patch_size) ** 2

    @classmethod
    def base(cls, **changes: Any) -> PI05Config:
        """The public pi0.5 base: 3,353,433,872 parameters."""
        return cls(**changes)

    @classmethod
    def tiny(cls, **changes: Any) -> PI05Config:
        """The same network at 0.6 M parameters for 64-pixel images, small enough to train on two CPU cores."""
        sizes: dict[str, Any] = {
            "vision": VisionConfig(width=96, depth=2, num_heads=4, mlp_width=288, patch_size=16),
            "language": StreamConfig(width=96, mlp_width=192, depth=2, num_heads=4, head_dim=32),
            "expert": StreamConfig(width=64, mlp_width=128, depth=2, num_heads=4, head_dim=32),
            "vocab_size": 640,
            "empty_cameras": 0,
            "image_resolution": 64,
            "tokenizer": "builtin",
            "tokenizer_max_length": 32,
            "max_action_dim": 7,
            "chunk_size": 8,
            "n_action_steps": 4,
            "num_inference_steps": 5,
        }
        return cls(**{**sizes, **changes})

    def to_dict(self) -> dict[str, Any]:
        """Plain nested dictionary (JSON-ready); `from_dict` reads it back."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> PI05Config:
        """Raises ValueError naming keys that no configuration has."""
        unknown = sorted(set(values) - {f.name for f in fields(cls)})
        if unknown:
            raise ValueError(f"unknown pi0.5 configuration keys {unknown}; known: {[f.name for f in fields(cls)]}")
        return cls(**values)


def changed_config(config: PI05Config, changes: Mapping[str, Any]) -> PI05Config:
    """`config` with some fields replaced; nested parts may be given as dictionaries.

    Raises ValueError naming unknown fields and the nearest known ones.
    """
    known = [field.name for field in fields(PI05Config)]
    for name in changes:
        if name not in known:
            near = get_close_matches(name, known, n=3)
            raise ValueError(f"pi0.5 has no configuration field '{name}'; nearest: {near or known}")
    return replace(config, **changes)


def _check_fields(name: str, values: dict[str, Any], kind: type) -> None:
    known = [f.name for f in fields(kind)]
    if unknown := sorted(set(values) - set(known)):
        raise ValueError(f"{name} has no {unknown}; it has {known}")
    if missing := [f.name for f in fields(kind) if f.default is MISSING and f.name not in values]:
        raise ValueError(f"{name} lacks {missing}")


def _check_types(config: Any, prefix: str) -> None:
    """Raises ValueError naming the first field whose value is not of its declared type; sizes must be at least 1."""
    for name, hint in get_type_hints(type(config)).items():
        value = getattr(config, name)
        if not _is_of(value, hint):
            choices = (
                f"one of {list(get_args(hint))}" if get_origin(hint) is Literal else getattr(hint, "__name__", hint)
            )
            raise ValueError(f"{prefix}{name}={value!r} must be {choices}")
        least = 0 if name in ("empty_cameras", "depth") else 1
        if isinstance(value, int) and hint not in (bool, float) and value < least:
            raise ValueError(f"{prefix}{name}={value} must be at least {least}")


def _is_of(value: Any, hint: Any) -> bool:
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if isinstance(hint, UnionType):
        return any(_is_of(value, part) for part in get_args(hint))
    if get_origin(hint) is tuple:
        return isinstance(value, tuple) and all(_is_of(item, get_args(hint)[0]) for item in value)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, hint) and not (hint is int and isinstance(value, bool))
