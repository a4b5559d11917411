"""Versions are published beside what runs next, each of them, whole or not at all."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ratoon.engine.crash_points import CrashPoint
from ratoon.engine.journal.records import JournalAwayError
from ratoon.engine.policy import publisher, turns
from ratoon.engine.worker.tasks import WorkerLostError
from ratoon.errors import ErrorCode, RatoonError
from ratoon.metrics import PUBLISH_FAILURES, PUBLISH_SECONDS, Sample
from ratoon.stream.manifest import WeightManifest
from ratoon_proto.types import OperationState, PublishConfig, PublishKind, Recovery
from tests.engine.conftest import MakeMachine
from tests.engine.fake_trainer import FakeCopy
from tests.engine.harness import Machine, started
from tests.engine.local_ports import POLICY
from tests.engine.refusals import raises
from tests.until import until


class Gate:
    """Holds what writes a version until it is opened; `begun` once one has come to it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.opened = threading.Event(), threading.Event()
        write: Callable[[FakeCopy, Path], dict[str, str]] = FakeCopy.write

        def wait(copy: FakeCopy, folder: Path) -> dict[str, str]:
            self.begun.set()
            assert self.opened.wait(60.0)
            return write(copy, folder)

        monkeypatch.setattr(FakeCopy, "write", wait)


async def test_the_next_operation_runs_while_a_version_is_written(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    await machine.landed()
    gate = Gate(monkeypatch)
    first = await machine.end(await machine.update(1, 1))
    await asyncio.to_thread(gate.begun.wait, 60.0)
    second = await machine.end(await machine.forward_backward(2, 2))
    assert (first.state, second.state) == (OperationState.DONE, OperationState.DONE)
    assert machine.run.published == (0,)
    asked = [asyncio.create_task(machine.controller.weight_manifest(v)) for v in (None, 1)]
    step = await machine.step(3)
    await asyncio.sleep(0.01)
    # A step whose version would take the copy's place waits.
    assert not any(task.done() for task in asked)
    assert not (await machine.controller.get_operation(step.operation_id, 0.0)).state.is_final
    gate.opened.set()
    assert [(await task).version for task in asked] == [1, 1]
    assert (await machine.end(step)).state is OperationState.DONE
    assert (await machine.controller.weight_manifest(None)).version == 2
    assert machine.run.published == (1, 2)
    names = [change.metric for change in machine.metrics.changes if isinstance(change, Sample)]
    assert names.count(PUBLISH_SECONDS.name) == 3


@pytest.mark.parametrize("device", ["cpu", "cuda"])
async def test_on_a_cpu_the_next_operation_gives_way_to_it(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    await machine.landed()
    monkeypatch.setattr(publisher, "_HEAD_START", 1e9)
    machine.run.trainer = replace(machine.run.trainer, device=device)
    gate = Gate(monkeypatch)
    await machine.end(await machine.update(1, 1))
    await asyncio.to_thread(gate.begun.wait, 60.0)
    second = await machine.forward_backward(2, 2)
    if device == "cpu":
        await asyncio.sleep(0.05)
        now = await machine.controller.get_operation(second.operation_id, 0.0)
        assert not now.state.is_final
        gate.opened.set()
    assert (await machine.end(second)).state is OperationState.DONE
    gate.opened.set()


async def test_what_is_written_is_the_version_not_what_came_after(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    await machine.landed()
    gate = Gate(monkeypatch)
    await machine.end(await machine.update(1, 10))
    late = await machine.update(2, 20)
    await asyncio.to_thread(gate.begun.wait, 60.0)
    gate.opened.set()
    await machine.end(late)
    await machine.landed()
    texts = [
        (machine.paths.weights / f"{version:08d}" / "model.json").read_text() for version in (1, 2)
    ]
    assert ["20.0" in text for text in texts] == [False, True]
    assert all("10.0" in text for text in texts)


@pytest.mark.parametrize("kills_worker", [False, True])
async def test_a_crash_leaves_no_version_out(
    make_machine: MakeMachine, monkeypatch: pytest.MonkeyPatch, *, kills_worker: bool
) -> None:
    """The worker is a step ahead of the journal when the engine ends: it has both versions."""
    machine = await make_machine(recovery=Recovery.REPLAY).start()
    gate = Gate(monkeypatch)
    await machine.end(await machine.update(1, 1))
    await asyncio.to_thread(gate.begun.wait, 60.0)
    second = await machine.update(2, 2)
    await until(lambda: len(machine.worker.trainer.weights) == 2)
    machine.controller.abandon()
    if kills_worker:
        gate.opened.set()
        await machine.worker.kill()
    restarted = asyncio.create_task(machine.restart_controller())
    gate.opened.set()
    await restarted
    assert (await machine.end(second)).state is OperationState.DONE
    await machine.landed()
    assert machine.run.published == (1, 2)


@pytest.mark.parametrize("name", ["hold", "publish"])
async def test_a_version_that_is_refused_can_be_asked_for_again(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    await machine.landed()
    real, is_full = getattr(machine.worker, name), True

    async def full(*args: object) -> object:
        if is_full:
            raise RatoonError(ErrorCode.RESOURCE_EXHAUSTED, "disk full")
        return await real(*args)

    monkeypatch.setattr(machine.worker, name, full)
    ended = await machine.end(await machine.update(1, 1))
    await machine.landed()
    assert ended.state is OperationState.DONE
    assert (await machine.controller.weight_manifest(None)).version == 0
    with raises(ErrorCode.RESOURCE_EXHAUSTED):
        await machine.controller.weight_manifest(1)
    assert machine.metrics.changes.count(PUBLISH_FAILURES.sample(1, POLICY)) == 2
    is_full = False
    assert (await machine.controller.weight_manifest(1)).version == 1
    assert machine.run.published == (0, 1)


@pytest.mark.parametrize(
    "point", [CrashPoint.WORKER_BEFORE_PUBLISH, CrashPoint.WORKER_AFTER_PUBLISH]
)
async def test_a_version_whose_worker_dies_is_made_again(
    make_machine: MakeMachine, point: CrashPoint
) -> None:
    """Without another call: the controller starts anew by itself. Who reads gets no older one."""
    machine = await make_machine(recovery=Recovery.REPLAY).start()
    machine.crashes.armed[point] = 1
    ended = await machine.update(1, 1)
    assert (await machine.end(ended)).state is OperationState.DONE
    assert (await machine.controller.weight_manifest(None)).version == 1
    await until(lambda: machine.run.published == (0, 1))
    assert len(machine.worker.trainers) == 2


async def test_a_version_whose_rank_dies_is_made_again(
    make_machine: MakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its worker is alive, but takes no step any more."""
    machine = await make_machine(recovery=Recovery.REPLAY).start()
    await machine.landed()
    real, lost = FakeCopy.write, list[str]()

    def write(copy: FakeCopy, folder: Path) -> dict[str, str]:
        if not lost:
            lost.append(copy.text)
            raise WorkerLostError("a rank is lost")
        return real(copy, folder)

    monkeypatch.setattr(FakeCopy, "write", write)
    assert (await machine.end(await machine.update(1, 1))).state is OperationState.DONE
    assert (await machine.controller.weight_manifest(1)).version == 1
    assert len(machine.worker.trainers) == 2
    assert (await machine.end(await machine.update(2, 2))).state is OperationState.DONE
    assert machine.metrics.changes.count(PUBLISH_FAILURES.sample(1, POLICY)) == 0


async def test_a_read_sleeps_while_a_stopped_publication_waits_for_the_running_turn(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "_AWAY_S", 0.0)
    ask, publisher = machine.journal.ask, machine.controller._turns._publisher
    landed, refused, looks = publisher.landed, list[str](), list[None]()

    async def away(name: str, call: Callable[[], Any]) -> Any:
        if name == "set_published" and not refused:
            refused.append(name)
            raise JournalAwayError("away")
        return await ask(name, call)

    async def counted(timeout_s: float | None = None) -> None:
        looks.append(None)
        await landed(timeout_s)

    gate, hold = Gate(monkeypatch), machine.faults.holds.setdefault(2.0, threading.Event())
    monkeypatch.setattr(machine.journal, "ask", away)
    await machine.end(await machine.update(1, 1))
    running = await machine.update(2, 2)
    await started(machine, running)
    gate.opened.set()
    await until(lambda: refused)
    monkeypatch.setattr(publisher, "landed", counted)
    read = asyncio.create_task(machine.controller.weight_manifest(1))
    await asyncio.sleep(0.05)
    assert not read.done()
    assert len(looks) < 5
    hold.set()
    assert (await read).version == 1
    assert (await machine.end(running)).state is OperationState.DONE
    assert (await machine.controller.weight_manifest(None)).version == 2


async def test_a_read_does_not_wait_for_a_version_whose_step_has_not_ended(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    await machine.landed()
    hold, read = machine.worker.hold, list[int]()

    async def held(*args: Any) -> None:
        await hold(*args)
        read.append((await machine.controller.weight_manifest(None)).version)

    monkeypatch.setattr(machine.worker, "hold", held)
    await machine.end(await machine.update(1, 1))
    assert read == [0]
    assert (await machine.controller.weight_manifest(None)).version == 1


async def test_a_step_that_publishes_nothing_leaves_the_publication_before_it_alone(
    make_machine: MakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish = PublishConfig(kind=PublishKind.EVERY_N, every_n=2)
    machine = await make_machine(publish=publish).start()
    real, asked = machine.worker.publish, list[int]()

    async def counted(*args: Any) -> WeightManifest:
        asked.append(args[1])
        return await real(*args)

    monkeypatch.setattr(machine.worker, "publish", counted)
    gate = Gate(monkeypatch)
    await machine.updates(1, 2, 3)
    gate.opened.set()
    assert (await machine.controller.weight_manifest(None)).version == 2
    await machine.landed()
    assert asked == [2]
