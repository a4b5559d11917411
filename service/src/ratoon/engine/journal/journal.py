"""The journal for the engine's event loop: the store's methods as coroutines.

They run on one thread, one at a time, in call order.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy import Engine
from sqlalchemy.exc import InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from ratoon.engine.journal.fenced import ALL_STEPS, FencedStore
from ratoon.engine.journal.records import JournalAwayError
from ratoon.engine.journal.store import SqlStore
from ratoon.engine.refusals import is_disk_full
from ratoon.errors import RatoonError
from ratoon.log import get_logger

_LOG = get_logger("store")
T = TypeVar("T")
P = ParamSpec("P")
_AWAY_S = 0.5
_DISK_FULL_S = 2.0
# How old the known state of the database may be, and how long a look at it may take.
_LOOK_S = 2.0
_HANGS_S = 10.0


class StoreCalls:
    """Owns the store's thread."""

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
        """Raises `JournalAwayError` by the last known state; never waits.

        `look` queries the database. It runs at most every `_LOOK_S` seconds, queued behind the
        thread's other calls, and its result serves later checks.
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


def _awaited(
    method: Callable[Concatenate[Any, P], T],
) -> Callable[Concatenate[Journal, P], Coroutine[Any, Any, T]]:
    """The store's method as a coroutine."""
    name = method.__name__

    async def call(self: Journal, *args: P.args, **kwargs: P.kwargs) -> T:
        store = self.fenced if hasattr(FencedStore, name) else self.store
        return await self.ask(name, partial(getattr(store, name), *args, **kwargs))

    return call


class Journal:
    """Durable knowledge of policies and operations; the store documents each method.

    Writes of controllers carry their fencing token and raise `FencedError` where a newer one is
    known. They are durable when they return, and idempotent. All methods raise `JournalAwayError`
    where the database does not answer.
    """

    def __init__(self, engine: Engine, kept_steps: int = ALL_STEPS) -> None:
        """`kept_steps`: as of `FencedStore`."""
        self.store, self.fenced = SqlStore(engine), FencedStore(engine, kept_steps)
        self._calls = StoreCalls()

    # Writes of a controller, fenced by its token.
    acquire = _awaited(FencedStore.acquire)
    accept_loss = _awaited(FencedStore.accept_loss)
    adopt = _awaited(FencedStore.adopt)
    set_policy = _awaited(FencedStore.set_policy)
    fail = _awaited(FencedStore.fail)
    end_policy = _awaited(FencedStore.end_policy)
    check_token = _awaited(FencedStore.check_token)
    set_published = _awaited(FencedStore.set_published)
    accept = _awaited(FencedStore.accept)
    end = _awaited(FencedStore.end)
    cover = _awaited(FencedStore.cover)
    release = _awaited(FencedStore.release)
    unname = _awaited(FencedStore.unname)
    set_expiry = _awaited(FencedStore.set_expiry)
    collect = _awaited(FencedStore.collect)
    rebase = _awaited(FencedStore.rebase)
    roll_back = _awaited(FencedStore.roll_back)

    # Policies and their lifecycle operations.
    insert_policy = _awaited(SqlStore.insert_policy)
    insert_first_state = _awaited(SqlStore.insert_first_state)
    mark_deleting = _awaited(SqlStore.mark_deleting)
    remove_policy = _awaited(SqlStore.remove_policy)
    end_lifecycle_operation = _awaited(SqlStore.end_lifecycle_operation)
    forget_ended_lifecycle_operations = _awaited(SqlStore.forget_ended_lifecycle_operations)

    # Reads, which need no token.
    policy = _awaited(SqlStore.policy)
    policies = _awaited(SqlStore.policies)
    history = _awaited(SqlStore.history)
    records_from = _awaited(SqlStore.records_from)
    bodies_in_use = _awaited(SqlStore.bodies_in_use)
    results_in_use = _awaited(SqlStore.results_in_use)
    numerics = _awaited(SqlStore.numerics)
    find_key = _awaited(SqlStore.find_key)
    find_operation = _awaited(SqlStore.find_operation)
    find_lifecycle_operation = _awaited(SqlStore.find_lifecycle_operation)
    orphaned_lifecycle_operations = _awaited(SqlStore.orphaned_lifecycle_operations)
    checkpoints = _awaited(SqlStore.checkpoints)
    list_operations = _awaited(SqlStore.list_operations)
    steps = _awaited(SqlStore.steps)
    last_reports = _awaited(SqlStore.last_reports)
    count_operations = _awaited(SqlStore.count_operations)

    def check(self) -> None:
        """Raises `JournalAwayError` by the last known state; never waits."""
        self._calls.check(self.store.look)

    async def ask(self, name: str, call: Callable[[], T]) -> T:
        """Run a store method. `name` is its name, for subclasses."""
        del name
        return await self._calls.once(call)


async def until_there(call: Callable[[], Awaitable[T]]) -> T:
    """Retry until the database answers. Raises what else the call raises."""
    while True:
        try:
            return await call()
        except JournalAwayError as err:
            _LOG.warning("waiting for the database", reason=str(err))
            await asyncio.sleep(_AWAY_S)


async def until_room(call: Callable[[], Awaitable[T]]) -> T:
    """Retry until the database answers and a disk has room: accepted work waits for space."""
    while True:
        try:
            return await until_there(call)
        except RatoonError as error:
            if not is_disk_full(error):
                raise
            _LOG.error("disk full", reason=error.message)
            await asyncio.sleep(_DISK_FULL_S)
