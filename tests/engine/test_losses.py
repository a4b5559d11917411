"""What proves that a journal has lost its end, what does not, and what follows from a decision."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from ratoon.cli import cli
from ratoon.config import CheckpointConfig, LimitsConfig, RatoonConfig
from ratoon.doctor import Status, run_checks
from ratoon.engine.commands import Command
from ratoon.engine.files.losses import Choice, read_loss, write_decision
from ratoon.engine.files.paths import read_position, write_position
from ratoon.engine.journal.records import OperationRecord
from ratoon.engine.types import Operation
from ratoon.errors import ErrorCode, RatoonError
from ratoon_proto.types import PolicyState, Recovery, Sequencing
from tests.engine.archived_machine import ArchivedMachine, Store
from tests.engine.harness import (
    NO_CHECKPOINTS,
    Machine,
    code_of,
    forward_backward,
    optim_step,
    policy_spec,
    save,
    update,
)
from tests.until import until

DATABASE = "ratoon.sqlite"
OFTEN = CheckpointConfig(every_operations=1, every_s=0, every_bytes=0, keep=1)


class Room:
    """One policy, whose journal can be set back to where it was."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.spec = policy_spec(recovery=Recovery.REPLAY)
        self.checkpoints = NO_CHECKPOINTS
        self.machine: Machine | None = None
        self.worker: Any = None

    async def start(self, *, keeps_worker: bool = False) -> Machine:
        """A new controller; the policy may be refused."""
        await self.stop()
        worker = self.machine.worker if self.machine is not None and keeps_worker else None
        url = f"sqlite:///{self.root / DATABASE}"
        limits = LimitsConfig(gap_wait_s=0.05)
        if worker is None:
            machine = Machine(self.root, self.spec, limits, url, checkpoints=self.checkpoints)
        else:
            machine = Machine(
                self.root, self.spec, limits, url, lambda _: worker, checkpoints=self.checkpoints
            )
        self.machine = machine
        await machine.controller.start()
        await machine.landed()
        return machine

    async def stop(self) -> None:
        if self.machine is None:
            return
        await self.machine.controller._turns.stop(0.0)
        self.machine.journal.store._engine.dispose()

    def remember(self) -> None:
        with (
            closing(sqlite3.connect(self.root / DATABASE)) as here,
            closing(sqlite3.connect(self.root / "then.sqlite")) as then,
        ):
            here.backup(then)

    async def set_back(self, name: str = "then.sqlite") -> None:
        """Stop, and give the journal the state that was remembered."""
        await self.stop()
        for suffix in ("", "-wal", "-shm"):
            (self.root / f"{DATABASE}{suffix}").unlink(missing_ok=True)
        (self.root / DATABASE).write_bytes((self.root / name).read_bytes())

    async def run(self, *commands: tuple[int, Command]) -> list[Operation]:
        machine = self.machine
        assert machine is not None
        ended = [
            await machine.end(await machine.submit(seq, command, float(seq)))
            for seq, command in commands
        ]
        await machine.landed()
        if self.checkpoints is OFTEN:
            await covered(machine, ended[-1].seq)
        return ended


async def covered(machine: Machine, last_seq: int) -> None:
    """Until the state after `last_seq` has its checkpoint, which has covered what it may."""
    checkpointer = machine.controller._turns._checkpointer

    def is_covered() -> bool:
        known = machine.journal.store.checkpoints("p")
        is_landed = checkpointer._landing is not None and checkpointer._landing.done()
        return is_landed and bool(known) and known[-1].info.seq == last_seq

    await until(is_covered)


@pytest.fixture
async def room(tmp_path: Path) -> AsyncIterator[Room]:
    made = Room(tmp_path / "data")
    made.root.mkdir()
    yield made
    await made.stop()


def is_refused(machine: Machine) -> bool:
    is_failed = machine.run.state is PolicyState.FAILED
    return is_failed and "the journal has lost its end" in machine.run.failure


async def test_a_version_alone_proves_it(room: Room) -> None:
    machine = await room.start()
    await room.run((1, update(1)))
    room.remember()
    await room.run((2, update(2)))
    await room.set_back()
    machine.paths.position.unlink()
    machine = await room.start()
    assert is_refused(machine)
    assert "there are versions 2" in machine.run.failure


async def test_a_checkpoint_alone_proves_it(room: Room) -> None:
    machine = await room.start()
    room.remember()
    await room.run((1, save("mine")))
    await room.set_back()
    machine.paths.position.unlink()
    machine = await room.start()
    assert is_refused(machine)
    assert "there are checkpoints mine" in machine.run.failure


async def test_a_worker_alone_proves_it_also_once_it_has_ended(room: Room) -> None:
    machine = await room.start()
    room.remember()
    await room.run((1, forward_backward(1)))
    await room.set_back()
    machine.paths.position.unlink()
    machine = await room.start(keeps_worker=True)
    assert is_refused(machine)
    assert machine.worker.is_released
    assert is_refused(await room.start())


@pytest.mark.parametrize("command", [update(2), forward_backward(2), save("mine")])
async def test_an_end_alone_that_is_lost_is_missed(
    room: Room, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    """The acceptance is there: run again it would be told twice, and differ where choices do."""
    machine = await room.start()
    await room.run((1, update(1)))
    accept = machine.journal.fenced.accept

    def accept_and_remember(token: int, record: OperationRecord, next_seq: int) -> int:
        position = accept(token, record, next_seq)
        room.remember()
        return position

    monkeypatch.setattr(machine.journal.fenced, "accept", accept_and_remember)
    await room.run((2, command))
    await room.set_back()
    machine = await room.start()
    assert is_refused(machine)
    assert "the end of seq 1 and the acceptance of seq 2" in machine.run.failure


async def test_a_torn_position_says_nothing(room: Room) -> None:
    machine = await room.start()
    await room.run((1, update(1)))
    await room.stop()
    path = machine.paths.position
    path.write_bytes(path.read_bytes()[:-1])
    machine = await room.start()
    assert machine.run.state is PolicyState.READY
    known = read_position(path)
    assert known is not None
    assert (known.max_seq, known.last_seq, known.version) == (1, 1, 1)


async def test_a_journal_that_is_whole_again_is_gone_on_from(room: Room) -> None:
    machine = await room.start()
    await room.run((1, update(1)))
    room.remember()
    await room.run((2, update(2)))
    await room.stop()
    (room.root / "whole.sqlite").write_bytes(b"")
    with (
        closing(sqlite3.connect(room.root / DATABASE)) as here,
        closing(sqlite3.connect(room.root / "whole.sqlite")) as whole,
    ):
        here.backup(whole)
    await room.set_back()
    assert is_refused(await room.start())
    await room.set_back("whole.sqlite")
    machine = await room.start()
    assert machine.run.state is PolicyState.READY
    assert len(machine.weights) == 2
    assert read_loss(machine.paths) is None


async def test_a_decision_about_one_loss_says_nothing_of_another(room: Room) -> None:
    machine = await room.start()
    room.remember()
    await room.run((1, update(1)), (2, update(2)))
    older = (room.root / "then.sqlite").read_bytes()
    room.remember()
    await room.run((3, update(3)))
    await room.set_back()
    assert is_refused(await room.start())
    write_decision(machine.paths, Choice.ACCEPT_LOSS)
    (room.root / "then.sqlite").write_bytes(older)
    await room.set_back()
    machine = await room.start()
    assert is_refused(machine)
    assert "what is left has version 0" in machine.run.failure


async def test_a_window_that_was_open_at_the_checkpoint_is_poisoned(room: Room) -> None:
    """Its gradients are lost: a step on the rest of it would be another step, and silent."""
    room.checkpoints = OFTEN
    machine = await room.start()
    await room.run((1, update(1)), (2, forward_backward(2)))
    room.remember()
    await room.run((3, forward_backward(3)))
    await room.set_back()
    machine = await room.start()
    assert is_refused(machine)
    write_decision(machine.paths, Choice.FROM_EVIDENCE)
    room.checkpoints = NO_CHECKPOINTS
    machine = await room.start()
    assert machine.run.state is PolicyState.READY
    (stepped,) = await room.run((4, optim_step()))
    assert code_of(stepped) == ErrorCode.WINDOW_POISONED
    (stepped,) = await room.run((5, optim_step(2)))
    assert code_of(stepped) == ErrorCode.WINDOW_POISONED
    assert machine.weights == [([1.0], 0.5)]


async def test_lost_request_ids_are_not_gone_on_from(room: Room) -> None:
    """Who asks again under an id that nobody remembers would have it applied twice."""
    room.spec = policy_spec(recovery=Recovery.REPLAY, sequencing=Sequencing.SERVER)
    room.checkpoints = OFTEN
    machine = await room.start()
    room.remember()
    for name in ("a", "b"):
        await machine.end(await machine.update(name, 1.0))
    await covered(machine, 2)
    await room.set_back()
    machine = await room.start()
    assert is_refused(machine)
    with pytest.raises(RatoonError, match="request ids of seq 1 to 2 are lost"):
        write_decision(machine.paths, Choice.FROM_EVIDENCE)


async def test_a_policy_that_runs_nothing_again_goes_back_to_what_is_left(room: Room) -> None:
    room.spec = policy_spec(recovery=Recovery.FAIL)
    machine = await room.start()
    await room.run((1, update(1)), (2, save("mine")))
    room.remember()
    await room.run((3, update(3)), (4, save("newer")))
    await room.set_back()
    machine = await room.start()
    assert is_refused(machine)
    write_decision(machine.paths, Choice.ACCEPT_LOSS)
    machine = await room.start()
    assert machine.run.state is PolicyState.READY
    assert machine.weights == [([1.0], 0.5)]
    (kept,) = machine.paths.set_aside.iterdir()
    assert {path.name for path in (kept / "checkpoints").iterdir()} == {"newer"}
    assert {path.name for path in kept.iterdir()} >= {"loss.json", "decision.json"}
    (again,) = await room.run((3, update(3)))
    assert getattr(again.result, "version", None) == 3, "2 is the number of what was lost"


async def refuse(room: Room) -> Machine:
    """A refused policy of one version, of which nothing is known but that something is lost."""
    machine = await room.start()
    await room.run((1, update(1)))
    known = read_position(machine.paths.position)
    assert known is not None
    write_position(machine.paths.position, replace(known, count=known.count + 1))
    machine = await room.start()
    assert is_refused(machine)
    return machine


async def test_files_of_a_refused_policy_do_not_expire(room: Room) -> None:
    machine = await refuse(room)
    result = machine.paths.results / ("0" * 32)
    result.write_bytes(b"of a Forward")
    os.utime(result, (0, 0))
    await machine.controller.sweep()
    assert result.exists()


async def test_an_operator_reads_and_decides(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RATOON_DATA_ROOT", str(room.root))

    def recover(*arguments: str) -> Result:
        return CliRunner().invoke(cli, ["recover", "p", *arguments])

    unknown = recover()
    assert unknown.exit_code == 2
    assert "policy: got p, expected one with a folder below" in unknown.stderr
    machine = await room.start()
    assert recover().stdout == "p: nothing is lost\n"
    assert recover("--accept-loss").exit_code == 2
    machine = await refuse(room)
    told = recover()
    assert (told.exit_code, told.stdout) == (0, f"p: {machine.run.failure}\n")
    assert recover("--accept-loss", "--from-evidence").exit_code == 2
    refusal = recover("--from-evidence")
    assert refusal.exit_code == 2
    assert "there is no checkpoint of what was lost" in refusal.stderr
    assert is_refused(await room.start())
    assert recover("--accept-loss").exit_code == 0
    lines = (room.root / "access" / "audit.jsonl").read_text().splitlines()
    entry = json.loads(lines[-1])
    assert (entry["call"], entry["policy_id"]) == ("recover.accept-loss", "p")
    machine = await room.start()
    assert machine.run.state is PolicyState.READY
    assert recover().stdout == "p: nothing is lost\n"


async def test_the_doctor_names_what_is_refused_and_what_was_set_aside(room: Room) -> None:
    config = RatoonConfig(data_root=room.root)
    machine = await refuse(room)
    checks = dict(doctor_says(config))
    assert checks == {"policy p": machine.run.failure}
    write_decision(machine.paths, Choice.ACCEPT_LOSS)
    machine = await room.start()
    (detail,) = dict(doctor_says(config)).values()
    assert str(machine.paths.set_aside) in detail


def doctor_says(config: RatoonConfig) -> list[tuple[str, str]]:
    checks = [check for check in run_checks(config) if check.name.startswith("policy")]
    assert all(check.status is Status.WARN for check in checks)
    return [(check.name, check.detail) for check in checks]


async def test_copies_in_an_archive_are_evidence_too(tmp_path: Path) -> None:
    """Where a disk is lost, they are all there is."""
    store, url = Store(tmp_path / "store"), f"sqlite:///{tmp_path / DATABASE}"
    machine = ArchivedMachine(tmp_path / "one", store, url, OFTEN)
    await machine.start()
    with closing(sqlite3.connect(tmp_path / DATABASE)) as here:
        then = sqlite3.connect(tmp_path / "then.sqlite")
        here.backup(then)
        then.close()
    await machine.end(await machine.update(1, 1))
    await covered(machine, 1)
    await machine.controller._turns.stop(0.0)
    machine.journal.store._engine.dispose()
    copies = {path for path in store.path.rglob("*") if path.is_file()}
    for suffix in ("-wal", "-shm"):
        (tmp_path / f"{DATABASE}{suffix}").unlink(missing_ok=True)
    (tmp_path / DATABASE).write_bytes((tmp_path / "then.sqlite").read_bytes())
    again = ArchivedMachine(tmp_path / "two", store, url, OFTEN)
    await again.controller.start()
    assert is_refused(again)
    assert "there are checkpoints auto-1-1" in again.run.failure
    assert {path for path in store.path.rglob("*") if path.is_file()} == copies
    await again.controller._turns.stop(0.0)
    again.journal.store._engine.dispose()
    write_decision(again.paths, Choice.ACCEPT_LOSS)
    last = ArchivedMachine(tmp_path / "two", store, url, OFTEN)
    await last.controller.start()
    (kept,) = last.paths.set_aside.iterdir()
    assert [path.name for path in (kept / "checkpoints").iterdir()] == ["auto-1-1"]
    await last.controller.close(1.0)
