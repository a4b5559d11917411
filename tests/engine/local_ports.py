"""The controller's ports in this process: the real store, the real worker's core, their deaths."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import cache, partial
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar, cast

from sqlalchemy import Engine

from ratoon.engine.crash_points import CrashPoint, Reach, never
from ratoon.engine.journal.connections import connect
from ratoon.engine.journal.journal import Journal
from ratoon.engine.journal.records import JournalAwayError
from ratoon.engine.journal.tables import open_database
from ratoon.engine.worker.tasks import (
    GradientFile,
    GradientRequest,
    Loaded,
    LoadRequest,
    Outcome,
    Task,
    WorkerLostError,
    WorkerStatus,
)
from ratoon.engine.worker.worker import WorkerCore
from ratoon.stream.manifest import WeightManifest
from ratoon.train.saved_state import AsOf
from ratoon.train.spec import TrainerSpec
from ratoon_proto.types import Progress, SelfCheckReport
from tests.engine.fake_trainer import FakeTrainer, Faults, as_trainer

if TYPE_CHECKING:
    from ratoon.train.trainer import Trainer

P = ParamSpec("P")
T = TypeVar("T")
POLICY = "p"
IN_MEMORY = "sqlite://"


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


class LocalJournal(Journal):
    """Without a thread. `lost` writes happen and are not answered, once each.

    While it `is_away` the database takes no writes of operations.
    """

    def __init__(self, url: str) -> None:
        super().__init__(_copy_of_an_empty_one() if url == IN_MEMORY else open_database(url))
        self.lost: set[str] = set()
        self.is_away = False

    async def ask(self, name: str, call: Callable[[], T]) -> T:
        if self.is_away and name in ("accept", "end", "cover"):
            raise JournalAwayError("away")
        self._answer(f"before {name}")
        result = call()
        # Without a checkpoint nothing is asked that anybody would miss.
        args = cast("partial[T]", call).args
        if name != "cover" or None not in args:
            self._answer(name)
        return result

    def _answer(self, name: str) -> None:
        if name in self.lost:
            self.lost.remove(name)
            raise ConnectionError(f"the answer to {name} was lost")


@cache
def _empty_database() -> bytes:
    with closing(open_database(IN_MEMORY).raw_connection()) as made:
        return cast("sqlite3.Connection", made.driver_connection).serialize()


def _copy_of_an_empty_one() -> Engine:
    """A database in memory with the journal's tables, which take longer to make than to copy."""
    engine = connect(IN_MEMORY)
    with closing(engine.raw_connection()) as connection:
        cast("sqlite3.Connection", connection.driver_connection).deserialize(_empty_database())
    return engine


class LocalWorker:
    """`RemoteWorker` over the real core on one thread, and what a kill does to it.

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
        # What it was told last of where GPUs are to be.
        self.spread = False, 0
        self._start()

    @property
    def trainer(self) -> FakeTrainer:
        return self.trainers[-1]

    def _start(self) -> None:
        self._compute, self._files, self._versions = (ThreadPoolExecutor(1) for _ in range(3))
        self.core = WorkerCore(self._create, self._reach)

    def _reach(self, point: CrashPoint) -> None:
        self.reach(point)

    def _create(self, _spec: TrainerSpec) -> Trainer:
        self.trainers.append(FakeTrainer(self._faults))
        return as_trainer(self.trainer)

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

    async def kill(self) -> None:
        """As a kill of its process: nothing that it had begun goes on after this returns."""
        self.is_dead = True
        for pool in (self._compute, self._files, self._versions):
            await asyncio.to_thread(pool.shutdown, cancel_futures=True)

    async def replace(self) -> None:
        self._start()
        self.is_dead = self.is_released = False

    async def release(self) -> None:
        self.is_dead = self.is_released = True

    async def fence(self, token: int, *, evenly: bool = False, num_nodes: int = 0) -> WorkerStatus:
        self.spread = evenly, num_nodes
        if not self.is_dead:
            self.core.fence(token)
        return await self._run(self.core.status)

    async def call(
        self,
        method: Callable[Concatenate[WorkerCore, P], T],
        *args: P.args,
        **options: P.kwargs,
    ) -> T:
        """By the method below of the same name, which a test may replace."""
        return await getattr(self, method.__name__)(*args, **options)

    async def load(self, token: int, policy_id: str, request: LoadRequest) -> Loaded:
        return await self._run(lambda: self.core.load(token, policy_id, request))

    async def apply(self, token: int, task: Task) -> Outcome:
        return await self._run(lambda: self.core.apply(token, task))

    async def skip(self, token: int, seq: int, outcome: Outcome) -> Outcome:
        return await self._run(lambda: self.core.skip(token, seq, outcome))

    async def forward(self, token: int, task: Task) -> Outcome:
        return await self._run(lambda: self.core.forward(token, task))

    async def restore(self, token: int, tasks: tuple[Task, ...]) -> None:
        if self.loses_restore:
            self.loses_restore = False
            raise ConnectionError("the call was lost")
        await self._run(lambda: self.core.restore(token, tasks))

    async def publish(
        self, token: int, version: int, weights_root: str, created_at: float, deltas: bool = False
    ) -> WeightManifest:
        args = token, version, weights_root, created_at, deltas
        return await self._run(lambda: self.core.publish(*args), self._versions)

    async def announce(
        self, token: int, version: int, weights_root: str, created_at: float
    ) -> WeightManifest | None:
        args = token, version, weights_root, created_at
        return await self._run(lambda: self.core.announce(*args), self._versions)

    async def hold(
        self, token: int, version: int, is_requested: bool = False
    ) -> SelfCheckReport | None:
        return await self._run(lambda: self.core.hold(token, version, is_requested))

    async def write_gradients(self, token: int, request: GradientRequest) -> GradientFile:
        return await self._run(lambda: self.core.write_gradients(token, request))

    async def snapshot(self, token: int) -> str:
        return await self._run(lambda: self.core.snapshot(token))

    async def write_snapshot(self, token: int, folder: str, as_of: AsOf) -> int:
        return await self._run(lambda: self.core.write_snapshot(token, folder, as_of), self._files)

    async def progress(self) -> Progress:
        if self.is_dead:
            raise WorkerLostError("dead")
        return self.core.progress()

    async def cancel(self, operation_id: str) -> None:
        self.core.cancel(operation_id)
