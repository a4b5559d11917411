"""The gateway's gRPC listener: connections, TLS, and the bytes between callers and gRPC.

gRPC itself listens on a Unix socket in a folder of this process; everything between passes
unchanged except for `frames`. Connections are limited in all and per host, silent ones are closed,
and gRPC sees a connection only once HTTP/2 has begun on it.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import ssl
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import cast

from ratoon.api.grpc.frames import PREFACE_BYTES, Arrival, Frames

MAX_CONNECTIONS = 2048
MAX_CONNECTIONS_OF_HOST = 1024
HANDSHAKE_S = 20.0
_HEADER = "ratoon-call"
# Unauthorized calls per host: beyond it the host's bytes are not read until the gate has judged
# some, or a flood of calls would queue ahead of other hosts'. Calls that gRPC itself refuses are
# never judged, so they stop counting after `_JUDGED_S`.
MAX_UNJUDGED = 32
_JUDGED_S = 2.0
# Bytes processed between two checks of that limit.
_PIECE_BYTES = 2048
# How long data for a peer that does not read is kept, before its connection is dropped.
_LINGER_S = 60.0


class _Host:
    """One host's connections: its unjudged calls, and the connections that wait for them."""

    def __init__(self) -> None:
        self.num_connections = 0
        self._unjudged: dict[Arrival, float] = {}
        self._waiting: deque[_Outside] = deque()
        self._timer: asyncio.TimerHandle | None = None

    def began(self, arrival: Arrival) -> None:
        self._unjudged[arrival] = asyncio.get_running_loop().time()

    def judged(self, arrival: Arrival) -> None:
        if self._unjudged.pop(arrival, None) is not None:
            self._go_on()

    def is_full(self, connection: _Outside) -> bool:
        """Whether the limit is reached; if so, `connection` is resumed later."""
        if len(self._unjudged) < MAX_UNJUDGED:
            return False
        self._waiting.append(connection)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_JUDGED_S, self._expire)
        return True

    def _expire(self) -> None:
        self._timer = None
        before = asyncio.get_running_loop().time() - _JUDGED_S
        self._unjudged = {one: at for one, at in self._unjudged.items() if at > before}
        self._go_on()

    def _go_on(self) -> None:
        """Resume connections in turn; one that finds the limit reached queues again."""
        for _ in range(len(self._waiting)):
            if len(self._unjudged) >= MAX_UNJUDGED:
                break
            self._waiting.popleft().advance()
        if self._waiting and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_JUDGED_S, self._expire)


class Front:
    """One listening address. `upstream`: gRPC's own socket."""

    def __init__(self, upstream: Path, context: ssl.SSLContext | None) -> None:
        self.upstream = upstream
        self._context = context
        # Callers do not know it, so they cannot forge our header.
        self._secret = secrets.token_hex(8)
        self._numbers = itertools.count()
        self._open: dict[str, _Outside] = {}
        self._hosts: dict[str, _Host] = {}
        self._server: asyncio.Server | None = None

    async def listen(self, host: str, port: int) -> int:
        """Listen; returns the port. Raises OSError where it is taken."""
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
        """Accept no more connections; open ones continue."""
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
                return Call(found, int(stream), arrival)
        return None

    def admit(self, connection: _Outside, name: str) -> bool:
        """Whether the limits allow another connection of the host; if so, register it."""
        host = self._hosts.get(name, _Host())
        if len(self._open) >= MAX_CONNECTIONS or host.num_connections >= MAX_CONNECTIONS_OF_HOST:
            return False
        connection.number = number = str(next(self._numbers))
        self._open[number] = connection
        self._hosts[name] = connection.host = host
        host.num_connections += 1
        connection.frames = Frames(name, (_HEADER, f"{self._secret}.{number}."), host.began)
        return True

    def dismiss(self, connection: _Outside, name: str) -> None:
        if self._open.pop(connection.number, None) is not None:
            connection.host.num_connections -= 1
            if not connection.host.num_connections:
                self._hosts.pop(name, None)


class Call:
    """A call whose handler has started."""

    def __init__(self, connection: _Outside, stream: int, arrival: Arrival) -> None:
        self.arrival = arrival
        self._connection = connection
        self._stream = stream

    def judged(self) -> None:
        """The gate has decided on the call."""
        self._connection.host.judged(self.arrival)

    def end(self) -> None:
        self.judged()
        self._connection.frames.forget(self._stream)


class _Pipe(asyncio.Protocol):
    """One end of a connection: forwards to the other, and stops reading while that is full."""

    transport: asyncio.Transport
    other: _Pipe | None = None
    _is_other_full = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports, where Ray installed it, are not of this class.
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        if self.other is not None:
            self.other.transport.write(data)

    def pause_writing(self) -> None:
        if self.other is not None:
            self.other._is_other_full = True
            self.other.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None:
            self.other._is_other_full = False
            self.other._read_on()

    def _read_on(self) -> None:
        if not self.transport.is_closing():
            self.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.other is not None:
            self.other.close()

    def close(self) -> None:
        """Close once all is written; a peer that does not read has `_LINGER_S`."""
        self.transport.close()
        loop = asyncio.get_running_loop()
        loop.call_later(_LINGER_S, self.transport.abort)


class _Outside(_Pipe):
    """The caller's end."""

    frames: Frames
    host: _Host
    number = ""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._name = ""
        self._unseen = bytearray()
        self._early = bytearray()
        self._is_held = False
        self._timer: asyncio.TimerHandle | None = None
        self._connecting: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        peer = transport.get_extra_info("peername")
        self._name = str(peer[0]) if peer else ""
        if not self._front.admit(self, self._name):
            self.transport.abort()
            return
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(HANDSHAKE_S, self.transport.abort)

    def data_received(self, data: bytes) -> None:
        self._unseen += data
        if not self._is_held:
            self.advance()

    def advance(self) -> None:
        """Forward what has arrived, until its host reaches the limit of unjudged calls."""
        self._is_held = False
        while self._unseen:
            if self.host.is_full(self):
                self._is_held = True
                self.transport.pause_reading()
                return
            self._pass_on(self.frames.feed(bytes(self._unseen[:_PIECE_BYTES])))
            del self._unseen[:_PIECE_BYTES]
        self._read_on()

    def _pass_on(self, data: bytes) -> None:
        if self.other is not None:
            super().data_received(data)
            return
        self._early += data
        if len(self._early) < PREFACE_BYTES or self._connecting is not None:
            return
        if self._timer is not None:
            self._timer.cancel()
        # Read no more until gRPC's end is connected.
        self.transport.pause_reading()
        self._connecting = asyncio.create_task(self._connect())

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self.number:
            self._front.dismiss(self, self._name)
            self._unseen.clear()
            self.frames.end()
        super().connection_lost(exc)

    def abort(self) -> None:
        self.transport.abort()

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        inside = _Pipe()
        # gRPC speaks first, possibly before its connection is visible here.
        inside.other = self
        try:
            path = str(self._front.upstream)
            await loop.create_unix_connection(lambda: inside, path)
        except OSError:
            self.transport.abort()
            return
        if self.transport.is_closing():
            inside.transport.abort()
            return
        self.other = inside
        inside.transport.write(bytes(self._early))
        self._early.clear()
        self._read_on()

    def _read_on(self) -> None:
        """Resume reading, unless it waits for the other end or the gate."""
        is_connecting = self._connecting is not None and self.other is None
        is_held = self._is_held or is_connecting or self._is_other_full
        if not is_held and not self.transport.is_closing():
            self.transport.resume_reading()
