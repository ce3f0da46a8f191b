"""How does one process keep what it writes to itself?"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


def lock_file(path: Path, busy: str) -> IO[str]:
    """`path`, made and opened, while no other process holds it; closing it sets it free.

    The system sets it free when the process ends, however it ends. busy: the message of the ValueError that is raised
    when another one holds it. The holder may delete the file: who waited at its door does not get the deleted one.
    """
    while True:
        file = open(path, "w")  # noqa: SIM115 (kept open as long as it is locked)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.close()
            raise ValueError(busy) from error
        if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
            return file
        file.close()


@contextmanager
def sole_writer(target: Path, busy: str) -> Iterator[None]:
    """Within the block no other process is in a block of its own for `target`, a folder that need not exist yet.

    The lock is a hidden file beside it. Raises ValueError with `busy` when there is another one, OSError when the file
    cannot be made.
    """
    target = target.resolve()
    path = target.with_name(f".{target.name}.lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = lock_file(path, busy)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        lock.close()
