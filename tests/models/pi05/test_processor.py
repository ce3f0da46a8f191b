"""From batches to the network's inputs and back, and one clear error for each way a batch can be wrong."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from soma_lightning.models.pi05.config import PI05Config
from soma_lightning.models.pi05.images import resize_with_padding
from soma_lightning.models.pi05.processor import PI05Processor
from soma_lightning.models.pi05.tokenizer import build_builtin_tokenizer, prompt_text

TINY = PI05Config.tiny()
IMAGE, IMAGE2 = TINY.cameras


@pytest.fixture
def processor(make_statistics):
    return PI05Processor(TINY, make_statistics(), build_builtin_tokenizer())


def quantile_bins(state: np.ndarray, stats: dict[str, np.ndarray]) -> np.ndarray:
    """The formula of the page in float32, as the public code computes it."""
    low, high = stats["q01"].astype(np.float32), stats["q99"].astype(np.float32)
    normalised = 2 * (state - low) / (high - low) - 1
    return np.digitize(normalised, bins=np.linspace(-1, 1, 257)[:-1]) - 1


def test_inputs_are_images_masks_and_prompts(processor, make_batch):
    batch = make_batch()
    inputs = processor.inputs(batch)
    for name, image in zip((IMAGE, IMAGE2), inputs.images, strict=True):
        assert torch.equal(image, batch[name].float() / 255 * 2 - 1)
    assert [mask.tolist() for mask in inputs.image_masks] == [[True] * 3] * 2
    bins = quantile_bins(batch["observation.state"].numpy(), processor.statistics["observation.state"])
    assert bins.min() == -1
    assert bins.max() == 255
    tokenizer = processor.prompts.tokenizer
    for row, mask, text, values in zip(inputs.tokens, inputs.token_mask, batch["task"], bins.tolist(), strict=True):
        assert row[mask].tolist() == [2, *tokenizer(prompt_text(text, values), add_special_tokens=False)["input_ids"]]


def test_state_outside_the_quantiles_keeps_its_place(processor, make_batch):
    batch = make_batch(1)
    stats = processor.statistics["observation.state"]
    batch["observation.state"] = torch.from_numpy(stats["q01"] - 0.01).float()[None]
    tokens = processor.inputs(batch).tokens
    assert processor.prompts.tokenizer.convert_ids_to_tokens(tokens[0].tolist())[10:18] == ["-1"] * 8


def test_task_family_reads_no_state(make_statistics, make_batch):
    statistics = {"action": make_statistics()["action"]}
    processor = PI05Processor(replace(TINY, prompt="task"), statistics, build_builtin_tokenizer())
    batch = make_batch(1)
    del batch["observation.state"]
    tokens = processor.inputs(batch).tokens[0]
    names = processor.prompts.tokenizer.convert_ids_to_tokens(tokens.tolist())
    assert names[:7] == ["<bos>", "pick", "up", "the", "cube", "\n", "<pad>"]
    with pytest.raises(ValueError, match=r"state_noise=0\.1 has no effect: config\.prompt='task'"):
        processor.inputs(batch, state_noise=0.1)


def test_state_noise_is_added_to_the_normalised_state(processor, make_batch):
    batch = make_batch()
    stats = processor.statistics["observation.state"]
    low, high = torch.from_numpy(stats["q01"]).float(), torch.from_numpy(stats["q99"]).float()
    draw = torch.randn(3, 8, generator=torch.Generator().manual_seed(5))
    noisy = dict(batch)
    noisy["observation.state"] = batch["observation.state"] + 0.3 * draw * (high - low) / 2
    with_noise = processor.inputs(batch, state_noise=0.3, generator=torch.Generator().manual_seed(5)).tokens
    same_value = processor.inputs(noisy).tokens
    assert (with_noise - same_value).abs().max() <= 1  # a bin edge may fall between the two roundings
    assert (with_noise == same_value).float().mean() > 0.95
    assert not torch.equal(with_noise, processor.inputs(batch).tokens)


def test_zero_images_are_black_and_readable(make_statistics, make_batch):
    processor = PI05Processor(replace(TINY, zero_images=True), make_statistics(), build_builtin_tokenizer())
    inputs = processor.inputs(make_batch(2))
    assert all(torch.equal(image, torch.full((2, 3, 64, 64), -1.0)) for image in inputs.images)
    assert all(mask.all() for mask in inputs.image_masks)


def test_images_of_another_size_are_resized(processor, make_batch):
    batch = make_batch(2, side=48)
    inputs = processor.inputs(batch)
    assert torch.equal(inputs.images[1], resize_with_padding(batch[IMAGE2], 64))


def test_targets_are_normalised_and_padded(make_statistics, make_batch):
    statistics = make_statistics()
    processor = PI05Processor(replace(TINY, max_action_dim=12), statistics, build_builtin_tokenizer())
    batch = make_batch()
    batch["action_is_pad"][0, 5:] = True
    targets = processor.targets(batch)
    low, high = statistics["action"]["q01"], statistics["action"]["q99"]
    expected = 2 * (batch["action"].double().numpy() - low) / (high - low) - 1
    np.testing.assert_allclose(targets.actions[..., :7].numpy(), expected, rtol=1e-5, atol=1e-6)
    assert targets.actions.dtype == torch.float32
    assert torch.equal(targets.actions[..., 7:], torch.zeros(3, 8, 5))
    assert torch.equal(targets.counts, ~batch["action_is_pad"])
    torch.testing.assert_close(processor.actions(targets.actions, batch), batch["action"], rtol=0, atol=2e-6)


def test_mean_std_statistics(make_statistics, make_batch):
    statistics = make_statistics()
    processor = PI05Processor(replace(TINY, normalization="mean_std"), statistics, build_builtin_tokenizer())
    batch = make_batch()
    stats = statistics["action"]
    expected = (batch["action"].double().numpy() - stats["mean"]) / (stats["std"] + 1e-8)
    np.testing.assert_allclose(processor.targets(batch).actions.numpy(), expected, rtol=1e-5, atol=2e-6)


def test_every_step_counts_with_repeat_or_without_a_mask(make_statistics, make_batch):
    batch = make_batch()
    batch["action_is_pad"][:, 3:] = True
    repeat = PI05Processor(replace(TINY, pad_actions="repeat"), make_statistics(), build_builtin_tokenizer())
    assert repeat.targets(batch).counts.all()
    del batch["action_is_pad"]
    mask = PI05Processor(TINY, make_statistics(), build_builtin_tokenizer())
    assert mask.targets(batch).counts.all()


# -- what is wrong with a batch ---------------------------------------------------------------------------------------


def test_camera_names_are_listed_expected_and_found(processor, make_batch):
    batch = make_batch()
    batch["observation.images.top"] = batch.pop(IMAGE2)
    with pytest.raises(ValueError, match="cameras do not fit the policy") as caught:
        processor.inputs(batch)
    for part in (
        f"expected ['{IMAGE}', '{IMAGE2}']",
        f"found ['{IMAGE}', 'observation.images.top']",
        f"missing ['{IMAGE2}'], extra ['observation.images.top']",
        "missing_cameras='mask'",
    ):
        assert part in str(caught.value)
    batch = make_batch()
    batch["observation.images.top"] = batch[IMAGE]
    with pytest.raises(ValueError, match=r"missing \[\], extra \['observation.images.top'\]"):
        processor.inputs(batch)


def test_cameras_keep_the_order_of_the_configuration(processor, make_batch):
    batch = make_batch()
    backwards = dict(reversed(batch.items()))
    assert list(backwards) != list(batch)
    expected = [batch[name].float() / 127.5 - 1 for name in processor.config.cameras]
    for inputs in (processor.inputs(batch), processor.inputs(backwards)):
        for image, pixels in zip(inputs.images, expected, strict=True):
            torch.testing.assert_close(image, pixels)


def test_a_missing_camera_can_be_masked(make_statistics, make_batch):
    processor = PI05Processor(TINY, make_statistics(), build_builtin_tokenizer(), missing_cameras="mask")
    batch = make_batch()
    kept = batch.pop(IMAGE2)
    inputs = processor.inputs(batch)
    assert len(inputs.images) == len(inputs.image_masks) == 1
    del batch[IMAGE]
    with pytest.raises(ValueError, match="cameras do not fit"):
        processor.inputs(batch)
    batch["observation.images.other"] = kept
    with pytest.raises(ValueError, match="cameras do not fit"):
        processor.inputs(batch)


def test_missing_fields_are_named(processor, make_batch):
    for key, method in (
        ("observation.state", processor.inputs),
        ("task", processor.inputs),
        ("action", processor.targets),
    ):
        batch = make_batch()
        del batch[key]
        with pytest.raises(ValueError, match=f"batch has no '{key}'"):
            method(batch)


@pytest.mark.parametrize("task", ["pick up the cube", [], [1, 2, 3]])
def test_tasks_must_be_a_list_of_strings(processor, make_batch, task):
    with pytest.raises(ValueError, match="'task' must be a list of one string a sample"):
        processor.inputs(make_batch() | {"task": task})


def test_sample_counts_must_agree(processor, make_batch):
    batch = make_batch()
    batch["task"] = batch["task"][:2]
    with pytest.raises(ValueError, match="observation.images.image holds 3 samples, task holds 2"):
        processor.inputs(batch)


def test_state_dimension_must_be_that_of_the_statistics(processor, make_batch):
    with pytest.raises(ValueError, match=r"observation.state must be \[B, 8\] as in the statistics, got \(3, 9\)"):
        processor.inputs(make_batch(state_dim=9))


def test_action_shape_errors(processor, make_batch):
    with pytest.raises(ValueError, match=r"action must be \[B, chunk_size=8, A\], got \(3, 10, 7\)"):
        processor.targets(make_batch(horizon=10))
    with pytest.raises(ValueError, match="action has 9 dimensions, more than the model's max_action_dim=7"):
        processor.targets(make_batch(action_dim=9))
    with pytest.raises(ValueError, match="action has 6 dimensions, its statistics have 7"):
        processor.targets(make_batch(action_dim=6))
    with pytest.raises(ValueError, match=r"action_is_pad must be bool \[3, 8\], got torch.float32 \[3, 8\]"):
        processor.targets(make_batch() | {"action_is_pad": torch.zeros(3, 8)})


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_and_infinity_name_key_and_first_sample(processor, make_batch, bad):
    batch = make_batch()
    batch["observation.state"][1, 2] = bad
    batch["observation.state"][2, 0] = bad
    with pytest.raises(ValueError, match="observation.state holds NaN or infinity, first in sample 1"):
        processor.inputs(batch)
    batch = make_batch()
    batch["action"][2, 7, 6] = bad
    with pytest.raises(ValueError, match="action holds NaN or infinity, first in sample 2"):
        processor.targets(batch)
    batch = make_batch()
    batch[IMAGE2] = batch[IMAGE2] / 255
    batch[IMAGE2][1, 0, 0, 0] = bad
    with pytest.raises(ValueError, match="observation.images.image2 holds NaN or infinity, first in sample 1"):
        processor.inputs(batch)


def test_float_images_of_another_range_are_refused(processor, make_batch):
    batch = make_batch()
    batch[IMAGE] = batch[IMAGE].float()
    with pytest.raises(ValueError, match=r"image is a float image and must lie in 0..1, but sample 0 spans 0..255"):
        processor.inputs(batch)
    batch[IMAGE] = batch[IMAGE] / 127.5 - 1
    with pytest.raises(ValueError, match=r"must lie in 0..1, but sample 0 spans -1..1"):
        processor.inputs(batch)


def test_float_images_within_range_pass(processor, make_batch):
    batch = make_batch()
    expected = processor.inputs(batch).images[0]
    batch[IMAGE] = batch[IMAGE].float() / 255
    torch.testing.assert_close(processor.inputs(batch).images[0], expected)


# -- what is wrong with a policy --------------------------------------------------------------------------------------


def test_missing_statistics_say_what_to_do(make_batch, make_statistics):
    bare = PI05Processor(TINY, None, build_builtin_tokenizer())
    with pytest.raises(ValueError, match=r"no statistics to normalise observation.state with; call set_statistics"):
        bare.inputs(make_batch())
    with pytest.raises(ValueError, match="no statistics to normalise action with"):
        bare.targets(make_batch())
    with pytest.raises(ValueError, match="no statistics to normalise action with"):
        bare.prepare()
    with pytest.raises(ValueError, match="no statistics of 'observation.state'"):
        PI05Processor(TINY, {"action": make_statistics()["action"]})
    statistics = make_statistics()
    del statistics["action"]["q99"]
    with pytest.raises(ValueError, match="statistics of 'action' lack 'q99'"):
        PI05Processor(TINY, statistics)


def test_statistics_of_another_robot_are_refused(make_statistics):
    with pytest.raises(ValueError, match=r"config\.action_dim=6, but the statistics of action have 7 dimensions"):
        PI05Processor(replace(TINY, action_dim=6), make_statistics())
    with pytest.raises(ValueError, match=r"config\.state_dim=9, but the statistics of observation.state have 8"):
        PI05Processor(replace(TINY, state_dim=9), make_statistics())


def test_a_tokenizer_larger_than_the_model_is_refused(make_statistics):
    processor = PI05Processor(replace(TINY, vocab_size=100), make_statistics(), build_builtin_tokenizer())
    with pytest.raises(ValueError, match=r"tokenizer has \d+ tokens, the model's vocab_size is 100"):
        processor.prepare()
    PI05Processor(TINY, make_statistics()).prepare()


def test_unknown_settings_are_refused():
    with pytest.raises(ValueError, match="missing_cameras must be 'error' or 'mask', got 'skip'"):
        PI05Processor(TINY, missing_cameras="skip")
    with pytest.raises(ValueError, match="on_long_prompt must be 'error' or 'truncate', got 'cut'"):
        PI05Processor(TINY, on_long_prompt="cut")


def test_a_long_prompt_is_said(processor, make_batch):
    batch = make_batch()
    batch["task"][1] = "pick up the cube and " * 8
    with pytest.raises(ValueError, match=r"prompt of sample 1 .* more than tokenizer_max_length=32"):
        processor.inputs(batch)
