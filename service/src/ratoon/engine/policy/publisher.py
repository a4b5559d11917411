"""Publishes the current version when it is due, beside the next operations; drops the oldest.

A version with a name stays listed until the name is taken away.

A version can be fetched only once the journal says that it was applied. The next one is held once
this one can be fetched, so that no crash leaves a version out.

    applied -> held: copied -> journaled -> written while other operations run -> published

A version with a delta may be announced before its files are written: who has the parent can make
the files then. The journal lists it once they are there, as any other, so a crash in between costs
a reader nothing but the wait for whole files: the same version is written again, bit for bit.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from enum import Enum

from ratoon import metrics
from ratoon.engine.crash_points import CrashPoint
from ratoon.engine.policy import telemetry
from ratoon.engine.policy.queue import Awaited
from ratoon.engine.policy.receivers import Receivers, describe_versions, version_info
from ratoon.engine.policy.run import LostWorkers, PolicyRun
from ratoon.engine.refusals import disk_refusal, superseded
from ratoon.engine.types import Acknowledgement, OperationResult
from ratoon.engine.worker.tasks import FencedError
from ratoon.engine.worker.worker import WorkerCore
from ratoon.errors import ErrorCode, RatoonError
from ratoon.log import get_logger
from ratoon.stream.manifest import WeightManifest
from ratoon.stream.versions import (
    list_versions,
    prune_versions,
    set_aside,
    whole_version,
)
from ratoon.warning_kinds import WarningKind, warn
from ratoon_proto.types import PublishKind, StepResult, StepWarning, VersionList

_LOG = get_logger("publisher")
# Fraction of an operation's duration during which the next operation yields to publishing.
_HEAD_START = 0.05


class PublicationState(Enum):
    """How far the publication of one version has come; afterwards it is published or refused."""

    # No version is under way.
    NONE = "none"
    # Its weights are copied; the journal may not have the operation that made it yet.
    HELD = "held"
    # It is written while other operations run.
    WRITING = "writing"
    # Its writing was stopped; the next start begins it again.
    UNFINISHED = "unfinished"

    @property
    def is_begun(self) -> bool:
        """Whether the operation that made the version has ended, so that readers wait for it."""
        return self in (PublicationState.WRITING, PublicationState.UNFINISHED)


class Publisher(Awaited):
    """Publishes one version at a time; its states are `PublicationState`.

    Callers that wait for a version are woken when the published ones change. `on_stopped` is called
    where a publication ends for a reason that only a new start can clear.
    """

    def __init__(self, run: PolicyRun, on_stopped: Callable[[], None]) -> None:
        super().__init__()
        self._run = run
        self._on_stopped = on_stopped
        self.receivers = Receivers(max_held=run.limits.max_held_versions, now=run.now)
        # The lock is held while versions leave the published ones.
        self._listing = asyncio.Lock()
        # The version under way, its state, and the task that writes it.
        self._version: int | None = None
        self._state = PublicationState.NONE
        self._landing: asyncio.Task[None] | None = None
        # Its manifest, once it is announced; None: it is not, and will not be.
        self._announced: asyncio.Future[WeightManifest | None] | None = None
        # The version that could not be published, and why.
        self._refused: tuple[int, RatoonError] | None = None
        # The version whose writing failed, until a later attempt ends.
        self._stopped: int | None = None
        # The fault of each damaged version, and the version that was damaged last.
        self._damaged: dict[int, RatoonError] = {}
        self._damaged_last: int | None = None
        self._lost_workers = LostWorkers()

    @property
    def is_stopped(self) -> bool:
        """Whether the last publication was stopped, and has not ended since."""
        return self._stopped is not None

    @property
    def newest(self) -> int | None:
        """The version published last, which after a LoadCheckpoint may not be the highest."""
        return self._run.published[-1] if self._run.published else None

    def state_of(self, version: int | None) -> PublicationState:
        """State of the version under way, if that is `version`; None: whichever it is."""
        return self._state if version in (None, self._version) else PublicationState.NONE

    def is_published(self, version: int | None, known_version: int | None = None) -> bool:
        """Whether `version` is published; None: a newest version other than `known_version`."""
        if version is not None:
            return version in self._run.listed
        return self.newest not in (None, known_version)

    def is_wanted(self, version: int | None, asked: int | None = None) -> bool:
        """Whether a read of `version` (None: the newest) triggers its publication.

        `asked`: the version that the same read has asked for. Where its publication was refused
        since, the read does not trigger it again.
        """
        current = self._run.version
        is_published = current == self.newest if version is None else self._has(current)
        if is_published or current == self._version:
            return False
        on_request = self._run.spec.publish.kind is PublishKind.ON_REQUEST
        is_refused = self._refused is not None and self._refused[0] == current
        if is_refused and (current == asked or (version is None and not on_request)):
            return False
        if version == current and current in self._run.listed:
            return True  # Its name is left, its files are not.
        return version in (None, current) and (on_request or self._is_due(current))

    async def hold(self, version: int, result: OperationResult) -> OperationResult:
        """Copy the weights of the `version` that an operation has made, where that is due.

        Returns the result with the seconds that the worker was held, or a warning that the version
        is not published, and with one of receivers that serve old weights. Raises
        `WorkerLostError`, and what stopped the version before.
        """
        if not self._is_due(version):
            return result
        started = time.perf_counter()
        error = await self._hold(version)
        lag = self.receivers.lag_warning(self.newest, self._run.spec.publish)
        result = result if lag is None else _with_warning(result, lag)
        if error is not None:
            text = f"version {version} is not published: {error}"
            return _with_warning(result, warn(WarningKind.NOT_PUBLISHED, text))
        return _with_seconds(result, time.perf_counter() - started)

    def begin(self) -> None:
        """Write the held version, if there is one, now that the journal has its step."""
        if self._state is not PublicationState.HELD:
            self.wake()  # Waiting callers may request the current version.
            return
        assert self._version is not None
        self._state = PublicationState.WRITING
        self._announced = asyncio.get_running_loop().create_future()
        landing = self._land(self._version)
        self._landing = asyncio.get_running_loop().create_task(landing)
        self._landing.add_done_callback(self._over)

    async def publish(self) -> None:
        """Begin to publish the current version, unless it is published or under way.

        Where its publication was stopped before, the call waits until this attempt ends and raises
        what stops it again: the turn loop then counts and delays the restarts, and no operation
        that runs at the same time can be the cause. Raises `WorkerLostError`.
        """
        version = self._run.version
        is_under_way = version == self._version and self._state is not PublicationState.UNFINISHED
        if version == self.newest or is_under_way:
            return
        await self._hold(version, is_requested=True)
        self.begin()
        if version == self._stopped:
            await self._landed_well()

    async def published(self) -> WeightManifest:
        """The manifest of the current version, once it is published.

        Raises why it cannot be, RESOURCE_EXHAUSTED where the disk has no room for one more, and
        `WorkerLostError`.
        """
        version = self._run.version
        while True:
            if version != self._version and not self._has(version):
                refusal = await asyncio.to_thread(self._disk_refusal)
                if refusal is not None:
                    raise refusal
            if not self._has(version):
                await self.publish()
            await self._landed_well()
            manifest = await self.manifest(version)
            if manifest is not None:
                return manifest
            if self._refused is not None and self._refused[0] == version:
                raise self._refused[1]  # It was damaged, and damaged again.

    async def collect(self) -> None:
        """Remove versions that nothing keeps any more; called between two turns."""
        there = await asyncio.to_thread(list_versions, self._run.paths.weights)
        if not self._kept.issuperset(there):
            await self.landed()
            await self._prune()

    async def catch_up(self, *, has_worker: bool, is_lost: bool) -> None:
        """After a crash: publish the current version where it is due, or was lost (`is_lost`).

        Without a worker that is left to a reader, who brings it back. Raises `WorkerLostError`.
        """
        run = self._run
        is_whole = self.newest == run.version or not (is_lost or self._is_due(run.version))
        if is_whole or not has_worker:
            self._leave()
            self.wake()
            return
        if run.stored_outcome is not None:
            self._version, self._state = run.version, PublicationState.HELD
            self.begin()
            await self._landed_well()
        else:
            await self.publish()

    async def landed(self, timeout_s: float | None = None) -> None:
        """Wait until no version is being written, at most `timeout_s` seconds; None: for ever."""
        if self._landing is not None:
            await asyncio.wait([self._landing], timeout=timeout_s)

    async def announced(self, delta_from: int | None) -> WeightManifest | None:
        """The manifest of the version under way, as soon as its delta from `delta_from` can be
        fetched; None, once the version is written, or its writing stopped, if it has none."""
        announced = self._announced
        if delta_from is None or self._landing is None or announced is None:
            await self.landed()
            return None
        await asyncio.wait([self._landing, announced], return_when=asyncio.FIRST_COMPLETED)
        manifest = announced.result() if announced.done() else None
        if manifest is None or delta_from not in (d.parent_version for d in manifest.deltas):
            await self.landed()
            return None
        return manifest if self._is_announced(manifest.version) else None

    def _is_announced(self, version: int) -> bool:
        if self._version != version or self._state is not PublicationState.WRITING:
            return False
        announced = self._announced
        return announced is not None and announced.done() and announced.result() is not None

    async def get_ahead(self, operation_s: float) -> None:
        """On CPUs, let the version that an operation of so many seconds made be written first.

        There an operation takes all cores, and writer threads stall the compute threads at their
        next barrier. A slow disk delays nobody: the head start is a fraction of the operation's own
        duration.
        """
        if self._run.trainer.device == "cpu":
            await self.landed(_HEAD_START * operation_s)

    async def stop(self) -> None:
        """Stop the writing of the version under way; the next start begins it again."""
        landing, self._landing = self._landing, None
        if self._state is PublicationState.WRITING:
            self._state = PublicationState.UNFINISHED
        elif self._state is PublicationState.HELD:
            self._leave()
        if landing is not None:
            landing.cancel()
            await asyncio.wait([landing])  # Its cancel is not this task's.
            self.wake()

    def abandon(self) -> None:
        """Cancel the writing of the version under way without waiting for its end."""
        if self._landing is not None:
            self._landing.cancel()

    async def manifest(self, version: int | None) -> WeightManifest | None:
        """The manifest of a published version, None: the newest.

        None where the version turns out to be damaged: it is published no more, and the caller
        looks again. Raises WEIGHTS_NOT_FOUND, or why the version could not be published.
        """
        run = self._run
        wanted = self.newest if version is None else version
        if wanted is not None and self._has(wanted):
            root = run.paths.weights
            try:
                return await asyncio.to_thread(whole_version, root, wanted, run.policy_id)
            except RatoonError as error:
                if error.code is not ErrorCode.WEIGHTS_NOT_FOUND:
                    raise
                await self._drop(wanted, error)
                return None
        if self._refused is not None and version in (None, self._refused[0]):
            raise self._refused[1]
        damaged = max(self._damaged, default=-1) if version is None else version
        raise self._damaged.get(damaged) or self._not_published("version", version)

    async def acknowledge(self, ack: Acknowledgement) -> int | None:
        """Note what a receiver serves and holds; returns the newest published version.

        Raises WEIGHTS_NOT_FOUND where what it would hold is not published, and what
        `Receivers.acknowledge` raises.
        """
        run, held = self._run, ack.holds_version
        if held is not None and self.state_of(held).is_begun and not self._is_announced(held):
            await self.landed()
        async with self._listing:
            if held is not None and not (self._has(held) or self._is_announced(held)):
                raise self._not_published("holds_version", held)
            unknown = self.receivers.acknowledge(ack)
            newest = self.newest
        run.send(telemetry.receivers_gone(run.policy_id, unknown))
        if newest is not None:
            run.send(telemetry.receiver_lags(run.policy_id, self.receivers.lags(newest)))
        return newest

    async def versions(self) -> VersionList:
        """The listed versions whose files are there, and all receivers."""
        run, held = self._run, self.receivers.held()
        args = run.paths.weights, run.policy_id, run.listed, run.named, held
        versions = await asyncio.to_thread(lambda: tuple(describe_versions(*args)))
        return VersionList(versions=versions, receivers=self.receivers.described(self.newest))

    def _has(self, version: int) -> bool:
        """Whether a version is listed, and not known to be damaged."""
        return version in self._run.listed and version not in self._damaged

    def _is_due(self, version: int) -> bool:
        """Whether the policy publishes this version without being asked."""
        publish = self._run.spec.publish
        match publish.kind:
            case PublishKind.EVERY:
                return True
            case PublishKind.EVERY_N:
                return version % publish.every_n == 0
            case PublishKind.ON_REQUEST:
                return False

    async def _hold(self, version: int, *, is_requested: bool = False) -> RatoonError | None:
        """Hold a version once the one before is published; returns why that cannot be.

        `is_requested`: a self-check that is due comes first, and its verdict is told.
        """
        run, name = self._run, str(version)
        await self._landed_well()
        before = self._version, self._state
        self._version, self._state = version, PublicationState.HELD
        try:
            self._lost_workers.check(name)
            call = run.worker.call(WorkerCore.hold, run.token, version, is_requested)
            verdict = await self._lost_workers.counted(name, call)
        except RatoonError as error:
            self._refuse(version, error)
            return error
        except BaseException:
            self._version, self._state = before
            raise
        if verdict is not None:
            run.send(telemetry.self_checked(run.policy_id, verdict))
        return None

    async def _landed_well(self) -> None:
        """Wait for the version that is being written. Raises what stopped it."""
        await self.landed()
        if self._landing is not None:
            self._landing.result()

    def _leave(self) -> None:
        """No version is under way any more."""
        self._version, self._state = None, PublicationState.NONE

    async def _land(self, version: int) -> None:
        run, started = self._run, time.perf_counter()
        run.reach(CrashPoint.ENGINE_BEFORE_PUBLISH)
        root, deltas, now = str(run.paths.weights), run.spec.publish.deltas, run.now()
        try:
            await self._announce(version, root, now)
            call = run.worker.call(WorkerCore.publish, run.token, version, root, now, deltas)
            await self._lost_workers.counted(str(version), call)
        except RatoonError as error:
            self._refuse(version, error)
            return
        await self._show(version)
        seconds = time.perf_counter() - started
        run.send([metrics.PUBLISH_SECONDS.sample(seconds, run.policy_id)])
        _LOG.info(
            "version published",
            policy_id=run.policy_id,
            version=version,
            publish_s=round(seconds, 3),
        )

    async def _announce(self, version: int, root: str, now: float) -> None:
        """Let readers have the version's delta before its files are written, where there is one."""
        run, started = self._run, time.perf_counter()
        manifest = None
        if run.spec.publish.deltas:
            call = run.worker.call(WorkerCore.announce, run.token, version, root, now)
            manifest = await self._lost_workers.counted(str(version), call)
        if self._announced is not None:
            self._announced.set_result(manifest)
        if manifest is not None:
            seconds = round(time.perf_counter() - started, 3)
            _LOG.info(
                "version announced", policy_id=run.policy_id, version=version, delta_s=seconds
            )

    async def _show(self, version: int) -> None:
        """List the written version for readers, and drop the oldest that no receiver holds."""
        run = self._run
        async with self._listing:
            others = tuple(other for other in run.published if other != version)
            there, held = (*others, version), self.receivers.held()
            kept = there[-run.spec.keep_versions :]
            published = tuple(one for one in there if one in kept or one in held)
            await run.set_published(published)
            self._leave()
            self._stopped = None
            self._damaged.pop(version, None)
            self._lost_workers = LostWorkers()
        run.send(telemetry.versions(run.policy_id, run.version, published))
        run.send(telemetry.receiver_lags(run.policy_id, self.receivers.lags(version)))
        self.wake()
        run.reach(CrashPoint.ENGINE_AFTER_PUBLISH)
        await self._prune()

    def _disk_refusal(self) -> RatoonError | None:
        """Why one more version is refused; None: there is room. It takes what the newest does."""
        run, wanted_bytes = self._run, 0
        if self.newest is not None:
            newest = version_info(run.paths.weights, self.newest, run.policy_id)
            wanted_bytes = 0 if newest is None else newest.size_bytes + newest.delta_bytes
        root = run.paths.weights if run.paths.weights.is_dir() else run.paths.root
        return disk_refusal(root, wanted_bytes, run.limits.min_free_disk_bytes)

    @property
    def _kept(self) -> frozenset[int | None]:
        """Versions whose files stay, the one under way among them."""
        return frozenset((*self._run.listed, *self.receivers.held(), self._version))

    async def _prune(self) -> None:
        await asyncio.to_thread(prune_versions, self._run.paths.weights, self._kept)

    async def _drop(self, version: int, error: RatoonError) -> None:
        """Publish a damaged version no more, and set its files aside.

        The current version is written again for the reads that follow, unless it is damaged twice
        in a row.
        """
        run = self._run
        async with self._listing:
            if version not in run.listed:
                return  # It was pruned meanwhile.
            published = tuple(other for other in run.published if other != version)
            try:
                await run.set_published(published)
            except FencedError as err:
                raise superseded() from err  # The files are another controller's.
        kept = await asyncio.to_thread(set_aside, run.paths.weights, version, error.message)
        if kept is not None:
            message = f"{error.message}; its files are kept as {kept.name}"
            error = RatoonError.from_dict({**error.to_dict(), "message": message})
        self._damaged[version] = error
        if version == self._damaged_last:
            self._refused = (version, error)
        self._damaged_last = version
        run.send(telemetry.versions(run.policy_id, run.version, published))

    def _refuse(self, version: int, error: RatoonError) -> None:
        """Note why a version cannot be published; only a read that asks for it tries again."""
        policy_id = self._run.policy_id
        _LOG.error("publish failed", policy_id=policy_id, version=version, error=error.message)
        self._run.send([metrics.PUBLISH_FAILURES.sample(1, policy_id)])
        self._refused = (version, error)
        self._leave()
        self._stopped = None

    def _over(self, landing: asyncio.Task[None]) -> None:
        self.wake()
        if landing.cancelled() or landing is not self._landing:
            return
        error = landing.exception()
        if error is None:
            self._landing = None
        # A newer controller is no fault: the next turn ends this one.
        if isinstance(error, Exception) and not isinstance(error, FencedError):
            _LOG.error("publication stopped", reason=f"{type(error).__name__}: {error}")
            self._stopped = self._version
            self._on_stopped()

    def _not_published(self, field: str, version: int | None) -> RatoonError:
        run = self._run
        return RatoonError(
            ErrorCode.WEIGHTS_NOT_FOUND,
            f"{field}: policy {run.policy_id} has published {list(run.listed)}",
            field=field,
            got="none" if version is None else str(version),
            expected=f"one of {list(run.listed)}",
        )


def _with_seconds(result: OperationResult, seconds: float) -> OperationResult:
    if not isinstance(result, StepResult):
        return result
    phases = replace(result.report.seconds, publish=seconds)
    return replace(result, report=replace(result.report, seconds=phases))


def _with_warning(result: OperationResult, warning: StepWarning) -> OperationResult:
    if not isinstance(result, StepResult):
        return result
    warnings = (*result.report.warnings, warning)
    return replace(result, report=replace(result.report, warnings=warnings))
