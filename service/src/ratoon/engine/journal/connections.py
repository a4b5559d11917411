"""Connections to the journal's database: SQLite or PostgreSQL, by URL, durable at each commit.

Enters a URL, leaves an engine. Invariant: once a transaction's commit returns, what it wrote
survives a power cut; what it read under `FOR UPDATE` did not change until then, on either kind.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import (
    URL,
    Connection,
    Dialect,
    Engine,
    ExceptionContext,
    create_engine,
    event,
    make_url,
    text,
)
from sqlalchemy.exc import ArgumentError, DBAPIError, OperationalError
from sqlalchemy.pool import ConnectionPoolEntry, QueuePool

from ratoon.engine.files.disk import disk_full
from ratoon.engine.journal.log_check import check_log
from ratoon.errors import ErrorCode, RatoonError, invalid
from ratoon.log import get_logger

if TYPE_CHECKING:
    import psycopg

_LOG = get_logger("connections")
_EXPECTED = "sqlite:///PATH or postgresql://USER:PASSWORD@HOST:PORT/NAME"
# How long a writer of SQLite waits for another process's transaction.
_BUSY_S = 30
_SWITCH_S = 0.01
# Of each PostgreSQL session, whatever the server's defaults are. The time limits end what a lost
# host would otherwise hold for ever: a lock, or our wait for one.
_SESSION = {
    "lock_timeout": "30s",
    "statement_timeout": "60s",
    "idle_in_transaction_session_timeout": "60s",
}
# Of `synchronous_commit`: those that wait for this server's log, and a synchronous standby's.
_DURABLE = ("on", "remote_apply")
# How long a session that cannot be had is tried for, and how often.
_PATIENCE_S = 60.0
_RETRY_S = 0.5
_TIMELINE = "timeline"
_CONNECT = {
    # A standby is no database to write to: it is waited for, or passed over where the URL has more.
    "target_session_attrs": "read-write",
    "connect_timeout": 10,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 4,
    "tcp_user_timeout": 30_000,
}


def connect(url: str) -> Engine:
    """An engine; nothing is in the database yet.

    Raises INVALID_ARGUMENT for a URL of another kind, UNSUPPORTED for a PostgreSQL server that does
    not sync its log, `sqlalchemy.exc.OperationalError` where the database cannot be reached, and
    INTERNAL for a damaged log of SQLite; the first use of a damaged SQLite file raises it too.
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
    """One connection, which threads take in turn; other processes may have theirs."""
    if url.database and url.database != ":memory:":
        check_log(Path(url.database))
    engine = create_engine(
        url,
        poolclass=QueuePool,
        pool_size=1,
        max_overflow=0,
        pool_timeout=_BUSY_S,
        connect_args={"check_same_thread": False, "timeout": _BUSY_S},
    )
    listen: Callable[..., None] = event.listen
    listen(engine, "connect", _make_durable)
    listen(engine, "begin", _begin)
    listen(engine, "handle_error", _name_full_disk)
    return engine


def _make_durable(connection: sqlite3.Connection, _record: object) -> None:
    """WAL with an fsync at each commit; folding the log back every 256 pages keeps it small."""
    # The module would begin a transaction at the first write: after the reads that decided it.
    connection.isolation_level = None
    # Text that is none any more is to be found by its row's digest, which needs to see it.
    connection.text_factory = _decode
    try:
        _log_ahead(connection)
        for pragma in ("synchronous=FULL", "wal_autocheckpoint=256"):
            connection.execute(f"PRAGMA {pragma}")
        fault = str(connection.execute("PRAGMA integrity_check(1)").fetchone()[0])
    except sqlite3.DatabaseError as err:
        # The rest is of another kind: locked, full, not to be opened.
        if err.sqlite_errorcode & 0xFF not in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            raise
        fault = str(err)
    except UnicodeDecodeError as err:
        # SQLite's own words, with a damaged name in them.
        fault = f"a name is {err.object!r}"
    if fault != "ok":
        path = connection.execute("PRAGMA database_list").fetchone()[2]
        raise RatoonError(
            ErrorCode.INTERNAL,
            f"database_url: the journal {path} is damaged ({fault}): restore it from a backup",
            field="database_url",
            got=fault,
            expected="a whole SQLite file",
        )


def _log_ahead(connection: sqlite3.Connection) -> None:
    """WAL mode. Others that switch a new file at the same moment are not waited for by SQLite."""
    deadline = time.monotonic() + _BUSY_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
        except sqlite3.OperationalError as err:
            if err.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
            time.sleep(_SWITCH_S)
        else:
            return


def _decode(data: bytes) -> str:
    return data.decode(errors="surrogateescape")


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
    listen: Callable[..., None] = event.listen
    listen(engine, "do_connect", _wait_for_server)
    listen(engine, "connect", _note_timeline)
    listen(engine, "handle_error", _name_full_disk)
    listen(engine, "handle_error", _end_read_only_session)
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
        if not connection.execute(text("SHOW synchronous_standby_names")).scalar_one():
            _LOG.warning(
                "no synchronous standby: a failover may lose operations that were acknowledged",
                setting="synchronous_standby_names",
            )
    return engine


def _name_full_disk(context: ExceptionContext) -> None:
    """Raises RESOURCE_EXHAUSTED in the place of a full disk; the transaction is undone by then."""
    refusal = disk_full(context.original_exception)
    if refusal is not None:
        raise refusal from context.original_exception


def _end_read_only_session(context: ExceptionContext) -> None:
    """A server that takes writes no more is away, and its sessions with it; nothing was written."""
    from psycopg.errors import ReadOnlySqlTransaction

    if isinstance(context.original_exception, ReadOnlySqlTransaction):
        context.is_disconnect = True
        raise OperationalError(
            context.statement, context.parameters, context.original_exception
        ) from context.original_exception


def _wait_for_server(
    _dialect: Dialect, _record: object, _arguments: object, parameters: dict[str, Any]
) -> psycopg.Connection:
    """A session that writes; a server that is down, starting or a standby is waited for.

    Raises `psycopg.OperationalError` after `_PATIENCE_S`, and at once where the server refuses.
    """
    import psycopg

    deadline = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return _made_durable(psycopg.connect(**parameters))
        except psycopg.OperationalError as err:
            if _is_refused(err) or time.monotonic() > deadline:
                raise
            _LOG.warning("database does not answer", reason=str(err))
            time.sleep(_RETRY_S)


def _made_durable(session: psycopg.Connection) -> psycopg.Connection:
    """A commit waits for the log, or for more where server, database or URL say so."""
    level = session.execute("SELECT current_setting('synchronous_commit')").fetchone()
    if level is None or level[0] not in _DURABLE:
        session.execute("SET synchronous_commit = on")
    session.commit()
    return session


def _note_timeline(session: psycopg.Connection, record: ConnectionPoolEntry) -> None:
    """A session is on one timeline for as long as it lasts: each promotion begins another."""
    row = session.execute("SELECT left(pg_walfile_name(pg_current_wal_lsn()), 8)").fetchone()
    assert row is not None
    record.info[_TIMELINE] = int(row[0], 16)
    session.commit()


def timeline_of(connection: Connection) -> int:
    """Of the PostgreSQL server that the session is on; 0: SQLite."""
    return int(connection.info.get(_TIMELINE, 0))


def is_server_away(error: DBAPIError) -> bool:
    """Whether no PostgreSQL server that takes writes could be reached, or it starts or stops."""
    import psycopg

    return isinstance(error.orig, psycopg.OperationalError) and not _is_refused(error.orig)


def _is_refused(error: psycopg.OperationalError) -> bool:
    """A server that goes down or comes up says: the database system is ..."""
    reason = str(error)
    return "FATAL" in reason and "database system is" not in reason
