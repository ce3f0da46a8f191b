"""`soma eval`: rolls a checkpoint out in an environment and reports success rates."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from soma_lightning import envs
from soma_lightning.cli.checkpoint import check_policy_options, load_policy, stored_type
from soma_lightning.cli.machine import available_memory_gb, usable_cores
from soma_lightning.cli.parser import CommandParser
from soma_lightning.envs.base import EnvGroup, require_known
from soma_lightning.envs.registry import effective_settings, environment_class
from soma_lightning.envs.rendering import RenderingUnavailableError
from soma_lightning.envs.worker import WorkerError
from soma_lightning.evaluation.folder import CONTACT_SHEET, RESULTS, SEEDS, SUCCESS_CHART, VIDEOS, check_folder
from soma_lightning.evaluation.protocol import find_protocol
from soma_lightning.evaluation.results import table
from soma_lightning.evaluation.run import evaluate, evaluate_seeds
from soma_lightning.evaluation.settings import EvaluationSettings, Until
from soma_lightning.models.registry import load_extensions, pick_device


def evaluate_policy(
    policy: str,
    out: str,
    env: str | None = None,
    tasks: list[str] | None = None,
    protocol: str | None = None,
    episodes: int | None = None,
    first_init_state: int = 0,
    executed_steps: int | None = None,
    denoising_steps: int | None = None,
    seed: int = 0,
    seeds: list[int] | None = None,
    until: Until = "success",
    blind: bool = False,
    recorded: int = 1,
    num_envs: int | None = None,
    workers: int | None = None,
    timeout_s: float | None = None,
    env_options: dict[str, Any] | None = None,
    model_type: str | None = None,
    policy_options: dict[str, Any] | None = None,
    device: str = "auto",
    overwrite: bool = False,
) -> dict[str, Any]:
    """Rolls a policy out and writes results.json, success.png, videos and a contact sheet.

    Args:
        policy: folder of the checkpoint (as `soma fit` or `save_pretrained` writes it).
        out: folder for the results; an interrupted evaluation goes on where it stopped.
        env: environment name; somatable when left out, libero with a protocol.
        tasks: task names; all tasks of the environment when left out.
        protocol: a LIBERO suite; results say whether all its tasks and initial states were run, or what was left out.
        episodes: episodes per task; when left out, one for each initial state, or 100 where they have no end.
        first_init_state: index of the first initial state.
        executed_steps: actions executed per predicted chunk; the checkpoint's own when left out.
        denoising_steps: Euler steps of the flow; the checkpoint's own when left out.
        seed: seed of the policy's noise.
        seeds: several of them, e.g. [0, 1, 2]: one evaluation each in out/seed_N, mean and deviation in seeds.json.
        until: "success" ends an episode at its first success; "limit" goes on, to measure success at the end.
        blind: show the policy black images, as a control.
        recorded: successes and failures per task kept as video, those of the lowest initial states.
        num_envs: episodes that run side by side; as many as cores and memory allow when left out.
        workers: simulator processes; 0 simulates in this process; what suits the environment when left out.
        timeout_s: seconds after which a silent worker is given up, 180 when left out; only with workers.
        env_options: further arguments of the environment, e.g. {"image_size": 64}.
        model_type: registered model type; read from the checkpoint's config.json when left out.
        policy_options: how the checkpoint is loaded, e.g. {"cuda_graphs": true} (the entries of `get_model`).
        device: "auto", "cpu" or "cuda".
        overwrite: discard an earlier evaluation in `out`.
    """
    env = env or ("somatable" if protocol is None else "libero")
    found = find_protocol(env, protocol)
    options = options_until(env, env_options or {}, until)
    options = options if found is None else found.env_options(options)
    num_envs, workers = side_by_side(env, num_envs, workers)
    if workers == 0 and timeout_s is not None:
        raise ValueError(f"timeout_s={timeout_s} has no effect without workers; leave it out, or set workers")
    if seeds is not None and seed:
        raise ValueError(f"seed={seed} and seeds={seeds} exclude each other; leave one out")
    check_policy_options(policy_options)
    target = pick_device(device)
    check_folder(Path(out))
    load_extensions()
    model_type = model_type or stored_type(Path(policy))
    seconds = 180.0 if timeout_s is None else timeout_s  # LIBERO builds simulators in resets
    # The environments come first: they are made in seconds, a large policy is loaded in minutes.
    with envs.make_group(env, options, num_slots=num_envs, num_workers=workers, timeout_s=seconds) as group:
        for task in tasks or ():
            require_known("task", task, group.tasks)
        model = load_policy(policy, model_type, target, policy_options)
        config = model.config
        names = tuple(group.tasks if tasks is None else tasks)
        settings = EvaluationSettings(
            policy=policy,
            env=env,
            tasks=names,
            executed_steps=config.n_action_steps if executed_steps is None else executed_steps,
            denoising_steps=config.num_inference_steps if denoising_steps is None else denoising_steps,
            episodes=all_episodes(group, names, first_init_state) if episodes is None else episodes,
            first_init_state=first_init_state,
            seed=seed,
            until=until,
            blind=blind,
            recorded=recorded,
            env_options=effective_settings(env, options),
            protocol=protocol,
            policy_options=policy_options or {},
        )
        more: dict[str, Any] = {"overwrite": overwrite, "announce": print_plan}
        if seeds is not None:
            summary = evaluate_seeds(model, group, settings, seeds, Path(out), **more)
            print_seeds(summary, Path(out))
            return summary
        results = evaluate(model, group, settings, Path(out), **more)
    print_results(results, Path(out))
    return results


def options_until(env: str, options: dict[str, Any], until: Until) -> dict[str, Any]:
    """The environment's options with what `until` asks for. ValueError when the environment cannot do it."""
    if "end_on_success" in options:
        raise ValueError("env_options.end_on_success is set by until=success or until=limit; leave it out")
    if until == "success":
        return options
    if "end_on_success" not in effective_settings(env, {}):
        raise ValueError(f"until=limit needs an environment with the setting end_on_success; '{env}' has none")
    return {**options, "end_on_success": False}


def side_by_side(env: str, num_envs: int | None, workers: int | None) -> tuple[int, int]:
    """Slots and worker processes: what was asked for, and what suits environment and machine where nothing was."""
    memory_gb = environment_class(env).process_memory_gb
    if num_envs is None:
        num_envs = 100
        if memory_gb:
            num_envs = max(1, min(usable_cores(), int(available_memory_gb() / memory_gb)))
    if workers is None:
        workers = num_envs if memory_gb else 0
    if not 0 <= workers <= num_envs or num_envs < 1:
        raise ValueError(f"num_envs={num_envs} must be at least 1, and workers={workers} must lie in 0..num_envs")
    return num_envs, workers


def all_episodes(group: EnvGroup, tasks: tuple[str, ...], first_init_state: int) -> int:
    """One for each initial state of the task with the fewest; 100 where they have no end."""
    numbers = [number for task in tasks if (number := group.tasks[task].num_init_states) is not None]
    return max(1, min(numbers) - first_init_state) if numbers else 100


def print_plan(report: dict[str, Any]) -> None:
    """The run report in short; all of it goes into run_report.json."""
    settings, policy = report["settings"], report["policy"]
    training, limits = policy["training"] or {}, sorted(set(report["step_limits"].values()))
    states = ", ".join(f"{task} {first}..{last}" for task, (first, last) in report["init_states"].items())
    print("SomaSpeed evaluation")
    for name, value in (
        ("policy", f"{settings['policy']} (backbone {policy['backbone_hash'][:12]}, {policy.get('dtype', '')})"),
        ("trained", f"{training['step']} steps" if "step" in training else "-"),
        ("statistics", policy.get("statistics", "-")),
        ("protocol", "-" if report["protocol"] is None else report["protocol"]["statement"]),
        ("steps", f"{settings['executed_steps']} executed of {policy.get('chunk_size', '?')} per look"),
        ("limits", f"{', '.join(map(str, limits))} steps, until {settings['until']}"),
        ("flow", f"{settings['denoising_steps']} Euler steps, seed {settings['seed']}"),
        ("images", "black (blind)" if settings["blind"] else "as the environment draws them"),
        ("attention", report["attention"]),
        ("simulator", ", ".join(f"{name} {value}" for name, value in report["simulator"].items()) or "-"),
        ("machine", f"{report['machine']['device']}, {report['machine']['slots']} slot(s)"),
        ("states", states),
    ):
        print(f"  {name + ':':<12}{value}")


def print_results(results: dict[str, Any], out: Path) -> None:
    print(table(results))
    if results["protocol"] is not None:
        print(f"protocol {results['protocol']['statement']}")
    if "success_at_end_note" in results["overall"]:
        print(f"success at end: {results['overall']['success_at_end_note']}")
    written = (RESULTS, SUCCESS_CHART, CONTACT_SHEET, VIDEOS)
    print(f"written: {', '.join(str(out / name) for name in written if (out / name).exists())}")


def print_seeds(summary: dict[str, Any], out: Path) -> None:
    print(f"rates over the seeds {summary['seeds']}")
    for name, row in {**summary["tasks"], "average over tasks": summary["mean_of_tasks"]}.items():
        rates = ", ".join(f"{rate:.3f}" for rate in row["rates"])
        print(f"{name}: {row['mean']:.3f} +- {row['std']:.3f} ({rates})")
    if summary["protocol"] is not None:
        print(f"protocol {summary['protocol']['statement']}")
    print(f"written: {out / SEEDS}, {', '.join(str(out / run) for run in summary['runs'])}")


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
        kept = "\nFinished episodes are kept: the same command goes on where it stopped."
        print(f"error: {error}{kept * any(error.episodes.values())}", file=sys.stderr)
        return 2
    except (ValueError, OSError, ImportError, RenderingUnavailableError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
