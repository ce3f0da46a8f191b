"""Is the pi0.5 network what its page says: sizes, masks, shared prefixes, frozen parts, precision, start values?"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soma_lightning.models.pi05.checkpoint import public_state_dict
from soma_lightning.models.pi05.config import PI05Config, StreamConfig, VisionConfig
from soma_lightning.models.pi05.initialization import fourier_features, initialize_from_scratch
from soma_lightning.models.pi05.model import PI05Model, cast_to_islands
from soma_lightning.models.pi05.prefix import PrefixCache

B, T, H, A, R, L, CAMERAS = 3, 2, 5, 6, 28, 9, 3
Inputs = tuple[list[Tensor], list[Tensor], Tensor, Tensor]


def small_model(**changes: Any) -> PI05Model:
    """A network with random adaptive norms (at their public start, zero, every attention gradient vanishes)."""
    sizes: dict[str, Any] = {
        "vision": VisionConfig(width=16, depth=1, num_heads=2, mlp_width=24, patch_size=14),
        "language": StreamConfig(width=24, mlp_width=32, depth=3, num_heads=4, num_kv_heads=2, head_dim=8),
        "expert": StreamConfig(width=16, mlp_width=24, depth=3, num_heads=4, num_kv_heads=2, head_dim=8),
        "vocab_size": 40,
        "image_resolution": R,
        "max_action_dim": A,
        "chunk_size": H,
        "n_action_steps": H,
    }
    torch.manual_seed(0)
    model = PI05Model(PI05Config(**{**sizes, **changes}))
    initialize_from_scratch(model)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "expert" in name and "dense" in name:
                p.copy_(0.3 * torch.randn(p.shape))
    return model


def make_inputs(lengths: list[int] | None = None, cameras: list[list[bool]] | None = None) -> Inputs:
    """lengths: prompt tokens of each row; cameras[row][slot]: readable."""
    g = torch.Generator().manual_seed(1)
    images = [torch.rand(B, 3, R, R, generator=g) * 2 - 1 for _ in range(CAMERAS)]
    masks = torch.tensor(cameras or [[True] * CAMERAS] * B)
    tokens = torch.randint(1, 40, (B, L), generator=g)
    token_mask = torch.arange(L) < torch.tensor(lengths or [L] * B)[:, None]
    return images, list(masks.T), tokens, token_mask


def flow_inputs(draws: int = 1) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(2)
    return torch.randn(B * draws, H, A, generator=g), torch.rand(B * draws, generator=g)


def velocity(model: PI05Model, inputs: Inputs, **encode: Any) -> Tensor:
    return model.velocity(model.encode_prefix(*inputs, **encode), *flow_inputs())


# -- sizes ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def base() -> PI05Model:
    with torch.device("meta"):
        return PI05Model(PI05Config.base(dtype="bfloat16"))


def test_the_public_network_has_811_tensors_and_its_parameter_counts(base: PI05Model) -> None:
    public = public_state_dict(base.state_dict())
    assert len(public) == 811
    assert sum(p.numel() for p in public.values()) == 3_353_433_872

    def count(part: str) -> int:
        return sum(p.numel() for key, p in public.items() if part in key)

    assert count("vision_tower.vision_model.") == 412_442_352
    assert count("multi_modal_projector.") == 2_361_344
    assert count("language_model.") == 2_508_531_712
    assert count("gemma_expert.model.") == 427_932_672
    assert count("time_mlp_") == 2 * 1_049_600
    assert list(public["action_in_proj.weight"].shape) == [1024, 32]
    assert not any("lm_head" in key for key in public)


def test_expert_only_training_has_208_tensors(base: PI05Model) -> None:
    trainable = [p for p in base.parameters() if p.requires_grad]
    assert len(trainable) == len(base.trainable_names()) == 208
    assert sum(p.numel() for p in trainable) == 430_098_464
    assert all(name.startswith("expert.") for name in base.trainable_names())


def test_lerobots_islands_keep_558_tensors_in_fp32(base: PI05Model) -> None:
    assert Counter(p.dtype for p in base.parameters()) == {torch.float32: 558, torch.bfloat16: 253}


def test_openpis_islands() -> None:
    model = small_model(dtype="bfloat16", islands="openpi")
    dtypes = {name.removeprefix("prefix.paligemma."): p.dtype for name, p in model.named_parameters()}
    vision = {name.removeprefix("vision_tower."): d for name, d in dtypes.items() if name.startswith("vision_tower.")}
    fp32 = {name for name, d in vision.items() if d == torch.float32}
    assert fp32 == {f"embeddings.{n}" for n in ("patch_embedding.weight", "patch_embedding.bias")} | {
        "embeddings.position_embedding.weight"
    }
    assert dtypes["multi_modal_projector.linear.weight"] == torch.bfloat16
    assert dtypes["language_model.norm.weight"] == torch.float32
    assert dtypes["expert.layers.0.input_layernorm.dense.weight"] == torch.float32
    assert dtypes["expert.layers.0.mlp.up_proj.weight"] == torch.bfloat16
    assert dtypes["expert.time_mlp_in.weight"] == dtypes["expert.action_out_proj.bias"] == torch.float32


def test_tiny_has_the_public_structure() -> None:
    model = PI05Model(PI05Config.tiny())
    assert 0.6e6 < sum(p.numel() for p in model.parameters()) < 0.7e6
    layers = [key.split("layers.")[0] for key in public_state_dict(model.state_dict()) if "layers.1." in key]
    assert set(layers) == {
        "paligemma_with_expert.paligemma.model.vision_tower.vision_model.encoder.",
        "paligemma_with_expert.paligemma.model.language_model.",
        "paligemma_with_expert.gemma_expert.model.",
    }


# -- prefix -----------------------------------------------------------------------------------------------------------

RAGGED: dict[str, Inputs] = {
    "full": make_inputs(),
    "prompt_padding": make_inputs([4, 9, 6]),
    "equal_padding": make_inputs([4, 4, 4]),
    "empty_camera": make_inputs([4, 9, 6], [[True, False, True]] * B),
    "cameras_by_row": make_inputs([4, 9, 6], [[True, False, True], [False, True, True], [True, True, False]]),
    "no_image": make_inputs([4, 9, 6], [[False] * 3] * B),
    "no_prompt_in_a_row": make_inputs([0, 9, 6]),
}


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("name", RAGGED)
def test_compaction_is_exact(name: str, kv_heads: int) -> None:
    stream = {"num_heads": 4, "num_kv_heads": kv_heads, "head_dim": 8, "depth": 3}
    model = small_model(
        trainable="all",
        language=StreamConfig(width=24, mlp_width=32, **stream),
        expert=StreamConfig(width=16, mlp_width=24, **stream),
    )
    results = []
    for compact in (True, False):
        model.zero_grad()
        v = velocity(model, RAGGED[name], compact=compact)
        v.square().mean().backward()
        results.append((v.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}))
    (v, grads), (v_padded, grads_padded) = results
    torch.testing.assert_close(v, v_padded, rtol=1e-5, atol=1e-6)
    assert len(grads) > 20
    for parameter, grad in grads.items():
        reference = grads_padded[parameter]
        torch.testing.assert_close(grad, reference, rtol=1e-4, atol=1e-5 * max(1.0, reference.abs().max().item()))


@pytest.mark.parametrize("name", RAGGED)
def test_buckets_change_lengths_only(name: str) -> None:
    model = small_model()
    expected = velocity(model, RAGGED[name])
    longest = int(model.encode_prefix(*RAGGED[name]).lengths.max())
    model.prefix.bucket = 4
    prefix = model.encode_prefix(*RAGGED[name])
    width = prefix.keys[0].shape[2]
    assert longest <= width < longest + 4
    assert prefix.mask is None or prefix.mask.shape == (B, width)
    torch.testing.assert_close(velocity(model, RAGGED[name]), expected, rtol=1e-5, atol=1e-6)


def test_compiled_layers_train_as_eager_ones_and_share_their_code() -> None:
    results, compiled = [], []

    def backend(graph: Any, example: Any) -> Any:
        compiled.append(graph)
        return graph.forward

    for compiles in (False, True):
        model = small_model(trainable="all")
        if compiles:
            model.compile_layers(bucket=4, backend=backend)
        v = velocity(model, RAGGED["prompt_padding"])
        v.square().mean().backward()
        results.append((v.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}))
    (v, grads), (v_compiled, grads_compiled) = results
    torch.testing.assert_close(v_compiled, v, rtol=1e-5, atol=1e-6)
    assert grads.keys() == grads_compiled.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(grads_compiled[name], grad, rtol=1e-4, atol=1e-5 * max(1.0, grad.abs().max().item()))
    assert 4 <= len(compiled) <= 6  # vision, two kinds of language layer, expert: not one for each of 7 layers
    with pytest.raises(ValueError, match="bucket=0 must be at least 1 token"):
        model.compile_layers(bucket=0)


def test_a_hole_in_the_prompt_takes_no_position() -> None:
    model = small_model()
    images, image_masks, tokens, token_mask = make_inputs([6, 6, 6])
    holed_tokens = torch.cat([tokens[:, :2], tokens.new_full((B, 1), 7), tokens[:, 2:-1]], 1)
    holed_mask = torch.cat([token_mask[:, :2], token_mask.new_zeros(B, 1), token_mask[:, 2:-1]], 1)
    holed = velocity(model, (images, image_masks, holed_tokens, holed_mask))
    torch.testing.assert_close(holed, velocity(model, (images, image_masks, tokens, token_mask)), rtol=1e-5, atol=1e-6)


def test_cache_is_cut_to_the_longest_row() -> None:
    model = small_model()
    image_tokens = model.config.image_tokens
    cache = model.encode_prefix(*RAGGED["empty_camera"])
    assert cache.keys[0].shape == cache.values[-1].shape == (B, 2, 2 * image_tokens + 9, 8)
    assert len(cache.keys) == len(cache.values) == 3
    assert cache.lengths.tolist() == [2 * image_tokens + 4, 2 * image_tokens + 9, 2 * image_tokens + 6]
    assert cache.mask is not None
    assert cache.mask.sum(1).tolist() == cache.lengths.tolist()
    for full in ("full", "equal_padding"):
        assert model.encode_prefix(*RAGGED[full]).mask is None


def test_an_empty_camera_is_never_run_and_may_be_left_out() -> None:
    model = small_model()
    images, image_masks, tokens, token_mask = make_inputs([4, 9, 6], [[True, False, True]] * B)
    seen: list[int] = []
    vision = model.prefix.paligemma.vision_tower
    vision.embeddings.register_forward_hook(lambda _m, _i, out: seen.append(out.shape[0]))
    images[1] = torch.full_like(images[1], torch.nan)
    v = velocity(model, (images, image_masks, tokens, token_mask))
    assert seen == [2 * B]
    without = ([images[0], images[2]], [image_masks[0], image_masks[2]], tokens, token_mask)
    assert torch.equal(v, velocity(model, without))


@pytest.mark.parametrize("trainable", ["expert", "all"])
@pytest.mark.parametrize("compact", [True, False])
def test_a_masked_image_may_hold_nan(compact: bool, trainable: str) -> None:
    model = small_model(trainable=trainable)
    images, masks, tokens, token_mask = make_inputs(
        [L, 3, 5], [[True, False, False], [False, True, False], [True, True, False]]
    )
    poisoned = [image.where(mask[:, None, None, None], torch.nan) for image, mask in zip(images, masks, strict=True)]
    results = []
    for pictures in (images, poisoned):
        v = velocity(model, (pictures, masks, tokens, token_mask), compact=compact)
        model.zero_grad()
        v.square().sum().backward()
        results.append((v, [p.grad for p in model.parameters() if p.grad is not None]))
    (expected, expected_grads), (got, grads) = results
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(grads, expected_grads, rtol=1e-5, atol=1e-5)


def test_the_last_layer_computes_keys_and_values_only() -> None:
    model = small_model()
    language = model.prefix.paligemma.language_model
    calls: Counter[str] = Counter()
    for name, module in language.named_modules():
        module.register_forward_hook(lambda _m, _i, _o, name=name: calls.update([name]))
    model.encode_prefix(*make_inputs())
    last = {name.removeprefix("layers.2.") for name in calls if name.startswith("layers.2.")}
    assert last == {"input_layernorm", "self_attn.k_proj", "self_attn.v_proj"}
    assert {"layers.1.mlp", "layers.1.self_attn.o_proj", "layers.1.post_attention_layernorm"} <= set(calls)
    assert "norm" not in calls
    names = {name for name, _ in language.named_parameters()}
    assert {"norm.weight", "layers.2.mlp.up_proj.weight", "layers.2.self_attn.q_proj.weight"} <= names


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"images": 1}, "1 images but 3 image masks"),
        ({"image": torch.zeros(B, 3, R, R + 14)}, r"images\[0\] must be \[B, 3, R, R\]"),
        ({"image_mask": torch.ones(B)}, r"image_masks\[0\] must be bool"),
        ({"image_mask": torch.ones(B, 1, dtype=torch.bool)}, r"image_masks\[0\] must be \[B\]"),
        ({"token_mask": torch.ones(B, L + 1, dtype=torch.bool)}, r"must both be \[B, L\]"),
        ({"token_mask": torch.ones(B, L, dtype=torch.int64)}, "token_mask must be bool"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    images, image_masks, tokens, token_mask = make_inputs()
    images = images[: change.get("images", len(images))]
    if "image" in change:
        images[0] = change["image"]
    if "image_mask" in change:
        image_masks[0] = change["image_mask"]
    with pytest.raises(ValueError, match=message):
        small_model().encode_prefix(images, image_masks, tokens, change.get("token_mask", token_mask))


def test_a_row_without_anything_to_read_is_refused() -> None:
    inputs = make_inputs([4, 0, 6], [[True] * 3, [False] * 3, [True] * 3])
    with pytest.raises(ValueError, match="row 1 has neither a readable image nor a readable prompt token"):
        small_model().encode_prefix(*inputs)


# -- flow -------------------------------------------------------------------------------------------------------------


def test_draws_share_one_prefix() -> None:
    model = small_model(trainable="all")
    inputs = RAGGED["cameras_by_row"]
    noise, time = flow_inputs(T)
    actions = torch.randn(B, H, A)

    def gradients(loss: Tensor) -> dict[str, Tensor]:
        model.zero_grad()
        loss.backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    shared = model.flow_loss(model.encode_prefix(*inputs), actions, noise, time)
    assert shared.shape == (B * T, H, A)
    rows = torch.arange(B).repeat_interleave(T)
    images, image_masks, tokens, token_mask = inputs
    repeated = ([x[rows] for x in images], [m[rows] for m in image_masks], tokens[rows], token_mask[rows])
    apart = model.flow_loss(model.encode_prefix(*repeated), actions[rows], noise, time)
    torch.testing.assert_close(shared, apart, rtol=1e-5, atol=1e-5)
    apart_grads = gradients(apart.mean())
    for name, grad in gradients(shared.mean()).items():
        torch.testing.assert_close(grad, apart_grads[name], rtol=1e-4, atol=1e-5, msg=name)


def test_loss_is_the_squared_error_of_noise_minus_actions() -> None:
    model = small_model()
    prefix = model.encode_prefix(*make_inputs([4, 9, 6]))
    noise, time = flow_inputs()
    actions = torch.randn(B, H, A)
    t = time[:, None, None]
    expected = (model.velocity(prefix, t * noise + (1 - t) * actions, time) - (noise - actions)) ** 2
    torch.testing.assert_close(model.flow_loss(prefix, actions, noise, time), expected)


def test_sampling_is_euler_from_noise_and_computes_no_prefix() -> None:
    model = small_model()
    prefix = model.encode_prefix(*make_inputs([4, 9, 6]))
    model.prefix.register_forward_hook(lambda *_: pytest.fail("the prefix ran again"))
    noise, _ = flow_inputs(T)
    x = noise
    with torch.no_grad():
        for step in range(4):
            x = x - model.velocity(prefix, x, torch.full((B * T,), 1 - step / 4)) / 4
    sampled = model.sample_actions(prefix, noise, num_steps=4)
    torch.testing.assert_close(sampled, x)
    assert not sampled.requires_grad


def test_flow_inputs_that_do_not_fit_are_refused() -> None:
    model = small_model()
    prefix = model.encode_prefix(*make_inputs())
    noise, time = flow_inputs()
    with pytest.raises(ValueError, match="N a multiple of the prefix's 3 rows and A = 6"):
        model.velocity(prefix, noise[:2], time[:2])
    with pytest.raises(ValueError, match="A = 6"):
        model.velocity(prefix, noise[..., :4], time)
    with pytest.raises(ValueError, match=r"time must be \[N\]"):
        model.velocity(prefix, noise, time[:1])
    with pytest.raises(ValueError, match="actions have 1 rows, but the prefix has 3"):
        model.flow_loss(prefix, torch.zeros(1, H, A), noise, time)
    with pytest.raises(ValueError, match="num_steps=0 must be a whole number, at least 1"):
        model.sample_actions(prefix, noise, num_steps=0)


# -- freezing ---------------------------------------------------------------------------------------------------------


def test_a_frozen_prefix_records_no_graph_and_stays_in_eval_mode() -> None:
    model = small_model().train()
    assert model.frozen_modules() == [model.prefix]
    assert not any(m.training for m in model.prefix.modules())
    assert model.expert.training
    cache = model.encode_prefix(*make_inputs())
    assert not any(x.requires_grad for x in (*cache.keys, *cache.values))
    model.velocity(cache, *flow_inputs()).mean().backward()
    assert {n for n, p in model.named_parameters() if p.grad is not None} == set(model.trainable_names())


def test_unfreezing_one_prefix_parameter_lets_gradients_through() -> None:
    model = small_model()
    model.prefix.paligemma.multi_modal_projector.requires_grad_(True)
    velocity(model, make_inputs()).mean().backward()
    grads = {n for n, p in model.prefix.named_parameters() if p.grad is not None}
    assert grads == {f"paligemma.multi_modal_projector.linear.{n}" for n in ("weight", "bias")}


def test_training_everything_leaves_only_the_dead_end_frozen() -> None:
    model = small_model(trainable="all").train()
    dead = {id(p) for module in model.prefix.unreached_modules() for p in module.parameters()}
    frozen = {id(p) for p in model.parameters() if not p.requires_grad}
    assert frozen == dead
    assert model.prefix.paligemma.vision_tower.training
    velocity(model, make_inputs()).square().mean().backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    model.freeze("expert")
    assert model.frozen_modules() == [model.prefix]
    assert not model.prefix.paligemma.vision_tower.training
    with pytest.raises(ValueError, match="trainable='head' must be one of .*'all_but_vision', 'all'"):
        model.freeze("head")  # type: ignore[arg-type]
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match="checkpointed already; freeze before that"):
        model.freeze("all")


# -- precision --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("islands", ["lerobot", "openpi"])
def test_bfloat16_follows_fp32(islands: str) -> None:
    reference = small_model()
    model = small_model(dtype="bfloat16", islands=islands)
    v = velocity(model, RAGGED["cameras_by_row"])
    assert v.dtype == torch.float32
    error = (v - velocity(reference, RAGGED["cameras_by_row"])).norm() / v.norm()
    assert 1e-5 < error < 3e-2
    v.square().mean().backward()
    assert all(p.grad is not None and p.grad.dtype == p.dtype for p in model.parameters() if p.requires_grad)


def test_autocast_leaves_the_islands_in_fp32() -> None:
    model = small_model()
    dtypes: dict[str, torch.dtype] = {}
    for name, module in model.expert.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda _m, _i, out, name=name: dtypes.__setitem__(name, out.dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        v = velocity(model, make_inputs([4, 9, 6]))
    islands = {n for n in dtypes if n.endswith("dense") or n.startswith(("action_", "time_"))}
    assert {n for n, d in dtypes.items() if d == torch.float32} == islands
    reference = velocity(model, make_inputs([4, 9, 6]))
    assert v.dtype == torch.float32
    assert (v - reference).norm() / reference.norm() < 3e-2


@pytest.mark.parametrize("islands", ["lerobot", "openpi"])
def test_a_cast_of_the_whole_network_is_noticed(islands: str) -> None:
    model = small_model(dtype="bfloat16", islands=islands)
    model.check_dtypes()
    with pytest.raises(ValueError, match=r"parameters were cast away .*is torch\.bfloat16\).*use precision='32-true'"):
        model.bfloat16().check_dtypes()


def test_unknown_islands_are_refused() -> None:
    with pytest.raises(ValueError, match="islands='jax' is unknown"):
        cast_to_islands(small_model(), torch.bfloat16, "jax")


# -- start values -----------------------------------------------------------------------------------------------------


def test_the_public_start_is_an_identity() -> None:
    """Zero adaptive norms close every gate, so the velocity is the output projection of the normalised input."""
    model = PI05Model(small_model().config)
    prefix = model.encode_prefix(*make_inputs())
    noise, time = flow_inputs()
    x = model.expert.action_in_proj(noise)
    expected = model.expert.action_out_proj(F.rms_norm(x, x.shape[-1:], eps=1e-6))
    torch.testing.assert_close(model.velocity(prefix, noise, time), expected)


def test_start_from_scratch_opens_gates_and_orders_numbers() -> None:
    model = PI05Model(PI05Config.tiny())
    ids = list(range(100, 356))
    initialize_from_scratch(model, ids)
    W = model.config.expert.width
    for module in (model.expert.norm, model.expert.layers[1].input_layernorm):
        assert module.dense.bias[2 * W :].eq(1.0).all()
        assert module.dense.bias[: 2 * W].eq(0.0).all()
        assert module.dense.weight.eq(0.0).all()
    paligemma = model.prefix.paligemma
    assert abs(paligemma.vision_tower.embeddings.position_embedding.weight.std().item() - 0.3) < 0.03
    table = paligemma.get_input_embeddings().weight
    assert abs(table[:100].norm(dim=1).mean().item() - 1.0) < 0.1
    numbers = table[ids]
    assert torch.equal(numbers, fourier_features(256, model.config.language.width))
    distance = (numbers[:, None] - numbers[None]).norm(dim=-1)
    assert distance[128, 129] < distance[128, 160] < distance[128, 255]
    with pytest.raises(ValueError, match=r"number tokens \[700\] lie outside the vocabulary of 640"):
        initialize_from_scratch(model, [700])


def test_a_meta_build_gets_its_buffers_back() -> None:
    with torch.device("meta"):
        model = PI05Model(small_model().config)
    model.to_empty(device="cpu")
    model.load_state_dict(small_model().state_dict())
    model.prefix.reset_buffers()
    inputs = make_inputs([4, 9, 6])
    assert torch.equal(velocity(model, inputs), velocity(small_model(), inputs))
    assert model.prefix.paligemma.get_input_embeddings().embed_scale.item() == pytest.approx(24**0.5)


def test_a_stored_prefix_can_be_sliced_by_row() -> None:
    """What a feature cache does: single rows of a cache give the same velocities."""
    model = small_model()
    cache = model.encode_prefix(*RAGGED["cameras_by_row"])
    noise, time = flow_inputs()
    assert cache.mask is not None
    row = PrefixCache([k[1:2] for k in cache.keys], [v[1:2] for v in cache.values], cache.mask[1:2], cache.lengths[1:2])
    torch.testing.assert_close(
        model.velocity(row, noise[1:2], time[1:2]), model.velocity(cache, noise, time)[1:2], rtol=1e-5, atol=1e-6
    )
