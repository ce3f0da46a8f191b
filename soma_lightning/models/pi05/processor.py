"""How does a training batch or an observation become pi0.5's inputs, and its output the robot's actions?

B batch, H action horizon (chunk), A action dimensions, A_max the model's action width, S state dimensions, L tokens,
R image side. A batch is the one of `soma_lightning.contract`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from soma_lightning.contract import ACTION, ACTION_IS_PAD, IMAGE_PREFIX, STATE, TASK, Statistics
from soma_lightning.models.normalization import Normalizer, from_deltas, to_deltas
from soma_lightning.models.pi05.config import PI05Config
from soma_lightning.models.pi05.images import BLACK, resize_with_padding
from soma_lightning.models.pi05.tokenizer import OnLongPrompt, PromptTokenizer, discretize_state, load_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

MissingCameras = Literal["error", "mask"]
#: Float images beyond 0..1 by more than this are in another range (0..255, -1..1), not overshoot of a resize filter.
_RANGE_SLACK = 0.05


@dataclass(frozen=True)
class ModelInputs:
    """What `PI05Model.encode_prefix` takes; slots without a camera are left out.

    images: one float32 [B, 3, R, R] in [-1, 1] a camera. image_masks: one bool [B] a camera. tokens: int64 [B, L].
    token_mask: bool [B, L], True at prompt tokens. Masks stay on the CPU, so that the network can compact what it
    reads without waiting for the device.
    """

    images: list[Tensor]
    image_masks: list[Tensor]
    tokens: Tensor
    token_mask: Tensor


@dataclass(frozen=True)
class Targets:
    """What a training batch asks for.

    actions: float32 [B, H, A_max], normalised, zeros beyond A. counts: bool [B, H], True where a step enters the loss.
    """

    actions: Tensor
    counts: Tensor


class PI05Processor:
    """Prepares what pi0.5 reads and translates what it writes.

    statistics: of `observation.state` (unless config.prompt is "task") and `action`; None until `set_statistics`.
    tokenizer: a transformers tokenizer; None loads config.tokenizer when it is first needed (or by `prepare`).
    on_long_prompt: "error", or "truncate" (see `PromptTokenizer`).
    missing_cameras: "error" refuses a batch without one of config.cameras; "mask" leaves that slot out, as the public
    policies do for their empty slots. Slots of config.empty_cameras never have an image.
    Raises ValueError for unknown settings, and for statistics that do not fit the configuration.
    """

    def __init__(
        self,
        config: PI05Config,
        statistics: Statistics | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        on_long_prompt: OnLongPrompt = "error",
        missing_cameras: MissingCameras = "error",
    ) -> None:
        if missing_cameras not in ("error", "mask"):
            raise ValueError(f"missing_cameras must be 'error' or 'mask', got {missing_cameras!r}")
        if on_long_prompt not in ("error", "truncate"):
            raise ValueError(f"on_long_prompt must be 'error' or 'truncate', got {on_long_prompt!r}")
        self.config = config
        self.statistics = statistics
        self.on_long_prompt = on_long_prompt
        self.missing_cameras = missing_cameras
        self.tokenizer = tokenizer
        self._prompts: PromptTokenizer | None = None
        self._state = self._normalizer(STATE, config.state_dim) if config.prompt == "state" else None
        self._action = self._normalizer(ACTION, config.action_dim)

    # -- what is needed before the first batch ------------------------------------------------------------------------

    @property
    def prompts(self) -> PromptTokenizer:
        """The prompt tokenizer. Raises OSError when config.tokenizer cannot be loaded."""
        if self._prompts is None:
            if self.tokenizer is None:
                self.tokenizer = load_tokenizer(self.config.tokenizer)
            self._prompts = PromptTokenizer(
                self.tokenizer, self.config.prompt, self.config.tokenizer_max_length, self.on_long_prompt
            )
        return self._prompts

    def prepare(self) -> None:
        """Says now, rather than at the first batch, that statistics or the tokenizer are missing.

        Raises ValueError for missing statistics, OSError for a tokenizer that cannot be loaded.
        """
        self._action_normalizer()
        if self.config.prompt == "state":
            self._state_normalizer()
        if len(self.prompts.tokenizer) > self.config.vocab_size:
            raise ValueError(
                f"the tokenizer has {len(self.prompts.tokenizer)} tokens, the model's vocab_size is "
                f"{self.config.vocab_size}; use the tokenizer that the model was trained with"
            )

    def check_data(self, cameras: Sequence[str], tasks: Sequence[str]) -> None:
        """Says now, rather than at the first batch, that a data set's cameras or instructions do not fit.

        Raises ValueError for cameras that the policy does not have (or lacks), and for an instruction that is too long
        even with the shortest state.
        """
        self._present_cameras(dict.fromkeys(cameras))
        self.longest_prompt(tasks)

    def longest_prompt(self, tasks: Sequence[str]) -> int:
        """Tokens of the longest of these instructions with the shortest state. ValueError when they are too many."""
        bins = None
        if self.config.prompt == "state":
            bins = torch.zeros(len(tasks), self._state_normalizer().dim, dtype=torch.int64)
        return int(self.prompts.encode(tasks, bins)[1].sum(1).max())

    # -- inputs -----------------------------------------------------------------------------------------------------

    def inputs(
        self, batch: Mapping[str, Any], *, state_noise: float = 0.0, generator: torch.Generator | None = None
    ) -> ModelInputs:
        """What the prefix reads of `batch` (actions are not needed), on the devices of the batch's tensors.

        state_noise: standard deviation of Gaussian noise on the normalised state (training only), from `generator`.
        Raises ValueError for cameras, dimensions, ranges or batch sizes that do not fit, for NaN or infinity (naming
        key and first sample), missing statistics, a prompt that is too long, and state_noise without a state.
        """
        names = self._present_cameras(batch)
        tasks = _strings(batch)
        state_BS = self._checked_state(batch) if self.config.prompt == "state" else None
        if state_BS is None and state_noise:
            raise ValueError(
                f"state_noise={state_noise} has no effect: config.prompt='task' reads no state; set it to 0"
            )
        _check_values({name: batch[name] for name in names} | ({} if state_BS is None else {STATE: state_BS}))
        for key in (*names, *([] if state_BS is None else [STATE])):
            if len(batch[key]) != len(tasks):
                raise ValueError(f"{key} holds {len(batch[key])} samples, {TASK} holds {len(tasks)}")
        images = self.images({name: batch[name] for name in names})
        masks = [torch.ones(len(tasks), dtype=torch.bool) for _ in images]
        bins = None if state_BS is None else self._bins(state_BS, state_noise, generator)
        tokens, token_mask = self.prompts.encode(tasks, bins)
        return ModelInputs(images, masks, tokens.to(images[0].device), token_mask)

    def images(self, batch: Mapping[str, Tensor]) -> list[Tensor]:
        """The images of `ModelInputs` alone: float32 [B, 3, R, R] in [-1, 1], one a camera of `batch`, by slot."""
        return [self._image(batch[name]) for name in self.config.cameras if name in batch]

    def _present_cameras(self, batch: Mapping[str, Any]) -> list[str]:
        """config.cameras that the batch has, in slot order (the order of masked slots changes nothing)."""
        expected = self.config.cameras
        found = [key for key in batch if key.startswith(IMAGE_PREFIX)]
        missing = [name for name in expected if name not in batch]
        extra = sorted(set(found) - set(expected))
        present = [name for name in expected if name in batch]
        if extra or not present or (missing and self.missing_cameras == "error"):
            raise ValueError(
                f"the batch's cameras do not fit the policy: expected {list(expected)}, found {sorted(found)} "
                f"(missing {missing}, extra {extra}); map or drop cameras in the data module (cameras=...), or set "
                "config.cameras; missing_cameras='mask' runs without some of them"
            )
        return present

    def _image(self, images: Tensor) -> Tensor:
        resolution = self.config.image_resolution
        if self.config.zero_images:
            return torch.full((len(images), 3, resolution, resolution), BLACK, device=images.device)
        return resize_with_padding(images, resolution)

    def _checked_state(self, batch: Mapping[str, Any]) -> Tensor:
        normalizer = self._state_normalizer()
        state: Tensor | None = batch.get(STATE)
        if state is None:
            raise ValueError(f"the batch has no '{STATE}', which config.prompt='state' reads; it has {sorted(batch)}")
        if state.ndim != 2 or state.shape[1] != normalizer.dim:
            raise ValueError(
                f"{STATE} must be [B, {normalizer.dim}] as in the statistics, got {tuple(state.shape)}; use the "
                "statistics of this data, or select the state dimensions in the data module"
            )
        return state.float()

    def _bins(self, state_BS: Tensor, noise: float, generator: torch.Generator | None) -> Tensor:
        normalised_BS = self._state_normalizer().normalize(state_BS)
        if noise:
            source = normalised_BS.device if generator is None else generator.device
            draw_BS = torch.randn(normalised_BS.shape, generator=generator, device=source)
            normalised_BS = normalised_BS + noise * draw_BS.to(normalised_BS.device)
        return discretize_state(normalised_BS)

    # -- targets and outputs ----------------------------------------------------------------------------------------

    def targets(self, batch: Mapping[str, Any]) -> Targets:
        """Normalised, padded actions of a training batch and the steps that enter the loss (config.pad_actions).

        Raises ValueError for a missing action, a chunk or width that does not fit, NaN or infinity, missing statistics.
        """
        normalizer = self._action_normalizer()
        action: Tensor | None = batch.get(ACTION)
        if action is None:
            raise ValueError(f"the training batch has no '{ACTION}'; it has {sorted(batch)}")
        config = self.config
        if action.ndim != 3 or action.shape[1] != config.chunk_size:
            raise ValueError(
                f"{ACTION} must be [B, chunk_size={config.chunk_size}, A], got {tuple(action.shape)}; give the data "
                "module the policy's chunk_size"
            )
        if action.shape[2] > config.max_action_dim:
            raise ValueError(
                f"{ACTION} has {action.shape[2]} dimensions, more than the model's max_action_dim="
                f"{config.max_action_dim}; select fewer, or build a model with a larger max_action_dim"
            )
        if action.shape[2] != normalizer.dim:
            raise ValueError(
                f"{ACTION} has {action.shape[2]} dimensions, its statistics have {normalizer.dim}; use the statistics "
                "of this data"
            )
        _check_values({ACTION: action})
        action = action.float()
        if config.delta_actions:
            action = to_deltas(action, self._reference(batch), config.delta_actions)
        actions = normalizer.normalize(action)
        return Targets(functional.pad(actions, (0, config.max_action_dim - normalizer.dim)), self._counts(batch))

    def _counts(self, batch: Mapping[str, Any]) -> Tensor:
        action: Tensor = batch[ACTION]
        is_pad: Tensor | None = batch.get(ACTION_IS_PAD)
        if is_pad is None or self.config.pad_actions == "repeat":
            return torch.ones(action.shape[:2], dtype=torch.bool, device=action.device)
        if is_pad.dtype != torch.bool or is_pad.shape != action.shape[:2]:
            raise ValueError(
                f"{ACTION_IS_PAD} must be bool {list(action.shape[:2])}, got {is_pad.dtype} {list(is_pad.shape)}"
            )
        return ~is_pad

    def actions(self, sampled: Tensor, batch: Mapping[str, Any]) -> Tensor:
        """The robot's actions [B, H, A] float32 in raw units from the model's [B, H, A_max].

        batch: what the model saw; its state is what config.delta_actions are relative to.
        Raises ValueError for a state that is missing or does not fit when there are such dimensions.
        """
        normalizer = self._action_normalizer()
        actions = normalizer.unnormalize(sampled[..., : normalizer.dim].float())
        dims = self.config.delta_actions
        return from_deltas(actions, self._reference(batch), dims) if dims else actions

    def _reference(self, batch: Mapping[str, Any]) -> Tensor:
        """The state [B, S] that delta actions are relative to, before any noise."""
        dims = self.config.delta_actions
        state: Tensor | None = batch.get(STATE)
        if state is None or state.ndim != 2 or state.shape[1] <= max(dims):
            found = f"the batch has {sorted(batch)}" if state is None else f"got {tuple(state.shape)}"
            raise ValueError(f"delta_actions={list(dims)} need '{STATE}' as [B, S] with S > {max(dims)}; {found}")
        _check_values({STATE: state})
        return state.float()

    # -- statistics -------------------------------------------------------------------------------------------------

    def _normalizer(self, feature: str, dim: int | None) -> Normalizer | None:
        if self.statistics is None:
            return None
        config = self.config
        normalizer = Normalizer(self.statistics, feature, mode=config.normalization, eps=config.normalization_eps)
        if dim is not None and dim != normalizer.dim:
            name = "action_dim" if feature == ACTION else "state_dim"
            raise ValueError(
                f"config.{name}={dim}, but the statistics of {feature} have {normalizer.dim} dimensions; they must be "
                f"of the same robot: set {name} to {normalizer.dim}, or give the right statistics"
            )
        return normalizer

    def _state_normalizer(self) -> Normalizer:
        return _required(self._state, STATE)

    def _action_normalizer(self) -> Normalizer:
        return _required(self._action, ACTION)


def _required(normalizer: Normalizer | None, feature: str) -> Normalizer:
    if normalizer is None:
        raise ValueError(
            f"the policy has no statistics to normalise {feature} with; call set_statistics(...) with those of the "
            "data set (LeRobotDataModule.statistics), or load a checkpoint that carries them"
        )
    return normalizer


def _strings(batch: Mapping[str, Any]) -> Sequence[str]:
    tasks = batch.get(TASK)
    if tasks is None:
        raise ValueError(f"the batch has no '{TASK}' (one instruction a sample); it has {sorted(batch)}")
    if isinstance(tasks, str) or not tasks or not all(isinstance(task, str) for task in tasks):
        raise ValueError(f"'{TASK}' must be a list of one string a sample, got {tasks!r:.80}")
    return list(tasks)


def _in_range(key: str, values: Tensor) -> Tensor:
    """Bool like `values`: finite, and for an image within 0..1."""
    if key.startswith(IMAGE_PREFIX):
        return (values >= -_RANGE_SLACK) & (values <= 1.0 + _RANGE_SLACK)
    return torch.isfinite(values)


def _check_values(named: Mapping[str, Tensor]) -> None:
    """Raises ValueError for NaN or infinity, and for float images in another range than 0..1.

    One flag a tensor is read back together, so the usual case waits for the device once.
    """
    floats = {key: values for key, values in named.items() if values.is_floating_point()}
    if not floats:
        return
    flags = torch.stack([_in_range(key, values).all() for key, values in floats.items()])
    if all(flags.tolist()):
        return
    key, values = next((key, values) for key, values in floats.items() if not _in_range(key, values).all())
    sample = int((~_in_range(key, values)).flatten(1).any(1).nonzero()[0])
    if not torch.isfinite(values[sample]).all():
        raise ValueError(
            f"{key} holds NaN or infinity, first in sample {sample} of the batch; repair or drop that data"
        )
    low, high = values[sample].min().item(), values[sample].max().item()
    raise ValueError(
        f"{key} is a float image and must lie in 0..1, but sample {sample} spans {low:.3g}..{high:.3g}; pass uint8 for "
        "0..255, or scale it"
    )
