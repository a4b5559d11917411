"""One service per `data_root`, on ports of its own, checked before anything starts.

File locks on its folders keep other services out; the kernel drops them with the process. Ports
that the service chooses lie outside the system's range of ephemeral ports (32768 on, on Linux;
49152 on, elsewhere), so that a port is still free when the service comes to bind it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import random
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from ratoon.config import RatoonConfig
from ratoon.errors import invalid
from ratoon.log import get_logger
from ratoon.stream.files import make_folder

LOCK_NAME = "service.lock"
# Ports of a service that was just killed may still be bound.
PORT_PATIENCE_S = 10.0
_POLL_S = 0.1
_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS)
_log = get_logger("sole_service")
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


@contextmanager
def sole_service(config: RatoonConfig) -> Iterator[None]:
    """Hold the folders for the block. Raises INVALID_ARGUMENT where a folder or port is taken."""
    with ExitStack() as held:
        for field in ("data_root", "weights_root"):
            folder: Path | None = getattr(config, field)
            if folder is not None:
                held.enter_context(_held(field, folder.absolute()))
        deadline = time.monotonic() + PORT_PATIENCE_S
        for field, host, port in ports_of(config):
            _wait_for_port(field, host, port, deadline)
        yield


def ports_of(config: RatoonConfig) -> Iterator[tuple[str, str, int]]:
    """Setting, address and port of each wire; port 0 picks a free port anyway."""
    yield "http.port", config.http.host, config.http.port
    yield "grpc.port", config.grpc.host, config.grpc.port
    if config.serve.is_on:
        yield "serve.http_port", config.serve.http_host, config.serve.http_port


def _wait_for_port(field: str, host: str, port: int, deadline: float) -> None:
    is_told = False
    while port and not _is_free(field, host, port):
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            raise invalid(field, port, f"a port of {host} that no other process listens on")
        if not is_told:
            _log.warning("port is taken", setting=field, port=port, waits_s=round(left_s))
            is_told = True
        time.sleep(_POLL_S)


def _is_free(field: str, host: str, port: int) -> bool:
    try:
        return is_free(host, port)
    except OSError as err:
        raise invalid(field, f"{host}:{port} ({err})", "an address of this machine") from err


@contextmanager
def _held(field: str, folder: Path) -> Iterator[None]:
    try:
        make_folder(folder, 0o700)
        descriptor = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as err:
        raise invalid(field, f"{folder} ({err.strerror})", "a folder to write to") from err
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        got = f"{folder}, which another service uses"
        raise invalid(field, got, "a folder of its own, or that service stopped") from None
    except OSError as err:
        if err.errno not in _WITHOUT_LOCKS:
            os.close(descriptor)
            raise
        _log.warning("no locks on this file system", setting=field, folder=str(folder))
    try:
        yield
    finally:
        os.close(descriptor)
