"""A controller's ports, over Ray: the journal at the coordinator, the worker in its own process.

Enters the calls of `Journal` and `WorkerPort`, leaves their answers. Invariant: a lost worker is
`WorkerLostError`; a lost coordinator is waited for (Ray repeats the call, and writes may be
repeated).
"""

# Ray's decorators are only partly typed.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeVar, cast

import ray
from ray import ObjectRef
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ratoon.engine.checkpoints import Checkpoint, Covered
from ratoon.engine.gpu_environment import GPU_ENVIRONMENT
from ratoon.engine.journal import OperationEnd, OperationRecord, PolicyHistory, RollBack
from ratoon.engine.numerics import Numerics
from ratoon.engine.placement import end_worker, place
from ratoon.engine.ray_calls import ActorLostError, ask, find_actor, kill_actor
from ratoon.engine.settings import COORDINATOR_NAME, EngineSettings, worker_name
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
from ratoon.engine.types import (
    OperationKey,
    OperationResult,
    PolicyState,
    Progress,
)
from ratoon.engine.worker_actor import CONCURRENCY_GROUPS, WorkerActor
from ratoon.model.spec import ModelInfo
from ratoon.stream.manifest import WeightManifest

if TYPE_CHECKING:
    from collections.abc import Callable

    from ray.actor import ActorClass, ActorProxy

    from ratoon.engine.coordinator_actor import CoordinatorActor

T = TypeVar("T")


class RayJournal:
    """`Journal` at the coordinator."""

    def __init__(self, namespace: str) -> None:
        found = find_actor(COORDINATOR_NAME, namespace)
        assert found is not None, "a controller is made by the coordinator"
        self._coordinator = cast("ActorProxy[CoordinatorActor]", found)

    async def acquire(self, policy_id: str) -> int:
        return await ask(self._coordinator.acquire.remote(policy_id))

    async def history(self, policy_id: str) -> PolicyHistory:
        return await ask(self._coordinator.history.remote(policy_id))

    async def records_from(self, policy_id: str, seq: int) -> tuple[OperationRecord, ...]:
        return await ask(self._coordinator.records_from.remote(policy_id, seq))

    async def bodies_in_use(self, policy_id: str) -> Mapping[str, str]:
        return await ask(self._coordinator.bodies_in_use.remote(policy_id))

    async def results_in_use(self, policy_id: str) -> frozenset[str]:
        return await ask(self._coordinator.results_in_use.remote(policy_id))

    async def numerics(self, digest: str) -> Mapping[str, str]:
        return await ask(self._coordinator.numerics.remote(digest))

    async def find_key(self, policy_id: str, key: OperationKey) -> OperationRecord | None:
        return await ask(self._coordinator.find_key.remote(policy_id, key))

    async def find_operation(self, operation_id: str) -> OperationRecord | None:
        return await ask(self._coordinator.find_operation.remote(operation_id))

    async def accept(self, token: int, record: OperationRecord, next_seq: int) -> None:
        await ask(self._coordinator.accept.remote(token, record, next_seq))

    async def begin(
        self,
        token: int,
        operation_id: str,
        started_at: float,
        plan: dict[str, object] | None,
        numerics: Numerics,
    ) -> None:
        await ask(self._coordinator.begin.remote(token, operation_id, started_at, plan, numerics))

    async def end(self, token: int, policy_id: str, end: OperationEnd) -> None:
        await ask(self._coordinator.end.remote(token, policy_id, end))

    async def amend(self, token: int, operation_id: str, result: OperationResult) -> None:
        await ask(self._coordinator.amend.remote(token, operation_id, result))

    async def cover(
        self, token: int, policy_id: str, automatic: Checkpoint | None, keep: int
    ) -> Covered:
        return await ask(self._coordinator.cover.remote(token, policy_id, automatic, keep))

    async def rebase(
        self, token: int, policy_id: str, digests: Mapping[int, str], numerics: Numerics
    ) -> None:
        await ask(self._coordinator.rebase.remote(token, policy_id, digests, numerics))

    async def fail(self, token: int, policy_id: str, failure: str) -> None:
        await ask(self._coordinator.fail.remote(token, policy_id, failure))

    async def set_published(self, token: int, policy_id: str, published: tuple[int, ...]) -> None:
        await ask(self._coordinator.set_published.remote(token, policy_id, published))

    async def set_policy(
        self, token: int, policy_id: str, state: PolicyState, info: ModelInfo | None
    ) -> None:
        await ask(self._coordinator.set_policy.remote(token, policy_id, state, info))

    async def roll_back(
        self, token: int, policy_id: str, roll_back: RollBack
    ) -> tuple[OperationRecord, ...]:
        return await ask(self._coordinator.roll_back.remote(token, policy_id, roll_back))

    async def checkpoints(self, policy_id: str) -> tuple[Checkpoint, ...]:
        return await ask(self._coordinator.checkpoints.remote(policy_id))


class RayWorker:
    """`WorkerPort` over the policy's worker actor, which `fence` makes where there is none."""

    def __init__(self, policy_id: str, settings: EngineSettings, *, on_gpu: bool) -> None:
        self._policy_id = policy_id
        self._settings = settings
        self._on_gpu = on_gpu
        self._handle: ActorProxy[WorkerActor] | None = None

    async def fence(self, token: int) -> WorkerStatus:
        worker = self._handle = self._handle or await self._find_or_make()
        await _ask_worker(worker.fence.remote(token))
        return await _ask_worker(worker.status.remote())

    async def load(self, token: int, request: LoadRequest) -> Loaded:
        return await _ask_worker(self._worker().load.remote(token, request))

    async def replace(self) -> None:
        self._handle = None
        await kill_actor(worker_name(self._policy_id), self._settings.namespace)

    async def release(self) -> None:
        self._handle = None
        await end_worker(self._policy_id, self._settings.namespace)

    async def prepare(
        self, token: int, command: BatchCommand, body_path: str, old_logprobs: OldLogprobsSource
    ) -> dict[str, object]:
        reference = self._worker().prepare.remote(token, command, body_path, old_logprobs)
        return await _ask_worker(reference)

    async def apply(self, token: int, task: WorkerTask) -> Outcome:
        return await _ask_worker(self._worker().apply.remote(token, task))

    async def skip(self, token: int, seq: int, outcome: Outcome) -> None:
        await _ask_worker(self._worker().skip.remote(token, seq, outcome))

    async def forward(self, token: int, task: ForwardTask) -> Outcome:
        return await _ask_worker(self._worker().forward.remote(token, task))

    async def restore(self, token: int, tasks: tuple[ForwardBackwardTask, ...]) -> None:
        await _ask_worker(self._worker().restore.remote(token, tasks))

    async def publish(
        self, token: int, version: int, weights_root: str, created_at: float
    ) -> WeightManifest:
        reference = self._worker().publish.remote(token, version, weights_root, created_at)
        return await _ask_worker(reference)

    async def snapshot(self, token: int) -> str:
        return await _ask_worker(self._worker().snapshot.remote(token))

    async def write_snapshot(self, token: int, folder: str) -> int:
        return await _ask_worker(self._worker().write_snapshot.remote(token, folder))

    async def progress(self) -> Progress:
        return await _ask_worker(self._worker().progress.remote())

    async def cancel(self, operation_id: str) -> None:
        await _ask_worker(self._worker().cancel.remote(operation_id))

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
        return actor.remote(self._policy_id, settings.log_level, settings.crash_points)


async def _ask_worker(reference: ObjectRef[T]) -> T:
    try:
        return await ask(reference)
    except ActorLostError as err:
        raise WorkerLostError(str(err)) from err
