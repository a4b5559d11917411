"""Two controllers on one journal and one worker: whatever they do, one of them applies.

The older one is refused at the worker, before anything is touched, and at the journal, so that what
it had the worker do is completed by the newer one.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from ratoon.config import CheckpointConfig
from ratoon.engine.commands import SeqKey, Submission
from ratoon.engine.files.paths import PolicyPaths, policy_leftovers
from ratoon.engine.journal.records import Checkpoint, OperationEnd
from ratoon.engine.policy import startup
from ratoon.engine.policy.controller import Controller
from ratoon.engine.policy.run import PolicyRun
from ratoon.engine.types import Operation
from ratoon.engine.worker.tasks import FencedError, Outcome, Task
from ratoon.errors import ErrorCode, RatoonError
from ratoon.stream.files import TEMPORARY_PREFIX
from ratoon_proto.types import OperationState, PolicyState, Recovery
from tests.engine.conftest import MakeMachine
from tests.engine.fake_trainer import number_body
from tests.engine.harness import DISCARD, PATIENCE_S, RATE, Machine, started, update
from tests.engine.test_recovery import settled
from tests.until import until

Apply = Callable[[int, Task], Awaitable[Outcome]]
REFUSED = (ErrorCode.UNAVAILABLE, ErrorCode.POLICY_NOT_READY)


def an_update(seq: int) -> Submission:
    return Submission(
        policy_id="p", key=SeqKey(seq=seq), command=update(seq), body=number_body(seq)
    )


async def second_controller(machine: Machine) -> tuple[Controller, PolicyRun]:
    """The first one, left running; the machine's is now a second, not started."""
    first = machine.controller, machine.run
    machine.controller = machine._controller()
    return first


async def fenced(run: PolicyRun) -> None:
    """Until the controller of `run` has heard that it is replaced."""
    await until(lambda: run.state is PolicyState.FAILED)


async def at_any(controllers: tuple[Controller, ...], seq: int) -> Operation:
    """A caller that asks one controller after the other until the update has ended."""
    submission, clock = an_update(seq), asyncio.get_running_loop().time
    deadline, turn = clock() + PATIENCE_S, seq
    while clock() < deadline:
        controller, turn = controllers[turn % len(controllers)], turn + 1
        try:
            operation = await controller.submit(submission)
            ended = await controller.get_operation(operation.operation_id, 0.2)
        except RatoonError as error:
            assert error.code in (*REFUSED, ErrorCode.SEQ_GAP), error
        else:
            if ended.state.is_final:
                return ended
        await asyncio.sleep(0.002)
    raise AssertionError(f"update {seq} has no end")


@pytest.mark.parametrize("pause_s", [0.0, 0.002, 0.01, 0.05])
async def test_two_that_are_started_at_once_apply_each_update_once(
    make_machine: MakeMachine, pause_s: float
) -> None:
    machine = make_machine()
    first, _ = await second_controller(machine)
    controllers = (first, machine.controller)
    callers = [asyncio.create_task(at_any(controllers, seq)) for seq in (3, 1, 2, 4, 6, 5)]

    async def start(controller: Controller, after_s: float) -> None:
        await asyncio.sleep(after_s)
        await controller.start()

    starts = await asyncio.gather(
        start(first, 0.0), start(machine.controller, pause_s), return_exceptions=True
    )
    assert None in starts, starts
    assert {type(start) for start in starts} <= {type(None), FencedError}, starts
    ended = await asyncio.gather(*callers)
    assert {operation.state for operation in ended} == {OperationState.DONE}
    assert machine.weights == [([float(seq)], RATE) for seq in range(1, 7)]
    row = machine.journal.store.history("p").policy
    assert (row.version, row.max_version, row.next_seq) == (6, 6, 7)
    await first._turns.stop(0.0)


async def test_what_the_older_one_had_applied_is_refused_at_its_commit(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    fenced_end, committed = machine.journal.fenced.end, list[int]()

    def end(token: int, policy_id: str, end: OperationEnd) -> int:
        position = fenced_end(token, policy_id, end)
        committed.append(token)
        return position

    monkeypatch.setattr(machine.journal.fenced, "end", end)
    running = await machine.running(1)
    older, older_run = await second_controller(machine)
    starting = asyncio.create_task(machine.controller.start())
    await asyncio.sleep(0.02)
    machine.faults.holds[1.0].set()
    await starting
    await fenced(older_run)
    ended = await machine.end(running)
    assert ended.state is OperationState.DONE
    assert machine.weights == [([1.0], RATE)]
    assert machine.journal.store.history("p").policy.version == 1
    assert older_run.token < machine.run.token
    assert committed == [machine.run.token]
    await older._turns.stop(0.0)
    assert not machine.worker.is_released, "it is the newer one's"


async def test_the_older_one_is_refused_at_the_worker(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is about to ask the worker when the newer one takes over."""
    apply, refused = machine.worker.apply, asyncio.Event()

    async def late_apply(token: int, task: Task) -> Outcome:
        if token != older_run.token:
            return await apply(token, task)
        await machine.controller.start()
        ended = await machine.controller.get_operation(task.operation_id, 10.0)
        assert ended.state is OperationState.DONE
        with pytest.raises(FencedError):
            await apply(token, task)
        refused.set()
        raise FencedError("as the worker said")

    monkeypatch.setattr(machine.worker, "apply", late_apply)
    older, older_run = await second_controller(machine)
    operation = await older.submit(an_update(1))
    await asyncio.wait_for(refused.wait(), 10)
    assert (await machine.end(operation)).state is OperationState.DONE
    await machine.end(await machine.update(2, 2))
    assert machine.weights == [([1.0], RATE), ([2.0], RATE)]
    await fenced(older_run)
    await older._turns.stop(0.0)


async def test_a_retry_at_the_older_one_leaves_the_body_that_the_newer_one_accepted(
    machine: Machine,
) -> None:
    older, _ = await second_controller(machine)
    await machine.controller.start()
    await machine.running(1)
    second = await machine.update(2, 2)
    assert (await older.submit(an_update(2))).operation_id == second.operation_id
    machine.faults.holds[1.0].set()
    assert (await machine.end(second)).state is OperationState.DONE


async def test_a_refusal_of_the_older_one_leaves_the_body_that_the_newer_one_accepted(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its caller was away before it was refused, and has asked the newer one."""
    older, older_run = await second_controller(machine)
    hold, is_held, may_go = older_run.bodies.hold, asyncio.Event(), asyncio.Event()

    async def slow_hold(holder: str, digest: str, body: bytes) -> None:
        await hold(holder, digest, body)
        is_held.set()
        await may_go.wait()

    monkeypatch.setattr(older_run.bodies, "hold", slow_hold)
    submitting = asyncio.create_task(older.submit(an_update(2)))
    await is_held.wait()
    await machine.controller.start()
    machine.faults.holds[1.0] = threading.Event()
    await started(machine, await machine.update(1, 1))
    second = await machine.update(2, 2)
    with pytest.raises(RatoonError, match="took over"):
        await older.submit(Submission(policy_id="p", key=SeqKey(seq=9), command=DISCARD, body=b""))
    may_go.set()
    with pytest.raises(RatoonError, match="failed"):
        await submitting
    machine.faults.holds[1.0].set()
    assert (await machine.end(second)).state is OperationState.DONE
    await older._turns.stop(0.0)


async def test_a_body_that_the_newer_one_clears_away_is_to_be_sent_again(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is being written by the older one, and looks as if that had crashed."""
    replace, is_written, may_go = Path.replace, threading.Event(), threading.Event()

    def slow_replace(path: Path, target: Path) -> Path:
        if path.parent == machine.paths.bodies:
            is_written.set()
            may_go.wait(10)
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", slow_replace)
    older, _ = await second_controller(machine)
    submitting = asyncio.create_task(older.submit(an_update(1)))
    await asyncio.to_thread(is_written.wait, 10)
    await machine.controller.start()
    may_go.set()
    with pytest.raises(RatoonError) as caught:
        await submitting
    assert (caught.value.code, caught.value.retryable) == (ErrorCode.UNAVAILABLE, True)
    assert (await machine.end(await machine.update(1, 1))).state is OperationState.DONE
    await older._turns.stop(0.0)


@pytest.mark.parametrize("is_overtaken", [False, True])
async def test_a_start_removes_leftovers_unless_it_is_overtaken(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, is_overtaken: bool
) -> None:
    """A newer one may be writing what looks like one."""
    await second_controller(machine)
    temporary = machine.paths.weights / f"{TEMPORARY_PREFIX}1"
    temporary.mkdir()

    def list_late(paths: PolicyPaths) -> list[Path]:
        if is_overtaken:
            machine.journal.fenced.acquire("p")
        return policy_leftovers(paths)

    monkeypatch.setattr(startup, "policy_leftovers", list_late)
    if is_overtaken:
        with pytest.raises(FencedError):
            await machine.controller.start()
    else:
        await machine.controller.start()
    assert temporary.exists() is is_overtaken


async def test_a_start_that_is_overtaken_takes_no_body_away(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has read which bodies are needed when the newer one accepts another."""
    await second_controller(machine)
    overtaken, machine.controller = machine.controller, machine._controller()
    needed_bodies = startup._needed_bodies
    operations: list[Operation] = []

    async def overtake(run: PolicyRun) -> frozenset[tuple[str, str]]:
        needed = await needed_bodies(run)
        monkeypatch.undo()
        machine.faults.holds[1.0] = threading.Event()
        await machine.controller.start()
        operations.extend([await machine.update(1, 1), await machine.update(2, 2)])
        return needed

    monkeypatch.setattr(startup, "_needed_bodies", overtake)
    with pytest.raises(FencedError):
        await overtaken.start()
    machine.faults.holds[1.0].set()
    for operation in operations:
        assert (await machine.end(operation)).state is OperationState.DONE


def with_checkpoints(make_machine: MakeMachine) -> Machine:
    """One after each update, and the newest is kept."""
    each = CheckpointConfig(every_operations=1, every_s=0, every_bytes=0, keep=1)
    return make_machine(recovery=Recovery.REPLAY, checkpoints=each)


def only_checkpoint(machine: Machine) -> str:
    (known,) = machine.journal.store.checkpoints("p")
    return known.info.checkpoint_id


async def test_a_start_that_is_overtaken_takes_no_checkpoint_away(
    make_machine: MakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has read which checkpoints there are when the newer one takes another."""
    machine = with_checkpoints(make_machine)
    overtaken, machine.controller = machine.controller, machine._controller()
    checkpoints = machine.journal.checkpoints

    async def overtake(policy_id: str) -> tuple[Checkpoint, ...]:
        known = await checkpoints(policy_id)
        monkeypatch.undo()
        await machine.controller.start()
        await machine.end(await machine.update(1, 1))
        await settled(machine)
        return known

    monkeypatch.setattr(machine.journal, "checkpoints", overtake)
    with pytest.raises(FencedError):
        await overtaken.start()
    assert machine.paths.checkpoint(only_checkpoint(machine)).is_dir()


async def test_the_older_one_takes_no_checkpoint_of_the_newer_one_for_its_own(
    make_machine: MakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both take one at the same seq, and the older one clears the way for its own."""
    machine = await with_checkpoints(make_machine).start()
    older, _ = await second_controller(machine)
    checkpoints, overtaken = machine.journal.checkpoints, asyncio.Event()

    async def overtake(policy_id: str) -> tuple[Checkpoint, ...]:
        known = await checkpoints(policy_id)
        monkeypatch.undo()
        await machine.controller.start()
        await settled(machine)
        overtaken.set()
        return known

    monkeypatch.setattr(machine.journal, "checkpoints", overtake)
    await older.submit(an_update(1))
    await asyncio.wait_for(overtaken.wait(), 10)
    landing = older._turns._checkpointer._landing
    assert landing is not None
    await landing
    assert machine.paths.checkpoint(only_checkpoint(machine)).is_dir()
    await older._turns.stop(0.0)
