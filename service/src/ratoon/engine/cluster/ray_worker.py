"""A policy's worker over Ray: a process of its own, started or taken when it is first fenced.

A lost worker raises `WorkerLostError`; one that answers nothing for too long is lost.
"""

# Ray's decorators are only partly typed.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

import ray
from ray import ObjectRef
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ratoon.engine.cluster.gpu_environment import GPU_ENVIRONMENT
from ratoon.engine.cluster.placement import free_gpus, place
from ratoon.engine.cluster.ray_calls import START_S, ActorLostError, ask_living
from ratoon.engine.cluster.worker_process import end_worker, find_worker, make_worker
from ratoon.engine.settings import EngineSettings
from ratoon.engine.worker.tasks import WorkerLostError, WorkerStatus

if TYPE_CHECKING:
    from ratoon.engine.cluster.worker_process import Worker

T = TypeVar("T")


class RayWorker:
    """`WorkerPort` by name: methods not defined here are forwarded to the worker."""

    def __init__(
        self, policy_id: str, settings: EngineSettings, num_workers: int, *, on_gpus: bool
    ) -> None:
        """`num_workers`: ranks; `on_gpus`: each has a GPU of its own."""
        self._policy_id = policy_id
        self._settings = settings
        self._num_workers = num_workers
        self._on_gpus = on_gpus
        self._handle: Worker | None = None
        # Whether it has answered yet: it is given longer to come up.
        self._is_up = False

    async def fence(self, token: int, *, on_one_node: bool = False) -> WorkerStatus:
        worker = self._handle = self._handle or await self._find_or_make(on_one_node=on_one_node)
        await self._ask(worker, worker.fence.remote(token))
        return await self._ask(worker, worker.status.remote())

    async def replace(self) -> None:
        handle, self._handle, self._is_up = self._handle, None, False
        if handle is not None:
            # At once: whether it is the policy's, one that hangs would not say.
            ray.kill(cast("Any", handle))
        await end_worker(self._policy_id, self._settings.namespace)

    async def release(self) -> None:
        await self.replace()
        free_gpus(self._policy_id)

    def __getattr__(self, name: str) -> Callable[..., Awaitable[object]]:
        """Forward any other method."""

        async def call(*args: object) -> object:
            worker = self._worker()
            return await self._ask(worker, getattr(worker, name).remote(*args))

        return call

    def _worker(self) -> Worker:
        """The worker. A call after `release` must not start another one."""
        if self._handle is None:
            raise WorkerLostError(f"policy {self._policy_id} has no worker")
        return self._handle

    async def _find_or_make(self, *, on_one_node: bool) -> Worker:
        """The policy's worker, found or started. Raises RESOURCE_EXHAUSTED."""
        found = await find_worker(self._policy_id, self._settings.namespace)
        if found is not None:
            return found
        options: dict[str, object] = {}
        if self._on_gpus:
            group = await place(self._policy_id, self._num_workers, on_one_node=on_one_node)
            options["num_gpus"] = 1
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=0
            )
            options["runtime_env"] = {"env_vars": GPU_ENVIRONMENT}
        return make_worker(self._policy_id, self._num_workers, self._settings, **options)

    async def _ask(self, worker: Worker, reference: ObjectRef[T]) -> T:
        max_silence_s = self._settings.max_silence_s if self._is_up else START_S
        try:
            answer = await ask_living(reference, worker.progress.remote, max_silence_s)
        except ActorLostError as err:
            raise WorkerLostError(str(err)) from err
        self._is_up = True
        return answer
