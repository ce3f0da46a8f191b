"""The policy contract: dispatch, and a check that passes good policies and names each way to break the contract."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from soma_lightning.models.policy import BasePolicy, ForwardType, PolicyCheck, check_policy

B, C, A, S = 3, 4, 2, 5


def observation() -> Any:
    generator = torch.Generator().manual_seed(0)
    return {
        "main_images": torch.randint(0, 255, (B, 8, 8, 3), dtype=torch.uint8, generator=generator),
        "states": torch.randn(B, S, generator=generator),
        "task_descriptions": [f"push cube {i}" for i in range(B)],
    }


class GaussianPolicy(BasePolicy):
    """A frozen trunk, a Gaussian head and a value head: the smallest policy that keeps the whole contract."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(S, 8).requires_grad_(False)
        self.mean, self.value = nn.Linear(8, C * A), nn.Linear(8, 1)
        self.log_std = nn.Parameter(torch.full((C * A,), -1.0))

    def distribution(self, states: Tensor) -> tuple[torch.distributions.Normal, Tensor]:
        hidden = self.trunk(states).tanh()
        return torch.distributions.Normal(self.mean(hidden), self.log_std.exp()), self.value(hidden)

    def default_forward(self, forward_inputs: dict[str, Any]) -> dict[str, Tensor]:
        normal, values = self.distribution(forward_inputs["states"])
        logprobs = normal.log_prob(forward_inputs["action"]).unflatten(1, (C, A)).sum(-1)
        return {"logprobs": logprobs, "values": values, "entropy": normal.entropy().sum(-1)}

    def predict_action_batch(
        self, env_obs: Any, mode: str = "train", compute_values: bool = True
    ) -> tuple[Tensor | np.ndarray, dict[str, Any]]:
        with torch.no_grad():
            normal, _ = self.distribution(env_obs["states"])
            if mode == "eval":
                return normal.mean.unflatten(1, (C, A)), {}
            inputs = {"action": normal.sample(), "states": env_obs["states"].clone()}
            record = self.default_forward(inputs)
        result = {"prev_logprobs": record["logprobs"], "prev_values": record["values"], "forward_inputs": inputs}
        return inputs["action"].unflatten(1, (C, A)), result


class EvalOnlyPolicy(GaussianPolicy):
    def predict_action_batch(
        self, env_obs: Any, mode: str = "eval", compute_values: bool = False
    ) -> tuple[Tensor | np.ndarray, dict[str, Any]]:
        if mode == "train":
            raise NotImplementedError("train mode needs a value head")
        actions, result = super().predict_action_batch(env_obs, mode, compute_values)
        return torch.as_tensor(actions).numpy(), result


def broken(change: Callable[[GaussianPolicy, Any, str, Any], Any]) -> GaussianPolicy:
    """A Gaussian policy whose `predict_action_batch` goes through `change(policy, env_obs, mode, answer)`."""
    policy = GaussianPolicy()
    original = policy.predict_action_batch

    def predict_action_batch(env_obs: Any, mode: str = "train", compute_values: bool = True) -> Any:
        return change(policy, env_obs, mode, original(env_obs, mode, compute_values))

    policy.predict_action_batch = predict_action_batch  # type: ignore[method-assign]
    return policy


def with_actions(change: Callable[[Tensor], Any]) -> GaussianPolicy:
    return broken(lambda policy, obs, mode, answer: (change(answer[0]), answer[1]))


def with_result(change: Callable[[dict[str, Any]], Any], modes: tuple[str, ...] = ("train",)) -> GaussianPolicy:
    def apply(policy: GaussianPolicy, obs: Any, mode: str, answer: Any) -> Any:
        if mode in modes:
            change(answer[1])
        return answer

    return broken(apply)


def with_replay(change: Callable[[dict[str, Tensor], GaussianPolicy], Any]) -> GaussianPolicy:
    class Replay(GaussianPolicy):
        def default_forward(self, forward_inputs: dict[str, Any]) -> dict[str, Tensor]:
            answer = super().default_forward(forward_inputs)
            if torch.is_grad_enabled():  # replaying, not recording
                change(answer, self)
            return answer

    return Replay()


def side_effect(change: Callable[[GaussianPolicy, Any], Any]) -> GaussianPolicy:
    def apply(policy: GaussianPolicy, obs: Any, mode: str, answer: Any) -> Any:
        change(policy, obs)
        return answer

    return broken(apply)


def test_a_good_policy_passes_and_is_left_as_it_was() -> None:
    policy = GaussianPolicy().train()
    policy.trunk.eval()
    kept = torch.ones_like(policy.log_std)
    policy.log_std.grad = kept
    obs = observation()
    check = check_policy(policy, obs)
    check.raise_if_failed()
    assert check.passed
    assert check.train_mode == "checked"
    assert check.action_shape == (B, C, A)
    assert "keeps the policy contract" in str(check)
    assert (policy.training, policy.trunk.training) == (True, False)
    assert policy.log_std.grad is kept
    assert policy.mean.weight.grad is None
    assert torch.equal(obs["states"], observation()["states"])


def test_a_policy_without_train_mode_passes_and_says_so() -> None:
    check = check_policy(EvalOnlyPolicy(), observation())
    assert check.passed
    assert check.train_mode == "not implemented (train mode needs a value head)"
    assert check.action_shape == (B, C, A)


def test_arrays_as_observation() -> None:
    class Numpy(EvalOnlyPolicy):
        def predict_action_batch(self, env_obs: Any, mode: str = "eval", compute_values: bool = False) -> Any:
            states = torch.as_tensor(env_obs["states"])
            return super().predict_action_batch({**env_obs, "states": states}, mode, compute_values)

    obs = {name: value.numpy() if isinstance(value, Tensor) else value for name, value in observation().items()}
    assert check_policy(Numpy(), obs).passed
    assert check_policy(Numpy(), {**obs, "wrist_images": None}).passed


def poke_state(policy: GaussianPolicy, obs: Any) -> None:
    obs["states"] += 1


def drift(policy: GaussianPolicy, obs: Any) -> None:
    with torch.no_grad():
        policy.trunk.weight.mul_(0.999)


def leave_gradient(policy: GaussianPolicy, obs: Any) -> None:
    policy.log_std.grad = torch.ones_like(policy.log_std)


class OverwritesRecord(GaussianPolicy):
    def default_forward(self, forward_inputs: dict[str, Any]) -> dict[str, Tensor]:
        answer = super().default_forward(forward_inputs)
        if torch.is_grad_enabled():
            forward_inputs["action"] = forward_inputs["action"] + 1.0
        return answer


class ReturnsNothing(GaussianPolicy):
    def default_forward(self, forward_inputs: dict[str, Any]) -> Any:
        return None if torch.is_grad_enabled() else super().default_forward(forward_inputs)


def thaw(policy: GaussianPolicy, obs: Any) -> None:
    policy.trunk.requires_grad_(True)


def shift(key: str) -> Callable[[dict[str, Any]], None]:
    def change(result: dict[str, Any]) -> None:
        result[key] = result[key] + 1e-3

    return change


BROKEN: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "no policy": (lambda: nn.Linear(2, 2), "Linear must be an nn.Module with predict_action_batch"),
    "nothing implemented": (
        BasePolicy,
        r'mode="eval"\) is not implemented: BasePolicy does not implement predict_action',
    ),
    "raises": (lambda: broken(lambda *_: 1 / 0), r'mode="eval"\) raised ZeroDivisionError: division by zero'),
    "no tuple": (
        lambda: broken(lambda p, o, m, answer: answer[0]),
        r"must return \(actions, result dictionary\), got Ten",
    ),
    "list of actions": (lambda: with_actions(lambda x: x.tolist()), "as a tensor or array, got list"),
    "flat actions": (
        lambda: with_actions(lambda x: x.flatten(1)),
        r"actions \[B=3, chunk, action dim\], got shape \(3, 8\)",
    ),
    "lost row": (lambda: with_actions(lambda x: x[:2]), r"got shape \(2, 4, 2\)"),
    "no step": (lambda: with_actions(lambda x: x[:, :0]), r"got shape \(3, 0, 2\)"),
    "float64": (lambda: with_actions(lambda x: x.double()), "must return float32 actions, got torch.float64"),
    "NaN": (lambda: with_actions(lambda x: x * torch.nan), "actions that are not finite"),
    "graph": (lambda: with_actions(lambda x: x.clone().requires_grad_()), "actions that require grad"),
    "writes observation": (lambda: side_effect(poke_state), r"changed the observation it was given: \['states'\]"),
    "adds to observation": (lambda: side_effect(lambda p, o: o.update(seen=1)), "changed the observation"),
    "leaves eval mode": (
        lambda: side_effect(lambda p, o: p.eval()),
        "mode was changed and not put back: the policy, trunk",
    ),
    "toggles the mode": (lambda: side_effect(lambda p, o: p.train(not p.training)), "mode was changed and not put"),
    "writes weights": (lambda: side_effect(drift), r"weights were written to: trunk\.weight"),
    "leaves a gradient": (lambda: side_effect(leave_gradient), "predict_action_batch left gradients behind: log_std"),
    "thaws": (lambda: side_effect(thaw), r"requires_grad was changed: trunk\.weight, trunk\.bias"),
    "no values": (lambda: with_result(lambda r: r.pop("prev_values")), r"result of train mode lacks \['prev_values'\]"),
    "no action": (
        lambda: with_result(lambda r: r["forward_inputs"].pop("action")),
        'dictionary with at least "action"',
    ),
    "other action": (
        lambda: with_result(lambda r: r["forward_inputs"].update(action=torch.zeros(B, C * A))),
        r'\["action"\] is not the returned actions',
    ),
    "wrong log-probability": (
        lambda: with_result(shift("prev_logprobs")),
        r"ratio of exactly 1; it is off by 1\.\d\de-03",
    ),
    "wrong value": (lambda: with_result(shift("prev_values")), r"recorded values; they are off by 1\.\d\de-03"),
    "recorded graph": (
        lambda: with_result(lambda r: r.update(prev_values=r["prev_values"].clone().requires_grad_())),
        "prev_values requires grad",
    ),
    "replay raises": (lambda: with_replay(lambda r, p: r["missing"]), "default_forward.* raised KeyError: 'missing'"),
    "replay writes the record": (
        OverwritesRecord,
        r"changed the record, which is replayed more than once: \['action'\]",
    ),
    "no dictionary": (ReturnsNothing, "default_forward must return a dictionary, got NoneType"),
    "recorded list": (
        lambda: with_result(lambda r: r.update(prev_logprobs=r["prev_logprobs"].tolist(), prev_values=1.0)),
        r"must be tensors: prev_logprobs \(list\), prev_values \(float\)",
    ),
    "entropy number": (lambda: with_replay(lambda r, p: r.update(entropy=1.0)), r"must be tensors: entropy \(float\)"),
    "entropy NaN": (
        lambda: with_replay(lambda r, p: r.update(entropy=r["entropy"] * torch.nan)),
        "entropy is not finite",
    ),
    "no entropy": (lambda: with_replay(lambda r, p: r.pop("entropy")), r"\['entropy'\] missing"),
    "entropy shape": (
        lambda: with_replay(lambda r, p: r.update(entropy=torch.zeros(B, 7))),
        r"entropy must be \[B\] or \[B, 1\]",
    ),
    "logprob shape": (lambda: with_replay(lambda r, p: r.update(logprobs=r["logprobs"][:2])), "must have one shape"),
    "logprob NaN": (
        lambda: with_replay(lambda r, p: r.update(logprobs=r["logprobs"] * torch.nan)),
        "logprobs .* not finite",
    ),
    "no gradient": (lambda: with_replay(lambda r, p: r.update(values=r["values"].detach())), "values has no gradient"),
    "zero gradient": (
        lambda: with_replay(lambda r, p: r.update({k: 0 * r[k] + r[k].detach() for k in ("logprobs", "values")})),
        "no trainable parameter receives a gradient",
    ),
    "frozen gradient": (
        lambda: with_replay(lambda r, p: setattr(p.trunk.weight, "grad", torch.ones(8, S))),
        r"frozen parameters received a gradient: trunk\.weight",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_each_way_to_break_the_contract_is_named(name: str) -> None:
    build, message = BROKEN[name]
    policy = build()
    check = check_policy(policy, observation())
    assert not check.passed
    with pytest.raises(ValueError, match=message):
        check.raise_if_failed()
    assert policy.training
    assert all(p.grad is None for p in policy.parameters())


def test_dropout_is_found_by_the_replay() -> None:
    class Dropout(GaussianPolicy):
        def distribution(self, states: Tensor) -> tuple[torch.distributions.Normal, Tensor]:
            return super().distribution(nn.functional.dropout(states, 0.5, self.training))

    assert "ratio of exactly 1" in str(check_policy(Dropout().train(), observation()))
    assert check_policy(Dropout().eval(), observation()).passed


def test_frozen_parameters_thawed_during_the_replay_are_found_and_frozen_again() -> None:
    class Thawing(GaussianPolicy):
        def default_forward(self, forward_inputs: dict[str, Any]) -> dict[str, Tensor]:
            self.trunk.requires_grad_(torch.is_grad_enabled())
            return super().default_forward(forward_inputs)

    policy = Thawing()
    text = str(check_policy(policy, observation()))
    assert "requires_grad was changed: trunk.weight, trunk.bias" in text
    assert "frozen parameters received a gradient: trunk.weight, trunk.bias" in text
    assert not policy.trunk.weight.requires_grad
    assert policy.trunk.weight.grad is None


def test_a_long_list_of_names_is_cut() -> None:
    policy = side_effect(lambda p, o: p.eval())
    policy.more = nn.Sequential(*(nn.Identity() for _ in range(6)))
    assert "and 6 more" in str(check_policy(policy, observation()))


def test_forward_dispatches() -> None:
    class Both(GaussianPolicy):
        def sft_forward(self, batch: dict[str, Any]) -> dict[str, Tensor]:
            return {"loss": batch["x"]}

        def sac_q_forward(self, obs: Tensor, actions: Tensor) -> dict[str, Tensor]:
            return {"q": obs + actions}

    policy = Both()
    assert policy(ForwardType.SFT, batch={"x": torch.tensor(3.0)})["loss"] == 3
    assert policy("sft", batch={"x": torch.tensor(4.0)})["loss"] == 4
    assert policy(forward_type="sac_q", obs=torch.tensor(1.0), actions=torch.tensor(2.0))["q"] == 3
    inputs = {"states": torch.zeros(B, S), "action": torch.zeros(B, C * A)}
    assert set(policy(forward_inputs=inputs)) == {"logprobs", "values", "entropy"}
    with pytest.raises(NotImplementedError, match=r"Both does not implement sac_forward\(\)"):
        policy(ForwardType.SAC)
    with pytest.raises(NotImplementedError, match=r"GaussianPolicy does not implement sft_forward\(\)"):
        GaussianPolicy()("sft", batch={})
    with pytest.raises(ValueError, match=r"unknown forward_type 'sfr'; known: \['default', 'sft'"):
        policy("sfr")


@pytest.mark.parametrize("method", ["default_forward", "sft_forward", "predict_action_batch"])
def test_the_base_class_names_what_is_missing(method: str) -> None:
    with pytest.raises(NotImplementedError, match=rf"BasePolicy does not implement {method}\(\)"):
        getattr(BasePolicy(), method)({})


def test_a_report_without_problems_does_not_raise() -> None:
    PolicyCheck("P").raise_if_failed()
    with pytest.raises(ValueError, match="1 problem"):
        PolicyCheck("P", ["wrong"]).raise_if_failed()
