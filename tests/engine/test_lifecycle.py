"""Lives of policies with processes that are only names: create, retry, delete, bounds, restarts."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Collection
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from sqlalchemy.exc import OperationalError

from ratoon.config import LimitsConfig
from ratoon.engine import lifecycle
from ratoon.engine.controllers import Controllers
from ratoon.engine.files.archive import Archive
from ratoon.engine.files.paths import make_policy_folders, policy_paths
from ratoon.engine.journal import journal as store_calls
from ratoon.engine.journal.fenced import FencedStore
from ratoon.engine.journal.journal import Journal
from ratoon.engine.journal.records import JournalAwayError, PolicyRow
from ratoon.engine.journal.tables import open_database
from ratoon.engine.lifecycle import Lifecycle
from ratoon.engine.refusals import not_up
from ratoon.engine.types import Operation, PolicyResult, PolicySpec
from ratoon.engine.worker.tasks import FencedError
from ratoon.errors import ErrorCode, RatoonError, exhausted
from ratoon.model.spec import FolderBase
from ratoon.stream.files import digest_bytes
from ratoon_proto.types import (
    EmptyResult,
    OperationKind,
    OperationState,
    ParallelLayout,
    PolicyState,
    WeightFile,
)
from tests.engine.fake_trainer import INFO
from tests.engine.harness import ListSink, life_record, policy_spec
from tests.engine.refusals import raises
from tests.until import until


class FakeFleet(Controllers):
    """Processes by policy id; `hold` keeps starts waiting, `faults` makes one each fail.

    While it `is_stuck` nothing ends.
    """

    def __init__(self, fenced: FencedStore) -> None:
        self.fenced = fenced
        self.running: set[str] = set()
        self.hold: asyncio.Event | None = None
        self.faults: list[Exception] = []
        self.has_gpu = self.makes_controllers = True
        self.drained: list[tuple[str, float]] = []
        self.is_stuck = False
        # Policies whose drain fails.
        self.undrained: set[str] = set()

    async def check(self, spec: PolicySpec) -> None:
        if spec.parallel.num_workers != 1:
            raise RatoonError(ErrorCode.UNSUPPORTED, "one worker")

    async def start(self, spec: PolicySpec) -> None:
        if self.hold is not None:
            await self.hold.wait()
        if self.faults:
            raise self.faults.pop(0)
        token = self.fenced.acquire(spec.policy_id)
        self.fenced.set_policy(token, spec.policy_id, PolicyState.READY, INFO)
        self.running.add(spec.policy_id)

    async def stop(self, policy_id: str) -> None:
        if self.is_stuck:
            raise RatoonError(ErrorCode.UNAVAILABLE, "the processes do not end")
        self.running.discard(policy_id)

    def require_gpu(self) -> None:
        if not self.has_gpu:
            raise no_gpu()

    async def fail(self, policy_id: str, failure: str) -> bool:
        if self.makes_controllers:
            self.fenced.fail(self.fenced.acquire(policy_id), policy_id, failure)
        return self.makes_controllers

    async def drain(self, policy_id: str, grace_s: float) -> None:
        if policy_id in self.undrained:
            raise RuntimeError("its checkpointer is broken")
        self.drained.append((policy_id, grace_s))


class Town:
    def __init__(self, root: Path, max_policies: int = 2) -> None:
        self.root = root
        self.journal = Journal(open_database("sqlite://"))
        self.store = self.journal.store
        self.fleet = FakeFleet(self.journal.fenced)
        self.limits = LimitsConfig(max_policies=max_policies)
        self.archive = Archive()
        self.lifecycle = self.new()

    def new(self) -> Lifecycle:
        return Lifecycle(
            journal=self.journal,
            controllers=self.fleet,
            metrics=ListSink(),
            limits=self.limits,
            data_root=self.root,
            paths_of=partial(policy_paths, self.root),
            archive_of=lambda _: self.archive,
            now=time.time,
        )

    async def end(self, operation: Operation) -> Operation:
        ended = await self.lifecycle.get_operation(operation.operation_id, 5.0)
        assert ended.state.is_final
        return ended


@pytest.fixture
def town(tmp_path: Path) -> Town:
    return Town(tmp_path)


async def test_a_created_policy_is_ready_and_its_operation_says_so(town: Town) -> None:
    created = await town.lifecycle.create_policy(policy_spec("a"))
    assert created.state is OperationState.QUEUED
    assert created.operation_id.startswith("a.")
    ended = await town.end(created)
    assert isinstance(ended.result, PolicyResult)
    policy = ended.result.policy
    assert (policy.state, policy.info, policy.next_seq) == (PolicyState.READY, INFO, 1)
    assert town.fleet.running == {"a"}


async def test_the_same_spec_again_is_the_same_operation(town: Town) -> None:
    first = await town.lifecycle.create_policy(policy_spec("a"))
    again = await town.lifecycle.create_policy(policy_spec("a"))
    assert again.operation_id == first.operation_id
    await town.end(first)
    done = await town.lifecycle.create_policy(policy_spec("a"))
    assert (done.operation_id, done.state) == (first.operation_id, OperationState.DONE)
    with raises(ErrorCode.POLICY_EXISTS) as caught:
        await town.lifecycle.create_policy(policy_spec("a", keep_versions=5))
    assert caught.value.message == (
        "policy a exists already, with another spec; it is ready, at version 0. Take another id, or"
        " the spec that it was created with"
    )


async def test_a_policy_that_cannot_be_loaded_is_gone_and_may_be_tried_again(town: Town) -> None:
    town.fleet.faults.append(RatoonError(ErrorCode.UNSUPPORTED, "sliding window"))
    failed = await town.end(await town.lifecycle.create_policy(policy_spec("a")))
    assert failed.state is OperationState.FAILED
    with raises(ErrorCode.POLICY_NOT_FOUND):
        await town.lifecycle.policy("a")
    again = await town.end(await town.lifecycle.create_policy(policy_spec("a")))
    assert again.state is OperationState.DONE
    assert again.operation_id != failed.operation_id


async def test_more_policies_than_there_is_room_for_are_refused(town: Town) -> None:
    for name in ("a", "b"):
        await town.lifecycle.create_policy(policy_spec(name))
    with raises(ErrorCode.RESOURCE_EXHAUSTED) as caught:
        await town.lifecycle.create_policy(policy_spec("c"))
    assert caught.value.details == {"resource": "policies", "wanted": "1", "free": "0"}


async def test_what_the_fleet_refuses_leaves_no_policy(town: Town) -> None:
    with raises(ErrorCode.UNSUPPORTED):
        await town.lifecycle.create_policy(policy_spec("a", parallel=ParallelLayout(num_workers=2)))
    assert town.store.policies() == ()


async def test_a_deleted_policy_leaves_nothing_but_the_operation(town: Town) -> None:
    await town.end(await town.lifecycle.create_policy(policy_spec("a")))
    make_policy_folders(policy_paths(town.root, "a"))
    deletion = await town.lifecycle.delete_policy("a")
    ended = await town.end(deletion)
    assert isinstance(ended.result, EmptyResult)
    assert (town.fleet.running, town.store.policies()) == (set(), ())
    assert list((town.root / "policies").iterdir()) == []
    with raises(ErrorCode.POLICY_NOT_FOUND):
        await town.lifecycle.delete_policy("a")
    again = await town.end(await town.lifecycle.create_policy(policy_spec("a")))
    assert again.state is OperationState.DONE


async def test_a_policy_that_is_being_created_is_not_deleted(town: Town) -> None:
    town.fleet.hold = asyncio.Event()
    created = await town.lifecycle.create_policy(policy_spec("a"))
    with raises(ErrorCode.POLICY_NOT_READY):
        await town.lifecycle.delete_policy("a")
    seen = await town.lifecycle.watch_operation(created, 1.0)
    assert seen.state is OperationState.RUNNING
    town.fleet.hold.set()
    assert (await town.end(created)).state is OperationState.DONE


async def test_a_new_engine_finishes_what_the_old_one_acknowledged(town: Town) -> None:
    await town.end(await town.lifecycle.create_policy(policy_spec("a")))
    town.fleet.hold = asyncio.Event()
    created = await town.lifecycle.create_policy(policy_spec("b"))
    await asyncio.sleep(0)
    town.fleet.running.clear()
    town.fleet.hold = None
    town.lifecycle = town.new()
    await town.lifecycle.recover()
    ended = await town.end(created)
    assert ended.state is OperationState.DONE
    await until(lambda: town.fleet.running == {"a", "b"})


async def test_a_model_that_is_sent_is_the_policys_own_and_goes_with_it(town: Town) -> None:
    data = b"{}"
    file = WeightFile(name="config.json", size_bytes=2, digest=digest_bytes(data))
    base = FolderBase(folder="", files=(file,))
    spec = policy_spec("a")
    spec = replace(spec, model=replace(spec.model, base=base))
    with raises(ErrorCode.UPLOAD_NOT_FOUND) as caught:
        await town.lifecycle.create_policy(spec)
    assert caught.value.field == "spec.sent_model.files[0]"
    assert town.store.policies() == ()
    assert await town.lifecycle.put_model_file("a", file, 0, data) == 2
    town.fleet.hold = asyncio.Event()
    created = await town.lifecycle.create_policy(spec)
    folder = policy_paths(town.root, "a").model
    await until(folder.is_dir)
    # An engine that ends now is followed by one that has nothing to take.
    town.lifecycle.stop()
    town.fleet.hold = None
    town.lifecycle = town.new()
    await town.lifecycle.recover()
    assert (await town.end(created)).state is OperationState.DONE
    placed = (await town.lifecycle.policy("a")).spec.model.base
    assert placed == replace(base, folder=str(folder))
    assert (folder / "config.json").read_bytes() == data
    # A retry finds the operation, though what it sent is no longer where it came.
    assert (await town.lifecycle.create_policy(spec)).operation_id == created.operation_id
    await town.end(await town.lifecycle.delete_policy("a"))
    assert not folder.exists()
    with raises(ErrorCode.UPLOAD_NOT_FOUND):
        await town.lifecycle.create_policy(spec)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is tried again is tried at once."""
    monkeypatch.setattr(lifecycle, "_BACKOFF_S", 0.0)
    monkeypatch.setattr(lifecycle, "_WAITING_S", 0.0)


def no_gpu() -> RatoonError:
    return RatoonError(ErrorCode.RESOURCE_EXHAUSTED, "no GPU", details={"resource": "GPU"})


def worker_lost() -> RatoonError:
    return not_up("a", "its worker was lost: the OOM killer took it")


def store_away() -> RatoonError:
    return RatoonError(ErrorCode.UNAVAILABLE, "the object store: away")


async def come_back(town: Town, *faults: Exception) -> None:
    """The next engine, of which as many starts fail, until it is through with a policy."""
    await town.end(await town.lifecycle.create_policy(policy_spec("a")))
    town.fleet.faults += faults
    town.fleet.running.clear()
    town.lifecycle = town.new()
    await town.lifecycle.recover()
    await until(lambda: not town.lifecycle._tasks)
    assert town.fleet.faults == []


@pytest.mark.usefixtures("at_once")
async def test_what_passes_keeps_no_policy_from_coming_back(town: Town) -> None:
    """One lost worker, or a GPU node that was not up yet, failed it until somebody called."""
    passing = [worker_lost(), ConnectionError("reset"), *(worker_lost() for _ in range(2))]
    waited = [error() for error in (no_gpu, store_away) for _ in range(9)]
    await come_back(town, *passing[:2], *waited, *passing[2:])
    assert town.fleet.running == {"a"}
    assert (await town.lifecycle.policy("a")).state is PolicyState.READY


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("makes_controllers", [True, False])
async def test_a_policy_that_does_not_come_back_is_failed_and_says_why(
    town: Town, *, makes_controllers: bool
) -> None:
    town.fleet.makes_controllers = makes_controllers
    await come_back(town, *(worker_lost() for _ in range(5)))
    row = await town.lifecycle.policy("a")
    assert (row.state, town.fleet.running) == (PolicyState.FAILED, set())
    assert row.failure.startswith("its controller failed 5 times in a row")
    assert row.failure.endswith("the OOM killer took it")
    await come_back(town, RatoonError(ErrorCode.UNSUPPORTED, "sliding window"))
    assert (await town.lifecycle.policy("a")).failure == "sliding window"


@pytest.mark.usefixtures("at_once")
async def test_an_engine_that_was_overtaken_fails_no_policy_of_the_other(town: Town) -> None:
    await come_back(town, FencedError("token 1 of a is not the newest"))
    row = await town.lifecycle.policy("a")
    assert (row.state, row.failure, town.fleet.running) == (PolicyState.READY, "", set())


@pytest.mark.usefixtures("at_once")
async def test_a_policy_of_a_gpu_does_not_come_back_on_a_cpu(town: Town) -> None:
    """A cluster whose GPU nodes were not up yet looked like one of CPUs."""
    await town.end(await town.lifecycle.create_policy(policy_spec("a")))
    await town.end(await town.lifecycle.create_policy(policy_spec("b")))
    info, fenced = replace(INFO, uses_gpu=True), town.fleet.fenced
    fenced.set_policy(fenced.acquire("a"), "a", PolicyState.READY, info)
    town.fleet.running.clear()
    town.fleet.has_gpu = False
    town.lifecycle = town.new()
    await town.lifecycle.recover()
    await until(lambda: len(town.lifecycle._tasks) == 1)
    assert town.fleet.running == {"b"}
    town.fleet.has_gpu = True
    await until(lambda: town.fleet.running == {"a", "b"})


@pytest.mark.usefixtures("at_once")
async def test_a_failed_create_ends_once_it_is_cleaned_up(town: Town) -> None:
    """A store that was away as it cleaned up left it running, and the policy in nobody's hands."""
    faults = [store_away() for _ in range(3)]

    class AwayAtFirst(Archive):
        async def forget(self, kept: Collection[str] = ()) -> None:
            if faults:
                raise faults.pop()

    town.archive = AwayAtFirst()
    town.lifecycle = town.new()
    town.fleet.faults.append(store_away())
    failed = await town.end(await town.lifecycle.create_policy(policy_spec("a")))
    assert (failed.state, faults) == (OperationState.FAILED, [])
    assert town.store.policies() == ()
    again = await town.end(await town.lifecycle.create_policy(policy_spec("a")))
    assert again.state is OperationState.DONE


async def stuck_delete(town: Town) -> None:
    await town.end(await town.lifecycle.create_policy(policy_spec("a")))
    town.fleet.is_stuck = True
    failed = await town.end(await town.lifecycle.delete_policy("a"))
    assert failed.state is OperationState.FAILED
    assert (await town.lifecycle.policy("a")).state is PolicyState.DELETING
    with pytest.raises(RatoonError, match="policy a is being deleted; its id is free once"):
        await town.lifecycle.create_policy(policy_spec("a"))
    town.fleet.is_stuck = False


async def test_a_delete_that_failed_may_be_asked_for_again(town: Town) -> None:
    await stuck_delete(town)
    again = await town.end(await town.lifecycle.delete_policy("a"))
    assert again.state is OperationState.DONE
    assert (town.fleet.running, town.store.policies()) == (set(), ())


async def test_a_delete_that_failed_is_tried_again_at_start(town: Town) -> None:
    """A policy being deleted whose DeletePolicy had ended kept the engine from starting."""
    await stuck_delete(town)
    town.lifecycle = town.new()
    await town.lifecycle.recover()
    await until(lambda: not town.store.policies())
    assert (town.fleet.running, town.store.policies()) == (set(), ())


async def test_a_delete_whose_end_was_not_journaled_ends_at_start(town: Town) -> None:
    await town.end(await town.lifecycle.create_policy(policy_spec("a")))
    record = life_record("a", "a.delete", OperationKind.DELETE_POLICY)
    town.store.mark_deleting("a", record)
    town.store.remove_policy("a", keep_operation_id="a.delete")
    town.lifecycle = town.new()
    await town.lifecycle.recover()
    ended = await town.lifecycle.get_operation("a.delete", 5.0)
    assert ended.state is OperationState.DONE


async def test_a_database_that_is_away_is_waited_for(
    town: Town, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_calls, "_AWAY_S", 0.01)
    policies, num_calls = town.store.policies, 0

    def away() -> tuple[PolicyRow, ...]:
        nonlocal num_calls
        num_calls += 1
        if num_calls < 3:
            raise OperationalError("SELECT", {}, Exception("the server closed the connection"))
        return policies()

    await town.end(await town.lifecycle.create_policy(policy_spec("a")))
    monkeypatch.setattr(town.store, "policies", away)
    with pytest.raises(JournalAwayError):
        await town.lifecycle.create_policy(policy_spec("b"))
    town.fleet.running.clear()
    town.lifecycle = town.new()
    await town.lifecycle.recover()
    await until(lambda: town.fleet.running == {"a"})


async def test_an_unknown_operation_is_not_found(town: Town) -> None:
    with raises(ErrorCode.OPERATION_NOT_FOUND):
        await town.lifecycle.get_operation("a.0", 0.0)


async def test_an_engine_that_drains_takes_no_policy(town: Town) -> None:
    await town.end(await town.lifecycle.create_policy(policy_spec("a")))
    town.lifecycle.check_taking()
    await town.lifecycle.drain(2.5)
    assert town.fleet.drained == [("a", 2.5)]
    for call in (
        town.lifecycle.create_policy(policy_spec("b")),
        town.lifecycle.delete_policy("a"),
    ):
        with pytest.raises(RatoonError, match="draining"):
            await call
    with pytest.raises(RatoonError):
        town.lifecycle.check_taking()
    assert (await town.lifecycle.policy("a")).state is PolicyState.READY


async def test_who_waits_for_a_policy_is_let_go_at_the_end_of_a_drain(town: Town) -> None:
    town.fleet.hold = asyncio.Event()
    created = await town.lifecycle.create_policy(policy_spec("a"))
    await asyncio.sleep(0.01)
    seen = await town.lifecycle.get_operation(created.operation_id, 0.0)
    waits = [
        asyncio.create_task(town.lifecycle.get_operation(created.operation_id, 30.0)),
        asyncio.create_task(_watched_to_the_end(town.lifecycle, seen)),
    ]
    await asyncio.sleep(0.01)
    await town.lifecycle.drain(0.1)
    for wait in waits:
        with pytest.raises(RatoonError, match="draining"):
            await wait
    # What is there is read; and the controller of an operation may be away already.
    assert await town.lifecycle.get_operation(created.operation_id, 0.0) == seen
    town.store.insert_policy(policy_spec("b"), life_record("b", "b.create"))
    with pytest.raises(RatoonError, match="draining"):
        await town.lifecycle.get_operation("b.create", 30.0)


async def test_a_policy_that_does_not_drain_keeps_nobody_waiting(town: Town) -> None:
    """The drain ended with its error: others were let go by nobody, and waited on."""
    for name in ("a", "b"):
        await town.end(await town.lifecycle.create_policy(policy_spec(name)))
    town.fleet.hold = asyncio.Event()
    await town.end(await town.lifecycle.delete_policy("b"))
    created = await town.lifecycle.create_policy(policy_spec("c"))
    waiting = asyncio.create_task(town.lifecycle.get_operation(created.operation_id, 30.0))
    await asyncio.sleep(0.01)
    town.fleet.undrained = {"a"}
    await town.lifecycle.drain(0.1)
    assert town.fleet.drained == [("c", 0.1)]
    with pytest.raises(RatoonError, match="draining"):
        await waiting


async def _watched_to_the_end(lifecycle: Lifecycle, seen: Operation) -> None:
    while not seen.state.is_final:
        seen = await lifecycle.watch_operation(seen, 30.0)


async def test_a_drain_needs_no_database(town: Town, monkeypatch: pytest.MonkeyPatch) -> None:
    """It took minutes, and ended with the database's error before anything was stopped."""

    def away() -> tuple[PolicyRow, ...]:
        raise OperationalError("SELECT", {}, Exception("the server closed the connection"))

    await town.end(await town.lifecycle.create_policy(policy_spec("a")))
    await town.end(await town.lifecycle.create_policy(policy_spec("b")))
    await town.end(await town.lifecycle.delete_policy("b"))
    town.lifecycle = town.new()
    await town.lifecycle.recover()
    monkeypatch.setattr(town.store, "policies", away)
    await town.lifecycle.drain(2.5)
    assert town.fleet.drained == [("a", 2.5)]
    assert town.lifecycle.policy_ids == {"a"}


async def test_a_policy_comes_back_once_a_full_disk_has_room(
    town: Town, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was left alone until somebody submitted to it, and who had waited waited on."""
    monkeypatch.setattr(store_calls, "_DISK_FULL_S", 0.01)
    await town.end(await town.lifecycle.create_policy(policy_spec("a")))
    town.fleet.running.clear()
    acquire, refused = town.fleet.fenced.acquire, 0

    def acquire_with_room(policy_id: str) -> int:
        nonlocal refused
        if refused < 3:
            refused += 1
            raise exhausted("full", resource="disk", wanted=1, free=0, limit=0, retry_after_s=1)
        return acquire(policy_id)

    monkeypatch.setattr(town.fleet.fenced, "acquire", acquire_with_room)
    town.lifecycle = town.new()
    await town.lifecycle.recover()
    await until(lambda: (refused, town.fleet.running) == (3, {"a"}))
    assert (await town.lifecycle.policy("a")).state is PolicyState.READY


async def test_no_policy_is_begun_on_a_disk_that_is_nearly_full(
    town: Town, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(town.root)._replace(free=town.limits.min_free_disk_bytes - 1)
    with monkeypatch.context() as full:
        full.setattr(shutil, "disk_usage", lambda _: usage)
        with pytest.raises(RatoonError) as caught:
            await town.lifecycle.create_policy(policy_spec("a"))
    assert caught.value.details["resource"] == "disk"
    await town.end(await town.lifecycle.create_policy(policy_spec("a")))
