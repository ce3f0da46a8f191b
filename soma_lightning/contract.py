"""What a training batch and an environment observation contain: every key, shape, dtype, unit and range, once.

Shape letters: B batch, H action horizon (chunk size), A action dimensions, S state dimensions, h/w image height/width,
K executed steps. Every model's processor starts from a training batch (LeRobot's field names); every environment hands
out an observation (RLinf's field names); `batch_from_observation` is the only bridge between the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NotRequired, TypedDict

import numpy as np
import torch
from torch import Tensor

IMAGE_PREFIX = "observation.images."
STATE = "observation.state"
ACTION = "action"
ACTION_IS_PAD = "action_is_pad"
TASK = "task"
#: Beside a policy's weights: the step at which a training wrote them, {"step": int, "epoch": int}.
TRAINING_FILE = "soma_training.json"

#: Environment image field -> camera key of a training batch (the public LIBERO data sets' names).
CAMERA_OF_OBSERVATION = {
    "main_images": f"{IMAGE_PREFIX}image",
    "wrist_images": f"{IMAGE_PREFIX}image2",
    "extra_view_images": f"{IMAGE_PREFIX}image3",
}

#: {feature: {"mean" | "std" | "min" | "max" | "q01" | "q99": float64 [D], "count": int64 [1]}}, as in LeRobot's
#: `meta/stats.json`; features are `observation.state` and `action` (raw units of the data set).
Statistics = dict[str, dict[str, np.ndarray]]


@dataclass(frozen=True)
class Field:
    """One entry of a batch: `shape` in the letters of this module, `range` in raw units."""

    key: str
    shape: str
    dtype: str
    unit: str
    range: str
    required: bool = True


TRAINING_BATCH = (
    Field(f"{IMAGE_PREFIX}<camera>", "[B, 3, h, w]", "uint8 or float32", "pixel", "0..255, or 0..1 when float"),
    Field(STATE, "[B, S]", "float32", "the data set's (LIBERO: m, axis-angle rad, finger m)", "unbounded"),
    Field(ACTION, "[B, H, A]", "float32", "the data set's (LIBERO: -1..1, gripper -1 open, +1 closed)", "unbounded"),
    Field(ACTION_IS_PAD, "[B, H]", "bool", "-", "True where the chunk runs past the episode's end", required=False),
    Field(TASK, "B strings", "list[str]", "-", "free text"),
)


class EnvObservation(TypedDict):
    """Batched observation of B environments (RLinf's names); images are upright and mirrored as the models want them.

    main_images, wrist_images, extra_view_images: uint8 [B, h, w, 3], 0..255. states: float32 [B, S]: end-effector
    position (m), axis-angle without sign change (rad), two finger positions (m). task_descriptions: B instructions.
    An environment of state observations has no images: main_images is None and states also hold the objects.
    """

    main_images: np.ndarray | Tensor | None
    states: np.ndarray | Tensor
    task_descriptions: list[str]
    wrist_images: NotRequired[np.ndarray | Tensor | None]
    extra_view_images: NotRequired[np.ndarray | Tensor | None]


PromptFamily = Literal["state", "task"]


def batch_from_observation(observation: EnvObservation) -> dict[str, Any]:
    """Turns an environment observation into the keys of a training batch (without actions).

    Returns images as uint8 [B, 3, h, w], `observation.state` as float32 [B, S], `task` as list[str].
    Raises KeyError naming the missing field.
    """
    for key in ("main_images", "states", "task_descriptions"):
        if key not in observation:
            raise KeyError(
                f"the observation has no '{key}'; it has {sorted(observation)}. A group's observe(slots) gives such a "
                "batch; that of a single environment is envs.batch_observations([(env.observe(), env.instruction)])"
            )
    batch: dict[str, Any] = {
        STATE: torch.as_tensor(observation["states"], dtype=torch.float32),
        TASK: list(observation["task_descriptions"]),
    }
    for field, camera in CAMERA_OF_OBSERVATION.items():
        images = observation.get(field)
        if images is not None:
            batch[camera] = torch.as_tensor(images).movedim(-1, -3)
    return batch
