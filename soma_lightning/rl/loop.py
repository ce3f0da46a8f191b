"""From a checkpoint and an environment to a better checkpoint: collection and learning, side by side.

The learner is this process (or, with several devices, the ranks of its Fabric); rollout processes belong to the engine,
which rank 0 holds. An iteration takes `fragments_per_update` fragments, makes one PPO update and publishes the new
weights; meanwhile the rollout processes collect the next ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.optim import Optimizer

from soma_lightning.models.flow_policy import FlowPolicy
from soma_lightning.models.flow_sde import FlowSDE
from soma_lightning.models.registry import get_model
from soma_lightning.rl.engine import EngineStats, RolloutEngine, SyncEngine
from soma_lightning.rl.engine_local import LocalEngine
from soma_lightning.rl.learner import PPOLearner
from soma_lightning.rl.ppo import PPOConfig
from soma_lightning.rl.records import EpisodeEnd, Fragment
from soma_lightning.rl.rollout import CollectorSpec, Cursor, RolloutSettings
from soma_lightning.rl.sharing import share_fragments

#: evaluate(policy in eval mode, updates that it has had) -> numbers to log; called on rank 0 alone.
Evaluate = Callable[[nn.Module, int], Mapping[str, float]]
#: log(number of the iteration, from 1, row): called on rank 0 after every iteration.
Log = Callable[[int, Mapping[str, float]], None]


@dataclass(frozen=True)
class LoopSettings:
    """How collection and learning are joined.

    iterations: updates in all. fragments_per_update: F. workers: rollout processes. engine: "local" collects in
    processes of its own while the learner learns; "sync" in this one, in turns. max_lag: how many versions the weights
    that acted may be behind those that learn (local: 0 to 2; nothing is ever behind in sync). arena_mb: shared memory
    of one rollout process for fragments under way. fragment_timeout_s: after which a silent rollout process is ended.
    save_every: iterations between checkpoints; the last one is saved in any case.
    """

    iterations: int
    fragments_per_update: int = 1
    workers: int = 1
    engine: Literal["local", "sync"] = "local"
    max_lag: int = 1
    arena_mb: int = 1024
    fragment_timeout_s: float = 600.0
    save_every: int = 1

    def __post_init__(self) -> None:
        for name in ("iterations", "fragments_per_update", "workers", "arena_mb", "save_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.engine not in ("local", "sync"):
            raise ValueError(f"engine={self.engine!r} must be 'local' or 'sync'")
        if not 0 <= self.max_lag <= 2:
            raise ValueError(f"max_lag={self.max_lag} must lie in 0..2: what acted longer ago teaches little")
        if self.engine == "sync":
            for name, value in (("workers", 1), ("max_lag", 1), ("arena_mb", 1024)):
                if getattr(self, name) != value:
                    raise ValueError(
                        f"{name}={getattr(self, name)} has no effect with engine='sync', which collects in this "
                        "process; leave it out"
                    )


@dataclass
class PPOResult:
    """policy, optimizer: the learner's, on its device. history: what each iteration of this run logged."""

    policy: nn.Module
    optimizer: Optimizer
    history: list[dict[str, float]] = field(default_factory=list)


def build_policy(model: Mapping[str, Any], flow_sde: FlowSDE | None) -> nn.Module:
    """The policy as it explores: `get_model(model)`, its stochastic process, and a critic where it has none.

    Raises ValueError for a flow policy without `flow_sde`, and for a `flow_sde` that another policy would ignore.
    """
    policy = get_model(model)
    if not isinstance(policy, FlowPolicy):
        if flow_sde is not None:
            raise ValueError(f"flow={flow_sde} has no effect: {type(policy).__name__} is no FlowPolicy; leave it out")
        return policy
    if flow_sde is None:
        raise ValueError(f"{type(policy).__name__} explores by stochastic denoising steps; set flow={{num_steps: ...}}")
    policy.explore_with(flow_sde)
    if getattr(policy, "value_head", None) is None:
        policy.add_value_head(model.get("model_path"))  # type: ignore[operator]
    return policy


def train_ppo(
    model: Mapping[str, Any],
    rollout: RolloutSettings,
    loop: LoopSettings,
    ppo: PPOConfig | None = None,
    flow: FlowSDE | None = None,
    *,
    fabric: Fabric | None = None,
    evaluate: Evaluate | None = None,
    evaluate_every: int = 10,
    log: Log | None = None,
    on_start: Callable[[nn.Module], None] | None = None,
    state: str | Path | None = None,
) -> PPOResult:
    """Trains the policy that `model` (a `get_model` configuration) describes by PPO in the environments of `rollout`.

    flow: how a flow policy explores. fabric: of the learner, launched; one process on the CPU when None. evaluate:
    called with a policy of the learner's weights, before the first and after every `evaluate_every`-th iteration. log:
    called after every iteration. on_start: called with the learner's policy before anything is collected. state: file
    that keeps what a later run needs; one that is there is gone on from.
    Raises ValueError for settings that do not fit, and RuntimeError when rollout processes keep failing.
    """
    ppo = PPOConfig() if ppo is None else ppo
    if evaluate_every < 1:
        raise ValueError(f"evaluate_every={evaluate_every} must be at least 1; leave evaluate out for no evaluation")
    if fabric is None:
        fabric = Fabric(accelerator="cpu", devices=1, strategy="somaspeed")
    make_policy = partial(build_policy, dict(model), flow)
    policy = _learning(make_policy())
    if on_start is not None:
        on_start(policy)
    learner = PPOLearner(fabric, policy, ppo)
    cursors = learner.load(state) if state is not None and Path(state).is_file() else {}
    first, spec = learner.updates, CollectorSpec(make_policy, rollout, loop.workers, cursors)
    result = PPOResult(learner.policy, learner.optimizer)
    examiner = None if evaluate is None else _Examiner(make_policy, learner, evaluate)
    engine = _make_engine(spec, loop) if fabric.global_rank == 0 else None
    with nullcontext() if engine is None else engine:
        _publish(engine, learner, min(loop.max_lag + 1, loop.iterations - first) * loop.fragments_per_update)
        for iteration in range(first, loop.iterations):
            start = examiner.examine() if examiner is not None and iteration == 0 else {}
            row = {f"start_{name}": value for name, value in start.items()}
            row |= _iterate(engine, learner, loop, cursors)
            if examiner is not None and (iteration + 1) % evaluate_every == 0:
                row |= examiner.examine()
            result.history.append(row)
            is_last = iteration + 1 == loop.iterations
            if state is not None and (is_last or (iteration + 1) % loop.save_every == 0):
                learner.save(state, cursors)
            if log is not None and fabric.global_rank == 0:
                log(iteration + 1, row)
    return result


class _Examiner:
    """Evaluates a policy of its own, on rank 0, with the learner's weights: the learner's may lack a backbone, and be
    spread over ranks."""

    def __init__(self, make_policy: Callable[[], nn.Module], learner: PPOLearner, evaluate: Evaluate) -> None:
        self._learner, self._evaluate = learner, evaluate
        fabric = learner.fabric
        self._policy = make_policy().to(fabric.device).eval() if fabric.global_rank == 0 else None

    @torch.no_grad()
    def examine(self) -> Mapping[str, float]:
        """What `evaluate` says; nothing on other ranks, which wait. All ranks call it."""
        weights = self._learner.snapshot()
        found: Mapping[str, float] = {}
        if self._policy is not None:
            own = dict(self._policy.named_parameters())
            for name, value in weights.items():
                own[name].copy_(value)
            found = self._evaluate(self._policy, self._learner.updates)
        self._learner.fabric.barrier()
        return found


def _learning(policy: nn.Module) -> nn.Module:
    """The policy as it learns: without the backbone that its rollouts send the features of, where it can do without."""
    if getattr(policy, "sends_features", False) and getattr(policy, "loaded_from", None) is not None:
        policy.release_backbone()  # type: ignore[operator]
    return policy


def _publish(engine: RolloutEngine | None, learner: PPOLearner, credit: int) -> None:
    """New weights for the rollouts, and leave to collect `credit` fragments more."""
    weights = learner.snapshot()
    if engine is not None:
        engine.publish(learner.updates, weights)
        if credit > 0:
            engine.submit_fragment_credit(credit)


def _iterate(
    engine: RolloutEngine | None, learner: PPOLearner, loop: LoopSettings, cursors: dict[int, Cursor]
) -> dict[str, float]:
    """Takes one update's fragments, learns from them, publishes."""
    begin, version = time.perf_counter(), learner.updates
    with ExitStack() as held:

        def receive() -> list[Fragment]:
            assert engine is not None
            fragments = []
            for _ in range(loop.fragments_per_update):
                lease = held.enter_context(engine.next_fragment(loop.fragment_timeout_s))
                cursors[lease.worker] = lease.facts["cursor"]
                fragments.append(Fragment.unpack(lease.tensors, lease.facts, lease.version))
            return fragments

        fragments = share_fragments(learner.fabric, receive)
        waited = time.perf_counter() - begin
        row = learner.update(fragments)
    allowed = version + 1 + loop.max_lag < loop.iterations
    _publish(engine, learner, loop.fragments_per_update if allowed else 0)
    wall = time.perf_counter() - begin
    row.update(_rollout_facts([end for one in fragments for end in one.episodes]))
    steps = sum(int(one.timeline.valid_steps.sum()) for one in fragments)
    row.update(
        wall_s=wall,
        learner_idle=waited / wall,
        env_steps=float(steps),
        env_steps_per_s=steps / wall,
        lag=float(max(version - one.version for one in fragments)),
    )
    return row if engine is None else row | _engine_facts(engine.stats())


def _engine_facts(stats: EngineStats) -> dict[str, float]:
    """Since the start: what was lost, and the share of their time that rollout processes waited."""
    waited = stats.credit_waited_s + stats.memory_waited_s
    return {
        "rollout_idle": waited / max(waited + stats.collecting_s, 1e-9),
        "queued": float(stats.queued),
        "lost": float(stats.lost),
        "stale": float(stats.stale),
        "restarts": float(stats.restarts),
        "snapshots_skipped": float(stats.snapshots_skipped),
    }


def _rollout_facts(ends: list[EpisodeEnd]) -> dict[str, float]:
    """Of the episodes that ended in these fragments; nothing of them when none did."""
    if not ends:
        return {"episodes": 0.0}
    return {
        "episodes": float(len(ends)),
        "rollout_success": sum(end.success for end in ends) / len(ends),
        "episode_steps": sum(end.steps for end in ends) / len(ends),
    }


def _make_engine(spec: CollectorSpec, loop: LoopSettings) -> RolloutEngine:
    if loop.engine == "sync":
        return SyncEngine(spec)
    return LocalEngine(
        spec,
        loop.workers,
        fragments_per_update=loop.fragments_per_update,
        max_lag=loop.max_lag,
        arena_bytes=loop.arena_mb * 2**20,
        fragment_timeout_s=loop.fragment_timeout_s,
    )
