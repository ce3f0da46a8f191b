"""`soma open-loop`: a policy's predicted action chunks against the recorded actions of a data set."""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from soma_lightning import plots
from soma_lightning.cli.checkpoint import check_policy_options, load_policy, stored_type
from soma_lightning.cli.data import check_out
from soma_lightning.cli.parser import CommandParser
from soma_lightning.contract import ACTION, STATE
from soma_lightning.data.inspection import dimension_names
from soma_lightning.data.lerobot import LeRobotDataset
from soma_lightning.data.open_loop import EpisodePrediction, OpenLoopSettings, predict_episodes, summarize
from soma_lightning.evaluation.report import check_policy_parts
from soma_lightning.models.registry import load_extensions, pick_device

RESULTS, TABLE = "open_loop.json", "open_loop.csv"


def compare_open_loop(
    dataset: str,
    policy: str,
    out: str,
    episodes: str = "0",
    executed_steps: int | None = None,
    denoising_steps: int | None = None,
    seed: int = 0,
    batch_size: int = 32,
    cameras: dict[str, str] | None = None,
    state_key: str = STATE,
    action_key: str = ACTION,
    state_indices: list[int] | None = None,
    action_indices: list[int] | None = None,
    model_type: str | None = None,
    policy_options: dict[str, Any] | None = None,
    device: str = "auto",
) -> dict[str, Any]:
    """Shows a policy recorded observations and draws its chunks against the recorded actions.

    Args:
        dataset: folder of a LeRobot data set.
        policy: folder of the checkpoint (as `soma fit` or `save_pretrained` writes it).
        out: folder for open_loop.json, open_loop.csv and a picture per episode.
        episodes: numbers of the episodes, such as 0,3 (or "all").
        executed_steps: the policy looks every so many frames; the checkpoint's own when left out.
        denoising_steps: Euler steps of the flow; the checkpoint's own when left out.
        seed: seed of the policy's noise.
        batch_size: looks that are predicted at once.
        cameras: {key in the data set: key that the policy knows}; every camera under its own name when left out.
        state_key: column read as the state.
        action_key: column read as the action.
        state_indices: state dimensions to keep, in this order.
        action_indices: action dimensions to keep, in this order.
        model_type: registered model type; read from the checkpoint's config.json when left out.
        policy_options: how the checkpoint is loaded, e.g. {"dtype": "bfloat16"} (the entries of `get_model`).
        device: "auto", "cpu" or "cuda".
    """
    check_policy_options(policy_options)
    target, folder = pick_device(device), Path(out)
    check_out(folder, Path(dataset))
    whole = LeRobotDataset(
        dataset,
        cameras=cameras,
        state_key=state_key,
        action_key=action_key,
        state_indices=state_indices,
        action_indices=action_indices,
    )
    chosen = chosen_episodes(episodes, whole.num_episodes)
    load_extensions()
    model = load_policy(policy, model_type or stored_type(Path(policy)), target, policy_options)
    check_policy_parts(model)
    settings = OpenLoopSettings(
        executed_steps=model.config.n_action_steps if executed_steps is None else executed_steps,
        denoising_steps=model.config.num_inference_steps if denoising_steps is None else denoising_steps,
        seed=seed,
        batch_size=batch_size,
    )
    predictions = predict_episodes(model, whole, settings, chosen, report=lambda line: print(line, file=sys.stderr))
    names = dimension_names(whole.info.features[action_key])
    names = names if action_indices is None else [names[i] for i in action_indices]
    results = {
        "dataset": dataset,
        "policy": {"path": policy, "backbone_hash": model.backbone_hash(), **model.report_facts()},
        "settings": vars(settings),
        **summarize(predictions, whole.actions.numpy(), names),
    }
    write(results, predictions, folder)
    print_results(results, folder)
    return results


def chosen_episodes(text: str, count: int) -> list[int]:
    """The numbers in "0,3", or all. Raises ValueError naming what is not there."""
    if text == "all":
        return list(range(count))
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise ValueError(f"--episodes={text!r} must be numbers such as 0,3, or all")
    numbers = [int(number) for number in text.split(",")]
    if wrong := [number for number in numbers if number >= count]:
        raise ValueError(f"--episodes: {wrong} are not in the data set, which has the episodes 0 to {count - 1}")
    if len(set(numbers)) != len(numbers):
        raise ValueError(f"--episodes={text} names one twice")
    return numbers


def write(results: dict[str, Any], predictions: Sequence[EpisodePrediction], out: Path) -> None:
    """The errors as JSON, every frame's actions as CSV, one picture an episode."""
    (out / RESULTS).write_text(json.dumps(results, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    names = results["dimensions"]
    with open(out / TABLE, "w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["episode", "frame", "dimension", "recorded", "predicted", "absolute_error"])
        for prediction in predictions:
            predicted, errors = prediction.predicted, prediction.errors
            for frame, recorded in enumerate(prediction.recorded):
                for d, name in enumerate(names):
                    row = (recorded[d].item(), predicted[frame, d].item(), errors[frame, d].item())
                    table.writerow([prediction.episode, frame, name, *row])
    for prediction, found in zip(predictions, results["episodes"], strict=True):
        settings = results["settings"]
        title = (
            f"episode {prediction.episode}, {found['frames']} frames: {prediction.task}\n"
            f"looks every {settings['executed_steps']} frames, {settings['denoising_steps']} Euler steps, "
            f"noise seed {settings['seed']}"
        )
        labels = [f"{name}: mean error {mae:.3g}" for name, mae in zip(names, found["mae"], strict=True)]
        path = out / f"episode_{prediction.episode:06d}.png"
        plots.open_loop(prediction.recorded, prediction.looks, prediction.chunks, labels, title, path)


def print_results(results: dict[str, Any], out: Path) -> None:
    settings = results["settings"]
    print(
        f"{results['frames']} frames of {len(results['episodes'])} episodes, {results['chunks']} chunks, "
        f"{settings['executed_steps']} steps each, noise seed {settings['seed']}"
    )
    print(f"{'dimension':<20}{'mean abs. error':>18}{'of the mean action':>20}")
    for name, mae, naive in zip(results["dimensions"], results["mae"], results["mean_action"]["mae"], strict=True):
        print(f"{name:<20}{mae:>18.4g}{naive:>20.4g}")
    pair = [results["normalized"], results["mean_action"]["normalized"]]
    mine, naive = ("-" if value is None else f"{value:.4g}" for value in pair)
    print(f"{'normalised':<20}{mine:>18}{naive:>20}   (1: half of q01..q99)")
    print(f"written: {out / RESULTS}, {out / TABLE} and a picture per episode")


def build_parser() -> CommandParser:
    """The options of `soma open-loop`: the arguments of `compare_open_loop`."""
    parser = CommandParser("open-loop", __doc__)
    parser.add_argument("dataset", type=str, metavar="DIR", help="folder of a LeRobot data set")
    parser.add_function_arguments(compare_open_loop, skip={"dataset"})
    return parser


def main(argv: list[str]) -> int:
    """Returns the exit status: 2 for a wrong command line or bad input."""
    options = build_parser().parse_args(argv).as_dict()
    try:
        compare_open_loop(**options)
    except (ValueError, OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
