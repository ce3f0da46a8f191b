"""The engine in one process, and leases: what every engine promises."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from soma_lightning.rl.engine import FragmentLease, FragmentLostError, SyncEngine, check_fit

sys.path.insert(0, str(Path(__file__).parent))  # as rollout processes import it
import collectors  # type: ignore[import-not-found]  # noqa: E402

Make = Callable[..., SyncEngine]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    def build(actions: dict[int, str] | None = None) -> SyncEngine:
        return SyncEngine(collectors.Script(tmp_path, actions or {}))

    return build


def test_fragments_come_one_by_one_with_the_published_weights(make: Make):
    with make() as engine:
        engine.submit_fragment_credit(3)
        for number in range(3):
            engine.publish(number, collectors.weights(number))
            with engine.next_fragment(10) as lease:
                assert (lease.index, lease.version, lease.worker) == (number, number, 0)
                assert lease.tensors["matrix"].eq(number).all()
        stats = engine.stats()
    assert (stats.collected, stats.consumed, stats.lost, stats.stale) == (3, 3, 0, 0)
    assert stats.consumed_by_lag == {0: 3}
    assert stats.snapshots_published == 3


def test_what_would_wait_for_ever_is_an_error(make: Make):
    with make() as engine:
        with pytest.raises(RuntimeError, match="no credit is left"):
            engine.next_fragment(1)
        engine.submit_fragment_credit(1)
        with pytest.raises(RuntimeError, match="no weights were published"):
            engine.next_fragment(1)
        engine.drain(0)
        engine.publish(0, collectors.weights(0))
        with pytest.raises(RuntimeError, match="no credit is left"):
            engine.next_fragment(1)
    with pytest.raises(RuntimeError, match="not running"):
        engine.next_fragment(1)


def test_a_lost_fragment_is_counted_and_collected_again(make: Make):
    with make({0: "lost"}) as engine:
        engine.publish(0, collectors.weights(0))
        engine.submit_fragment_credit(1)
        assert engine.next_fragment(10).index == 0
        assert engine.stats().lost == 1


def test_losses_end_at_the_time_limit(make: Make, monkeypatch: pytest.MonkeyPatch):
    def lose(*_: Any) -> None:
        raise FragmentLostError("always")

    monkeypatch.setattr(collectors.Collector, "collect", lose)
    with make() as engine:
        engine.publish(0, collectors.weights(0))
        engine.submit_fragment_credit(1)
        with pytest.raises(FragmentLostError, match="always"):
            engine.next_fragment(0.05)


def test_stopping_closes_the_collector_once_and_errors_pass_through(make: Make, tmp_path: Path):
    with pytest.raises(ZeroDivisionError), make() as engine:
        _ = 1 / 0
    engine.stop()
    assert len(list(tmp_path.glob("closed_*"))) == 1


def test_a_released_fragment_cannot_be_read():
    releases: list[int] = []
    tensors = {"a": torch.ones(2)}
    lease = FragmentLease(tensors, {}, version=0, index=7, worker=0, on_release=lambda: releases.append(1))
    with lease:
        assert lease.tensors is tensors
    lease.release()
    assert releases == [1]
    with pytest.raises(RuntimeError, match="fragment 7 was released"):
        _ = lease.tensors


def test_weights_of_another_kind_are_refused():
    with pytest.raises(ValueError, match=r"different \['a is float32 \[2\], the collector has bfloat16 \[2\]'\]"):
        check_fit({"a": torch.zeros(2)}, {"a": torch.zeros(2, dtype=torch.bfloat16)})
