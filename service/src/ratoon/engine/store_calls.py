"""The store from an event loop: on its one thread, and as often as it takes.

Enter calls of the store, leave their answers. Invariant: one call runs at a time, in the order in
which they came.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from sqlalchemy.exc import InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from ratoon.engine.journal import JournalAwayError
from ratoon.engine.room import is_disk_full
from ratoon.errors import RatoonError
from ratoon.log import get_logger

_LOG = get_logger("store")
T = TypeVar("T")
_AWAY_S = 0.5
_DISK_FULL_S = 2.0


class StoreCalls:
    """Owns the thread."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store")

    async def once(self, call: Callable[[], T]) -> T:
        """Run a call. Raises `JournalAwayError`."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, call)
        except (OperationalError, InterfaceError, PoolTimeoutError) as err:
            _LOG.warning("database does not answer", reason=str(err))
            raise JournalAwayError("the database does not answer") from err

    async def insist(self, call: Callable[[], T]) -> T:
        """The same, for what nobody would ask for again: until it answers, and has room."""
        return await until_room(lambda: self.once(call))


async def until_there(call: Callable[[], Awaitable[T]]) -> T:
    """Call until the database answers. Raises what else the call raises."""
    while True:
        try:
            return await call()
        except JournalAwayError as err:
            _LOG.warning("waiting for the database", reason=str(err))
            await asyncio.sleep(_AWAY_S)


async def until_room(call: Callable[[], Awaitable[T]]) -> T:
    """The same, and until no disk is full: what was accepted waits for room."""
    while True:
        try:
            return await until_there(call)
        except RatoonError as error:
            if not is_disk_full(error):
                raise
            _LOG.error("disk full", reason=error.message)
            await asyncio.sleep(_DISK_FULL_S)
