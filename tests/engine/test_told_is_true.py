"""Something fails between an effect in the worker and its end in the journal: what is told is true.

Every kind of operation, every fault at that moment; afterwards the weights and gradients are those
of the operations that are told to be done, and of no other, also once they are run again.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path

import pytest
import structlog

from ratoon.engine.commands import (
    Command,
    ForwardBackwardCommand,
    ImportWeightsCommand,
    LoadCheckpointCommand,
    OptimStepCommand,
    SaveCheckpointCommand,
    UpdateCommand,
)
from ratoon.engine.crash_points import CrashPoint
from ratoon.engine.journal.records import JournalState
from ratoon.engine.policy import turns
from ratoon.errors import ErrorCode, RatoonError
from ratoon.log import configure_logging
from ratoon_proto.types import ImportMode, OperationState, Recovery
from tests.engine.archived_machine import ArchivedMachine, Store
from tests.engine.conftest import without_pauses
from tests.engine.crash_runs import BROKEN, SKIPPED, Survivor
from tests.engine.harness import (
    DISCARD,
    NO_CHECKPOINTS,
    RATE,
    forward,
    forward_backward,
    import_weights,
    load,
    optim_step,
    publish,
    save,
    started,
    update,
)
from tests.work_units import rows

Call = tuple[Command, float]
Weights = list[tuple[list[float], float]]
# A batch that is cancelled while it runs.
HELD = 35.0
# A step on the ForwardBackward just before it alone.
PART = optim_step(0)
BEFORE: tuple[Call, ...] = ((update(1), 1), (save("mine"), 0), (update(2), 2))
# The fault strikes the last of each.
STRUCK: dict[str, tuple[Call, ...]] = {
    "update": ((update(5), 5),),
    "skipped update": ((update(SKIPPED), SKIPPED),),
    "broken update": ((update(BROKEN), BROKEN),),
    "cancelled update": ((update(HELD), HELD),),
    "forward-backward": ((forward_backward(10), 10),),
    "broken forward-backward": ((forward_backward(BROKEN), BROKEN),),
    "cancelled forward-backward": ((forward_backward(HELD), HELD),),
    "second cancelled": ((forward_backward(10), 10), (forward_backward(HELD), HELD)),
    "step": ((forward_backward(10), 10), (optim_step(), 0)),
    "step on a part": ((forward_backward(10), 10), (forward_backward(20), 20), (PART, 0)),
    "discard": ((forward_backward(10), 10), (DISCARD, 0)),
    "save": ((forward_backward(10), 10), (save("other"), 0)),
    "publish": ((forward_backward(10), 10), (publish("v"), 0)),
    "load": ((load("mine"), 0),),
    "load into a window": ((forward_backward(10), 10), (load("mine"), 0)),
    "forward": ((forward(3), 3),),
    "import": ((import_weights(9), 9),),
    "full import": ((import_weights(9, mode=ImportMode.FULL), 9),),
    "broken import": ((import_weights(BROKEN), BROKEN),),
}
AFTER: tuple[Call, ...] = (
    (forward_backward(60), 60),
    (optim_step(), 0),
    (DISCARD, 0),
    (update(7), 7),
    (forward_backward(80), 80),
)


class Strike:
    """One fault, once the worker has come to the end of the operation under test."""

    def __init__(self, machine: ArchivedMachine, name: str) -> None:
        self._machine, self._name = machine, name
        self._loop = asyncio.get_running_loop()
        self.is_armed = self.has_struck = False
        self._tasks: list[asyncio.Task[object]] = []
        self._reach = machine.worker.reach
        machine.worker.reach = self.reach

    def reach(self, point: CrashPoint) -> None:
        """In the worker's thread."""
        if self.is_armed and point is CrashPoint.WORKER_AFTER_APPLY:
            self.is_armed, self.has_struck = False, True
            asyncio.run_coroutine_threadsafe(self._strike(), self._loop).result()
        self._reach(point)

    async def _strike(self) -> None:
        machine, faults = self._machine, self._machine.crashes.armed
        match self._name:
            case "archive away":
                machine.store.is_away = True
                self._loop.call_later(0.05, setattr, machine.store, "is_away", False)
            case "publish refused" | "publish broken":
                is_refused = self._name == "publish refused"
                error = RatoonError(ErrorCode.UNAVAILABLE, "disk") if is_refused else OSError(5)
                fail_once(machine.worker, "publish", error)
            case "bodies stuck":
                fail_once(machine.run.bodies, "release", OSError(5, "no such luck"))
            case "journal away":
                machine.journal.is_away = True
                self._loop.call_later(0.05, setattr, machine.journal, "is_away", False)
            case "restore lost":
                machine.worker.loses_restore = True
            case "cancel":
                live = next(iter(machine.run.ledger.open_operations()))
                cancel = machine.controller.cancel_operation(live.operation_id)
                self._tasks.append(self._loop.create_task(_ignoring(cancel)))
            case "before end" | "end" | "set_published":
                machine.journal.lost.add(self._name)
            case name:
                faults[CrashPoint(name)] = 1

    def over(self) -> None:
        self._machine.store.is_away = self._machine.worker.loses_restore = False
        self._machine.journal.lost.clear()
        self._machine.crashes.armed.clear()


STRIKES = ("cancel", "end", "engine-after-end")
MORE_STRIKES = (
    *("archive away", "worker-after-apply"),
    "publish refused",
    "publish broken",
    "bodies stuck",
    "journal away",
    "restore lost",
    "before end",
    "set_published",
    "engine-before-end",
    "engine-after-publish",
)


def fail_once(port: object, name: str, error: Exception) -> None:
    real: Callable[..., Coroutine[object, object, object]] = getattr(port, name)

    async def fail(*_args: object) -> object:
        setattr(port, name, real)
        raise error

    setattr(port, name, fail)


async def _ignoring(call: Coroutine[object, object, object]) -> None:
    with contextlib.suppress(RatoonError):
        await call


def state_told(calls: list[Call], states: list[JournalState]) -> tuple[Weights, list[float]]:
    """Weights and gradients after those of the calls that are told to be done."""
    weights: Weights = []
    saved: dict[str, Weights] = {}
    window: dict[int, float] = {}
    for seq, ((command, number), state) in enumerate(zip(calls, states, strict=True), 1):
        if state is not JournalState.APPLIED:
            continue
        match command:
            case UpdateCommand():
                weights += [] if number == SKIPPED else [([number], RATE)]
            case ForwardBackwardCommand():
                window[seq] = number
            case OptimStepCommand(include_seqs=seqs):
                weights.append(([window[seq] for seq in seqs or window], RATE))
                window = {}
            case SaveCheckpointCommand(checkpoint_id=name):
                saved[name] = list(weights)
            case LoadCheckpointCommand(checkpoint_id=name):
                weights, window = list(saved[name]), {}
            case ImportWeightsCommand(mode=mode):
                kept = weights if mode is ImportMode.DELTA else []
                weights = [*kept, ([number], 0.0)]
            case _ if command == DISCARD:
                window = {}
            case _:
                pass
    return weights, list(window.values())


class Caller:
    """Submits to a machine whose controller may be killed, and hears how each ended."""

    def __init__(self, machine: ArchivedMachine) -> None:
        self.machine, self.survivor = machine, Survivor(machine)
        self.calls: list[Call] = []
        self.told: list[OperationState] = []

    async def call(self, command: Command, number: float) -> None:
        """One operation, to its end; a held one is cancelled while it runs."""
        seq, machine = len(self.calls) + 1, self.machine
        if command == PART:
            command = optim_step(seq - 1)
        self.calls.append((command, number))
        hold = machine.faults.holds[HELD] = threading.Event()
        operation = await self.survivor.submit(seq, command, number)
        if number == HELD:
            await started(machine, operation)
            await machine.controller.cancel_operation(operation.operation_id)
        self.told.append((await self.survivor.end(seq, command, number)).state)
        hold.set()

    def check(self, what: str) -> None:
        """What is told by now is what the worker has."""
        records = self.machine.journal.store.records_from("p", 1)
        states = [record.state for record in records]
        if self.machine.run.replays:
            assert self.told == [state.public for state in states], what
        trainer = self.machine.worker.trainer
        assert (trainer.weights, trainer.gradients) == state_told(self.calls, states), what


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Failures by the hundred: without pauses, tracebacks and syncs."""
    monkeypatch.setattr(turns, "_AWAY_S", 0.01)
    configure_logging("CRITICAL")
    with without_pauses():
        yield
    structlog.reset_defaults()


@pytest.mark.parametrize(
    ("strike", "recovery"),
    [
        *rows(((strike, Recovery.REPLAY) for strike in STRIKES), [(STRIKES[-1], Recovery.REPLAY)]),
        ("end", Recovery.FAIL),
        *(
            pytest.param(strike, recovery, marks=pytest.mark.more)
            for strike, recovery in (
                *((strike, Recovery.REPLAY) for strike in MORE_STRIKES),
                *((strike, Recovery.FAIL) for strike in ("archive away", "worker-after-apply")),
            )
        ),
    ],
)
async def test_what_is_told_is_what_the_worker_has(
    tmp_path: Path, strike: str, recovery: Recovery
) -> None:
    """Red once: a LoadCheckpoint without an archive was told to have failed, and had loaded; the
    part of a cancelled ForwardBackward stayed in an empty window where the controller began anew.
    """
    store = Store(tmp_path / "store")
    machine = ArchivedMachine(
        tmp_path / "disk", store, "sqlite://", NO_CHECKPOINTS, recovery=recovery
    )
    caller, fault = Caller(machine), Strike(machine, strike)
    await caller.survivor.revive(is_first=True)
    for call in BEFORE:
        await caller.call(*call)
    for name, (*prefix, struck) in STRUCK.items():
        for call in prefix:
            await caller.call(*call)
        fault.is_armed, fault.has_struck = True, False
        await caller.call(*struck)
        assert fault.has_struck, name
        fault.over()
        for call in AFTER:
            await caller.call(*call)
        caller.check(name)
        await caller.call(DISCARD, 0)
    await machine.restart_controller()
    caller.check("a new controller")
    if recovery is Recovery.REPLAY:
        machine.worker.is_dead = True
        await machine.restart_controller()
        caller.check("a new worker")
    await machine.controller.close(1.0)
