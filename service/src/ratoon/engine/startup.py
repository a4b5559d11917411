"""How a controller comes to own its policy, at first and after any crash.

Enters the journal's history and the worker's status, leaves a run that goes on where the journal
ends. Invariant: the token is raised on the journal and the worker before either is read.

A worker that agrees with the journal is kept; the outcome that it holds and the journal does not
completes the record. Otherwise the policy goes back to its newest checkpoint, or its initial
weights, and everything past it fails explicitly.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from ratoon.engine import telemetry
from ratoon.engine.executor import Executor
from ratoon.engine.files import drop_unknown_checkpoints, make_policy_folders
from ratoon.engine.journal import JournalState, OperationRecord, PolicyHistory, RollBack
from ratoon.engine.policy_run import PolicyRun, StoredOutcome
from ratoon.engine.publisher import Publisher
from ratoon.engine.sequencer import Sequencer
from ratoon.engine.tasks import (
    CheckpointWeights,
    InitialWeights,
    LoadRequest,
    WorkerLostError,
    WorkerStatus,
)
from ratoon.engine.types import OperationKind, PolicyState
from ratoon.engine.window import Window
from ratoon.errors import ErrorCode, RatoonError
from ratoon.log import get_logger
from ratoon.model.spec import ModelInfo

_LOG = get_logger("startup")


async def start_policy(run: PolicyRun, executor: Executor, publisher: Publisher) -> None:
    """Make `run` ready to take turns. Raises `RatoonError` where the model cannot be loaded."""
    await asyncio.to_thread(make_policy_folders, run.paths)
    journal, worker = run.ports.journal, run.ports.worker
    run.token = await journal.acquire(run.policy_id)
    try:
        status = await worker.fence(run.token)
    except WorkerLostError:
        await worker.replace()
        status = await worker.fence(run.token)
    history = await journal.history(run.policy_id)
    info: ModelInfo | None = None
    keeps_worker = status.is_loaded and agrees(history, status)
    if not keeps_worker:
        info = await _reload(run, history)
        history = await journal.history(run.policy_id)
        status = replace(status, last_seq=history.policy.next_seq - 1, last_outcome=None)
    _adopt(run, history, status)
    await _settle_ended(run)
    _fail_unsequenced(run)
    await run.bodies.reconcile(_needed_bodies(run))
    open_ids = [live.operation_id for live in run.ledger.open_operations()]
    await asyncio.to_thread(run.claims.sweep, open_ids)
    if keeps_worker and run.stored_outcome is None and run.window.is_open:
        await executor.restore_window()
    if publisher.is_due() and run.version not in run.published and run.stored_outcome is None:
        await publisher.publish()
    await journal.set_policy(run.token, run.policy_id, PolicyState.READY, info)
    run.state = PolicyState.READY
    run.send(telemetry.versions(run.policy_id, run.version, run.published))
    if info is not None:
        run.send(telemetry.model(run.policy_id, info))


def agrees(history: PolicyHistory, status: WorkerStatus) -> bool:
    """Whether a worker's state is what the journal says, but for the end of its last seq. Pure."""
    for record in history.records:
        is_last = record.seq == status.last_seq and status.last_outcome is not None
        if record.seq <= status.last_seq and not record.state.is_final and not is_last:
            return False
        if record.seq > status.last_seq and record.state is JournalState.APPLIED:
            return False
    return status.last_seq < history.policy.next_seq


async def _reload(run: PolicyRun, history: PolicyHistory) -> ModelInfo:
    """Bring the worker to the newest checkpoint and fail everything past it."""
    checkpoint = history.checkpoint
    roll_back = RollBack(
        seq=checkpoint.seq if checkpoint else 0,
        replay_from_seq=checkpoint.replay_from_seq if checkpoint else 1,
        version=checkpoint.version if checkpoint else 0,
        checkpoint_id=checkpoint.checkpoint_id if checkpoint else "",
        finished_at=run.ports.now(),
    )
    changed = await run.ports.journal.roll_back(run.token, run.policy_id, roll_back)
    for record in changed:
        run.send(telemetry.entered(record, JournalState.FAILED))
        live = run.ledger.find(record.operation_id)
        if live is not None:
            live.set_record(record)
            run.ledger.settle(live)
    if changed:
        _LOG.warning(
            "policy rolled back",
            policy_id=run.policy_id,
            version=roll_back.version,
            num_failed=len(changed),
        )
    known = await run.ports.journal.checkpoints(run.policy_id)
    names = frozenset(checkpoint.checkpoint_id for checkpoint in known)
    await asyncio.to_thread(drop_unknown_checkpoints, run.paths, names)
    kept = tuple(v for v in history.policy.published if v <= roll_back.version)
    if kept != history.policy.published:
        await run.ports.journal.set_published(run.token, run.policy_id, kept)
    request = LoadRequest(
        trainer=run.trainer,
        source=CheckpointWeights(folder=str(run.paths.checkpoint(checkpoint.checkpoint_id)))
        if checkpoint
        else InitialWeights(),
        version=roll_back.version,
        last_seq=history.policy.next_seq - 1,
    )
    return await run.ports.worker.load(run.token, request)


def _adopt(run: PolicyRun, history: PolicyHistory, status: WorkerStatus) -> None:
    """Take over what the journal says: versions, window, queue, bodies."""
    policy = history.policy
    run.version, run.max_version = policy.version, policy.max_version
    run.published = policy.published
    by_seq = {record.seq: record for record in history.records}
    last = by_seq.get(status.last_seq)
    run.stored_outcome, turn = None, status.last_seq + 1
    if last is not None and not last.state.is_final:
        assert status.last_outcome is not None
        run.stored_outcome = StoredOutcome(seq=last.seq, outcome=status.last_outcome)
        turn = last.seq
    run.window, run.window_records = Window(), {}
    run.sequencer = Sequencer(turn=turn)
    for record in history.records:
        if record.seq < turn:
            _adopt_past(run, record)
        else:
            _adopt_open(run, record)


def _adopt_past(run: PolicyRun, record: OperationRecord) -> None:
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
    live.is_started = False
    live.set_record(record)


def _needed_bodies(run: PolicyRun) -> dict[str, str]:
    """Digests by operation, of the open window and the queue."""
    records = [live.record for live in run.ledger.open_operations()]
    records += run.window_records.values()
    return {record.operation_id: record.body_digest for record in records if record.body_digest}


async def _settle_ended(run: PolicyRun) -> None:
    """What the journal knows to have ended, and memory does not: an answer was lost."""
    for live in run.ledger.open_operations():
        record = await run.ports.journal.find_operation(live.operation_id)
        if record is not None and record.state.is_final:
            live.set_record(record)
            run.ledger.settle(live)
            run.send(telemetry.entered(record, record.state))


def _fail_unsequenced(run: PolicyRun) -> None:
    """Forwards without a key are not journaled: those in flight are lost, and say so."""
    for live in run.ledger.open_operations():
        if live.record.seq == 0:
            error = RatoonError(ErrorCode.WORKER_LOST, "the worker was lost; submit it again")
            live.fail(error, run.ports.now())
            run.ledger.settle(live)
            run.send(telemetry.entered(live.record, JournalState.FAILED))
