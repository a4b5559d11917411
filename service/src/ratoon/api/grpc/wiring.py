"""The service's method handlers, for Serve's proxy and for the gateway alike.

Enters a servicer and a server, leaves handlers on it. Invariant: bytes that are no message of their
type reach the servicer as `Malformed`, to be answered with a typed error; gRPC's own answer would
be INTERNAL without a trailer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import grpc
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from ratoon.errors import ErrorCode, RatoonError
from ratoon_proto.v1 import service_pb2

RequestT = TypeVar("RequestT", bound=Message)
SERVICE = service_pb2.DESCRIPTOR.services_by_name["PolicyService"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Malformed:
    """What came instead of a request, by size alone."""

    num_bytes: int


class Server(Protocol):
    """What `grpc.aio.Server` and Serve's own server have in common."""

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Any) -> None: ...


def add_policy_service(servicer: object, server: Server) -> None:
    """Mount `servicer`, whose methods are named as the RPCs. Serve calls it with a stand-in."""
    handlers = {method.name: _handler(servicer, method) for method in SERVICE.methods}
    generic = grpc.method_handlers_generic_handler(SERVICE.full_name, handlers)
    server.add_generic_rpc_handlers((generic,))


def _handler(servicer: object, method: MethodDescriptor) -> grpc.RpcMethodHandler[Any, Any]:
    make = (
        grpc.unary_stream_rpc_method_handler
        if method.server_streaming
        else grpc.unary_unary_rpc_method_handler
    )
    return make(
        getattr(servicer, method.name),
        request_deserializer=_Deserializer(GetMessageClass(method.input_type)),
        response_serializer=_serialize,
    )


class _Deserializer:
    def __init__(self, message_class: type[Message]) -> None:
        self._class = message_class

    def __call__(self, data: bytes) -> Message | Malformed:
        try:
            return self._class.FromString(data)
        except DecodeError:
            return Malformed(num_bytes=len(data))


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()


def sized(request: RequestT | Malformed, max_bytes: int) -> RequestT:
    """Raises MALFORMED_BODY, BODY_TOO_LARGE."""
    if isinstance(request, Malformed):
        raise RatoonError(
            ErrorCode.MALFORMED_BODY,
            f"the request's {request.num_bytes} bytes are not a message of its type",
            got=f"{request.num_bytes} bytes",
            expected="a serialized request",
        )
    size_bytes = request.ByteSize()
    if size_bytes > max_bytes:
        raise RatoonError(
            ErrorCode.BODY_TOO_LARGE,
            f"the request has {size_bytes} bytes, the limit is {max_bytes}: "
            "send the batch in parts (UploadPart)",
            got=f"{size_bytes} bytes",
            expected=f"at most {max_bytes} bytes",
        )
    return request
