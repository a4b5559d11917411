"""Ranges of files over HTTP, read in threads straight into memory.

Through httpx a byte costs several times as much, all of it on the event loop.
"""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from socket import SHUT_RDWR

import httpx

# Of an answer that is an error.
_ERROR_BYTES = 2**20
_PARTIAL = 206


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """What was answered: the bytes of the range, or the text of an error."""

    status: int
    headers: Mapping[str, str]
    data: bytearray


class RangeReader:
    """As many connections as are used at a time, at most `in_flight`; `context` None: no TLS."""

    def __init__(
        self,
        base_url: str,
        headers: Mapping[str, str],
        context: ssl.SSLContext | None,
        *,
        in_flight: int,
        connect_timeout_s: float,
    ) -> None:
        url = httpx.URL(base_url)
        self._host, self._port, self._prefix = url.host, url.port, url.path.rstrip("/")
        self._headers, self._context = dict(headers), context
        self._connect_timeout_s = connect_timeout_s
        self._idle: list[HTTPConnection] = []
        self._threads = ThreadPoolExecutor(in_flight, "ratoon-range")

    async def read(self, path: str, *, offset: int, length: int, timeout_s: float) -> Range:
        """Raises OSError or HTTPException where no answer, or not all of one, came in time."""
        fetch = _Fetch(self, path, offset, length)
        work = asyncio.get_running_loop().run_in_executor(self._threads, fetch.run, timeout_s)
        try:
            # Each wait for the peer is bounded in the thread; an answer that trickles in is here.
            return await asyncio.wait_for(asyncio.shield(work), timeout_s)
        except (TimeoutError, asyncio.CancelledError):
            fetch.abandon()
            work.add_done_callback(lambda done: done.cancelled() or done.exception())
            raise

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        while self._idle:
            self._idle.pop().close()

    def connection(self, timeout_s: float, *, is_new: bool) -> tuple[HTTPConnection, bool]:
        """One that is connected, and whether it is another call's, which may have ended since."""
        with suppress(IndexError):
            if not is_new:
                return self._idle.pop(), True
        timeout_s = min(timeout_s, self._connect_timeout_s)
        connection = (
            HTTPConnection(self._host, self._port, timeout=timeout_s)
            if self._context is None
            else HTTPSConnection(self._host, self._port, timeout=timeout_s, context=self._context)
        )
        connection.connect()
        return connection, False

    def give_back(self, connection: HTTPConnection) -> None:
        self._idle.append(connection)

    def ask(self, connection: HTTPConnection, path: str, offset: int, length: int) -> HTTPResponse:
        headers = self._headers | {"Range": f"bytes={offset}-{offset + length - 1}"}
        connection.request("GET", self._prefix + path, headers=headers)
        return connection.getresponse()


class _Fetch:
    """One range, in a thread, until it is there or abandoned from another thread."""

    def __init__(self, reader: RangeReader, path: str, offset: int, length: int) -> None:
        self._reader, self._path, self._offset, self._length = reader, path, offset, length
        self._lock = threading.Lock()
        self._connection: HTTPConnection | None = None
        self._is_abandoned = False

    def abandon(self) -> None:
        with self._lock:
            self._is_abandoned = True
            # Wakes the thread, which waits for the peer.
            if self._connection is not None and self._connection.sock is not None:
                with suppress(OSError):
                    self._connection.sock.shutdown(SHUT_RDWR)

    def run(self, timeout_s: float) -> Range:
        connection, was_used = self._reader.connection(timeout_s, is_new=False)
        try:
            return self._run(connection, timeout_s)
        except (OSError, HTTPException):
            if not was_used or self._is_abandoned:
                raise
        connection, _ = self._reader.connection(timeout_s, is_new=True)
        return self._run(connection, timeout_s)

    def _run(self, connection: HTTPConnection, timeout_s: float) -> Range:
        with self._lock:
            self._connection = connection
            if self._is_abandoned:
                connection.close()
                raise TimeoutError
        try:
            connection.sock.settimeout(timeout_s)
            response = self._reader.ask(connection, self._path, self._offset, self._length)
            data = self._body(response)
        except BaseException:
            connection.close()
            raise
        finally:
            with self._lock:
                self._connection = None
        if response.isclosed() and connection.sock is not None:
            self._reader.give_back(connection)
        else:
            connection.close()
        return Range(status=response.status, headers=response.headers, data=data)

    def _body(self, response: HTTPResponse) -> bytearray:
        """The range and, of an answer that goes on after it, one byte more."""
        if response.status not in (200, _PARTIAL):
            return bytearray(response.read(_ERROR_BYTES))
        # All of the file, from one that knows no ranges.
        left = self._offset if response.status != _PARTIAL else 0
        data = bytearray(self._length)
        while left and (size := response.readinto(memoryview(data)[:left])):
            left -= size
        got = 0
        while got < self._length and (size := response.readinto(memoryview(data)[got:])):
            got += size
        del data[got:]
        if response.status == _PARTIAL:
            data += response.read(1)
        return data
