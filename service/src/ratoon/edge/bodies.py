"""Bounds the size and time of a body while it is read, and inflates it.

No more of a body is held than its call's bound, whatever Content-Length said and however it is
compressed. A compressed body is inflated piece by piece; besides the decoder's window only one
piece of at most a few MiB is held. A body that inflates to more than its call's bound, or to more
than `MAX_RATIO` times its size after the first `FREE_BYTES`, is refused before more of it is made.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol, cast

import zstandard
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import Message, Receive, Scope

from ratoon.config import LimitsConfig
from ratoon.errors import ErrorCode, RatoonError

# Methods of requests that are whole without a body.
WITHOUT_BODY = frozenset({"GET", "HEAD", "DELETE", "OPTIONS", "TRACE", "CONNECT"})
# JSON of tokens and log-probs shrinks to a third; no real batch to a hundredth.
MAX_RATIO = 100
FREE_BYTES = 2**20
_PIECE_BYTES = 256 * 1024
# zstd's decoder has no limit per call. The smallest block, 4 bytes, makes 128 KiB.
_ZSTD_SLICE_BYTES = 256
_ZSTD_WINDOW_BYTES = 8 * 2**20


def bounded_body(
    scope: Scope, receive: Receive, limits: LimitsConfig, check_size: Callable[[int], None]
) -> Receive:
    """Return a `receive` that bounds the request's body, and inflates it.

    `check_size` is called with the number of bytes that the body has at least, and raises
    BODY_TOO_LARGE if there are too many; a false or missing Content-Length changes nothing. Raises
    BODY_TOO_LARGE, MALFORMED_BODY and UNSUPPORTED for what the headers say; the returned function
    raises BODY_TOO_LARGE, MALFORMED_BODY and REQUEST_TIMEOUT.
    """
    headers = MutableHeaders(scope=scope)
    _check_place(scope, headers)
    length, coding = headers.get("content-length", "0"), _coding(headers)
    if length.isdecimal():
        check_size(int(length))
    inflater = None
    if coding != "identity":
        inflater = Inflater(coding, check_size=check_size)
        del headers["content-encoding"]
        if "content-length" in headers:
            del headers["content-length"]
    return _Body(receive, limits, inflater, check_size).receive


class _Body:
    """The body of one request, as it arrives."""

    def __init__(
        self,
        receive: Receive,
        limits: LimitsConfig,
        inflater: Inflater | None,
        check_size: Callable[[int], None],
    ) -> None:
        self._check_size = check_size
        self._receive = receive
        self._limits = limits
        self._inflater = inflater
        self._num_bytes = 0
        self._ends_at = asyncio.get_running_loop().time() + limits.max_body_s
        # `_is_whole`: all of it has arrived; `_is_done`: all of it was passed on.
        self._is_whole = False
        self._is_done = False
        self._pieces: Iterator[bytes] = iter(())

    async def receive(self) -> Message:
        """Return the next message. Raises BODY_TOO_LARGE, MALFORMED_BODY, REQUEST_TIMEOUT."""
        if self._is_done:
            # Only the disconnect can follow, however late.
            return await self._receive()
        if self._inflater is None:
            message = await self._next()
            self._is_done = self._is_whole
            return message
        return await self._next_inflated(self._inflater)

    async def _next_inflated(self, inflater: Inflater) -> Message:
        while True:
            piece = next(self._pieces, None)
            if piece is not None:
                return {"type": "http.request", "body": piece, "more_body": True}
            if self._is_whole:
                inflater.check_end()
                self._is_done = True
                return {"type": "http.request", "body": b"", "more_body": False}
            message = await self._next()
            if message["type"] != "http.request":
                return message
            self._pieces = inflater.pieces(cast("bytes", message.get("body", b"")))

    async def _next(self) -> Message:
        left_s = self._ends_at - asyncio.get_running_loop().time()
        within_s = max(min(self._limits.max_body_pause_s, left_s), 0.0)
        try:
            # `asyncio.wait_for` of Python 3.11 loses a cancel that comes with the message.
            async with asyncio.timeout(within_s):
                message = await self._receive()
        except TimeoutError as err:
            raise _too_slow(self._num_bytes) from err
        if message["type"] != "http.request":
            return message
        self._num_bytes += len(message.get("body", b""))
        self._check_size(self._num_bytes)
        self._is_whole = not message.get("more_body", False)
        return message


def _check_place(scope: Scope, headers: Headers) -> None:
    """Refuse a body of a method that takes none: nobody would read it.

    Raises MALFORMED_BODY.
    """
    has_body = "transfer-encoding" in headers or headers.get("content-length", "0") != "0"
    if has_body and scope["method"] in WITHOUT_BODY:
        raise RatoonError(
            ErrorCode.MALFORMED_BODY,
            f"{scope['method']} takes no body",
            got=f"{headers.get('content-length', 'some')} bytes",
            expected="no body",
        )


def _coding(headers: Headers) -> str:
    """Return the body's content coding.

    Raises UNSUPPORTED for an unknown coding, or several at once.
    """
    coding = headers.get("content-encoding", "identity").strip().lower()
    if coding != "identity" and coding not in CODINGS:
        raise RatoonError(
            ErrorCode.UNSUPPORTED,
            f"Content-Encoding: got {coding[:64]}, expected one of {', '.join(CODINGS)}",
            field="Content-Encoding",
            got=coding[:64],
            expected=f"one of {', '.join(CODINGS)}",
        )
    return coding


def _too_slow(num_bytes: int) -> RatoonError:
    return RatoonError(
        ErrorCode.REQUEST_TIMEOUT,
        f"the rest of the body did not come; it has {num_bytes} bytes so far",
        got=f"{num_bytes} bytes",
        expected="the whole body, without a long pause",
    )


class _Decoder(Protocol):
    """Decodes one compressed stream, piece by piece.

    `is_at_end`: the stream has ended, with nothing behind it.
    """

    @property
    def is_at_end(self) -> bool: ...
    def decode(self, data: bytes) -> Iterator[bytes]: ...


class Inflater:
    """Inflates one body.

    `coding` is one of `CODINGS`. `check_size` is called with the number of inflated bytes and
    raises if there are too many.
    """

    def __init__(self, coding: str, *, check_size: Callable[[int], None]) -> None:
        self._coding = coding
        self._check_total = check_size
        self._decoder = CODINGS[coding]()
        self._num_in = 0
        self._num_out = 0

    def pieces(self, data: bytes) -> Iterator[bytes]:
        """Yield the pieces that `data` adds. Raises BODY_TOO_LARGE, MALFORMED_BODY."""
        self._num_in += len(data)
        try:
            for piece in self._decoder.decode(data):
                self._num_out += len(piece)
                self._check_size()
                if piece:
                    yield piece
        except (zlib.error, zstandard.ZstdError, ValueError) as err:
            raise self._malformed() from err

    def check_end(self) -> None:
        """Check that the body is whole. Raises MALFORMED_BODY if it is truncated."""
        if not self._decoder.is_at_end:
            raise self._malformed()

    def _check_size(self) -> None:
        self._check_total(self._num_out)
        if self._num_out > max(FREE_BYTES, MAX_RATIO * self._num_in):
            raise RatoonError(
                ErrorCode.BODY_TOO_LARGE,
                f"the body grows more than {MAX_RATIO} times when it is inflated",
                field="Content-Encoding",
                got=f"{self._num_out} bytes from {self._num_in}",
                expected=f"at most {MAX_RATIO} times as many",
            )

    def _malformed(self) -> RatoonError:
        return RatoonError(
            ErrorCode.MALFORMED_BODY,
            f"the body is not one whole {self._coding} stream",
            field="Content-Encoding",
            got=f"{self._num_in} bytes",
            expected=self._coding,
        )


class _Gzip:
    """Decodes one gzip member; anything after it is malformed."""

    def __init__(self) -> None:
        self._decoder = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)

    @property
    def is_at_end(self) -> bool:
        return self._decoder.eof and not self._decoder.unused_data

    def decode(self, data: bytes) -> Iterator[bytes]:
        while True:
            if data and self._decoder.eof:
                raise ValueError("bytes after the end")
            piece = self._decoder.decompress(data, _PIECE_BYTES)
            yield piece
            data = self._decoder.unconsumed_tail
            if not data and len(piece) < _PIECE_BYTES:
                return


class _Zstd:
    """Decodes one zstd frame; anything after it is malformed."""

    def __init__(self) -> None:
        decompressor = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES)
        self._decoder = decompressor.decompressobj()

    @property
    def is_at_end(self) -> bool:
        return self._decoder.eof and not self._decoder.unused_data

    def decode(self, data: bytes) -> Iterator[bytes]:
        for start in range(0, len(data), _ZSTD_SLICE_BYTES):
            if self._decoder.eof:
                raise ValueError("bytes after the end")
            yield self._decoder.decompress(data[start : start + _ZSTD_SLICE_BYTES])


CODINGS: Mapping[str, Callable[[], _Decoder]] = {"gzip": _Gzip, "zstd": _Zstd}
