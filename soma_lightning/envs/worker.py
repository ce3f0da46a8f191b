"""How one object lives in a process of its own and answers calls, with time-outs.

A worker is started with the spawn method (a fork of a process that holds an OpenGL context deadlocks), builds its
object itself and then serves one call at a time. Whatever goes wrong there comes back as a `WorkerFailure`; a worker
that died or does not answer is ended, its own process only, and started again.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from soma_lightning.envs.base import Episode
from soma_lightning.envs.rendering import WORKER_ENVIRONMENT, RenderingUnavailableError

#: What a constructor raises for a setting or a machine that does not do; the commands, too, show its message alone.
_OF_THE_USER = (RenderingUnavailableError, ValueError, ImportError, OSError)
_READY = 0  # request number of the answer that a worker gives once its object is built


class WorkerFailure(RuntimeError):  # noqa: N818 (a failure of the worker, raised as WorkerError by the public classes)
    """One call to one worker gave no result. `alive`: the worker still serves, only this call raised there."""

    def __init__(self, message: str, *, alive: bool) -> None:
        super().__init__(message)
        self.alive = alive


class WorkerError(RuntimeError):
    """One or several workers gave no result; the message names them, their slots and episodes, and the reason.

    slots: those whose episodes are lost (reset them to go on). episodes: what ran there, by slot. results: what the
    other slots returned from the same call, by slot.
    """

    def __init__(
        self, message: str, *, slots: list[int], episodes: dict[int, Episode | None], results: dict[int, Any]
    ) -> None:
        super().__init__(message)
        self.slots, self.episodes, self.results = slots, episodes, results


class Worker:
    """The parent's end of one worker process.

    build: picklable, called once in the process; the object's methods are then called by name. environment: variables
    set there before anything is built. Times are in seconds.
    Raises TypeError at once when `build` cannot be pickled.
    """

    def __init__(
        self, number: int, build: Callable[[], object], *, environment: Mapping[str, str], start_timeout_s: float
    ) -> None:
        self.number = number
        self._start_timeout_s = start_timeout_s
        defaults = {name: os.environ.get(name, value) for name, value in WORKER_ENVIRONMENT.items()}
        self._environment = {**defaults, **environment}
        try:
            self._build = pickle.dumps(build)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise TypeError(
                f"what a worker process builds must be picklable ({error}); use EnvSpec or a function of a module"
            ) from error
        self._process: BaseProcess | None = None
        self._connection: Connection | None = None
        self._last_request = _READY
        self._is_ready = False

    @property
    def pid(self) -> int | None:
        """The process id; None while no process is there."""
        return self._process.pid if self._process is not None else None

    @property
    def connection(self) -> Connection:
        if self._connection is None:
            raise RuntimeError(f"worker {self.number} does not run; its group is closed")
        return self._connection

    def start(self) -> None:
        """Starts the process and returns at once; the first `receive` or `await_ready` waits until it is built."""
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, self._build, self._environment), name=f"env-worker-{self.number}", daemon=True
        )
        self._process.start()
        theirs.close()  # with the child's copy alone left, its death closes the pipe and ends every wait
        self._last_request, self._is_ready = _READY, False

    def await_ready(self) -> None:
        """Waits until the worker's object is built. WorkerFailure when that fails or lasts too long."""
        if not self._is_ready:
            self._receive(_READY, "start", time.monotonic() + self._start_timeout_s, self._start_timeout_s)
            self._is_ready = True

    def send(self, method: str, *arguments: Any) -> None:
        """Asks for `method(*arguments)`; `receive` gives the answer. WorkerFailure when the worker is gone."""
        self.await_ready()
        self._last_request += 1
        try:
            self.connection.send((self._last_request, method, arguments))
        except OSError as error:
            raise self._died(method) from error

    def receive(self, method: str, deadline: float, timeout_s: float) -> Any:
        """The answer to the last `send`. `deadline` is a `time.monotonic()` value; `timeout_s` is for the message."""
        return self._receive(self._last_request, method, deadline, timeout_s)

    def end(self) -> None:
        """Kills the process, if there is one, and closes the pipe."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def restart(self) -> None:
        """Ends the process and starts a new one in its place."""
        self.end()
        self.start()

    def _receive(self, request: int, method: str, deadline: float, timeout_s: float) -> Any:
        number, ok, value = self._read(method, deadline, timeout_s)
        while number != request:  # the answer to an earlier request, whose caller was interrupted
            number, ok, value = self._read(method, deadline, timeout_s)
        if not ok:
            during = "building its environment" if number == _READY else f"'{method}'"
            raise WorkerFailure(f"worker {self.number} raised in {during}:\n{value}", alive=number != _READY)
        return value

    def _read(self, method: str, deadline: float, timeout_s: float) -> tuple[int, bool, Any]:
        process, connection = self._process, self.connection
        assert process is not None, "start() comes first"
        late = WorkerFailure(
            f"worker {self.number} gave no answer to '{method}' within {timeout_s:g} s and was ended", alive=False
        )
        if not wait([connection], max(0.0, deadline - time.monotonic())):
            raise late
        # A process that is stopped in the middle of an answer would block this read for ever; killing it ends the read.
        watchdog = threading.Timer(max(0.1, deadline - time.monotonic()), process.kill)
        watchdog.daemon = True
        watchdog.start()
        try:
            number, ok, value = connection.recv()
        except (EOFError, OSError) as error:
            raise (late if time.monotonic() >= deadline else self._died(method)) from error
        finally:
            watchdog.cancel()
        return number, ok, value

    def _died(self, method: str) -> WorkerFailure:
        assert self._process is not None
        self._process.join(timeout=5.0)
        code = self._process.exitcode
        how = f"was killed by signal {signal.Signals(-code).name}" if code is not None and code < 0 else "ended"
        status = f" with exit status {code}" if code is not None and code >= 0 else ""
        return WorkerFailure(f"worker {self.number} {how}{status} during '{method}'", alive=False)


def ordered_results(
    workers: list[Worker], method: str, calls: Iterable[tuple[Any, ...]], timeout_s: float
) -> Iterator[Any]:
    """Calls `method(*call)` for every call, each on any free worker, and yields the results in the calls' order.

    Workers run at most two calls each ahead of the result that is yielded next. Raises WorkerFailure as soon as a call
    fails; closing the iterator early leaves calls in flight, whose answers are dropped at the next use.
    """
    pending = iter(enumerate(calls))
    idle = list(workers)
    busy: dict[Connection, tuple[Worker, int, float]] = {}
    finished: dict[int, Any] = {}
    yielded, started, exhausted = 0, 0, False
    while True:
        while idle and not exhausted and started - yielded < 2 * len(workers):
            index, arguments = next(pending, (-1, ()))
            if index < 0:
                exhausted = True
                break
            worker = idle.pop()
            worker.send(method, *arguments)
            busy[worker.connection] = (worker, index, time.monotonic() + timeout_s)
            started += 1
        if yielded in finished:
            yield finished.pop(yielded)
            yielded += 1
            continue
        if not busy:
            return
        nearest = min(deadline for _, _, deadline in busy.values())
        ready = wait(list(busy), max(0.0, nearest - time.monotonic()))
        overdue = [connection for connection, (_, _, deadline) in busy.items() if deadline == nearest]
        for connection in ready or overdue:
            assert isinstance(connection, Connection)
            worker, index, deadline = busy.pop(connection)
            finished[index] = worker.receive(method, deadline, timeout_s)
            idle.append(worker)


def _serve(connection: Connection, build: bytes, environment: Mapping[str, str]) -> None:
    """The worker process: builds the object, then answers (number, method, arguments) with (number, ok, value)."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends its workers
    os.environ.update(environment)
    try:
        served = pickle.loads(build)()  # bytes of our own parent process
    except _OF_THE_USER as error:  # says by itself what to change or install; a traceback would only hide it
        connection.send((_READY, False, str(error)))
        return
    except Exception:  # reported to the parent with its traceback
        connection.send((_READY, False, traceback.format_exc()))
        return
    connection.send((_READY, True, None))
    while True:
        try:
            number, method, arguments = connection.recv()
        except (EOFError, ConnectionResetError):  # the parent is gone
            return
        try:
            answer = (number, True, getattr(served, method)(*arguments))
        except Exception:  # reported to the parent with its traceback
            answer = (number, False, traceback.format_exc())
        try:
            connection.send(answer)
        except (BrokenPipeError, ConnectionResetError):  # the parent is gone
            return
