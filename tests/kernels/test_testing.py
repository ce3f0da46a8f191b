"""The comparison that judges kernels is judged here: what it must let pass and what it must not."""

from __future__ import annotations

import pytest
import torch

from soma_kernels.testing import TOLERANCE, assert_close, relative_rms

TRUTH = torch.randn(4000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def noisy(scale: float, dtype: torch.dtype) -> torch.Tensor:
    """TRUTH with a relative RMS error of `scale` before rounding to dtype."""
    noise = torch.randn(4000, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return (TRUTH + scale * TRUTH.square().mean().sqrt() * noise).to(dtype)


def test_relative_rms() -> None:
    assert relative_rms(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 1.0])) == pytest.approx(0.5**0.5)
    assert relative_rms(torch.tensor([0.0, 0.3]), torch.zeros(2)) == pytest.approx(0.3 / 2**0.5)
    assert relative_rms(torch.zeros(0), torch.zeros(0)) == 0.0


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_one_rounding_passes_and_a_worse_result_fails(dtype: torch.dtype) -> None:
    assert_close("x", TRUTH.to(dtype), TRUTH)
    with pytest.raises(AssertionError, match="x: relative RMS error"):
        assert_close("x", noisy(3 * TOLERANCE[dtype], dtype), TRUTH)


def test_torch_sets_the_bar() -> None:
    torch_result = noisy(1e-4, torch.float32)
    assert_close("x", noisy(1.9e-4, torch.float32), TRUTH, torch_result)
    with pytest.raises(AssertionError, match="exceeds"):
        assert_close("x", noisy(2.2e-4, torch.float32), TRUTH, torch_result)


def test_one_final_rounding_is_allowed_when_torch_is_exact() -> None:
    truth = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    got = torch.tensor([1.0, 2.0, 3.0])
    got[1] += 1.2e-7 * 0.5
    assert_close("x", got, truth, truth.float())


def test_one_wrong_element_does_not_hide_in_the_mean() -> None:
    got = TRUTH.to(torch.bfloat16)
    got[17] += 0.3
    assert relative_rms(got, TRUTH) < TOLERANCE[torch.bfloat16]
    with pytest.raises(AssertionError, match="x: one element is off"):
        assert_close("x", got, TRUTH)


def test_non_finite_values_must_agree() -> None:
    truth = torch.tensor([1.0, float("nan"), float("inf")], dtype=torch.float64)
    assert_close("x", truth.float(), truth)
    for wrong in (
        [1.0, 1.0, float("inf")],
        [float("nan"), float("nan"), float("inf")],
        [1.0, float("nan"), float("-inf")],
    ):
        with pytest.raises(AssertionError, match="1 of 3 values differ in being finite"):
            assert_close("x", torch.tensor(wrong), truth)


def test_misuse_is_named() -> None:
    with pytest.raises(ValueError, match="dq: the reference must be float64"):
        assert_close("dq", TRUTH.float(), TRUTH.float())
    with pytest.raises(ValueError, match=r"dq: torch's result must have dtype torch\.float32"):
        assert_close("dq", TRUTH.float(), TRUTH, TRUTH)
    with pytest.raises(AssertionError, match=r"dq: shape \(3,\), reference \(4000,\)"):
        assert_close("dq", torch.zeros(3), TRUTH)


def test_unwritten_memory_is_visible(unwritten_is_nan: None) -> None:
    like = torch.zeros(2, 3)
    for x in (torch.empty(4), torch.empty_like(like), torch.empty_strided((2, 2), (1, 2)), like.new_empty(3)):
        assert x.isnan().all()
    assert (torch.empty(3, dtype=torch.int32) == torch.iinfo(torch.int32).max).all()
    assert torch.empty(2, dtype=torch.bool).all()


def test_allocation_is_ordinary_outside_the_block() -> None:
    assert torch.empty.__name__ == "empty"
    assert torch.Tensor.new_empty.__name__ == "new_empty"
