"""Who is compared in the sharded benchmark, and what a user of each has to write around the same network and loop?

All run under `lightning.pytorch.Trainer(precision="bf16-mixed")`, clip at MAX_NORM and step AdamW with one setting;
peers use torch.optim.AdamW(fused=True) on a GPU. Peers gather in bf16 and reduce in fp32, as "somaspeed" does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy, fully_shard

from bench.sharded_models import Batch, Problem
from soma_lightning import SomaSpeedStrategy
from soma_lightning.optim.fused_adamw import FusedAdamW

MAX_NORM = 1.0
#: Small: without a warm-up, a larger one makes losses jump, and with them the roundings that contenders differ by.
LEARNING_RATE = 3e-5


class Training(pl.LightningModule):
    """The network, its batches and its optimizer; what "somaspeed" needs.

    losses: 0-d, of this rank, one a step. norms: 0-d, over all ranks, before clipping, of the steps that kept one.
    keeps_norms: whether the present step keeps its norm.
    """

    def __init__(self, network: nn.Module, batches: Sequence[Batch]) -> None:
        super().__init__()
        self.network = network
        self.batches = batches
        self.losses: list[Tensor] = []
        self.norms: list[Tensor] = []
        self.keeps_norms = True

    def training_step(self, batch: Tensor, batch_index: int) -> Tensor:
        loss: Tensor = self.network(self.batches[batch_index % len(self.batches)])
        self.losses.append(loss.detach())
        return loss

    def trained(self) -> list[nn.Parameter]:
        """Parameters that train; today's, which sharding may have replaced."""
        return [p for p in self.parameters() if p.requires_grad]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.trained(), lr=LEARNING_RATE)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Keeps the norm of the step that was just taken."""
        assert isinstance(optimizer, FusedAdamW)
        if self.keeps_norms:
            self.norms.append(optimizer.last_grad_norm.clone())


class PeerTraining(Training):
    """With torch's fused AdamW and torch's clipping, which Lightning would refuse together."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = self.trained()
        return torch.optim.AdamW(trained, lr=LEARNING_RATE, fused=trained[0].device.type == "cuda")

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        norm = self.clip()
        if self.keeps_norms:
            self.norms.append(norm.detach())

    def clip(self) -> Tensor:
        """What Lightning calls for `gradient_clip_val`."""
        return torch.nn.utils.clip_grad_norm_(self.trained(), MAX_NORM)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """The norm was kept when the gradients were clipped."""


class FSDPTraining(PeerTraining):
    """FSDP (the first) clips through its own root; Lightning leaves that to the user."""

    def clip(self) -> Tensor:
        root: Any = self.trainer.strategy.model
        norm: Tensor = root.clip_grad_norm_(MAX_NORM)
        return norm


class ModelParallelTraining(PeerTraining):
    """FSDP2 by hand, block by block, frozen blocks included, as the documentation of Lightning and torch shows."""

    def __init__(self, network: nn.Module, batches: Sequence[Batch], unit_classes: tuple[type[nn.Module], ...]) -> None:
        super().__init__(network, batches)
        self._unit_classes = unit_classes

    def configure_model(self) -> None:
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
        mesh = self.device_mesh["data_parallel"]  # type: ignore[index]
        for module in reversed(list(self.network.modules())):  # inside out
            if isinstance(module, self._unit_classes) or module is self.network:
                fully_shard(module, mesh=mesh, mp_policy=policy)


class UnsynchronizedTraining(PeerTraining):
    """Wrong on purpose: every rank keeps the gradients of its own rows."""

    def on_train_start(self) -> None:
        root: Any = self.trainer.strategy.model
        root.require_backward_grad_sync = False


@dataclass(frozen=True)
class Contender:
    """One way to train. note: what it does, for the page. strategy: the Trainer's. module: the LightningModule.

    divided: whether a rank's optimizer state is its share, so that ranks add up; else every rank holds all of it.
    baseline: who trains with one process for the weak scaling of this contender.
    """

    name: str
    note: str
    strategy: Callable[[Problem], Any]
    module: Callable[[Problem, nn.Module, Sequence[Batch]], Training]
    divided: bool
    baseline: str


def _ours(problem: Problem, network: nn.Module, batches: Sequence[Batch]) -> Training:
    return Training(network, batches)


def _peer(problem: Problem, network: nn.Module, batches: Sequence[Batch]) -> Training:
    return PeerTraining(network, batches)


def _fsdp_strategy(problem: Problem) -> FSDPStrategy:
    precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return FSDPStrategy(auto_wrap_policy=set(problem.unit_classes), mixed_precision=precision)


_ALL = (
    Contender(
        "somaspeed",
        "FSDP2; frozen parameters whole on every rank, norms kept in fp32, one fused step after one all-reduce",
        lambda problem: SomaSpeedStrategy(report=False),
        _ours,
        divided=True,
        baseline="somaspeed, one process",
    ),
    Contender(
        "somaspeed_keep",
        "the same with reshard_after_forward=False: trained parameters are gathered once a step and held till backward",
        lambda problem: SomaSpeedStrategy(report=False, reshard_after_forward=False),
        _ours,
        divided=True,
        baseline="somaspeed, one process",
    ),
    Contender(
        "somaspeed_replicate",
        "everything whole on both ranks, without FSDP2; gradients averaged in buckets during the backward pass",
        lambda problem: SomaSpeedStrategy(layout="replicate", report=False),
        _ours,
        divided=False,
        baseline="somaspeed, one process",
    ),
    Contender(
        "ddp",
        "DDPStrategy(gradient_as_bucket_view=True): everything whole on both ranks, gradients averaged in fp32 buckets",
        lambda problem: DDPStrategy(gradient_as_bucket_view=True),
        _peer,
        divided=False,
        baseline="stock, one process",
    ),
    Contender(
        "fsdp",
        "FSDPStrategy, each block wrapped: flat parameters, frozen ones divided and gathered too",
        _fsdp_strategy,
        lambda problem, network, batches: FSDPTraining(network, batches),
        divided=True,
        baseline="stock, one process",
    ),
    Contender(
        "model_parallel",
        "ModelParallelStrategy, `fully_shard` on each block: FSDP2, frozen blocks divided and gathered too",
        lambda problem: ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
        lambda problem, network, batches: ModelParallelTraining(network, batches, problem.unit_classes),
        divided=True,
        baseline="stock, one process",
    ),
    Contender(
        "unsynchronized",
        "wrong on purpose, to see that the comparison of losses and norms catches it",
        lambda problem: DDPStrategy(),
        lambda problem, network, batches: UnsynchronizedTraining(network, batches),
        divided=False,
        baseline="stock, one process",
    ),
    Contender(
        "somaspeed, one process",
        'strategy="somaspeed", the same rows on one GPU',
        lambda problem: SomaSpeedStrategy(report=False),
        _ours,
        divided=False,
        baseline="",
    ),
    Contender(
        "stock, one process",
        'strategy="auto", the same rows on one GPU',
        lambda problem: "auto",
        _peer,
        divided=False,
        baseline="",
    ),
)

CONTENDERS = {contender.name: contender for contender in _ALL if contender.baseline}
BASELINES = {contender.name: contender for contender in _ALL if not contender.baseline}
#: What is compared unless somebody asks for others.
DEFAULT_CONTENDERS = ("ddp", "somaspeed", "model_parallel", "fsdp", "somaspeed_replicate", "somaspeed_keep")
