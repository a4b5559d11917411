"""The queue of a policy: which seq's turn it is, its operations, and the open window.

Turns come in seq order, whatever the order of arrival. The turn grows by one at a time, and only
past accepted seqs, so the order of execution depends on the seqs alone. A seq is unknown (a gap),
then waiting or consumed (ended ahead of its turn), then past.

The ledger has all open operations and the newest ended. Any other operation is in the journal, or
was a Forward without a key that ended long ago.

The window has the ForwardBackwards that were applied or that failed since the last step; a
cancelled one leaves no trace. The record of an applied one is kept, because the worker may have to
compute its gradients again. Sequencer and window are pure: no clock, no I/O.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from ratoon.engine.commands import RequestKey, SeqKey
from ratoon.engine.journal.records import NO_PROGRESS, JournalState, OperationRecord
from ratoon.engine.types import FailedResult, OperationResult
from ratoon.engine.worker.tasks import TeacherAnswer
from ratoon.errors import ErrorCode, RatoonError, invalid
from ratoon_proto.types import Progress

# Ended operations kept in memory, so that most waits end without a journal read.
_MAX_ENDED = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """The seq to run, or to skip, next."""

    seq: int
    operation_id: str
    is_consumed: bool


def check_reuse(key: SeqKey | RequestKey, payload_hash: str, known: OperationRecord) -> None:
    """Raises KEY_REUSED unless a retry has the payload of the operation that its key names."""
    if known.payload_hash == payload_hash:
        return
    if isinstance(key, SeqKey):
        field, got = "key.seq", str(key.seq)
    else:
        field, got = "key.request_id", key.request_id
    raise RatoonError(
        ErrorCode.KEY_REUSED,
        f"{field}: {got} was used for another payload",
        field=field,
        got=got,
        expected="a new key, or the payload it was first used with",
        details={"operation_id": known.operation_id},
    )


class Sequencer:
    """The accepted seqs of one policy from `turn` on."""

    def __init__(self, *, turn: int) -> None:
        assert turn >= 1
        self._turn = turn
        self._free = turn
        self._waiting: dict[int, str] = {}
        self._consumed: set[int] = set()

    @property
    def turn(self) -> int:
        """The seq that runs next; all lower ones are past."""
        return self._turn

    @property
    def next_free(self) -> int:
        """The lowest seq never accepted."""
        return self._free

    @property
    def highest(self) -> int:
        """The highest seq that is accepted and not past; 0: none."""
        return max(self._waiting, default=0)

    def accept(self, seq: int, operation_id: str) -> None:
        """Accept a seq, which may be far ahead, for an operation."""
        assert seq >= self._turn, f"seq {seq} is past"
        assert seq not in self._waiting, f"seq {seq} is taken"
        self._waiting[seq] = operation_id
        while self._free in self._waiting:
            self._free += 1

    def next_free_after(self, seq: int) -> int:
        """The value of `next_free` once `seq` is accepted."""
        free = self._free
        while free in self._waiting or free == seq:
            free += 1
        return free

    def consume(self, seq: int) -> None:
        """Mark an accepted operation as ended ahead of its turn, which is then skipped."""
        assert seq in self._waiting
        self._consumed.add(seq)

    def blocked_by(self, seq: int) -> int:
        """The missing seq that `seq` waits for; 0: none."""
        return self._free if self._turn <= self._free < seq else 0

    def peek(self) -> Turn | None:
        """Whose turn it is; None while that seq has not arrived."""
        if self._turn not in self._waiting:
            return None
        return Turn(
            seq=self._turn,
            operation_id=self._waiting[self._turn],
            is_consumed=self._turn in self._consumed,
        )

    def advance(self) -> None:
        """End the current turn."""
        del self._waiting[self._turn]
        self._consumed.discard(self._turn)
        self._turn += 1


@dataclass(slots=True, kw_only=True)
class Awaited:
    """Base of an object whose changes callers wait for."""

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
    # Its turn has come, so it can only be asked to stop.
    is_started: bool = False
    cancel_requested: bool = False
    # What its teachers said; None: they have not all answered, or it has none.
    answers: tuple[TeacherAnswer, ...] | None = None
    # Why a teacher does not answer, for which it fails.
    unanswered: RatoonError | None = None
    # The missing seq that blocks it, and the loop time since which a caller has waited behind it.
    _gap: tuple[int, float] = (0, 0.0)

    @property
    def operation_id(self) -> str:
        return self.record.operation_id

    @property
    def is_final(self) -> bool:
        return self.record.state.is_final

    @property
    def bodies(self) -> tuple[str, ...]:
        """Digests of the files that it is run from, those that only memory knows included."""
        answers = (answer.digest for answer in self.answers or ())
        return tuple(dict.fromkeys((*self.record.bodies, *answers)))

    @property
    def awaits_teachers(self) -> bool:
        """Whether it cannot run yet for what its teachers have not said."""
        command = self.record.command
        has_teachers = command is not None and bool(command.teachers)
        is_over = self.is_final or self.is_started
        return has_teachers and not is_over and self.answers is None and self.unanswered is None

    def waits_since(self, missing_seq: int, now: float) -> float:
        """Loop time since which callers have waited behind this seq; `now` for the first one."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The window's ForwardBackwards by seq, in seq order; none: closed. A failed one has None."""

    entries: Mapping[int, OperationRecord | None] = field(
        default_factory=dict[int, OperationRecord | None]
    )

    @property
    def applied(self) -> tuple[int, ...]:
        return tuple(self.records)

    @property
    def failed(self) -> tuple[int, ...]:
        return tuple(seq for seq, record in self.entries.items() if record is None)

    @property
    def records(self) -> dict[int, OperationRecord]:
        """The applied ForwardBackwards by seq."""
        return {seq: record for seq, record in self.entries.items() if record is not None}

    @property
    def is_open(self) -> bool:
        return bool(self.entries)

    def replay_from(self, seq: int) -> int:
        """The first seq to replay from a checkpoint taken at `seq`."""
        return next(iter(self.entries), seq + 1)

    def with_applied(self, record: OperationRecord) -> Window:
        return self._with(record.seq, record)

    def with_failed(self, seq: int) -> Window:
        return self._with(seq, None)

    def check_closed(self) -> None:
        """Raises WINDOW_OPEN: an Update brings its own gradients, an import other weights."""
        if self.is_open:
            raise RatoonError(
                ErrorCode.WINDOW_OPEN,
                f"ForwardBackwards {_names(self.entries)} are not stepped or discarded",
                details={"window_seqs": _names(self.entries)},
            )

    def select(
        self, include_seqs: tuple[int, ...], *, allow_empty: bool = False
    ) -> tuple[int, ...]:
        """The ForwardBackwards that an OptimStep steps on; `include_seqs` empty: all.

        Raises WINDOW_POISONED naming what failed, WINDOW_EMPTY unless it is allowed to be, or
        INVALID_ARGUMENT.
        """
        if not include_seqs:
            if self.failed:
                raise self._poisoned(self.failed[0])
            if not self.applied and not allow_empty:
                raise RatoonError(
                    ErrorCode.WINDOW_EMPTY, "no ForwardBackward since the last step or discard"
                )
            return self.applied
        if len(set(include_seqs)) != len(include_seqs):
            raise invalid("include_seqs", list(include_seqs), "each seq once")
        for index, seq in enumerate(include_seqs):
            if seq in self.failed:
                raise self._poisoned(seq)
            if seq not in self.applied:
                raise invalid(
                    f"include_seqs[{index}]", seq, f"one of the window's {list(self.applied)}"
                )
        return tuple(sorted(include_seqs))

    def _with(self, seq: int, record: OperationRecord | None) -> Window:
        assert all(earlier < seq for earlier in self.entries)
        return Window(entries={**self.entries, seq: record})

    def _poisoned(self, seq: int) -> RatoonError:
        return RatoonError(
            ErrorCode.WINDOW_POISONED,
            f"ForwardBackward {seq} failed: discard the window, or list the seqs to include",
            details={"failed_seq": str(seq), "window_seqs": _names(self.entries)},
        )


def _names(seqs: Iterable[int]) -> str:
    return ",".join(map(str, seqs))
