"""The critic: start values, float32 whatever surrounds it, pooling that masked tokens cannot disturb."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from soma_lightning.models.value_head import ValueHead, pool_tokens


def linears(head: ValueHead) -> list[nn.Linear]:
    return [module for module in head.layers if isinstance(module, nn.Linear)]


@pytest.mark.parametrize(("activation", "gain"), [("relu", math.sqrt(2)), ("tanh", 5 / 3)])
def test_sizes_and_start_values(activation: str, gain: float) -> None:
    head = ValueHead(2048, activation=activation)  # type: ignore[arg-type]
    assert [(one.in_features, one.out_features) for one in linears(head)] == [
        (2048, 1024),
        (1024, 512),
        (512, 256),
        (256, 1),
    ]
    for one in linears(head)[:-1]:
        assert one.weight.std().item() == pytest.approx(gain / math.sqrt(one.out_features), rel=0.02)
    assert linears(head)[-1].weight.std().item() == pytest.approx(0.02, rel=0.2)
    assert all(one.bias.abs().max() == 0 for one in linears(head))
    kinds = {type(module) for module in head.layers} - {nn.Linear}
    assert kinds == {nn.ReLU if activation == "relu" else nn.Tanh}


def test_one_value_a_row_in_float32_inside_autocast() -> None:
    head = ValueHead(8, hidden=(16,))
    features = torch.randn(5, 8).bfloat16()
    plain = head(features)
    assert (plain.shape, plain.dtype) == ((5,), torch.float32)
    expected = linears(head)[1](linears(head)[0](features.float()).relu())[:, 0]
    assert torch.equal(plain, expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(head(features), plain)


def test_a_head_without_hidden_layers_is_linear() -> None:
    head = ValueHead(3, hidden=())
    torch.testing.assert_close(head(torch.eye(3)), linears(head)[0].weight[0])


def test_an_unknown_activation_is_refused() -> None:
    with pytest.raises(ValueError, match="activation='gelu' is unknown; known: relu, tanh"):
        ValueHead(3, activation="gelu")  # type: ignore[arg-type]


def test_pooling_is_the_mean_over_the_tokens_that_count() -> None:
    hidden = torch.arange(12.0).view(2, 3, 2)
    mask = torch.tensor([[True, True, False], [False, True, False]])
    assert pool_tokens(hidden, mask).tolist() == [[1.0, 2.0], [8.0, 9.0]]
    assert pool_tokens(hidden, None).tolist() == [[2.0, 3.0], [8.0, 9.0]]
    assert pool_tokens(hidden.bfloat16(), mask).dtype == torch.float32


def test_masked_tokens_may_hold_anything() -> None:
    hidden = torch.randn(2, 3, 4, requires_grad=True)
    mask = torch.tensor([[True, False, True], [True, True, False]])
    spoilt = torch.where(mask[..., None], hidden, math.nan)
    pooled = pool_tokens(spoilt, mask)
    torch.testing.assert_close(pooled, pool_tokens(hidden, mask))
    pooled.sum().backward()
    assert hidden.grad is not None
    assert hidden.grad[mask].tolist() == [[0.5] * 4] * 4
    assert hidden.grad[~mask].abs().max() == 0
