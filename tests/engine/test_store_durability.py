"""What a commit promises: settings of either database, and a PostgreSQL server that crashes."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

import pytest
from psycopg import sql
from sqlalchemy import text
from sqlalchemy.exc import OperationalError

from ratoon.config import RatoonConfig
from ratoon.engine.journal import connections
from ratoon.engine.journal.tables import open_database
from ratoon.engine.settings import EngineSettings
from ratoon.errors import ErrorCode, RatoonError
from tests.engine import postgres_room
from tests.engine.postgres import PostgresServer
from tests.engine.refusals import raises
from tests.engine.stores import Stores
from tests.small_disk import NoMountError


def test_every_commit_to_sqlite_is_synced(tmp_path: Path) -> None:
    """Without synchronous=FULL the log is not on disk when an operation is acknowledged."""
    engine = open_database(f"sqlite:///{tmp_path / 'journal.sqlite'}")
    with engine.begin() as connection:
        assert connection.execute(text("PRAGMA journal_mode")).scalar_one() == "wal"
        assert connection.execute(text("PRAGMA synchronous")).scalar_one() == 2
    engine.dispose()


def test_every_commit_to_postgresql_waits_for_the_log(postgres: PostgresServer) -> None:
    """Also where the server's own default is not to."""
    url = postgres.create_database()
    name = sql.Identifier(url.rpartition("/")[2])
    postgres.execute(sql.SQL("ALTER DATABASE {} SET synchronous_commit = off").format(name))
    engine = open_database(url)
    with engine.begin() as connection:
        assert connection.execute(text("SHOW synchronous_commit")).scalar_one() == "on"
        assert connection.execute(text("SHOW fsync")).scalar_one() == "on"
        assert connection.execute(text("SHOW lock_timeout")).scalar_one() == "30s"
    engine.dispose()


def test_a_postgresql_server_that_does_not_sync_is_refused(postgres: PostgresServer) -> None:
    url = postgres.create_database()
    engine = open_database(url)
    postgres.execute(sql.SQL("ALTER SYSTEM SET fsync = off"))
    try:
        _reload(postgres, "off")
        with raises(ErrorCode.UNSUPPORTED, match="fsync off"):
            open_database(url)
    finally:
        postgres.execute(sql.SQL("ALTER SYSTEM RESET fsync"))
        _reload(postgres, "on")
    engine.dispose()


def _reload(postgres: PostgresServer, fsync: str) -> None:
    postgres.execute(sql.SQL("SELECT pg_reload_conf()"))
    postgres.wait_for_setting("fsync", fsync)


def test_a_postgresql_server_that_crashed_has_what_was_committed(postgres: PostgresServer) -> None:
    """While it is away the store waits, and then goes on without being opened again."""
    stores = Stores(postgres.create_database()).with_policy()
    stores.applied(1, 1)
    before = stores.store.history("p")
    postgres.stop("immediate")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(stores.store.history, "p")
        time.sleep(0.2)
        assert not waiting.done()
        postgres.start()
        assert waiting.result(30) == before
    stores.applied(2, 2)
    policy = stores.policy
    assert policy.version == 2
    stores.engine.dispose()


def test_a_postgresql_server_that_takes_no_writes_is_waited_for(postgres: PostgresServer) -> None:
    """As a standby until it is promoted."""
    url = postgres.create_database()
    change = sql.SQL("ALTER DATABASE {} SET default_transaction_read_only = {}")
    name = sql.Identifier(url.rpartition("/")[2])
    postgres.execute(change.format(name, sql.SQL("on")))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(open_database, url)
        time.sleep(1.0)
        assert not waiting.done()
        postgres.execute(change.format(name, sql.SQL("off")))
        engine = waiting.result(30)
    Stores(url).with_policy().engine.dispose()
    engine.dispose()


def test_a_session_whose_server_takes_no_writes_any_more_is_given_up(
    postgres: PostgresServer,
) -> None:
    """Its first write is refused as where there is no server; the next waits for one."""
    stores = Stores(postgres.create_database()).with_policy()
    stores.applied(1, 1)
    postgres.execute(sql.SQL("ALTER SYSTEM SET default_transaction_read_only = on"))
    try:
        postgres.execute(sql.SQL("SELECT pg_reload_conf()"))
        time.sleep(0.5)
        with pytest.raises(OperationalError, match="read-only"):
            stores.accept(2)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(stores.accept, 2)
            time.sleep(1.0)
            assert not waiting.done()
            postgres.execute(sql.SQL("ALTER SYSTEM RESET default_transaction_read_only"))
            postgres.execute(sql.SQL("SELECT pg_reload_conf()"))
            waiting.result(30)
    finally:
        postgres.execute(sql.SQL("ALTER SYSTEM RESET default_transaction_read_only"))
        postgres.execute(sql.SQL("SELECT pg_reload_conf()"))
    assert [record.seq for record in stores.store.records_from("p", 1)] == [1, 2]
    stores.engine.dispose()


@pytest.mark.parametrize("has_disk", [True, False])
def test_a_postgresql_server_without_room_refuses_and_keeps_what_it_has(
    postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch, has_disk: bool
) -> None:
    """On a disk that is full, and as tests do it where none can be mounted."""
    if not has_disk:
        monkeypatch.setattr(postgres_room, "mounted", _no_mount)
    with postgres_room.small_database(postgres) as database:
        stores = Stores(database.url).with_policy()
        stores.accept(1)
        database.fill()
        seq, error = _first_refused(stores, 2)
        assert error.code is ErrorCode.RESOURCE_EXHAUSTED
        assert error.details["resource"] == "disk"
        assert [record.seq for record in stores.store.records_from("p", 1)] == [*range(1, seq)]
        database.clear()
        stores.accept(seq)
        assert [record.seq for record in stores.store.records_from("p", 1)] == [*range(1, seq + 1)]
        stores.engine.dispose()


def _first_refused(stores: Stores, seq: int) -> tuple[int, RatoonError]:
    """The last pages have some room still."""
    while True:
        try:
            stores.accept(seq)
        except RatoonError as error:
            return seq, error
        seq += 1


def _no_mount(_root: Path, _size_bytes: int) -> NoReturn:
    raise NoMountError("not here")


def test_a_postgresql_server_that_refuses_is_not_waited_for(postgres: PostgresServer) -> None:
    url = postgres.create_database().replace(postgres.password, "hunter2")
    began = time.monotonic()
    with pytest.raises(OperationalError, match="password authentication failed") as caught:
        open_database(url)
    assert time.monotonic() - began < connections._PATIENCE_S
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "got"),
    [
        ("mysql://me:hunter2@127.0.0.1/journal", "mysql"),
        ("me:hunter2@127.0.0.1", "no URL"),
    ],
)
def test_a_url_of_another_kind_is_refused_without_its_password(url: str, got: str) -> None:
    with pytest.raises(RatoonError, match="postgresql://USER:PASSWORD@HOST") as caught:
        open_database(url)
    assert (caught.value.field, caught.value.got) == ("database_url", got)
    assert "hunter2" not in str(caught.value)


def test_no_password_is_in_what_the_settings_print(tmp_path: Path) -> None:
    config = RatoonConfig(
        data_root=tmp_path, database_url="postgresql://me:hunter2@127.0.0.1/journal"
    )
    settings = EngineSettings.from_config(config)
    assert settings.database_url == config.database_url
    assert "hunter2" not in f"{config!r} {settings!r}"
    sqlite = EngineSettings.from_config(RatoonConfig(data_root=tmp_path))
    assert sqlite.database_url == f"sqlite:///{tmp_path / 'ratoon.sqlite'}"
