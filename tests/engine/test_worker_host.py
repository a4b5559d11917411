"""Tenants of one process: who is let in, what each has of its own, and what one's end leaves."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest

from ratoon.engine.crash_points import CrashPoint, never
from ratoon.engine.files.paths import policy_paths
from ratoon.engine.types import FailedResult
from ratoon.engine.worker.host import WorkerHost
from ratoon.engine.worker.tasks import Choices, FencedError, Task, WorkerLostError
from ratoon.errors import RatoonError
from ratoon.train.spec import TrainerSpec
from ratoon_proto.types import OperationState
from tests.engine.fake_trainer import FakeTrainer, Faults, as_trainer, number_body
from tests.engine.harness import digest_of, forward_backward, optim_step, update
from tests.engine.test_worker import load_request
from tests.until import until

if TYPE_CHECKING:
    from ratoon.train.trainer import Trainer

KEY = "base"


class Building(FakeTrainer):
    """A trainer that knows whose model it runs on; where that has no room, no other comes."""

    def __init__(self, model: object) -> None:
        super().__init__(Faults())
        self.shared = model
        self.has_room = True

    def beside(self, _spec: TrainerSpec) -> Trainer:
        if not self.has_room:
            raise MemoryError("tried to allocate 2.32 GiB")
        return as_trainer(Building(self.shared))


class House:
    """A host and its tenants' tasks, with bodies below `folder`."""

    def __init__(self, folder: Path, reach: Callable[[CrashPoint], None] = never) -> None:
        self.folder = folder
        self.models: list[object] = []
        self.host = WorkerHost(self.create, reach)

    def create(self, _spec: TrainerSpec) -> Trainer:
        self.models.append(object())
        return as_trainer(Building(self.models[-1]))

    def move_in(self, name: str, token: int = 1) -> Building:
        assert self.host.take(name, KEY, 3)
        self.host.core(name).load(token, name, load_request())
        return self.trainer(name)

    def trainer(self, name: str) -> Building:
        return cast("Building", self.host.core(name).trainer)

    def task(self, name: str, seq: int, number: float, *, is_update: bool = True) -> Task:
        paths = policy_paths(self.folder, name)
        path = paths.body(digest_of(number))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(number_body(number))
        return Task(
            operation_id=f"{name}.{seq}",
            seq=seq,
            command=update(number) if is_update else forward_backward(number),
            choices=Choices(next_version=seq),
            paths=paths,
            started_at=None,
        )

    def state(self, name: str) -> tuple[object, ...]:
        status = self.host.core(name).status()
        trainer = self.trainer(name)
        return status, trainer.weights, trainer.is_window_empty


@pytest.fixture
def house(tmp_path: Path) -> House:
    return House(tmp_path)


def test_tenants_are_of_one_key_and_bounded(house: House) -> None:
    host = house.host
    assert host.tenants() == ()
    assert host.take("a", KEY, 2)
    assert not host.take("b", "another", 2)
    assert host.take("b", KEY, 2)
    assert not host.take("c", KEY, 2)
    assert host.take("a", KEY, 2)
    assert host.tenants() == ("a", "b")
    assert not host.leave("b")
    assert host.take("c", KEY, 2)


def test_a_policy_that_shares_nothing_is_alone(house: House) -> None:
    assert house.host.take("a", "", 8)
    assert not house.host.take("b", "", 8)
    assert house.host.take("a", "", 8)


def test_the_last_ones_end_is_the_process_s(house: House) -> None:
    """Nobody may come between that and the end of the process."""
    house.move_in("a")
    house.move_in("b")
    assert not house.host.leave("c")
    assert not house.host.leave("a")
    assert house.host.leave("b")
    assert not house.host.take("c", KEY, 3)
    assert house.host.leave("b")


def test_tenants_share_a_model_as_long_as_there_is_one(house: House) -> None:
    first, second = house.move_in("a"), house.move_in("b")
    assert first.shared is second.shared is house.models[0]
    assert not house.host.leave("a")
    house.host.collect()
    assert house.move_in("c").shared is house.models[0]
    # One that loads again, as its controller found it at odds with the journal.
    house.host.core("b").load(2, "b", load_request())
    assert house.trainer("b").shared is house.models[0]
    assert len(house.models) == 1


def test_each_has_its_own_token_seq_and_window(house: House) -> None:
    house.move_in("a", token=5)
    house.move_in("b", token=1)
    a, b = house.host.core("a"), house.host.core("b")
    a.apply(5, house.task("a", 1, 1.0))
    b.apply(1, house.task("b", 1, 2.0, is_update=False))
    before = house.state("b")
    assert not house.trainer("b").is_window_empty
    a.apply(5, house.task("a", 2, 3.0))
    assert house.state("b") == before
    with pytest.raises(FencedError):
        a.apply(1, house.task("a", 3, 4.0))
    step = replace(house.task("b", 2, 0.0), command=optim_step())
    assert b.apply(1, step).state is OperationState.DONE


def test_what_fails_for_one_is_not_the_others(house: House) -> None:
    """A body that cannot be read, and a cancel, beside an open window."""
    house.move_in("a")
    house.move_in("b")
    a, b = house.host.core("a"), house.host.core("b")
    b.apply(1, house.task("b", 1, 2.0, is_update=False))
    before = house.state("b")
    bad = house.task("a", 1, 1.0)
    bad.paths.body(digest_of(1.0)).write_bytes(b"nothing")
    outcome = a.apply(1, bad)
    assert isinstance(outcome.result, FailedResult)
    b.cancel("a.2")
    assert a.apply(1, house.task("a", 2, 4.0)).state is OperationState.DONE
    a.cancel("a.3")
    house.trainer("a").faults.holds[5.0] = threading.Event()
    assert a.apply(1, house.task("a", 3, 5.0)).state is OperationState.CANCELLED
    assert house.state("b") == before
    assert b.apply(1, house.task("b", 2, 6.0, is_update=False)).state is OperationState.DONE


def test_one_in_doubt_takes_the_process_with_it(house: House) -> None:
    house.move_in("a")
    house.move_in("b")

    house.trainer("a").faults.kills_device[1.0] = 1
    with pytest.raises(WorkerLostError):
        house.host.core("a").apply(1, house.task("a", 1, 1.0))
    assert house.host.leave("a")
    assert not house.host.take("c", KEY, 3)


def test_one_that_could_not_be_loaded_does_not(house: House) -> None:
    house.move_in("a")
    assert house.host.take("b", KEY, 3)
    house.trainer("a").has_room = False
    with pytest.raises(RatoonError):
        house.host.core("b").load(1, "b", load_request())
    assert not house.host.leave("b")
    applied = house.host.core("a").apply(1, house.task("a", 1, 1.0))
    assert applied.state is OperationState.DONE


async def test_one_that_leaves_stops_what_it_runs_and_is_not_told_that_it_was_cancelled(
    house: House,
) -> None:
    """Its caller would have journaled a cancel that nobody asked for."""
    house.move_in("a").faults.holds[1.0] = threading.Event()
    house.move_in("b")
    core = house.host.core("a")
    with ThreadPoolExecutor(1) as compute:
        running = compute.submit(core.apply, 1, house.task("a", 1, 1.0))
        await until(lambda: core.progress().micro_batches_done)
        assert not house.host.leave("a")
        with pytest.raises(WorkerLostError):
            running.result(10)
    with pytest.raises(WorkerLostError):
        house.host.core("a")
    with pytest.raises(WorkerLostError):
        core.fence(1)


async def test_one_that_leaves_writes_nothing_more(tmp_path: Path) -> None:
    """Its folder may be deleted next, or another process write the same version."""
    may_write = threading.Event()

    def reach(point: CrashPoint) -> None:
        if point is CrashPoint.WORKER_BEFORE_PUBLISH:
            assert may_write.wait(10)

    house = House(tmp_path, reach)
    house.move_in("a")
    house.move_in("b")
    core = house.host.core("a")
    core.hold(1, 0)
    root = tmp_path / "weights"
    root.mkdir()
    with ThreadPoolExecutor(2) as threads:
        published = threads.submit(core.publish, 1, 0, str(root), 0.0)
        await until(core._held_lock.locked)
        left = threads.submit(house.host.leave, "a")
        assert not left.done()
        may_write.set()
        assert left.result(10) is False
        assert published.result(10).version == 0
    with pytest.raises(WorkerLostError):
        core.publish(1, 0, str(root), 0.0)
