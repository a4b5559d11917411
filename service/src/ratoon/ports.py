"""Ports to listen on later.

Enters an address, leaves a port that is free there. Invariant: it is none that the system gives to
a connection or to who asks for any (32768 on, on Linux; 49152 on, elsewhere): between the choice
and its use, which may be a start of the whole service later, the system gives it to nobody.
"""

from __future__ import annotations

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


def _bound(host: str, port: int) -> int:
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    with socket.socket(family) as probe:
        probe.bind((host, port))
    return port
