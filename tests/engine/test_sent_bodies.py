"""Bodies that go ahead of their call as files: they become the operation's, or nothing is left."""

from __future__ import annotations

import errno
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ratoon.config import load_config
from ratoon.engine import client as module
from ratoon.engine.client import EngineClient
from ratoon.engine.commands import SeqKey, Submission
from ratoon.engine.settings import EngineSettings
from ratoon.engine.types import Operation
from ratoon.errors import ErrorCode
from ratoon.method_call import MethodCall
from ratoon_proto.types import OperationState
from tests.engine.fake_trainer import number_body
from tests.engine.harness import Machine, digest_of, update
from tests.engine.refusals import raises


class Edge:
    """Another process's client of the machine's engine. `lose`: files are gone before the call."""

    def __init__(self, machine: Machine) -> None:
        settings = EngineSettings.from_config(load_config(None))
        self.machine, self.lose = machine, False
        self.received: list[Submission] = []
        self.client = EngineClient(self._send, replace(settings, data_root=machine.root))

    async def _send(self, call: MethodCall[Any]) -> Any:
        return await call.on(self)

    async def submit(self, submission: Submission) -> Operation:
        """Stands for `Engine.submit`."""
        self.received.append(submission)
        if self.lose:
            for path in self.machine.paths.bodies.glob(".tmp-*"):
                path.unlink()
        return await self.machine.controller.submit(submission)

    async def update(self, seq: int, number: float) -> Operation:
        return await self.client.submit(
            Submission(
                policy_id="p",
                key=SeqKey(seq=seq),
                # The client names the body.
                command=replace(update(number), body_digest=""),
                body=number_body(number),
            )
        )


@pytest.fixture
def edge(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Edge:
    monkeypatch.setattr(module, "_SMALL_BYTES", 0)
    # The update of this number runs until `end`: its body is held.
    machine.faults.holds[3.0] = threading.Event()
    return Edge(machine)


async def _end(edge: Edge, operation: Operation) -> OperationState:
    edge.machine.faults.holds[3.0].set()
    return (await edge.machine.end(operation)).state


async def test_a_body_that_went_ahead_is_what_is_run(edge: Edge) -> None:
    operation = await edge.update(1, 3.0)
    assert edge.received[0].body == b""
    assert edge.received[0].body_bytes == len(number_body(3.0))
    assert edge.machine.bodies == {digest_of(3.0)}
    assert edge.machine.paths.body(digest_of(3.0)).read_bytes() == number_body(3.0)
    record = edge.machine.journal.store.find_operation(operation.operation_id)
    assert record is not None
    assert record.body_bytes == len(number_body(3.0))
    assert await _end(edge, operation) is OperationState.DONE


async def test_a_small_body_goes_with_its_call(edge: Edge, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SMALL_BYTES", len(number_body(3.0)))
    operation = await edge.update(1, 3.0)
    await _end(edge, operation)
    assert (edge.received[0].body, edge.received[0].sent) == (number_body(3.0), None)


async def test_a_retry_and_a_refused_call_leave_no_file(edge: Edge) -> None:
    first = await edge.update(1, 3.0)
    assert (await edge.update(1, 3.0)).operation_id == first.operation_id
    with raises(ErrorCode.KEY_REUSED):
        await edge.update(1, 4.0)
    with raises(ErrorCode.INVALID_ARGUMENT):
        await edge.update(10**6, 5.0)
    assert edge.machine.bodies == {digest_of(3.0)}
    await _end(edge, first)


async def test_a_body_that_cannot_be_written_goes_with_its_call(
    edge: Edge, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine says why, and a retry of what it has already needs no room."""

    def full(path: Path, *_buffers: bytes | memoryview) -> None:
        path.touch()
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(module, "write_synced", full)
    operation = await edge.update(1, 3.0)
    assert edge.received[0].body == number_body(3.0)
    assert edge.machine.bodies == {digest_of(3.0)}
    assert await _end(edge, operation) is OperationState.DONE


async def test_a_file_that_a_start_has_removed_takes_no_seq(edge: Edge) -> None:
    edge.lose = True
    with raises(ErrorCode.UNAVAILABLE):
        await edge.update(1, 3.0)
    assert edge.machine.bodies == set()
    edge.lose = False
    operation = await edge.update(1, 3.0)
    assert operation.seq == 1
    await _end(edge, operation)
