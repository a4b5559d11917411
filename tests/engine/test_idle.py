"""Policies that nobody uses: they are put away and come back with the same bits, or end."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from ratoon.config import LimitsConfig, RatoonConfig
from ratoon.engine.policy import checkpointer, controller, idle, turns
from ratoon.engine.policy.controller import Controller
from ratoon.engine.settings import EngineSettings
from ratoon.engine.types import Acknowledgement, OperationFilter
from ratoon.engine.worker.tasks import WorkerStatus
from ratoon.errors import ErrorCode, RatoonError, exhausted
from ratoon.metrics import POLICY_RELEASED, RECOVERIES, Sample
from ratoon_proto.types import OperationState, PolicyState, PublishConfig, PublishKind, Recovery
from tests.engine.conftest import MakeMachine
from tests.engine.harness import DISCARD, RATE, Machine, forward, policy_spec, save
from tests.engine.refusals import raises
from tests.engine.test_checkpointer import config
from tests.engine.test_engine import House
from tests.engine.test_recovery import EACH, checkpoint_ids, counted, damage
from tests.until import until


class Clock:
    """The loop's, in the place of `time`, which may be set forward."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    for module in (idle, controller):
        monkeypatch.setattr(module, "time", clock)
    return clock


async def pass_by(clock: Clock, own: Controller, seconds: float) -> None:
    """So many seconds go by with nothing to do, and the controller has seen it."""
    await until(lambda: own._turns._idle._since is not None)
    clock.ahead_s += seconds
    for _ in range(5):
        own._turns.wake()
        await asyncio.sleep(0.01)


async def released(machine: Machine) -> None:
    """Put away by callers that ask again."""
    while machine.run.state is not PolicyState.RELEASED:
        with contextlib.suppress(RatoonError):
            await machine.controller.release()


async def put_away(machine: Machine) -> None:
    """Until the machine's policy is put away by itself."""
    await until(lambda: machine.run.state is PolicyState.RELEASED and machine.worker.is_released)


def journaled(machine: Machine) -> tuple[PolicyState, str]:
    policy = machine.journal.store.history("p").policy
    return policy.state, policy.failure


@pytest.mark.parametrize("recovery", Recovery)
async def test_a_policy_comes_back_with_the_bits_it_went_with(
    make_machine: MakeMachine, recovery: Recovery
) -> None:
    """A policy with `recovery: fail` too: nothing of it was lost, so nothing fails."""
    made = (make_machine(recovery=recovery, checkpoints=config()) for _ in range(2))
    plain, machine = [await each.start() for each in made]
    for each in (plain, machine):
        await each.updates(1, 2)
        await each.end(await each.submit(3, forward(3), 3))
    await machine.controller.release()
    await machine.controller.release()
    assert (machine.worker.is_released, journaled(machine)[0]) == (True, PolicyState.RELEASED)
    assert machine.bodies == set()
    for each in (plain, machine):
        await each.end(await each.forward_backward(4, 4))
        await each.end(await each.step(5))
        await each.landed()
    assert machine.weights == plain.weights == [([1.0], RATE), ([2.0], RATE), ([4.0], RATE)]
    then, now = (each.journal.store.history("p").policy for each in (plain, machine))
    assert (then.version, then.next_seq, then.published) == (3, 6, (2, 3))
    assert (now.version, now.next_seq, now.published) == (3, 6, (2, 3))
    digests = [
        [record.weights_digest for record in each.journal.store.records_from("p", 1)]
        for each in (plain, machine)
    ]
    assert digests[0] == digests[1]
    assert (machine.run.state, len(machine.worker.trainers)) == (PolicyState.READY, 2)
    assert counted(machine, RECOVERIES) == [], "no worker was lost"
    shown = [
        sample.value
        for sample in machine.metrics.changes
        if isinstance(sample, Sample) and sample.metric == POLICY_RELEASED.name
    ]
    assert shown == [0, 1, 0]


async def test_what_needs_no_worker_is_answered_without_one(make_machine: MakeMachine) -> None:
    machine = await make_machine(recovery=Recovery.REPLAY).start()
    first = await machine.update(1, 1)
    await machine.end(first)
    await machine.end(await machine.submit(2, save("mine"), 0))
    await machine.landed()
    await machine.controller.release()
    own = machine.controller
    for _ in range(2):
        assert (await own.weight_manifest(None)).version == 1
        ack = Acknowledgement(receiver_id="r", version=1, holds_version=1, hold_s=9.0)
        assert await own.ack_weights(ack) == 1
        versions = await own.versions()
        assert [each.version for each in versions.versions] == [0, 1]
        assert (await own.get_operation(first.operation_id, 0.0)).state.is_final
        assert (await machine.update(1, 1)).operation_id == first.operation_id
        with raises(ErrorCode.WINDOW_EMPTY):
            await own.read_gradients(("w",))
        await own.put_upload_part("u", 0, b"part")
        assert await own.get_upload_parts("u", 1) == [b"part"]
        await own.sweep()
        await machine.restart_controller()
        own = machine.controller
    await own.delete_checkpoint("mine")
    assert (machine.run.state, machine.worker.is_released) == (PolicyState.RELEASED, True)
    assert len(machine.worker.trainers) == 1
    await machine.updates(3)
    assert machine.weights == [([1.0], RATE), ([3.0], RATE)]


async def test_a_reader_of_what_is_not_written_brings_the_worker_back(
    make_machine: MakeMachine,
) -> None:
    publish = PublishConfig(kind=PublishKind.ON_REQUEST, every_n=1)
    machine = await make_machine(recovery=Recovery.REPLAY, publish=publish).start()
    await machine.updates(1)
    await machine.controller.release()
    assert (await machine.controller.weight_manifest(None)).version == 1
    await machine.landed()
    await machine.controller.release()
    read = await machine.end(await machine.submit(None, forward(2), 2))
    assert read.state is OperationState.DONE, "a Forward without a key, which no journal has"
    assert len(machine.worker.trainers) == 3


async def test_it_is_put_away_after_so_long_without_work(make_machine: MakeMachine) -> None:
    machine = await make_machine(recovery=Recovery.REPLAY, idle_release_s=0.2).start()
    began = time.monotonic()
    operation = await machine.running(1)
    await asyncio.sleep(0.3)
    assert machine.run.state is PolicyState.READY, "it works"
    machine.faults.holds[1].set()
    await machine.end(operation)
    ended = time.monotonic()
    late = await machine.update(3, 3)
    await put_away(machine)
    assert time.monotonic() - ended >= 0.2, began
    assert (late.blocked_by_seq, checkpoint_ids(machine)) == (2, ["auto-1-1"])
    await machine.updates(2)
    assert (await machine.end(late)).state is OperationState.DONE
    assert machine.weights == [([1.0], RATE), ([2.0], RATE), ([3.0], RATE)]


async def test_a_window_keeps_its_worker(make_machine: MakeMachine) -> None:
    """Gradients are on no disk."""
    machine = await make_machine(recovery=Recovery.REPLAY, idle_release_s=0.02).start()
    await put_away(machine)
    await machine.end(await machine.forward_backward(1, 1))
    await asyncio.sleep(0.1)
    with raises(ErrorCode.WINDOW_OPEN, match="ForwardBackwards 1"):
        await machine.controller.release()
    assert (machine.run.state, checkpoint_ids(machine)) == (PolicyState.READY, [])
    await machine.end(await machine.submit(2, DISCARD, 0))
    await put_away(machine)
    assert len(machine.worker.trainers) == 2


async def test_work_that_comes_meanwhile_goes_first(make_machine: MakeMachine) -> None:
    machine = await make_machine(recovery=Recovery.REPLAY, limits={"max_wait_s": 0.2}).start()
    machine.faults.writes = threading.Event()
    await machine.updates(1)
    with raises(ErrorCode.UNAVAILABLE, match="its state is being written"):
        await machine.controller.release()
    asking = asyncio.ensure_future(released(machine))
    await machine.updates(2)
    machine.faults.writes.set()
    await asking
    assert checkpoint_ids(machine) == ["auto-1-1", "auto-2-1"]
    await machine.updates(3)
    assert machine.weights == [([1.0], RATE), ([2.0], RATE), ([3.0], RATE)]


async def test_a_state_that_cannot_be_saved_keeps_its_worker(
    make_machine: MakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpointer, "_RETRY_S", 0.05)
    limits = {"max_wait_s": 0.3}
    machine = await make_machine(recovery=Recovery.REPLAY, limits=limits).start()
    await machine.updates(1)
    machine.faults.full_disk = True
    with raises(ErrorCode.UNAVAILABLE):
        await machine.controller.release()
    assert (machine.run.state, machine.worker.is_released) == (PolicyState.READY, False)
    machine.faults.full_disk = False
    await released(machine)
    assert machine.worker.is_released


async def test_it_waits_for_a_place_and_is_read_meanwhile(
    make_machine: MakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "_WAITING_S", 0.02)
    machine = await make_machine(recovery=Recovery.REPLAY).start()
    await machine.updates(1)
    await machine.landed()
    await machine.controller.release()
    asked, fence = [0], machine.worker.fence

    async def no_place(*args: Any, **options: Any) -> WorkerStatus:
        asked[0] += 1
        if asked[0] <= 3:
            assert not machine.controller._lock.locked()
            raise exhausted("no GPU", resource="GPU", wanted=1, free=0, limit=1, retry_after_s=1.0)
        return await fence(*args, **options)

    monkeypatch.setattr(machine.worker, "fence", no_place)
    operation = await machine.update(2, 2)
    await until(lambda: asked[0] > 1)
    assert (await machine.controller.weight_manifest(None)).version == 1
    assert journaled(machine)[0] is PolicyState.RELEASED
    await machine.end(operation)
    assert machine.run.state is PolicyState.READY


async def test_a_damaged_state_is_replayed_from_the_one_before(make_machine: MakeMachine) -> None:
    machine = await make_machine(recovery=Recovery.REPLAY, checkpoints=EACH).start()
    await machine.updates(1, 2, 3)
    machine.journal.lost.add("set_policy")
    await machine.controller.release()
    assert machine.journal.lost == set()
    damage(machine, checkpoint_ids(machine)[-1])
    await machine.updates(4)
    assert machine.weights == [([number], RATE) for number in (1.0, 2.0, 3.0, 4.0)]


@pytest.mark.parametrize("is_open", [False, True])
async def test_a_policy_ends_that_nobody_calls(
    make_machine: MakeMachine, clock: Clock, is_open: bool
) -> None:
    """A wall clock that jumps ends nothing. Gradients of an open window are in no checkpoint."""
    machine = await make_machine(recovery=Recovery.REPLAY, idle_ttl_s=1000.0).start()
    machine.run.now = lambda: time.time() + 1e9
    await machine.updates(1)
    if is_open:
        await machine.end(await machine.forward_backward(2, 2))
        machine.journal.lost.add("end_policy")
    late = await machine.update(9, 9)
    for _ in range(2):
        await pass_by(clock, machine.controller, 900.0)
        machine.controller.note_call()
    assert machine.run.state is PolicyState.READY
    await pass_by(clock, machine.controller, 1001.0)
    await until(lambda: machine.run.state is PolicyState.ENDED)
    state, failure = journaled(machine)
    assert state is PolicyState.ENDED
    assert failure == "nobody has called it for 1000 s; its last state is checkpoint ended-v1"
    (known,) = machine.journal.store.checkpoints("p")
    assert (known.info.name, known.info.version) == ("ended-v1", 1)
    assert (machine.paths.checkpoint(known.info.checkpoint_id)).is_dir()
    assert (await machine.controller.get_operation(late.operation_id, 0.0)).state is (
        OperationState.CANCELLED
    )
    with raises(ErrorCode.POLICY_FAILED, match="policy p is ended: nobody has called it"):
        await machine.updates(3)


async def test_a_policy_ends_that_is_put_away(make_machine: MakeMachine, clock: Clock) -> None:
    """The checkpoint that a caller has saved last is its last state, and stays for good."""
    machine = await make_machine(idle_release_s=0.05, idle_ttl_s=1000.0).start()
    await machine.updates(1)
    await machine.end(await machine.submit(2, save("mine", ttl_s=60.0), 0))
    await put_away(machine)
    loads = len(machine.worker.trainers)
    await machine.restart_controller()
    assert machine.run.state is PolicyState.RELEASED
    await pass_by(clock, machine.controller, 1001.0)
    await until(lambda: machine.run.state is PolicyState.ENDED)
    assert journaled(machine)[1].endswith("its last state is checkpoint mine")
    (known,) = machine.journal.store.checkpoints("p")
    assert (known.info.name, known.info.expires_at) == ("mine", None)
    assert len(machine.worker.trainers) == loads


@pytest.fixture
async def house(tmp_path: Path) -> House:
    house = House(tmp_path)
    config = RatoonConfig(data_root=tmp_path, limits=LimitsConfig(max_policies=1))
    house.settings = EngineSettings.from_config(config)
    await house.crash()
    await house.engine.recover()
    return house


def row_state(house: House) -> PolicyState:
    row = house.journal.store.policy("a")
    assert row is not None
    return row.state


async def test_an_ended_policy_leaves_its_checkpoint_and_its_history(
    house: House, clock: Clock
) -> None:
    """What a kill leaves of it, the next engine deletes; every call that names it renews it."""
    spec, engine = policy_spec("a", recovery=Recovery.REPLAY, idle_ttl_s=1000.0), house.engine
    await house.end(await engine.create_policy(spec))
    await house.done("a", 1)
    operation = await house.update("a", 1)
    ack = Acknowledgement(receiver_id="r", version=1, holds_version=None, hold_s=0.0)
    asked = OperationFilter(policy_id="a", kinds=(), states=(), seq=0)
    calls: tuple[Callable[[], Awaitable[object]], ...] = (
        lambda: engine.policy("a"),
        lambda: engine.note_call("a"),
        lambda: engine.ack_weights("a", ack),
        lambda: engine.list_checkpoints("a"),
        lambda: engine.list_steps("a", (), (0, 0), 10),
        lambda: engine.list_operations(asked, None, None, 10),
        lambda: engine.get_operation(operation.operation_id, 0.0),
    )
    own = await engine._controllers.find("a")
    assert own is not None
    for call in calls:
        await pass_by(clock, own, 900.0)
        assert row_state(house) is PolicyState.READY
        await call()
    await engine.policies()
    await pass_by(clock, own, 1001.0)
    await until(lambda: row_state(house) is PolicyState.ENDED)
    paths = house.settings.paths("a")
    await until(lambda: not paths.weights.exists() and not paths.results.exists())
    assert house.cluster.workers["a"].is_released

    async def check() -> None:
        (saved,) = await house.engine.list_checkpoints("a")
        assert (saved.name, saved.version) == ("ended-v1", 1)
        assert [path.name for path in paths.checkpoints.iterdir()] == [saved.checkpoint_id]
        assert (await house.engine.list_steps("a", (), (0, 0), 10)).version == (1,)
        policy = await house.engine.policy("a")
        assert (policy.state, policy.published_version) == (PolicyState.ENDED, None)
        for call in (house.update("a", 2), house.engine.weight_manifest("a", None)):
            with raises(ErrorCode.POLICY_FAILED, match="checkpoint ended-v1"):
                await call
        with raises(ErrorCode.POLICY_EXISTS, match="has ended; its id is free once it is deleted"):
            await house.engine.create_policy(spec)

    await check()
    for name in ("weights", "results"):
        (paths.root / name).mkdir(parents=True, exist_ok=True)
    (paths.checkpoints / "auto-9-9").mkdir()
    await house.crash()
    await house.engine.recover()
    await until(lambda: not paths.results.exists() and len([*paths.checkpoints.iterdir()]) == 1)
    await check()
    await house.end(await house.engine.create_policy(policy_spec("b")))
    await house.end(await house.engine.delete_policy("a"))
    assert not paths.root.exists()
    with raises(ErrorCode.POLICY_NOT_FOUND):
        await house.engine.policy("a")
    await house.leave()


async def test_a_restarted_engine_leaves_a_policy_put_away(house: House) -> None:
    await house.end(await house.engine.create_policy(policy_spec("a", recovery=Recovery.REPLAY)))
    await house.done("a", 1)
    assert (await house.engine.release_policy("a")).state is PolicyState.RELEASED
    await house.crash()
    await house.engine.recover()
    await until(lambda: house.engine._controllers.find_started("a"))
    manifest = await house.engine.weight_manifest("a", None)
    policy = await house.engine.policy("a")
    assert (manifest.version, policy.state) == (1, PolicyState.RELEASED)
    assert house.cluster.workers["a"].is_released
    await house.done("a", 2)
    assert house.weights("a") == [([1.0], RATE), ([2.0], RATE)]
    await house.leave()
