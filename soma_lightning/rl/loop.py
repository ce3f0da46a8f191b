"""From a checkpoint and an environment to a better checkpoint: collection and learning, side by side.

The learner is this process; rollout processes belong to the engine. An iteration takes `fragments_per_update`
fragments, makes one PPO update and publishes the new weights; meanwhile the rollout processes collect the next ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from lightning.fabric import Fabric
from torch import nn

from soma_lightning.models.flow_policy import FlowPolicy
from soma_lightning.models.flow_sde import FlowSDE
from soma_lightning.models.registry import get_model
from soma_lightning.rl.engine import RolloutEngine, SyncEngine
from soma_lightning.rl.learner import PPOLearner
from soma_lightning.rl.ppo import PPOConfig
from soma_lightning.rl.records import EpisodeEnd, Fragment
from soma_lightning.rl.rollout import CollectorSpec, RolloutSettings

#: evaluate(policy) -> numbers to log.
Evaluate = Callable[[nn.Module], Mapping[str, float]]


@dataclass(frozen=True)
class LoopSettings:
    """How collection and learning are joined.

    iterations: updates in all. fragments_per_update: F. workers: rollout processes. engine: "local" collects in
    processes of its own while the learner learns; "sync" in this one, in turns. max_lag: how many versions the weights
    that acted may be behind those that learn (local: 0 to 2). arena_mb: shared memory of one rollout process for
    fragments under way. fragment_timeout_s: after which a silent rollout process is ended. evaluate_every: iterations
    between evaluations, 0 for none.
    """

    iterations: int
    fragments_per_update: int = 1
    workers: int = 1
    engine: Literal["local", "sync"] = "local"
    max_lag: int = 1
    arena_mb: int = 1024
    fragment_timeout_s: float = 600.0
    evaluate_every: int = 0

    def __post_init__(self) -> None:
        for name in ("iterations", "fragments_per_update", "workers", "arena_mb"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.evaluate_every < 0:
            raise ValueError(f"evaluate_every={self.evaluate_every} is negative; 0 evaluates never")
        if self.engine not in ("local", "sync"):
            raise ValueError(f"engine={self.engine!r} must be 'local' or 'sync'")
        if self.engine == "sync" and self.workers != 1:
            raise ValueError(f"engine='sync' collects in this process, so workers={self.workers} has no effect; set 1")


@dataclass
class PPOResult:
    """history: what each iteration logged. policy: the learner's, on its device."""

    policy: nn.Module
    history: list[dict[str, float]] = field(default_factory=list)


def build_policy(model: Mapping[str, Any], flow_sde: FlowSDE | None) -> nn.Module:
    """The policy as it explores: `get_model(model)`, its stochastic process and a critic where it has none.

    Raises ValueError for a flow policy without `flow_sde`, and for `flow_sde` that another policy would ignore.
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
    log: Callable[[int, Mapping[str, float]], None] | None = None,
) -> PPOResult:
    """Trains the policy that `model` (a `get_model` configuration) describes by PPO in the environments of `rollout`.

    flow: how a flow policy explores. fabric: of the learner, launched; one process on the CPU when None. evaluate:
    called with the learner's policy every `loop.evaluate_every` iterations. log: called after every iteration.
    Raises ValueError for settings that do not fit, and RuntimeError when rollout processes keep failing.
    """
    ppo = PPOConfig() if ppo is None else ppo
    if (evaluate is None) != (loop.evaluate_every == 0):
        raise ValueError("evaluate and loop.evaluate_every go together: give both or neither")
    if fabric is None:
        fabric = Fabric(accelerator="cpu", devices=1, strategy="somaspeed")
    make_policy = partial(build_policy, dict(model), flow)
    learner = PPOLearner(fabric, _learning(make_policy(), evaluate), ppo)
    result = PPOResult(learner.policy)
    engine = _make_engine(CollectorSpec(make_policy, rollout, loop.workers), loop)
    with engine:
        engine.publish(0, learner.snapshot())
        credit = min(loop.max_lag + 1, loop.iterations) * loop.fragments_per_update
        engine.submit_fragment_credit(credit)
        for iteration in range(loop.iterations):
            row = _iterate(engine, learner, loop, iteration)
            if evaluate is not None and (iteration + 1) % loop.evaluate_every == 0:
                row.update(evaluate(learner.policy))
            result.history.append(row)
            if log is not None:
                log(iteration, row)
    return result


def _learning(policy: nn.Module, evaluate: Evaluate | None) -> nn.Module:
    """The policy as it learns: without the backbone that its rollouts send the features of, unless it is to act."""
    release = getattr(policy, "release_backbone", None)
    if release is not None and evaluate is None and getattr(policy, "sends_features", False):
        release()
    return policy


def _iterate(engine: RolloutEngine, learner: PPOLearner, loop: LoopSettings, iteration: int) -> dict[str, float]:
    """Takes one update's fragments, learns from them, publishes."""
    begin = time.perf_counter()
    with ExitStack() as held:
        leases = [
            held.enter_context(engine.next_fragment(loop.fragment_timeout_s)) for _ in range(loop.fragments_per_update)
        ]
        waited = time.perf_counter() - begin
        fragments = [Fragment.unpack(lease.tensors, lease.facts, lease.version) for lease in leases]
        row = learner.update(fragments)
    engine.publish(iteration + 1, learner.snapshot())
    if iteration + loop.max_lag + 1 < loop.iterations:
        engine.submit_fragment_credit(loop.fragments_per_update)
    wall = time.perf_counter() - begin
    row.update(_rollout_facts([end for one in fragments for end in one.episodes]))
    steps = sum(int(one.timeline.valid_steps.sum()) for one in fragments)
    row.update(
        wall_s=wall,
        learner_idle=waited / wall,
        env_steps=float(steps),
        env_steps_per_s=steps / wall,
        lag=float(max(iteration - lease.version for lease in leases)),
    )
    return row


def _rollout_facts(ends: list[EpisodeEnd]) -> dict[str, float]:
    """Of the episodes that ended in these fragments; nothing when none did."""
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
    from soma_lightning.rl.engine_local import LocalEngine

    return LocalEngine(
        spec,
        loop.workers,
        fragments_per_update=loop.fragments_per_update,
        max_lag=loop.max_lag,
        arena_bytes=loop.arena_mb * 2**20,
        fragment_timeout_s=loop.fragment_timeout_s,
    )
