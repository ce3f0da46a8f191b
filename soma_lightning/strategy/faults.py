"""How the failure of one rank ends the job on all of them, with that rank's traceback last.

A rank that raises leaves the others waiting in a collective. It writes its traceback into the store that the process
group was made with; a thread of every other rank looks there every second, lets its own program fail by itself for a
short while, then prints the traceback and ends the process. A rank that is killed writes nothing; it is missed
(`presence.py`), and the others end in the same way.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
import traceback
from types import TracebackType

from soma_lightning.compat import separate_store
from soma_lightning.strategy.presence import Presence

#: Store keys.
_FAILED, _SEEN = "soma_lightning/failed", "soma_lightning/seen"

#: Seconds: between two looks; that a rank has to fail by itself; that a failed rank waits for the others to look.
_PERIOD, _GRACE, _FAREWELL = 1.0, 5.0, 10.0

_VANISHED = (
    "its process is gone without a traceback: killed by a signal (by hand, by the scheduler, by the kernel for want of "
    "memory), or its machine is gone; the end of its own output may say more"
)


class FailureWatch:
    """One per process, from the moment the process group exists."""

    _of_this_process: FailureWatch | None = None

    @classmethod
    def of_this_process(cls, rank: int, world_size: int, address: str) -> FailureWatch:
        """The one that is there, or a new one. address: of the machine of rank 0."""
        if cls._of_this_process is None:
            cls._of_this_process = cls(rank, world_size, address)
        return cls._of_this_process

    def __init__(self, rank: int, world_size: int, address: str) -> None:
        self.rank, self.world_size = rank, world_size
        self._store = separate_store()
        self._watched = separate_store()
        self._presence = Presence(rank, world_size, address, self._store)
        self._reported, self._heard, self._done = threading.Event(), threading.Event(), threading.Event()
        #: Rank and traceback of the first failure, once this rank has heard of it.
        self._first = ""
        self._thread = threading.Thread(target=self._watch, name="soma-failure-watch", daemon=True)
        self._thread.start()
        atexit.register(self._end)
        self._next_hook = sys.excepthook
        sys.excepthook = self._excepthook

    def report(self, error: BaseException) -> None:
        """Tells the other ranks that this one failed with `error`, or left by `sys.exit`; the first report counts.

        A rank that fails because another did gets that rank's traceback as a note.
        """
        if self._reported.is_set() or (isinstance(error, SystemExit) and type(error) is not SystemExit):
            return  # Lightning's own SystemExit comes to all ranks
        self._reported.set()
        text = f"{self.rank}\n{''.join(traceback.format_exception(error))}"
        # A killed rank breaks the collectives of the others: the error may come a moment before the news.
        self._heard.wait(_PERIOD)
        try:
            first = self._first or self._store.compare_set(_FAILED, "", text).decode()
        except RuntimeError:  # the rank with the store is gone, and with it whoever could be told
            self._heard.wait(_GRACE)
            first = self._first
        self._done.set()
        if not first:
            error.add_note("another rank is gone; its output says why")
        elif first == text:
            self._wait_for_others()
        else:
            culprit, _, their_text = first.partition("\n")
            error.add_note(f"rank {culprit} failed first:\n{their_text}")
            with contextlib.suppress(RuntimeError):
                self._store.add(_SEEN, 1)

    def _wait_for_others(self) -> None:
        """The store lives in one of the ranks: it must not go before everybody has read it."""
        end = time.monotonic() + _FAREWELL
        with contextlib.suppress(RuntimeError):
            while time.monotonic() < end and self._store.add(_SEEN, 0) < self.world_size - 1:
                time.sleep(0.1)

    def _watch(self) -> None:
        while not self._done.is_set():
            gone = self._presence.wait(_PERIOD)
            self._first = f"{gone}\n{_VANISHED}" if gone is not None else self._look()
            if not self._first:
                continue
            self._heard.set()
            culprit, _, text = self._first.partition("\n")
            if gone is not None:  # before anything else ends this process
                print(f"rank {self.rank}: rank {culprit} is gone: {text}", file=sys.stderr, flush=True)
            if self._reported.wait(_GRACE) or self._done.is_set():
                return
            print(f"rank {self.rank} ends because rank {culprit} failed:\n{text}", file=sys.stderr, flush=True)
            self._presence.leave()
            os._exit(1)

    def _end(self) -> None:
        """At the end of the program: an interpreter that is torn down under a thread in the store's code aborts."""
        self._done.set()
        self._presence.leave()
        self._thread.join(_PERIOD)

    def _look(self) -> str:
        """What a failed rank wrote into the store; "" also when the store is gone, which presence explains."""
        try:
            if not self._watched.check([_FAILED]):
                return ""
            first: str = self._watched.get(_FAILED).decode()
            if first.partition("\n")[0] == str(self.rank):
                return ""
            self._watched.add(_SEEN, 1)
        except RuntimeError:
            return ""
        return first

    def _excepthook(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self.report(error)
        self._next_hook(kind, error, trace)
