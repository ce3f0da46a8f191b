"""The small flow policy keeps the contract, explores reproducibly, imitates, and comes back from a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from soma_lightning.contract import ACTION, STATE
from soma_lightning.models.flow_mlp import FlowMLPConfig, FlowMLPPolicy
from soma_lightning.models.flow_policy import takes_keys
from soma_lightning.models.flow_sde import FlowSDE
from soma_lightning.models.policy import check_policy
from soma_lightning.models.registry import get_model
from tests.rl.gaussian import GaussianPolicy

CONFIG = FlowMLPConfig(state_dim=6, action_dim=2, hidden=32)


def policy(**settings: Any) -> FlowMLPPolicy:
    made = FlowMLPPolicy(CONFIG)
    made.explore_with(FlowSDE(4, **settings))
    return made


def observation(rows: int = 3) -> Any:
    states = torch.randn(rows, 6, generator=torch.Generator().manual_seed(0))
    return {"states": states, "task_descriptions": ["reach the goal"] * rows}


@pytest.mark.parametrize("method", ["flow_sde", "flow_cps"])
def test_it_keeps_the_policy_contract(method: str) -> None:
    check = check_policy(policy(method=method), observation())
    check.raise_if_failed()
    assert (check.train_mode, check.action_shape) == ("checked", (3, 4, 2))


def test_the_record_of_an_exploring_step() -> None:
    actions, result = policy().predict_action_batch(observation(), mode="train")
    inputs = result["forward_inputs"]
    assert inputs["chains"].shape == (3, 5, 4, 4)
    assert inputs["chains"].dtype == torch.float32
    assert (inputs["denoise_inds"].shape, inputs["denoise_inds"].dtype) == ((3, 4), torch.int64)
    assert torch.equal(inputs["denoise_inds"], inputs["denoise_inds"][:, :1].expand(3, 4))
    assert inputs["noise_level"].tolist() == [0.5] * 3
    assert torch.equal(inputs["action"], actions.flatten(1))
    assert torch.equal(inputs["model_action"], inputs["chains"][:, -1].flatten(1))
    assert torch.equal(actions, inputs["chains"][:, -1, :, :2])
    assert torch.equal(inputs["states"], observation()["states"])
    assert result["prev_logprobs"].shape == (3, 4, 2)
    assert result["prev_values"].shape == (3,)
    _, without = policy().predict_action_batch(observation(), mode="train", compute_values=False)
    assert "prev_values" not in without


def test_replay_takes_the_noise_level_that_was_recorded() -> None:
    made = policy()
    _, result = made.predict_action_batch(observation(), mode="train")
    made.explore_with(FlowSDE(4, 0.2))  # annealed since
    replay = made.default_forward(result["forward_inputs"])
    assert torch.equal(replay["logprobs"], result["prev_logprobs"])


def test_keys_make_exploration_independent_of_the_batch() -> None:
    made, seen = policy(), observation(5)
    keys = [(0, env, 3) for env in range(5)]
    actions, result = made.predict_action_batch(seen, mode="train", keys=keys)
    one = {"states": seen["states"][3:4], "task_descriptions": ["reach the goal"]}
    alone, single = made.predict_action_batch(one, mode="train", keys=keys[3:4])
    torch.testing.assert_close(alone, actions[3:4], rtol=0, atol=1e-6)
    assert torch.equal(single["forward_inputs"]["denoise_inds"], result["forward_inputs"]["denoise_inds"][3:4])
    assert torch.equal(single["forward_inputs"]["chains"][:, 0], result["forward_inputs"]["chains"][3:4, 0])
    again, _ = made.predict_action_batch(seen, mode="train", keys=keys)
    assert torch.equal(again, actions)
    other, _ = made.predict_action_batch(seen, mode="train", keys=[(0, env, 4) for env in range(5)])
    assert not torch.equal(other, actions)


def test_without_keys_exploration_follows_torchs_seed() -> None:
    made = policy()
    torch.manual_seed(3)
    first, _ = made.predict_action_batch(observation(), mode="train")
    second, _ = made.predict_action_batch(observation(), mode="train")
    torch.manual_seed(3)
    again, _ = made.predict_action_batch(observation(), mode="train")
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


def test_only_policies_with_keys_are_given_them() -> None:
    assert takes_keys(policy())
    assert not takes_keys(GaussianPolicy())


def test_acting_without_exploration() -> None:
    made = FlowMLPPolicy(CONFIG)
    noise = torch.randn(3, 4, 4)
    actions, facts = made.predict_action_batch(observation(), mode="eval", noise=noise)
    again, _ = made.predict_action_batch(observation(), mode="eval", noise=noise)
    assert torch.equal(actions, again)
    assert facts == {"num_steps": 4}
    assert made.predict_action_batch(observation(), noise=noise, num_steps=7)[1] == {"num_steps": 7}
    with pytest.raises(RuntimeError, match=r"call explore_with\(FlowSDE"):
        made.predict_action_batch(observation(), mode="train")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "act"}, "mode must be 'eval' or 'train', got 'act'"),
        ({"mode": "train", "num_steps": 4}, "num_steps and noise are of mode='eval'"),
        ({"mode": "train", "noise": torch.zeros(3, 4, 4)}, "num_steps and noise are of mode='eval'"),
        ({"mode": "eval", "keys": [(0,), (1,), (2,)]}, "keys are of mode='train'"),
    ],
)
def test_arguments_of_the_other_mode_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        policy().predict_action_batch(observation(), **arguments)


def test_flow_noise_is_refused_where_there_is_no_network_for_it() -> None:
    with pytest.raises(ValueError, match="FlowMLPPolicy has no noise network"):
        FlowMLPPolicy(CONFIG).explore_with(FlowSDE(4, method="flow_noise"))


def test_padded_dimensions_and_actions_that_were_not_executed_get_no_gradient() -> None:
    from soma_lightning.rl.ppo import reduce_rows

    made = policy()
    _, result = made.predict_action_batch(observation(), mode="train")
    replay = made.default_forward(result["forward_inputs"])
    reduce_rows(replay["logprobs"], torch.tensor([2, 2, 2])).sum().backward()
    grad = made.velocity_net[-1].bias.grad.view(4, 4)  # type: ignore[operator, union-attr]
    assert grad[:2, :2].abs().min() > 0
    assert grad[2:].abs().max() == 0
    assert grad[:, 2:].abs().max() == 0


def test_the_supervised_loss_falls_and_is_reproducible() -> None:
    made = FlowMLPPolicy(CONFIG)
    states = torch.randn(64, 6)
    batch = {STATE: states, ACTION: states[:, None, :2].expand(64, 4, 2)}
    optimizer = torch.optim.Adam(made.parameters(), lr=3e-3)

    def loss(seed: int) -> torch.Tensor:
        return made.sft_forward(batch, generator=torch.Generator().manual_seed(seed))["loss"]

    first = loss(0)
    assert torch.equal(first, loss(0))
    for step in range(150):
        optimizer.zero_grad()
        loss(step).backward()
        optimizer.step()
    assert loss(0).item() < 0.6 * first.item()


def test_a_saved_policy_comes_back(tmp_path: Path) -> None:
    made = policy()
    made.save_pretrained(tmp_path / "new" / "policy")
    noise = torch.randn(3, 4, 4)
    loaded = get_model({"model_type": "flow_mlp", "model_path": str(tmp_path / "new" / "policy")})
    assert loaded.config == CONFIG  # type: ignore[union-attr]
    expected, _ = made.predict_action_batch(observation(), mode="eval", noise=noise)
    found, _ = loaded.predict_action_batch(observation(), mode="eval", noise=noise)  # type: ignore[operator]
    assert torch.equal(found, expected)
    assert torch.equal(loaded.predict_values(observation()), made.predict_values(observation()))  # type: ignore[operator]


def test_a_folder_that_does_not_fit_is_named(tmp_path: Path) -> None:
    policy().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())

    def load(**changes: Any) -> None:
        (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
        FlowMLPPolicy.from_pretrained(tmp_path)

    load()
    with pytest.raises(ValueError, match="holds no flow_mlp policy"):
        load(type="pi05")
    with pytest.raises(ValueError, match=r"(?s)do not fit its config.json.*size mismatch"):
        load(hidden=16)
    with pytest.raises(ValueError, match="depth"):
        load(depth=3)


def test_the_builder_makes_a_new_policy_of_the_sizes() -> None:
    made = get_model({"model_type": "flow_mlp", "state_dim": 5, "action_dim": 3, "precision": "fp32"})
    assert made.config == FlowMLPConfig(5, 3)  # type: ignore[union-attr]
    assert made.report_facts()["model"] == "flow_mlp"  # type: ignore[operator]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"precision": "bf16"}, "flow_mlp computes in fp32; leave precision='bf16' out"),
        ({"model_path": "somewhere"}, r"\['action_dim', 'state_dim'\] would be ignored"),
        ({"state_dims": 6}, "state_dims"),
        ({"action_dim": 5}, "action_dim=5 is more than action_width=4"),
        ({"n_action_steps": 5}, "n_action_steps=5 is more than chunk_size=4"),
        ({"hidden": 0}, "hidden=0 must be a whole number from 1"),
        ({"chunk_size": 2.0}, "chunk_size=2.0 must be a whole number from 1"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        get_model({"model_type": "flow_mlp", "state_dim": 6, "action_dim": 2, **settings})


def test_a_missing_size_is_named() -> None:
    with pytest.raises(ValueError, match="state_dim"):
        get_model({"model_type": "flow_mlp", "action_dim": 2})


def test_states_of_another_width_are_refused() -> None:
    with pytest.raises(ValueError, match=r"states must be \[B, 6\], got \[3, 5\]"):
        policy().predict_action_batch({**observation(), "states": torch.zeros(3, 5)}, mode="eval")
