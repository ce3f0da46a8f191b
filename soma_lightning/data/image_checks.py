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
    limit: int | None,
    findings: Findings,
    progress: Progress,
) -> dict[str, CameraCheck]:
    """Decodes the images of `episodes` (sound ones), camera by camera, and notes every one that fails.

    limit: frames a camera, evenly spaced, None for all; frames of the contact sheet are always among them, and 0
    decodes none.
    """
    checks = {key: CameraCheck(total=sum(e.length for e in episodes)) for key in (*info.image_keys, *info.video_keys)}
    if limit == 0 or not episodes:
        return checks
    wanted = _chosen_frames(checks, limit)
    sheet = _sheet_frames(episodes)
    for camera, check in checks.items():
        first = 0
        for group in _groups(episodes):
            length = sum(episode.length for episode in group)
            rows = wanted[(wanted >= first) & (wanted < first + length)] - first
            first += length
            _check_group(root, camera, group, rows, sheet, check, findings, progress)
        if check.blank:
            what = f"{check.blank} of {check.checked} decoded images are of a single colour"
            findings.warning(what, None, None, camera)
    return checks


def _chosen_frames(checks: dict[str, CameraCheck], limit: int | None) -> NDArray[np.int64]:
    total = next(iter(checks.values())).total if checks else 0
    count = total if limit is None else min(limit, total)
    return np.unique(np.linspace(0, max(total - 1, 0), count).round().astype(np.int64))


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


def _check_group(
    root: Path,
    camera: str,
    group: Sequence[fmt.EpisodeRow],
    rows: NDArray[np.int64],
    sheet: set[tuple[int, int]],
    check: CameraCheck,
    findings: Findings,
    progress: Progress,
) -> None:
    numbers = [episode.episode_index for episode in group]
    try:
        # Times stand in for state and action: a fault in those says nothing about the images.
        data = LeRobotDataset(
            root,
            episodes=numbers,
            cameras={camera: _CAMERA},
            state_key=fmt.TIMESTAMP,
            action_key=fmt.TIMESTAMP,
            image_cache_mib=0,  # frames are read in their order
        )
    except (ValueError, OSError, ImportError) as error:
        what = f"images of episodes {numbers[0]} to {numbers[-1]} were not checked: {error}"
        findings.problem(what, None, None, camera)
        return
    places = list(zip(data.frames.episode_index.tolist(), data.frames.frame_index.tolist(), strict=True))
    shown = {row for row, place in enumerate(places) if place in sheet}
    wanted = sorted(shown | set(rows.tolist()))
    for start in range(0, len(wanted), _BLOCK):
        block = wanted[start : start + _BLOCK]
        for row, image in _decode(data, camera, block, check, findings):
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
            file = data.frames.files[int(data.frames.location[row, 0])].relative_to(data.root).as_posix()
            what = frame + str(error).rpartition(frame)[2]  # the place is in the finding's own fields
            findings.problem(what, file, int(data.frames.episode_index[row]), camera)
        else:
            yield row, image
