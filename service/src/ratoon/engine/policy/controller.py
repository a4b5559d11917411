"""Owns one policy: takes submissions, runs them in seq order, answers for them.

An operation belongs to the controller, not to its caller: a disconnect changes nothing.

States are the policy's: creating -> ready -> deleting, or failed where the loop cannot go on. On an
unhandled error the loop restarts from `start_policy`, which trusts only the journal and the worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial
from typing import TypeVar

from ratoon.engine.commands import (
    NOBODY,
    Command,
    Holder,
    LoadCheckpointCommand,
    NoKey,
    Submission,
)
from ratoon.engine.crash_points import CrashPoint
from ratoon.engine.files.paths import drop_expired_results
from ratoon.engine.files.uploads import UploadFiles
from ratoon.engine.journal.codec import payload_hash
from ratoon.engine.journal.records import OperationRecord
from ratoon.engine.policy.callers import (
    Admission,
    JournalUnknownError,
    OperationViews,
    new_operation_id,
    view_of,
)
from ratoon.engine.policy.checkpointer import Checkpointer, is_over
from ratoon.engine.policy.executor import Executor
from ratoon.engine.policy.publisher import PublicationState, Publisher
from ratoon.engine.policy.run import PolicyRun, cancel_queued, is_run_too_long
from ratoon.engine.policy.startup import stand_by
from ratoon.engine.policy.turns import GradientReads, TurnLoop
from ratoon.engine.refusals import (
    cancelled,
    checkpoint_not_found,
    draining,
    full_disk_refused,
    is_disk_full,
    policy_not_ready,
    superseded,
    version_not_found,
)
from ratoon.engine.types import (
    Acknowledgement,
    CheckpointInfo,
    ForwardResult,
    NamedVersion,
    Operation,
)
from ratoon.engine.worker.tasks import FencedError, WorkerLostError
from ratoon.engine.worker.worker import WorkerCore
from ratoon.errors import ErrorCode, RatoonError
from ratoon.stream.manifest import WeightManifest
from ratoon_proto.types import GradientManifest, PolicyState, VersionList

# How long a submission, whose body is in memory, waits for a recovery: less than a client's try.
_QUEUE_S = 20.0
T = TypeVar("T")


class Controller:
    """Its methods may be called concurrently on one event loop."""

    def __init__(self, run: PolicyRun, on_ended: Callable[[], None] = lambda: None) -> None:
        """`on_ended` is called once the policy has ended by itself, and its controller is to."""
        self._run = run
        self._views = OperationViews(run)
        self._publisher = Publisher(run, on_stopped=self._restart)
        # Guards the queue: held for submissions, cancellations and restarts.
        self._lock = asyncio.Lock()
        checkpointer = Checkpointer(run)
        executor = Executor(run, self._publisher, checkpointer)
        self._gradients = GradientReads(run)
        self._turns = TurnLoop(
            run, executor, self._publisher, checkpointer, self._gradients, self._lock, on_ended
        )
        self._admission = Admission(run, self._turns.teachers)
        self._uploads = UploadFiles(
            run.paths,
            ttl_s=run.limits.upload_ttl_s,
            max_upload_bytes=run.limits.max_body_bytes,
            max_total_bytes=run.limits.max_queued_bytes,
        )
        # The journal may have a seq that memory lacks; it must not be assigned or counted again.
        self._lacks_seq = False
        self._is_draining = False
        self._is_over = False

    @property
    def state(self) -> PolicyState:
        return self._run.state

    def note_call(self) -> None:
        """A caller has named the policy, which renews its `idle_ttl_s`."""
        self._run.called_at = time.monotonic()

    async def start(self) -> None:
        """Own the policy and begin to take turns. Raises `RatoonError` where it cannot load."""
        await self._turns.start()

    async def fail(self, failure: str) -> None:
        """See `TurnLoop.fail`."""
        await self._turns.fail(failure)

    async def close(self, grace_s: float) -> None:
        """Refuse new work, cancel open operations, and stop: the policy is being deleted."""
        self._run.enter(PolicyState.DELETING, self._run.failure)
        for live in self._run.ledger.open_operations():
            with contextlib.suppress(Exception):  # The policy and its journal go anyway.
                await self.cancel_operation(live.operation_id)
        await self._turns.stop(grace_s)
        await self._run.archive.stop()
        for live in self._run.ledger.open_operations():
            live.fail(cancelled(live.operation_id), self._run.now())
            self._run.ledger.settle(live)
        self._publisher.wake()

    async def drain(self, grace_s: float) -> None:
        """Refuse new work, and let the running operation finish within `grace_s` seconds.

        Queued operations are in the journal; the next start continues them.
        """
        self._is_draining = True
        self._turns.pause()
        try:
            await self._turns.stop(grace_s)
        finally:
            self._let_go()

    def abandon(self) -> None:
        """Stop at once, as a crash would, and wake all waiting callers."""
        self._turns.abandon()
        self._run.claims.restore(self._run.policy_id, ())
        self._let_go()

    def _let_go(self) -> None:
        """Wake all waiting callers, who must ask the next process."""
        self._is_over = True
        self._views.let_go()
        self._publisher.wake()

    async def submit(self, submission: Submission) -> Operation:
        """Accept an operation durably, or return the first one's handle for a retry.

        Raises POLICY_NOT_READY, INVALID_ARGUMENT, KEY_REUSED, RESOURCE_EXHAUSTED (then nothing is
        accepted, and no seq is taken), and UNAVAILABLE where a recovery takes long, or where the
        journal does not answer: the operation may have been accepted, which a retry finds out.

        A policy that failed for its numbers takes a LoadCheckpoint, which brings it back. Raises
        CHECKPOINT_NOT_FOUND for it too, and INVALID_ARGUMENT unless its seq is next.
        """
        self._check_taking(submission.command)
        self._admission.check(submission)
        operation_id = new_operation_id(self._run.policy_id)
        key, payload, first = submission.key, payload_hash(submission.command), None
        refusal = await self._admission.hold(operation_id, submission)
        try:
            async with self._queue():
                self._check_taking(submission.command)
                is_failed = self._run.state is PolicyState.FAILED
                if is_failed:
                    await self._turns.given_up()
                    await stand_by(self._run)
                if not isinstance(key, NoKey):
                    first = await self._admission.find(key, payload)
                if first is None and refusal is not None:
                    raise refusal
                self._lacks_seq = self._lacks_seq and not (is_failed or self._turns.is_known)
                if first is None and self._lacks_seq:
                    raise _read_again()
                if first is None and is_failed:
                    await self._admission.check_way_back(submission)
                record = first or await self._accept(operation_id, submission, payload)
                if is_failed and not record.state.is_final:
                    self._turns.bring_back()
        except JournalUnknownError as err:
            self._lacks_seq = True
            raise self._unknown() from err
        except FencedError as err:
            self._run.enter(PolicyState.FAILED, self._run.failure)
            raise superseded() from err
        except Exception:
            await self._admission.drop(operation_id, submission, None)
            raise
        if first is not None:
            await self._admission.drop(operation_id, submission, first)
        live = self._run.ledger.find(record.operation_id)
        return view_of(record) if live is None else self._views.known(live)

    async def get_operation(self, operation_id: str, wait_s: float) -> Operation:
        """See `OperationViews.get`."""
        return await self._views.get(operation_id, wait_s)

    async def watch_operation(self, seen: Operation, wait_s: float) -> Operation:
        """See `OperationViews.watch`."""
        return await self._views.watch(seen, wait_s)

    async def cancel_operation(self, operation_id: str) -> Operation:
        """Cancel a queued operation, ask a running one to stop; an ended one stays as it is.

        Raises OPERATION_NOT_FOUND; UNAVAILABLE where the journal does not answer or must be read
        again first; POLICY_NOT_READY where it will not be.
        """
        live = self._run.ledger.find(operation_id)
        if live is None:
            record = await self._views.past(operation_id)
            if not record.state.is_final:
                self._check_ready()
                raise _read_again()
            return view_of(record)
        async with self._lock:
            if not live.is_started and not live.is_final:
                try:
                    await cancel_queued(self._run, live)
                except Exception as err:
                    if is_disk_full(err):
                        raise
                    raise self._unknown() from err
                self._turns.wake()
        if not live.is_final:
            live.cancel_requested = True
            with contextlib.suppress(WorkerLostError):  # The turn loop recovers.
                await self._run.worker.call(WorkerCore.cancel, operation_id)
        return await self._views.of(live)

    async def weight_manifest(
        self,
        version: int | None,
        known_version: int | None = None,
        wait_s: float = 0.0,
        name: str = "",
        delta_from: int | None = None,
    ) -> WeightManifest:
        """The manifest of a version that can be fetched; `version` None: the newest.

        What an ended operation made is what a reader gets: while a version is being written, or
        has to be written again after a crash, the call waits for it, whatever `known_version` and
        `wait_s` are. A policy that publishes on request writes its current version for the call.
        Beyond that the call waits up to `wait_s` seconds for a version that no operation has made
        yet; with `known_version`, for a newest version that is another one. It has a version
        written once: where that fails, it waits for another one. With `name` the version is the one
        of that name. With `delta_from` it waits no longer for a version that is being written than
        until the delta from that version can be fetched.

        Versions of a failed policy stay readable. Raises WEIGHTS_NOT_FOUND, POLICY_NOT_READY,
        POLICY_FAILED where it would wait for a failed policy, and UNAVAILABLE where the wait would
        not end before the service does.
        """
        run, clock = self._run, asyncio.get_running_loop().time
        deadline = clock() + min(wait_s, run.limits.max_wait_s)
        asked: int | None = None
        if name:
            if not run.failure:
                self._check_ready()
            version = run.version_of(name)
        while True:
            if not run.failure:
                self._check_ready()
                if self._publisher.is_wanted(version, asked):
                    if self._is_over:
                        raise draining()
                    asked = run.version
                    await self._turns.publish()
                if self._publisher.state_of(version) is PublicationState.WRITING:
                    announced = await self._publisher.announced(delta_from)
                    if announced is not None:
                        return announced
            left_s: float | None = deadline - clock()
            if left_s <= 0 or self._publisher.is_published(version, known_version):
                async with self._lock:  # A start, or its rollback of versions, holds it.
                    # Lost with its worker, a publication is begun again by the start after it.
                    if run.failure or not self._publisher.state_of(version).is_begun:
                        manifest = await self._publisher.manifest(version)
                        if manifest is not None:
                            return manifest
                        continue
                left_s = None
            elif run.failure:
                raise policy_not_ready(run.policy_id, run.state, run.failure)
            if self._is_over:
                raise draining()
            await self._publisher.wait_change(left_s)

    async def ack_weights(self, ack: Acknowledgement) -> int | None:
        """See `Publisher.acknowledge`. Raises POLICY_NOT_READY too."""
        if not self._run.failure:
            self._check_ready()
        async with self._lock:  # A rollback of versions holds it.
            return await self._publisher.acknowledge(ack)

    async def versions(self) -> VersionList:
        """See `Publisher.versions`. Raises POLICY_NOT_READY; a failed policy answers."""
        if not self._run.failure:
            self._check_ready()
        return await self._publisher.versions()

    async def read_gradients(self, names: tuple[str, ...]) -> GradientManifest:
        """Gradient sums of the open window, of the tensors of these names in exported weights.

        Raises INVALID_ARGUMENT, WINDOW_EMPTY, WINDOW_POISONED, RESOURCE_EXHAUSTED, WORKER_LOST,
        POLICY_NOT_READY, POLICY_FAILED.
        """
        self._check_taking()
        if self._run.state is PolicyState.RELEASED:
            self._run.window.select(())  # It has none open, which no worker needs to say.
        manifest = self._gradients.ask(names)
        self._turns.wake()
        return await asyncio.shield(manifest)

    async def release(self) -> None:
        """Put the policy away once nothing is left to run; it is put away on return.

        Raises WINDOW_OPEN, POLICY_NOT_READY, POLICY_FAILED, and UNAVAILABLE where it has work, or
        its state is being written, for longer than callers wait.
        """
        self._check_taking()
        if self._run.state is PolicyState.RELEASED:
            return
        try:
            async with asyncio.timeout(self._run.limits.max_wait_s):
                await self._turns.release()
        except TimeoutError:
            text = f"policy {self._run.policy_id} still has work, or its state is being written"
            raise RatoonError(ErrorCode.UNAVAILABLE, f"{text}; ask again") from None

    async def put_upload_part(
        self, upload_id: str, part_index: int, body: bytes, holder: Holder = NOBODY
    ) -> None:
        """Store a part of a batch.

        Raises KEY_REUSED, BODY_TOO_LARGE, POLICY_NOT_READY, RESOURCE_EXHAUSTED.
        """
        self._check_taking()
        refusal = await self._admission.disk_refusal(len(body))
        if refusal is not None:
            raise refusal
        with full_disk_refused():
            await asyncio.to_thread(
                self._uploads.put,
                upload_id,
                part_index,
                body,
                key_id=holder.key_id,
                check_key=partial(self._run.claims.check_upload, holder),
            )

    async def get_upload_parts(self, upload_id: str, num_parts: int) -> list[bytes]:
        """Parts 0 to num_parts - 1. Raises UPLOAD_NOT_FOUND naming the missing one."""
        self._check_ready()
        return await asyncio.to_thread(self._uploads.get, upload_id, num_parts)

    async def delete_checkpoint(self, name: str) -> CheckpointInfo:
        """Take a checkpoint's name away, and have its files deleted once no recovery needs them.

        Returns what it was. Raises CHECKPOINT_NOT_FOUND, POLICY_NOT_READY, POLICY_FAILED, and
        UNAVAILABLE where the journal does not answer.
        """
        found = await self._named(self._run.journal.release, name)
        if found is None:
            raise checkpoint_not_found(name)
        self._turns.collect()
        return found

    async def delete_version(self, name: str) -> NamedVersion:
        """Take a version's name away, and have its files deleted unless something else keeps them.

        Returns what it was. Raises WEIGHTS_NOT_FOUND, and otherwise as `delete_checkpoint`.
        """
        found = await self._named(self._run.journal.unname, name)
        if found is None:
            raise version_not_found(name)
        self._turns.collect()
        return found

    async def set_ttl(self, name: str, ttl_s: float | None, *, of_version: bool) -> None:
        """Have a checkpoint, or a version's name, expire in `ttl_s` seconds; None: never.

        Raises CHECKPOINT_NOT_FOUND, WEIGHTS_NOT_FOUND, and otherwise as `delete_checkpoint`.
        """
        expires_at = None if ttl_s is None else self._run.now() + ttl_s
        change = partial(self._run.journal.set_expiry, expires_at=expires_at, of_version=of_version)
        if await self._named(change, name, stays=True) is None:
            raise version_not_found(name) if of_version else checkpoint_not_found(name)

    async def _named(
        self,
        change: Callable[[int, str, str], Awaitable[tuple[T | None, int]]],
        name: str,
        *,
        stays: bool = False,
    ) -> T | None:
        """Have the journal change what has a name, or else take it away; returns what it is."""
        self._check_taking()
        run = self._run
        async with self._lock:  # A start reads the names.
            self._check_taking()
            try:
                found, position = await change(run.token, run.policy_id, name)
            except FencedError as err:
                raise superseded() from err
            except Exception as err:
                if is_disk_full(err):
                    raise
                raise self._unknown() from err
            run.has_come_to(position)
            if isinstance(found, NamedVersion):
                known = (found if named.name == name else named for named in run.named)
                run.named = tuple(each for each in known if stays or each is not found)
            run.reach(CrashPoint.ENGINE_AFTER_RELEASE)
        return found

    async def sweep(self) -> None:
        """Delete uploads, results, checkpoints and versions that have expired, unless the policy
        failed."""
        if self._run.failure:
            return
        now = self._run.now()
        known = await self._run.journal.checkpoints(self._run.policy_id)
        infos = (*(checkpoint.info for checkpoint in known), *self._run.named)
        if any(is_over(info.expires_at, now) for info in infos):
            self._turns.collect()
        protected = await self._named_results()
        ttl_s = self._run.limits.result_ttl_s
        await asyncio.to_thread(self._uploads.drop_expired)
        await asyncio.to_thread(drop_expired_results, self._run.paths, ttl_s, protected)

    @contextlib.asynccontextmanager
    async def _queue(self) -> AsyncGenerator[None, None]:
        """Hold the queue's lock. Raises UNAVAILABLE after `_QUEUE_S`."""
        try:
            async with asyncio.timeout(_QUEUE_S):
                await self._lock.acquire()
        except TimeoutError:
            raise _read_again() from None
        try:
            yield
        finally:
            self._lock.release()

    async def _accept(
        self, operation_id: str, submission: Submission, payload: str
    ) -> OperationRecord:
        record = await self._admission.accept(operation_id, submission, payload)
        if 0 < record.seq < self._run.sequencer.highest:
            for live in self._run.ledger.open_operations():
                live.wake()  # Their `blocked_by_seq` may have changed.
        self._turns.teachers.follow()  # The turn before it may take long.
        self._turns.wake()
        return record

    async def _named_results(self) -> frozenset[str]:
        """Digests of Forward results that open operations, or a recovery, will read."""
        run = self._run
        records = [live.record for live in run.ledger.open_operations()]
        digests = set(await run.journal.results_in_use(run.policy_id))
        # Choices of running operations, and of those whose end is not journaled yet.
        names = [r.choices.old_logprobs for r in records if r.choices is not None]
        digests.update(name.partition(".")[0] for name in names if name)
        forwards = {r.command.forward_id for r in records if r.command is not None}
        for operation_id in filter(None, forwards):
            live = run.ledger.find(operation_id)
            record = live.record if live else await run.journal.find_operation(operation_id)
            if record is not None and isinstance(record.result, ForwardResult):
                digests.add(record.result.digest)
        return frozenset(digests)

    def _restart(self) -> None:
        """See `TurnLoop.restart`."""
        self._turns.restart()

    def _unknown(self) -> RatoonError:
        """A write got no answer: read the journal again before the next turn."""
        self._turns.restart()
        return RatoonError(ErrorCode.UNAVAILABLE, "the journal does not answer; ask again")

    def _check_taking(self, command: Command | None = None) -> None:
        if self._is_draining:
            raise draining()
        run = self._run
        is_failed_for_numbers = run.state is PolicyState.FAILED and is_run_too_long(
            run, run.skipped_in_row
        )
        if not (is_failed_for_numbers and isinstance(command, LoadCheckpointCommand)):
            self._check_ready()

    def _check_ready(self) -> None:
        if self._run.state not in (PolicyState.READY, PolicyState.RELEASED):
            run = self._run
            raise policy_not_ready(run.policy_id, run.state, run.failure)


def _read_again() -> RatoonError:
    return RatoonError(ErrorCode.UNAVAILABLE, "the journal is read again; ask again")
