"""A policy's worker over Ray: its process, and the calls that the engine makes to it.

The process is a detached actor around `worker.WorkerCore`, which the engine starts, or takes, when
it first fences. Each concurrency group has threads of its own. All calls of the trainer run on
"compute", which is one thread, so they never overlap. "files" writes snapshots and "versions"
writes published weights beside them; "control" answers at any time. Processes that look the actor
up import this module, so torch is imported by the constructor.

Importing torch and transformers takes a process seconds. So on CPUs a spare is started ahead; the
first policy that looks for a worker takes it, and keeps it until it ends.

A lost worker raises `WorkerLostError`. A worker that stays silent for too long counts as lost.
"""

# Ray's decorators are only partly typed.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, cast

import ray
from ray import ObjectRef
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ratoon.cluster.placement import GPU_ENVIRONMENT, free_gpus, place
from ratoon.cluster.ray_calls import (
    START_S,
    ActorLostError,
    ask,
    ask_living,
    find_actor,
    kill_actor,
)
from ratoon.engine.crash_points import make_reach
from ratoon.engine.settings import EngineSettings
from ratoon.engine.worker.kernels import list_backends
from ratoon.engine.worker.tasks import WorkerLostError, WorkerStatus
from ratoon.engine.worker.worker import WorkerCore
from ratoon.garbage import frozen_imports
from ratoon.log import configure_logging, get_logger
from ratoon.method_call import MethodCall
from ratoon_proto.types import BackendInfo

if TYPE_CHECKING:
    from ray.actor import ActorClass, ActorProxy

    from ratoon.engine.worker.kernels import CompileCache
    from ratoon.train.spec import TrainerSpec
    from ratoon.train.trainer import Trainer

    Worker = ActorProxy["WorkerActor"]

CONCURRENCY_GROUPS = {"compute": 1, "control": 4, "files": 1, "versions": 1}
T = TypeVar("T")
_SPARE = "ratoon-spare-worker"
# A spare that has not answered in this time never will.
_SPARE_S = 60.0
P = ParamSpec("P")
# The concurrency group of each method that does not wait for the trainer; all others run on
# "compute", one at a time.
_GROUPS = {
    WorkerCore.progress.__name__: "control",
    WorkerCore.cancel.__name__: "control",
    WorkerCore.publish.__name__: "versions",
    WorkerCore.write_snapshot.__name__: "files",
}
_LOG = get_logger("worker")


class WorkerActor:
    """Wraps `WorkerCore`."""

    def __init__(
        self,
        policy_id: str,
        num_workers: int,
        log_level: str,
        crash_points: Path | None,
        compiled: Path,
        max_silence_s: float,
    ) -> None:
        """`policy_id` "": the process is a spare. `num_workers`: the policy's ranks.

        `compiled`: the folder of compiled kernels and of the measured rates of GPUs.
        `max_silence_s`: another rank that answers nothing for so long is lost.
        """
        configure_logging(log_level)
        started = time.perf_counter()
        with frozen_imports():
            from ratoon.cluster.ranks import Ranks

            self._ranks = Ranks(log_level, crash_points, compiled, max_silence_s)
            self._ranks.start(num_workers, policy_id)

            from ratoon.engine.worker.worker import WorkerCore
            from ratoon.train.trainer import Trainer

        self._policy_id, self._taking = policy_id, threading.Lock()
        self._create_trainer = Trainer.create
        self._compiled = compiled
        self._cache: CompileCache | None = None
        _LOG.info("worker started", imports_s=round(time.perf_counter() - started, 3))
        self._core = WorkerCore(self._create, make_reach(crash_points))

    def _create(self, spec: TrainerSpec) -> Trainer:
        from ratoon.engine.worker.kernels import CompileCache, start_compiler

        if spec.device != "cpu":
            # While weights are loaded; nothing is compiled before.
            start_compiler()
        with self._ranks.created(spec, self._policy_id) as peers:
            trainer = self._create_trainer(spec, peers, self._compiled)
        # Nothing is compiled on a CPU.
        if self._cache is None and spec.device != "cpu":
            self._cache = CompileCache(self._compiled, trainer.fingerprint())
        return trainer

    @ray.method(concurrency_group="control")
    def take(self, policy_id: str) -> bool:
        """Claim the spare for a policy; returns whether the process is that policy's."""
        with self._taking:
            self._policy_id = self._policy_id or policy_id
            return self._policy_id == policy_id

    @ray.method(concurrency_group="control")
    def holder(self) -> str:
        """The policy that the process belongs to; "": none yet."""
        return self._policy_id

    @ray.method(concurrency_group="control")
    def backends(self) -> tuple[BackendInfo, ...]:
        return list_backends()

    @ray.method(concurrency_group="control")
    def fence(self, token: int) -> None:
        """See `WorkerCore.fence`. Raises `WorkerLostError` too, where a rank failed to start."""
        self._core.fence(token)
        if failure := self._ranks.failure():
            raise WorkerLostError(str(failure)) from failure

    @ray.method(concurrency_group="control")
    def ping(self) -> None:
        """Answers while the process lives, whatever else it does.

        Raises the failure of a creation of several ranks, as its call may never return.
        """
        if failure := self._ranks.failure():
            raise failure

    @ray.method(concurrency_group="compute")
    def call(self, call: MethodCall[object]) -> object:
        """Call a method of the core: on the compute thread, unless the caller names a group."""
        return call.on(self._core)


def make_worker(
    policy_id: str, num_workers: int, settings: EngineSettings, **options: object
) -> Worker:
    """Start a policy's process, that of its first rank; `options` are those of its actor."""
    # Ray accepts concurrency groups here, but its types do not say so.
    remote = cast(
        "Callable[..., Callable[[type[WorkerActor]], ActorClass[WorkerActor]]]", ray.remote
    )
    actor = remote(num_cpus=0, concurrency_groups=CONCURRENCY_GROUPS)(WorkerActor).options(
        name=_name(policy_id),
        namespace=settings.namespace,
        lifetime="detached",
        get_if_exists=True,
        **options,
    )
    return actor.remote(
        policy_id,
        num_workers,
        settings.log_level,
        settings.crash_points,
        settings.compiled,
        settings.max_silence_s,
    )


def make_spare(settings: EngineSettings) -> Worker:
    """The spare, which may be some policy's by now."""
    return make_worker("", 1, settings)


def find_spare(namespace: str) -> Worker | None:
    """The spare, which may be some policy's by now; None: there is none."""
    return _find(_SPARE, namespace)


async def find_worker(policy_id: str, namespace: str) -> Worker | None:
    """A policy's process, which may be the spare, taken now; None: it has none."""
    named = _find(_name(policy_id), namespace)
    if named is not None:
        return named
    spare = find_spare(namespace)
    if spare is None or not await _told(spare.take.remote(policy_id), namespace):
        return None
    return spare


async def end_worker(policy_id: str, namespace: str) -> None:
    """End a policy's process, if there is one."""
    await kill_actor(_name(policy_id), namespace)
    spare = find_spare(namespace)
    if spare is not None and await _told(spare.holder.remote(), namespace) == policy_id:
        await kill_actor(_SPARE, namespace)


async def end_spare(namespace: str) -> None:
    """End the spare, even if a policy has taken it."""
    await kill_actor(_SPARE, namespace)


def _name(policy_id: str) -> str:
    return f"ratoon-worker-{policy_id}" if policy_id else _SPARE


def _find(name: str, namespace: str) -> Worker | None:
    return cast("Worker | None", find_actor(name, namespace))


async def _told(reference: ObjectRef[T], namespace: str) -> T | None:
    """The spare's answer. One that does not answer is ended; its policy gets another worker."""
    try:
        async with asyncio.timeout(_SPARE_S):
            return await ask(reference)
    except (ActorLostError, TimeoutError):
        await kill_actor(_SPARE, namespace)
        return None


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
