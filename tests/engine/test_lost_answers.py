"""What callers see while the journal has an operation that its controller has not heard of.

The answer to an acceptance was lost while a turn ran: memory is read again only when the turn ends.
"""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from ratoon.engine.types import Operation
from ratoon.errors import ErrorCode, RatoonError
from ratoon_proto.types import OperationState
from tests.engine.harness import RATE, Machine
from tests.engine.refusals import raises
from tests.until import until


async def _lose_the_third(machine: Machine) -> Operation:
    """Update 1 runs until it is let go; update 3 is in the journal alone."""
    await machine.running(1)
    machine.journal.lost.add("accept")
    with raises(ErrorCode.UNAVAILABLE):
        await machine.update(3, 3)
    return await machine.update(3, 3)


async def _read_again(machine: Machine) -> None:
    await until(lambda: machine.controller._turns.is_known)


async def test_nothing_is_accepted_before_the_journal_is_read_again(machine: Machine) -> None:
    """Accepted 1, 3 and then 2, the journal's next seq was 3, and a healthy worker rolled back."""
    third = await _lose_the_third(machine)
    with pytest.raises(RatoonError) as caught:
        await machine.update(2, 2)
    assert (caught.value.code, caught.value.retryable) == (ErrorCode.UNAVAILABLE, True)
    machine.faults.holds[1.0].set()
    await machine.end(await machine.update(1, 1))
    await _read_again(machine)
    await machine.update(2, 2)
    await machine.end(third)
    assert machine.journal.store.history("p").policy.next_seq == 4
    await machine.restart_controller()
    assert (await machine.update(3, 3)).state is OperationState.DONE
    assert machine.weights == [([1.0], RATE), ([2.0], RATE), ([3.0], RATE)]
    assert len(machine.worker.trainers) == 1


async def test_who_waits_for_it_is_not_answered_at_once(machine: Machine) -> None:
    """Its callers asked again as fast as they could, for as long as the turn ran."""
    third = await _lose_the_third(machine)
    clock = asyncio.get_running_loop().time
    begin = clock()
    view = await machine.controller.get_operation(third.operation_id, 0.2)
    assert view.state is OperationState.QUEUED
    assert clock() - begin >= 0.2
    machine.faults.holds[1.0].set()


async def test_a_cancel_of_it_is_refused_and_not_forgotten(machine: Machine) -> None:
    """It was answered with the queued operation, which ran."""
    third = await _lose_the_third(machine)
    with pytest.raises(RatoonError) as caught:
        await machine.controller.cancel_operation(third.operation_id)
    assert (caught.value.code, caught.value.retryable) == (ErrorCode.UNAVAILABLE, True)
    machine.faults.holds[1.0].set()
    await _read_again(machine)
    cancelled = await machine.controller.cancel_operation(third.operation_id)
    assert cancelled.state is OperationState.CANCELLED


async def test_a_body_that_is_being_written_outlives_a_restart(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The restart took the temporary file away: INTERNAL, where nothing was wrong."""
    replace = Path.replace
    is_written, may_go = threading.Event(), threading.Event()

    def slow_replace(path: Path, target: Path) -> Path:
        if path.parent.name == "bodies":
            is_written.set()
            may_go.wait(5)
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", slow_replace)
    submitting = asyncio.create_task(machine.update(1, 1))
    await asyncio.to_thread(is_written.wait, 5)
    machine.controller._turns.restart()
    await _read_again(machine)
    may_go.set()
    assert (await machine.end(await submitting)).state is OperationState.DONE
