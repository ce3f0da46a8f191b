"""One worker process: answers in order, late answers, a stop in the middle of an answer."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from multiprocessing.connection import wait
from pathlib import Path

import pytest

from soma_lightning.envs.worker import Worker, WorkerFailure, ordered_results

SERVED = """
import os, time

class Served:
    def slow_square(self, number, seconds):
        time.sleep(seconds)
        if number == 13:
            raise ValueError("thirteen is refused")
        return number * number

    def large(self):
        return bytes(64 << 20)

    def variable(self, name):
        return os.environ.get(name)
"""


@pytest.fixture
def workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Worker]]:
    (tmp_path / "served_by_worker.py").write_text(SERVED)
    monkeypatch.syspath_prepend(tmp_path)
    from served_by_worker import Served  # type: ignore[import-not-found]

    pool = [Worker(n, Served, environment={"SOMA_TEST": str(n)}, start_timeout_s=60) for n in range(2)]
    for worker in pool:
        worker.start()
    yield pool
    for worker in pool:
        worker.end()


def test_results_come_in_order_whoever_is_faster(workers: list[Worker]) -> None:
    calls = [(0, 0.3), (1, 0.0), (2, 0.0), (3, 0.2), (4, 0.0), (5, 0.0)]
    assert list(ordered_results(workers, "slow_square", calls, 10)) == [0, 1, 4, 9, 16, 25]


def test_an_iterator_that_is_left_early_disturbs_nothing(workers: list[Worker]) -> None:
    results = ordered_results(workers, "slow_square", ((n, 0.1) for n in range(100)), 10)
    assert [next(results), next(results)] == [0, 1]
    results.close()
    assert list(ordered_results(workers, "slow_square", [(7, 0.0), (8, 0.0), (9, 0.0)], 10)) == [49, 64, 81]


def test_a_failing_call_stops_the_iteration(workers: list[Worker]) -> None:
    with pytest.raises(WorkerFailure, match=r"raised in 'slow_square':\nTraceback[\s\S]*thirteen is refused") as caught:
        list(ordered_results(workers, "slow_square", [(1, 0.0), (13, 0.0)], 10))
    assert caught.value.alive


def test_a_late_call_is_a_failure(workers: list[Worker]) -> None:
    with pytest.raises(WorkerFailure, match=r"gave no answer to 'slow_square' within 0.5 s") as caught:
        list(ordered_results(workers, "slow_square", [(1, 30.0)], 0.5))
    assert not caught.value.alive


def test_a_worker_stopped_in_the_middle_of_an_answer_ends_the_wait(workers: list[Worker]) -> None:
    worker = workers[0]
    worker.send("large")
    assert wait([worker.connection], 30)  # its first bytes are in the pipe, which holds far less than the answer
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGSTOP)
    with pytest.raises(WorkerFailure, match="gave no answer to 'large' within 1 s and was ended"):
        worker.receive("large", time.monotonic() + 1, 1)


def test_variables_are_set_in_the_worker_only(workers: list[Worker]) -> None:
    for number, worker in enumerate(workers):
        worker.send("variable", "SOMA_TEST")
        assert worker.receive("variable", time.monotonic() + 30, 30) == str(number)
        worker.send("variable", "LP_NUM_THREADS")
        assert worker.receive("variable", time.monotonic() + 30, 30) == os.environ.get("LP_NUM_THREADS", "1")
    assert "SOMA_TEST" not in os.environ
