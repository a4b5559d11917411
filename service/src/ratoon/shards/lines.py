"""A TCP connection of each rank to rank 0, on which nothing is ever sent.

The kernels of both machines probe it (keepalive) and close it when no answer comes. A copy between
ranks waits for as long as the other rank may compute, so without these connections a rank would
wait for hours for a machine behind a network that drops its packets.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable
from contextlib import suppress

# Keepalive: seconds before the first probe, seconds between probes, and probes without an answer
# after which the connection is closed.
IDLE_S, EVERY_S, TIMES = 10, 5, 4


class Lines:
    """This process's end of the connections: one to rank 0, or rank 0's to all others."""

    def __init__(self, connections: Iterable[socket.socket] = ()) -> None:
        self._connections = [*connections]
        for each in self._connections:
            _keep_alive(each)
            each.setblocking(False)

    def is_cut(self) -> bool:
        """Whether the process at one of the other ends is gone, or its machine silent."""
        return any(map(_is_cut, self._connections))

    def close(self) -> None:
        while self._connections:
            self._connections.pop().close()


def accept_all(listener: socket.socket, name: str, count: int, timeout_s: float) -> Lines:
    """Rank 0's end. A caller that does not send the meeting's name is refused. Raises `OSError`."""
    connections: list[socket.socket] = []
    deadline = time.monotonic() + timeout_s
    while len(connections) < count:
        listener.settimeout(max(0.01, deadline - time.monotonic()))
        connection, _ = listener.accept()
        connection.settimeout(max(0.01, deadline - time.monotonic()))
        with suppress(OSError):
            if connection.recv(len(name), socket.MSG_WAITALL) == name.encode("ascii"):
                connections.append(connection)
                continue
        connection.close()
    return Lines(connections)


def connect(host: str, port: int, name: str, timeout_s: float) -> Lines:
    """Another rank's end. Raises `OSError`."""
    connection = socket.create_connection((host, port), timeout_s)
    connection.sendall(name.encode("ascii"))
    return Lines([connection])


def _is_cut(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", IDLE_S),
        ("TCP_KEEPINTVL", EVERY_S),
        ("TCP_KEEPCNT", TIMES),
    ):
        # macOS has not all of them, and defaults of its own.
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
