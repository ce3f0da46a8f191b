"""How does a policy act in many environments at once, and what is written down on the way?

Every environment goes on from fragment to fragment: an episode that ends is followed by the next one at once, so no
step is simulated that nobody learns from. Each decision's randomness is keyed by (seed, environment, decision), so what
one environment does depends neither on the others of the batch nor on the number of processes.

Shape letters as in records.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from soma_lightning.contract import EnvObservation
from soma_lightning.envs.base import ChunkOutcome, EnvGroup, Episode
from soma_lightning.envs.registry import make_group
from soma_lightning.envs.worker import WorkerError
from soma_lightning.models.flow_policy import takes_keys
from soma_lightning.models.policy import check_executed_steps
from soma_lightning.models.registry import pick_device
from soma_lightning.rl.engine import Collected, FragmentLostError
from soma_lightning.rl.records import EpisodeEnd, Fragment, Timeline, split_inputs

#: (episodes begun, decisions made) of every environment of a rollout process.
Cursor = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class RolloutSettings:
    """How fragments are collected.

    env, env_options: as `make_group` takes them; their stream of initial states is theirs to choose. tasks: names, in
    turn over environments; all tasks when empty. envs_per_worker: environments of one rollout process, B.
    env_workers: simulator processes of one rollout process, 0 simulates in it. decisions: chunk decisions of an
    environment in a fragment, T. executed_steps: actions executed of each chunk, C. first_init_state: training counts
    initial states up from here. env_timeout_s: the longest one call to a simulator process may take. device: where the
    policy acts; "auto" takes a GPU where there is one.
    """

    env: str
    env_options: Mapping[str, Any] = field(default_factory=dict)
    tasks: tuple[str, ...] = ()
    envs_per_worker: int = 8
    env_workers: int = 0
    decisions: int = 16
    executed_steps: int = 4
    first_init_state: int = 0
    env_timeout_s: float = 60.0
    seed: int = 0
    device: str = "auto"

    def __post_init__(self) -> None:
        for name in ("envs_per_worker", "decisions", "executed_steps"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}={value!r} must be a whole number from 1")
        for name in ("env_workers", "first_init_state", "seed"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name}={getattr(self, name)} is negative")


@dataclass
class _Slot:
    """One environment: its number in the whole run, the episodes and decisions it has had."""

    number: int
    episodes: int = 0
    decisions: int = 0
    steps: int = 0
    episode: Episode | None = None


class PolicyCollector:
    """Collects fragments with one policy in one group of environments; lives in a rollout process.

    policy: as `models.policy.BasePolicy` describes, on the device where it acts. worker: number of the process, of
    `num_workers`. cursor: where an earlier run stopped, as its last fragment's facts say.
    Raises ValueError when the policy or the cursor does not fit the environments.
    """

    def __init__(
        self,
        policy: Any,
        envs: EnvGroup,
        settings: RolloutSettings,
        *,
        worker: int = 0,
        num_workers: int = 1,
        cursor: Cursor | None = None,
    ) -> None:
        self.policy, self.envs, self.settings = policy, envs, settings
        self._tasks = tuple(settings.tasks or envs.tasks)
        unknown = [task for task in self._tasks if task not in envs.tasks]
        if unknown:
            raise ValueError(f"tasks {unknown} do not exist; the environment has {list(envs.tasks)}")
        if hasattr(policy, "noise_shape"):
            check_executed_steps(policy, settings.executed_steps)
        self._takes_keys = takes_keys(policy)
        self._num_envs = num_workers * envs.num_slots
        begun = cursor or [(0, 0)] * envs.num_slots
        if len(begun) != envs.num_slots:
            raise ValueError(
                f"the run that is to go on had {len(begun)} environments a rollout process, this one has "
                f"{envs.num_slots}; keep envs_per_worker, or begin anew"
            )
        first = worker * envs.num_slots
        self._slots = [_Slot(first + slot, *counts) for slot, counts in enumerate(begun)]
        self._observation: EnvObservation | None = None

    def tensors(self) -> dict[str, Tensor]:
        """The parameters that snapshots of the learner replace."""
        return {name: p.detach() for name, p in self.policy.named_parameters() if p.requires_grad}

    def collect(self, index: int, version: int) -> Collected:
        """The next fragment. FragmentLostError when a simulator process died or hung; the next one starts afresh."""
        try:
            fragment = self._fragment(version)
        except WorkerError as error:
            self._restart()
            raise FragmentLostError(str(error)) from error
        tensors, facts = fragment.pack()
        return Collected(tensors, {**facts, "cursor": [(slot.episodes, slot.decisions) for slot in self._slots]})

    def close(self) -> None:
        self.envs.close()

    # -- one fragment -------------------------------------------------------------------------------------------------

    def _fragment(self, version: int) -> Fragment:
        steps = [self._decide() for _ in range(self.settings.decisions)]
        last_values = self.policy.predict_values(self._observed()).reshape(1, -1).float()
        columns = {name: torch.stack([step.row[name] for step in steps]) for name in steps[0].row}
        values = torch.cat([columns.pop("values"), last_values.cpu()])
        samples = None if steps[0].samples is None else [one for step in steps for one in step.samples or ()]
        return Fragment(
            inputs={name: torch.cat([step.inputs[name] for step in steps]) for name in steps[0].inputs},
            samples=samples,
            log_probs=torch.cat([step.log_probs for step in steps]),
            timeline=Timeline(values=values, **columns),
            episodes=[end for step in steps for end in step.ends],
            version=version,
        )

    def _decide(self) -> _Step:
        """One chunk of every environment: look, act, execute, begin the next episodes."""
        everyone = range(len(self._slots))
        actions, result = self.policy.predict_action_batch(
            self._observed(), mode="train", compute_values=True, **self._keys()
        )
        _check_recorded(self.policy, result)
        executed = np.asarray(actions, np.float32)[:, : self.settings.executed_steps]
        if executed.shape[1] < self.settings.executed_steps:
            raise ValueError(
                f"executed_steps={self.settings.executed_steps} is more than the {executed.shape[1]} actions that the "
                "policy predicts"
            )
        self._observation = None
        outcomes = self.envs.execute(everyone, executed)
        row = {
            "values": result["prev_values"].reshape(-1).float().cpu(),
            "rewards": torch.tensor([outcome.reward for outcome in outcomes], dtype=torch.float32),
            "terminated": torch.tensor([outcome.done and not outcome.truncated for outcome in outcomes]),
            "truncated": torch.tensor([outcome.done and outcome.truncated for outcome in outcomes]),
            "valid_steps": torch.tensor([outcome.steps for outcome in outcomes], dtype=torch.int32),
            "bootstrap_values": self._bootstrap_values(outcomes),
        }
        inputs, samples = split_inputs(result["forward_inputs"])
        return _Step(row, inputs, samples, result["prev_logprobs"], self._turn(outcomes))

    def _keys(self) -> dict[str, Any]:
        keys = [(self.settings.seed, slot.number, slot.decisions) for slot in self._slots]
        return {"keys": keys} if self._takes_keys else {}

    def _bootstrap_values(self, outcomes: Sequence[ChunkOutcome]) -> Tensor:
        """V of the last observation of episodes that the limit cut off, 0 for the others."""
        values = torch.zeros(len(outcomes))
        cut = [slot for slot, outcome in enumerate(outcomes) if outcome.done and outcome.truncated]
        if cut:
            values[cut] = self.policy.predict_values(self.envs.observe(cut)).reshape(-1).float().cpu()
        return values

    def _turn(self, outcomes: Sequence[ChunkOutcome]) -> list[EpisodeEnd]:
        """Counts what happened and starts the next episode where one ended."""
        ends, over = [], []
        for number, (slot, outcome) in enumerate(zip(self._slots, outcomes, strict=True)):
            slot.decisions += 1
            slot.steps += outcome.steps
            if outcome.done:
                assert slot.episode is not None
                ends.append(EpisodeEnd(slot.episode.task, slot.episode.init_state, outcome.success, slot.steps))
                over.append(number)
        self._begin(over)
        return ends

    def _begin(self, numbers: Sequence[int]) -> None:
        if not numbers:
            return
        episodes = [self._next_episode(self._slots[number]) for number in numbers]
        self.envs.reset(numbers, episodes)
        for number, episode in zip(numbers, episodes, strict=True):
            self._slots[number].episode, self._slots[number].steps = episode, 0

    def _next_episode(self, slot: _Slot) -> Episode:
        """Environment e of E runs initial states e, e + E, e + 2 E, ... of its task."""
        task = self._tasks[slot.number % len(self._tasks)]
        number = self.settings.first_init_state + slot.number + slot.episodes * self._num_envs
        slot.episodes += 1
        states = self.envs.tasks[task].num_init_states
        return Episode(task, number if states is None else number % states)

    def _observed(self) -> EnvObservation:
        """What all environments show now; drawn once however often it is read."""
        if self._observation is None:
            self._begin([number for number, slot in enumerate(self._slots) if slot.episode is None])
            self._observation = self.envs.observe(range(len(self._slots)))
        return self._observation

    def _restart(self) -> None:
        """Nothing that runs is gone on with: rows of one fragment belong to one unbroken stretch."""
        self._observation = None
        for slot in self._slots:
            slot.episode = None


@dataclass
class _Step:
    """One decision of all environments."""

    row: dict[str, Tensor]
    inputs: dict[str, Tensor]
    samples: list[Any] | None
    log_probs: Tensor
    ends: list[EpisodeEnd]


@dataclass(frozen=True)
class CollectorSpec:
    """A picklable recipe for the collector of rollout process `worker`; calling it builds policy and environments.

    make_policy: picklable; builds the policy as it acts, on its device. cursors: where an earlier run stopped, by
    process.
    """

    make_policy: Callable[[], Any]
    settings: RolloutSettings
    num_workers: int = 1
    cursors: Mapping[int, Cursor] = field(default_factory=dict)

    def __call__(self, worker: int) -> PolicyCollector:
        settings = self.settings
        envs = make_group(
            settings.env,
            settings.env_options,
            num_slots=settings.envs_per_worker,
            num_workers=settings.env_workers,
            timeout_s=settings.env_timeout_s,
        )
        try:
            policy = self.make_policy().to(pick_device(settings.device)).eval()
            cursor = self.cursors.get(worker)
            return PolicyCollector(policy, envs, settings, worker=worker, num_workers=self.num_workers, cursor=cursor)
        except BaseException:
            envs.close()
            raise


def _check_recorded(policy: Any, result: Mapping[str, Any]) -> None:
    missing = [key for key in ("prev_logprobs", "prev_values", "forward_inputs") if result.get(key) is None]
    if missing:
        raise ValueError(
            f"{type(policy).__name__}.predict_action_batch(mode='train') returned no {', '.join(missing)}; "
            "soma_lightning.models.policy.check_policy(policy, env_obs) checks the whole contract"
        )
