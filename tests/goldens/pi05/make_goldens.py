"""Writes what lerobot's pi0.5 computes on tiny random networks, for the parity tests.

Run with Python >= 3.12, lerobot 0.6.1 and transformers 5.5 (torch 2.11, CPU):

    HF_HUB_OFFLINE=1 python tests/goldens/pi05/make_goldens.py                    # the cases below
    HF_HUB_OFFLINE=1 python tests/goldens/pi05/make_goldens.py --loads FOLDER     # a checkpoint written by us

`network.safetensors` holds the weights (public keys) that all cases share; `case_*.safetensors` holds inputs, loss,
every trainable gradient and the actions of 10 Euler steps; `loads.safetensors` holds what lerobot computes from the
folder that `write_checkpoint.py` wrote (weights, inputs, actions).

lerobot forces sizes that would make these files large (vision MLP, projection, vocabulary) and checks variant names;
the network classes are wrapped here so that small sizes reach them. Nothing of the forward code is changed.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import lerobot.policies.pi05.modeling_pi05 as upstream
import torch
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.policies.pi05.configuration_pi05 import PI05Config
from safetensors.torch import load_file, save_file
from transformers import PaliGemmaConfig

FOLDER = Path(__file__).parent
SIZES = json.loads((FOLDER / "sizes.json").read_text())
VOCAB, IMAGE, PROMPT = SIZES["vocab_size"], SIZES["image_resolution"], SIZES["tokenizer_max_length"]
ACTION_DIM, MAX_ACTION_DIM, STATE_DIM, CAMERAS = SIZES["action_dim"], SIZES["max_action_dim"], SIZES["state_dim"], 3
STREAMS = {"gemma_2b": SIZES["language"], "gemma_300m": SIZES["expert"]}
assert SIZES["expert"]["num_heads"] == 8, "lerobot's joint layer is written for 8 heads"


@dataclass
class Case:
    """One golden file. prompt_lengths, image_masks: one entry a batch row; image_masks[row][camera]."""

    name: str
    horizon: int
    prompt_lengths: list[int]
    image_masks: list[list[bool]]
    loss_dims: str = "real"
    dtype: str = "float32"
    trainable: str = "expert"


CASES = [
    # A prompt with the state is long, a prompt without it short; here they are ids and lengths.
    Case("state_prompt", 7, [12, 10], [[True, True, False]] * 2),
    Case("task_prompt", 10, [4, 3], [[True, False, False]] * 2, loss_dims="padded"),
    Case("full_rows", 10, [12, 12], [[True, True, True]] * 2),
    Case("ragged_cameras", 7, [5, 12], [[True, False, True], [False, True, True]]),
    Case("all_trainable", 7, [9, 12], [[True, True, False]] * 2, trainable="all"),
    Case("bfloat16", 10, [12, 7], [[True, True, False]] * 2, dtype="bfloat16"),
    Case("vision_frozen", 7, [9, 12], [[True, True, False], [True, False, True]], trainable="all_but_vision"),
]


def install_small_sizes() -> None:
    def small_variant(variant: str) -> upstream.GemmaConfig:
        stream = dict(STREAMS[variant])
        return upstream.GemmaConfig(mlp_dim=stream.pop("mlp_width"), **stream)

    paligemma, expert = upstream.PaliGemmaForConditionalGenerationWithPiGemma, upstream.PiGemmaForCausalLM

    def small_paligemma(config: PaliGemmaConfig) -> torch.nn.Module:
        vision = SIZES["vision"]
        config.vision_config.hidden_size = vision["width"]
        config.vision_config.num_hidden_layers = vision["depth"]
        config.vision_config.num_attention_heads = vision["num_heads"]
        config.vision_config.intermediate_size = vision["mlp_width"]
        config.vision_config.projection_dim = config.projection_dim = config.text_config.hidden_size
        config.text_config.vocab_size = VOCAB
        return paligemma(config=config)

    def small_expert(config) -> torch.nn.Module:
        config.vocab_size = VOCAB
        return expert(config=config)

    upstream.get_gemma_config = small_variant
    upstream.PaliGemmaForConditionalGenerationWithPiGemma = small_paligemma
    upstream.PiGemmaForCausalLM = small_expert


def build_policy(case: Case) -> upstream.PI05Policy:
    image = PolicyFeature(FeatureType.VISUAL, (3, IMAGE, IMAGE))
    cameras = {f"observation.images.image{c}": image for c in range(CAMERAS)}
    config = PI05Config(
        device="cpu",
        dtype=case.dtype,
        chunk_size=case.horizon,
        n_action_steps=5,
        max_action_dim=MAX_ACTION_DIM,
        image_resolution=(IMAGE, IMAGE),
        tokenizer_max_length=PROMPT,
        train_expert_only=case.trainable == "expert",
        freeze_vision_encoder=case.trainable == "all_but_vision",
        input_features={**cameras, "observation.state": PolicyFeature(FeatureType.STATE, (STATE_DIM,))},
        output_features={"action": PolicyFeature(FeatureType.ACTION, (ACTION_DIM,))},
    )
    policy = upstream.PI05Policy(config)
    policy.train()
    return policy


def random_weights(policy: upstream.PI05Policy) -> dict[str, torch.Tensor]:
    """Random values for every used tensor; adaptive norms too, because at zero every attention gradient vanishes."""
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, parameter in policy.model.named_parameters():
        if "lm_head" in name:
            continue
        std = 0.1 if parameter.dim() == 1 else (0.3 if "dense" in name else 1.0) * parameter[0].numel() ** -0.5
        weights[name] = std * torch.randn(parameter.shape, generator=generator)
    return weights


def set_weights(policy: upstream.PI05Policy, weights: dict[str, torch.Tensor]) -> None:
    missing, unexpected = policy.model.load_state_dict(weights, strict=False)
    assert not unexpected, unexpected
    assert all("lm_head" in name for name in missing), missing


def make_inputs(case: Case, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    batch = len(case.prompt_lengths)
    lengths = torch.tensor(case.prompt_lengths)
    token_mask = torch.arange(PROMPT)[None] < lengths[:, None]
    image_masks = torch.tensor(case.image_masks)
    images = torch.rand(CAMERAS, batch, 3, IMAGE, IMAGE, generator=generator) * 2 - 1
    images[~image_masks.T] = -1.0
    return {
        # float16 holds these values exactly, so the file needs half the bytes
        "images": images.half(),
        "image_masks": image_masks.T.contiguous(),
        "tokens": torch.randint(3, VOCAB, (batch, PROMPT), generator=generator) * token_mask,
        "token_mask": token_mask,
        "actions": torch.nn.functional.pad(
            torch.randn(batch, case.horizon, ACTION_DIM, generator=generator), (0, MAX_ACTION_DIM - ACTION_DIM)
        ),
        "noise": torch.randn(batch, case.horizon, MAX_ACTION_DIM, generator=generator),
        "time": torch.rand(batch, generator=generator) * 0.999 + 0.001,
        "sampling_noise": torch.randn(batch, case.horizon, MAX_ACTION_DIM, generator=generator),
    }


def observation(inputs: dict[str, torch.Tensor]) -> tuple:
    images = [image.float() for image in inputs["images"]]
    return images, list(inputs["image_masks"]), inputs["tokens"], inputs["token_mask"]


def sample(policy: upstream.PI05Policy, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    policy.eval()
    return policy.model.sample_actions(*observation(inputs), noise=inputs["sampling_noise"], num_steps=10)


def make_case(case: Case, weights: dict[str, torch.Tensor], seed: int) -> None:
    policy = build_policy(case)
    set_weights(policy, weights)
    inputs = make_inputs(case, seed)
    losses = policy.model(*observation(inputs), inputs["actions"], inputs["noise"], inputs["time"])
    loss = (losses[..., :ACTION_DIM] if case.loss_dims == "real" else losses).mean()
    loss.backward()
    parameters = policy.model.named_parameters()
    gradients = {f"grad.{name}": p.grad.clone() for name, p in parameters if p.grad is not None}
    outputs = {"loss": loss.detach(), "losses": losses.detach(), "sampled": sample(policy, inputs)}
    settings = {key: str(value) for key, value in vars(case).items() if key in ("loss_dims", "dtype", "trainable")}
    save_file({**inputs, **outputs, **gradients}, FOLDER / f"case_{case.name}.safetensors", metadata=settings)
    print(f"{case.name}: loss {loss.item():.6f}, {len(gradients)} gradients")


def check_loads(folder: Path) -> None:
    """lerobot loads a folder written by us, strictly, and samples actions."""
    policy = upstream.PI05Policy.from_pretrained(folder, strict=True)
    file = load_file(folder / "model.safetensors")
    state = policy.state_dict()
    wanted = set(state)
    # from_pretrained swallows errors and goes on with random weights, so compare what arrived.
    tied = {"model.paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight"}
    missing = wanted - set(file) - tied
    assert not missing, missing
    assert not set(file) - wanted, set(file) - wanted
    for key, value in file.items():
        assert torch.equal(state[key], value.to(state[key].dtype)), key
    case = Case("loads", policy.config.chunk_size, [12, 8], [[True, True, False]] * 2)
    inputs = make_inputs(case, seed=99)
    head = "model.paligemma_with_expert.gemma_expert.lm_head.weight"
    weights = {f"weight.{key}": value for key, value in file.items() if key != head}
    save_file({**inputs, **weights, "sampled": sample(policy, inputs)}, FOLDER / "loads.safetensors")
    print(f"lerobot loaded {len(file)} tensors from {folder.name}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--loads", type=Path, help="a checkpoint folder written by write_checkpoint.py")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    install_small_sizes()
    if arguments.loads is not None:
        check_loads(arguments.loads)
        return
    weights = random_weights(build_policy(CASES[0]))
    save_file(weights, FOLDER / "network.safetensors")
    for seed, case in enumerate(CASES, start=1):
        make_case(case, weights, seed)


if __name__ == "__main__":
    main()
