"""Which versions readers can fetch: publish the current one when it is due, drop the oldest.

Enters the run at a step boundary, leaves a version folder and the list of published versions.
Invariant: a version is published only after the journal says that it was applied.
"""

from __future__ import annotations

import asyncio
import time

from ratoon.engine.crash_points import CrashPoint
from ratoon.engine.policy_run import PolicyRun
from ratoon.engine.types import PublishKind
from ratoon.errors import ErrorCode, RatoonError
from ratoon.stream.manifest import WeightManifest
from ratoon.stream.versions import prune_versions, read_manifest


class Publisher:
    """Acts between operations only: the worker's weights stand still meanwhile."""

    def __init__(self, run: PolicyRun) -> None:
        self._run = run

    def is_due(self) -> bool:
        """Whether the policy publishes its current version without being asked."""
        publish = self._run.spec.publish
        match publish.kind:
            case PublishKind.EVERY:
                return True
            case PublishKind.EVERY_N:
                return self._run.version % publish.every_n == 0
            case PublishKind.ON_REQUEST:
                return False

    def is_wanted(self, version: int | None) -> bool:
        """Whether a reader who asks for `version` (None: the newest) asks to publish it."""
        run = self._run
        on_request = run.spec.publish.kind is PublishKind.ON_REQUEST
        return on_request and version in (None, run.version) and run.version not in run.published

    async def publish(self) -> float:
        """Publish the current version; the seconds it took. Raises what the export raises."""
        run, started = self._run, time.perf_counter()
        run.reach(CrashPoint.CONTROLLER_BEFORE_PUBLISH)
        await run.ports.worker.publish(
            run.token, run.version, str(run.paths.weights), run.ports.now()
        )
        others = tuple(version for version in run.published if version != run.version)
        published = (*others, run.version)[-run.spec.keep_versions :]
        await run.ports.journal.set_published(run.token, run.policy_id, published)
        run.published = published
        run.reach(CrashPoint.CONTROLLER_AFTER_PUBLISH)
        await asyncio.to_thread(prune_versions, run.paths.weights, 1, published)
        return time.perf_counter() - started

    async def manifest(self, version: int | None) -> WeightManifest:
        """The manifest of a published version, None: the newest. Raises WEIGHTS_NOT_FOUND."""
        run = self._run
        if version is None and run.published:
            version = run.published[-1]
        if version is None or version not in run.published:
            raise RatoonError(
                ErrorCode.WEIGHTS_NOT_FOUND,
                f"version: policy {run.policy_id} has published {list(run.published)}",
                field="version",
                got="none" if version is None else str(version),
                expected=f"one of {list(run.published)}",
            )
        return await asyncio.to_thread(read_manifest, run.paths.weights, version)
