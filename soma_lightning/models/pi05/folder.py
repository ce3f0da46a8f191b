"""What lies beside the weights in a pi0.5 checkpoint folder: statistics, lerobot's pipelines, and the folder itself.

lerobot layout: `policy_preprocessor.json`, `policy_postprocessor.json` and one safetensors of statistics each (named as
lerobot 0.6.1 does), plus `statistics.json`, which keeps float64. openpi layout: `assets/<id>/norm_stats.json`.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from soma_lightning.contract import ACTION, STATE, TRAINING_FILE, Statistics
from soma_lightning.models.normalization import load_statistics, save_statistics
from soma_lightning.models.pi05.checkpoint import WEIGHTS_FILE, CheckpointLayout
from soma_lightning.models.pi05.config import PI05Config
from soma_lightning.models.pi05.config_files import CONFIG_FILE, EXTRA_FILE
from soma_lightning.models.pi05.tokenizer import BUILTIN, TOKENIZER_FILE
from soma_lightning.models.tensor_files import write_safetensors

STATISTICS_FILE = "statistics.json"
NORM_STATS_FILE = "norm_stats.json"
_PREPROCESSOR = "policy_preprocessor"
_POSTPROCESSOR = "policy_postprocessor"
_NORMALIZER = "normalizer_processor"
_UNNORMALIZER = "unnormalizer_processor"
#: openpi files statistics under the data set's name; ours may come from any.
ASSET_ID = "soma"
#: The critic, which no public layout knows.
VALUE_HEAD_FILE = "value_head.safetensors"
#: What peft calls its files.
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_WRITTEN_BY_US = {
    CONFIG_FILE,
    EXTRA_FILE,
    WEIGHTS_FILE,
    STATISTICS_FILE,
    TOKENIZER_FILE,
    TRAINING_FILE,
    VALUE_HEAD_FILE,
    *("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    "assets",
    *(ADAPTER_CONFIG, ADAPTER_WEIGHTS),
}


def fetch_checkpoint(path_or_id: str | Path, revision: str | None = None) -> Path:
    """The local folder of a checkpoint: `path_or_id` itself, or the hub repository of that id, downloaded.

    Raises FileNotFoundError for a folder that is not there, NotADirectoryError for a file, ValueError for a revision of
    a local folder, and OSError with the ways out when the hub refuses or cannot be reached.
    """
    folder = Path(path_or_id)
    if folder.is_dir():
        if revision is not None:
            raise ValueError(f"revision={revision!r} has no effect on the local folder {folder}; leave it out")
        return folder
    if folder.exists():
        raise NotADirectoryError(f"{folder} is a file; pass the folder of the checkpoint, {folder.absolute().parent}")
    name = str(path_or_id)
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise FileNotFoundError(f"there is no checkpoint folder {folder} (and it is no hub id of the form owner/name)")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        patterns = ["*.json", "*.safetensors", "full_weights.pt", "actor/model_state_dict/full_weights.pt", "assets/**"]
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise OSError(
            f"the checkpoint '{name}' (revision {revision or 'main'}) is no local folder and cannot be fetched from "
            f"the hub: {reason} Check name and revision; if the repository is gated, accept its licence there and "
            "log in with `hf auth login` (or set HF_TOKEN); without network, pass the folder of a downloaded copy."
        ) from error


def check_replaceable(target: Path) -> None:
    """Raises FileExistsError when `target` holds anything that is no part of a pi0.5 checkpoint and would be lost.

    Also when it is the working directory: replacing that would leave the program in a folder that is gone.
    """
    if target.is_dir() and target.resolve() == Path.cwd():
        raise FileExistsError(
            f"{target.resolve()} is the working directory and cannot be replaced; choose a new folder"
        )
    foreign = sorted(p.name for p in target.iterdir() if not _is_ours(p.name)) if target.is_dir() else []
    if foreign or target.is_file():
        raise FileExistsError(
            f"{target} holds {foreign or 'a file'} which is no part of a pi0.5 checkpoint and would be lost; choose "
            "another folder"
        )


@contextmanager
def written_at_once(target: Path) -> Iterator[Path]:
    """A temporary folder beside `target` that becomes `target` when the block ends; an error leaves `target` as it was.

    An earlier checkpoint there is replaced; a link stays one. Raises FileExistsError when `target` holds anything else.
    """
    check_replaceable(target)
    target = target.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        new = scratch / "new"
        new.mkdir()
        yield new
        if target.is_dir():
            target.rename(scratch / "old")
        new.rename(target)
    finally:
        if not target.exists() and (scratch / "old").is_dir():
            (scratch / "old").rename(target)
        shutil.rmtree(scratch, ignore_errors=True)


def _is_ours(name: str) -> bool:
    return name in _WRITTEN_BY_US or name.startswith((_PREPROCESSOR, _POSTPROCESSOR))


def save_side_files(folder: Path, layout: CheckpointLayout, config: PI05Config, statistics: Statistics) -> None:
    """Writes statistics of state and action in the form of `layout`, and lerobot's pipelines where they apply.

    The openpi form keeps mean, std, q01 and q99. Raises ValueError when it needs one that is missing.
    """
    if layout == "openpi":
        save_statistics(statistics, folder / "assets" / ASSET_ID / NORM_STATS_FILE, layout="openpi")
        return
    save_statistics(statistics, folder / STATISTICS_FILE, layout="lerobot")
    if lerobot_would_agree(config):
        _save_pipelines(folder, config, statistics)


def lerobot_would_agree(config: PI05Config) -> bool:
    """True when lerobot's own pipelines compute what ours do.

    State in the prompt, its epsilon, a known tokenizer, absolute actions.
    """
    same_prompt = config.prompt == "state" and config.tokenizer != BUILTIN
    return same_prompt and config.normalization_eps == "lerobot" and not config.delta_actions


def _save_pipelines(folder: Path, config: PI05Config, statistics: Statistics) -> None:
    tensors = {
        f"{feature}.{name}": torch.from_numpy(np.asarray(value, np.float32))
        for feature, stats in statistics.items()
        for name, value in stats.items()
    }
    pipelines = _pipelines(config, _dim(statistics, STATE), _dim(statistics, ACTION))
    for name, steps in pipelines.items():
        for index, step in enumerate(steps):
            if step["registry_name"] in (_NORMALIZER, _UNNORMALIZER):
                step["state_file"] = f"{name}_step_{index}_{step['registry_name']}.safetensors"
                write_safetensors(folder / step["state_file"], tensors)
        (folder / f"{name}.json").write_text(json.dumps({"name": name, "steps": steps}, indent=2))


def _pipelines(config: PI05Config, state_dim: int, action_dim: int) -> dict[str, list[dict[str, Any]]]:
    """The steps of lerobot's two pipelines for pi0.5, as lerobot 0.6.1 writes them."""
    mode = {"quantiles": "QUANTILES", "mean_std": "MEAN_STD"}[config.normalization]
    norm_map = {"VISUAL": "IDENTITY", "STATE": mode, "ACTION": mode}
    shape = [3, config.image_resolution, config.image_resolution]
    action = {ACTION: {"type": "ACTION", "shape": [action_dim]}}
    features = {
        **{camera: {"type": "VISUAL", "shape": shape} for camera in config.cameras},
        STATE: {"type": "STATE", "shape": [state_dim]},
        **action,
    }
    tokenizer = {
        "max_length": config.tokenizer_max_length,
        "task_key": "task",
        "padding_side": "right",
        "padding": "max_length",
        "truncation": True,
        "tokenizer_name": config.tokenizer,
    }
    device = _step("device_processor", device="cpu", float_dtype=None)
    return {
        _PREPROCESSOR: [
            _step("rename_observations_processor", rename_map={}),
            _step("to_batch_processor"),
            _step("relative_actions_processor", enabled=False, exclude_joints=["gripper"], action_names=None),
            _step(_NORMALIZER, eps=1e-8, features=features, norm_map=norm_map),
            _step("pi05_prepare_state_tokenizer_processor_step"),
            _step("tokenizer_processor", **tokenizer),
            device,
        ],
        _POSTPROCESSOR: [
            _step(_UNNORMALIZER, eps=1e-8, features=action, norm_map=norm_map),
            _step("absolute_actions_processor", enabled=False),
            device,
        ],
    }


def _step(registry_name: str, **config: Any) -> dict[str, Any]:
    return {"registry_name": registry_name, "config": config}


def _dim(statistics: Statistics, feature: str) -> int:
    return next(len(value) for name, value in statistics[feature].items() if name != "count")


def find_statistics(folder: Path) -> tuple[Statistics, str] | None:
    """The statistics of a checkpoint folder and the file they came from, or None when it carries none.

    Looks for `statistics.json`, lerobot's preprocessor, then openpi's assets. Raises ValueError for a damaged file, and
    for several openpi assets: which one is meant must be said (statistics=...).
    """
    if (folder / STATISTICS_FILE).is_file():
        return load_statistics(folder / STATISTICS_FILE), STATISTICS_FILE
    pipeline = folder / f"{_PREPROCESSOR}.json"
    if pipeline.is_file():
        return _from_lerobot(pipeline)
    assets = sorted(folder.glob(f"assets/**/{NORM_STATS_FILE}"))
    if len(assets) > 1:
        names = [str(path.relative_to(folder)) for path in assets]
        raise ValueError(
            f"{folder} holds several statistics {names}; pass the right one as "
            "statistics=soma_lightning.models.normalization.load_statistics(path)"
        )
    return (load_statistics(assets[0]), str(assets[0].relative_to(folder))) if assets else None


def _from_lerobot(pipeline: Path) -> tuple[Statistics, str] | None:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        steps = json.loads(pipeline.read_text())["steps"]
        files = [s["state_file"] for s in steps if s.get("registry_name") == _NORMALIZER and "state_file" in s]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{pipeline} is not one of lerobot's pipelines: {type(error).__name__} {error}") from error
    if not files:
        return None
    path = pipeline.parent / files[0]
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path}, named by {pipeline.name}, cannot be read: {error}") from error
    statistics: Statistics = {}
    for key, tensor in tensors.items():
        feature, _, name = key.rpartition(".")
        if feature in (STATE, ACTION):
            value = tensor.reshape(-1).numpy()
            statistics.setdefault(feature, {})[name] = value.astype(np.int64 if name == "count" else np.float64)
    return (statistics, files[0]) if statistics else None
