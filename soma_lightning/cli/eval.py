"""`soma eval`: rolls a checkpoint out in an environment and reports success rates."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from soma_lightning import envs
from soma_lightning.cli.parser import CommandParser
from soma_lightning.envs.base import require_known
from soma_lightning.envs.rendering import RenderingUnavailableError
from soma_lightning.envs.worker import WorkerError
from soma_lightning.evaluation import (
    CONTACT_SHEET,
    RESULTS,
    SUCCESS_CHART,
    VIDEOS,
    EvaluationSettings,
    check_folder,
    evaluate,
)
from soma_lightning.models.registry import get_model, load_extensions


def evaluate_policy(
    policy: str,
    out: str,
    env: str = "somatable",
    tasks: list[str] | None = None,
    episodes: int = 100,
    first_init_state: int = 0,
    executed_steps: int | None = None,
    denoising_steps: int | None = None,
    seed: int = 0,
    recorded: int = 2,
    num_envs: int = 100,
    workers: int = 0,
    timeout_s: float | None = None,
    env_options: dict[str, Any] | None = None,
    model_type: str | None = None,
    device: str = "auto",
    overwrite: bool = False,
) -> dict[str, Any]:
    """Rolls a policy out and writes results.json, success.png, videos and a contact sheet.

    Args:
        policy: folder of the checkpoint (as `soma fit` or `save_pretrained` writes it).
        out: folder for the results; an interrupted evaluation goes on where it stopped.
        env: environment name.
        tasks: task names; all tasks of the environment when left out.
        episodes: episodes per task.
        first_init_state: index of the first initial state.
        executed_steps: actions executed per predicted chunk; the checkpoint's own when left out.
        denoising_steps: Euler steps of the flow; the checkpoint's own when left out.
        seed: seed of the policy's noise.
        recorded: episodes per task kept as video.
        num_envs: episodes that run side by side.
        workers: simulator processes; 0 simulates in this process.
        timeout_s: seconds after which a silent worker is given up, 60 when left out; only with workers.
        env_options: further arguments of the environment, e.g. {"image_size": 64}.
        model_type: registered model type; read from the checkpoint's config.json when left out.
        device: "auto", "cpu" or "cuda".
        overwrite: discard an earlier evaluation in `out`.
    """
    if not 0 <= workers <= num_envs or num_envs < 1:
        raise ValueError(f"num_envs={num_envs} must be at least 1, and workers={workers} must lie in 0..num_envs")
    if workers == 0 and timeout_s is not None:
        raise ValueError(f"timeout_s={timeout_s} has no effect without workers; leave it out, or set workers")
    target = pick_device(device)
    check_folder(Path(out))
    load_extensions()
    model_type = model_type or stored_type(Path(policy))
    options = env_options or {}
    seconds = 60.0 if timeout_s is None else timeout_s
    # The environments come first: they are made in seconds, a large policy is loaded in minutes.
    with envs.make_group(env, options, num_slots=num_envs, num_workers=workers, timeout_s=seconds) as group:
        for task in tasks or ():
            require_known("task", task, group.tasks)
        model: Any = get_model({"model_type": model_type, "model_path": policy})
        model.to(target).eval()
        config = model.config
        settings = EvaluationSettings(
            policy=policy,
            env=env,
            tasks=tuple(group.tasks if tasks is None else tasks),
            executed_steps=config.n_action_steps if executed_steps is None else executed_steps,
            denoising_steps=config.num_inference_steps if denoising_steps is None else denoising_steps,
            episodes=episodes,
            first_init_state=first_init_state,
            seed=seed,
            recorded=recorded,
            env_options=options,
        )
        results = evaluate(model, group, settings, Path(out), overwrite=overwrite, announce=print_plan)
    print_results(results, Path(out))
    return results


def stored_type(policy: Path) -> str:
    """The model type that a checkpoint folder names in its config.json."""
    config = policy / "config.json"
    if not config.is_file():
        raise FileNotFoundError(
            f"{policy} holds no config.json, so it is no checkpoint; pass the `policy` folder that soma fit wrote"
        )
    try:
        stored = json.loads(config.read_text())
    except ValueError as error:
        raise ValueError(f"{config} is no valid JSON: {error}") from error
    if not isinstance(stored, dict):
        raise ValueError(f"{config} must hold a JSON object, not {type(stored).__name__}")
    return str(stored.get("type", "pi05"))


def pick_device(device: str) -> torch.device:
    """Raises ValueError for a device that torch does not know or does not see."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"device={device!r}, but torch sees no CUDA device; use device=cpu")
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device={device!r} is unknown; use auto, cpu or cuda") from error


def print_plan(report: dict[str, Any]) -> None:
    """The run report in short; all of it goes into run_report.json."""
    settings, policy = report["settings"], report["policy"]
    print("SomaSpeed evaluation")
    for name, value in (
        ("policy", f"{settings['policy']} (backbone {policy['backbone_hash'][:12]}, {policy.get('dtype', '')})"),
        ("statistics", policy.get("statistics", "-")),
        ("steps", f"{settings['executed_steps']} executed of {policy.get('chunk_size', '?')} per look"),
        ("flow", f"{settings['denoising_steps']} Euler steps, seed {settings['seed']}"),
        ("attention", report["attention"]),
        ("states", ", ".join(f"{task} {first}..{last}" for task, (first, last) in report["init_states"].items())),
    ):
        print(f"  {name + ':':<12}{value}")


def print_results(results: dict[str, Any], out: Path) -> None:
    print(f"{'task':<16}{'success':>10}{'rate':>8}   95 % interval")
    for name, task in results["tasks"].items():
        low, high = task["wilson95"]
        count = f"{task['successes']}/{task['episodes']}"
        print(f"{name:<16}{count:>10}{task['rate']:>8.2f}   {low:.3f} to {high:.3f}")
    written = (RESULTS, SUCCESS_CHART, CONTACT_SHEET, VIDEOS)
    print(f"written: {', '.join(str(out / name) for name in written if (out / name).exists())}")


def build_parser() -> CommandParser:
    """The options of `soma eval`: the arguments of `evaluate_policy`."""
    parser = CommandParser("eval", __doc__)
    parser.add_function_arguments(evaluate_policy, skip={"tasks", "overwrite"})
    parser.add_tasks("task of the environment; all of them when left out")
    parser.add_overwrite("discard an earlier evaluation in --out")
    return parser


def main(argv: list[str]) -> int:
    """Returns the exit status: 2 for a wrong command line or bad input."""
    options = build_parser().parse_args(argv).as_dict()
    try:
        evaluate_policy(tasks=options.pop("task"), **options)
    except WorkerError as error:
        print(
            f"error: {error}\nFinished episodes are kept: the same command goes on where it stopped.", file=sys.stderr
        )
        return 2
    except (ValueError, OSError, ImportError, RenderingUnavailableError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
