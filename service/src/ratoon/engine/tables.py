"""The journal's tables, for SQLite and PostgreSQL alike.

Values that are only read back whole are text columns of JSON; bodies are files, never columns.
Invariant: (policy_id, seq) and (policy_id, request_id) name at most one operation.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable

from sqlalchemy import (
    Column,
    Engine,
    Float,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    create_engine,
    event,
)
from sqlalchemy.pool import StaticPool

METADATA = MetaData()

POLICIES = Table(
    "policies",
    METADATA,
    Column("policy_id", String(64), primary_key=True),
    Column("spec", Text, nullable=False),
    Column("state", String(16), nullable=False),
    Column("version", Integer, nullable=False),
    Column("max_version", Integer, nullable=False),
    Column("next_seq", Integer, nullable=False),
    Column("token", Integer, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("info", Text),
    # JSON list of versions, in the order in which they were published.
    Column("published", Text, nullable=False),
)

# No foreign key to policies: the record of a DeletePolicy outlives its policy.
OPERATIONS = Table(
    "operations",
    METADATA,
    Column("operation_id", String(128), primary_key=True),
    Column("policy_id", String(64), nullable=False),
    Column("kind", String(32), nullable=False),
    Column("seq", Integer),
    Column("request_id", String(256)),
    Column("payload_hash", String(64), nullable=False),
    Column("command", Text),
    Column("body_digest", String(64), nullable=False),
    Column("state", String(16), nullable=False),
    Column("plan", Text),
    Column("result", Text),
    Column("version", Integer),
    # Of weights, moments and counters, after the operation.
    Column("weights_digest", String(64), nullable=False),
    Column("created_at", Float, nullable=False),
    Column("started_at", Float),
    Column("finished_at", Float),
    UniqueConstraint("policy_id", "seq"),
    UniqueConstraint("policy_id", "request_id"),
)
Index("operations_by_state", OPERATIONS.c.policy_id, OPERATIONS.c.state)

CHECKPOINTS = Table(
    "checkpoints",
    METADATA,
    Column("policy_id", String(64), primary_key=True),
    Column("checkpoint_id", String(64), primary_key=True),
    Column("version", Integer, nullable=False),
    Column("seq", Integer, nullable=False),
    Column("replay_from_seq", Integer, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("size_bytes", Integer, nullable=False),
)


def open_database(url: str) -> Engine:
    """A database with the journal's tables. For SQLite: one connection, durable at each commit."""
    if not url.startswith("sqlite"):
        engine = create_engine(url, pool_pre_ping=True)
    else:
        engine = create_engine(
            url, poolclass=StaticPool, connect_args={"check_same_thread": False, "timeout": 30}
        )
        listen: Callable[..., None] = event.listen
        listen(engine, "connect", _make_durable)
    METADATA.create_all(engine)
    return engine


def _make_durable(connection: sqlite3.Connection, _record: object) -> None:
    """WAL with an fsync at each commit; folding the log back every 256 pages keeps it small."""
    cursor = connection.cursor()
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "wal_autocheckpoint=256"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()
