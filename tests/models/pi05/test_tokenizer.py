"""Prompts: cleaning, templates, state bins, the built-in vocabulary, padding and lengths."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

from soma_lightning.models.pi05.config import PI05Config
from soma_lightning.models.pi05.tokenizer import (
    PromptTokenizer,
    build_builtin_tokenizer,
    builtin_vocabulary,
    clean_instruction,
    discretize_state,
    load_builtin_tokenizer,
    load_tokenizer,
    prompt_text,
)

ENGLISH = (
    "Pick up the black bowl between the plate and the ramekin, then place it on the plate!",
    "turn on the stove & put the moka_pot on it (gently); don't spill 3.5 cups @ 100%",
    "\u201cCaf\u00e9\u201d \u2013 na\u00efve \u2019quotes\u2019, tab\tand [brackets] {x} ~ ^ | \\ / < > = + * # $ `",
    "256 objects, -12 degrees, 007, x-1 and -1",
)


@pytest.fixture(scope="module")
def builtin():
    return build_builtin_tokenizer()


def test_instructions_are_cleaned_and_keep_their_case():
    assert clean_instruction("  Pick_up the\ncube \n") == "Pick up the cube"


def test_templates_of_both_families():
    assert prompt_text(" pick_up ", [12, -1, 255]) == "Task: pick up, State: 12 -1 255;\nAction: "
    assert prompt_text(" pick_up\n", None) == "pick up"


def test_bins_follow_numpy_digitize_over_the_left_edges():
    x = np.concatenate(
        [
            np.random.default_rng(0).normal(size=4000).astype(np.float32),
            np.linspace(-1, 1, 257, dtype=np.float32),
            np.nextafter(np.linspace(-1, 1, 257, dtype=np.float32), np.float32(-9)),
        ]
    )
    expected = np.digitize(x, bins=np.linspace(-1, 1, 256 + 1)[:-1]) - 1
    np.testing.assert_array_equal(discretize_state(torch.from_numpy(x)).numpy(), expected)


def test_bin_values_at_the_ends():
    x = torch.tensor([[-5.0, -1.0001, -1.0, -0.9921875, 0.0, 0.992, 0.9922, 1.0, 7.0]])
    assert discretize_state(x).tolist() == [[-1, -1, 0, 1, 128, 254, 255, 255, 255]]


def test_builtin_vocabulary_fits_the_tiny_configuration():
    vocabulary = builtin_vocabulary()
    assert len(vocabulary) <= PI05Config.tiny().vocab_size
    assert sorted(vocabulary.values()) == list(range(len(vocabulary)))
    assert [vocabulary[t] for t in ("<pad>", "<unk>", "<bos>", "\n", "-1", "0", "255")] == [0, 1, 2, 3, 4, 5, 260]


def test_number_tokens_are_contiguous_and_in_order(builtin):
    ids = PromptTokenizer(builtin, "state", 32).number_token_ids
    assert ids == list(range(ids[0], ids[0] + 257))
    assert builtin.convert_ids_to_tokens(ids) == [str(i) for i in range(-1, 256)]


def test_any_english_instruction_has_no_unknown_token(builtin):
    for text in ENGLISH:
        ids = builtin(text, add_special_tokens=False)["input_ids"]
        assert builtin.unk_token_id not in ids, text


def test_builtin_round_trip(builtin):
    text = "Task : pick up the spoon , State : 12 -1 255 ; \n Action :"
    ids = builtin("Task: pick up the spoon, State: 12 -1 255;\nAction: ", add_special_tokens=False)["input_ids"]
    assert builtin.decode(ids) == text
    assert builtin("ab 256", add_special_tokens=False).tokens() == ["a", "##b", "25", "##6"]
    assert builtin("x -1 -12", add_special_tokens=False).tokens() == ["x", "-1", "-", "12"]


def test_demo_prompt_with_eight_state_dims_fits_in_32_tokens(builtin):
    tokens, mask = PromptTokenizer(builtin, "state", 32).encode(["pick up the cube"], torch.full((1, 8), 200))
    assert mask.sum() == 22
    assert (
        builtin.decode(tokens[0][mask[0]]) == "<bos> Task : pick up the cube , State :" + " 200" * 8 + " ; \n Action :"
    )


@pytest.mark.parametrize("num_states", [1, 8])
def test_table_lookup_equals_the_tokenizer_on_the_whole_string(builtin, num_states):
    texts = [*ENGLISH, "reach the green disc", "  push_the cube\n", "", "0 1 -1"]
    bins = torch.randint(-1, 256, (len(texts), num_states), generator=torch.Generator().manual_seed(0))
    tokens, mask = PromptTokenizer(builtin, "state", 120).encode(texts, bins)
    for row, keep, text, values in zip(tokens, mask, texts, bins.tolist(), strict=True):
        expected = [2, *builtin(prompt_text(text, values), add_special_tokens=False)["input_ids"]]
        assert row[keep].tolist() == expected
        assert row[~keep].eq(0).all()
        assert keep.tolist() == [True] * len(expected) + [False] * (120 - len(expected))


def test_family_without_a_state_ends_with_a_separate_line_break(builtin):
    tokens, mask = PromptTokenizer(builtin, "task", 12).encode(["pick_up the cube\n", "reach"], None)
    names = [builtin.convert_ids_to_tokens(row[keep].tolist()) for row, keep in zip(tokens, mask, strict=True)]
    assert names == [["<bos>", "pick", "up", "the", "cube", "\n"], ["<bos>", "reach", "\n"]]


def unigram_tokenizer():
    """A stand-in for PaliGemma's: BOS 2, pad 0, digits split, spaces kept inside pieces."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = [("<pad>", 0.0), ("<unk>", -20.0), ("<bos>", 0.0), ("\n", -2.0), ("\u2581", -3.0)]
    pieces += [(c, -5.0) for c in "abcdefghijklmnopqrstuvwxyzTSA:;,-0123456789"] + [("Task", -1.0), ("\u2581up", -1.0)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=1))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>", bos_token="<bos>")


def test_a_tokenizer_that_splits_numbers_encodes_whole_strings():
    tokenizer = unigram_tokenizer()
    prompts = PromptTokenizer(tokenizer, "state", 64)
    tokens, mask = prompts.encode(["pick up", "go"], torch.tensor([[12, 255], [-1, 0]]))
    for row, keep, text, values in zip(tokens, mask, ["pick up", "go"], [[12, 255], [-1, 0]], strict=True):
        assert row[keep].tolist() == [2, *tokenizer(prompt_text(text, values), add_special_tokens=False)["input_ids"]]
        assert row[~keep].eq(0).all()
    with pytest.raises(ValueError, match="no single token for each state bin"):
        _ = prompts.number_token_ids


@pytest.mark.parametrize("make", [build_builtin_tokenizer, unigram_tokenizer])
def test_a_long_prompt_is_an_error_that_names_length_limit_and_ways_out(make):
    prompts = PromptTokenizer(make(), "state", 10)
    message = r"prompt of sample 1 \('push the ball'\) has \d+ tokens, .*tokenizer_max_length=10; shorten .* on_long"
    with pytest.raises(ValueError, match=message):
        prompts.encode(["up", "push the ball"], torch.zeros(2, 1, dtype=torch.int64))


@pytest.mark.parametrize("make", [build_builtin_tokenizer, unigram_tokenizer])
def test_truncation_keeps_the_start_and_warns_once(make, caplog):
    bins = torch.tensor([[7, 8]])
    whole = PromptTokenizer(make(), "state", 64).encode(["push the ball"], bins)[0]
    prompts = PromptTokenizer(make(), "state", 9, on_long_prompt="truncate")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            tokens, mask = prompts.encode(["push the ball"], bins)
    assert torch.equal(tokens, whole[:, :9])
    assert mask.all()
    assert sum("its end is cut" in record.message for record in caplog.records) == 1


def test_bins_must_fit_the_family_and_the_batch(builtin):
    with pytest.raises(ValueError, match="'state' needs state bins"):
        PromptTokenizer(builtin, "state", 32).encode(["reach"], None)
    with pytest.raises(ValueError, match="'task' takes no state bins"):
        PromptTokenizer(builtin, "task", 32).encode(["reach"], torch.zeros(1, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match="2 instructions but 1 states"):
        PromptTokenizer(builtin, "state", 32).encode(["a", "b"], torch.zeros(1, 2, dtype=torch.int64))


def test_unknown_settings_are_refused(builtin):
    with pytest.raises(ValueError, match="on_long_prompt must be 'error' or 'truncate', got 'cut'"):
        PromptTokenizer(builtin, "state", 32, on_long_prompt="cut")
    from transformers import PreTrainedTokenizerFast

    bare = PreTrainedTokenizerFast(tokenizer_object=builtin.backend_tokenizer, pad_token="<pad>")
    with pytest.raises(ValueError, match="no bos_token_id"):
        PromptTokenizer(bare, "state", 32)


def test_builtin_is_saved_and_loaded(builtin, tmp_path):
    builtin.save_pretrained(tmp_path)
    loaded = load_builtin_tokenizer(tmp_path)
    assert loaded.get_vocab() == builtin.get_vocab()
    assert [loaded.pad_token_id, loaded.unk_token_id, loaded.bos_token_id] == [0, 1, 2]
    text = prompt_text("pick up the spoon", [-1, 255])
    assert loaded(text)["input_ids"] == builtin(text)["input_ids"]


def test_missing_or_damaged_builtin_tokenizer_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"tokenizer\.json is missing"):
        load_builtin_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer\.json cannot be read as a tokenizer"):
        load_builtin_tokenizer(tmp_path)


def test_gated_tokenizer_is_explained_in_one_message(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(OSError, match=r"licence .*HF_TOKEN.*Without network.*tokenizer='builtin'") as caught:
        load_tokenizer(str(tmp_path))
    assert str(tmp_path) in str(caught.value)


def test_a_local_folder_is_loaded(builtin, tmp_path):
    builtin.save_pretrained(tmp_path)
    assert load_tokenizer(str(tmp_path)).get_vocab() == builtin.get_vocab()
    assert load_tokenizer("builtin").get_vocab() == builtin.get_vocab()
