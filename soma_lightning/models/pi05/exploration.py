"""How does pi0.5 explore and learn by reinforcement? What it records of an observation, and its critic.

With a frozen prefix the record holds the prefix's keys and values, and one pooled vector for the critic: the learner
never runs the backbone. The images are recorded beside them, so that all of it can be computed again. A prefix that
trains is computed again from the images, with gradients.

B batch, H action horizon (chunk), A_max the model's action width, L prompt tokens, W width of the language model.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from soma_lightning.contract import IMAGE_PREFIX, STATE, EnvObservation, batch_from_observation
from soma_lightning.layout.full_state import gather
from soma_lightning.models.flow_policy import FEATURES, FlowPolicy
from soma_lightning.models.pi05.folder import VALUE_HEAD_FILE
from soma_lightning.models.pi05.prefix import PrefixCache
from soma_lightning.models.tensor_files import write_safetensors
from soma_lightning.models.value_head import ValueHead

if TYPE_CHECKING:
    from soma_lightning.models.pi05.config import PI05Config
    from soma_lightning.models.pi05.model import PI05Model
    from soma_lightning.models.pi05.processor import PI05Processor

PROMPT, PROMPT_MASK, VALUE_FEATURES = "tokenized_prompt", "tokenized_prompt_mask", "value_features"


class PI05Exploration(FlowPolicy):
    """The reinforcement learning half of `PI05Policy`."""

    config: PI05Config
    model: PI05Model
    processor: PI05Processor
    value_head: ValueHead | None
    loaded_from: Path | None

    @property
    def noise_shape(self) -> tuple[int, int]:
        """(H, A_max): shape of one sample's flow noise."""
        return self.config.chunk_size, self.config.max_action_dim

    @property
    def env_action_dim(self) -> int:
        """The robot's action dimensions. ValueError before statistics said how many there are."""
        if self.config.action_dim is None:
            raise ValueError("the policy's action_dim is unknown; set statistics first")
        return self.config.action_dim

    def add_value_head(self, checkpoint: str | Path | None = None) -> None:
        """Adds the critic, on the frozen prefix's pooled vector; `checkpoint`: a folder that may hold a saved one.

        Raises ValueError when the policy has one, and for a saved one of other sizes.
        """
        if self.value_head is not None:
            raise ValueError("the policy has a value head already")
        parameter = next(self.model.parameters())
        head = ValueHead(self.config.language.width)
        saved = None if checkpoint is None else Path(checkpoint) / VALUE_HEAD_FILE
        if saved is not None and saved.is_file():
            try:
                head.load_state_dict(load_file(saved))
            except RuntimeError as error:
                raise ValueError(f"{saved} does not fit this policy's value head: {error}") from error
        self.value_head = head.to(parameter.device)
        self.model.prefix.pools = True

    def release_backbone(self) -> None:
        """Frees the memory of the frozen prefix, where recorded features take its place: in a learner.

        The policy can then replay records and be saved, but not act. Raises ValueError when a part of the prefix
        trains, and for a policy that was not loaded from a checkpoint: `save_pretrained` takes the prefix from there.
        """
        if self.loaded_from is None:
            raise ValueError(
                "only a policy that was loaded from a checkpoint can release its backbone: it is saved there"
            )
        self.model.release_prefix()

    @property
    def sends_features(self) -> bool:
        """Whether records carry frozen features, so that a learner needs no backbone."""
        return not self.model.prefix_trains

    def missing_for_exploration(self) -> str | None:
        """What `predict_action_batch` lacks for train mode, as a phrase; None when it has it."""
        if self.flow_sde is None:
            return "stochastic flow steps: call explore_with(FlowSDE(num_steps=...))"
        return "a value head: call add_value_head()" if self.value_head is None else None

    def whole_value_head(self) -> dict[str, Tensor]:
        """The critic's weights on the CPU, empty without one. Shards are gathered: all ranks call it."""
        if self.value_head is None:
            return {}
        weights = {name: value.detach() for name, value in self.value_head.state_dict().items()}
        whole: dict[str, Tensor] = gather(weights, keep=True)
        return whole

    @staticmethod
    def save_value_head(weights: Mapping[str, Tensor], folder: Path) -> None:
        """Writes what `whole_value_head` returned beside a checkpoint's weights; nothing without a critic."""
        if weights:
            write_safetensors(folder / VALUE_HEAD_FILE, weights)

    # -- what FlowPolicy asks for -------------------------------------------------------------------------------------

    def record_observation(self, env_obs: EnvObservation) -> dict[str, Any]:
        """Images (uint8 [B, 3, h, w], by camera), prompt tokens and mask [B, L]; with a frozen prefix also `features`
        (FrozenFeatures) and, with a value head, `value_features` float32 [B, W]."""
        batch = self.observed_batch(env_obs)
        inputs = self.processor.inputs(batch)
        recorded: dict[str, Any] = {name: batch[name] for name in self.config.cameras if name in batch}
        recorded |= {PROMPT: inputs.tokens, PROMPT_MASK: inputs.token_mask.to(inputs.tokens.device)}
        if not self.sends_features:
            return recorded
        prefix = self.model.encode_prefix(inputs.images, inputs.image_masks, inputs.tokens, inputs.token_mask)
        recorded[FEATURES] = prefix.features()
        if prefix.pooled is not None:
            recorded[VALUE_FEATURES] = prefix.pooled
        return recorded

    def context_of(self, recorded: Mapping[str, Any]) -> PrefixCache:
        if FEATURES in recorded:
            cache = PrefixCache.from_features(recorded[FEATURES], self.config.language.head_dim)
            cache.pooled = recorded.get(VALUE_FEATURES)
            return cache
        images = {name: value for name, value in recorded.items() if name.startswith(IMAGE_PREFIX)}
        prepared = self.processor.images(images)
        masks = [torch.ones(len(image), dtype=torch.bool) for image in prepared]
        return self.model.encode_prefix(prepared, masks, recorded[PROMPT], recorded[PROMPT_MASK].cpu())

    def replay_entries(self, recorded: Collection[str]) -> Collection[str]:
        """Without images and prompt, where features stand for them."""
        if FEATURES not in recorded:
            return recorded
        return {name for name in recorded if not name.startswith((IMAGE_PREFIX, PROMPT))}

    def velocity(self, context: PrefixCache, x_t: Tensor, time: Tensor) -> Tensor:
        return self.model.velocity(context, x_t, time)

    def values_of(self, context: PrefixCache) -> Tensor:
        if self.value_head is None or context.pooled is None:
            raise RuntimeError("this policy has no critic: call add_value_head() first")
        values: Tensor = self.value_head(context.pooled)
        return values

    def executable(self, x_0: Tensor, env_obs: EnvObservation) -> Tensor:
        state = batch_from_observation(env_obs)[STATE]  # what delta actions are relative to; no image is moved
        return self.processor.actions(x_0, {STATE: state.to(x_0.device)})

    def observed_batch(self, env_obs: EnvObservation) -> dict[str, Any]:
        """The observation as the policy's batch, on its device; cameras that it does not have are left out."""
        batch = batch_from_observation(env_obs)
        return self._on_device(
            {k: v for k, v in batch.items() if not k.startswith(IMAGE_PREFIX) or k in self.config.cameras}
        )

    def _on_device(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        device = next(self.model.parameters()).device
        return {key: value.to(device) if isinstance(value, Tensor) else value for key, value in batch.items()}
