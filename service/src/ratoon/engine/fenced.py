"""What controllers write to the journal: each write fenced, each one transaction.

Enters records and ends of operations, leaves rows. Invariant: a write carries its controller's
fencing token and is refused once a newer one is known; it is durable when the method returns.

Writes may be repeated (a caller cannot know whether a lost answer was a lost write): a second time
changes nothing.
"""

from __future__ import annotations

import dataclasses
import json

from sqlalchemy import Connection, Engine, and_, or_, select

from ratoon.engine.codec import to_text
from ratoon.engine.journal import (
    LIFE_KINDS,
    FencedError,
    JournalConflictError,
    JournalState,
    OperationEnd,
    OperationRecord,
    PolicyRow,
    RollBack,
)
from ratoon.engine.rollback import rolled_back
from ratoon.engine.rows import (
    require_operation,
    require_policy,
    select_operation,
    select_policy,
    set_operation,
    set_policy,
    to_columns,
    to_record,
)
from ratoon.engine.sealed import insert_row, update_rows
from ratoon.engine.tables import CHECKPOINTS, OPERATIONS
from ratoon.engine.types import OperationResult, PolicyState
from ratoon.model.spec import ModelInfo

_FINAL = tuple(state for state in JournalState if state.is_final)


class FencedStore:
    """Shares the database with `SqlStore`; used by the same one thread at a time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def acquire(self, policy_id: str) -> int:
        with self._engine.begin() as connection:
            token = require_policy(connection, policy_id).token + 1
            set_policy(connection, policy_id, token=token)
            return token

    def set_policy(
        self, token: int, policy_id: str, state: PolicyState, info: ModelInfo | None
    ) -> None:
        """The state, but of one being deleted; what the model said of itself (None: as it was)."""
        with self._engine.begin() as connection:
            if _fence(connection, policy_id, token).state is not PolicyState.DELETING:
                set_policy(connection, policy_id, state=state)
            if info is not None:
                set_policy(connection, policy_id, info=to_text(info))

    def set_published(self, token: int, policy_id: str, published: tuple[int, ...]) -> None:
        with self._engine.begin() as connection:
            _fence(connection, policy_id, token)
            set_policy(connection, policy_id, published=json.dumps(published))

    def accept(self, token: int, record: OperationRecord, next_seq: int) -> None:
        """A new record. Raises `IntegrityError` where its key names another operation."""
        with self._engine.begin() as connection:
            _fence(connection, record.policy_id, token)
            if select_operation(connection, OPERATIONS.c.operation_id == record.operation_id):
                return
            insert_row(connection, OPERATIONS, to_columns(record))
            set_policy(connection, record.policy_id, next_seq=next_seq)

    def begin(
        self, token: int, operation_id: str, started_at: float, plan: dict[str, object] | None
    ) -> None:
        """What was decided is durable before any of it is applied; an ended one is not begun."""
        with self._engine.begin() as connection:
            record = _fence_operation(connection, operation_id, token)
            if record.state.is_final:
                raise JournalConflictError(f"{operation_id} is {record.state}")
            set_operation(
                connection,
                operation_id,
                state=JournalState.APPLYING,
                started_at=started_at,
                plan=None if plan is None else json.dumps(plan, separators=(",", ":")),
            )

    def end(self, token: int, policy_id: str, end: OperationEnd) -> None:
        """An operation's end, and with it the policy's version, checkpoint and closed window."""
        with self._engine.begin() as connection:
            policy = _fence(connection, policy_id, token)
            record = require_operation(connection, end.operation_id)
            if record.state.is_final:
                return
            set_operation(
                connection,
                end.operation_id,
                state=end.state,
                result=to_text(end.result),
                version=end.version if end.state is JournalState.APPLIED else None,
                weights_digest=end.weights_digest,
                finished_at=end.finished_at,
            )
            set_policy(
                connection,
                policy_id,
                version=end.version,
                max_version=max(policy.max_version, end.version),
            )
            if end.checkpoint is not None:
                values = {"policy_id": policy_id, **dataclasses.asdict(end.checkpoint)}
                insert_row(connection, CHECKPOINTS, values)
            if end.closes_window:
                _compact(connection, policy_id, record.seq)

    def amend(self, token: int, operation_id: str, result: OperationResult) -> None:
        with self._engine.begin() as connection:
            _fence_operation(connection, operation_id, token)
            set_operation(connection, operation_id, result=to_text(result))

    def roll_back(
        self, token: int, policy_id: str, roll_back: RollBack
    ) -> tuple[OperationRecord, ...]:
        """Fail what is open and what was applied past the checkpoint; returns what changed."""
        with self._engine.begin() as connection:
            policy = _fence(connection, policy_id, token)
            rows = connection.execute(
                select(OPERATIONS)
                .where(
                    OPERATIONS.c.policy_id == policy_id,
                    OPERATIONS.c.kind.not_in(LIFE_KINDS),
                    or_(
                        OPERATIONS.c.state.not_in(_FINAL),
                        and_(
                            OPERATIONS.c.seq >= roll_back.replay_from_seq,
                            OPERATIONS.c.state == JournalState.APPLIED,
                        ),
                    ),
                )
                .order_by(OPERATIONS.c.seq)
            ).mappings()
            changed = tuple(
                record
                for record in (rolled_back(to_record(row), roll_back) for row in rows)
                if record is not None
            )
            for record in changed:
                columns = to_columns(record)
                set_operation(connection, columns.pop("operation_id"), **columns)
            set_policy(
                connection,
                policy_id,
                version=roll_back.version,
                max_version=max(policy.max_version, roll_back.version),
            )
            return changed


def _fence(connection: Connection, policy_id: str, token: int) -> PolicyRow:
    """The policy, locked. Raises `FencedError` for an older token, or where the policy is gone."""
    policy = select_policy(connection, policy_id)
    if policy is None or policy.token != token:
        raise FencedError(f"token {token} of {policy_id} is not the newest")
    return policy


def _fence_operation(connection: Connection, operation_id: str, token: int) -> OperationRecord:
    """The operation as it is once its policy is locked: what was read before may have ended."""
    policy_id = require_operation(connection, operation_id).policy_id
    _fence(connection, policy_id, token)
    return require_operation(connection, operation_id)


def _compact(connection: Connection, policy_id: str, through_seq: int) -> None:
    """Drop commands and plans that nothing re-runs: idempotency needs only the hash."""
    condition = and_(
        OPERATIONS.c.policy_id == policy_id,
        OPERATIONS.c.seq <= through_seq,
        OPERATIONS.c.command.is_not(None),
        OPERATIONS.c.state.in_(_FINAL),
    )
    update_rows(connection, OPERATIONS, condition, {"command": None, "plan": None})
