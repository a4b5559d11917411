"""An engine of several policies in this process: what fails in one is felt by no other."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ratoon.cluster.ray_cluster import RayCluster
from ratoon.config import RatoonConfig
from ratoon.engine import lifecycle
from ratoon.engine.commands import Command, SeqKey, Submission
from ratoon.engine.engine import Engine
from ratoon.engine.first_states import check_fits
from ratoon.engine.journal.journal import Journal
from ratoon.engine.journal.records import JournalAwayError
from ratoon.engine.journal.store import SqlStore
from ratoon.engine.journal.tables import open_database
from ratoon.engine.policy import turns
from ratoon.engine.policy.turns import TurnLoop
from ratoon.engine.settings import EngineSettings
from ratoon.engine.types import Operation, PolicyResult, PolicySpec
from ratoon.engine.worker.tasks import Loaded, LoadRequest, WorkerLostError
from ratoon.errors import ErrorCode, RatoonError
from ratoon.model.spec import ModelDtype, PresetBase
from ratoon.train.spec import TrainerSpec
from ratoon_proto.types import (
    AdamWConfig,
    BackendInfo,
    CheckpointSource,
    LoraTuning,
    MuonConfig,
    OperationState,
    PolicyState,
    Recovery,
)
from tests.engine.fake_trainer import RESET, Faults, number_body
from tests.engine.harness import (
    PATIENCE_S,
    RATE,
    code_of,
    policy_spec,
    save,
    trainer_spec,
    update,
)
from tests.engine.local_ports import LocalWorker
from tests.engine.refusals import raises
from tests.until import until

NAMES = ("a", "b")


class LocalCluster(RayCluster):
    """Workers of this process, by policy; they outlive an engine."""

    def __init__(self) -> None:
        self.workers: dict[str, LocalWorker] = {}
        self.num_backends = 0

    async def check(self, spec: PolicySpec) -> None:
        """There is room."""

    def require_gpu(self) -> None:
        """There is none to require."""

    def trainer(self, spec: PolicySpec) -> TrainerSpec:
        return trainer_spec(spec)

    def worker(self, policy_id: str, num_workers: int, host_key: str = "") -> LocalWorker:
        assert host_key == "", "each is to be alone"
        return self.workers.setdefault(policy_id, LocalWorker(Faults()))

    async def end_worker(self, policy_id: str) -> None:
        if policy_id in self.workers:
            await self.workers[policy_id].release()

    async def close(self) -> None:
        """Nothing runs for no policy."""

    async def backends(self) -> tuple[BackendInfo, ...]:
        self.num_backends += 1
        await asyncio.sleep(0.01)
        return ()


class House:
    """Engines, one after the other, over the same journal, files and workers."""

    def __init__(self, root: Path) -> None:
        self.settings = EngineSettings.from_config(RatoonConfig(data_root=root))
        self.journal = Journal(open_database(self.settings.database_url))
        self.cluster = LocalCluster()
        self.engine = self.new()

    def new(self) -> Engine:
        return Engine(self.settings, self.journal, self.cluster)

    async def start(self) -> None:
        await self.engine.recover()
        for name in NAMES:
            created = await self.engine.create_policy(policy_spec(name))
            assert (await self.end(created)).state is OperationState.DONE

    async def crash(self) -> None:
        """The engine's process is killed, and the next one starts."""
        await self.leave()
        self.engine = self.new()

    async def leave(self) -> None:
        self.engine._lifecycle.stop()
        for kept in self.engine._controllers._kept.values():
            kept.abandon()
        await asyncio.sleep(0)

    async def update(self, policy_id: str, seq: int, number: float | None = None) -> Operation:
        number = seq if number is None else number
        body = number_body(number)
        return await self.engine.submit(
            Submission(policy_id=policy_id, key=SeqKey(seq=seq), command=update(number), body=body)
        )

    async def submit(self, policy_id: str, seq: int, command: Command) -> Operation:
        """An operation without a batch."""
        return await self.engine.submit(
            Submission(policy_id=policy_id, key=SeqKey(seq=seq), command=command, body=b"")
        )

    async def end(self, operation: Operation) -> Operation:
        while not operation.state.is_final:
            operation = await self.engine.get_operation(operation.operation_id, PATIENCE_S)
        return operation

    async def done(self, policy_id: str, seq: int) -> None:
        """An update, to its end; what may be asked again is."""
        while True:
            try:
                ended = await self.end(await self.update(policy_id, seq))
            except RatoonError as error:
                assert error.retryable, error
                await asyncio.sleep(0.01)
            else:
                assert ended.state is OperationState.DONE, ended
                return

    def weights(self, policy_id: str) -> list[tuple[list[float], float]]:
        return self.cluster.workers[policy_id].trainer.weights


@pytest.fixture
async def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[House]:
    monkeypatch.setattr(turns, "_BACKOFF_S", 0.001)
    house = House(tmp_path)
    await house.start()
    yield house
    for worker in house.cluster.workers.values():
        for hold in worker._faults.holds.values():
            hold.set()
    await house.leave()


def fail_turns(
    monkeypatch: pytest.MonkeyPatch,
    policy_id: str,
    error: BaseException,
    is_over: Callable[[], bool],
) -> None:
    """Turns of one policy raise `error` instead of being taken, until it is over."""
    take = TurnLoop._take_one

    async def take_or_fail(self: TurnLoop) -> bool:
        if self._run.policy_id == policy_id and not is_over():
            raise error
        return await take(self)

    monkeypatch.setattr(TurnLoop, "_take_one", take_or_fail)


@pytest.mark.parametrize("error", [ValueError("of its own"), asyncio.CancelledError()])
async def test_a_controller_that_fails_is_begun_anew_and_the_others_go_on(
    house: House, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """A cancelled future that it waited for ended the loop without a word."""
    failures = iter([False, False, True])
    fail_turns(monkeypatch, "a", error, lambda: next(failures, True))
    operation = await house.update("a", 1)
    await house.done("b", 1)
    assert (await house.end(operation)).state is OperationState.DONE
    assert house.weights("a") == house.weights("b") == [([1.0], RATE)]


async def test_a_controller_that_fails_for_good_is_the_failure_of_its_policy_alone(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail_turns(monkeypatch, "a", ValueError("of its own"), lambda: False)
    await house.update("a", 1)
    await until(lambda: house.cluster.workers["a"].is_released)
    with raises(ErrorCode.POLICY_FAILED):
        await house.update("a", 2)
    assert (await house.engine.policy("a")).state is PolicyState.FAILED
    await house.done("b", 1)
    assert (await house.engine.policy("b")).state is PolicyState.READY
    monkeypatch.undo()
    await house.crash()
    # What was accepted before has failed with the worker.
    await house.done("a", 2)


async def _saved(house: House) -> None:
    """Two updates of policy a, and a checkpoint after them."""
    for seq in (1, 2):
        await house.done("a", seq)
    await house.end(await house.submit("a", 3, save("sft")))


@pytest.mark.parametrize("recovery", Recovery)
@pytest.mark.parametrize("with_optimizer", [True, False])
async def test_a_policy_begins_with_another_ones_checkpoint(
    house: House, recovery: Recovery, with_optimizer: bool
) -> None:
    """The source may be trained on and deleted; the new one recovers from its own copy."""
    await _saved(house)
    begun = [([1.0], RATE), ([2.0], RATE), *([] if with_optimizer else [([], RESET)])]
    origin = CheckpointSource("a", "sft", with_optimizer=with_optimizer)
    spec = policy_spec("c", from_checkpoint=origin, recovery=recovery)
    created = await house.end(await house.engine.create_policy(spec))
    assert isinstance(created.result, PolicyResult)
    assert (created.result.policy.version, created.result.policy.spec) == (0, spec)
    assert (await house.end(await house.engine.create_policy(spec))).result == created.result
    assert house.weights("c") == begun
    await house.done("a", 4)
    await house.end(await house.engine.delete_policy("a"))
    await house.done("c", 1)
    await house.cluster.workers["c"].kill()
    await house.crash()
    await house.engine.recover()
    await house.done("c", 2)
    # What is not replayed is lost with the worker.
    kept = [([1.0], RATE)] if recovery is Recovery.REPLAY else []
    assert house.weights("c") == [*begun, *kept, ([2.0], RATE)]
    assert await house.engine.list_checkpoints("c") == ()


@pytest.mark.parametrize(
    ("field", "changes", "source"),
    [
        ("spec.preset", {"base": PresetBase(name="small")}, ("a", "sft")),
        ("spec.lora", {"tuning": LoraTuning(rank=2, alpha=4.0)}, ("a", "sft")),
        ("spec.dtype", {"dtype": ModelDtype.BFLOAT16}, ("a", "sft")),
        ("checkpoint_id", {}, ("a", "none")),
        ("policy_id", {}, ("none", "sft")),
    ],
)
async def test_a_source_that_does_not_fit_is_refused_by_field(
    house: House, field: str, changes: dict[str, object], source: tuple[str, str]
) -> None:
    await _saved(house)
    spec = policy_spec("c", from_checkpoint=CheckpointSource(*source))
    with pytest.raises(RatoonError) as caught:
        await house.engine.create_policy(replace(spec, model=replace(spec.model, **changes)))
    assert caught.value.field == field
    assert [policy.spec.policy_id for policy in await house.engine.policies()] == ["a", "b"]


async def test_a_source_without_a_momentum_is_refused(house: House) -> None:
    await _saved(house)
    muon = AdamWConfig(muon=MuonConfig())
    spec = policy_spec("c", from_checkpoint=CheckpointSource("a", "sft"), optimizer=muon)
    with raises(ErrorCode.INVALID_ARGUMENT, match=r"spec\.optimizer\.muon"):
        await house.engine.create_policy(spec)
    assert [policy.spec.policy_id for policy in await house.engine.policies()] == ["a", "b"]


def test_a_seed_matters_where_it_makes_frozen_weights() -> None:
    full = policy_spec().model
    check_fits(replace(full, seed=7), full)
    adapter = replace(full, tuning=LoraTuning(rank=2, alpha=4.0))
    with raises(ErrorCode.INVALID_ARGUMENT, match=r"spec\.seed"):
        check_fits(replace(adapter, seed=7), adapter)


async def test_a_damaged_source_fails_the_creation_and_leaves_nothing(house: House) -> None:
    await _saved(house)
    (folder,) = house.engine._settings.paths("a").checkpoints.glob("sft*")
    (folder / "state.json").write_text("damaged")
    spec = policy_spec("c", from_checkpoint=CheckpointSource("a", "sft"))
    created = await house.end(await house.engine.create_policy(spec))
    assert code_of(created) == ErrorCode.INVALID_ARGUMENT
    with raises(ErrorCode.POLICY_NOT_FOUND):
        await house.engine.policy("c")
    assert not house.engine._settings.paths("c").root.exists()


async def test_a_creation_that_is_killed_takes_its_first_state_again(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that the journal does not have is replaced; it would be ahead of the journal."""
    await _saved(house)
    insert = SqlStore.insert_first_state

    def die(*_: object) -> None:
        raise JournalAwayError("killed")

    monkeypatch.setattr(SqlStore, "insert_first_state", die)
    spec = policy_spec("c", from_checkpoint=CheckpointSource("a", "sft", with_optimizer=True))
    created = await house.engine.create_policy(spec)
    checkpoints = house.engine._settings.paths("c").checkpoints
    await until(lambda: checkpoints.exists() and any(checkpoints.iterdir()))
    await house.leave()
    monkeypatch.setattr(SqlStore, "insert_first_state", insert)
    house.engine = house.new()
    await house.engine.recover()
    assert (await house.end(created)).state is OperationState.DONE
    assert house.weights("c") == house.weights("a")


async def test_a_worker_that_hangs_holds_its_policy_alone(house: House) -> None:
    faults = house.cluster.workers["a"]._faults
    hold = faults.holds[1.0] = threading.Event()
    running = await house.update("a", 1)
    await house.done("b", 1)
    assert not (await house.engine.get_operation(running.operation_id, 0.0)).state.is_final
    hold.set()
    assert (await house.end(running)).state is OperationState.DONE


async def test_an_engine_that_was_killed_leaves_nothing_to_run_again(house: House) -> None:
    """The worker ends the operation meanwhile; the next engine reads its outcome."""
    faults = house.cluster.workers["a"]._faults
    hold = faults.holds[1.0] = threading.Event()
    running, queued = await house.update("a", 1), await house.update("a", 2)
    await until(lambda: house.cluster.workers["a"].core.progress().micro_batches_done)
    await house.crash()
    hold.set()
    # Before it has read its journal.
    again = await house.update("a", 2)
    assert again.operation_id == queued.operation_id
    for operation in (running, queued):
        assert (await house.end(operation)).state is OperationState.DONE
    assert house.weights("a") == [([1.0], RATE), ([2.0], RATE)]
    assert len(house.cluster.workers["a"].trainers) == 1
    await house.done("b", 1)


async def test_a_wait_outlasts_the_start_of_a_controller(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended after half a second, with an operation that nobody had taken up yet."""
    hold = house.cluster.workers["a"]._faults.holds[1.0] = threading.Event()
    running = await house.update("a", 1)
    await house.crash()
    monkeypatch.setattr(lifecycle, "_AWAY_S", 0.01)
    begun = asyncio.Event()
    acquire = house.journal.acquire

    async def acquire_later(policy_id: str, above: int) -> int:
        await begun.wait()
        return await acquire(policy_id, above)

    monkeypatch.setattr(house.journal, "acquire", acquire_later)
    await house.engine.recover()
    waiting = asyncio.create_task(house.engine.get_operation(running.operation_id, PATIENCE_S))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    begun.set()
    hold.set()
    assert (await waiting).state is OperationState.DONE


async def test_calls_of_an_engine_that_cannot_read_its_journal_are_refused_in_time(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    await house.crash()
    monkeypatch.setattr("ratoon.engine.engine._RECOVER_S", 0.05)
    never = asyncio.Event()

    async def hang() -> object:
        await never.wait()
        return {}

    monkeypatch.setattr(house.journal, "count_operations", hang)
    with pytest.raises(JournalAwayError, match="still reads"):
        await house.update("a", 1)
    monkeypatch.undo()
    never.set()
    await house.done("a", 1)


async def test_counters_and_gauges_of_a_new_engine_are_the_journals(house: House) -> None:
    """Gauges of a policy were gone until its next batch, and its kernel backend for good."""

    def shown() -> set[bytes]:
        gauges = b"ratoon_report_seq{", b"ratoon_loss{", b"ratoon_last_step", b"ratoon_policy_info{"
        names = (*gauges, b"ratoon_backend_info{", b"ratoon_open_operations{")
        lines = house.engine._metrics.render().splitlines()
        counts = {line for line in lines if line.startswith(b"ratoon_operations_total{")}
        done = {line for line in counts if b'kind="update"' in line and b'state="done"' in line}
        return done | {line for line in lines if line.startswith(names)}

    for name in NAMES:
        await house.done(name, 1)
    # Each policy has 8 series, 2 of them of open operations.
    at_rest = 2 * len(NAMES)
    await until(lambda: sum(line.endswith(b" 0.0") for line in shown()) == at_rest)
    before = shown()
    assert len(before) == 8 * len(NAMES)
    await house.crash()
    await house.engine.recover()
    await until(lambda: shown() == before)
    assert b"ratoon_build_info{" in await house.engine.metrics_text()


async def test_a_policy_that_is_deleted_while_it_starts_is_deleted(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waits for its start is told to ask again, and hears that it is gone."""
    await house.crash()
    entered, never = asyncio.Event(), asyncio.Event()

    async def hang(_token: int, **_options: object) -> object:
        entered.set()
        return await never.wait()

    monkeypatch.setattr(house.cluster.workers["a"], "fence", hang)
    await house.engine.recover()
    waiting = asyncio.create_task(house.update("a", 1))
    await entered.wait()
    deletion = await house.engine.delete_policy("a")
    with pytest.raises(RatoonError) as caught:
        await waiting
    assert caught.value.retryable
    assert (await house.end(deletion)).state is OperationState.DONE
    with raises(ErrorCode.POLICY_NOT_FOUND):
        await house.update("a", 1)
    await house.done("b", 1)


async def test_who_waits_for_a_policy_that_loses_a_worker_as_it_comes_back_is_answered(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was FAILED, and started again by the next call that changes it; a poll was none."""
    monkeypatch.setattr(lifecycle, "_BACKOFF_S", 0.0)
    worker = house.cluster.workers["a"]
    hold = worker._faults.holds[1.0] = threading.Event()
    operation = await house.update("a", 1)
    await house.crash()
    worker.is_dead = True
    hold.set()
    load, losses = LocalWorker.load, [WorkerLostError("the OOM killer took it")]

    async def lost_once(
        self: LocalWorker, token: int, policy_id: str, request: LoadRequest
    ) -> Loaded:
        if losses:
            raise losses.pop()
        return await load(self, token, policy_id, request)

    monkeypatch.setattr(LocalWorker, "load", lost_once)
    await house.engine.recover()
    assert (await house.end(operation)).state is OperationState.FAILED  # `recovery: fail`
    assert losses == []
    assert (await house.engine.policy("a")).state is PolicyState.READY


async def test_a_policy_that_loses_each_worker_as_it_comes_back_is_failed(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "_BACKOFF_S", 0.0)
    worker = house.cluster.workers["a"]

    async def lost(*_: object) -> Loaded:
        raise WorkerLostError("the OOM killer took it")

    await house.crash()
    worker.is_dead = True
    with monkeypatch.context() as patched:
        patched.setattr(worker, "load", lost)
        await house.engine.recover()
        await until(lambda: worker.is_released)
    policy = await house.engine.policy("a")
    assert policy.state is PolicyState.FAILED
    assert policy.failure.endswith("its worker was lost: the OOM killer took it")
    await house.done("a", 1)  # Which starts it again.


async def test_callers_that_ask_for_backends_at_once_share_one_process(house: House) -> None:
    """Two hundred clients that connected at once started two hundred processes that load torch."""
    await asyncio.gather(*(house.engine.backends() for _ in range(20)))
    assert house.cluster.num_backends == 1


async def test_a_worker_that_imports_torch_holds_no_caller_up(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that asked for the limits waited for its import, for 40 s after a restart."""
    found = (BackendInfo(op="o", name="n", available=True, unavailable_reason=""),)
    imported = asyncio.Event()

    async def late() -> tuple[BackendInfo, ...]:
        await imported.wait()
        return found

    monkeypatch.setattr("ratoon.engine.engine._BACKENDS_S", 0.01)
    monkeypatch.setattr(house.cluster, "backends", late)
    async with asyncio.timeout(5.0):
        assert await house.engine.backends() == ()
    imported.set()
    assert await house.engine.backends() == found


async def test_thousands_wait_for_one_operation(house: House) -> None:
    faults = house.cluster.workers["a"]._faults
    hold = faults.holds[1.0] = threading.Event()
    running = await house.update("a", 1)
    waits = [
        asyncio.create_task(house.engine.get_operation(running.operation_id, PATIENCE_S))
        for _ in range(3000)
    ]
    await house.done("b", 1)
    hold.set()
    assert {operation.state for operation in await asyncio.gather(*waits)} == {OperationState.DONE}
