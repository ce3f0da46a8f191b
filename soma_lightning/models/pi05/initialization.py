"""Where does training start? Values of a fresh network: the public start, and a start for training from scratch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from soma_lightning.models.pi05.expert import ActionExpert, AdaptiveRMSNorm

if TYPE_CHECKING:
    from soma_lightning.models.pi05.model import PI05Model

POSITION_STD = 0.3
GATE_BIAS = 1.0


def initialize_expert(expert: ActionExpert) -> None:
    """The public start: projections N(0, 1 / fan_in), biases zero, adaptive norms zero.

    Zero adaptive norms make every gate zero, so the expert starts as an identity and learns its depth slowly.
    """
    for module in expert.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    for module in expert.modules():
        if isinstance(module, AdaptiveRMSNorm):
            nn.init.zeros_(module.dense.weight)


@torch.no_grad()
def initialize_from_scratch(model: PI05Model, number_token_ids: Sequence[int] = ()) -> None:
    """Start values for training the whole network without a checkpoint; matters for tiny networks and short training.

    - Gates start open (bias 1): a closed gate passes no gradient to the layer behind it until it has opened.
    - Patch position table std 0.3: at the usual 0.02 a linear patch embedding drowns it, and where a thing is in the
      image is what a policy has to read.
    - Projections of the language model N(0, 1 / (3 fan_in)): the public constant std 0.02 is meant for width 2048.
    - Token embeddings N(0, 1 / width), which sqrt(width) scales to unit size.
    - `number_token_ids` (tokens that stand for equally spaced numbers, in increasing order): sines and cosines of the
      number, low frequencies strong, so that neighbouring numbers start as neighbours.

    Raises ValueError when an id lies outside the vocabulary.
    """
    config = model.config
    outside = [i for i in number_token_ids if not 0 <= i < config.vocab_size]
    if outside:
        raise ValueError(f"number tokens {outside[:5]} lie outside the vocabulary of {config.vocab_size}")
    initialize_expert(model.expert)
    for module in model.expert.modules():
        if isinstance(module, AdaptiveRMSNorm):
            _gate(module).fill_(GATE_BIAS)
    paligemma = model.prefix.paligemma
    for module in paligemma.language_model.layers.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=(3 * module.in_features) ** -0.5)
    nn.init.normal_(paligemma.vision_tower.embeddings.position_embedding.weight, std=POSITION_STD)
    table = paligemma.get_input_embeddings().weight
    nn.init.normal_(table, std=table.shape[1] ** -0.5)
    if number_token_ids:
        ids = torch.tensor(list(number_token_ids), device=table.device)
        table[ids] = fourier_features(len(ids), table.shape[1]).to(table)


def _gate(norm: AdaptiveRMSNorm) -> Tensor:
    """The gate's third of the bias (scale, shift, gate)."""
    bias: Tensor = norm.dense.bias
    return bias[2 * bias.shape[0] // 3 :]


def fourier_features(count: int, width: int) -> Tensor:
    """Embeddings of `count` equally spaced numbers in [0, 1): float32 [count, width].

    Frequencies are multiples of a quarter cycle, so the first never repeats over the range; amplitude falls as
    1 / (1 + frequency). The factor 3 / sqrt(width) gives rows about the size of the random ones.
    """
    numbers = torch.arange(count, dtype=torch.float32)[:, None] / count
    frequencies = torch.arange(1, width // 2 + 1, dtype=torch.float32) / 4
    angles = 2.0 * math.pi * numbers * frequencies
    amplitudes = 3.0 / math.sqrt(width) / (1.0 + frequencies)
    features = torch.cat([angles.sin() * amplitudes, angles.cos() * amplitudes], dim=1)
    return torch.nn.functional.pad(features, (0, width - features.shape[1]))
