"""What makes an evaluation one of LIBERO's, and what must be said of one that does less.

10 tasks x 50 fixed initial states, every pair once, with the limits of openpi. Only a complete evaluation may be set
beside published numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from soma_lightning.envs.base import TaskSpec, require_known
from soma_lightning.envs.libero_suites import MAX_STEPS, NUM_INIT_STATES
from soma_lightning.evaluation.settings import EvaluationSettings

_ENV = "libero"
#: Options that change the benchmark itself; others, such as the images' size, belong to the policy.
_FIXED_OPTIONS: Mapping[str, Any] = {
    "max_steps": None,
    "settle_steps": 10,
    "hard_reset": True,
    "reflections": True,
    "multisampling": True,
    "seed": 7,
    "stream": 0,
}


@dataclass(frozen=True)
class LiberoProtocol:
    """The evaluation of one suite. ValueError naming the nearest suite for an unknown one."""

    suite: str

    def __post_init__(self) -> None:
        require_known("protocol", self.suite, MAX_STEPS)

    @property
    def num_tasks(self) -> int:
        return 90 if self.suite == "libero_90" else 10

    def env_options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The environment's options. ValueError when `given` names another suite."""
        if given.get("suite", self.suite) != self.suite:
            raise ValueError(f"protocol={self.suite}, but env_options name the suite {given['suite']!r}; leave one out")
        return {**given, "suite": self.suite}

    def deviations(self, settings: EvaluationSettings) -> list[str]:
        """What the evaluation does otherwise, in words; empty when it is complete."""
        found = []
        if len(settings.tasks) < self.num_tasks:
            found.append(f"{len(settings.tasks)} of {self.num_tasks} tasks")
        if settings.init_states != range(NUM_INIT_STATES):
            states = settings.init_states
            found.append(f"initial states {states[0]}..{states[-1]} of 0..{NUM_INIT_STATES - 1}")
        for option, value in _FIXED_OPTIONS.items():
            chosen = settings.env_options.get(option, value)
            if chosen != value:
                found.append(f"{option}={chosen}")
        return found + (["blind"] if settings.blind else [])

    def statement(self, settings: EvaluationSettings) -> dict[str, Any]:
        """What results.json says about the protocol."""
        deviations = self.deviations(settings)
        size = f"{self.suite}, {len(settings.tasks)} x {settings.episodes}"
        claim = f"{size}: no claims ({', '.join(deviations)})" if deviations else f"{size}: complete"
        return {"name": self.suite, "complete": not deviations, "deviations": deviations, "statement": claim}


def find_protocol(env: str, name: str | None) -> LiberoProtocol | None:
    """The protocol called `name`. ValueError for an unknown one and for another environment than LIBERO."""
    if name is None:
        return None
    if env != _ENV:
        raise ValueError(f"protocol={name} is one of environment '{_ENV}'; leave out env={env}")
    return LiberoProtocol(name)


def check_init_states(settings: EvaluationSettings, tasks: Mapping[str, TaskSpec]) -> None:
    """Raises ValueError, before anything runs, for initial states that a task does not have."""
    last = settings.init_states[-1]
    for name in settings.tasks:
        number = tasks[name].num_init_states
        if number is not None and last >= number:
            raise ValueError(
                f"task '{name}' has the initial states 0..{number - 1}; episodes={settings.episodes} from "
                f"first_init_state={settings.first_init_state} would need {last}; ask for fewer"
            )
