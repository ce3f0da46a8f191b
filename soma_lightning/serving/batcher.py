"""When do requests of several clients become one batch, and who gets which answer?

A client has one request at a time. One batch is worked on at a time, in a thread of its own; what comes meanwhile waits
for the next one.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

Request = TypeVar("Request")
Answer = TypeVar("Answer")


class UnavailableError(RuntimeError):
    """A request was not taken: too many wait, or the server is ending."""


@dataclass(eq=False)
class _Waiting(Generic[Request, Answer]):
    """begin_by: when its batch begins at the latest, seconds of the loop's clock."""

    request: Request
    begin_by: float
    answer: asyncio.Future[Answer]


class Batcher(Generic[Request, Answer]):
    """Collects requests and gives each its own answer.

    work: one answer a request, in order; called in a thread, never twice at once. form: requests of one batch have the
    same. A batch begins when `max_batch_size` requests wait, when every client has one waiting, or when the oldest has
    waited `max_wait_s`. A batch that fails is tried again request by request, so that an error reaches only its cause.
    """

    def __init__(
        self,
        work: Callable[[Sequence[Request]], Sequence[Answer]],
        form: Callable[[Request], Hashable],
        *,
        max_batch_size: int,
        max_wait_s: float,
        max_waiting: int,
    ) -> None:
        self.work, self.form = work, form
        self.max_batch_size, self.max_wait_s, self.max_waiting = max_batch_size, max_wait_s, max_waiting
        self._waiting: list[_Waiting[Request, Answer]] = []
        self._changed = asyncio.Event()
        self._clients = 0
        self._is_ending = False

    @contextmanager
    def client(self) -> Iterator[None]:
        """Counts a client as present within the block."""
        self._clients += 1
        try:
            yield
        finally:
            self._clients -= 1
            self._changed.set()

    async def submit(self, request: Request) -> Answer:
        """The answer. A cancelled request leaves the queue; the batch that works on it goes on.

        Raises UnavailableError when `max_waiting` requests wait or after `end`, and what `work` raised.
        """
        if self._is_ending:
            raise UnavailableError("the server is ending; try again when it is back")
        if len(self._waiting) >= self.max_waiting:
            raise UnavailableError(
                f"{len(self._waiting)} requests wait already, as many as max_waiting allows; try again later"
            )
        loop = asyncio.get_running_loop()
        waiting = _Waiting[Request, Answer](request, loop.time() + self.max_wait_s, loop.create_future())
        self._waiting.append(waiting)
        self._changed.set()
        try:
            return await waiting.answer
        finally:
            with suppress(ValueError):  # taken into a batch already
                self._waiting.remove(waiting)

    async def run(self) -> None:
        """Works on batches until `end` was called and the last one is done."""
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(1, thread_name_prefix="policy") as thread:
            while await self._is_ready():
                batch = self._take()
                answers = await loop.run_in_executor(thread, self._attempt, [one.request for one in batch])
                for waiting, answer in zip(batch, answers, strict=True):
                    _settle(waiting.answer, answer)

    def end(self) -> None:
        """Refuses the requests that wait and new ones."""
        self._is_ending = True
        for waiting in self._waiting:
            _settle(waiting.answer, UnavailableError("the server is ending; try again when it is back"))
        self._waiting.clear()
        self._changed.set()

    async def _is_ready(self) -> bool:
        """Waits until a batch may begin; False at the end."""
        loop = asyncio.get_running_loop()
        while not self._is_ending:
            left = None
            if self._waiting:
                left = self._waiting[0].begin_by - loop.time()
                if left <= 0 or len(self._waiting) >= min(self.max_batch_size, self._clients):
                    return True
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._changed.wait()
        return False

    def _take(self) -> list[_Waiting[Request, Answer]]:
        """The oldest request and those of its form. Who is passed over does not wait for others again."""
        form = self.form(self._waiting[0].request)
        batch = [one for one in self._waiting if self.form(one.request) == form][: self.max_batch_size]
        self._waiting = [one for one in self._waiting if one not in batch]
        for one in self._waiting:
            one.begin_by = -math.inf
        return batch

    def _attempt(self, requests: Sequence[Request]) -> list[Answer | Exception]:
        """Answers or errors, one a request."""
        try:
            return list(self.work(requests))
        except Exception as error:
            if len(requests) == 1:
                return [error]
        return [self._attempt([request])[0] for request in requests]


def _settle(future: asyncio.Future[Answer], answer: Answer | Exception) -> None:
    """Hands the answer over, unless nobody waits for it any more."""
    if future.done():
        return
    if isinstance(answer, Exception):
        future.set_exception(answer)
    else:
        future.set_result(answer)
