"""The store from an event loop: on its one thread, and as often as it takes.

Enter calls of the store, leave their answers. Invariant: one call runs at a time, in the order in
which they came; whether the database answers is known without asking it.
"""

from __future__ import annotations

import asyncio
import math
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
# How old what is known of the database may be, and how long its answer may take.
_LOOK_S = 2.0
_HANGS_S = 10.0


class StoreCalls:
    """Owns the thread."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="store")
        self._is_away = False
        self._look: asyncio.Task[None] | None = None
        self._looked_at = -math.inf

    async def once(self, call: Callable[[], T]) -> T:
        """Run a call. Raises `JournalAwayError`."""
        try:
            answer = await asyncio.get_running_loop().run_in_executor(self._thread, call)
        except (OperationalError, InterfaceError, PoolTimeoutError) as err:
            self._is_away = True
            _LOG.warning("database does not answer", reason=str(err))
            raise JournalAwayError("the database does not answer") from err
        self._is_away = False
        return answer

    def check(self, look: Callable[[], object]) -> None:
        """Raises `JournalAwayError` by what was last met; waits for nothing.

        `look` asks the database for anything. It is called for the next who checks, at most every
        `_LOOK_S` seconds, behind what the thread has to do.
        """
        now = asyncio.get_running_loop().time()
        if self._look is None or (self._look.done() and now - self._looked_at >= _LOOK_S):
            self._looked_at = now
            self._look = asyncio.create_task(self._looked(look))
        if self._is_away or (not self._look.done() and now - self._looked_at >= _HANGS_S):
            raise JournalAwayError("the database does not answer")

    async def _looked(self, look: Callable[[], object]) -> None:
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, look)
        except Exception as err:  # noqa: BLE001 - whatever it is, it is no answer
            self._is_away = True
            _LOG.warning("database does not answer", reason=str(err))
        else:
            self._is_away = False

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
