"""What the floor's counts are of."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import psutil
import pytest

from benchmarks.service.floor_counts import committed_writes, held

pytestmark = pytest.mark.more


def test_transactions_are_counted_not_their_statements(tmp_path: Path) -> None:
    database = sqlite3.connect(tmp_path / "some.sqlite", isolation_level=None)
    database.execute("PRAGMA journal_mode=WAL")
    database.execute("CREATE TABLE rows (value BLOB)")
    before = committed_writes(tmp_path / "some.sqlite")
    for _ in range(3):
        database.execute("BEGIN")
        for _ in range(4):
            # The row takes more than one page.
            database.execute("INSERT INTO rows VALUES (zeroblob(10000))")
        database.execute("COMMIT")
    assert committed_writes(tmp_path / "some.sqlite") == before + 3
    database.execute("PRAGMA wal_checkpoint(RESTART)")
    database.execute("INSERT INTO rows VALUES (1)")
    # Frames of the log before are still in the file.
    assert committed_writes(tmp_path / "some.sqlite") == 1
    database.close()


def test_what_is_held_names_processes_and_passes_over_those_that_are_gone() -> None:
    gone = psutil.Popen(["true"])
    gone.wait()
    (row,) = held([psutil.Process(), gone])
    assert row["rss_mb"] >= row["pss_mb"] > 1
    assert row["name"]
