"""How often the journal is written for one operation: transactions that change a row."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from sqlalchemy import Connection, event

from ratoon.errors import ErrorCode, RatoonError
from ratoon_proto.types import PublishConfig, PublishKind, Recovery, StepResult
from tests.engine.conftest import MakeMachine
from tests.engine.harness import DISCARD, Machine


class Writes:
    """Committed transactions of a machine's database in which there was a write."""

    def __init__(self, machine: Machine) -> None:
        self.count = 0
        engine = machine.journal.store._engine
        event.listen(engine, "before_cursor_execute", self._execute)
        event.listen(engine, "commit", self._commit)

    def _execute(self, connection: Connection, _cursor: Any, statement: str, *_: Any) -> None:
        if statement.split(maxsplit=1)[0] in ("INSERT", "UPDATE", "DELETE"):
            connection.info["has_written"] = True

    def _commit(self, connection: Connection) -> None:
        self.count += connection.info.pop("has_written", False)

    def take(self) -> int:
        """Since the last time."""
        taken, self.count = self.count, 0
        return taken


@pytest.mark.parametrize("recovery", Recovery)
async def test_an_update_is_written_three_times(
    make_machine: MakeMachine, recovery: Recovery
) -> None:
    """Accepted, ended, published."""
    machine = await make_machine(recovery=recovery).start()
    writes = Writes(machine)
    for seq in (1, 2):
        ended = await machine.end(await machine.update(seq, seq))
        await machine.landed()
        assert writes.take() == 3
        record = machine.journal.store.find_operation(ended.operation_id)
        assert record is not None
        assert record.result == ended.result
    await machine.update(2, 2)
    await asyncio.sleep(0.01)
    assert writes.take() == 0


async def test_what_publishes_nothing_is_written_twice(make_machine: MakeMachine) -> None:
    machine = await make_machine(recovery=Recovery.REPLAY).start()
    writes = Writes(machine)
    await machine.end(await machine.forward_backward(1, 1))
    assert writes.take() == 2
    await machine.end(await machine.step(2))
    await machine.landed()
    assert writes.take() == 3
    await machine.end(await machine.submit(3, DISCARD, 0))
    assert writes.take() == 2


async def test_an_update_that_is_published_on_request_is_written_twice(
    make_machine: MakeMachine,
) -> None:
    publish = PublishConfig(kind=PublishKind.ON_REQUEST, every_n=1)
    machine = await make_machine(publish=publish).start()
    writes = Writes(machine)
    await machine.end(await machine.update(1, 1))
    assert writes.take() == 2
    await machine.controller.weight_manifest(None)
    assert writes.take() == 1


async def test_an_update_whose_weights_cannot_be_copied_says_so(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    await machine.landed()
    writes = Writes(machine)

    async def refuse(*_: object) -> None:
        raise RatoonError(ErrorCode.RESOURCE_EXHAUSTED, "disk full")

    monkeypatch.setattr(machine.worker, "hold", refuse)
    ended = await machine.end(await machine.update(1, 1))
    assert writes.take() == 2
    assert isinstance(ended.result, StepResult)
    (warning,) = ended.result.report.warnings
    assert (warning.kind, str(warning)) == (
        "not_published",
        "version 1 is not published: disk full",
    )
    record = machine.journal.store.find_operation(ended.operation_id)
    assert record is not None
    assert record.result == ended.result
    assert machine.journal.store.history("p").policy.published == (0,)
