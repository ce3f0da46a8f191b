"""Which features, and which frames of them, can be recorded?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from soma_lightning.data import lerobot_format as fmt


def parse_features(features: Mapping[str, Mapping[str, Any]]) -> dict[str, fmt.Feature]:
    """The features of a recording to be, or ValueError naming the one that the format or the writer cannot hold."""
    if not features:
        raise ValueError("features is empty; name at least 'action' with its dtype and shape")
    parsed = {}
    for key, spec in features.items():
        if key in fmt.BOOKKEEPING_DTYPES:
            raise ValueError(f"features names '{key}', which the writer fills itself; leave it out")
        if "/" in key:
            raise ValueError(f"features names '{key}'; LeRobot allows no '/' in a feature's name")
        if set(spec) - {"dtype", "shape", "names"} or not {"dtype", "shape"} <= set(spec):
            raise ValueError(f"feature '{key}' needs dtype, shape and optionally names, found {sorted(spec)}")
        parsed[key] = _parse_feature(key, str(spec["dtype"]), tuple(spec["shape"]), spec.get("names"))
    return parsed


def _parse_feature(key: str, dtype: str, shape: tuple[int, ...], names: Any) -> fmt.Feature:
    if dtype in ("image", "video"):
        if len(shape) != 3 or shape[2] != 3 or min(shape) < 1:
            raise ValueError(f"feature '{key}' has shape {list(shape)}; an image is [height, width, 3]")
        if dtype == "video" and (shape[0] % 2 or shape[1] % 2):
            raise ValueError(
                f"feature '{key}' has shape {list(shape)}; a video's height and width must be even (colours have half "
                "the resolution): crop or pad the frames by one pixel, or use dtype 'image'"
            )
        return fmt.Feature(key, dtype, shape, names or ["height", "width", "channel"])
    if dtype not in fmt.NUMERIC_DTYPES:
        raise ValueError(
            f"feature '{key}' has dtype '{dtype}'; use 'image', 'video' or one of {sorted(fmt.NUMERIC_DTYPES)}"
        )
    if len(shape) != 1 or shape[0] < 1:
        raise ValueError(f"feature '{key}' has shape {list(shape)}; numeric features have one axis, as in [7]")
    return fmt.Feature(key, dtype, shape, names)


def check_frames(
    features: Mapping[str, fmt.Feature], frames: Mapping[str, NDArray[Any]], episode: int
) -> dict[str, NDArray[Any]]:
    """The frames in the order of `features`, or ValueError naming the episode and the column."""
    missing, extra = sorted(set(features) - set(frames)), sorted(set(frames) - set(features))
    if missing or extra:
        raise ValueError(f"episode {episode}: missing columns {missing}, unknown columns {extra}")
    checked: dict[str, NDArray[Any]] = {}
    first: tuple[str, int] | None = None
    for key, feature in features.items():
        where = f"episode {episode}, column '{key}'"
        array = frames[key]
        dtype = "uint8" if feature.is_camera else feature.dtype
        if not isinstance(array, np.ndarray):
            raise ValueError(f"{where}: expected a numpy array, found {type(array).__name__}")
        if array.dtype != np.dtype(dtype):
            raise ValueError(f"{where}: dtype {array.dtype}, expected {dtype}")
        if array.ndim == 1 and feature.shape == (1,):
            array = array[:, None]
        if array.shape[1:] != feature.shape or not array.ndim or not len(array):
            raise ValueError(f"{where}: shape {list(array.shape)}, expected [T, {', '.join(map(str, feature.shape))}]")
        if first is None:
            first = (key, len(array))
        elif len(array) != first[1]:
            raise ValueError(f"{where}: {len(array)} frames, but '{first[0]}' has {first[1]}")
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            frame = int(np.argwhere(~np.isfinite(array))[0, 0])
            raise ValueError(f"{where}: frame {frame} is not finite")
        checked[key] = array
    return checked
