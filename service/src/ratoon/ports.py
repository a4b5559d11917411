"""Chooses ports to listen on later.

They lie outside the system's range of ephemeral ports (32768 on, on Linux; 49152 on, elsewhere), so
that a port is still free when the service comes to bind it.
"""

from __future__ import annotations

import errno
import random
import socket
from contextlib import suppress

_LOWEST, _HIGHEST = 20_000, 32_767


def free_port(host: str = "127.0.0.1") -> int:
    """A random free port, so that two processes that choose at once hardly ever collide.

    Raises `OSError` where none of a hundred is free, or the address is not this machine's.
    """
    # Not seeded: processes with equal seeds would choose the same port.
    *ports, last = random.SystemRandom().sample(range(_LOWEST, _HIGHEST + 1), 100)
    for port in ports:
        with suppress(OSError):
            return _bound(host, port)
    return _bound(host, last)


def is_free(host: str, port: int) -> bool:
    """Whether nobody listens on the port, not even a socket that would share it.

    Raises `OSError` where the address is not this machine's, or the port not for this user.
    """
    with socket.socket(_family(host, port)) as probe:
        # Connections in TIME_WAIT do not keep a listener from binding.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as err:
            if err.errno == errno.EADDRINUSE:
                return False
            raise
    return True


def _bound(host: str, port: int) -> int:
    with socket.socket(_family(host, port)) as probe:
        probe.bind((host, port))
    return port


def _family(host: str, port: int) -> int:
    return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
