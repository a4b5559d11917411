"""One policy's operations as callers see them: now, on change, or once ended (long poll).

It changes nothing. Operations that are not in memory are read from the journal.
"""

from __future__ import annotations

import asyncio
import contextlib

from ratoon.engine.journal.records import OperationRecord, ended_progress
from ratoon.engine.policy.queue import LiveOperation
from ratoon.engine.policy.run import PolicyRun
from ratoon.engine.refusals import draining, operation_not_found, seq_gap
from ratoon.engine.types import Operation
from ratoon.engine.worker.tasks import WorkerLostError
from ratoon.engine.worker.worker import WorkerCore

# How often the progress of a running operation is refreshed.
_PROGRESS_S = 0.25
# How long a reader is held for a refresh.
_PROGRESS_WAIT_S = 0.05
# How long a waiting caller is held while an open operation is not in memory.
_AWAY_S = 0.5


class OperationViews:
    """Its methods may be called concurrently on one event loop."""

    def __init__(self, run: PolicyRun) -> None:
        self._run = run
        self._progress_until = 0.0
        self._asking: asyncio.Task[None] | None = None
        self._is_over = False

    def let_go(self) -> None:
        """Wake all waiters, who must ask the next process: no operation ends here any more."""
        self._is_over = True
        for live in self._run.ledger.open_operations():
            live.wake()

    async def get(self, operation_id: str, wait_s: float) -> Operation:
        """The operation once it has ended, or after `wait_s` seconds.

        Raises OPERATION_NOT_FOUND, SEQ_GAP where it was waited for behind a missing seq for
        `gap_wait_s`, in however many calls, and UNAVAILABLE where the wait would not end before the
        service does.
        """
        live = self._run.ledger.find(operation_id)
        if live is None:
            return await self._ended_or_later(operation_id, wait_s)
        clock, limits = asyncio.get_running_loop().time, self._run.limits
        begin = clock()
        deadline = begin + min(wait_s, limits.max_wait_s)
        while not live.is_final and clock() < deadline:
            if self._is_over:
                raise draining()
            missing = self._missing(live)
            if not missing:
                await live.wait_change(deadline - clock())
                continue
            gap_ends = live.waits_since(missing, clock()) + limits.gap_wait_s
            if gap_ends <= begin:
                # A caller that asks again is held as well: the seq may be arriving by now.
                gap_ends = min(begin + limits.gap_wait_s, deadline)
            await live.wait_change(min(gap_ends, deadline) - clock())
            if clock() >= gap_ends and self._missing(live) == missing:
                raise seq_gap(live.record.seq, missing)
        return await self.of(live)

    async def watch(self, seen: Operation, wait_s: float) -> Operation:
        """The operation once it differs from `seen`, or after `wait_s` seconds.

        Raises UNAVAILABLE where the watch would not end before the service does.
        """
        live = self._run.ledger.find(seen.operation_id)
        if live is None:
            return await self._ended_or_later(seen.operation_id, wait_s)
        clock = asyncio.get_running_loop().time
        deadline = clock() + min(wait_s, self._run.limits.max_wait_s)
        while True:
            view = await self.of(live)
            remaining = deadline - clock()
            if view != seen or remaining <= 0:
                return view
            if self._is_over:
                raise draining()
            await live.wait_change(min(remaining, _PROGRESS_S) if live.is_started else remaining)

    async def past(self, operation_id: str) -> OperationRecord:
        """A journaled operation that is no longer in memory. Raises OPERATION_NOT_FOUND."""
        record = await self._run.ports.journal.find_operation(operation_id)
        if record is None or record.policy_id != self._run.policy_id:
            raise operation_not_found(operation_id)
        if record.kind.is_lifecycle:
            raise operation_not_found(operation_id)  # `lifecycle` answers these.
        return record

    async def of(self, live: LiveOperation) -> Operation:
        """The current view of an operation in memory."""
        if live.is_started and not live.is_final:
            await self._refresh(live)
        return self.known(live)

    def known(self, live: LiveOperation) -> Operation:
        """The view of an operation in memory, with the progress that was last asked for."""
        progress = ended_progress(live.record.result) if live.is_final else live.progress
        return live.record.to_operation(progress=progress, blocked_by_seq=self._missing(live))

    async def _ended_or_later(self, operation_id: str, wait_s: float) -> Operation:
        """The operation from the journal; open operations reappear after recovery."""
        record = await self.past(operation_id)
        if not record.state.is_final:
            await asyncio.sleep(min(wait_s, _AWAY_S))
        return view_of(record)

    async def _refresh(self, live: LiveOperation) -> None:
        """Ask the worker for its progress, at most once per `_PROGRESS_S` for all readers.

        A busy or hung worker does not hold readers up: a late answer serves the next one.
        """
        now = asyncio.get_running_loop().time()
        is_asked = self._asking is not None and not self._asking.done()
        if is_asked or now < self._progress_until:
            return
        self._progress_until = now + _PROGRESS_S
        self._asking = asyncio.create_task(self._ask_progress(live))
        await asyncio.wait({self._asking}, timeout=_PROGRESS_WAIT_S)

    async def _ask_progress(self, live: LiveOperation) -> None:
        with contextlib.suppress(WorkerLostError):
            live.progress = await self._run.ports.worker.call(WorkerCore.progress)

    def _missing(self, live: LiveOperation) -> int:
        """The missing seq that blocks a queued operation; 0: none."""
        if live.is_final or live.record.seq == 0:
            return 0
        return self._run.sequencer.blocked_by(live.record.seq)


def view_of(record: OperationRecord) -> Operation:
    """View of an operation that is neither running nor queued."""
    progress = ended_progress(record.result)
    return record.to_operation(progress=progress, blocked_by_seq=0)
