"""A policy's worker over Ray: its process, and the calls that the engine makes to it.

The process is a detached actor around `worker.host.WorkerHost`, which the engine starts, or takes,
when it first fences. It is one policy's, or has the tenants of one model: those with a `host_key`
look for a process of that key with room before they start one. Each concurrency group has threads
of its own. All calls of trainers run on "compute", which is one thread, so they never overlap.
"files" writes snapshots and "versions" writes published weights beside them; "control" answers at
any time. Processes that look the actor up import this module, so torch is imported by the
constructor.

Importing torch and transformers takes a process seconds. So a worker is a fork (`worker_start`),
where Ray is this machine's own. On CPUs a spare is started ahead; the first policy that looks for a
worker takes it, and keeps it until it ends.

A lost worker raises `WorkerLostError`. A worker that stays silent for too long counts as lost.
"""

# Ray's decorators are only partly typed.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, cast
from weakref import WeakValueDictionary

import ray
from ray import ObjectRef
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ratoon.cluster.placement import free_gpus, place
from ratoon.cluster.ray_calls import START_S, ActorLostError, ask_living
from ratoon.cluster.worker_places import (
    SPARE,
    WorkerPlace,
    end_place,
    find_place,
    free_hosts,
    hosts,
    leave,
    own_name,
    told,
    unused_name,
)
from ratoon.cluster.worker_start import WORKER_ENVIRONMENT
from ratoon.engine.crash_points import make_reach
from ratoon.engine.settings import EngineSettings
from ratoon.engine.worker.kernels import list_backends
from ratoon.engine.worker.tasks import NeighbourLostError, WorkerLostError, WorkerStatus
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
P = ParamSpec("P")
# The concurrency group of each method that does not wait for the trainer; all others run on
# "compute", one at a time and by turns.
_GROUPS = {
    WorkerCore.progress.__name__: "control",
    WorkerCore.cancel.__name__: "control",
    WorkerCore.announce.__name__: "versions",
    WorkerCore.publish.__name__: "versions",
    WorkerCore.write_snapshot.__name__: "files",
}
_LOG = get_logger("worker")


class WorkerActor:
    """Wraps `WorkerCore`."""

    def __init__(
        self,
        policy_id: str,
        place: str,
        num_workers: int,
        log_level: str,
        crash_points: Path | None,
        compiled: Path,
        max_silence_s: float,
    ) -> None:
        """`policy_id`: the only one that the process is for; "": it is to be taken.

        `place`: whose GPUs are its own (`placement`). `num_workers`: the ranks of its policies.
        `compiled`: the folder of compiled kernels and of the measured rates of GPUs.
        `max_silence_s`: another rank that answers nothing for so long is lost.
        """
        configure_logging(log_level)
        started = time.perf_counter()
        with frozen_imports():
            from ratoon.cluster.ranks import Ranks

            self._ranks = Ranks(log_level, crash_points, compiled, max_silence_s)
            self._ranks.start(num_workers, place)

            from ratoon.engine.worker.host import WorkerHost
            from ratoon.train.trainer import Trainer

        self._place = place
        self._create_trainer = Trainer.create
        self._compiled = compiled
        self._cache: CompileCache | None = None
        _LOG.info("worker started", imports_s=round(time.perf_counter() - started, 3))
        self._host = WorkerHost(self._create, make_reach(crash_points))
        if policy_id:
            self._host.take(policy_id, "", 1)

    def _create(self, spec: TrainerSpec) -> Trainer:
        from ratoon.engine.worker.kernels import CompileCache, start_compiler

        # Nothing is compiled on a CPU. On a GPU this goes on while weights are loaded; nothing is
        # compiled before.
        compiler = None if spec.device == "cpu" else start_compiler()
        with self._ranks.created(spec, self._place) as others:
            if compiler is not None and self._cache is None:
                # Not before the others have joined, as it asks the GPU for its name.
                self._cache = CompileCache.of_device(self._compiled, spec.device)
            trainer = self._create_trainer(spec, others, self._compiled)
        if compiler is not None and self._cache is not None:
            compiler.join()
            self._cache.compile_ahead(trainer)
        return trainer

    @ray.method(concurrency_group="control")
    def take(self, policy_id: str, key: str, max_tenants: int) -> bool:
        """See `WorkerHost.take`."""
        return self._host.take(policy_id, key, max_tenants)

    @ray.method(concurrency_group="control")
    def leave(self, policy_id: str) -> bool:
        """See `WorkerHost.leave`."""
        return self._host.leave(policy_id)

    @ray.method(concurrency_group="control")
    def tenants(self) -> tuple[str, ...]:
        """See `WorkerHost.tenants`."""
        return self._host.tenants()

    @ray.method(concurrency_group="control")
    def backends(self) -> tuple[BackendInfo, ...]:
        return list_backends()

    @ray.method(concurrency_group="control")
    def fence(self, policy_id: str, token: int) -> None:
        """See `WorkerCore.fence`. Raises `WorkerLostError` too, where a rank failed to start."""
        self._host.core(policy_id).fence(token)
        if failure := self._ranks.failure():
            raise WorkerLostError(str(failure)) from failure

    @ray.method(concurrency_group="control")
    def ping(self) -> None:
        """Answers while the process lives, whatever else it does.

        Raises the failure of several ranks that wait for one another, as the call that they are in
        may never return.
        """
        if failure := self._ranks.failure():
            raise failure

    @ray.method(concurrency_group="compute")
    def compute(self, policy_id: str, call: MethodCall[object]) -> object:
        """Call a method of a policy's core on the compute thread."""
        self._host.collect()
        core = self._host.core(policy_id)
        try:
            return call.on(core)
        finally:
            if self._cache is not None:
                self._cache.note(core.trainer)

    @ray.method(concurrency_group="control")
    def call_beside(self, policy_id: str, call: MethodCall[object]) -> object:
        """Call a method that runs beside others, in the group that the caller names."""
        return call.on(self._host.core(policy_id))


def make_worker(
    policy_id: str, name: str, num_workers: int, settings: EngineSettings, **options: object
) -> Worker:
    """Start a process, that of the first rank; `options` are those of its actor.

    `name`: the actor's. `policy_id`: see `WorkerActor`.
    """
    # Ray accepts concurrency groups here, but its types do not say so.
    remote = cast(
        "Callable[..., Callable[[type[WorkerActor]], ActorClass[WorkerActor]]]", ray.remote
    )
    actor = remote(num_cpus=0, concurrency_groups=CONCURRENCY_GROUPS)(WorkerActor).options(
        name=name,
        namespace=settings.namespace,
        lifetime="detached",
        get_if_exists=True,
        runtime_env={"env_vars": WORKER_ENVIRONMENT},
        **options,
    )
    return actor.remote(
        policy_id,
        policy_id or name,
        num_workers,
        settings.log_level,
        settings.crash_points,
        settings.compiled,
        settings.max_silence_s,
    )


def make_spare(settings: EngineSettings) -> Worker:
    """The spare, which may have tenants by now."""
    return make_worker("", SPARE, 1, settings)


@dataclass(slots=True, eq=False)
class _Waiting:
    policy_id: str
    may_go: asyncio.Future[None]


class HostTurns:
    """Whose call a process computes next, and to whose call its loss is laid.

    A process computes one call at a time. Of those that wait the one goes first whose tenant has
    computed for the shortest time; one that comes, or comes back, counts as having computed as long
    as the one whose turn it is. So calls of a length alternate, and a tenant of short ones has more
    of them while others compute long ones. A process that somebody waits for is never idle.

    A tenant has one call at a time (`policy.turns`); calls that do not compute need no turn. Its
    methods run on the engine's event loop.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._holder: str | None = None
        # Who waits, in the order of coming.
        self._waiting: list[_Waiting] = []
        # Seconds computed by tenant, and those of the one whose turn it is, or last was.
        self._used: dict[str, float] = {}
        self._now = 0.0
        self._is_lost = self._is_ended = False

    @asynccontextmanager
    async def taken(self, policy_id: str) -> AsyncGenerator[None]:
        """Inside, it is this tenant's turn. Raises `NeighbourLostError` if the process is lost."""
        # Whoever comes counts as having computed as long as `_now`: less need not be remembered.
        here = {self._holder, *(each.policy_id for each in self._waiting)}
        self._used = {k: used for k, used in self._used.items() if used > self._now or k in here}
        self._used[policy_id] = max(self._used.get(policy_id, 0.0), self._now)
        if self._holder is not None:
            await self._wait(policy_id)
        self._holder = policy_id
        self._now = max(self._now, self._used[policy_id])
        started = self._clock()
        try:
            if self._is_lost:
                raise NeighbourLostError("the process was lost before the call")
            yield
        finally:
            self._used[policy_id] += self._clock() - started
            self._pass_on()

    def lost(self, policy_id: str, reason: str) -> WorkerLostError:
        """Note that the process is lost; returns the error for a tenant's call that saw it.

        To blame is the call that was computed, or any where there was none.
        """
        self._is_lost = True
        is_anothers = self._holder not in (None, policy_id)
        kind = NeighbourLostError if self._is_ended or is_anothers else WorkerLostError
        return kind(reason)

    def end(self) -> None:
        """Note that the process is ended on purpose, whatever it computes: no call is to blame."""
        self._is_lost = self._is_ended = True

    async def _wait(self, policy_id: str) -> None:
        waiting = _Waiting(policy_id, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        try:
            await waiting.may_go
        except asyncio.CancelledError:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
            else:  # It was this one's turn already.
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        self._holder = None
        if self._waiting:
            following = min(self._waiting, key=lambda each: self._used[each.policy_id])
            self._waiting.remove(following)
            # Nobody may come in between.
            self._holder = following.policy_id
            following.may_go.set_result(None)


class Houses:
    """The processes that have, or may have, several tenants, as all policies of an engine see them.

    `placing` is held while one is reserved or given back.
    """

    def __init__(self) -> None:
        self.placing = asyncio.Lock()
        self._turns = WeakValueDictionary[str, HostTurns]()

    def turns(self, worker: Worker) -> HostTurns:
        """The turns of a process, which those that use it keep."""
        name = cast("Any", worker)._actor_id.hex()
        return self._turns.setdefault(name, HostTurns())


class RayWorker:
    """`RemoteWorker` over an actor."""

    def __init__(
        self,
        policy_id: str,
        settings: EngineSettings,
        num_workers: int,
        *,
        on_gpus: bool,
        host_key: str = "",
        houses: Houses | None = None,
    ) -> None:
        """`num_workers`: ranks; `on_gpus`: each has a GPU of its own.

        `host_key`: the policy's `TrainerSpec.host_key`. `houses`: those of the engine.
        """
        self._policy_id = policy_id
        self._settings = settings
        self._num_workers = num_workers
        self._on_gpus = on_gpus
        self._host_key = host_key
        self._houses = houses or Houses()
        self._place: WorkerPlace | None = None
        self._turns = HostTurns()
        # Whether it has answered yet: it is given longer to come up.
        self._is_up = False

    async def fence(self, token: int, *, evenly: bool = False, num_nodes: int = 0) -> WorkerStatus:
        """See `RemoteWorker.fence`."""
        if self._place is None:
            self._place = await self._find_or_make(evenly=evenly, num_nodes=num_nodes)
            self._turns = self._houses.turns(self._place.worker)
        await self._ask(self._place.worker.fence.remote(self._policy_id, token))
        return await self.call(WorkerCore.status)

    async def call(
        self,
        method: Callable[Concatenate[WorkerCore, P], T],
        *args: P.args,
        **options: P.kwargs,
    ) -> T:
        """See `RemoteWorker.call`."""
        if self._place is None:
            # A call after `release` must not start another worker.
            raise WorkerLostError(f"policy {self._policy_id} has no worker")
        worker = self._place.worker
        call = MethodCall.of(method, *args, **options)
        if group := _GROUPS.get(call.name):
            beside = cast("Any", worker.call_beside).options(concurrency_group=group)
            return await self._ask(beside.remote(self._policy_id, call))
        async with self._turns.taken(self._policy_id):
            answer = worker.compute.remote(self._policy_id, cast("MethodCall[object]", call))
            return await self._ask(cast("ObjectRef[T]", answer))

    async def replace(self) -> None:
        """See `RemoteWorker.replace`."""
        await self._leave()

    async def release(self) -> None:
        """See `RemoteWorker.release`."""
        await self._leave()
        async with self._houses.placing:
            free_gpus(self._policy_id)
            free_hosts(self._settings.namespace)

    async def _leave(self) -> None:
        """Leave the process that has the policy, if any; it ends, unless others stay there."""
        namespace = self._settings.namespace
        place, self._place, self._is_up = self._place, None, False
        place = place or await find_place(self._policy_id, namespace)
        if place is not None and await leave(place, self._policy_id):
            self._houses.turns(place.worker).end()
            await end_place(place, namespace)

    async def _find_or_make(self, *, evenly: bool, num_nodes: int) -> WorkerPlace:
        """The policy's process, found, joined or started.

        Raises RESOURCE_EXHAUSTED, and `WorkerLostError` where a new host does not come up.
        """
        namespace = self._settings.namespace
        found = await find_place(self._policy_id, namespace)
        for other in [] if found else hosts(namespace, self._host_key):
            if await self._is_let_in(other):
                found = other
                break
        if found is not None:
            # Who has taken the spare and shares nothing is alone there.
            is_own = found.is_own or (found.name == SPARE and not self._host_key)
            return replace(found, is_own=is_own)
        if not self._host_key:
            name = own_name(self._policy_id)
            made = await self._make(name, self._policy_id, evenly=evenly, num_nodes=num_nodes)
            return WorkerPlace(name=name, worker=made, is_own=True)
        while True:
            async with self._houses.placing:
                name = unused_name(self._host_key, namespace)
                worker = await self._make(name, "", evenly=evenly, num_nodes=num_nodes)
                made = WorkerPlace(name=name, worker=worker)
            is_let_in = await self._is_let_in(made)
            if is_let_in:
                return made
            if is_let_in is None:
                raise WorkerLostError(f"{name} did not come up")

    async def _is_let_in(self, host: WorkerPlace) -> bool | None:
        """Whether a process takes the policy; None: it did not answer, and has ended."""
        args = self._policy_id, self._host_key, self._settings.max_tenants
        return await told(host, host.worker.take.remote(*args), self._settings.namespace)

    async def _make(self, name: str, policy_id: str, *, evenly: bool, num_nodes: int) -> Worker:
        options: dict[str, object] = {}
        if self._on_gpus:
            group = await place(
                policy_id or name, self._num_workers, evenly=evenly, num_nodes=num_nodes
            )
            options["num_gpus"] = 1
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=0
            )
        return make_worker(policy_id, name, self._num_workers, self._settings, **options)

    async def _ask(self, reference: ObjectRef[T]) -> T:
        assert self._place is not None
        max_silence_s = self._settings.max_silence_s if self._is_up else START_S
        turns = self._turns
        try:
            answer = await ask_living(reference, self._place.worker.ping.remote, max_silence_s)
        except ActorLostError as err:
            raise turns.lost(self._policy_id, str(err)) from err
        self._is_up = True
        return answer
