"""What a recovery compares, refuses and names; weights are the history of the steps that ran."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from ratoon.config import CheckpointConfig
from ratoon.engine.crash_points import CrashPoint
from ratoon.engine.types import FailedResult
from ratoon.errors import ErrorCode
from ratoon.metrics import CHECKPOINTS, RECOVERIES, WARNINGS, Metric, Sample
from ratoon.warning_kinds import WarningKind
from ratoon_proto.types import OnChangedNumerics, OperationState, PolicyState, Recovery
from tests.engine.conftest import MakeMachine
from tests.engine.harness import (
    NO_CHECKPOINTS,
    RATE,
    Machine,
    digest_of,
    forward,
    from_forward,
    load,
    save,
)
from tests.engine.refusals import raises
from tests.until import until

EACH = CheckpointConfig(every_operations=1, every_s=0, every_bytes=0, keep=2)


async def replaying(make_machine: MakeMachine, **changes: object) -> Machine:
    return await make_machine(recovery=Recovery.REPLAY, **changes).start()


async def lose_worker(machine: Machine) -> None:
    machine.worker.is_dead = True
    await machine.restart_controller()


async def settled(machine: Machine) -> None:
    """Until no checkpoint is due or under way."""
    checkpointer = machine.controller._turns._checkpointer

    def is_at_rest() -> bool:
        landing = checkpointer._landing
        return checkpointer.wait_s() != 0.0 and (landing is None or landing.done())

    await until(is_at_rest)


def hold_end(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Ends are journaled once the event is set."""
    end, may_end = machine.journal.end, asyncio.Event()

    async def slow_end(*args: Any) -> int:
        await may_end.wait()
        return await end(*args)

    monkeypatch.setattr(machine.journal, "end", slow_end)
    return may_end


def counted(machine: Machine, metric: Metric) -> list[str]:
    samples = [change for change in machine.metrics.changes if isinstance(change, Sample)]
    return [each.labels[-1] for each in samples if each.metric == metric.name and each.value]


def checkpoint_ids(machine: Machine) -> list[str]:
    return [known.info.checkpoint_id for known in machine.journal.store.checkpoints("p")]


def damage(machine: Machine, checkpoint_id: str) -> None:
    path = machine.paths.checkpoint(checkpoint_id) / "state.json"
    path.write_bytes(path.read_bytes()[:-3])


def snapshot_of(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


async def test_what_was_applied_is_run_again_and_keeps_its_numbers(
    make_machine: MakeMachine,
) -> None:
    machine = await replaying(make_machine)
    results = [(await machine.end(await machine.update(seq, seq))).result for seq in (1, 2, 3)]
    await lose_worker(machine)
    again = [(await machine.end(await machine.update(seq, seq))).result for seq in (1, 2, 3)]
    assert again == results
    assert machine.weights == [([1.0], RATE), ([2.0], RATE), ([3.0], RATE)]
    assert (await machine.controller.weight_manifest(None)).version == 3
    assert counted(machine, RECOVERIES) == ["replayed"]


@pytest.mark.parametrize("num_updates", [1, 2])
async def test_another_digest_stops_the_policy_with_both(
    make_machine: MakeMachine, num_updates: int
) -> None:
    """Going on would train weights that no caller has seen."""
    machine = await replaying(make_machine)
    await machine.updates(*range(1, num_updates + 1))
    journaled = [record.weights_digest for record in machine.journal.store.records_from("p", 1)]
    await machine.landed()
    files, machine.faults.noise = snapshot_of(machine.paths.root), 1.0
    await lose_worker(machine)
    for _ in range(2):  # Nor does the worker that has these weights serve the next controller.
        policy = machine.journal.store.history("p").policy
        assert policy.state is PolicyState.FAILED
        assert "update 1" in policy.failure
        assert journaled[0] in policy.failure
        assert machine.worker.trainer.state_digest() in policy.failure
        with raises(ErrorCode.POLICY_FAILED, match=journaled[0]):
            await machine.update(num_updates + 1, 3)
        assert snapshot_of(machine.paths.root) == files
        assert machine.worker.is_released
        await machine.restart_controller()
    assert set(counted(machine, RECOVERIES)) == {"stopped"}
    machine.faults.noise = 0.0
    await machine.restart_controller()
    policy = machine.journal.store.history("p").policy
    assert (policy.state, policy.failure) == (PolicyState.READY, "")
    expected = [([float(seq)], RATE) for seq in range(1, num_updates + 1)]
    assert machine.weights == expected


async def test_choices_that_were_journaled_are_not_made_anew(make_machine: MakeMachine) -> None:
    """Another cut, on a worker with other memory, would be other sums of the same gradients."""
    machine = await replaying(make_machine)
    await machine.end(await machine.update(1, 1))
    machine.faults.plan_tokens = 32
    await lose_worker(machine)
    await machine.end(await machine.update(2, 2))
    assert [plan.micro_batch_tokens for plan in machine.worker.trainer.plans] == [64, 32]


@pytest.mark.parametrize("loses_worker", [False, True])
async def test_a_plan_that_only_the_worker_has_is_kept_as_long_as_the_worker(
    make_machine: MakeMachine, loses_worker: bool
) -> None:
    """It is of an operation that has an effect and no end; without the worker it has neither."""
    machine = await replaying(make_machine)
    machine.crashes.armed[CrashPoint.ENGINE_BEFORE_END] = 1
    update = await machine.update(1, 1)
    await until(lambda: machine.crashes.hits)
    machine.faults.plan_tokens = 32
    machine.worker.is_dead = loses_worker
    await machine.restart_controller()
    ended = await machine.end(update)
    assert ended.state is OperationState.DONE
    assert ended.started_at is not None
    await lose_worker(machine)
    (plan,) = machine.worker.trainer.plans
    assert plan.micro_batch_tokens == (32 if loses_worker else 64)
    assert machine.weights == [([1.0], RATE)]


async def test_an_operation_that_the_worker_ended_runs_until_it_is_journaled(
    make_machine: MakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was queued again in the eyes of its caller, and could be cancelled."""
    machine = await replaying(make_machine)
    machine.crashes.armed[CrashPoint.ENGINE_BEFORE_END] = 1
    update = await machine.update(1, 1)
    await until(lambda: machine.crashes.hits)
    before = await machine.controller.get_operation(update.operation_id, 0.0)
    may_end = hold_end(machine, monkeypatch)
    await machine.restart_controller()
    seen = await machine.controller.cancel_operation(update.operation_id)
    assert (seen.state, seen.started_at) == (OperationState.RUNNING, before.started_at)
    may_end.set()
    assert (await machine.end(update)).state is OperationState.DONE
    assert machine.weights == [([1.0], RATE)]


async def test_other_numerics_stop_the_policy_naming_what_differs(
    make_machine: MakeMachine,
) -> None:
    machine = await replaying(make_machine)
    await machine.end(await machine.update(1, 1))
    machine.faults.device = "other"
    await lose_worker(machine)
    policy = machine.journal.store.history("p").policy
    assert policy.state is PolicyState.FAILED
    assert "device: fake -> other" in policy.failure
    assert machine.weights == [], "nothing was run"


async def test_other_numerics_may_be_a_new_base(make_machine: MakeMachine) -> None:
    rebase = OnChangedNumerics.REBASE
    machine = await replaying(make_machine, on_changed_numerics=rebase)
    await machine.updates(1, 2)
    machine.faults.device, machine.faults.noise = "other", 0.5
    await lose_worker(machine)
    assert machine.weights == [([1.5], RATE), ([2.5], RATE)]
    assert machine.run.state is PolicyState.READY
    assert machine.journal.store.history("p").policy.version == 2
    assert checkpoint_ids(machine) == ["auto-2-2"]
    assert counted(machine, RECOVERIES) == ["rebased"]
    records = machine.journal.store.records_from("p", 1)
    assert records[1].weights_digest == machine.worker.trainer.state_digest()
    assert machine.journal.store.numerics(records[0].numerics) == {"device": "other"}
    await machine.end(await machine.update(3, 3))
    await lose_worker(machine)
    assert machine.weights == [([1.5], RATE), ([2.5], RATE), ([3.5], RATE)]
    assert counted(machine, RECOVERIES) == ["rebased", "replayed"]


async def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(
    make_machine: MakeMachine,
) -> None:
    machine = await replaying(make_machine, checkpoints=EACH)
    for seq in (1, 2, 3):
        await machine.end(await machine.update(seq, seq))
        await settled(machine)
    assert checkpoint_ids(machine) == ["auto-2-1", "auto-3-1"]
    assert machine.bodies == {digest_of(3)}
    damage(machine, "auto-3-1")
    await lose_worker(machine)
    assert machine.weights == [([1.0], RATE), ([2.0], RATE), ([3.0], RATE)]
    assert counted(machine, CHECKPOINTS).count("unusable") == 1
    damage(machine, "auto-2-1")
    await lose_worker(machine)
    policy = machine.journal.store.history("p").policy
    assert policy.state is PolicyState.FAILED
    assert "auto-2-1" in policy.failure
    assert "auto-3-1" in policy.failure
    assert {path.name for path in machine.paths.checkpoints.iterdir()} == {"auto-2-1", "auto-3-1"}


async def test_a_checkpoint_of_another_state_is_unusable(make_machine: MakeMachine) -> None:
    """Whole files that are not those that the journal means: a restored backup."""
    machine = await replaying(make_machine, checkpoints=EACH)
    for seq in (1, 2, 3):
        await machine.end(await machine.update(seq, seq))
        await settled(machine)
    newest, before = (
        machine.paths.checkpoint(name) / "state.json" for name in ("auto-3-1", "auto-2-1")
    )
    newest.write_bytes(before.read_bytes())
    await lose_worker(machine)
    assert machine.weights == [([1.0], RATE), ([2.0], RATE), ([3.0], RATE)]
    assert counted(machine, CHECKPOINTS).count("unusable") == 1


async def test_a_roll_back_passes_over_a_damaged_checkpoint_for_good(
    make_machine: MakeMachine,
) -> None:
    """It was the base of the next recovery where it could be read again: a double step."""
    machine = await make_machine().start()
    await machine.update(1, 1)
    await machine.submit(2, save("older"), 0)
    await machine.update(3, 3)
    await machine.end(await machine.submit(4, save("newer"), 0))
    state = machine.paths.checkpoint("newer") / "state.json"
    text = state.read_text()
    damage(machine, "newer")
    machine.journal.lost.add("before roll_back")
    machine.worker.is_dead = True
    await machine.end(await machine.update(5, 5))
    lost = await machine.end(await machine.update(3, 3))
    assert isinstance(lost.result, FailedResult)
    assert lost.result.error["details"] == {
        "version": "1",
        "checkpoint_id": "older",
        "retired_version": "2",
    }
    state.write_text(text)
    await machine.end(await machine.update(6, 3))
    await lose_worker(machine)
    assert machine.weights == [([1.0], RATE)]
    assert (await machine.end(lost)).result == lost.result
    assert set(counted(machine, RECOVERIES)) == {"rolled_back"}
    assert set(counted(machine, WARNINGS)) == {WarningKind.ROLLED_BACK}
    # Its caller may still ask for it by name.
    loaded = await machine.end(await machine.submit(7, load("newer"), 0))
    assert loaded.state is OperationState.DONE
    assert machine.weights == [([1.0], RATE), ([3.0], RATE)]


async def test_a_damaged_body_fails_its_operation_by_name(make_machine: MakeMachine) -> None:
    machine = await replaying(make_machine)
    await machine.running(1)
    doomed = await machine.update(2, 2)
    path = machine.paths.body(digest_of(2))
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    machine.faults.holds[1.0].set()
    ended = await machine.end(doomed)
    assert isinstance(ended.result, FailedResult)
    assert digest_of(2) in str(ended.result.error["message"])
    await machine.end(await machine.update(3, 3))
    assert machine.weights == [([1.0], RATE), ([3.0], RATE)]


@pytest.mark.parametrize("is_there", [True, False])
async def test_a_damaged_body_stops_a_recovery(make_machine: MakeMachine, is_there: bool) -> None:
    """To pass over the operation would be a step that silently never was."""
    machine = await replaying(make_machine)
    await machine.updates(1, 2)
    path = machine.paths.body(digest_of(1))
    whole = path.read_bytes()
    path.unlink()
    if is_there:
        path.write_bytes(whole[:-1] + b"?")
    await lose_worker(machine)
    policy = machine.journal.store.history("p").policy
    assert policy.state is PolicyState.FAILED
    assert digest_of(1) in policy.failure
    path.write_bytes(whole)
    await machine.restart_controller()
    assert machine.weights == [([1.0], RATE), ([2.0], RATE)]


async def test_the_old_logprobs_of_what_may_run_again_are_kept(make_machine: MakeMachine) -> None:
    limits = {"result_ttl_s": 0.001}
    keep_one = CheckpointConfig(every_operations=0, every_s=0, every_bytes=0, keep=1)
    machine = await replaying(make_machine, limits=limits, checkpoints=keep_one)
    read = await machine.end(await machine.submit(None, forward(1), 1))
    await machine.end(await machine.update(1, 1, loss=from_forward(read)))
    await asyncio.sleep(0.01)
    await machine.controller.sweep()
    await lose_worker(machine)
    assert machine.run.state is PolicyState.READY, machine.run.failure
    assert len(machine.weights) == 1
    await machine.end(await machine.submit(2, save("covers"), 0))
    await machine.controller.sweep()
    assert list(machine.paths.results.iterdir()) == []


async def test_the_old_logprobs_of_what_only_the_worker_has_ended_are_kept(
    make_machine: MakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Forward without a key is in no journal, and its controller is gone."""
    machine = await replaying(make_machine, limits={"result_ttl_s": 0.001})
    read = await machine.end(await machine.submit(None, forward(1), 1))
    machine.crashes.armed[CrashPoint.ENGINE_BEFORE_END] = 1
    update = await machine.update(1, 1, loss=from_forward(read))
    await until(lambda: machine.crashes.hits)
    may_end = hold_end(machine, monkeypatch)
    await machine.restart_controller()
    await asyncio.sleep(0.01)
    await machine.controller.sweep()
    may_end.set()
    assert (await machine.end(update)).state is OperationState.DONE
    await lose_worker(machine)
    assert machine.run.state is PolicyState.READY, machine.run.failure
    assert len(machine.weights) == 1


async def test_a_forward_without_a_key_is_found_by_a_new_controller(
    make_machine: MakeMachine,
) -> None:
    """It is in no journal, and the Update that names it was accepted before the kill."""
    machine = await replaying(make_machine)
    read = await machine.end(await machine.submit(None, forward(1), 1))
    await machine.running(1)
    named = await machine.update(2, 1, loss=from_forward(read))
    restart = asyncio.create_task(machine.restart_controller())
    await asyncio.sleep(0.02)
    machine.faults.holds[1.0].set()
    await restart
    assert (await machine.end(named)).state is OperationState.DONE


async def test_an_automatic_checkpoint_is_no_callers(make_machine: MakeMachine) -> None:
    machine = await replaying(make_machine, checkpoints=EACH)
    await machine.end(await machine.update(1, 1))
    await settled(machine)
    for command in (load("auto-1"), save("auto-9")):
        with raises(ErrorCode.INVALID_ARGUMENT):
            await machine.submit(2, command, 0)
    assert (await machine.update(2, 2)).seq == 2


async def test_a_journal_that_is_away_loses_nothing(make_machine: MakeMachine) -> None:
    machine = await replaying(make_machine, checkpoints=NO_CHECKPOINTS)
    running = await machine.running(1)
    machine.journal.is_away = True
    machine.faults.holds[1.0].set()
    with raises(ErrorCode.UNAVAILABLE):
        await machine.update(2, 2)
    await asyncio.sleep(0.05)
    machine.journal.is_away = False
    assert (await machine.end(running)).state is OperationState.DONE
    await machine.end(await machine.update(2, 2))
    assert machine.weights == [([1.0], RATE), ([2.0], RATE)]
    assert len(machine.worker.trainers) == 1
