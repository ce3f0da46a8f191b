"""Which observation does a client's message hold? Names of openpi, of LeRobot and of our environments mean the same.

S state dimensions, h/w image height/width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from soma_lightning.contract import CAMERA_OF_OBSERVATION, STATE, TASK, EnvObservation

STATES, TASKS = "states", "task_descriptions"
FIELD_OF_CAMERA = {camera: field for field, camera in CAMERA_OF_OBSERVATION.items()}
#: Of an instruction: far more than any policy reads, and few enough that nobody waits while they are tokenized.
MAX_CHARACTERS = 10_000
#: Name in a message -> field of an observation (contract.EnvObservation).
FIELD_OF_NAME = {
    "observation/image": "main_images",
    "observation/wrist_image": "wrist_images",
    "observation/state": STATES,
    "prompt": TASKS,
    **FIELD_OF_CAMERA,
    STATE: STATES,
    TASK: TASKS,
    **{field: field for field in (*CAMERA_OF_OBSERVATION, STATES, TASKS)},
}


@dataclass(frozen=True)
class Observation:
    """What one client sees. images: {field of an observation: uint8 [h, w, 3]}. state: float32 [S]."""

    images: Mapping[str, np.ndarray]
    state: np.ndarray
    instruction: str

    @property
    def form(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """The shapes: observations of one form fit into one batch."""
        shapes = {STATES: self.state.shape, **{field: image.shape for field, image in self.images.items()}}
        return tuple(sorted(shapes.items()))


def stacked(observations: Sequence[Observation]) -> EnvObservation:
    """One batch of observations of one form."""
    fields = observations[0].images
    return cast(
        "EnvObservation",
        {
            "main_images": None,
            **{field: np.stack([one.images[field] for one in observations]) for field in fields},
            STATES: np.stack([one.state for one in observations]),
            TASKS: [one.instruction for one in observations],
        },
    )


class ObservationReader:
    """Reads messages for a policy of these cameras and this state.

    cameras: the policy's camera keys; None when it does not tell, then any of the three that an observation has may
    come. state_dim: S, or None for any. renamed: {name in a message: camera key}, in addition to FIELD_OF_NAME.
    Raises ValueError for cameras that have no place in an observation and for names that mean something already.
    """

    def __init__(
        self, cameras: Sequence[str] | None, state_dim: int | None, renamed: Mapping[str, str] | None = None
    ) -> None:
        renamed = renamed or {}
        if unknown := sorted((set(cameras or ()) | set(renamed.values())) - set(FIELD_OF_CAMERA)):
            raise ValueError(
                f"the cameras {unknown} have no place in an observation, which has {list(FIELD_OF_CAMERA)}; save the "
                "policy with changes={'cameras': [some of these]}, or rename a client's cameras to these"
            )
        if twice := sorted(set(renamed) & set(FIELD_OF_NAME)):
            raise ValueError(f"the names {twice} have a meaning already; rename other ones")
        self.cameras, self.state_dim = cameras, state_dim
        self._field_of_name = FIELD_OF_NAME | {name: FIELD_OF_CAMERA[camera] for name, camera in renamed.items()}
        self._cameras = {FIELD_OF_CAMERA[camera] for camera in (FIELD_OF_CAMERA if cameras is None else cameras)}
        self._required = {STATES, TASKS} | (set() if cameras is None else self._cameras)

    def read(self, message: Mapping[str, Any]) -> Observation:
        """The observation in `message`. Raises ValueError for what is unknown, missing, twice there or does not fit."""
        named = self._by_field(message)
        images = {field: _image(name, value) for field, (name, value) in named.items() if field in self._cameras}
        return Observation(images, _state(*named[STATES], self.state_dim), _text(*named[TASKS]))

    def _by_field(self, message: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
        """{field: (the client's name for it, value)}."""
        named: dict[str, tuple[str, Any]] = {}
        for name, value in message.items():
            if value is None:  # our environments' observations say so of a camera that they do not have
                continue
            field = self._field_of_name.get(name)
            if field is None or field not in {STATES, TASKS, *self._cameras}:
                raise ValueError(f"the observation has {name!r:.80}, which the policy does not read; {self._wanted()}")
            if field in named:
                raise ValueError(f"'{named[field][0]}' and '{name}' mean the same; send one of them")
            named[field] = (name, value)
        if missing := sorted(self._required - set(named)):
            names = [" or ".join(f"'{n}'" for n, f in self._field_of_name.items() if f == field) for field in missing]
            raise ValueError(f"the observation has no {'; no '.join(names)}. It has {sorted(message)!r:.200}")
        return named

    def _wanted(self) -> str:
        known = [name for name, field in self._field_of_name.items() if field in {STATES, TASKS, *self._cameras}]
        return f"it reads {known}"


def _single(value: Any) -> Any:
    """What a batch of one holds; anything else as it is."""
    return value[0] if len(value) == 1 else value


def _image(name: str, value: Any) -> np.ndarray:
    """uint8 [h, w, 3], contiguous."""
    if not isinstance(value, np.ndarray) or value.dtype != np.uint8:
        raise ValueError(
            f"'{name}' must be an array of uint8, 0..255, got {getattr(value, 'dtype', type(value).__name__)}"
        )
    image = _single(value) if value.ndim == 4 else value
    if image.ndim == 3 and image.shape[2] != 3 and image.shape[0] == 3:
        image = image.transpose(1, 2, 0)
    if image.ndim != 3 or image.shape[2] != 3 or 0 in image.shape:
        raise ValueError(
            f"'{name}' must be one image, [height, width, 3] or [3, height, width], got {list(value.shape)}; the "
            "server makes batches by itself"
        )
    return np.ascontiguousarray(image)


def _state(name: str, value: Any, state_dim: int | None) -> np.ndarray:
    """float32 [S]."""
    if isinstance(value, list) and all(type(number) in (int, float) for number in value):
        value = np.array(value, np.float64)
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "iuf":
        found = getattr(value, "dtype", type(value).__name__)
        raise ValueError(f"'{name}' must be an array or list of numbers, got {found}")
    state = _single(value) if value.ndim == 2 else value
    if state.ndim != 1 or (state_dim is not None and len(state) != state_dim):
        wanted = "dimensions" if state_dim is None else state_dim
        raise ValueError(f"'{name}' must be one state, [{wanted}], got {list(value.shape)}")
    with np.errstate(over="ignore"):
        state = state.astype(np.float32)
    if not np.isfinite(state).all():
        raise ValueError(f"'{name}' holds NaN or infinity")
    return state


def _text(name: str, value: Any) -> str:
    text = _single(value) if isinstance(value, list) else value
    if not isinstance(text, str):
        raise ValueError(f"'{name}' must be one string, got {type(value).__name__}")
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"'{name}' has {len(text):,} characters; at most {MAX_CHARACTERS:,} are read")
    return text
