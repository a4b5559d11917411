"""A PostgreSQL database that has no room when a test says so.

In: a server. Out: a database on a disk of its own of a few MiB; where none can be mounted, one
whose triggers refuse writes with the SQLSTATE of a full disk. Invariant: the server's log has room.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import psycopg
from psycopg import sql

from tests.engine.postgres import SERVICE_USER, PostgresServer
from tests.small_disk import MIB, NoMountError, mounted

# An empty database takes more than half of it.
DISK_BYTES = 12 * MIB
TABLESPACE = "small"
REFUSE = """
CREATE OR REPLACE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS
$$ BEGIN RAISE EXCEPTION 'no room' USING ERRCODE = 'disk_full'; END $$;
CREATE TRIGGER refuse BEFORE INSERT OR UPDATE ON operations EXECUTE FUNCTION refuse();
CREATE TRIGGER refuse BEFORE INSERT OR UPDATE ON policies EXECUTE FUNCTION refuse();
"""
ALLOW = "DROP TRIGGER refuse ON operations; DROP TRIGGER refuse ON policies"


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallDatabase:
    url: str
    fill: Callable[[], None]
    clear: Callable[[], None]


@contextmanager
def small_database(server: PostgresServer) -> Iterator[SmallDatabase]:
    """An empty database for as long as the block lasts."""
    try:
        with mounted(server.folder / "small", DISK_BYTES) as disk:
            space = disk.root / "space"
            space.mkdir()
            if os.getuid() == 0:
                shutil.chown(space, SERVICE_USER)
            place = sql.SQL("CREATE TABLESPACE {} LOCATION {}")
            server.execute(place.format(sql.Identifier(TABLESPACE), sql.Literal(str(space))))
            url = server.create_database(TABLESPACE)
            yield SmallDatabase(url=url, fill=disk.fill, clear=disk.clear)
            disk.clear()
            server.drop_database(url)
            server.execute(sql.SQL("DROP TABLESPACE {}").format(sql.Identifier(TABLESPACE)))
    except NoMountError:
        url = server.create_database()
        yield SmallDatabase(
            url=url, fill=partial(_run, url, REFUSE), clear=partial(_run, url, ALLOW)
        )


def _run(url: str, script: str) -> None:
    with psycopg.connect(url) as connection:
        connection.execute(script.encode())
