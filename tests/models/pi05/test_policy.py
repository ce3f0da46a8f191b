"""The policy object: objective, masks, sampling, the policy contract, checkpoints in both layouts, and its errors."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from soma_lightning import models
from soma_lightning.models import PI05Config, PI05Policy
from soma_lightning.models.flow import sample_time
from soma_lightning.models.flow_sde import FlowSDE
from soma_lightning.models.pi05.building import build_pi05
from soma_lightning.models.policy import BasePolicy, ForwardType, check_policy


@pytest.fixture
def observation():
    rng = np.random.default_rng(0)
    return {
        "main_images": rng.integers(0, 256, (2, 64, 64, 3), dtype=np.uint8),
        "wrist_images": rng.integers(0, 256, (2, 64, 64, 3), dtype=np.uint8),
        "states": rng.normal(size=(2, 8)).astype(np.float32),
        "task_descriptions": ["pick up the cube", "reach the green disc"],
    }


def draws(rows: int, width: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    return torch.randn(rows, 8, width, generator=generator), torch.rand(rows, generator=generator)


# -- objective --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flow_draws", [1, 3])
@pytest.mark.parametrize(("loss_dims", "width"), [("real", 7), ("padded", 9)])
def test_loss_is_the_masked_mean_of_the_velocity_error(make_policy, make_batch, flow_draws, loss_dims, width):
    policy = make_policy(loss_dims=loss_dims, max_action_dim=9)
    batch = make_batch()
    batch["action_is_pad"][0, 5:] = True
    batch["action_is_pad"][2, 1:] = True
    noise, time = draws(3 * flow_draws, 9)
    out = policy.sft_forward(batch, noise=noise, time=time, flow_draws=flow_draws)

    inputs = policy.processor.inputs(batch)
    actions = policy.processor.targets(batch).actions
    total, count, per_dim = 0.0, 0, np.zeros(width)
    for row in range(3 * flow_draws):
        sample = row // flow_draws
        one = [x[sample : sample + 1] for x in (*inputs.images, *inputs.image_masks, inputs.tokens, inputs.token_mask)]
        prefix = policy.model.encode_prefix(one[:2], one[2:4], one[4], one[5])
        t, e, a = time[row], noise[row], actions[sample]
        v = policy.model.velocity(prefix, (t * e + (1 - t) * a)[None], time[row : row + 1])[0]
        error = ((v - (e - a)) ** 2).detach().double().numpy()[:, :width]
        real = ~batch["action_is_pad"][sample].numpy()
        total, count, per_dim = total + error[real].sum(), count + real.sum() * width, per_dim + error[real].sum(0)
    assert out["count"].item() == count == 14 * flow_draws * width
    np.testing.assert_allclose(out["loss_sum"].item(), total, rtol=1e-5)
    np.testing.assert_allclose(out["loss"].item(), total / count, rtol=1e-5)
    np.testing.assert_allclose(out["loss_per_dim"].numpy(), per_dim / (14 * flow_draws), rtol=1e-5)
    assert not out["loss_per_dim"].requires_grad


def test_padded_steps_influence_neither_loss_nor_gradients(make_policy, make_batch):
    """With time = 1 the actions enter as targets only, so a change of padded actions may change nothing at all.

    (At other times x_t of a padded step is read by the others, in training as in acting.)
    """
    policy = make_policy()
    batch = make_batch()
    batch["action_is_pad"][:, 6:] = True
    noise, _ = draws(3)
    time = torch.ones(3)
    results = []
    for padding in (0.0, 100.0):
        batch["action"][:, 6:] = padding
        policy.zero_grad()
        out = policy.sft_forward(batch, noise=noise, time=time)
        out["loss"].backward()
        results.append((out["loss"].item(), [p.grad.clone() for p in policy.parameters() if p.grad is not None]))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(a, b) for a, b in zip(results[0][1], results[1][1], strict=True))

    repeat = PI05Policy(replace(policy.config, pad_actions="repeat"), policy.statistics)
    repeat.load_state_dict(policy.state_dict())
    losses = []
    for padding in (0.0, 100.0):
        batch["action"][:, 6:] = padding
        losses.append(repeat.sft_forward(batch, noise=noise, time=time)["loss"].item())
    assert losses[1] > losses[0] + 100


def test_a_wholly_padded_batch_has_loss_zero(make_policy, make_batch):
    batch = make_batch()
    batch["action_is_pad"][:] = True
    out = make_policy().sft_forward(batch)
    assert out["loss"].item() == out["loss_sum"].item() == out["count"].item() == 0


def test_draws_are_noise_then_time(make_policy, make_batch):
    policy, batch = make_policy(), make_batch()
    generator = torch.Generator().manual_seed(4)
    noise = torch.randn(6, 8, 7, generator=generator)
    time = 0.001 + 0.999 * torch.rand(6, generator=generator) ** (1 / 1.5)
    given = policy.sft_forward(batch, noise=noise, time=time, flow_draws=2)["loss"]
    drawn = policy.sft_forward(batch, flow_draws=2, generator=torch.Generator().manual_seed(4))["loss"]
    torch.testing.assert_close(drawn, given, rtol=1e-6, atol=0)


def test_state_noise_changes_only_the_prompt(make_policy, make_batch):
    policy, batch = make_policy(), make_batch()
    noise, time = draws(3)
    plain = policy.sft_forward(batch, noise=noise, time=time)["loss"]
    noisy = policy.sft_forward(batch, noise=noise, time=time, state_noise=0.5)["loss"]
    assert plain.item() != noisy.item()


def test_wrong_draws_are_refused(make_policy, make_batch):
    policy, batch = make_policy(), make_batch()
    noise, time = draws(3)
    with pytest.raises(ValueError, match=r"noise must be \[6, 8, 7\], got \[3, 8, 7\]"):
        policy.sft_forward(batch, noise=noise, flow_draws=2)
    with pytest.raises(ValueError, match=r"time must be \[3\], got \[2\]"):
        policy.sft_forward(batch, noise=noise, time=time[:2])
    with pytest.raises(ValueError, match="flow_draws=0 must be at least 1"):
        policy.sft_forward(batch, flow_draws=0)


def test_backbone_is_frozen_by_default_and_its_hash_says_so(make_policy, make_batch):
    policy = make_policy()
    before = policy.backbone_hash()
    trainable = [p for p in policy.parameters() if p.requires_grad]
    assert {id(p) for p in trainable} == {id(p) for p in policy.model.expert.parameters()}
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2)
    policy.train()
    assert not any(part.training for module in policy.frozen_modules() for part in module.modules())
    policy.sft_forward(make_batch())["loss"].backward()
    assert all(p.grad is None for p in policy.parameters() if not p.requires_grad)
    optimizer.step()
    assert policy.backbone_hash() == before
    with torch.no_grad():
        next(policy.model.prefix.parameters()).view(-1)[0] += 1
    assert policy.backbone_hash() != before


def test_whole_network_trains_when_asked(make_policy, make_batch):
    policy = make_policy(trainable="all")
    policy.sft_forward(make_batch())["loss"].backward()
    table = policy.model.prefix.paligemma.vision_tower.embeddings.patch_embedding.weight
    assert table.grad is not None
    assert table.grad.abs().sum() > 0


def test_number_tokens_start_as_neighbours(make_policy):
    policy = make_policy()
    table = policy.model.prefix.paligemma.get_input_embeddings().weight
    numbers = table[policy.processor.prompts.number_token_ids]
    near = torch.nn.functional.cosine_similarity(numbers[1:], numbers[:-1]).min()
    far = torch.nn.functional.cosine_similarity(numbers[128:], numbers[:-128]).max()
    assert near > 0.9 > far


# -- acting -----------------------------------------------------------------------------------------------------------


def test_sampled_actions_are_in_raw_units(make_policy, make_batch):
    policy, batch = make_policy(), make_batch()
    noise, _ = draws(3)
    actions = policy.sample_actions(batch, noise, num_steps=4)
    inputs = policy.processor.inputs(batch)
    prefix = policy.model.encode_prefix(inputs.images, inputs.image_masks, inputs.tokens, inputs.token_mask)
    x = noise
    for k in range(4):
        x = x - policy.model.velocity(prefix, x, torch.full((3,), 1 - k / 4)) / 4
    low, high = (policy.statistics["action"][name] for name in ("q01", "q99"))
    expected = (x.detach().double().numpy() + 1) / 2 * (high - low) + low
    np.testing.assert_allclose(actions.numpy(), expected, rtol=1e-4, atol=1e-5)
    assert actions.dtype == torch.float32
    assert not actions.requires_grad


def test_sampling_is_seeded_and_uses_the_configured_steps(make_policy, make_batch):
    policy, batch = make_policy(), make_batch()
    one, two = (policy.sample_actions(batch, generator=torch.Generator().manual_seed(1)) for _ in range(2))
    assert torch.equal(one, two)
    noise = torch.randn(3, 8, 7, generator=torch.Generator().manual_seed(1))
    assert torch.equal(one, policy.sample_actions(batch, noise, num_steps=5))
    assert not torch.equal(one, policy.sample_actions(batch, noise, num_steps=2))
    with pytest.raises(ValueError, match="num_steps=0 must be a whole number, at least 1"):
        policy.sample_actions(batch, num_steps=0)
    with pytest.raises(ValueError, match=r"num_steps=1\.5 must be a whole number"):
        policy.sample_actions(batch, num_steps=1.5)
    with pytest.raises(ValueError, match=r"noise must be \[3, 8, 7\]"):
        policy.sample_actions(batch, noise[:2])


def test_zero_images_make_the_policy_blind(make_policy, make_batch):
    blind, seeing = make_policy(zero_images=True), make_policy()
    noise, _ = draws(3)
    batch, other = make_batch(), make_batch()
    other["observation.images.image"] = 255 - other["observation.images.image"]
    assert torch.equal(blind.sample_actions(batch, noise), blind.sample_actions(other, noise))
    assert not torch.equal(seeing.sample_actions(batch, noise), seeing.sample_actions(other, noise))


def test_policy_keeps_the_contract(make_policy, observation):
    check = check_policy(make_policy().eval(), observation)
    assert check.passed, str(check)
    assert check.action_shape == (2, 8, 7)
    assert check.train_mode.startswith("not implemented (mode='train' needs stochastic flow steps")


def test_train_mode_and_values_need_their_parts(make_policy, observation):
    policy = make_policy()
    with pytest.raises(NotImplementedError, match="mode='train' needs stochastic flow steps: call explore_with"):
        policy.predict_action_batch(observation, mode="train")
    with pytest.raises(NotImplementedError, match="PI05Policy has no stochastic steps to explore with"):
        policy(forward_inputs={})
    policy.explore_with(FlowSDE(3))
    with pytest.raises(NotImplementedError, match=r"compute_values=True needs a value head: call add_value_head\(\)"):
        policy.predict_action_batch(observation, compute_values=True)
    with pytest.raises(ValueError, match="mode must be 'eval' or 'train', got 'test'"):
        policy.predict_action_batch(observation, mode="test")


def test_forward_dispatches_to_the_objective(make_policy, make_batch):
    policy, batch = make_policy(), make_batch()
    noise, time = draws(3)
    assert isinstance(policy, BasePolicy)
    direct = policy.sft_forward(batch, noise=noise, time=time)["loss"]
    assert torch.equal(policy(ForwardType.SFT, batch=batch, noise=noise, time=time)["loss"], direct)


def test_observation_and_batch_give_the_same_actions(make_policy, observation):
    policy = make_policy()
    noise = torch.randn(2, *policy.noise_shape, generator=torch.Generator().manual_seed(2))
    actions, result = policy.predict_action_batch(observation, noise=noise, num_steps=3)
    batch = {
        "observation.images.image": torch.from_numpy(observation["main_images"]).permute(0, 3, 1, 2),
        "observation.images.image2": torch.from_numpy(observation["wrist_images"]).permute(0, 3, 1, 2),
        "observation.state": torch.from_numpy(observation["states"]),
        "task": observation["task_descriptions"],
    }
    assert torch.equal(actions, policy.sample_actions(batch, noise, 3))
    assert result == {"num_steps": 3}
    more = observation | {"extra_view_images": observation["main_images"]}
    assert torch.equal(policy.predict_action_batch(more, noise=noise, num_steps=3)[0], actions)
    with pytest.raises(ValueError, match=r"missing \['observation.images.image2'\]"):
        policy.predict_action_batch({k: v for k, v in observation.items() if k != "wrist_images"})


def test_select_action_executes_part_of_a_chunk(make_policy, observation):
    policy = make_policy()
    noise, _ = draws(2)
    chunk, _ = policy.predict_action_batch(observation, noise=noise)
    taken = [policy.select_action(observation, noise=noise) for _ in range(5)]
    for step, index in enumerate((0, 1, 2, 3, 0)):  # n_action_steps = 4
        assert torch.equal(taken[step], chunk[:, index])
    policy.reset()
    assert torch.equal(policy.select_action(observation, n_action_steps=8, noise=noise), chunk[:, 0])
    one = {key: value[:1] for key, value in observation.items()}
    with pytest.raises(ValueError, match=r"actions for 2 environments are queued, but .* has 1; call reset"):
        policy.select_action(one)


def test_more_executed_steps_than_the_chunk_are_refused(make_policy, observation, tmp_path):
    policy = make_policy()
    with pytest.raises(ValueError, match=r"n_action_steps=9 must lie in 1\.\.8, the chunk"):
        policy.select_action(observation, n_action_steps=9)
    policy.save_pretrained(tmp_path / "p")
    with pytest.raises(ValueError, match=r"n_action_steps=9 must lie in 1\.\.chunk_size=8"):
        PI05Policy.from_pretrained(tmp_path / "p", changes={"n_action_steps": 9})


def test_flow_times_follow_the_configuration(make_policy, make_batch, monkeypatch):
    settings = {"time_beta_alpha": 3.0, "time_beta_beta": 2.0, "time_scale": 0.5, "time_offset": 0.25}
    policy, seen = make_policy(**settings), []
    flow_loss = policy.model.flow_loss
    monkeypatch.setattr(policy.model, "flow_loss", lambda *args: seen.append(args[-1]) or flow_loss(*args))
    policy.sft_forward(make_batch(), flow_draws=64, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(0)
    torch.randn(len(seen[0]), *policy.noise_shape, generator=generator)  # noise is drawn before time
    expected = sample_time(len(seen[0]), alpha=3.0, beta=2.0, scale=0.5, offset=0.25, generator=generator)
    assert torch.equal(seen[0], expected)


# -- statistics and facts ---------------------------------------------------------------------------------------------


def test_dimensions_follow_the_statistics(make_policy, make_statistics, caplog):
    policy = make_policy()
    assert (policy.config.action_dim, policy.config.state_dim) == (7, 8)
    with caplog.at_level(logging.WARNING):
        policy.set_statistics(make_statistics(state_dim=5, action_dim=4), source="data set X")
    assert (policy.config.action_dim, policy.config.state_dim) == (4, 5)
    assert "action_dim changes from 7 to 4" in caplog.text
    assert policy.processor.config == policy.config
    assert policy.statistics_source == "data set X"


def test_new_statistics_keep_the_other_settings(make_statistics):
    policy = PI05Policy(PI05Config.tiny(), on_long_prompt="truncate", missing_cameras="mask")
    policy.set_statistics(make_statistics())
    assert (policy.processor.on_long_prompt, policy.processor.missing_cameras) == ("truncate", "mask")


def test_statistics_wider_than_the_model_are_refused_and_nothing_changes(make_policy, make_statistics):
    policy = make_policy()
    with pytest.raises(ValueError, match="action_dim=8 is larger than the model's max_action_dim=7"):
        policy.set_statistics(make_statistics(action_dim=8))
    assert policy.config.action_dim == policy.processor.config.action_dim == 7
    with pytest.raises(ValueError, match=r"config\.action_dim=6, but the statistics of action have 7"):
        PI05Policy(PI05Config.tiny(action_dim=6), make_statistics())


def test_missing_statistics_are_said(make_batch):
    policy = PI05Policy(PI05Config.tiny())
    with pytest.raises(ValueError, match="no statistics to normalise action with; call set_statistics"):
        policy.sft_forward(make_batch())
    assert policy.statistics is None
    assert policy.report_facts()["statistics"] == "none"


def test_facts_and_description_are_plain(make_policy):
    policy = make_policy(prompt="state", loss_dims="padded")
    facts = json.loads(json.dumps(policy.report_facts()))
    assert facts["chunk_size"] == 8
    assert facts["n_action_steps"] == 4
    assert facts["statistics"] == "given"
    assert facts["prompt"] == "state"
    assert facts["loss"] == "mean over 7 action dimensions (padded), padded steps left out"
    assert facts["dtype"] == "float32 (lerobot fp32 islands)"
    described = policy.describe()
    assert json.loads(json.dumps(described)) == described
    assert PI05Config.from_dict(described["config"]) == policy.config
    assert described["statistics"]["action"]["q01"] == policy.statistics["action"]["q01"].tolist()


# -- builder ----------------------------------------------------------------------------------------------------------


def test_builder_of_the_registry(make_policy, tmp_path):
    make_policy().save_pretrained(tmp_path / "p")
    loaded = build_pi05({"model_type": "pi05", "precision": "bf16", "model_path": str(tmp_path / "p")}, torch.bfloat16)
    assert loaded.config.dtype == "bfloat16"
    kept = build_pi05({"model_type": "pi05", "model_path": str(tmp_path / "p"), "n_action_steps": 1}, None)
    assert (kept.config.dtype, kept.config.n_action_steps) == ("float32", 1)
    fresh = build_pi05({"model_type": "pi05", "size": "tiny", "trainable": "all", "is_lora": False}, torch.float32)
    assert fresh.config == PI05Config.tiny(trainable="all")


@pytest.mark.parametrize(
    ("cfg", "message"),
    [
        ({"size": "tiny", "is_lora": True, "trainable": "all"}, "trainable='all' has no effect with lora"),
        ({"size": "tiny", "is_lora": "false"}, "is_lora='false' must be true or false"),
        ({"size": "tiny", "cuda_graphs": "false"}, "cuda_graphs='false' must be true or false"),
        ({"size": "tiny", "dtype": "bfloat16"}, r"precision \(float32\) and dtype='bfloat16' contradict each other"),
        ({"size": "small"}, "size='small' is unknown; known: base, tiny"),
        ({"size": "tiny", "chunk": 4}, r"no configuration field 'chunk'; nearest: \['chunk_size'"),
        ({"size": "tiny", "revision": "x"}, "revision='x' has no effect without model_path"),
        ({"size": "tiny", "model_path": "p"}, "size='tiny' has no effect with model_path='p'"),
    ],
)
def test_builder_refuses_what_it_would_ignore(cfg, message):
    with pytest.raises(ValueError, match=message):
        build_pi05({"model_type": "pi05", **cfg}, torch.float32)


def test_builder_refuses_half_precision():
    with pytest.raises(ValueError, match="float32 or bfloat16, not torch.float16"):
        build_pi05({"model_type": "pi05", "size": "tiny"}, torch.float16)


def test_models_package_imports_lazily():
    code = """
import sys, soma_lightning.models as models
assert dir(models) == ["PI05Config", "PI05Policy"]
assert not {"transformers", "lightning", "soma_lightning.models.pi05.policy"} & set(sys.modules)
models.PI05Config.tiny()
assert "transformers" not in sys.modules
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=120)
    with pytest.raises(AttributeError, match="no attribute 'PI06Policy'"):
        getattr(models, "PI06Policy")  # noqa: B009
