"""A drained controller takes nothing, ends what runs and leaves what is queued to the next."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from ratoon.config import CheckpointConfig
from ratoon.errors import ErrorCode, RatoonError
from ratoon_proto.types import OperationState, PublishConfig, PublishKind, Recovery
from tests.engine.conftest import MakeMachine
from tests.engine.harness import Machine
from tests.engine.refusals import raises
from tests.engine.test_publication import Gate


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


async def test_a_read_asks_a_drained_service_for_no_version(make_machine: MakeMachine) -> None:
    """It waited for a turn, and no turn comes."""
    publish = PublishConfig(kind=PublishKind.ON_REQUEST, every_n=1)
    machine = await make_machine(publish=publish).start()
    await machine.controller.drain(1.0)
    with raises(ErrorCode.UNAVAILABLE, match="draining"):
        await machine.controller.weight_manifest(None)


async def test_a_checkpoint_that_is_due_does_not_keep_a_paused_loop_busy(
    make_machine: MakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    often = CheckpointConfig(every_operations=1, every_s=0, every_bytes=0)
    machine = await make_machine(recovery=Recovery.REPLAY, checkpoints=often).start()
    gate, loop, looks = Gate(monkeypatch), machine.controller._turns, list[None]()
    take_one = loop._take_one

    async def counted() -> bool:
        looks.append(None)
        return await take_one()

    hold, running = await _running(machine, 1.0)
    draining = asyncio.create_task(machine.controller.drain(10.0))
    await asyncio.sleep(0)
    monkeypatch.setattr(loop, "_take_one", counted)
    hold.set()
    assert (await machine.controller.get_operation(running, 10.0)).state is OperationState.DONE
    await asyncio.sleep(0.05)
    assert len(looks) < 5
    gate.opened.set()
    await draining


async def test_a_loop_that_does_not_stop_lets_go_of_who_waits(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They waited on: nobody told them of an end that did not come."""

    async def broken(grace_s: float) -> None:
        raise RuntimeError(f"not within {grace_s:g} s")

    hold, _ = await _running(machine, 1.0)
    queued = await machine.update(2, 2.0)
    waiting = asyncio.create_task(machine.controller.get_operation(queued.operation_id, 30.0))
    await asyncio.sleep(0.05)
    monkeypatch.setattr(machine.controller._turns, "stop", broken)
    with pytest.raises(RuntimeError, match="not within"):
        await machine.controller.drain(1.0)
    with pytest.raises(RatoonError, match="draining"):
        await asyncio.wait_for(waiting, 5.0)
    hold.set()
