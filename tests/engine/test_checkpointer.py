"""Automatic checkpoints: when they are taken, what they free, and what a failure leaves."""

from __future__ import annotations

import asyncio
import threading

import pytest

from ratoon.config import CheckpointConfig
from ratoon.engine.policy import checkpointer
from ratoon.errors import ErrorCode
from ratoon.metrics import CHECKPOINTS
from ratoon_proto.types import OperationState, Recovery
from tests.engine.conftest import MakeMachine
from tests.engine.harness import DISCARD, RATE, Machine, digest_of, forward, load, save
from tests.engine.refusals import raises
from tests.engine.test_recovery import checkpoint_ids, counted, lose_worker, settled
from tests.until import until


def config(**changes: float) -> CheckpointConfig:
    off: dict[str, float] = {"every_operations": 0, "every_s": 0, "every_bytes": 0, "keep": 1}
    return CheckpointConfig.model_validate(off | changes)


async def machine_of(make_machine: MakeMachine, **changes: float) -> Machine:
    return await make_machine(recovery=Recovery.REPLAY, checkpoints=config(**changes)).start()


async def test_each_so_many_operations(make_machine: MakeMachine) -> None:
    machine = await machine_of(make_machine, every_operations=3)
    await machine.updates(1, 2)
    await machine.end(await machine.submit(3, forward(3), 3))
    await settled(machine)
    assert checkpoint_ids(machine) == [], "a Forward is nothing to run again"
    await machine.end(await machine.forward_backward(4, 4))
    await settled(machine)
    (known,) = machine.journal.store.checkpoints("p")
    assert (known.info.checkpoint_id, known.info.replay_from_seq) == ("auto-4-1", 4)
    assert known.weights_digest == machine.worker.trainer.state_digest()
    assert machine.bodies == {digest_of(4)}
    for seq in (5, 6):
        await machine.end(await machine.submit(seq, DISCARD, 0))
    await machine.end(await machine.update(7, 7))
    await settled(machine)
    assert checkpoint_ids(machine) == ["auto-7-1"]
    assert [path.name for path in machine.paths.checkpoints.iterdir()] == ["auto-7-1"]
    assert machine.bodies == set()


async def test_after_so_many_seconds_though_nothing_else_happens(
    make_machine: MakeMachine,
) -> None:
    machine = await machine_of(make_machine, every_s=0.05)
    await asyncio.sleep(0.1)
    assert checkpoint_ids(machine) == []
    await machine.end(await machine.update(1, 1))
    await until(lambda: checkpoint_ids(machine))
    assert checkpoint_ids(machine) == ["auto-1-1"]


async def test_each_so_many_bytes_of_bodies(make_machine: MakeMachine) -> None:
    machine = await machine_of(make_machine)
    await machine.end(await machine.update(1, 1))
    size_bytes = machine.paths.body(digest_of(1)).stat().st_size
    await machine.controller.close(1.0)
    machine = await machine_of(make_machine, every_bytes=size_bytes + 1)
    await machine.end(await machine.update(1, 1))
    await settled(machine)
    assert checkpoint_ids(machine) == []
    await machine.restart_controller()
    await machine.end(await machine.submit(2, forward(2), 2))
    await settled(machine)
    assert checkpoint_ids(machine) == ["auto-2-2"], "a restart counts what is there"


async def test_checkpoints_that_no_record_names_are_dropped(make_machine: MakeMachine) -> None:
    """A caller's too: what the worker has saved and the journal does not know is in its outcome."""
    machine = await machine_of(make_machine, every_operations=1)
    await machine.end(await machine.submit(1, save("mine"), 0))
    await machine.end(await machine.update(2, 2))
    await settled(machine)
    for name in ("auto-9-1", "torn", ".tmp-torn"):
        (machine.paths.checkpoints / name).mkdir()
    known = ["auto-2-1", "mine"]
    await machine.restart_controller()
    assert sorted(path.name for path in machine.paths.checkpoints.iterdir()) == known
    await lose_worker(machine)
    assert sorted(path.name for path in machine.paths.checkpoints.iterdir()) == known


async def test_a_policy_that_does_not_replay_has_none(make_machine: MakeMachine) -> None:
    machine = await make_machine(checkpoints=config(every_operations=1)).start()
    await machine.end(await machine.update(1, 1))
    await settled(machine)
    assert checkpoint_ids(machine) == []
    record = machine.journal.store.records_from("p", 1)[0]
    assert record.weights_digest == "", "nothing is compared"
    assert machine.bodies == set()


async def test_operations_run_while_one_is_written(make_machine: MakeMachine) -> None:
    machine = await machine_of(make_machine, every_operations=1)
    machine.faults.writes = threading.Event()
    await machine.end(await machine.update(1, 1))
    await machine.end(await machine.update(2, 2))
    assert checkpoint_ids(machine) == []
    assert machine.bodies == {digest_of(1), digest_of(2)}
    machine.faults.writes.set()
    await settled(machine)
    assert checkpoint_ids(machine) == ["auto-2-1"]
    await lose_worker(machine)
    assert machine.weights == [([1.0], RATE), ([2.0], RATE)]


async def test_a_callers_checkpoint_covers_and_stays(make_machine: MakeMachine) -> None:
    machine = await machine_of(make_machine, every_operations=2)
    await machine.end(await machine.update(1, 1))
    await machine.end(await machine.submit(2, save("mine"), 0))
    assert machine.bodies == set()
    await machine.end(await machine.update(3, 3))
    await settled(machine)
    assert checkpoint_ids(machine) == ["mine"], "it counts as one"
    await machine.end(await machine.update(4, 4))
    await settled(machine)
    assert checkpoint_ids(machine) == ["mine", "auto-4-1"]
    assert machine.paths.checkpoint("mine").is_dir()


def named(machine: Machine) -> list[str]:
    """Checkpoints that callers see."""
    return [c.info.name for c in machine.journal.store.checkpoints("p") if c.info.name]


def folders(machine: Machine) -> list[str]:
    return sorted(path.name for path in machine.paths.checkpoints.iterdir())


async def collected(machine: Machine) -> None:
    """Until nothing waits to be deleted."""
    await settled(machine)
    checkpointer = machine.controller._turns._checkpointer
    await until(lambda: not checkpointer.must_collect)
    await machine.end(await machine.submit(None, forward(3), 3))


async def test_a_deleted_checkpoint_stays_as_long_as_recovery_begins_at_it(
    make_machine: MakeMachine,
) -> None:
    """Its name is free at once; its files, from which the weights come back, are not."""
    machine = await machine_of(make_machine, every_operations=2)
    await machine.end(await machine.update(1, 1))
    await machine.end(await machine.submit(2, save("mine"), 0))
    deleted = await machine.controller.delete_checkpoint("mine")
    assert (deleted.name, deleted.seq) == ("mine", 2)
    with raises(ErrorCode.CHECKPOINT_NOT_FOUND):
        await machine.controller.delete_checkpoint("mine")
    assert named(machine) == []
    await collected(machine)
    assert folders(machine) == ["mine"]
    await lose_worker(machine)
    assert machine.weights == [([1.0], RATE)]
    again = await machine.end(await machine.submit(3, save("mine"), 0))
    assert again.state is OperationState.DONE
    await collected(machine)
    assert named(machine) == ["mine"]
    assert folders(machine) == [f"auto-3-{machine.run.token}-own"], "the older one is covered"
    await lose_worker(machine)
    assert machine.weights == [([1.0], RATE)]


async def test_a_deleted_checkpoint_stays_until_no_replay_loads_it(
    make_machine: MakeMachine,
) -> None:
    """The newest is damaged, so the load is run again, of a checkpoint without a name."""
    machine = await machine_of(make_machine, keep=2)
    await machine.end(await machine.submit(1, save("mine"), 0))
    await machine.end(await machine.update(2, 2))
    await machine.end(await machine.submit(3, save("older"), 0))
    await machine.end(await machine.submit(4, load("mine"), 0))
    await machine.end(await machine.update(5, 5))
    await machine.end(await machine.submit(6, save("newer"), 0))
    await machine.controller.delete_checkpoint("mine")
    await collected(machine)
    assert folders(machine) == ["mine", "newer", "older"]
    for path in machine.paths.checkpoint("newer").iterdir():
        path.write_text("damaged")
    await lose_worker(machine)
    assert machine.weights == [([5.0], RATE)]
    await machine.end(await machine.submit(7, save("newest"), 0))
    await collected(machine)
    assert folders(machine) == ["newer", "newest", "older"], "recovery begins behind the load"


async def test_an_overwritten_checkpoint_is_loaded_until_another_is_saved(
    make_machine: MakeMachine,
) -> None:
    machine = await machine_of(make_machine)
    await machine.end(await machine.submit(1, save("mine"), 0))
    await machine.end(await machine.update(2, 2))
    await machine.end(await machine.submit(3, load("mine"), 0))
    await machine.end(await machine.update(4, 4))
    refused = await machine.end(await machine.submit(5, save("mine"), 0))
    assert refused.state is OperationState.FAILED
    machine.faults.full_disk = True
    failed = await machine.end(await machine.submit(6, save("mine", overwrite=True), 0))
    assert (failed.state, named(machine)) == (OperationState.FAILED, ["mine"])
    machine.faults.full_disk = False
    await collected(machine)
    await lose_worker(machine)
    assert machine.weights == [([4.0], RATE)], "the loaded state is that of the name before"
    await machine.end(await machine.submit(7, save("mine", overwrite=True), 0))
    await collected(machine)
    assert (named(machine), len(folders(machine))) == (["mine"], 1)
    await machine.end(await machine.update(8, 8))
    await machine.end(await machine.submit(9, load("mine"), 0))
    assert machine.weights == [([4.0], RATE)]


async def test_the_last_few_stay_and_those_that_are_pinned(make_machine: MakeMachine) -> None:
    machine = await machine_of(make_machine)
    for seq, options in enumerate(({"pinned": True}, {}, {}, {"keep_last": 2}), 1):
        await machine.end(await machine.submit(seq, save(f"c{seq}", **options), 0))
    assert named(machine) == ["c1", "c3", "c4"]
    await collected(machine)
    assert folders(machine) == ["c1", "c3", "c4"]


async def test_a_checkpoint_expires(make_machine: MakeMachine) -> None:
    machine = await machine_of(make_machine)
    await machine.end(await machine.submit(1, save("brief", ttl_s=0.2), 0))
    await machine.end(await machine.submit(2, save("long", ttl_s=3600.0), 0))
    await machine.controller.sweep()
    await collected(machine)
    assert named(machine) == ["brief", "long"]
    await machine.controller.set_ttl("long", None, of_version=False)
    await machine.controller.set_ttl("brief", 0.1, of_version=False)
    with raises(ErrorCode.CHECKPOINT_NOT_FOUND):
        await machine.controller.set_ttl("", 0.1, of_version=False)
    await asyncio.sleep(0.2)
    await machine.controller.sweep()
    await collected(machine)
    assert (named(machine), folders(machine)) == (["long"], ["long"])


async def test_a_policy_that_rolls_back_keeps_the_one_it_would_go_back_to(
    make_machine: MakeMachine,
) -> None:
    machine = await make_machine(checkpoints=config()).start()
    await machine.end(await machine.update(1, 1))
    for seq in (2, 3):
        await machine.end(await machine.submit(seq, save(f"c{seq}"), 0))
        await machine.controller.delete_checkpoint(f"c{seq}")
    await collected(machine)
    assert folders(machine) == ["c3"]
    await machine.end(await machine.update(4, 4))
    await lose_worker(machine)
    assert machine.weights == [([1.0], RATE)]


async def test_bodies_since_the_oldest_that_is_kept_are_kept(make_machine: MakeMachine) -> None:
    machine = await machine_of(make_machine, every_operations=1, keep=3)
    for seq in (1, 2, 3):
        await machine.end(await machine.update(seq, seq))
        await settled(machine)
    assert machine.bodies == {digest_of(2), digest_of(3)}
    records = machine.journal.store.records_from("p", 1)
    assert [record.command is None for record in records] == [True, False, False]
    assert [record.choices is None for record in records] == [True, False, False]
    again = await machine.end(await machine.update(1, 1))
    assert again.operation_id == records[0].operation_id


async def test_what_was_cancelled_keeps_no_body(make_machine: MakeMachine) -> None:
    """Submitted and cancelled again and again, bodies would fill the disk before a checkpoint."""
    machine = await machine_of(make_machine)
    running = await machine.running(1)
    queued = await machine.update(2, 2)
    for operation in (queued, running):
        await machine.controller.cancel_operation(operation.operation_id)
    assert (await machine.end(running)).state is OperationState.CANCELLED
    await machine.end(await machine.update(3, 3))
    assert machine.bodies == {digest_of(3)}
    await lose_worker(machine)
    assert machine.weights == [([3.0], RATE)]
    assert machine.bodies == {digest_of(3)}


async def test_a_full_disk_fails_a_checkpoint_and_nothing_else(
    make_machine: MakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpointer, "_RETRY_S", 0.05)
    machine = await machine_of(make_machine, every_operations=1)
    machine.faults.full_disk = True
    for seq in (1, 2):
        assert (await machine.end(await machine.update(seq, seq))).state is OperationState.DONE
    await until(lambda: "failed" in counted(machine, CHECKPOINTS))
    assert machine.bodies == {digest_of(1), digest_of(2)}
    assert checkpoint_ids(machine) == []
    machine.faults.full_disk = False
    await until(lambda: checkpoint_ids(machine))
    await settled(machine)
    assert checkpoint_ids(machine) == ["auto-2-1"]
    assert machine.bodies == set()
    assert set(counted(machine, CHECKPOINTS)) == {"failed", "written"}


async def test_an_answer_that_was_lost_deletes_nothing_that_is_journaled(
    make_machine: MakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row is there: to write the folder anew would first remove what the row means."""
    monkeypatch.setattr(checkpointer, "_RETRY_S", 0.05)
    machine = await machine_of(make_machine, every_operations=1)
    machine.journal.lost.add("cover")
    await machine.end(await machine.update(1, 1))
    await until(lambda: counted(machine, CHECKPOINTS) == ["failed", "written"])
    assert counted(machine, CHECKPOINTS) == ["failed", "written"]
    await lose_worker(machine)
    assert machine.weights == [([1.0], RATE)]
    assert machine.bodies == set()
