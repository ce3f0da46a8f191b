"""What does a rollout hand to the learner, and how does it travel?

A fragment is T consecutive chunk decisions of B environments under one version of the weights. It travels as named
tensors (in shared memory) and a few plain facts; `unpack` gives it back without a copy.

Shape letters: T decisions, B environments, N = T * B rows in the order of time (row t * B + b), K denoising steps,
H action horizon, A action width.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from soma_lightning.models.features import FrozenFeatures, stack_samples
from soma_lightning.models.flow_policy import FEATURES

_INPUT, _FEATURE = "inputs.", "features."

#: Frozen features of one row: {part: [S, tokens, W]}.
Sample = Mapping[str, Tensor]


@dataclass
class Timeline:
    """What happened at every decision: rewards and ends.

    rewards: float32 [T, B], summed over the executed steps of the chunk. values: float32 [T + 1, B] of the behaviour
    policy, the last row that of the observation after the cut. terminated, truncated: bool [T, B]; the environment was
    reset after such a chunk. bootstrap_values: float32 [T, B], the value of the last observation of a truncated
    episode, 0 elsewhere. valid_steps: int32 [T, B], actions that were executed before the episode's end.
    """

    rewards: Tensor
    values: Tensor
    terminated: Tensor
    truncated: Tensor
    bootstrap_values: Tensor
    valid_steps: Tensor


@dataclass
class EpisodeEnd:
    """An episode that ended inside a fragment. steps: executed in it, since the run began it."""

    task: str
    init_state: int
    success: bool
    steps: int


@dataclass
class Fragment:
    """T * B decisions and their outcome.

    inputs: {entry of `forward_inputs`: [N, ...]}. samples: frozen features, one a row; None for policies without.
    log_probs: [N, ...], of the behaviour policy. version: of its weights.
    """

    inputs: dict[str, Tensor]
    samples: Sequence[Sample] | None
    log_probs: Tensor
    timeline: Timeline
    episodes: list[EpisodeEnd]
    version: int

    @property
    def num_rows(self) -> int:
        return self.log_probs.shape[0]

    def pack(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """(tensors to be copied, facts): what `unpack` takes. Features are laid end to end, without padding."""
        tensors = {_INPUT + name: value for name, value in self.inputs.items()}
        tensors["log_probs"] = self.log_probs
        tensors.update({one.name: getattr(self.timeline, one.name) for one in fields(Timeline)})
        facts: dict[str, Any] = {"episodes": [vars(end) for end in self.episodes], "lengths": None}
        if self.samples is not None:
            facts["lengths"] = [_tokens(sample) for sample in self.samples]
            for part in self.samples[0]:
                # [tokens, S, W]: rows of different length lie end to end.
                tensors[_FEATURE + part] = torch.cat([sample[part].transpose(0, 1) for sample in self.samples])
        return tensors, facts

    @classmethod
    def unpack(cls, tensors: Mapping[str, Tensor], facts: Mapping[str, Any], version: int) -> Fragment:
        """The fragment behind `pack`: views of `tensors`."""
        samples = None
        if facts["lengths"] is not None:
            parts = {name.removeprefix(_FEATURE): one for name, one in tensors.items() if name.startswith(_FEATURE)}
            pieces = {name: torch.split(one, facts["lengths"]) for name, one in parts.items()}
            rows = range(len(facts["lengths"]))
            samples = [{name: piece[row].transpose(0, 1) for name, piece in pieces.items()} for row in rows]
        return cls(
            inputs={name.removeprefix(_INPUT): one for name, one in tensors.items() if name.startswith(_INPUT)},
            samples=samples,
            log_probs=tensors["log_probs"],
            timeline=Timeline(**{one.name: tensors[one.name] for one in fields(Timeline)}),
            episodes=[EpisodeEnd(**end) for end in facts["episodes"]],
            version=version,
        )


def split_inputs(forward_inputs: Mapping[str, Any]) -> tuple[dict[str, Tensor], list[Sample] | None]:
    """The tensors of a policy's `forward_inputs`, and its frozen features row by row.

    Raises TypeError naming an entry that is neither, and ValueError for one that has not one row an observation.
    """
    tensors: dict[str, Tensor] = {}
    samples: list[Sample] | None = None
    for name, value in forward_inputs.items():
        if name == FEATURES and isinstance(value, FrozenFeatures):
            samples = [value.sample(row) for row in range(len(value.lengths))]
        elif isinstance(value, Tensor):
            tensors[name] = value
        else:
            raise TypeError(
                f"forward_inputs[{name!r}] is {type(value).__name__}; a record that travels to the learner holds "
                f"tensors [B, ...], and FrozenFeatures as {FEATURES!r}"
            )
    rows = {name: value.shape[:1] for name, value in tensors.items()}
    if len(set(rows.values())) > 1:
        raise ValueError(f"entries of forward_inputs have different numbers of rows: {rows}")
    return tensors, samples


@dataclass
class Rows:
    """N rows of several fragments, ready to be shuffled. version: int64 [N], of the weights that acted."""

    inputs: dict[str, Tensor]
    samples: Sequence[Sample] | None
    log_probs: Tensor
    values: Tensor
    valid_steps: Tensor
    version: Tensor

    @classmethod
    def of(
        cls, fragments: Sequence[Fragment], wanted: Callable[[Collection[str]], Collection[str]] = lambda names: names
    ) -> Rows:
        """All rows of `fragments`, which recorded the same entries. Raises ValueError when they did not.

        wanted: which of the recorded entries to take (`BasePolicy.replay_entries`).
        """
        first = fragments[0]
        for other in fragments[1:]:
            if set(other.inputs) != set(first.inputs) or (other.samples is None) != (first.samples is None):
                raise ValueError("fragments recorded different entries; all workers must run the same policy")
        samples = None if first.samples is None else [one for part in fragments for one in part.samples or ()]
        names = wanted([*first.inputs, *([] if samples is None else [FEATURES])])
        return cls(
            inputs={
                name: torch.cat([part.inputs[name] for part in fragments]) for name in first.inputs if name in names
            },
            samples=samples,
            log_probs=torch.cat([part.log_probs for part in fragments]),
            values=torch.cat([part.timeline.values[:-1].flatten() for part in fragments]),
            valid_steps=torch.cat([part.timeline.valid_steps.flatten() for part in fragments]),
            version=torch.cat([torch.full((part.num_rows,), part.version) for part in fragments]),
        )

    def __len__(self) -> int:
        return self.log_probs.shape[0]

    def forward_inputs(self, index: Tensor, device: torch.device) -> dict[str, Any]:
        """`forward_inputs` of the rows `index` (int64, on the CPU), on `device`."""
        chosen: dict[str, Any] = {
            name: value[index.to(value.device)].to(device, non_blocking=True) for name, value in self.inputs.items()
        }
        if self.samples is not None:
            chosen[FEATURES] = stack_samples([self.samples[row] for row in index.tolist()], device)
        return chosen


def _tokens(sample: Sample) -> int:
    return next(iter(sample.values())).shape[1]
