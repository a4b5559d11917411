"""Windows of gradients, and cancels, of a policy whose weights are the history of its steps."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from ratoon.engine.commands import RefusedCommand, SeqKey
from ratoon.engine.crash_points import CrashPoint
from ratoon.engine.journal.records import JournalState
from ratoon.engine.types import CheckpointInfo, FailedResult, version_of
from ratoon.errors import ErrorCode, invalid
from ratoon_proto.types import OperationKind, OperationState, Recovery
from tests.engine.conftest import MakeMachine
from tests.engine.harness import (
    DISCARD,
    POLICY,
    RATE,
    SAVE,
    Machine,
    code_of,
    save,
    started,
)
from tests.engine.refusals import raises
from tests.until import until


async def test_gradients_of_a_window_add_up_until_the_step(machine: Machine) -> None:
    for seq, number in ((1, 10), (2, 20)):
        await machine.forward_backward(seq, number)
    stepped = await machine.end(await machine.step(3))
    assert version_of(stepped.result) == 1
    assert machine.weights == [([10.0, 20.0], RATE)]
    assert code_of(await machine.end(await machine.step(4))) == ErrorCode.WINDOW_EMPTY


async def test_an_update_with_an_open_window_fails_and_leaves_it(machine: Machine) -> None:
    await machine.forward_backward(1, 10)
    assert code_of(await machine.end(await machine.update(2, 2))) == ErrorCode.WINDOW_OPEN
    await machine.end(await machine.step(3))
    assert machine.weights == [([10.0], RATE)]


async def test_a_failed_forward_backward_poisons_the_window_until_discard(machine: Machine) -> None:
    machine.faults.breaks.add(20.0)
    await machine.forward_backward(1, 10)
    broken = await machine.forward_backward(2, 20)
    step = await machine.end(await machine.step(3))
    assert code_of(await machine.end(broken)) == ErrorCode.INTERNAL
    assert code_of(step) == ErrorCode.WINDOW_POISONED
    assert isinstance(step.result, FailedResult)
    assert step.result.error["details"] == {"failed_seq": "2", "window_seqs": "1,2"}
    assert machine.worker.trainer.gradients == [10.0], "the window was not restored"
    await machine.submit(4, DISCARD, 0)
    await machine.forward_backward(5, 50)
    await machine.end(await machine.step(6))
    assert machine.weights == [([50.0], RATE)]


@pytest.mark.parametrize("is_listed", [False, True])
async def test_a_poisoned_step_may_discard_its_window(
    make_machine: MakeMachine, is_listed: bool
) -> None:
    """It fails, as do retries; the next pair is right, whichever process dies in between."""
    machine = await make_machine(recovery=Recovery.REPLAY).start()
    machine.faults.refuses.add(20.0)
    await machine.updates(1)
    await machine.forward_backward(2, 10)
    await machine.forward_backward(3, 20)
    seqs = (2, 3) if is_listed else ()
    refused = await machine.end(await machine.step(4, *seqs, discard_on_poison=True))
    assert (code_of(refused), refused.state) == (ErrorCode.WINDOW_POISONED, OperationState.FAILED)
    assert machine.worker.trainer.gradients == []
    again = await machine.step(4, *seqs, discard_on_poison=True)
    assert (again.operation_id, again.result) == (refused.operation_id, refused.result)
    await machine.end(await machine.forward_backward(5, 50))
    for is_worker_lost in (False, True, False):
        if is_worker_lost:
            await machine.worker.kill()
        await machine.restart_controller()
        assert tuple(machine.run.window.records) == (5,)
        assert machine.worker.trainer.gradients == [50.0]
    await machine.end(await machine.step(6))
    assert machine.weights == [([1.0], RATE), ([50.0], RATE)]
    await machine.worker.kill()
    await machine.restart_controller()
    assert machine.weights == [([1.0], RATE), ([50.0], RATE)]
    assert machine.run.version == 2
    step = machine.journal.store.find_key(POLICY, SeqKey(seq=4))
    assert step is not None
    assert (step.state, step.version) == (JournalState.DISCARDED, None)


@pytest.mark.parametrize("point", [CrashPoint.ENGINE_BEFORE_END, CrashPoint.ENGINE_AFTER_END])
async def test_a_crash_loses_no_discard(make_machine: MakeMachine, point: CrashPoint) -> None:
    """The worker has discarded the window before the journal hears of it."""
    machine = await make_machine(recovery=Recovery.REPLAY).start()
    machine.faults.refuses.add(20.0)
    for seq, number in ((1, 10), (2, 20)):
        await machine.end(await machine.forward_backward(seq, number))
    machine.crashes.armed[point] = 1
    step = await machine.step(3, discard_on_poison=True)
    await until(lambda: machine.crashes.hits)
    await machine.restart_controller()
    assert code_of(await machine.end(step)) == ErrorCode.WINDOW_POISONED
    assert not machine.run.window.is_open
    await machine.forward_backward(4, 40)
    await machine.end(await machine.step(5))
    assert machine.weights == [([40.0], RATE)]


@pytest.mark.parametrize("is_worker_lost", [False, True])
async def test_a_refused_call_that_takes_its_seq_fails_at_its_turn(
    make_machine: MakeMachine, is_worker_lost: bool
) -> None:
    """It poisons the window as any ForwardBackward that fails, before and after a restart."""
    machine = await make_machine(recovery=Recovery.REPLAY).start()
    error = invalid("loss.clip_low", -1, "a number").to_dict()
    refused = RefusedCommand(kind=OperationKind.FORWARD_BACKWARD, error=error, request_digest="00")
    late = await machine.submit(2, refused, 0)
    assert late.blocked_by_seq == 1
    await machine.forward_backward(1, 10)
    ended = await machine.end(late)
    assert (ended.kind, ended.result) == (
        OperationKind.FORWARD_BACKWARD,
        FailedResult(error=error),
    )
    if is_worker_lost:
        await machine.worker.kill()
    await machine.restart_controller()
    assert (await machine.submit(2, refused, 0)).operation_id == late.operation_id
    with raises(ErrorCode.KEY_REUSED):
        await machine.submit(2, replace(refused, request_digest="01"), 0)
    poisoned = await machine.end(await machine.step(3, discard_on_poison=True))
    assert code_of(poisoned) == ErrorCode.WINDOW_POISONED
    plain = replace(refused, kind=OperationKind.SAVE_CHECKPOINT)
    await machine.forward_backward(4, 40)
    assert code_of(await machine.end(await machine.submit(5, plain, 0))) == "INVALID_ARGUMENT"
    await machine.end(await machine.step(6))
    assert machine.weights == [([40.0], RATE)]


async def test_what_else_fails_a_step_discards_nothing(machine: Machine) -> None:
    await machine.forward_backward(1, 10)
    fenced = {"discard_on_poison": True, "expected_version": 7}
    failed = await machine.end(await machine.step(2, **fenced))
    assert code_of(failed) == ErrorCode.VERSION_MISMATCH
    await machine.end(await machine.step(3, discard_on_poison=True))
    assert machine.weights == [([10.0], RATE)]


async def test_a_step_without_a_gradient_is_taken_where_it_may_be(
    make_machine: MakeMachine,
) -> None:
    machine = await make_machine(recovery=Recovery.REPLAY).start()
    assert code_of(await machine.end(await machine.step(1))) == ErrorCode.WINDOW_EMPTY
    stepped = await machine.end(await machine.step(2, allow_empty=True))
    assert version_of(stepped.result) == 1
    machine.faults.refuses.add(20.0)
    await machine.forward_backward(3, 20)
    poisoned = await machine.end(await machine.step(4, allow_empty=True))
    assert code_of(poisoned) == ErrorCode.WINDOW_POISONED
    await machine.worker.kill()
    await machine.restart_controller()
    assert machine.weights == [([], RATE)]
    assert machine.run.version == 1


async def test_a_step_may_list_the_operations_to_include(machine: Machine) -> None:
    machine.faults.breaks.add(20.0)
    for seq, number in ((1, 10), (2, 20), (3, 30)):
        await machine.forward_backward(seq, number)
    refused = await machine.end(await machine.step(4, 1, 2))
    assert code_of(refused) == ErrorCode.WINDOW_POISONED
    assert code_of(await machine.end(await machine.step(5, 1, 9))) == ErrorCode.INVALID_ARGUMENT
    await machine.end(await machine.step(6, 3))
    assert machine.weights == [([30.0], RATE)]


async def test_a_batch_refused_at_its_turn_poisons_the_window_too(machine: Machine) -> None:
    machine.faults.refuses.add(20.0)
    await machine.forward_backward(1, 10)
    refused = await machine.end(await machine.forward_backward(2, 20))
    assert code_of(refused) == ErrorCode.STALE_ROLLOUTS
    assert code_of(await machine.end(await machine.step(3))) == ErrorCode.WINDOW_POISONED


async def test_a_cancelled_queued_operation_consumes_its_seq(machine: Machine) -> None:
    machine.faults.holds[1.0] = threading.Event()
    first = await machine.update(1, 1)
    queued = await machine.update(2, 2)
    last = await machine.update(3, 3)
    await started(machine, first)
    cancelled = await machine.controller.cancel_operation(queued.operation_id)
    assert cancelled.state is OperationState.CANCELLED
    assert code_of(cancelled) == ErrorCode.CANCELLED
    machine.faults.holds[1.0].set()
    await machine.end(last)
    assert machine.weights == [([1.0], RATE), ([3.0], RATE)]
    again = await machine.update(2, 2)
    assert (again.operation_id, again.state) == (queued.operation_id, OperationState.CANCELLED)


async def test_a_cancelled_operation_behind_a_gap_still_waits_its_turn(machine: Machine) -> None:
    blocked = await machine.update(2, 2)
    last = await machine.update(3, 3)
    await machine.controller.cancel_operation(blocked.operation_id)
    await machine.update(1, 1)
    await machine.end(last)
    assert machine.weights == [([1.0], RATE), ([3.0], RATE)]


async def test_a_cancelled_running_update_leaves_the_weights(machine: Machine) -> None:
    running = await machine.running(1)
    await machine.controller.cancel_operation(running.operation_id)
    assert code_of(await machine.end(running)) == ErrorCode.CANCELLED
    await machine.end(await machine.update(2, 2))
    assert machine.weights == [([2.0], RATE)]


async def test_a_cancelled_forward_backward_counts_as_absent(machine: Machine) -> None:
    machine.faults.holds[20.0] = threading.Event()
    await machine.forward_backward(1, 10)
    running = await machine.forward_backward(2, 20)
    await started(machine, running)
    await machine.controller.cancel_operation(running.operation_id)
    assert (await machine.end(running)).state is OperationState.CANCELLED
    await machine.end(await machine.step(3))
    assert machine.weights == [([10.0], RATE)]


async def test_a_cancel_of_an_ended_operation_changes_nothing(machine: Machine) -> None:
    ended = await machine.end(await machine.update(1, 1))
    assert await machine.controller.cancel_operation(ended.operation_id) == ended


async def test_a_checkpoint_in_a_window_says_where_to_replay_from(machine: Machine) -> None:
    await machine.end(await machine.update(1, 1))
    await machine.forward_backward(2, 20)
    in_window = await machine.end(await machine.submit(3, SAVE, 0))
    await machine.step(4)
    closed = await machine.end(await machine.submit(5, save("mine"), 0))
    assert isinstance(in_window.result, CheckpointInfo)
    assert isinstance(closed.result, CheckpointInfo)
    saved = in_window.result
    assert (saved.seq, saved.version, saved.replay_from_seq) == (3, 1, 2)
    assert (closed.result.version, closed.result.replay_from_seq) == (2, 6)
    known = machine.journal.store.checkpoints("p")
    assert [checkpoint.info.checkpoint_id for checkpoint in known] == ["seq3-v1", "mine"]
    twice = await machine.end(await machine.submit(6, save("mine"), 0))
    assert code_of(twice) == ErrorCode.INVALID_ARGUMENT
    assert isinstance(twice.result, FailedResult)
    assert twice.result.error["message"] == (
        "checkpoint_id: the policy has a checkpoint mine already, of version 2 at seq 5; take"
        " another name, or overwrite it"
    )


async def test_bodies_live_as_long_as_their_window(machine: Machine) -> None:
    await machine.end(await machine.forward_backward(1, 10))
    await machine.end(await machine.forward_backward(2, 10))
    assert len(machine.bodies) == 1
    await machine.end(await machine.step(3))
    assert machine.bodies == set()
    first = machine.journal.store.find_operation(
        (await machine.forward_backward(1, 10)).operation_id
    )
    assert first is not None
    assert (first.command, first.choices) == (None, None)
