"""One PPO update: exact first ratios, any split of the rows, any number of ranks, any policy of the contract."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L  # noqa: N812 (Lightning's own convention)
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from soma_lightning.envs.registry import make_group
from soma_lightning.models.flow_mlp import FlowMLPConfig, FlowMLPPolicy
from soma_lightning.models.flow_sde import FlowSDE
from soma_lightning.models.policy import ForwardType
from soma_lightning.optim.fused_adamw import FP32MasterAdamW, FusedAdamW
from soma_lightning.optim.state import MASTER_KEY
from soma_lightning.rl.advantages import gae, normalize_advantages
from soma_lightning.rl.learner import PPOLearner
from soma_lightning.rl.ppo import PPOConfig, policy_loss, reduce_rows, value_loss
from soma_lightning.rl.records import Fragment, Rows, Timeline
from soma_lightning.rl.rollout import PolicyCollector, RolloutSettings
from tests.ranks import ranks_run, whole
from tests.rl.gaussian import GaussianPolicy

#: One worker runs the file: starting its processes takes longest.
pytestmark = pytest.mark.xdist_group("ppo_learner")

ENVS, DECISIONS = 5, 9  # 45 rows: minibatches of 16 leave 13
SETTINGS: dict[str, Any] = {"minibatch_size": 16, "micro_batch_size": 16, "epochs": 2, "lr": 1e-3, "value_lr": 1e-3}


def flow_policy(seed: int = 0) -> FlowMLPPolicy:
    torch.manual_seed(seed)
    policy = FlowMLPPolicy(FlowMLPConfig(state_dim=6, action_dim=2, hidden=16))
    policy.explore_with(FlowSDE(4))
    return policy


def collect(policy: nn.Module, fragments: int = 1) -> list[Fragment]:
    settings = RolloutSettings("point_reach", envs_per_worker=ENVS, decisions=DECISIONS)
    with make_group("point_reach", {}, num_slots=ENVS) as envs:
        collector = PolicyCollector(policy, envs, settings)
        found = [collector.collect(index, 0) for index in range(fragments)]
    return [Fragment.unpack(one.tensors, one.facts, 0) for one in found]


def fabric_of(layout: str) -> L.Fabric:
    from soma_lightning import FabricSomaSpeedStrategy

    strategy = FabricSomaSpeedStrategy(layout=layout, report=False)
    fabric = L.Fabric(accelerator="cpu", devices=int(os.environ.get("WORLD_SIZE", "1")), strategy=strategy)
    fabric.launch()
    return fabric


def learner_of(policy: nn.Module, **changes: Any) -> PPOLearner:
    return PPOLearner(fabric_of("auto"), policy, PPOConfig(**{**SETTINGS, **changes}))


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert set(one) == set(other)
    return max((one[name] - other[name]).abs().max().item() for name in one)


# -- replay is exact --------------------------------------------------------------------------------------------------


def test_the_first_ratio_is_exactly_one() -> None:
    policy = flow_policy()
    logged = learner_of(policy, minibatch_size=45, micro_batch_size=45, epochs=1).update(collect(policy))
    assert logged["ratio_deviation"] == 0
    assert logged["approx_kl"] == 0
    assert logged["clip_fraction"] == 0
    assert logged["logp_gap_max"] < 1e-4  # the rollouts scored 5 rows at a time, this learner 45
    assert logged["optimizer_steps"] == 1


def test_the_rollouts_own_scores_are_exact_in_their_own_batches() -> None:
    policy = flow_policy()
    fragment = collect(policy)[0]
    replay = [
        policy(
            ForwardType.DEFAULT,
            forward_inputs={name: value[row : row + ENVS] for name, value in fragment.inputs.items()},
        )
        for row in range(0, ENVS * DECISIONS, ENVS)
    ]
    assert torch.equal(torch.cat([one["logprobs"] for one in replay]), fragment.log_probs)
    assert torch.equal(torch.cat([one["values"] for one in replay]), fragment.timeline.values[:-1].flatten())


@pytest.mark.parametrize("interpolate", [False, True])
def test_without_a_learning_rate_nothing_moves(interpolate: bool) -> None:
    policy = flow_policy()
    fragments = collect(policy)
    changes: dict[str, Any] = {"interpolate_proximal": True, "recompute_log_probs": False} if interpolate else {}
    learner = learner_of(policy, lr=0.0, value_lr=0.0, weight_decay=0.0, **changes)
    before, value_losses = whole(policy), []
    for _ in range(2):
        logged = learner.update(fragments)
        assert logged["clip_fraction"] == 0
        assert logged["approx_kl"] <= 1e-9
        assert logged["ratio_deviation"] <= 1e-4
        value_losses.append(logged["value_loss"])
    assert difference(before, whole(policy)) == 0
    assert value_losses[0] == pytest.approx(value_losses[1], rel=1e-6)


def test_an_update_moves_policy_and_critic() -> None:
    policy = flow_policy()
    fragments = collect(policy)
    before = whole(policy)
    logged = learner_of(policy).update(fragments)
    after = whole(policy)
    assert all((before[name] - after[name]).abs().max() > 0 for name in before)
    assert logged["ratio_deviation"] > 1e-4
    assert (logged["optimizer_steps"], logged["epochs"]) == (3, 2)
    assert logged["grad_norm"] > 0


# -- the update is the one that is written down -----------------------------------------------------------------------


def written_down(policy: nn.Module, fragments: Sequence[Fragment], config: PPOConfig) -> None:
    """The same update in plain torch: means over the rows of each minibatch, clipping, AdamW."""
    rows = Rows.of(fragments)
    parts = []
    for one in (fragment.timeline for fragment in fragments):
        parts.append(gae(one.rewards, one.values, one.terminated, one.truncated, one.bootstrap_values))
    advantages = normalize_advantages(torch.cat([part.advantages.flatten() for part in parts]))
    returns = torch.cat([part.returns.flatten() for part in parts])
    groups = [
        {"params": [p for n, p in policy.named_parameters() if not n.startswith("value")], "lr": config.lr},
        {"params": [p for n, p in policy.named_parameters() if n.startswith("value")], "lr": config.value_lr},
    ]
    optimizer = torch.optim.AdamW(groups, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay)

    def replay(index: Tensor) -> tuple[Tensor, Tensor]:
        found = policy(ForwardType.DEFAULT, forward_inputs=rows.forward_inputs(index, torch.device("cpu")))
        return reduce_rows(found["logprobs"], rows.valid_steps[index]), found["values"]

    with torch.no_grad():
        proximal = replay(torch.arange(len(rows)))[0]
    weights = (proximal - reduce_rows(rows.log_probs, rows.valid_steps)).exp()
    for epoch in range(config.epochs):
        order = torch.from_numpy(np.random.default_rng((config.seed, 0, epoch)).permutation(len(rows)))
        for index in order.split(config.minibatch_size):
            log_probs, values = replay(index)
            actor = policy_loss(log_probs, proximal[index], weights[index], advantages[index], config).loss
            critic = value_loss(values, rows.values[index], returns[index], config).loss
            optimizer.zero_grad()
            (actor + critic).mean().backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), config.max_grad_norm)
            optimizer.step()


@pytest.mark.parametrize("micro_batch_size", [16, 5])
@pytest.mark.parametrize("max_grad_norm", [0.05, 100.0])
def test_an_update_with_a_ragged_minibatch_equals_plain_torch(micro_batch_size: int, max_grad_norm: float) -> None:
    fragments = collect(flow_policy(), fragments=2)[:1]
    mine, plain = flow_policy(), flow_policy()
    changes = {"micro_batch_size": micro_batch_size, "max_grad_norm": max_grad_norm}
    learner = learner_of(mine, **changes)
    learner.update(fragments)
    written_down(plain, fragments, learner.config)
    assert difference(whole(mine), whole(plain)) <= 1e-6
    assert difference(whole(mine), whole(flow_policy())) > 1e-3


@pytest.mark.parametrize("interpolate", [False, True])
def test_micro_batches_equal_one_batch(interpolate: bool) -> None:
    """Also where the rollouts lag and some behaviour weights lie above the bound."""
    policy = flow_policy()
    fragments = collect(policy)
    for fragment in fragments:  # rollouts by other weights, a few rows far away
        fragment.log_probs = fragment.log_probs + 0.02 * torch.randn(fragment.log_probs.shape)
        fragment.log_probs[:6] -= 0.2
    found = []
    for micro_batch_size in (16, 3):
        policy = flow_policy()
        learner = learner_of(
            policy,
            micro_batch_size=micro_batch_size,
            interpolate_proximal=interpolate,
            recompute_log_probs=not interpolate,
        )
        learner.updates = 1
        found.append((learner.update(fragments), whole(policy)))
    assert difference(found[0][1], found[1][1]) <= 1e-6
    for name, value in found[0][0].items():
        assert found[1][0][name] == pytest.approx(value, rel=1e-3, abs=1e-5), name
    assert found[0][0]["behaviour_weight"] != 1


def test_fragments_are_cut_apart_before_advantages_are_made() -> None:
    """Two fragments of one environment each are not one column of twice the length."""
    policy = flow_policy()
    both = collect(policy, fragments=2)
    columns = learner_of(policy)._columns(Rows.of(both), both)
    alone = [learner_of(policy, normalize_advantages=False)._columns(Rows.of([one]), [one]) for one in both]
    assert torch.equal(columns["returns"], torch.cat([one["returns"] for one in alone]))
    expected = normalize_advantages(torch.cat([one["advantages"] for one in alone]))
    assert torch.equal(columns["advantages"], expected)


def test_every_epoch_has_a_permutation_of_its_own_that_a_resumed_run_repeats() -> None:
    learner = learner_of(flow_policy())
    first, second = learner._order(45, 0), learner._order(45, 1)
    assert sorted(first) == sorted(second) == list(range(45))
    assert (first != second).any()
    assert (learner_of(flow_policy())._order(45, 0) == first).all()
    learner.updates = 1
    assert (learner._order(45, 0) != first).any()
    assert (learner_of(flow_policy(), seed=1)._order(45, 0) != first).any()


def test_target_kl_ends_the_epochs() -> None:
    policy = flow_policy()
    fragments = collect(policy)
    logged = learner_of(policy, epochs=8, target_kl=1e-7, lr=1e-2).update(fragments)
    assert logged["epochs"] == 1
    policy = flow_policy()
    assert learner_of(policy, epochs=3, target_kl=1e3).update(fragments)["epochs"] == 3


def test_the_critic_warms_up_alone() -> None:
    policy = flow_policy()
    learner = learner_of(policy, critic_warmup_updates=1, weight_decay=0.0)
    fragments = collect(policy)
    before = whole(policy)
    learner.update(fragments)
    after = whole(policy)
    for name, value in before.items():
        assert ((after[name] - value).abs().max() > 0) == name.startswith("value"), name
    learner.update(fragments)
    assert difference(whole(policy), after) > 0
    moved = {name for name, value in whole(policy).items() if (value - after[name]).abs().max() > 0}
    assert moved == set(after)


# -- the optimizer ----------------------------------------------------------------------------------------------------


def test_the_value_head_has_its_own_learning_rate() -> None:
    policy = flow_policy()
    learner = learner_of(policy, lr=0.0, value_lr=1e-2, weight_decay=0.0)
    before = whole(policy)
    learner.update(collect(policy))
    for name, value in whole(policy).items():
        assert ((value - before[name]).abs().max() > 0) == name.startswith("value_head."), name
    rates = {group["lr"]: len(group["params"]) for group in learner.optimizer.param_groups}
    assert rates == {0.0: 6, 1e-2: 6}


class BF16Gaussian(GaussianPolicy):
    """Its mean is computed in bf16, the critic in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.mean.bfloat16()

    def _distribution(self, states: Tensor) -> Any:
        mean = self.mean(states.bfloat16()).float().unflatten(1, (self.chunk, self.action_dim))
        return torch.distributions.Normal(mean, self.log_std.exp())


def test_a_policy_in_bf16_gets_fp32_masters() -> None:
    torch.manual_seed(0)
    policy = BF16Gaussian()
    learner = learner_of(policy, lr=1e-6, value_lr=1e-6, minibatch_size=45, micro_batch_size=45, epochs=1)
    optimizer: Any = learner.optimizer.optimizer
    assert isinstance(optimizer, FP32MasterAdamW)
    before = whole(policy)
    logged = learner.update(collect(policy))
    assert logged["ratio_deviation"] == 0
    after = whole(policy)
    assert all(after[name].dtype == value.dtype for name, value in before.items())
    weight = policy.mean[0].weight
    master = next(state[MASTER_KEY] for p, state in optimizer.state.items() if p is weight)
    assert 0 < (master - before["mean.0.weight"].float()).abs().max().item() < 1e-5


def test_a_policy_in_float32_gets_the_plain_optimizer() -> None:
    learner = learner_of(flow_policy())
    optimizer: Any = learner.optimizer.optimizer
    assert isinstance(optimizer, FusedAdamW)
    assert not isinstance(optimizer, FP32MasterAdamW)
    with pytest.raises(ValueError, match="nothing to train"):
        learner_of(flow_policy().requires_grad_(False))


# -- other policies ---------------------------------------------------------------------------------------------------


def bandit(policy: GaussianPolicy, states: Tensor) -> Fragment:
    """One decision of each environment, which ends; the reward is near 1 where the actions are near the states."""
    actions, result = policy.predict_action_batch({"states": states, "task_descriptions": [""] * len(states)})
    rewards = (-(actions - states[:, None, :2]).square().mean((1, 2))).exp()[None]
    over = torch.ones_like(rewards, dtype=torch.bool)
    values = torch.stack([result["prev_values"], torch.zeros(len(states))])
    timeline = Timeline(rewards, values, over, ~over, torch.zeros_like(rewards), torch.full_like(rewards, 4).int())
    return Fragment(result["forward_inputs"], None, result["prev_logprobs"], timeline, [], version=0)


def test_a_policy_that_is_no_flow_learns_by_the_same_update() -> None:
    torch.manual_seed(0)
    policy = GaussianPolicy()
    learner = learner_of(policy, minibatch_size=128, micro_batch_size=128, epochs=4, lr=1e-3, value_lr=1e-3)
    rewards = []
    for _ in range(30):
        fragment = bandit(policy, torch.rand(256, 6) * 2 - 1)
        rewards.append(fragment.timeline.rewards.mean().item())
        learner.update([fragment])
    assert np.mean(rewards[:3]) < 0.7
    assert np.mean(rewards[-3:]) > 0.8


# -- ranks ------------------------------------------------------------------------------------------------------------


#: layout and settings; minibatches of 22 leave one row, which only one of two ranks has.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "replicate": ("replicate", {}),
    "fsdp": ("fsdp", {}),
    "one row left": ("replicate", {"minibatch_size": 22}),
    "one row left, sharded": ("fsdp", {"minibatch_size": 22}),
    "critic alone": ("replicate", {"critic_warmup_updates": 1}),
    "critic alone, sharded": ("fsdp", {"critic_warmup_updates": 1}),
    "interpolated": ("fsdp", {"interpolate_proximal": True, "recompute_log_probs": False}),
}


def one_update(layout: str, **changes: Any) -> dict[str, Any]:
    """Two epochs on 45 rows in ragged minibatches of micro-batches of 4, on every rank."""
    policy = flow_policy()
    fragments = collect(policy)
    learner = PPOLearner(fabric_of(layout), policy, PPOConfig(**{**SETTINGS, "micro_batch_size": 4, **changes}))
    logged = learner.update(fragments)
    return {"logged": logged, "snapshot": {n: t.clone() for n, t in learner.snapshot().items()}}


def every_case() -> dict[str, Any]:
    return {name: one_update(layout, **changes) for name, (layout, changes) in CASES.items()}


@pytest.fixture(scope="module")
def on_two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return ranks_run(every_case, tmp_path_factory.mktemp("two"))


def assert_equal_to_one_rank(found: dict[str, Any], **changes: Any) -> None:
    policy = flow_policy()
    fragments = collect(policy)
    logged = learner_of(policy, **changes).update(fragments)
    assert difference(found["snapshot"], whole(policy)) <= 1e-6
    assert set(found["logged"]) == set(logged)
    for name, value in logged.items():
        assert found["logged"][name] == pytest.approx(value, rel=1e-3, abs=1e-5), name


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_equal_one(on_two: list[dict[str, Any]], case: str) -> None:
    for rank in on_two:
        assert_equal_to_one_rank(rank[case], **CASES[case][1])


@pytest.mark.parametrize("case", ["replicate", "fsdp"])
def test_a_snapshot_is_whole_on_every_rank(on_two: list[dict[str, Any]], case: str) -> None:
    names = {name for name, _ in flow_policy().named_parameters()}
    for rank in on_two:
        assert set(rank[case]["snapshot"]) == names
    first, second = (rank[case]["snapshot"] for rank in on_two)
    assert difference(first, second) == 0
    flow_policy().load_state_dict(first)


@pytest.mark.slow
def test_four_ranks_in_two_replicas_equal_one(tmp_path: Path) -> None:
    for rank in ranks_run(one_update, tmp_path, world_size=4, arguments={"layout": "hsdp"}):
        assert_equal_to_one_rank(rank)


def test_more_ranks_than_rows_of_a_minibatch_only_keep_step() -> None:
    """Every rank gets as many micro-batches; one without rows computes one that does not count."""
    learner = learner_of(flow_policy(), minibatch_size=4, micro_batch_size=1)
    order = np.arange(9)
    seen: list[int] = []
    steps = []
    for rank in range(3):
        learner.fabric = _Rank(rank, 3)  # type: ignore[assignment]
        pieces = list(learner._micro_batches(order))
        steps.append([len(step) for step in pieces])
        seen += [int(row) for step in pieces for index, counts in step for row in index[counts]]
    assert steps == [[2, 2, 1]] * 3
    assert sorted(seen) == list(range(9))


class _Rank:
    def __init__(self, global_rank: int, world_size: int) -> None:
        self.global_rank, self.world_size = global_rank, world_size
