"""Fails a policy after too many steps in a row were skipped for their numbers.

The count is a function of the journal, so every reader gets the same, and a failed policy is not
brought back.

A step that was taken, a loaded checkpoint or imported weights reset the count. Operations that
change no weights, and steps without tokens or without a gradient, leave it as it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from ratoon.engine.journal.records import JournalState, OperationEnd, OperationRecord
from ratoon.engine.policy import telemetry
from ratoon.engine.policy.run import PolicyRun
from ratoon.engine.refusals import policy_not_ready
from ratoon.engine.types import CheckpointInfo, FailedResult
from ratoon_proto.types import ImportResult, OperationKind, PolicyState, StepResult

_STEPS = (OperationKind.UPDATE, OperationKind.OPTIM_STEP)
# Records read first from the end of the journal; doubled until the count is known.
_FIRST_SPAN = 64


class NumbersFailedError(Exception):
    """The policy is failed for its numbers; the message says why."""


async def note_end(run: PolicyRun, record: OperationRecord) -> None:
    """Count a sequenced operation that ended. Raises `NumbersFailedError` at the limit.

    The caller holds the controller's lock, so that nothing is submitted meanwhile.
    """
    run.skipped_in_row = skipped_after(run.skipped_in_row, record)
    if is_run_too_long(run, run.skipped_in_row):
        await _give_up(run, run.skipped_in_row)


async def read_run(run: PolicyRun, next_seq: int) -> None:
    """Read the count from the journal. Raises as `note_end`."""
    span = _FIRST_SPAN
    while True:
        start = max(1, next_seq - span)
        records = await run.ports.journal.records_from(run.policy_id, start)
        is_known = start == 1 or any(ends_run(record) for record in records)
        count = skipped_in_row(records)
        if is_known or is_run_too_long(run, count):
            break
        span *= 2
    run.skipped_in_row = count
    if is_run_too_long(run, count):
        await _give_up(run, count)


def skipped_in_row(records: Iterable[OperationRecord]) -> int:
    """The count after `records`, in seq order, starting from 0. Pure."""
    count = 0
    for record in records:
        count = skipped_after(count, record)
    return count


def skipped_after(count: int, record: OperationRecord) -> int:
    """The count after a record, given the count before it. Pure."""
    if ends_run(record):
        return 0
    return count + _is_skipped_for_numbers(record)


def ends_run(record: OperationRecord) -> bool:
    """Whether it changed the weights, which resets the count. Pure."""
    if record.state is not JournalState.APPLIED:
        return False
    if record.kind is OperationKind.LOAD_CHECKPOINT:
        return isinstance(record.result, CheckpointInfo)
    if record.kind is OperationKind.IMPORT_WEIGHTS:
        return isinstance(record.result, ImportResult)
    if record.kind not in _STEPS or not isinstance(record.result, StepResult):
        return False
    return not record.result.report.skipped


def is_run_too_long(run: PolicyRun, count: int) -> bool:
    limit = run.spec.numerics_guard.max_skipped_in_row
    return 0 < limit <= count


def _is_skipped_for_numbers(record: OperationRecord) -> bool:
    if record.state is not JournalState.APPLIED or not isinstance(record.result, StepResult):
        return False
    reason = record.result.report.skip_reason
    return reason is not None and reason.is_of_numbers


async def _give_up(run: PolicyRun, count: int) -> None:
    """Fail the policy and its open operations. Idempotent."""
    history = await run.ports.journal.history(run.policy_id)
    reason = f"{count} optimizer steps in a row were skipped for their numbers"
    # A skipped step closes its window too.
    if history.closed is not None and isinstance(history.closed.result, StepResult):
        last = history.closed.result.report.skip_reason
        reason += f", the last at seq {history.closed.seq}: {last}"
    run.state, run.failure = PolicyState.FAILED, reason
    error = policy_not_ready(run.policy_id, run.state, reason)
    result = FailedResult(error=error.to_dict())
    for record in history.records:
        if record.state.is_final:
            continue
        end = OperationEnd(
            operation_id=record.operation_id,
            state=JournalState.FAILED,
            result=result,
            version=history.policy.version,
            started_at=None,
            finished_at=run.ports.now(),
        )
        await run.end(end)
        run.send(telemetry.entered(replace(record, result=result), JournalState.FAILED))
    for live in run.ledger.open_operations():
        live.fail(error, run.ports.now())
        run.ledger.settle(live)
    raise NumbersFailedError(reason)
