"""How do weights move between our names and the public checkpoints? Strictly, and straight from safetensors.

Two public layouts hold the same tensors: "lerobot" (keys start with `model.`) and "openpi" (converted PyTorch weights,
bare keys). Both readers accept either form, with the SigLIP keys nested (`vision_tower.vision_model.`) or flat. The
used network has 811 tensors; files have 812 or 813, because two language-model heads that no policy uses are stored:

- `paligemma.lm_head.weight` equals the token embedding. Files written with tied weights keep only this name, others
  hold both; lerobot's strict loader needs it and copies it into the embedding. We write this name only.
- `gemma_expert.lm_head.weight` is never read by anyone, yet both public loaders refuse a file without it. We write
  zeros in bfloat16 (0.5 GB at full size); we neither allocate nor load it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import torch
from torch import Tensor, nn

from soma_lightning.models.pi05.config_files import CheckpointLayout, read_config, write_config

if TYPE_CHECKING:
    from soma_lightning.models.pi05.model import PI05Model

__all__ = [
    "WEIGHTS_FILE",
    "CheckpointLayout",
    "load_weights",
    "own_name",
    "public_key",
    "public_state_dict",
    "read_config",
    "save_state_dict",
    "save_weights",
    "weights_file",
    "write_config",
]

WEIGHTS_FILE = "model.safetensors"

_PALIGEMMA = "paligemma_with_expert.paligemma."
_EXPERT = "paligemma_with_expert.gemma_expert."
_EMBEDDING = f"{_PALIGEMMA}model.language_model.embed_tokens.weight"
_TIED_HEAD = f"{_PALIGEMMA}lm_head.weight"
_UNUSED_HEAD = f"{_EXPERT}lm_head.weight"

#: (start of our name, start of the public key); the first row that fits is used, in both directions.
_NAMES = (
    ("prefix.paligemma.vision_tower.", f"{_PALIGEMMA}model.vision_tower.vision_model."),
    ("prefix.paligemma.", f"{_PALIGEMMA}model."),
    ("expert.layers.", f"{_EXPERT}model.layers."),
    ("expert.norm.", f"{_EXPERT}model.norm."),
    ("expert.", ""),
)
#: Keys of older or wider checkpoints that this network has no place for.
_DROPPED = re.compile(
    rf"{re.escape(_UNUSED_HEAD)}"
    r"|state_proj\..*"  # pi0 has a state token, pi0.5 writes the state into the prompt
    rf"|{re.escape(_EXPERT)}model\.(layers\.\d+\.(input|post_attention)_layernorm|norm)\.weight"  # not adaptive
)
_SHOWN = 12


def public_key(name: str) -> str:
    """The public (openpi) key of one of our parameter names."""
    for ours, public in _NAMES:
        if name.startswith(ours):
            return public + name.removeprefix(ours)
    raise ValueError(f"'{name}' is no parameter of a pi0.5 network")


def own_name(key: str) -> str | None:
    """Our parameter name of a public key in any accepted form; None for keys that are dropped.

    `paligemma.lm_head.weight` maps to the embedding. A key that nobody knows maps to a name that no network has.
    """
    key = key.removeprefix("model.")
    if key.startswith("action_time_mlp_"):
        key = key.removeprefix("action_")
    if _DROPPED.fullmatch(key):
        return None
    key = _EMBEDDING if key == _TIED_HEAD else key
    return next(ours + key.removeprefix(public) for ours, public in _NAMES if key.startswith(public))


def public_state_dict(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A PI05Model's state dict under public keys (811 tensors at full size, embedding under its own name)."""
    return {public_key(name): tensor for name, tensor in state_dict.items()}


def load_weights(model: PI05Model, path: str | Path) -> None:
    """Fills every parameter of `model` from a checkpoint folder or a safetensors file, in the model's own dtypes.

    A model built on the meta device is materialised on the CPU. Raises FileNotFoundError when there is no file, and
    ValueError, before anything is changed, for a damaged file and for keys or shapes that do not fit (all of them are
    listed).
    """
    from safetensors import SafetensorError, safe_open

    file = weights_file(path)
    try:
        opened = safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is no readable safetensors file ({error}); it may be damaged or cut short") from error
    parameters = dict(model.named_parameters())
    with opened as tensors:
        sources, unexpected = _match(tensors.keys(), parameters, file)
        slices = {name: tensors.get_slice(key) for name, key in sources.items()}
        shapes = {name: tuple(part.get_shape()) for name, part in slices.items()}
        kinds = {name: part.get_dtype() for name, part in slices.items()}
        unusable = [f"{sources[name]} ({kind})" for name, kind in kinds.items() if not kind.startswith(("F", "BF"))]
        _check_complete(file, parameters, sources, shapes, {"unexpected": unexpected, "not floating-point": unusable})
        for name, parameter in parameters.items():
            _fill(model, name, parameter, tensors.get_tensor(sources[name]))
    if any(buffer.is_meta for buffer in model.buffers()):
        model.prefix.reset_buffers()


def weights_file(path: str | Path) -> Path:
    """The safetensors file of a checkpoint folder, or `path` itself when it is a file."""
    path = Path(path)
    file = path / WEIGHTS_FILE if path.is_dir() else path
    if not file.is_file():
        there = sorted(p.name for p in path.iterdir()) if path.is_dir() else "nothing"
        raise FileNotFoundError(f"there is no {file}; a pi0.5 checkpoint is one safetensors file ({path} has {there})")
    return file


def save_weights(model: PI05Model, path: str | Path, layout: CheckpointLayout = "lerobot") -> Path:
    """Writes the weights so that lerobot or openpi loads them strictly; returns the file.

    path: a folder (then `model.safetensors` inside it) or a file name that ends in .safetensors. Dtypes are kept.
    """
    return save_state_dict(model.state_dict(), path, layout)


def save_state_dict(state_dict: Mapping[str, Tensor], path: str | Path, layout: CheckpointLayout = "lerobot") -> Path:
    """As `save_weights`, from the state dict of a PI05Model (for example gathered from shards)."""
    from safetensors.torch import save_file

    if layout not in get_args(CheckpointLayout):
        raise ValueError(f"layout={layout!r} is unknown; known: {list(get_args(CheckpointLayout))}")
    path = Path(path)
    file = path if path.suffix == ".safetensors" else path / WEIGHTS_FILE
    tensors = public_state_dict(state_dict)
    without_values = sorted(key for key, tensor in tensors.items() if tensor.is_meta)
    if without_values:
        raise ValueError(
            f"{len(without_values)} tensors have no values (meta device), the first is {without_values[0]}"
        )
    embedding = tensors.pop(_EMBEDDING)
    tensors[_TIED_HEAD] = embedding
    expert_width = tensors["action_in_proj.weight"].shape[0]
    tensors[_UNUSED_HEAD] = torch.zeros(embedding.shape[0], expert_width, dtype=torch.bfloat16)
    prefix = "model." if layout == "lerobot" else ""
    file.parent.mkdir(parents=True, exist_ok=True)
    save_file({prefix + k: v.detach().cpu().contiguous() for k, v in tensors.items()}, file, metadata={"format": "pt"})
    return file


def _match(keys: Iterable[str], parameters: Mapping[str, nn.Parameter], file: Path) -> tuple[dict[str, str], list[str]]:
    """({our name: key of the file}, keys that fit no parameter)."""
    sources: dict[str, str] = {}
    unexpected = []
    for key in sorted(keys):
        name = own_name(key)
        if name is None:
            continue
        if name not in parameters:
            unexpected.append(key)
        elif name not in sources or sources[name].endswith(_TIED_HEAD):
            sources[name] = key  # an untied file holds both embedding and head: the embedding is the one in use
        elif not key.endswith(_TIED_HEAD):
            raise ValueError(
                f"{file} holds {key} and {sources[name]}, two forms of one tensor; it was not written whole"
            )
    return sources, unexpected


def _check_complete(
    file: Path,
    parameters: Mapping[str, nn.Parameter],
    sources: Mapping[str, str],
    shapes: Mapping[str, tuple[int, ...]],
    wrong: Mapping[str, list[str]],
) -> None:
    missing = [public_key(name) for name in parameters if name not in sources]
    misshaped = [
        f"{sources[name]} is {list(shape)}, the network has {list(parameters[name].shape)}"
        for name, shape in shapes.items()
        if shape != tuple(parameters[name].shape)
    ]
    problems = {"missing": missing, **wrong, "of another shape": misshaped}
    if not any(problems.values()):
        return
    lines = [f"{file} does not fit the network:"]
    for title, found in problems.items():
        if found:
            more = f", and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
            lines.append(f"  {len(found)} {title}: {', '.join(found[:_SHOWN])}{more}")
    lines.append("Is the configuration (sizes, max_action_dim, image_resolution, vocab_size) the checkpoint's own?")
    raise ValueError("\n".join(lines))


@torch.no_grad()
def _fill(model: nn.Module, name: str, parameter: nn.Parameter, value: Tensor) -> None:
    if not parameter.is_meta:
        parameter.copy_(value)
        return
    filled = torch.empty(parameter.shape, dtype=parameter.dtype).copy_(value)
    owner, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, nn.Parameter(filled, requires_grad=parameter.requires_grad))
