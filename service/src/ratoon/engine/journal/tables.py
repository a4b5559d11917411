"""The journal's tables, for SQLite and PostgreSQL alike, and its values as their rows.

Values that are only read back whole are JSON text columns; bodies are files, never columns.
(policy_id, seq) and (policy_id, request_id) are unique. The newest revision of `migrations` must
leave exactly these tables. A record written and read again is equal, or refused as damaged
(`integrity.DamagedRowError`).

Fencing tokens are integers that only grow, across policies, deletions and database failovers. Their
upper bits are PostgreSQL's timeline, which each promotion of a standby raises. So a token whose
commit was lost in a failover is never given again, and older tokens are recognised.
"""

from __future__ import annotations

import dataclasses
import json
from functools import lru_cache
from typing import Any, cast

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    ColumnElement,
    Connection,
    Engine,
    Float,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    RowMapping,
    String,
    Table,
    Text,
    UniqueConstraint,
    select,
)
from sqlalchemy.exc import DBAPIError, OperationalError

from ratoon.engine.commands import Command
from ratoon.engine.journal.codec import from_text, to_text
from ratoon.engine.journal.connections import connect, is_server_away, upgrade
from ratoon.engine.journal.integrity import (
    DIGEST,
    DamagedRowError,
    insert_row,
    update_rows,
    verified,
)
from ratoon.engine.journal.records import Checkpoint, JournalState, OperationRecord, PolicyRow
from ratoon.engine.journal.steps import StepRow
from ratoon.engine.refusals import policy_not_found
from ratoon.engine.types import CheckpointInfo, NamedVersion, OperationResult, PolicySpec
from ratoon.engine.worker.tasks import Choices
from ratoon.errors import ErrorCode, RatoonError
from ratoon.log import get_logger
from ratoon.model.spec import ModelInfo
from ratoon_proto.types import OperationKind, PolicyState, SkipReason

_LOG = get_logger("store")
METADATA = MetaData()
# Versions, seqs and bytes. SQLite's own integers have 64 bits.
_WIDE = BigInteger().with_variant(Integer, "sqlite")
_TIMELINE_BITS = 32
_NAME = "last"
# Rows that a server sends at a time: a whole table would fill the memory, and take the time of a
# statement.
_PORTION_ROWS = 500


def _digest() -> Column[str]:
    """Digest of the row: see `integrity`."""
    return Column(DIGEST, String(32), nullable=False, server_default="")


POLICIES = Table(
    "policies",
    METADATA,
    Column("policy_id", String(64), primary_key=True),
    Column("spec", Text, nullable=False),
    Column("state", String(16), nullable=False),
    Column("version", _WIDE, nullable=False),
    Column("max_version", _WIDE, nullable=False),
    Column("next_seq", _WIDE, nullable=False),
    Column("token", _WIDE, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("info", Text),
    # JSON list of versions, in publication order.
    Column("published", Text, nullable=False),
    # Why the policy failed.
    Column("failure", Text),
    # How many writes callers could be told of; null: of before it was counted.
    Column("position", _WIDE),
    _digest(),
)


# No foreign key to policies: the record of a DeletePolicy outlives its policy.
OPERATIONS = Table(
    "operations",
    METADATA,
    Column("operation_id", String(128), primary_key=True),
    Column("policy_id", String(64), nullable=False),
    Column("kind", String(32), nullable=False),
    Column("seq", _WIDE),
    Column("request_id", String(256)),
    Column("payload_hash", String(64), nullable=False),
    Column("command", Text),
    Column("body_digest", String(64), nullable=False),
    Column("body_bytes", _WIDE, nullable=False),
    Column("key_id", String(64), nullable=False),
    Column("state", String(16), nullable=False),
    Column("choices", Text),
    Column("result", Text),
    Column("version", _WIDE),
    # Digest of weights, moments and counters after the operation.
    Column("weights_digest", String(64), nullable=False),
    Column("created_at", Float, nullable=False),
    Column("started_at", Float),
    Column("finished_at", Float),
    # Key of a NUMERICS row: the numerics it ran under.
    Column("numerics", String(32)),
    _digest(),
    UniqueConstraint("policy_id", "seq"),
    UniqueConstraint("policy_id", "request_id"),
)


# Operations that may run or be replayed: few, however many a policy has had.
_IS_KEPT = OPERATIONS.c.command.is_not(None)


Index(
    "operations_kept",
    OPERATIONS.c.policy_id,
    OPERATIONS.c.seq,
    sqlite_where=_IS_KEPT,
    postgresql_where=_IS_KEPT,
)


# For lists, newest first: of one policy, and of all.
Index(
    "operations_of_policy_by_time",
    OPERATIONS.c.policy_id,
    OPERATIONS.c.created_at,
    OPERATIONS.c.operation_id,
)
Index("operations_by_time", OPERATIONS.c.created_at, OPERATIONS.c.operation_id)


# Operations that took or skipped an optimizer step, or set the weights: see `steps`.
STEPS = Table(
    "steps",
    METADATA,
    Column("policy_id", String(64), primary_key=True),
    Column("seq", _WIDE, primary_key=True, autoincrement=False),
    Column("version", _WIDE, nullable=False),
    Column("finished_at", Float, nullable=False),
    Column("kind", String(32), nullable=False),
    Column("figures", LargeBinary),
    # Kinds of its warnings, with commas between them; null: none.
    Column("warnings", Text),
    Column("skip_reason", String(32)),
    _digest(),
    # SQLite keeps the rows in the order of their key, which is then stored once.
    sqlite_with_rowid=False,
)


CHECKPOINTS = Table(
    "checkpoints",
    METADATA,
    Column("policy_id", String(64), primary_key=True),
    # Its folder.
    Column("checkpoint_id", String(64), primary_key=True),
    # What its caller calls it; null: it is the service's own.
    Column("name", String(64)),
    Column("pinned", Boolean),
    Column("expires_at", Float),
    Column("version", _WIDE, nullable=False),
    Column("seq", _WIDE, nullable=False),
    Column("replay_from_seq", _WIDE, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("size_bytes", _WIDE, nullable=False),
    Column("weights_digest", String(64)),
    _digest(),
)


NAMED_VERSIONS = Table(
    "named_versions",
    METADATA,
    Column("policy_id", String(64), primary_key=True),
    # What its caller calls it.
    Column("name", String(64), primary_key=True),
    Column("version", _WIDE, nullable=False),
    Column("size_bytes", _WIDE, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("expires_at", Float),
    _digest(),
)


# One row: the last fencing token given to any policy's controller.
TOKENS = Table(
    "tokens",
    METADATA,
    Column("name", String(16), primary_key=True),
    Column("last", _WIDE, nullable=False),
    _digest(),
)


# Numerics, on which bits depend besides journal and plan, by their digest.
NUMERICS = Table(
    "numerics",
    METADATA,
    Column("numerics", String(32), primary_key=True),
    # JSON object of texts.
    Column("fields", Text, nullable=False),
    _digest(),
)


def open_database(url: str) -> Engine:
    """A database with these tables, created or upgraded as needed.

    Every row is read once. Raises what `connect` and `upgrade` raise, and INTERNAL for a damaged
    row.
    """
    engine = connect(url)
    upgrade(engine)
    with engine.begin() as connection:
        of_policies = (POLICIES, OPERATIONS, STEPS, CHECKPOINTS, NAMED_VERSIONS)
        _check_all(connection, *of_policies, NUMERICS, TOKENS)
    return engine


def _check_all(connection: Connection, *tables: Table) -> None:
    """Read every row, in portions. Raises INTERNAL naming the first damaged one, or why not.

    Raises `OperationalError` where the server goes away meanwhile.
    """
    portions = {"yield_per": _PORTION_ROWS}
    try:
        for table in tables:
            names = table.c.keys()
            for row in connection.execute(select(table), execution_options=portions):
                verified(table, dict(zip(names, row, strict=True)))
    except (DamagedRowError, DBAPIError) as err:
        if isinstance(err, DBAPIError) and is_server_away(err):
            raise
        fault = str(err.orig) if isinstance(err, DBAPIError) else str(err)
        raise RatoonError(
            ErrorCode.INTERNAL,
            f"database_url: the journal cannot be read ({fault}): restore it from a backup",
            field="database_url",
            got=fault,
            expected="rows as they were written",
        ) from err


def await_database(url: str) -> Engine:
    """`open_database`, retried until its server is up."""
    while True:
        try:
            return open_database(url)
        except OperationalError as err:
            if not is_server_away(err):
                raise
            _LOG.warning("still waiting for the database", reason=str(err.orig))


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
        "name": checkpoint.info.name or None,
        "pinned": checkpoint.info.pinned or None,
    }
    insert_row(connection, CHECKPOINTS, values)


def select_named(connection: Connection, policy_id: str) -> tuple[NamedVersion, ...]:
    """Named versions, the oldest name first."""
    query = select(NAMED_VERSIONS).where(NAMED_VERSIONS.c.policy_id == policy_id)
    order = (NAMED_VERSIONS.c.created_at, NAMED_VERSIONS.c.name)
    rows = connection.execute(query.order_by(*order)).mappings()
    return tuple(_to_named(row) for row in rows)


def step_columns(policy_id: str, step: StepRow) -> dict[str, Any]:
    values = {field.name: getattr(step, field.name) for field in dataclasses.fields(step)}
    return values | {"policy_id": policy_id, "warnings": ",".join(step.warnings) or None}


def to_step(row: RowMapping) -> StepRow:
    values = verified(STEPS, row)
    del values["policy_id"]
    warnings, reason = values["warnings"], values["skip_reason"]
    decoded: dict[str, Any] = values | {
        "kind": OperationKind(values["kind"]),
        "warnings": tuple(warnings.split(",")) if warnings else (),
        "skip_reason": None if reason is None else SkipReason(reason),
    }
    return StepRow(**decoded)


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
    values |= {"name": values["name"] or "", "pinned": bool(values["pinned"])}
    names = [field.name for field in dataclasses.fields(CheckpointInfo)]
    info = CheckpointInfo(**{name: values[name] for name in names})
    return Checkpoint(info=info, weights_digest=values["weights_digest"] or "")


def _to_named(row: RowMapping) -> NamedVersion:
    values = verified(NAMED_VERSIONS, row)
    del values["policy_id"]
    return NamedVersion(**values)


def next_token(last: int, own: int, timeline: int) -> int:
    """The token after `last` (of any policy) and `own` (from before tokens were shared). Pure."""
    return max(last, own, timeline << _TIMELINE_BITS) + 1


def is_before(token: int, timeline: int) -> bool:
    """Whether a token is from an earlier timeline. Pure."""
    return token >> _TIMELINE_BITS < timeline


def is_promoted_since(token: int, newer: int) -> bool:
    """Whether a standby was promoted between the commits of two tokens. Pure."""
    return is_before(token, newer >> _TIMELINE_BITS)


def last_token(connection: Connection) -> int:
    """The last token, locked until the transaction ends; 0: none was given yet."""
    query = select(TOKENS).where(TOKENS.c.name == _NAME).with_for_update()
    return int(verified(TOKENS, connection.execute(query).mappings().one())["last"])


def set_last_token(connection: Connection, token: int) -> None:
    update_rows(connection, TOKENS, TOKENS.c.name == _NAME, {"last": token})
