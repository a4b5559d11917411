"""A cancel that comes along with a result ends the call: `asyncio.wait_for` of 3.11 loses it."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any

from starlette.types import Message

from ratoon.api.grpc.intake import Intake, Request
from ratoon.config import LimitsConfig
from ratoon.edge.bodies import bounded_body
from ratoon.edge.budget import ByteBudget, EdgeBounds, EdgeBudget
from ratoon.edge.h2_frames import Arrival


async def _is_cancelled(task: asyncio.Task[Any], has_come: Callable[[], object]) -> bool:
    """Whether `task` ends by a cancel that comes in the round in which the result does."""
    while not has_come():  # noqa: ASYNC110 - of rounds of the loop, not of time
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task}, timeout=2.0)
    return task.cancelled()


async def test_a_share_of_the_budget_is_not_kept_by_a_call_that_was_cancelled() -> None:
    budget = ByteBudget(10, resource="bytes", most_of_one=5)
    entered = asyncio.Event()

    async def hold(caller: str, seconds: float) -> None:
        async with budget.hold(caller, 5):
            entered.set()
            await asyncio.sleep(seconds)

    first = [asyncio.create_task(hold(name, 60)) for name in ("a", "b")]
    await entered.wait()
    second = asyncio.create_task(hold("c", 0.2))
    await asyncio.sleep(0.01)
    assert not budget._taken["c"]
    first[0].cancel()
    assert await _is_cancelled(second, lambda: budget._taken["c"])
    first[1].cancel()
    await asyncio.wait(first)
    assert budget.total == 0


async def test_a_call_that_is_cancelled_as_its_length_comes_is_not_read() -> None:
    limits = LimitsConfig(max_body_pause_s=0.5)
    intake = Intake(limits, EdgeBudget(EdgeBounds(max_body_bytes=100)))
    arrival = Arrival("host")
    asked = asyncio.Event()

    async def messages() -> AsyncIterator[bytes]:
        asked.set()
        await asyncio.sleep(0.2)
        yield b"x"

    async with AsyncExitStack() as held:
        call: Any = SimpleNamespace(arrival=arrival, judged=lambda: None)
        request = Request(rpc="GetPolicy", messages=messages(), call=call, held=held)
        task = asyncio.create_task(intake.read(request, "caller"))
        await asyncio.sleep(0.01)
        arrival.add(memoryview(struct.pack(">BI", 0, 1)))
        await asyncio.sleep(0)
        assert await _is_cancelled(task, lambda: True)


async def test_a_body_whose_reader_is_cancelled_as_it_comes_is_not_passed_on() -> None:
    come: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
    passed_on: list[Message] = []

    async def receive() -> Message:
        return await come

    scope = {"type": "http", "method": "POST", "path": "/v1/policies", "headers": []}
    bounded = bounded_body(scope, receive, LimitsConfig(), lambda _: None)

    async def read() -> None:
        passed_on.append(await bounded())
        await asyncio.sleep(0.2)

    task = asyncio.create_task(read())
    await asyncio.sleep(0.01)
    come.set_result({"type": "http.request", "body": b"{}", "more_body": False})
    await asyncio.sleep(0)
    assert await _is_cancelled(task, lambda: True)
