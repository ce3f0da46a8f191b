"""What to change when a run is out of memory: who was doing what, how much is in use, what needs less in this run."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch.nn import Module

from soma_lightning.layout.mesh import Layout

#: What a rank was doing; decides what would have helped.
Activity = Literal["set-up", "forward pass", "backward pass", "optimizer step", "evaluation"]

#: Free but reserved memory that is worth a word.
_FRAGMENTED = 0.1


@dataclass(frozen=True)
class Situation:
    """The settings of a run that decide how much memory it needs.

    where: for example "global_step 12", or "". accumulate: `accumulate_grad_batches` where the Trainer accumulates.
    frozen: "auto", "replicate" or "shard". reshard_after_forward: as in `SomaSpeedStrategy`.
    """

    activity: Activity
    where: str
    device: torch.device
    layout: Layout
    precision: str
    frozen: str = "auto"
    reshard_after_forward: bool | None = None
    accumulate: int | None = None


@contextlib.contextmanager
def explaining(situation: Situation, modules: Iterable[Module]) -> Iterator[None]:
    """A torch.OutOfMemoryError from inside leaves with a note; of contexts in each other the innermost writes it."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        if not getattr(error, "soma_explained", False):
            error.soma_explained = True  # type: ignore[attr-defined]
            error.add_note(note(situation, list(modules)))
        raise


def note(situation: Situation, modules: list[Module]) -> str:
    """The text of the note. modules: what the run trains."""
    rank = f"rank {dist.get_rank()} of {dist.get_world_size()}" if dist.is_initialized() else "rank 0 of 1"
    where = f" of {situation.where}" if situation.where else ""
    ways = [*_settings(situation, modules), *_activations(situation, modules), *_allocator(situation)]
    ways = ways or ["a smaller model, or a device with more memory: no setting of this run would need less"]
    return "\n".join(
        [
            f"{rank} was out of memory in the {situation.activity}{where}",
            f"in use: {_in_use(situation.device)}",
            "what needs less:",
            *(f"  - {way}" for way in ways),
        ]
    )


def _settings(now: Situation, modules: list[Module]) -> Iterator[str]:
    """What divides or shrinks parameters, gradients and optimizer state."""
    layout, ranks = now.layout, dist.get_world_size() if dist.is_initialized() else 1
    whole = [p for m in modules for p in m.parameters() if not p.requires_grad and not hasattr(p, "device_mesh")]
    if layout.replicate > 1:
        yield (
            f"layout='fsdp' (now replicate={layout.replicate}, shard={layout.shard}): a rank holds 1/{ranks} of the "
            "trained parameters, their gradients and moments"
        )
    if layout.shard != 1 and whole and now.frozen != "shard":
        size = sum(p.numel() * p.element_size() for p in whole)
        yield f"frozen='shard' (now {now.frozen!r}): {_gib(size)} of frozen parameters are whole on every rank"
    if layout.shard != 1 and now.reshard_after_forward is False:
        yield "reshard_after_forward=True (now False): gathered parameters are freed until the backward pass"
    if ranks == 1 and now.device.type == "cuda" and torch.cuda.device_count() > 1:
        yield f"devices={torch.cuda.device_count()} (now 1): parameters, gradients and moments are divided over them"
    if now.precision == "64-true":
        yield "precision='32-true' (now '64-true'): half of everything"
    if now.precision == "32-true" and now.activity == "set-up":
        yield "precision='bf16-true' (now '32-true'): half of the parameters; fp32 masters come with the first step"


def _activations(now: Situation, modules: list[Module]) -> Iterator[str]:
    """What shrinks that which a batch leaves for its backward pass."""
    if now.activity == "evaluation":
        yield "a smaller batch_size of the evaluation data"
    if now.activity in ("forward pass", "backward pass"):
        if now.accumulate is None:
            yield "a smaller batch_size, with gradients accumulated over more batches before each step"
        else:
            yield (
                f"half the batch_size with accumulate_grad_batches={2 * now.accumulate} (now {now.accumulate}): the "
                "same effective batch"
            )
        children = [child for module in modules for child in module.modules()]
        if any(hasattr(child, "gradient_checkpointing_enable") for child in children):
            if not any(getattr(child, "gradient_checkpointing", False) for child in children):
                yield "gradient_checkpointing_enable() of the transformers model: activations are computed twice"
        else:
            yield "torch.utils.checkpoint around the blocks of the module: activations are computed twice, not kept"
    if now.precision == "32-true" and now.activity not in ("set-up", "optimizer step"):
        yield "precision='bf16-mixed' (now '32-true'): most activations take half"


def _allocator(now: Situation) -> Iterator[str]:
    if now.device.type != "cuda" or "expandable_segments" in _allocator_settings():
        return
    free = torch.cuda.memory_reserved(now.device) - torch.cuda.memory_allocated(now.device)
    if free > _FRAGMENTED * torch.cuda.get_device_properties(now.device).total_memory:
        yield f"PYTORCH_ALLOC_CONF=expandable_segments:True: {_gib(free)} are reserved in pieces that did not fit"


def _allocator_settings() -> str:
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    return " ".join(os.environ.get(name, "") for name in names)


def _in_use(device: torch.device) -> str:
    if device.type != "cuda":
        return f"{_gib(1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)} at the peak of this process"
    tensors, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    free, total = torch.cuda.mem_get_info(device)
    peak, others = torch.cuda.max_memory_allocated(device), max(total - free - reserved, 0)
    return (
        f"{_gib(tensors)} by tensors (peak {_gib(peak)}), {_gib(reserved - tensors)} reserved and free, {_gib(others)} "
        f"outside of torch's allocator, of {_gib(total)} on {device}"
    )


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"
