"""The two wires behind one face: a request message in, a response message or a `WireError` out.

The HTTP side writes its own JSON from the message, with the documented differences, so that a test
of both wires states its request once.
"""

from __future__ import annotations

import base64
import json
import re
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
from google.protobuf.json_format import MessageToDict, ParseDict
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from ratoon_proto.fields import http_route
from ratoon_proto.v1 import operation_pb2, service_pb2
from ratoon_proto.v1.service_pb2_grpc import PolicyServiceStub

SERVICE = service_pb2.DESCRIPTOR.services_by_name["PolicyService"]

# RPC -> method and path, whose names are fields of the request: the table of docs/api.md too.
_ALL_ROUTES = {one.name: route for one in SERVICE.methods if (route := http_route(one))}
# On HTTP these come by their own means: server-sent events, bytes with a digest header.
OTHER_ROUTES = {
    name: _ALL_ROUTES[name] for name in ("WatchOperation", "WatchWeights", "FetchWeights")
}
ROUTES = {name: route for name, route in _ALL_ROUTES.items() if name not in OTHER_ROUTES}
HTTP_ALONE = {
    ("GET", "/v1/policies/{policy_id}/weights/latest"),
    ("GET", "/v1/policies/{policy_id}/weights/{version}/files/{name}"),
    ("HEAD", "/v1/policies/{policy_id}/weights/{version}/files/{name}"),
    ("GET", "/metrics"),
}


class WireError(Exception):
    """An error as it came over a wire: the detail, and the wire's own status."""

    def __init__(self, detail: operation_pb2.ErrorDetail, status: int | grpc.StatusCode) -> None:
        super().__init__(f"{status}: {detail.code} {detail.message}")
        self.detail = detail
        self.status = status


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcWire:
    channel: grpc.aio.Channel
    name: str = "grpc"

    async def call(self, rpc: str, request: Message) -> Any:
        try:
            return await getattr(PolicyServiceStub(self.channel), rpc)(request, timeout=60)
        except grpc.aio.AioRpcError as error:
            raise grpc_error(error) from error


def grpc_error(error: grpc.aio.AioRpcError) -> WireError:
    trailers = dict(error.trailing_metadata() or ())
    data = trailers["ratoon-error-bin"]
    assert isinstance(data, bytes)
    return WireError(operation_pb2.ErrorDetail.FromString(data), error.code())


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpWire:
    client: httpx.AsyncClient
    name: str = "http"

    async def call(self, rpc: str, request: Message) -> Any:
        method, path = ROUTES[rpc]
        body = request_json(request)
        url = re.sub(r"\{(\w+)\}", lambda match: _path_part(request, match.group(1), body), path)
        if method in ("POST", "PUT"):
            # As a peer may write it: NaN is no JSON, but Python sends it.
            response = await self.client.request(
                method,
                url,
                content=json.dumps(body),
                headers={"Content-Type": "application/json"},
                timeout=60,
            )
        else:
            response = await self.client.request(method, url, params=body, timeout=60)
        if response.is_success:
            output = GetMessageClass(SERVICE.methods_by_name[rpc].output_type)()
            return ParseDict(_proto_json(output.DESCRIPTOR, response.json()), output)
        raise http_error(response)


Wire = GrpcWire | HttpWire


async def refused_by(wire: Wire, rpc: str, request: Message) -> WireError:
    """The error of a call that must fail."""
    with pytest.raises(WireError) as caught:
        await wire.call(rpc, request)
    return caught.value


def _path_part(request: Message, name: str, body: dict[str, Any]) -> str:
    """A field of the request as part of the path, and no longer of the body."""
    body.pop(name, None)
    field = request.DESCRIPTOR.fields_by_name[name]
    is_absent = field.has_presence and not request.HasField(name)
    return "latest" if is_absent else str(getattr(request, name))


def http_error(response: httpx.Response) -> WireError:
    body = response.json()
    assert set(body) == {"error"}, body
    detail = ParseDict(body["error"], operation_pb2.ErrorDetail())
    return WireError(detail, response.status_code)


def request_json(message: Message) -> dict[str, Any]:
    """The JSON that docs/api.md asks for."""
    data = MessageToDict(message, preserving_proto_field_name=True)
    return _our_json(message.DESCRIPTOR, data)


def _our_json(descriptor: Any, data: dict[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, value in data.items():
        field = descriptor.fields_by_name[name]
        if name == "key":
            out |= _our_json(field.message_type, value)
        elif name == "segments" and isinstance(value, dict):
            segments = field.message_type.fields_by_name["segments"].message_type
            out[name] = [_our_json(segments, item) for item in value.get("segments", [])]
        else:
            out[name] = _each(value, lambda item, field=field: _our_value(field, item))
    return out


def _our_value(field: Any, value: Any) -> Any:
    if field.message_type is not None:
        empty = {"shape": [], "data": ""} if field.message_type.name == "Tensor" else {}
        return {**empty, **_our_json(field.message_type, value)}
    if field.enum_type is not None:
        return value.removeprefix(_prefix(field.enum_type)).lower()
    if field.cpp_type in (field.CPPTYPE_INT64, field.CPPTYPE_UINT64):
        return int(value)
    if field.cpp_type == field.CPPTYPE_DOUBLE:
        return float(value)
    return value


def _proto_json(descriptor: Any, data: dict[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, value in data.items():
        field = descriptor.fields_by_name[name]
        if value is None:
            continue
        is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
        out[name] = (
            value if is_map else _each(value, lambda item, field=field: _proto_value(field, item))
        )
    return out


def _proto_value(field: Any, value: Any) -> Any:
    if field.message_type is not None and isinstance(value, dict):
        return _proto_json(field.message_type, value)
    if field.enum_type is not None:
        return f"{_prefix(field.enum_type)}{value.upper()}"
    # Null in a list is a number that is not finite.
    return "NaN" if value is None else value


def _each(value: Any, convert: Any) -> Any:
    return [convert(item) for item in value] if isinstance(value, list) else convert(value)


def _prefix(enum: Any) -> str:
    return enum.values_by_number[0].name.removesuffix("UNSPECIFIED")


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()
