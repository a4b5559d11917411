"""Publishes the current version when it is due, and drops the oldest.

A version is published only once the journal says that it was applied.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path

from ratoon.engine.crash_points import CrashPoint
from ratoon.engine.policy.ledger import Awaited
from ratoon.engine.policy.run import PolicyRun
from ratoon.engine.types import OperationResult, PublishKind, StepResult
from ratoon.errors import ErrorCode, RatoonError
from ratoon.log import get_logger
from ratoon.stream.files import remove_folder
from ratoon.stream.manifest import WeightManifest
from ratoon.stream.versions import list_versions, prune_versions, read_manifest, version_folder

_LOG = get_logger("publisher")


class Publisher(Awaited):
    """Acts only between operations, while the worker's weights do not change.

    Who waits for a version is woken when the published ones change.
    """

    def __init__(self, run: PolicyRun) -> None:
        super().__init__()
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
        """Whether a read of `version` (None: the newest) triggers its publication."""
        run = self._run
        on_request = run.spec.publish.kind is PublishKind.ON_REQUEST
        return on_request and version in (None, run.version) and run.version not in run.published

    def is_there(self, version: int | None, known_version: int | None) -> bool:
        """Whether `version`, or with None a newest other than `known_version`, is published."""
        published = self._run.published
        if version is not None:
            return version in published
        return bool(published) and published[-1] != known_version

    async def catch_up(self) -> None:
        """After a crash: publish the current version where that is due and it is not readable.

        Other unreadable versions are no longer listed, and folders that the journal does not know
        are removed. Raises as `publish`.
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
        """Publish the current version; returns the seconds taken. Raises as the export."""
        seconds = await self._write()
        await self._show(None)
        return seconds

    async def publish_after(self, operation_id: str, result: OperationResult) -> OperationResult:
        """Publish the version that an operation has made, where that is due.

        Returns the result with the publication's duration, or a warning that it failed. One journal
        write holds version and report.
        """
        run = self._run
        if not self.is_due():
            self.wake()  # Who waits may request it.
            return result
        try:
            seconds = await self._write()
        except RatoonError as error:
            _LOG.error("publish failed", policy_id=run.policy_id, error=error.message)
            result = _with_warning(result, f"version {run.version} is not published: {error}")
            step, published = (operation_id, result), run.published
            await run.ports.journal.set_published(run.token, run.policy_id, published, step)
            return result
        result = _with_seconds(result, seconds)
        await self._show((operation_id, result))
        return result

    async def _write(self) -> float:
        """Write the current version's folder; returns the seconds it took."""
        run, started = self._run, time.perf_counter()
        run.reach(CrashPoint.ENGINE_BEFORE_PUBLISH)
        root = str(run.paths.weights)
        await run.ports.worker.publish(run.token, run.version, root, run.ports.now())
        return time.perf_counter() - started

    async def _show(self, step: tuple[str, OperationResult] | None) -> None:
        """List the written version for readers, and drop the oldest."""
        run = self._run
        others = tuple(version for version in run.published if version != run.version)
        published = (*others, run.version)[-run.spec.keep_versions :]
        await run.ports.journal.set_published(run.token, run.policy_id, published, step)
        run.published = published
        self.wake()
        run.reach(CrashPoint.ENGINE_AFTER_PUBLISH)
        await asyncio.to_thread(prune_versions, run.paths.weights, 1, published)

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
    """The versions whose files are complete; all other folders are removed.

    A folder of an unknown version may be older than the journal, and would be taken for the version
    of that number published next.
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


def _with_seconds(result: OperationResult, seconds: float) -> OperationResult:
    if not isinstance(result, StepResult):
        return result
    phases = replace(result.report.seconds, publish=seconds)
    return replace(result, report=replace(result.report, seconds=phases))


def _with_warning(result: OperationResult, text: str) -> OperationResult:
    if not isinstance(result, StepResult):
        return result
    return replace(result, report=replace(result.report, warnings=(*result.report.warnings, text)))
