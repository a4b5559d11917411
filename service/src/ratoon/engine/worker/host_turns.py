"""Whose call a worker process computes next, and to whose call its loss is laid.

A process computes one call at a time. Of those that wait the one goes first whose tenant has
computed for the shortest time; one that comes, or comes back, counts as having computed as long as
the one whose turn it is. So calls of a length alternate, and a tenant of short ones has more of
them while others compute long ones. A process that somebody waits for is never idle.

A tenant has one call at a time (`policy.turns`); calls that do not compute need no turn.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from ratoon.engine.worker.tasks import NeighbourLostError, WorkerLostError


@dataclass(slots=True, eq=False)
class _Waiting:
    policy_id: str
    may_go: asyncio.Future[None]


class HostTurns:
    """The turns of one process. Its methods run on the engine's event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._holder: str | None = None
        # Who waits, in the order of coming.
        self._waiting: list[_Waiting] = []
        # Seconds computed by tenant, and those of the one whose turn it is, or last was.
        self._used: dict[str, float] = {}
        self._now = 0.0
        self._is_lost = self._is_ended = False

    @asynccontextmanager
    async def taken(self, policy_id: str) -> AsyncGenerator[None]:
        """Inside, it is this tenant's turn. Raises `NeighbourLostError` if the process is lost."""
        # Whoever comes counts as having computed as long as `_now`: less need not be remembered.
        here = {self._holder, *(each.policy_id for each in self._waiting)}
        self._used = {k: used for k, used in self._used.items() if used > self._now or k in here}
        self._used[policy_id] = max(self._used.get(policy_id, 0.0), self._now)
        if self._holder is not None:
            await self._wait(policy_id)
        self._holder = policy_id
        self._now = max(self._now, self._used[policy_id])
        started = self._clock()
        try:
            if self._is_lost:
                raise NeighbourLostError("the process was lost before the call")
            yield
        finally:
            self._used[policy_id] += self._clock() - started
            self._pass_on()

    def lost(self, policy_id: str, reason: str) -> WorkerLostError:
        """Note that the process is lost; returns the error for a tenant's call that saw it.

        To blame is the call that was computed, or any where there was none.
        """
        self._is_lost = True
        is_anothers = self._holder not in (None, policy_id)
        kind = NeighbourLostError if self._is_ended or is_anothers else WorkerLostError
        return kind(reason)

    def end(self) -> None:
        """Note that the process is ended on purpose, whatever it computes: no call is to blame."""
        self._is_lost = self._is_ended = True

    async def _wait(self, policy_id: str) -> None:
        waiting = _Waiting(policy_id, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        try:
            await waiting.may_go
        except asyncio.CancelledError:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
            else:  # It was this one's turn already.
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        self._holder = None
        if self._waiting:
            following = min(self._waiting, key=lambda each: self._used[each.policy_id])
            self._waiting.remove(following)
            # Nobody may come in between.
            self._holder = following.policy_id
            following.may_go.set_result(None)
