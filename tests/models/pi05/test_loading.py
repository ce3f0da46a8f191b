"""Does a checkpoint reach its device tensor by tensor: RLinf's files too, into shards too, and at the public size?"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from soma_lightning.models import PI05Config, PI05Policy
from soma_lightning.models.pi05.checkpoint import (
    load_weights,
    public_state_dict,
    save_weights,
    seed_masters,
    stored_tensors,
)
from soma_lightning.models.pi05.model import PI05Model
from soma_lightning.models.pi05.tokenizer import load_tokenizer
from soma_lightning.optim.fused_adamw import FP32MasterAdamW
from soma_lightning.optim.masters import master_values
from tests.ranks import ranks_run, whole

PALIGEMMA, EXPERT = "paligemma_with_expert.paligemma.", "paligemma_with_expert.gemma_expert."
WEIGHT_BIAS = ("weight", "bias")


def tiny_model(seed: int = 0, **changes: Any) -> PI05Model:
    torch.manual_seed(seed)
    return PI05Model(PI05Config.tiny(**changes))


def same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return set(a) == set(b) and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)


# -- the public size --------------------------------------------------------------------------------------------------


def gemma_shapes(start: str, width: int, mlp: int) -> dict[str, list[int]]:
    """Matrices of one Gemma layer with 8 query heads and 1 key head of size 256."""
    return {
        **{f"{start}self_attn.q_proj.weight": [2048, width], f"{start}self_attn.o_proj.weight": [width, 2048]},
        **{f"{start}self_attn.{name}_proj.weight": [256, width] for name in "kv"},
        **{f"{start}mlp.{name}_proj.weight": [mlp, width] for name in ("gate", "up")},
        f"{start}mlp.down_proj.weight": [width, mlp],
    }


def vision_shapes() -> dict[str, list[int]]:
    start = f"{PALIGEMMA}model.vision_tower.vision_model."
    shapes = {
        f"{start}embeddings.patch_embedding.weight": [1152, 3, 14, 14],
        f"{start}embeddings.patch_embedding.bias": [1152],
        f"{start}embeddings.position_embedding.weight": [256, 1152],
        **{f"{start}post_layernorm.{part}": [1152] for part in ("weight", "bias")},
    }
    linear = {f"self_attn.{name}_proj": [1152, 1152] for name in ("q", "k", "v", "out")}
    linear |= {"mlp.fc1": [4304, 1152], "mlp.fc2": [1152, 4304]}
    for layer in (f"{start}encoder.layers.{i}." for i in range(27)):
        shapes |= {f"{layer}{norm}.{part}": [1152] for norm in ("layer_norm1", "layer_norm2") for part in WEIGHT_BIAS}
        for name, shape in linear.items():
            shapes |= {f"{layer}{name}.weight": shape, f"{layer}{name}.bias": shape[:1]}
    return shapes


def public_shapes() -> dict[str, list[int]]:
    """Every key of the public base with its shape, both language heads and the embedding included: 813."""
    language, norms = f"{PALIGEMMA}model.language_model.", ("input_layernorm", "post_attention_layernorm")
    shapes = {
        **vision_shapes(),
        f"{PALIGEMMA}model.multi_modal_projector.linear.weight": [2048, 1152],
        f"{PALIGEMMA}model.multi_modal_projector.linear.bias": [2048],
        f"{language}embed_tokens.weight": [257152, 2048],
        f"{language}norm.weight": [2048],
        f"{PALIGEMMA}lm_head.weight": [257152, 2048],
        f"{EXPERT}lm_head.weight": [257152, 1024],
        **{"action_in_proj.weight": [1024, 32], "action_in_proj.bias": [1024]},
        **{"action_out_proj.weight": [32, 1024], "action_out_proj.bias": [32]},
    }
    dense = [f"{EXPERT}model.norm.dense"]
    for i in range(18):
        shapes |= gemma_shapes(f"{language}layers.{i}.", 2048, 16384)
        shapes |= gemma_shapes(f"{EXPERT}model.layers.{i}.", 1024, 4096)
        shapes |= {f"{language}layers.{i}.{norm}.weight": [2048] for norm in norms}
        dense += [f"{EXPERT}model.layers.{i}.{norm}.dense" for norm in norms]
    shapes |= {f"{name}.weight": [3072, 1024] for name in dense} | {f"{name}.bias": [3072] for name in dense}
    for name in ("time_mlp_in", "time_mlp_out"):
        shapes |= {f"{name}.weight": [1024, 1024], f"{name}.bias": [1024]}
    return shapes


@pytest.mark.parametrize(("layout", "start"), [("openpi", ""), ("lerobot", "model.")])
def test_the_public_size_has_the_public_keys_shapes_and_bytes(layout: Any, start: str) -> None:
    with torch.device("meta"):
        model = PI05Model(PI05Config.base(dtype="bfloat16"))
    expected = public_shapes()
    assert len(expected) == 813
    embedding = f"{PALIGEMMA}model.language_model.embed_tokens.weight"
    stored = stored_tensors(model.state_dict(), layout)
    tied = {start + key: shape for key, shape in expected.items() if key != embedding}
    assert {key: list(value.shape) for key, value in stored.items()} == tied
    assert len(tied) == 812
    untied = sum(value.nbytes for value in stored.values()) + public_state_dict(model.state_dict())[embedding].nbytes
    assert untied == 9_353_911_360


# -- RLinf ------------------------------------------------------------------------------------------------------------


def rlinf_weights(model: PI05Model) -> dict[str, Tensor]:
    """As RLinf saves an actor: openpi's keys, embedding and head both, and the critic."""
    weights = public_state_dict(model.state_dict())
    embedding = weights[f"{PALIGEMMA}model.language_model.embed_tokens.weight"]
    heads = {f"{PALIGEMMA}lm_head.weight": embedding, f"{EXPERT}lm_head.weight": torch.zeros(640, 64)}
    critic = {f"value_head.mlp.{i}.{part}": torch.ones(3) for i in (0, 2, 4, 6) for part in WEIGHT_BIAS}
    return {**weights, **heads, **critic}


@pytest.mark.parametrize("name", ["full_weights.pt", "actor/model_state_dict/full_weights.pt"])
def test_rlinfs_weights_load_from_both_places(name: str, tmp_path: Path) -> None:
    model = tiny_model()
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    torch.save(rlinf_weights(model), tmp_path / name)
    loaded = tiny_model(seed=1)
    load_weights(loaded, tmp_path)
    assert same_bits(loaded.state_dict(), model.state_dict())
    tokenizer = load_tokenizer("builtin")
    policy = PI05Policy.from_pretrained(tmp_path, config=PI05Config.tiny(), tokenizer=tokenizer)
    assert same_bits(policy.model.state_dict(), model.state_dict())
    with pytest.raises(FileNotFoundError, match=r"there is no .*config\.json"):
        PI05Policy.from_pretrained(tmp_path)


def test_one_error_lists_what_does_not_fit_in_a_pt_file(tmp_path: Path) -> None:
    weights = rlinf_weights(tiny_model())
    del weights["action_out_proj.bias"]
    weights["lora_A.weight"] = torch.ones(2)
    weights["action_in_proj.weight"] = torch.ones(64, 32)
    torch.save(weights, tmp_path / "full_weights.pt")
    with pytest.raises(ValueError, match="does not fit the network") as error:
        load_weights(tiny_model(), tmp_path)
    message = str(error.value)
    assert "1 missing: action_out_proj.bias" in message
    assert "1 unexpected: lora_A.weight" in message
    assert "1 of another shape: action_in_proj.weight is [64, 32], the network has [64, 7]" in message


def test_a_folder_with_two_files_of_weights_is_refused(tmp_path: Path) -> None:
    save_weights(tiny_model(), tmp_path)
    (tmp_path / "full_weights.pt").touch()
    with pytest.raises(ValueError, match=r"several files of weights \(.*model\.safetensors, .*full_weights\.pt\)"):
        load_weights(tiny_model(), tmp_path)


# -- places -----------------------------------------------------------------------------------------------------------


def test_a_device_that_has_no_effect_or_no_values_is_refused(tmp_path: Path) -> None:
    save_weights(tiny_model(), tmp_path)
    with pytest.raises(ValueError, match="device='cpu' has no effect"):
        load_weights(tiny_model(), tmp_path, "cpu")
    with torch.device("meta"):
        empty = tiny_model()
    with pytest.raises(ValueError, match="meta device holds no values"):
        load_weights(empty, tmp_path, "meta")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("way", ["argument", "default device"])
def test_weights_go_straight_to_the_device(way: str, tmp_path: Path) -> None:
    PI05Policy(PI05Config.tiny()).save_pretrained(tmp_path / "p")
    expected = PI05Policy.from_pretrained(tmp_path / "p")
    if way == "argument":
        policy = PI05Policy.from_pretrained(tmp_path / "p", device="cuda")
    else:
        with torch.device("cuda"):
            policy = PI05Policy.from_pretrained(tmp_path / "p")
    assert {x.device.type for x in (*policy.parameters(), *policy.buffers())} == {"cuda"}
    assert same_bits({k: v.cpu() for k, v in policy.state_dict().items()}, expected.state_dict())
    policy.save_pretrained(tmp_path / "again")
    files = [load_file(tmp_path / name / "model.safetensors") for name in ("p", "again")]
    assert same_bits(*files)


def load_into_shards(file: str) -> list[dict[str, Any]]:
    """Into a network that has values already, and into one that was built on the meta device."""
    mesh, found = init_device_mesh("cpu", (2,)), []
    for device in ("cpu", "meta"):
        with torch.device(device):
            model = tiny_model(seed=1, dtype="bfloat16")
        for layer in model.expert.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        if device == "meta":
            with pytest.raises(ValueError, match=r"sharded and on the meta device; call model\.to_empty"):
                load_weights(model, file)
            model.to_empty(device="cpu")
        load_weights(model, file)
        assert all(isinstance(p, DTensor) and p.to_local().numel() < p.numel() for p in model.expert.parameters())
        optimizer = FP32MasterAdamW([p for p in model.parameters() if p.requires_grad])
        seed_masters(model, optimizer, file)
        masters = {n: value.full_tensor() for n, value in master_values(model, optimizer).items()}
        found.append({"weights": whole(model), "buffers": dict(model.named_buffers()), "masters": masters})
    return found


def test_shards_take_their_own_slices(tmp_path: Path) -> None:
    saved = tiny_model()
    with torch.no_grad():
        for p in saved.parameters():
            p.copy_(torch.randn_like(p))
    file = save_weights(saved, tmp_path)
    expected = tiny_model(seed=2, dtype="bfloat16")
    load_weights(expected, file)
    for found in ranks_run(load_into_shards, tmp_path, arguments={"file": str(file)}, device="cpu"):
        for model in found:
            assert same_bits(model["weights"], dict(expected.named_parameters()))
            assert same_bits(model["buffers"], dict(expected.named_buffers()))
            assert len(model["masters"]) == 14  # the matrices of two layers
            assert same_bits(model["masters"], {n: dict(saved.named_parameters())[n] for n in model["masters"]})


# -- memory -----------------------------------------------------------------------------------------------------------

#: 400 MB of fp32 values, none of its tensors above 20 MB. Prints MB of resident memory beyond the model's own growth.
MEMORY = """
import sys, torch
from soma_lightning.models.pi05.checkpoint import load_weights, save_weights, stored_tensors
from soma_lightning.models.pi05.config import PI05Config, StreamConfig
from soma_lightning.models.pi05.model import PI05Model
step, folder, suffix = sys.argv[1:]
language = StreamConfig(width=512, mlp_width=8192, depth=6, num_heads=4, head_dim=32)
expert = StreamConfig(width=256, mlp_width=4096, depth=6, num_heads=4, head_dim=32)
config = PI05Config.tiny(language=language, expert=expert, dtype="float32" if step == "write" else "bfloat16",
                         islands="openpi")

def resident(name):
    lines = open("/proc/self/status").read().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(name))) / 1024

if step == "write":
    model = PI05Model(config)
    save_weights(model, folder)
    torch.save(stored_tensors(model.state_dict(), "openpi"), folder + "/full_weights.pt")
    print(sum(p.nbytes for p in model.parameters()) / 2**20, max(p.nbytes for p in model.parameters()) / 2**20)
else:
    with torch.device("meta"):
        model = PI05Model(config)
    if step == "save":
        model.to_empty(device="cpu")
        for p in model.parameters(): torch.nn.init.ones_(p)
    open("/proc/self/clear_refs", "w").write("5")  # the peak starts here
    before = resident("VmRSS")
    if step == "load":
        load_weights(model, folder + "/" + suffix)
        before += sum(p.nbytes for p in model.parameters()) / 2**20
    else:
        save_weights(model, folder + "/again")
    print(resident("VmHWM") - before)
"""


def memory_step(*arguments: str) -> list[float]:
    command = [sys.executable, "-c", MEMORY, *arguments]
    run = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(f"[{','.join(run.stdout.split())}]")


@pytest.mark.slow
def test_peak_memory_is_that_of_the_largest_tensor(tmp_path: Path) -> None:
    size, largest = memory_step("write", str(tmp_path), "")
    assert size > 350 > 10 * largest
    for suffix in ("model.safetensors", "full_weights.pt"):
        (beyond,) = memory_step("load", str(tmp_path), suffix)
        assert beyond < 3 * largest, suffix
    (beyond,) = memory_step("save", str(tmp_path), "")
    assert beyond < 3 * largest
