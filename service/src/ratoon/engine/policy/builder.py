"""Makes an operation's choices when its turn comes, or refuses to run it.

It changes no state, so a refused operation needs no repair.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from ratoon.engine.files.paths import drop_checkpoint_folder
from ratoon.engine.journal.records import JournalState, OperationRecord
from ratoon.engine.policy.run import PolicyRun
from ratoon.engine.types import (
    CheckpointInfo,
    DiscardGradientsCommand,
    ForwardBackwardCommand,
    ForwardCommand,
    ForwardResult,
    ImportWeightsCommand,
    LoadCheckpointCommand,
    OptimStepCommand,
    SaveCheckpointCommand,
    UpdateCommand,
)
from ratoon.engine.worker.tasks import Choices
from ratoon.errors import ErrorCode, RatoonError, invalid


class TaskBuilder:
    """Reads the run and the journal; changes neither."""

    def __init__(self, run: PolicyRun) -> None:
        self._run = run

    async def choose(self, record: OperationRecord) -> Choices:
        """All choices but the cuts of a batch, which the worker makes.

        Raises VERSION_MISMATCH, WINDOW_OPEN, WINDOW_EMPTY, WINDOW_POISONED, CHECKPOINT_NOT_FOUND.
        """
        command, run = record.command, self._run
        assert command is not None, "an open record keeps its command"
        command.check_version(run.version)
        match command:
            case UpdateCommand():
                run.window.check_closed()
                choices = await self._of_forward(command)
                return replace(choices, next_version=run.max_version + 1)
            case ForwardBackwardCommand():
                return await self._of_forward(command)
            case OptimStepCommand():
                run.window.select(command.include_seqs)
                return Choices(next_version=run.max_version + 1)
            case ForwardCommand() | DiscardGradientsCommand():
                return Choices()
            case SaveCheckpointCommand():
                return Choices(checkpoint=await self._to_save(record, command))
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
        checkpoint_id = command.checkpoint_id or f"seq{record.seq}-v{run.version}"
        checkpoints = await run.ports.journal.checkpoints(run.policy_id)
        for known in (checkpoint.info for checkpoint in checkpoints):
            if known.checkpoint_id == checkpoint_id:
                raise _exists(known)
        # A failed save leaves a folder where its controller was killed before it deleted it.
        await run.check_newest()
        await asyncio.to_thread(drop_checkpoint_folder, run.paths, checkpoint_id)
        return CheckpointInfo(
            checkpoint_id=checkpoint_id,
            version=run.version,
            seq=record.seq,
            replay_from_seq=run.window.replay_from(record.seq),
            created_at=0.0,
            size_bytes=0,
        )

    async def _to_load(self, command: LoadCheckpointCommand) -> CheckpointInfo:
        run = self._run
        for checkpoint in await run.ports.journal.checkpoints(run.policy_id):
            info = checkpoint.info
            if info.checkpoint_id == command.checkpoint_id and not checkpoint.is_automatic:
                await run.archive.restore_checkpoint(info.checkpoint_id)
                return info
        raise RatoonError(
            ErrorCode.CHECKPOINT_NOT_FOUND,
            f"checkpoint_id: no checkpoint {command.checkpoint_id}",
            field="checkpoint_id",
            got=command.checkpoint_id,
            expected="a checkpoint of this policy",
        )

    async def _of_forward(self, command: UpdateCommand | ForwardBackwardCommand) -> Choices:
        """Which old log-probs the command uses, and of which version, where that is known."""
        operation_id = command.forward_id
        if not operation_id:
            return Choices()
        run = self._run
        live = run.ledger.find(operation_id)
        record = live.record if live else await run.ports.journal.find_operation(operation_id)
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


def _exists(known: CheckpointInfo) -> RatoonError:
    return RatoonError(
        ErrorCode.INVALID_ARGUMENT,
        f"checkpoint_id: the policy has a checkpoint {known.checkpoint_id} already, of version"
        f" {known.version} at seq {known.seq}; take another name",
        field="checkpoint_id",
        got=known.checkpoint_id,
        expected="a name that no checkpoint has yet",
    )


def forward_file_name(operation_id: str, digest: str) -> str:
    """The file beside a Forward's output that maps its log-probs to rollouts."""
    return f"{digest}.{operation_id.rpartition('.')[2]}"
