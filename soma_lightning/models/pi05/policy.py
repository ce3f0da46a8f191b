"""How is pi0.5 trained, asked for actions, saved and loaded? The policy object around the network.

B batch, H action horizon (chunk), A action dimensions of the robot, A_max the model's action width, T flow draws.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed import get_rank
from torch.optim import Optimizer

from soma_lightning.contract import ACTION, STATE, EnvObservation, Statistics
from soma_lightning.layout.full_state import is_sharded
from soma_lightning.models.features import FrozenFeatures
from soma_lightning.models.flow import sample_time
from soma_lightning.models.pi05.checkpoint import CheckpointLayout, load_weights, save_weights, seed_masters
from soma_lightning.models.pi05.config import PI05Config, Trainable, changed_config
from soma_lightning.models.pi05.config_files import read_config, write_config
from soma_lightning.models.pi05.dimensions import check_asked_dims, new_dim
from soma_lightning.models.pi05.exploration import PI05Exploration
from soma_lightning.models.pi05.folder import fetch_checkpoint, find_statistics, save_side_files, written_at_once
from soma_lightning.models.pi05.identity import backbone_hash, check_features_fixed, feature_identity
from soma_lightning.models.pi05.initialization import initialize_from_scratch
from soma_lightning.models.pi05.model import PI05Model, check_fp8
from soma_lightning.models.pi05.prefix import PrefixCache
from soma_lightning.models.pi05.processor import MissingCameras, PI05Processor
from soma_lightning.models.pi05.tokenizer import BUILTIN, OnLongPrompt, load_builtin_tokenizer
from soma_lightning.models.policy import Mode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)


class PI05Policy(PI05Exploration):
    """pi0.5 with everything around its network: prompts, images, statistics, objective, sampling, checkpoints.

    config.trainable says what trains; by default the backbone (everything but the action expert and its projections) is
    frozen. The dimensions of state and action are those of the statistics. Arguments beyond `config` are
    `PI05Processor`'s. Weights are the public start values; `reset_parameters` prepares training from scratch,
    `from_pretrained` loads a checkpoint.
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
        super().__init__()
        self.config = config
        self.statistics_source = "none"
        self.loaded_from: Path | None = None
        self.frozen_precision: Literal["fp8"] | None = None
        self.processor = PI05Processor(
            config, statistics, tokenizer, on_long_prompt=on_long_prompt, missing_cameras=missing_cameras
        )
        if statistics is not None:
            self.set_statistics(statistics)
        self.model = PI05Model(self.config)
        # Of the object, not of the class: a class attribute would hide the module that `add_value_head` puts here.
        self.value_head = None
        self._queue: deque[Tensor] = deque()

    # -- what the policy is -------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return next(self.model.parameters()).device

    @property
    def statistics(self) -> Statistics | None:
        """Statistics of state and action in use."""
        return self.processor.statistics

    @property
    def is_sharded(self) -> bool:
        """Whether ranks hold parts of parameters, so that saving takes all of them."""
        return is_sharded(self.model)

    def set_statistics(self, statistics: Statistics, source: str = "given") -> None:
        """Uses these statistics from now on; state and action dimensions follow them.

        source: where they come from, for the run report. Raises ValueError when statistics are missing that the
        configuration needs, or when they have more action dimensions than the model.
        """
        kept = {feature: dict(statistics[feature]) for feature in (STATE, ACTION) if feature in statistics}
        config = replace(
            self.config,
            state_dim=new_dim("state_dim", self.config.state_dim, kept.get(STATE)),
            action_dim=new_dim("action_dim", self.config.action_dim, kept.get(ACTION)),
        )
        old = self.processor
        self.processor = PI05Processor(
            config, kept, old.tokenizer, on_long_prompt=old.on_long_prompt, missing_cameras=old.missing_cameras
        )
        self.config, self.statistics_source = config, source

    def describe(self) -> dict[str, Any]:
        """Configuration and statistics as plain values (JSON-ready, comparable): what a training checkpoint keeps."""
        statistics = {
            feature: {name: value.tolist() for name, value in stats.items()}
            for feature, stats in (self.statistics or {}).items()
        }
        config: dict[str, Any] = json.loads(json.dumps(self.config.to_dict()))
        facts = {"config": config, "statistics": statistics, "statistics_source": self.statistics_source}
        return facts if self.frozen_precision is None else {**facts, "frozen_precision": self.frozen_precision}

    def report_facts(self) -> dict[str, Any]:
        """What the run report says about this policy (JSON-ready)."""
        config = self.config
        steps = "padded steps left out" if config.pad_actions == "mask" else "padded steps included"
        dims = config.action_dim if config.loss_dims == "real" else config.max_action_dim
        return {
            "model": "pi05",
            "trainable_part": config.trainable,
            "chunk_size": config.chunk_size,
            "n_action_steps": config.n_action_steps,
            "num_inference_steps": config.num_inference_steps,
            "action_dim": config.action_dim,
            "state_dim": config.state_dim,
            "delta_actions": list(config.delta_actions),
            "statistics": self.statistics_source,
            "normalization": f"{config.normalization} ({config.normalization_eps} epsilon)",
            "cameras": list(config.cameras),
            "empty_cameras": config.empty_cameras,
            "missing_cameras": self.processor.missing_cameras,
            "zero_images": config.zero_images,
            "prompt": config.prompt,
            "tokenizer": config.tokenizer,
            "on_long_prompt": self.processor.on_long_prompt,
            "loss": f"mean over {dims} action dimensions ({config.loss_dims}), {steps}",
            "dtype": f"{config.dtype} ({config.islands} fp32 islands)",
            "frozen_precision": self.frozen_precision or config.dtype,
            "frozen_layers": self.model.prefix.path(),
            "cuda_graphs": self.model.graphs is not None,
        }

    def quantize_frozen(self, precision: Literal["fp8"]) -> None:
        """Stores the frozen backbone in fp8 and runs its matrix products there; it cannot be undone.

        The policy must have been loaded from a checkpoint: from there `save_pretrained` takes the unrounded backbone.
        Raises ValueError otherwise, for another precision, and as `PI05Model.quantize_frozen`.
        """
        _check_frozen_precision(precision, self.config)
        if self.loaded_from is None:
            raise ValueError(
                "frozen_precision='fp8' needs a policy that was loaded from a checkpoint: its frozen weights are "
                "rounded here and saved from there"
            )
        self.model.quantize_frozen()
        self.frozen_precision = precision

    def frozen_modules(self) -> list[nn.Module]:
        """The largest modules of which no parameter trains."""
        return self.model.frozen_modules()

    # -- frozen features ----------------------------------------------------------------------------------------------

    def backbone_hash(self) -> str:
        """SHA-256 of every backbone tensor (the part that trainable="expert" freezes): name, dtype, shape and bytes."""
        return backbone_hash(self)

    def check_features_fixed(self) -> None:
        """Raises ValueError when `encode_features` may change in training, or cannot run on one rank alone."""
        check_features_fixed(self)

    def feature_identity(self) -> dict[str, Any]:
        """Everything but the observations that decides what `encode_features` returns, as JSON values."""
        return feature_identity(self)

    @torch.no_grad()
    def encode_features(self, batch: Mapping[str, Any]) -> FrozenFeatures:
        """What the frozen backbone computes for the observations of a batch: keys and values of every layer."""
        inputs = self.processor.inputs(self._on_device(batch))
        # Not through the model's hooks: ranks miss different samples, so that no collective may run here.
        prefix: PrefixCache = self.model.prefix(inputs.images, inputs.image_masks, inputs.tokens, inputs.token_mask)
        return prefix.features()

    def reset_parameters(self) -> None:
        """Start values for training without a checkpoint (models/pi05/initialization.py says which and why)."""
        prompts = self.processor.prompts if self.config.tokenizer == BUILTIN else None
        initialize_from_scratch(self.model, prompts.number_token_ids if prompts is not None else ())

    # -- training -----------------------------------------------------------------------------------------------------

    def sft_forward(  # type: ignore[override]
        self,
        batch: Mapping[str, Any],
        *,
        noise: Tensor | None = None,
        time: Tensor | None = None,
        flow_draws: int = 1,
        state_noise: float = 0.0,
        generator: torch.Generator | None = None,
        features: FrozenFeatures | None = None,
    ) -> dict[str, Tensor]:
        """Flow-matching loss on a training batch (contract.TRAINING_BATCH).

        noise: standard normal float32 [B*T, H, A_max]; time: float32 [B*T] in 0..1, 1 = noise; drawn when None, noise
        before time, T = `flow_draws` draws a sample that share one prefix. Row n belongs to sample n // T.
        state_noise: standard deviation added to the normalised state. generator: of every draw.
        features: what `encode_features` gave for these observations; the batch's images and prompts are then not read.

        Returns loss (0-d mean over what counts), loss_sum and count (0-d; their quotient is loss) and loss_per_dim
        (detached, [A], or [A_max] with config.loss_dims="padded").
        Raises ValueError for batches or draws that do not fit (see `PI05Processor`), and for state_noise with features.
        """
        if flow_draws < 1:
            raise ValueError(f"flow_draws={flow_draws} must be at least 1")
        batch = self._on_device(batch)
        targets = self.processor.targets(batch)
        prefix = self._prefix(batch, features, state_noise, generator)
        rows = len(targets.actions) * flow_draws
        noise = self._noise(rows, generator) if noise is None else self._checked_noise(noise, rows)
        time = self._time(rows, generator) if time is None else _checked_time(time, rows, self.device)
        dims = targets.actions.shape[2] if self.config.loss_dims == "padded" else self.config.action_dim
        errors_NHA = self.model.flow_loss(prefix, targets.actions, noise, time)[..., :dims]
        return _reduced(errors_NHA, targets.counts, flow_draws)

    def _prefix(
        self,
        batch: Mapping[str, Any],
        features: FrozenFeatures | None,
        state_noise: float = 0.0,
        generator: torch.Generator | None = None,
    ) -> PrefixCache:
        if features is not None:
            if state_noise:
                raise ValueError(f"state_noise={state_noise} would change the prompts that features were computed from")
            return PrefixCache.from_features(features, self.config.language.head_dim)
        inputs = self.processor.inputs(batch, state_noise=state_noise, generator=generator)
        return self.model.encode_prefix(inputs.images, inputs.image_masks, inputs.tokens, inputs.token_mask)

    def _noise(self, rows: int, generator: torch.Generator | None) -> Tensor:
        source = self.device if generator is None else generator.device
        return torch.randn(rows, *self.noise_shape, generator=generator, device=source).to(self.device)

    def _checked_noise(self, noise: Tensor, rows: int) -> Tensor:
        if noise.shape != (rows, *self.noise_shape):
            raise ValueError(f"noise must be {[rows, *self.noise_shape]}, got {list(noise.shape)}")
        return noise.to(self.device, torch.float32)

    def _time(self, rows: int, generator: torch.Generator | None) -> Tensor:
        config = self.config
        return sample_time(
            rows,
            alpha=config.time_beta_alpha,
            beta=config.time_beta_beta,
            scale=config.time_scale,
            offset=config.time_offset,
            generator=generator,
            device=self.device,
        )

    # -- acting -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def sample_actions(
        self,
        batch: Mapping[str, Any],
        noise: Tensor | None = None,
        num_steps: int | None = None,
        generator: torch.Generator | None = None,
        features: FrozenFeatures | None = None,
    ) -> Tensor:
        """Action chunks [B, H, A] float32 in raw units for the observations of a batch (actions are not read).

        noise: [B, H, A_max] to start from, drawn from `generator` when None. num_steps: Euler steps, by default
        config.num_inference_steps. features: as in `sft_forward`.
        Raises ValueError for batches, noise or steps that do not fit.
        """
        num_steps = self.config.num_inference_steps if num_steps is None else num_steps
        if not isinstance(num_steps, int) or num_steps < 1:
            raise ValueError(f"num_steps={num_steps} must be a whole number, at least 1")
        batch = self._on_device(batch)
        prefix = self._prefix(batch, features)
        rows = len(prefix.lengths)
        noise = self._noise(rows, generator) if noise is None else self._checked_noise(noise, rows)
        return self.processor.actions(self.model.sample_actions(prefix, noise, num_steps), batch)

    def predict_action_batch(
        self,
        env_obs: EnvObservation,
        mode: Mode = "eval",
        compute_values: bool | None = None,
        num_steps: int | None = None,
        noise: Tensor | None = None,
        keys: Sequence[Sequence[int]] | None = None,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Executable action chunks for B environments: (float32 [B, H, A] on the CPU, result dictionary).

        Cameras that the environment offers and the policy does not have are left out. num_steps and noise as in
        `sample_actions`, of eval mode; result then holds "num_steps". keys: of train mode (see `FlowPolicy.explore`).
        compute_values: result holds prev_values; None: in train mode.
        Raises NotImplementedError for mode="train" and compute_values=True before `explore_with` and `add_value_head`,
        ValueError for arguments of the other mode.
        """
        if mode not in ("eval", "train"):
            raise ValueError(f"mode must be 'eval' or 'train', got {mode!r}")
        missing = self.missing_for_exploration() if mode == "train" or compute_values else None
        if missing:
            wish = "mode='train'" if mode == "train" else "compute_values=True"
            raise NotImplementedError(f"{wish} needs {missing}; use mode='eval', compute_values=False")
        if mode == "train":
            if num_steps is not None or noise is not None:
                raise ValueError("num_steps and noise are of mode='eval'; explore_with and keys decide in train mode")
            return self.explore(env_obs, compute_values=compute_values is not False, keys=keys)
        if keys is not None:
            raise ValueError("keys are of mode='train'; pass noise")
        actions = self.sample_actions(self.observed_batch(env_obs), noise, num_steps)
        result: dict[str, Any] = {"num_steps": self.config.num_inference_steps if num_steps is None else num_steps}
        if compute_values:
            result["prev_values"] = self.predict_values(env_obs)
        return actions.cpu(), result

    def reset(self) -> None:
        """Forgets the queued actions: call it when an episode begins."""
        self._queue.clear()

    def select_action(
        self,
        obs: EnvObservation,
        *,
        n_action_steps: int | None = None,
        num_steps: int | None = None,
        noise: Tensor | None = None,
    ) -> Tensor:
        """The next action [B, A] (float32, raw units, CPU); looks at `obs` only when the queue of actions is empty.

        n_action_steps: actions executed of each predicted chunk, by default config.n_action_steps. Call `reset` at the
        start of an episode. Raises ValueError for more executed steps than the chunk has, and when the number of
        environments changed without a reset.
        """
        steps = self.config.n_action_steps if n_action_steps is None else n_action_steps
        if not 1 <= steps <= self.config.chunk_size:
            raise ValueError(
                f"n_action_steps={steps} must lie in 1..{self.config.chunk_size}, the chunk that the policy predicts"
            )
        if not self._queue:
            actions, _ = self.predict_action_batch(obs, num_steps=num_steps, noise=noise)
            self._queue.extend(actions[:, :steps].unbind(dim=1))
        elif len(self._queue[0]) != len(obs["task_descriptions"]):
            raise ValueError(
                f"actions for {len(self._queue[0])} environments are queued, but the observation has "
                f"{len(obs['task_descriptions'])}; call reset() when an episode begins"
            )
        return self._queue.popleft()

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def seed_masters(self, optimizer: Optimizer) -> None:
        """Starts the optimizer's fp32 masters at the values of the checkpoint that this policy was loaded from.

        For bf16 training from an fp32 checkpoint: without it the masters start from the rounded parameters. Call it
        after `optimizer` was built and before its state is restored; PI05Module does. ValueError when the policy was
        not loaded, or the optimizer keeps no masters (FP32MasterAdamW does).
        """
        if self.loaded_from is None:
            raise ValueError("this policy was not loaded from a checkpoint, so masters start from its parameters")
        seed_masters(self.model, optimizer, self.loaded_from)

    def save_pretrained(
        self,
        folder: str | Path,
        layout: CheckpointLayout = "lerobot",
        *,
        optimizer: Optimizer | None = None,
        values: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Writes config.json, model.safetensors, the statistics, and the tokenizer when it is the built-in one.

        The folder appears whole or not at all; an earlier checkpoint there is replaced. layout: "lerobot", or "openpi"
        (statistics under assets/). optimizer: its fp32 masters are written in the place of its bf16 parameters, so
        that nothing of what was trained is rounded. values: tensors to write instead of parameters, by the model's
        names (averaged weights). An fp8 backbone is copied from the checkpoint it was loaded from. A sharded policy is
        saved by all ranks together: each calls this, rank 0 writes.
        Raises FileExistsError when the folder holds other files, ValueError for an unknown layout and for an optimizer
        without masters.
        """
        if layout not in ("lerobot", "openpi"):
            raise ValueError(f"layout must be 'lerobot' or 'openpi', got {layout!r}")
        is_whole = self.frozen_precision is None and self.model.has_prefix
        source = None if is_whole else self.loaded_from
        weights: dict[str, Any] = {"optimizer": optimizer, "values": values, "frozen_from": source}
        critic = self.whole_value_head()
        if self.is_sharded and get_rank() != 0:
            save_weights(self.model, None, layout, **weights)
            return
        with written_at_once(Path(folder)) as new:
            write_config(self.config, new, layout)
            save_weights(self.model, new, layout, **weights)
            if self.statistics is not None:
                save_side_files(new, layout, self.config, self.statistics)
            if self.config.tokenizer == BUILTIN:
                self.processor.prompts.tokenizer.save_pretrained(new)
            self.save_value_head(critic, new)

    @classmethod
    def from_pretrained(
        cls,
        path_or_id: str | Path,
        revision: str | None = None,
        *,
        device: str | torch.device | None = None,
        config: PI05Config | None = None,
        dtype: Literal["float32", "bfloat16"] | None = None,
        trainable: Trainable | None = None,
        frozen_precision: Literal["fp8"] | None = None,
        action_dim: int | None = None,
        statistics: Statistics | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        changes: Mapping[str, Any] | None = None,
        on_long_prompt: OnLongPrompt = "error",
        missing_cameras: MissingCameras = "error",
    ) -> PI05Policy:
        """Loads a checkpoint folder (lerobot, openpi or RLinf layout) or a hub repository, strictly.

        Nothing is initialised first, and every tensor goes from the mapped file to its place and dtype by itself: host
        memory holds about one tensor beside the policy.

        revision: of a hub repository. device: of the policy, by default torch's default device (the CPU, unless
        `torch.device(...)`, `trainer.init_module()` or `fabric.init_module()` is entered). config: instead of the
        folder's config.json, which RLinf's have none of. dtype, trainable, action_dim and `changes` (any other field of
        PI05Config) replace what the checkpoint says. statistics: instead of the checkpoint's. tokenizer: instead of
        config.tokenizer's. Without statistics anywhere, `set_statistics` must follow before use.
        frozen_precision: "fp8" stores the frozen backbone in fp8 and runs its products there; None: in `dtype`.

        Raises FileNotFoundError or OSError when there is no such checkpoint, ValueError for a file that is damaged, for
        weights that do not fit (missing, unexpected and mis-shaped keys in one message), for unknown `changes`, and for
        a dimension that the statistics do not have.
        """
        named = {"dtype": dtype, "trainable": trainable, "action_dim": action_dim}
        overrides = {name: value for name, value in named.items() if value is not None}
        twice = sorted(set(overrides) & set(changes or {}))
        if twice:
            raise ValueError(f"{twice} are given both as arguments and in changes; give each once")
        folder = fetch_checkpoint(path_or_id, revision)
        saved = read_config(folder) if config is None else config
        config = changed_config(saved, {**(changes or {}), **overrides})
        _check_frozen_precision(frozen_precision, config)
        if tokenizer is None and config.tokenizer == BUILTIN:
            tokenizer = load_builtin_tokenizer(folder)
        found = (statistics, "given") if statistics is not None else find_statistics(folder)
        if statistics is None and found is not None and config.delta_actions != saved.delta_actions:
            log.warning("the statistics of %s are not taken: they are of other delta_actions", folder)
            found = None
        with torch.device("meta"):  # start values would be thrown away
            policy = cls(config, tokenizer=tokenizer, on_long_prompt=on_long_prompt, missing_cameras=missing_cameras)
        load_weights(policy.model, folder, device)
        policy.loaded_from = folder
        if frozen_precision is not None:
            policy.quantize_frozen(frozen_precision)
        if found is not None:
            check_asked_dims({**(changes or {}), **overrides}, found[0])
            policy.set_statistics(found[0], source=found[1] if statistics is not None else f"checkpoint ({found[1]})")
        return policy


def _check_frozen_precision(precision: str | None, config: PI05Config) -> None:
    if precision == "fp8":
        check_fp8(config)
    elif precision is not None:
        raise ValueError(f"frozen_precision={precision!r} is unknown; it is 'fp8', or None for the policy's dtype")


def _reduced(errors_NHA: Tensor, counts_BH: Tensor, flow_draws: int) -> dict[str, Tensor]:
    """Sums and means over the steps that count; row n of the errors belongs to sample n // flow_draws."""
    counted_NH1 = counts_BH.repeat_interleave(flow_draws, dim=0)[..., None]
    sum_A = torch.where(counted_NH1, errors_NHA, 0.0).sum(dim=(0, 1))
    steps = counts_BH.sum() * flow_draws
    loss_sum, count = sum_A.sum(), (steps * sum_A.shape[0]).to(sum_A.dtype)
    return {
        "loss": loss_sum / count.clamp(min=1),
        "loss_sum": loss_sum,
        "count": count,
        "loss_per_dim": sum_A.detach() / steps.clamp(min=1),
    }


def _checked_time(time: Tensor, rows: int, device: torch.device) -> Tensor:
    if time.shape != (rows,):
        raise ValueError(f"time must be [{rows}], got {list(time.shape)}")
    return time.to(device, torch.float32)
