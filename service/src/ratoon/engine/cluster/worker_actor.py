"""The worker's process: a detached actor around `worker.WorkerCore`.

Each concurrency group has threads of its own. All calls of the trainer run on "compute", which is
one thread, so they never overlap. "files" writes snapshots and "versions" writes published weights
beside them; "control" answers at any time. Processes that look the actor up import this module, so
torch is imported by the constructor.
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
from ratoon.engine.worker.tasks import WorkerLostError
from ratoon.garbage import frozen_imports
from ratoon.log import configure_logging, get_logger
from ratoon.method_call import MethodCall
from ratoon_proto.types import BackendInfo

if TYPE_CHECKING:
    from ratoon.engine.worker.compile_cache import CompileCache
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
        """`policy_id` "": the process is a spare. `num_workers`: the policy's ranks.

        `compiled`: the folder of compiled kernels and of the measured rates of GPUs.
        `max_silence_s`: another rank that answers nothing for so long is lost.
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
