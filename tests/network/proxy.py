"""A TCP proxy that fails on purpose.

In: the address of a service, faults. Out: a port that behaves like a bad network. Invariant: what
it forwards is forwarded unchanged and in order; a fault takes effect at exactly the byte it names.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Literal

Direction = Literal["up", "down"]
# reset: both sides get RST. close: both sides get FIN. silence: nothing more arrives, nothing ends.
# outage: every connection is reset and none taken, until `start`.
FaultKind = Literal["reset", "close", "silence", "outage"]
_READ_BYTES = 65_536
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Happens once, to the connection that carries byte `at_byte` of `direction` since `arm`."""

    kind: FaultKind
    direction: Direction
    at_byte: int


@dataclass(slots=True, eq=False)
class _Link:
    """One connection through the proxy: its two sides, and whether it has gone silent."""

    near: asyncio.StreamWriter
    far: asyncio.StreamWriter
    is_silent: bool = False


@dataclass(slots=True)
class Proxy:
    """States: serving, or out (`outage`), when connections are cut and new ones refused."""

    host: str
    far_port: int
    port: int = 0
    delay_s: float = 0.0
    # Between two bytes of what comes down.
    trickle_s: float = 0.0
    num_hits: int = 0
    _fault: Fault | None = None
    _hit: asyncio.Event = field(default_factory=asyncio.Event)
    _answered: asyncio.Event = field(default_factory=asyncio.Event)
    _seen: dict[Direction, int] = field(default_factory=lambda: {"up": 0, "down": 0})
    _links: set[_Link] = field(default_factory=set)
    _server: asyncio.Server | None = None

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    @property
    def num_bytes(self) -> dict[Direction, int]:
        """Bytes forwarded since `arm`."""
        return dict(self._seen)

    def arm(self, fault: Fault | None) -> None:
        """Count anew, and fail where `fault` says."""
        self._fault, self._seen = fault, {"up": 0, "down": 0}
        self._hit.clear()

    async def hit(self) -> None:
        """Returns once the armed fault has happened."""
        await self._hit.wait()

    async def first_answer(self) -> None:
        """Returns once an answer has come through."""
        await self._answered.wait()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, self.host, self.port)
        self.port = int(self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for link in tuple(self._links):
            _end(link, "reset")

    async def outage(self, seconds: float) -> None:
        """Nothing is there for so long."""
        await self.stop()
        await asyncio.sleep(seconds)
        await self.start()

    async def _serve(self, reader: asyncio.StreamReader, near: asyncio.StreamWriter) -> None:
        try:
            far_reader, far = await asyncio.open_connection(self.host, self.far_port)
        except OSError:
            near.close()
            return
        link = _Link(near=near, far=far)
        self._links.add(link)
        try:
            # asyncio reports the cancelled handlers of a loop that ends.
            with suppress(asyncio.CancelledError):
                async with asyncio.TaskGroup() as pumps:
                    pumps.create_task(self._pump(link, "up", reader, far))
                    pumps.create_task(self._pump(link, "down", far_reader, near))
        finally:
            self._links.discard(link)
            near.close()
            far.close()

    async def _pump(
        self,
        link: _Link,
        direction: Direction,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        with suppress(OSError):
            while data := await reader.read(_READ_BYTES):
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                fault = self._fault
                if fault is not None and fault.direction == direction and not link.is_silent:
                    left = fault.at_byte - self._seen[direction]
                    if len(data) > left:
                        self._fault, self.num_hits = None, self.num_hits + 1
                        self._hit.set()
                        writer.write(data[:left])
                        await writer.drain()
                        link.is_silent = fault.kind == "silence"
                        if fault.kind == "outage":
                            await self.stop()
                        _end(link, fault.kind)
                        if not link.is_silent:
                            return
                while self.trickle_s and direction == "down" and data:
                    writer.write(data[:1])
                    data = data[1:]
                    await asyncio.sleep(self.trickle_s)
                self._seen[direction] += len(data)
                if direction == "down":
                    self._answered.set()
                if not link.is_silent:
                    writer.write(data)
                    await writer.drain()
            if not link.is_silent:
                writer.write_eof()


def _end(link: _Link, kind: FaultKind) -> None:
    if kind == "silence":
        return
    for writer in (link.near, link.far):
        raw = writer.get_extra_info("socket")
        if kind != "close" and raw is not None and raw.fileno() >= 0:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            writer.transport.abort()
        else:
            writer.close()


@asynccontextmanager
async def proxied(address: str) -> AsyncIterator[Proxy]:
    """A proxy in front of `address` (host:port, or a URL of one)."""
    host, _, port = address.rpartition("//")[2].rpartition(":")
    proxy = Proxy(host=host, far_port=int(port))
    await proxy.start()
    try:
        yield proxy
    finally:
        await proxy.stop()
