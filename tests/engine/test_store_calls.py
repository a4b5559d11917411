"""What is known of the database without asking it."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import pytest
from sqlalchemy.exc import OperationalError

from ratoon.engine.journal import journal as store_calls
from ratoon.engine.journal.journal import StoreCalls
from ratoon.engine.journal.records import JournalAwayError
from ratoon.engine.journal.store import SqlStore
from ratoon.engine.journal.tables import open_database


async def test_a_check_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was a read behind whatever the store's thread had to do."""
    monkeypatch.setattr(store_calls, "_LOOK_S", 0.0)
    calls, release = StoreCalls(), threading.Event()
    writing = asyncio.create_task(calls.once(release.wait))
    await asyncio.sleep(0.05)
    begin = time.monotonic()
    for _ in range(100):
        calls.check(lambda: None)
    assert time.monotonic() - begin < 0.1
    release.set()
    await writing


async def test_a_database_that_is_away_is_known_and_so_is_its_return() -> None:
    def fail() -> None:
        raise OperationalError("SELECT", {}, Exception("down"))

    calls = StoreCalls()
    with pytest.raises(JournalAwayError):
        await calls.once(fail)
    with pytest.raises(JournalAwayError):
        calls.check(lambda: None)
    await calls.once(lambda: None)
    calls.check(lambda: None)


async def test_what_nobody_else_asks_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle service would say that it is well for ever."""
    monkeypatch.setattr(store_calls, "_LOOK_S", 0.05)
    calls, looked = StoreCalls(), 0

    def look() -> None:
        nonlocal looked
        looked += 1
        raise OSError("gone")

    calls.check(look)
    for _ in range(20):
        await asyncio.sleep(0.01)
        try:
            calls.check(look)
        except JournalAwayError:
            break
    else:
        pytest.fail("it was never said")
    assert looked <= 5


async def test_a_look_that_hangs_is_an_absence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_calls, "_LOOK_S", 0.0)
    monkeypatch.setattr(store_calls, "_HANGS_S", 0.05)
    calls, release = StoreCalls(), threading.Event()
    calls.check(release.wait)
    await asyncio.sleep(0.1)
    with pytest.raises(JournalAwayError):
        calls.check(release.wait)
    release.set()


def test_a_look_takes_no_write_lock(tmp_path: Path) -> None:
    """Listing policies began with it: another process's transaction was waited for."""
    engine = open_database(f"sqlite:///{tmp_path / 'journal'}")
    other = open_database(f"sqlite:///{tmp_path / 'journal'}")
    with other.begin():
        begin = time.monotonic()
        SqlStore(engine).look()
        assert time.monotonic() - begin < 1.0
