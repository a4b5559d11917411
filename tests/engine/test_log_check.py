"""A log of SQLite that a disk changed is refused, and one that a power cut left is not."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from ratoon.engine.journal.integrity import check_log, find_damage
from ratoon.engine.journal.tables import open_database
from ratoon.errors import RatoonError
from tests.engine.stores import Stores

HEADER_BYTES = 32
FRAME_BYTES = 24 + 4096
SECTOR_BYTES = 512


def commits_of(log: bytes) -> list[int]:
    """Where the transactions end, in bytes."""
    return [
        start + FRAME_BYTES
        for start in range(HEADER_BYTES, len(log), FRAME_BYTES)
        if any(log[start + 4 : start + 8])
    ]


def flipped(log: bytes, place: int) -> bytes:
    damaged = bytearray(log)
    damaged[place] ^= 16
    return bytes(damaged)


@pytest.fixture
def connection(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    opened = sqlite3.connect(tmp_path / "j", isolation_level=None)
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "wal_autocheckpoint=0"):
        opened.execute(f"PRAGMA {pragma}")
    opened.execute("CREATE TABLE t (n INTEGER, x TEXT)")
    yield opened
    opened.close()


def insert(connection: sqlite3.Connection, numbers: range) -> None:
    for number in numbers:
        # Rows take one page or several.
        connection.execute("INSERT INTO t VALUES (?, ?)", (number, "x" * (9000 * (number % 3))))


@pytest.fixture
def log(connection: sqlite3.Connection, tmp_path: Path) -> bytes:
    """Log of some forty transactions."""
    insert(connection, range(40))
    return (tmp_path / "j-wal").read_bytes()


def test_a_changed_byte_before_the_last_transaction_is_found(log: bytes) -> None:
    """SQLite alone drops every commit from there on, and says nothing."""
    *_, before, last = commits_of(log)
    assert last == len(log)
    generator = random.Random(1)
    places = [*range(HEADER_BYTES), *(generator.randrange(before) for _ in range(300))]
    # Two numbers of the header that nothing depends on say nothing but by its checksum.
    found = [place for place in places if find_damage(flipped(log, place))]
    assert set(places) - set(found) <= set(range(before - FRAME_BYTES, before))


def test_what_a_power_cut_leaves_of_the_last_transaction_is_not_damage(log: bytes) -> None:
    assert find_damage(log) == ""
    assert find_damage(b"") == ""
    generator = random.Random(2)
    for stop in commits_of(log):
        start = max([HEADER_BYTES, *(end for end in commits_of(log) if end < stop)])
        for _ in range(8):
            torn = bytearray(log[:stop])
            for sector in range(start, stop, SECTOR_BYTES):
                if generator.random() < 0.5:
                    end = min(sector + SECTOR_BYTES, stop)
                    torn[sector:end] = bytes(end - sector)
            assert find_damage(bytes(torn[: generator.randrange(start, stop + 1)])) == ""
            assert find_damage(bytes(torn)) == ""


def test_a_log_that_begins_anew_over_an_old_one_is_not_damaged(
    connection: sqlite3.Connection, tmp_path: Path, log: bytes
) -> None:
    connection.execute("PRAGMA wal_checkpoint(PASSIVE)")
    anew = log
    for number in range(40, 50):
        insert(connection, range(number, number + 1))
        anew = (tmp_path / "j-wal").read_bytes()
        assert len(anew) == len(log)
        assert find_damage(anew) == ""
    assert find_damage(flipped(anew, HEADER_BYTES + 100))
    # The header alone was written when the power went.
    assert find_damage(anew[:HEADER_BYTES] + log[HEADER_BYTES:]) == ""


def test_a_damaged_log_is_refused_by_name_and_kept(tmp_path: Path) -> None:
    """Opening it and closing it again would fold back what is left, and remove the log."""
    url = f"sqlite:///{tmp_path / 'journal.sqlite'}"
    stores = Stores(url).with_policy()
    for seq in range(1, 6):
        stores.applied(seq, seq)
    path = tmp_path / "journal.sqlite-wal"
    damaged = flipped(path.read_bytes(), HEADER_BYTES + 200)
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "journal.sqlite").write_bytes((tmp_path / "journal.sqlite").read_bytes())
    (copy / "journal.sqlite-wal").write_bytes(damaged)
    with pytest.raises(RatoonError, match=r"log .*journal\.sqlite-wal is damaged") as caught:
        open_database(f"sqlite:///{copy / 'journal.sqlite'}")
    assert caught.value.field == "database_url"
    assert (copy / "journal.sqlite-wal").read_bytes() == damaged
    check_log(tmp_path / "journal.sqlite")
    stores.engine.dispose()
