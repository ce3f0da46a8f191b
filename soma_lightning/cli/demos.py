"""`soma demos`: records a scripted expert's demonstrations as a LeRobot data set."""

from __future__ import annotations

import shutil
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from jsonargparse import ActionYesNo, Namespace

from soma_lightning.cli.machine import usable_cores
from soma_lightning.cli.parser import CommandParser
from soma_lightning.data.lerobot_format import RECORDING_FILE
from soma_lightning.data.lerobot_writer import LeRobotWriter
from soma_lightning.envs.attempts import AttemptStore
from soma_lightning.envs.demos import (
    FPS,
    TIMEOUT_S,
    RecordingSummary,
    check_recording,
    demonstration_features,
    record_demonstrations,
    recording_identity,
)
from soma_lightning.envs.registry import EXPERTS, EnvSpec
from soma_lightning.envs.somatable import TASKS
from soma_lightning.envs.worker import WorkerError
from soma_lightning.locks import sole_writer


def build_parser() -> CommandParser:
    """The options of `soma demos`."""
    parser = CommandParser("demos", __doc__)
    parser.add_argument("--env", default="somatable", help=f"environment: {' or '.join(EXPERTS)}")
    parser.add_argument(
        "--env_options",
        type=dict[str, Any],
        default={},
        help='further arguments of the environment, e.g. {"suite": "libero_goal"}',
    )
    parser.add_tasks(f"task with an expert; for somatable: {', '.join(TASKS)}", required=True)
    parser.add_argument("--episodes", type=int, required=True, help="successful demonstrations to record per task")
    parser.add_argument("--out", type=str, required=True, help="folder of the data set to be")
    parser.add_argument("--seed", type=int, default=0, help="another seed gives other init states and other noise")
    parser.add_argument(
        "--noise", type=float, help="disturbance of the executed actions, action units; the expert's own when left out"
    )
    parser.add_argument("--workers", type=int, default=available_cpus(), help="simulator processes")
    parser.add_argument(
        "--timeout_s", type=float, help=f"the longest one attempt may take in a process; {TIMEOUT_S:g} when left out"
    )
    parser.add_argument("--image_size", type=int, default=64, help="side of both images, pixels")
    parser.add_argument(
        "--videos",
        action=ActionYesNo,
        nargs="?",
        default=False,
        help="store the cameras as H.264 video instead of PNG (for 224 pixels and more; needs PyAV)",
    )
    parser.add_overwrite("replace a data set that is already there")
    return parser


def available_cpus() -> int:
    """Cores this process may use, at most 8: the writer in this process keeps up with no more."""
    return min(8, usable_cores())


def open_store(out: Path, identity: dict[str, Any], *, overwrite: bool) -> AttemptStore:
    """Attempts of an earlier run that was stopped, or none. ValueError for those of other settings."""
    target = out.resolve()
    folder = target.with_name(f".{target.name}.attempts")
    try:
        return AttemptStore(folder, identity)
    except ValueError:
        if not overwrite:
            raise
    shutil.rmtree(folder)
    return AttemptStore(folder, identity)


def record(options: Namespace) -> RecordingSummary:
    """Records what `options` asks for. Raises ValueError, FileExistsError, RenderingUnavailableError, WorkerError."""
    if "image_size" in options.env_options:
        raise ValueError("--env_options.image_size: both images have one size, --image_size")
    spec = EnvSpec(options.env, {**options.env_options, "image_size": options.image_size})
    conditions = {"seed": options.seed, "noise": options.noise}
    check_recording(
        spec,
        options.task,
        episodes=options.episodes,
        workers=options.workers,
        timeout_s=options.timeout_s,
        **conditions,
    )
    busy = f"another soma demos records into {options.out}; wait for it, or choose another --out"
    with ExitStack() as held:
        try:
            held.enter_context(sole_writer(Path(options.out), busy))
        except OSError as error:
            raise OSError(f"the data set '{options.out}' cannot be written: {error}") from error
        return _record(options, spec, conditions)


def _record(options: Namespace, spec: EnvSpec, conditions: dict[str, Any]) -> RecordingSummary:
    store = open_store(Path(options.out), recording_identity(spec, **conditions), overwrite=options.overwrite)
    with LeRobotWriter(
        options.out,
        fps=FPS,
        features=demonstration_features(options.image_size, videos=options.videos),
        robot_type=options.env,
        overwrite=options.overwrite,
    ) as writer:
        summary = record_demonstrations(
            spec,
            options.task,
            episodes=options.episodes,
            writer=writer,
            workers=options.workers,
            timeout_s=options.timeout_s,
            store=store,
            **conditions,
        )
        writer.write_side_file(Path(RECORDING_FILE).name, summary.to_dict())
    store.remove()
    return summary


def main(argv: list[str]) -> int:
    """Runs `soma demos`. Returns 0, or 2 after printing one error; wrong options end with SystemExit(2)."""
    options = build_parser().parse_args(argv)
    try:
        summary = record(options)
    except WorkerError as error:
        kept = "Finished attempts are kept: the same command goes on where it stopped."
        print(f"soma demos: error: {error}\n{kept}", file=sys.stderr)
        return 2
    except (ValueError, OSError, ImportError, RuntimeError) as error:
        print(f"soma demos: error: {error}", file=sys.stderr)
        return 2
    for task in summary.tasks:
        print(f"{task.task}: the expert solved {task.success_rate:.0%} of {task.attempts} attempts")
    print(f"written: {Path(options.out)}, {summary.num_frames} frames")
    return 0
