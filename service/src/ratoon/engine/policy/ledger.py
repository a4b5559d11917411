"""The operations that a controller has in memory: all open ones and the newest ended.

Any other operation is in the journal, or was a Forward without a key that ended long ago.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from ratoon.engine.journal.records import NO_PROGRESS, JournalState, OperationRecord
from ratoon.engine.types import FailedResult, OperationResult
from ratoon.errors import RatoonError
from ratoon_proto.types import Progress

# Ended operations kept in memory, so that most waits end without a journal read.
_MAX_ENDED = 128


@dataclass(slots=True, kw_only=True)
class Awaited:
    """What callers wait for a change of."""

    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def wake(self) -> None:
        """Wake all waiters."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_change(self, timeout_s: float | None) -> None:
        """Wait for a change, at most until the timeout; None: for ever."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()


@dataclass(slots=True, kw_only=True)
class LiveOperation(Awaited):
    """One operation in memory."""

    record: OperationRecord
    progress: Progress = NO_PROGRESS
    # Its turn has come: it can only be asked to stop.
    is_started: bool = False
    cancel_requested: bool = False
    # A missing seq that it is waited for behind, and since when (the loop's time).
    _gap: tuple[int, float] = (0, 0.0)

    @property
    def operation_id(self) -> str:
        return self.record.operation_id

    @property
    def is_final(self) -> bool:
        return self.record.state.is_final

    def waits_since(self, missing_seq: int, now: float) -> float:
        """When it was first waited for behind this seq; `now`, where it was not."""
        if self._gap[0] != missing_seq:
            self._gap = (missing_seq, now)
        return self._gap[1]

    def set_record(self, record: OperationRecord) -> None:
        self.record = record
        self.wake()

    def start(self, started_at: float | None) -> None:
        record = replace(self.record, state=JournalState.APPLYING, started_at=started_at)
        self.set_record(record)

    def end(self, state: JournalState, result: OperationResult, now: float) -> None:
        self.set_record(replace(self.record, state=state, result=result, finished_at=now))

    def fail(self, error: RatoonError, now: float) -> None:
        self.end(JournalState.FAILED, FailedResult(error=error.to_dict()), now)


class Ledger:
    """Operations by id; open ones are never dropped. `on_settled` is called for each that ends."""

    def __init__(self, *, on_settled: Callable[[str], None]) -> None:
        self._on_settled = on_settled
        self._open: dict[str, LiveOperation] = {}
        self._ended: OrderedDict[str, LiveOperation] = OrderedDict()

    @property
    def num_open(self) -> int:
        return len(self._open)

    def open_operations(self) -> Iterator[LiveOperation]:
        """Open operations in order of arrival; a copy, so that they may end meanwhile."""
        return iter(tuple(self._open.values()))

    def find(self, operation_id: str) -> LiveOperation | None:
        return self._open.get(operation_id) or self._ended.get(operation_id)

    def add(self, record: OperationRecord) -> LiveOperation:
        live = LiveOperation(record=record)
        self._open[record.operation_id] = live
        return live

    def settle(self, live: LiveOperation) -> None:
        """Move an operation to the ended ones."""
        assert live.is_final
        self._open.pop(live.operation_id, None)
        self._on_settled(live.operation_id)
        self._ended[live.operation_id] = live
        while len(self._ended) > _MAX_ENDED:
            self._ended.popitem(last=False)
