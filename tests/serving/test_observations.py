"""Observations of openpi's, LeRobot's and our clients mean the same; what does not fit is named."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

from soma_lightning.serving.observations import ObservationReader, stacked

CAMERAS = ("observation.images.image", "observation.images.image2")
DRAW = np.random.default_rng(0)
IMAGE, WRIST = (DRAW.integers(0, 256, (5, 7, 3), dtype=np.uint8) for _ in range(2))
STATE = DRAW.uniform(-1, 1, 8)
SAME = {
    "openpi": {
        "observation/image": IMAGE,
        "observation/wrist_image": WRIST,
        "observation/state": STATE,
        "prompt": "pick",
    },
    "lerobot": {
        CAMERAS[0]: IMAGE.transpose(2, 0, 1),
        CAMERAS[1]: WRIST.transpose(2, 0, 1)[None],
        "observation.state": STATE.astype(np.float32)[None],
        "task": ["pick"],
    },
    "ours": {
        "main_images": IMAGE[None],
        "wrist_images": WRIST[None],
        "extra_view_images": None,
        "states": STATE.tolist(),
        "task_descriptions": ["pick"],
    },
    "renamed": {"top": IMAGE, "hand": WRIST, "states": STATE, "task": "pick"},
}


@pytest.mark.parametrize("names", SAME)
def test_every_family_of_names_means_the_same_observation(names: str) -> None:
    reader = ObservationReader(CAMERAS, 8, {"top": CAMERAS[0], "hand": CAMERAS[1]})
    found = reader.read(SAME[names])
    np.testing.assert_array_equal(found.images["main_images"], IMAGE)
    np.testing.assert_array_equal(found.images["wrist_images"], WRIST)
    np.testing.assert_array_equal(found.state, STATE.astype(np.float32))
    assert (found.state.dtype, found.instruction, set(found.images)) == (
        np.float32,
        "pick",
        {"main_images", "wrist_images"},
    )
    batch = stacked([found, found])
    assert batch["main_images"].shape == (2, 5, 7, 3)
    assert batch["task_descriptions"] == ["pick", "pick"]


def changed(**changes: Any) -> dict[str, Any]:
    """openpi's message with entries replaced; ... takes one away."""
    message = {**SAME["openpi"], **{name.replace("__", "/"): value for name, value in changes.items()}}
    return {name: value for name, value in message.items() if value is not ...}


@pytest.mark.parametrize(
    ("message", "told"),
    [
        (changed(observation__image=...), "has no 'observation/image' or 'observation.images.image' or 'main_images'"),
        (changed(observation__image=None), "has no 'observation/image'"),
        (changed(observation__state=...), "has no 'observation/state' or 'observation.state' or 'states'"),
        (changed(prompt=...), "has no 'prompt' or 'task'"),
        (changed(actions=STATE), "has 'actions', which the policy does not read; it reads ['observation/image', "),
        (changed(extra_view_images=IMAGE), "has 'extra_view_images', which the policy does not read"),
        (changed(task="pick"), "'prompt' and 'task' mean the same; send one of them"),
        (changed(observation__image=IMAGE.astype(np.float32)), "must be an array of uint8, 0..255, got float32"),
        (changed(observation__image=IMAGE.tolist()), "must be an array of uint8, 0..255, got list"),
        (
            changed(observation__image=IMAGE[..., :2]),
            "must be one image, [height, width, 3] or [3, height, width], got",
        ),
        (changed(observation__image=IMAGE[0]), "got [7, 3]"),
        (changed(observation__image=IMAGE[:0]), "got [0, 7, 3]"),
        (changed(observation__image=np.stack([IMAGE, IMAGE])), "got [2, 5, 7, 3]; the server makes batches by itself"),
        (changed(observation__state=STATE[:7]), "'observation/state' must be one state, [8], got [7]"),
        (changed(observation__state=np.stack([STATE, STATE])), "must be one state, [8], got [2, 8]"),
        (changed(observation__state=np.float64(1)), "must be an array or list of numbers, got float64"),
        (changed(observation__state=["a"] * 8), "must be an array or list of numbers, got list"),
        (changed(observation__state=np.ones(8, bool)), "must be an array or list of numbers, got bool"),
        (changed(observation__state=STATE * np.nan), "'observation/state' holds NaN or infinity"),
        (changed(observation__state=STATE * 1e60), "holds NaN or infinity"),
        (changed(prompt=5), "'prompt' must be one string, got int"),
        (changed(prompt="pick " * 2001), "'prompt' has 10,005 characters; at most 10,000 are read"),
        (changed(prompt=["a", "b"]), "'prompt' must be one string, got list"),
    ],
)
def test_what_does_not_fit_is_named(message: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=re.escape(told)):
        ObservationReader(CAMERAS, 8).read(message)


def test_a_policy_that_does_not_tell_takes_what_comes() -> None:
    reader = ObservationReader(None, None)
    assert set(reader.read({"extra_view_images": IMAGE, "states": STATE[:3], "task": "go"}).images) == {
        "extra_view_images"
    }
    plain = reader.read({"states": STATE, "task": "go"})
    assert stacked([plain])["main_images"] is None
    assert plain.form != reader.read({"states": STATE[:3], "task": "go"}).form


def test_cameras_without_a_place_and_names_taken_are_refused() -> None:
    with pytest.raises(ValueError, match=r"cameras \['observation.images.top'\] have no place in an observation"):
        ObservationReader(["observation.images.top"], 8)
    with pytest.raises(ValueError, match=r"cameras \['main'\] have no place"):
        ObservationReader(CAMERAS, 8, {"top": "main"})
    with pytest.raises(ValueError, match=r"names \['prompt'\] have a meaning already"):
        ObservationReader(CAMERAS, 8, {"prompt": CAMERAS[0]})
