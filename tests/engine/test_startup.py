"""What a controller does after a crash: of itself, of its worker, of an answer on the way."""

from __future__ import annotations

import asyncio
import errno
import threading
from dataclasses import replace
from typing import Any

import pytest

from ratoon.config import CheckpointConfig
from ratoon.engine.files.paths import PolicyPaths
from ratoon.engine.journal.records import PolicyHistory
from ratoon.engine.policy import recovery, startup, turns
from ratoon.engine.policy.run import PolicyRun
from ratoon.engine.types import FailedResult, Operation, version_of
from ratoon.engine.worker.tasks import (
    FencedError,
    Loaded,
    LoadRequest,
    WorkerLostError,
    WorkerStatus,
)
from ratoon.errors import ErrorCode, RatoonError
from ratoon.train.spec import OptimizerStates
from ratoon_proto.types import OperationState, PolicyState, Recovery, Shard
from tests.engine import harness
from tests.engine.conftest import MakeMachine
from tests.engine.fake_trainer import INFO, FakeTrainer
from tests.engine.harness import DISCARD, RATE, Machine, code_of, forward, save, started
from tests.engine.local_ports import Crash
from tests.engine.refusals import raises
from tests.until import until


@pytest.mark.parametrize("lost", ["before end", "end", "set_published"])
async def test_a_lost_answer_of_the_journal_neither_loses_nor_doubles_a_step(
    machine: Machine, lost: str
) -> None:
    """The controller starts anew and completes the record from what the worker stored."""
    machine.journal.lost.add(lost)
    first = await machine.update(1, 1)
    second = await machine.update(2, 2)
    assert (await machine.end(first)).state is OperationState.DONE
    assert (await machine.end(second)).state is OperationState.DONE
    assert machine.weights == [([1.0], RATE), ([2.0], RATE)]
    assert len(machine.worker.trainers) == 1
    assert machine.journal.lost == set()
    assert machine.journal.store.history("p").policy.version == 2
    assert (await machine.controller.weight_manifest(None)).version == 2


async def test_what_was_chosen_at_first_is_that_of_every_recovery(
    make_machine: MakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a larger GPU others would fit: a checkpoint would be of another kind, replay have other
    bits."""
    open_spec = replace(
        harness.trainer_spec(harness.policy_spec()), optimizer_states=None, device="cuda:0"
    )
    assert open_spec.parallel.shard is None
    monkeypatch.setattr(harness, "trainer_spec", lambda _spec: open_spec)
    machine = make_machine(recovery=Recovery.REPLAY)
    asked: list[tuple[OptimizerStates | None, Shard | None]] = []
    load = machine.worker.load

    async def noted(token: int, policy_id: str, request: LoadRequest) -> Loaded:
        asked.append((request.trainer.optimizer_states, request.trainer.parallel.shard))
        return await load(token, policy_id, request)

    monkeypatch.setattr(machine.worker, "load", noted)
    await machine.start()
    await machine.end(await machine.update(1, 1))
    machine.worker.is_dead = True
    await machine.end(await machine.update(2, 2))
    machine.worker.is_dead = True
    await machine.restart_controller()
    chosen = OptimizerStates(INFO.optimizer_states), Shard(INFO.shard)
    assert asked == [(None, None), chosen, chosen]
    info = machine.journal.store.history("p").policy.info
    assert info == replace(INFO, uses_gpu=True)
    assert machine.weights == [([1.0], RATE), ([2.0], RATE)]


async def test_a_lost_worker_for_which_there_is_no_gpu_is_waited_for(
    make_machine: MakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until a node comes back: more often than a controller that fails would try."""
    monkeypatch.setattr(turns, "_WAITING_S", 0.001)
    machine = await make_machine(recovery=Recovery.REPLAY).start()
    refusals = [
        RatoonError(ErrorCode.RESOURCE_EXHAUSTED, "no GPU", details={"resource": "GPU"})
        for _ in range(2 * turns._MAX_FAILURES)
    ]
    fence = machine.worker.fence

    async def fence_once_there_is_room(token: int, *, evenly: bool, num_nodes: int) -> WorkerStatus:
        assert (evenly, num_nodes) == (False, 0)
        if refusals:
            raise refusals.pop()
        return await fence(token)

    await machine.end(await machine.update(1, 1))
    machine.worker.is_dead = True
    monkeypatch.setattr(machine.worker, "fence", fence_once_there_is_room)
    assert (await machine.end(await machine.update(2, 2))).state is OperationState.DONE
    assert refusals == []
    assert machine.weights == [([1.0], RATE), ([2.0], RATE)]


async def test_a_restart_that_is_asked_for_during_another_is_one_more(
    make_machine: MakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a publication that it began, and that has stopped before it ends."""
    machine, known = make_machine(recovery=Recovery.REPLAY), list[bool]()
    start_policy = startup.start_policy

    async def noted(run: PolicyRun, *others: Any, **options: Any) -> None:
        await start_policy(run, *others, **options)
        known.append(machine.controller._turns.is_known)
        if len(known) == 2:
            machine.controller._turns.restart()

    monkeypatch.setattr(turns, "start_policy", noted)
    await machine.start()
    machine.controller._turns.restart()
    await until(lambda: len(known) == 3)
    # Memory matches the journal once it is over, not while it reads.
    assert known[1:] == [False, False]
    await until(lambda: machine.controller._turns.is_known)


async def test_ranks_that_read_weights_come_back_on_as_many_nodes(
    make_machine: MakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though nobody named it: it was chosen, where nodes had as many ranks each."""
    open_spec = harness.trainer_spec(harness.policy_spec())
    monkeypatch.setattr(harness, "trainer_spec", lambda _spec: open_spec)
    monkeypatch.setattr(FakeTrainer, "info", lambda _: replace(INFO, shard="weights", num_nodes=2))
    machine = await make_machine(recovery=Recovery.REPLAY).start()
    assert machine.worker.spread == (False, 0)
    machine.worker.is_dead = True
    await machine.end(await machine.update(1, 1))
    assert machine.worker.spread == (True, 2)


async def test_an_operation_whose_acceptance_was_lost_runs_once(machine: Machine) -> None:
    machine.journal.lost.add("accept")
    with raises(ErrorCode.UNAVAILABLE) as caught:
        await machine.update(1, 1)
    assert caught.value.retryable
    retried = await machine.update(1, 1)
    assert (await machine.end(retried)).state is OperationState.DONE
    assert machine.weights == [([1.0], RATE)]


async def test_a_step_on_a_part_of_the_window_is_completed_without_touching_gradients(
    machine: Machine,
) -> None:
    """The worker has stepped: to put the listed gradients on it again would leave them there."""
    for seq in (1, 2):
        await machine.end(await machine.forward_backward(seq, seq))
    machine.journal.lost.add("before end")
    stepped = await machine.end(await machine.step(3, 2))
    assert stepped.state is OperationState.DONE
    assert machine.worker.trainer.gradients == []
    assert machine.weights == [([2.0], RATE)]


async def test_a_window_whose_restore_was_lost_is_restored_at_the_next_start(
    machine: Machine,
) -> None:
    machine.faults.breaks.add(20.0)
    await machine.forward_backward(1, 10)
    machine.worker.loses_restore = True
    await machine.end(await machine.forward_backward(2, 20))
    await machine.end(await machine.step(3, 1))
    assert machine.weights == [([10.0], RATE)]
    assert not machine.worker.loses_restore


async def test_a_cancel_whose_answer_was_lost_is_not_run_all_the_same(machine: Machine) -> None:
    await machine.running(1)
    doomed = await machine.update(2, 2)
    machine.journal.lost.add("end")
    with raises(ErrorCode.UNAVAILABLE):
        await machine.controller.cancel_operation(doomed.operation_id)
    machine.faults.holds[1.0].set()
    assert code_of(await machine.end(doomed)) == ErrorCode.CANCELLED
    await machine.end(await machine.update(3, 3))
    assert machine.weights == [([1.0], RATE), ([3.0], RATE)]


async def test_a_cancel_that_comes_while_the_journal_is_read_does_not_undo_a_step(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker had run it: the record said cancelled, and the weights had it."""
    history, cancels = machine.journal.history, list[asyncio.Task[Operation]]()

    async def cancelled_meanwhile(policy_id: str) -> PolicyHistory:
        cancel = machine.controller.cancel_operation(first.operation_id)
        cancels.append(asyncio.create_task(cancel))
        await asyncio.sleep(0.01)
        return await history(policy_id)

    machine.journal.lost.add("before end")
    monkeypatch.setattr(machine.journal, "history", cancelled_meanwhile)
    first = await machine.update(1, 1)
    assert (await machine.end(first)).state is OperationState.DONE
    await asyncio.gather(*cancels)
    assert len(cancels) == 1
    assert (await machine.end(await machine.update(2, 2))).state is OperationState.DONE
    assert machine.weights == [([1.0], RATE), ([2.0], RATE)]
    assert machine.journal.store.history("p").policy.version == 2


async def test_a_stop_that_comes_with_a_wake_up_stops(make_machine: MakeMachine) -> None:
    later = CheckpointConfig(every_operations=0, every_s=60, every_bytes=0)
    machine = await make_machine(recovery=Recovery.REPLAY, checkpoints=later).start()
    await machine.end(await machine.update(1, 1))
    await asyncio.sleep(0.02)
    turns = machine.controller._turns
    turns.wake()
    await asyncio.sleep(0)
    await turns.stop(0.0)


async def test_a_first_start_that_failed_is_made_up_for(
    make_machine: MakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one found no folders."""
    machine = make_machine()

    def full(_paths: PolicyPaths) -> None:
        monkeypatch.undo()
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(startup, "make_policy_folders", full)
    with pytest.raises(OSError, match="full"):
        await machine.start()
    await machine.start()
    assert (await machine.end(await machine.update(1, 1))).state is OperationState.DONE


async def test_a_first_start_that_was_killed_after_the_load_says_what_the_model_is(
    make_machine: MakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A policy that was ready and had none took no operation, for as long as its worker lived."""
    machine = make_machine()

    async def crash(*_: object) -> None:
        raise Crash

    with monkeypatch.context() as patched:
        patched.setattr(machine.journal, "set_policy", crash)
        with pytest.raises(Crash):
            await machine.start()
    await machine.restart_controller()
    assert machine.journal.store.history("p").policy.info == INFO


async def test_a_restarted_controller_goes_on_with_its_queue_and_window(machine: Machine) -> None:
    machine.faults.breaks.add(20.0)
    machine.faults.holds[30.0] = threading.Event()
    await machine.forward_backward(1, 10)
    await machine.forward_backward(2, 20)
    running = await machine.forward_backward(3, 30)
    queued = await machine.step(4, 1, 3)
    blocked = await machine.update(6, 6)
    cancelled = await machine.update(7, 7)
    await machine.controller.cancel_operation(cancelled.operation_id)
    await started(machine, running)
    restart = asyncio.create_task(machine.restart_controller())
    await asyncio.sleep(0.05)
    machine.faults.holds[30.0].set()
    await restart
    assert (await machine.end(running)).state is OperationState.DONE
    assert (await machine.end(queued)).state is OperationState.DONE
    assert (await machine.update(6, 6)).operation_id == blocked.operation_id
    await machine.update(5, 5)
    await machine.end(blocked)
    last = await machine.end(await machine.update(8, 8))
    assert machine.weights == [
        ([10.0, 30.0], RATE),
        ([5.0], RATE),
        ([6.0], RATE),
        ([8.0], RATE),
    ]
    assert len(machine.worker.trainers) == 1
    assert version_of(last.result) == 4
    assert machine.bodies == set()


async def test_a_lost_worker_fails_everything_past_the_checkpoint(machine: Machine) -> None:
    """Nothing whose effect is gone is still called done, and its version numbers are retired."""
    await machine.update(1, 1)
    await machine.submit(2, save("safe"), 0)
    gone = await machine.end(await machine.update(3, 3))
    read = await machine.end(await machine.submit(4, forward(4), 4))
    machine.faults.holds[5.0] = threading.Event()
    running = await machine.update(5, 5)
    queued = await machine.update(6, 6)
    blocked = await machine.update(8, 8)
    await started(machine, running)
    machine.worker.is_dead = True
    machine.faults.holds[5.0].set()
    for operation in (running, queued, blocked, gone):
        ended = await machine.end(operation)
        assert code_of(ended) == ErrorCode.WORKER_LOST
        assert isinstance(ended.result, FailedResult)
        details = ended.result.error["details"]
        assert isinstance(details, dict)
        assert details["checkpoint_id"] == "safe"
        assert ("retired_version" in details) == (operation is gone)
    assert (await machine.end(read)).state is OperationState.DONE
    assert (await machine.controller.weight_manifest(None)).version == 1
    after = await machine.end(await machine.update(7, 7))
    assert version_of(after.result) == 3
    await machine.end(await machine.update(9, 9))
    assert machine.weights == [([1.0], RATE), ([7.0], RATE), ([9.0], RATE)]


async def test_a_window_that_was_lost_is_poisoned_until_it_is_discarded(machine: Machine) -> None:
    """A checkpoint holds no gradients: an OptimStep must not go on without those it lost."""
    await machine.forward_backward(1, 10)
    await machine.submit(2, save("in-window"), 0)
    await machine.end(await machine.forward_backward(3, 30))
    machine.worker.is_dead = True
    await machine.restart_controller()
    step = await machine.end(await machine.step(4))
    assert code_of(step) == ErrorCode.WINDOW_POISONED
    assert isinstance(step.result, FailedResult)
    assert step.result.error["details"] == {"failed_seq": "1", "window_seqs": "1,3"}
    await machine.submit(5, DISCARD, 0)
    await machine.end(await machine.update(6, 6))
    assert machine.weights == [([6.0], RATE)]


async def test_a_controller_that_was_replaced_applies_nothing_more(
    make_machine: MakeMachine,
) -> None:
    machine = await make_machine().start()
    old, old_run = machine.controller, machine.run
    new = machine._controller()
    await new.start()
    with raises(ErrorCode.UNAVAILABLE):
        await machine.update(1, 1)
    assert old_run.state is PolicyState.FAILED
    with pytest.raises(FencedError):
        await machine.worker.publish(old_run.token, 0, str(machine.paths.weights), 0.0)
    await old.fail("gone")
    assert machine.journal.store.history("p").policy.state is PolicyState.READY
    assert not machine.worker.is_released
    machine.controller = new
    await machine.end(await machine.update(1, 2))
    assert machine.weights == [([2.0], RATE)]
    await old._turns.stop(0.0)


async def test_a_new_process_over_the_same_files_comes_back_at_the_checkpoint(
    make_machine: MakeMachine,
) -> None:
    """A restart of the whole service: worker and controller are new, the journal is not."""
    machine = await make_machine().start()
    await machine.update(1, 1)
    await machine.end(await machine.submit(2, save("safe"), 0))
    await machine.end(await machine.update(3, 3))
    machine.worker.is_dead = True
    await machine.restart_controller()
    policy = machine.journal.store.history("p").policy
    assert (policy.state, policy.version, policy.max_version) == (PolicyState.READY, 1, 2)
    assert machine.weights == [([1.0], RATE)]
    again = await machine.update(3, 3)
    assert code_of(again) == ErrorCode.WORKER_LOST
    await machine.end(await machine.update(4, 4))
    assert machine.weights == [([1.0], RATE), ([4.0], RATE)]


async def test_a_worker_that_dies_while_a_policy_starts_is_replaced_at_the_next_call(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who submitted or cancelled meanwhile was told of an internal error, and did not ask again."""

    async def die(*_: object) -> None:
        machine.worker.is_dead = True
        raise WorkerLostError("killed")

    machine.worker.is_dead = True
    monkeypatch.setattr(machine.worker, "load", die)
    with pytest.raises(RatoonError) as raised:
        await machine.restart_controller()
    assert (raised.value.code, raised.value.retryable) == (ErrorCode.POLICY_NOT_READY, True)
    monkeypatch.undo()
    await machine.controller.start()
    assert machine.controller.state is PolicyState.READY


@pytest.mark.parametrize(
    "change", [{}, {"weights_digest": "another"}, {"version": 1}, {"last_seq": 1}]
)
async def test_a_worker_is_adopted_at_the_journals_digest_version_and_seq_only(
    make_machine: MakeMachine, change: dict[str, Any]
) -> None:
    machine = await make_machine(recovery=Recovery.REPLAY).start()
    await machine.end(await machine.update(1, 1))
    await machine.end(await machine.update(2, 2))
    history = machine.journal.store.history("p")
    status = machine.worker.core.status()
    assert status.weights_digest
    assert recovery.agrees(history, replace(status, **change)) == (not change)
