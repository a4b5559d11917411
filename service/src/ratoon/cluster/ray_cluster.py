"""The engine on a Ray cluster: its database, and where its workers run.

Free capacity is checked before it is reserved.
"""

# Ray's decorators are only partly typed.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import os

import ray
from prometheus_client import disable_created_metrics

from ratoon.cluster.placement import (
    check_free_gpus,
    cpus_by_node,
    no_gpus,
    on_gpu_node,
    worker_device,
)
from ratoon.cluster.ray_calls import ask, kill_actor
from ratoon.cluster.worker_places import end_spare, has_room
from ratoon.cluster.worker_process import Houses, RayWorker, make_spare
from ratoon.engine.engine import Engine
from ratoon.engine.files.paths import POLICIES, require_known
from ratoon.engine.journal.journal import Journal
from ratoon.engine.journal.tables import await_database
from ratoon.engine.settings import SAMPLER_NAME, EngineSettings
from ratoon.engine.types import PolicySpec
from ratoon.engine.worker.kernels import list_backends
from ratoon.engine.worker.tasks import RemoteWorker
from ratoon.errors import invalid
from ratoon.model.spec import ModelDtype
from ratoon.stream.files import make_folder, remove_leftovers
from ratoon.train.spec import OptimizerStates, TrainerSpec
from ratoon_proto.types import BackendInfo, ReferencePolicy, Shard


def open_engine(settings: EngineSettings) -> Engine:
    """An engine to be recovered. Raises what opening its database and folders raises."""
    disable_created_metrics()
    make_folder(settings.data_root)
    if settings.weights_root is not None:
        make_folder(settings.weights_root, 0o700)
        remove_leftovers(settings.weights_root)
    journal = Journal(await_database(settings.database_url), settings.limits.max_steps)
    known = [row.spec.policy_id for row in journal.store.policies()]
    require_known(settings.data_root, known)
    remove_leftovers(settings.data_root / POLICIES)
    return Engine(settings, journal, RayCluster(settings))


class RayCluster:
    """Where workers run: a detached process per policy, with those of its other ranks, or one that
    several policies are tenants of."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._houses = Houses()

    @property
    def device(self) -> str:
        return worker_device(self._settings)

    async def check(self, spec: PolicySpec) -> None:
        """Raises UNSUPPORTED, and RESOURCE_EXHAUSTED with the wanted and free amounts."""
        if self.device != "cpu":
            key, settings = self.trainer(spec).host_key, self._settings
            if await has_room(key, settings.max_tenants, settings.namespace):
                return
            is_even = spec.parallel.shard is Shard.WEIGHTS
            await check_free_gpus(spec.parallel.num_workers, evenly=is_even)
            return
        # What Ray knows of the only node may be a part of it.
        cpus = cpus_by_node()
        count, whose = _cores(), "the machine's cores"
        if len(cpus) > 1:
            by_node = ", ".join(f"{each}" for each in sorted(cpus.values(), reverse=True))
            count, whose = sum(cpus.values()), f"the CPUs of the cluster (by node: {by_node})"
        if spec.parallel.num_workers > count:
            expected = f"at most {count}, {whose}"
            raise invalid("parallel.num_workers", spec.parallel.num_workers, expected)

    def require_gpu(self) -> None:
        """Raises RESOURCE_EXHAUSTED where a policy would now get a CPU for want of GPUs."""
        if self._settings.device == "auto" and self.device == "cpu":
            raise no_gpus(1, {})

    def worker(self, policy_id: str, num_workers: int, host_key: str = "") -> RemoteWorker:
        """A policy's worker; no process is started before it is fenced."""
        return RayWorker(
            policy_id,
            self._settings,
            num_workers,
            on_gpus=self.device != "cpu",
            host_key=host_key,
            houses=self._houses,
        )

    async def end_worker(self, policy_id: str) -> None:
        """End the policy's worker, if any, and release its resources."""
        await self.worker(policy_id, 1).release()

    async def close(self) -> None:
        """End the processes that belong to no policy."""
        await end_spare(self._settings.namespace)
        await kill_actor(SAMPLER_NAME, self._settings.namespace)

    async def backends(self) -> tuple[BackendInfo, ...]:
        """Kernel backends on the workers' device."""
        if self.device == "cpu":
            return await ask(make_spare(self._settings).backends.remote())
        node = on_gpu_node()
        task = ray.remote(num_cpus=0, max_calls=1, scheduling_strategy=node)(list_backends)
        return await ask(task.remote())

    def trainer(self, spec: PolicySpec) -> TrainerSpec:
        """What the policy's worker is to load."""
        # Wider weights need no separate master copy.
        is_bf16 = spec.model.dtype is ModelDtype.BFLOAT16
        return TrainerSpec(
            model=spec.model,
            optimizer=spec.optimizer,
            deterministic=spec.deterministic,
            micro_batch_tokens=spec.micro_batch_tokens,
            keep_reference=spec.reference is not ReferencePolicy.NONE,
            attention_backend=spec.attention_backend,
            device=self.device,
            num_threads=self._settings.num_threads or max(1, _cores() // spec.parallel.num_workers),
            parallel=spec.parallel,
            optimizer_states=self._settings.optimizer_states if is_bf16 else OptimizerStates.FP32,
            host_activation_bytes=self._settings.host_activation_bytes,
            self_check_every=self._settings.self_check_every,
            guard=spec.numerics_guard,
            keep_rollouts=spec.keep_rollouts,
            keep_rollouts_bytes=spec.keep_rollouts_bytes,
            publishes_merged=spec.publish.merged,
            # A CPU would train no sooner: there the files are compared, by processes of their own.
            compares_versions=spec.publish.deltas and self.device != "cpu",
            max_tenants=self._settings.max_tenants,
            models_root=self._settings.models_root,
        )


def _cores() -> int:
    """Cores that this process may use, or all where the system does not say (macOS)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
