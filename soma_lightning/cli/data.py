"""`soma data`: says what is in a data set, checks all of it, and draws it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from soma_lightning.cli.data_report import write_report
from soma_lightning.cli.parser import CommandParser
from soma_lightning.contract import ACTION, STATE
from soma_lightning.data.inspection import Inspection, inspect_dataset


def build_parser() -> CommandParser:
    """The options of `soma data`."""
    parser = CommandParser("data", __doc__)
    parser.add_argument("dataset", type=str, metavar="DIR", help="folder of a LeRobot data set")
    parser.add_argument("--out", type=str, help="folder for report.json, index.html and pictures; none without it")
    parser.add_argument(
        "--images", type=str, default="all", help="frames a camera to decode, evenly spaced: 'all', or how many"
    )
    parser.add_argument("--state_key", type=str, default=STATE, help="column that is described as the state")
    parser.add_argument("--action_key", type=str, default=ACTION, help="column that is described as the action")
    return parser


def images_to_decode(value: str) -> int | None:
    """None for "all". Raises ValueError for what is neither that nor a number of frames."""
    if value == "all":
        return None
    if not value.isdecimal():
        raise ValueError(f"--images={value!r} must be 'all' or a number of frames, e.g. --images 500")
    return int(value)


def check_out(out: Path, root: Path) -> None:
    """Makes the folder of the report. ValueError when it lies in the data set, which stays as it is."""
    if root.resolve() in (out.resolve(), *out.resolve().parents):
        raise ValueError(f"--out={out} lies in the data set; choose a folder outside of it")
    out.mkdir(parents=True, exist_ok=True)


def print_summary(inspection: Inspection) -> None:
    summary = inspection.summary
    for name, value in summary_lines(summary):
        print(f"{name + ':':<12}{value}")
    for title, findings in (("problems", inspection.problems), ("warnings", inspection.warnings)):
        print(f"{title + ':':<12}{len(findings) or 'none'}")
        for finding in findings:
            print(f"  {finding}")


def _duration(hours: float) -> str:
    if hours >= 1:
        return f"{hours:.2f} hours"
    return f"{60 * hours:.1f} minutes" if 60 * hours >= 1 else f"{3600 * hours:.1f} seconds"


def summary_lines(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """The summary as (name, text), in the order to be read."""
    lines = [
        ("data set", f"{summary['root']}, LeRobot {summary['version']}, {summary['bytes'] / 1e6:.1f} MB"),
        ("robot", f"{summary['robot'] or 'not named'}, {summary['fps']} frames per second"),
        ("size", f"{summary['episodes']} episodes, {summary['frames']} frames, {_duration(summary['hours'])}"),
    ]
    for task in summary["tasks"]:
        lines.append(("task", f"{task['task']} ({task['episodes']} episodes, {task['frames']} frames)"))
    for camera in summary["cameras"]:
        size = f"{camera['height']}x{camera['width']} {camera['dtype']}, {camera['codec']}"
        decoded = f"decoded {camera['decoded']} of {camera['frames']} frames, {camera['broken']} broken"
        lines.append(("camera", f"{camera['key']}, {size}; {decoded}"))
    for key, column in summary["columns"].items():
        constant = f"; constant: {', '.join(column['names'][d] for d in column['constant'])}" * bool(column["constant"])
        names = ", ".join(column["names"])
        lines.append(("column", f"{key}, {column['dtype']} [{column['size']}]: {names}{constant}"))
        lines.append(("statistics", f"{key}: {', '.join(summary['statistics'][key]) or 'none'}"))
    if summary["other_columns"]:
        lines.append(("also", ", ".join(summary["other_columns"])))
    return lines


def main(argv: list[str]) -> int:
    """Returns the exit status: 1 when there are problems, 2 for a wrong command line or unreadable metadata."""
    options = build_parser().parse_args(argv)
    out = None if options.out is None else Path(options.out)
    try:
        images = images_to_decode(options.images)
        if out is not None:
            check_out(out, Path(options.dataset))
        inspection = inspect_dataset(
            options.dataset,
            images=images,
            state_key=options.state_key,
            action_key=options.action_key,
            report=lambda line: print(line, file=sys.stderr),
        )
        print_summary(inspection)
        if out is not None:
            page = write_report(inspection, summary_lines(inspection.summary), out)
            print(f"written: {page} and what it shows, {out / 'report.json'}")
    except (ValueError, OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 1 if inspection.problems else 0
