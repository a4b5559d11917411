"""The controllers of all policies: each is started once, and ended separately.

A failure in one controller's tasks fails only its own policy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from ratoon.engine.policy.controller import Controller
from ratoon.engine.policy.turns import is_cancelled
from ratoon.engine.refusals import overtaken
from ratoon.engine.types import PolicySpec
from ratoon.log import get_logger

if TYPE_CHECKING:
    from ratoon.cluster.ray_cluster import RayCluster

_LOG = get_logger("controllers")
_SWEEP_S = 60.0
# How long the running operation of a deleted policy may go on.
_GRACE_S = 10.0


class Controllers:
    """Controllers by policy id. `make` builds a controller that is not started yet."""

    def __init__(self, make: Callable[[PolicySpec], Controller], cluster: RayCluster) -> None:
        self._make = make
        self._cluster = cluster
        self._kept: dict[str, _ManagedController] = {}

    async def check(self, spec: PolicySpec) -> None:
        """See `RayCluster.check`."""
        await self._cluster.check(spec)

    async def start(self, spec: PolicySpec) -> None:
        """Start the policy's controller and worker, unless they run; they are ready on return.

        Raises `RatoonError` where the model cannot be loaded.
        """
        kept = self._kept.get(spec.policy_id)
        if kept is None:
            kept = self._kept[spec.policy_id] = _ManagedController(self._make(spec))
        await kept.started()

    async def find(self, policy_id: str) -> Controller | None:
        """The policy's controller once it has started. Raises what its start raises."""
        kept = self._kept.get(policy_id)
        return None if kept is None else await kept.started()

    def find_started(self, policy_id: str) -> Controller | None:
        """The policy's controller, if it has started. Does not wait for a start, as `find` does."""
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
        """End the policy's controller at once, without draining it, and then its worker."""
        kept = self._kept.pop(policy_id, None)
        if kept is not None:
            kept.abandon()
        await self._cluster.end_worker(policy_id)

    def require_gpu(self) -> None:
        """See `RayCluster.require_gpu`."""
        self._cluster.require_gpu()

    async def fail(self, policy_id: str, failure: str) -> bool:
        """Mark a policy as failed that did not start; end its worker, unless another engine has it.

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


class _ManagedController:
    """One controller, and the tasks that start it and sweep its files."""

    def __init__(self, controller: Controller) -> None:
        self.controller = controller
        self._start: asyncio.Task[None] | None = None
        self._sweep = asyncio.get_running_loop().create_task(self._sweep_often())

    @property
    def is_started(self) -> bool:
        return self._start is not None and self._start.done()

    async def started(self) -> Controller:
        """The controller, once it has started. The first caller starts it. Raises `RatoonError`."""
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
