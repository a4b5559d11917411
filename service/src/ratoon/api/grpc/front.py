"""What listens for the gateway: connections, TLS, and the bytes between callers and gRPC.

gRPC itself listens on a Unix socket in a folder of this process, and everything in between passes
as it is, but for `frames`. Connections are bounded in all and for one host, one that says nothing
is closed, and gRPC hears of one only when HTTP/2 has begun on it.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import ssl
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import cast

from ratoon.api.grpc.frames import PREFACE_BYTES, Arrival, Frames

MAX_CONNECTIONS = 2048
MAX_CONNECTIONS_OF_HOST = 1024
HANDSHAKE_S = 20.0
_HEADER = "ratoon-call"
# What is written to a peer that does not read is kept so long, then dropped with its connection.
_LINGER_S = 60.0


class Front:
    """One listening address. `upstream`: gRPC's own socket."""

    def __init__(self, upstream: Path, context: ssl.SSLContext | None) -> None:
        self.upstream = upstream
        self._context = context
        # Callers do not know it, so no header of theirs is taken for ours.
        self._secret = secrets.token_hex(8)
        self._numbers = itertools.count()
        self._open: dict[str, _Outside] = {}
        self._of_host: Counter[str] = Counter()
        self._server: asyncio.Server | None = None

    async def listen(self, host: str, port: int) -> int:
        """The port. Raises OSError where it is taken."""
        self._server = await asyncio.get_running_loop().create_server(
            lambda: _Outside(self),
            host,
            port,
            ssl=self._context,
            ssl_handshake_timeout=None if self._context is None else HANDSHAKE_S,
            reuse_port=False,
        )
        return int(self._server.sockets[0].getsockname()[1])

    def close(self) -> None:
        """Take no more connections; those that are open go on."""
        if self._server is not None:
            self._server.close()

    def abort(self) -> None:
        for connection in tuple(self._open.values()):
            connection.abort()

    def named(self, metadata: Iterable[tuple[str, str | bytes]]) -> Call | None:
        """The call that our header among `metadata` names."""
        for name, value in metadata:
            text = str(value)
            if name == _HEADER and text.startswith(self._secret):
                connection, _, stream = text[len(self._secret) + 1 :].partition(".")
                found = self._open.get(connection)
                arrival = None if found is None else found.frames.take(int(stream))
                if found is None or arrival is None:
                    return None
                return Call(found.frames, int(stream), arrival)
        return None

    def admit(self, connection: _Outside, host: str) -> Frames | None:
        """None: there is no place for it."""
        if len(self._open) >= MAX_CONNECTIONS or self._of_host[host] >= MAX_CONNECTIONS_OF_HOST:
            return None
        number = str(next(self._numbers))
        self._open[number] = connection
        self._of_host[host] += 1
        connection.number = number
        return Frames(host, (_HEADER, f"{self._secret}.{number}."))

    def dismiss(self, number: str, host: str) -> None:
        if self._open.pop(number, None) is not None:
            self._of_host[host] -= 1
            self._of_host += Counter()  # Hosts without any are forgotten.


class Call:
    """A call that has a handler."""

    def __init__(self, frames: Frames, stream: int, arrival: Arrival) -> None:
        self.arrival = arrival
        self._frames = frames
        self._stream = stream

    def end(self) -> None:
        self._frames.forget(self._stream)


class _Pipe(asyncio.Protocol):
    """One end; what comes is written to the other, and not read while that one is full."""

    transport: asyncio.Transport
    other: _Pipe | None = None
    _is_full = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Of uvloop, where Ray has put it in, they are not of this class.
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if self.other is not None:
            self.other.transport.write(data)

    def pause_writing(self) -> None:
        if self.other is not None:
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None:
            self.other.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.other is not None:
            self.other.close()

    def close(self) -> None:
        """After what is written; a peer that does not read it has `_LINGER_S`."""
        self.transport.close()
        loop = asyncio.get_running_loop()
        loop.call_later(_LINGER_S, self.transport.abort)


class _Outside(_Pipe):
    """The caller's end."""

    frames: Frames
    number = ""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._host = ""
        self._early = bytearray()
        self._timer: asyncio.TimerHandle | None = None
        self._connecting: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        peer = transport.get_extra_info("peername")
        self._host = str(peer[0]) if peer else ""
        frames = self._front.admit(self, self._host)
        if frames is None:
            self.transport.abort()
            return
        self.frames = frames
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(HANDSHAKE_S, self.transport.abort)

    def data_received(self, data: bytes) -> None:
        data = self.frames.feed(data)
        if self.other is not None:
            super().data_received(data)
            return
        self._early += data
        if len(self._early) < PREFACE_BYTES or self._connecting is not None:
            return
        if self._timer is not None:
            self._timer.cancel()
        # Nothing more comes until there is where to put it.
        self.transport.pause_reading()
        self._connecting = asyncio.create_task(self._connect())

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self.number:
            self._front.dismiss(self.number, self._host)
            self.frames.end()
        super().connection_lost(exc)

    def abort(self) -> None:
        self.transport.abort()

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        inside = _Pipe()
        try:
            path = str(self._front.upstream)
            await loop.create_unix_connection(lambda: inside, path)
        except OSError:
            self.transport.abort()
            return
        if self.transport.is_closing():
            inside.transport.abort()
            return
        self.other, inside.other = inside, self
        inside.transport.write(bytes(self._early))
        self._early.clear()
        self.transport.resume_reading()
