"""Schemas of the journal: from nothing, as it is, from the future."""

from __future__ import annotations

from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Engine, inspect, text
from sqlalchemy.exc import DBAPIError

import ratoon.engine.journal.migrations
from ratoon.engine.journal.connections import connect
from ratoon.engine.journal.tables import METADATA, open_database
from ratoon.errors import ErrorCode
from tests.engine.refusals import raises
from tests.engine.stores import Stores


def revision(engine: Engine) -> str | None:
    with engine.begin() as connection:
        return MigrationContext.configure(connection).get_current_revision()


def execute(engine: Engine, *statements: str) -> None:
    with engine.begin() as connection:
        for statement in statements:
            connection.execute(text(statement))


def newest_revision() -> str:
    folder = Path(ratoon.engine.journal.migrations.__file__).parent
    newest = ScriptDirectory(str(folder)).get_current_head()
    assert newest is not None
    return newest


def test_a_new_database_has_the_tables_that_the_code_names(database_url: str) -> None:
    engine = open_database(database_url)
    with engine.begin() as connection:
        context = MigrationContext.configure(connection)
        assert compare_metadata(context, METADATA) == []
    assert revision(engine) == newest_revision()
    engine.dispose()


def test_an_open_of_the_newest_schema_changes_nothing(database_url: str) -> None:
    first = Stores(database_url).with_policy()
    second = Stores(database_url)
    assert second.store.policies() == first.store.policies()
    assert revision(second.engine) == newest_revision()


def test_a_database_newer_than_the_code_is_refused_by_name(database_url: str) -> None:
    engine = open_database(database_url)
    execute(engine, "UPDATE alembic_version SET version_num = '9999'")
    with raises(ErrorCode.UNSUPPORTED, match="revision 9999") as caught:
        open_database(database_url)
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
