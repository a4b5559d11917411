"""Waiting for a version that is not published yet."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ratoon.errors import ErrorCode, RatoonError
from ratoon.stream.manifest import WeightManifest
from ratoon_proto.types import OperationState, PublishConfig, PublishKind
from tests.engine.conftest import MakeMachine
from tests.engine.harness import PATIENCE_S, Machine, load, save
from tests.engine.refusals import raises


async def waiting(machine: Machine, known: int | None) -> asyncio.Task[WeightManifest]:
    wait = asyncio.create_task(machine.controller.weight_manifest(None, known, PATIENCE_S))
    await asyncio.sleep(0.01)
    assert not wait.done()
    return wait


async def version_of(machine: Machine, version: int) -> WeightManifest:
    return await machine.controller.weight_manifest(version, None, PATIENCE_S)


async def test_a_wait_ends_with_the_next_version(machine: Machine) -> None:
    waits = [await waiting(machine, 0), asyncio.create_task(version_of(machine, 2))]
    await machine.update(1, 1)
    assert (await waits[0]).version == 1
    assert not waits[1].done()
    await machine.update(2, 2)
    assert (await waits[1]).version == 2


async def test_a_wait_ends_where_the_newest_is_an_earlier_one(machine: Machine) -> None:
    """A reader that waited for a higher number would keep weights that were given up."""
    await machine.submit(1, save("mine"), 0)
    await machine.end(await machine.update(2, 2))
    await machine.landed()
    wait = await waiting(machine, 1)
    await machine.submit(3, load("mine"), 0)
    assert (await wait).version == 0


async def test_a_wait_for_what_does_not_come_ends_in_time(machine: Machine) -> None:
    assert (await machine.controller.weight_manifest(None, 0, 0.05)).version == 0
    with raises(ErrorCode.WEIGHTS_NOT_FOUND, match="has published"):
        await machine.controller.weight_manifest(1, None, 0.05)


async def test_who_waits_requests_what_is_published_on_request(make_machine: MakeMachine) -> None:
    publish = PublishConfig(kind=PublishKind.ON_REQUEST, every_n=1)
    machine = await make_machine(publish=publish).start()
    ended = await machine.end(await machine.update(1, 1))
    assert ended.state is OperationState.DONE
    assert machine.run.published == ()
    assert (await machine.controller.weight_manifest(None, None, PATIENCE_S)).version == 1
    wait = await waiting(machine, 1)
    await machine.update(2, 2)
    assert (await wait).version == 2


async def test_who_waits_has_a_version_published_once(
    make_machine: MakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one could not be, weights were copied again and again, as fast as the disk refused."""
    publish = PublishConfig(kind=PublishKind.ON_REQUEST, every_n=1)
    machine = await make_machine(publish=publish).start()
    await machine.controller.weight_manifest(None)
    await machine.end(await machine.update(1, 1))
    real, asked, is_full = machine.worker.publish, list[int](), True

    async def full(*args: Any) -> WeightManifest:
        asked.append(args[1])
        if is_full:
            raise RatoonError(ErrorCode.RESOURCE_EXHAUSTED, "disk full")
        return await real(*args)

    monkeypatch.setattr(machine.worker, "publish", full)
    wait = await waiting(machine, 0)
    await asyncio.sleep(0.1)
    assert asked == [1]
    # The next call tries it again, and the same one another version.
    assert (await machine.controller.weight_manifest(None, 0, 0.1)).version == 0
    assert asked == [1, 1]
    is_full = False
    await machine.update(2, 2)
    assert (await wait).version == 2


async def test_a_drained_service_lets_go(machine: Machine) -> None:
    wait = await waiting(machine, 0)
    await machine.controller.drain(1.0)
    with raises(ErrorCode.UNAVAILABLE):
        await wait


async def test_a_failed_policy_has_no_next_version(machine: Machine) -> None:
    wait = await waiting(machine, 0)
    await machine.controller._turns._give_up("its worker is gone")
    with raises(ErrorCode.POLICY_FAILED, match="its worker is gone"):
        await wait
    assert (await machine.controller.weight_manifest(None)).version == 0
