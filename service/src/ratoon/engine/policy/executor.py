"""One operation from its turn to its end: execute, conclude, begin to publish.

The worker stores a seq's outcome before the journal does. After a crash that outcome completes the
record, with all choices made for it. Where the worker has none either, no caller has been told, and
the choices are made anew. Making them changes no state, so a refused operation needs no repair.

    accepted -> [choose, apply, hold] -> applied, failed or cancelled -> [begin to publish, restore]
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from ratoon.engine.commands import (
    DiscardGradientsCommand,
    ForwardBackwardCommand,
    ForwardCommand,
    ImportWeightsCommand,
    LoadCheckpointCommand,
    OptimStepCommand,
    PublishVersionCommand,
    RefusedCommand,
    SaveCheckpointCommand,
    UpdateCommand,
)
from ratoon.engine.crash_points import CrashPoint
from ratoon.engine.files.paths import drop_checkpoint_folder
from ratoon.engine.journal.records import (
    Checkpoint,
    JournalState,
    OperationEnd,
    OperationRecord,
    unused_id,
)
from ratoon.engine.policy import telemetry
from ratoon.engine.policy.checkpointer import Checkpointer
from ratoon.engine.policy.publisher import Publisher
from ratoon.engine.policy.queue import LiveOperation, Window
from ratoon.engine.policy.run import LostWorkers, PolicyRun
from ratoon.engine.refusals import cancelled, checkpoint_not_found
from ratoon.engine.types import (
    CheckpointInfo,
    FailedResult,
    ForwardResult,
    NamedVersion,
    OperationResult,
    version_of,
)
from ratoon.engine.worker.tasks import Choices, Outcome, Task
from ratoon.engine.worker.worker import WorkerCore
from ratoon.errors import ErrorCode, RatoonError, invalid
from ratoon_proto.types import OperationKind, OperationState

_JOURNAL_STATE = {
    OperationState.DONE: JournalState.APPLIED,
    OperationState.FAILED: JournalState.FAILED,
    OperationState.CANCELLED: JournalState.CANCELLED,
}


class Executor:
    """Executes and concludes one operation at a time, for the turn loop alone.

    Propagates `WorkerLostError` and `FencedError`. An operation that too many workers in a row are
    lost to fails; the policy goes on.
    """

    def __init__(self, run: PolicyRun, publisher: Publisher, checkpointer: Checkpointer) -> None:
        self._run = run
        self._lost_workers = LostWorkers()
        self._checkpointer = checkpointer
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

    async def pass_over(self, record: OperationRecord) -> None:
        """Skip an operation that ended before its turn; the worker counts its seq."""
        run = self._run
        outcome = Outcome.of_error(record.operation_id, cancelled(record.operation_id))
        await run.worker.call(WorkerCore.skip, run.token, record.seq, outcome)
        if record.state is JournalState.FAILED and record.effect.adds_to_window:
            run.window = run.window.with_failed(record.seq)

    async def run_forward(self, live: LiveOperation) -> None:
        """Run a Forward without a key: not journaled, on the newest version."""
        run = self._run
        live.start(run.now())
        try:
            task = await self._task(live)
        except RatoonError as error:
            outcome = Outcome.of_error(live.operation_id, error)
        else:
            call = run.worker.call(WorkerCore.forward, run.token, task)
            outcome = await self._lost_workers.counted(live.operation_id, call)
        await run.bodies.release(live.operation_id, live.record.body_digest)
        self._settle(live, _JOURNAL_STATE[outcome.state], outcome.result, run.now())

    async def restore_window(self) -> None:
        """Make the worker's gradients those of the window's applied operations."""
        await self._restore(self._run.window.applied)

    async def _apply(self, live: LiveOperation) -> Outcome:
        """Have the worker run the operation, or skip it where it may not run or is cancelled."""
        run = self._run
        live.start(run.now())
        run.send(telemetry.entered(live.record, JournalState.APPLYING))
        try:
            task = await self._task(live)
            if isinstance(task.command, PublishVersionCommand):
                task = await self._published(live, task.command)
        except RatoonError as error:
            return await self._skip(live, error)
        if live.cancel_requested:
            return await self._skip(live, cancelled(live.operation_id))
        command = live.record.command
        if isinstance(command, OptimStepCommand):
            selected = run.window.select(command.include_seqs, allow_empty=command.allow_empty)
            if selected != run.window.applied:
                await self._restore(selected)
        call = run.worker.call(WorkerCore.apply, run.token, task)
        return await self._lost_workers.counted(live.operation_id, call)

    async def _task(self, live: LiveOperation) -> Task:
        """Make the operation's choices. Raises `RatoonError` where it may not run."""
        self._lost_workers.check(live.operation_id)
        choices = await self._choose(live.record)
        if live.unanswered is not None:
            raise live.unanswered
        choices = replace(choices, teachers=live.answers or ())
        live.set_record(replace(live.record, choices=choices))
        return live.record.to_task(self._run.paths)

    async def _published(self, live: LiveOperation, command: PublishVersionCommand) -> Task:
        """The task, once its version is published. Raises why it cannot be.

        The worker counts the seq afterwards: no version is made by what the journal has not ended.
        """
        manifest = await self._publisher.published()
        size_bytes = sum(file.size_bytes for file in manifest.files)
        named = NamedVersion(name=command.name, version=manifest.version, size_bytes=size_bytes)
        live.set_record(replace(live.record, choices=Choices(named=named)))
        return live.record.to_task(self._run.paths)

    async def _skip(self, live: LiveOperation, error: RatoonError) -> Outcome:
        """Have the worker count the operation's seq without running it."""
        run, record = self._run, live.record
        outcome = Outcome.of_error(live.operation_id, error, started_at=record.started_at)
        command = record.command
        if isinstance(command, OptimStepCommand) and command.discard_on_poison:
            discards = error.code is ErrorCode.WINDOW_POISONED
            outcome = replace(outcome, discards_gradients=discards)
        return await run.worker.call(WorkerCore.skip, run.token, record.seq, outcome)

    async def _restore(self, seqs: tuple[int, ...]) -> None:
        """Have the worker compute the gradients of these ForwardBackwards again."""
        run, records = self._run, self._run.window.records
        tasks = tuple(records[seq].to_task(run.paths) for seq in seqs)
        await run.worker.call(WorkerCore.restore, run.token, tasks)

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

    async def _conclude(self, live: LiveOperation, outcome: Outcome) -> None:
        """Hold the new version, if any, journal how the operation ended, then act on it."""
        run, state = self._run, _JOURNAL_STATE[outcome.state]
        if outcome.discards_gradients:
            state = JournalState.DISCARDED
        live.set_record(
            replace(live.record, choices=outcome.choices, started_at=outcome.started_at)
        )
        record, result, done = live.record, outcome.result, state is JournalState.APPLIED
        made = version_of(result) if done else None
        version = run.version if made is None else made
        stepped = version != run.version
        if stepped:
            result = await self._publisher.hold(version, result)
        end = self._end_of(record, replace(outcome, result=result), state, version)
        run.reach(CrashPoint.ENGINE_BEFORE_END)
        await run.end(end, record.seq)
        run.reach(CrashPoint.ENGINE_AFTER_END)
        run.version, run.max_version = version, max(run.max_version, version)
        await self._follow_window(live, state)
        if stepped:
            self._publisher.begin()
        self._checkpointer.note(replace(record, state=state))
        if end.checkpoint is not None:
            await self._checkpointer.cover_saved()
        self._settle(live, state, end.result, end.finished_at, version if done else None)
        if record.kind is OperationKind.SAVE_CHECKPOINT and not done:
            await self._drop_unsaved(outcome.choices)
        if outcome.must_restore or (not done and _has_subset(record)):
            await self.restore_window()

    def _end_of(
        self, record: OperationRecord, outcome: Outcome, state: JournalState, version: int
    ) -> OperationEnd:
        """The operation's end as it is journaled. `version`: the policy's afterwards."""
        run, result, done = self._run, outcome.result, state is JournalState.APPLIED
        saved, named, keep_last = None, None, 0
        command, now = record.command, run.now()
        if done and isinstance(command, SaveCheckpointCommand | PublishVersionCommand):
            assert isinstance(result, CheckpointInfo | NamedVersion)
            expires_at = None if command.ttl_s is None else now + command.ttl_s
            result = replace(result, created_at=now, expires_at=expires_at)
            if isinstance(result, NamedVersion):
                named = result
            else:
                saved = Checkpoint(info=result, weights_digest=outcome.weights_digest)
            if isinstance(command, SaveCheckpointCommand):
                keep_last = command.keep_last
        return OperationEnd(
            operation_id=record.operation_id,
            state=state,
            result=result,
            version=version,
            started_at=outcome.started_at,
            finished_at=now,
            choices=outcome.choices if done else None,
            weights_digest=outcome.weights_digest,
            numerics=run.numerics,
            checkpoint=saved,
            named=named,
            keep_last=keep_last,
            frees_window=_closes_window(record, state) and not run.replays,
        )

    async def _follow_window(self, live: LiveOperation, state: JournalState) -> None:
        """Update the window, and release bodies, unless replay needs them until a checkpoint.

        A cancelled operation is never replayed, and the answers of one that failed are not either.
        """
        run, record = self._run, live.record
        if state is not JournalState.APPLIED:
            for digest in live.bodies:
                if digest != record.body_digest:
                    await run.bodies.release(record.operation_id, digest)
        if record.effect.adds_to_window:
            if state is JournalState.APPLIED:
                run.window = run.window.with_applied(record)
                return
            if state is JournalState.FAILED:
                run.window = run.window.with_failed(record.seq)
        doomed = [record]
        if _closes_window(record, state):
            doomed += run.window.records.values()
            run.window = Window()
        if run.replays and state is not JournalState.CANCELLED:
            return
        for ended in doomed:
            for digest in ended.bodies:
                await run.bodies.release(ended.operation_id, digest)

    async def _drop_unsaved(self, choices: Choices | None) -> None:
        """Delete what a failed save left, if it ran.

        Its archived copy goes at the next start, or once the name is used again.
        """
        if choices is not None and choices.checkpoint is not None:
            name = choices.checkpoint.checkpoint_id
            await asyncio.to_thread(drop_checkpoint_folder, self._run.paths, name)

    def _settle(
        self,
        live: LiveOperation,
        state: JournalState,
        result: OperationResult,
        finished_at: float,
        version: int | None = None,
    ) -> None:
        """Report the end of the operation to its callers and the metrics."""
        run = self._run
        live.set_record(replace(live.record, version=version))
        live.end(state, result, finished_at)
        run.settle(live)
        now = telemetry.versions(run.policy_id, run.version, run.published)
        run.send([*telemetry.ended(live.record), *now])

    async def _choose(self, record: OperationRecord) -> Choices:
        """All choices but the cuts of a batch, which the worker makes.

        Raises the error of a refused call, VERSION_MISMATCH, WINDOW_OPEN, WINDOW_EMPTY,
        WINDOW_POISONED, CHECKPOINT_NOT_FOUND.
        """
        command, run = record.command, self._run
        assert command is not None, "an open record keeps its command"
        command.check_version(run.version)
        match command:
            case RefusedCommand(error=error):
                raise RatoonError.from_dict(error)
            case UpdateCommand():
                run.window.check_closed()
                choices = await self._of_forward(command)
                return replace(choices, next_version=run.max_version + 1)
            case ForwardBackwardCommand():
                return await self._of_forward(command)
            case OptimStepCommand():
                run.window.select(command.include_seqs, allow_empty=command.allow_empty)
                return Choices(next_version=run.max_version + 1)
            case ForwardCommand() | DiscardGradientsCommand():
                return Choices()
            case SaveCheckpointCommand():
                return Choices(checkpoint=await self._to_save(record, command))
            case PublishVersionCommand(name=name, overwrite=overwrite):
                for known in () if overwrite else run.named:
                    if known.name == name:
                        raise _exists("name", name, f"a version {name}", known.version)
                return Choices()
            case LoadCheckpointCommand():
                return Choices(checkpoint=await self._to_load(command))
            case ImportWeightsCommand():
                # Gradients of the weights before would be stepped on those after.
                run.window.check_closed()
                return Choices(next_version=run.max_version + 1)

    async def _to_save(
        self, record: OperationRecord, command: SaveCheckpointCommand
    ) -> CheckpointInfo:
        run = self._run
        name = command.checkpoint_id or f"seq{record.seq}-v{run.version}"
        checkpoints = await run.journal.checkpoints(run.policy_id)
        for known in (checkpoint.info for checkpoint in checkpoints):
            if known.name == name and not command.overwrite:
                where = f"{known.version} at seq {known.seq}"
                raise _exists("checkpoint_id", name, f"a checkpoint {name}", where)
        checkpoint_id = unused_id(name, record.seq, run.token, checkpoints)
        # A failed save leaves a folder where its controller was killed before it deleted it.
        await run.check_newest()
        await asyncio.to_thread(drop_checkpoint_folder, run.paths, checkpoint_id)
        return CheckpointInfo(
            checkpoint_id=checkpoint_id,
            name=name,
            pinned=command.pinned,
            version=run.version,
            seq=record.seq,
            replay_from_seq=run.window.replay_from(record.seq),
            created_at=0.0,
            size_bytes=0,
        )

    async def _to_load(self, command: LoadCheckpointCommand) -> CheckpointInfo:
        run = self._run
        for checkpoint in await run.journal.checkpoints(run.policy_id):
            info = checkpoint.info
            if info.name == command.checkpoint_id:
                await run.archive.restore_checkpoint(info.checkpoint_id)
                return info
        raise checkpoint_not_found(command.checkpoint_id)

    async def _of_forward(self, command: UpdateCommand | ForwardBackwardCommand) -> Choices:
        """Which old log-probs the command uses, and of which version, where that is known."""
        operation_id = command.forward_id
        if not operation_id:
            return Choices()
        run = self._run
        live = run.ledger.find(operation_id)
        record = live.record if live else await run.journal.find_operation(operation_id)
        if record is None:
            # A Forward without a key is not journaled; its files exist until they expire.
            for path in run.paths.results.iterdir():
                if path.suffix and operation_id == run.policy_id + path.suffix:
                    return Choices(old_logprobs=path.name)
        field, expected = "loss.old_logprobs.forward_operation_id", "a finished Forward"
        if record is None or record.policy_id != run.policy_id:
            raise invalid(field, operation_id, f"{expected} of this policy")
        if record.state is not JournalState.APPLIED:
            raise invalid(field, f"{record.kind} that is {record.state.public}", expected)
        if not isinstance(record.result, ForwardResult):
            raise invalid(field, str(record.kind), expected)
        name = forward_file_name(operation_id, record.result.digest)
        if not (run.paths.results / name).exists():
            raise invalid(field, "a Forward whose result has expired", expected)
        return Choices(old_logprobs=name, old_version=record.result.version)


def _closes_window(record: OperationRecord, state: JournalState) -> bool:
    """Whether no window is open after an operation that has ended in this state."""
    is_applied = state is JournalState.APPLIED and record.effect.closes_window
    return is_applied or state is JournalState.DISCARDED


def _has_subset(record: OperationRecord) -> bool:
    """Whether an OptimStep may have left only part of the window's gradients on the worker."""
    return isinstance(record.command, OptimStepCommand) and bool(record.command.include_seqs)


def _exists(field: str, name: str, what: str, version: object) -> RatoonError:
    return RatoonError(
        ErrorCode.INVALID_ARGUMENT,
        f"{field}: the policy has {what} already, of version {version}; take another name, or"
        " overwrite it",
        field=field,
        got=name,
        expected="a name that is not taken, or overwrite",
    )


def forward_file_name(operation_id: str, digest: str) -> str:
    """The file beside a Forward's output that maps its log-probs to rollouts."""
    return f"{digest}.{operation_id.rpartition('.')[2]}"
