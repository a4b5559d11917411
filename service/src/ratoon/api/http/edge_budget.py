"""Limits over all connections of an HTTP server: their number, bodies and unread answers."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from ipaddress import IPv6Address, ip_address, ip_network
from typing import Protocol

from ratoon.api.contract import body_bound, rpc_at
from ratoon.errors import RatoonError, exhausted

MIB = 2**20
# The most of a file that an answer holds, and what a reader has `stalled_s` for.
CHUNK_BYTES = 16 * MIB
_RETRY_S = 1.0
WITHOUT_BODY = frozenset({"GET", "HEAD", "DELETE", "OPTIONS", "TRACE", "CONNECT"})
_FILE = re.compile(r"/v1/policies/[^/]+/(weights/[^/]+/)?files/[^/]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeBounds:
    """Times in seconds. `max_held_bytes` None: four bodies of maximum size."""

    headers_s: float = 20.0
    idle_s: int = 90
    stalled_s: float = 60.0
    max_header_bytes: int = 16 * 1024
    max_headers: int = 100
    max_connections: int = 8192
    max_connections_of_host: int = 2048
    max_unsent_bytes: int = 128 * MIB
    max_body_bytes: int = 256 * MIB
    max_held_bytes: int | None = None

    @property
    def held_bytes(self) -> int:
        return 4 * self.max_body_bytes if self.max_held_bytes is None else self.max_held_bytes


class Held(Protocol):
    """A connection as the budget sees it."""

    transport: asyncio.Transport


@dataclass(slots=True, eq=False)
class _Host:
    num_connections: int = 0
    # Connections without a request under way, and those whose reader is behind; oldest first.
    waiting: dict[Held, None] = field(default_factory=dict[Held, None])
    stalled: dict[Held, None] = field(default_factory=dict[Held, None])


@dataclass(slots=True, eq=False)
class _Place:
    """One connection's share. Bytes are those of the request under way."""

    host: str
    fetch_bytes: int = 0
    body_bytes: int = 0


class EdgeBudget:
    """One per server, used on its event loop only."""

    def __init__(self, bounds: EdgeBounds) -> None:
        self.bounds = bounds
        self._hosts: dict[str, _Host] = {}
        self._places: dict[Held, _Place] = {}
        self._fetch_bytes = 0
        self._body_bytes = 0

    def enter(self, connection: Held, peer: str) -> bool:
        """Whether there is room for a connection, evicting an idle one if needed."""
        name = host_of(peer)
        host = self._hosts.setdefault(name, _Host())
        is_in = self._has_room(host)
        if is_in:
            host.num_connections += 1
            host.waiting[connection] = None
            self._places[connection] = _Place(name)
        self._forget_empty(name)
        return is_in

    def leave(self, connection: Held) -> None:
        """The connection has closed."""
        if connection not in self._places:
            return
        self.finish(connection)
        place = self._places.pop(connection)
        host = self._hosts[place.host]
        host.num_connections -= 1
        host.waiting.pop(connection, None)
        host.stalled.pop(connection, None)
        self._forget_empty(place.host)

    def begin(
        self, connection: Held, method: str, path: str, declared_bytes: int
    ) -> RatoonError | None:
        """Admit a request whose headers have arrived. Returns the refusal; None: it is admitted."""
        place = self._places[connection]
        self._hosts[place.host].waiting.pop(connection, None)
        fetch_bytes = CHUNK_BYTES if method == "GET" and _FILE.fullmatch(path) else 0
        body_bytes = min(declared_bytes, self.body_bound(method, path))
        unsent, held = self.bounds.max_unsent_bytes, self.bounds.held_bytes
        if fetch_bytes and self._unsent_bytes() + fetch_bytes > unsent:
            return _full("answers wait for their readers", "unsent_bytes", unsent)
        if body_bytes and self._body_bytes + body_bytes > held:
            return _full("bodies wait to be answered", "body_bytes", held)
        self._set(place, fetch_bytes, body_bytes)
        return None

    def hold(self, connection: Held, num_bytes: int) -> bool:
        """Whether so many bytes of its request's body may be held."""
        place = self._places[connection]
        more = max(num_bytes - place.body_bytes, 0)
        if self._body_bytes + more > self.bounds.held_bytes:
            return False
        self._set(place, place.fetch_bytes, place.body_bytes + more)
        return True

    def release_chunk(self, connection: Held) -> None:
        """Its answer is sent from a file, so it takes no memory."""
        place = self._places[connection]
        self._set(place, 0, place.body_bytes)

    def finish(self, connection: Held) -> None:
        """The answer is with the transport; the connection is idle until its next request."""
        place = self._places[connection]
        self._set(place, 0, 0)
        self._hosts[place.host].waiting[connection] = None
        is_room = True
        while is_room and self._unsent_bytes() > self.bounds.max_unsent_bytes:
            crowd = max(self._hosts.values(), key=lambda host: len(host.stalled))
            is_room = _end_first(crowd.stalled)

    def stall(self, connection: Held) -> None:
        """Its reader is behind."""
        self._hosts[self._places[connection].host].stalled[connection] = None

    def go_on(self, connection: Held) -> None:
        """Its reader has caught up."""
        self._hosts[self._places[connection].host].stalled.pop(connection, None)

    def body_bound(self, method: str, path: str) -> int:
        """Maximum body size; unknown paths count as calls without a batch."""
        if method in WITHOUT_BODY:
            return 0
        return body_bound(rpc_at(path), self.bounds.max_body_bytes)

    def _has_room(self, host: _Host) -> bool:
        crowd = None
        if host.num_connections >= self.bounds.max_connections_of_host:
            crowd = host
        elif len(self._places) >= self.bounds.max_connections:
            crowd = max(self._hosts.values(), key=lambda other: len(other.waiting))
        return crowd is None or _end_first(crowd.waiting)

    def _forget_empty(self, name: str) -> None:
        if not self._hosts[name].num_connections:
            del self._hosts[name]

    def _set(self, place: _Place, fetch_bytes: int, body_bytes: int) -> None:
        self._fetch_bytes += fetch_bytes - place.fetch_bytes
        self._body_bytes += body_bytes - place.body_bytes
        place.fetch_bytes, place.body_bytes = fetch_bytes, body_bytes

    def _unsent_bytes(self) -> int:
        """Bytes in write buffers, or reserved for them."""
        return self._fetch_bytes + sum(
            connection.transport.get_write_buffer_size() for connection in self._stalled()
        )

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
    """Evict the connection that has waited longest; False: there is none."""
    first = next(iter(connections), None)
    if first is None:
        return False
    # The transport reports it only in the next loop iteration, but its buffer is empty at once.
    del connections[first]
    first.transport.abort()
    return True


def _full(what: str, resource: str, limit: int) -> RatoonError:
    return exhausted(
        f"{limit} bytes of {what}",
        resource=resource,
        wanted=1,
        free=0,
        limit=limit,
        retry_after_s=_RETRY_S,
    )
