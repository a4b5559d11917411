"""What the journal keeps of a task beside its command, and the same task from its record. Pure.

Enters a task or a record that began, leaves JSON or the task. Invariant: `recorded_task` of a
record makes the choices that `decisions` wrote into it, whenever and wherever it is called.
"""

from __future__ import annotations

from pathlib import Path
from typing import cast

from ratoon.engine.files import PolicyPaths
from ratoon.engine.journal import OperationRecord
from ratoon.engine.tasks import (
    DiscardTask,
    ForwardBackwardTask,
    ForwardTask,
    FromForwardFile,
    FromGiven,
    LoadTask,
    OldLogprobsSource,
    OptimStepTask,
    SaveTask,
    UpdateTask,
    WorkerTask,
)
from ratoon.engine.types import (
    CheckpointInfo,
    DiscardGradientsCommand,
    ForwardBackwardCommand,
    ForwardCommand,
    LoadCheckpointCommand,
    OptimStepCommand,
    SaveCheckpointCommand,
    UpdateCommand,
)

NO_FORWARD = ""


def decisions(task: WorkerTask) -> dict[str, object] | None:
    """What the journal keeps of a task, so that running it again makes the same choices."""
    match task:
        case ForwardBackwardTask(plan=plan, old_logprobs=source):
            return {"plan": plan, "old_logprobs": _forward_of(source)}
        case UpdateTask(plan=plan, old_logprobs=source, next_version=version):
            return {"plan": plan, "old_logprobs": _forward_of(source), "next_version": version}
        case ForwardTask(plan=plan):
            return {"plan": plan}
        case OptimStepTask(next_version=version):
            return {"next_version": version}
        case SaveTask(checkpoint_id=checkpoint_id):
            return {"checkpoint_id": checkpoint_id}
        case DiscardTask() | LoadTask():
            return None


def recorded_task(record: OperationRecord, paths: PolicyPaths) -> WorkerTask:
    """The task of a record that has begun; of a LoadCheckpoint that is applied.

    Not of a SaveCheckpoint, which depends on what is around it.
    """
    operation_id, seq, command = record.operation_id, record.seq, record.command
    chosen = record.plan or {}
    match command:
        case UpdateCommand():
            return UpdateTask(
                operation_id=operation_id,
                seq=seq,
                command=command,
                body_path=str(paths.body(command.body_digest)),
                old_logprobs=forward_source(str(chosen["old_logprobs"]), paths),
                plan=_plan(chosen),
                next_version=cast("int", chosen["next_version"]),
            )
        case ForwardBackwardCommand():
            return recorded_forward_backward(record, paths)
        case ForwardCommand():
            return ForwardTask(
                operation_id=operation_id,
                seq=seq,
                command=command,
                body_path=str(paths.body(command.body_digest)),
                plan=_plan(chosen),
                results_folder=str(paths.results),
            )
        case OptimStepCommand(optim=optim):
            version = cast("int", chosen["next_version"])
            return OptimStepTask(
                operation_id=operation_id, seq=seq, optim=optim, next_version=version
            )
        case DiscardGradientsCommand():
            return DiscardTask(operation_id=operation_id, seq=seq)
        case LoadCheckpointCommand(checkpoint_id=checkpoint_id):
            assert isinstance(record.result, CheckpointInfo)
            folder = str(paths.checkpoint(checkpoint_id))
            return LoadTask(
                operation_id=operation_id, seq=seq, folder=folder, checkpoint=record.result
            )
        case SaveCheckpointCommand() | None:
            raise AssertionError(f"{record.kind} {seq} is not run from its record")


def recorded_forward_backward(record: OperationRecord, paths: PolicyPaths) -> ForwardBackwardTask:
    """The task of a ForwardBackward that has begun."""
    command, chosen = record.command, record.plan
    assert isinstance(command, ForwardBackwardCommand)
    assert chosen is not None
    return ForwardBackwardTask(
        operation_id=record.operation_id,
        seq=record.seq,
        command=command,
        body_path=str(paths.body(command.body_digest)),
        old_logprobs=forward_source(str(chosen["old_logprobs"]), paths),
        plan=_plan(chosen),
    )


def forward_source(name: str, paths: PolicyPaths) -> OldLogprobsSource:
    """Old log-probs from the named file of a Forward; `NO_FORWARD`: from no file."""
    return FromGiven() if name == NO_FORWARD else FromForwardFile(path=str(paths.results / name))


def _plan(chosen: dict[str, object]) -> dict[str, object]:
    plan = chosen["plan"]
    assert isinstance(plan, dict), "what `decisions` wrote"
    return cast("dict[str, object]", plan)


def _forward_of(source: OldLogprobsSource) -> str:
    return Path(source.path).name if isinstance(source, FromForwardFile) else NO_FORWARD
