"""Workers that are lost to what they run: a step that stops half way, a device that fails."""

from __future__ import annotations

from typing import Any

import pytest

from ratoon.engine.policy.run import MAX_LOSSES
from ratoon.engine.worker.tasks import WorkerLostError
from ratoon.errors import ErrorCode, RatoonError
from ratoon.metrics import PUBLISH_FAILURES
from ratoon_proto.types import OperationState, PolicyState, Recovery
from tests.engine.conftest import MakeMachine
from tests.engine.harness import RATE, Machine, code_of, forward
from tests.engine.local_ports import POLICY
from tests.until import until

ALWAYS = 1000


async def replaying(make_machine: MakeMachine) -> Machine:
    return await make_machine(recovery=Recovery.REPLAY).start()


async def test_a_step_that_stops_half_way_is_taken_once(make_machine: MakeMachine) -> None:
    machine = await replaying(make_machine)
    await machine.end(await machine.update(1, 1))
    machine.faults.tears[2.0] = 1
    ended = await machine.end(await machine.update(2, 2))
    assert ended.state is OperationState.DONE
    await machine.end(await machine.update(3, 3))
    assert machine.weights == [([1.0], RATE), ([2.0], RATE), ([3.0], RATE)]
    assert len(machine.worker.trainers) == 2


async def test_a_window_is_whole_after_its_step_stopped_half_way(
    make_machine: MakeMachine,
) -> None:
    machine = await replaying(make_machine)
    for seq in (1, 2):
        await machine.end(await machine.forward_backward(seq, seq))
    machine.faults.tears[2.0] = 1
    ended = await machine.end(await machine.step(3))
    assert ended.state is OperationState.DONE
    assert machine.weights == [([1.0, 2.0], RATE)]


async def test_a_device_that_fails_costs_nothing_but_time(make_machine: MakeMachine) -> None:
    """The worker's process lives on, and would fail at everything."""
    machine = await replaying(make_machine)
    await machine.end(await machine.update(1, 1))
    machine.faults.kills_device[2.0] = MAX_LOSSES - 1
    ended = [await machine.end(await machine.update(seq, seq)) for seq in (2, 3)]
    assert [operation.state for operation in ended] == [OperationState.DONE] * 2
    assert machine.weights == [([1.0], RATE), ([2.0], RATE), ([3.0], RATE)]
    assert len(machine.worker.trainers) == MAX_LOSSES


async def test_what_takes_every_worker_fails_and_the_policy_goes_on(
    make_machine: MakeMachine,
) -> None:
    machine = await replaying(make_machine)
    await machine.end(await machine.update(1, 1))
    machine.faults.kills_device[2.0] = ALWAYS
    poison = await machine.update(2, 2)
    after = await machine.update(3, 3)
    ended = await machine.end(poison)
    assert ended.state is OperationState.FAILED
    assert code_of(ended) == ErrorCode.WORKER_LOST
    assert (await machine.end(after)).state is OperationState.DONE
    assert machine.weights == [([1.0], RATE), ([3.0], RATE)]
    assert machine.journal.store.history("p").policy.state is PolicyState.READY
    # Nor does a recovery run it again.
    machine.worker.is_dead = True
    await machine.restart_controller()
    assert machine.weights == [([1.0], RATE), ([3.0], RATE)]
    assert (await machine.end(await machine.update(4, 4))).state is OperationState.DONE


async def test_so_does_a_forward_without_a_key(make_machine: MakeMachine) -> None:
    machine = await replaying(make_machine)
    await machine.end(await machine.update(1, 1))
    machine.faults.kills_device[7.0] = ALWAYS
    ended = await machine.end(await machine.submit(None, forward(7), 7))
    assert code_of(ended) == ErrorCode.WORKER_LOST
    assert (await machine.end(await machine.update(2, 2))).state is OperationState.DONE
    assert machine.weights == [([1.0], RATE), ([2.0], RATE)]


async def test_without_replay_what_was_lost_is_named(make_machine: MakeMachine) -> None:
    machine = await make_machine(recovery=Recovery.FAIL).start()
    machine.faults.kills_device[1.0] = 1
    ended = await machine.end(await machine.update(1, 1))
    assert code_of(ended) == ErrorCode.WORKER_LOST
    assert (await machine.end(await machine.update(2, 2))).state is OperationState.DONE
    assert machine.weights == [([2.0], RATE)]


class LosesVersionOne:
    """Each call of the worker's method for version 1 ends the worker, while it `is_on`."""

    def __init__(self, machine: Machine, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        real = getattr(machine.worker, name)
        self.is_on, self.count = True, 0

        async def call(token: int, version: int, *args: Any) -> object:
            if self.is_on and version == 1:
                self.count += 1
                machine.worker.is_dead = True
                raise WorkerLostError("out of memory")
            return await real(token, version, *args)

        monkeypatch.setattr(machine.worker, name, call)


@pytest.mark.parametrize("name", ["hold", "publish"])
async def test_a_version_that_takes_every_worker_is_refused_and_the_policy_goes_on(
    make_machine: MakeMachine, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    machine = await replaying(make_machine)
    losses = LosesVersionOne(machine, monkeypatch, name)
    ended = await machine.end(await machine.update(1, 1))
    assert ended.state is OperationState.DONE
    await until(lambda: machine.metrics.changes.count(PUBLISH_FAILURES.sample(1, POLICY)) == 1)
    assert (machine.run.state, machine.run.published) == (PolicyState.READY, (0,))
    # Nor does a request take another one.
    with pytest.raises(RatoonError, match="4 workers in a row were lost to it, the last: out of"):
        await machine.controller.weight_manifest(1)
    assert losses.count == MAX_LOSSES == len(machine.worker.trainers) - 1
    assert (await machine.end(await machine.update(2, 2))).state is OperationState.DONE
    await machine.landed()
    assert machine.run.published == (0, 2)
    assert machine.weights == [([1.0], RATE), ([2.0], RATE)]


async def test_an_operation_beside_a_version_has_no_part_in_its_losses(
    make_machine: MakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = await replaying(make_machine)
    losses = LosesVersionOne(machine, monkeypatch, "publish")
    ended = await machine.end(await machine.update(1, 1))
    poison = await machine.forward_backward(2, 2)
    machine.faults.kills_device[2.0] = MAX_LOSSES - 1
    await until(lambda: losses.count == MAX_LOSSES - 1)
    losses.is_on = False
    assert (await machine.end(poison)).state is OperationState.DONE
    assert ended.state is OperationState.DONE
    assert machine.run.published == (0, 1)


async def test_a_publication_that_fails_for_no_known_reason_fails_the_policy(
    make_machine: MakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was begun again for ever."""
    machine = await replaying(make_machine)

    async def broken(*_: object) -> None:
        raise ValueError("no version at all")

    monkeypatch.setattr(machine.worker, "publish", broken)
    await machine.end(await machine.update(1, 1))
    await until(lambda: machine.run.state is PolicyState.FAILED)
    assert "no version at all" in machine.run.failure
    assert (await machine.controller.weight_manifest(None)).version == 0
