"""`soma demos`: records a scripted expert's demonstrations as a LeRobot data set."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from jsonargparse import Namespace

from soma_lightning.cli.parser import CommandParser
from soma_lightning.data.lerobot_format import RECORDING_FILE
from soma_lightning.data.lerobot_writer import LeRobotWriter
from soma_lightning.envs.demos import (
    FPS,
    RecordingSummary,
    check_recording,
    demonstration_features,
    record_demonstrations,
)
from soma_lightning.envs.registry import EnvSpec
from soma_lightning.envs.somatable import TASKS


def build_parser() -> CommandParser:
    """The options of `soma demos`."""
    parser = CommandParser("demos", __doc__)
    parser.add_argument("--env", default="somatable", help="environment; somatable has experts")
    parser.add_tasks(f"one of {', '.join(TASKS)}", required=True)
    parser.add_argument("--episodes", type=int, required=True, help="successful demonstrations to record per task")
    parser.add_argument("--out", type=str, required=True, help="folder of the data set to be")
    parser.add_argument("--seed", type=int, default=0, help="another seed gives other init states and other noise")
    parser.add_argument("--noise", type=float, default=0.25, help="disturbance of the executed actions, action units")
    parser.add_argument("--workers", type=int, default=available_cpus(), help="simulator processes")
    parser.add_argument("--image_size", type=int, default=64, help="side of both images, pixels")
    parser.add_overwrite("replace a data set that is already there")
    return parser


def available_cpus() -> int:
    """Cores this process may use, at most 8: the writer in this process keeps up with no more."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return min(8, len(allowed))


def record(options: Namespace) -> RecordingSummary:
    """Records what `options` asks for. Raises ValueError, FileExistsError, RenderingUnavailableError, WorkerError."""
    spec = EnvSpec(options.env, {"image_size": options.image_size})
    check_recording(
        spec,
        options.task,
        episodes=options.episodes,
        seed=options.seed,
        noise=options.noise,
        workers=options.workers,
    )
    with LeRobotWriter(
        options.out,
        fps=FPS,
        features=demonstration_features(options.image_size),
        robot_type=options.env,
        overwrite=options.overwrite,
    ) as writer:
        summary = record_demonstrations(
            spec,
            options.task,
            episodes=options.episodes,
            writer=writer,
            seed=options.seed,
            noise=options.noise,
            workers=options.workers,
        )
        writer.write_side_file(Path(RECORDING_FILE).name, summary.to_dict())
    return summary


def main(argv: list[str]) -> int:
    """Runs `soma demos`. Returns 0, or 2 after printing one error; wrong options end with SystemExit(2)."""
    options = build_parser().parse_args(argv)
    try:
        summary = record(options)
    except (ValueError, OSError, ImportError, RuntimeError) as error:
        print(f"soma demos: error: {error}", file=sys.stderr)
        return 2
    for task in summary.tasks:
        print(f"{task.task}: the expert solved {task.success_rate:.0%} of {task.attempts} attempts")
    print(f"written: {Path(options.out)}, {summary.num_frames} frames")
    return 0
