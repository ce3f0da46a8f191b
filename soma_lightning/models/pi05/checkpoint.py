"""How do weights move between our names and the public checkpoints? Strictly, and one tensor at a time.

Two public layouts hold the same tensors: "lerobot" (keys start with `model.`) and "openpi" (converted PyTorch weights,
bare keys). Both readers accept either form, with the SigLIP keys nested (`vision_tower.vision_model.`) or flat; we read
all of them, and RLinf's `full_weights.pt` (openpi's keys and a value head), whatever a file says of itself. The used
network has 811 tensors; files have 812 or 813, because two language-model heads that no policy uses are stored:

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
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from soma_lightning.layout.full_state import own_slice
from soma_lightning.models.pi05.config_files import CheckpointLayout, read_config, write_config
from soma_lightning.models.tensor_files import TensorFile, gather_in_turn, whole, write_safetensors
from soma_lightning.optim.masters import master_values, named_low_precision, seed_master

if TYPE_CHECKING:
    from soma_lightning.models.pi05.model import PI05Model

__all__ = [
    "WEIGHTS_FILE",
    "WEIGHTS_FILES",
    "CheckpointLayout",
    "load_weights",
    "own_name",
    "public_key",
    "public_state_dict",
    "read_config",
    "save_state_dict",
    "save_weights",
    "seed_masters",
    "weights_file",
    "write_config",
]

WEIGHTS_FILE = "model.safetensors"
#: Where a checkpoint folder may have its weights; the last two are RLinf's.
WEIGHTS_FILES = (WEIGHTS_FILE, "full_weights.pt", "actor/model_state_dict/full_weights.pt")

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
    r"|value_head\..*"  # RLinf's critic, which imitation and evaluation do not ask
    r"|state_proj\..*"  # pi0 has a state token, pi0.5 writes the state into the prompt
    rf"|{re.escape(_EXPERT)}model\.(layers\.\d+\.(input|post_attention)_layernorm|norm)\.weight"  # not adaptive
)
#: In names of adapted layers: before the parameters of the layer itself, and before those of its adapter.
_BASE_LAYER, _ADAPTER = ".base_layer.", ".lora_"
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


def load_weights(model: PI05Model, path: str | Path, device: str | torch.device | None = None) -> None:
    """Fills every parameter of `model` from a checkpoint folder or file, in the model's own dtypes and places.

    device: where the parameters of a model that was built on the meta device are put, each straight from the mapped
    file; None means torch's default device. A parameter that is a DTensor takes its own slice of the file.

    Raises FileNotFoundError when there is no file, and ValueError, before anything is changed, for a damaged file, for
    keys or shapes that do not fit (all of them are listed), and for a device that has no effect.
    """
    file = weights_file(path)
    tensors = TensorFile(file)
    parameters = base_parameters(model)
    sources = _fitting(tensors, parameters)
    place = _place(parameters, device)
    with torch.no_grad():
        for name, key in sources.items():
            _fill(model, name, parameters[name], tensors.read(key), place)
    model.prefix.reset_buffers()


def seed_masters(model: PI05Model, optimizer: Optimizer, path: str | Path) -> None:
    """Starts the optimizer's fp32 masters of `model` at the values of the checkpoint that it was loaded from.

    Without it they start from the rounded bf16 parameters. Elements that were changed since, and tensors that the file
    holds in the model's own dtype, stay as they are. Errors as in `load_weights`; ValueError when there are no masters.
    """
    trained = named_low_precision(model, optimizer)
    tensors = TensorFile(weights_file(path))
    for name, key in _fitting(tensors, base_parameters(model)).items():
        if name in trained and tensors.dtypes[key] != trained[name].dtype:
            seed_master(optimizer, trained[name], tensors.read(key))


def weights_file(path: str | Path) -> Path:
    """The file with the weights of a checkpoint folder (one of WEIGHTS_FILES), or `path` itself when it is a file.

    Raises FileNotFoundError when there is none, ValueError when there are several.
    """
    path = Path(path)
    if path.is_file():
        return path
    found = [path / name for name in WEIGHTS_FILES if (path / name).is_file()]
    if len(found) > 1:
        raise ValueError(
            f"{path} holds several files of weights ({', '.join(map(str, found))}); pass the folder of one"
        )
    if not found:
        there = sorted(p.name for p in path.iterdir()) if path.is_dir() else "nothing"
        raise FileNotFoundError(
            f"there is no {path / WEIGHTS_FILE}; a pi0.5 checkpoint is one file, {' or '.join(WEIGHTS_FILES)} "
            f"({path} has {there})"
        )
    return found[0]


def save_weights(
    model: PI05Model,
    path: str | Path | None,
    layout: CheckpointLayout = "lerobot",
    optimizer: Optimizer | None = None,
    *,
    values: Mapping[str, Tensor] | None = None,
    frozen_from: str | Path | None = None,
) -> Path | None:
    """Writes the weights so that lerobot or openpi loads them strictly, tensor by tensor; returns the file.

    path: a folder (then `model.safetensors` inside it) or a file name that ends in .safetensors. Dtypes are kept, but
    `optimizer`'s fp32 masters are written in the place of the bf16 parameters that they belong to, and `values` (by our
    parameter names) in the place of any; adapters are merged into float32. frozen_from: the checkpoint from which a
    prefix was loaded that is in fp8 now, or released; the prefix is copied from there. A sharded model is saved by all
    ranks together: one has the path, the others None.
    """
    masters = {} if optimizer is None else master_values(model, optimizer)
    frozen = {} if frozen_from is None else _prefix_tensors(model, frozen_from)
    own = {name: tensor for name, tensor in model.state_dict().items() if not frozen or not name.startswith("prefix.")}
    return save_state_dict({**merged_tensors(model, {**own, **masters, **(values or {})}), **frozen}, path, layout)


def base_parameters(model: PI05Model) -> dict[str, nn.Parameter]:
    """The parameters that a checkpoint has, by their names in a network without adapters."""
    named = list(model.named_parameters())
    if not model.has_prefix:
        named += [(f"prefix.{name}", p) for name, p in model.prefix.named_parameters()]
    return {name.replace(_BASE_LAYER, "."): p for name, p in named if _ADAPTER not in name}


@torch.no_grad()
def merged_tensors(model: PI05Model, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of `model` without adapters (lora.py): what they add is summed in float32, on the CPU, and kept so.

    Shards are gathered: all ranks call it together.
    """
    if model.lora is None:
        return dict(tensors)
    merged = {}
    for name, value in tensors.items():
        layer, is_weight, _ = name.partition(f"{_BASE_LAYER}weight")
        if is_weight:
            a, b = (whole(tensors[f"{layer}{_ADAPTER}{part}.default.weight"]).float() for part in "AB")
            value = (whole(value).float() + model.lora.scale * (b @ a)).cpu()
        if _ADAPTER not in name:
            merged[name.replace(_BASE_LAYER, ".")] = value
    return merged


def _prefix_tensors(model: PI05Model, path: str | Path) -> dict[str, Tensor]:
    """The prefix of a checkpoint that fits the model, mapped from the file."""
    tensors = TensorFile(weights_file(path))
    sources = _fitting(tensors, base_parameters(model))
    return {name: tensors.read(key) for name, key in sources.items() if name.startswith("prefix.")}


def save_state_dict(
    state_dict: Mapping[str, Tensor], path: str | Path | None, layout: CheckpointLayout = "lerobot"
) -> Path | None:
    """As `save_weights`, from the state dict of a PI05Model."""
    if layout not in get_args(CheckpointLayout):
        raise ValueError(f"layout={layout!r} is unknown; known: {list(get_args(CheckpointLayout))}")
    tensors = stored_tensors(state_dict, layout)
    if path is None:
        gather_in_turn(tensors)
        return None
    path = Path(path)
    file = path if path.suffix == ".safetensors" else path / WEIGHTS_FILE
    without_values = sorted(key for key, tensor in tensors.items() if tensor.is_meta)
    if without_values:
        raise ValueError(
            f"{len(without_values)} tensors have no values (meta device), the first is {without_values[0]}"
        )
    file.parent.mkdir(parents=True, exist_ok=True)
    write_safetensors(file, tensors)
    return file


def stored_tensors(state_dict: Mapping[str, Tensor], layout: CheckpointLayout) -> dict[str, Tensor]:
    """What a file of `layout` holds, by its keys: 812 tensors at full size, among them both language heads."""
    tensors = public_state_dict(state_dict)
    embedding = tensors.pop(_EMBEDDING)
    tensors[_TIED_HEAD] = embedding
    expert_width = tensors["action_in_proj.weight"].shape[0]
    zero = torch.zeros((), dtype=torch.bfloat16, device="cpu")  # it takes memory only while it is written
    tensors[_UNUSED_HEAD] = zero.expand(embedding.shape[0], expert_width)
    prefix = "model." if layout == "lerobot" else ""
    return {prefix + key: value for key, value in tensors.items()}


def _fitting(tensors: TensorFile, parameters: Mapping[str, nn.Parameter]) -> dict[str, str]:
    """{our name: key}, in the order of the file; ValueError that lists everything that does not fit."""
    sources, unexpected = _match(tensors.shapes, parameters, tensors.file)
    shapes = {name: tensors.shapes[key] for name, key in sources.items()}
    dtypes = {key: tensors.dtypes[key] for key in sources.values()}
    unusable = [f"{key} ({dtype})" for key, dtype in dtypes.items() if not dtype.is_floating_point]
    wrong = {"unexpected": unexpected, "not floating-point": unusable}
    _check_complete(tensors.file, parameters, sources, shapes, wrong)
    place = {key: index for index, key in enumerate(tensors.shapes)}
    return dict(sorted(sources.items(), key=lambda item: place[item[1]]))


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


def _place(parameters: Mapping[str, nn.Parameter], device: str | torch.device | None) -> torch.device:
    """Where parameters without values go."""
    place = torch.get_default_device() if device is None else torch.device(device)
    if any(parameter.is_meta for parameter in parameters.values()):
        if any(isinstance(parameter, DTensor) for parameter in parameters.values()):
            raise ValueError("the network is sharded and on the meta device; call model.to_empty(device=...) first")
        if place.type == "meta":
            raise ValueError("the meta device holds no values; load the weights to a device that does, such as 'cpu'")
    elif device is not None:
        raise ValueError(f"device={str(device)!r} has no effect: the network has its place already; leave it out")
    return place


def _fill(model: nn.Module, name: str, parameter: nn.Parameter, value: Tensor, place: torch.device) -> None:
    if isinstance(parameter, DTensor):
        parameter.to_local().copy_(own_slice(value, parameter))
    elif not parameter.is_meta:
        parameter.copy_(value)
    else:
        filled = torch.empty(parameter.shape, dtype=parameter.dtype, device=place).copy_(value)
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, nn.Parameter(filled, requires_grad=parameter.requires_grad))
