"""How is a pi0.5 configuration written beside the weights? `config.json` as the public code has it, and `soma.json`.

`config.json` has exactly the fields that lerobot (or openpi) knows, because lerobot refuses a file with any other.
What they cannot say (sizes of a small network, prompt family, tokenizer, ...) goes into `soma.json` beside it. A public
checkpoint has no `soma.json`; then those fields have the public values.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from soma_lightning.contract import ACTION, IMAGE_PREFIX, STATE
from soma_lightning.models.pi05.config import PI05Config, StreamConfig

CheckpointLayout = Literal["lerobot", "openpi"]
CONFIG_FILE = "config.json"
EXTRA_FILE = "soma.json"

_VARIANTS = {
    "gemma_2b": StreamConfig(width=2048, mlp_width=16384),
    "gemma_300m": StreamConfig(width=1024, mlp_width=4096),
}
_NORMALIZATIONS = {"QUANTILES": "quantiles", "MEAN_STD": "mean_std"}
#: lerobot's field -> ours, copied as they are.
_LEROBOT_FIELDS = {
    "dtype": "dtype",
    "chunk_size": "chunk_size",
    "n_action_steps": "n_action_steps",
    "max_action_dim": "max_action_dim",
    "num_inference_steps": "num_inference_steps",
    "time_sampling_beta_alpha": "time_beta_alpha",
    "time_sampling_beta_beta": "time_beta_beta",
    "time_sampling_scale": "time_scale",
    "time_sampling_offset": "time_offset",
    "min_period": "min_period",
    "max_period": "max_period",
    "empty_cameras": "empty_cameras",
    "tokenizer_max_length": "tokenizer_max_length",
}
#: Our fields that lerobot's config.json says in its own way; all others are in soma.json.
_SAID_BY_LEROBOT = {
    *_LEROBOT_FIELDS.values(),
    *("cameras", "image_resolution", "normalization", "action_dim", "state_dim"),
}
_SAID_BY_OPENPI = {"max_action_dim", "chunk_size", "dtype"}
#: lerobot's fields that say nothing about what the network computes.
_NO_EFFECT = {
    *("type", "n_obs_steps", "device", "use_amp", "use_peft", "push_to_hub", "repo_id", "private", "tags", "license"),
    *("pretrained_path", "pretrained_revision", "max_state_dim", "gradient_checkpointing", "compile_model"),
    *("compile_mode", "relative_exclude_joints", "action_feature_names"),
    *("optimizer_lr", "optimizer_betas", "optimizer_eps", "optimizer_weight_decay", "optimizer_grad_clip_norm"),
    *("scheduler_warmup_steps", "scheduler_decay_steps", "scheduler_decay_lr"),
}
_READ_HERE = {
    *("paligemma_variant", "action_expert_variant", "image_resolution", "normalization_mapping"),
    *("input_features", "output_features", "train_expert_only", "freeze_vision_encoder"),
}


def write_config(config: PI05Config, folder: str | Path, layout: CheckpointLayout = "lerobot") -> None:
    """Writes `config.json` and `soma.json` into `folder`, which must exist."""
    public = _to_lerobot(config) if layout == "lerobot" else _to_openpi(config)
    said = _SAID_BY_LEROBOT if layout == "lerobot" else _SAID_BY_OPENPI
    extra = {name: value for name, value in config.to_dict().items() if name not in said}
    for name, values in ((CONFIG_FILE, public), (EXTRA_FILE, extra)):
        (Path(folder) / name).write_text(json.dumps(values, indent=2) + "\n")


def read_config(folder: str | Path) -> PI05Config:
    """The configuration of a checkpoint folder in either layout.

    Without `soma.json` the family's public values hold: `islands` and `normalization_eps` of the layout, prompt with
    state (an openpi `pi05_libero` has none in its prompt: `dataclasses.replace(config, prompt="task")`), frozen prefix
    unless only `freeze_vision_encoder` is on ("all_but_vision"; both off are lerobot's defaults and say nothing);
    a feature as wide as its padding says nothing about the robot, so that dimension stays None.

    Raises FileNotFoundError without `config.json`, ValueError for another model type, a damaged file or a setting
    that this network does not have.
    """
    folder = Path(folder)
    public = _read_json(folder / CONFIG_FILE)
    extra = _read_json(folder / EXTRA_FILE) if (folder / EXTRA_FILE).is_file() else None
    if public.get("type") == "pi05":
        values, said = _from_lerobot(public, folder / CONFIG_FILE, is_ours=extra is not None), _SAID_BY_LEROBOT
    elif "action_horizon" in public:
        values, said = _from_openpi(public, folder / CONFIG_FILE), _SAID_BY_OPENPI
    else:
        raise ValueError(
            f"{folder / CONFIG_FILE} is no pi0.5 configuration: it has neither type 'pi05' (lerobot; found "
            f"{public.get('type')!r}) nor action_horizon (openpi)"
        )
    both = sorted(said & set(extra or {}))
    if both:
        raise ValueError(f"{folder / EXTRA_FILE} says {both}, which {CONFIG_FILE} says already; remove them there")
    try:
        return PI05Config.from_dict({**values, **(extra or {})})
    except ValueError as error:
        alone = "" if extra is not None else f" (there is no {EXTRA_FILE}, so sizes are the public ones)"
        raise ValueError(f"{folder} holds a configuration of no pi0.5 network{alone}: {error}") from error


def _to_lerobot(config: PI05Config) -> dict[str, Any]:
    side = config.image_resolution
    mode = next(theirs for theirs, ours in _NORMALIZATIONS.items() if ours == config.normalization)
    inputs: dict[str, Any] = {key: {"type": "VISUAL", "shape": [3, side, side]} for key in config.cameras}
    if config.state_dim is not None:
        inputs[STATE] = {"type": "STATE", "shape": [config.state_dim]}
    outputs = {} if config.action_dim is None else {ACTION: {"type": "ACTION", "shape": [config.action_dim]}}
    return {
        "type": "pi05",
        "n_obs_steps": 1,
        "input_features": inputs,
        "output_features": outputs,
        "paligemma_variant": "gemma_2b",
        "action_expert_variant": "gemma_300m",
        **{theirs: getattr(config, ours) for theirs, ours in _LEROBOT_FIELDS.items()},
        "image_resolution": [side, side],
        "normalization_mapping": {"VISUAL": "IDENTITY", "STATE": mode, "ACTION": mode},
        "train_expert_only": config.trainable == "expert",
        "freeze_vision_encoder": config.trainable == "all_but_vision",
    }


def _to_openpi(config: PI05Config) -> dict[str, Any]:
    return {
        "action_dim": config.max_action_dim,
        "action_horizon": config.chunk_size,
        "paligemma_variant": "gemma_2b",
        "action_expert_variant": "gemma_300m",
        "precision": config.dtype,
    }


def _from_lerobot(public: dict[str, Any], file: Path, is_ours: bool) -> dict[str, Any]:
    _refuse_unknown(public, {*_LEROBOT_FIELDS, *_NO_EFFECT, *_READ_HERE}, file)
    values = {ours: public[theirs] for theirs, ours in _LEROBOT_FIELDS.items() if theirs in public}
    values |= _streams(public, file)
    inputs, outputs = _features(public, "input_features", file), _features(public, "output_features", file)
    cameras = [key for key, feature in inputs.items() if feature["type"] == "VISUAL"]
    cameras = [key for key in cameras if not key.startswith(f"{IMAGE_PREFIX}empty_camera_")]
    if not cameras:
        raise ValueError(f"{file} names no camera in input_features; add one {IMAGE_PREFIX}<name> of type VISUAL")
    max_dims = {ACTION: public.get("max_action_dim", 32), STATE: public.get("max_state_dim", 32)}
    dims = {}
    for feature, found in ((ACTION, outputs.get(ACTION)), (STATE, inputs.get(STATE))):
        width_of_padding = found is not None and not is_ours and found["shape"][0] == max_dims[feature]
        dims[feature] = None if found is None or width_of_padding else found["shape"][0]
    return {
        **values,
        "cameras": tuple(cameras),
        "empty_cameras": public.get("empty_cameras", 0),
        "image_resolution": _image_side(public.get("image_resolution", (224, 224)), file),
        "normalization": _normalization(public.get("normalization_mapping"), file),
        "action_dim": dims[ACTION],
        "state_dim": dims[STATE],
        **_trainable(public),
    }


def _trainable(public: dict[str, Any]) -> dict[str, Any]:
    """What lerobot's fields say of our `trainable`, in a file that has no soma.json to say it."""
    vision_only = public.get("freeze_vision_encoder", False) and not public.get("train_expert_only", False)
    return {"trainable": "all_but_vision" if vision_only else "expert"}


def _image_side(resolution: Any, file: Path) -> int:
    match resolution:
        case [int() as height, int() as width] if height == width:
            return height
    raise ValueError(f"{file} has image_resolution {resolution!r}; pi0.5 takes square images, [height, width] alike")


def _features(public: dict[str, Any], name: str, file: Path) -> dict[str, dict[str, Any]]:
    """input_features or output_features: {key: {"type": ..., "shape": [...]}}."""
    features = public.get(name) or {}
    if not isinstance(features, dict):
        raise ValueError(f"{file}: {name} must be an object of features, got {features!r:.80}")
    for key, feature in features.items():
        match feature:
            case {"type": str(), "shape": [int(), *_]}:
                continue
        raise ValueError(f"{file}: {name} of {key!r} must have a type and a shape, got {feature!r:.80}")
    return features


def _from_openpi(public: dict[str, Any], file: Path) -> dict[str, Any]:
    known = {"action_dim", "action_horizon", "paligemma_variant", "action_expert_variant", "precision"}
    _refuse_unknown(public, known, file)
    return {
        **_streams(public, file),
        "max_action_dim": public.get("action_dim", 32),
        "chunk_size": public["action_horizon"],
        "n_action_steps": public["action_horizon"],
        "dtype": public.get("precision", "bfloat16"),
        "islands": "openpi",
        "normalization_eps": "openpi",
        "loss_dims": "padded",
        "pad_actions": "repeat",
    }


def _streams(public: dict[str, Any], file: Path) -> dict[str, Any]:
    streams = {}
    for ours, theirs, default in (
        ("language", "paligemma_variant", "gemma_2b"),
        ("expert", "action_expert_variant", "gemma_300m"),
    ):
        variant = public.get(theirs, default)
        if not isinstance(variant, str) or variant not in _VARIANTS:
            raise ValueError(f"{file} has {theirs}={variant!r}; known: {sorted(_VARIANTS)}")
        streams[ours] = asdict(_VARIANTS[variant])
    return streams


def _normalization(mapping: Any, file: Path) -> str:
    match {"STATE": "QUANTILES", "ACTION": "QUANTILES"} if mapping is None else mapping:
        case {"STATE": str(state), "ACTION": str(action), **others}:
            if state == action and state in _NORMALIZATIONS and others.get("VISUAL", "IDENTITY") == "IDENTITY":
                return _NORMALIZATIONS[state]
    raise ValueError(
        f"{file} has normalization_mapping {mapping!r:.200}; pi0.5 needs STATE and ACTION alike, one of "
        f"{sorted(_NORMALIZATIONS)}, and VISUAL IDENTITY"
    )


def _refuse_unknown(public: dict[str, Any], known: set[str], file: Path) -> None:
    """A field that we do not know is harmless while it is off; switched on it may change what the network computes."""
    on = {name: value for name, value in public.items() if name not in known and value}
    if on:
        raise ValueError(f"{file} switches on {on}, which this network does not have; it would be ignored")


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise FileNotFoundError(f"there is no {file}; a checkpoint folder holds {CONFIG_FILE} beside the weights")
    try:
        values = json.loads(file.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{file} must hold a JSON object, not {type(values).__name__}")
    return values
