"""Every picture the project draws: success bars, learning curves, data sets, contact sheets, rollout videos."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

from soma_lightning.imports import require_package

mpl.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402  (the back end must be chosen first)
from matplotlib.ticker import LogLocator, NullFormatter  # noqa: E402

COLOR, SECOND_COLOR = "#2a6f97", "#c8553d"


def _save(figure: Any, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, bbox_inches="tight")
    plt.close(figure)
    return path


def success_bars(rows: Sequence[tuple[str, int, int, tuple[float, float]]], path: Path, title: str) -> Path:
    """rows: (label, successes, episodes, (low, high) of the 95 % interval); rates are drawn in percent."""
    figure, axes = plt.subplots(figsize=(max(4.0, 1.5 * len(rows) + 1.5), 3.6))
    for index, (_, successes, episodes, (low, high)) in enumerate(rows):
        rate = successes / episodes
        axes.bar(index, 100 * rate, color=COLOR, width=0.6)
        axes.errorbar(index, 100 * rate, [[100 * (rate - low)], [100 * (high - rate)]], color="black", capsize=4)
        axes.text(index + 0.06, 100 * rate + 1.5, f"{successes}/{episodes}", ha="left", fontsize=9)
    axes.set_xticks(range(len(rows)), [label for label, *_ in rows], rotation=15 if len(rows) > 3 else 0)
    axes.set_ylim(0, 112)
    axes.set_ylabel("success rate (%), 95 % Wilson interval")
    axes.set_title(title)
    axes.spines[["top", "right"]].set_visible(False)
    return _save(figure, path)


def read_curve(metrics_csv: Path, name: str) -> tuple[np.ndarray, np.ndarray]:
    """(steps, values) of one column of Lightning's metrics.csv; rows without a value are left out."""
    with open(metrics_csv, newline="") as file:
        points = [(int(row["step"]), float(row[name])) for row in csv.DictReader(file) if row.get(name)]
    steps, values = zip(*points, strict=True) if points else ((), ())
    return np.asarray(steps), np.asarray(values)


def learning_curve(metrics_csv: Path, path: Path) -> Path:
    """Draws train and validation loss, and the sampled-action error when it was logged, against optimizer steps."""
    figure, axes = plt.subplots(figsize=(6.4, 3.8))
    for name, color, style in (("train_loss", "#9fb8c8", "-"), ("val_loss", COLOR, "o-")):
        steps, values = read_curve(metrics_csv, name)
        if len(steps):
            axes.plot(steps, values, style, color=color, label=name, markersize=4)
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("flow-matching loss")
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
    axes.yaxis.set_major_formatter("{x:g}")  # 0.3 instead of 3 x 10^-1
    axes.yaxis.set_minor_formatter(NullFormatter())
    lines = list(axes.get_lines())
    steps, errors = read_curve(metrics_csv, "val_action_error")
    if len(steps):
        right = axes.twinx()
        lines += right.plot(steps, errors, "s--", color=SECOND_COLOR, label="val_action_error", markersize=4)
        right.set_ylabel("mean absolute action error")
        right.set_ylim(bottom=0)
    labels = [str(line.get_label()) for line in lines]
    axes.legend(lines, labels, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)  # off the curves
    return _save(figure, path)


def reward_curve(history: Sequence[Mapping[str, float]], path: Path) -> Path:
    """Success rates of a reinforcement learning run against the updates that its policy has had.

    history: rows with "iteration" (from 1), and "rollout_success" (exploring), "success", "success_low" and
    "success_high" (held out, after it, with its 95 % interval) where they were measured; the same with "start_" before
    the first update.
    """
    figure, axes = plt.subplots(figsize=(6.4, 3.8))
    explored = [(row["iteration"], row["rollout_success"]) for row in history if "rollout_success" in row]
    if explored:
        axes.plot(*zip(*explored, strict=True), "-", color="#9fb8c8", label="rollouts, exploring")
    names = ("success", "success_low", "success_high")
    held_out = [(0, *(row[f"start_{name}"] for name in names)) for row in history if "start_success" in row]
    held_out += [(row["iteration"], *(row[name] for name in names)) for row in history if "success" in row]
    if held_out:
        updates, rates, low, high = zip(*held_out, strict=True)
        axes.plot(updates, rates, "o-", color=COLOR, label="held out", markersize=4)
        axes.fill_between(updates, low, high, color=COLOR, alpha=0.15, linewidth=0, label="95 % interval")
    axes.set_xlabel("updates")
    axes.set_ylabel("success rate")
    axes.set_ylim(0, 1)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_lines():
        axes.legend(frameon=False, loc="lower right")
    return _save(figure, path)


def contact_sheet(rollouts: Sequence[tuple[str, Sequence[np.ndarray]]], path: Path, columns: int = 8) -> Path:
    """One row a rollout: at most `columns` images (uint8 [h, w, 3]) from first to last, under the rollout's label."""
    figure = plt.figure(figsize=(1.3 * columns, 1.75 * len(rollouts)), layout="constrained")
    rows = figure.subfigures(len(rollouts), 1, squeeze=False)[:, 0]
    for row, (label, frames) in zip(rows, rollouts, strict=True):
        row.suptitle(label, fontsize=8, x=0.01, ha="left")
        picks = np.unique(np.linspace(0, len(frames) - 1, columns).round().astype(int))
        for axes, index in zip_longest(row.subplots(1, columns), picks):
            axes.set_axis_off()
            if index is not None:
                axes.imshow(frames[index])
                axes.set_title(f"image {index + 1} of {len(frames)}", fontsize=6, loc="left")
    return _save(figure, path)


def episode_lengths(lengths: Sequence[int], path: Path) -> Path:
    """How many episodes have which length. lengths: frames of each episode."""
    figure, axes = plt.subplots(figsize=(6.4, 2.8))
    axes.hist(lengths, bins=min(50, max(lengths) - min(lengths) + 1), color=COLOR)
    axes.axvline(float(np.median(lengths)), color=SECOND_COLOR, linestyle="--", label=f"median {np.median(lengths):g}")
    axes.set_xlabel("frames")
    axes.set_ylabel("episodes")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return _save(figure, path)


def histograms(
    names: Sequence[str],
    low: np.ndarray,
    high: np.ndarray,
    counts: np.ndarray,
    marks: tuple[np.ndarray, np.ndarray],
    path: Path,
    bars: int = 80,
) -> Path:
    """One panel a dimension, on a logarithmic scale, so that single frames far out can be seen.

    counts: [D, a multiple of `bars`], frames in bins of equal width between low and high [D]. marks: two values a
    dimension, [D] each, drawn as dashed lines.
    """
    columns = min(4, len(names))
    rows = -(-len(names) // columns)
    figure, grid = plt.subplots(rows, columns, figsize=(3.2 * columns, 2.1 * rows), squeeze=False, layout="constrained")
    for d, axes in enumerate(grid.flat):
        if d >= len(names):
            axes.set_axis_off()
            continue
        heights, edges = counts[d].reshape(bars, -1).sum(axis=1), np.linspace(low[d], high[d], bars + 1)
        if low[d] == high[d]:  # one bar in the middle
            heights, edges = np.roll(heights, bars // 2), low[d] + (np.arange(bars + 1) - bars // 2 - 0.5) / bars
        axes.stairs(heights, edges, fill=True, color=COLOR)
        for mark in marks:
            axes.axvline(mark[d], color=SECOND_COLOR, linestyle="--", linewidth=1)
        axes.set_yscale("symlog", linthresh=1)  # empty bins stay at 0
        axes.set_ylim(bottom=0)
        axes.set_title(names[d], fontsize=8, loc="left")
        axes.tick_params(labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
    return _save(figure, path)


def camera_sheet(frames: Mapping[tuple[int, int], np.ndarray], path: Path) -> Path:
    """One row an episode with its frames from left to right. frames: {(episode, frame): uint8 [h, w, 3]}."""
    episodes: dict[int, list[int]] = {}
    for episode, frame in sorted(frames):
        episodes.setdefault(episode, []).append(frame)
    columns = max(map(len, episodes.values()))
    figure, grid = plt.subplots(
        len(episodes), columns, figsize=(2.2 * columns, 2.2 * len(episodes)), squeeze=False, layout="constrained"
    )
    for axes in grid.flat:
        axes.set_axis_off()
    for row, (episode, numbers) in enumerate(episodes.items()):
        for axes, frame in zip(grid[row], numbers, strict=False):
            axes.imshow(frames[episode, frame])
            axes.set_title(f"episode {episode}, frame {frame}", fontsize=7, loc="left")
    return _save(figure, path)


def open_loop(
    recorded: np.ndarray, looks: np.ndarray, chunks: np.ndarray, labels: Sequence[str], title: str, path: Path
) -> Path:
    """Recorded actions over time and every predicted chunk from the frame where it starts, one panel a dimension.

    recorded: [T, A]. looks: frames where chunks start [L]. chunks: [L, H, A]. labels: A. What a chunk predicts past the
    episode's end is left out.
    """
    columns = 1 if len(labels) == 1 else 2
    rows = -(-len(labels) // columns)
    size = (7.0 * columns, 1.7 * rows + 0.8)
    figure, grid = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    for d, axes in enumerate(grid.flat):
        if d >= len(labels):
            axes.set_axis_off()
            continue
        axes.plot(recorded[:, d], color="black", linewidth=1.2, label="recorded")
        for number, (look, chunk) in enumerate(zip(looks, chunks, strict=True)):
            values = chunk[: len(recorded) - look, d]
            label = None if number else "predicted"
            axes.plot(look + np.arange(len(values)), values, color=SECOND_COLOR, linewidth=1, alpha=0.8, label=label)
            axes.plot(look, values[0], ".", color=SECOND_COLOR, markersize=5)
        axes.set_title(labels[d], fontsize=8, loc="left")
        axes.tick_params(labelsize=7)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in grid[-1]:
        axes.set_xlabel("frame", fontsize=8)
    figure.suptitle(title, fontsize=9)
    figure.legend(*grid[0, 0].get_legend_handles_labels(), loc="outside upper right", frameon=False, fontsize=8)
    return _save(figure, path)


def write_video(frames: Sequence[np.ndarray], path: Path, fps: int) -> Path:
    """Writes uint8 [h, w, 3] frames as H.264 MP4 (yuv420p, so that every player opens it).

    Small frames are enlarged by whole factors to about 256 pixels. Raises ImportError without PyAV.
    """
    require_package("av", purpose="write a rollout video")
    import av

    path.parent.mkdir(parents=True, exist_ok=True)
    factor = max(1, 256 // frames[0].shape[0])
    partial = path.with_suffix(".partial")
    with av.open(str(partial), "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=fps)
        height, width = (factor * size // 2 * 2 for size in frames[0].shape[:2])
        stream.height, stream.width, stream.pix_fmt = height, width, "yuv420p"
        for frame in frames:
            large = np.repeat(np.repeat(frame, factor, 0), factor, 1)[:height, :width]
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(large), format="rgb24")))
        container.mux(stream.encode())
    return partial.replace(path)
