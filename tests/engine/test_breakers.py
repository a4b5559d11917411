"""A run of steps that were skipped for their numbers fails the policy; a LoadCheckpoint brings it
back."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from ratoon.engine.crash_points import CrashPoint
from ratoon.engine.journal.records import JournalState, OperationRecord
from ratoon.engine.policy.run import skipped_in_row
from ratoon.engine.types import CheckpointInfo, Operation, OperationResult
from ratoon.errors import ErrorCode, RatoonError
from ratoon_proto.types import (
    EmptyResult,
    ImportResult,
    NumericsGuard,
    OperationKind,
    OperationState,
    PolicyState,
    Recovery,
    SkipReason,
    StepReport,
    StepResult,
)
from tests.engine.conftest import MakeMachine
from tests.engine.harness import RATE, Crash, Machine, code_of, life_record, load, save
from tests.engine.refusals import raises
from tests.until import until

THREE = NumericsGuard(max_skipped_in_row=3)
BAD, EMPTY, GOOD = 13.0, 7.0, 1.0
RECOVERIES = list(Recovery)


async def _started(make_machine: MakeMachine, **spec: object) -> Machine:
    machine = make_machine(**{"numerics_guard": THREE} | spec)
    machine.faults.skips.add(BAD)
    machine.faults.empties.add(EMPTY)
    return await machine.start()


async def _run(machine: Machine, *numbers: float, first_seq: int = 1) -> None:
    for seq, number in enumerate(numbers, first_seq):
        ended = await machine.end(await machine.update(seq, number))
        assert ended.state is OperationState.DONE
        assert isinstance(ended.result, StepResult)
        assert ended.result.report.skipped == (number != GOOD)


async def _refused(machine: Machine, seq: int) -> RatoonError:
    with raises(ErrorCode.POLICY_FAILED) as caught:
        await machine.update(seq, GOOD)
    return caught.value


def _policy_state(machine: Machine) -> tuple[PolicyState, str]:
    row = machine.journal.store.policy("p")
    assert row is not None
    return row.state, row.to_policy().failure


async def test_a_run_of_skipped_steps_fails_the_policy(make_machine: MakeMachine) -> None:
    machine = await _started(make_machine)
    await _run(machine, GOOD, BAD, BAD)
    assert machine.controller.state is PolicyState.READY
    behind = await machine.update(5, GOOD)
    # Behind a gap: it would wait for ever.
    far = await machine.update(7, GOOD)
    last = await machine.update(4, BAD)
    assert (await machine.end(last)).state is OperationState.DONE
    for operation in (behind, far):
        ended = await machine.end(operation)
        assert ended.state is OperationState.FAILED
        assert code_of(ended) == ErrorCode.POLICY_FAILED
    error = await _refused(machine, 6)
    reason = "3 optimizer steps in a row were skipped for their numbers, the last at seq 4: "
    assert reason + SkipReason.NON_FINITE_LOSS in error.message
    assert _policy_state(machine) == (PolicyState.FAILED, reason + SkipReason.NON_FINITE_LOSS)
    assert len(machine.weights) == 1


async def test_a_failed_policy_has_no_worker_and_can_be_read(make_machine: MakeMachine) -> None:
    """It kept its GPU until it was deleted, while others were refused for want of one."""
    machine = await _started(make_machine)
    await _run(machine, GOOD, BAD, BAD)
    saved = await machine.submit(4, save("mine"), 0)
    last = await machine.update(5, BAD)
    await machine.end(last)
    await until(lambda: machine.worker.is_released)
    core = machine.worker.core
    for _ in range(2):
        assert machine.worker.is_released
        assert machine.worker.core is core, "no start makes another"
        assert (await machine.controller.weight_manifest(None)).version == 1
        with raises(ErrorCode.WEIGHTS_NOT_FOUND):
            await machine.controller.weight_manifest(7)
        for operation in (saved, last):
            assert (await machine.end(operation)).state is OperationState.DONE
            cancelled = await machine.controller.cancel_operation(operation.operation_id)
            assert cancelled.state is OperationState.DONE
        await _refused(machine, 6)
        await machine.restart_controller()
    assert machine.paths.checkpoint("mine").is_dir()


@pytest.mark.parametrize("recovery", RECOVERIES)
@pytest.mark.parametrize("loses_worker", [False, True])
async def test_a_failed_policy_is_not_brought_back(
    make_machine: MakeMachine, recovery: Recovery, loses_worker: bool
) -> None:
    machine = await _started(make_machine, recovery=recovery)
    await _run(machine, GOOD, BAD, BAD, BAD)
    before = await _refused(machine, 5)
    trainers = len(machine.worker.trainers)
    for _ in range(2):
        machine.worker.is_dead |= loses_worker
        await machine.restart_controller()
        assert machine.controller.state is PolicyState.FAILED
        assert (await _refused(machine, 5)).message == before.message
    assert _policy_state(machine)[0] is PolicyState.FAILED
    assert len(machine.worker.trainers) == trainers


@pytest.mark.parametrize("recovery", RECOVERIES)
async def test_the_run_goes_on_where_a_controller_ended(
    make_machine: MakeMachine, recovery: Recovery
) -> None:
    machine = await _started(make_machine, recovery=recovery)
    await _run(machine, BAD, BAD)
    await machine.restart_controller()
    assert machine.controller.state is PolicyState.READY
    assert machine.run.skipped_in_row == 2
    await _run(machine, BAD, first_seq=3)
    await _refused(machine, 4)


async def test_a_crash_between_the_step_and_the_failure_changes_nothing(
    make_machine: MakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is queued behind the run fails after a restart as it would have before."""
    machine = await _started(make_machine)
    await _run(machine, BAD, BAD)

    async def killed(*_arguments: object) -> None:
        raise RuntimeError("killed")

    with monkeypatch.context() as patch:
        patch.setattr("ratoon.engine.policy.turns.note_end", killed)
        behind = await machine.update(4, GOOD)
        last = await machine.update(3, BAD)
        assert (await machine.end(last)).state is OperationState.DONE
        await machine.restart_controller()
    assert machine.controller.state is PolicyState.FAILED
    assert code_of(await machine.end(behind)) == ErrorCode.POLICY_FAILED
    await _refused(machine, 5)


async def test_a_step_that_is_taken_ends_the_run_and_one_without_tokens_does_not(
    make_machine: MakeMachine,
) -> None:
    machine = await _started(make_machine)
    await _run(machine, BAD, BAD, GOOD, EMPTY, EMPTY, EMPTY, BAD, EMPTY, BAD)
    assert machine.controller.state is PolicyState.READY
    await machine.restart_controller()
    assert machine.run.skipped_in_row == 2
    await _run(machine, BAD, first_seq=10)
    await _refused(machine, 11)


async def test_no_run_fails_a_policy_whose_limit_is_zero(make_machine: MakeMachine) -> None:
    machine = await _started(make_machine, numerics_guard=NumericsGuard(max_skipped_in_row=0))
    await _run(machine, *[BAD] * 8, GOOD)
    assert machine.controller.state is PolicyState.READY


# Points that the way back comes to, by what is armed once the policy is failed.
WAY_BACK = (
    CrashPoint.ENGINE_BEFORE_ACCEPT,
    CrashPoint.ENGINE_AFTER_ACCEPT,
    CrashPoint.ENGINE_IN_REPLAY,
    CrashPoint.ENGINE_BEFORE_END,
    CrashPoint.ENGINE_AFTER_END,
    CrashPoint.ENGINE_BEFORE_PUBLISH,
    CrashPoint.ENGINE_AFTER_PUBLISH,
    CrashPoint.WORKER_BEFORE_APPLY,
    CrashPoint.WORKER_AFTER_APPLY,
    CrashPoint.WORKER_BEFORE_PUBLISH,
    CrashPoint.WORKER_AFTER_PUBLISH,
)
_RETRYABLE = (ErrorCode.UNAVAILABLE, ErrorCode.POLICY_NOT_READY)


async def _failed(make_machine: MakeMachine, recovery: Recovery) -> Machine:
    """Failed at seq 7: two steps, a checkpoint of them, one step, and three that were skipped."""
    machine = await _started(make_machine, recovery=recovery)
    await _run(machine, GOOD, GOOD)
    await machine.end(await machine.submit(3, save("mine"), 0))
    await _run(machine, GOOD, BAD, BAD, BAD, first_seq=4)
    await until(lambda: machine.worker.is_released)
    return machine


async def _submitted(machine: Machine, seq: int, name: str = "mine") -> Operation:
    """Submit the load until it is accepted, and start anew what a kill has ended."""
    hits = 0
    while True:
        try:
            if len(machine.crashes.hits) > hits:
                hits = len(machine.crashes.hits)
                await machine.restart_controller()
            return await machine.submit(seq, load(name), 0)
        except Crash:
            continue
        except RatoonError as error:
            if error.code not in _RETRYABLE:
                raise
        await asyncio.sleep(0.002)


async def _loaded(machine: Machine, seq: int = 8) -> Operation:
    """The end of the load, through whatever is killed meanwhile."""
    while True:
        operation = await _submitted(machine, seq)
        if operation.state.is_final:
            return operation
        await machine.controller.get_operation(operation.operation_id, 0.02)
        if any(point.startswith("engine-") for point in machine.crashes.hits):
            machine.crashes.hits.clear()
            await machine.restart_controller()


def _weights(numbers: Sequence[float]) -> list[tuple[list[float], float]]:
    return [([number], RATE) for number in numbers]


@pytest.mark.parametrize("recovery", RECOVERIES)
@pytest.mark.parametrize("restarts", [False, True])
async def test_a_load_of_its_checkpoint_brings_a_failed_policy_back(
    make_machine: MakeMachine, recovery: Recovery, restarts: bool
) -> None:
    """Weights and moments are the checkpoint's, and the count begins anew."""
    machine = await _failed(make_machine, recovery)
    if restarts:
        await machine.restart_controller()
    ended = await _loaded(machine)
    assert (ended.seq, ended.state) == (8, OperationState.DONE)
    assert machine.weights == _weights([GOOD, GOOD])
    await until(lambda: machine.controller.state is PolicyState.READY)
    assert _policy_state(machine) == (PolicyState.READY, "")
    await _run(machine, BAD, BAD, GOOD, BAD, BAD, first_seq=9)
    assert machine.weights == _weights([GOOD, GOOD, GOOD])
    await _run(machine, BAD, first_seq=14)
    await _refused(machine, 15)


@pytest.mark.parametrize("point", WAY_BACK)
@pytest.mark.parametrize("loses_worker", [False, True])
async def test_a_kill_on_the_way_back_changes_nothing(
    make_machine: MakeMachine, point: CrashPoint, loses_worker: bool
) -> None:
    machine = await _failed(make_machine, Recovery.REPLAY)
    machine.crashes.armed[point] = 1
    machine.worker.is_dead |= loses_worker
    assert (await _loaded(machine)).state is OperationState.DONE
    if point in machine.crashes.armed:  # What is published comes after the end.
        await machine.landed()
        await until(lambda: point not in machine.crashes.armed)
    if any(hit.startswith("engine-") for hit in machine.crashes.hits):
        await machine.restart_controller()
    await until(lambda: machine.controller.state is PolicyState.READY)
    await _run(machine, GOOD, first_seq=9)
    assert machine.weights == _weights([GOOD, GOOD, GOOD])
    history = machine.journal.store.history("p")
    assert (history.policy.version, history.policy.next_seq) == (4, 10)


async def test_only_the_next_operation_brings_a_failed_policy_back(
    make_machine: MakeMachine,
) -> None:
    """What is refused takes no seq and starts no worker."""
    machine = await _failed(make_machine, Recovery.REPLAY)
    trainers = len(machine.worker.trainers)
    with raises(ErrorCode.INVALID_ARGUMENT) as caught:
        await machine.submit(9, load("mine"), 0)
    assert (caught.value.field, caught.value.got) == ("key.seq", "9")
    with raises(ErrorCode.CHECKPOINT_NOT_FOUND):
        await machine.submit(8, load("other"), 0)
    await _refused(machine, 8)
    with raises(ErrorCode.POLICY_FAILED):
        await machine.submit(8, save("later"), 0)
    assert machine.controller.state is PolicyState.FAILED
    assert len(machine.worker.trainers) == trainers
    assert machine.journal.store.history("p").policy.next_seq == 8


async def test_a_load_that_fails_or_is_cancelled_leaves_the_policy_failed(
    make_machine: MakeMachine,
) -> None:
    machine = await _failed(make_machine, Recovery.REPLAY)
    state = machine.paths.checkpoint("mine") / "state.json"
    text = state.read_text()
    state.write_text("damaged")
    ended = await _loaded(machine)
    assert ended.state is OperationState.FAILED
    assert (await _refused(machine, 9)).message.endswith(SkipReason.NON_FINITE_LOSS)
    state.write_text(text)
    await until(lambda: machine.worker.is_released)
    operation = await _submitted(machine, 9)
    cancelled = await machine.controller.cancel_operation(operation.operation_id)
    assert (await machine.end(cancelled)).state is OperationState.CANCELLED
    await until(lambda: machine.controller.state is PolicyState.FAILED)
    await _refused(machine, 10)
    assert (await _loaded(machine, 10)).state is OperationState.DONE
    assert machine.weights == _weights([GOOD, GOOD])


async def test_a_load_that_is_next_in_time_spares_the_policy(make_machine: MakeMachine) -> None:
    """It was queued behind the step that would have failed the policy."""
    machine = await _started(make_machine)
    await _run(machine, GOOD)
    await machine.end(await machine.submit(2, save("mine"), 0))
    await _run(machine, BAD, BAD, first_seq=3)
    queued = await machine.submit(6, load("mine"), 0)
    await _run(machine, BAD, first_seq=5)
    assert (await machine.end(queued)).state is OperationState.DONE
    assert machine.controller.state is PolicyState.READY
    assert machine.weights == _weights([GOOD])


async def test_the_default_is_five(make_machine: MakeMachine) -> None:
    machine = await _started(make_machine, numerics_guard=NumericsGuard())
    await _run(machine, *[BAD] * 4)
    assert machine.controller.state is PolicyState.READY
    await _run(machine, BAD, first_seq=5)
    await _refused(machine, 6)


async def test_a_long_journal_is_read_as_far_as_the_run_goes(make_machine: MakeMachine) -> None:
    """More records than are read at first lie between the skipped steps and the end."""
    machine = await _started(make_machine, numerics_guard=NumericsGuard(max_skipped_in_row=4))
    await _run(machine, GOOD, BAD, BAD, BAD)
    for seq in range(5, 80):
        await machine.end(await machine.forward_backward(seq, GOOD))
    await machine.restart_controller()
    assert machine.run.skipped_in_row == 3


def _record(kind: OperationKind, state: JournalState, result: OperationResult) -> OperationRecord:
    return replace(life_record("p", "o", kind), state=state, result=result)


def _step(reason: SkipReason | None, *, skipped: bool = True) -> OperationRecord:
    report = StepReport(skipped=skipped, skip_reason=reason)
    result = StepResult(version=0, report=report)
    return _record(OperationKind.OPTIM_STEP, JournalState.APPLIED, result)


_CHECKPOINT = CheckpointInfo(
    checkpoint_id="c", version=0, seq=1, replay_from_seq=1, created_at=0.0, size_bytes=1
)


def test_every_reason_but_a_lack_of_tokens_or_of_a_gradient_counts() -> None:
    """A batch of which nothing can be learned says nothing about the policy's numbers."""
    for reason in SkipReason:
        expected = 0 if reason in (SkipReason.NO_TOKENS, SkipReason.ZERO_GRADIENT) else 1
        assert skipped_in_row([_step(reason)]) == expected, reason


def test_what_leaves_the_weights_leaves_the_run() -> None:
    bad = _step(SkipReason.GRADIENT_NORM)
    discard = _record(OperationKind.DISCARD_GRADIENTS, JournalState.APPLIED, EmptyResult())
    save = _record(OperationKind.SAVE_CHECKPOINT, JournalState.APPLIED, _CHECKPOINT)
    load = replace(save, kind=OperationKind.LOAD_CHECKPOINT)
    lost = replace(_step(None, skipped=False), state=JournalState.FAILED)
    gradient = replace(_step(None, skipped=False), kind=OperationKind.FORWARD_BACKWARD)
    assert skipped_in_row([bad, discard, save, lost, gradient, bad]) == 2
    assert skipped_in_row([bad, replace(load, state=JournalState.CANCELLED), bad]) == 2
    assert skipped_in_row([bad, load, bad]) == 1
    result = ImportResult(version=1, num_tensors=1, size_bytes=1, dtypes=(), digest="")
    imported = _record(OperationKind.IMPORT_WEIGHTS, JournalState.APPLIED, result)
    assert skipped_in_row([bad, replace(imported, state=JournalState.FAILED), bad]) == 2
    assert skipped_in_row([bad, imported, bad]) == 1
    assert skipped_in_row([bad, _step(None, skipped=False)]) == 0
