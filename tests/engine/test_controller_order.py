"""Any schedule of arrivals, retries and cancels against a sequential oracle."""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import dataclass
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ratoon.config import LimitsConfig
from ratoon.engine.types import Command, FailedResult, OperationState
from ratoon.errors import ErrorCode
from tests.engine.harness import (
    DISCARD,
    RATE,
    Machine,
    forward_backward,
    optim_step,
    policy_spec,
    update,
)


@dataclass(frozen=True)
class Step:
    """One operation of a schedule; `number` names its batch."""

    kind: str
    number: float
    breaks: bool
    is_cancelled: bool

    @property
    def command(self) -> Command:
        match self.kind:
            case "update":
                return update(self.number)
            case "forward_backward":
                return forward_backward(self.number)
            case "optim_step":
                return optim_step()
            case _:
                return DISCARD


kinds = st.sampled_from(["update", "forward_backward", "forward_backward", "optim_step", "discard"])
steps = st.lists(
    st.tuples(kinds, st.booleans(), st.integers(0, 4).map(lambda n: n == 0)), min_size=1, max_size=7
).map(
    lambda drawn: [
        Step(kind, float(index), breaks, cancelled)
        for index, (kind, breaks, cancelled) in enumerate(drawn, start=1)
    ]
)


def oracle(schedule: list[Step]) -> tuple[list[tuple[list[float], float]], list[str]]:
    """Weights and ends ("done", "cancelled" or an error code) of running the steps in a row."""
    weights: list[tuple[list[float], float]] = []
    window: list[float] = []
    poisoned = False
    ends: list[str] = []
    for step in schedule:
        end = "done"
        if step.is_cancelled:
            end = "cancelled"
        elif step.kind == "update":
            if window or poisoned:
                end = str(ErrorCode.WINDOW_OPEN)
            elif step.breaks:
                end = str(ErrorCode.INTERNAL)
            else:
                weights.append(([step.number], RATE))
        elif step.kind == "forward_backward":
            if step.breaks:
                poisoned, end = True, str(ErrorCode.INTERNAL)
            else:
                window.append(step.number)
        elif step.kind == "optim_step":
            if poisoned:
                end = str(ErrorCode.WINDOW_POISONED)
            elif not window:
                end = str(ErrorCode.WINDOW_EMPTY)
            else:
                weights.append((window, RATE))
                window = []
        else:
            window, poisoned = [], False
        ends.append(end)
    return weights, ends


async def play(folder: Path, schedule: list[Step], order: list[int], retries: list[int]) -> None:
    """Submit in `order` with seq 1 last, cancel what is queued, then retry and compare."""
    machine = Machine(folder, policy_spec(), LimitsConfig())
    machine.faults.breaks |= {step.number for step in schedule if step.breaks}
    await machine.start()
    ids: dict[int, str] = {}
    try:
        for index in order:
            step = schedule[index]
            operation = await machine.submit(index + 2, step.command, step.number)
            ids[index] = operation.operation_id
            if step.is_cancelled:
                cancelled = await machine.controller.cancel_operation(operation.operation_id)
                assert cancelled.state is OperationState.CANCELLED
        for index in retries:
            step = schedule[index]
            again = await machine.submit(index + 2, step.command, step.number)
            assert again.operation_id == ids[index]
        first = await machine.submit(1, DISCARD, 0)
        await machine.end(first)
        weights, ends = oracle(schedule)
        for index, expected in enumerate(ends):
            ended = await machine.controller.get_operation(ids[index], 20.0)
            assert ended.state.is_final
            got = str(ended.state)
            if ended.state is OperationState.FAILED:
                assert isinstance(ended.result, FailedResult)
                got = str(ended.result.error["code"])
            assert (index, got) == (index, expected)
        assert machine.weights == weights
        assert machine.journal.store.history("p").policy.version == len(weights)
    finally:
        await machine.controller.close(1.0)


@settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(schedule=steps, data=st.data())
def test_any_arrival_with_retries_and_cancels_equals_the_sequential_run(
    schedule: list[Step], data: st.DataObject
) -> None:
    """Trap 9, a retried POST is a second step; trap 12, chunks that arrive out of order."""
    order = data.draw(st.permutations(range(len(schedule))))
    retries = data.draw(st.lists(st.sampled_from(range(len(schedule))), max_size=3))
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(play(Path(folder), schedule, list(order), retries))
