"""When is a kernel's result right? Comparison with float64 by tensor name, and memory that shows what was not written.

The measure is the relative root-mean-square error against a float64 reference. The bar is twice the error of plain
torch in the same dtype when the caller gives torch's result, and the table below otherwise. A single wrong element
can hide in a mean, so the largest error is bounded as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

#: Relative RMS error that a result may have without torch's own to compare with: a few roundings of each dtype.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}
#: How much worse than plain torch in the same dtype a result may be.
FACTOR_OVER_TORCH = 2.0
#: Largest error of one element over the RMS bar, relative to that element and the tensor's RMS. The errors of many
#: roundings are near normal, so 1e6 elements stay within 5; one misread element is off by hundreds.
ELEMENT_FACTOR = 16.0


def relative_rms(got: Tensor, reference: Tensor, terms: Tensor | None = None) -> float:
    """rms(got - reference) / rms(reference) in float64; the plain RMS error where the reference is all zero.

    terms: relative to its RMS instead, where that is larger.
    """
    got, reference = got.detach().double(), reference.detach().double().to(got.device)
    return _rms(got - reference) / (_size(reference, terms) or 1.0)


def _size(reference: Tensor, terms: Tensor | None) -> float:
    return max(_rms(reference), 0.0 if terms is None else _rms(terms))


def _rms(x: Tensor) -> float:
    return x.detach().double().square().mean().sqrt().item() if x.numel() else 0.0


def assert_close(
    name: str,
    got: Tensor,
    reference: Tensor,
    torch_result: Tensor | None = None,
    *,
    slack: float = 1.0,
    terms: Tensor | None = None,
) -> None:
    """Raises AssertionError naming the tensor when `got` is worse than its dtype allows.

    got: the result under test. reference: float64, same shape, computed independently. torch_result: plain torch's
    answer in the dtype of `got`; our error may then be FACTOR_OVER_TORCH times torch's, or one final rounding if torch
    happens to be closer than that. slack: factor of the limit without torch_result. terms: where the result is a
    difference of large numbers, one of them; errors are then relative to it where it is larger than the reference.
    Non-finite values must sit where the reference has the same ones.
    """
    if reference.dtype != torch.float64:
        raise ValueError(f"{name}: the reference must be float64, got {reference.dtype}")
    if got.shape != reference.shape:
        raise AssertionError(f"{name}: shape {tuple(got.shape)}, reference {tuple(reference.shape)}")
    if torch_result is not None and torch_result.dtype != got.dtype:
        raise ValueError(f"{name}: torch's result must have dtype {got.dtype}, got {torch_result.dtype}")
    ours, truth = got.detach().double(), reference.detach().to(got.device)
    finite = truth.isfinite()
    wrong = ~torch.isclose(ours, truth, rtol=0, atol=0, equal_nan=True) & ~(finite & ours.isfinite())
    if wrong.any():
        raise AssertionError(
            f"{name}: {int(wrong.sum())} of {wrong.numel()} values differ in being finite; {_at(wrong)}"
        )
    ours, truth = ours[finite], truth[finite]
    by_torch = None if torch_result is None else torch_result.detach().double().to(got.device)[finite]
    terms = None if terms is None else terms.to(got.device)[finite]
    limit = (slack if by_torch is None else 1.0) * _limit(got.dtype, truth, by_torch, terms)
    error = relative_rms(ours, truth, terms)
    if error > limit:
        raise AssertionError(f"{name}: relative RMS error {error:.3e} exceeds {limit:.3e} ({got.dtype})")
    if truth.numel():
        rms = torch.tensor(_size(truth, terms), dtype=torch.float64, device=truth.device)
        element = truth.abs() if terms is None else torch.maximum(truth.abs(), terms.double().abs())
        share = (ours - truth).abs() / (element + rms + (rms == 0))
        if share.max().item() > ELEMENT_FACTOR * limit:
            worst = int(share.argmax())
            raise AssertionError(
                f"{name}: one element is off: got {ours[worst].item():.6e}, reference {truth[worst].item():.6e}, error "
                f"{share[worst].item():.3e} of its scale exceeds {ELEMENT_FACTOR * limit:.3e}"
            )


def _limit(dtype: torch.dtype, truth: Tensor, torch_result: Tensor | None, terms: Tensor | None) -> float:
    if torch_result is None:
        return TOLERANCE[dtype]
    # A correctly rounded result has a relative RMS error of about a quarter of the dtype's epsilon.
    return max(FACTOR_OVER_TORCH * relative_rms(torch_result, truth, terms), torch.finfo(dtype).eps / 4)


def _at(wrong: Tensor) -> str:
    return f"first at {tuple(int(i) for i in wrong.nonzero()[0])}" if wrong.dim() else "the value itself"


@contextmanager
def nan_filled_empty() -> Iterator[None]:
    """Fills what torch.empty and its relatives allocate with NaN (integers: their largest value) inside the block.

    A kernel that leaves part of its output unwritten then fails every comparison instead of passing by luck.
    """
    with ExitStack() as stack:
        for owner, name in (
            (torch, "empty"),
            (torch, "empty_like"),
            (torch, "empty_strided"),
            (Tensor, "new_empty"),
            (Tensor, "new_empty_strided"),
        ):
            stack.enter_context(patch.object(owner, name, _filling(getattr(owner, name))))
        yield


def _filling(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def filled(*args: Any, **kwargs: Any) -> Tensor:
        x = allocate(*args, **kwargs)
        with torch.no_grad():
            if x.is_floating_point() or x.is_complex():
                return x.fill_(torch.nan)
            return x.fill_(True if x.dtype == torch.bool else torch.iinfo(x.dtype).max)

    return filled
