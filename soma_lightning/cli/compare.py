"""`soma compare`: several evaluations of one task side by side, with intervals and an optional claim to check."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from soma_lightning.cli.parser import CommandParser
from soma_lightning.plots import success_bars


def compare(results: list[str], out: str, task: str | None = None, claim_best: str | None = None) -> int:
    """Draws one bar an evaluation and, on request, checks that one beats all others.

    Args:
        results: evaluations as LABEL=FOLDER (a folder that `soma eval` wrote).
        out: picture to write (PNG); a table goes beside it as JSON.
        task: task to compare; needed when an evaluation has several.
        claim_best: label whose interval must lie above all others; exit status 1 when it does not.
    """
    if Path(out).suffix != ".png":
        raise ValueError(f"out={out} must end in .png; the table goes beside it as .json")
    rows = [read_row(entry, task) for entry in results]
    labels = [row["label"] for row in rows]
    if len(set(labels)) != len(labels):
        raise ValueError(f"the labels {labels} name one evaluation twice")
    if claim_best is not None and claim_best not in labels:
        raise ValueError(f"claim_best={claim_best!r} is none of the labels {labels}")
    if claim_best is not None and len(rows) == 1:
        raise ValueError(f"claim_best={claim_best!r} needs another evaluation to lie above; name two or more")
    check_same_episodes(rows)
    picture = success_bars(
        [(r["label"], r["successes"], r["episodes"], tuple(r["wilson95"])) for r in rows], Path(out), rows[0]["task"]
    )
    for row in rows:
        low, high = row["wilson95"]
        count = f"{row['successes']}/{row['episodes']}"
        print(f"{row['label']:<20}{count:>8}  95 % {low:.3f} to {high:.3f}  backbone {row['backbone'][:12]}")
    verdict = None if claim_best is None else judge(rows, claim_best)
    table = Path(out).with_suffix(".json")
    table.write_text(json.dumps({"rows": rows, "claim": verdict}, indent=1))
    print(f"written: {picture}, {table}")
    return 0 if verdict is None or verdict["holds"] else 1


#: Entries of an environment's options that decide which episodes are run; others, such as cameras, may be compared.
EPISODE_OPTIONS = ("suite", "stream", "seed")


def check_same_episodes(rows: list[dict[str, Any]]) -> None:
    """Raises ValueError naming what makes the evaluations' episodes different ones."""
    facts = ("task", "env", *EPISODE_OPTIONS, "init_states")
    for row in rows[1:]:
        for fact in facts:
            ours, theirs = rows[0].get(fact), row.get(fact)
            if ours != theirs:
                shown = "" if fact == "init_states" else f" ({ours!r} and {theirs!r})"
                name = "initial states" if fact == "init_states" else f"values of {fact}"
                raise ValueError(
                    f"{rows[0]['label']} and {row['label']} used different {name}{shown}, so they cannot be compared"
                )


def judge(rows: list[dict[str, Any]], claimed: str) -> dict[str, Any]:
    """Whether the interval of the evaluation `claimed` lies above all others."""
    best = next(row for row in rows if row["label"] == claimed)
    others = [row for row in rows if row is not best]
    beaten = [row["label"] for row in others if row["wilson95"][1] < best["wilson95"][0]]
    holds = len(beaten) == len(others)
    names = ", ".join(row["label"] for row in others)
    print(f"{claimed}: the interval {'lies above' if holds else 'does NOT lie above'} that of {names}")
    return {"best": claimed, "beats": beaten, "holds": holds}


def read_row(entry: str, task: str | None) -> dict[str, Any]:
    label, found, folder = entry.partition("=")
    if not found:
        raise ValueError(f"{entry!r} is not LABEL=FOLDER")
    path = Path(folder) / "results.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; run soma eval --out {folder} first")
    try:
        stored = json.loads(path.read_text())
        tasks, backbone = dict(stored["tasks"]), str(stored["policy"]["backbone_hash"])
        settings = dict(stored["settings"])
        options = {name: settings["env_options"].get(name) for name in EPISODE_OPTIONS}
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{path} was not written whole by this version of soma eval ({error!r}); run it again"
        ) from error
    if task is None and len(tasks) != 1:
        raise ValueError(f"{path} has the tasks {sorted(tasks)}; choose one with --task")
    name = task or next(iter(tasks))
    if name not in tasks:
        raise ValueError(f"{path} has no task {name!r}; it has {sorted(tasks)}")
    return {"label": label, "task": name, "env": settings["env"], **options, "backbone": backbone, **tasks[name]}


def main(argv: list[str]) -> int:
    """Returns the exit status: 1 when the claim does not hold, 2 for a wrong command line or bad input."""
    parser = CommandParser("compare", __doc__)
    parser.add_argument("results", nargs="+", type=str, metavar="LABEL=FOLDER", help="a folder that soma eval wrote")
    parser.add_function_arguments(compare, skip={"results"})
    options = parser.parse_args(argv).as_dict()
    try:
        return compare(**options)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
