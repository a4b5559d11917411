"""What a starting controller takes over from the journal: versions, window, queue.

Operations below the current turn are past, the others are queued; afterwards memory and journal
agree on what has ended.
"""

from __future__ import annotations

from dataclasses import replace

from ratoon.engine.journal.records import RUN_KINDS, JournalState, OperationRecord, PolicyHistory
from ratoon.engine.policy import telemetry
from ratoon.engine.policy.run import PolicyRun
from ratoon.engine.policy.sequencer import Sequencer
from ratoon.engine.policy.window import Window
from ratoon.engine.worker.tasks import WorkerStatus
from ratoon.errors import ErrorCode, RatoonError
from ratoon_proto.types import OperationKind, OperationState


def agrees(history: PolicyHistory, status: WorkerStatus) -> bool:
    """Whether a worker's state matches the journal, except for how its last seq ended. Pure."""
    closed, is_pending = history.closed, False
    if history.policy.info is None:
        return False  # Its first load did not finish, so the model info is lost.
    if closed is not None and closed.seq > status.last_seq:
        return False  # A recovery did not finish.
    if not _has_journaled_seqs(history, status):
        return False
    for record in history.records:
        is_last = record.seq == status.last_seq and status.last_outcome is not None
        if is_last and record.state.is_final and not _ended_alike(record, status):
            return False
        if record.seq <= status.last_seq and not record.state.is_final:
            if not is_last:
                return False
            is_pending = True
        if record.seq > status.last_seq and record.state is JournalState.APPLIED:
            return False
    if status.last_seq >= history.policy.next_seq:
        return False
    return is_pending or _has_journaled_state(history, status)


def adopt(run: PolicyRun, history: PolicyHistory, status: WorkerStatus) -> None:
    """Take over versions, window and queue from the journal."""
    policy = history.policy
    run.version, run.max_version = policy.version, policy.max_version
    run.published = policy.published
    by_seq = {record.seq: record for record in history.records}
    last = by_seq.get(status.last_seq)
    run.stored_outcome, turn = None, status.last_seq + 1
    if last is not None and not last.state.is_final:
        assert status.last_outcome is not None
        run.stored_outcome, turn = status.last_outcome, last.seq
    run.window, run.window_records = Window(), {}
    run.sequencer = Sequencer(turn=turn)
    for record in history.records:
        if record.seq < turn:
            _adopt_past(run, record)
        else:
            _adopt_open(run, record)


async def settle_ended(run: PolicyRun) -> None:
    """Settle open operations that have ended in the journal, whose answer was lost.

    One that the journal lost altogether fails; the caller may submit it again.
    """
    for live in run.ledger.open_operations():
        record = await run.ports.journal.find_operation(live.operation_id)
        if record is None and live.record.seq:
            error = RatoonError(ErrorCode.UNAVAILABLE, "the journal has lost it: submit it again")
            live.fail(error, run.ports.now())
            run.ledger.settle(live)
            run.send(telemetry.entered(live.record, JournalState.FAILED))
        elif record is not None and record.state.is_final:
            live.set_record(record)
            run.ledger.settle(live)
            run.send(telemetry.entered(record, record.state))


def fail_unsequenced(run: PolicyRun) -> None:
    """Fail open Forwards without a key: they are not journaled, so they are lost."""
    for live in run.ledger.open_operations():
        if live.record.seq == 0:
            error = RatoonError(ErrorCode.WORKER_LOST, "the worker was lost; submit it again")
            live.fail(error, run.ports.now())
            run.ledger.settle(live)
            run.send(telemetry.entered(live.record, JournalState.FAILED))


def _has_journaled_seqs(history: PolicyHistory, status: WorkerStatus) -> bool:
    """Whether every operation that the worker has seen is in the journal, the last one by its id.

    A database that failed over may have lost some.
    """
    seen = [record for record in history.records if record.seq <= status.last_seq]
    closed_seq = history.closed.seq if history.closed else 0
    if [record.seq for record in seen] != list(range(closed_seq + 1, status.last_seq + 1)):
        return False
    last = seen[-1] if seen else history.closed
    if last is None or status.last_outcome is None:
        return True
    return last.operation_id == status.last_outcome.operation_id


def _ended_alike(record: OperationRecord, status: WorkerStatus) -> bool:
    """Whether worker and journal agree that the operation was applied, where that matters."""
    outcome = status.last_outcome
    assert outcome is not None
    is_done = outcome.state is OperationState.DONE
    return record.kind not in RUN_KINDS or is_done == (record.state is JournalState.APPLIED)


def _has_journaled_state(history: PolicyHistory, status: WorkerStatus) -> bool:
    """Whether versions match, and digests where both sides have one."""
    journaled = history.closed.weights_digest if history.closed else ""
    has_digests = bool(journaled and status.weights_digest)
    is_same = not has_digests or journaled == status.weights_digest
    return is_same and status.version == history.policy.version


def _adopt_past(run: PolicyRun, record: OperationRecord) -> None:
    if record.state is JournalState.LOST:
        # Gradients of the window are lost, and nobody knows which.
        run.window = run.window.with_failed(record.seq)
        return
    if record.kind is not OperationKind.FORWARD_BACKWARD:
        return
    if record.state is JournalState.APPLIED:
        run.window = run.window.with_applied(record.seq)
        run.window_records[record.seq] = record
    elif record.state is JournalState.FAILED:
        run.window = run.window.with_failed(record.seq)


def _adopt_open(run: PolicyRun, record: OperationRecord) -> None:
    run.sequencer.accept(record.seq, record.operation_id)
    if record.state.is_final:
        run.sequencer.consume(record.seq)
        return
    live = run.ledger.find(record.operation_id) or run.ledger.add(record)
    live.set_record(record)
    # The worker has run it, so it can no longer be cancelled as a queued one.
    stored = run.stored_outcome
    live.is_started = stored is not None and stored.operation_id == record.operation_id
    if stored is not None and live.is_started:
        live.start(stored.started_at)
        # Keeps the files that the choices name.
        live.set_record(replace(live.record, choices=stored.choices))
