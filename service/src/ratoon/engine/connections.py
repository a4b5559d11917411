"""Connections to the journal's database: SQLite or PostgreSQL, by URL, durable at each commit.

Enters a URL, leaves an engine. Invariant: once a transaction's commit returns, what it wrote
survives a power cut; what it read under `FOR UPDATE` did not change until then, on either kind.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url, text
from sqlalchemy.exc import ArgumentError
from sqlalchemy.pool import StaticPool

from ratoon.errors import ErrorCode, RatoonError, invalid

_EXPECTED = "sqlite:///PATH or postgresql://USER:PASSWORD@HOST:PORT/NAME"
# How long a writer of SQLite waits for another process's transaction.
_BUSY_S = 30
# Of each PostgreSQL session, whatever the server's defaults are. The time limits end what a lost
# host would otherwise hold for ever: a lock, or our wait for one.
_SESSION = {
    "synchronous_commit": "on",
    "lock_timeout": "30s",
    "statement_timeout": "60s",
    "idle_in_transaction_session_timeout": "60s",
}
_CONNECT = {
    "connect_timeout": 10,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 4,
    "tcp_user_timeout": 30_000,
}


def connect(url: str) -> Engine:
    """An engine; nothing is in the database yet.

    Raises INVALID_ARGUMENT for a URL of another kind, UNSUPPORTED for a PostgreSQL server that does
    not sync its log, `sqlalchemy.exc.OperationalError` where the database cannot be reached.
    """
    try:
        parsed = make_url(url)
    except ArgumentError:
        # The URL may hold a password: it is in no message.
        raise invalid("database_url", "no URL", _EXPECTED) from None
    match parsed.get_backend_name():
        case "sqlite":
            return _sqlite(parsed)
        case "postgresql":
            return _postgresql(parsed)
        case name:
            raise invalid("database_url", name, _EXPECTED)


def _sqlite(url: URL) -> Engine:
    """One connection, which one thread at a time uses; other processes may have theirs."""
    engine = create_engine(
        url, poolclass=StaticPool, connect_args={"check_same_thread": False, "timeout": _BUSY_S}
    )
    listen: Callable[..., None] = event.listen
    listen(engine, "connect", _make_durable)
    listen(engine, "begin", _begin)
    return engine


def _make_durable(connection: sqlite3.Connection, _record: object) -> None:
    """WAL with an fsync at each commit; folding the log back every 256 pages keeps it small."""
    # The module would begin a transaction at the first write: after the reads that decided it.
    connection.isolation_level = None
    cursor = connection.cursor()
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "wal_autocheckpoint=256"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _begin(connection: Connection) -> None:
    """Take the write lock first: SQLite has no `FOR UPDATE`."""
    connection.exec_driver_sql("BEGIN IMMEDIATE")


def _postgresql(url: URL) -> Engine:
    """Sessions that wait for the log; a row that is read under `FOR UPDATE` is the newest one."""
    given = url.query.get("options", "")
    settings = " ".join(f"-c {name}={value}" for name, value in _SESSION.items())
    options = f"{given if isinstance(given, str) else ' '.join(given)} {settings}".strip()
    engine = create_engine(
        url.set(drivername="postgresql+psycopg"),
        isolation_level="READ COMMITTED",
        pool_pre_ping=True,
        connect_args=_CONNECT | {"options": options},
    )
    with engine.begin() as connection:
        for name in ("fsync", "full_page_writes"):
            if connection.execute(text(f"SHOW {name}")).scalar_one() != "on":
                raise RatoonError(
                    ErrorCode.UNSUPPORTED,
                    f"database_url: the PostgreSQL server has {name} off, so that a power cut may "
                    "lose what was acknowledged",
                    field="database_url",
                    got=f"{name} = off",
                    expected=f"{name} = on",
                )
    return engine
