"""Values of the journal as rows of its tables, and back.

A record written and read again is equal, or refused as damaged (`sealed.DamagedRowError`).
"""

from __future__ import annotations

import dataclasses
import json
from functools import lru_cache
from typing import Any, cast

from sqlalchemy import ColumnElement, Connection, RowMapping, select

from ratoon.engine.journal.checkpoints import Checkpoint
from ratoon.engine.journal.codec import from_text, to_text
from ratoon.engine.journal.records import JournalState, OperationRecord, PolicyRow
from ratoon.engine.journal.sealed import insert_row, update_rows, verified
from ratoon.engine.journal.tables import CHECKPOINTS, OPERATIONS, POLICIES
from ratoon.engine.refusals import policy_not_found
from ratoon.engine.types import CheckpointInfo, Command, OperationResult, PolicySpec
from ratoon.engine.worker.tasks import Choices
from ratoon.model.spec import ModelInfo
from ratoon_proto.types import OperationKind, PolicyState


def select_policy(connection: Connection, policy_id: str) -> PolicyRow | None:
    query = select(POLICIES).where(POLICIES.c.policy_id == policy_id).with_for_update()
    row = connection.execute(query).mappings().first()
    return None if row is None else to_policy(row)


def require_policy(connection: Connection, policy_id: str) -> PolicyRow:
    policy = select_policy(connection, policy_id)
    if policy is None:
        raise policy_not_found(policy_id)
    return policy


def select_operation(
    connection: Connection, condition: ColumnElement[bool]
) -> OperationRecord | None:
    row = connection.execute(select(OPERATIONS).where(condition)).mappings().first()
    return None if row is None else to_record(row)


def select_operations(
    connection: Connection, policy_id: str, *conditions: ColumnElement[bool]
) -> tuple[OperationRecord, ...]:
    """Matching operations in seq order."""
    query = select(OPERATIONS).where(OPERATIONS.c.policy_id == policy_id, *conditions)
    rows = connection.execute(query.order_by(OPERATIONS.c.seq)).mappings()
    return tuple(to_record(row) for row in rows)


def select_checkpoints(connection: Connection, policy_id: str) -> tuple[Checkpoint, ...]:
    """Checkpoints in seq order."""
    query = select(CHECKPOINTS).where(CHECKPOINTS.c.policy_id == policy_id)
    order = (CHECKPOINTS.c.seq, CHECKPOINTS.c.created_at)
    rows = connection.execute(query.order_by(*order)).mappings()
    return tuple(_to_checkpoint(row) for row in rows)


def insert_checkpoint(connection: Connection, policy_id: str, checkpoint: Checkpoint) -> None:
    values = {
        "policy_id": policy_id,
        "weights_digest": checkpoint.weights_digest or None,
        **dataclasses.asdict(checkpoint.info),
    }
    insert_row(connection, CHECKPOINTS, values)


def set_policy(connection: Connection, policy_id: str, **columns: object) -> None:
    update_rows(connection, POLICIES, POLICIES.c.policy_id == policy_id, columns)


def set_operation(connection: Connection, operation_id: str, **columns: object) -> None:
    update_rows(connection, OPERATIONS, OPERATIONS.c.operation_id == operation_id, columns)


def to_columns(record: OperationRecord) -> dict[str, Any]:
    values = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
    return values | {
        "seq": record.seq or None,
        "request_id": record.request_id or None,
        "numerics": record.numerics or None,
        "command": None if record.command is None else to_text(record.command),
        "choices": None if record.choices is None else to_text(record.choices),
        "result": None if record.result is None else to_text(record.result),
    }


def to_record(row: RowMapping) -> OperationRecord:
    values = verified(OPERATIONS, row)
    choices, command, result = values["choices"], values["command"], values["result"]
    decoded: dict[str, Any] = values | {
        "kind": OperationKind(values["kind"]),
        "state": JournalState(values["state"]),
        "seq": values["seq"] or 0,
        "request_id": values["request_id"] or "",
        "numerics": values["numerics"] or "",
        "command": None if command is None else cast("Command", from_text(command)),
        "choices": None if choices is None else cast("Choices", from_text(choices)),
        "result": None if result is None else cast("OperationResult", from_text(result)),
    }
    return OperationRecord(**decoded)


@lru_cache(256)
def _of_policy(text: str) -> object:
    """A policy's spec or info: immutable, the same text each time, and read at every call."""
    return from_text(text)


def to_policy(row: RowMapping) -> PolicyRow:
    values = verified(POLICIES, row)
    return PolicyRow(
        spec=cast("PolicySpec", _of_policy(values["spec"])),
        state=PolicyState(values["state"]),
        version=values["version"],
        max_version=values["max_version"],
        next_seq=values["next_seq"],
        token=values["token"],
        created_at=values["created_at"],
        info=None if values["info"] is None else cast("ModelInfo", _of_policy(values["info"])),
        published=tuple(json.loads(values["published"])),
        failure=values["failure"] or "",
        position=values["position"] or 0,
    )


def _to_checkpoint(row: RowMapping) -> Checkpoint:
    values = verified(CHECKPOINTS, row)
    names = [field.name for field in dataclasses.fields(CheckpointInfo)]
    info = CheckpointInfo(**{name: values[name] for name in names})
    return Checkpoint(info=info, weights_digest=values["weights_digest"] or "")
