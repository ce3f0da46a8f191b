"""Does every image of a data set decode to the declared size? And which frames show what its cameras see?

Images come from `LeRobotDataset`, whatever they are stored as. Frames are opened in groups of episodes, so that memory
does not grow with the data set.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from soma_lightning.contract import IMAGE_PREFIX
from soma_lightning.data import lerobot_format as fmt
from soma_lightning.data.findings import Findings
from soma_lightning.data.frame_scan import Progress
from soma_lightning.data.lerobot import LeRobotDataset

#: Episodes of one group together have about this many frames; a frame takes some 100 bytes while its group is open.
_GROUP_FRAMES = 200_000
_BLOCK = 32
SHEET_EPISODES = 6
_CAMERA = f"{IMAGE_PREFIX}camera"


@dataclass
class CameraCheck:
    """What became of one camera's images: total frames of sound episodes, checked ones, broken ones among them, those
    of a single colour, and frames for a contact sheet {(episode, frame): uint8 [h, w, 3]}."""

    total: int = 0
    checked: int = 0
    broken: int = 0
    blank: int = 0
    sheet: dict[tuple[int, int], NDArray[np.uint8]] = field(default_factory=dict)


def check_images(
    root: Path,
    info: fmt.DatasetInfo,
    episodes: Sequence[fmt.EpisodeRow],
    sound: set[int],
    limit: int | None,
    findings: Findings,
    progress: Progress,
) -> dict[str, CameraCheck]:
    """Decodes images, camera by camera, and notes every one that fails.

    episodes: all of the data set. sound: those whose frames are where the metadata say; images of others cannot be
    found. limit: frames a camera, evenly spaced, None for all; frames of the contact sheet are always among them, and 0
    decodes none.
    """
    chosen = [episode for episode in episodes if episode.episode_index in sound]
    total = sum(episode.length for episode in chosen)
    cameras = [key for key in (*info.image_keys, *info.video_keys) if not info.features[key].is_depth_map]
    checks = {key: CameraCheck(total=total) for key in cameras}
    if limit == 0 or not chosen:
        return checks
    sample = None if limit is None or limit >= total else _evenly_spaced(episodes, chosen, limit)
    sheet = _sheet_frames(chosen)
    for camera, check in checks.items():
        for group in _groups(chosen):
            for data in _opened(root, camera, group, findings):
                _check_frames(data, camera, sample, sheet, check, findings, progress)
        if check.blank:
            what = f"{check.blank} of {check.checked} decoded images are of a single colour"
            findings.warning(what, None, None, camera)
    return checks


def _evenly_spaced(
    episodes: Sequence[fmt.EpisodeRow], chosen: Sequence[fmt.EpisodeRow], count: int
) -> NDArray[np.int64]:
    """`index` (the number of a frame in the data set) of `count` frames of the chosen episodes."""
    first_index = np.cumsum([0, *(episode.length for episode in episodes)])[[e.episode_index for e in chosen]]
    ends = np.cumsum([episode.length for episode in chosen])
    picks = np.linspace(0, ends[-1] - 1, count).round().astype(np.int64)
    place = np.searchsorted(ends, picks, side="right")
    begins = ends - [episode.length for episode in chosen]
    index: NDArray[np.int64] = first_index[place] + picks - begins[place]
    return index


def _sheet_frames(episodes: Sequence[fmt.EpisodeRow]) -> set[tuple[int, int]]:
    """First, middle and last frame of some episodes, evenly chosen."""
    picks = np.unique(np.linspace(0, len(episodes) - 1, SHEET_EPISODES).round().astype(int)).tolist()
    chosen = [episodes[pick] for pick in picks]
    return {(e.episode_index, frame) for e in chosen for frame in (0, (e.length - 1) // 2, e.length - 1)}


def _groups(episodes: Sequence[fmt.EpisodeRow]) -> Iterator[list[fmt.EpisodeRow]]:
    group: list[fmt.EpisodeRow] = []
    frames = 0
    for episode in episodes:
        group.append(episode)
        frames += episode.length
        if frames >= _GROUP_FRAMES:
            yield group
            group, frames = [], 0
    if group:
        yield group


def _opened(root: Path, camera: str, group: Sequence[fmt.EpisodeRow], findings: Findings) -> Iterator[LeRobotDataset]:
    """The group as a data set of this camera. What does not open is halved, down to the episodes that are to blame."""
    data, text = _open(root, camera, group)
    if data is not None:
        yield data
        return
    halves = (group[: len(group) // 2], group[len(group) // 2 :])
    if len(group) > 1 and any(_open(root, camera, half)[1] != text for half in halves):
        for half in halves:
            yield from _opened(root, camera, half, findings)
        return
    first, last = group[0].episode_index, group[-1].episode_index
    if first == last:
        findings.problem(f"its images were not checked: {text}", None, first, camera)
    else:
        findings.problem(f"images of episodes {first} to {last} were not checked: {text}", None, None, camera)


def _open(root: Path, camera: str, group: Sequence[fmt.EpisodeRow]) -> tuple[LeRobotDataset | None, str]:
    try:
        # Times stand in for state and action: a fault in those says nothing about the images.
        data = LeRobotDataset(
            root,
            episodes=[episode.episode_index for episode in group],
            cameras={camera: _CAMERA},
            state_key=fmt.TIMESTAMP,
            action_key=fmt.TIMESTAMP,
            image_cache_mib=0,  # frames are read in their order
        )
    except (ValueError, OSError, ImportError) as error:
        return None, str(error)
    return data, ""


def _check_frames(
    data: LeRobotDataset,
    camera: str,
    sample: NDArray[np.int64] | None,
    sheet: set[tuple[int, int]],
    check: CameraCheck,
    findings: Findings,
    progress: Progress,
) -> None:
    """Decodes the frames of `sample` (by `index`; None: all) and of `sheet`."""
    frames = data.frames
    places = list(zip(frames.episode_index.tolist(), frames.frame_index.tolist(), strict=True))
    shown = {row for row, place in enumerate(places) if place in sheet}
    sampled = range(len(frames)) if sample is None else np.flatnonzero(np.isin(frames.index, sample)).tolist()
    wanted = sorted(shown | set(sampled))
    for start in range(0, len(wanted), _BLOCK):
        for row, image in _decode(data, camera, wanted[start : start + _BLOCK], check, findings):
            check.blank += bool((image.flatten(1).amax(1) == image.flatten(1).amin(1)).all())
            if row in shown:
                check.sheet[places[row]] = image.movedim(0, -1).numpy().copy()
        progress.at(f"decoded images of {camera}", check.checked, check.total)


def _decode(
    data: LeRobotDataset, camera: str, rows: Sequence[int], check: CameraCheck, findings: Findings
) -> Iterator[tuple[int, Tensor]]:
    """(row, uint8 [3, h, w]) of the images that decode. A block with a broken one is decoded image by image."""
    check.checked += len(rows)
    try:
        yield from zip(rows, data.batch(rows)[_CAMERA], strict=True)
        return
    except (ValueError, OSError):
        pass
    for row in rows:
        try:
            image = data.batch([row])[_CAMERA][0]
        except (ValueError, OSError) as error:
            check.broken += 1
            frame = f"frame {data.frames.frame_index[row]}: "
            place, _, what = str(error).rpartition(frame)  # the place goes into the finding's own fields
            file = Path(place.partition(": ")[0])
            known = file.relative_to(data.root).as_posix() if file.is_relative_to(data.root) else None
            findings.problem(frame + what, known, int(data.frames.episode_index[row]), camera)
        else:
            yield row, image
