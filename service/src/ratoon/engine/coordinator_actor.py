"""The coordinator's process: a detached actor that owns the database and the lives of policies.

Enters calls from clients and controllers, leaves rows and operations. Invariant: the database is
written by this process alone, from one thread. No torch is imported here.
"""

# Ray's decorators are only partly typed.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar

import ray
from sqlalchemy import Engine
from sqlalchemy.exc import OperationalError

from ratoon.engine import telemetry
from ratoon.engine.archive import open_archive
from ratoon.engine.backends import BackendInfo, list_backends
from ratoon.engine.checkpoints import Checkpoint, Covered
from ratoon.engine.connections import is_server_away
from ratoon.engine.coordinator import Coordinator
from ratoon.engine.crash_points import CrashPoint, make_reach
from ratoon.engine.fenced import FencedStore
from ratoon.engine.files import require_known
from ratoon.engine.fleet import RayFleet
from ratoon.engine.journal import OperationEnd, OperationRecord, PolicyHistory, RollBack
from ratoon.engine.metrics_actor import RayMetricsSink, find_metrics
from ratoon.engine.numerics import Numerics
from ratoon.engine.placement import on_gpu_node
from ratoon.engine.ray_calls import ask, kill_actor
from ratoon.engine.settings import METRICS_NAME, EngineSettings
from ratoon.engine.store import SqlStore
from ratoon.engine.store_calls import StoreCalls
from ratoon.engine.tables import open_database
from ratoon.engine.types import (
    Operation,
    OperationKey,
    OperationResult,
    Policy,
    PolicySpec,
    PolicyState,
)
from ratoon.garbage import freeze_garbage
from ratoon.log import configure_logging, get_logger
from ratoon.model.spec import ModelInfo
from ratoon.stream.files import make_folder, remove_leftovers

T = TypeVar("T")
_LOG = get_logger("coordinator")


class CoordinatorActor:
    """Shell of `Coordinator`, and the journal's remote end."""

    def __init__(self, settings: EngineSettings) -> None:
        configure_logging(settings.log_level)
        make_folder(settings.data_root)
        if settings.weights_root is not None:
            make_folder(settings.weights_root, 0o700)
            remove_leftovers(settings.weights_root)
        self._settings = settings
        self._reach = make_reach(settings.crash_points)
        engine = _open_database(settings.database_url)
        self._store, self._fenced = SqlStore(engine), FencedStore(engine)
        known = [row.spec.policy_id for row in self._store.policies()]
        require_known(settings.data_root, known)
        self._fleet = RayFleet(settings)
        self._calls = StoreCalls()
        self._coordinator = Coordinator(
            store=self._store,
            calls=self._calls,
            fleet=self._fleet,
            metrics=RayMetricsSink(settings.namespace),
            limits=settings.limits,
            data_root=settings.data_root,
            paths_of=settings.paths,
            archive_of=lambda paths: open_archive(settings.storage_url, paths),
            now=time.time,
        )
        self._is_recovered = False
        self._backends: tuple[BackendInfo, ...] | None = None
        self._backends_lock = asyncio.Lock()
        freeze_garbage()
        ray.get_runtime_context().current_actor.recover.remote()

    @ray.method
    async def recover(self) -> None:
        """Take up what an earlier coordinator left; done once in the life of this process."""
        if self._is_recovered:
            return
        self._is_recovered = True
        hub = find_metrics(self._settings.namespace)
        if hub is not None:
            counts = await self._calls.insist(self._store.count_operations)
            await ask(hub.seed.remote(telemetry.journal_counts(counts)))
        await self._coordinator.recover()

    @ray.method
    async def settings(self) -> EngineSettings:
        return self._settings

    @ray.method
    async def create_policy(self, spec: PolicySpec) -> Operation:
        return await self._coordinator.create_policy(spec)

    @ray.method
    async def delete_policy(self, policy_id: str) -> Operation:
        return await self._coordinator.delete_policy(policy_id)

    @ray.method
    async def get_operation(self, operation_id: str, wait_s: float) -> Operation:
        return await self._coordinator.get_operation(operation_id, wait_s)

    @ray.method
    async def watch_operation(self, seen: Operation, wait_s: float) -> Operation:
        return await self._coordinator.watch_operation(seen, wait_s)

    @ray.method
    async def policy(self, policy_id: str) -> Policy:
        return (await self._coordinator.policy(policy_id)).to_policy()

    @ray.method
    async def policies(self) -> tuple[Policy, ...]:
        return tuple(row.to_policy() for row in await self._on_store(self._store.policies))

    @ray.method
    async def backends(self) -> tuple[BackendInfo, ...]:
        """Of the workers' device, asked for in a process that ends afterwards."""
        async with self._backends_lock:  # A process for all who ask at once, not one for each.
            if self._backends is None:
                where = "DEFAULT" if self._fleet.device == "cpu" else on_gpu_node()
                task = ray.remote(num_cpus=0, max_calls=1, scheduling_strategy=where)(list_backends)
                self._backends = await ask(task.remote())
            return self._backends

    @ray.method
    async def drain(self, grace_s: float) -> None:
        await self._coordinator.drain(grace_s)

    @ray.method
    async def check_well(self) -> None:
        self._coordinator.check_well()

    @ray.method
    async def stop_policies(self) -> None:
        """End the processes of all policies; the store keeps what it knows of them."""
        for policy_id in self._coordinator.policy_ids:
            await self._fleet.end(policy_id)
        await kill_actor(METRICS_NAME, self._settings.namespace)

    # The journal.

    @ray.method
    async def acquire(self, policy_id: str) -> int:
        return await self._on_store(partial(self._fenced.acquire, policy_id))

    @ray.method
    async def history(self, policy_id: str) -> PolicyHistory:
        return await self._on_store(partial(self._store.history, policy_id))

    @ray.method
    async def records_from(self, policy_id: str, seq: int) -> tuple[OperationRecord, ...]:
        return await self._on_store(partial(self._store.records_from, policy_id, seq))

    @ray.method
    async def bodies_in_use(self, policy_id: str) -> Mapping[str, str]:
        return await self._on_store(partial(self._store.bodies_in_use, policy_id))

    @ray.method
    async def results_in_use(self, policy_id: str) -> frozenset[str]:
        return await self._on_store(partial(self._store.results_in_use, policy_id))

    @ray.method
    async def numerics(self, digest: str) -> Mapping[str, str]:
        return await self._on_store(partial(self._store.numerics, digest))

    @ray.method
    async def find_key(self, policy_id: str, key: OperationKey) -> OperationRecord | None:
        return await self._on_store(partial(self._store.find_key, policy_id, key))

    @ray.method
    async def find_operation(self, operation_id: str) -> OperationRecord | None:
        return await self._on_store(partial(self._store.find_operation, operation_id))

    @ray.method
    async def accept(self, token: int, record: OperationRecord, next_seq: int) -> None:
        self._reach(CrashPoint.COORDINATOR_BEFORE_ACCEPT)
        await self._on_store(partial(self._fenced.accept, token, record, next_seq))
        self._reach(CrashPoint.COORDINATOR_AFTER_ACCEPT)

    @ray.method
    async def begin(
        self,
        token: int,
        operation_id: str,
        started_at: float,
        plan: dict[str, object] | None,
        numerics: Numerics,
    ) -> None:
        self._reach(CrashPoint.COORDINATOR_BEFORE_BEGIN)
        write = partial(self._fenced.begin, token, operation_id, started_at, plan, numerics)
        await self._on_store(write)
        self._reach(CrashPoint.COORDINATOR_AFTER_BEGIN)

    @ray.method
    async def end(self, token: int, policy_id: str, end: OperationEnd) -> None:
        self._reach(CrashPoint.COORDINATOR_BEFORE_END)
        await self._on_store(partial(self._fenced.end, token, policy_id, end))
        self._reach(CrashPoint.COORDINATOR_AFTER_END)

    @ray.method
    async def amend(self, token: int, operation_id: str, result: OperationResult) -> None:
        await self._on_store(partial(self._fenced.amend, token, operation_id, result))

    @ray.method
    async def cover(
        self, token: int, policy_id: str, automatic: Checkpoint | None, keep: int
    ) -> Covered:
        self._reach(CrashPoint.COORDINATOR_BEFORE_COVER)
        write = partial(self._fenced.cover, token, policy_id, automatic, keep)
        covered = await self._on_store(write)
        self._reach(CrashPoint.COORDINATOR_AFTER_COVER)
        return covered

    @ray.method
    async def rebase(
        self, token: int, policy_id: str, digests: Mapping[int, str], numerics: Numerics
    ) -> None:
        await self._on_store(partial(self._fenced.rebase, token, policy_id, digests, numerics))

    @ray.method
    async def fail(self, token: int, policy_id: str, failure: str) -> None:
        await self._on_store(partial(self._fenced.fail, token, policy_id, failure))

    @ray.method
    async def set_published(self, token: int, policy_id: str, published: tuple[int, ...]) -> None:
        await self._on_store(partial(self._fenced.set_published, token, policy_id, published))

    @ray.method
    async def set_policy(
        self, token: int, policy_id: str, state: PolicyState, info: ModelInfo | None
    ) -> None:
        await self._on_store(partial(self._fenced.set_policy, token, policy_id, state, info))

    @ray.method
    async def roll_back(
        self, token: int, policy_id: str, roll_back: RollBack
    ) -> tuple[OperationRecord, ...]:
        return await self._on_store(partial(self._fenced.roll_back, token, policy_id, roll_back))

    @ray.method
    async def checkpoints(self, policy_id: str) -> tuple[Checkpoint, ...]:
        return await self._on_store(partial(self._store.checkpoints, policy_id))

    async def _on_store(self, call: Callable[[], T]) -> T:
        return await self._calls.once(call)


def _open_database(url: str) -> Engine:
    """Wait for a server that is away, however long: without it there is nothing to do."""
    while True:
        try:
            return open_database(url)
        except OperationalError as err:
            if not is_server_away(err):
                raise
            _LOG.warning("still waiting for the database", reason=str(err.orig))
