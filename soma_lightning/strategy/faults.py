"""How the failure of one rank ends the job on all of them, with that rank's traceback last.

A rank that raises leaves the others waiting in a collective. It writes its traceback into the store that the process
group was made with; a thread of every other rank looks there every second, lets its own program fail by itself for a
short while, then prints the traceback and ends the process.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import traceback
from types import TracebackType

from soma_lightning.compat import separate_store

#: Store keys.
_FAILED, _SEEN = "soma_lightning/failed", "soma_lightning/seen"

#: Seconds: between two looks; that a rank has to fail by itself; that a failed rank waits for the others to look.
_PERIOD, _GRACE, _FAREWELL = 1.0, 5.0, 10.0


class FailureWatch:
    """One per process, from the moment the process group exists."""

    _of_this_process: FailureWatch | None = None

    @classmethod
    def of_this_process(cls, rank: int, world_size: int) -> FailureWatch:
        """The one that is there, or a new one."""
        if cls._of_this_process is None:
            cls._of_this_process = cls(rank, world_size)
        return cls._of_this_process

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self._store = separate_store()
        self._watched = separate_store()
        self._reported = threading.Event()
        #: Rank and traceback of the first failure, once this rank has seen it.
        self._first = ""
        threading.Thread(target=self._watch, name="soma-failure-watch", daemon=True).start()
        self._next_hook = sys.excepthook
        sys.excepthook = self._excepthook

    def report(self, error: BaseException) -> None:
        """Tells the other ranks that this one failed with `error`; the first report counts.

        A rank that fails because another did gets that rank's traceback as a note.
        """
        if self._reported.is_set() or isinstance(error, SystemExit):
            return
        self._reported.set()
        text = f"{self.rank}\n{''.join(traceback.format_exception(error))}"
        try:
            first = self._first or self._store.compare_set(_FAILED, "", text).decode()
        except RuntimeError:  # the rank with the store is gone, and with it whoever could be told
            error.add_note("another rank is gone; its output says why")
            return
        if first == text:
            self._wait_for_others()
            return
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
        while not self._reported.wait(_PERIOD):
            try:
                if not self._watched.check([_FAILED]):
                    continue
                self._first = self._watched.get(_FAILED).decode()
                self._watched.add(_SEEN, 1)
            except RuntimeError:
                return  # the store is gone: the run is over
            if self._reported.wait(_GRACE):
                return
            culprit, _, text = self._first.partition("\n")
            print(f"rank {self.rank} ends because rank {culprit} failed:\n{text}", file=sys.stderr, flush=True)
            os._exit(1)

    def _excepthook(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self.report(error)
        self._next_hook(kind, error, trace)
