"""The controller's ports in this process: the real store, the real worker's core, and their deaths.

Enter calls of a controller, leave what a coordinator and a worker on other machines would answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from ratoon.engine.checkpoints import Checkpoint, Covered
from ratoon.engine.crash_points import CrashPoint, Reach, never
from ratoon.engine.fenced import FencedStore
from ratoon.engine.journal import (
    JournalAwayError,
    OperationEnd,
    OperationRecord,
    PolicyHistory,
    RollBack,
)
from ratoon.engine.numerics import Numerics
from ratoon.engine.store import SqlStore
from ratoon.engine.tables import open_database
from ratoon.engine.tasks import (
    BatchCommand,
    ForwardBackwardTask,
    ForwardTask,
    Loaded,
    LoadRequest,
    OldLogprobsSource,
    Outcome,
    WorkerLostError,
    WorkerStatus,
    WorkerTask,
)
from ratoon.engine.types import OperationKey, OperationResult, PolicyState, Progress
from ratoon.engine.worker import WorkerCore
from ratoon.model.spec import ModelInfo
from ratoon.stream.manifest import WeightManifest
from ratoon.train.spec import TrainerSpec
from tests.engine.fake_trainer import FakeTrainer, Faults, export_fake

T = TypeVar("T")
POLICY = "p"


class Crash(BaseException):
    """A process of the machine was killed: nothing of it goes on."""


class Crashes:
    """Kills at points: `armed` says how many times each is still to be reached; any thread."""

    def __init__(self) -> None:
        self.armed: dict[CrashPoint, int] = {}
        self.hits: list[CrashPoint] = []
        self._lock = threading.Lock()

    def reach(self, point: CrashPoint) -> None:
        with self._lock:
            if point not in self.armed:
                return
            self.armed[point] -= 1
            if self.armed[point] > 0:
                return
            del self.armed[point]
            self.hits.append(point)
        raise Crash(point)


class LocalJournal:
    """`Journal` over the real store. `lost` writes happen and are not answered, once each.

    A coordinator that is killed comes back, and the call is repeated, as Ray does it. While it
    `is_away` the database does not answer.
    """

    def __init__(self, url: str, reach: Reach) -> None:
        engine = open_database(url)
        self.store, self.fenced = SqlStore(engine), FencedStore(engine)
        self.lost: set[str] = set()
        self.is_away = False
        self._reach = reach

    def _write(self, name: str, call: Callable[[], T]) -> T:
        if self.is_away:
            raise JournalAwayError("away")
        with contextlib.suppress(Crash):
            self._reach(CrashPoint(f"coordinator-before-{name}"))
        result = call()
        try:
            self._reach(CrashPoint(f"coordinator-after-{name}"))
        except Crash:
            result = call()
        return result

    async def records_from(self, policy_id: str, seq: int) -> tuple[OperationRecord, ...]:
        return self.store.records_from(policy_id, seq)

    async def bodies_in_use(self, policy_id: str) -> Mapping[str, str]:
        return self.store.bodies_in_use(policy_id)

    async def results_in_use(self, policy_id: str) -> frozenset[str]:
        return self.store.results_in_use(policy_id)

    async def numerics(self, digest: str) -> Mapping[str, str]:
        return self.store.numerics(digest)

    async def cover(
        self, token: int, policy_id: str, automatic: Checkpoint | None, keep: int
    ) -> Covered:
        cover = partial(self.fenced.cover, token, policy_id, automatic, keep)
        covered = self._write("cover", cover)
        if automatic is not None:
            self._answer("cover")
        return covered

    async def rebase(
        self, token: int, policy_id: str, digests: Mapping[int, str], numerics: Numerics
    ) -> None:
        self.fenced.rebase(token, policy_id, digests, numerics)

    async def fail(self, token: int, policy_id: str, failure: str) -> None:
        self.fenced.fail(token, policy_id, failure)

    async def acquire(self, policy_id: str) -> int:
        return self.fenced.acquire(policy_id)

    async def history(self, policy_id: str) -> PolicyHistory:
        return self.store.history(policy_id)

    async def find_key(self, policy_id: str, key: OperationKey) -> OperationRecord | None:
        return self.store.find_key(policy_id, key)

    async def find_operation(self, operation_id: str) -> OperationRecord | None:
        return self.store.find_operation(operation_id)

    async def accept(self, token: int, record: OperationRecord, next_seq: int) -> None:
        self._write("accept", lambda: self.fenced.accept(token, record, next_seq))
        self._answer("accept")

    async def begin(
        self,
        token: int,
        operation_id: str,
        started_at: float,
        plan: dict[str, object] | None,
        numerics: Numerics,
    ) -> None:
        begin = partial(self.fenced.begin, token, operation_id, started_at, plan, numerics)
        self._write("begin", begin)
        self._answer("begin")

    async def end(self, token: int, policy_id: str, end: OperationEnd) -> None:
        if "before end" in self.lost:
            self._answer("before end")
        self._write("end", lambda: self.fenced.end(token, policy_id, end))
        self._answer("end")

    async def amend(self, token: int, operation_id: str, result: OperationResult) -> None:
        self.fenced.amend(token, operation_id, result)
        self._answer("amend")

    async def set_published(self, token: int, policy_id: str, published: tuple[int, ...]) -> None:
        self.fenced.set_published(token, policy_id, published)

    async def set_policy(
        self, token: int, policy_id: str, state: PolicyState, info: ModelInfo | None
    ) -> None:
        self.fenced.set_policy(token, policy_id, state, info)

    async def roll_back(
        self, token: int, policy_id: str, roll_back: RollBack
    ) -> tuple[OperationRecord, ...]:
        return self.fenced.roll_back(token, policy_id, roll_back)

    async def checkpoints(self, policy_id: str) -> tuple[Checkpoint, ...]:
        return self.store.checkpoints(policy_id)

    def _answer(self, name: str) -> None:
        if name in self.lost:
            self.lost.remove(name)
            raise ConnectionError(f"the answer to {name} was lost")


class LocalWorker:
    """`WorkerPort` over the real core on one thread, and what a kill does to it.

    `loses_restore`: the next call of `restore` never arrives. `is_released`: its controller gave it
    up, and has asked for no other.
    """

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self.reach: Reach = never
        self.trainers: list[FakeTrainer] = []
        self.is_dead = False
        self.loses_restore = False
        self.is_released = False
        self._start()

    @property
    def trainer(self) -> FakeTrainer:
        return self.trainers[-1]

    def _start(self) -> None:
        self._compute, self._files = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self.core = WorkerCore(self._create, export_fake, self._reach)  # pyright: ignore[reportArgumentType]

    def _reach(self, point: CrashPoint) -> None:
        self.reach(point)

    def _create(self, _spec: TrainerSpec) -> FakeTrainer:
        self.trainers.append(FakeTrainer(self._faults))
        return self.trainer

    async def _run(self, call: Callable[[], T], thread: ThreadPoolExecutor | None = None) -> T:
        if self.is_dead:
            raise WorkerLostError("dead")
        core = self.core
        try:
            pool = thread or self._compute
            result = await asyncio.get_running_loop().run_in_executor(pool, call)
        except Crash as err:
            self.is_dead = True
            raise WorkerLostError("killed") from err
        if self.is_dead or core is not self.core:
            raise WorkerLostError("died meanwhile")
        return result

    async def replace(self) -> None:
        self._start()
        self.is_dead = self.is_released = False

    async def release(self) -> None:
        self.is_dead = self.is_released = True

    async def fence(self, token: int) -> WorkerStatus:
        if not self.is_dead:
            self.core.fence(token)
        return await self._run(self.core.status)

    async def load(self, token: int, request: LoadRequest) -> Loaded:
        return await self._run(lambda: self.core.load(token, POLICY, request))

    async def prepare(
        self, token: int, command: BatchCommand, body_path: str, old_logprobs: OldLogprobsSource
    ) -> dict[str, object]:
        return await self._run(lambda: self.core.prepare(token, command, body_path, old_logprobs))

    async def apply(self, token: int, task: WorkerTask) -> Outcome:
        return await self._run(lambda: self.core.apply(token, task))

    async def skip(self, token: int, seq: int, outcome: Outcome) -> None:
        await self._run(lambda: self.core.skip(token, seq, outcome))

    async def forward(self, token: int, task: ForwardTask) -> Outcome:
        return await self._run(lambda: self.core.forward(token, task))

    async def restore(self, token: int, tasks: tuple[ForwardBackwardTask, ...]) -> None:
        if self.loses_restore:
            self.loses_restore = False
            raise ConnectionError("the call was lost")
        await self._run(lambda: self.core.restore(token, tasks))

    async def publish(
        self, token: int, version: int, weights_root: str, created_at: float
    ) -> WeightManifest:
        return await self._run(lambda: self.core.publish(token, version, weights_root, created_at))

    async def snapshot(self, token: int) -> str:
        return await self._run(lambda: self.core.snapshot(token))

    async def write_snapshot(self, token: int, folder: str) -> int:
        return await self._run(lambda: self.core.write_snapshot(token, folder), self._files)

    async def progress(self) -> Progress:
        if self.is_dead:
            raise WorkerLostError("dead")
        return self.core.progress()

    async def cancel(self, operation_id: str) -> None:
        self.core.cancel(operation_id)
