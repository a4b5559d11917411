"""Connections to the journal's database: SQLite or PostgreSQL, by URL, durable at each commit.

What a transaction wrote survives a power cut once its commit returns, and what it read under `FOR
UPDATE` cannot change before then. An upgrade of the schema is one transaction, run by one process
at a time: it happens whole or not at all.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import (
    URL,
    Connection,
    Dialect,
    Engine,
    ExceptionContext,
    create_engine,
    event,
    func,
    make_url,
    select,
    text,
)
from sqlalchemy.exc import ArgumentError, DBAPIError, OperationalError
from sqlalchemy.pool import ConnectionPoolEntry, QueuePool

from ratoon.engine.journal.integrity import check_log
from ratoon.engine.refusals import disk_full
from ratoon.errors import ErrorCode, RatoonError, invalid
from ratoon.log import get_logger

if TYPE_CHECKING:
    import psycopg

_LOG = get_logger("connections")
_EXPECTED = "sqlite:///PATH or postgresql://USER:PASSWORD@HOST:PORT/NAME"
# How long a SQLite writer waits for another process's transaction.
_BUSY_S = 30
_SWITCH_S = 0.01
# Set in each PostgreSQL session, whatever the server's defaults are. The time limits release locks
# and connections of a host that has gone.
_SESSION = {
    "lock_timeout": "30s",
    "statement_timeout": "60s",
    "idle_in_transaction_session_timeout": "60s",
}
# Values of `synchronous_commit` that wait for this server's log, or a synchronous standby's too.
_DURABLE = ("on", "remote_apply")
# How long, and how often, to retry opening a session.
_PATIENCE_S = 60.0
_RETRY_S = 0.5
_TIMELINE = "timeline"
_CONNECT = {
    # A standby takes no writes: wait for it, or try the URL's other hosts.
    "target_session_attrs": "read-write",
    "connect_timeout": 10,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 4,
    "tcp_user_timeout": 30_000,
}
_FOLDER = Path(__file__).parent / "migrations"
# PostgreSQL's advisory lock for upgrades; any number that nobody else uses.
_LOCK = 0x7261746F6F6E


def connect(url: str) -> Engine:
    """A SQLAlchemy engine for a database that may be empty.

    Raises INVALID_ARGUMENT for a URL of another kind, UNSUPPORTED for a PostgreSQL server that does
    not sync its log, `sqlalchemy.exc.OperationalError` where the database cannot be reached, and
    INTERNAL for a damaged SQLite log. A damaged SQLite file raises INTERNAL at its first use.
    """
    try:
        parsed = make_url(url)
    except ArgumentError:
        # The URL may hold a password, so the message leaves it out.
        raise invalid("database_url", "no URL", _EXPECTED) from None
    match parsed.get_backend_name():
        case "sqlite":
            return _sqlite(parsed)
        case "postgresql":
            return _postgresql(parsed)
        case name:
            raise invalid("database_url", name, _EXPECTED)


def _sqlite(url: URL) -> Engine:
    """One connection, which threads share in turn; other processes may have their own."""
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
    """WAL with an fsync at each commit; a checkpoint every 256 pages keeps it small."""
    # The sqlite3 module would begin a transaction only at the first write, after the reads that
    # decided it.
    connection.isolation_level = None
    # Damaged text must still be readable, so that the row's digest can detect it.
    connection.text_factory = _decode
    try:
        _log_ahead(connection)
        for pragma in ("synchronous=FULL", "wal_autocheckpoint=256"):
            connection.execute(f"PRAGMA {pragma}")
        fault = str(connection.execute("PRAGMA integrity_check(1)").fetchone()[0])
    except sqlite3.DatabaseError as err:
        # Other errors mean locked, full or unreadable.
        if err.sqlite_errorcode & 0xFF not in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            raise
        fault = str(err)
    except UnicodeDecodeError as err:
        # SQLite's own message, which contains a damaged name.
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
    """WAL mode. SQLite does not wait for processes that switch a new file at the same moment."""
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
    """Sessions that wait for the log. A row read under `FOR UPDATE` is the newest one."""
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
    """Turn a full disk into RESOURCE_EXHAUSTED; the transaction is rolled back by then."""
    refusal = disk_full(context.original_exception)
    if refusal is not None:
        raise refusal from context.original_exception


def _end_read_only_session(context: ExceptionContext) -> None:
    """Treat a server that became read-only as disconnected; nothing was written."""
    from psycopg.errors import ReadOnlySqlTransaction

    if isinstance(context.original_exception, ReadOnlySqlTransaction):
        context.is_disconnect = True
        raise OperationalError(
            context.statement, context.parameters, context.original_exception
        ) from context.original_exception


def _wait_for_server(
    _dialect: Dialect, _record: object, _arguments: object, parameters: dict[str, Any]
) -> psycopg.Connection:
    """A session that can write. Waits for a server that is down, starting or a standby.

    Raises `psycopg.OperationalError` after `_PATIENCE_S`, or at once where the server refuses.
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
    """Make commits wait for the log, unless server, database or URL ask for more."""
    level = session.execute("SELECT current_setting('synchronous_commit')").fetchone()
    if level is None or level[0] not in _DURABLE:
        session.execute("SET synchronous_commit = on")
    session.commit()
    return session


def _note_timeline(session: psycopg.Connection, record: ConnectionPoolEntry) -> None:
    """Record the session's timeline, which cannot change: each promotion begins another session."""
    row = session.execute("SELECT left(pg_walfile_name(pg_current_wal_lsn()), 8)").fetchone()
    assert row is not None
    record.info[_TIMELINE] = int(row[0], 16)
    session.commit()


def timeline_of(connection: Connection) -> int:
    """Timeline of the PostgreSQL server that the session is on; 0: SQLite."""
    return int(connection.info.get(_TIMELINE, 0))


def is_server_away(error: DBAPIError) -> bool:
    """Whether no writable PostgreSQL server was reached, or it is starting or stopping."""
    import psycopg

    return isinstance(error.orig, psycopg.OperationalError) and not _is_refused(error.orig)


def _is_refused(error: psycopg.OperationalError) -> bool:
    """A server that is starting or stopping says: the database system is ..."""
    reason = str(error)
    return "FATAL" in reason and "database system is" not in reason


def upgrade(engine: Engine) -> None:
    """Run the missing revisions, if any.

    Raises UNSUPPORTED, changing nothing, for a revision that this version of Ratoon does not know.
    """
    with engine.begin() as connection:
        if connection.dialect.name == "postgresql":
            # However long another upgrade, or a large table, takes.
            connection.execute(text("SET LOCAL lock_timeout = 0"))
            connection.execute(text("SET LOCAL statement_timeout = 0"))
            connection.execute(select(func.pg_advisory_xact_lock(_LOCK)))
        config = Config()
        # ConfigParser interpolates percent signs.
        config.set_main_option("script_location", str(_FOLDER).replace("%", "%%"))
        config.attributes["connection"] = connection
        revision = MigrationContext.configure(connection).get_current_revision()
        if revision is not None:
            _check_known(config, revision)
        command.upgrade(config, "head")


def _check_known(config: Config, revision: str) -> None:
    scripts = ScriptDirectory.from_config(config)
    if revision in {script.revision for script in scripts.walk_revisions()}:
        return
    newest = scripts.get_current_head()
    raise RatoonError(
        ErrorCode.UNSUPPORTED,
        f"database_url: the database's schema is revision {revision}, this version of Ratoon knows "
        f"revisions up to {newest}: start the version that wrote it, or a newer one",
        field="database_url",
        got=revision,
        expected=f"at most {newest}",
    )
