"""Who is answered in which batch, with what; one batch at a time."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from typing import Any

import pytest

from soma_lightning.serving.batcher import Batcher, UnavailableError


class Doubler:
    """Doubles numbers and notes its batches; a batch begins when `may_begin` is set; strings are errors."""

    def __init__(self) -> None:
        self.batches: list[list[Any]] = []
        self.may_begin, self.busy = threading.Event(), threading.Lock()
        self.may_begin.set()

    def __call__(self, requests: Any) -> list[Any]:
        assert self.busy.acquire(blocking=False), "two batches at once"
        try:
            self.batches.append(list(requests))
            assert self.may_begin.wait(10)
            if any(isinstance(request, str) for request in requests):
                raise ValueError(f"no numbers in {requests}")
            return [2 * request for request in requests]
        finally:
            self.busy.release()


def with_batcher(
    scene: Callable[[Batcher[Any, Any], Doubler], Awaitable[None]], clients: int = 8, **settings: Any
) -> Doubler:
    """Plays the scene while the batcher runs, with so many clients present."""
    work = Doubler()

    async def play() -> None:
        options = {"max_batch_size": 4, "max_wait_s": 5.0, "max_waiting": 16, **settings}
        batcher = Batcher[Any, Any](work, lambda request: int(request) >= 100, **options)
        with ExitStack() as present:
            for _ in range(clients):
                present.enter_context(batcher.client())
            running = asyncio.create_task(batcher.run())
            await scene(batcher, work)
            batcher.end()
            await asyncio.wait_for(running, 10)

    asyncio.run(asyncio.wait_for(play(), 20))
    return work


async def begun(work: Doubler, count: int = 1) -> None:
    """Waits until so many batches began."""
    while len(work.batches) < count:
        await asyncio.sleep(0.001)


def test_full_batches_begin_at_once_and_everyone_gets_the_own_answer() -> None:
    async def scene(batcher: Batcher[Any, Any], work: Doubler) -> None:
        begin = time.monotonic()
        assert await asyncio.gather(*(batcher.submit(n) for n in range(8))) == [2 * n for n in range(8)]
        assert time.monotonic() - begin < 4

    assert with_batcher(scene).batches == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_batch_begins_when_every_client_waits_or_the_oldest_has_waited() -> None:
    async def alone(batcher: Batcher[Any, Any], work: Doubler) -> None:
        begin = time.monotonic()
        assert await batcher.submit(1) == 2
        assert time.monotonic() - begin < 4

    async def among_three(batcher: Batcher[Any, Any], work: Doubler) -> None:
        begin = time.monotonic()
        assert await asyncio.gather(batcher.submit(1), batcher.submit(2)) == [2, 4]
        assert 0.2 <= time.monotonic() - begin < 4

    assert with_batcher(alone, clients=1).batches == [[1]]
    assert with_batcher(among_three, clients=3, max_wait_s=0.2).batches == [[1, 2]]


def test_a_client_that_goes_is_not_waited_for() -> None:
    async def scene(batcher: Batcher[Any, Any], work: Doubler) -> None:
        with batcher.client():
            answer = asyncio.create_task(batcher.submit(1))
            await asyncio.sleep(0.05)
            assert not work.batches
        assert await asyncio.wait_for(answer, 4) == 2

    assert with_batcher(scene, clients=1).batches == [[1]]


def test_requests_of_another_form_make_the_next_batch() -> None:
    async def scene(batcher: Batcher[Any, Any], work: Doubler) -> None:
        assert await asyncio.gather(*map(batcher.submit, (1, 100, 2, 200))) == [2, 200, 4, 400]

    assert with_batcher(scene, clients=4).batches == [[1, 2], [100, 200]]


def test_an_error_reaches_its_cause_alone() -> None:
    async def scene(batcher: Batcher[Any, Any], work: Doubler) -> None:
        answers = await asyncio.gather(*map(batcher.submit, (1, "2", 3)), return_exceptions=True)
        assert answers[::2] == [2, 6]
        assert isinstance(answers[1], ValueError)
        assert str(answers[1]) == "no numbers in ['2']"

    assert with_batcher(scene, clients=3).batches == [[1, "2", 3], [1], ["2"], [3]]


def test_a_full_queue_answers_at_once() -> None:
    async def scene(batcher: Batcher[Any, Any], work: Doubler) -> None:
        work.may_begin.clear()
        first = asyncio.create_task(batcher.submit(0))
        await begun(work)
        waiting = [asyncio.create_task(batcher.submit(n)) for n in (1, 2)]
        await asyncio.sleep(0)
        with pytest.raises(UnavailableError, match="2 requests wait already, as many as max_waiting allows"):
            await batcher.submit(3)
        work.may_begin.set()
        assert await asyncio.gather(first, *waiting) == [0, 2, 4]

    assert with_batcher(scene, max_wait_s=0.0, max_waiting=2).batches == [[0], [1, 2]]


def test_who_gives_up_leaves_the_queue_and_stops_no_batch() -> None:
    async def scene(batcher: Batcher[Any, Any], work: Doubler) -> None:
        work.may_begin.clear()
        in_work = [asyncio.create_task(batcher.submit(n)) for n in (0, 1)]
        await begun(work)
        waiting = [asyncio.create_task(batcher.submit(n)) for n in (2, 3)]
        await asyncio.sleep(0)
        in_work[0].cancel()
        waiting[0].cancel()
        await asyncio.sleep(0)
        work.may_begin.set()
        answers = await asyncio.gather(*in_work, *waiting, return_exceptions=True)
        assert answers[1::2] == [2, 6]
        assert all(isinstance(answer, asyncio.CancelledError) for answer in answers[::2])

    assert with_batcher(scene, clients=2, max_batch_size=2, max_wait_s=0.1).batches == [[0, 1], [3]]


def test_the_end_finishes_the_batch_and_refuses_who_waits() -> None:
    async def scene(batcher: Batcher[Any, Any], work: Doubler) -> None:
        work.may_begin.clear()
        first = asyncio.create_task(batcher.submit(0))
        await begun(work)
        waiting = asyncio.create_task(batcher.submit(1))
        await asyncio.sleep(0)
        batcher.end()
        work.may_begin.set()
        assert await first == 0
        for refused in (waiting, batcher.submit(2)):
            with pytest.raises(UnavailableError, match="the server is ending"):
                await refused

    assert with_batcher(scene, max_wait_s=0.0).batches == [[0]]
