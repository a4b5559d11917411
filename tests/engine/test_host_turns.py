"""Turns of tenants on one process: short calls do not wait for many long ones, and who lost it."""

from __future__ import annotations

import asyncio

import pytest

from ratoon.cluster.worker_process import HostTurns
from ratoon.engine.policy.run import MAX_LOSSES, LostWorkers
from ratoon.engine.worker.tasks import NeighbourLostError, WorkerLostError


class Process:
    """Computes calls that take as long as they say, on a clock of its own."""

    def __init__(self) -> None:
        self.now = 0.0
        self.turns = HostTurns(lambda: self.now)
        self.ran: list[str] = []

    async def compute(self, tenant: str, seconds: float) -> None:
        async with self.turns.taken(tenant):
            await asyncio.sleep(0)
            self.now += seconds
            self.ran.append(tenant)

    async def busy(self, tenant: str, seconds: float, calls: int) -> None:
        """A tenant that sends its next call once the one before is answered."""
        for _ in range(calls):
            await self.compute(tenant, seconds)


async def test_calls_of_a_length_alternate() -> None:
    process = Process()
    await asyncio.gather(*(process.busy(name, 1.0, 4) for name in "abc"))
    rounds = [process.ran[start : start + 3] for start in range(0, 12, 3)]
    assert all(sorted(each) == ["a", "b", "c"] for each in rounds)


async def test_a_tenant_gets_a_share_of_time_and_not_of_calls() -> None:
    """Two of the three always wait: between two alone, calls alternate whatever they take."""
    process = Process()
    long = asyncio.create_task(process.busy("long", 10.0, 4))
    await asyncio.gather(process.busy("short", 1.0, 20), process.busy("brief", 1.0, 20))
    # 10 short calls of each for a long one, and not one.
    assert process.ran.count("long") <= 3
    await long


async def test_tenants_that_are_gone_are_let_go() -> None:
    process = Process()
    for number in range(100):
        await asyncio.gather(process.compute(f"gone-{number}", 1.0), process.compute("stays", 1.0))
    assert {*process.turns._used} <= {"stays", "gone-98", "gone-99"}


async def test_one_that_was_away_has_saved_up_nothing() -> None:
    process = Process()
    await process.busy("old", 1.0, 50)
    await asyncio.gather(process.busy("new", 1.0, 6), process.busy("old", 1.0, 6))
    assert set(process.ran[50:54]) == {"old", "new"}
    await process.busy("new", 1.0, 50)
    await asyncio.gather(process.busy("new", 1.0, 6), process.busy("old", 1.0, 6))
    assert set(process.ran[112:116]) == {"old", "new"}


async def test_a_call_that_is_given_up_passes_its_turn_on() -> None:
    process = Process()
    is_held, may_go = asyncio.Event(), asyncio.Event()

    async def hold() -> None:
        async with process.turns.taken("holder"):
            is_held.set()
            await may_go.wait()

    holder = asyncio.create_task(hold())
    await is_held.wait()
    given_up, patient = (asyncio.create_task(process.compute(name, 1.0)) for name in "ab")
    await asyncio.sleep(0)
    may_go.set()
    await holder
    # It has been given the turn by now, and never takes it.
    given_up.cancel()
    await asyncio.gather(given_up, patient, return_exceptions=True)
    assert given_up.cancelled()
    assert process.ran == ["b"]


async def test_a_loss_is_laid_to_the_call_that_was_computed() -> None:
    """A neighbour's operation must not fail for the workers that this one has lost."""
    turns = HostTurns()
    async with turns.taken("a"):
        waiting = asyncio.create_task(_take(turns, "b"))
        await asyncio.sleep(0)
        assert type(turns.lost("b", "a publication beside it")) is NeighbourLostError
        assert type(turns.lost("a", "it was computing")) is WorkerLostError
    with pytest.raises(NeighbourLostError):
        await waiting
    with pytest.raises(NeighbourLostError):
        await _take(turns, "c")


async def test_a_process_that_is_ended_is_nobodys_loss() -> None:
    """A tenant in doubt takes it along, whatever others compute by then."""
    turns = HostTurns()
    async with turns.taken("b"):
        turns.end()
        assert type(turns.lost("b", "ended")) is NeighbourLostError


async def test_a_process_lost_in_no_turn_is_laid_to_the_call_that_saw_it() -> None:
    turns = HostTurns()
    assert type(turns.lost("a", "a publication alone")) is WorkerLostError


@pytest.mark.parametrize("kind", [WorkerLostError, NeighbourLostError])
async def test_losses_of_neighbours_are_not_counted(kind: type[WorkerLostError]) -> None:
    lost = LostWorkers()

    async def call() -> None:
        raise kind("gone")

    for _ in range(MAX_LOSSES):
        lost.check("p.1")
        with pytest.raises(kind):
            await lost.counted("p.1", call())
    if kind is NeighbourLostError:
        lost.check("p.1")
    else:
        with pytest.raises(Exception, match="4 workers in a row"):
            lost.check("p.1")


async def _take(turns: HostTurns, policy_id: str) -> None:
    async with turns.taken(policy_id):
        pass
