"""One operation from its turn to its end: choose, apply, journal, publish.

The worker stores a seq's outcome before the journal does. After a crash that outcome completes the
record, with all choices made for it. Where the worker has none either, no caller has been told, and
the choices are made anew.

    accepted -> [choose, apply, hold] -> applied, failed or cancelled -> [begin to publish, restore]
"""

from __future__ import annotations

from dataclasses import replace

from ratoon.engine.crash_points import CrashPoint
from ratoon.engine.journal.checkpoints import Checkpoint
from ratoon.engine.journal.records import CLOSING_KINDS, JournalState, OperationEnd, OperationRecord
from ratoon.engine.policy import telemetry
from ratoon.engine.policy.builder import TaskBuilder
from ratoon.engine.policy.checkpointer import Checkpointer
from ratoon.engine.policy.ledger import LiveOperation
from ratoon.engine.policy.lost_workers import LostWorkers
from ratoon.engine.policy.publisher import Publisher
from ratoon.engine.policy.run import PolicyRun
from ratoon.engine.policy.window import Window
from ratoon.engine.refusals import cancelled
from ratoon.engine.types import CheckpointInfo, FailedResult, OperationResult, OptimStepCommand
from ratoon.engine.worker.tasks import Choices, Outcome, Task
from ratoon.errors import RatoonError
from ratoon.log import get_logger
from ratoon_proto.types import ImportResult, OperationKind, OperationState, StepResult

_LOG = get_logger("executor")

_JOURNAL_STATE = {
    OperationState.DONE: JournalState.APPLIED,
    OperationState.FAILED: JournalState.FAILED,
    OperationState.CANCELLED: JournalState.CANCELLED,
}


class Executor:
    """Used by one coroutine at a time. Propagates `WorkerLostError` and `FencedError`.

    An operation that too many workers in a row are lost to fails; the policy goes on.
    """

    def __init__(self, run: PolicyRun, publisher: Publisher, checkpointer: Checkpointer) -> None:
        self._run = run
        self._lost_workers = LostWorkers()
        self._checkpointer = checkpointer
        self._builder = TaskBuilder(run)
        self._publisher = publisher

    async def run_sequenced(self, live: LiveOperation) -> None:
        """Run the operation whose seq is next. It ends, and its seq is consumed, in any case."""
        run = self._run
        outcome, run.stored_outcome = run.stored_outcome, None
        if outcome is not None:
            assert outcome.operation_id == live.operation_id
        else:
            outcome = await self._apply(live)
        if live.record.kind is OperationKind.SAVE_CHECKPOINT:
            outcome = await self._archived(outcome)
        await self._conclude(live, outcome)

    async def _archived(self, outcome: Outcome) -> Outcome:
        """Archive a saved checkpoint; where that fails, the save fails."""
        if outcome.state is not OperationState.DONE:
            return outcome
        assert isinstance(outcome.result, CheckpointInfo)
        try:
            await self._run.archive.keep_checkpoint(outcome.result.checkpoint_id)
        except RatoonError as error:
            failed = FailedResult(error=error.to_dict())
            state = OperationState.FAILED
            return replace(outcome, state=state, result=failed, weights_digest="")
        return outcome

    async def pass_over(self, record: OperationRecord) -> None:
        """Skip an operation that ended before its turn; the worker counts its seq."""
        run = self._run
        error = cancelled(record.operation_id)
        outcome = Outcome.unrun(record.operation_id, OperationState.CANCELLED, error)
        await run.ports.worker.skip(run.token, record.seq, outcome)
        has_failed = record.state is JournalState.FAILED
        if has_failed and record.kind is OperationKind.FORWARD_BACKWARD:
            run.window = run.window.with_failed(record.seq)

    async def run_forward(self, live: LiveOperation) -> None:
        """Run a Forward without a key: not journaled, on the newest version."""
        run = self._run
        live.start(run.ports.now())
        try:
            task = await self._task(live)
        except RatoonError as error:
            outcome = Outcome.unrun(live.operation_id, OperationState.FAILED, error)
        else:
            call = run.ports.worker.forward(run.token, task)
            outcome = await self._lost_workers.counted(live.operation_id, call)
        await run.bodies.release(live.operation_id, live.record.body_digest)
        self._settle(live, _JOURNAL_STATE[outcome.state], outcome.result)

    async def restore_window(self) -> None:
        """Make the worker's gradients those of the window's applied operations."""
        await self._restore(self._run.window.applied)

    async def _apply(self, live: LiveOperation) -> Outcome:
        run = self._run
        live.start(run.ports.now())
        run.send(telemetry.entered(live.record, JournalState.APPLYING))
        try:
            task = await self._task(live)
        except RatoonError as error:
            return await self._skip(live, OperationState.FAILED, error)
        if live.cancel_requested:
            error = cancelled(live.operation_id)
            return await self._skip(live, OperationState.CANCELLED, error)
        command = live.record.command
        if isinstance(command, OptimStepCommand):
            selected = run.window.select(command.include_seqs)
            if selected != run.window.applied:
                await self._restore(selected)
        call = run.ports.worker.apply(run.token, task)
        return await self._lost_workers.counted(live.operation_id, call)

    async def _task(self, live: LiveOperation) -> Task:
        """Raises `RatoonError` where the operation may not run."""
        self._lost_workers.check(live.operation_id)
        choices = await self._builder.choose(live.record)
        live.set_record(replace(live.record, choices=choices))
        return live.record.to_task(self._run.paths)

    async def _skip(
        self, live: LiveOperation, state: OperationState, error: RatoonError
    ) -> Outcome:
        outcome = Outcome.unrun(live.operation_id, state, error, live.record.started_at)
        await self._run.ports.worker.skip(self._run.token, live.record.seq, outcome)
        return outcome

    async def _conclude(self, live: LiveOperation, outcome: Outcome) -> None:
        """Journal how the operation ended, then act on it."""
        run, state, result = self._run, _JOURNAL_STATE[outcome.state], outcome.result
        choices, started_at = outcome.choices, outcome.started_at
        record = replace(live.record, choices=choices, started_at=started_at)
        live.set_record(record)
        done = state is JournalState.APPLIED
        closes = done and record.kind in CLOSING_KINDS
        version = _version_after(result, run.version) if done else run.version
        stepped = version != run.version
        if stepped:
            result = await self._publisher.hold(version, result)
        saved = None
        if done and record.kind is OperationKind.SAVE_CHECKPOINT:
            assert isinstance(result, CheckpointInfo)
            result = replace(result, created_at=run.ports.now())
            saved = Checkpoint(info=result, weights_digest=outcome.weights_digest)
        end = OperationEnd(
            operation_id=record.operation_id,
            state=state,
            result=result,
            version=version,
            started_at=started_at,
            finished_at=run.ports.now(),
            choices=choices if done else None,
            weights_digest=outcome.weights_digest,
            numerics=run.numerics,
            checkpoint=saved,
            frees_window=closes and not run.replays,
        )
        run.reach(CrashPoint.ENGINE_BEFORE_END)
        await run.end(end, record.seq)
        run.reach(CrashPoint.ENGINE_AFTER_END)
        run.version, run.max_version = version, max(run.max_version, version)
        await self._follow_window(live, state, closes=closes)
        if stepped:
            self._publisher.begin()
        self._checkpointer.note(replace(record, state=state))
        if saved is not None and run.replays:
            await self._checkpointer.cover_saved()
        self._settle(live, state, result, version=version if done else None)
        if record.kind is OperationKind.SAVE_CHECKPOINT and not done:
            await self._drop_unsaved(choices)
        if outcome.must_restore or (not done and _has_subset(record)):
            await self.restore_window()

    async def _follow_window(
        self, live: LiveOperation, state: JournalState, *, closes: bool
    ) -> None:
        """Update the window, and release bodies, unless replay needs them until a checkpoint.

        A cancelled operation is never replayed.
        """
        run, record = self._run, live.record
        if record.kind is OperationKind.FORWARD_BACKWARD:
            if state is JournalState.APPLIED:
                run.window = run.window.with_applied(record.seq)
                run.window_records[record.seq] = record
                return
            if state is JournalState.FAILED:
                run.window = run.window.with_failed(record.seq)
        doomed = [record] if record.body_digest else []
        if closes:
            doomed += run.window_records.values()
            run.window = Window()
            run.window_records.clear()
        if run.replays and state is not JournalState.CANCELLED:
            return
        for ended in doomed:
            await run.bodies.release(ended.operation_id, ended.body_digest)

    async def _drop_unsaved(self, choices: Choices | None) -> None:
        """Delete what a failed save left; one that did not run left nothing."""
        if choices is not None and choices.checkpoint is not None:
            await self._checkpointer.drop_unsaved(choices.checkpoint.checkpoint_id)

    async def _restore(self, seqs: tuple[int, ...]) -> None:
        run = self._run
        tasks = tuple(run.window_records[seq].to_task(run.paths) for seq in seqs)
        await run.ports.worker.restore(run.token, tasks)

    def _settle(
        self,
        live: LiveOperation,
        state: JournalState,
        result: OperationResult,
        version: int | None = None,
    ) -> None:
        """Report the end of the operation to its callers and the metrics."""
        run = self._run
        live.set_record(replace(live.record, version=version))
        live.end(state, result, run.ports.now())
        run.ledger.settle(live)
        run.send(telemetry.entered(live.record, state))
        run.send(telemetry.result(run.policy_id, live.record.kind, result))
        run.send(telemetry.versions(run.policy_id, run.version, run.published))


def _has_subset(record: OperationRecord) -> bool:
    """Whether an OptimStep may have left only part of the window's gradients on the worker."""
    return isinstance(record.command, OptimStepCommand) and bool(record.command.include_seqs)


def _version_after(result: OperationResult, version: int) -> int:
    match result:
        case StepResult() | CheckpointInfo() | ImportResult():
            return result.version
        case _:
            return version
