"""What became of a run's calls: what callers were told, what the journal says, and the verdict.

It counts the lost and the doubled. `Verdict` defines both; no difference is forgiven.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import Any

from sqlalchemy import create_engine, select

from ratoon.engine.journal.codec import from_text
from ratoon.engine.journal.records import JournalState, OperationRecord
from ratoon.engine.journal.tables import OPERATIONS, POLICIES, to_record
from ratoon.engine.types import PolicySpec
from tests.faults.judge.calls import Call

# Fields of a report that differ between any two runs.
_VOLATILE = frozenset(
    {
        "seconds",
        "rank_seconds",
        "tokens_per_second",
        "hardware_mfu",
        "logical_mfu",
        "peak_memory_bytes",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ack:
    """A caller was told that its call is this operation, each time that it asked."""

    call: Call
    operation_ids: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What a caller was last told of its operation: its state, or the code of its error."""

    operation_id: str
    end: str
    # The version after a step, None where there is none.
    version: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One operation of the accepted history."""

    record: OperationRecord
    call: Call

    @property
    def end(self) -> str:
        """done, cancelled, or the code of the failure."""
        return end_of(self.record)


@dataclass
class Notes:
    """What callers were told; of calls by number."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    calls: dict[int, Call] = field(default_factory=dict[int, Call])
    operations: dict[int, set[str]] = field(default_factory=dict[int, set[str]])
    seqs: dict[int, int] = field(default_factory=dict[int, int])
    told: dict[str, Told] = field(default_factory=dict[str, Told])
    errors: list[str] = field(default_factory=list[str])

    def acknowledged(self, call: Call, operation_id: str, seq: int) -> None:
        with self.lock:
            self.calls[call.number] = call
            self.operations.setdefault(call.number, set()).add(operation_id)
            self.seqs[call.number] = seq

    def first(self, number: int) -> str:
        return min(self.operations[number])

    def acks(self) -> list[Ack]:
        return [
            Ack(call=call, operation_ids=frozenset(self.operations[number]))
            for number, call in sorted(self.calls.items())
        ]


@dataclass(slots=True)
class Verdict:
    """Lost: a call that was acknowledged has no end, another end or another effect than without
    faults. Doubled: one call is two operations, or was applied twice."""

    lost: list[str] = field(default_factory=list[str])
    doubled: list[str] = field(default_factory=list[str])

    @property
    def is_good(self) -> bool:
        return not (self.lost or self.doubled)

    def add(self, other: Verdict) -> None:
        self.lost += other.lost
        self.doubled += other.doubled


def end_of(record: OperationRecord) -> str:
    """done, cancelled or the code of the failure; "open" before that."""
    if record.state is JournalState.APPLIED:
        return "done"
    if record.state is JournalState.CANCELLED:
        return "cancelled"
    if record.state is JournalState.FAILED:
        return str(getattr(record.result, "error", {}).get("code", "?"))
    return "open"


def read_journal(database: Path, policy_id: str) -> list[OperationRecord]:
    """The policy's sequenced operations, by seq. The service may be running."""
    engine = create_engine(f"sqlite:///{database}")
    try:
        with engine.connect() as connection:
            rows = connection.execute(
                select(OPERATIONS)
                .where(
                    OPERATIONS.c.policy_id == policy_id,
                    OPERATIONS.c.seq.is_not(None),
                    OPERATIONS.c.seq.is_not(None),
                )
                .order_by(OPERATIONS.c.seq)
            ).mappings()
            return [to_record(row) for row in rows]
    finally:
        engine.dispose()


def plain(value: object) -> Any:
    """A result as JSON values, without what no two runs have in common."""
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items() if name not in _VOLATILE}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    # Not a number is equal to itself here.
    return repr(value) if isinstance(value, float) else value


def judge_acks(
    acks: Iterable[Ack], told: Mapping[str, Told], records: Iterable[OperationRecord]
) -> tuple[Verdict, list[Entry]]:
    """Each acknowledged call is one operation of the journal; it ended as its caller was told."""
    verdict, entries = Verdict(), list[Entry]()
    by_id = {record.operation_id: record for record in records}
    known: set[str] = set()
    for ack in acks:
        name = f"call {ack.call.number} ({ack.call.kind})"
        found = [by_id[name] for name in ack.operation_ids if name in by_id]
        known |= ack.operation_ids
        if len(ack.operation_ids) > 1:
            verdict.doubled.append(f"{name} is operations {sorted(ack.operation_ids)}")
        if len(found) < len(ack.operation_ids):
            verdict.lost.append(f"{name} was acknowledged and is not in the journal")
        entries += [Entry(record=record, call=ack.call) for record in found]
        verdict.lost += [
            f"{name} ended as {end_of(record)}, its caller was told {told[record.operation_id].end}"
            for record in found
            if record.operation_id in told and not _agree(record, told[record.operation_id])
        ]
    verdict.doubled += [
        f"operation {record.operation_id} (seq {record.seq}) is nobody's"
        for name, record in by_id.items()
        if name not in known
    ]
    return verdict, sorted(entries, key=lambda entry: entry.record.seq)


def _agree(record: OperationRecord, told: Told) -> bool:
    return end_of(record) == told.end and told.version in (None, record.version)


def read_policy(database: Path, policy_id: str) -> PolicySpec:
    """What the policy was created with, as the service completed it."""
    engine = create_engine(f"sqlite:///{database}")
    try:
        with engine.connect() as connection:
            query = select(POLICIES.c.spec).where(POLICIES.c.policy_id == policy_id)
            spec = from_text(str(connection.execute(query).scalar_one()))
    finally:
        engine.dispose()
    assert isinstance(spec, PolicySpec)
    return spec
