"""Operations and their results to the wire.

A final operation has exactly one result. A Forward's output is inline only if its bytes are given.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from google.protobuf.message import DecodeError

from ratoon.api.convert.errors import detail_of_dict
from ratoon.api.convert.policy import policy_message
from ratoon.api.convert.records import write
from ratoon.engine.types import CheckpointInfo, FailedResult, ForwardResult, Operation, PolicyResult
from ratoon_proto.types import EmptyResult, ImportResult, StepResult
from ratoon_proto.v1 import operation_pb2 as wire
from ratoon_proto.v1.training_pb2 import ForwardOutput

# Results that the message holds as they are.
_FIELDS: Mapping[type, str] = MappingProxyType(
    {
        CheckpointInfo: "checkpoint",
        EmptyResult: "empty",
        ImportResult: "imported",
        StepResult: "step",
    }
)


def operation_message(
    operation: Operation, models_root: Path, *, forward_output: bytes | None
) -> wire.Operation:
    """`forward_output`: the serialized `ForwardOutput` to put inline; None: name its file."""
    message = write(wire.Operation(), operation, skip=("result",))
    match operation.result:
        case PolicyResult(policy=policy):
            message.policy.CopyFrom(policy_message(policy, models_root))
        case ForwardResult() as result:
            _set_forward(message.forward, result, forward_output)
        case FailedResult(error=error):
            message.error.CopyFrom(detail_of_dict(error))
        case None:
            pass
        case result:
            write(message, {_FIELDS[type(result)]: result})
    return message


def _set_forward(message: wire.ForwardResult, result: ForwardResult, output: bytes | None) -> None:
    write(message, result, skip=("digest", "size_bytes"))
    if output is None:
        message.file.digest, message.file.size_bytes = result.digest, result.size_bytes
        return
    try:
        message.inline.CopyFrom(ForwardOutput.FromString(output))
    except DecodeError as err:
        raise AssertionError(f"result file {result.digest} is not a ForwardOutput") from err
