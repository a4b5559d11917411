"""The worker's process: a detached actor around `worker.WorkerCore`.

Trainer calls run on one thread, always the same, except for writing snapshots and versions;
`fence`, `progress` and `cancel` never wait for them. Processes that look the actor up import this
module, so the constructor imports torch.
"""

# Ray's decorators are only partly typed.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import ray

from ratoon.engine.crash_points import make_reach
from ratoon.engine.worker.backends import list_backends
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
from ratoon.garbage import frozen_imports
from ratoon.log import configure_logging, get_logger
from ratoon.stream.manifest import WeightManifest
from ratoon_proto.types import BackendInfo, Progress

if TYPE_CHECKING:
    from ratoon.engine.worker.compile_cache import CompileCache
    from ratoon.train.saved_state import AsOf
    from ratoon.train.spec import TrainerSpec
    from ratoon.train.trainer import Trainer

_LOG = get_logger("worker")
CONCURRENCY_GROUPS = {"compute": 1, "control": 4, "files": 1, "versions": 1}


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
        """`policy_id` "": none yet (a spare). `num_workers`: its ranks. `compiled`: where compiled
        kernels are kept, and the rates of GPUs that were measured. `max_silence_s`: after which
        another rank is lost.
        """
        configure_logging(log_level)
        started = time.perf_counter()
        with frozen_imports():
            from ratoon.engine.cluster.ranks import Ranks

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
        from ratoon.engine.worker.compile_cache import CompileCache, start_compiler

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
        self._core.fence(token)
        if failure := self._ranks.failure():
            raise WorkerLostError(str(failure)) from failure

    @ray.method(concurrency_group="control")
    def progress(self) -> Progress:
        """Raises what a creation of several ranks has failed with: it may never return."""
        if failure := self._ranks.failure():
            raise failure
        return self._core.progress()

    @ray.method(concurrency_group="control")
    def cancel(self, operation_id: str) -> None:
        self._core.cancel(operation_id)

    @ray.method(concurrency_group="compute")
    def status(self) -> WorkerStatus:
        return self._core.status()

    @ray.method(concurrency_group="compute")
    def load(self, token: int, request: LoadRequest) -> Loaded:
        return self._core.load(token, self._policy_id, request)

    @ray.method(concurrency_group="compute")
    def apply(self, token: int, task: Task) -> Outcome:
        return self._core.apply(token, task)

    @ray.method(concurrency_group="compute")
    def skip(self, token: int, seq: int, outcome: Outcome) -> None:
        self._core.skip(token, seq, outcome)

    @ray.method(concurrency_group="compute")
    def forward(self, token: int, task: Task) -> Outcome:
        return self._core.forward(token, task)

    @ray.method(concurrency_group="compute")
    def restore(self, token: int, tasks: tuple[Task, ...]) -> None:
        self._core.restore(token, tasks)

    @ray.method(concurrency_group="compute")
    def hold(self, token: int, version: int) -> None:
        self._core.hold(token, version)

    @ray.method(concurrency_group="versions")
    def publish(
        self, token: int, version: int, weights_root: str, created_at: float, deltas: bool
    ) -> WeightManifest:
        return self._core.publish(token, version, weights_root, created_at, deltas)

    @ray.method(concurrency_group="compute")
    def write_gradients(self, token: int, request: GradientRequest) -> GradientFile:
        return self._core.write_gradients(token, request)

    @ray.method(concurrency_group="compute")
    def snapshot(self, token: int) -> str:
        return self._core.snapshot(token)

    @ray.method(concurrency_group="files")
    def write_snapshot(self, token: int, folder: str, as_of: AsOf) -> int:
        return self._core.write_snapshot(token, folder, as_of)
