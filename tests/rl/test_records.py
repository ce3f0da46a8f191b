"""Fragments survive the journey: packed to named tensors and plain facts, and back, bit for bit."""

from __future__ import annotations

import json

import pytest
import torch

from soma_lightning.models.features import FrozenFeatures
from soma_lightning.models.flow_policy import FEATURES
from soma_lightning.rl.records import EpisodeEnd, Fragment, Rows, Timeline, split_inputs


def fragment(decisions: int = 3, envs: int = 2, *, lengths: tuple[int, ...] | None = (4, 2, 5, 1, 3, 3)) -> Fragment:
    torch.manual_seed(decisions)
    rows = decisions * envs
    inputs = {"chains": torch.randn(rows, 5, 4, 3), "denoise_inds": torch.randint(0, 4, (rows, 4))}
    samples = None
    if lengths is not None:
        parts = {
            "keys_values": torch.randn(6, rows, max(lengths), 8).bfloat16(),
            "scales": torch.rand(6, rows, max(lengths), 1),
        }
        features = FrozenFeatures(parts, lengths[:rows])
        samples = [features.sample(row) for row in range(rows)]
    timeline = Timeline(
        rewards=torch.rand(decisions, envs),
        values=torch.rand(decisions + 1, envs),
        terminated=torch.rand(decisions, envs) < 0.5,
        truncated=torch.zeros(decisions, envs, dtype=torch.bool),
        bootstrap_values=torch.zeros(decisions, envs),
        valid_steps=torch.randint(1, 5, (decisions, envs), dtype=torch.int32),
    )
    ends = [EpisodeEnd("reach", 7, True, 12)]
    return Fragment(inputs, samples, torch.randn(rows, 4, 2), timeline, ends, version=3)


def test_unpacking_gives_back_what_was_packed():
    sent = fragment()
    tensors, facts = sent.pack()
    got = Fragment.unpack(tensors, json.loads(json.dumps(facts)), version=3)
    assert set(got.inputs) == set(sent.inputs)
    assert got.version == 3
    assert got.episodes == sent.episodes
    for name, value in sent.inputs.items():
        assert torch.equal(got.inputs[name], value)
    assert torch.equal(got.log_probs, sent.log_probs)
    for name, value in vars(sent.timeline).items():
        assert torch.equal(getattr(got.timeline, name), value), name
    for mine, theirs in zip(got.samples, sent.samples, strict=True):
        assert set(mine) == {"keys_values", "scales"}
        for part in mine:
            assert mine[part].dtype == theirs[part].dtype
            assert torch.equal(mine[part], theirs[part])


def test_features_travel_without_padding_and_without_a_copy_at_the_end():
    tensors, facts = fragment().pack()
    assert tensors["features.keys_values"].shape == (18, 6, 8)  # 4 + 2 + 5 + 1 + 3 + 3 tokens, not 6 * 5
    got = Fragment.unpack(tensors, facts, 0)
    storage = tensors["features.keys_values"].untyped_storage().data_ptr()
    assert all(sample["keys_values"].untyped_storage().data_ptr() == storage for sample in got.samples)


def test_rows_of_several_fragments_keep_their_order():
    first, second = fragment(3), fragment(2, lengths=(2, 2, 1, 6))
    second.version = 4
    rows = Rows.of([first, second])
    assert len(rows) == 10
    assert rows.version.tolist() == [3] * 6 + [4] * 4
    assert torch.equal(
        rows.values, torch.cat([first.timeline.values[:-1].flatten(), second.timeline.values[:-1].flatten()])
    )
    chosen = rows.forward_inputs(torch.tensor([7, 0]), torch.device("cpu"))
    assert torch.equal(chosen["chains"], torch.stack([second.inputs["chains"][1], first.inputs["chains"][0]]))
    features = chosen[FEATURES]
    assert features.lengths == (2, 4)
    assert torch.equal(features.sample(1)["keys_values"], first.samples[0]["keys_values"])


def test_fragments_of_different_policies_are_refused():
    with pytest.raises(ValueError, match="recorded different entries"):
        Rows.of([fragment(), fragment(lengths=None)])


def test_an_entry_that_cannot_travel_is_named():
    with pytest.raises(TypeError, match=r"forward_inputs\['prompt'\] is list"):
        split_inputs({"chains": torch.zeros(2, 3), "prompt": ["a", "b"]})
    with pytest.raises(ValueError, match="different numbers of rows"):
        split_inputs({"chains": torch.zeros(2, 3), "states": torch.zeros(3, 3)})
