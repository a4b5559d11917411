"""The policy table and the journal in SQL: lifecycle operations, and reads for everyone.

Every method is one transaction, durable when it returns. Rows that a decision depends on are locked
before they are read, so another process's writes come wholly before or wholly after.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing

from sqlalchemy import (
    ColumnElement,
    Connection,
    Engine,
    and_,
    delete,
    func,
    or_,
    select,
    tuple_,
)
from sqlalchemy.exc import IntegrityError

from ratoon.engine.commands import RequestKey, SeqKey, effect_of
from ratoon.engine.journal.codec import to_text
from ratoon.engine.journal.integrity import insert_row, verified
from ratoon.engine.journal.records import (
    Checkpoint,
    JournalState,
    OperationRecord,
    PolicyHistory,
    PolicyRow,
)
from ratoon.engine.journal.steps import StepRow
from ratoon.engine.journal.tables import (
    CHECKPOINTS,
    NAMED_VERSIONS,
    NUMERICS,
    OPERATIONS,
    POLICIES,
    STEPS,
    insert_checkpoint,
    require_policy,
    select_checkpoints,
    select_named,
    select_operation,
    select_operations,
    select_policy,
    set_operation,
    set_policy,
    to_columns,
    to_policy,
    to_record,
    to_step,
)
from ratoon.engine.refusals import policy_not_ready
from ratoon.engine.types import OperationFilter, OperationResult, Place, PolicySpec
from ratoon.errors import ErrorCode, RatoonError
from ratoon_proto.types import OperationKind, PolicyState

# Rows that one list of operations reads at most, so that no writer waits long for it.
_SCANNED = 5000
_FINAL = tuple(state for state in JournalState if state.is_final)
_LIFECYCLE = tuple(kind for kind in OperationKind if kind.is_lifecycle)
_BATCHES = tuple(kind for kind in OperationKind if effect_of(kind).computes_gradients)
_STEPS = tuple(kind for kind in OperationKind if effect_of(kind).takes_step)
_CLOSING = tuple(kind for kind in OperationKind if effect_of(kind).closes_window)


class SqlStore:
    """Used by one thread at a time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def insert_policy(self, spec: PolicySpec, record: OperationRecord) -> None:
        """Add a policy and the record of its CreatePolicy. Raises POLICY_EXISTS."""
        with self._engine.begin() as connection:
            row = {
                "policy_id": spec.policy_id,
                "spec": to_text(spec),
                "state": PolicyState.CREATING,
                "version": 0,
                "max_version": 0,
                "next_seq": 1,
                "token": 0,
                "created_at": record.created_at,
                "info": None,
                "published": "[]",
                "failure": None,
                "position": 0,
            }
            try:
                insert_row(connection, POLICIES, row)
            except IntegrityError as err:
                raise RatoonError(
                    ErrorCode.POLICY_EXISTS,
                    f"policy {spec.policy_id} exists already: it was created just now",
                    field="policy_id",
                ) from err
            insert_row(connection, OPERATIONS, to_columns(record))

    def insert_first_state(self, policy_id: str, checkpoint: Checkpoint) -> None:
        """Add the checkpoint that a policy without a controller is created from."""
        with self._engine.begin() as connection:
            require_policy(connection, policy_id)
            insert_checkpoint(connection, policy_id, checkpoint)

    def policy(self, policy_id: str) -> PolicyRow | None:
        with self._engine.begin() as connection:
            return select_policy(connection, policy_id)

    def policies(self) -> tuple[PolicyRow, ...]:
        """All policies, oldest first."""
        with self._engine.begin() as connection:
            order = (POLICIES.c.created_at, POLICIES.c.policy_id)
            rows = connection.execute(select(POLICIES).order_by(*order)).mappings()
            return tuple(to_policy(row) for row in rows)

    def look(self) -> None:
        """Run an empty query, without the write lock that transactions begin with.

        Raises the driver's error where the database does not answer.
        """
        with closing(self._engine.raw_connection()) as connection:
            connection.cursor().execute("SELECT 1")

    def mark_deleting(self, policy_id: str, record: OperationRecord) -> None:
        """Refuse the policy's further work; `record` is its DeletePolicy.

        Raises POLICY_NOT_FOUND, and POLICY_NOT_READY where another DeletePolicy is under way.
        """
        with self._engine.begin() as connection:
            state = require_policy(connection, policy_id).state
            if select_operation(connection, _life(policy_id, OperationKind.DELETE_POLICY)):
                raise policy_not_ready(policy_id, state)
            set_policy(connection, policy_id, state=PolicyState.DELETING)
            insert_row(connection, OPERATIONS, to_columns(record))

    def remove_policy(self, policy_id: str, *, keep_operation_id: str) -> None:
        """Delete a policy and all its records but one, the operation that ends it."""
        with self._engine.begin() as connection:
            for table in (POLICIES, CHECKPOINTS, NAMED_VERSIONS, STEPS):
                connection.execute(delete(table).where(table.c.policy_id == policy_id))
            connection.execute(
                delete(OPERATIONS).where(
                    OPERATIONS.c.policy_id == policy_id,
                    OPERATIONS.c.operation_id != keep_operation_id,
                )
            )

    def end_lifecycle_operation(
        self, operation_id: str, state: JournalState, result: OperationResult, finished_at: float
    ) -> None:
        """Record how a CreatePolicy or DeletePolicy ended."""
        with self._engine.begin() as connection:
            set_operation(
                connection,
                operation_id,
                state=state,
                result=to_text(result),
                finished_at=finished_at,
            )

    def forget_ended_lifecycle_operations(self, before: float) -> None:
        """Drop lifecycle records of deleted policies that ended before a time, in seconds."""
        with self._engine.begin() as connection:
            connection.execute(
                delete(OPERATIONS).where(
                    OPERATIONS.c.kind.in_(_LIFECYCLE),
                    OPERATIONS.c.finished_at < before,
                    OPERATIONS.c.policy_id.not_in(select(POLICIES.c.policy_id)),
                )
            )

    def history(self, policy_id: str) -> PolicyHistory:
        """Records since the last closed window, and the checkpoints, in seq order."""
        with self._engine.begin() as connection:
            policy = require_policy(connection, policy_id)
            is_closing = OPERATIONS.c.kind.in_(_CLOSING)
            closes = or_(
                and_(is_closing, OPERATIONS.c.state == JournalState.APPLIED),
                and_(OPERATIONS.c.version.is_not(None), OPERATIONS.c.state == JournalState.LOST),
                OPERATIONS.c.state == JournalState.DISCARDED,
            )
            closed_seq = _max_seq(connection, policy_id, closes)
            closed = select_operations(connection, policy_id, OPERATIONS.c.seq == closed_seq)
            freed_seq = _max_seq(connection, policy_id, OPERATIONS.c.command.is_(None))
            return PolicyHistory(
                policy=policy,
                closed=closed[0] if closed else None,
                records=select_operations(connection, policy_id, OPERATIONS.c.seq > closed_seq),
                checkpoints=select_checkpoints(connection, policy_id),
                kept_from_seq=freed_seq + 1,
                named=select_named(connection, policy_id),
            )

    def records_from(self, policy_id: str, seq: int) -> tuple[OperationRecord, ...]:
        """Records from `seq` on, in seq order."""
        with self._engine.begin() as connection:
            return select_operations(connection, policy_id, OPERATIONS.c.seq >= seq)

    def bodies_in_use(self, policy_id: str) -> frozenset[tuple[str, str]]:
        """Operation and digest of each body that may be run or replayed."""
        may_run = and_(
            OPERATIONS.c.command.is_not(None), OPERATIONS.c.state != JournalState.CANCELLED
        )
        with self._engine.begin() as connection:
            kept = select_operations(connection, policy_id, may_run)
            return frozenset((r.operation_id, digest) for r in kept for digest in r.bodies)

    def results_in_use(self, policy_id: str) -> frozenset[str]:
        """Digests of Forward results that stored choices refer to; they go with the command."""
        is_kept = OPERATIONS.c.command.is_not(None)
        with self._engine.begin() as connection:
            kept = select_operations(connection, policy_id, is_kept)
            names = {r.choices.old_logprobs for r in kept if r.choices is not None}
            return frozenset(name.partition(".")[0] for name in names if name)

    def numerics(self, digest: str) -> Mapping[str, str]:
        """The fields behind a record's numerics digest; empty where they are not known."""
        with self._engine.begin() as connection:
            query = select(NUMERICS).where(NUMERICS.c.numerics == digest)
            row = connection.execute(query).mappings().first()
            return {} if row is None else json.loads(verified(NUMERICS, row)["fields"])

    def find_key(self, policy_id: str, key: SeqKey | RequestKey) -> OperationRecord | None:
        match key:
            case SeqKey(seq=seq):
                condition = OPERATIONS.c.seq == seq
            case RequestKey(request_id=request_id):
                condition = OPERATIONS.c.request_id == request_id
        with self._engine.begin() as connection:
            return select_operation(
                connection, and_(OPERATIONS.c.policy_id == policy_id, condition)
            )

    def find_operation(self, operation_id: str) -> OperationRecord | None:
        with self._engine.begin() as connection:
            return select_operation(connection, OPERATIONS.c.operation_id == operation_id)

    def find_lifecycle_operation(
        self, policy_id: str, kind: OperationKind
    ) -> OperationRecord | None:
        """The CreatePolicy, or open DeletePolicy, of an existing policy."""
        with self._engine.begin() as connection:
            return select_operation(connection, _life(policy_id, kind))

    def orphaned_lifecycle_operations(self) -> tuple[OperationRecord, ...]:
        """Open CreatePolicy and DeletePolicy operations whose policy is gone."""
        with self._engine.begin() as connection:
            rows = connection.execute(
                select(OPERATIONS).where(
                    OPERATIONS.c.kind.in_(_LIFECYCLE),
                    OPERATIONS.c.state.not_in(_FINAL),
                    OPERATIONS.c.policy_id.not_in(select(POLICIES.c.policy_id)),
                )
            ).mappings()
            return tuple(to_record(row) for row in rows)

    def checkpoints(self, policy_id: str) -> tuple[Checkpoint, ...]:
        """Checkpoints in seq order."""
        with self._engine.begin() as connection:
            return select_checkpoints(connection, policy_id)

    def list_operations(
        self,
        asked: OperationFilter,
        policies: tuple[str, ...] | None,
        after: Place | None,
        most: int,
    ) -> tuple[tuple[OperationRecord, ...], Place | None]:
        """Records, newest first, and where the list goes on; None: it is over.

        `policies`: only those of these; None: of all. `after`: the place that the list goes on
        behind; None: it begins. Whatever is asked for, no more than `_SCANNED` rows are read, so
        that there may be fewer than `most`.
        """
        of_policy = (OPERATIONS.c.policy_id == asked.policy_id,) if asked.policy_id else ()
        key = (OPERATIONS.c.created_at, OPERATIONS.c.operation_id)
        is_next = () if after is None else (tuple_(*key) < after,)
        order = [column.desc() for column in key]
        scanned = select(*key).where(*of_policy, *is_next).order_by(*order)
        with self._engine.begin() as connection:
            last = connection.execute(scanned.offset(_SCANNED - 1).limit(1)).first()
            ends = () if last is None else (tuple_(*key) >= tuple(last),)
            chosen = select(OPERATIONS).where(
                *of_policy, *is_next, *ends, *_matches(asked, policies)
            )
            rows = connection.execute(chosen.order_by(*order).limit(most)).mappings()
            records = tuple(to_record(row) for row in rows)
        if len(records) == most:
            return records, (records[-1].created_at, records[-1].operation_id)
        return records, None if last is None else (last.created_at, last.operation_id)

    def steps(
        self, policy_id: str, after_seq: int, before_seq: int, most: int
    ) -> tuple[StepRow, ...]:
        """The next rows of a policy's steps, in seq order, at most so many; `before_seq` 0: any."""
        query = select(STEPS).where(STEPS.c.policy_id == policy_id, STEPS.c.seq > after_seq)
        if before_seq:
            query = query.where(STEPS.c.seq < before_seq)
        with self._engine.begin() as connection:
            rows = connection.execute(query.order_by(STEPS.c.seq).limit(most)).mappings()
            return tuple(to_step(row) for row in rows)

    def last_reports(self, policy_id: str) -> tuple[OperationRecord, ...]:
        """The newest applied operations with a batch, and with a step, in seq order: one, if it
        has both."""
        with self._engine.begin() as connection:
            newest = (_newest_applied(connection, policy_id, kinds) for kinds in (_BATCHES, _STEPS))
            seqs = [seq for seq in newest if seq]
            return select_operations(connection, policy_id, OPERATIONS.c.seq.in_(seqs))

    def count_operations(self) -> Mapping[tuple[str, str, str], int]:
        """Number of records by (policy, kind, journal state)."""
        columns = (OPERATIONS.c.policy_id, OPERATIONS.c.kind, OPERATIONS.c.state)
        with self._engine.begin() as connection:
            rows = connection.execute(select(*columns, func.count()).group_by(*columns))
            return {(str(row[0]), str(row[1]), str(row[2])): int(row[3]) for row in rows}


def _matches(
    asked: OperationFilter, policies: tuple[str, ...] | None
) -> Iterator[ColumnElement[bool]]:
    """What is asked for beside a policy. The journal does not tell running from queued."""
    if policies is not None:
        yield OPERATIONS.c.policy_id.in_(policies)
    if asked.kinds:
        yield OPERATIONS.c.kind.in_(asked.kinds)
    if asked.states:
        is_open = not all(state.is_final for state in asked.states)
        states = [each for each in _FINAL if each.public in asked.states]
        yield OPERATIONS.c.state.in_([*states, *[JournalState.ACCEPTED] * is_open])
    if asked.seq:
        yield OPERATIONS.c.seq == asked.seq


def _max_seq(connection: Connection, policy_id: str, condition: ColumnElement[bool]) -> int:
    """Highest seq of the policy's operations that match a condition; 0: none."""
    query = select(func.max(OPERATIONS.c.seq)).where(OPERATIONS.c.policy_id == policy_id, condition)
    return connection.execute(query).scalar_one() or 0


def _newest_applied(
    connection: Connection, policy_id: str, kinds: Sequence[OperationKind]
) -> int | None:
    """Seq of the policy's newest applied operation of these kinds; read from the end."""
    query = select(OPERATIONS.c.seq).where(
        OPERATIONS.c.policy_id == policy_id,
        OPERATIONS.c.kind.in_(kinds),
        OPERATIONS.c.state == JournalState.APPLIED,
    )
    return connection.execute(query.order_by(OPERATIONS.c.seq.desc()).limit(1)).scalar()


def _life(policy_id: str, kind: OperationKind) -> ColumnElement[bool]:
    """Matches the policy's CreatePolicy, or its open DeletePolicy."""
    return and_(
        OPERATIONS.c.policy_id == policy_id,
        OPERATIONS.c.seq.is_(None),  # It makes the query use the index.
        OPERATIONS.c.kind == kind,
        or_(
            OPERATIONS.c.kind == OperationKind.CREATE_POLICY,
            OPERATIONS.c.state.not_in(_FINAL),
        ),
    )
