"""Receivers of versions: what they serve, what is kept while they read it, and for how long."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest

from ratoon import metrics
from ratoon.engine.policy.receivers import MAX_RECEIVERS, Receivers
from ratoon.engine.types import Acknowledgement, Operation
from ratoon.errors import ErrorCode, RatoonError
from ratoon.metrics import Gone, MetricsTotals
from ratoon.stream.versions import list_versions
from ratoon.warning_kinds import WarningKind
from ratoon_proto.types import Recovery, StepResult, StepWarning
from tests.engine.conftest import MakeMachine
from tests.engine.harness import Machine, load, save
from tests.engine.local_ports import POLICY
from tests.engine.refusals import raises
from tests.engine.test_metrics import series


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


def ack(
    name: str = "a", version: int | None = None, *, holds: int | None = None, hold_s: float = 60.0
) -> Acknowledgement:
    return Acknowledgement(receiver_id=name, version=version, holds_version=holds, hold_s=hold_s)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def receivers(clock: Clock) -> Receivers:
    return Receivers(max_held=2, clock=clock)


def lags(machine: Machine) -> dict[str, float]:
    """`ratoon_receiver_lag_versions` by receiver."""
    totals = MetricsTotals()
    totals.send(machine.metrics.changes)
    return {
        name.split('receiver_id="')[1].split('"')[0]: value
        for name, value in series(totals).items()
        if name.startswith("ratoon_receiver_lag_versions")
    }


async def step_to(machine: Machine, version: int) -> None:
    for number in range(machine.run.version + 1, version + 1):
        await machine.end(await machine.update(number, number))
    await machine.landed()


def test_a_hold_ends_with_the_next_word_or_at_its_deadline(
    receivers: Receivers, clock: Clock
) -> None:
    receivers.acknowledge(ack("a", holds=1, hold_s=10.0))
    receivers.acknowledge(ack("b", holds=2, hold_s=30.0))
    clock.now += 9.0
    assert receivers.held() == {1, 2}
    clock.now += 1.0
    assert receivers.held() == {2}
    receivers.acknowledge(ack("b", 2))
    assert receivers.held() == frozenset()


def test_so_many_versions_are_held_and_no_more(receivers: Receivers, clock: Clock) -> None:
    receivers.acknowledge(ack("a", holds=1, hold_s=10.0))
    receivers.acknowledge(ack("b", holds=2))
    with raises(
        ErrorCode.RESOURCE_EXHAUSTED, match=r"hold versions \[1, 2\], of at most 2"
    ) as caught:
        receivers.acknowledge(ack("c", 0, holds=3))
    assert caught.value.details["resource"] == "held_versions"
    assert receivers.lags(5) == {}
    # Another's version is no further one, and one's own makes way for the next.
    receivers.acknowledge(ack("c", holds=1))
    receivers.acknowledge(ack("b", holds=3))
    assert receivers.held() == {1, 3}
    receivers.acknowledge(ack("c", holds=3))
    clock.now += 10.0
    receivers.acknowledge(ack("d", holds=4))
    assert receivers.held() == {3, 4}


def test_the_longest_silent_makes_way_for_a_new_one(receivers: Receivers) -> None:
    receivers.acknowledge(ack("r0", 0, holds=9))
    for number in range(1, MAX_RECEIVERS):
        assert receivers.acknowledge(ack(f"r{number}", 0)) == ()
    receivers.acknowledge(ack("r0", 0, holds=9))
    assert receivers.acknowledge(ack("new", 3)) == ("r1",)
    assert len(receivers.lags(4)) == MAX_RECEIVERS
    assert receivers.lags(4)["new"] == 1
    assert receivers.held() == {9}
    receivers.acknowledge(ack("r0", 0))
    for number in range(2, MAX_RECEIVERS):
        receivers.acknowledge(ack(f"r{number}", 0))
    assert receivers.acknowledge(ack("r1")) == ("new",)


def test_a_receiver_lags_in_publications_until_it_is_taken_for_gone(receivers: Receivers) -> None:
    for name, version in (("near", 92), ("far", 36), ("lags", 91), ("gone", 35), ("ahead", 120)):
        receivers.acknowledge(ack(name, version))
    receivers.acknowledge(ack("serves none"))
    told = ("far version 36 (64 behind)", "lags version 91 (9 behind)")
    assert receivers.lagging(100, 1) == told
    assert receivers.lagging(126, 10) == (
        "gone version 35 (91 behind)",
        "far version 36 (90 behind)",
    )


async def test_a_step_tells_of_receivers_that_lag(machine: Machine) -> None:
    await machine.controller.ack_weights(ack("old", 0))
    warnings: tuple[StepWarning, ...] = ()
    for number in range(1, 11):
        ended = await machine.end(await machine.update(number, number))
        await machine.landed()
        await machine.controller.ack_weights(ack("new", number))
        warnings = _warnings(ended)
        assert not warnings or number == 10
    assert len(warnings) == 1
    warning = warnings[0]
    assert warning.kind == WarningKind.RECEIVER_LAG
    assert "far behind version 9, the newest: old version 0 (9 behind); they" in warning.message
    await machine.controller.ack_weights(ack("old", 10))
    assert _warnings(await machine.end(await machine.update(11, 11))) == ()


def _warnings(ended: Operation) -> tuple[StepWarning, ...]:
    assert isinstance(ended.result, StepResult)
    assert ended.result.report is not None
    return ended.result.report.warnings


async def test_a_held_version_stays_until_it_is_let_go(machine: Machine) -> None:
    assert await machine.controller.ack_weights(ack(holds=0)) == 0
    await step_to(machine, 3)
    assert machine.run.published == (0, 2, 3)
    assert list_versions(machine.paths.weights) == (0, 2, 3)
    assert (await machine.controller.weight_manifest(0)).version == 0
    assert await machine.controller.ack_weights(ack(version=0)) == 3
    await step_to(machine, 4)
    assert machine.run.published == (3, 4)
    assert list_versions(machine.paths.weights) == (3, 4)


async def test_a_receiver_that_never_returns_keeps_nothing_for_ever(machine: Machine) -> None:
    clock = Clock()
    machine.controller._publisher.receivers = Receivers(max_held=2, clock=clock)
    await machine.controller.ack_weights(ack(holds=0, hold_s=5.0))
    await step_to(machine, 3)
    assert machine.run.published == (0, 2, 3)
    clock.now += 5.0
    await step_to(machine, 4)
    assert machine.run.published == (3, 4)
    assert list_versions(machine.paths.weights) == (3, 4)


async def test_what_is_gone_cannot_be_held(machine: Machine) -> None:
    await step_to(machine, 2)
    for version in (0, 3):
        with raises(ErrorCode.WEIGHTS_NOT_FOUND, match=r"holds_version: .* \[1, 2\]") as caught:
            await machine.controller.ack_weights(ack(version=1, holds=version))
        assert caught.value.field == "holds_version"
    assert lags(machine) == {}


async def test_a_version_that_is_just_leaving_cannot_be_held(machine: Machine) -> None:
    """A hold that came while the journal was written was granted for files that then went."""
    await step_to(machine, 1)
    holds: list[asyncio.Task[int | None]] = []
    ask = machine.journal.ask

    async def asked(name: str, call: object) -> object:
        if name == "set_published" and machine.run.version == 2 and not holds:
            holds.append(asyncio.create_task(machine.controller.ack_weights(ack(holds=0))))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        return await ask(name, call)  # pyright: ignore[reportArgumentType]

    machine.journal.ask = asked  # pyright: ignore[reportAttributeAccessIssue]
    await step_to(machine, 2)
    with pytest.raises(RatoonError, match="holds_version"):
        await holds[0]
    assert list_versions(machine.paths.weights) == (1, 2)


async def test_a_new_engine_keeps_to_keep_versions(machine: Machine) -> None:
    """Holds are in memory alone: what was held is listed until the next version."""
    await machine.controller.ack_weights(ack(holds=0))
    await step_to(machine, 3)
    await machine.restart_controller()
    assert machine.run.published == (0, 2, 3)
    await step_to(machine, 4)
    assert list_versions(machine.paths.weights) == (3, 4)


async def test_a_lost_worker_takes_no_hold_along(make_machine: MakeMachine) -> None:
    machine = await make_machine(recovery=Recovery.REPLAY).start()
    await machine.controller.ack_weights(ack(holds=0))
    await step_to(machine, 1)
    await machine.worker.kill()
    await step_to(machine, 3)
    assert len(machine.worker.trainers) == 2
    assert list_versions(machine.paths.weights) == (0, 2, 3)


async def test_lag_is_that_of_the_newest_version(machine: Machine) -> None:
    await machine.submit(1, save("mine"), 0)
    await step_to_after(machine, 2, 3)
    await machine.controller.ack_weights(ack("a", 2))
    await machine.controller.ack_weights(ack("b", 1))
    assert lags(machine) == {"a": 0, "b": 1}
    await machine.end(await machine.update(4, 4))
    await machine.landed()
    assert lags(machine) == {"a": 1, "b": 2}
    await machine.controller.ack_weights(ack("b"))
    assert lags(machine) == {"a": 1}
    # Below 0: it serves what a LoadCheckpoint has given up.
    await machine.end(await machine.submit(5, load("mine"), 0))
    await machine.landed()
    assert lags(machine) == {"a": -2}


async def step_to_after(machine: Machine, *seqs: int) -> None:
    for seq in seqs:
        await machine.end(await machine.update(seq, seq))
    await machine.landed()


async def test_a_forgotten_receiver_has_no_series(machine: Machine) -> None:
    for number in range(MAX_RECEIVERS + 1):
        await machine.controller.ack_weights(ack(f"r{number}", 0))
    shown = lags(machine)
    assert len(shown) == MAX_RECEIVERS
    assert "r0" not in shown
    machine.metrics.send([Gone(labels={metrics.POLICY_LABEL: POLICY})])
    assert lags(machine) == {}


async def test_versions_and_receivers_are_described(machine: Machine) -> None:
    await step_to(machine, 2)
    await machine.controller.ack_weights(ack("a", 1, holds=2))
    await machine.controller.ack_weights(ack("b"))
    described = await machine.controller.versions()
    published = await machine.controller.weight_manifest(2)
    assert [one.version for one in described.versions] == list(machine.run.published)
    newest = described.versions[-1]
    assert newest.size_bytes == sum(file.size_bytes for file in published.files) > 0
    assert newest.published_at.timestamp() == pytest.approx(published.created_at, abs=1e-5)
    assert [one.is_held for one in described.versions] == [False, True]
    first, second = described.receivers
    assert (first.receiver_id, first.version, first.lag, first.holds_version) == ("a", 1, 1, 2)
    assert (second.receiver_id, second.version, second.lag) == ("b", None, None)
    assert 0 <= (second.last_seen - first.last_seen).total_seconds() < 60
