"""The engine: one process that owns the journal and the controllers of all policies.

Its public methods are what other processes may call (`client`). A call about a policy goes to that
policy's controller. Lifecycle operations, and calls whose controller is not up, go to `lifecycle`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from importlib.metadata import version
from platform import python_version
from typing import TYPE_CHECKING

from ratoon import __version__, metrics
from ratoon.engine.commands import NOBODY, Holder, Submission
from ratoon.engine.controllers import Controllers
from ratoon.engine.crash_points import make_reach
from ratoon.engine.files.archive import ArchivedBodyFiles, open_archive
from ratoon.engine.files.paths import BodyFiles
from ratoon.engine.journal.journal import Journal, until_room
from ratoon.engine.journal.records import JournalAwayError, OperationRecord
from ratoon.engine.journal.steps import Curves
from ratoon.engine.lifecycle import Lifecycle
from ratoon.engine.policy import telemetry
from ratoon.engine.policy.callers import view_of
from ratoon.engine.policy.controller import Controller
from ratoon.engine.policy.limits import Claims
from ratoon.engine.policy.run import PolicyRun
from ratoon.engine.refusals import (
    not_up,
    operation_not_found,
    policy_not_found,
    policy_not_ready,
)
from ratoon.engine.settings import EngineSettings
from ratoon.engine.types import (
    Acknowledgement,
    CheckpointInfo,
    NamedVersion,
    Operation,
    OperationFilter,
    Place,
    Policy,
    PolicySpec,
)
from ratoon.errors import ErrorCode, RatoonError
from ratoon.log import get_logger
from ratoon.metrics import Change, MetricsTotals
from ratoon.stream.manifest import WeightManifest
from ratoon_proto.types import (
    BackendInfo,
    GradientManifest,
    PolicyState,
    StepHistory,
    VersionList,
    WeightFile,
)

if TYPE_CHECKING:
    from ratoon.cluster.ray_cluster import RayCluster

_LOG = get_logger("engine")
# How long a call waits while a newly started engine reads its policies.
_RECOVER_S = 5.0
# How long it waits for the backends of a newly started worker.
_BACKENDS_S = 1.0
# Rows of steps that are read at a time, in some ten milliseconds.
_STEPS_READ = 1000
# A controller's errors for an operation that it does not have, or no longer answers for.
_NOT_HERE = (
    ErrorCode.OPERATION_NOT_FOUND,
    ErrorCode.POLICY_NOT_READY,
    ErrorCode.POLICY_FAILED,
    ErrorCode.UNAVAILABLE,
)


class Engine:
    """Its public methods are coroutines, which may run concurrently on one event loop."""

    def __init__(self, settings: EngineSettings, journal: Journal, cluster: RayCluster) -> None:
        self._settings = settings
        self._journal = journal
        self._cluster = cluster
        self._metrics = MetricsTotals()
        self._claims = Claims(
            settings.data_root, max_total_bytes=settings.limits.max_total_queued_bytes
        )
        self._reach = make_reach(settings.crash_points)
        self._controllers = Controllers(self._make_controller, cluster)
        self._lifecycle = Lifecycle(
            journal=journal,
            controllers=self._controllers,
            metrics=self._metrics,
            limits=settings.limits,
            data_root=settings.data_root,
            paths_of=settings.paths,
            archive_of=lambda paths: open_archive(settings.storage_url, paths),
            now=time.time,
        )
        self._recovering: asyncio.Task[None] | None = None
        self._backends: asyncio.Task[tuple[BackendInfo, ...]] | None = None

    async def recover(self) -> None:
        """Continue what an earlier engine left, once. Waits for the database, not for policies."""
        if self._recovering is None:
            self._recovering = asyncio.get_running_loop().create_task(self._recover())
        await asyncio.shield(self._recovering)

    async def settings(self) -> EngineSettings:
        return self._settings

    async def create_policy(self, spec: PolicySpec) -> Operation:
        """Begin to create a policy; the same spec again is a retry. See `Lifecycle.create_policy`.

        Raises POLICY_EXISTS, RESOURCE_EXHAUSTED, UNSUPPORTED, UPLOAD_NOT_FOUND.
        """
        await self._recovered()
        return await self._lifecycle.create_policy(spec)

    async def put_model_file(
        self, policy_id: str, file: WeightFile, offset: int, data: bytes
    ) -> int:
        """Store a piece of a model for CreatePolicy. See `Lifecycle.put_model_file`."""
        return await self._lifecycle.put_model_file(policy_id, file, offset, data)

    async def delete_policy(self, policy_id: str) -> Operation:
        """Begin to delete a policy and all its files. See `Lifecycle.delete_policy`.

        Raises POLICY_NOT_FOUND, POLICY_NOT_READY while it is being created, POLICY_FAILED.
        """
        await self._recovered()
        return await self._lifecycle.delete_policy(policy_id)

    async def release_policy(self, policy_id: str) -> Policy:
        """Put a policy away. Raises what `Controller.release` raises, and POLICY_NOT_FOUND."""
        await (await self._controller(policy_id)).release()
        return await self.policy(policy_id)

    async def policy(self, policy_id: str) -> Policy:
        """Raises POLICY_NOT_FOUND."""
        await self.note_call(policy_id)
        return (await self._lifecycle.policy(policy_id)).to_policy()

    async def note_call(self, policy_id: str) -> None:
        """A caller has named the policy: it does not end for as long as its `idle_ttl_s` says."""
        controller = self._controllers.find_started(policy_id)
        if controller is not None:
            controller.note_call()

    async def policies(self) -> tuple[Policy, ...]:
        """All policies, oldest first."""
        return tuple(row.to_policy() for row in await self._journal.policies())

    async def submit(self, submission: Submission) -> Operation:
        """Accept a call durably. Raises what `Controller.submit` raises, and POLICY_NOT_FOUND."""
        return await (await self._controller(submission.policy_id)).submit(submission)

    async def get_operation(self, operation_id: str, wait_s: float) -> Operation:
        """The operation once it has ended, or after `wait_s` seconds.

        Raises OPERATION_NOT_FOUND, SEQ_GAP with `details.missing_seq`.
        """
        clock = asyncio.get_running_loop().time
        deadline = clock() + min(wait_s, self._settings.limits.max_wait_s)
        while True:
            left_s = max(deadline - clock(), 0.0)
            operation = await self._operation(
                operation_id,
                lambda controller, left_s=left_s: controller.get_operation(operation_id, left_s),
                lambda left_s=left_s: self._lifecycle.get_operation(operation_id, left_s),
            )
            # While a controller recovers, the journal's answer comes early: keep polling.
            if operation.state.is_final or clock() >= deadline:
                return operation

    async def list_operations(
        self,
        asked: OperationFilter,
        policies: tuple[str, ...] | None,
        after: Place | None,
        most: int,
    ) -> tuple[tuple[Operation, ...], Place | None]:
        """Operations, newest first; see `SqlStore.list_operations`.

        Raises POLICY_NOT_FOUND where one is named of which nothing is left.
        """
        await self._recovered()
        await self.note_call(asked.policy_id)
        found, goes_on = await self._journal.list_operations(asked, policies, after, most)
        if asked.policy_id and after is None and not found:
            await self._lifecycle.policy(asked.policy_id)
        seen = [await self._seen(record) for record in found]
        return tuple(o for o in seen if not asked.states or o.state in asked.states), goes_on

    async def list_steps(
        self, policy_id: str, figures: tuple[str, ...], seqs: tuple[int, int], max_points: int
    ) -> StepHistory:
        """Steps after the first of `seqs` and before the second (0: up to the newest), as at most
        `max_points` points; `figures` empty: all that there are.

        Rows are read in portions, between which the journal takes other calls. Raises
        INVALID_ARGUMENT for an unknown figure, and POLICY_NOT_FOUND, also where the policy is
        deleted meanwhile.
        """
        curves = Curves(figures, max_points)
        created_at = (await self.policy(policy_id)).created_at
        after_seq, before_seq = seqs
        while True:
            rows = await self._journal.steps(policy_id, after_seq, before_seq, _STEPS_READ)
            await asyncio.to_thread(curves.add, rows)
            if len(rows) < _STEPS_READ:
                break
            after_seq = rows[-1].seq
        if (await self._lifecycle.policy(policy_id)).created_at != created_at:
            raise policy_not_found(policy_id)
        return await asyncio.to_thread(curves.history)

    async def list_versions(self, policy_id: str) -> VersionList:
        """See `Publisher.versions`. Raises POLICY_NOT_FOUND, POLICY_NOT_READY."""
        return await (await self._controller(policy_id)).versions()

    async def watch_operation(self, seen: Operation, wait_s: float) -> Operation:
        """The operation once it differs from `seen`, or after `wait_s` seconds."""
        return await self._operation(
            seen.operation_id,
            lambda controller: controller.watch_operation(seen, wait_s),
            lambda: self._lifecycle.watch_operation(seen, wait_s),
        )

    async def cancel_operation(self, operation_id: str) -> Operation:
        """Ask an operation to stop before it changes weights; one that has ended stays as it is.

        Raises OPERATION_NOT_FOUND, UNSUPPORTED for CreatePolicy and DeletePolicy.
        """
        try:
            controller = await self._controller(_policy_of(operation_id))
            return await controller.cancel_operation(operation_id)
        except RatoonError as error:
            if error.code not in (*_NOT_HERE, ErrorCode.POLICY_NOT_FOUND):
                raise
            found = await self.get_operation(operation_id, 0.0)
            if found.state.is_final:
                return found
            if not found.kind.is_lifecycle:
                raise
        raise RatoonError(ErrorCode.UNSUPPORTED, f"{found.kind} cannot be cancelled")

    async def put_upload_part(
        self, policy_id: str, upload_id: str, part_index: int, body: bytes, holder: Holder = NOBODY
    ) -> None:
        """Store a part of a batch. Raises KEY_REUSED for other bytes, BODY_TOO_LARGE."""
        controller = await self._controller(policy_id)
        await controller.put_upload_part(upload_id, part_index, body, holder)

    async def get_upload_parts(self, policy_id: str, upload_id: str, num_parts: int) -> list[bytes]:
        """Parts 0 to num_parts - 1. Raises UPLOAD_NOT_FOUND naming the missing one."""
        return await (await self._controller(policy_id)).get_upload_parts(upload_id, num_parts)

    async def list_checkpoints(self, policy_id: str) -> tuple[CheckpointInfo, ...]:
        """The checkpoints that callers have saved, by seq. Raises POLICY_NOT_FOUND."""
        await self.policy(policy_id)
        known = await self._journal.checkpoints(policy_id)
        return tuple(checkpoint.info for checkpoint in known if checkpoint.info.name)

    async def delete_checkpoint(self, policy_id: str, name: str) -> CheckpointInfo:
        """Delete a caller's checkpoint. Raises what `Controller.delete_checkpoint` raises."""
        return await (await self._controller(policy_id)).delete_checkpoint(name)

    async def delete_version(self, policy_id: str, name: str) -> NamedVersion:
        """Take a version's name away. Raises what `Controller.delete_version` raises."""
        return await (await self._controller(policy_id)).delete_version(name)

    async def set_ttl(
        self, policy_id: str, name: str, ttl_s: float | None, *, of_version: bool
    ) -> None:
        """Have what a caller has named expire later. Raises what `Controller.set_ttl` raises."""
        controller = await self._controller(policy_id)
        await controller.set_ttl(name, ttl_s, of_version=of_version)

    async def weight_manifest(
        self,
        policy_id: str,
        version: int | None,
        known_version: int | None = None,
        wait_s: float = 0.0,
        name: str = "",
        delta_from: int | None = None,
    ) -> WeightManifest:
        """A published version's manifest; None: the newest. See `Controller.weight_manifest`."""
        controller = await self._controller(policy_id)
        return await controller.weight_manifest(version, known_version, wait_s, name, delta_from)

    async def ack_weights(self, policy_id: str, ack: Acknowledgement) -> int | None:
        """Note what a receiver serves and holds; returns the newest published version.

        Raises POLICY_NOT_FOUND, POLICY_NOT_READY, WEIGHTS_NOT_FOUND, RESOURCE_EXHAUSTED.
        """
        return await (await self._controller(policy_id)).ack_weights(ack)

    async def gradient_manifest(self, policy_id: str, names: tuple[str, ...]) -> GradientManifest:
        """Write gradient sums as a result file. Raises what `Controller.read_gradients` raises."""
        return await (await self._controller(policy_id)).read_gradients(names)

    async def read_output(self, policy_id: str, digest: str) -> bytes:
        """The output of a policy's Forward. Raises OPERATION_NOT_FOUND where it is kept no more."""
        path = self._settings.paths(policy_id).results / digest
        try:
            return await asyncio.to_thread(path.read_bytes)
        except FileNotFoundError as err:
            raise operation_not_found(digest) from err

    async def check_well(self) -> None:
        """Raises UNAVAILABLE where the engine drains, or its database does not answer."""
        self._lifecycle.check_well()

    async def backends(self) -> tuple[BackendInfo, ...]:
        """Kernel backends on the workers' device, determined once; none before that.

        It takes a process that imports torch: a caller who wants the limits waits `_BACKENDS_S`.
        """
        if self._backends is None or (self._backends.done() and self._backends.exception()):
            self._backends = asyncio.get_running_loop().create_task(self._cluster.backends())
        finding = self._backends
        await asyncio.wait({finding}, timeout=_BACKENDS_S)
        return finding.result() if finding.done() else ()

    async def record_metrics(self, changes: Sequence[Change]) -> None:
        """Add changes that other processes have counted."""
        self._metrics.send(changes)

    async def metrics_text(self) -> bytes:
        """The totals of all processes, as Prometheus text."""
        return await asyncio.to_thread(self._metrics.render)

    async def drain(self, grace_s: float) -> None:
        """Refuse new work, and let running operations finish within `grace_s` seconds."""
        await self._lifecycle.drain(grace_s)

    async def stop_policies(self) -> None:
        """End all controllers and workers; the journal stays as it is."""
        self._lifecycle.stop()
        for policy_id in self._lifecycle.policy_ids:
            try:
                await self._controllers.end(policy_id)
            except Exception:  # noqa: BLE001 - whatever it is, the others have to end
                _LOG.exception("not ended", policy_id=policy_id)
        await self._cluster.close()

    async def _recover(self) -> None:
        counts = await until_room(self._journal.count_operations)
        build = (__version__, python_version(), version("torch"))
        self._metrics.send([metrics.BUILD.sample(1, *build), *telemetry.journal_counts(counts)])
        await self._lifecycle.recover()

    async def _recovered(self) -> None:
        """Raises `JournalAwayError` where the engine cannot read its journal in time."""
        try:
            async with asyncio.timeout(_RECOVER_S):
                await self.recover()
        except TimeoutError:
            raise JournalAwayError("the engine still reads its journal") from None

    async def _controller(self, policy_id: str) -> Controller:
        """The policy's started controller.

        Raises POLICY_NOT_FOUND, POLICY_NOT_READY, POLICY_FAILED.
        """
        await self._recovered()
        controller = await self._controllers.find(policy_id)
        await self.note_call(policy_id)
        if controller is None:
            row = await self._lifecycle.policy(policy_id)
            if row.state in (PolicyState.READY, PolicyState.RELEASED):
                raise not_up(policy_id, "it waits for a GPU, or for its turn")
            raise policy_not_ready(policy_id, row.state, row.failure)
        return controller

    async def _operation(
        self,
        operation_id: str,
        of_policy: Callable[[Controller], Awaitable[Operation]],
        of_life: Callable[[], Awaitable[Operation]],
    ) -> Operation:
        controller = self._controllers.find_started(_policy_of(operation_id))
        if controller is not None:
            controller.note_call()
            try:
                return await of_policy(controller)
            except RatoonError as error:
                if error.code not in _NOT_HERE:
                    raise
        return await of_life()

    async def _seen(self, record: OperationRecord) -> Operation:
        """A listed operation as it stands now."""
        if not record.state.is_final:
            with contextlib.suppress(RatoonError):
                return await self.get_operation(record.operation_id, 0.0)
        return view_of(record)

    def _make_controller(self, spec: PolicySpec) -> Controller:
        settings = self._settings
        paths = settings.paths(spec.policy_id)
        archive, trainer = open_archive(settings.storage_url, paths), self._cluster.trainer(spec)
        worker = self._cluster.worker(spec.policy_id, spec.parallel.num_workers, trainer.host_key)
        run = PolicyRun(
            spec=spec,
            trainer=trainer,
            journal=self._journal,
            worker=worker,
            metrics=self._metrics,
            policies=self,
            now=time.time,
            limits=settings.limits,
            checkpoints=settings.checkpoints,
            paths=paths,
            bodies=ArchivedBodyFiles(paths, archive) if settings.storage_url else BodyFiles(paths),
            archive=archive,
            claims=self._claims,
            reach=self._reach,
        )
        return Controller(run, partial(self._lifecycle.clear_ended, spec.policy_id))


def _policy_of(operation_id: str) -> str:
    policy_id, dot, _ = operation_id.rpartition(".")
    if not (policy_id and dot):
        raise operation_not_found(operation_id)
    return policy_id
