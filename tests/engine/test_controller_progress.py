"""How far a running operation is, for those who look."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from ratoon.engine.journal.records import NO_PROGRESS
from ratoon.engine.policy import callers
from ratoon_proto.types import OperationState, Progress
from tests.engine.harness import Machine
from tests.engine.local_ports import LocalWorker


async def test_watching_shows_progress_and_the_end(machine: Machine) -> None:
    seen = await machine.running(1)
    running = await machine.controller.watch_operation(seen, 5.0)
    assert (running.state, running.progress.micro_batches_planned) == (OperationState.RUNNING, 2)
    waiting = asyncio.create_task(machine.controller.watch_operation(running, 5.0))
    machine.faults.holds[1.0].set()
    while not (now := await waiting).state.is_final:
        waiting = asyncio.create_task(machine.controller.watch_operation(now, 5.0))
    assert now.progress.micro_batches_done == 2


async def test_a_worker_that_hangs_does_not_hold_those_who_look(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that computes answered those who asked how far it is after most of a second."""
    monkeypatch.setattr(callers, "_PROGRESS_S", 0.0)
    seen = await machine.running(1)
    answers, asked = asyncio.Event(), list[LocalWorker]()

    async def late(worker: LocalWorker) -> Progress:
        asked.append(worker)
        await answers.wait()
        return replace(NO_PROGRESS, micro_batches_done=7)

    monkeypatch.setattr(LocalWorker, "progress", late)
    for _ in range(5):
        now = await machine.controller.get_operation(seen.operation_id, 0.0)
        assert (now.state, now.progress.micro_batches_done) == (OperationState.RUNNING, 1)
    assert len(asked) == 1
    answers.set()
    await asyncio.sleep(0.01)
    now = await machine.controller.get_operation(seen.operation_id, 0.0)
    assert now.progress.micro_batches_done == 7
    machine.faults.holds[1.0].set()
    await machine.end(seen)
