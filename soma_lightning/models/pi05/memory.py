"""How much memory will a training step of pi0.5 need on one device? An estimate from shapes, before anything runs.

Counted is what must fit at once: weights, gradients, optimizer state, keys and values of a batch's prefix, what layers
that train keep for their backward pass, and the largest temporary of layers that do not. Left out are the CUDA context
(about half a gigabyte), images, and what an allocator loses between its blocks.

Sizes are bytes, or bytes a token where a function says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from soma_lightning.frozen_layers import Fp8Linear, compute_dtype
from soma_lightning.models.pi05.config import StreamConfig, VisionConfig
from soma_lightning.optim.shards import local

if TYPE_CHECKING:
    from soma_lightning.models.pi05.model import PI05Model

GIB = 2**30


@dataclass(frozen=True)
class Batch:
    """What decides the size of activations. cameras: with an image; prompt_tokens: of the longest prompt.

    stored_samples: whose features are kept on the device, in `stored_bytes` a number (None: those of the network).
    """

    rows: int
    cameras: int
    prompt_tokens: int
    flow_draws: int = 1
    features_cached: bool = False
    stored_samples: int = 0
    stored_bytes: float | None = None


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one device. parameters: by dtype. average: of the trained parameters, in fp32."""

    parameters: dict[str, int]
    gradients: int
    optimizer: int
    average: int
    prefix: int
    activations: int
    temporary: int
    features: int = 0

    @property
    def total(self) -> int:
        states = self.gradients + self.optimizer + self.average + self.features
        return sum(self.parameters.values()) + states + self.prefix + self.activations + self.temporary

    def facts(self) -> dict[str, str]:
        """For the run report, in GiB."""
        parts = {f"parameters in {dtype}": size for dtype, size in self.parameters.items()}
        parts |= {"gradients": self.gradients, "optimizer": self.optimizer, "average": self.average}
        parts |= {
            "stored features": self.features,
            "prefix": self.prefix,
            "activations": self.activations,
            "temporary": self.temporary,
        }
        return {name: f"{size / GIB:.2f} GiB" for name, size in {"total": self.total, **parts}.items() if size}


def estimate_memory(model: PI05Model, batch: Batch, *, masters: bool, average: bool = False) -> MemoryEstimate:
    """Of a training step with AdamW. masters: fp32 copies of bf16 parameters, with fp32 moments.

    Sharded parameters count with their local part.
    """
    parameters: Counter[str] = Counter()
    gradients = optimizer = trained = 0
    for p in model.parameters():
        mine = local(p)
        parameters[str(p.dtype).removeprefix("torch.")] += mine.nbytes
        if p.requires_grad:
            has_master = masters and p.dtype.itemsize == 2
            gradients += mine.nbytes
            optimizer += mine.numel() * (12 if has_master else 2 * p.dtype.itemsize)
            trained += mine.numel()
    activations = _expert_bytes(model, batch)
    kept, temporary = (0, 0) if batch.features_cached else _prefix_bytes(model, batch)
    has_graphs = model.graphs is not None  # a recording has its own memory, for a prefix, too
    if not has_graphs:  # the prefix is computed before the expert, and leaves its temporaries behind
        temporary = max(0, temporary - activations)
    return MemoryEstimate(
        parameters=dict(parameters),
        gradients=gradients,
        optimizer=optimizer,
        average=4 * trained if average else 0,
        prefix=_keys_values_bytes(model, batch) * (2 if has_graphs else 1),
        activations=activations + kept + _adapter_bytes(model, batch),
        temporary=temporary,
        features=_stored_bytes(model, batch),
    )


def _prefix_tokens(model: PI05Model, batch: Batch) -> int:
    return batch.rows * (batch.cameras * model.config.image_tokens + batch.prompt_tokens)


def _keys_values_bytes(model: PI05Model, batch: Batch) -> int:
    language = model.config.language
    size = _dtype(model.prefix.paligemma.language_model.layers).itemsize
    width = language.num_kv_heads * language.head_dim
    return 2 * language.depth * _prefix_tokens(model, batch) * width * size


def _stored_bytes(model: PI05Model, batch: Batch) -> int:
    whole = _keys_values_bytes(model, replace(batch, rows=batch.stored_samples))
    computed = _dtype(model.prefix.paligemma.language_model.layers).itemsize
    return round(whole * (1 if batch.stored_bytes is None else batch.stored_bytes / computed))


def _expert_bytes(model: PI05Model, batch: Batch) -> int:
    rows = batch.rows * batch.flow_draws * model.config.chunk_size
    stream, size = model.config.expert, _dtype(model.expert.layers).itemsize
    return _kept(rows, stream.depth, stream.width * size, _stream_layer(stream, size), model.gradient_checkpointing)


def _prefix_bytes(model: PI05Model, batch: Batch) -> tuple[int, int]:
    """(what language and vision layers keep for the backward pass, largest temporary of those that keep nothing)."""
    config, paligemma, kept, temporary = model.config, model.prefix.paligemma, 0, 0
    language, vision = paligemma.language_model.layers, paligemma.vision_tower.encoder.layers
    rows, size = _prefix_tokens(model, batch), _dtype(language).itemsize
    if _trains(model.prefix.parameters()):
        recomputed = model.gradient_checkpointing and _trains(language.parameters())
        layer = _stream_layer(config.language, size)
        kept += _kept(rows, config.language.depth - 1, config.language.width * size, layer, recomputed)
    else:
        temporary = rows * _frozen_layer(config.language.width, config.language.mlp_width, size, language, gated=True)
    rows, size = batch.rows * batch.cameras * config.image_tokens, _dtype(vision).itemsize
    if _trains(paligemma.vision_tower.parameters()):
        layer = _vision_layer(config.vision, size)
        kept += _kept(rows, config.vision.depth, config.vision.width * size, layer, model.gradient_checkpointing)
    else:
        frozen = rows * _frozen_layer(config.vision.width, config.vision.mlp_width, size, vision, gated=False)
        temporary = max(temporary, frozen)
    return kept, temporary


def _adapter_bytes(model: PI05Model, batch: Batch) -> int:
    """What adapters change in what layers keep: see `_adapted_layer`. Nothing without adapters."""
    if model.lora is None:
        return 0
    vision, language = model.prefix.paligemma.vision_tower, model.prefix.paligemma.language_model
    stacks = [(batch.rows * batch.flow_draws * model.config.chunk_size, list(model.expert.layers))]
    if _trains(model.prefix.parameters()):
        stacks.append((_prefix_tokens(model, batch), list(language.layers)[:-1]))
    if _trains(vision.parameters()):
        stacks.append((batch.rows * batch.cameras * model.config.image_tokens, list(vision.encoder.layers)))
    total = 0
    for rows, layers in stacks:
        a_token = sum(map(_adapted_layer, layers))
        total += rows * a_token // (len(layers) if model.gradient_checkpointing and layers else 1)
    return total


def _adapted_layer(layer: Any) -> int:
    """Bytes a token: an adapter keeps its product with A, and its input, of which it makes a copy in another dtype.

    A linear layer whose weight is frozen keeps no input, a Gemma norm no fp32 result: negative when less is kept than
    by a layer that trains.
    """
    norms = [getattr(layer, name, None) for name in ("input_layernorm", "post_attention_layernorm")]
    frozen_norms = sum(norm is not None and not _trains(norm.parameters()) for norm in norms)
    total: int = -4 * frozen_norms * layer.self_attn.q_proj.in_features
    for part in (layer.self_attn, layer.mlp):
        spared: dict[int, int] = {}  # width of an input -> its bytes, if nobody keeps it: layers share inputs
        for name, linear in part.named_children():
            base = getattr(linear, "base_layer", linear)
            if not isinstance(base, nn.Linear):
                continue
            keeps = base.weight.requires_grad or name in ("o_proj", "out_proj")  # attention keeps what these read
            if base is not linear:
                a = linear.lora_A["default"].weight
                is_copy = a.dtype != base.weight.dtype
                total += a.itemsize * (len(a) + (base.in_features if is_copy else 0))
                keeps = keeps or not is_copy
            size = 0 if keeps else base.in_features * base.weight.itemsize
            spared[base.in_features] = min(size, spared.get(base.in_features, size))
        total -= sum(spared.values())
    return total


def _kept(rows: int, depth: int, entry: int, layer: int, recomputed: bool) -> int:
    """Of a stack, from bytes a row of a layer's input and of all that it keeps; recomputed: one layer at a time."""
    return rows * (depth * entry + layer if recomputed else depth * layer)


def _stream_layer(stream: StreamConfig, size: int) -> int:
    """Bytes a token of a Gemma layer: two norms in fp32 with what they give and residuals, attention, gated MLP."""
    queries, keys = stream.num_heads * stream.head_dim, stream.num_kv_heads * stream.head_dim
    norms = 2 * stream.width * (2 * 4 + 2 * size)
    return norms + size * (3 * queries + 4 * keys + 4 * stream.mlp_width)


def _vision_layer(vision: VisionConfig, size: int) -> int:
    """Bytes a token of a SigLIP layer: two norms' inputs and outputs, q, k, v, attention's output, MLP around gelu."""
    return size * (2 * 2 * vision.width + 4 * vision.width + 2 * vision.mlp_width)


def _frozen_layer(width: int, mlp: int, size: int, layers: nn.ModuleList, *, gated: bool) -> int:
    """Bytes a token at the widest place of a frozen layer: the MLP's inputs, its product, and the residual stream."""
    is_fp8 = any(isinstance(module, Fp8Linear) for module in layers.modules())
    return size * mlp * (2 if gated else 1) + (1 if is_fp8 else size) * (mlp + width) + 2 * size * width


def _dtype(layers: nn.ModuleList) -> torch.dtype:
    return compute_dtype(layers[0].self_attn.q_proj)  # type: ignore[union-attr, arg-type]


def _trains(parameters: Iterable[nn.Parameter]) -> bool:
    return any(p.requires_grad for p in parameters)
