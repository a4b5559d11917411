"""What callers do with a policy's operations: they submit them, and look at them.

A submission becomes an operation only once its body, then its record, are durable; a refused one
takes no seq and leaves nothing behind. An operation is seen as it is now, on change, or once ended
(long poll), which changes nothing. Operations that are not in memory are read from the journal.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from ratoon.engine.commands import (
    ForwardCommand,
    ImportWeightsCommand,
    LoadCheckpointCommand,
    NoKey,
    OperationKey,
    RequestKey,
    SeqKey,
    Submission,
)
from ratoon.engine.crash_points import CrashPoint
from ratoon.engine.files.paths import model_folder, safe_name
from ratoon.engine.journal.records import (
    JournalState,
    OperationRecord,
    check_own_id,
    ended_progress,
)
from ratoon.engine.policy import telemetry
from ratoon.engine.policy.queue import LiveOperation, check_reuse
from ratoon.engine.policy.run import PolicyRun
from ratoon.engine.policy.teachers import Teachers
from ratoon.engine.refusals import (
    check_room,
    checkpoint_not_found,
    disk_full,
    disk_refusal,
    draining,
    full_disk_refused,
    operation_not_found,
    policy_replaced,
    seq_gap,
    superseded,
)
from ratoon.engine.types import Operation
from ratoon.engine.worker.tasks import FencedError, WorkerLostError
from ratoon.engine.worker.worker import WorkerCore
from ratoon.errors import RatoonError, invalid
from ratoon_proto.types import PolicyState

# How often the progress of a running operation is refreshed.
_PROGRESS_S = 0.25
# How long a reader is held for a refresh.
_PROGRESS_WAIT_S = 0.05
# How long a waiting caller is held while an open operation is not in memory.
_AWAY_S = 0.5


class JournalUnknownError(Exception):
    """The journal did not answer a write, so whether it happened must be read again."""


def new_operation_id(policy_id: str) -> str:
    """It contains the policy's id, so that routing a handle needs no lookup."""
    return f"{policy_id}.{uuid.uuid4().hex}"


class Admission:
    """Callers of `find` and `accept` hold the controller's lock."""

    def __init__(self, run: PolicyRun, teachers: Teachers) -> None:
        self._run = run
        self._teachers = teachers

    def check(self, submission: Submission) -> None:
        """Check what needs no queue. Raises INVALID_ARGUMENT, and as `policy_replaced`."""
        run, command, key = self._run, submission.command, submission.key
        if submission.policy_created_at not in (None, run.created_at):
            raise policy_replaced(run.policy_id, run.created_at)
        if not (isinstance(key, NoKey) and isinstance(command, ForwardCommand)):
            key.check(run.spec.sequencing)
        if command.own_checkpoint_id is not None:
            check_own_id(safe_name("checkpoint_id", command.own_checkpoint_id))

    async def check_way_back(self, submission: Submission) -> None:
        """Check the LoadCheckpoint that is to bring a failed policy back.

        Raises CHECKPOINT_NOT_FOUND, and INVALID_ARGUMENT unless its seq is next.
        """
        run, command = self._run, submission.command
        assert isinstance(command, LoadCheckpointCommand)
        known = await run.journal.checkpoints(run.policy_id)
        if all(checkpoint.info.name != command.checkpoint_id for checkpoint in known):
            raise checkpoint_not_found(command.checkpoint_id)
        seq, free = self._seq(submission.key), run.sequencer.next_free
        if seq != free:
            raise invalid("key.seq", seq, f"{free}, the next one: the policy is failed")

    async def hold(self, operation_id: str, submission: Submission) -> RatoonError | None:
        """Make the body durable, for the operation that the submission may become.

        Returns the refusal where the disk has no room, a teacher cannot be asked or the model
        folder cannot be read, for the caller to raise unless the submission turns out to be a
        retry, which needs none of them.
        """
        if isinstance(submission.command, ImportWeightsCommand):
            folder, root = submission.command.folder, self._run.paths.models_root
            try:
                await asyncio.to_thread(model_folder, "model_folder", folder, root)
            except RatoonError as refusal:
                return refusal
        refusal = await self._teachers.refusal(submission)
        if refusal is None and not self._is_awaited(submission):
            # What was sent ahead is on the disk already.
            refusal = await self.disk_refusal(len(submission.body))
        if refusal is not None:
            return refusal
        digest = submission.command.body_digest
        if digest:
            try:
                body = submission.sent or submission.body
                await self._run.bodies.hold(operation_id, digest, body)
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

    async def find(self, key: SeqKey | RequestKey, payload: str) -> OperationRecord | None:
        """The operation that a retry repeats. Raises KEY_REUSED for another payload."""
        record = await self._run.journal.find_key(self._run.policy_id, key)
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
        run, now = self._run, self._run.now()
        holder, num_tokens = submission.holder, submission.num_tokens
        with full_disk_refused():
            await run.claims.take(
                run.policy_id,
                operation_id,
                holder,
                num_tokens=num_tokens,
                body_bytes=submission.body_bytes,
                now=now,
                is_awaited=self._is_awaited(submission),
            )
        try:
            yield
        except RatoonError:
            await run.claims.undo(operation_id, holder, num_tokens, now)
            raise

    def _is_awaited(self, submission: Submission) -> bool:
        """Whether its seq is next, or a student waits for it. It bypasses the queue limit, or the
        queue would deadlock."""
        return submission.is_awaited or self._seq(submission.key) == self._run.sequencer.turn

    def _check_room(self, submission: Submission) -> None:
        run, limits = self._run, self._run.limits
        if self._is_awaited(submission):
            return
        num_open, used = run.ledger.num_open, run.claims.open_bytes(run.policy_id)
        name = f"policy {run.policy_id}: open operations"
        check_room(name, "open_operations", num_open, 1, limits.max_open_operations)
        name, wanted = f"policy {run.policy_id}: bytes of open operations", submission.body_bytes
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
            body_bytes=submission.body_bytes,
            key_id=submission.holder.key_id,
            created_at=self._run.now(),
        )


class OperationViews:
    """Its methods may be called concurrently on one event loop."""

    def __init__(self, run: PolicyRun) -> None:
        self._run = run
        self._progress_until = 0.0
        self._asking: asyncio.Task[None] | None = None
        self._is_over = False

    def let_go(self) -> None:
        """Wake all waiters, who must ask the next process: no operation ends here any more."""
        self._is_over = True
        for live in self._run.ledger.open_operations():
            live.wake()

    async def get(self, operation_id: str, wait_s: float) -> Operation:
        """The operation once it has ended, or after `wait_s` seconds.

        Raises OPERATION_NOT_FOUND, SEQ_GAP where it was waited for behind a missing seq for
        `gap_wait_s`, in however many calls, and UNAVAILABLE where the wait would not end before the
        service does.
        """
        live = self._run.ledger.find(operation_id)
        if live is None:
            return await self._ended_or_later(operation_id, wait_s)
        clock, limits = asyncio.get_running_loop().time, self._run.limits
        begin = clock()
        deadline = begin + min(wait_s, limits.max_wait_s)
        while not live.is_final and clock() < deadline:
            if self._is_over:
                raise draining()
            missing = self._missing(live)
            if not missing:
                await live.wait_change(deadline - clock())
                continue
            gap_ends = live.waits_since(missing, clock()) + limits.gap_wait_s
            if gap_ends <= begin:
                # A caller that asks again is held as well: the seq may be arriving by now.
                gap_ends = min(begin + limits.gap_wait_s, deadline)
            await live.wait_change(min(gap_ends, deadline) - clock())
            if clock() >= gap_ends and self._missing(live) == missing:
                raise seq_gap(live.record.seq, missing)
        return await self.of(live)

    async def watch(self, seen: Operation, wait_s: float) -> Operation:
        """The operation once it differs from `seen`, or after `wait_s` seconds.

        Raises UNAVAILABLE where the watch would not end before the service does.
        """
        live = self._run.ledger.find(seen.operation_id)
        if live is None:
            return await self._ended_or_later(seen.operation_id, wait_s)
        clock = asyncio.get_running_loop().time
        deadline = clock() + min(wait_s, self._run.limits.max_wait_s)
        while True:
            view = await self.of(live)
            remaining = deadline - clock()
            if view != seen or remaining <= 0:
                return view
            if self._is_over:
                raise draining()
            await live.wait_change(min(remaining, _PROGRESS_S) if live.is_started else remaining)

    async def past(self, operation_id: str) -> OperationRecord:
        """A journaled operation that is no longer in memory. Raises OPERATION_NOT_FOUND."""
        record = await self._run.journal.find_operation(operation_id)
        if record is None or record.policy_id != self._run.policy_id:
            raise operation_not_found(operation_id)
        if record.kind.is_lifecycle:
            raise operation_not_found(operation_id)  # `lifecycle` answers these.
        return record

    async def of(self, live: LiveOperation) -> Operation:
        """The current view of an operation in memory."""
        if live.is_started and not live.is_final:
            await self._refresh(live)
        return self.known(live)

    def known(self, live: LiveOperation) -> Operation:
        """The view of an operation in memory, with the progress that was last asked for."""
        progress = ended_progress(live.record.result) if live.is_final else live.progress
        return live.record.to_operation(progress=progress, blocked_by_seq=self._missing(live))

    async def _ended_or_later(self, operation_id: str, wait_s: float) -> Operation:
        """The operation from the journal; open operations reappear after recovery."""
        record = await self.past(operation_id)
        if not record.state.is_final:
            await asyncio.sleep(min(wait_s, _AWAY_S))
        return view_of(record)

    async def _refresh(self, live: LiveOperation) -> None:
        """Ask the worker for its progress, at most once per `_PROGRESS_S` for all readers.

        A busy or hung worker does not hold readers up: a late answer serves the next one.
        """
        now = asyncio.get_running_loop().time()
        is_asked = self._asking is not None and not self._asking.done()
        if is_asked or now < self._progress_until:
            return
        self._progress_until = now + _PROGRESS_S
        self._asking = asyncio.create_task(self._ask_progress(live))
        await asyncio.wait({self._asking}, timeout=_PROGRESS_WAIT_S)

    async def _ask_progress(self, live: LiveOperation) -> None:
        with contextlib.suppress(WorkerLostError):
            live.progress = await self._run.worker.call(WorkerCore.progress)

    def _missing(self, live: LiveOperation) -> int:
        """The missing seq that blocks a queued operation; 0: none."""
        if live.is_final or live.record.seq == 0:
            return 0
        return self._run.sequencer.blocked_by(live.record.seq)


def view_of(record: OperationRecord) -> Operation:
    """View of an operation that is neither running nor queued."""
    progress = ended_progress(record.result)
    return record.to_operation(progress=progress, blocked_by_seq=0)
