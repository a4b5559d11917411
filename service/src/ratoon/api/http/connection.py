"""HTTP/1 connections with bounds on their time and memory.

`partial(BoundedConnection, budget=EdgeBudget(bounds))` is the value of uvicorn's `http` option.
uvicorn itself bounds neither headers, readers, connections nor bodies that no handler reads.

Heads of requests that two readers may take for different requests are refused. httptools refuses
most of them (obsolete folding, bare LF, two lengths, a length beside chunks); the rest is refused
here (RFC 9112, sections 2.3, 3.2 and 6.1).
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import httptools
from starlette.types import Message, Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from ratoon.api.contract import body_bound_at, is_fetch
from ratoon.api.http.errors import error_response
from ratoon.edge.budget import CHUNK_BYTES, EdgeBudget
from ratoon.edge.zero_copy import ZERO_COPY, FileSender
from ratoon.errors import ErrorCode, RatoonError

# uvicorn takes the caller's address from these if they come from loopback.
_FORWARDED = frozenset({b"x-forwarded-for", b"x-forwarded-proto"})
# Bytes of a file sent over TLS that are in memory at a time.
_PIECE_BYTES = 256 * 1024
_HOST = re.compile(rb"(\[[0-9A-Fa-f:.]+(%[\w.~-]+)?\]|[A-Za-z0-9._~-]+)(:(\d{0,5}))?")
_ABSOLUTE = re.compile(rb"(?i:https?)://([^/?#]*)")
_MAX_PORT = 65535


class BoundedConnection(HttpToolsProtocol):
    """A connection that serves one request at a time.

    Each state has its own timer, which incoming bytes do not restart. The states are *headers*
    (from the connection, or a request's first byte, to the end of its headers), *idle* (from an
    answer to the next request's first byte; uvicorn's `timeout_keep_alive`), *unread* (from the
    first byte that the kernel does not take to the last of those behind it) and *sending* (from the
    first to the last byte of a message's part of a file).

    Applications find `http.response.zerocopysend` among the scope's extensions. It raises OSError
    if the reader has left or was let go.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        budget: EdgeBudget,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        # A WebSocket protocol would take over the connection, without these limits.
        self.ws_protocol_class = None
        self._handler = self.app
        self.app = self._answer
        self._budget = budget
        self._bounds = budget.bounds
        self._headers = _Timer(self.loop, self._bounds.headers_s, self._abort)
        self._idle = _Timer(self.loop, self.timeout_keep_alive, self._close)
        self._unread = _Timer(self.loop, self._bounds.stalled_s, self._abort)
        self._sending = _Timer(self.loop, self._bounds.stalled_s, self._abort)
        self._is_counted = False
        # Ignore further input: it was pipelined before the first request's answer.
        self._is_deaf = False
        # Whether the parser has consumed any of the last piece; bytes buffered since it last did.
        self._has_moved = False
        self._num_kept_bytes = 0
        self._is_head = True
        self._num_headers = 0
        self._fault: tuple[str, str] | None = None
        self._max_body_bytes = 0
        self._num_body_bytes = 0
        self._refusal: RatoonError | None = None
        self._file: FileSender | None = None
        # The file sent last. The kernel has queued its pages, not copies of them, so the file stays
        # open until the reader has read them: files that nobody has open may be written over.
        self._held_file: int | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # With these limits `pause_writing` is called for every byte that is not sent at once.
        # asyncio's TLS would take 0 as a buffer that is always full.
        transport.set_write_buffer_limits(high=1 if self.scheme == "https" else 0, low=0)
        self._is_counted = self._budget.enter(self, self.client[0] if self.client else "")
        if self._is_counted:
            self._budget.idle(self)
            self._headers.start()
        else:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._headers, self._idle, self._unread, self._sending):
            timer.stop()
        if self._file is not None:
            self._file.stop()
        self._release_file()
        self._budget.leave(self)
        self._is_counted = False
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_deaf:
            return
        self._has_moved = False
        super().data_received(data)
        # The parser buffers a header, or a trailer, until it is complete.
        self._num_kept_bytes = 0 if self._has_moved else self._num_kept_bytes + len(data)
        is_over = self._num_kept_bytes > self._bounds.max_header_bytes
        if is_over and not self.transport.is_closing():
            self.send_400_response("Headers too large.")

    def send_400_response(self, msg: str) -> None:
        if self._is_answering() and not self.cycle.more_body:
            # Answer the well-formed request first, then close.
            self.cycle.keep_alive = False
            self._is_deaf = True
            return
        self.transport.write(refusal(self._fault, msg))
        self.transport.close()

    def on_message_begin(self) -> None:
        if self._is_answering():
            raise httptools.HttpParserError("one request at a time")
        super().on_message_begin()
        self._has_moved = True
        self._is_head, self._num_headers = True, 0
        self._release_file()
        self._idle.stop()
        self._headers.start()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_headers += 1
        if self._num_headers > self._bounds.max_headers:
            raise httptools.HttpParserError("too many headers")
        # Trailers are dropped: the request is being answered already.
        if self._is_head and name.lower() not in _FORWARDED:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._is_head = False
        assert self.parser is not None
        self._fault = head_fault(self.parser.get_http_version(), self.url, self.headers)
        if self._fault is not None:
            raise httptools.HttpParserError("an ambiguous head")
        # The request's task, which runs `_answer`, starts later.
        super().on_headers_complete()
        self._has_moved = True
        self._headers.stop()
        method, path = self.scope["method"], self.scope["path"]
        self._num_body_bytes = 0
        self._max_body_bytes = body_bound_at(method, path, self._bounds.max_body_bytes)
        self._refusal = self._budget.begin(
            self,
            unsent_bytes=CHUNK_BYTES if is_fetch(method, path) else 0,
            body_bytes=min(self._declared_bytes(), self._max_body_bytes),
        )
        if self._refusal is not None:
            self._max_body_bytes = 0

    def on_body(self, body: bytes) -> None:
        self._has_moved = True
        if not self._is_answering() or self._is_over():
            return
        # Keep one byte beyond the limit, which marks the body as too large.
        body = body[: self._max_body_bytes + 1 - self._num_body_bytes]
        self._num_body_bytes += len(body)
        if not self._budget.hold(self, self._num_body_bytes):
            self.transport.abort()
            return
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._has_moved = True
        # A truncated body never counts as complete.
        if not self._is_over():
            super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._is_counted:
            self._budget.finish(self)
            self._budget.idle(self)
            self._idle.start()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread.start()
        if self._is_counted:
            self._budget.stall(self)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unread.stop()
        if self._is_counted:
            self._budget.go_on(self)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application, or answer the budget's refusal."""
        if self._refusal is not None:
            await error_response(self._refusal)(scope, receive, send)
            return

        async def send_file_too(message: Message) -> None:
            await (self._send_file if message["type"] == ZERO_COPY else send)(message)

        scope["extensions"] = {ZERO_COPY: {}}
        await self._handler(scope, receive, send_file_too)  # type: ignore[arg-type]

    async def _send_file(self, message: Message) -> None:
        """Send a part of an answer's body, whose head has been sent, from the file itself."""
        if self.flow.write_paused:
            await self.flow.drain()
        is_sent = False
        if self._is_counted and not self.transport.is_closing():
            self._budget.release_unsent(self)
            self._sending.start()
            try:
                send = self._send_in_pieces if self.scheme == "https" else self._send_by_kernel
                is_sent = await send(message["file"], message["offset"], message["count"])
            finally:
                self._sending.stop()
        if not is_sent:
            # uvicorn marks a disconnected peer in the same way.
            self.cycle.disconnected = True
            self.transport.abort()
            raise ConnectionResetError("the reader has left, or was let go")
        if not message.get("more_body", False):
            await self._end_file(message["file"])

    async def _send_by_kernel(self, file: int, offset: int, count: int) -> bool:
        self._file = FileSender(self.transport.get_extra_info("socket"), self.loop)
        is_sent = await self._file.send(file, offset, count)
        self.cycle.expected_content_length -= count
        return is_sent

    async def _send_in_pieces(self, file: int, offset: int, count: int) -> bool:
        stop = offset + count
        while offset < stop and self._is_counted:
            most = min(stop - offset, _PIECE_BYTES)
            piece = await asyncio.to_thread(os.pread, file, most, offset)
            if not piece:
                return False
            offset += len(piece)
            await self.cycle.send({"type": "http.response.body", "body": piece, "more_body": True})
        return offset == stop

    async def _end_file(self, file: int) -> None:
        """End an answer that was sent from a file.

        A reader that got pages of the file closes the connection itself, once it has read them.
        """
        is_last = not self.cycle.keep_alive
        if self.scheme != "https":
            self._held_file = os.dup(file)
            # uvicorn would close the connection now; `idle` limits how long the reader takes.
            self.cycle.keep_alive = True
        await self.cycle.send({"type": "http.response.body", "body": b"", "more_body": False})
        if self._held_file is not None and is_last:
            self._is_deaf = True
            self.transport.write_eof()

    def _release_file(self) -> None:
        if self._held_file is not None:
            os.close(self._held_file)
            self._held_file = None

    def _declared_bytes(self) -> int:
        length = dict(self.headers).get(b"content-length", b"0")
        return int(length) if length.isdigit() else 0

    def _is_answering(self) -> bool:
        # uvicorn types it as never None.
        cycle: Any = self.cycle
        return cycle is not None and not cycle.response_complete

    def _is_over(self) -> bool:
        return self._num_body_bytes > self._max_body_bytes

    def _abort(self) -> None:
        self.transport.abort()

    def _close(self) -> None:
        """Close once all is written; the *unread* timer bounds how long that takes."""
        self.transport.close()


class _Timer:
    """Calls a function once a time is over, unless it is stopped before."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, seconds: float, end: Callable[[], None]
    ) -> None:
        self._loop = loop
        self._seconds = seconds
        self._end = end
        self._handle: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start or restart the timer."""
        self.stop()
        self._handle = self._loop.call_later(self._seconds, self._end)

    def stop(self) -> None:
        """Stop the timer, if it runs."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None


def head_fault(
    version: str, target: bytes, headers: Sequence[tuple[bytes, bytes]]
) -> tuple[str, str] | None:
    """Return the field that makes a request ambiguous, and what is expected; None if none does.

    The names of `headers` are in lower case.
    """
    if version not in ("1.0", "1.1"):
        return "version", "HTTP/1.1 or HTTP/1.0"
    hosts = [value for name, value in headers if name == b"host"]
    if len(hosts) > 1 or (version == "1.1" and not hosts):
        return "Host", f"one, got {len(hosts)}"
    if hosts and not _is_host(hosts[0]):
        return "Host", "a name or an address, and a port or none"
    if not target.startswith(b"/") and target != b"*":
        absolute = _ABSOLUTE.match(target)
        if absolute is None or absolute[1].lower() not in [host.lower() for host in hosts]:
            return "target", "a path, or the same host as in Host"
    codings = [value.lower() for name, value in headers if name == b"transfer-encoding"]
    if codings and (version == "1.0" or codings != [b"chunked"]):
        return "Transfer-Encoding", "chunked alone, in HTTP/1.1"
    return None


def refusal(fault: tuple[str, str] | None, message: str) -> bytes:
    """Return the bytes of a 400 answer, after which the connection ends.

    `fault` is that of `head_fault`; None for bytes that are not HTTP.
    """
    field, expected = fault or ("", "HTTP/1.1 (RFC 9112)")
    error = RatoonError(
        ErrorCode.MALFORMED_BODY,
        f"{field}: expected {expected}" if field else message,
        field=field,
        expected=expected,
    )
    answer = error_response(error, {"connection": "close"})
    head = b"".join(b"%b: %b\r\n" % line for line in answer.raw_headers)
    return b"HTTP/1.1 400 Bad Request\r\n" + head + b"\r\n" + bytes(answer.body)


def _is_host(value: bytes) -> bool:
    found = _HOST.fullmatch(value)
    return found is not None and int(found[4] or 0) <= _MAX_PORT
