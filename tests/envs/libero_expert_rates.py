"""How often does LIBERO's scripted expert solve its tasks, calm and disturbed? Makes the table of docs/libero.md.

    python tests/envs/libero_expert_rates.py --states 10 --workers 8

Runs the benchmark's first initial states of every task with an expert, without images, "disturbed" by the noise with
which `soma demos` records. One process a core; a simulator takes 2 GB.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from soma_lightning.envs.libero import LiberoEnv
from soma_lightning.envs.libero_expert import EXPERT_TASKS, LiberoExpert
from soma_lightning.envs.recorder import Disturbance


@dataclass(frozen=True)
class Attempt:
    """One episode: number is the task's in the suite."""

    suite: str
    number: int
    state: int
    disturbed: bool
    solved: bool = False
    steps: int = 0


@functools.lru_cache(maxsize=1)
def env_of(suite: str, number: int) -> LiberoEnv:
    """The simulator of the process; attempts come sorted, so that it is seldom built."""
    return LiberoEnv(suite, task_numbers=[number], cameras=[])


def tried(wanted: Attempt) -> Attempt:
    """Runs one attempt to its end."""
    env = env_of(wanted.suite, wanted.number)
    expert = LiberoExpert(env)
    env.reset(next(iter(env.tasks)), wanted.state)
    expert.reset()
    noise = expert.disturbance.noise if wanted.disturbed else 0.0
    generator = np.random.default_rng((wanted.number, wanted.state))
    disturbance = Disturbance(noise, generator, expert.disturbance)
    steps, done = 0, False
    while not done:
        _, executed = disturbance.step_of(expert)
        outcome = env.step(executed)
        steps, done = steps + 1, outcome.done
    return replace(wanted, solved=outcome.success, steps=steps)


def table(attempts: Sequence[Attempt]) -> str:
    """Markdown: a row a task, calm and disturbed; steps are the median of the solved episodes."""
    rows: dict[tuple[str, int], dict[bool, list[Attempt]]] = defaultdict(lambda: {False: [], True: []})
    for one in attempts:
        rows[one.suite, one.number][one.disturbed].append(one)
    lines = ["| suite, task | solved | steps | solved, disturbed | steps |", "|---|---|---|---|---|"]
    for (suite, number), kinds in sorted(rows.items()):
        cells = []
        for disturbed in (False, True):
            steps = [one.steps for one in kinds[disturbed] if one.solved]
            median = f"{statistics.median(steps):.0f}" if steps else "-"
            cells += [f"{len(steps)} of {len(kinds[disturbed])}", median]
        lines.append(f"| `{suite}` {number} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Runs all attempts and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suites", nargs="+", default=list(EXPERT_TASKS), choices=list(EXPERT_TASKS))
    parser.add_argument("--tasks", nargs="+", type=int, help="numbers; all with an expert when left out")
    parser.add_argument("--states", type=int, default=10, help="initial states of each task")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--out", type=Path, help="file for every attempt, JSON lines, written as they end")
    chosen = parser.parse_args()
    wanted = [
        Attempt(suite, number, state, disturbed)
        for suite in chosen.suites
        for number in EXPERT_TASKS[suite]
        if chosen.tasks is None or number in chosen.tasks
        for disturbed in (False, True)
        for state in range(chosen.states)
    ]
    attempts = []
    with multiprocessing.get_context("spawn").Pool(chosen.workers) as pool:
        for attempt in pool.imap(tried, wanted, chunksize=max(1, chosen.states // 2)):
            attempts.append(attempt)
            if chosen.out is not None:
                with chosen.out.open("a") as file:
                    file.write(json.dumps(asdict(attempt)) + "\n")
    print(table(attempts))


if __name__ == "__main__":
    main()
