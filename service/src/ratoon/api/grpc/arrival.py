"""What is known of a gRPC call before the gate has judged it: its length and place in line."""

from __future__ import annotations

import asyncio
from typing import Protocol

_PREFIX_BYTES = 5


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
