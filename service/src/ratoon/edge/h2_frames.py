"""Watches the frames of an HTTP/2 connection, for each message's length and for floods.

gRPC allocates a message as it arrives, checks its limit only afterwards, and reports the length
only with the whole message. So the five bytes before a message are read here. Each call gets a
header that names its `Arrival`, where the handler finds the length before it asks gRPC for the
message; gRPC sees the call only with that header, for which the call needs a place. Nothing else
is changed or checked; HPACK is not decoded. RFC 9113, section 4 and 6.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

_PREFIX_BYTES = 5
PREFACE_BYTES = 24
_HEAD_BYTES = 9
_DATA, _HEADERS, _RST_STREAM, _GOAWAY, _CONTINUATION = 0, 1, 3, 7, 9
_END_STREAM, _END_HEADERS, _PADDED = 1, 4, 8
_ENHANCE_YOUR_CALM = 11
# Per connection. gRPC refuses calls beyond its own limit, so the oldest beyond this are stale.
_MAX_ARRIVALS = 2048
# Cost that a connection may have without bringing anything (CVE-2023-44487 and its kind). A frame
# costs one, and a call that is reset before the gate has judged it `_RESET_COST` more, as its
# handler may start all the same. A KiB of messages brings one, each frame of an answer
# `_ANSWER_WORTH`: a reader may send as many WINDOW_UPDATE. `_FREE_PER_S` is for keep-alives.
MAX_COST = 4096.0
_RESET_COST = 31.0
_ANSWER_WORTH = 4.0
_FREE_PER_S = 10.0
_KIB = 1024


class Places(Protocol):
    """Places of a connection's calls: a call without one is not forwarded to gRPC yet.

    `take` returns False if there is none. `rest` counts a call that was reset before it was judged.
    """

    def take(self) -> bool: ...
    def give_back(self) -> None: ...
    def rest(self) -> None: ...


class Arrival:
    """The part of a call's request that has arrived. `host` is the caller's address."""

    __slots__ = ("_has_ended", "_places", "_prefix", "_waiter", "host", "num_bytes")

    def __init__(self, host: str) -> None:
        self.host = host
        # Bytes of the stream that have arrived, without headers.
        self.num_bytes = 0
        self._prefix = b""
        self._waiter: asyncio.Future[None] | None = None
        self._has_ended = False
        self._places: Places | None = None

    async def length(self) -> int | None:
        """Wait for the length of the message, in bytes; None if the stream ends without one."""
        while not self._is_known and not self._has_ended:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return int.from_bytes(self._prefix[1:], "big") if self._is_known else None

    @property
    def _is_known(self) -> bool:
        return len(self._prefix) == _PREFIX_BYTES

    def add(self, data: memoryview) -> None:
        """Add the next bytes of the message; the first five are its prefix."""
        if not self._is_known:
            self._prefix += data[: _PREFIX_BYTES - len(self._prefix)].tobytes()
            self._wake()

    def enter(self, places: Places) -> None:
        """Keep the place that the call has taken: the call is forwarded to gRPC now."""
        self._places = places

    def leave(self) -> bool:
        """Give the place back, if the call still has one. Returns whether it had one."""
        places, self._places = self._places, None
        if places is not None:
            places.give_back()
        return places is not None

    def end(self) -> None:
        """Note that no more bytes will arrive."""
        self._has_ended = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Cost:
    """Cost of one connection: the frames it has sent, less what they have brought."""

    def __init__(self) -> None:
        self._cost = 0.0
        self._at = time.monotonic()

    def add(self, cost: float) -> None:
        """Add a cost; a negative one pays for others, but never in advance."""
        self._cost = max(self._cost + cost, 0.0)

    def is_flood(self) -> bool:
        """Return whether the connection has cost more than is free, as of now."""
        now = time.monotonic()
        self.add((self._at - now) * _FREE_PER_S)
        self._at = now
        return self._cost > MAX_COST


class _Reader:
    """Reads frame heads from bytes that arrive in pieces.

    `num_ahead` bytes come before the first frame. Subclasses see each frame's head, the payload of
    DATA frames and each frame's end.
    """

    def __init__(self, num_ahead: int) -> None:
        self._head = b""
        self._left: int = num_ahead
        self._kind, self._flags, self._stream = -1, 0, 0

    @property
    def is_between_frames(self) -> bool:
        """Whether the last byte read was the last of its frame."""
        return not self._left and not self._head

    def _read_head(self, head: bytes) -> None:
        self._left = int.from_bytes(head[:3], "big")
        self._kind, self._flags = head[3], head[4]
        self._stream = int.from_bytes(head[5:], "big") & 0x7FFFFFFF


class Frames(_Reader):
    """The bytes that a caller sends on one connection.

    `header` is the name of our header, and the prefix of its value.
    """

    def __init__(self, host: str, header: tuple[str, str], places: Places) -> None:
        super().__init__(PREFACE_BYTES)
        self.cost = Cost()
        self._host = host
        self._name, self._mark = header
        self._places = places
        self._arrivals: dict[int, Arrival] = {}
        # State of the DATA frame being read.
        self._message_left: int = 0
        self._is_pad_next = False
        self._newest = 0
        # The newest call, until its headers are with gRPC. `_is_due`: all of them have arrived.
        self._named: int | None = None
        self._is_due = False
        # gRPC ignores calls beyond this one.
        self._last_taken = 2**31 - 1

    def take(self, stream: int) -> Arrival | None:
        """Return the arrival of a call whose handler has started; None if the call has ended."""
        return self._arrivals.get(stream)

    def forget(self, stream: int) -> None:
        """End a call: nothing more of it will arrive, and its place is free."""
        arrival = self._arrivals.pop(stream, None)
        if arrival is not None:
            arrival.end()
            arrival.leave()

    def answered(self, stream: int, *, is_ended: bool) -> None:
        """Note that gRPC has begun to answer a call, so the gate has nothing left to judge."""
        if is_ended:
            self.forget(stream)
        elif stream in self._arrivals:
            self._arrivals[stream].leave()

    def ignored(self, last: int) -> None:
        """Note gRPC's GOAWAY: it takes no call of a stream after `last`."""
        self._last_taken = last
        for stream in [one for one in self._arrivals if one > last]:
            self.forget(stream)

    def leave(self) -> None:
        """Give back the places of all calls."""
        for arrival in self._arrivals.values():
            arrival.leave()

    def end(self) -> None:
        """End all calls, as the connection has ended."""
        for arrival in self._arrivals.values():
            arrival.end()
            arrival.leave()

    def feed(self, data: bytes | memoryview, most: int) -> tuple[bytes | memoryview, int]:
        """Process up to `most` frames; returns bytes for gRPC, and how many of `data` were used.

        It ends early after a call that was reset before the gate judged it, and where a call has
        found no place; the next call of `feed` tries again.
        """
        out: list[bytes | memoryview] = []
        view = memoryview(data)
        # `start`: index of the first byte that is not in `out` yet.
        at = start = 0
        while True:
            if self._is_due:
                if not self._enter():
                    break
                out += view[start:at], self._named_frame()
                start = at
            if at == len(view) or not (most or self._left):
                break
            if self._left:
                piece = view[at : at + self._left]
                self._left -= len(piece)
                at += len(piece)
                if self._kind == _DATA:
                    self._payload(piece)
            else:
                piece = view[at : at + _HEAD_BYTES - len(self._head)]
                at += len(piece)
                head = self._head + piece
                if len(head) < _HEAD_BYTES:
                    out.append(view[start : at - len(piece)])
                    start, self._head = at, head
                    break
                most -= 1
                passed_on = self._begin(head)
                if self._head or passed_on != head:
                    out += view[start : at - len(piece)], passed_on
                    start, self._head = at, b""
            if not self._left and self._end():
                most = 0
        rest = view[start:at]
        return b"".join([*out, rest]) if out else rest, at

    def calm_down(self) -> bytes:
        """Return a GOAWAY frame that says why the connection is closed (RFC 9113, 6.8)."""
        reason = b"too many frames or resets that bring nothing"
        payload = self._newest.to_bytes(4, "big") + _ENHANCE_YOUR_CALM.to_bytes(4, "big") + reason
        return _frame(_GOAWAY, 0, 0, payload)

    def _begin(self, head: bytes) -> bytes:
        """Start a frame and return its head for gRPC.

        END_HEADERS is taken from it where our header is to follow.
        """
        self._read_head(head)
        kind = self._kind
        brought = self._left / _KIB if kind == _DATA else 0.0
        self.cost.add(1.0 - brought)
        self._message_left, self._is_pad_next = self._left, bool(self._flags & _PADDED)
        if kind == _HEADERS and self._stream > self._newest:
            self._newest = self._named = self._stream
            self._arrivals[self._stream] = Arrival(self._host)
            if len(self._arrivals) > _MAX_ARRIVALS:
                self.forget(next(iter(self._arrivals)))
        is_named = kind in (_HEADERS, _CONTINUATION) and self._named is not None
        if not is_named or not self._flags & _END_HEADERS:
            return head
        return head[:4] + bytes([head[4] & ~_END_HEADERS]) + head[5:]

    def _payload(self, piece: memoryview) -> None:
        arrival = self._arrivals.get(self._stream)
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

    def _end(self) -> bool:
        """End a frame. Returns whether it has reset a call that the gate has not judged."""
        kind, flags, self._kind = self._kind, self._flags, -1
        if kind in (_HEADERS, _CONTINUATION) and self._named is not None and flags & _END_HEADERS:
            self._is_due = True
        arrival = self._arrivals.get(self._stream)
        if arrival is None:
            return False
        if kind in (_DATA, _HEADERS) and flags & _END_STREAM:
            arrival.end()
        if kind != _RST_STREAM:
            return False
        is_early = arrival.leave()
        if is_early:
            self.cost.add(_RESET_COST)
            self._places.rest()
        self.forget(self._stream)
        return is_early

    def _enter(self) -> bool:
        """Return whether gRPC may have the call whose headers have arrived."""
        assert self._named is not None
        arrival = self._arrivals.get(self._named)
        if arrival is not None and self._named <= self._last_taken:
            if not self._places.take():
                return False
            arrival.enter(self._places)
        self._is_due = False
        return True

    def _named_frame(self) -> bytes:
        """Return the last frame of the call's headers: a literal, not indexed (RFC 7541, 6.2.2)."""
        stream, self._named = self._named, None
        assert stream is not None
        text, name = f"{self._mark}{stream}".encode(), self._name.encode()
        block = bytes([0, len(name)]) + name + bytes([len(text)]) + text
        return _frame(_CONTINUATION, _END_HEADERS, stream, block)


class Answers(_Reader):
    """The bytes that gRPC sends on one connection, which are passed on unchanged."""

    def __init__(self, frames: Frames) -> None:
        super().__init__(0)
        self._frames = frames
        self._last_taken = b""

    def feed(self, data: bytes) -> None:
        """Read the frames of `data`: ends of calls, answers that pay for the caller's frames."""
        at = 0
        while at < len(data):
            if self._left:
                num_bytes = min(self._left, len(data) - at)
                if self._kind == _GOAWAY:
                    self._last_taken += data[at : at + num_bytes]
                self._left -= num_bytes
                at += num_bytes
            else:
                piece = data[at : at + _HEAD_BYTES - len(self._head)]
                at += len(piece)
                self._head += piece
                if len(self._head) < _HEAD_BYTES:
                    return
                self._read_head(self._head)
                self._head = b""
            if not self._left:
                self._end()

    def _end(self) -> None:
        kind, is_ended = self._kind, bool(self._flags & _END_STREAM)
        if kind in (_DATA, _HEADERS):
            self._frames.cost.add(-_ANSWER_WORTH)
        if kind in (_HEADERS, _RST_STREAM):
            self._frames.answered(self._stream, is_ended=is_ended or kind == _RST_STREAM)
        elif kind == _GOAWAY:
            self._frames.ignored(int.from_bytes(self._last_taken[:4], "big") & 0x7FFFFFFF)
            self._last_taken = b""


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    size = len(payload).to_bytes(3, "big")
    return size + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload
