"""Any arrival, retry, cancel and crash against a sequential oracle, compared after every event.

A held call stays at the worker until it is let go, so that everything can happen while one runs.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest
import structlog
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.errors import Flaky
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from ratoon.config import CheckpointConfig, LimitsConfig
from ratoon.engine.journal.records import OperationRecord
from ratoon.engine.policy.callers import Admission
from ratoon.engine.policy.queue import Sequencer, Turn
from ratoon.engine.types import FailedResult, Operation
from ratoon.engine.worker.runner import TaskRunner
from ratoon.engine.worker.tasks import WorkerStatus
from ratoon.engine.worker.worker import WorkerCore
from ratoon.errors import ErrorCode, RatoonError
from ratoon.log import configure_logging
from ratoon_proto.types import OperationState, Recovery
from tests.engine.conftest import without_pauses
from tests.engine.harness import Machine, policy_spec
from tests.engine.order_model import KINDS, Call, OrderModel
from tests.engine.refusals import raises
from tests.work_units import rows

T = TypeVar("T")
WRITES = ("accept", "before end", "end", "set_published")
GAP_WAIT_S = 0.01
# Only what hangs takes that long; a build that is broken on purpose is given less.
END_S = 120.0


class OrderMachine(RuleBasedStateMachine):
    """Events of callers, and crashes; between two of them the machine runs as far as it can."""

    @initialize(every_operations=st.sampled_from((0, 3)))
    def start(self, every_operations: int) -> None:
        self.folder = tempfile.TemporaryDirectory(dir=os.environ.get("PYTEST_DEBUG_TEMPROOT"))
        self.loop = asyncio.new_event_loop()
        self.model = OrderModel()
        self.machine = Machine(
            Path(self.folder.name),
            policy_spec(recovery=Recovery.REPLAY),
            LimitsConfig(gap_wait_s=GAP_WAIT_S),
            checkpoints=CheckpointConfig(
                every_operations=every_operations, every_s=0, every_bytes=0, keep=1
            ),
        )
        self.wait(self.machine.start())

    def teardown(self) -> None:
        for hold in self.machine.faults.holds.values():
            hold.set()
        self.loop.run_until_complete(self.machine.controller.close(1.0))
        self.loop.close()
        self.folder.cleanup()

    @rule(
        ahead=st.sampled_from((0, 0, 0, 1, 2, 3)),
        kind=st.sampled_from(KINDS),
        breaks=st.sampled_from((False, False, False, True)),
        is_held=st.sampled_from((False, False, False, True)),
    )
    def arrive(self, ahead: int, kind: str, breaks: bool, is_held: bool) -> None:
        seq = self.model.free_seq(ahead)
        call, faults = Call(seq, kind, float(seq), breaks, is_held), self.machine.faults
        if breaks:
            faults.breaks.add(call.number)
        if is_held:
            faults.holds[call.number] = threading.Event()
        operation = self.submit(call)
        if operation is None:
            faults.breaks.discard(call.number)
            faults.holds.pop(call.number, None)
            return
        call.operation_id = operation.operation_id
        self.model.calls[seq] = call
        self.model.advance()

    @precondition(lambda self: self.model.calls)
    @rule(data=st.data())
    def retry(self, data: st.DataObject) -> None:
        """Queued, running or done: the first one's handle."""
        call = self.any_call(data)
        again = self.submit(call)
        assert again is not None
        assert again.operation_id == call.operation_id

    @precondition(lambda self: self.model.calls)
    @rule(data=st.data())
    def reuse_a_seq(self, data: st.DataObject) -> None:
        call = self.any_call(data)
        other = {"discard": "optim_step", "optim_step": "loose_step", "loose_step": "discard"}
        kind = other.get(call.kind, call.kind)
        with raises(ErrorCode.KEY_REUSED) as caught:
            self.submit(Call(call.seq, kind, 0.5, False, False))
        assert caught.value.details == {"operation_id": call.operation_id}

    @precondition(lambda self: self.model.calls)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        call, controller = self.any_call(data), self.machine.controller
        asked = self.wait(self.insist(lambda: controller.cancel_operation(call.operation_id)))
        if asked is not None and not call.end:
            call.end = "cancelled"
        self.model.advance()

    @precondition(lambda self: self.model.running)
    @rule()
    def let_go(self) -> None:
        self.release(self.model.running)
        self.model.advance()

    @precondition(lambda self: self.is_known and self.model.behind_a_gap)
    @rule(data=st.data())
    def wait_behind_a_gap(self, data: st.DataObject) -> None:
        call, missing = data.draw(st.sampled_from(self.model.behind_a_gap)), self.model.missing_seq
        with pytest.raises(RatoonError) as caught:
            self.wait(self.machine.controller.get_operation(call.operation_id, END_S / 2))
        assert (caught.value.code, caught.value.retryable) == (ErrorCode.SEQ_GAP, True)
        assert caught.value.details["missing_seq"] == str(missing)

    @rule(name=st.sampled_from(WRITES))
    def lose_an_answer(self, name: str) -> None:
        """The next such write happens, or does not ("before end"), and is not answered."""
        self.machine.journal.lost.add(name)

    @rule()
    def crash_the_controller(self) -> None:
        """What runs at the worker ends there; the new controller hears of it."""
        self.wait(self.restart())
        self.model.advance()

    @rule()
    def crash_the_worker(self) -> None:
        """With everything on it; what was applied is run again, and nobody hears of it."""
        self.machine.worker.is_dead = True
        self.wait(self.restart())
        self.model.advance()

    @precondition(lambda self: self.model.running)
    @rule()
    def cancel_what_runs_while_the_controller_crashes(self) -> None:
        """It comes too late, or not: the worker has what the caller is told."""
        call, machine = self.model.running, self.machine
        assert call is not None
        cancel = self.insist(lambda: machine.controller.cancel_operation(call.operation_id))
        self.wait(_both(self.restart(), cancel))
        view = self.wait(machine.controller.get_operation(call.operation_id, END_S / 2))
        if _end_of(view) == "cancelled":
            call.end = "cancelled"
        self.model.advance()

    @rule()
    def come_to_an_end(self) -> None:
        """The gaps are filled and nothing is held: all ends, and the window was what it should."""
        while self.model.running is not None or self.model.behind_a_gap:
            if self.model.running is not None:
                self.let_go()
            else:
                self.arrive(0, "forward_backward", False, False)
        self.arrive(0, "optim_step", False, False)
        assert all(call.end for call in self.model.calls.values())

    @invariant()
    def every_call_stands_where_the_oracle_has_it(self) -> None:
        for call in self.model.calls.values():
            self.check(call)
        assert self.machine.weights == self.model.weights
        row = self.machine.journal.store.history("p").policy
        assert (row.version, row.next_seq) == (len(self.model.weights), self.model.missing_seq)

    @property
    def is_known(self) -> bool:
        """Whether the controller knows what the journal has; else it reads it once nothing runs."""
        return self.machine.controller._turns.is_known

    def wait(self, work: Coroutine[object, object, T]) -> T:
        return self.loop.run_until_complete(asyncio.wait_for(work, END_S))

    def any_call(self, data: st.DataObject) -> Call:
        return self.model.calls[data.draw(st.sampled_from(sorted(self.model.calls)))]

    def submit(self, call: Call) -> Operation | None:
        machine = self.machine
        return self.wait(self.insist(lambda: machine.submit(call.seq, call.command, call.number)))

    async def insist(self, ask: Callable[[], Awaitable[Operation]]) -> Operation | None:
        """What a client does with an answer that says to ask again.

        None: it was refused twice, as all new is while the journal must be read and a call is held.
        """
        num_refused = 0
        while num_refused < 2:
            try:
                return await ask()
            except RatoonError as error:
                if error.code not in (ErrorCode.UNAVAILABLE, ErrorCode.POLICY_NOT_READY):
                    raise
            num_refused += self.model.running is not None and not self.is_known
            await asyncio.sleep(0.001)
        return None

    async def restart(self) -> None:
        task = self.machine.controller._turns._task
        assert task is not None
        task.cancel()
        restarting = asyncio.create_task(self.machine.restart_controller())
        await asyncio.sleep(0.002)
        if self.model.running is not None:
            self.release(self.model.running)
        await restarting

    def release(self, call: Call | None) -> None:
        assert call is not None
        call.is_held = False
        self.machine.faults.holds[call.number].set()

    def check(self, call: Call) -> None:
        controller = self.machine.controller
        if call.end:
            ended = self.wait(controller.get_operation(call.operation_id, END_S / 2))
            assert (call.seq, _end_of(ended)) == (call.seq, call.end)
        elif call is self.model.running:
            self.wait(self.until_running(call))
        else:
            view = self.wait(controller.get_operation(call.operation_id, 0.0))
            assert view.state is OperationState.QUEUED
            if self.is_known:
                missing = self.model.missing_seq
                assert view.blocked_by_seq == (missing if call.seq > missing else 0)

    async def until_running(self, call: Call) -> None:
        while True:
            view = await self.machine.controller.get_operation(call.operation_id, 0.0)
            if view.state is OperationState.RUNNING:
                return
            await asyncio.sleep(0.001)


def _end_of(operation: Operation) -> str:
    assert operation.state.is_final, operation
    if operation.state is OperationState.FAILED:
        assert isinstance(operation.result, FailedResult)
        return str(operation.result.error["code"])
    return str(operation.state)


async def _both(*work: Coroutine[object, object, object]) -> None:
    await asyncio.gather(*work)


def no_dedupe(monkeypatch: pytest.MonkeyPatch) -> None:
    async def find(_self: Admission, _key: object, _payload: str) -> OperationRecord | None:
        return None

    monkeypatch.setattr(Admission, "find", find)


def order_of_arrival(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gap does not keep the next seq from its turn."""

    def peek(self: Sequencer) -> Turn | None:
        self._turn = min(self._waiting, default=self._turn)
        return real_peek(self)

    real_peek = Sequencer.peek
    monkeypatch.setattr(Sequencer, "peek", peek)


def window_not_rerun(monkeypatch: pytest.MonkeyPatch) -> None:
    def restore(self: TaskRunner, _tasks: object) -> None:
        self.trainer.discard_gradients()

    monkeypatch.setattr(TaskRunner, "restore", restore)


def stored_outcome_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the worker ran for a controller that was killed is run again."""

    def status(self: WorkerCore) -> WorkerStatus:
        return replace(real_status(self), last_outcome=None, last_seq=self._last_seq - 1)

    real_status = WorkerCore.status
    monkeypatch.setattr(WorkerCore, "status", status)


BROKEN = (no_dedupe, order_of_arrival, window_not_rerun, stored_outcome_forgotten)


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    """Lost answers make restarts by the hundred: without pauses, tracebacks and syncs."""
    configure_logging("CRITICAL")
    with without_pauses():
        yield
    structlog.reset_defaults()


SETTINGS = settings(
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


@pytest.mark.parametrize("num_examples", rows((3, 24), now=(3,)))
def test_any_events_come_to_what_the_calls_in_a_row_do(num_examples: int) -> None:
    run_state_machine_as_test(OrderMachine, settings=settings(SETTINGS, max_examples=num_examples))


@pytest.mark.more
@pytest.mark.parametrize("break_engine", BROKEN)
def test_an_engine_that_is_broken_on_purpose_is_seen(
    monkeypatch: pytest.MonkeyPatch, break_engine: Callable[[pytest.MonkeyPatch], None]
) -> None:
    break_engine(monkeypatch)
    monkeypatch.setattr(sys.modules[__name__], "END_S", 0.5)
    quick_look = settings(
        SETTINGS, max_examples=200, phases=[Phase.generate], derandomize=True, database=None
    )
    with pytest.raises((AssertionError, TimeoutError, pytest.fail.Exception, Flaky)):
        run_state_machine_as_test(OrderMachine, settings=quick_look)
