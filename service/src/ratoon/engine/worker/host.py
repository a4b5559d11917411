"""The worker of each policy that a process serves: of a single one, or of tenants of one model.

    untaken -> taken by a policy -> [others of its key join, any of them leaves] -> over

Each tenant has a `WorkerCore`: token, seqs, outcomes, window and copies of its own. What one does
reaches another in two ways alone. Their calls run one after the other, as the process has one
thread that computes; and a tenant whose trainer is in doubt takes the process with it, as what has
broken it may be the device. The others are then as after any loss of a worker: each is replayed
from its own checkpoint and journal.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from ratoon.engine.crash_points import Reach
from ratoon.engine.worker.tasks import WorkerLostError
from ratoon.engine.worker.worker import WorkerCore
from ratoon.garbage import collect_all
from ratoon.log import get_logger
from ratoon.train.spec import TrainerSpec

if TYPE_CHECKING:
    from ratoon.train.trainer import Trainer

_LOG = get_logger("worker")


class WorkerHost:
    """Any thread may call its methods, except for `collect`."""

    def __init__(self, create_trainer: Callable[[TrainerSpec], Trainer], reach: Reach) -> None:
        """`create_trainer` loads a model for the first tenant. `reach`: as `WorkerCore`'s."""
        self._create_trainer = create_trainer
        self._reach = reach
        self._lock = threading.Lock()
        self._cores: dict[str, WorkerCore] = {}
        # What tenants must have in common, and how many there may be; None: nobody has come.
        self._kind: tuple[str, int] | None = None
        self._is_over = False
        # Somebody has left, and what it held may have reference cycles.
        self._has_garbage = False

    def take(self, policy_id: str, key: str, max_tenants: int) -> bool:
        """Let a policy in, unless it is in; returns whether it is a tenant now.

        `key`: its `TrainerSpec.host_key`; the first tenant's is the process's own.
        """
        with self._lock:
            if policy_id in self._cores:
                return True
            if self._kind is None:
                self._kind = key, max_tenants if key else 1
            own, limit = self._kind
            if own != key or self._is_over or len(self._cores) >= limit:
                return False
            create = partial(self._create, policy_id)
            self._cores[policy_id] = WorkerCore(create, self._reach)
            return True

    def leave(self, policy_id: str) -> bool:
        """End a policy's worker, if it has one here; returns whether the process is to end.

        It is once nobody is left, or one that leaves was lost with the process; nobody is let in
        then.
        """
        with self._lock:
            core = self._cores.pop(policy_id, None)
            if core is None:
                return self._is_over
            self._is_over |= core.is_process_lost or not self._cores
        core.end()
        self._has_garbage = True
        _LOG.info("policy has left", policy_id=policy_id)
        return self._is_over

    def tenants(self) -> tuple[str, ...]:
        """Ids of the policies that are here."""
        with self._lock:
            return tuple(self._cores)

    def core(self, policy_id: str) -> WorkerCore:
        """A policy's worker. Raises `WorkerLostError` where it has none here."""
        with self._lock:
            core = self._cores.get(policy_id)
        if core is None:
            raise WorkerLostError(f"policy {policy_id} has no worker here")
        return core

    def collect(self) -> None:
        """Free what those who left have held. The compute thread calls it before other work."""
        if self._has_garbage:
            collect_all()
            self._has_garbage = False

    def _create(self, policy_id: str, spec: TrainerSpec) -> Trainer:
        with self._lock:
            others = [core for name, core in self._cores.items() if name != policy_id]
        trainers = [trainer for core in others if (trainer := core.trainer) is not None]
        return trainers[0].beside(spec) if trainers else self._create_trainer(spec)
