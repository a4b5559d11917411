"""Upgrades a database to the newest revision of the journal's schema.

An upgrade is one transaction, run by one process at a time: it happens whole or not at all.
"""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Engine, func, select, text

from ratoon.errors import ErrorCode, RatoonError

_FOLDER = Path(__file__).parent / "migrations"
# PostgreSQL's advisory lock for upgrades; any number that nobody else uses.
_LOCK = 0x7261746F6F6E


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
