"""How does a policy learn from fragments? One PPO update: advantages, rescoring, epochs of minibatches.

Everything runs through Fabric: the strategy shards or replicates the policy, and its fused step divides by the number
of rows that all ranks and micro-batches counted. Every rank has all rows and works on its own part of each minibatch,
so any number of ranks makes the same update.

Shape letters: N rows (decisions) of an update, M of a micro-batch.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from lightning.fabric import Fabric
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from soma_lightning.layout.full_state import shard_like
from soma_lightning.models.policy import ForwardType
from soma_lightning.optim.fused_adamw import FP32MasterAdamW, FusedAdamW
from soma_lightning.rl.advantages import gae, normalize_advantages
from soma_lightning.rl.engine import check_fit
from soma_lightning.rl.ppo import (
    PPOConfig,
    behaviour_weights,
    interpolated_proximal,
    policy_loss,
    reduce_rows,
    stop_early,
    truncated_weights,
    value_loss,
)
from soma_lightning.rl.records import Fragment, Rows
from soma_lightning.rl.rollout import Cursor

#: Mean difference of log-probabilities (nats) for the same weights that is no rounding any more.
_MUCH_GAP = 0.05
_LOW_PRECISION = (torch.bfloat16, torch.float16)


class MicroBatch:
    """Rows that go through the network together.

    A plain object: Fabric converts and moves what it finds in mappings and dataclasses, and nothing here wants that.
    columns: {name: [M]} that the loss reads. counts: bool [M]; a row that does not count only keeps this rank in step
    with the others. All on the device.
    """

    def __init__(self, inputs: dict[str, Any], valid_steps: Tensor, columns: dict[str, Tensor], counts: Tensor) -> None:
        self.inputs, self.valid_steps, self.columns, self.counts = inputs, valid_steps, columns, counts


class Objective(nn.Module):
    """The module that Fabric sets up: a policy, and the loss sum of a micro-batch."""

    def __init__(self, policy: nn.Module, config: PPOConfig) -> None:
        super().__init__()
        self.policy, self.config = policy, config
        self.soma_normalizer: Tensor | None = None
        self.fact_names: tuple[str, ...] = ()

    def forward(self, batch: MicroBatch, task: str) -> tuple[Tensor, Tensor]:
        """task "score": (log-probabilities, values), [M] each. Otherwise (loss, sums of what is logged), over the rows
        that count: "learn", or "learn values" for the critic alone.
        """
        replay = _checked(self.policy(ForwardType.DEFAULT, forward_inputs=batch.inputs), len(batch.counts))
        log_probs = reduce_rows(replay["logprobs"].float(), batch.valid_steps)
        values = replay["values"].float().reshape(-1)
        if task == "score":
            return log_probs, values
        given, counts = batch.columns, batch.counts
        critic = value_loss(values, given["old_values"], given["returns"], self.config)
        proximal, weights = self._reference(log_probs, given)
        actor = policy_loss(log_probs, proximal, weights, given["advantages"], self.config)
        entropy = replay["entropy"].float().reshape(-1)
        loss = self.config.value_coef * critic.loss
        if task == "learn":
            loss = loss + actor.loss - self.config.entropy_coef * entropy
        logged = {"policy_loss": actor.loss, "value_loss": critic.loss, "entropy": entropy}
        logged.update(actor.facts, **critic.facts)
        if self.config.interpolate_proximal:
            logged["behaviour_weight"] = weights
        self.fact_names = tuple(logged)
        self.soma_normalizer = counts.sum()
        sums = torch.stack([torch.where(counts, value.detach(), 0.0).sum() for value in logged.values()])
        return torch.where(counts, loss, 0.0).sum(), sums

    def _reference(self, log_probs: Tensor, given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Proximal log-probabilities and behaviour weights, [M] each."""
        if not self.config.interpolate_proximal:
            return given["proximal"], given["weights"]
        behaviour, lag = given["behaviour"], given["lag"]
        proximal = interpolated_proximal(log_probs.detach(), behaviour, lag)
        return proximal, truncated_weights(proximal, behaviour, self.config)


def _checked(replay: dict[str, Tensor], rows: int) -> dict[str, Tensor]:
    """What `default_forward` returned. ValueError naming an entry that is missing or has not one number a row."""
    missing = [name for name in ("logprobs", "values", "entropy") if name not in replay]
    if missing:
        raise ValueError(f"default_forward must return logprobs, values and entropy; {', '.join(missing)} missing")
    for name in ("values", "entropy"):
        if replay[name].shape not in ((rows,), (rows, 1)):
            raise ValueError(
                f"default_forward must return {name} as [B] or [B, 1] with B={rows}, got {list(replay[name].shape)}"
            )
    return replay


class PPOLearner:
    """Policy, optimizer and the update, on every rank of a launched `fabric`.

    policy: keeps the policy contract; what requires grad is trained, a `value_head` (or whatever's name begins with
    "value") with a learning rate of its own.
    """

    def __init__(self, fabric: Fabric, policy: nn.Module, config: PPOConfig) -> None:
        self.fabric, self.config = fabric, config
        module, self.optimizer = fabric.setup(Objective(policy, config), _optimizer(policy, config))
        self.objective: Any = module
        self.updates = 0
        self._has_warned = False

    @property
    def policy(self) -> nn.Module:
        policy: nn.Module = self.objective.module.policy
        return policy

    @torch.no_grad()
    def snapshot(self) -> dict[str, Tensor]:
        """{name in the policy: whole tensor} of everything that trains. Shards are gathered: all ranks call it."""
        return {name: p.full_tensor() if isinstance(p, DTensor) else p.detach() for name, p in _trained(self.policy)}

    def save(self, file: str | Path, cursors: Mapping[int, Cursor]) -> None:
        """Writes what a later run needs to go on: what trains, the optimizer, the number of updates, `cursors`.

        All ranks call it together; rank 0 writes. The file is replaced whole or not at all.
        """
        file = Path(file)
        partial = file.with_suffix(file.suffix + ".partial")
        content = {
            "weights": self.snapshot(),
            "optimizer": self.optimizer,
            "updates": self.updates,
            "cursors": {worker: [list(counts) for counts in cursor] for worker, cursor in cursors.items()},
        }
        self.fabric.save(partial, content)
        if self.fabric.global_rank == 0:
            partial.replace(file)
        self.fabric.barrier()

    @torch.no_grad()
    def load(self, file: str | Path) -> dict[int, Cursor]:
        """Goes on from what `save` wrote, on any number of ranks; returns the cursors.

        Raises ValueError when the file is damaged or of another policy or optimizer.
        """
        try:
            saved = self.fabric.load(file, weights_only=True)
            weights, cursors, updates = saved["weights"], saved["cursors"], int(saved["updates"])
            trained = dict(_trained(self.policy))
            check_fit(weights, trained)
            for name, parameter in trained.items():
                parameter.copy_(shard_like(weights[name], parameter))
            self.optimizer.load_state_dict(saved["optimizer"])  # after the weights: masters of bf16 ones are in it
        except (RuntimeError, ValueError, KeyError, TypeError, EOFError, pickle.UnpicklingError) as error:
            raise ValueError(f"{file} is no state of this run ({error}); remove it to begin anew") from error
        self.updates = updates
        return {int(worker): [(int(a), int(b)) for a, b in cursor] for worker, cursor in cursors.items()}

    def update(self, fragments: Sequence[Fragment]) -> dict[str, float]:
        """Learns from `fragments`, the same ones on every rank; returns what is logged.

        Advantages come from whole fragments, before anything is shuffled. With `recompute_log_probs` the rows are
        scored again with this learner's own forward, in the micro-batches of the first epoch, so that the first ratio
        is exactly 1; how far the rollouts' own scores were off is logged as logp_gap.
        """
        rows = Rows.of(fragments, getattr(self.policy, "replay_entries", lambda names: names))
        columns = self._columns(rows, fragments)
        logged = _explained(columns)
        order = self._order(len(rows), epoch=0)
        scored = self._score(rows, order)
        gap = (scored - columns["behaviour"]).abs()
        logged |= {"logp_gap": gap.mean().item(), "logp_gap_max": gap.max().item()}
        self._warn_of_gap(gap[rows.version == self.updates])
        columns["proximal"] = scored if self.config.recompute_log_probs else columns["behaviour"]
        if not self.config.interpolate_proximal:
            columns["weights"], facts = behaviour_weights(columns["proximal"], columns["behaviour"], self.config)
            logged |= facts
        for epoch in range(self.config.epochs):
            order = order if epoch == 0 else self._order(len(rows), epoch)
            logged |= self._epoch(rows, columns, order)
            logged["epochs"] = float(epoch + 1)
            if stop_early(logged["approx_kl"], self.config):
                break
        self.updates += 1
        return logged

    def _warn_of_gap(self, gap: Tensor) -> None:
        """Once, when the learner scores rows of its own weights otherwise than the rollout did. gap: of those rows."""
        if len(gap) == 0 or gap.mean() <= _MUCH_GAP or self._has_warned:
            return
        self._has_warned = True
        rank_zero_warn(
            f"log-probabilities differ by {gap.mean():.3g} nats between rollout and learner for the same weights: "
            "default_forward does not compute what predict_action_batch recorded (check_policy finds out), or both run "
            "in different precision"
        )

    # -- rows ---------------------------------------------------------------------------------------------------------

    def _columns(self, rows: Rows, fragments: Sequence[Fragment]) -> dict[str, Tensor]:
        """What the loss reads of all rows, [N] each, on the CPU."""
        parts = []
        for one in (fragment.timeline for fragment in fragments):
            ends = (one.terminated, one.truncated, one.bootstrap_values)
            parts.append(gae(one.rewards, one.values, *ends, self.config.gamma, self.config.gae_lambda))
        advantages = torch.cat([part.advantages.flatten() for part in parts])
        if self.config.normalize_advantages:
            advantages = normalize_advantages(advantages)
        return {
            "advantages": advantages,
            "returns": torch.cat([part.returns.flatten() for part in parts]),
            "old_values": rows.values,
            "behaviour": reduce_rows(rows.log_probs.float().cpu(), rows.valid_steps),
            "lag": self.updates + 1 - rows.version,
        }

    def _order(self, num_rows: int, epoch: int) -> np.ndarray:
        """The epoch's permutation, the same on every rank and after a resume."""
        return np.random.default_rng((self.config.seed, self.updates, epoch)).permutation(num_rows)

    def _micro_batches(self, order: np.ndarray) -> Iterator[list[tuple[Tensor, Tensor]]]:
        """For each optimizer step this rank's micro-batches: (rows int64 [M], whether they count bool [M]).

        Every rank gets as many, so that collective operations meet; where rows run out it computes one that does not
        count.
        """
        world, rank = self.fabric.world_size, self.fabric.global_rank
        for first in range(0, len(order), self.config.minibatch_size):
            minibatch = order[first : first + self.config.minibatch_size]
            largest = -(-len(minibatch) // world)
            mine = np.array_split(minibatch, world)[rank]
            pieces = np.array_split(mine, -(-largest // self.config.micro_batch_size))
            yield [
                (torch.from_numpy(piece), torch.ones(len(piece), dtype=torch.bool))
                if len(piece)
                else (torch.from_numpy(minibatch[:1].copy()), torch.zeros(1, dtype=torch.bool))
                for piece in pieces
            ]

    def _batch(self, rows: Rows, columns: dict[str, Tensor], index: Tensor, counts: Tensor) -> MicroBatch:
        device = self.fabric.device
        chosen = {name: column[index].to(device, non_blocking=True) for name, column in columns.items()}
        valid_steps = rows.valid_steps[index].to(device, non_blocking=True)
        return MicroBatch(rows.forward_inputs(index, device), valid_steps, chosen, counts.to(device, non_blocking=True))

    # -- passes -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _score(self, rows: Rows, order: np.ndarray) -> Tensor:
        """Log-probabilities of all rows under the present weights, [N], on the CPU."""
        scores = torch.zeros(len(rows))
        for micro_batches in self._micro_batches(order):
            for index, counts in micro_batches:
                log_probs, _ = self.objective(self._batch(rows, {}, index, counts), "score")
                scores[index[counts]] = log_probs.cpu()[counts]
        return self._sum(scores.to(self.fabric.device)).cpu()  # each row was scored by one rank

    def _sum(self, values: Tensor) -> Tensor:
        """Over the ranks."""
        if self.fabric.world_size > 1:
            reduced = self.fabric.all_reduce(values, reduce_op="sum")
            assert isinstance(reduced, Tensor)
            return reduced
        return values

    def _epoch(self, rows: Rows, columns: dict[str, Tensor], order: np.ndarray) -> dict[str, float]:
        """One pass over all rows; returns the means of what is logged."""
        task = "learn" if self.updates >= self.config.critic_warmup_updates else "learn values"
        sums: list[Tensor] = []
        norms: list[Tensor] = []
        for micro_batches in self._micro_batches(order):
            self.optimizer.zero_grad()
            for number, (index, counts) in enumerate(micro_batches):
                waits = number < len(micro_batches) - 1
                with self.fabric.no_backward_sync(self.objective, enabled=waits):
                    loss, logged = self.objective(self._batch(rows, columns, index, counts), task)
                    self.fabric.backward(loss)
                sums.append(logged)
            norm = self.fabric.clip_gradients(self.objective, self.optimizer, max_norm=self.config.max_grad_norm)
            norms.append(cast("Tensor", norm))
            self.optimizer.step()
        total = self._sum(torch.stack(sums).double().sum(0))
        names = self.objective.module.fact_names
        facts = dict(zip(names, (total / len(rows)).tolist(), strict=True))
        return {**facts, "grad_norm": torch.stack(norms).mean().item(), "optimizer_steps": float(len(norms))}


def _trained(policy: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in policy.named_parameters() if p.requires_grad]


def _optimizer(policy: nn.Module, config: PPOConfig) -> FusedAdamW:
    """AdamW with the critic's learning rate for parameters whose name begins with "value", the policy's for others."""
    trained = dict(_trained(policy))
    if not trained:
        raise ValueError("no parameter of the policy requires grad, so there is nothing to train")
    values = [p for name, p in trained.items() if name.startswith("value")]
    others = [p for name, p in trained.items() if not name.startswith("value")]
    groups = [{"params": others, "lr": config.lr}, {"params": values, "lr": config.value_lr}]
    kind = FP32MasterAdamW if any(p.dtype in _LOW_PRECISION for p in trained.values()) else FusedAdamW
    return kind(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
    )


def _explained(columns: dict[str, Tensor]) -> dict[str, float]:
    """How good the critic was before this update: 1 explains all of the returns' variance, 0 none of it."""
    returns, errors = columns["returns"], columns["returns"] - columns["old_values"]
    spread = returns.var(correction=0).item()
    explained = 1 - errors.var(correction=0).item() / spread if spread > 0 else 0.0
    return {"explained_variance": explained, "return_mean": returns.mean().item()}
