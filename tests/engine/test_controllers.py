"""What becomes of controllers as a whole: a cancel arrives, and one that fails stops no other."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from ratoon.engine.controllers import Controllers
from ratoon.engine.worker.tasks import WorkerLostError
from tests.engine.harness import policy_spec
from tests.engine.test_engine import NAMES, House, LocalCluster


class SlowController:
    """Ends nothing before `ended` is set."""

    def __init__(self) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def start(self) -> None:
        """At once."""

    async def close(self, grace_s: float) -> None:
        await self.ended

    async def drain(self, grace_s: float) -> None:
        await self.ended

    def abandon(self) -> None:
        """There is nothing to leave."""


@pytest.mark.parametrize("call", ["stop", "drain"])
async def test_a_cancel_that_comes_with_the_end_is_not_lost(call: str) -> None:
    """`asyncio.wait_for` of Python 3.11 gave the result, and the task went on."""
    slow = SlowController()
    controllers = Controllers(lambda _: cast("Any", slow), LocalCluster())
    await controllers.start(policy_spec("a"))
    ending = controllers.stop("a") if call == "stop" else controllers.drain("a", 5.0)
    task = asyncio.create_task(ending)
    await asyncio.sleep(0.01)
    slow.ended.set_result(None)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await controllers.end("a")


async def test_a_worker_that_does_not_end_keeps_no_other_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stop ended there: the other workers, and what belongs to no policy, went on."""
    house = House(tmp_path)
    await house.start()
    ended: list[str] = []

    async def end_worker(policy_id: str) -> None:
        ended.append(policy_id)
        if len(ended) == 1:
            raise WorkerLostError("it does not end")

    async def close() -> None:
        ended.append("spare")

    monkeypatch.setattr(house.cluster, "end_worker", end_worker)
    monkeypatch.setattr(house.cluster, "close", close)
    await house.engine.stop_policies()
    assert sorted(ended) == sorted([*NAMES, "spare"])
