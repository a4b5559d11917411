"""Ranges of files over HTTP, each read in a thread straight into the bytes that are given out.

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
from http.client import (
    HTTPConnection,
    HTTPException,
    HTTPMessage,
    HTTPResponse,
    HTTPSConnection,
    IncompleteRead,
)
from socket import SHUT_RDWR, socket
from urllib.parse import urlsplit

WHOLE_FILE, PART_OF_FILE = 200, 206
_SKIPPED_BYTES = 2**20
# How much is read of an answer that is an error.
_ERROR_BYTES = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """`data` is the range, with a byte more where the answer goes on; or the text of an error."""

    status: int
    headers: HTTPMessage
    data: bytes


class RangeReader:
    """At most `in_flight` connections, kept until `close`. `context` None: without TLS."""

    def __init__(
        self,
        base_url: str,
        headers: Mapping[str, str],
        context: ssl.SSLContext | None,
        *,
        in_flight: int,
        connect_timeout_s: float,
    ) -> None:
        url = urlsplit(base_url)
        # http.client would look for a port in an IPv6 address.
        self._address = url.hostname or "", url.port or (80 if context is None else 443)
        self._prefix = url.path.rstrip("/")
        self._headers, self._context = headers, context
        self._connect_timeout_s = connect_timeout_s
        self._idle: list[HTTPConnection] = []
        self._is_closed = False
        self._places = asyncio.Semaphore(in_flight)
        self._threads = ThreadPoolExecutor(in_flight, "ratoon-range")

    async def read(self, path: str, *, offset: int, length: int, timeout_s: float) -> Answer:
        """Raises OSError or HTTPException where no answer, or not all of one, came in time."""
        async with self._places:
            fetch = _Fetch(self, path, offset, length, timeout_s)
            work = asyncio.get_running_loop().run_in_executor(self._threads, fetch.run)
            try:
                # The thread bounds each wait for the peer, this the whole of what trickles in.
                await asyncio.wait([work], timeout=timeout_s)
                if not work.done():
                    raise TimeoutError(f"no whole answer in {timeout_s:.3g} s")
                return work.result()
            finally:
                if not work.done():
                    fetch.abandon()
                    work.add_done_callback(lambda work: work.cancelled() or work.exception())

    def close(self) -> None:
        self._is_closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._close_idle()

    def idle(self) -> HTTPConnection | None:
        """One that another call has left, whose other end may have closed it since."""
        with suppress(IndexError):
            return self._idle.pop()
        return None

    def connected(self, timeout_s: float) -> HTTPConnection:
        timeout_s = min(timeout_s, self._connect_timeout_s)
        connection = (
            HTTPConnection(*self._address, timeout=timeout_s)
            if self._context is None
            else HTTPSConnection(*self._address, timeout=timeout_s, context=self._context)
        )
        connection.connect()
        return connection

    def ask(self, connection: HTTPConnection, path: str, offset: int, length: int) -> HTTPResponse:
        # No If-Range: of another file of this name, all would come.
        headers = {**self._headers, "Range": f"bytes={offset}-{offset + length - 1}"}
        connection.request("GET", self._prefix + path, headers=headers)
        return connection.getresponse()

    def give_back(self, connection: HTTPConnection) -> None:
        self._idle.append(connection)
        if self._is_closed:
            self._close_idle()

    def _close_idle(self) -> None:
        while (connection := self.idle()) is not None:
            connection.close()


class _Fetch:
    """One range: `run` by a thread, which `abandon` wakes where it waits for the peer."""

    def __init__(
        self, reader: RangeReader, path: str, offset: int, length: int, timeout_s: float
    ) -> None:
        self._reader, self._timeout_s = reader, timeout_s
        self._path, self._offset, self._length = path, offset, length
        self._lock = threading.Lock()
        self._socket: socket | None = None
        self._is_abandoned = False

    def abandon(self) -> None:
        with self._lock:
            self._is_abandoned = True
            if self._socket is not None:
                with suppress(OSError):
                    # Not the TLS socket's own, which goes on in plain text until it is shut.
                    socket.shutdown(self._socket, SHUT_RDWR)

    def run(self) -> Answer:
        connection = self._reader.idle()
        if connection is not None:
            try:
                return self._answer(connection)
            except (OSError, HTTPException):
                if self._is_abandoned:
                    raise
        return self._answer(self._reader.connected(self._timeout_s))

    def _answer(self, connection: HTTPConnection) -> Answer:
        try:
            with self._lock:
                if self._is_abandoned:
                    raise TimeoutError
                # http.client forgets it where the peer means to close the connection.
                self._socket = connection.sock
            connection.sock.settimeout(self._timeout_s)
            response = self._reader.ask(connection, self._path, self._offset, self._length)
            with response:
                data = self._body(response)
                is_over = response.isclosed()
            with self._lock:
                self._socket = None
                is_over &= connection.sock is not None and not self._is_abandoned
        except BaseException:
            connection.close()
            raise
        if is_over:
            self._reader.give_back(connection)
        else:
            connection.close()
        return Answer(status=response.status, headers=response.headers, data=data)

    def _body(self, response: HTTPResponse) -> bytes:
        if response.status not in (WHOLE_FILE, PART_OF_FILE):
            return response.read(_ERROR_BYTES)
        if response.status == WHOLE_FILE:  # From one that knows no ranges.
            left = self._offset
            while left and (skipped := response.read(min(left, _SKIPPED_BYTES))):
                left -= len(skipped)
        data = response.read(self._length)
        if len(data) < self._length and response.length:
            raise IncompleteRead(data, response.length)
        return data if response.status == WHOLE_FILE else data + response.read(1)
