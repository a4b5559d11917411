"""Creates and deletes policies, and recovers them after a restart of the engine.

The journal has every acknowledged lifecycle operation, and a restarted engine finishes it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from pathlib import Path

from ratoon.config import LimitsConfig
from ratoon.engine.controllers import Controllers
from ratoon.engine.files.archive import Archive
from ratoon.engine.files.paths import (
    PolicyPaths,
    remove_all_but_checkpoints,
    remove_policy_files,
)
from ratoon.engine.files.sent_models import SentModels
from ratoon.engine.first_states import FirstStates
from ratoon.engine.journal.codec import hash_text, to_text
from ratoon.engine.journal.journal import Journal, until_room, until_there
from ratoon.engine.journal.records import (
    JournalAwayError,
    JournalState,
    OperationRecord,
    PolicyRow,
)
from ratoon.engine.policy import telemetry
from ratoon.engine.policy.callers import new_operation_id, view_of
from ratoon.engine.policy.queue import Ledger, LiveOperation
from ratoon.engine.policy.run import log_end
from ratoon.engine.refusals import (
    disk_refusal,
    draining,
    full_disk_refused,
    is_waited_for,
    operation_not_found,
    policy_exists,
    policy_not_found,
    policy_not_ready,
)
from ratoon.engine.types import FailedResult, Operation, OperationResult, PolicyResult, PolicySpec
from ratoon.engine.worker.tasks import FencedError, WorkerLostError
from ratoon.errors import ErrorCode, RatoonError, described, invalid
from ratoon.log import get_logger
from ratoon.metrics import POLICY_LABEL, Gone, MetricsSink
from ratoon.model.spec import FolderBase
from ratoon_proto.types import EmptyResult, OperationKind, PolicyState, WeightFile

_LOG = get_logger("lifecycle")
# How long a caller that waits is held while its policy's controller is away.
_AWAY_S = 0.5
# Starts in a row that may fail; what is only waited for does not count.
_MAX_FAILURES = 5
_BACKOFF_S = 0.2
_WAITING_S = 2.0


class Lifecycle:
    """Its methods run on the engine's event loop."""

    def __init__(
        self,
        *,
        journal: Journal,
        controllers: Controllers,
        metrics: MetricsSink,
        limits: LimitsConfig,
        data_root: Path,
        paths_of: Callable[[str], PolicyPaths],
        archive_of: Callable[[PolicyPaths], Archive],
        now: Callable[[], float],
    ) -> None:
        self._first_states = FirstStates(journal, paths_of, archive_of, now)
        self._sent_models = SentModels(
            data_root,
            ttl_s=limits.upload_ttl_s,
            max_total_bytes=limits.max_sent_model_bytes,
            paths_of=paths_of,
        )
        self._journal = journal
        self._controllers = controllers
        self._metrics = metrics
        self._limits = limits
        self._data_root = data_root
        self._paths_of = paths_of
        self._archive_of = archive_of
        self._now = now
        self._ledger = Ledger(on_settled=lambda _: None)
        self._lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_draining = self._is_drained = False
        # Policies that may have a worker: they can be stopped while the database is away.
        self._policy_ids: set[str] = set()

    async def recover(self) -> None:
        """Continue what an earlier engine left; returns before policies are loaded."""
        for record in await until_room(self._journal.orphaned_lifecycle_operations):
            self._spawn(self._end_without_policy(self._ledger.add(record)))
        for row in await until_room(self._journal.policies):
            policy_id = row.spec.policy_id
            self._policy_ids.add(policy_id)
            match row.state:
                case PolicyState.CREATING:
                    live = await self._resume_create(policy_id)
                    self._spawn(self._create(row.spec, live))
                case PolicyState.DELETING:
                    live = await self._resume_delete(policy_id)
                    self._spawn(self._delete(policy_id, live))
                case PolicyState.READY | PolicyState.RELEASED | PolicyState.FAILED:
                    self._spawn(self._bring_back(row))
                case PolicyState.ENDED:
                    self.clear_ended(policy_id)

    async def drain(self, grace_s: float) -> None:
        """Refuse new work, and let running operations finish within `grace_s` seconds.

        A policy that does not drain is logged; its operations go on at the next start.
        """
        self._is_draining = True
        names = [*self._policy_ids]
        drains = (self._controllers.drain(name, grace_s) for name in names)
        for name, error in zip(
            names, await asyncio.gather(*drains, return_exceptions=True), strict=True
        ):
            if error is not None:
                _LOG.error("not drained", policy_id=name, reason=f"{type(error).__name__}: {error}")
        self._is_drained = True
        for live in self._ledger.open_operations():
            live.wake()

    def stop(self) -> None:
        """Cancel all tasks; the next engine continues them."""
        for task in self._tasks:
            task.cancel()

    @property
    def policy_ids(self) -> frozenset[str]:
        """Policies that this engine has started, so that they may have a worker."""
        return frozenset(self._policy_ids)

    def check_taking(self) -> None:
        """Raises UNAVAILABLE where this process takes no new work."""
        if self._is_draining:
            raise draining()

    def check_well(self) -> None:
        """Raises UNAVAILABLE, `JournalAwayError`, from cached state: it may be called often."""
        self.check_taking()
        self._journal.check()

    async def create_policy(self, spec: PolicySpec) -> Operation:
        """Begin to create a policy; a retry with the same spec returns the first operation.

        Raises POLICY_EXISTS, RESOURCE_EXHAUSTED, UNSUPPORTED, UPLOAD_NOT_FOUND.
        """
        self.check_taking()
        spec = self._with_own_folder(spec)
        async with self._lock:
            row = await self._journal.policy(spec.policy_id)
            if row is not None:
                return await self._existing(row, spec)
            await self._check_room()
            await asyncio.to_thread(self._sent_models.check, spec.policy_id, _sent_files(spec))
            await self._first_states.check(spec)
            await self._controllers.check(spec)
            record = self._record(spec.policy_id, OperationKind.CREATE_POLICY, to_text(spec))
            horizon = self._now() - self._limits.result_ttl_s
            await self._journal.forget_ended_lifecycle_operations(horizon)
            await self._journal.insert_policy(spec, record)
            self._policy_ids.add(spec.policy_id)
            live = self._accepted(record)
        self._spawn(self._create(spec, live))
        return view_of(live.record)

    async def put_model_file(
        self, policy_id: str, file: WeightFile, offset: int, data: bytes
    ) -> int:
        """Store a piece of a file of a model; returns the bytes that have arrived.

        Raises INVALID_ARGUMENT, RESOURCE_EXHAUSTED.
        """
        self.check_taking()
        await self._check_disk(len(data))
        with full_disk_refused():
            return await asyncio.to_thread(self._sent_models.put, policy_id, file, offset, data)

    async def delete_policy(self, policy_id: str) -> Operation:
        """Begin to delete a policy and all its files.

        Raises POLICY_NOT_FOUND, POLICY_NOT_READY.
        """
        self.check_taking()
        async with self._lock:
            row = await self._journal.policy(policy_id)
            if row is None:
                raise policy_not_found(policy_id)
            if row.state is PolicyState.CREATING:
                raise policy_not_ready(policy_id, row.state)
            kind = OperationKind.DELETE_POLICY
            first = await self._journal.find_lifecycle_operation(policy_id, kind)
            if first is not None:
                return view_of(first)
            record = self._record(policy_id, OperationKind.DELETE_POLICY, policy_id)
            await self._journal.mark_deleting(policy_id, record)
            live = self._accepted(record)
        self._spawn(self._delete(policy_id, live))
        return view_of(live.record)

    async def get_operation(self, operation_id: str, wait_s: float) -> Operation:
        """A lifecycle operation, once it has ended or after `wait_s` seconds.

        Raises OPERATION_NOT_FOUND, and UNAVAILABLE where it would not end before the service does.
        """
        live = self._ledger.find(operation_id)
        if live is None:
            return await self._past(operation_id, wait_s)
        clock = asyncio.get_running_loop().time
        deadline = clock() + min(wait_s, self._limits.max_wait_s)
        while not live.is_final and clock() < deadline:
            self._check_goes_on()
            await live.wait_change(deadline - clock())
        return view_of(live.record)

    async def watch_operation(self, seen: Operation, wait_s: float) -> Operation:
        """A lifecycle operation once it differs from `seen`, or after `wait_s` seconds."""
        live = self._ledger.find(seen.operation_id)
        if live is None:
            return await self._past(seen.operation_id, wait_s)
        if view_of(live.record) == seen:
            self._check_goes_on()
            await live.wait_change(min(wait_s, self._limits.max_wait_s))
        return view_of(live.record)

    async def policy(self, policy_id: str) -> PolicyRow:
        """Raises POLICY_NOT_FOUND."""
        row = await self._journal.policy(policy_id)
        if row is None:
            raise policy_not_found(policy_id)
        return row

    async def _past(self, operation_id: str, wait_s: float) -> Operation:
        """An operation known to the journal only. If it is open, its controller is recovering."""
        if wait_s > 0:
            self._check_goes_on()
        record = await self._journal.find_operation(operation_id)
        if record is None:
            raise operation_not_found(operation_id)
        if not record.state.is_final:
            await asyncio.sleep(min(wait_s, _AWAY_S))
        return view_of(record)

    def _check_goes_on(self) -> None:
        """Raises UNAVAILABLE once drained: no operation ends here any more."""
        if self._is_drained:
            raise draining()

    async def _existing(self, row: PolicyRow, spec: PolicySpec) -> Operation:
        """The first operation, for a retry with the same spec. Raises POLICY_EXISTS."""
        kind, policy_id = OperationKind.CREATE_POLICY, spec.policy_id
        first = await self._journal.find_lifecycle_operation(policy_id, kind)
        is_gone = row.state in (PolicyState.DELETING, PolicyState.ENDED)
        if first is None or row.spec != spec or is_gone:
            is_other = row.spec != spec
            raise policy_exists(policy_id, row.state, row.version, is_other=is_other)
        return view_of(first)

    async def _check_room(self) -> None:
        rows, limit = await self._journal.policies(), self._limits.max_policies
        used = sum(row.state is not PolicyState.ENDED for row in rows)
        if used >= limit:
            raise RatoonError(
                ErrorCode.RESOURCE_EXHAUSTED,
                f"this server has {used} policies of at most {limit} (max_policies): delete one",
                details={"resource": "policies", "wanted": "1", "free": "0"},
            )
        await self._check_disk(0)

    async def _check_disk(self, wanted_bytes: int) -> None:
        reserve = self._limits.min_free_disk_bytes
        refusal = await asyncio.to_thread(disk_refusal, self._data_root, wanted_bytes, reserve)
        if refusal is not None:
            raise refusal

    def _with_own_folder(self, spec: PolicySpec) -> PolicySpec:
        """The spec with the place of its model, if that was sent."""
        base = spec.model.base
        if not (isinstance(base, FolderBase) and base.is_sent):
            return spec
        own = replace(base, folder=str(self._paths_of(spec.policy_id).model))
        return replace(spec, model=replace(spec.model, base=own))

    async def _take_model(self, spec: PolicySpec) -> None:
        """Give a policy its model, if that was sent."""
        files, policy_id = _sent_files(spec), spec.policy_id
        if files:
            with full_disk_refused():
                await asyncio.to_thread(self._sent_models.take, policy_id, files)
            await self._archive_of(self._paths_of(policy_id)).keep_model()

    async def _create(self, spec: PolicySpec, live: LiveOperation) -> None:
        policy_id = spec.policy_id
        self._running(live)
        try:
            await until_room(partial(self._take_model, spec))
            await until_room(partial(self._first_states.take, spec))
            await until_there(lambda: self._controllers.start(spec))
            await self._check_first_state(spec)
        except Exception as err:  # noqa: BLE001 - whatever it is, the caller must hear of it
            # Unlike a policy that comes back, this one is not started again.
            error = _typed(err.__cause__ if isinstance(err.__cause__, WorkerLostError) else err)
            _LOG.error("create failed", policy_id=policy_id, error=error.message)
            await self._forget_at_last(live)
            await self._end(live, JournalState.FAILED, FailedResult(error=error.to_dict()))
            return
        row = await until_room(lambda: self._journal.policy(policy_id))
        assert row is not None, "it is not deleted while it is created"
        await self._end(live, JournalState.APPLIED, PolicyResult(policy=row.to_policy()))

    async def _check_first_state(self, spec: PolicySpec) -> None:
        """Raises INVALID_ARGUMENT where a policy has not taken its source's state."""
        row = await self._journal.policy(spec.policy_id)
        if spec.from_checkpoint and row is not None and row.state is PolicyState.FAILED:
            name = spec.from_checkpoint.checkpoint_id
            raise invalid("spec.from_checkpoint", name, f"one that can be loaded: {row.failure}")

    async def _delete(self, policy_id: str, live: LiveOperation) -> None:
        self._running(live)
        try:
            await self._forget(policy_id, keep_operation_id=live.operation_id)
        except Exception as err:  # noqa: BLE001 - the caller must hear of it, and may try again
            _LOG.exception("delete failed", policy_id=policy_id)
            result = FailedResult(error=_typed(err).to_dict())
            await self._end(live, JournalState.FAILED, result)
        else:
            await self._end(live, JournalState.APPLIED, EmptyResult())

    async def _forget_at_last(self, live: LiveOperation) -> None:
        """Retry `_forget` until it succeeds; nobody can delete a policy that is being created."""
        policy_id = live.record.policy_id
        while True:
            try:
                return await self._forget(policy_id, keep_operation_id=live.operation_id)
            except Exception:  # noqa: BLE001 - the object store is away, or a process does not end
                _LOG.exception("not cleaned up", policy_id=policy_id)
                await asyncio.sleep(_WAITING_S)

    async def _forget(self, policy_id: str, *, keep_operation_id: str) -> None:
        """Delete a policy's processes, files and rows, all but the record of this operation."""
        await self._controllers.stop(policy_id)
        self._policy_ids.discard(policy_id)
        paths = self._paths_of(policy_id)
        await self._archive_of(paths).forget()
        await asyncio.to_thread(remove_policy_files, paths)
        await until_room(
            lambda: self._journal.remove_policy(policy_id, keep_operation_id=keep_operation_id)
        )
        self._metrics.send([Gone(labels={POLICY_LABEL: policy_id})])

    def clear_ended(self, policy_id: str) -> None:
        """Begin to end the processes of a policy that has ended, and to delete what it leaves."""
        self._spawn(self._clear_ended(policy_id))

    async def _clear_ended(self, policy_id: str) -> None:
        paths = self._paths_of(policy_id)
        try:
            await self._controllers.end(policy_id)
            self._policy_ids.discard(policy_id)
            known = await until_room(lambda: self._journal.checkpoints(policy_id))
            kept = {checkpoint.info.checkpoint_id for checkpoint in known}
            await self._archive_of(paths).forget(kept)
            await asyncio.to_thread(remove_all_but_checkpoints, paths, kept)
        except Exception:  # noqa: BLE001 - the next start, or a deletion, does it
            _LOG.exception("not cleaned up", policy_id=policy_id)
        self._metrics.send([Gone(labels={POLICY_LABEL: policy_id})])

    async def _bring_back(self, row: PolicyRow) -> None:
        """Start a policy again. What may pass is tried again, what stays fails the policy."""
        policy_id, failures, failure = row.spec.policy_id, 0, ""
        again: PolicyRow | None = row
        while again is not None and again.state is not PolicyState.DELETING:
            try:
                await until_room(partial(self._start_again, again))
                return
            except FencedError as err:  # Policy and worker are another engine's.
                _LOG.warning("fenced", policy_id=policy_id, reason=str(err))
                return
            except Exception as err:  # noqa: BLE001 - one must not keep the others from coming back
                is_waited = is_waited_for(err)
                failures += not is_waited
                _LOG.exception("policy did not come back", policy_id=policy_id, failures=failures)
                failure = _failed_for_good(err, failures)
            if failure:
                if not await self._controllers.fail(policy_id, failure):
                    token = await self._journal.acquire(policy_id)
                    await self._journal.fail(token, policy_id, failure)
                return
            await asyncio.sleep(_WAITING_S if is_waited else _BACKOFF_S * 2**failures)
            again = await until_room(lambda: self._journal.policy(policy_id))

    async def _start_again(self, row: PolicyRow) -> None:
        """Start a policy; one of a GPU not without one."""
        if row.info is not None and row.info.uses_gpu:
            self._controllers.require_gpu()
        await self._controllers.start(row.spec)

    async def _resume_create(self, policy_id: str) -> LiveOperation:
        kind = OperationKind.CREATE_POLICY
        record = await until_room(lambda: self._journal.find_lifecycle_operation(policy_id, kind))
        assert record is not None, "a policy's life begins with a record"
        return self._ledger.add(record)

    async def _resume_delete(self, policy_id: str) -> LiveOperation:
        """The open DeletePolicy, or a new one where the last one failed."""
        kind = OperationKind.DELETE_POLICY
        record = await until_room(lambda: self._journal.find_lifecycle_operation(policy_id, kind))
        if record is not None:
            return self._ledger.add(record)
        again = self._record(policy_id, kind, policy_id)
        await until_room(lambda: self._journal.mark_deleting(policy_id, again))
        return self._accepted(again)

    async def _end_without_policy(self, live: LiveOperation) -> None:
        """End an orphaned operation: its policy is gone, and the engine died before saying so."""
        if live.record.kind is OperationKind.DELETE_POLICY:
            await self._end(live, JournalState.APPLIED, EmptyResult())
            return
        error = RatoonError(ErrorCode.UNAVAILABLE, "the policy could not be created; try again")
        await self._end(live, JournalState.FAILED, FailedResult(error=error.to_dict()))

    async def _end(self, live: LiveOperation, state: JournalState, result: OperationResult) -> None:
        operation_id, now = live.operation_id, self._now()
        await until_room(
            lambda: self._journal.end_lifecycle_operation(operation_id, state, result, now)
        )
        live.end(state, result, now)
        self._ledger.settle(live)
        log_end(live.record)
        self._metrics.send(telemetry.entered(live.record, state))

    def _accepted(self, record: OperationRecord) -> LiveOperation:
        self._metrics.send(telemetry.entered(record, JournalState.ACCEPTED))
        return self._ledger.add(record)

    def _running(self, live: LiveOperation) -> None:
        live.set_record(replace(live.record, state=JournalState.APPLYING, started_at=self._now()))

    def _record(self, policy_id: str, kind: OperationKind, payload: str) -> OperationRecord:
        return OperationRecord(
            operation_id=new_operation_id(policy_id),
            policy_id=policy_id,
            kind=kind,
            payload_hash=hash_text(payload),
            created_at=self._now(),
        )

    def _spawn(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _sent_files(spec: PolicySpec) -> tuple[WeightFile, ...]:
    """Files of a model that was sent; none for any other."""
    return spec.model.base.files if isinstance(spec.model.base, FolderBase) else ()


def _failed_for_good(error: Exception, failures: int) -> str:
    """Why a policy that did not start again is failed; "": it is tried again."""
    message = _typed(error).message
    if isinstance(error, RatoonError) and not error.retryable:
        return message
    if failures < _MAX_FAILURES:
        return ""
    return f"its controller failed {failures} times in a row, the last time with {message}"


def _typed(error: Exception) -> RatoonError:
    if isinstance(error, RatoonError):
        return error
    if isinstance(error, JournalAwayError):
        return RatoonError(ErrorCode.UNAVAILABLE, str(error))
    if isinstance(error, WorkerLostError):
        return RatoonError(ErrorCode.WORKER_LOST, f"the policy's worker was lost: {error}")
    return RatoonError(ErrorCode.INTERNAL, described(error))
