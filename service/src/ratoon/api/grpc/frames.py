"""The frames of one HTTP/2 connection, watched on their way to gRPC: how long each message is.

gRPC allocates a message as it comes, whatever its length, and tells nobody until it is whole: its
own limit is looked at afterwards. So the five bytes in front of a message are read here, and each
call gets a header that names its `Arrival`, by which the handler finds them before it asks gRPC for
the message. Nothing else is changed or judged; HPACK is not decoded. RFC 9113, section 4 and 6.
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
# Of one connection. gRPC refuses calls beyond its own bound, so the oldest of more are nobody's.
_MAX_ARRIVALS = 2048


class Arrival:
    """The request of one call, as far as it has come. `host`: of its caller."""

    __slots__ = ("_has_ended", "_prefix", "_waiter", "host", "num_bytes")

    def __init__(self, host: str) -> None:
        self.host = host
        # Of the stream: what has come, headers apart.
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
        """The next bytes of the message, its prefix first."""
        if not self._is_known:
            self._prefix += data[: _PREFIX_BYTES - len(self._prefix)].tobytes()
            self._wake()

    def end(self) -> None:
        """Nothing more comes."""
        self._has_ended = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Frames:
    """One connection's bytes from its caller. `header`: its name, and the value's first part.

    `on_call` hears of each call that begins.
    """

    def __init__(
        self, host: str, header: tuple[str, str], on_call: Callable[[Arrival], None]
    ) -> None:
        self._host = host
        self._name, self._mark = header
        self._on_call = on_call
        self._arrivals: OrderedDict[int, Arrival] = OrderedDict()
        # Of the frame, or the preface, that is under way.
        self._head = bytearray()
        self._left = PREFACE_BYTES
        self._kind, self._flags, self._stream = -1, 0, 0
        self._message_left = 0
        self._is_pad_next = False
        self._newest = 0
        self._named: int | None = None

    def take(self, stream: int) -> Arrival | None:
        """Of a call whose handler has begun."""
        return self._arrivals.get(stream)

    def forget(self, stream: int) -> None:
        """Its handler has ended."""
        self._arrivals.pop(stream, None)

    def end(self) -> None:
        """The connection has."""
        for arrival in self._arrivals.values():
            arrival.end()

    def feed(self, data: bytes) -> bytes:
        """`data` for gRPC, with the header of each call that begins in it."""
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
        """A frame; its head is changed where our header is to follow."""
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
        """After a frame: what is to be put in behind it."""
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
        # A literal that no table keeps: RFC 7541, 6.2.2.
        block = bytes([0, len(name)]) + name + bytes([len(text)]) + text
        size = len(block).to_bytes(3, "big")
        return size + bytes([_CONTINUATION, _END_HEADERS]) + stream.to_bytes(4, "big") + block

    def _ends_new_headers(self) -> bool:
        return (
            self._kind in (_HEADERS, _CONTINUATION)
            and self._named is not None
            and bool(self._flags & _END_HEADERS)
        )
