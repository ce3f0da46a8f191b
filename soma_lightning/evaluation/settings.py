"""What decides the outcome of an evaluation, and what one finished episode is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from soma_lightning.envs.base import require_known

Until = Literal["success", "limit"]


@dataclass(frozen=True)
class EvaluationSettings:
    """What decides the outcome of an evaluation; a resumed one must have the same.

    policy: folder of the checkpoint. tasks: names in the environment. episodes: per task, on the initial states
    first_init_state, first_init_state + 1, ... executed_steps: actions executed per predicted chunk.
    denoising_steps: Euler steps of the flow. seed: of the policy's noise, see `draw_noise`.
    until: "success" ends an episode when the goal is first reached; "limit" goes on, so that success at the end is
    measured, too. blind: the policy is shown black images. recorded: how many successes and how many failures of each
    task are kept as video, those of the lowest initial states. env_options: all settings of the environment.
    protocol: name of a `LiberoProtocol`. policy_options: how the checkpoint is loaded, e.g. its dtype.
    """

    policy: str
    env: str
    tasks: tuple[str, ...]
    executed_steps: int
    denoising_steps: int
    episodes: int = 100
    first_init_state: int = 0
    seed: int = 0
    until: Until = "success"
    blind: bool = False
    recorded: int = 1
    env_options: Mapping[str, Any] = field(default_factory=dict)
    protocol: str | None = None
    policy_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("episodes", "executed_steps", "denoising_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("first_init_state", "seed", "recorded"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} must not be negative")
        if not self.tasks:
            raise ValueError("no task given; name at least one")
        if len(set(self.tasks)) != len(self.tasks):
            raise ValueError(f"tasks {list(self.tasks)} name one task twice; raise episodes instead")
        require_known("until", self.until, get_args(Until))

    @property
    def init_states(self) -> range:
        return range(self.first_init_state, self.first_init_state + self.episodes)


@dataclass
class Rollout:
    """A finished episode.

    success_once: the goal held after some step. success_at_end: it held after the last step; None when that was not
    measured, because the episode ended at its first success or the environment does not tell. steps: control steps
    until the first success, or all of them.
    """

    task: str
    init_state: int
    success_once: bool
    success_at_end: bool | None
    steps: int
    reward: float
