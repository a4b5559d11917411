"""From an accepted operation to the task that a worker runs, or the reason why it may not run.

Enters a record whose turn has come, leaves a `WorkerTask` with every choice made, or a typed error.
Invariant: nothing has been touched when it raises, so a refused operation needs no repair.
"""

from __future__ import annotations

import asyncio

from ratoon.engine.admission import named_forward
from ratoon.engine.decisions import NO_FORWARD, forward_source, recorded_task
from ratoon.engine.files import drop_checkpoint_folder
from ratoon.engine.journal import JournalState, OperationRecord
from ratoon.engine.policy_run import PolicyRun
from ratoon.engine.tasks import (
    BatchCommand,
    DiscardTask,
    ForwardBackwardTask,
    ForwardTask,
    LoadTask,
    OptimStepTask,
    SaveTask,
    UpdateTask,
    WorkerTask,
)
from ratoon.engine.types import (
    Command,
    DiscardGradientsCommand,
    ForwardBackwardCommand,
    ForwardCommand,
    ForwardResult,
    LoadCheckpointCommand,
    OptimStepCommand,
    SaveCheckpointCommand,
    UpdateCommand,
)
from ratoon.errors import ErrorCode, RatoonError, invalid


class TaskBuilder:
    """Reads the run, the journal and the worker; changes none of them."""

    def __init__(self, run: PolicyRun) -> None:
        self._run = run

    async def build(self, record: OperationRecord) -> WorkerTask:
        """The task of an operation whose turn it is; one that began before makes the same choices.

        Raises VERSION_MISMATCH, WINDOW_OPEN, WINDOW_EMPTY, WINDOW_POISONED, CHECKPOINT_NOT_FOUND,
        or what the worker says of the batch.
        """
        command = record.command
        assert command is not None, "an open record keeps its command"
        if record.plan is not None and not isinstance(command, SaveCheckpointCommand):
            return recorded_task(record, self._run.paths)
        self._check_version(command)
        match command:
            case UpdateCommand() | ForwardBackwardCommand() | ForwardCommand():
                return await self._batch_task(record, command)
            case OptimStepCommand():
                self._run.window.select(command.include_seqs)
                return OptimStepTask(
                    operation_id=record.operation_id,
                    seq=record.seq,
                    optim=command.optim,
                    next_version=self._run.max_version + 1,
                )
            case DiscardGradientsCommand():
                return DiscardTask(operation_id=record.operation_id, seq=record.seq)
            case SaveCheckpointCommand():
                return await self._save_task(record, command)
            case LoadCheckpointCommand():
                return await self._load_task(record, command)

    async def _batch_task(self, record: OperationRecord, command: BatchCommand) -> WorkerTask:
        if isinstance(command, UpdateCommand):
            self._run.window.check_update()
        body_path = self._body_path(command)
        source = forward_source(await self._forward_file(command), self._run.paths)
        token, worker = self._run.token, self._run.ports.worker
        plan = await worker.prepare(token, command, body_path, source)
        match command:
            case UpdateCommand():
                return UpdateTask(
                    operation_id=record.operation_id,
                    seq=record.seq,
                    command=command,
                    body_path=body_path,
                    old_logprobs=source,
                    plan=plan,
                    next_version=self._run.max_version + 1,
                )
            case ForwardBackwardCommand():
                return ForwardBackwardTask(
                    operation_id=record.operation_id,
                    seq=record.seq,
                    command=command,
                    body_path=body_path,
                    old_logprobs=source,
                    plan=plan,
                )
            case ForwardCommand():
                return ForwardTask(
                    operation_id=record.operation_id,
                    seq=record.seq,
                    command=command,
                    body_path=body_path,
                    plan=plan,
                    results_folder=str(self._run.paths.results),
                )

    async def _save_task(self, record: OperationRecord, command: SaveCheckpointCommand) -> SaveTask:
        run = self._run
        checkpoint_id = command.checkpoint_id or f"seq{record.seq}-v{run.version}"
        checkpoints = await run.ports.journal.checkpoints(run.policy_id)
        known = {checkpoint.info.checkpoint_id for checkpoint in checkpoints}
        if checkpoint_id in known:
            raise invalid("checkpoint_id", checkpoint_id, "a name that no checkpoint has yet")
        # Of a save that failed and was killed before it could take it away.
        await run.check_newest()
        await asyncio.to_thread(drop_checkpoint_folder, run.paths, checkpoint_id)
        return SaveTask(
            operation_id=record.operation_id,
            seq=record.seq,
            checkpoint_id=checkpoint_id,
            version=run.version,
            replay_from_seq=run.window.replay_from(record.seq),
            folder=str(run.paths.checkpoint(checkpoint_id)),
        )

    async def _load_task(self, record: OperationRecord, command: LoadCheckpointCommand) -> LoadTask:
        run = self._run
        for checkpoint in await run.ports.journal.checkpoints(run.policy_id):
            info = checkpoint.info
            if info.checkpoint_id == command.checkpoint_id and not checkpoint.is_automatic:
                await run.archive.restore_checkpoint(info.checkpoint_id)
                return LoadTask(
                    operation_id=record.operation_id,
                    seq=record.seq,
                    folder=str(run.paths.checkpoint(info.checkpoint_id)),
                    checkpoint=info,
                )
        raise RatoonError(
            ErrorCode.CHECKPOINT_NOT_FOUND,
            f"checkpoint_id: no checkpoint {command.checkpoint_id}",
            field="checkpoint_id",
            got=command.checkpoint_id,
            expected="a checkpoint of this policy",
        )

    def _check_version(self, command: Command) -> None:
        match command:
            case (
                UpdateCommand(expected_version=expected)
                | ForwardBackwardCommand(expected_version=expected)
                | OptimStepCommand(expected_version=expected)
                | ForwardCommand(expected_version=expected)
            ):
                if expected is None or expected == self._run.version:
                    return
                raise RatoonError(
                    ErrorCode.VERSION_MISMATCH,
                    f"expected_version: got {expected}, the policy is at {self._run.version}",
                    field="expected_version",
                    got=str(expected),
                    expected=str(self._run.version),
                    details={"version": str(self._run.version)},
                )
            case DiscardGradientsCommand() | SaveCheckpointCommand() | LoadCheckpointCommand():
                return

    async def _forward_file(self, command: BatchCommand) -> str:
        """Name of the file with the old log-probs that the command asks for; "": none asked for."""
        operation_id = named_forward(command)
        if not operation_id:
            return NO_FORWARD
        run = self._run
        live = run.ledger.find(operation_id)
        record = live.record if live else await run.ports.journal.find_operation(operation_id)
        if record is None:
            # One without a key is in no journal; its files are there while they are kept.
            for path in run.paths.results.iterdir():
                if path.suffix and operation_id == run.policy_id + path.suffix:
                    return path.name
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
        return name

    def _body_path(self, command: BatchCommand) -> str:
        return str(self._run.paths.body(command.body_digest))


def forward_file_name(operation_id: str, digest: str) -> str:
    """The file beside a Forward's output that says whose log-probs are in it."""
    return f"{digest}.{operation_id.rpartition('.')[2]}"
