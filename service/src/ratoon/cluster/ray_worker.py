"""A policy's worker over Ray: the process that the engine starts, or takes, when it first fences.

A lost worker raises `WorkerLostError`. A worker that stays silent for too long counts as lost.
"""

# Ray's decorators are only partly typed.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, cast

import ray
from ray import ObjectRef
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ratoon.cluster.gpu_environment import GPU_ENVIRONMENT
from ratoon.cluster.placement import free_gpus, place
from ratoon.cluster.ray_calls import START_S, ActorLostError, ask_living
from ratoon.cluster.worker_process import end_worker, find_worker, make_worker
from ratoon.engine.settings import EngineSettings
from ratoon.engine.worker.tasks import WorkerLostError, WorkerStatus
from ratoon.engine.worker.worker import WorkerCore
from ratoon.method_call import MethodCall

if TYPE_CHECKING:
    from ratoon.cluster.worker_process import Worker

P = ParamSpec("P")
T = TypeVar("T")
# The concurrency group of each method that does not wait for the trainer; all others run on
# "compute", one at a time.
_GROUPS = {
    WorkerCore.progress.__name__: "control",
    WorkerCore.cancel.__name__: "control",
    WorkerCore.publish.__name__: "versions",
    WorkerCore.write_snapshot.__name__: "files",
}


class RayWorker:
    """`RemoteWorker` over an actor."""

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
        """See `RemoteWorker.fence`."""
        worker = self._handle = self._handle or await self._find_or_make(on_one_node=on_one_node)
        await self._ask(worker, worker.fence.remote(token))
        return await self.call(WorkerCore.status)

    async def call(
        self,
        method: Callable[Concatenate[WorkerCore, P], T],
        *args: P.args,
        **options: P.kwargs,
    ) -> T:
        """See `RemoteWorker.call`."""
        if self._handle is None:
            # A call after `release` must not start another worker.
            raise WorkerLostError(f"policy {self._policy_id} has no worker")
        call = MethodCall.of(method, *args, **options)
        run = cast("Any", self._handle.call)
        if group := _GROUPS.get(call.name):
            run = run.options(concurrency_group=group)
        return await self._ask(self._handle, cast("ObjectRef[T]", run.remote(call)))

    async def replace(self) -> None:
        """See `RemoteWorker.replace`."""
        handle, self._handle, self._is_up = self._handle, None, False
        if handle is not None:
            # First and without a question: a worker that hangs would not say whose it is.
            ray.kill(cast("Any", handle))
        await end_worker(self._policy_id, self._settings.namespace)

    async def release(self) -> None:
        """See `RemoteWorker.release`."""
        await self.replace()
        free_gpus(self._policy_id)

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
            answer = await ask_living(reference, worker.ping.remote, max_silence_s)
        except ActorLostError as err:
            raise WorkerLostError(str(err)) from err
        self._is_up = True
        return answer
