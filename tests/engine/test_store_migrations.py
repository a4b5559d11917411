"""Schemas of the journal: from nothing, from before there were revisions, from the future."""

from __future__ import annotations

import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Engine, inspect, text
from sqlalchemy.exc import DBAPIError

import ratoon.engine.migrations
from ratoon.engine.connections import connect
from ratoon.engine.journal import JournalState
from ratoon.engine.tables import METADATA, open_database
from ratoon.engine.types import OperationKind, PolicyState, StepResult
from ratoon.errors import ErrorCode, RatoonError
from tests.engine.fake_trainer import INFO
from tests.engine.stores import Stores

# What `sqlite3 ratoon.sqlite .dump` printed of a journal written before there were revisions.
BEFORE = Path(__file__).with_name("journal_before_migrations.sql")


def revision(engine: Engine) -> str | None:
    with engine.begin() as connection:
        return MigrationContext.configure(connection).get_current_revision()


def execute(engine: Engine, *statements: str) -> None:
    with engine.begin() as connection:
        for statement in statements:
            connection.execute(text(statement))


def newest_revision() -> str:
    folder = Path(ratoon.engine.migrations.__file__).parent
    newest = ScriptDirectory(str(folder)).get_current_head()
    assert newest is not None
    return newest


@pytest.fixture
def old_engine(database_url: str) -> Engine:
    """A database as the last version without revisions left it, policy `p` in it."""
    engine = connect(database_url)
    script = BEFORE.read_text()
    if engine.dialect.name == "sqlite":
        with sqlite3.connect(database_url.removeprefix("sqlite:///")) as connection:
            connection.executescript(script)
    else:
        with engine.begin() as connection:
            for statement in script.removeprefix("BEGIN TRANSACTION;").split(";\n"):
                if statement.strip() not in ("", "COMMIT"):
                    connection.exec_driver_sql(statement.replace("%", "%%"))
    return engine


def test_a_new_database_has_the_tables_that_the_code_names(database_url: str) -> None:
    engine = open_database(database_url)
    with engine.begin() as connection:
        context = MigrationContext.configure(connection)
        assert compare_metadata(context, METADATA) == []
    assert revision(engine) == newest_revision()
    engine.dispose()


def test_a_database_from_before_revisions_is_upgraded_and_keeps_everything(
    old_engine: Engine, database_url: str
) -> None:
    stores = Stores(database_url)
    with stores.engine.begin() as connection:
        assert compare_metadata(MigrationContext.configure(connection), METADATA) == []
    assert revision(stores.engine) == newest_revision()
    history = stores.store.history("p")
    policy, (checkpoint,) = history.policy, history.checkpoints
    assert (policy.state, policy.version, policy.next_seq) == (PolicyState.READY, 1, 5)
    info = replace(INFO, optimizer_states="")
    assert (policy.info, policy.published, policy.token) == (info, (0, 1), 1)
    assert (checkpoint.info.checkpoint_id, checkpoint.info.size_bytes) == ("c", 8)
    assert (checkpoint.weights_digest, history.records[0].numerics) == ("", "")
    assert [record.seq for record in history.records] == [2, 3, 4]
    assert history.records[2].state is JournalState.APPLYING
    assert history.records[2].plan == {"plan": {"micro_batches": [1]}}
    first = stores.store.find_operation("p.1")
    assert first is not None
    assert isinstance(first.result, StepResult)
    assert (first.kind, first.result.report.loss) == (OperationKind.UPDATE, 0.5)
    assert stores.fenced.acquire("p") > 1
    stores.engine.dispose()
    old_engine.dispose()


def test_an_open_of_the_newest_schema_changes_nothing(database_url: str) -> None:
    first = Stores(database_url).with_policy()
    second = Stores(database_url)
    assert second.store.policies() == first.store.policies()
    assert revision(second.engine) == newest_revision()


def test_a_database_newer_than_the_code_is_refused_by_name(database_url: str) -> None:
    engine = open_database(database_url)
    execute(engine, "UPDATE alembic_version SET version_num = '9999'")
    with pytest.raises(RatoonError, match="revision 9999") as caught:
        open_database(database_url)
    assert caught.value.code is ErrorCode.UNSUPPORTED
    assert caught.value.expected == f"at most {newest_revision()}"
    assert revision(engine) == "9999"
    engine.dispose()


def test_an_upgrade_that_fails_leaves_nothing_behind(database_url: str) -> None:
    """Half an upgrade would be of no revision: this one fails at its third table."""
    engine = connect(database_url)
    execute(engine, "CREATE TABLE checkpoints (mine INTEGER)")
    with pytest.raises(DBAPIError, match="checkpoints"):
        open_database(database_url)
    assert inspect(engine).get_table_names() == ["checkpoints"]
    execute(engine, "DROP TABLE checkpoints")
    open_database(database_url).dispose()
    assert revision(engine) == newest_revision()
    engine.dispose()
