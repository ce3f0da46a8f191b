"""How does one process keep what it writes to itself?"""

from __future__ import annotations

import fcntl
import os
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
