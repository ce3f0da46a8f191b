"""What does the action expert read? Images and prompt through PaliGemma, down to keys and values of every layer.

The modules and weights are transformers' own (SigLIP vision tower, projector, Gemma layers). The loop over the
language layers is ours, because the expert needs every layer's keys and values after RoPE, and because the last layer
has nothing else to do: its attention, MLP and the final norm feed no one.

Shape letters: B observations, C cameras, R image resolution, I tokens of one image, L prompt tokens, P prefix tokens,
Hq query heads, Hkv key/value heads, G = Hq // Hkv, D head size, W width of the language model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PaliGemmaConfig, PaliGemmaModel

from soma_lightning.frozen_layers import Fp8Embedding, compute_dtype, has_kernels, quantize_linears
from soma_lightning.models.features import FrozenFeatures
from soma_lightning.models.pi05.config import PI05Config
from soma_lightning.models.pi05.frozen import run_language, run_vision, why_stock
from soma_lightning.models.pi05.rotary import RotaryTable, rotary_table, rotate
from soma_lightning.models.value_head import pool_tokens

#: The one part of pi0.5's frozen features.
KEYS_VALUES = "keys_values"


@dataclass
class PrefixCache:
    """Keys and values of every prefix layer, computed once for one observation and read at every flow time.

    keys, values: one tensor [B, Hkv, P, D] a layer; keys after RoPE.
    mask: bool [B, P], True = readable; None when every row is full. Masked entries may hold anything.
    lengths: int64 [B], readable tokens of each row, which is also the position of the first action token.
    streams: the one tensor that keys and values are views of, if there is one (see `of_streams`).
    pooled: float32 [B, W], mean over the readable tokens of the last layer's input, each token scaled to root mean
    square 1; only if the prefix `pools`. (The last layer's output is never computed.)
    """

    keys: list[Tensor]
    values: list[Tensor]
    mask: Tensor | None
    lengths: Tensor
    streams: Tensor | None = None
    pooled: Tensor | None = None

    @classmethod
    def of_streams(cls, streams: Tensor, head_dim: int, mask: Tensor | None, lengths: Tensor) -> PrefixCache:
        """Views of [2 * layers, B, P, Hkv * D], keys before values of each layer."""
        parts = streams.view(*streams.shape[:-1], -1, head_dim).transpose(2, 3).unbind(0)
        return cls(list(parts[::2]), list(parts[1::2]), mask, lengths, streams)

    def features(self) -> FrozenFeatures:
        """What a feature cache keeps: `KEYS_VALUES` [2 * layers, B, P, Hkv * D], keys before values of each layer.

        The cache must be compact: readable tokens first.
        """
        streams = self.streams
        if streams is None:
            pairs = zip(self.keys, self.values, strict=True)
            streams = torch.stack([x_BHPD.transpose(1, 2).flatten(2) for pair in pairs for x_BHPD in pair])
        return FrozenFeatures({KEYS_VALUES: streams}, tuple(self.lengths.tolist()))

    @classmethod
    def from_features(cls, features: FrozenFeatures, head_dim: int) -> PrefixCache:
        """The same cache: views of the features' memory, in the layout that `PI05Prefix` hands out."""
        streams = features.parts[KEYS_VALUES]
        lengths = features.lengths_on(streams.device)
        width = streams.shape[2]  # features of one batch may be padded further than its longest sample
        columns = torch.arange(width, device=lengths.device)
        mask = None if min(features.lengths) == width else columns < lengths[:, None]
        return cls.of_streams(streams, head_dim, mask, lengths)


@dataclass(frozen=True)
class _Packing:
    """Which tokens of the padded sequence [camera 0 | camera 1 | ... | prompt] are computed, and in which order."""

    cameras: list[int]  # the cameras that run through the vision tower
    rows: list[Tensor | None]  # bool [B] a camera: rows that have it; None when all do
    num_prompt_tokens: int  # prompt columns kept
    order: Tensor | None  # int64 [B, P]: gathers readable tokens to the front; None when they are there already
    mask: Tensor | None  # bool [B, P]
    positions: Tensor  # int64 [B or 1, P]
    lengths: Tensor  # int64 [B]


def paligemma_config(config: PI05Config) -> PaliGemmaConfig:
    """transformers' configuration of the same network; states the values whose defaults differ from the checkpoint."""
    vision, language = config.vision, config.language
    return PaliGemmaConfig(
        vision_config={
            "model_type": "siglip_vision_model",
            "hidden_size": vision.width,
            "num_hidden_layers": vision.depth,
            "num_attention_heads": vision.num_heads,
            "intermediate_size": vision.mlp_width,
            "patch_size": vision.patch_size,
            "image_size": config.image_resolution,
            "vision_use_head": False,
        },
        text_config={
            "model_type": "gemma",
            "hidden_size": language.width,
            "num_hidden_layers": language.depth,
            "intermediate_size": language.mlp_width,
            "num_attention_heads": language.num_heads,
            "num_key_value_heads": language.num_kv_heads,
            "head_dim": language.head_dim,
            "vocab_size": config.vocab_size,
            "hidden_act": "gelu_pytorch_tanh",
        },
        projection_dim=language.width,
        hidden_size=language.width,
        vocab_size=config.vocab_size,
    )


class PrefixLayer(nn.Module):
    """One Gemma layer: transformers' modules, called so that keys and values come out.

    It adopts the children of a stock layer, so parameter names stay those of the public checkpoint.
    """

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.input_layernorm = layer.input_layernorm
        self.self_attn: Any = layer.self_attn
        self.post_attention_layernorm = layer.post_attention_layernorm
        self.mlp = layer.mlp
        self.head_dim: int = layer.self_attn.head_dim

    def forward(
        self, x: Tensor, rotary: RotaryTable, mask: Tensor | None, keys_values_only: bool
    ) -> tuple[Tensor | None, Tensor, Tensor]:
        """x [B, P, W], mask bool [B, P] or None -> (x of the next layer or None, keys, values [B, Hkv, P, D])."""
        attn = self.self_attn
        n = self.input_layernorm(x)
        k_BPHD = rotate(attn.k_proj(n).unflatten(-1, (-1, self.head_dim)), rotary)
        v_BPHD = attn.v_proj(n).unflatten(-1, (-1, self.head_dim))
        k_BHPD, v_BHPD = k_BPHD.transpose(1, 2), v_BPHD.transpose(1, 2)
        if keys_values_only:
            return None, k_BHPD, v_BHPD
        q_BPHD = rotate(attn.q_proj(n).unflatten(-1, (-1, self.head_dim)), rotary)
        x = x + attn.o_proj(_attend(q_BPHD, k_BHPD, v_BHPD, mask))
        x = x + self.mlp(self.post_attention_layernorm(x))
        return x, k_BHPD, v_BHPD


def _attend(q_BPHD: Tensor, k_BHPD: Tensor, v_BHPD: Tensor, mask: Tensor | None) -> Tensor:
    """Bidirectional attention, heads merged: [B, P, Hq * D].

    The G heads of a group are folded into the query rows, so keys are never repeated. With one key head (pi0.5) the
    folding is a view.
    """
    B, P, Hq, D = q_BPHD.shape
    Hkv = k_BHPD.shape[1]
    q = q_BPHD.view(B, P, Hkv, Hq // Hkv, D).transpose(1, 2).reshape(B, Hkv, -1, D)
    attn_mask = None if mask is None else mask[:, None, None, :]
    out = F.scaled_dot_product_attention(q, k_BHPD, v_BHPD, attn_mask=attn_mask)
    return out.view(B, Hkv, P, Hq // Hkv, D).transpose(1, 2).reshape(B, P, Hq * D)


class PI05Prefix(nn.Module):
    """PaliGemma as the frozen (or trainable) reader of images and prompt."""

    def __init__(self, config: PI05Config) -> None:
        super().__init__()
        self.image_tokens = config.image_tokens
        self.image_resolution = config.image_resolution
        self.head_dim = config.language.head_dim
        #: Compact sequences are padded to a multiple of this many prompt tokens, so that few lengths occur.
        self.bucket = 1
        #: The cache carries `PrefixCache.pooled`, which a value head reads.
        self.pools = False
        #: Frozen layers run fused where they can; False: as stock modules.
        self.fuse_frozen = True
        self.paligemma = PaliGemmaModel(paligemma_config(config))
        language = self.paligemma.language_model
        language.layers = nn.ModuleList(PrefixLayer(layer) for layer in language.layers)
        del language.rotary_emb  # unused (rotary.py), and its buffers would be lost on the meta device
        self.paligemma.vision_tower.encoder.register_forward_pre_hook(_match_encoder_dtype, with_kwargs=True)

    def reset_buffers(self) -> None:
        """Computes the non-persistent buffers again: no checkpoint holds them, and a meta build has no values."""
        embed = self.paligemma.get_input_embeddings()
        device = embed.weight.device
        embed.embed_scale = torch.tensor(embed.scalar_embed_scale, device=device)
        vision = self.paligemma.vision_tower.embeddings
        vision.position_ids = torch.arange(vision.num_positions, device=device)[None]

    def quantize(self) -> None:
        """Every matrix in fp8: linear layers and the token embedding; norms, patches and positions stay."""
        quantize_linears(self.paligemma)
        stock = self.paligemma.get_input_embeddings()
        self.paligemma.set_input_embeddings(Fp8Embedding(stock, stock.scalar_embed_scale))

    def unreached_modules(self) -> list[nn.Module]:
        """Modules that exist in every checkpoint but feed nothing: all of the last layer but norm, k_proj and v_proj.

        Also the final norm. Their parameters never receive a gradient.
        """
        language = self.paligemma.language_model
        last = language.layers[-1]
        attn = last.self_attn
        return [attn.q_proj, attn.o_proj, last.post_attention_layernorm, last.mlp, language.norm]

    def forward(
        self,
        images: list[Tensor],
        image_masks: list[Tensor],
        tokens: Tensor,
        token_mask: Tensor,
        compact: bool = True,
    ) -> PrefixCache:
        """See `PI05Model.encode_prefix`."""
        self._check(images, image_masks, tokens, token_mask)
        device = self.paligemma.get_input_embeddings().weight.device
        packing = self._pack(image_masks, token_mask, device, compact)
        x = self._embed(images, tokens.to(device), packing)
        layers = self.paligemma.language_model.layers
        if self.why_stock(layers) is None:
            streams, x = run_language(layers, x, packing.positions, packing.mask)
            cache = PrefixCache.of_streams(streams, self.head_dim, packing.mask, packing.lengths)
            return self._pooled(cache, x)
        rotary = rotary_table(packing.positions, self.head_dim, x.dtype)
        keys, values = [], []
        for i, layer in enumerate(layers):
            is_last = i == len(layers) - 1
            out, k, v = layer(x, rotary, packing.mask, keys_values_only=is_last)
            x = x if is_last else out
            keys.append(k)
            values.append(v)
        return self._pooled(PrefixCache(keys, values, packing.mask, packing.lengths), x)

    def _pooled(self, cache: PrefixCache, hidden: Tensor) -> PrefixCache:
        """Adds the observation's one vector, if it is wanted. hidden: the last layer's input [B, P, W]."""
        if self.pools:
            cache.pooled = pool_tokens(F.rms_norm(hidden.float(), hidden.shape[-1:]), cache.mask)
        return cache

    def path(self) -> str:
        """How vision and language layers run, for the run report."""
        kernels = has_kernels(self.paligemma.get_input_embeddings().weight.device)
        fused = "fused (Triton kernels)" if kernels else "fused (torch)"
        found = {name: self.why_stock(layers) for name, layers in self._stacks().items()}
        return ", ".join(f"{name}: {fused if why is None else f'stock modules ({why})'}" for name, why in found.items())

    def unfused(self) -> list[nn.ModuleList]:
        """Stacks of layers that run as stock modules."""
        return [layers for layers in self._stacks().values() if self.why_stock(layers) is not None]

    def _stacks(self) -> dict[str, nn.ModuleList]:
        paligemma = self.paligemma
        return {"vision": paligemma.vision_tower.encoder.layers, "language": paligemma.language_model.layers}

    def why_stock(self, layers: nn.ModuleList) -> str | None:
        """Why the language or vision layers run as stock modules, as a phrase; None when they run fused."""
        vision = self.paligemma.vision_tower
        # Images come first: nothing that trains behind the vision tower sends it gradients.
        if any(p.requires_grad for p in (vision if layers is vision.encoder.layers else self).parameters()):
            return "a part of the prefix trains"
        device = self.paligemma.get_input_embeddings().weight.device
        return why_stock(layers, device) if self.fuse_frozen else "fuse_frozen is off"

    def _embed(self, images: list[Tensor], tokens: Tensor, packing: _Packing) -> Tensor:
        """[B, P, W] in the dtype of the language model's matrix products."""
        dtype = compute_dtype(self.paligemma.language_model.layers[0].self_attn.q_proj)
        # The Gemma embedding multiplies by sqrt(W) itself; image features are used as they are.
        parts = [self.paligemma.get_input_embeddings()(tokens[:, : packing.num_prompt_tokens]).to(dtype)]
        if packing.cameras:
            pixels = torch.stack([_readable(images[c], packing.rows[c], tokens.device) for c in packing.cameras], dim=1)
            pixels = pixels.flatten(0, 1)
            features = self._image_features(pixels)
            parts.insert(0, features.to(dtype).view(tokens.shape[0], -1, features.shape[-1]))
        x = torch.cat(parts, dim=1)
        if packing.order is None:
            return x
        return x.gather(1, packing.order[..., None].expand(-1, -1, x.shape[-1]))

    def _image_features(self, pixels: Tensor) -> Tensor:
        """[N, 3, R, R] -> [N, I, W]."""
        trains = any(p.requires_grad for p in self.paligemma.vision_tower.parameters())
        with torch.set_grad_enabled(trains and torch.is_grad_enabled()):
            encoded = self._encoded_images(pixels)
        features: Tensor = self.paligemma.multi_modal_projector(encoded)
        return features

    def _encoded_images(self, pixels: Tensor) -> Tensor:
        """[N, 3, R, R] -> [N, I, width of the vision tower]."""
        tower = self.paligemma.vision_tower
        if self.why_stock(tower.encoder.layers) is not None:
            stock: Tensor = tower(pixels).last_hidden_state
            return stock
        x = _patches(pixels, tower.embeddings).to(compute_dtype(tower.encoder.layers[0].self_attn.q_proj))
        encoded: Tensor = tower.post_layernorm(run_vision(tower.encoder.layers, x))
        return encoded

    def _pack(self, image_masks: list[Tensor], token_mask: Tensor, device: torch.device, compact: bool) -> _Packing:
        B, L = token_mask.shape
        cameras_BC = torch.stack(image_masks, dim=1) if image_masks else token_mask.new_zeros(B, 0)
        cameras_BC = cameras_BC.to(token_mask.device)
        lengths = token_mask.sum(1) + self.image_tokens * cameras_BC.sum(1)
        columns = torch.arange(1, L + 1, device=token_mask.device)
        facts = torch.cat(
            [
                cameras_BC.any(0).long(),
                cameras_BC.all(0).long(),
                torch.stack([lengths.min(), lengths.max(), (token_mask * columns).max()]),
                (token_mask[:, 1:] <= token_mask[:, :-1]).all().long()[None],
            ]
        ).tolist()  # the one place that waits for the device, and only when the masks live there
        C = len(image_masks)
        some, all_rows, (shortest, longest, last_column, right_padded) = facts[:C], facts[C : 2 * C], facts[2 * C :]
        if shortest == 0:
            row = int(lengths.argmin())
            raise ValueError(f"row {row} has neither a readable image nor a readable prompt token; every row needs one")
        cameras = [c for c in range(C) if some[c] or not compact]
        rows = [None if all_rows[c] else image_masks[c] for c in range(C)]
        num_prompt_tokens = min(L, _rounded_up(last_column, self.bucket)) if compact else L
        valid = torch.cat([cameras_BC[:, cameras].repeat_interleave(self.image_tokens, 1), token_mask], dim=1)
        valid = valid[:, : len(cameras) * self.image_tokens + num_prompt_tokens].to(device)
        lengths = lengths.to(device)
        mask = None if shortest == valid.shape[1] else valid
        if not compact:
            positions = (valid.cumsum(1) - 1).clamp_(min=0)
            return _Packing(cameras, rows, num_prompt_tokens, None, mask, positions, lengths)
        order, width = None, valid.shape[1]
        if not (right_padded and all(all_rows[c] for c in cameras)):
            width = min(width, _rounded_up(longest, self.bucket))
            order = valid.to(torch.uint8).argsort(dim=1, descending=True, stable=True)[:, :width]
            mask = None if shortest == width else torch.arange(width, device=device) < lengths[:, None]
        positions = torch.arange(width, device=device)[None]
        return _Packing(cameras, rows, num_prompt_tokens, order, mask, positions, lengths)

    def _check(self, images: list[Tensor], image_masks: list[Tensor], tokens: Tensor, token_mask: Tensor) -> None:
        if len(images) != len(image_masks):
            raise ValueError(f"{len(images)} images but {len(image_masks)} image masks; pass one mask [B] an image")
        if tokens.dim() != 2 or token_mask.shape != tokens.shape:
            raise ValueError(
                f"tokens and token_mask must both be [B, L], got {tuple(tokens.shape)} and {tuple(token_mask.shape)}"
            )
        masks = [("token_mask", token_mask), *((f"image_masks[{c}]", m) for c, m in enumerate(image_masks))]
        for name, mask in masks:
            if mask.dtype != torch.bool:
                raise ValueError(f"{name} must be bool (True = readable), got {mask.dtype}")
        B, R = tokens.shape[0], self.image_resolution
        for c, (image, mask) in enumerate(zip(images, image_masks, strict=True)):
            if image.shape != (B, 3, R, R):
                raise ValueError(f"images[{c}] must be [B, 3, R, R] = {(B, 3, R, R)}, got {tuple(image.shape)}")
            if mask.shape != (B,):
                raise ValueError(f"image_masks[{c}] must be [B] = {(B,)}, got {tuple(mask.shape)}")


def _rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _readable(image: Tensor, rows: Tensor | None, device: torch.device) -> Tensor:
    """The image on `device`, zero in the rows that lack it.

    Their tokens are masked, but 0 * NaN is NaN: what an absent camera holds must not reach the network.
    """
    image = image.to(device)
    return image if rows is None else image.where(rows.to(device)[:, None, None, None], 0.0)


def _patches(pixels: Tensor, embeddings: Any) -> Tensor:
    """[N, 3, R, R] -> [N, I, W]: the patch convolution as one matrix product, and the learned positions."""
    conv = embeddings.patch_embedding
    side, grid = conv.stride[0], pixels.shape[-1] // conv.stride[0]
    patches = pixels.to(conv.weight.dtype).view(len(pixels), -1, grid, side, grid, side)
    flat = patches.permute(0, 2, 4, 1, 3, 5).reshape(len(pixels), grid * grid, -1)
    embedded = F.linear(flat, conv.weight.flatten(1), conv.bias)
    positions: Tensor = embeddings.position_embedding.weight
    return embedded + positions.to(embedded.dtype)


def _match_encoder_dtype(encoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Casts patch embeddings to the encoder's dtype (openpi keeps the embeddings in fp32 and the encoder in bf16)."""
    dtype = compute_dtype(encoder.layers[0].self_attn.q_proj)
    return args, {**kwargs, "inputs_embeds": kwargs["inputs_embeds"].to(dtype)}
