"""`soma ppo`: improves a checkpoint by Flow-SDE PPO in an environment."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jsonargparse import ActionConfigFile
from lightning.fabric import Fabric
from lightning.fabric.loggers import CSVLogger, Logger, TensorBoardLogger

from soma_lightning.cli.checkpoint import stored_type
from soma_lightning.cli.fit import resolve_configs
from soma_lightning.cli.parser import CommandParser, explain
from soma_lightning.contract import TRAINING_FILE
from soma_lightning.envs.registry import make_group
from soma_lightning.envs.rendering import RenderingUnavailableError
from soma_lightning.envs.worker import WorkerError
from soma_lightning.evaluation.settings import EvaluationSettings
from soma_lightning.imports import is_available
from soma_lightning.layout.full_state import is_sharded
from soma_lightning.models.flow_sde import FlowSDE
from soma_lightning.models.registry import load_extensions
from soma_lightning.optim.masters import has_masters
from soma_lightning.rl.loop import Evaluate, LoopSettings, PPOResult, train_ppo
from soma_lightning.rl.outputs import CURVE, POLICY, RESULTS, STATE, EvaluationPlan, Evaluator, RunFolder
from soma_lightning.rl.ppo import PPOConfig
from soma_lightning.rl.rollout import RolloutSettings

STRATEGIES = ("somaspeed", "somaspeed_hsdp", "somaspeed_replicate")


def improve_policy(
    policy: str,
    out: str,
    rollout: RolloutSettings,
    loop: LoopSettings,
    ppo: PPOConfig | None = None,
    flow: FlowSDE | None = None,
    evaluation: EvaluationPlan | None = None,
    model_type: str | None = None,
    policy_options: dict[str, Any] | None = None,
    accelerator: str = "auto",
    devices: int = 1,
    strategy: str = "somaspeed",
    loggers: list[Logger] | None = None,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Improves a policy by PPO; an interrupted run goes on where it last saved.

    Args:
        policy: folder of the checkpoint to start from.
        out: folder of the run: logs, learning_curve.png, results.json, state.ckpt, and the learned policy.
        rollout: where and how fragments are collected.
        loop: how collection and learning are joined.
        ppo: the algorithm's settings; those of the public pi0.5 recipes when left out.
        flow: how a flow policy explores; needed for such a policy.
        evaluation: rollouts without noise between iterations; none when left out.
        model_type: registered model type; read from the checkpoint's config.json when left out.
        policy_options: how the checkpoint is loaded (the entries of `get_model`).
        accelerator: of the learner, as Lightning names them.
        devices: of the learner.
        strategy: of the learner: somaspeed, somaspeed_hsdp or somaspeed_replicate.
        loggers: Lightning Fabric loggers; CSV, and TensorBoard where it is installed, when left out.
        overwrite: discard an earlier run in `out`.
    """
    load_extensions()
    ppo = ppo or PPOConfig()
    model = {"model_type": model_type or stored_type(Path(policy)), "model_path": policy, **(policy_options or {})}
    loggers = _default_loggers(Path(out)) if loggers is None else loggers
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy={strategy!r} must be one of {', '.join(STRATEGIES)}")
    if Path(policy).resolve() == (Path(out) / POLICY).resolve():
        raise ValueError(f"--out {out} would replace the policy that the run starts from; choose another folder")
    fabric = Fabric(accelerator=accelerator, devices=devices, strategy=strategy, loggers=loggers)
    fabric.launch()
    given: dict[str, Any] = {"rollout": rollout, "loop": loop, "ppo": ppo, "flow": flow, "evaluation": evaluation}
    settings = {"model": model, **{name: None if one is None else asdict(one) for name, one in given.items()}}
    is_first = fabric.global_rank == 0
    with ExitStack() as open_things:
        folder = RunFolder(Path(out), settings, overwrite=overwrite) if is_first else None
        if folder is not None and folder.history:
            print(f"going on with the run in {out}")
        if folder is not None:
            open_things.callback(folder.close)
        fabric.barrier()
        evaluate: Evaluate | None = None
        if evaluation is not None:  # rank 0 alone evaluates, and needs environments for it
            arguments = (policy, Path(out), rollout, flow, evaluation, open_things)
            evaluate = _evaluator(*arguments) if is_first else _evaluated_elsewhere
        result = train_ppo(
            model,
            rollout,
            loop,
            ppo,
            flow,
            fabric=fabric,
            evaluate=evaluate,
            evaluate_every=1 if evaluation is None else evaluation.every,
            log=_Log(fabric, folder, loop.iterations),
            on_start=_check_savable,
            state=Path(out) / STATE,
        )
        return _finish(fabric, folder, result, loop)


def _check_savable(policy: Any) -> None:
    if not callable(getattr(policy, "save_pretrained", None)):
        raise ValueError(
            f"{type(policy).__name__} cannot be saved at the end: give it save_pretrained(folder), or use "
            "soma_lightning.rl.train_ppo in Python"
        )


class _Log:
    """One line an iteration, the loggers, and the run's history."""

    def __init__(self, fabric: Fabric, folder: RunFolder | None, iterations: int) -> None:
        self.fabric, self.folder, self.iterations = fabric, folder, iterations

    def __call__(self, iteration: int, row: Mapping[str, float]) -> None:
        assert self.folder is not None
        self.folder.add(iteration, row)
        self.fabric.log_dict(dict(row), step=iteration)
        if "start_success" in row:
            print(f"before the first update  held-out success {row['start_success']:.3g}")
        shown = {
            "held-out success": row.get("success"),
            "rollout success": row.get("rollout_success"),
            "env steps/s": row["env_steps_per_s"],
            "lag": row["lag"],
            "kl": row["approx_kl"],
            "clipped": row["clip_fraction"],
            "logp gap": row["logp_gap"],
            "learner idle": row["learner_idle"],
            "rollouts idle": row["rollout_idle"],
            "lost": row["lost"] or None,
        }
        text = "  ".join(f"{name} {value:.3g}" for name, value in shown.items() if value is not None)
        print(f"iteration {iteration}/{self.iterations}  {text}", flush=True)


def _default_loggers(out: Path) -> list[Logger]:
    loggers: list[Logger] = [CSVLogger(str(out), name="logs", flush_logs_every_n_steps=1)]
    if is_available("tensorboard"):
        loggers.append(TensorBoardLogger(str(out), name="tensorboard"))
    return loggers


def _evaluator(
    policy: str,
    out: Path,
    rollout: RolloutSettings,
    flow: FlowSDE | None,
    plan: EvaluationPlan,
    open_things: ExitStack,
) -> Evaluator:
    options = rollout.env_options if plan.env_options is None else plan.env_options
    group = make_group(rollout.env, options, num_slots=plan.num_envs)
    open_things.callback(group.close)
    steps = plan.denoising_steps or (1 if flow is None else flow.num_steps)
    settings = EvaluationSettings(
        policy=policy,
        env=rollout.env,
        tasks=tuple(rollout.tasks or group.tasks),
        executed_steps=rollout.executed_steps,
        denoising_steps=steps,
        episodes=plan.episodes,
        first_init_state=plan.first_init_state,
        recorded=plan.recorded,
        env_options=options,
    )
    return Evaluator(group, settings, out / "videos")


def _evaluated_elsewhere(policy: Any, updates: int) -> dict[str, float]:
    raise RuntimeError("only rank 0 evaluates")


def _finish(fabric: Fabric, folder: RunFolder | None, result: PPOResult, loop: LoopSettings) -> dict[str, Any]:
    """Saves the policy and the results; every rank calls it."""
    policy: Any = result.policy
    target = fabric.broadcast("" if folder is None else str(folder.out / POLICY))
    if folder is not None or is_sharded(policy):  # shards are gathered by all ranks
        policy.save_pretrained(target, **({"optimizer": result.optimizer} if has_masters(result.optimizer) else {}))
    if folder is None:
        return {}
    (folder.out / POLICY / TRAINING_FILE).write_text(json.dumps({"step": loop.iterations, "epoch": 0, "by": "ppo"}))
    results = folder.finish({"policy": target, "world_size": fabric.world_size, "device": str(fabric.device)})
    print(f"written: {target}, {folder.out / RESULTS}, {folder.out / CURVE}")
    return results


def build_parser() -> CommandParser:
    """The options of `soma ppo`: the arguments of `improve_policy`, and `--config` files or recipe names."""
    parser = CommandParser("ppo", __doc__)
    parser.add_argument("--config", action=ActionConfigFile, help="a YAML file, or the name of a packaged recipe")
    parser.add_function_arguments(improve_policy, skip={"overwrite"})
    parser.add_overwrite("discard an earlier run in --out")
    return parser


def main(argv: list[str]) -> int:
    """Returns the exit status: 2 for a wrong command line or bad input."""
    try:
        parser = build_parser()
        options = parser.parse_args(list(resolve_configs(argv)))
        arguments = vars(parser.instantiate(options))
        del arguments["config"]
        improve_policy(**arguments)
    except (ValueError, OSError, ImportError, RuntimeError, WorkerError, RenderingUnavailableError) as error:
        print(f"error: {explain(str(error), ())}", file=sys.stderr)
        return 2
    except (KeyboardInterrupt, SystemExit) as end:
        if not isinstance(end, SystemExit) or end.code == 128 + signal.SIGTERM:
            print("the same command goes on after the last iteration that was saved", file=sys.stderr)
        raise
    return 0
