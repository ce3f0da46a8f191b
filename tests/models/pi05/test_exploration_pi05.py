"""pi0.5 explores and is replayed: exactly, and from cached features as from the images recorded beside them."""

from __future__ import annotations

from typing import Any

import lightning as L  # noqa: N812 (Lightning's own convention)
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from soma_lightning import FabricSomaSpeedStrategy
from soma_lightning.models import PI05Policy
from soma_lightning.models.flow_policy import FEATURES
from soma_lightning.models.flow_sde import FlowSDE
from soma_lightning.models.pi05.exploration import PROMPT, PROMPT_MASK, VALUE_FEATURES
from soma_lightning.models.policy import check_policy
from soma_lightning.models.value_head import ValueHead
from soma_lightning.rl.learner import PPOLearner
from soma_lightning.rl.ppo import PPOConfig
from soma_lightning.rl.records import Fragment, Rows, Timeline, split_inputs


@pytest.fixture
def explorer(make_policy):
    def make(**changes: Any) -> Any:
        policy = make_policy(**changes)
        policy.add_value_head()
        policy.explore_with(FlowSDE(3))
        return policy

    return make


def observation(rows: int = 3) -> Any:
    draw = torch.Generator().manual_seed(0)
    return {
        "main_images": torch.randint(0, 256, (rows, 64, 64, 3), dtype=torch.uint8, generator=draw),
        "wrist_images": torch.randint(0, 256, (rows, 64, 64, 3), dtype=torch.uint8, generator=draw),
        "extra_view_images": None,
        "states": torch.randn(rows, 8, generator=draw),
        "task_descriptions": ["pick up the cube", "reach the green disc", "go"][:rows],
    }


@pytest.mark.parametrize("trainable", ["expert", "all_but_vision", "all"])
def test_it_keeps_the_policy_contract(explorer, trainable):
    check = check_policy(explorer(trainable=trainable), observation())
    check.raise_if_failed()
    assert check.train_mode == "checked"


def test_what_a_frozen_prefix_records(explorer):
    policy = explorer()
    _, result = policy.predict_action_batch(observation(), mode="train")
    tensors, samples = split_inputs(result["forward_inputs"])
    assert samples is not None
    assert len(samples) == 3
    assert tensors[VALUE_FEATURES].dtype == torch.float32
    assert tensors[VALUE_FEATURES].shape == (3, policy.config.language.width)
    assert tensors["observation.images.image"].dtype == torch.uint8
    assert {PROMPT, PROMPT_MASK, "chains", "denoise_inds", "noise_level", "action", "model_action"} < set(tensors)
    assert torch.equal(policy.predict_values(observation()), result["prev_values"])


def test_a_prefix_that_trains_records_no_features(explorer):
    _, result = explorer(trainable="all").predict_action_batch(observation(), mode="train")
    assert FEATURES not in result["forward_inputs"]
    assert VALUE_FEATURES not in result["forward_inputs"]


def gradients(policy: Any, inputs: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    policy.zero_grad()
    replay = policy.default_forward(inputs)
    (replay["logprobs"].mean() + replay["values"].mean()).backward()
    frozen = [name for name, p in policy.named_parameters() if not p.requires_grad and p.grad is not None]
    assert frozen == []
    return replay, {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}


def test_cached_features_and_images_give_the_same_gradients(explorer):
    policy = explorer()
    _, result = policy.predict_action_batch(observation(), mode="train")
    inputs = result["forward_inputs"]
    live = {name: value for name, value in inputs.items() if name not in (FEATURES, VALUE_FEATURES)}
    cached, cached_grads = gradients(policy, inputs)
    recomputed, live_grads = gradients(policy, live)
    assert torch.equal(cached["logprobs"], result["prev_logprobs"])
    torch.testing.assert_close(recomputed["logprobs"], cached["logprobs"], rtol=0, atol=1e-5)
    torch.testing.assert_close(recomputed["values"], cached["values"], rtol=0, atol=1e-6)
    assert set(cached_grads) == set(live_grads)
    for name, grad in cached_grads.items():
        assert (grad - live_grads[name]).abs().max().item() <= 1e-6 * max(1.0, grad.abs().max().item()), name


def test_rows_in_another_order_and_split_score_the_same(explorer):
    policy = explorer()
    _, result = policy.predict_action_batch(observation(), mode="train")
    tensors, samples = split_inputs(result["forward_inputs"])
    nothing = torch.zeros(3)
    rows = Rows(tensors, samples, result["prev_logprobs"], nothing, nothing, nothing)
    for index in ([2, 0], [1]):
        order = torch.tensor(index)
        with torch.no_grad():
            replay = policy.default_forward(rows.forward_inputs(order, torch.device("cpu")))
        ratio = (replay["logprobs"] - result["prev_logprobs"][order]).sum((1, 2)).exp()
        assert (ratio - 1).abs().max().item() <= 1e-4
        torch.testing.assert_close(replay["values"], result["prev_values"][order], rtol=0, atol=1e-5)


def test_a_policy_without_critic_or_process_says_what_it_needs(make_policy):
    policy = make_policy()
    with pytest.raises(NotImplementedError, match=r"call explore_with\(FlowSDE"):
        policy.predict_action_batch(observation(), mode="train")
    policy.explore_with(FlowSDE(3))
    with pytest.raises(NotImplementedError, match=r"call add_value_head\(\)"):
        policy.predict_action_batch(observation(), mode="train")
    policy.add_value_head()
    policy.predict_action_batch(observation(), mode="train")
    with pytest.raises(ValueError, match="has a value head already"):
        policy.add_value_head()
    with pytest.raises(ValueError, match="only a policy that was loaded from a checkpoint"):
        policy.release_backbone()


def test_the_critic_is_saved_beside_the_weights(explorer, tmp_path):
    policy = explorer()
    policy.save_pretrained(tmp_path / "checkpoint")
    loaded = PI05Policy.from_pretrained(tmp_path / "checkpoint")
    assert loaded.value_head is None
    loaded.add_value_head(tmp_path / "checkpoint")
    assert torch.equal(loaded.predict_values(observation()), policy.predict_values(observation()))
    other = PI05Policy.from_pretrained(tmp_path / "checkpoint")
    other.add_value_head()
    assert not torch.equal(other.predict_values(observation()), policy.predict_values(observation()))


def test_a_saved_critic_of_other_sizes_is_refused(explorer, make_policy, tmp_path):
    weights = ValueHead(5).state_dict()
    save_file(weights, tmp_path / "value_head.safetensors")
    with pytest.raises(ValueError, match="does not fit this policy's value head"):
        make_policy().add_value_head(tmp_path)


def test_a_learner_without_a_backbone_replays_the_same(explorer, tmp_path):
    explorer().save_pretrained(tmp_path / "checkpoint")
    policy, learner = (PI05Policy.from_pretrained(tmp_path / "checkpoint") for _ in range(2))
    for one in (policy, learner):
        one.add_value_head(tmp_path / "checkpoint")
        one.explore_with(FlowSDE(3))
    learner.release_backbone()
    _, result = policy.predict_action_batch(observation(), mode="train")
    replay = learner.default_forward(result["forward_inputs"])
    assert torch.equal(replay["logprobs"], result["prev_logprobs"])
    assert torch.equal(replay["values"], result["prev_values"])
    assert not any(name.startswith("model.prefix.") for name, _ in learner.named_parameters())


def test_values_are_computed_unless_they_are_not_wanted(explorer):
    policy = explorer()
    assert "prev_values" in policy.predict_action_batch(observation(), mode="train")[1]
    assert "prev_values" not in policy.predict_action_batch(observation(), mode="train", compute_values=False)[1]


@pytest.mark.parametrize("has_features", [True, False])
def test_an_update_of_ppo_starts_at_ratio_one(explorer, has_features):
    """In micro-batches of two rows, which pad another way than the rollout's three."""
    policy = explorer()
    _, result = policy.predict_action_batch(observation(), mode="train")
    tensors, samples = split_inputs(result["forward_inputs"])
    if not has_features:
        del tensors[VALUE_FEATURES]
    row = torch.zeros(1, 3)
    over = torch.ones(1, 3, dtype=torch.bool)
    values = torch.stack([result["prev_values"], torch.zeros(3)])
    timeline = Timeline(torch.tensor([[0.0, 1.0, 0.0]]), values, over, ~over, row, torch.full((1, 3), 8))
    fragment = Fragment(tensors, samples if has_features else None, result["prev_logprobs"], timeline, [], 0)
    fabric = L.Fabric(accelerator="cpu", devices=1, strategy=FabricSomaSpeedStrategy(report=False))
    config = PPOConfig(epochs=1, minibatch_size=3, micro_batch_size=2, lr=1e-4)
    before = {name: p.detach().clone() for name, p in policy.named_parameters()}
    logged = PPOLearner(fabric, policy, config).update([fragment])
    assert logged["ratio_deviation"] == 0
    assert logged["logp_gap_max"] < 1e-2  # summed over 56 numbers
    for name, p in policy.named_parameters():
        is_equal = torch.equal(p, before[name])
        assert is_equal or p.requires_grad, name
    assert (policy.value_head.layers[-1].bias - before["value_head.layers.6.bias"]).abs().item() > 0
