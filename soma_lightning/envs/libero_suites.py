"""Which tasks and initial states LIBERO's suites have, how long an episode may last, and in which order they are run.

Nothing here builds a simulator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from soma_lightning.envs.base import Episode, TaskSpec, require_known
from soma_lightning.envs.libero_package import import_libero, quiet

#: Suite -> policy steps after which an episode is cut off; settle steps do not count. The limits that openpi evaluates
#: with: a little more than the longest demonstration of the suite (193, 254, 270, 505, 373 steps).
MAX_STEPS = {
    "libero_spatial": 220,
    "libero_object": 280,
    "libero_goal": 300,
    "libero_10": 520,
    "libero_90": 400,
}
#: Initial states that the benchmark fixes for every task.
NUM_INIT_STATES = 50


@dataclass(frozen=True)
class LiberoTask(TaskSpec):
    """A task of a suite; `number` is its place there, as papers count them (from 0)."""

    number: int = 0
    bddl_file: str = ""


class LiberoSuite:
    """One suite of the installed benchmark.

    name: a key of MAX_STEPS. Raises ValueError naming the nearest suite for an unknown one, ImportError and
    FileNotFoundError with the install line when benchmark or assets are missing.
    """

    def __init__(self, name: str, *, assets_root: str | Path | None = None) -> None:
        require_known("suite", name, MAX_STEPS)
        self._libero = import_libero(assets_root)
        self.name = name
        self._suite = _benchmark(name)
        folder = Path(self._libero.get_libero_path("bddl_files"))
        rows = [self._suite.get_task(number) for number in range(self._suite.n_tasks)]
        self.tasks = {
            row.name: LiberoTask(
                name=row.name,
                instruction=row.language,
                max_steps=MAX_STEPS[name],
                number=number,
                bddl_file=str(folder / row.problem_folder / row.bddl_file),
            )
            for number, row in enumerate(rows)
        }

    def init_states(self, task: str) -> np.ndarray:
        """The fixed initial states of `task`, float64 [50, D]: time, positions and velocities, as MuJoCo orders them.

        D differs from task to task. Read through the benchmark's own method: the file format differs by distribution.
        """
        require_known("task", task, self.tasks)
        with quiet():
            return np.asarray(self._suite.get_task_init_states(self.tasks[task].number), dtype=np.float64)


def select_tasks(tasks: Mapping[str, LiberoTask], numbers: Sequence[int] | None) -> dict[str, LiberoTask]:
    """The tasks with these numbers, in this order; all of them for None. ValueError for a number that does not exist.

    An empty list, a number given twice and anything but a list are errors, too.
    """
    if numbers is None:
        return dict(tasks)
    by_number = {task.number: task for task in tasks.values()}
    if not isinstance(numbers, Sequence):
        raise ValueError(f"task_numbers={numbers!r} must be a list, such as [{min(by_number)}]; leave it out for all")
    known = [number for number in numbers if isinstance(number, int) and not isinstance(number, bool)]
    if len(known) < len(numbers) or not by_number.keys() >= set(known) or not 0 < len(numbers) == len(set(known)):
        raise ValueError(
            f"task_numbers={list(numbers)} must be different numbers from 0..{len(by_number) - 1}; "
            "leave it out for all tasks"
        )
    return {by_number[number].name: by_number[number] for number in numbers}


def schedule(tasks: Sequence[str], init_states: Sequence[int], *, seed: int | None = None) -> list[Episode]:
    """Every pair of a task and an initial state once: task by task, or shuffled by `seed`.

    The place in the list is the reset id of RL: rollouts of one group share it. ValueError for an empty or repeated
    entry and for a negative state.
    """
    for name, values in (("tasks", tasks), ("init_states", init_states)):
        if not len(values) or len(set(values)) != len(values):
            raise ValueError(f"{name}={list(values)} must name at least one, and none twice")
    if min(init_states) < 0:
        raise ValueError(f"init_states={list(init_states)} are numbered from 0")
    episodes = [Episode(task, int(state)) for task in tasks for state in init_states]
    if seed is None:
        return episodes
    return [episodes[place] for place in np.random.default_rng(seed).permutation(len(episodes))]


@cache
def _benchmark(name: str) -> Any:
    with quiet():
        return import_module("libero.libero.benchmark").get_benchmark(name)()
