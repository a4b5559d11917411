"""A journal whose bytes changed on the disk: it is read as it was written, or refused by name."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from psycopg import sql
from sqlalchemy import Table, delete, insert, select, text

from ratoon.engine.commands import SeqKey
from ratoon.engine.journal import tables
from ratoon.engine.journal.integrity import DamagedRowError
from ratoon.engine.journal.tables import (
    CHECKPOINTS,
    OPERATIONS,
    POLICIES,
    STEPS,
    await_database,
    open_database,
)
from ratoon.engine.types import CheckpointInfo
from ratoon.errors import RatoonError
from tests.engine.postgres import PostgresServer
from tests.engine.stores import Stores, journaled

PAGE_BYTES = 4096
NUM_FLIPS = 100


def fill(stores: Stores) -> None:
    """Some forty operations, a checkpoint among their results."""
    checkpoint = CheckpointInfo(
        checkpoint_id="c", version=1, seq=1, replay_from_seq=2, created_at=3.0, size_bytes=8
    )
    stores.accept(1)
    stores.end(1, 1, checkpoint=journaled(checkpoint))
    for seq in range(2, 40):
        stores.applied(seq, seq)
    stores.accept(40)


def everything(stores: Stores) -> list[object]:
    """What the journal says, by its index of keys for some records."""
    store = stores.store
    records: list[object] = [store.find_key("p", SeqKey(seq=seq)) for seq in range(1, 41, 8)]
    everyone, steps = store.records_from("p", 1), store.steps("p", 0, 0, 100)
    return [
        *store.policies(),
        *store.checkpoints("p"),
        *records,
        everyone,
        *steps,
        store.history("p"),
    ]


@pytest.fixture
def stores(database_url: str) -> Iterator[Stores]:
    opened = Stores(database_url).with_policy()
    fill(opened)
    yield opened
    opened.engine.dispose()


CHANGES = (
    ("UPDATE policies SET version = version + 1", "row 'p' of the table policies"),
    ("UPDATE policies SET token = token - 1", "row 'p' of the table policies"),
    ("UPDATE operations SET state = 'accepted'", "of the table operations"),
    ("UPDATE operations SET result = replace(result, '0.5', '7')", "of the table operations"),
    ("UPDATE steps SET version = 7 WHERE seq = 3", "row 'p', 3 of the table steps"),
    ("UPDATE checkpoints SET size_bytes = 9", "row 'p', 'c' of the table checkpoints"),
)


def test_a_row_that_is_not_what_was_written_is_refused_by_name(
    stores: Stores, database_url: str
) -> None:
    expected, changed = everything(stores), (POLICIES, OPERATIONS, STEPS, CHECKPOINTS)
    with stores.engine.begin() as connection:
        written = {
            table: [dict(row) for row in connection.execute(select(table)).mappings()]
            for table in changed
        }
    for change, row in CHANGES:
        with stores.engine.begin() as connection:
            connection.execute(text(change))
        with pytest.raises(DamagedRowError, match=row):
            everything(stores)
        with pytest.raises(RatoonError, match=rf"{row} is damaged") as caught:
            open_database(database_url)
        assert caught.value.field == "database_url"
        with stores.engine.begin() as connection:
            for table, rows in written.items():
                connection.execute(delete(table))
                connection.execute(insert(table), rows)
        assert everything(stores) == expected


def test_a_postgresql_server_sends_rows_in_portions_and_may_go_away_between_them(
    postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole table is no journal that cannot be read, nor one for a memory to hold."""
    url = postgres.create_database()
    opened = Stores(url).with_policy()
    fill(opened)
    opened.engine.dispose()
    monkeypatch.setattr(tables, "_PORTION_ROWS", 7)
    ends = [sql.SQL("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = {}")]
    num_read, verify = 0, vars(tables)["verified"]

    def verified(table: Table, row: Mapping[str, Any]) -> dict[str, Any]:
        nonlocal num_read
        if table is OPERATIONS and ends:
            postgres.execute(ends.pop().format(sql.Literal(url.rpartition("/")[2])))
        num_read += table is OPERATIONS
        return verify(table, row)

    monkeypatch.setattr(tables, "verified", verified)
    await_database(url).dispose()
    # At most a portion, then all 41 by another session.
    assert 41 < num_read <= 41 + 7


def test_a_write_to_a_damaged_row_does_not_make_it_whole(stores: Stores) -> None:
    with stores.engine.begin() as connection:
        connection.execute(text("UPDATE policies SET version = 7"))
    with pytest.raises(DamagedRowError):
        stores.fenced.fail(stores.token, "p", "gone")
    with pytest.raises(DamagedRowError):
        stores.fenced.set_published(stores.token, "p", (1,))
    with stores.engine.begin() as connection:
        assert connection.execute(text("SELECT published FROM policies")).scalar_one() == "[]"


@pytest.mark.parametrize("damage", ["cut in half", "no header", "pages of zeros", "one lost row"])
def test_a_damaged_sqlite_file_is_refused_by_name(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "journal.sqlite"
    stores = Stores(f"sqlite:///{path}").with_policy()
    for seq in range(1, 40):
        stores.applied(seq, seq)
    stores.engine.dispose()
    whole = path.read_bytes()
    size_bytes = len(whole)
    assert size_bytes > 10 * PAGE_BYTES
    match damage:
        case "cut in half":
            path.write_bytes(whole[: size_bytes // 2])
        case "no header":
            path.write_bytes(b"\0" * 64 + whole[64:])
        case "pages of zeros":
            path.write_bytes(whole[: 4 * PAGE_BYTES] + b"\0" * (size_bytes - 4 * PAGE_BYTES))
        case _:
            # An index names an operation that its table does not have.
            path.write_bytes(whole.replace(b"p.17p", b"p.99p"))
    with pytest.raises(RatoonError, match=r"journal\.sqlite is damaged") as caught:
        open_database(f"sqlite:///{path}")
    assert caught.value.field == "database_url"


def test_a_flipped_byte_of_a_sqlite_file_is_harmless_or_refused(tmp_path: Path) -> None:
    """Without digests in the rows a number or a letter of a value came back as another."""
    path = tmp_path / "journal.sqlite"
    url = f"sqlite:///{path}"
    stores = Stores(url).with_policy()
    fill(stores)
    expected = everything(stores)
    stores.engine.dispose()
    whole = path.read_bytes()
    generator = random.Random(7)
    num_refused = 0
    for _ in range(NUM_FLIPS):
        place = generator.randrange(len(whole))
        damaged = bytearray(whole)
        damaged[place] ^= 1 << generator.randrange(8)
        path.write_bytes(damaged)
        try:
            opened = Stores(url)
            assert everything(opened) == expected, f"byte {place}"
            opened.engine.dispose()
        except (RatoonError, DamagedRowError) as err:
            assert re.search("damaged|cannot be read|revision", str(err)), place
            num_refused += 1
        for leftover in ("-wal", "-shm"):
            path.with_name(f"journal.sqlite{leftover}").unlink(missing_ok=True)
    assert num_refused > NUM_FLIPS // 10
