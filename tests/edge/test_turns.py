"""Whose turn it is at the gRPC listener: no connection waits for another's backlog."""

from __future__ import annotations

import asyncio
import gc

import pytest

from ratoon.edge import turns
from ratoon.edge.turns import MAX_UNJUDGED, MAX_UNJUDGED_OF_CONNECTION, Host, Share, Turns
from tests.until import until


class Connection:
    """Has `num_turns` turns' worth of frames, or calls of which each takes a place."""

    def __init__(self, name: str, host: Host, queue: Turns, log: list[str]) -> None:
        self.name = name
        self.num_turns = 0
        self.num_calls = 0
        self.share = Share(host, queue, self._advance)
        self._log = log

    def _advance(self) -> None:
        while self.num_calls and self.share.take():
            self._log.append(self.name)
            self.num_calls -= 1
        if self.num_turns:
            self._log.append(self.name)
            self.num_turns -= 1
            self.share.ask()


@pytest.fixture
def log() -> list[str]:
    return []


def _connections(log: list[str], names: str, host: Host | None = None) -> list[Connection]:
    host, queue = host or Host(), Turns()
    return [Connection(name, host, queue, log) for name in names]


async def test_connections_of_a_host_take_turns(log: list[str]) -> None:
    """What came later stood behind the whole backlog of what came before."""
    flood, good = _connections(log, "fg")
    flood.num_turns = 100
    flood.share.ask()
    await asyncio.sleep(0)
    good.num_turns = 1
    begun = len(log)
    good.share.ask()
    await until(lambda: "g" in log)
    assert log.index("g") <= begun + 1


async def test_hosts_take_turns(log: list[str]) -> None:
    """A host of many connections has as many turns as one of a single one."""
    queue, crowd = Turns(), Host()
    many = [Connection("f", crowd, queue, log) for _ in range(20)]
    good = Connection("g", Host(), queue, log)
    for one in (*many, good):
        one.num_turns = 10
        one.share.ask()
    await until(lambda: log.count("g") == 10)
    assert log[: log.index("g") + 20].count("g") == 10


async def test_the_loop_goes_on_between_turns(log: list[str]) -> None:
    """256 KiB of small frames held it for 0.1 s, and a call takes a dozen of its rounds."""
    (flood,) = _connections(log, "f")
    flood.num_turns = 1000
    flood.share.ask()
    for _ in range(4):
        before = len(log)
        await asyncio.sleep(0)
        assert len(log) <= before + turns._TURNS_AT_ONCE


async def test_one_that_fails_does_not_stop_the_others(log: list[str]) -> None:
    broken, good = _connections(log, "bg")
    broken.share._advance = lambda: 1 / 0  # type: ignore[assignment, return-value]
    asyncio.get_running_loop().set_exception_handler(lambda *_: log.append("!"))
    good.num_turns = 1
    for one in (broken, good):
        one.share.ask()
    await until(lambda: log == ["!", "g"])


async def test_a_connection_has_its_share_of_the_places(log: list[str]) -> None:
    flood, good = _connections(log, "fg")
    flood.num_calls = 100
    flood.share.ask()
    await until(lambda: len(log) == MAX_UNJUDGED_OF_CONNECTION)
    good.num_calls = 1
    good.share.ask()
    await until(lambda: log[-1] == "g")
    flood.share.give_back()
    await until(lambda: log[-1] == "f")
    assert len(log) == MAX_UNJUDGED_OF_CONNECTION + 2
    assert good.share.host.num_unjudged == MAX_UNJUDGED_OF_CONNECTION + 1


async def test_who_waits_longest_has_the_next_place(log: list[str]) -> None:
    """A place passes to the first in line, past those that have ended or cannot go on."""
    host = Host()
    crowd = _connections(log, "f" * 4, host)
    for one in crowd:
        one.num_calls = 100
        one.share.ask()
    await until(lambda: len(log) == MAX_UNJUDGED)
    ended, stuck, good, last = _connections(log, "esgl", host)
    for one in (ended, stuck, good, last):
        one.num_calls = 1
        one.share.ask()
    await asyncio.sleep(0)
    ended.share.end()
    stuck._advance = stuck.share.decline  # type: ignore[method-assign]
    stuck.share._advance = stuck.share.decline
    crowd[0].share.give_back()
    await until(lambda: "g" in log)
    assert log[MAX_UNJUDGED:] == ["g"]
    assert host.num_unjudged == MAX_UNJUDGED
    good.share.give_back()
    await until(lambda: "l" in log)
    last.share.give_back()
    await until(lambda: log[-1] == "f")


async def test_all_places_are_free_in_the_end(log: list[str]) -> None:
    host = Host()
    crowd = _connections(log, "f" * 40, host)
    for one in crowd:
        one.num_calls = 3
        one.share.ask()
    await until(lambda: len(log) == MAX_UNJUDGED)
    # Connections that hold places, and one that has just been given one, end.
    for one in crowd:
        for _ in range(one.share._num_unjudged):
            one.share.give_back()
        one.share.end()
    await asyncio.sleep(0.01)
    assert host.num_unjudged == 0


async def test_who_resets_calls_rests_and_nobody_else(
    log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "_RESETS_AT_ONCE", 0)
    monkeypatch.setattr(turns, "_RESETS_PER_S", 20.0)
    flood, good = _connections(log, "fg")
    loop = asyncio.get_running_loop()
    begin = loop.time()
    flood.share.rest()
    for one in (flood, good):
        one.num_turns = 1
        one.share.ask()
    await until(lambda: "f" in log)
    assert log == ["g", "f"]
    assert loop.time() - begin >= 0.05


def test_connections_of_one_host_share_its_state_for_as_long_as_there_is_one() -> None:
    queue = Turns()
    host = queue.host("192.0.2.1")
    share = Share(host, queue, lambda: None)
    host.num_unjudged = 3
    del host
    gc.collect()
    assert queue.host("192.0.2.1").num_unjudged == 3
    assert queue.host("192.0.2.2").num_unjudged == 0
    del share
    gc.collect()
    assert queue.host("192.0.2.1").num_unjudged == 0
