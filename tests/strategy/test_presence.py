"""A rank that is killed is missed at once, one that ends is not.

As a script it is one rank, without torch, which starts fast: python test_presence.py FOLDER RANK WORLD_SIZE BEHAVIOR.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from soma_lightning.strategy.presence import Presence

ROOT = Path(__file__).resolve().parents[2]


class FileStore:
    """What Presence needs of the store of a process group."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def set(self, key: str, value: str) -> None:
        unfinished = self.folder / "unfinished"
        unfinished.write_text(value)
        unfinished.rename(self.folder / key.replace("/", "."))

    def get(self, key: str) -> bytes:
        path = self.folder / key.replace("/", ".")
        while not path.exists():
            time.sleep(0.01)
        return path.read_bytes()


def be_a_rank(folder: Path, rank: int, world_size: int, behavior: str) -> None:
    presence = Presence(rank, world_size, "127.0.0.1", FileStore(folder))
    if behavior == "forks" and os.fork() == 0:
        time.sleep(20)  # as a data worker that outlives its rank
        os._exit(0)
    (folder / f"ready{rank}").touch()
    if behavior == "ends":
        return
    end = time.monotonic() + (3 if behavior == "listens" else 20)
    while time.monotonic() < end:
        gone = presence.wait(1.0)
        if gone is not None:
            (folder / f"gone{rank}").write_text(str(gone))
            return


def start(folder: Path, behaviors: list[str]) -> list[subprocess.Popen[bytes]]:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    world_size = str(len(behaviors))
    processes = [
        subprocess.Popen([sys.executable, __file__, str(folder), str(rank), world_size, behavior], env=environment)
        for rank, behavior in enumerate(behaviors)
    ]
    end = time.monotonic() + 60
    while not all((folder / f"ready{rank}").exists() for rank in range(len(behaviors))):
        assert time.monotonic() < end, "ranks did not start"
        time.sleep(0.02)
    return processes


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("behavior", ["waits", "forks"])
def test_a_killed_rank_is_missed_by_all_others(tmp_path: Path, victim: int, behavior: str) -> None:
    processes = start(tmp_path, [behavior if rank == victim else "waits" for rank in range(3)])
    processes[victim].send_signal(signal.SIGKILL)
    killed = time.monotonic()
    codes = [process.wait(timeout=60) for process in processes]
    assert time.monotonic() - killed < 10
    assert codes == [-signal.SIGKILL if rank == victim else 0 for rank in range(3)]
    for rank in {0, 1, 2} - {victim}:
        assert (tmp_path / f"gone{rank}").read_text() == str(victim)


@pytest.mark.parametrize("early", [0, 1])
def test_a_rank_that_ends_is_not_missed(tmp_path: Path, early: int) -> None:
    processes = start(tmp_path, ["ends" if rank == early else "listens" for rank in range(3)])
    assert [process.wait(timeout=60) for process in processes] == [0, 0, 0]
    assert not list(tmp_path.glob("gone*"))


def test_strangers_at_the_door_are_no_ranks(tmp_path: Path) -> None:
    store, made = FileStore(tmp_path), []
    thread = threading.Thread(target=lambda: made.append(Presence(0, 2, "127.0.0.1", store)))
    thread.start()
    _, port, word = store.get("soma_lightning/presence").decode().split()
    for words in (b"GET / HTTP/1.1\n", f"{word}x 1\n".encode(), f"{word} one\n".encode(), b""):
        with socket.create_connection(("127.0.0.1", int(port))) as stranger:
            stranger.sendall(words)
    rank = Presence(1, 2, "127.0.0.1", store)
    thread.join(timeout=60)
    assert made[0].wait(0.1) is None
    rank.leave()
    assert made[0].wait(0.1) is None


def test_a_rank_that_cannot_connect_says_so(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    FileStore(tmp_path).set("soma_lightning/presence", f"127.0.0.1 {port} word")
    with pytest.warns(UserWarning, match="rank 1 cannot watch whether rank 0 is alive"):
        rank = Presence(1, 2, "127.0.0.1", FileStore(tmp_path))
    assert rank.wait(0.01) is None


if __name__ == "__main__":
    be_a_rank(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
