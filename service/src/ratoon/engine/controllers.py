"""The controllers of all policies: each is started once, and ended separately.

A failure in one controller's tasks fails its policy alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from ratoon.engine.policy.controller import Controller
from ratoon.engine.policy.turns import is_cancelled
from ratoon.engine.refusals import overtaken
from ratoon.engine.types import PolicySpec
from ratoon.engine.worker.tasks import WorkerPort
from ratoon.log import get_logger
from ratoon.train.spec import TrainerSpec
from ratoon_proto.types import BackendInfo

_LOG = get_logger("controllers")
_SWEEP_S = 60.0
# Grace for what a deleted policy still runs.
_GRACE_S = 10.0


class Cluster(Protocol):
    """Where workers run: `ray_cluster.RayCluster`."""

    async def check(self, spec: PolicySpec) -> None:
        """Raises UNSUPPORTED, and RESOURCE_EXHAUSTED with the wanted and free amounts."""
        ...

    def require_gpu(self) -> None:
        """Raises RESOURCE_EXHAUSTED where a policy would now get a CPU for want of GPUs."""
        ...

    def trainer(self, spec: PolicySpec) -> TrainerSpec:
        """What the policy's worker is to load."""
        ...

    def worker(self, policy_id: str, num_workers: int) -> WorkerPort:
        """A policy's worker; no process is started before it is fenced."""
        ...

    async def end_worker(self, policy_id: str) -> None:
        """End the policy's worker, if any, and release its resources."""
        ...

    async def close(self) -> None:
        """End the processes that belong to no policy."""
        ...

    async def backends(self) -> tuple[BackendInfo, ...]:
        """Kernel backends on the workers' device."""
        ...


class Controllers:
    """Controllers by policy id. `make` gives a policy's controller, not yet started."""

    def __init__(self, make: Callable[[PolicySpec], Controller], cluster: Cluster) -> None:
        self._make = make
        self._cluster = cluster
        self._kept: dict[str, _Kept] = {}

    async def check(self, spec: PolicySpec) -> None:
        """See `Cluster.check`."""
        await self._cluster.check(spec)

    async def start(self, spec: PolicySpec) -> None:
        """Start the policy's controller, unless it runs; it is ready on return.

        Raises `RatoonError` where the model cannot be loaded.
        """
        kept = self._kept.get(spec.policy_id)
        if kept is None:
            kept = self._kept[spec.policy_id] = _Kept(self._make(spec))
        await kept.started()

    async def find(self, policy_id: str) -> Controller | None:
        """The policy's controller once it has started. Raises what its start raises."""
        kept = self._kept.get(policy_id)
        return None if kept is None else await kept.started()

    def find_started(self, policy_id: str) -> Controller | None:
        """The policy's controller, if it has started, so that a query does not wait for a start."""
        kept = self._kept.get(policy_id)
        return kept.controller if kept is not None and kept.is_started else None

    async def stop(self, policy_id: str) -> None:
        """End the policy's controller and worker, where they exist."""
        kept = self._kept.get(policy_id)
        if kept is not None:
            try:
                async with asyncio.timeout(2 * _GRACE_S):
                    await kept.controller.close(_GRACE_S)
            except TimeoutError:
                _LOG.warning("controller did not close", policy_id=policy_id)
        await self.end(policy_id)

    async def end(self, policy_id: str) -> None:
        """Stop all controllers at once, without draining, as a crash would."""
        kept = self._kept.pop(policy_id, None)
        if kept is not None:
            kept.abandon()
        await self._cluster.end_worker(policy_id)

    def require_gpu(self) -> None:
        """See `Cluster.require_gpu`."""
        self._cluster.require_gpu()

    async def fail(self, policy_id: str, failure: str) -> bool:
        """Mark a policy failed that did not start, and end its worker, unless it is another's.

        Returns whether it has a controller; without one nothing is done.
        """
        kept = self._kept.get(policy_id)
        if kept is not None:
            await kept.controller.fail(failure)
        return kept is not None

    async def drain(self, policy_id: str, grace_s: float) -> None:
        """Let the policy's running operation finish within `grace_s` seconds; start no other."""
        kept = self._kept.get(policy_id)
        if kept is None:
            return
        try:
            async with asyncio.timeout(grace_s + _GRACE_S):
                await kept.controller.drain(grace_s)
        except TimeoutError:
            _LOG.warning("controller did not drain", policy_id=policy_id)


class _Kept:
    """One controller, and the tasks that start it and sweep its files."""

    def __init__(self, controller: Controller) -> None:
        self.controller = controller
        self._start: asyncio.Task[None] | None = None
        self._sweep = asyncio.get_running_loop().create_task(self._sweep_often())

    @property
    def is_started(self) -> bool:
        return self._start is not None and self._start.done()

    async def started(self) -> Controller:
        """The started controller: the first caller starts it, others wait. Raises `RatoonError`."""
        start = self._start
        if start is None:
            start = self._start = asyncio.get_running_loop().create_task(self.controller.start())
        try:
            await asyncio.shield(start)
        except asyncio.CancelledError:
            if not start.cancelled() or is_cancelled():
                raise
            raise overtaken() from None
        except Exception:
            if self._start is start:
                self._start = None  # The next caller tries again.
            raise
        return self.controller

    def abandon(self) -> None:
        """Cancel all its tasks."""
        self._sweep.cancel()
        if self._start is not None:
            self._start.cancel()
        self.controller.abandon()

    async def _sweep_often(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            if not self.is_started:
                continue
            try:
                await self.controller.sweep()
            except Exception:  # noqa: BLE001 - what is not deleted now is deleted later
                _LOG.exception("sweep failed")
