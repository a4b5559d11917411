"""TCP proxy between callers and gRPC: connections, TLS, and the order in which bytes pass.

gRPC itself listens on a Unix socket in a folder of this process. Bytes pass unchanged except for
`frames`, and in the order of `turns`. The budget bounds the connections; silent ones and floods are
closed, and gRPC sees a connection only once HTTP/2 has begun on it.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import socket
import ssl
from collections.abc import Iterable
from pathlib import Path
from typing import cast

from ratoon.edge.budget import EdgeBudget, host_of
from ratoon.edge.h2_frames import PREFACE_BYTES, Answers, Arrival, Frames
from ratoon.edge.turns import FRAMES_PER_TURN, Share, Turns
from ratoon.log import get_logger

_HEADER = "ratoon-call"
# Bytes that wait for their turn, beyond which no more are read.
_MAX_UNSEEN_BYTES = 64 * 1024
# Time that a flood's connection stays open, unread; and the time between two log lines about them.
_CALM_S = 1.0
_LOG_S = 60.0
_TCP_ESTABLISHED = 1

_log = get_logger("grpc")


class GrpcProxy:
    """Proxy for one listening address. `upstream` is the path of gRPC's own socket."""

    def __init__(self, upstream: Path, context: ssl.SSLContext | None, budget: EdgeBudget) -> None:
        self.upstream = upstream
        self.bounds = budget.bounds
        self._context = context
        self._budget = budget
        # Callers do not know it, so they cannot forge our header.
        self._secret = secrets.token_hex(8)
        self._numbers = itertools.count()
        self._open: dict[str, _ClientSide] = {}
        self._turns = Turns()
        self._num_floods, self._logs_from = 0, 0.0
        self._server: asyncio.Server | None = None

    async def listen(self, host: str, port: int) -> int:
        """Listen on an address and return the port. Raises OSError where it is taken."""
        self._server = await asyncio.get_running_loop().create_server(
            lambda: _ClientSide(self),
            host,
            port,
            ssl=self._context,
            ssl_handshake_timeout=None if self._context is None else self.bounds.headers_s,
            reuse_port=False,
        )
        return int(self._server.sockets[0].getsockname()[1])

    def close(self) -> None:
        """Accept no more connections; open ones continue."""
        if self._server is not None:
            self._server.close()

    def abort(self) -> None:
        """Drop all connections."""
        for connection in tuple(self._open.values()):
            connection.abort()

    def named(self, metadata: Iterable[tuple[str, str | bytes]]) -> Call | None:
        """Return the call that our header among `metadata` names; None if it has ended."""
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

    def admit(self, connection: _ClientSide, peer: str) -> bool:
        """Register a connection of the peer; returns False if the budget has no room for it."""
        if not self._budget.enter(connection, peer):
            return False
        connection.number = number = str(next(self._numbers))
        self._open[number] = connection
        host = self._turns.host(host_of(peer))
        connection.share = share = Share(host, self._turns, connection.advance)
        connection.frames = Frames(peer, (_HEADER, f"{self._secret}.{number}."), share)
        connection.answers = Answers(connection.frames)
        return True

    def dismiss(self, connection: _ClientSide) -> None:
        """Forget a connection that has ended."""
        self._open.pop(connection.number, None)
        self._budget.leave(connection)

    def report_flood(self, name: str) -> None:
        """Log that a host's connection was closed as a flood; at most one line a minute."""
        self._num_floods += 1
        now = asyncio.get_running_loop().time()
        if now >= self._logs_from:
            _log.warning("connections closed as floods", host=name, num=self._num_floods)
            self._num_floods, self._logs_from = 0, now + _LOG_S


class Call:
    """A call whose handler has started."""

    def __init__(self, connection: _ClientSide, stream: int, arrival: Arrival) -> None:
        self.arrival = arrival
        self._connection = connection
        self._stream = stream

    def judged(self) -> None:
        """Give the call's place to another, as the gate has decided on it."""
        self.arrival.leave()

    def end(self) -> None:
        """End the call: its handler has returned."""
        self.judged()
        self._connection.frames.forget(self._stream)


class _Splice(asyncio.Protocol):
    """One end of a proxied connection. It stops reading while the other end is full."""

    transport: asyncio.Transport
    # How long data for a peer that does not read is kept, before its connection is dropped.
    linger_s: float
    other: _Splice | None = None
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
            self.other.read_on()

    def read_on(self) -> None:
        """Resume reading, unless the end is closing."""
        if not self.transport.is_closing():
            self.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.other is not None:
            self.other.close()

    def close(self) -> None:
        """Close once all is written; a peer that does not read has `linger_s`."""
        self.transport.close()
        asyncio.get_running_loop().call_later(self.linger_s, self.transport.abort)


class _ServerSide(_Splice):
    """The end of a proxied connection that faces gRPC."""

    def __init__(self, client: _ClientSide) -> None:
        # gRPC speaks first, possibly before its connection is visible to the other end.
        self.other = self._client = client
        self.linger_s = client.linger_s

    def data_received(self, data: bytes) -> None:
        self._client.answers.feed(data)
        super().data_received(data)

    def pause_writing(self) -> None:
        super().pause_writing()
        # gRPC does not read, so nobody knows when these calls will be judged.
        self._client.frames.leave()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._client.share.ask()


class _ClientSide(_Splice):
    """The end of a proxied connection that faces the caller."""

    frames: Frames
    answers: Answers
    share: Share
    number = ""

    def __init__(self, proxy: GrpcProxy) -> None:
        self._proxy = proxy
        self.linger_s = proxy.bounds.stalled_s
        self._name = ""
        # Bytes that have arrived and are not forwarded yet.
        self._unseen = memoryview(b"")
        self._timer: asyncio.TimerHandle | None = None
        self._connecting: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        peer = transport.get_extra_info("peername")
        self._name = str(peer[0]) if peer else ""
        if not self._proxy.admit(self, self._name):
            self.abort()
            return
        self._timer = asyncio.get_running_loop().call_later(
            self._proxy.bounds.headers_s, self.abort
        )

    def data_received(self, data: bytes) -> None:
        # Most bytes are forwarded as they came, without a copy.
        self._unseen = memoryview(b"".join((self._unseen, data)) if self._unseen else data)
        if len(self._unseen) > _MAX_UNSEEN_BYTES:
            self.transport.pause_reading()
        if self.other is not None:
            self.share.ask()
        elif len(self._unseen) >= PREFACE_BYTES and self._connecting is None:
            if self._timer is not None:
                self._timer.cancel()
            self._connecting = asyncio.create_task(self._connect())

    def advance(self) -> None:
        """Forward as many of the bytes that have arrived as one turn allows."""
        if self.other is None or self._is_other_full or self.transport.is_closing():
            self.share.decline()
        elif self._has_hung_up():
            self.abort()
        else:
            data, num_bytes = self.frames.feed(self._unseen, FRAMES_PER_TURN)
            self._unseen = self._unseen[num_bytes:]
            self.other.transport.write(data)
            if self.frames.cost.is_flood():
                self._calm_down(self.other)
                return
            if self._unseen:
                self.share.ask()
            self.read_on()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self.number:
            self._proxy.dismiss(self)
            self._end()
        super().connection_lost(exc)

    def abort(self) -> None:
        """Drop the connection."""
        self.transport.abort()

    def read_on(self) -> None:
        """Resume reading, unless too many bytes wait for their turn."""
        if len(self._unseen) <= _MAX_UNSEEN_BYTES and not self._is_other_full:
            super().read_on()

    def _has_hung_up(self) -> bool:
        """Return whether the caller has closed a connection that still has a backlog.

        The end of its bytes lies behind the backlog, so it has not been read yet.
        """
        if len(self._unseen) <= _MAX_UNSEEN_BYTES:
            return False
        caller = self.transport.get_extra_info("socket")
        state = caller.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
        return state[0] != _TCP_ESTABLISHED

    def _calm_down(self, server_side: _Splice) -> None:
        """End a flood: gRPC drops its calls, and the caller has a moment to read why."""
        self.other = server_side.other = None
        server_side.transport.abort()
        self._end()
        self._proxy.report_flood(self._name)
        if self.answers.is_between_frames:
            self.transport.write(self.frames.calm_down())
        # To close with unread bytes would reset the connection, and lose what was written.
        self.transport.pause_reading()
        asyncio.get_running_loop().call_later(_CALM_S, self.abort)

    def _end(self) -> None:
        self._unseen = memoryview(b"")
        self.frames.end()
        self.share.end()

    async def _connect(self) -> None:
        server_side, path = _ServerSide(self), str(self._proxy.upstream)
        try:
            await asyncio.get_running_loop().create_unix_connection(lambda: server_side, path)
        except OSError:
            self.abort()
            return
        if self.transport.is_closing():
            server_side.transport.abort()
            return
        self.other = server_side
        self.share.ask()
