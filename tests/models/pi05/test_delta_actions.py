"""Actions relative to the state: the network sees differences, everybody else absolute actions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from soma_lightning.models import PI05Config, PI05Policy
from soma_lightning.models.normalization import from_deltas, to_deltas
from soma_lightning.models.pi05.folder import lerobot_would_agree

DELTAS = (0, 2, 5)


def act_perfectly(policy: PI05Policy, batch, monkeypatch: pytest.MonkeyPatch) -> None:
    """The network answers with the exact target of `batch`."""
    exact = policy.processor.targets(batch).actions
    monkeypatch.setattr(policy.model, "sample_actions", lambda prefix, noise, num_steps: exact)


def test_targets_are_normalised_differences(make_policy, make_batch):
    policy, batch = make_policy(delta_actions=list(DELTAS)), make_batch()
    stats = policy.statistics["action"]
    expected = batch["action"].double().numpy()
    for b in range(3):
        for dim in DELTAS:
            expected[b, :, dim] -= float(batch["observation.state"][b, dim])
    expected = 2 * (expected - stats["q01"]) / (stats["q99"] - stats["q01"]) - 1
    np.testing.assert_allclose(policy.processor.targets(batch).actions.numpy(), expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("prompt", ["state", "task"])
def test_the_exact_target_becomes_the_recorded_actions(make_policy, make_batch, prompt, monkeypatch, tmp_path: Path):
    policy, batch = make_policy(delta_actions=DELTAS, prompt=prompt), make_batch()
    absolute = batch["action"].clone()
    policy.save_pretrained(tmp_path / "policy")
    loaded = PI05Policy.from_pretrained(tmp_path / "policy")
    assert loaded.config.delta_actions == DELTAS
    for each in (policy, loaded):
        act_perfectly(each, batch, monkeypatch)
        torch.testing.assert_close(each.sample_actions(batch), absolute, rtol=0, atol=4e-6)
    assert torch.equal(batch["action"], absolute)

    images = {"main_images": "observation.images.image", "wrist_images": "observation.images.image2"}
    observation = {name: batch[key].permute(0, 2, 3, 1).numpy() for name, key in images.items()}
    observation |= {"states": batch["observation.state"].numpy(), "task_descriptions": batch["task"]}
    actions, _ = loaded.predict_action_batch(observation)
    torch.testing.assert_close(actions, absolute, rtol=0, atol=4e-6)
    # The whole chunk is relative to the state that was looked at, not to the one when an action is executed.
    for step in range(loaded.config.n_action_steps):
        torch.testing.assert_close(loaded.select_action(observation), absolute[:, step], rtol=0, atol=4e-6)
        observation["states"] = observation["states"] + 1


def test_noise_on_the_state_does_not_move_the_target(make_policy, make_batch, monkeypatch):
    policy, batch = make_policy(delta_actions=DELTAS), make_batch()
    seen = []
    forward = policy.model.flow_loss
    monkeypatch.setattr(policy.model, "flow_loss", lambda *args: (seen.append(args[1]), forward(*args))[1])
    for noise in (0.0, 0.5):
        policy.sft_forward(batch, state_noise=noise, generator=torch.Generator().manual_seed(0))
    assert torch.equal(*seen)


def test_without_deltas_no_state_is_read(make_policy, make_batch):
    policy, batch = make_policy(prompt="task"), make_batch()
    del batch["observation.state"]
    assert policy.sample_actions(batch).shape == (3, 8, 7)
    relative = make_policy(prompt="task", delta_actions=[0])
    with pytest.raises(
        ValueError, match=r"delta_actions=\[0\] need 'observation.state' as \[B, S\] with S > 0; the batch"
    ):
        relative.sample_actions(batch)


def test_the_maps_are_inverse_and_leave_other_dimensions():
    action, state = torch.randn(2, 3, 4, dtype=torch.float64), torch.randn(2, 6, dtype=torch.float64)
    there = to_deltas(action, state, (1, 3))
    assert torch.equal(there[..., [0, 2]], action[..., [0, 2]])
    assert torch.equal(there[:, 2, 3], action[:, 2, 3] - state[:, 3])
    torch.testing.assert_close(from_deltas(there, state, (1, 3)), action)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"delta_actions": [0, 7]}, r"delta_actions=\[0, 7\] must lie in 0..6: action_dim=7"),
        ({"delta_actions": [-1]}, r"delta_actions=\[-1\] must lie in 0..6"),
        ({"delta_actions": [3], "state_dim": 3}, r"must lie in 0..2: state_dim=3; an action dimension is relative to"),
        ({"delta_actions": [1, 1]}, r"delta_actions=\[1, 1\] names a dimension twice"),
        ({"delta_actions": [True, False]}, r"delta_actions=\(True, False\) must be"),
    ],
)
def test_dimensions_that_do_not_fit(changes, message: str):
    with pytest.raises(ValueError, match=message):
        PI05Config.tiny(**changes)


def test_statistics_of_other_deltas_are_not_taken(make_policy, tmp_path: Path):
    make_policy().save_pretrained(tmp_path)
    assert PI05Policy.from_pretrained(tmp_path).statistics is not None
    assert PI05Policy.from_pretrained(tmp_path, changes={"delta_actions": [0]}).statistics is None


def test_lerobot_would_execute_differences():
    absolute = PI05Config.base()
    assert lerobot_would_agree(absolute)
    assert not lerobot_would_agree(PI05Config.base(delta_actions=[0]))
