"""Bounds what the callers of one server may occupy: connections, and bytes in memory.

Both wires count by this. A budget knows neither routes nor RPCs: whoever asks it says how many
bytes a request is about.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from ipaddress import IPv6Address, ip_address, ip_network
from typing import Protocol

from ratoon.errors import RatoonError, exhausted

MIB = 2**20
# Largest part of a file that an answer holds, and that a reader has `stalled_s` for.
CHUNK_BYTES = 16 * MIB
# How long a call may wait for room, and when to retry if there was none.
PATIENCE_S = 10.0
_RETRY_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeBounds:
    """Bounds of one server. Times in seconds.

    `headers_s` bounds the time to HTTP/1's headers, or to TLS and the preface of HTTP/2;
    `stalled_s` the time that a reader may leave bytes unread. `max_unsent_bytes` bounds answers
    that wait for their readers, `max_held_bytes` bodies of requests that are not answered yet
    (None: four of the largest).
    """

    headers_s: float = 20.0
    idle_s: int = 90
    stalled_s: float = 60.0
    max_header_bytes: int = 16 * 1024
    max_headers: int = 100
    max_connections: int = 8192
    max_connections_of_host: int = 2048
    max_unsent_bytes: int = 128 * MIB
    max_body_bytes: int = 64 * MIB
    max_held_bytes: int | None = None

    @property
    def held_bytes(self) -> int:
        return 4 * self.max_body_bytes if self.max_held_bytes is None else self.max_held_bytes


class Held(Protocol):
    """A connection as the budget sees it."""

    transport: asyncio.Transport


class ByteBudget:
    """Bytes in memory, counted by caller: at most `most` in all, and `most_of_one` of each."""

    def __init__(self, most: int, *, resource: str, most_of_one: int) -> None:
        self._most = most
        self._most_of_one = most_of_one
        self._resource = resource
        self._taken: Counter[str] = Counter()
        self._freed = asyncio.Event()

    @property
    def total(self) -> int:
        return self._taken.total()

    def refusal(self, caller: str, num_bytes: int, *, beside: int = 0) -> RatoonError | None:
        """Why a caller may not take so many more bytes now; None: it may.

        `beside`: bytes that are in memory too, but not counted here.
        """
        fits_all = self.total + beside + num_bytes <= self._most
        if fits_all and self._taken[caller] + num_bytes <= self._most_of_one:
            return None
        return exhausted(
            f"{self.total + beside} bytes of calls are in memory",
            resource=self._resource,
            wanted=num_bytes,
            free=0,
            limit=self._most,
            retry_after_s=_RETRY_S,
        )

    def change(self, caller: str, num_bytes: int) -> None:
        """Count so many more bytes; a negative number gives bytes back."""
        self._taken[caller] += num_bytes
        if not self._taken[caller]:
            del self._taken[caller]
        if num_bytes < 0:
            self._freed.set()
            self._freed = asyncio.Event()

    @asynccontextmanager
    async def hold(self, caller: str, num_bytes: int) -> AsyncGenerator[None, None]:
        """Hold the bytes for the block, once there is room for them.

        A request larger than its caller's share is admitted if nothing else is held. Raises
        RESOURCE_EXHAUSTED after `PATIENCE_S`.
        """
        refusal = self.refusal(caller, num_bytes)
        try:
            # `asyncio.wait_for` of Python 3.11 loses a cancel that comes with the result.
            async with asyncio.timeout(PATIENCE_S):
                while refusal is not None and self.total:
                    await self._freed.wait()
                    refusal = self.refusal(caller, num_bytes)
        except TimeoutError as err:
            assert refusal is not None
            raise refusal from err
        self.change(caller, num_bytes)
        try:
            yield
        finally:
            self.change(caller, -num_bytes)


@dataclass(slots=True, eq=False)
class _Host:
    """A host's connections, and those of them that may be closed for another; oldest first."""

    num_connections: int = 0
    # Connections without a request under way, and those whose reader is behind.
    idle: dict[Held, None] = field(default_factory=dict[Held, None])
    stalled: dict[Held, None] = field(default_factory=dict[Held, None])


@dataclass(slots=True, eq=False)
class _Place:
    """One connection's share. Bytes are those of the request under way."""

    host: str
    unsent_bytes: int = 0
    body_bytes: int = 0


class EdgeBudget:
    """Connections and bytes of one server; used on its event loop only.

    `most_of_one`: the part of a byte budget that one caller may hold.
    """

    def __init__(self, bounds: EdgeBounds, *, most_of_one: float = 1.0) -> None:
        self.bounds = bounds
        held, unsent = bounds.held_bytes, bounds.max_unsent_bytes
        self.bodies = ByteBudget(held, resource="body_bytes", most_of_one=int(held * most_of_one))
        self.unsent = ByteBudget(
            unsent, resource="unsent_bytes", most_of_one=int(unsent * most_of_one)
        )
        self._hosts: dict[str, _Host] = {}
        self._places: dict[Held, _Place] = {}

    def enter(self, connection: Held, peer: str) -> bool:
        """Admit a connection if there is room; an idle one is closed for it if needed."""
        name = host_of(peer)
        host = self._hosts.setdefault(name, _Host())
        is_in = self._has_room(host)
        if is_in:
            host.num_connections += 1
            self._places[connection] = _Place(name)
        self._forget_empty(name)
        return is_in

    def leave(self, connection: Held) -> None:
        """The connection has closed; one that was not admitted is ignored."""
        if connection not in self._places:
            return
        self.finish(connection)
        place = self._places.pop(connection)
        host = self._hosts[place.host]
        host.num_connections -= 1
        host.idle.pop(connection, None)
        host.stalled.pop(connection, None)
        self._forget_empty(place.host)

    def begin(self, connection: Held, *, unsent_bytes: int, body_bytes: int) -> RatoonError | None:
        """Admit a request that will hold so many bytes, or return its refusal."""
        place = self._places[connection]
        self._hosts[place.host].idle.pop(connection, None)
        refusal = None
        if unsent_bytes:
            refusal = self.unsent.refusal(place.host, unsent_bytes, beside=self._buffered_bytes())
        if refusal is None and body_bytes:
            refusal = self.bodies.refusal(place.host, body_bytes)
        if refusal is None:
            self._set(place, unsent_bytes, body_bytes)
        return refusal

    def hold(self, connection: Held, num_bytes: int) -> bool:
        """Hold so many bytes of its request's body; returns False if there is no room."""
        place = self._places[connection]
        more = max(num_bytes - place.body_bytes, 0)
        if more and self.bodies.refusal(place.host, more) is not None:
            return False
        self._set(place, place.unsent_bytes, place.body_bytes + more)
        return True

    def release_unsent(self, connection: Held) -> None:
        """Its answer is sent from a file, so it takes no memory."""
        place = self._places[connection]
        self._set(place, 0, place.body_bytes)

    def finish(self, connection: Held) -> None:
        """The answer is with the transport.

        Readers that are behind are let go, of the host with most of them, while too many bytes wait
        for them.
        """
        self._set(self._places[connection], 0, 0)
        is_room = True
        while is_room and self.unsent.total + self._buffered_bytes() > self.bounds.max_unsent_bytes:
            crowd = max(self._hosts.values(), key=lambda host: len(host.stalled))
            is_room = _end_first(crowd.stalled)

    def idle(self, connection: Held) -> None:
        """The connection waits for a request, and may be closed if there is no room for another."""
        self._hosts[self._places[connection].host].idle[connection] = None

    def stall(self, connection: Held) -> None:
        """Its reader is behind."""
        self._hosts[self._places[connection].host].stalled[connection] = None

    def go_on(self, connection: Held) -> None:
        """Its reader has caught up."""
        self._hosts[self._places[connection].host].stalled.pop(connection, None)

    def _has_room(self, host: _Host) -> bool:
        crowd = None
        if host.num_connections >= self.bounds.max_connections_of_host:
            crowd = host
        elif len(self._places) >= self.bounds.max_connections:
            crowd = max(self._hosts.values(), key=lambda other: len(other.idle))
        return crowd is None or _end_first(crowd.idle)

    def _forget_empty(self, name: str) -> None:
        if not self._hosts[name].num_connections:
            del self._hosts[name]

    def _set(self, place: _Place, unsent_bytes: int, body_bytes: int) -> None:
        self.unsent.change(place.host, unsent_bytes - place.unsent_bytes)
        self.bodies.change(place.host, body_bytes - place.body_bytes)
        place.unsent_bytes, place.body_bytes = unsent_bytes, body_bytes

    def _buffered_bytes(self) -> int:
        """Bytes in write buffers of connections whose readers are behind."""
        return sum(one.transport.get_write_buffer_size() for one in self._stalled())

    def _stalled(self) -> Iterator[Held]:
        for host in self._hosts.values():
            yield from host.stalled


def host_of(peer: str) -> str:
    """The host that connections are counted by; an IPv6 /64 network is one host."""
    try:
        address = ip_address(peer)
    except ValueError:
        return peer
    if not isinstance(address, IPv6Address):
        return peer
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ip_network((int(address), 64), strict=False))


def _end_first(connections: dict[Held, None]) -> bool:
    """Close the connection that has waited longest; False: there is none."""
    first = next(iter(connections), None)
    if first is None:
        return False
    # The transport reports it only in the next loop iteration, but its buffer is empty at once.
    del connections[first]
    first.transport.abort()
    return True
