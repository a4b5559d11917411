"""A connection of Serve's HTTP proxy that cannot be held open for nothing.

Enters bytes, leaves requests for uvicorn's own protocol. Invariant: headers come whole within
`HEADERS_S` seconds and `MAX_HEADER_BYTES`, an answer is taken on at least every `STALLED_S`
seconds, and no request is begun while more than `MAX_UNSENT_BYTES` wait for readers; a chunk of a
file counts in full from its request on.

uvicorn bounds neither; behind it Serve keeps each answer whole until its reader has taken it.
"""

from __future__ import annotations

import asyncio
from typing import Any

import httptools
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ratoon.api.http.errors import error_response
from ratoon.errors import exhausted

HEADERS_S = 20.0
STALLED_S = 60.0
MAX_HEADER_BYTES = 64 * 1024
MAX_CONNECTIONS = 8192
MAX_UNSENT_BYTES = 128 * 2**20
# The most that a route of files answers at once.
_CHUNK_BYTES = 16 * 2**20
_FILES = b"/files/"
_RETRY_S = 1.0


class BoundedConnection(HttpToolsProtocol):
    """For uvicorn's `http` option."""

    _timer: asyncio.TimerHandle | None = None
    _header_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            transport.abort()
            return
        self._end_in(HEADERS_S)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_never()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._header_bytes = 0
        self._end_in(HEADERS_S)

    def on_url(self, url: bytes) -> None:
        self._count(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(name + value)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._end_never()
        app = self.app
        asked = _CHUNK_BYTES if _is_fetch(self.url) else 0
        if self._unsent_bytes() + asked > MAX_UNSENT_BYTES:
            self.app = _answer_full
        try:
            super().on_headers_complete()
        finally:
            self.app = app

    def pause_writing(self) -> None:
        super().pause_writing()
        self._end_in(STALLED_S)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._end_never()

    def _unsent_bytes(self) -> int:
        connections: set[Any] = self.connections
        return sum(_unsent_bytes_of(each) for each in connections)

    def _count(self, data: bytes) -> None:
        self._header_bytes += len(data)
        if self._header_bytes > MAX_HEADER_BYTES:
            # Answered 400 by uvicorn.
            raise httptools.HttpParserError("headers too large")

    def _end_in(self, seconds: float) -> None:
        self._end_never()
        self._timer = self.loop.call_later(seconds, self.transport.abort)

    def _end_never(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _unsent_bytes_of(connection: Any) -> int:
    """What is in its buffer, or will be."""
    cycle = connection.cycle
    is_asked = cycle is not None and not cycle.response_complete and _is_fetch(connection.url)
    return connection.transport.get_write_buffer_size() + _CHUNK_BYTES * is_asked


def _is_fetch(url: bytes) -> bool:
    return _FILES in url


async def _answer_full(scope: Scope, receive: Receive, send: Send) -> None:
    error = exhausted(
        f"{MAX_UNSENT_BYTES} bytes of answers wait for their readers",
        resource="unsent_bytes",
        wanted=1,
        free=0,
        limit=MAX_UNSENT_BYTES,
        retry_after_s=_RETRY_S,
    )
    await error_response(error)(scope, receive, send)
