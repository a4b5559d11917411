"""What callers of one server may occupy: the counting itself, without a wire."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ratoon.edge.budget import ByteBudget, EdgeBounds, EdgeBudget
from ratoon.errors import ErrorCode, RatoonError


class _Connection:
    """A connection whose buffer has `num_bytes`."""

    def __init__(self, num_bytes: int = 0) -> None:
        self.num_bytes = num_bytes
        self.is_closed = False
        self.transport: Any = self

    def get_write_buffer_size(self) -> int:
        return 0 if self.is_closed else self.num_bytes

    def abort(self) -> None:
        self.is_closed = True


def test_addresses_of_one_network_are_one_host() -> None:
    """An attacker has 2**64 addresses of IPv6: each of them had a host's share."""
    budget = EdgeBudget(EdgeBounds(max_connections_of_host=2))
    assert budget.enter(_Connection(), "2001:db8::1")
    assert budget.enter(_Connection(), "2001:db8::2")
    assert not budget.enter(_Connection(), "2001:db8::3")
    assert budget.enter(_Connection(), "2001:db8:0:1::1")
    assert budget.enter(_Connection(), "::ffff:192.0.2.1")
    assert budget.enter(_Connection(), "192.0.2.1")
    assert not budget.enter(_Connection(), "192.0.2.1")


def test_only_an_idle_connection_gives_way() -> None:
    budget = EdgeBudget(EdgeBounds(max_connections=2))
    busy, idle = _Connection(), _Connection()
    for connection in (busy, idle):
        assert budget.enter(connection, "192.0.2.1")
    assert not budget.enter(_Connection(), "192.0.2.2")
    budget.idle(idle)
    assert budget.enter(_Connection(), "192.0.2.2")
    assert (busy.is_closed, idle.is_closed) == (False, True)
    budget.leave(idle)
    budget.leave(busy)
    assert budget.enter(_Connection(), "192.0.2.2")


def test_buffers_of_readers_that_are_behind_count_and_the_longest_is_let_go() -> None:
    budget = EdgeBudget(EdgeBounds(max_unsent_bytes=100))
    slow, other, third = _Connection(80), _Connection(30), _Connection()
    for connection in (slow, other, third):
        assert budget.enter(connection, "192.0.2.1")
    budget.stall(slow)
    assert budget.begin(third, unsent_bytes=20, body_bytes=0) is None
    refusal = budget.begin(other, unsent_bytes=1, body_bytes=0)
    assert refusal is not None
    assert refusal.details["resource"] == "unsent_bytes"
    budget.stall(other)
    budget.finish(third)
    assert (slow.is_closed, other.is_closed) == (True, False)


async def test_a_caller_holds_its_share_and_more_than_that_only_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ratoon.edge.budget.PATIENCE_S", 0.1)
    budget = ByteBudget(10, resource="bytes", most_of_one=5)
    async with budget.hold("a", 8):
        assert budget.total == 8
        with pytest.raises(RatoonError) as refused:
            async with budget.hold("b", 3):
                pytest.fail("there is no room")
        assert refused.value.code is ErrorCode.RESOURCE_EXHAUSTED
        assert refused.value.details["limit"] == "10"
    async with budget.hold("a", 5), budget.hold("b", 5):
        assert budget.total == 10
    assert budget.total == 0


async def test_who_waits_is_let_in_once_there_is_room() -> None:
    budget = ByteBudget(10, resource="bytes", most_of_one=5)
    released = asyncio.Event()

    async def hold() -> None:
        async with budget.hold("a", 5):
            await released.wait()

    first = asyncio.create_task(hold())
    await asyncio.sleep(0)
    second = asyncio.create_task(hold())
    await asyncio.sleep(0.01)
    assert budget.total == 5
    released.set()
    await asyncio.gather(first, second)
    assert budget.total == 0
