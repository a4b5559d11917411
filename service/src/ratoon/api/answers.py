"""Answers of the service: operations, errors, server information, chunks of files.

A final operation has exactly one result. Texts of errors are cut so that a message fits a gRPC
trailer (8 KiB of metadata). A file chunk is serialized with a single copy of its bytes. A watched
operation is throttled: a slow reader has at most one value waiting, the newest, however many
changes there were.
"""

from __future__ import annotations

import asyncio
import base64
import json
import platform
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar

import xxhash
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError

from ratoon.api.convert.checks import write
from ratoon.api.convert.policy import policy_message
from ratoon.config import LimitsConfig
from ratoon.engine.types import (
    CheckpointInfo,
    FailedResult,
    ForwardResult,
    NamedVersion,
    Operation,
    OperationFilter,
    Place,
    PolicyResult,
)
from ratoon.errors import ErrorCode, RatoonError, invalid, shown
from ratoon.model.spec import PRESET_NAMES
from ratoon_proto.types import BackendInfo, EmptyResult, ImportResult, StepResult
from ratoon_proto.v1 import operation_pb2 as wire
from ratoon_proto.v1 import service_pb2
from ratoon_proto.v1.training_pb2 import ForwardOutput

# Results that the message holds as they are.
_FIELDS: Mapping[type, str] = MappingProxyType(
    {
        EmptyResult: "empty",
        ImportResult: "imported",
        NamedVersion: "named_version",
        StepResult: "step",
    }
)
MAX_TEXT = 1024
MAX_DETAILS = 16
_MAX_TOKEN = 512
API_VERSION = "v1"
_LIBRARIES = ("ratoon", "ray", "torch", "transformers", "numpy", "grpcio", "fastapi")
_DATA = service_pb2.FetchWeightsResponse.DESCRIPTOR.fields_by_name["data"]
# Wire type of the format's length-delimited fields.
_LENGTH_DELIMITED = 2


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
        case CheckpointInfo() as result:
            message.checkpoint.CopyFrom(checkpoint_message(result))
        case FailedResult(error=error):
            message.error.CopyFrom(detail_of(RatoonError.from_dict(error)))
        case None:
            pass
        case result:
            write(message, {_FIELDS[type(result)]: result})
            if forward_output is not None:
                message.step.inline.CopyFrom(_parsed(forward_output))
    return message


def page_token(place: Place | None, asked: OperationFilter) -> str:
    """The token of the page that goes on behind `place`; "": there is none."""
    if place is None:
        return ""
    return base64.urlsafe_b64encode(json.dumps([*place, _digest(asked)]).encode()).decode()


def place_of(token: str, asked: OperationFilter) -> Place | None:
    """The place that a list goes on behind; None: it begins.

    Raises INVALID_ARGUMENT for a token that `page_token` has not made for the same question.
    """
    if not token:
        return None
    try:
        # What is longer is not ours, and may be nested deeper than a parser goes.
        text = base64.urlsafe_b64decode(token[:_MAX_TOKEN])
        created_at, operation_id, digest = json.loads(text)
    except (ValueError, TypeError):
        created_at, operation_id, digest = None, None, ""
    is_same = digest == _digest(asked)
    if not isinstance(created_at, float) or not isinstance(operation_id, str) or not is_same:
        expected = "the next_page_token of an answer to the same question"
        raise invalid("page_token", shown(token), expected)
    return created_at, operation_id


def _digest(asked: OperationFilter) -> str:
    return xxhash.xxh3_64_hexdigest(repr(asked).encode())


def checkpoint_message(info: CheckpointInfo) -> wire.CheckpointInfo:
    """A checkpoint by the name that its caller gave it."""
    return write(wire.CheckpointInfo(checkpoint_id=info.name), info, skip=("checkpoint_id", "name"))


def _set_forward(message: wire.ForwardResult, result: ForwardResult, output: bytes | None) -> None:
    write(message, result, skip=("digest", "size_bytes"))
    if output is None:
        message.file.digest, message.file.size_bytes = result.digest, result.size_bytes
    else:
        message.inline.CopyFrom(_parsed(output))


def _parsed(output: bytes) -> ForwardOutput:
    try:
        return ForwardOutput.FromString(output)
    except DecodeError as err:
        raise AssertionError("a result file is not a ForwardOutput") from err


def cut(text: str) -> str:
    """`text` without what UTF-8 cannot encode, at most MAX_TEXT characters."""
    safe = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return safe if len(safe) <= MAX_TEXT else f"{safe[: MAX_TEXT - 3]}..."


def detail_of(error: RatoonError) -> wire.ErrorDetail:
    """The wire form of `error`, its texts cut to MAX_TEXT characters."""
    details = list(error.details.items())[:MAX_DETAILS]
    return wire.ErrorDetail(
        code=str(error.code),
        message=cut(error.message),
        field=cut(error.field)[:256],
        got=cut(error.got)[:256],
        expected=cut(error.expected)[:512],
        retryable=error.retryable,
        details={cut(key)[:64]: cut(value)[:128] for key, value in details},
    )


def internal_error() -> RatoonError:
    """What a caller is told about our own bug; the log has the rest."""
    return RatoonError(ErrorCode.INTERNAL, "internal error; the server's log has the cause")


def server_info(
    limits: LimitsConfig, *, device: str, backends: Iterable[BackendInfo]
) -> service_pb2.ServerInfo:
    versions = {name: version(name) for name in _LIBRARIES}
    shown = service_pb2.ServerLimits.DESCRIPTOR.fields_by_name
    info = {
        "version": versions["ratoon"],
        "api_version": API_VERSION,
        "device": device,
        "backends": backends,
        "presets": PRESET_NAMES,
        "limits": {name: getattr(limits, name) for name in shown},
        "library_versions": {"python": platform.python_version(), **versions},
    }
    return write(service_pb2.ServerInfo(), info)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileChunk:
    """Bytes of a file, and their xxh3-128 in hexadecimal digits.

    It looks like a protobuf message to the gate and to gRPC.
    """

    DESCRIPTOR: ClassVar[Descriptor] = service_pb2.FetchWeightsResponse.DESCRIPTOR
    data: bytes = field(repr=False)
    digest: str

    @classmethod
    async def of(cls, data: bytes) -> FileChunk:
        """Compute the digest of `data` in a thread, and return the chunk."""
        return cls(data=data, digest=await asyncio.to_thread(xxhash.xxh3_128_hexdigest, data))

    def SerializeToString(self) -> bytes:
        """Return the message's bytes, joined once.

        Protobuf would copy a field of megabytes more than once, into a growing buffer.
        """
        others = service_pb2.FetchWeightsResponse(digest=self.digest).SerializeToString()
        head = bytes([_DATA.number << 3 | _LENGTH_DELIMITED]) + _varint(len(self.data))
        return b"".join((others, head, self.data))


def _varint(value: int) -> bytes:
    digits: list[int] = []
    while value > 0x7F:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*digits, value])


async def throttled(
    changes: AsyncIterator[Operation], *, interval_s: float
) -> AsyncGenerator[Operation, None]:
    """Yield the newest operation at once, then at most one in `interval_s` seconds.

    It ends with the final one. Raises the error of `changes`, after the last value that came before
    it.
    """
    newest: Operation | None = None
    changed = asyncio.Event()

    async def pump() -> None:
        nonlocal newest
        async for operation in changes:
            newest = operation
            changed.set()

    task = asyncio.create_task(pump())
    task.add_done_callback(lambda _: changed.set())
    sent: Operation | None = None
    try:
        while True:
            await changed.wait()
            changed.clear()
            if newest is sent or newest is None:
                if task.done():
                    await task
                    return
                continue
            sent = newest
            yield sent
            if sent.state.is_final:
                return
            await asyncio.sleep(interval_s)
            if task.done():
                changed.set()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
