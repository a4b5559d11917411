"""Which versions readers can fetch: publish the current one when it is due, drop the oldest.

Enters the run at a step boundary, leaves a version folder and the list of published versions.
Invariant: a version is published only after the journal says that it was applied.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from ratoon.engine.crash_points import CrashPoint
from ratoon.engine.policy_run import PolicyRun
from ratoon.engine.types import PublishKind
from ratoon.errors import ErrorCode, RatoonError
from ratoon.log import get_logger
from ratoon.stream.files import remove_folder
from ratoon.stream.manifest import WeightManifest
from ratoon.stream.versions import list_versions, prune_versions, read_manifest, version_folder

_LOG = get_logger("publisher")


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

    async def catch_up(self) -> None:
        """After a crash: publish the current version where that is due and it cannot be read.

        Of the others those that cannot be read are published no more; what the journal does not
        know is removed. Raises as `publish`.
        """
        run = self._run
        there = await asyncio.to_thread(_keep_readable, run.paths.weights, run.published)
        if there != run.published:
            _LOG.warning("versions lost", policy_id=run.policy_id, published=run.published)
            await run.ports.journal.set_published(run.token, run.policy_id, there)
            was_published, run.published = run.version in run.published, there
        else:
            was_published = False
        if run.version not in there and (was_published or self.is_due()):
            seconds = await self.publish()
            _LOG.info(
                "version published",
                policy_id=self._run.policy_id,
                version=self._run.version,
                publish_s=round(seconds, 3),
            )

    async def publish(self) -> float:
        """Publish the current version; the seconds it took. Raises what the export raises."""
        run, started = self._run, time.perf_counter()
        run.reach(CrashPoint.ENGINE_BEFORE_PUBLISH)
        await run.ports.worker.publish(
            run.token, run.version, str(run.paths.weights), run.ports.now()
        )
        others = tuple(version for version in run.published if version != run.version)
        published = (*others, run.version)[-run.spec.keep_versions :]
        await run.ports.journal.set_published(run.token, run.policy_id, published)
        run.published = published
        run.reach(CrashPoint.ENGINE_AFTER_PUBLISH)
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


def _keep_readable(root: Path, versions: tuple[int, ...]) -> tuple[int, ...]:
    """Those whose files are there; what is left of the others is removed.

    So is any other version: a folder of weights may be older than the journal beside it, and would
    pass for the version that is published next.
    """
    kept = tuple(version for version in versions if _is_readable(root, version))
    for version in {*versions, *list_versions(root)} - set(kept):
        remove_folder(version_folder(root, version))
    return kept


def _is_readable(root: Path, version: int) -> bool:
    folder = version_folder(root, version)
    try:
        files = read_manifest(root, version).files
        return all((folder / file.name).stat().st_size == file.size_bytes for file in files)
    except (RatoonError, OSError):
        return False
