"""Operations and their results to the wire.

Enters `engine.types.Operation`, leaves `ratoon.v1.Operation`. Invariant: a final operation carries
exactly one result; the output of a Forward is inline only where this module is handed its bytes.
"""

from __future__ import annotations

from pathlib import Path

from google.protobuf.message import DecodeError

from ratoon.api.convert.enums import to_wire
from ratoon.api.convert.errors import detail_of_dict
from ratoon.api.convert.policy import policy_message
from ratoon.api.convert.report import report_message
from ratoon.api.convert.times import set_time
from ratoon.engine.types import (
    CheckpointInfo,
    EmptyResult,
    FailedResult,
    ForwardResult,
    Operation,
    OperationResult,
    PolicyResult,
    StepResult,
)
from ratoon_proto.v1 import operation_pb2 as wire
from ratoon_proto.v1.training_pb2 import ForwardOutput


def operation_message(
    operation: Operation, models_root: Path, *, forward_output: bytes | None
) -> wire.Operation:
    """`forward_output`: the serialized `ForwardOutput` to put inline; None: name its file."""
    message = wire.Operation(
        operation_id=operation.operation_id,
        policy_id=operation.policy_id,
        kind=to_wire(wire.OperationKind, operation.kind),
        seq=operation.seq,
        request_id=operation.request_id,
        state=to_wire(wire.OperationState, operation.state),
        blocked_by_seq=operation.blocked_by_seq,
        progress=wire.Progress(
            micro_batches_done=operation.progress.micro_batches_done,
            micro_batches_planned=operation.progress.micro_batches_planned,
            tokens_per_second=operation.progress.tokens_per_second,
            eta_s=operation.progress.eta_s,
        ),
    )
    set_time(message.created_at, operation.created_at)
    if operation.started_at is not None:
        set_time(message.started_at, operation.started_at)
    if operation.finished_at is not None:
        set_time(message.finished_at, operation.finished_at)
    if operation.result is not None:
        _set_result(message, operation.result, models_root, forward_output)
    return message


def _set_result(
    message: wire.Operation,
    result: OperationResult,
    models_root: Path,
    forward_output: bytes | None,
) -> None:
    match result:
        case PolicyResult(policy=policy):
            message.policy.CopyFrom(policy_message(policy, models_root))
        case StepResult(version=version, report=report):
            message.step.version = version
            message.step.report.CopyFrom(report_message(report))
        case ForwardResult():
            message.forward.CopyFrom(_forward_message(result, forward_output))
        case CheckpointInfo():
            message.checkpoint.CopyFrom(checkpoint_message(result))
        case EmptyResult():
            message.empty.SetInParent()
        case FailedResult(error=error):
            message.error.CopyFrom(detail_of_dict(error))


def _forward_message(result: ForwardResult, output: bytes | None) -> wire.ForwardResult:
    message = wire.ForwardResult(version=result.version, report=report_message(result.report))
    if output is None:
        message.file.digest, message.file.size_bytes = result.digest, result.size_bytes
        return message
    try:
        message.inline.CopyFrom(ForwardOutput.FromString(output))
    except DecodeError as err:
        raise AssertionError(f"result file {result.digest} is not a ForwardOutput") from err
    return message


def checkpoint_message(checkpoint: CheckpointInfo) -> wire.CheckpointInfo:
    message = wire.CheckpointInfo(
        checkpoint_id=checkpoint.checkpoint_id,
        version=checkpoint.version,
        seq=checkpoint.seq,
        replay_from_seq=checkpoint.replay_from_seq,
        size_bytes=checkpoint.size_bytes,
    )
    set_time(message.created_at, checkpoint.created_at)
    return message
