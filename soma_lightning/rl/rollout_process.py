"""What happens inside a rollout process: it builds a collector and turns credits into fragments.

Two threads: one collects, the other listens to the learner's process and stages snapshots meanwhile. Messages are
tuples whose first entry names them:

to the process     ("credit", number)  ("slots", num_slots, layout) + blocks  ("snapshot", Snapshot)  ("release", slab)
                   ("stop",)
from the process   ("ready", layout of the collector's tensors)  ("staged", version)  ("slab", slab) + block
                   ("retire", slab)  ("full", releases seen)  ("fragment", number, version, Packed, facts, Seconds)
                   ("lost", number, reason)  ("failed", why)
"""

from __future__ import annotations

import ctypes
import os
import pickle
import queue
import signal
import threading
import time
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from soma_lightning.rl.blocks import Block
    from soma_lightning.rl.engine import Collector

# torch is imported by `RolloutProcess`: what the environment says must be set before.

_FOREIGN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK")
_FOREIGN_PREFIXES = ("MASTER_", "TORCHELASTIC_", "LT_", "PL_")
_PR_SET_PDEATHSIG = 1


class Seconds(NamedTuple):
    """Where a rollout process spent its time around one fragment: without credit, without memory, collecting."""

    credit_waited: float
    memory_waited: float
    collecting: float


def rollout_environment(inherited: Mapping[str, str], worker: int, own: Mapping[str, str]) -> dict[str, str]:
    """The variables of rollout process `worker`: `inherited` without the learner's place in its job, then `own`.

    A rollout process is no rank of the learner's job; torch and Lightning would take it for one.
    """
    kept = {
        name: value
        for name, value in inherited.items()
        if name not in _FOREIGN and not name.startswith(_FOREIGN_PREFIXES)
    }
    return {**kept, "SOMA_ROLE": "rollout", "SOMA_WORKER": str(worker), **own}


def main(
    connection: Connection, parent: int, worker: int, environment: Mapping[str, str], build: bytes, settings: Any
) -> None:
    """The process. build: pickled `make_collector`; settings: (arena bytes, device)."""
    _die_with(parent)
    os.environ.clear()
    os.environ.update(environment)
    try:
        process = RolloutProcess(connection, worker, build, *settings)
        process.run()
        process.close()
    except (BrokenPipeError, ConnectionResetError):  # the learner's process is gone
        return
    except Exception:  # reported to the learner with its traceback, which then ends this process and its group
        _report(connection, traceback.format_exc())


def _die_with(parent: int) -> None:
    """Ends this process when its parent ends, however that ends, and leaves Ctrl-C to the parent.

    A group of its own lets the parent end the processes of environments with it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.setpgid(0, 0)
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before it could be asked for
        os._exit(1)


def _report(connection: Connection, why: str) -> None:
    try:
        connection.send(("failed", why))
    except OSError:  # nobody is left to be told
        return


class RolloutProcess:
    """One collector, its slabs and its snapshots."""

    def __init__(self, connection: Connection, worker: int, build: bytes, arena_bytes: int, device: str) -> None:
        import torch

        from soma_lightning.models.registry import load_extensions
        from soma_lightning.rl.slabs import SlabPool

        if "OMP_NUM_THREADS" in os.environ:  # torch read it before it was set here, if the main module imports torch
            torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        load_extensions()
        self._connection = connection
        self._sending = threading.Lock()
        self._credits: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._reader: Any = None
        self._pool = SlabPool(
            arena_bytes,
            device,
            announce=self._announce,
            retire=lambda slab: self._send("retire", slab),
            when_full=lambda num_releases: self._send("full", num_releases),
        )
        self._collector: Collector = pickle.loads(build)(worker)  # bytes of our own parent process
        self._targets = self._collector.tensors()

    def run(self) -> None:
        """Collects until the learner says stop."""
        from soma_lightning.rl.blocks import lay_out

        self._send("ready", lay_out(self._targets))
        threading.Thread(target=self._listen, name="listener", daemon=True).start()
        begin = time.perf_counter()
        while (number := self._credits.get()) is not None:
            self._collect(number, time.perf_counter() - begin)
            begin = time.perf_counter()

    def close(self) -> None:
        """Closes the collector."""
        self._collector.close()

    def _collect(self, number: int, credit_waited: float) -> None:
        from soma_lightning.rl.engine import FragmentLostError

        version = self._reader.put_in_place()
        begin = time.perf_counter()
        try:
            found = self._collector.collect(number, version)
        except FragmentLostError as reason:
            self._send("lost", number, str(reason))
            return
        collecting = time.perf_counter() - begin
        packed = self._pool.pack(found.tensors, time.perf_counter)
        seconds = Seconds(credit_waited, packed.waited_s, collecting)
        self._send("fragment", number, version, packed, found.facts, seconds)

    def _listen(self) -> None:
        """The thread that hears the learner. What goes wrong here ends the process."""
        while True:
            try:
                message = self._connection.recv()
            except (EOFError, OSError):  # the learner's process is gone
                os._exit(1)
            try:
                self._hear(*message)
            except BaseException:  # reported to the learner with its traceback
                with self._sending:
                    _report(self._connection, traceback.format_exc())
                os._exit(1)

    def _hear(self, message: str, *told: Any) -> None:
        if message == "credit":
            self._credits.put(told[0])
        elif message == "release":
            self._pool.release(told[0])
        elif message == "slots":
            self._attach(*told)
        elif message == "snapshot":
            self._reader.stage(told[0])
            self._send("staged", told[0].version)
        elif message == "stop":
            self._credits.put(None)
        else:
            raise ValueError(f"unknown message {message!r}")

    def _attach(self, num_slots: int, layout: Any) -> None:
        from soma_lightning.rl.blocks import receive_block
        from soma_lightning.rl.snapshots import SnapshotReader

        slots = [receive_block(self._connection) for _ in range(num_slots)]
        self._reader = SnapshotReader(slots, layout, self._targets)

    def _announce(self, slab: int, block: Block) -> None:
        with self._sending:
            self._connection.send(("slab", slab))
            block.send(self._connection)

    def _send(self, *message: Any) -> None:
        with self._sending:
            self._connection.send(message)
