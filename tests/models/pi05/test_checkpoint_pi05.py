"""Do weights and configuration go through both public layouts unharmed, and is everything that does not fit refused?"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from soma_lightning.models.pi05.checkpoint import (
    CheckpointLayout,
    load_weights,
    own_name,
    public_key,
    public_state_dict,
    read_config,
    save_weights,
    write_config,
)
from soma_lightning.models.pi05.config import PI05Config, StreamConfig, VisionConfig
from soma_lightning.models.pi05.model import PI05Model

LAYOUTS: tuple[CheckpointLayout, ...] = ("lerobot", "openpi")
EMBEDDING = "paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight"
HEAD = "paligemma_with_expert.paligemma.lm_head.weight"
UNUSED_HEAD = "paligemma_with_expert.gemma_expert.lm_head.weight"

#: What lerobot 0.6.1 writes for a pi0.5 policy on LIBERO.
LEROBOT_CONFIG: dict[str, Any] = {
    "type": "pi05",
    "n_obs_steps": 1,
    "input_features": {
        "observation.images.image": {"type": "VISUAL", "shape": [3, 256, 256]},
        "observation.images.image2": {"type": "VISUAL", "shape": [3, 256, 256]},
        "observation.images.empty_camera_0": {"type": "VISUAL", "shape": [3, 224, 224]},
        "observation.state": {"type": "STATE", "shape": [8]},
    },
    "output_features": {"action": {"type": "ACTION", "shape": [7]}},
    "device": "cpu",
    "use_amp": False,
    "use_peft": False,
    "push_to_hub": True,
    "repo_id": None,
    "private": None,
    "tags": None,
    "license": None,
    "pretrained_path": None,
    "pretrained_revision": None,
    "paligemma_variant": "gemma_2b",
    "action_expert_variant": "gemma_300m",
    "dtype": "bfloat16",
    "chunk_size": 50,
    "n_action_steps": 10,
    "max_state_dim": 32,
    "max_action_dim": 32,
    "num_inference_steps": 10,
    "time_sampling_beta_alpha": 1.5,
    "time_sampling_beta_beta": 1.0,
    "time_sampling_scale": 0.999,
    "time_sampling_offset": 0.001,
    "min_period": 0.004,
    "max_period": 4.0,
    "use_relative_actions": False,
    "relative_exclude_joints": ["gripper"],
    "action_feature_names": None,
    "rtc_config": None,
    "image_resolution": [224, 224],
    "empty_cameras": 1,
    "tokenizer_max_length": 200,
    "normalization_mapping": {"VISUAL": "IDENTITY", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"},
    "gradient_checkpointing": False,
    "compile_model": False,
    "compile_mode": "max-autotune",
    "freeze_vision_encoder": False,
    "train_expert_only": False,
    "optimizer_lr": 2.5e-05,
    "optimizer_betas": [0.9, 0.95],
    "optimizer_eps": 1e-08,
    "optimizer_weight_decay": 0.01,
    "optimizer_grad_clip_norm": 1.0,
    "scheduler_warmup_steps": 1000,
    "scheduler_decay_steps": 30000,
    "scheduler_decay_lr": 2.5e-06,
}


def small_config(**changes: Any) -> PI05Config:
    sizes: dict[str, Any] = {
        "vision": VisionConfig(width=16, depth=1, num_heads=2, mlp_width=24, patch_size=14),
        "language": StreamConfig(width=24, mlp_width=32, depth=2, num_heads=4, head_dim=8),
        "expert": StreamConfig(width=16, mlp_width=24, depth=2, num_heads=4, head_dim=8),
        "vocab_size": 40,
        "image_resolution": 28,
        "max_action_dim": 6,
        "chunk_size": 5,
        "n_action_steps": 5,
    }
    return PI05Config(**{**sizes, **changes})


@pytest.fixture
def model() -> PI05Model:
    torch.manual_seed(0)
    return PI05Model(small_config())


def other_model(**changes: Any) -> PI05Model:
    torch.manual_seed(1)
    return PI05Model(small_config(**changes))


def same_bits(a: PI05Model, b: PI05Model) -> bool:
    left, right = a.state_dict(), b.state_dict()
    return set(left) == set(right) and all(torch.equal(left[name], right[name]) for name in left)


def rewrite(file: Path, tensors: dict[str, Tensor]) -> Path:
    save_file({key: value.contiguous() for key, value in tensors.items()}, file)
    return file


# -- weights ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_saved_weights_come_back_bit_by_bit(model: PI05Model, layout: CheckpointLayout, tmp_path: Path) -> None:
    file = save_weights(model, tmp_path, layout)
    assert file == tmp_path / "model.safetensors"
    loaded = other_model()
    load_weights(loaded, tmp_path)
    assert same_bits(model, loaded)
    again = other_model()
    load_weights(again, save_weights(model, tmp_path / "other.safetensors", layout))
    assert same_bits(model, again)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_layouts_keys(model: PI05Model, layout: CheckpointLayout, tmp_path: Path) -> None:
    tensors = load_file(save_weights(model, tmp_path, layout))
    prefix = "model." if layout == "lerobot" else ""
    used = {prefix + key for key in public_state_dict(model.state_dict())}
    assert set(tensors) == used - {prefix + EMBEDDING} | {prefix + HEAD, prefix + UNUSED_HEAD}
    assert tensors[prefix + UNUSED_HEAD].shape == (40, 16)
    assert tensors[prefix + UNUSED_HEAD].count_nonzero() == 0
    siglip = [key for key in tensors if "vision_tower" in key]
    assert siglip
    assert all("vision_tower.vision_model." in key for key in siglip)


def test_names_translate_in_both_directions(model: PI05Model) -> None:
    for name in model.state_dict():
        key = public_key(name)
        assert own_name(key) == own_name(f"model.{key}") == name
        assert own_name(key.replace("vision_tower.vision_model.", "vision_tower.")) == name
    with pytest.raises(ValueError, match="'value_head.mlp.0.weight' is no parameter"):
        public_key("value_head.mlp.0.weight")


def flat_siglip(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key.replace("vision_tower.vision_model.", "vision_tower."): value for key, value in tensors.items()}


def untied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """813 tensors: embedding and a head that has drifted from it (transformers 5 loses the tie)."""
    return {**tensors, EMBEDDING: tensors[HEAD], HEAD: torch.full_like(tensors[HEAD], 9.0)}


def with_pi0_leftovers(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    expert = "paligemma_with_expert.gemma_expert.model"
    left = {f"action_{key}" if key.startswith("time_mlp_") else key: value for key, value in tensors.items()}
    return {
        **left,
        "state_proj.weight": torch.ones(16, 6),
        "state_proj.bias": torch.ones(16),
        f"{expert}.layers.0.input_layernorm.weight": torch.ones(16),
        f"{expert}.layers.1.post_attention_layernorm.weight": torch.ones(16),
        f"{expert}.norm.weight": torch.ones(16),
    }


def without_heads(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    kept = {key: value for key, value in tensors.items() if key not in (HEAD, UNUSED_HEAD)}
    return {**kept, EMBEDDING: tensors[HEAD]}


@pytest.mark.parametrize("change", [flat_siglip, untied, with_pi0_leftovers, without_heads])
def test_every_public_form_loads(model: PI05Model, change: Any, tmp_path: Path) -> None:
    tensors = load_file(save_weights(model, tmp_path, "openpi"))
    rewrite(tmp_path / "model.safetensors", change(tensors))
    loaded = other_model()
    load_weights(loaded, tmp_path)
    assert same_bits(model, loaded)


def test_one_error_lists_missing_unexpected_and_misshaped(model: PI05Model, tmp_path: Path) -> None:
    tensors = load_file(save_weights(model, tmp_path, "lerobot"))
    del tensors["model.action_out_proj.bias"]
    tensors["model.lora_A.weight"] = torch.ones(2)
    tensors["model.action_in_proj.weight"] = torch.ones(16, 32)
    file = rewrite(tmp_path / "model.safetensors", tensors)
    loaded = other_model()
    before = {name: p.clone() for name, p in loaded.state_dict().items()}
    with pytest.raises(ValueError, match="does not fit the network") as error:
        load_weights(loaded, tmp_path)
    message = str(error.value)
    assert str(file) in message
    assert "1 missing: action_out_proj.bias" in message
    assert "1 unexpected: model.lora_A.weight" in message
    assert "model.action_in_proj.weight is [16, 32], the network has [16, 6]" in message
    assert all(torch.equal(before[name], p) for name, p in loaded.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_weights_whose_scales_are_unknown_are_refused(model: PI05Model, dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = load_file(save_weights(model, tmp_path, "lerobot"))
    tensors["model.action_in_proj.bias"] = tensors["model.action_in_proj.bias"].to(dtype)
    rewrite(tmp_path / "model.safetensors", tensors)
    message = f"1 in numbers that no checkpoint has: model.action_in_proj.bias ({dtype})"
    with pytest.raises(ValueError, match=re.escape(message)):
        load_weights(other_model(), tmp_path)


@pytest.mark.parametrize("start", ["", "expert."])
def test_keys_of_no_layout_are_unexpected(model: PI05Model, start: str, tmp_path: Path) -> None:
    long = "paligemma_with_expert.gemma_expert.model."
    tensors = load_file(save_weights(model, tmp_path, "openpi"))
    renamed = {key.replace(long, start): value for key, value in tensors.items()}
    rewrite(tmp_path / "model.safetensors", renamed)
    count = sum(key.startswith(long) for key in tensors)
    with pytest.raises(ValueError, match=rf"{count} missing: (.|\n)*{count} unexpected: {start}layers\.0\."):
        load_weights(other_model(), tmp_path)


def test_a_foreign_file_is_summarised(model: PI05Model, tmp_path: Path) -> None:
    file = rewrite(tmp_path / "x.safetensors", {f"w{i}": torch.ones(1) for i in range(40)})
    with pytest.raises(ValueError, match="40 unexpected: .*, and 28 more"):
        load_weights(model, file)


def test_a_tensor_in_two_forms_is_refused(model: PI05Model, tmp_path: Path) -> None:
    tensors = load_file(save_weights(model, tmp_path, "openpi"))
    tensors["model.action_in_proj.bias"] = tensors["action_in_proj.bias"].clone()
    rewrite(tmp_path / "model.safetensors", tensors)
    with pytest.raises(ValueError, match="two forms of one tensor"):
        load_weights(model, tmp_path)


@pytest.mark.parametrize("damage", ["cut short", "garbage", "empty"])
def test_a_damaged_file_is_named(model: PI05Model, damage: str, tmp_path: Path) -> None:
    file = save_weights(model, tmp_path)
    content = file.read_bytes()
    file.write_bytes({"cut short": content[:-100], "garbage": b"x" * 500, "empty": b""}[damage])
    with pytest.raises(ValueError, match="is no readable safetensors file") as error:
        load_weights(model, tmp_path)
    assert str(file) in str(error.value)


def test_a_folder_without_weights_says_what_it_has(model: PI05Model, tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(FileNotFoundError, match=r"there is no .*model\.safetensors.*pytorch_model\.bin"):
        load_weights(model, tmp_path)


def test_loading_keeps_the_models_own_dtypes_and_materialises_meta(model: PI05Model, tmp_path: Path) -> None:
    save_weights(model, tmp_path)
    with torch.device("meta"):
        loaded = PI05Model(small_config(dtype="bfloat16"))
    trainable = loaded.trainable_names()
    load_weights(loaded, tmp_path)
    assert not any(x.is_meta for x in (*loaded.parameters(), *loaded.buffers()))
    assert loaded.trainable_names() == trainable
    expected = other_model(dtype="bfloat16")
    load_weights(expected, tmp_path)
    assert same_bits(expected, loaded)
    assert loaded.expert.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16
    assert loaded.expert.norm.dense.weight.dtype == torch.float32


def test_weights_without_values_and_unknown_layouts_are_refused(model: PI05Model, tmp_path: Path) -> None:
    with torch.device("meta"):
        empty = PI05Model(small_config())
    with pytest.raises(ValueError, match="have no values"):
        save_weights(empty, tmp_path)
    with pytest.raises(ValueError, match=r"layout='jax' is unknown; known: \['lerobot', 'openpi'\]"):
        save_weights(model, tmp_path, "jax")  # type: ignore[arg-type]


# -- configuration ----------------------------------------------------------------------------------------------------


def write_public(folder: Path, values: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def test_lerobots_configuration_is_understood(tmp_path: Path) -> None:
    config = read_config(write_public(tmp_path, LEROBOT_CONFIG))
    assert config == PI05Config(
        cameras=("observation.images.image", "observation.images.image2"),
        empty_cameras=1,
        action_dim=7,
        state_dim=8,
        normalization="mean_std",
        dtype="bfloat16",
        n_action_steps=10,
    )
    assert config.islands == config.normalization_eps == "lerobot"


def test_a_feature_as_wide_as_its_padding_says_nothing(tmp_path: Path) -> None:
    values = {
        **LEROBOT_CONFIG,
        "input_features": {
            "observation.images.base_0_rgb": {"type": "VISUAL", "shape": [3, 224, 224]},
            "observation.state": {"type": "STATE", "shape": [32]},
        },
        "output_features": {"action": {"type": "ACTION", "shape": [32]}},
    }
    config = read_config(write_public(tmp_path, values))
    assert (config.action_dim, config.state_dim) == (None, None)
    assert config.cameras == ("observation.images.base_0_rgb",)


def test_openpis_configuration_is_understood(tmp_path: Path) -> None:
    values = {
        "action_dim": 32,
        "action_horizon": 10,
        "paligemma_variant": "gemma_2b",
        "action_expert_variant": "gemma_300m",
        "precision": "bfloat16",
    }
    config = read_config(write_public(tmp_path, values))
    assert (config.chunk_size, config.max_action_dim, config.dtype) == (10, 32, "bfloat16")
    assert (config.islands, config.normalization_eps) == ("openpi", "openpi")
    assert (config.loss_dims, config.pad_actions) == ("padded", "repeat")
    assert config.language == PI05Config.base().language
    assert config.expert == PI05Config.base().expert


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "config",
    [
        PI05Config.base(),
        PI05Config.tiny(action_dim=7, state_dim=8, prompt="task", trainable="all", zero_images=True),
        small_config(
            cameras=("observation.images.wrist",),
            normalization="mean_std",
            normalization_eps="openpi",
            dtype="bfloat16",
            islands="openpi",
            time_beta_alpha=1.0,
            min_period=1e-2,
            loss_dims="padded",
            pad_actions="repeat",
        ),
    ],
)
def test_every_configuration_comes_back(config: PI05Config, layout: CheckpointLayout, tmp_path: Path) -> None:
    write_config(config, tmp_path, layout)
    assert read_config(tmp_path) == config


def test_config_json_holds_no_field_that_lerobot_refuses(tmp_path: Path) -> None:
    write_config(PI05Config.tiny(action_dim=7, state_dim=8), tmp_path, "lerobot")
    written = json.loads((tmp_path / "config.json").read_text())
    assert set(written) <= set(LEROBOT_CONFIG)
    assert written["input_features"]["observation.state"] == {"type": "STATE", "shape": [8]}
    assert written["output_features"] == {"action": {"type": "ACTION", "shape": [7]}}
    assert "soma" not in written


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"type": "pi0"}, "neither type 'pi05' .*found 'pi0'.* nor action_horizon"),
        ({"use_relative_actions": True}, "switches on {'use_relative_actions': True}"),
        ({"rtc_training_max_delay": 4}, "switches on {'rtc_training_max_delay': 4}"),
        ({"image_resolution": [224, 320]}, r"image_resolution \[224, 320\]; pi0\.5 takes square images"),
        ({"paligemma_variant": "gemma_7b"}, "paligemma_variant='gemma_7b'; known"),
        ({"input_features": {}}, "names no camera"),
        ({"normalization_mapping": {"STATE": "MIN_MAX", "ACTION": "MIN_MAX"}}, "needs STATE and ACTION alike"),
        ({"normalization_mapping": {"STATE": "QUANTILES", "ACTION": "MEAN_STD"}}, "needs STATE and ACTION alike"),
        ({"normalization_mapping": []}, r"normalization_mapping \[\]; pi0\.5 needs STATE and ACTION alike"),
        ({"action_expert_variant": []}, r"action_expert_variant=\[\]; known"),
    ],
)
def test_settings_that_would_be_ignored_are_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message) as error:
        read_config(write_public(tmp_path, {**LEROBOT_CONFIG, **change}))
    assert "config.json" in str(error.value)


def test_damaged_configuration_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no .*config\.json"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json cannot be read as JSON"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="must hold a JSON object, not list"):
        read_config(tmp_path)
    write_public(tmp_path, LEROBOT_CONFIG)
    (tmp_path / "soma.json").write_text('{"chunk_size": 3}')
    with pytest.raises(ValueError, match=r"soma\.json says \['chunk_size'\], which config\.json says already"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image_resolution": 64}, r"image_resolution 64; pi0\.5 takes square images"),
        ({"input_features": [1]}, r"input_features must be an object of features, got \[1\]"),
        ({"input_features": {"a": 3}}, "input_features of 'a' must have a type and a shape, got 3"),
        ({"output_features": {"action": {"type": "ACTION", "shape": []}}}, "output_features of 'action' must have"),
        ({"chunk_size": 0}, "holds a configuration of no pi0.5 network: chunk_size=0"),
    ],
)
def test_a_malformed_configuration_is_named(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_config(PI05Config.tiny(action_dim=7, state_dim=8), tmp_path, "lerobot")
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(ValueError, match=message) as error:
        read_config(tmp_path)
    assert str(tmp_path) in str(error.value)


def test_lost_sizes_are_said(tmp_path: Path) -> None:
    write_config(PI05Config.tiny(action_dim=7, state_dim=8), tmp_path, "lerobot")
    (tmp_path / "soma.json").unlink()
    with pytest.raises(ValueError, match=r"there is no soma\.json, so sizes are the public ones"):
        read_config(tmp_path)
