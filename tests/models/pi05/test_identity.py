"""Does a policy's identity of its frozen features change with everything that changes them, and with nothing else?"""

from __future__ import annotations

import pytest
import torch
from tokenizers import normalizers

from soma_lightning.models import PI05Policy
from soma_lightning.models.pi05.config import StreamConfig, VisionConfig
from soma_lightning.models.pi05.tokenizer import build_builtin_tokenizer

#: (as it is, the same widths in other heads)
VISION = [{"vision": VisionConfig(96, 2, heads, 288, 16)} for heads in (4, 2)]
SIZES = [{"num_heads": 4, "num_kv_heads": 2, "head_dim": 32}, {"num_heads": 2, "num_kv_heads": 1, "head_dim": 64}]
LANGUAGE = [
    {"language": StreamConfig(96, 192, 2, **sizes), "expert": StreamConfig(64, 128, 2, **sizes)} for sizes in SIZES
]


def differing(one: PI05Policy, other: PI05Policy) -> set[str]:
    first, second = one.feature_identity(), other.feature_identity()
    return {name for name in {*first, *second} if first.get(name) != second.get(name)}


@pytest.mark.parametrize(("part", "changes"), [("vision", VISION), ("language", LANGUAGE)])
def test_heads_that_change_no_shape_are_seen(part, changes, make_policy, make_batch):
    one, other = (make_policy(**change) for change in changes)
    other.model.load_state_dict(one.model.state_dict())
    assert other.backbone_hash() == one.backbone_hash()
    first, second = (policy.encode_features(make_batch()).parts["keys_values"] for policy in (one, other))
    assert not torch.equal(first, second), "this is what the identity is for"
    assert f"{part}.num_heads" in differing(one, other)


def test_a_tokenizer_of_other_rules_is_seen_and_calls_change_nothing(make_policy, make_batch, make_statistics):
    policy = make_policy()
    before = policy.feature_identity()
    policy.encode_features(make_batch())
    policy.processor.prompts.tokenizer(["a", "b c"], padding=True, truncation=True, max_length=3)
    assert policy.feature_identity() == before

    tokenizer = build_builtin_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    other = PI05Policy(policy.config, make_statistics(), tokenizer)
    other.load_state_dict(policy.state_dict())
    assert tokenizer.get_vocab() == policy.processor.prompts.tokenizer.get_vocab()
    assert differing(policy, other) == {"tokenizer"}
