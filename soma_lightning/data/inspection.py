"""What is in a LeRobot data set, and what is wrong with it?

`inspect_dataset` reads everything once (numbers twice) and lists every fault. The parts: `frame_scan` reads the
numbers, `statistics_check` compares the statistics, `image_checks` decodes images, `findings` says how faults are told.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from soma_lightning.contract import ACTION, STATE
from soma_lightning.data import lerobot_format as fmt
from soma_lightning.data import statistics_check as stats
from soma_lightning.data.findings import Finding, Findings
from soma_lightning.data.frame_scan import FrameScan, Progress
from soma_lightning.data.image_checks import CameraCheck, check_images
from soma_lightning.data.lerobot_metadata import load_episodes, load_tasks
from soma_lightning.data.totals import FloatArray, Histogram

#: An episode shorter than this share of the median, or of a single frame, is called very short.
SHORT_SHARE = 0.2


@dataclass(frozen=True)
class ColumnPicture:
    """What a column's histogram is drawn from. names: one a dimension. q01, q99: float64 [D], taken from `source`."""

    names: list[str]
    histogram: Histogram
    q01: FloatArray
    q99: FloatArray
    source: str


@dataclass(frozen=True)
class Inspection:
    """Summary (JSON-ready), findings, and what the pictures of a report are drawn from.

    lengths: frames of each episode. columns: of state and action, those that have values. cameras: by camera key.
    """

    root: Path
    summary: dict[str, Any]
    problems: list[Finding]
    warnings: list[Finding]
    lengths: list[int]
    columns: dict[str, ColumnPicture]
    cameras: dict[str, CameraCheck]

    def to_dict(self) -> dict[str, Any]:
        """What report.json holds."""
        return {
            "summary": self.summary,
            "problems": [finding.to_dict() for finding in self.problems],
            "warnings": [finding.to_dict() for finding in self.warnings],
        }


def inspect_dataset(
    root: str | Path,
    *,
    images: int | None = None,
    state_key: str = STATE,
    action_key: str = ACTION,
    report: Callable[[str], None] = print,
) -> Inspection:
    """Checks a data set and describes it.

    images: how many frames a camera are decoded, evenly spaced; None decodes all. state_key, action_key: columns that
    are described in detail. report: receives a line of progress every few seconds.

    Raises FileNotFoundError or DatasetFormatError (a ValueError) when the metadata cannot be read, so that there is
    nothing to check against, and ValueError for arguments that do not fit. Everything else becomes a finding.
    """
    root = Path(root)
    if images is not None and images < 0:
        raise ValueError(f"images={images} must not be negative; None decodes all")
    info = fmt.load_info(root)
    keys = (state_key, action_key)
    for argument, key in zip(("state_key", "action_key"), keys, strict=True):
        feature = info.features.get(key)
        if feature is None or feature.dtype not in fmt.NUMERIC_DTYPES or len(feature.shape) != 1:
            vectors = [k for k, f in info.features.items() if f.dtype in fmt.NUMERIC_DTYPES and len(f.shape) == 1]
            raise ValueError(f"{argument}='{key}' is no vector of numbers in '{root}'; it has {vectors}")
    tasks, episodes = load_tasks(root, info), load_episodes(root, info)

    findings, progress = Findings(), Progress(report)
    scan = FrameScan(root, info, episodes, len(tasks), keys, findings)
    scan.check(progress)
    histograms = scan.histograms(progress)
    stored = stats.check_stored(root, scan.features, scan.totals, histograms, findings)
    columns = {}
    for key, histogram in histograms.items():
        q01, q99, source = stats.quantile_range(stored.get(key, {}), histogram)
        columns[key] = ColumnPicture(dimension_names(info.features[key]), histogram, q01, q99, source)
    _warn(scan, columns, tasks, findings)
    cameras = check_images(root, info, episodes, scan.sound, images, findings, progress)
    summary = _summarize(root, info, scan, keys, tasks, cameras)
    summary["statistics"] = {key: sorted(stored.get(key, {})) for key in keys}
    lengths = [episode.length for episode in episodes]
    return Inspection(root, summary, findings.problems, findings.warnings, lengths, columns, cameras)


def dimension_names(feature: fmt.Feature) -> list[str]:
    """A name for each dimension: the data set's, flat or grouped ({"motors": [...]}), or its number."""
    names: Any = feature.names
    if isinstance(names, Mapping):
        names = [name for group in names.values() for name in (group if isinstance(group, list) else [group])]
    size = feature.shape[0]
    if isinstance(names, list) and len(names) == size and all(isinstance(name, str) for name in names):
        return names
    return [str(d) for d in range(size)]


def _warn(scan: FrameScan, columns: Mapping[str, ColumnPicture], tasks: Sequence[str], findings: Findings) -> None:
    action_key = scan.watched[1]
    for key, column in columns.items():
        totals = scan.totals[key]
        for d in stats.constant(totals):
            stays = f"{column.names[d]} (dimension {d}) stays at {totals.low[d]:.6g} in all frames"
            findings.warning(stays, None, None, key)
        stats.warn_of_outliers(key, column.names, totals, column.q01, column.q99, findings)
        if key == action_key:
            stats.warn_of_gripper(key, column.names, totals, findings)
    for group in scan.duplicates:
        same = ", ".join(map(str, group[1:]))
        findings.warning(f"has the same states and actions as episode {same}", None, group[0])
    median = float(np.median([episode.length for episode in scan.episodes]))
    for episode in scan.episodes:
        if episode.length < max(2, SHORT_SHARE * median):
            what = f"is very short: {episode.length} frames, the median is {median:g}"
            findings.warning(what, episode.data_file, episode.episode_index)
    for number in scan.unchanging:
        findings.warning("never changes", scan.episodes[number].data_file, number, action_key)
    for number, task in enumerate(tasks):
        if not scan.task_frames[number]:
            findings.warning(f"task {number} ('{task}') has no frame", fmt.TASKS_FILE)


def _summarize(
    root: Path,
    info: fmt.DatasetInfo,
    scan: FrameScan,
    keys: tuple[str, str],
    tasks: Sequence[str],
    cameras: Mapping[str, CameraCheck],
) -> dict[str, Any]:
    raw = json.loads((root / fmt.INFO_FILE).read_text(encoding="utf-8"))
    return {
        "root": str(root),
        "version": raw.get("codebase_version"),
        "robot": info.robot_type,
        "fps": info.fps,
        "episodes": info.total_episodes,
        "frames": info.total_frames,
        "hours": info.total_frames / info.fps / 3600,
        "bytes": sum(path.stat().st_size for path in root.rglob("*") if path.is_file()),
        "tasks": [
            {"task": task, "episodes": int(scan.task_episodes[i]), "frames": int(scan.task_frames[i])}
            for i, task in enumerate(tasks)
        ],
        "cameras": [
            {
                "key": key,
                "height": info.features[key].image_size[0],
                "width": info.features[key].image_size[1],
                "dtype": info.features[key].dtype,
                "codec": _codec(root, info, key),
                "frames": check.total,
                "decoded": check.checked,
                "broken": check.broken,
            }
            for key, check in cameras.items()
        ],
        "columns": {
            key: {
                "dtype": info.features[key].dtype,
                "size": info.features[key].shape[0],
                "names": dimension_names(info.features[key]),
                "constant": stats.constant(scan.totals[key]),
            }
            for key in keys
        },
        "other_columns": [key for key in info.features if key not in (*keys, *cameras, *fmt.BOOKKEEPING_DTYPES)],
    }


def _codec(root: Path, info: fmt.DatasetInfo, key: str) -> str:
    """A video's codec as the metadata say, an embedded image's format as its first frame says; "unknown" otherwise."""
    if key in info.video_keys:
        return str((info.features[key].video_info or {}).get("video.codec", "unknown"))
    try:
        path = min(root.glob("data/*/*.parquet"))
        first = next(pq.ParquetFile(path).iter_batches(batch_size=1, columns=[key]))
        with Image.open(io.BytesIO(first.column(key)[0].as_py()["bytes"])) as image:
            return str(image.format).lower()
    except (OSError, ValueError, TypeError, KeyError, StopIteration, pa.ArrowException):
        return "unknown"  # what is wrong with the file is among the findings
