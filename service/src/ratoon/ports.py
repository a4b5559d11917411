"""Ports to listen on later.

A port is chosen outside the range that the system gives to connections (32768 on, on Linux; 49152
on, elsewhere), so that it is still free when the service comes to use it.
"""

from __future__ import annotations

import errno
import random
import socket
from contextlib import suppress

_LOWEST, _HIGHEST = 20_000, 32_767


def free_port(host: str = "127.0.0.1") -> int:
    """At random, so that two who choose at once hardly meet.

    Raises `OSError` where none of a hundred is free, or the address is none of this machine.
    """
    # Of no seed: processes that are seeded alike would choose alike.
    *ports, last = random.SystemRandom().sample(range(_LOWEST, _HIGHEST + 1), 100)
    for port in ports:
        with suppress(OSError):
            return _bound(host, port)
    return _bound(host, last)


def is_free(host: str, port: int) -> bool:
    """Whether nobody listens there, not even one that would share the port.

    Raises `OSError` where the address is none of this machine, or the port not for this user.
    """
    with socket.socket(_family(host, port)) as probe:
        # What is left of connections that are over does not matter to one who listens.
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
