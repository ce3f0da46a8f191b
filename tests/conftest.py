"""Every test starts from the same random state, and kernels run everywhere: compiled on a GPU, else interpreted."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

# Triton reads it when it is imported, so it is set before any test module is.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
    np.random.seed(0)  # noqa: NPY002 (the global state is what tests must not inherit)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where Triton's kernels run: the CPU in the interpreter, and a GPU. A test that takes it runs on both."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if request.param == "cpu":
        pytest.importorskip("triton")
        if os.environ.get("TRITON_INTERPRET") != "1":
            pytest.skip("kernels run on the CPU only with TRITON_INTERPRET=1")
    return torch.device(request.param)
