"""How close do a policy's action chunks come to recorded actions, when it sees the recorded observations?

Open loop: what the policy predicts changes nothing of what it sees next. Shape letters: T frames of an episode, H
chunk, K executed steps, L looks, A action dimensions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from soma_lightning.contract import ACTION, CAMERA_OF_OBSERVATION, STATE, TASK, EnvObservation
from soma_lightning.data.lerobot import LeRobotDataset
from soma_lightning.data.statistics import describe
from soma_lightning.models.flow import keyed_generator
from soma_lightning.models.normalization import Normalizer
from soma_lightning.models.policy import check_executed_steps

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class OpenLoopSettings:
    """What decides the predictions.

    executed_steps: K; the policy looks at frames 0, K, 2 K, ..., and the first K actions of a chunk count, so that
    every frame counts once. denoising_steps: Euler steps of the flow. seed: of the policy's noise, see `draw_noise`.
    batch_size: looks predicted at once; it does not change the noise.
    """

    executed_steps: int
    denoising_steps: int
    seed: int = 0
    batch_size: int = 32

    def __post_init__(self) -> None:
        for name, least in (("executed_steps", 1), ("denoising_steps", 1), ("batch_size", 1), ("seed", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)} must be at least {least}")


@dataclass(frozen=True)
class EpisodePrediction:
    """One episode. recorded: [T, A]. looks: frames that the policy saw [L]. chunks: its predictions there [L, H, A]."""

    episode: int
    task: str
    recorded: Floats
    looks: NDArray[np.int64]
    chunks: Floats

    @property
    def predicted(self) -> Floats:
        """[T, A]: of each frame, what the last look before it predicts."""
        frame_T = np.arange(len(self.recorded))
        look_T = np.searchsorted(self.looks, frame_T, side="right") - 1
        predicted: Floats = self.chunks[look_T, frame_T - self.looks[look_T]]
        return predicted

    @property
    def errors(self) -> NDArray[np.float64]:
        """[T, A], absolute."""
        errors: NDArray[np.float64] = np.abs(self.predicted.astype(np.float64) - self.recorded)
        return errors

    @property
    def chunk_errors(self) -> NDArray[np.float64]:
        """[L, H, A], absolute; NaN past the episode's end."""
        frame_LH = self.looks[:, None] + np.arange(self.chunks.shape[1])
        recorded = self.recorded[np.minimum(frame_LH, len(self.recorded) - 1)]
        errors: NDArray[np.float64] = np.abs(self.chunks.astype(np.float64) - recorded)
        errors[frame_LH >= len(self.recorded)] = np.nan
        return errors


def draw_noise(seed: int, episode: int, frame: int, shape: tuple[int, ...]) -> Tensor:
    """The noise a chunk starts from: a function of (seed, episode, frame) only."""
    return torch.randn(shape, generator=keyed_generator((seed, episode, frame)))


def predict_episodes(
    policy: Any,
    dataset: LeRobotDataset,
    settings: OpenLoopSettings,
    episodes: Sequence[int],
    report: Callable[[str], None] = print,
) -> list[EpisodePrediction]:
    """The policy's chunks for these episodes of the data set.

    policy: has `predict_action_batch` and `noise_shape`, as an evaluation needs it. The data set's cameras carry the
    names of a training batch (`contract.CAMERA_OF_OBSERVATION`); others have no place in an observation.
    Raises ValueError for such a camera, for more executed steps than the policy predicts, and for actions of another
    shape than the recorded ones or that are not finite.
    """
    check_executed_steps(policy, settings.executed_steps)
    if unknown := sorted(set(dataset.cameras.values()) - set(CAMERA_OF_OBSERVATION.values())):
        raise ValueError(
            f"the cameras {unknown} have no place in an observation; map them to {[*CAMERA_OF_OBSERVATION.values()]}, "
            f"or leave them out, with cameras={{key in the data set: one of these}}"
        )
    frames = dataset.frames
    seen = np.isin(frames.episode_index, episodes) & (frames.frame_index % settings.executed_steps == 0)
    looks = np.flatnonzero(seen)
    chunks = []
    for start in range(0, len(looks), settings.batch_size):
        rows = looks[start : start + settings.batch_size]
        chunks.append(_predict(policy, dataset, rows, settings))
        report(f"predicted {start + len(rows)} of {len(looks)} chunks")
    return list(_by_episode(dataset, episodes, looks, np.concatenate(chunks)))


def _predict(policy: Any, dataset: LeRobotDataset, rows: NDArray[np.int64], settings: OpenLoopSettings) -> Floats:
    batch, frames = dataset.batch(rows.tolist()), dataset.frames
    places = zip(frames.episode_index[rows].tolist(), frames.frame_index[rows].tolist(), strict=True)
    noise = [draw_noise(settings.seed, episode, frame, policy.noise_shape) for episode, frame in places]
    actions, _ = policy.predict_action_batch(
        observation_from_batch(batch),
        mode="eval",
        compute_values=False,
        num_steps=settings.denoising_steps,
        noise=torch.stack(noise),
    )
    chunks = np.asarray(actions, np.float32)
    wanted = (len(rows), policy.noise_shape[0], dataset.action_dim)
    if chunks.shape != wanted:
        raise ValueError(
            f"the policy predicts actions of shape {list(chunks.shape)}, the data set needs {list(wanted)} (looks, "
            "chunk, action dimensions); choose the dimensions that it was trained on with action_indices"
        )
    if not np.isfinite(chunks).all():
        raise ValueError("the policy predicts actions that are not finite")
    return chunks


def observation_from_batch(batch: dict[str, Any]) -> EnvObservation:
    """The observation in a training batch: the inverse of `contract.batch_from_observation`."""
    images = {
        field: batch[camera].movedim(-3, -1) for field, camera in CAMERA_OF_OBSERVATION.items() if camera in batch
    }
    observation: Any = {"main_images": None, "states": batch[STATE], "task_descriptions": batch[TASK], **images}
    return cast(EnvObservation, observation)


def _by_episode(
    dataset: LeRobotDataset, episodes: Sequence[int], looks: NDArray[np.int64], chunks: Floats
) -> Iterator[EpisodePrediction]:
    frames, actions = dataset.frames, dataset.actions.numpy()
    for episode in episodes:
        rows = np.flatnonzero(frames.episode_index == episode)
        mine = frames.episode_index[looks] == episode
        task = dataset.tasks[frames.task_index[rows[0]]]
        yield EpisodePrediction(episode, task, actions[rows], frames.frame_index[looks[mine]], chunks[mine])


def summarize(predictions: Sequence[EpisodePrediction], all_actions: Floats, names: Sequence[str]) -> dict[str, Any]:
    """Errors in plain types.

    all_actions: [N, A] of the whole data set. Errors are normalised as a policy with quantiles normalises actions: 1 is
    half of q01..q99. Near-constant dimensions (`Normalizer.constant_dimensions`) are left out of normalised errors.
    `mean_action`: the same errors of a policy that always predicts the data set's mean.
    """
    numbers = describe(all_actions)
    constant = Normalizer({ACTION: numbers}, ACTION).constant_dimensions
    half = (numbers["q99"] - numbers["q01"]) / 2
    varying = np.setdiff1d(np.arange(len(half)), constant)
    recorded = np.concatenate([p.recorded for p in predictions])
    mean_errors = np.abs(recorded - numbers["mean"])

    def described(errors_TA: NDArray[np.float64]) -> dict[str, Any]:
        mae_A = errors_TA.mean(axis=0)
        normalized = float((mae_A[varying] / half[varying]).mean()) if len(varying) else None
        return {"mae": mae_A.tolist(), "normalized": normalized}

    by_step_HA = np.nanmean(np.concatenate([p.chunk_errors for p in predictions]), axis=0)
    by_step = (by_step_HA[:, varying] / half[varying]).mean(axis=1) if len(varying) else np.empty(0)
    return {
        "dimensions": list(names),
        "constant_dimensions": list(constant),
        "half_range": half.tolist(),
        "frames": len(recorded),
        "chunks": sum(len(p.looks) for p in predictions),
        **described(np.concatenate([p.errors for p in predictions])),
        "normalized_by_step": by_step.tolist(),
        "mean_action": described(mean_errors),
        "episodes": [
            {"episode": p.episode, "task": p.task, "frames": len(p.recorded), **described(p.errors)}
            for p in predictions
        ],
    }
