"""What must a policy offer so that training, rollout and evaluation can use it, and does a given one offer it?

Shape letters: B environments, C executed actions a chunk, A action dimensions. `BasePolicy` states the contract (the
names are RLinf's); `check_policy` runs a policy through it.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from enum import StrEnum
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from soma_lightning.contract import EnvObservation

Mode = Literal["train", "eval"]


class ForwardType(StrEnum):
    """Branch that `BasePolicy.forward` dispatches to: the method `<value>_forward`."""

    DEFAULT = "default"
    SFT = "sft"
    SAC = "sac"
    SAC_Q = "sac_q"
    CROSSQ = "crossq"
    CROSSQ_Q = "crossq_q"


class BasePolicy(nn.Module):
    """A policy: one `forward` for every training branch, and `predict_action_batch` for acting.

    Calls go through `forward`, so that hooks of the wrapped module (sharding, compilation) run for each branch.
    A subclass writes the branches that it supports; any other raises NotImplementedError naming the method.
    """

    def forward(self, forward_type: ForwardType | str = ForwardType.DEFAULT, **kwargs: Any) -> dict[str, Tensor]:
        """Calls `<forward_type>_forward(**kwargs)`.

        Raises ValueError for an unknown type and NotImplementedError for a branch that this policy does not have.
        """
        try:
            branch = ForwardType(forward_type)
        except ValueError:
            raise ValueError(
                f"unknown forward_type {forward_type!r}; known: {[str(known) for known in ForwardType]}"
            ) from None
        method = getattr(self, f"{branch}_forward", None)
        if method is None:
            raise self._missing(f"{branch}_forward")
        result: dict[str, Tensor] = method(**kwargs)
        return result

    def default_forward(self, forward_inputs: dict[str, Any]) -> dict[str, Tensor]:
        """Computes again, with gradients, what the rollout recorded: the reinforcement learning branch.

        forward_inputs: `result["forward_inputs"]` of `predict_action_batch`, rows possibly shuffled.
        Returns {"logprobs": [B, ...], "values": [B] or [B, 1], "entropy": [B] or [B, 1]}.
        """
        raise self._missing("default_forward")

    def sft_forward(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        """The supervised objective on a training batch (contract.TRAINING_BATCH).

        Returns at least {"loss": 0-d mean}.
        """
        raise self._missing("sft_forward")

    def predict_action_batch(
        self, env_obs: EnvObservation, mode: Mode = "train", compute_values: bool = True
    ) -> tuple[Tensor | np.ndarray, dict[str, Any]]:
        """Acts on B observations.

        mode: "train" explores and records, "eval" does not. Returns (actions, result): actions float32 [B, C, A],
        executable as they are; in train mode result holds `prev_logprobs` [B, ...], `prev_values` [B] or [B, 1] (when
        compute_values) and `forward_inputs`, a dictionary of everything that `default_forward` needs, among it
        `action` [B, C * A], the returned actions.
        """
        raise self._missing("predict_action_batch")

    def replay_entries(self, recorded: Collection[str]) -> Collection[str]:
        """Which of the recorded entries `default_forward` reads: a learner need not move the others to its device."""
        return recorded

    def predict_values(self, env_obs: EnvObservation) -> Tensor:
        """State values [B] of B observations, for returns that are cut off.

        A policy with a critic of its own overrides this; here a whole action is sampled and thrown away.
        """
        _, result = self.predict_action_batch(env_obs, mode="train", compute_values=True)
        values: Tensor = result["prev_values"]
        return values.reshape(len(env_obs["task_descriptions"]))

    def _missing(self, method: str) -> NotImplementedError:
        return NotImplementedError(f"{type(self).__name__} does not implement {method}()")


def check_executed_steps(policy: Any, executed_steps: int) -> None:
    """Raises ValueError when more actions of a chunk are to be executed than `policy` predicts."""
    chunk_size = policy.noise_shape[0]
    if executed_steps > chunk_size:
        raise ValueError(
            f"executed_steps={executed_steps} is more than the {chunk_size} actions that the policy predicts; use at "
            f"most {chunk_size}"
        )


@dataclass
class PolicyCheck:
    """What `check_policy` found.

    problems: one sentence each; empty when the policy keeps the contract. train_mode: "checked", or "not implemented"
    with the policy's own reason (allowed: such a policy can be evaluated and fine-tuned, not trained by
    reinforcement). action_shape: (B, C, A), or None when no action came back.
    """

    policy: str
    problems: list[str] = field(default_factory=list)
    train_mode: str = "not reached"
    action_shape: tuple[int, ...] | None = None

    @property
    def passed(self) -> bool:
        """True when no problem was found."""
        return not self.problems

    def add(self, problems: Iterable[str]) -> None:
        """Appends problems that are not there yet."""
        self.problems.extend(problem for problem in problems if problem not in self.problems)

    def raise_if_failed(self) -> None:
        """Raises ValueError that lists every problem."""
        if self.problems:
            raise ValueError(str(self))

    def __str__(self) -> str:
        head = f"{self.policy}: actions {self.action_shape}, train mode {self.train_mode}"
        if self.passed:
            return f"{head}; keeps the policy contract"
        return f"{head}; {len(self.problems)} problem(s):\n" + "\n".join(f"- {problem}" for problem in self.problems)


def check_policy(policy: nn.Module, env_obs: EnvObservation) -> PolicyCheck:
    """Runs a policy through the contract of `BasePolicy` on one batch of observations.

    Checks the actions of both modes, the recorded results, that replaying a record gives a probability ratio of exactly
    1 and the same values, that gradients reach trainable parameters and no frozen one, and that neither the
    observations, the record nor the policy (weights, modes, requires_grad, gradients) are changed. Errors of the policy
    other than NotImplementedError become a problem with their type and message. The policy's gradients are as before
    afterwards.
    """
    check = PolicyCheck(type(policy).__name__)
    if not isinstance(policy, nn.Module) or not callable(getattr(policy, "predict_action_batch", None)):
        check.problems.append(
            f"{check.policy} must be an nn.Module with predict_action_batch(); derive it from soma_lightning.BasePolicy"
        )
        return check
    before = _PolicyState(policy)
    result = None
    modes: tuple[Mode, ...] = ("eval", "train")
    for mode in modes:
        result = _check_mode(policy, env_obs, mode, check)
        check.add(before.changes(policy, is_acting=True))
    if result is not None:
        _check_record(policy, result, len(env_obs["task_descriptions"]), check)
        check.add(before.changes(policy, is_acting=False))
    before.restore(policy)
    return check


class _PolicyState:
    """Modes, requires_grad flags and gradients of a policy, to be compared and put back."""

    def __init__(self, policy: nn.Module) -> None:
        self.modes = {name: module.training for name, module in policy.named_modules()}
        self.trainable = {name: p.requires_grad for name, p in policy.named_parameters()}
        self.grads = {name: p.grad for name, p in policy.named_parameters()}
        self.versions = {name: p._version for name, p in policy.named_parameters()}
        for p in policy.parameters():
            p.grad = None

    def changes(self, policy: nn.Module, *, is_acting: bool) -> list[str]:
        """What differs now. is_acting: no gradient may be there at all, not even a trainable parameter's."""
        problems = []
        written = [name for name, p in policy.named_parameters() if p._version != self.versions.get(name)]
        if written:
            problems.append(f"weights were written to: {_some(written)}")
        left = [name for name, p in policy.named_parameters() if p.grad is not None]
        if is_acting and left:
            problems.append(f"predict_action_batch left gradients behind: {_some(left)}")
        modes = [name or "the policy" for name, m in policy.named_modules() if m.training != self.modes.get(name)]
        if modes:
            problems.append(f"train/eval mode was changed and not put back: {_some(modes)}")
        flags = [name for name, p in policy.named_parameters() if p.requires_grad != self.trainable.get(name)]
        if flags:
            problems.append(f"requires_grad was changed: {_some(flags)}")
        frozen = [n for n, p in policy.named_parameters() if not self.trainable.get(n, True) and p.grad is not None]
        if frozen:
            problems.append(f"frozen parameters received a gradient: {_some(frozen)}")
        return problems

    def restore(self, policy: nn.Module) -> None:
        for name, module in policy.named_modules():
            module.training = self.modes.get(name, module.training)
        for name, p in policy.named_parameters():
            p.requires_grad_(self.trainable.get(name, p.requires_grad))
            p.grad = self.grads.get(name)


def _check_mode(policy: nn.Module, env_obs: EnvObservation, mode: Mode, check: PolicyCheck) -> dict[str, Any] | None:
    """Calls `predict_action_batch` in one mode and checks the actions; returns the result of train mode."""
    call = f'predict_action_batch(mode="{mode}")'
    kept = copy.deepcopy(env_obs)
    try:
        answer = policy.predict_action_batch(env_obs, mode=mode)  # type: ignore[operator]
    except NotImplementedError as error:
        if mode == "train":
            check.train_mode = f"not implemented ({error})"
        else:
            check.problems.append(f"{call} is not implemented: {error}")
        return None
    except Exception as error:
        check.problems.append(f"{call} raised {type(error).__name__}: {error}")
        return None
    changed = [key for key in kept if not _same(kept[key], env_obs.get(key))]  # type: ignore[literal-required]
    if changed or set(kept) != set(env_obs):
        check.problems.append(f"{call} changed the observation it was given: {changed or sorted(set(env_obs))}")
    if not (isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[1], dict)):
        check.problems.append(f"{call} must return (actions, result dictionary), got {type(answer).__name__}")
        return None
    actions: Any = answer[0]
    result: dict[str, Any] = answer[1]
    check.problems.extend(f"{call} {text}" for text in _action_problems(actions, len(kept["task_descriptions"])))
    if isinstance(actions, Tensor | np.ndarray):
        check.action_shape = tuple(actions.shape)
    if mode == "eval":
        return None
    check.train_mode = "checked"
    recorded = result.get("forward_inputs")
    if isinstance(recorded, dict) and "action" in recorded and isinstance(actions, Tensor | np.ndarray):
        given = torch.as_tensor(actions).flatten(1)
        if not _same(torch.as_tensor(recorded["action"]).to(given), given):
            check.problems.append(
                'result["forward_inputs"]["action"] is not the returned actions, flattened to [B, C * A]'
            )
    return result


def _action_problems(actions: Any, num_envs: int) -> list[str]:
    if not isinstance(actions, Tensor | np.ndarray):
        return [f"must return actions as a tensor or array, got {type(actions).__name__}"]
    problems = []
    if actions.ndim != 3 or actions.shape[0] != num_envs or 0 in actions.shape:
        problems.append(f"must return actions [B={num_envs}, chunk, action dim], got shape {tuple(actions.shape)}")
    if isinstance(actions, Tensor) and actions.requires_grad:
        problems.append("returns actions that require grad; act under torch.no_grad()")
    values = torch.as_tensor(actions).detach()
    if values.dtype != torch.float32:
        problems.append(f"must return float32 actions, got {values.dtype}")
    if values.is_floating_point() and not values.isfinite().all():
        problems.append("returns actions that are not finite")
    return problems


def _check_record(policy: nn.Module, result: dict[str, Any], num_envs: int, check: PolicyCheck) -> None:
    """Checks what train mode recorded, then replays it through `default_forward`."""
    keys = ("prev_logprobs", "prev_values", "forward_inputs")
    missing = [key for key in keys if result.get(key) is None]
    if missing:
        check.problems.append(f"the result of train mode lacks {missing}; it has {sorted(result)}")
        return
    recorded = result["forward_inputs"]
    if not isinstance(recorded, dict) or "action" not in recorded:
        check.problems.append('result["forward_inputs"] must be a dictionary with at least "action" [B, C * A]')
        return
    kept = copy.deepcopy(recorded)
    try:
        replay = policy(ForwardType.DEFAULT, forward_inputs=recorded)
    except Exception as error:
        check.problems.append(f"default_forward(forward_inputs) raised {type(error).__name__}: {error}")
        return
    written = [key for key in kept if not _same(kept[key], recorded.get(key))]
    if written:
        check.problems.append(f"default_forward changed the record, which is replayed more than once: {written}")
    if not isinstance(replay, dict):
        check.problems.append(f"default_forward must return a dictionary, got {type(replay).__name__}")
        return
    missing = [key for key in ("logprobs", "values", "entropy") if replay.get(key) is None]
    if missing:
        check.problems.append(f"default_forward must return logprobs, values and entropy; {missing} missing")
        return
    named = {key: result[key] for key in keys[:2]} | {key: replay[key] for key in ("logprobs", "values", "entropy")}
    no_tensors = [f"{key} ({type(value).__name__})" for key, value in named.items() if not isinstance(value, Tensor)]
    if no_tensors:
        check.problems.append(f"must be tensors: {', '.join(no_tensors)}")
        return
    check.problems.extend(_replay_problems(result, replay, num_envs))
    check.problems.extend(_gradient_problems(policy, replay))


def _replay_problems(result: dict[str, Any], replay: dict[str, Tensor], num_envs: int) -> list[str]:
    problems = []
    for key in ("values", "entropy"):
        if tuple(replay[key].shape) not in ((num_envs,), (num_envs, 1)):
            problems.append(f"{key} must be [B] or [B, 1] with B={num_envs}, got {tuple(replay[key].shape)}")
    if not replay["entropy"].isfinite().all():
        problems.append("entropy is not finite")
    for key, old_key in (("logprobs", "prev_logprobs"), ("values", "prev_values")):
        old, new = result[old_key], replay[key].detach()
        if old.requires_grad:
            problems.append(f"{old_key} requires grad; record under torch.no_grad()")
        if old.shape != new.shape:
            problems.append(f"{key} {tuple(new.shape)} and {old_key} {tuple(old.shape)} must have one shape")
        elif not (old.isfinite().all() and new.isfinite().all()):
            problems.append(f"{key} or {old_key} is not finite")
        elif key == "logprobs" and not torch.equal(torch.exp(new - old), torch.ones_like(new)):
            worst = torch.exp(new - old).sub(1).abs().max().item()
            problems.append(f"replaying a record must give a probability ratio of exactly 1; it is off by {worst:.2e}")
        elif key == "values" and not torch.equal(new, old):
            worst = (new - old).abs().max().item()
            problems.append(f"replaying a record must give the recorded values; they are off by {worst:.2e}")
    if replay["logprobs"].shape[:1] != (num_envs,):
        problems.append(f"logprobs must be [B, ...] with B={num_envs}, got {tuple(replay['logprobs'].shape)}")
    return problems


def _gradient_problems(policy: nn.Module, replay: dict[str, Tensor]) -> list[str]:
    problems = [f"{key} has no gradient" for key in ("logprobs", "values") if not replay[key].requires_grad]
    roots = [replay[key].sum() for key in ("logprobs", "values") if replay[key].requires_grad]
    if not roots:
        return problems
    torch.autograd.backward(torch.stack(roots).sum())
    grads = [p.grad for p in policy.parameters() if p.requires_grad and p.grad is not None]
    if not any(grad.abs().sum() > 0 for grad in grads):
        problems.append("no trainable parameter receives a gradient from logprobs and values")
    if not all(grad.isfinite().all() for grad in grads):
        problems.append("a gradient is not finite")
    return problems


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor | np.ndarray) and isinstance(b, Tensor | np.ndarray):
        first, second = torch.as_tensor(a), torch.as_tensor(b)
        return first.shape == second.shape and first.dtype == second.dtype and bool(torch.equal(first, second))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return set(a) == set(b) and all(_same(value, b[name]) for name, value in a.items())
    if is_dataclass(a) and type(a) is type(b):  # frozen features, and what else a policy records
        return all(_same(getattr(a, one.name), getattr(b, one.name)) for one in fields(a))
    return bool(type(a) is type(b) and a == b)


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
