"""Which rank is gone without a word? Every rank holds a TCP connection to rank 0 and says goodbye before it ends.

The kernel closes the connections of a process that is killed, at once and whatever its threads were doing; keep-alive
packets tell of a machine that is gone. Rank 0 sees it and tells the others; its own end all others see.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import selectors
import socket
import time
import warnings
from typing import Any

#: Store key: where rank 0 listens.
_ADDRESS = "soma_lightning/presence"

#: Seconds that ranks have to find each other at the start.
_MEETING = 60.0

#: Seconds for one message.
_HELLO = 5.0

#: Seconds: silence before the first keep-alive packet, between two; and how many unanswered ones end a connection.
_IDLE, _BETWEEN, _UNANSWERED = 10, 5, 4

_BYE = "bye"


class Presence:
    """The connections of this process. All ranks make one, together; a rank that cannot connect warns and is not seen.

    address: of the machine that rank 0 most likely runs on. store: of the process group.
    """

    def __init__(self, rank: int, world_size: int, address: str, store: Any) -> None:
        self._rank = rank
        #: Peer -> its connection and what it sent that is no whole line yet.
        self._peers: dict[int, _Line] = {}
        self._selector = selectors.DefaultSelector()
        try:
            lines = _receive_all(world_size, store) if rank == 0 else {0: _call_rank_0(rank, address, store)}
        except OSError as error:
            warnings.warn(f"rank {rank} cannot watch whether rank 0 is alive: {error}", stacklevel=2)
            lines = {}
        for peer, line in lines.items():
            self._peers[peer] = line
            self._selector.register(line.connection, selectors.EVENT_READ, peer)
        #: Ends `wait` when this process leaves.
        self._bell, rung = socket.socketpair()
        self._selector.register(rung, selectors.EVENT_READ, self._rank)
        atexit.register(self.leave)
        # A data worker must not keep the connection of a dead rank open.
        os.register_at_fork(after_in_child=self._close)

    def wait(self, seconds: float) -> int | None:
        """The rank that went without a goodbye, as soon as that is known; None after `seconds`."""
        for key, _ in self._selector.select(seconds):
            gone = None if key.data == self._rank else self._read(key.data)
            if gone is not None:
                self._tell(f"gone {gone}")
                return gone
        return None

    def _read(self, peer: int) -> int | None:
        line = self._peers[peer]
        for message in line.read():
            if message == _BYE:
                line.said_goodbye = True
            elif message.startswith("gone "):
                return int(message.removeprefix("gone "))
        if not line.ended:
            return None
        self._selector.unregister(line.connection)
        line.connection.close()
        del self._peers[peer]
        return None if line.said_goodbye else peer

    def leave(self) -> None:
        """Says goodbye: this process ends, and everybody knows why. A thread that waits here goes on."""
        self._tell(_BYE)
        with contextlib.suppress(OSError):
            self._bell.send(b".")

    def _tell(self, message: str) -> None:
        for line in list(self._peers.values()):
            line.send(message)

    def _close(self) -> None:
        for line in self._peers.values():
            line.connection.close()
        self._peers = {}


class _Line:
    """A connection that carries lines of text."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.said_goodbye = self.ended = False
        self._begun = b""
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        settings = {"TCP_KEEPIDLE": _IDLE, "TCP_KEEPINTVL": _BETWEEN, "TCP_KEEPCNT": _UNANSWERED}
        for name, value in settings.items():
            if hasattr(socket, name):  # not on every system
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def send(self, message: str) -> None:
        with contextlib.suppress(OSError):  # the reader sees it too
            self.connection.sendall(f"{message}\n".encode())

    def read(self) -> list[str]:
        """The whole lines that have come; waits for the first bytes, and notes the end of the connection."""
        try:
            received = self.connection.recv(4096)
        except OSError:
            received = b""
        self.ended = not received
        *lines, self._begun = (self._begun + received).split(b"\n")
        return [line.decode(errors="replace") for line in lines]

    def read_one(self) -> str:
        """The next line and nothing behind it, "" if the connection ends before."""
        text = b""
        while not text.endswith(b"\n"):
            byte = self.connection.recv(1)
            if not byte:
                return ""
            text += byte
        return text.decode(errors="replace").rstrip()


def _listen(backlog: int) -> socket.socket:
    """On all addresses of this machine, IPv6 included if it has that."""
    with contextlib.suppress(OSError):
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", 0), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=backlog)


def _receive_all(world_size: int, store: Any) -> dict[int, _Line]:
    """Rank 0: waits until every other rank has called and said the word from the store."""
    word, lines = secrets.token_hex(8), dict[int, _Line]()
    with _listen(world_size) as server:
        store.set(_ADDRESS, f"{socket.gethostname()} {server.getsockname()[1]} {word}")
        end = time.monotonic() + _MEETING
        while len(lines) < world_size - 1 and (left := end - time.monotonic()) > 0:
            server.settimeout(left)
            with contextlib.suppress(OSError):  # late, or a stranger who leaves again
                connection, _ = server.accept()
                connection.settimeout(_HELLO)
                line = _Line(connection)
                said, _, rank = line.read_one().partition(" ")
                if said == word and rank.isdecimal():
                    lines[int(rank)] = line
                    line.send(word)
                else:
                    connection.close()
    if len(lines) < world_size - 1:
        missing = sorted(set(range(1, world_size)) - set(lines))
        warnings.warn(f"rank 0 cannot watch whether ranks {missing} are alive: they did not connect", stacklevel=3)
    return lines


def _call_rank_0(rank: int, address: str, store: Any) -> _Line:
    host, port, word = store.get(_ADDRESS).decode().split()
    error: OSError | None = None
    for candidate in dict.fromkeys((address, host)):
        try:
            line = _Line(socket.create_connection((candidate, int(port)), timeout=_MEETING))
        except OSError as problem:
            error = problem
            continue
        line.send(f"{word} {rank}")
        if line.read_one() == word:
            return line
    raise error or OSError(f"what listens at port {port} of {address} is not rank 0")
