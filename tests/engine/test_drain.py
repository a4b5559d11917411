"""A drained controller takes nothing, ends what runs and leaves what is queued to the next."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from ratoon.engine.types import OperationState
from ratoon.errors import ErrorCode, RatoonError
from tests.engine.harness import Machine


async def _running(machine: Machine, number: float) -> tuple[threading.Event, str]:
    """An update 1 that runs until it is let go."""
    hold = machine.faults.holds[number] = threading.Event()
    operation = await machine.update(1, number)
    await machine.controller.watch_operation(operation, 5.0)
    return hold, operation.operation_id


async def test_what_runs_ends_and_what_is_queued_waits_for_the_next_start(
    machine: Machine,
) -> None:
    hold, running = await _running(machine, 1.0)
    queued = await machine.update(2, 2.0)
    draining = asyncio.create_task(machine.controller.drain(10.0))
    await asyncio.sleep(0.05)
    with pytest.raises(RatoonError) as caught:
        await machine.update(3, 3.0)
    assert (caught.value.code, caught.value.retry_after_s) == (ErrorCode.UNAVAILABLE, 5)
    with pytest.raises(RatoonError, match="draining"):
        await machine.controller.put_upload_part("u", 0, b"part")
    waiting = asyncio.create_task(machine.controller.get_operation(running, 10.0))
    hold.set()
    await draining
    assert (await waiting).state is OperationState.DONE
    assert machine.run.version == 1
    assert (await machine.controller.weight_manifest(None)).version == 1
    assert not (await machine.controller.get_operation(queued.operation_id, 0.0)).state.is_final
    await machine.restart_controller()
    assert (await machine.end(queued)).state is OperationState.DONE
    assert (await machine.end(await machine.update(3, 3.0))).state is OperationState.DONE
    assert machine.run.version == 3


async def test_a_wait_that_would_outlast_the_service_ends(machine: Machine) -> None:
    hold, _ = await _running(machine, 1.0)
    queued = await machine.update(2, 2.0)
    waiting = asyncio.create_task(machine.controller.get_operation(queued.operation_id, 30.0))
    await asyncio.sleep(0.05)
    hold.set()
    await machine.controller.drain(10.0)
    with pytest.raises(RatoonError, match="draining"):
        await waiting


async def test_a_watch_that_would_outlast_the_service_ends(machine: Machine) -> None:
    """It was held until the wires gave up on it, 25 s each."""
    hold, running = await _running(machine, 1.0)
    queued = await machine.update(2, 2.0)
    first = await machine.controller.get_operation(running, 0.0)
    draining = asyncio.create_task(machine.controller.drain(10.0))
    waiting = asyncio.create_task(machine.controller.watch_operation(queued, 30.0))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    hold.set()
    assert (await machine.controller.watch_operation(first, 5.0)).state is OperationState.DONE
    await draining
    with pytest.raises(RatoonError, match="draining"):
        await waiting
    with pytest.raises(RatoonError, match="draining"):
        await machine.controller.watch_operation(queued, 30.0)
    assert not (await machine.controller.get_operation(queued.operation_id, 0.0)).state.is_final


async def test_a_drain_ends_with_its_grace(machine: Machine) -> None:
    hold, running = await _running(machine, 1.0)
    begin = time.monotonic()
    await machine.controller.drain(0.2)
    assert time.monotonic() - begin >= 0.2
    hold.set()
    await machine.restart_controller()
    assert (await machine.controller.get_operation(running, 10.0)).state is OperationState.DONE
