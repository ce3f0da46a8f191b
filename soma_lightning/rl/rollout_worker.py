"""The learner's end of one rollout process: starts it, talks to it, ends it, and keeps what is known about it."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from torch import Tensor

from soma_lightning.rl import rollout_process
from soma_lightning.rl.blocks import Block, BlockLayout, receive_block
from soma_lightning.rl.engine import Collector

_MESSAGE_TIMEOUT_S = 30.0  # of one message once its first byte is there


class WorkerGone(Exception):  # noqa: N818 (not an error by itself: the engine decides)
    """The process ended; the text says how."""


class RolloutWorker:
    """One rollout process from its start to its end; another object takes over when it is started again.

    number: 0 to num_workers - 1. version: the newest that it has staged, -1 for none. running: number of the fragment
    that it collects. deadline: `time.monotonic()` until which it must be ready or have collected, None while it need
    not; staging_until: the same for a snapshot that it copies. is_full: it waits for memory that the learner holds.
    slabs: memory by number.
    """

    def __init__(self, number: int, build: bytes, environment: Mapping[str, str], settings: tuple[int, str]) -> None:
        self.number, self._build, self._environment, self._settings = number, build, environment, settings
        self.wanted: BlockLayout | None = None  # of the collector's tensors, once it is ready
        self.version = -1
        self.has_slots = self.is_full = False
        self.running: int | None = None
        self.deadline: float | None = None
        self.staging_until: float | None = None
        self.idle_since = 0.0
        self.num_releases = 0
        self.slabs: dict[int, Tensor] = {}
        self._process: BaseProcess | None = None
        self._connection: Connection | None = None

    @property
    def is_alive(self) -> bool:
        """Until `end` is called."""
        return self._process is not None

    @property
    def is_idle(self) -> bool:
        """Ready, and without a fragment."""
        return self.is_alive and self.wanted is not None and self.running is None

    @property
    def occupation(self) -> str:
        """What it is at, to complete a sentence of how it ended."""
        if self.wanted is None:
            return 'before it was ready (a script that starts rollout processes needs `if __name__ == "__main__":`)'
        return "without a fragment" if self.running is None else f"during fragment {self.running}"

    @property
    def nearest_deadline(self) -> float | None:
        """`time.monotonic()` until which something is expected of it; None when nothing is."""
        return min((one for one in (self.deadline, self.staging_until) if one is not None), default=None)

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    @property
    def connection(self) -> Connection:
        assert self._connection is not None, "start() comes first"
        return self._connection

    @property
    def sentinel(self) -> int:
        """Becomes ready when the process ends."""
        assert self._process is not None, "start() comes first"
        return self._process.sentinel

    def start(self, timeout_s: float) -> None:
        """Starts the process and returns at once. The calling thread must live as long: the process dies with it."""
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        arguments = (theirs, os.getpid(), self.number, self._environment, self._build, self._settings)
        # Not a daemon: those may not have children, and environments may live in processes of their own.
        self._process = context.Process(
            target=rollout_process.main, args=arguments, name=f"rollout-{self.number}", daemon=False
        )
        self._process.start()
        theirs.close()  # with the child's copy alone left, its death closes the pipe
        self.deadline = time.monotonic() + timeout_s

    def send(self, *message: Any) -> None:
        """Sends a small message. One to a process that has just ended is lost; its end shows elsewhere."""
        with suppress(OSError):
            self.connection.send(message)

    def send_blocks(self, blocks: Sequence[Block]) -> None:
        """Hands shared memory to the process, which was told how many blocks come."""
        with suppress(OSError):
            for block in blocks:
                block.send(self.connection)

    def receive(self) -> tuple[Any, ...]:
        """The next message, which must be there. WorkerGone when the process ended instead.

        A process that is stopped in the middle of a message would block this for ever; killing it ends that.
        """
        watchdog = threading.Timer(_MESSAGE_TIMEOUT_S, self._kill)
        watchdog.daemon = True
        watchdog.start()
        try:
            message: tuple[Any, ...] = self.connection.recv()
            if message[0] == "slab":
                self.slabs[message[1]] = receive_block(self.connection)
            return message
        except (EOFError, OSError) as error:
            raise WorkerGone(self.how_it_ended()) from error
        finally:
            watchdog.cancel()

    def has_message(self) -> bool:
        """Whether `receive` would return at once; True, too, where it would raise WorkerGone."""
        return self.connection.poll()

    def end(self) -> None:
        """Kills the process and what lives in its group, waits for its end and closes everything but leased memory."""
        if self._process is None:
            return
        self._kill()
        self._process.join()
        self._process.close()
        self._process = None
        self.connection.close()
        self.slabs.clear()
        self.running = self.deadline = self.staging_until = None

    def how_it_ended(self) -> str:
        """For a process whose pipe is closed or that has ended; ends it where it is still there."""
        process = self._process
        assert process is not None
        if not wait([process.sentinel], 5.0):
            return "closed its pipe"
        self._kill()  # what is left of its group, as long as its number cannot belong to another process
        process.join()
        code = process.exitcode or 0
        return f"was killed by signal {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"

    def _kill(self) -> None:
        process = self._process
        if process is None or process.pid is None:
            return
        try:
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # its end was noticed already; the number may be another process's by now
            return
        with suppress(ProcessLookupError):  # it has not made its group yet
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()


def per_worker(environment: Mapping[str, str] | Sequence[Mapping[str, str]], count: int) -> list[dict[str, str]]:
    """Variables of each of `count` processes, from those of all or of each one. ValueError for another number."""
    if isinstance(environment, Mapping):
        return [dict(environment)] * count
    if environment and len(environment) != count:
        raise ValueError(f"environment has variables of {len(environment)} processes, num_workers={count}")
    return [dict(one) for one in environment] or [{}] * count


def pickled(make_collector: Callable[[int], Collector]) -> bytes:
    """What travels to the processes. TypeError when it cannot."""
    try:
        return pickle.dumps(make_collector)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"make_collector must be picklable to reach the rollout processes ({error}); use a class or function "
            "at the top level of a module, or functools.partial of one"
        ) from error
