"""When are frozen features of two policies the same? What a feature cache asks a pi0.5 policy."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

import torch

from soma_lightning.contract import STATE
from soma_lightning.layout.full_state import is_sharded

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from soma_lightning.models.pi05.policy import PI05Policy


def backbone_hash(policy: PI05Policy) -> str:
    """See `PI05Policy.backbone_hash`; the scales of fp8 weights are counted with them."""
    digest = hashlib.sha256()
    for name, tensor in sorted(policy.model.prefix.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        values = tensor.detach().cpu().contiguous()
        digest.update(values.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def check_features_fixed(policy: PI05Policy) -> None:
    """See `PI05Policy.check_features_fixed`."""
    if policy.config.trainable != "expert":
        raise ValueError(
            f"a feature cache needs a frozen backbone, but config.trainable={policy.config.trainable!r} trains it; "
            "set trainable='expert', or feature_cache=null"
        )
    if policy.model.prefix_trains:
        raise ValueError(
            "a feature cache needs a frozen backbone, but adapters of it train; set lora targets='expert', or "
            "feature_cache=null"
        )
    if is_sharded(policy.model.prefix):
        raise ValueError(
            "the frozen backbone is sharded, so no rank can compute features that the others have; set the "
            "strategy's frozen='replicate', or feature_cache=null"
        )


def feature_identity(policy: PI05Policy) -> dict[str, Any]:
    """See `PI05Policy.feature_identity`."""
    config, processor = policy.config, policy.processor
    names = ["cameras", "image_resolution", "zero_images", "prompt", "tokenizer_max_length", "dtype"]
    if config.prompt == "state":
        names += ["normalization", "normalization_eps"]
    values = config.to_dict()
    parts = {f"{part}.{name}": value for part in ("vision", "language") for name, value in values[part].items()}
    statistics = policy.describe()["statistics"].get(STATE) if config.prompt == "state" else None
    return {
        "layout": "pi0.5 keys and values, version 1",
        "backbone": backbone_hash(policy),
        **parts,  # the number of heads changes no shape
        **json.loads(json.dumps({name: values[name] for name in names})),
        "missing_cameras": processor.missing_cameras,
        "on_long_prompt": processor.on_long_prompt,
        "tokenizer": _tokenizer_hash(processor.prompts.tokenizer),
        "state_statistics": statistics,
    }


def _tokenizer_hash(tokenizer: PreTrainedTokenizerBase) -> str:
    """Of what decides the ids of a text: the vocabulary alone does not, nor do the settings that calls change."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    stored = {} if backend is None else json.loads(backend.to_str())
    facts = {
        "vocabulary": sorted(tokenizer.get_vocab().items()),
        "rules": {name: stored.get(name) for name in ("added_tokens", "normalizer", "pre_tokenizer", "model")},
        "special": [tokenizer.bos_token_id, tokenizer.pad_token_id],
    }
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()
