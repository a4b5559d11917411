"""A policy's worker over Ray: a process of its own, which is started when it is first fenced.

A worker that is lost is `WorkerLostError`.
"""

# Ray's decorators are only partly typed.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, TypeVar, cast

import ray
from ray import ObjectRef
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ratoon.engine.cluster.gpu_environment import GPU_ENVIRONMENT
from ratoon.engine.cluster.placement import end_worker, place
from ratoon.engine.cluster.ray_calls import ActorLostError, ask, find_actor, kill_actor
from ratoon.engine.cluster.worker_actor import CONCURRENCY_GROUPS, WorkerActor
from ratoon.engine.settings import EngineSettings, worker_name
from ratoon.engine.worker.tasks import WorkerLostError, WorkerStatus

if TYPE_CHECKING:
    from ray.actor import ActorClass, ActorProxy

T = TypeVar("T")


class RayWorker:
    """`WorkerPort` by name: what is not written here is asked of the worker as it is."""

    def __init__(self, policy_id: str, settings: EngineSettings, *, on_gpu: bool) -> None:
        self._policy_id = policy_id
        self._settings = settings
        self._on_gpu = on_gpu
        self._handle: ActorProxy[WorkerActor] | None = None

    async def fence(self, token: int) -> WorkerStatus:
        worker = self._handle = self._handle or await self._find_or_make()
        await _ask_worker(worker.fence.remote(token))
        return await _ask_worker(worker.status.remote())

    async def replace(self) -> None:
        self._handle = None
        await kill_actor(worker_name(self._policy_id), self._settings.namespace)

    async def release(self) -> None:
        self._handle = None
        await end_worker(self._policy_id, self._settings.namespace)

    def __getattr__(self, name: str) -> Callable[..., Awaitable[object]]:
        """The others are the worker's own."""

        async def call(*args: object) -> object:
            return await _ask_worker(getattr(self._worker(), name).remote(*args))

        return call

    def _worker(self) -> ActorProxy[WorkerActor]:
        """What is asked of a worker that was released makes no other."""
        if self._handle is None:
            raise WorkerLostError(f"policy {self._policy_id} has no worker")
        return self._handle

    async def _find_or_make(self) -> ActorProxy[WorkerActor]:
        """Raises RESOURCE_EXHAUSTED."""
        name, namespace = worker_name(self._policy_id), self._settings.namespace
        found = cast("ActorProxy[WorkerActor] | None", find_actor(name, namespace))
        if found is not None:
            return found
        options: dict[str, object] = {}
        if self._on_gpu:
            group = await place(self._policy_id)
            options["num_gpus"] = 1
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(group)
            options["runtime_env"] = {"env_vars": GPU_ENVIRONMENT}
        # Ray takes concurrency groups here, and its types do not know it.
        remote = cast(
            "Callable[..., Callable[[type[WorkerActor]], ActorClass[WorkerActor]]]", ray.remote
        )
        actor = remote(num_cpus=0, concurrency_groups=CONCURRENCY_GROUPS)(WorkerActor).options(
            name=name, namespace=namespace, lifetime="detached", get_if_exists=True, **options
        )
        settings = self._settings
        return actor.remote(
            self._policy_id, settings.log_level, settings.crash_points, settings.compiled
        )


async def _ask_worker(reference: ObjectRef[T]) -> T:
    try:
        return await ask(reference)
    except ActorLostError as err:
        raise WorkerLostError(str(err)) from err
