"""Calls between the processes of a fault run, over sockets that a killed process closes.

A call to a process that is gone, or dies meanwhile, raises `PeerLostError` at once. As in Ray, it
is not known whether the call took effect.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any


class PeerLostError(Exception):
    """The other process is gone."""


class Server:
    """Answers on `path`, each caller on a thread of its own."""

    def __init__(self, path: Path, answer: Callable[[str, tuple[Any, ...]], Any]) -> None:
        path.unlink(missing_ok=True)
        self._answer = answer
        self._listener = Listener(str(path), "AF_UNIX", backlog=64)

    def run(self) -> None:
        """Until the process ends, or `close`."""
        while True:
            try:
                connection = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _serve(self, connection: Connection) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                name, args = connection.recv()
                connection.send(self._outcome(name, args))

    def _outcome(self, name: str, args: tuple[Any, ...]) -> tuple[bool, object]:
        try:
            return True, self._answer(name, args)
        except Exception as err:  # noqa: BLE001 - the caller's, whatever it is
            return False, err


class Peer:
    """Client of one server; any number of threads may call at once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._idle: list[Any] = []

    def connect(self) -> None:
        """Raises `PeerLostError` where nobody listens."""
        self._idle.append(self._connection())

    def call(self, name: str, *args: object) -> Any:
        """Raises what the method raises, and `PeerLostError`."""
        try:
            connection = self._idle.pop() if self._idle else self._connection()
            connection.send((name, args))
            is_value, value = connection.recv()
        except (EOFError, OSError) as err:
            self._idle.clear()
            raise PeerLostError(self._path.name) from err
        self._idle.append(connection)
        if is_value:
            return value
        raise value

    def _connection(self) -> Any:
        try:
            return Client(str(self._path), "AF_UNIX")
        except OSError as err:
            raise PeerLostError(self._path.name) from err


POOL = ThreadPoolExecutor(256, thread_name_prefix="rpc")
