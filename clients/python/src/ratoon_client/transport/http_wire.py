"""The service over HTTP, with the same messages as over gRPC.

Where each call is, the `http` option of service.proto says. A server-sent event that is cut off is
not given out.
"""

from __future__ import annotations

import asyncio
import json
import re
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from http.client import HTTPException
from types import MappingProxyType
from typing import Any
from urllib.parse import quote

import httpx
from google.protobuf.message import Message

from ratoon_client.config import ClientConfig
from ratoon_client.errors import (
    IntegrityError,
    RatoonApiError,
    RatoonClientError,
    TransportError,
    no_answer,
)
from ratoon_client.rpcs import RequestT, ResponseT, Rpc
from ratoon_client.transport.ranges import PART_OF_FILE, WHOLE_FILE, RangeReader
from ratoon_client.weights.chunks import check_chunk, check_length
from ratoon_client.weights.disk import in_thread
from ratoon_client.wire import error_of
from ratoon_proto.fields import http_route
from ratoon_proto.json_form import MessageT, from_json, to_request_json
from ratoon_proto.types import WeightFile
from ratoon_proto.v1 import operation_pb2, service_pb2

CHUNK_DIGEST = "Ratoon-Chunk-Digest"
# Two of a stream's keep-alive comments may be late.
EVENT_TIMEOUT_S = 45.0
_CONNECT_TIMEOUT_S = 10.0
# Calls at once; watches and ranges of files are not counted.
_MAX_IN_FLIGHT = 16
# Statuses that proxies make when nothing of ours answers. 404 in another form than ours: Serve's,
# which knows of no route while the service comes back.
_NO_ANSWER = frozenset({404, 408, 500, 502, 503, 504})
_PLACE = re.compile(r"\{(\w+)\}")


@cache
def _no_tls() -> ssl.SSLContext:
    """Stands where httpx wants a context for http:// too, which it would make for each client.

    One of the process also serves after a fork: a new one may wait in a child for a lock of the
    library that another thread held as the process was forked.
    """
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


class HttpTransport:
    """Connections for calls, and some for files; no proxy or credentials of the environment.

    `context` None: without TLS.
    """

    def __init__(self, base_url: str, config: ClientConfig, context: ssl.SSLContext | None) -> None:
        self._base_url = base_url
        # Not a bound of the pool: one call there that ends of its timeout while it waits keeps the
        # connection that it is just given, for ever and in vain.
        self._slots = asyncio.Semaphore(_MAX_IN_FLIGHT)
        headers = {"Authorization": config.authorization} if config.authorization else {}
        self._client = httpx.AsyncClient(
            base_url=base_url,
            trust_env=False,
            verify=_no_tls() if context is None else context,
            headers=headers,
            limits=httpx.Limits(max_keepalive_connections=_MAX_IN_FLIGHT),
        )
        self._ranges = RangeReader(
            base_url,
            headers,
            context,
            in_flight=config.fetches_in_flight,
            connect_timeout_s=_CONNECT_TIMEOUT_S,
        )

    async def call(
        self, rpc: Rpc[RequestT, ResponseT], request: RequestT, *, timeout_s: float
    ) -> ResponseT:
        route = ROUTES[rpc.name]
        body = await asyncio.to_thread(_body, route, request)
        response = await self._send(
            route.method,
            route.url(request),
            timeout_s=timeout_s,
            params=route.params(request),
            content=body,
            headers={"Content-Type": "application/json"} if body is not None else None,
        )
        if rpc.response is service_pb2.FetchWeightsResponse:
            digest = response.headers.get(CHUNK_DIGEST, "")
            return rpc.response(data=response.content, digest=digest)
        return _decoded(rpc.response, await asyncio.to_thread(_parsed, response))

    async def stream(
        self, rpc: Rpc[RequestT, ResponseT], request: RequestT
    ) -> AsyncGenerator[ResponseT, None]:
        route = ROUTES[rpc.name]
        timeout = httpx.Timeout(EVENT_TIMEOUT_S, connect=_CONNECT_TIMEOUT_S)
        async with (
            self._transport_errors(route.url(request)),
            self._client.stream(route.method, route.url(request), timeout=timeout) as response,
        ):
            if not response.is_success:
                await response.aread()
                raise _error_of(response)
            async for event in read_events(response.aiter_lines()):
                data = _json(event.data)
                if event.name == "error":
                    raise error_of(_decoded(operation_pb2.ErrorDetail, data["error"]))
                yield _decoded(rpc.response, data)

    async def read_file(
        self,
        policy_id: str,
        version: int,
        file: WeightFile,
        *,
        offset: int,
        length: int,
        timeout_s: float,
    ) -> bytes:
        """A range of the file. It is tied to the digest by the entity tag."""
        path = f"/v1/policies/{quote(policy_id, safe='')}/weights/{version}/files/{file.name}"
        async with self._transport_errors(path):
            answer = await self._ranges.read(
                path, offset=offset, length=length, timeout_s=timeout_s
            )
        if answer.status not in (WHOLE_FILE, PART_OF_FILE):
            raise _error(self._base_url + path, answer.status, answer.data)
        if answer.headers.get("ETag") != f'"{file.digest}"':
            raise IntegrityError(f"{file.name}: the service has another file of this name")
        check_length(file.name, offset, length, answer.data)
        digest = answer.headers.get(CHUNK_DIGEST)
        if digest is not None:
            await in_thread(check_chunk, file.name, offset, length, answer.data, digest)
        return answer.data

    async def close(self) -> None:
        self._ranges.close()
        await self._client.aclose()

    async def _send(
        self, method: str, url: str, *, timeout_s: float, **options: Any
    ) -> httpx.Response:
        timeout = httpx.Timeout(timeout_s, connect=min(timeout_s, _CONNECT_TIMEOUT_S))
        # httpx bounds each read: an answer that trickles in would have no end.
        async with self._transport_errors(url), asyncio.timeout(timeout_s), self._slots:
            response = await self._client.request(method, url, timeout=timeout, **options)
        if not response.is_success:
            raise _error_of(response)
        return response

    @asynccontextmanager
    async def _transport_errors(self, url: str) -> AsyncGenerator[None, None]:
        try:
            yield
        except (httpx.RequestError, HTTPException, OSError) as err:
            text = str(err) or type(err).__name__
            raise no_answer(f"{url} at {self._base_url}: {text}") from err
        except RuntimeError as err:
            # httpx's, of a call that was about to be sent when the client was closed.
            if not self._client.is_closed:
                raise
            raise TransportError(f"{url} at {self._base_url}: {err}") from err


def _body(route: Route, request: Message) -> bytes | None:
    if not route.has_body:
        return None
    return json.dumps(to_request_json(request, skip=route.fields)).encode()


def _parsed(response: httpx.Response) -> Any:
    return _json(response.text)


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as err:
        raise TransportError(f"the answer is not JSON: {text[:80]!r}") from err


def _decoded(message_type: type[MessageT], data: object) -> MessageT:
    try:
        return from_json(message_type, data)
    except ValueError as err:
        raise TransportError(f"the answer is {err}") from err


def _error_of(response: httpx.Response) -> RatoonClientError:
    return _error(str(response.request.url), response.status_code, response.content)


def _error(url: str, status: int, body: bytes) -> RatoonClientError:
    """What the service said, or that something else has answered in its place."""
    try:
        return error_of(from_json(operation_pb2.ErrorDetail, json.loads(body)["error"]))
    except (ValueError, KeyError, TypeError):
        text = f"{url}: HTTP {status}"
    if status in _NO_ANSWER:
        return TransportError(text)
    return RatoonApiError(f"HTTP_{status}", text)


@dataclass(frozen=True, slots=True)
class Route:
    """`path` has `{field}` where a field of the request goes."""

    method: str
    path: str

    @property
    def has_body(self) -> bool:
        return self.method in ("POST", "PUT")

    @property
    def fields(self) -> frozenset[str]:
        """Names of the fields in the path."""
        return frozenset(_PLACE.findall(self.path))

    def url(self, request: Message) -> str:
        return _PLACE.sub(lambda place: quote(_part(request, place[1]), safe=""), self.path)

    def params(self, request: Message) -> dict[str, Any]:
        """The query: all other fields of a call without a body."""
        if self.has_body:
            return {}
        return to_request_json(request, skip=self.fields)


def _part(request: Message, name: str) -> str:
    is_absent = request.DESCRIPTOR.fields_by_name[name].has_presence and not request.HasField(name)
    return "latest" if is_absent else str(getattr(request, name))


ROUTES: Mapping[str, Route] = MappingProxyType(
    {
        method.name: Route(*route)
        for method in service_pb2.DESCRIPTOR.services_by_name["PolicyService"].methods
        if (route := http_route(method)) is not None
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    name: str
    data: str


async def read_events(lines: AsyncIterator[str]) -> AsyncGenerator[Event, None]:
    name, data = "message", list[str]()
    async for line in lines:
        if not line:
            if data:
                yield Event(name=name, data="\n".join(data))
            name, data = "message", []
            continue
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "event":
            name = value
        elif field == "data":
            data.append(value)
