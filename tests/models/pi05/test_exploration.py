"""pi0.5 explores, records what replay needs, and is replayed from it: with cached features, and without a backbone."""

from __future__ import annotations

import lightning as L  # noqa: N812 (Lightning's own convention)
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from soma_lightning import FabricSomaSpeedStrategy
from soma_lightning.models import PI05Policy
from soma_lightning.models.flow_policy import FEATURES
from soma_lightning.models.flow_sde import FlowSDE
from soma_lightning.models.pi05.exploration import VALUE_FEATURES
from soma_lightning.models.pi05.folder import VALUE_HEAD_FILE
from soma_lightning.models.pi05.lora import LoRAConfig, add_lora
from soma_lightning.models.policy import check_policy
from soma_lightning.models.value_head import ValueHead
from soma_lightning.rl.learner import PPOLearner
from soma_lightning.rl.ppo import PPOConfig
from soma_lightning.rl.records import Fragment, Rows, Timeline, split_inputs

TASKS = ["reach the cube", "pick up the red cube", "push"]
KEYS = [(0, row, 0) for row in range(3)]


@pytest.fixture
def observation():
    rng = np.random.default_rng(0)
    return {
        "main_images": rng.integers(0, 256, (3, 64, 64, 3), dtype=np.uint8),
        "wrist_images": rng.integers(0, 256, (3, 64, 64, 3), dtype=np.uint8),
        "states": rng.normal(size=(3, 8)).astype(np.float32),
        "task_descriptions": list(TASKS),
    }


def of_rows(observation, rows):
    return {
        name: [value[row] for row in rows] if isinstance(value, list) else value[rows]
        for name, value in observation.items()
    }


@pytest.fixture
def explorer(make_policy):
    def make(**options):
        policy = make_policy(**options).eval()
        policy.reset_parameters()
        policy.explore_with(FlowSDE(4))
        policy.add_value_head()
        return policy

    return make


def gradients(policy, inputs):
    policy.zero_grad()
    replay = policy(forward_inputs=inputs)
    (replay["logprobs"].sum() + replay["values"].square().sum()).backward()
    return replay, {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}


def test_the_policy_keeps_the_contract_in_train_mode(explorer, observation):
    check = check_policy(explorer(), observation)
    assert check.passed, str(check)
    assert check.train_mode == "checked"


def test_the_record_holds_what_the_contract_names(explorer, observation):
    policy = explorer()
    actions, result = policy.predict_action_batch(observation, mode="train", compute_values=True, keys=KEYS)
    inputs = result["forward_inputs"]
    assert actions.shape == (3, 8, 7)
    assert inputs["chains"].shape == (3, 5, 8, policy.config.max_action_dim)
    assert inputs["denoise_inds"].shape == (3, 4)
    assert torch.equal(inputs["action"], actions.flatten(1))
    assert torch.equal(inputs["model_action"], inputs["chains"][:, -1].flatten(1))
    assert result["prev_logprobs"].shape == (3, 8, 7)
    assert result["prev_values"].shape == (3,)
    assert inputs["observation.images.image"].dtype == torch.uint8
    prompts = inputs["tokenized_prompt_mask"].sum(1)
    assert inputs[FEATURES].lengths == tuple((prompts + 2 * 16).tolist())  # two images of 16 tokens


def test_randomness_is_keyed_by_row_and_not_by_the_batch(explorer, observation):
    policy = explorer()
    together, result = policy.predict_action_batch(observation, mode="train", compute_values=True, keys=KEYS)
    for row in range(3):
        alone, single = policy.predict_action_batch(
            of_rows(observation, [row]), mode="train", compute_values=True, keys=KEYS[row : row + 1]
        )
        assert torch.equal(single["forward_inputs"]["denoise_inds"][0], result["forward_inputs"]["denoise_inds"][row])
        assert torch.allclose(alone[0], together[row], atol=1e-5)
        assert torch.allclose(single["prev_logprobs"][0], result["prev_logprobs"][row], atol=1e-4)


def test_cached_features_and_images_give_the_same_replay_and_gradients(explorer, observation):
    policy = explorer()
    _, result = policy.predict_action_batch(observation, mode="train", compute_values=True, keys=KEYS)
    cached = result["forward_inputs"]
    live = {name: value for name, value in cached.items() if name not in (FEATURES, VALUE_FEATURES)}
    with_cache, cached_grads = gradients(policy, cached)
    without, live_grads = gradients(policy, live)
    assert torch.equal(with_cache["logprobs"], result["prev_logprobs"])
    for name in ("logprobs", "values"):
        assert torch.allclose(with_cache[name], without[name], atol=1e-6), name
    assert set(cached_grads) == set(live_grads) == {name for name, p in policy.named_parameters() if p.requires_grad}
    for name, grad in cached_grads.items():
        assert torch.allclose(grad, live_grads[name], rtol=1e-5, atol=1e-6), name


def test_a_prefix_that_trains_is_computed_again_with_gradients(explorer, observation):
    policy = explorer(trainable="all")
    _, result = policy.predict_action_batch(observation, mode="train", compute_values=True, keys=KEYS)
    assert FEATURES not in result["forward_inputs"]
    _, grads = gradients(policy, result["forward_inputs"])
    assert any(name.startswith("model.prefix.paligemma.vision_tower") for name in grads)


def test_adapters_of_the_prefix_get_gradients(explorer, observation):
    policy = explorer()
    add_lora(policy.model, LoRAConfig(4, targets="paligemma", full=("expert",)))
    _, result = policy.predict_action_batch(observation, mode="train", compute_values=True, keys=KEYS)
    _, grads = gradients(policy, result["forward_inputs"])
    assert any("lora_B" in name and grad.abs().sum() > 0 for name, grad in grads.items())


def test_a_learner_without_backbone_replays_learns_and_saves(explorer, observation, tmp_path):
    policy = explorer()
    policy.save_pretrained(tmp_path / "start")
    _, result = policy.predict_action_batch(observation, mode="train", compute_values=True, keys=KEYS)
    learner = PI05Policy.from_pretrained(tmp_path / "start")
    learner.explore_with(FlowSDE(4))
    learner.add_value_head(tmp_path / "start")
    learner.release_backbone()
    assert not [name for name, _ in learner.named_parameters() if ".prefix." in name]
    assert all(p.is_meta for p in learner.model.prefix.parameters())
    replay, grads = gradients(learner, result["forward_inputs"])
    expected, full_grads = gradients(policy, result["forward_inputs"])
    assert torch.equal(replay["logprobs"], expected["logprobs"])
    assert torch.equal(replay["values"], expected["values"])
    assert {name: grad.tolist() for name, grad in grads.items()} == {n: g.tolist() for n, g in full_grads.items()}
    with torch.no_grad():
        learner.model.expert.action_out_proj.weight.add_(1.0)
    learner.save_pretrained(tmp_path / "learned")
    again = PI05Policy.from_pretrained(tmp_path / "learned")
    for name, p in policy.model.named_parameters():
        moved = 1.0 if name == "expert.action_out_proj.weight" else 0.0
        assert torch.equal(dict(again.model.named_parameters())[name], p + moved), name


def test_the_critic_is_saved_beside_the_weights(explorer, make_policy, tmp_path):
    policy = explorer()
    policy.save_pretrained(tmp_path / "policy")
    assert (tmp_path / "policy" / VALUE_HEAD_FILE).is_file()
    again = PI05Policy.from_pretrained(tmp_path / "policy")
    again.add_value_head(tmp_path / "policy")
    for name, value in policy.value_head.state_dict().items():
        assert torch.equal(again.value_head.state_dict()[name], value)
    policy.save_pretrained(tmp_path / "policy")  # its own files are replaced, not refused


def test_rows_in_another_order_and_split_score_the_same(explorer, observation):
    policy = explorer()
    _, result = policy.predict_action_batch(observation, mode="train")
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


def test_a_saved_critic_of_other_sizes_is_refused(explorer, make_policy, tmp_path):
    weights = ValueHead(5).state_dict()
    save_file(weights, tmp_path / "value_head.safetensors")
    with pytest.raises(ValueError, match="does not fit this policy's value head"):
        make_policy().add_value_head(tmp_path)


def test_values_are_computed_unless_they_are_not_wanted(explorer, observation):
    policy = explorer()
    assert "prev_values" in policy.predict_action_batch(observation, mode="train")[1]
    assert "prev_values" not in policy.predict_action_batch(observation, mode="train", compute_values=False)[1]


@pytest.mark.parametrize("has_features", [True, False])
def test_an_update_of_ppo_starts_at_ratio_one(explorer, observation, has_features):
    """In micro-batches of two rows, which pad another way than the rollout's three."""
    policy = explorer()
    _, result = policy.predict_action_batch(observation, mode="train")
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


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda p, o: p.predict_action_batch(o, mode="train", num_steps=3), ValueError, "of mode='eval'"),
        (lambda p, o: p.predict_action_batch(o, mode="eval", keys=KEYS), ValueError, "keys are of mode='train'"),
        (lambda p, o: p.add_value_head(), ValueError, "has a value head already"),
        (lambda p, o: p.release_backbone(), ValueError, "loaded from a checkpoint"),
    ],
)
def test_mistakes_are_named(explorer, observation, call, error, message):
    with pytest.raises(error, match=message):
        call(explorer(), observation)
