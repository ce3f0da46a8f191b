"""How do clients reach a policy: the openpi websocket protocol, time-outs, errors, and a clean end?

A client gets the metadata first, then one binary answer for each binary message that it sends. A text frame is an error
of one request; the connection stays. `GET /healthz` answers OK.
"""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any

from websockets.asyncio.server import Request, Response, ServerConnection, serve
from websockets.exceptions import ConnectionClosed

from soma_lightning.serving.batcher import Batcher, UnavailableError
from soma_lightning.serving.policy import ActionRequest, ServedPolicy
from soma_lightning.serving.protocol import pack, unpack

log = logging.getLogger(__name__)

#: Seconds that the last answers, and then the closing of connections, may take when the server ends.
FAREWELL_S = 5.0


@dataclass(frozen=True)
class ServerSettings:
    """Where a server listens and what it lets wait.

    port: 0 takes a free one. max_batch_size: requests of one batch. max_wait_ms: how long the first request of a batch
    waits for others. max_waiting: requests that may wait for a batch; more are refused. timeout_s: from a message to
    its answer. max_message_mb: a larger message ends its connection (close code 1009).
    """

    host: str = "127.0.0.1"
    port: int = 8000
    max_batch_size: int = 8
    max_wait_ms: float = 10.0
    max_waiting: int = 64
    timeout_s: float = 30.0
    max_message_mb: float = 16.0

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port={self.port} must lie in 0..65535; 0 takes a free one")
        for name in ("max_batch_size", "max_waiting"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("timeout_s", "max_message_mb"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be positive")
        if not 1 <= self.max_message_mb * 2**20 < math.inf:
            raise ValueError(f"max_message_mb={self.max_message_mb} must be finite, and at least one byte")
        if not self.max_wait_ms >= 0:
            raise ValueError(f"max_wait_ms={self.max_wait_ms} must not be negative")


class PolicyServer:
    """Binds its port when it is made, so that a taken one is told before a large policy is loaded.

    Raises OSError for an address that cannot be had.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        self._socket = _bound_socket(settings.host, settings.port)
        self._answering: set[asyncio.Task[None]] = set()

    @property
    def port(self) -> int:
        """The port that clients connect to."""
        return int(self._socket.getsockname()[1])

    @property
    def address(self) -> str:
        """ws://host:port"""
        host = self.settings.host
        return f"ws://[{host}]:{self.port}" if ":" in host else f"ws://{host}:{self.port}"

    def close(self) -> None:
        """Gives the port back; a server that ran has done so."""
        self._socket.close()

    def run(self, served: ServedPolicy, ready: Callable[[], None]) -> None:
        """Serves until SIGINT or SIGTERM, from the main thread. ready: called when clients can connect."""

        async def until_signal() -> None:
            stop, loop = asyncio.Event(), asyncio.get_running_loop()
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, stop.set)
            await self._serve(served, stop, ready)

        asyncio.run(until_signal())

    @contextmanager
    def in_background(self, served: ServedPolicy) -> Iterator[str]:
        """Serves from a thread within the block, which gets the address. Raises what stopped the server."""
        started: Future[Any] = Future()  # how to stop it

        async def until_stopped() -> None:
            stop, loop = asyncio.Event(), asyncio.get_running_loop()
            await self._serve(served, stop, lambda: started.set_result(partial(loop.call_soon_threadsafe, stop.set)))

        with ThreadPoolExecutor(1, thread_name_prefix="server") as thread:
            running = thread.submit(lambda: asyncio.run(until_stopped()))
            wait((started, running), return_when=FIRST_COMPLETED)
            try:
                if started.done():
                    yield self.address
            finally:
                if not running.done():
                    started.result()()
                running.result()

    async def _serve(self, served: ServedPolicy, stop: asyncio.Event, ready: Callable[[], None]) -> None:
        settings = self.settings
        batcher = Batcher[ActionRequest, dict[str, Any]](
            served.answer,
            lambda request: request.observation.form,
            max_batch_size=settings.max_batch_size,
            max_wait_s=settings.max_wait_ms / 1e3,
            max_waiting=settings.max_waiting,
        )
        async with serve(
            lambda connection: _Client(self, served, batcher, connection).talk(),
            sock=self._socket,
            compression=None,
            max_size=int(settings.max_message_mb * 2**20),
            origins=[None],  # a browser names its page's origin: no web page may ask the robot's policy
            process_request=_health,
            close_timeout=FAREWELL_S,
            server_header=None,
        ):
            worker, stopped = asyncio.create_task(batcher.run()), asyncio.create_task(stop.wait())
            ready()
            await asyncio.wait({worker, stopped}, return_when=asyncio.FIRST_COMPLETED)
            stopped.cancel()
            batcher.end()
            await worker
            if self._answering:
                await asyncio.wait(self._answering, timeout=FAREWELL_S)

    def note(self, task: asyncio.Task[None]) -> None:
        """Keeps an answer in mind, so that it leaves before the server ends."""
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)


class _Client:
    """One connection. answers: how many requests were answered with actions, which decides the next one's noise."""

    def __init__(
        self,
        server: PolicyServer,
        served: ServedPolicy,
        batcher: Batcher[ActionRequest, dict[str, Any]],
        connection: ServerConnection,
    ) -> None:
        self.server, self.served, self.batcher, self.connection = server, served, batcher, connection
        self.answers = 0

    async def talk(self) -> None:
        """Answers one message after the other until the client goes."""
        closed = asyncio.create_task(self.connection.wait_closed())
        with self.batcher.client(), suppress(ConnectionClosed):
            await self.connection.send(pack(self.served.metadata))
            async for message in self.connection:
                answer = asyncio.create_task(self._answer(message))
                self.server.note(answer)
                await asyncio.wait({answer, closed}, return_when=asyncio.FIRST_COMPLETED)
                answer.cancel()  # of a client that went; its request leaves the queue

    async def _answer(self, message: str | bytes) -> None:
        try:
            answer: str | bytes = pack(await self._actions(message))
            self.answers += 1
        except (ValueError, UnavailableError, TimeoutError) as error:
            answer = f"error: {error}"
        except Exception as error:
            log.exception("a request failed")
            answer = f"error: the policy failed ({type(error).__name__}: {error}); the server's log says where"
        with suppress(ConnectionClosed):
            await self.connection.send(answer)

    async def _actions(self, message: str | bytes) -> dict[str, Any]:
        if isinstance(message, str):
            raise ValueError("an observation is a binary message (msgpack), but this was text")
        request = ActionRequest(self.served.reader.read(unpack(message)), self.answers)
        seconds = self.server.settings.timeout_s
        try:
            async with asyncio.timeout(seconds):
                return await self.batcher.submit(request)
        except TimeoutError:
            raise TimeoutError(
                f"no answer within timeout_s={seconds:g}; fewer clients, or a larger --timeout_s"
            ) from None


def _health(connection: ServerConnection, request: Request) -> Response | None:
    return connection.respond(HTTPStatus.OK, "OK\n") if request.path == "/healthz" else None


def _bound_socket(host: str, port: int) -> socket.socket:
    """Bound, not yet listening: clients are refused, not kept waiting, until the policy is there."""
    try:
        family, kind, number, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, number)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
        except OSError:
            bound.close()
            raise
    except OSError as error:
        raise OSError(
            f"cannot listen on {host}:{port} ({error}); choose another --host or --port, 0 for a free one"
        ) from None
    return bound
