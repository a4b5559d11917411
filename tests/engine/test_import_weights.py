"""ImportWeights: in order, once, whole or not at all, and again after a crash while it can be."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import pytest

from ratoon.engine.policy import checkpointer
from ratoon.engine.types import FailedResult, Operation, version_of
from ratoon.engine.worker.tasks import WorkerLostError
from ratoon.errors import ErrorCode, RatoonError
from ratoon.metrics import RECOVERIES
from ratoon_proto.types import ImportMode, ImportResult, OperationState, PolicyState, Recovery
from tests.engine.conftest import MakeMachine
from tests.engine.harness import (
    DISCARD,
    RATE,
    Machine,
    code_of,
    import_weights,
    load,
    save,
)
from tests.engine.refusals import raises
from tests.engine.test_recovery import (
    checkpoint_ids,
    counted,
    damage,
    lose_worker,
    replaying,
    settled,
)
from tests.engine.test_worker import Bench, assert_lost
from tests.until import until

FULL = ImportMode.FULL
Weights = list[tuple[list[float], float]]
STEPPED: Weights = [([1.0], RATE)]
ADDED: Weights = [([9.0], 0.0)]


async def imported(machine: Machine, seq: int, number: float = 9, **changes: object) -> Operation:
    command = import_weights(number, **changes)
    return await machine.end(await machine.submit(seq, command, number))


def message_of(operation: Operation) -> str:
    assert isinstance(operation.result, FailedResult)
    return str(operation.result.error["message"])


def failure_of(machine: Machine) -> str:
    policy = machine.journal.store.history("p").policy
    assert policy.state is PolicyState.FAILED
    return policy.failure


async def test_it_runs_at_its_turn_and_makes_the_next_version(machine: Machine) -> None:
    last = await machine.update(3, 3)
    second = await machine.submit(2, import_weights(9), 9)
    await machine.end(await machine.update(1, 1))
    done = await machine.end(second)
    assert isinstance(done.result, ImportResult)
    assert (done.result.version, done.result.dtypes) == (2, ("F32",))
    await machine.end(last)
    assert machine.weights == [*STEPPED, *ADDED, ([3.0], RATE)]
    await machine.landed()
    assert machine.run.published == (2, 3)


async def test_a_full_import_replaces_what_was_there(machine: Machine) -> None:
    await machine.end(await machine.update(1, 1))
    await imported(machine, 2, mode=FULL)
    assert machine.weights == ADDED
    # Numbers are not given twice after it either.
    await machine.end(await machine.submit(3, save("mine"), 0))
    await imported(machine, 4, 10)
    await machine.end(await machine.submit(5, load("mine"), 0))
    again = await imported(machine, 6, 11)
    assert version_of(again.result) == 4


async def test_a_retry_is_the_first_one_though_the_folder_is_gone(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller that lost the answer has deleted it."""
    first = await imported(machine, 1)
    path = machine.put_folder("outer-9", 9)
    shutil.rmtree(path.parent)
    # The harness makes none again.
    monkeypatch.setattr(machine, "put_folder", lambda *_: path)
    again = await machine.submit(1, import_weights(9), 9)
    assert (again.operation_id, again.result) == (first.operation_id, first.result)
    assert machine.weights == ADDED
    with raises(ErrorCode.KEY_REUSED):
        await machine.submit(1, import_weights(9, mode=FULL), 9)


@pytest.mark.parametrize("name", ["none", "../outside", "escape", "."])
async def test_a_folder_that_is_not_below_the_root_takes_no_seq(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, name: str, tmp_path: Path
) -> None:
    machine.put_folder("outer-1", 1)
    outside = tmp_path / "outside"
    outside.mkdir()
    (machine.paths.models_root / "escape").symlink_to(outside)
    monkeypatch.setattr(machine, "put_folder", lambda *_: outside)
    with pytest.raises(RatoonError) as caught:
        await machine.submit(1, import_weights(1, folder=name), 1)
    assert (caught.value.code, caught.value.field) == (ErrorCode.INVALID_ARGUMENT, "model_folder")
    assert str(tmp_path) not in caught.value.message
    assert machine.journal.store.history("p").policy.next_seq == 1
    await machine.end(await machine.update(1, 1))


@pytest.mark.parametrize("is_link", [False, True])
async def test_a_folder_that_changes_before_its_turn_fails_it_alone(
    machine: Machine, is_link: bool, tmp_path: Path
) -> None:
    """Gone, or a link that leads out by now."""
    waiting = await machine.submit(2, import_weights(9), 9)
    folder = machine.put_folder("outer-9", 9).parent
    (tmp_path / "outside").mkdir()
    folder.rename(tmp_path / "outside" / "real")
    if is_link:
        folder.symlink_to(tmp_path / "outside" / "real")
    await machine.end(await machine.update(1, 1))
    assert code_of(await machine.end(waiting)) == ErrorCode.INVALID_ARGUMENT
    await machine.end(await machine.update(3, 3))
    assert machine.weights == [*STEPPED, ([3.0], RATE)]


async def test_expected_version_is_checked_at_the_turn(machine: Machine) -> None:
    await machine.end(await machine.update(1, 1))
    assert code_of(await imported(machine, 2, expected_version=0)) == ErrorCode.VERSION_MISMATCH
    assert machine.weights == STEPPED
    assert (await imported(machine, 3, expected_version=1)).state is OperationState.DONE


@pytest.mark.parametrize("breaks", [False, True])
async def test_an_open_window_is_refused_and_stays(machine: Machine, breaks: bool) -> None:
    """A poisoned one too: gradients of other weights are not silently dropped, nor stepped on."""
    if breaks:
        machine.faults.breaks.add(5.0)
    await machine.end(await machine.forward_backward(1, 5))
    refused = await imported(machine, 2)
    assert code_of(refused) == ErrorCode.WINDOW_OPEN
    assert machine.weights == []
    if not breaks:
        await machine.end(await machine.step(3))
        assert machine.weights == [([5.0], RATE)]
    else:
        await machine.end(await machine.submit(3, DISCARD, 0))
    assert (await imported(machine, 4)).state is OperationState.DONE


async def test_values_that_are_refused_change_nothing(machine: Machine) -> None:
    machine.faults.breaks.add(9.0)
    digest = machine.worker.trainer.state_digest()
    assert code_of(await imported(machine, 1)) == ErrorCode.INVALID_ARGUMENT
    assert (machine.worker.trainer.state_digest(), machine.run.version) == (digest, 0)
    assert len(machine.worker.trainers) == 1


async def test_it_is_cancelled_until_it_touches_the_weights(machine: Machine) -> None:
    machine.faults.reads = threading.Event()
    operation = await machine.submit(1, import_weights(9), 9)
    queued = await machine.submit(2, import_weights(10), 10)
    live = machine.run.ledger.find(operation.operation_id)
    assert live is not None
    await until(lambda: live.is_started)
    await machine.controller.cancel_operation(queued.operation_id)
    await machine.controller.cancel_operation(operation.operation_id)
    machine.faults.reads.set()
    for one in (operation, queued):
        assert (await machine.end(one)).state is OperationState.CANCELLED
    assert machine.weights == []
    assert (await imported(machine, 3)).state is OperationState.DONE


# After a crash.


async def test_a_checkpoint_is_due_at_once_whatever_the_settings(
    make_machine: MakeMachine,
) -> None:
    """From then on nobody needs the folder."""
    machine = await replaying(make_machine)
    await machine.end(await machine.update(1, 1))
    await settled(machine)
    assert checkpoint_ids(machine) == []
    await imported(machine, 2)
    await until(lambda: checkpoint_ids(machine))
    assert checkpoint_ids(machine) == ["auto-2-1"]
    await machine.end(await machine.update(3, 3))
    await settled(machine)
    assert checkpoint_ids(machine) == ["auto-2-1"]
    shutil.rmtree(machine.paths.models_root)
    await lose_worker(machine)
    assert machine.weights == [*STEPPED, *ADDED, ([3.0], RATE)]
    assert machine.run.state is PolicyState.READY


async def without_checkpoint(machine: Machine) -> None:
    """An update, an import and an update, whose checkpoint never lands."""
    machine.faults.full_disk = True
    await machine.end(await machine.update(1, 1))
    await imported(machine, 2)
    await machine.end(await machine.update(3, 3))


async def test_until_then_it_is_run_again_from_the_same_bytes(
    make_machine: MakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = await replaying(make_machine)
    await without_checkpoint(machine)
    await lose_worker(machine)
    assert machine.weights == [*STEPPED, *ADDED, ([3.0], RATE)]
    assert counted(machine, RECOVERIES) == ["replayed"]
    # It is still due: that of before the crash has failed, and nothing has ended since.
    monkeypatch.setattr(checkpointer, "_RETRY_S", 0.0)
    machine.faults.full_disk = False
    await machine.restart_controller()
    await until(lambda: checkpoint_ids(machine))


@pytest.mark.parametrize("fault", ["changed", "gone", "outside"])
async def test_other_bytes_stop_the_recovery_by_name(
    make_machine: MakeMachine, fault: str, tmp_path: Path
) -> None:
    """And the policy comes back once they are there again."""
    machine = await replaying(make_machine)
    await without_checkpoint(machine)
    path = machine.put_folder("outer-9", 9)
    record = machine.journal.store.records_from("p", 2)[0]
    assert record.choices is not None
    kept = path.read_bytes()
    if fault == "changed":
        path.write_text("10.0")
    else:
        shutil.rmtree(path.parent)
    if fault == "outside":
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "elsewhere" / path.name).write_bytes(kept)
        path.parent.symlink_to(tmp_path / "elsewhere")
    await lose_worker(machine)
    failure = failure_of(machine)
    assert "import_weights 2 cannot be run again: model_folder" in failure
    if fault == "changed":
        assert record.choices.folder_digest in failure
    if fault == "outside":
        path.parent.unlink()
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(kept)
    await machine.restart_controller()
    assert machine.run.state is PolicyState.READY
    assert machine.weights == [*STEPPED, *ADDED, ([3.0], RATE)]


async def test_a_damaged_checkpoint_costs_the_folder_again(make_machine: MakeMachine) -> None:
    machine = await replaying(make_machine)
    await imported(machine, 1)
    await until(lambda: checkpoint_ids(machine))
    damage(machine, "auto-1-1")
    await lose_worker(machine)
    assert machine.weights == ADDED


async def test_without_replay_it_fails_like_a_step(make_machine: MakeMachine) -> None:
    machine = await make_machine().start()
    await machine.end(await machine.update(1, 1))
    await machine.end(await machine.submit(2, save("mine"), 0))
    operation = await imported(machine, 3)
    assert checkpoint_ids(machine) == ["mine"], "none is taken of such a policy"
    await lose_worker(machine)
    lost = await machine.controller.get_operation(operation.operation_id, 0.0)
    assert code_of(lost) == ErrorCode.WORKER_LOST
    assert "version 2 and rolled back" in message_of(lost)
    assert machine.weights == STEPPED
    again = await imported(machine, 4)
    assert version_of(again.result) == 3, "the number of the lost version is retired"


@pytest.mark.parametrize("recovery", list(Recovery))
async def test_one_that_stops_half_way_is_applied_once(
    make_machine: MakeMachine, recovery: Recovery
) -> None:
    machine = await make_machine(recovery=recovery).start()
    machine.faults.tears[9.0] = 1
    operation = await machine.submit(1, import_weights(9), 9)
    ended = await machine.end(operation)
    if recovery is Recovery.FAIL:
        assert code_of(ended) == ErrorCode.WORKER_LOST
    else:
        assert ended.state is OperationState.DONE
    await machine.end(await machine.update(2, 1))
    assert machine.weights == (STEPPED if recovery is Recovery.FAIL else [*ADDED, *STEPPED])
    assert len(machine.worker.trainers) == 2


def test_the_worker_is_lost_to_an_import_that_stops_half_way(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    path = bench.paths.models_root / "outer-9" / "number.json"
    path.parent.mkdir(parents=True)
    path.write_text("9.0")
    first = bench.core.apply(1, bench.task(1, import_weights(9), 1))
    assert bench.core.apply(1, bench.task(1, import_weights(9), 1)) is first
    assert bench.trainer.weights == ADDED
    assert first.choices is not None
    assert first.choices.folder_digest
    assert (
        first.weights_digest == bench.trainer.state_digest() == bench.core.status().weights_digest
    )
    bench.faults.tears[9.0] = 1
    with pytest.raises(WorkerLostError, match="middle of a step"):
        bench.core.apply(1, bench.task(2, import_weights(9), 2))
    assert_lost(bench)
