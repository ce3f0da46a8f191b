"""What the kernel tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from soma_kernels.testing import nan_filled_empty


@pytest.fixture
def unwritten_is_nan() -> Iterator[None]:
    """Memory that nobody wrote reads as NaN during the test."""
    with nan_filled_empty():
        yield
