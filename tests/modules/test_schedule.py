"""The learning-rate schedule of the public pi0.5 recipe."""

from __future__ import annotations

import math

import pytest

from soma_lightning.modules.schedule import fit_to_run, warmup_cosine


def test_public_values():
    factor = warmup_cosine(warmup_steps=1000, decay_steps=30000, final_ratio=0.1)
    assert factor(0) == pytest.approx(1 / 1001)
    assert factor(500) == pytest.approx(1 / 1001 + (1 - 1 / 1001) * 0.5)
    assert factor(15000) == pytest.approx(0.55)
    assert factor(30000) == pytest.approx(0.1)
    assert factor(10**6) == pytest.approx(0.1)


def test_warmup_rises_to_the_cosine():
    factor = warmup_cosine(warmup_steps=50, decay_steps=1000, final_ratio=0.02)
    values = [factor(step) for step in range(50)]
    assert values == sorted(values)
    assert factor(50) == pytest.approx(0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * 0.05)))


def test_no_warmup_starts_at_the_peak():
    assert warmup_cosine(0, 100, 0.0)(0) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("total", "expected"),
    [
        (3000, (100, 3000)),
        (30000, (1000, 30000)),
        (60000, (1000, 30000)),
        (math.inf, (1000, 30000)),
        (-1, (1000, 30000)),
    ],
)
def test_short_runs_shrink_both(total: float, expected: tuple[int, int]):
    assert fit_to_run(1000, 30000, total) == expected
