"""From a submission to an accepted operation: keys, limits, the body, the record.

An operation is queued only once its body, then its record, are durable. A refused one takes no seq
and leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from ratoon.engine.commands import (
    ForwardCommand,
    ImportWeightsCommand,
    NoKey,
    OperationKey,
    RequestKey,
    SeqKey,
    Submission,
)
from ratoon.engine.crash_points import CrashPoint
from ratoon.engine.files.paths import model_folder, safe_name
from ratoon.engine.journal.records import JournalState, OperationRecord, check_own_id
from ratoon.engine.policy import telemetry
from ratoon.engine.policy.queue import check_reuse
from ratoon.engine.policy.run import PolicyRun
from ratoon.engine.refusals import (
    check_room,
    disk_full,
    disk_refusal,
    full_disk_refused,
    policy_replaced,
    superseded,
)
from ratoon.engine.worker.tasks import FencedError
from ratoon.errors import RatoonError, invalid
from ratoon_proto.types import PolicyState


class JournalUnknownError(Exception):
    """The journal did not answer a write, so whether it happened must be read again."""


def new_operation_id(policy_id: str) -> str:
    """It contains the policy's id, so that routing a handle needs no lookup."""
    return f"{policy_id}.{uuid.uuid4().hex}"


class Admission:
    """Callers of `find` and `accept` hold the controller's lock."""

    def __init__(self, run: PolicyRun) -> None:
        self._run = run

    def check(self, submission: Submission) -> None:
        """Check what needs no queue. Raises INVALID_ARGUMENT, and as `policy_replaced`."""
        run, command, key = self._run, submission.command, submission.key
        if submission.policy_created_at not in (None, run.created_at):
            raise policy_replaced(run.policy_id, run.created_at)
        if not (isinstance(key, NoKey) and isinstance(command, ForwardCommand)):
            key.check(run.spec.sequencing)
        if command.own_checkpoint_id is not None:
            check_own_id(safe_name("checkpoint_id", command.own_checkpoint_id))

    async def hold(self, operation_id: str, submission: Submission) -> RatoonError | None:
        """Make the body durable, for the operation that the submission may become.

        Returns the refusal where the disk has no room, or the model folder cannot be read, for the
        caller to raise unless the submission turns out to be a retry, which needs neither.
        """
        if isinstance(submission.command, ImportWeightsCommand):
            folder, root = submission.command.folder, self._run.paths.models_root
            try:
                await asyncio.to_thread(model_folder, "model_folder", folder, root)
            except RatoonError as refusal:
                return refusal
        if not self._is_awaited(submission.key):
            refusal = await self.disk_refusal(len(submission.body))
            if refusal is not None:
                return refusal
        digest = submission.command.body_digest
        if digest:
            try:
                await self._run.bodies.hold(operation_id, digest, submission.body)
            except FileNotFoundError as err:
                # A newly started controller has removed the temporary file as a leftover.
                raise superseded() from err
            except OSError as err:
                refusal = disk_full(err)
                if refusal is None:
                    raise
                return refusal
            self._run.reach(CrashPoint.ENGINE_AFTER_BODY)
        return None

    async def disk_refusal(self, wanted_bytes: int) -> RatoonError | None:
        """Why `wanted_bytes` more are refused; None: there is room."""
        run = self._run
        reserve = run.limits.min_free_disk_bytes
        return await asyncio.to_thread(disk_refusal, run.paths.root, wanted_bytes, reserve)

    async def drop(
        self, operation_id: str, submission: Submission, first: OperationRecord | None
    ) -> None:
        """Release the body: the submission is not accepted, or it is a retry of `first`."""
        digest = submission.command.body_digest
        if not digest:
            return
        # A record keeps its command for as long as its body is needed. If this controller was
        # replaced, the newer one may have accepted the same submission meanwhile.
        is_needed = first is not None and first.command is not None
        if is_needed or self._run.state is PolicyState.FAILED:
            await self._run.bodies.forget(operation_id, digest)
        else:
            await self._run.bodies.release(operation_id, digest)

    async def find(self, key: OperationKey, payload: str) -> OperationRecord | None:
        """The operation that a retry repeats. Raises KEY_REUSED for another payload."""
        record = await self._run.ports.journal.find_key(self._run.policy_id, key)
        if record is None or record.state is JournalState.LOST:
            return record  # The payload of a lost operation may be lost too.
        check_reuse(key, payload, record)
        return record

    async def accept(
        self, operation_id: str, submission: Submission, payload: str
    ) -> OperationRecord:
        """Journal and queue a new operation, whose body is held.

        Raises RESOURCE_EXHAUSTED, BODY_TOO_LARGE over a quota, INVALID_ARGUMENT for a seq too far
        ahead, and `JournalUnknownError` where the journal did not answer.
        """
        run = self._run
        seq = self._seq(submission.key)
        self._check_room(submission)
        record = self._record(operation_id, submission, seq, payload)
        async with self._claimed(operation_id, submission):
            if seq:
                await self._journal(record, run.sequencer.next_free_after(seq))
        if seq:
            run.sequencer.accept(seq, record.operation_id)
        run.bodies.land(operation_id)
        run.ledger.add(record)
        run.send(telemetry.entered(record, JournalState.ACCEPTED))
        return record

    async def _journal(self, record: OperationRecord, next_seq: int) -> None:
        self._run.reach(CrashPoint.ENGINE_BEFORE_ACCEPT)
        try:
            await self._run.accept(record, next_seq)
        except (FencedError, RatoonError):
            raise
        except Exception as err:
            self._run.bodies.land(record.operation_id)
            raise JournalUnknownError(record.operation_id) from err
        self._run.reach(CrashPoint.ENGINE_AFTER_ACCEPT)

    def _seq(self, key: OperationKey) -> int:
        match key:
            case SeqKey(seq=seq):
                return seq
            case RequestKey():
                return self._run.sequencer.next_free
            case NoKey():
                return 0

    @asynccontextmanager
    async def _claimed(
        self, operation_id: str, submission: Submission
    ) -> AsyncGenerator[None, None]:
        """Count the operation as open, and its tokens as used, unless the block refuses it."""
        run, now = self._run, self._run.ports.now()
        holder, num_tokens = submission.holder, submission.num_tokens
        with full_disk_refused():
            await run.claims.take(
                run.policy_id,
                operation_id,
                holder,
                num_tokens=num_tokens,
                body_bytes=len(submission.body),
                now=now,
                is_awaited=self._is_awaited(submission.key),
            )
        try:
            yield
        except RatoonError:
            await run.claims.undo(operation_id, holder, num_tokens, now)
            raise

    def _is_awaited(self, key: OperationKey) -> bool:
        """Whether its seq is next. It bypasses the queue limit, or the queue would deadlock."""
        return self._seq(key) == self._run.sequencer.turn

    def _check_room(self, submission: Submission) -> None:
        run, limits = self._run, self._run.limits
        if self._is_awaited(submission.key):
            return
        num_open, used = run.ledger.num_open, run.claims.open_bytes(run.policy_id)
        name = f"policy {run.policy_id}: open operations"
        check_room(name, "open_operations", num_open, 1, limits.max_open_operations)
        name, wanted = f"policy {run.policy_id}: bytes of open operations", len(submission.body)
        check_room(name, "queued_bytes", used, wanted, limits.max_queued_bytes)
        seq, free = self._seq(submission.key), run.sequencer.next_free
        if seq > free + limits.max_open_operations:
            # The seqs before it are more than may wait: a caller's slip, which would wait for ever.
            most = free + limits.max_open_operations
            raise invalid("key.seq", seq, f"at most {most}, as {free} has not arrived")

    def _record(
        self, operation_id: str, submission: Submission, seq: int, payload: str
    ) -> OperationRecord:
        key, command = submission.key, submission.command
        return OperationRecord(
            operation_id=operation_id,
            policy_id=self._run.policy_id,
            kind=command.kind,
            seq=seq,
            request_id=key.request_id if isinstance(key, RequestKey) else "",
            payload_hash=payload,
            command=command,
            body_digest=command.body_digest,
            body_bytes=len(submission.body),
            key_id=submission.holder.key_id,
            created_at=self._run.ports.now(),
        )
