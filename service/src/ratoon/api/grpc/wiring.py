"""The service's method handlers, for Serve's proxy and for the gateway.

Bytes that do not parse, or hold too many messages, reach the servicer as `Refused`, which it
answers with a typed error; gRPC's own answer would be INTERNAL without a trailer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import grpc
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from ratoon.api.contract import BATCHES, SERVICE, body_bound, check_size
from ratoon.api.convert.fields import named_policy
from ratoon.api.counts import MalformedError, MessageCounter
from ratoon.config import LimitsConfig
from ratoon.errors import ErrorCode, RatoonError

RequestT = TypeVar("RequestT", bound=Message)
# For Serve's proxy, which has no config.
_DEFAULT_LIMITS = LimitsConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Replaces a request that must be refused. `policy_id`: what it is about; "": unknown."""

    error: RatoonError
    policy_id: str


class Server(Protocol):
    """What `grpc.aio.Server` and Serve's own server have in common."""

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Any) -> None: ...


def add_policy_service(
    servicer: object, server: Server, limits: LimitsConfig = _DEFAULT_LIMITS
) -> None:
    """Mount `servicer`, whose methods are named as the RPCs. Serve passes a stand-in."""
    handlers = {method.name: _handler(servicer, method, limits) for method in SERVICE.methods}
    generic = grpc.method_handlers_generic_handler(SERVICE.full_name, handlers)
    server.add_generic_rpc_handlers((generic,))


def deserializer(rpc: str, limits: LimitsConfig) -> Callable[[bytes], Any]:
    """Parses the bytes of an `rpc` request, or returns `Refused`."""
    return _Deserializer(SERVICE.methods_by_name[rpc], limits)


def _handler(
    servicer: object, method: MethodDescriptor, limits: LimitsConfig
) -> grpc.RpcMethodHandler[Any, Any]:
    make = (
        grpc.unary_stream_rpc_method_handler
        if method.server_streaming
        else grpc.unary_unary_rpc_method_handler
    )
    return make(
        getattr(servicer, method.name),
        request_deserializer=_Deserializer(method, limits),
        response_serializer=_serialize,
    )


class _Deserializer:
    """Deserializer of one RPC. It counts objects before any are made."""

    def __init__(self, method: MethodDescriptor, limits: LimitsConfig) -> None:
        self._class = GetMessageClass(method.input_type)
        self._descriptor = method.input_type
        is_batch = method.name in BATCHES
        self._counter = MessageCounter(method.input_type, limits) if is_batch else None

    def __call__(self, data: bytes) -> Message | Refused:
        try:
            if self._counter is not None:
                self._counter.count(data)
            return self._class.FromString(data)
        except (DecodeError, MalformedError):
            error = _malformed(len(data))
        except RatoonError as err:
            error = err
        return Refused(error=error, policy_id=named_policy(self._descriptor, data))


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()


def sized(request: RequestT | Refused, rpc: str, max_bytes: int) -> RequestT:
    """The request. Raises MALFORMED_BODY, BODY_TOO_LARGE."""
    if isinstance(request, Refused):
        raise request.error
    check_size(rpc, request.ByteSize(), body_bound(rpc, max_bytes))
    return request


def _malformed(num_bytes: int) -> RatoonError:
    return RatoonError(
        ErrorCode.MALFORMED_BODY,
        f"the request's {num_bytes} bytes are not a message of its type",
        got=f"{num_bytes} bytes",
        expected="a serialized request",
    )
