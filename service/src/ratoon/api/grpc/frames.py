"""Watches the frames of an HTTP/2 connection on their way to gRPC, for each message's length.

gRPC allocates a message as it arrives, checks its limit only afterwards, and reports the length
only with the whole message. So the five bytes before a message are read here. Each call gets a
header that names its `Arrival`, where the handler finds the length before it asks gRPC for the
message. Nothing else is changed or checked; HPACK is not decoded. RFC 9113, section 4 and 6.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable

PREFACE_BYTES = 24
_HEAD_BYTES = 9
_PREFIX_BYTES = 5
_DATA, _HEADERS, _RST_STREAM, _CONTINUATION = 0, 1, 3, 9
_END_STREAM, _END_HEADERS, _PADDED = 1, 4, 8
# Per connection. gRPC refuses calls beyond its own limit, so the oldest beyond this are stale.
_MAX_ARRIVALS = 2048


class Arrival:
    """What has arrived of one call's request. `host`: of its caller."""

    __slots__ = ("_has_ended", "_prefix", "_waiter", "host", "num_bytes")

    def __init__(self, host: str) -> None:
        self.host = host
        # Bytes of the stream so far, without headers.
        self.num_bytes = 0
        self._prefix = b""
        self._waiter: asyncio.Future[None] | None = None
        self._has_ended = False

    async def length(self) -> int | None:
        """Bytes of the message, as soon as they are known; None: there is none."""
        while not self._is_known and not self._has_ended:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return int.from_bytes(self._prefix[1:], "big") if self._is_known else None

    @property
    def _is_known(self) -> bool:
        return len(self._prefix) == _PREFIX_BYTES

    def add(self, data: memoryview) -> None:
        """Add the next bytes of the message, its prefix first."""
        if not self._is_known:
            self._prefix += data[: _PREFIX_BYTES - len(self._prefix)].tobytes()
            self._wake()

    def end(self) -> None:
        """Nothing more will arrive."""
        self._has_ended = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Frames:
    """One connection's bytes from its caller. `header`: our header's name, and its value's prefix.

    `on_call` is called for each new call.
    """

    def __init__(
        self, host: str, header: tuple[str, str], on_call: Callable[[Arrival], None]
    ) -> None:
        self._host = host
        self._name, self._mark = header
        self._on_call = on_call
        self._arrivals: OrderedDict[int, Arrival] = OrderedDict()
        # State of the frame, or the preface, being read.
        self._head = bytearray()
        self._left = PREFACE_BYTES
        self._kind, self._flags, self._stream = -1, 0, 0
        self._message_left = 0
        self._is_pad_next = False
        self._newest = 0
        self._named: int | None = None

    def take(self, stream: int) -> Arrival | None:
        """The arrival of a call whose handler has started."""
        return self._arrivals.get(stream)

    def forget(self, stream: int) -> None:
        """The call's handler has ended."""
        self._arrivals.pop(stream, None)

    def end(self) -> None:
        """The connection has ended."""
        for arrival in self._arrivals.values():
            arrival.end()

    def feed(self, data: bytes) -> bytes:
        """Process `data`; returns it for gRPC, with our header added to each new call."""
        out, view, at = bytearray(), memoryview(data), 0
        while at < len(view):
            if self._left:
                piece = view[at : at + self._left]
                self._left -= len(piece)
                self._payload(piece)
                out += piece
            else:
                piece = view[at : at + _HEAD_BYTES - len(self._head)]
                self._head += piece
                if len(self._head) == _HEAD_BYTES:
                    self._begin()
                    out += self._head
                    self._head.clear()
            at += len(piece)
            if not self._left and not self._head:
                out += self._end()
        return bytes(out)

    def _begin(self) -> None:
        """Start a frame. Clears END_HEADERS in its head where our header is to follow."""
        self._left = int.from_bytes(self._head[:3], "big")
        self._kind, self._flags = self._head[3], self._head[4]
        self._stream = int.from_bytes(self._head[5:], "big") & 0x7FFFFFFF
        self._message_left, self._is_pad_next = self._left, bool(self._flags & _PADDED)
        if self._kind == _HEADERS and self._stream > self._newest:
            self._newest = self._named = self._stream
            arrival = self._arrivals[self._stream] = Arrival(self._host)
            self._on_call(arrival)
            if len(self._arrivals) > _MAX_ARRIVALS:
                self._arrivals.popitem(last=False)[1].end()
        if self._ends_new_headers():
            self._head[4] &= ~_END_HEADERS

    def _payload(self, piece: memoryview) -> None:
        arrival = self._arrivals.get(self._stream) if self._kind == _DATA else None
        if arrival is None:
            return
        arrival.num_bytes += len(piece)
        if self._is_pad_next:
            self._is_pad_next = False
            self._message_left -= 1 + piece[0]
            piece = piece[1:]
        piece = piece[: max(self._message_left, 0)]
        self._message_left -= len(piece)
        arrival.add(piece)

    def _end(self) -> bytes:
        """End a frame; returns the bytes to insert after it."""
        kind, flags, self._kind = self._kind, self._flags, -1
        ends = kind == _RST_STREAM or (kind in (_DATA, _HEADERS) and flags & _END_STREAM)
        if ends and self._stream in self._arrivals:
            self._arrivals[self._stream].end()
            if kind == _RST_STREAM:
                self.forget(self._stream)
        if kind not in (_HEADERS, _CONTINUATION) or self._named is None or not flags & _END_HEADERS:
            return b""
        stream, self._named = self._named, None
        text = f"{self._mark}{stream}".encode()
        name = self._name.encode()
        # A literal that is not indexed: RFC 7541, 6.2.2.
        block = bytes([0, len(name)]) + name + bytes([len(text)]) + text
        size = len(block).to_bytes(3, "big")
        return size + bytes([_CONTINUATION, _END_HEADERS]) + stream.to_bytes(4, "big") + block

    def _ends_new_headers(self) -> bool:
        return (
            self._kind in (_HEADERS, _CONTINUATION)
            and self._named is not None
            and bool(self._flags & _END_HEADERS)
        )
