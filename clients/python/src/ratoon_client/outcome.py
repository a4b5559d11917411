"""A finished operation to what its caller asked for.

A result that is kept as a file is fetched and verified before it is read.
"""

from __future__ import annotations

from google.protobuf.message import DecodeError

from ratoon_client.caller import Caller
from ratoon_client.errors import IntegrityError, RatoonApiError
from ratoon_client.values import Checkpoint, ForwardResult, OperationResult
from ratoon_client.weights.calls import fetch_result_file
from ratoon_client.wire.decode import decode, decode_forward, error_of
from ratoon_proto.types import ImportResult, Operation, Policy, StepResult
from ratoon_proto.v1 import operation_pb2, training_pb2


async def outcome(caller: Caller, message: operation_pb2.Operation) -> OperationResult:
    """Raises RatoonApiError where the operation failed or was cancelled."""
    match message.WhichOneof("result"):
        case "error":
            raise error_of(message.error)
        case "policy":
            return decode(message.policy, Policy)
        case "step":
            return decode(message.step, StepResult)
        case "checkpoint":
            return decode(message.checkpoint, Checkpoint)
        case "imported":
            return decode(message.imported, ImportResult)
        case "forward":
            return await _forward(caller, message)
        case _:
            pass
    state = decode(message, Operation).state
    if state == "done":
        return None
    raise RatoonApiError(state.upper(), f"operation {message.operation_id} is {state}")


async def _forward(caller: Caller, message: operation_pb2.Operation) -> ForwardResult:
    forward = message.forward
    if forward.WhichOneof("output") != "file":
        return decode_forward(forward.inline, forward)
    data = await fetch_result_file(
        caller, message.policy_id, forward.file.digest, forward.file.size_bytes
    )
    try:
        output = training_pb2.ForwardOutput.FromString(data)
    except DecodeError as err:
        raise IntegrityError(f"result file {forward.file.digest} is no ForwardOutput") from err
    return decode_forward(output, forward)
