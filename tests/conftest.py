"""Every test starts from the same random state, whatever ran before it in its process."""

from __future__ import annotations

import numpy as np
import pytest
import torch


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002 (the global state is what tests must not inherit)
