"""HTTP routes of the calls that gRPC has too, of watches, and of health and metrics.

Method, path, parameters, body and answer of a call come from its descriptor in service.proto. Only
what the contract does not say is here: a call's possible errors, and how parameters are written.
The body of a response is `to_json` of the message and nothing else.

Watches are server-sent events: each change is sent as `event: operation` or `event: weights` with
JSON data, and a failure of the watch as `event: error`. A watch that fails at once is an ordinary
HTTP error, not a stream.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from types import MappingProxyType
from typing import Annotated, Any, TypeVar

from fastapi import APIRouter, Path, Query, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from fastapi.routing import APIRoute
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from starlette.requests import ClientDisconnect

from ratoon.api.answers import detail_of
from ratoon.api.contract import BATCHES, SERVICE, call_name
from ratoon.api.convert.checks import DIGEST, OPERATION_ID, POLICY_ID, UPLOAD_ID
from ratoon.api.gate import AuthorizedCall, Gate
from ratoon.api.http.access import AuthorizedCallOf
from ratoon.api.http.bodies import BodyRoute, fill_request
from ratoon.api.http.errors import error_response, error_responses
from ratoon.api.http.schema import WireModel, body_of, enum_of, error_body, model_of
from ratoon.api.service import MAX_PAGE_SIZE, MAX_POINTS, PolicyService
from ratoon.errors import ErrorCode, RatoonError
from ratoon_proto.fields import comment, fields_of, http_route
from ratoon_proto.fill import fill
from ratoon_proto.json_form import to_json
from ratoon_proto.v1 import service_pb2 as wire
from ratoon_proto.v1.operation_pb2 import Operation, OperationKind, OperationState
from ratoon_proto.v1.service_pb2 import WatchOperationRequest, WatchWeightsRequest

T = TypeVar("T")
ACCEPTED = 202
PolicyId = Annotated[str, Path(examples=["tiny-grpo"], pattern=f"^{POLICY_ID.pattern}$")]
UploadId = Annotated[str, Path(examples=["batch-17"], pattern=f"^{UPLOAD_ID.pattern}$")]
Digest = Annotated[str, Path(pattern=f"^{DIGEST.pattern}$")]
CheckpointId = Annotated[str, Path(examples=["after-warmup"])]
VersionName = Annotated[str, Path(examples=["after-warmup"])]
KnownVersion = Annotated[int | None, Query(ge=0, lt=2**63)]
OperationId = Annotated[str, Path(pattern=f"^{OPERATION_ID.pattern}$")]
Version = Annotated[int, Path(ge=0, lt=2**63)]
Seq = Annotated[int, Path(ge=1, lt=2**63)]
Index = Annotated[int, Path(ge=0, lt=2**31)]
WaitSeconds = Annotated[float, Query(ge=0, allow_inf_nan=False, examples=[30])]
_PLACE = re.compile(r"\{(\w+)\}")
_KEYED = (
    ErrorCode.POLICY_NOT_FOUND,
    ErrorCode.POLICY_NOT_READY,
    ErrorCode.POLICY_FAILED,
    ErrorCode.KEY_REUSED,
    ErrorCode.SEQ_GAP,
    ErrorCode.RESOURCE_EXHAUSTED,
)
_BATCH = (*_KEYED, ErrorCode.UPLOAD_NOT_FOUND, ErrorCode.OPERATION_NOT_FOUND)
_ROLLOUTS = (ErrorCode.POLICY_NOT_FOUND, ErrorCode.ROLLOUTS_NOT_FOUND)
# The tag of each call's route, and its errors beyond the common ones.
CALLS: Mapping[str, tuple[str, tuple[ErrorCode, ...]]] = MappingProxyType(
    {
        "CreatePolicy": (
            "policies",
            (
                ErrorCode.POLICY_EXISTS,
                ErrorCode.RESOURCE_EXHAUSTED,
                ErrorCode.UNSUPPORTED,
                ErrorCode.UPLOAD_NOT_FOUND,
            ),
        ),
        "SendModelFile": ("policies", (ErrorCode.RESOURCE_EXHAUSTED,)),
        "ListPolicies": ("policies", ()),
        "GetPolicy": ("policies", (ErrorCode.POLICY_NOT_FOUND,)),
        "DeletePolicy": ("policies", (ErrorCode.POLICY_NOT_FOUND, ErrorCode.POLICY_NOT_READY)),
        "ReleasePolicy": (
            "policies",
            (
                ErrorCode.POLICY_NOT_FOUND,
                ErrorCode.POLICY_NOT_READY,
                ErrorCode.POLICY_FAILED,
                ErrorCode.WINDOW_OPEN,
            ),
        ),
        "SaveCheckpoint": ("policies", _KEYED),
        "ListCheckpoints": ("policies", (ErrorCode.POLICY_NOT_FOUND,)),
        "DeleteCheckpoint": (
            "policies",
            (
                ErrorCode.POLICY_NOT_FOUND,
                ErrorCode.POLICY_NOT_READY,
                ErrorCode.POLICY_FAILED,
                ErrorCode.CHECKPOINT_NOT_FOUND,
            ),
        ),
        "LoadCheckpoint": ("policies", (*_KEYED, ErrorCode.CHECKPOINT_NOT_FOUND)),
        "Update": ("training", _BATCH),
        "ForwardBackward": ("training", _BATCH),
        "OptimStep": ("training", _KEYED),
        "DiscardGradients": ("training", _KEYED),
        "Forward": ("training", _BATCH),
        "UploadPart": ("training", (ErrorCode.POLICY_NOT_FOUND, ErrorCode.RESOURCE_EXHAUSTED)),
        "GetOperation": ("operations", (ErrorCode.OPERATION_NOT_FOUND, ErrorCode.SEQ_GAP)),
        "ListOperations": ("operations", (ErrorCode.POLICY_NOT_FOUND,)),
        "CancelOperation": ("operations", (ErrorCode.OPERATION_NOT_FOUND,)),
        "ListSteps": ("training", (ErrorCode.POLICY_NOT_FOUND,)),
        "PublishVersion": ("weights", _KEYED),
        "DeleteVersion": (
            "weights",
            (
                ErrorCode.POLICY_NOT_FOUND,
                ErrorCode.POLICY_NOT_READY,
                ErrorCode.POLICY_FAILED,
                ErrorCode.WEIGHTS_NOT_FOUND,
            ),
        ),
        "ListVersions": (
            "weights",
            (ErrorCode.POLICY_NOT_FOUND, ErrorCode.POLICY_NOT_READY, ErrorCode.POLICY_FAILED),
        ),
        "ListRollouts": ("rollouts", _ROLLOUTS),
        "GetRollout": ("rollouts", _ROLLOUTS),
        "GetWeightManifest": (
            "weights",
            (ErrorCode.POLICY_NOT_FOUND, ErrorCode.WEIGHTS_NOT_FOUND),
        ),
        "GetGradientManifest": (
            "training",
            (
                ErrorCode.POLICY_NOT_FOUND,
                ErrorCode.POLICY_NOT_READY,
                ErrorCode.POLICY_FAILED,
                ErrorCode.WINDOW_EMPTY,
                ErrorCode.WINDOW_POISONED,
                ErrorCode.WORKER_LOST,
                ErrorCode.RESOURCE_EXHAUSTED,
            ),
        ),
        "AckWeights": (
            "weights",
            (
                ErrorCode.POLICY_NOT_FOUND,
                ErrorCode.POLICY_NOT_READY,
                ErrorCode.WEIGHTS_NOT_FOUND,
                ErrorCode.RESOURCE_EXHAUSTED,
            ),
        ),
        "ImportWeights": ("weights", _KEYED),
        "Sample": (
            "weights",
            (
                ErrorCode.POLICY_NOT_FOUND,
                ErrorCode.POLICY_NOT_READY,
                ErrorCode.POLICY_FAILED,
                ErrorCode.WEIGHTS_NOT_FOUND,
                ErrorCode.RESOURCE_EXHAUSTED,
            ),
        ),
        "GetServerInfo": ("server", ()),
    }
)
# Calls that return an operation, but start none.
_AT_ONCE = frozenset({"GetOperation", "CancelOperation"})
# Calls that end where their caller leaves, as all do over gRPC.
_END_WITH_CALLER = frozenset({"Sample"})
# Answers that take long to be written as JSON.
_LONG = frozenset({"ListOperations", "ListSteps", "Sample"})
_IN_PATH: Mapping[str, Any] = MappingProxyType(
    {
        "policy_id": PolicyId,
        "operation_id": OperationId,
        "checkpoint_id": CheckpointId,
        "upload_id": UploadId,
        "digest": Digest,
        "part_index": Index,
        "seq": Seq,
        "group": Index,
        "rollout": Index,
        "version": Version,
        "name": VersionName,
    }
)
_Kind, _State = enum_of(OperationKind.DESCRIPTOR), enum_of(OperationState.DESCRIPTOR)
# Parameters of the query, and what they are where they are left out.
_IN_QUERY: Mapping[str, tuple[Any, Any]] = MappingProxyType(
    {
        "known_version": (KnownVersion, None),
        "delta_from": (KnownVersion, None),
        "wait_s": (WaitSeconds, 0.0),
        "name": (Annotated[str, Query()], ""),
        "policy_id": (Annotated[str, Query(pattern=f"^({POLICY_ID.pattern})?$")], ""),
        "kinds": (Annotated[list[_Kind], Query()], []),
        "states": (Annotated[list[_State], Query()], []),
        "seq": (Annotated[int, Query(ge=0, lt=2**63)], 0),
        "page_size": (Annotated[int, Query(ge=0, le=MAX_PAGE_SIZE)], 0),
        "page_token": (Annotated[str, Query()], ""),
        "figures": (Annotated[list[str], Query()], []),
        "after_seq": (Annotated[int, Query(ge=0, lt=2**63)], 0),
        "before_seq": (Annotated[int, Query(ge=0, lt=2**63)], 0),
        "max_points": (Annotated[int, Query(ge=0, le=MAX_POINTS)], 0),
    }
)
PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
MEDIA_TYPE = "text/event-stream"
KEEP_ALIVE_S = 15.0
# A failure within this time is an HTTP error; a later one is an event.
_AT_ONCE_S = 1.0


def json_of(message: Message, *, status: int = 200) -> JSONResponse:
    """Build the JSON response of a message."""
    return JSONResponse(to_json(message), status_code=status)


def add_calls(routes: APIRouter, service: PolicyService, gate: Gate) -> None:
    """Add the routes of all RPCs that have an HTTP route."""
    for name in CALLS:
        method = SERVICE.methods_by_name[name]
        route = http_route(method)
        assert route is not None, f"{name} has no route"
        verb, path = route
        for place in _PLACE.findall(path):
            if method.input_type.fields_by_name[place].has_presence:
                latest = path.replace(f"{{{place}}}", "latest")
                _add(routes, method, verb, latest, service, gate, f"{call_name(name)}_latest")
        _add(routes, method, verb, path, service, gate, call_name(name))


def _add(
    routes: APIRouter,
    method: MethodDescriptor,
    verb: str,
    path: str,
    service: PolicyService,
    gate: Gate,
    name: str,
) -> None:
    tag, codes = CALLS[method.name]
    is_begun = method.output_type is Operation.DESCRIPTOR and method.name not in _AT_ONCE
    body = body_of(method)
    status = ACCEPTED if is_begun else 200
    endpoint = _endpoint(method, gate, getattr(service, call_name(method.name)), status)
    endpoint.__name__ = name
    endpoint.__signature__ = _signature(method, verb, path, body)  # pyright: ignore[reportFunctionMemberAccess] - inspect reads it
    routes.add_api_route(
        path,
        endpoint,
        methods=[verb],
        name=name,
        tags=[tag],
        description=comment(method.full_name),
        status_code=status,
        response_model=model_of(method.output_type),
        responses=error_responses(*codes),
        route_class_override=APIRoute if body is None else BodyRoute,
    )


def _endpoint(
    method: MethodDescriptor, gate: Gate, call: Callable[[Any], Awaitable[Any]], status: int
) -> Callable[..., Awaitable[Response]]:
    request_type = GetMessageClass(method.input_type)
    is_large = method.name in BATCHES

    async def endpoint(
        *,
        authorized: AuthorizedCall,
        body: WireModel | None = None,
        connection: Request | None = None,
        **fields: Any,
    ) -> Response:
        request = request_type()
        fill(request, fields)
        if body is not None and is_large:
            await asyncio.to_thread(fill_request, request, body)
        elif body is not None:
            fill_request(request, body)
        running = gate.run(authorized, call, request)
        if connection is not None:
            try:
                answer = await while_connected(connection, running)
            except ClientDisconnect:
                return Response()  # Nobody reads it.
        else:
            answer = await running
        if method.name in _LONG:
            return await asyncio.to_thread(json_of, answer, status=status)
        return json_of(answer, status=status)

    return endpoint


async def while_connected(connection: Request, running: Coroutine[Any, Any, T]) -> T:
    """The result of a call, which is cancelled where its caller leaves: raises ClientDisconnect."""
    call, leaving = asyncio.ensure_future(running), asyncio.ensure_future(_left(connection))
    try:
        await asyncio.wait({call, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not call.done():
            raise ClientDisconnect
        return call.result()
    finally:
        call.cancel()
        leaving.cancel()
        await asyncio.gather(call, leaving, return_exceptions=True)


async def _left(connection: Request) -> None:
    """Returns once the caller has left; the body has been read."""
    while (await connection.receive())["type"] != "http.disconnect":
        pass


def _signature(
    method: MethodDescriptor, verb: str, path: str, body: type[WireModel] | None
) -> inspect.Signature:
    """Build the signature that FastAPI reads: authorized call, path and query parameters, body."""
    kinds: dict[str, tuple[Any, Any]] = {"authorized": (AuthorizedCallOf, inspect.Parameter.empty)}
    for name in _PLACE.findall(path):
        kinds[name] = (_IN_PATH[name], inspect.Parameter.empty)
    if verb in ("GET", "DELETE"):
        route = http_route(method)
        assert route is not None
        places = _PLACE.findall(route[1])
        names = [one.name for one in fields_of(method.input_type) if one.name not in places]
        kinds |= {name: _IN_QUERY[name] for name in names}
    if body is not None:
        kinds["body"] = (body, inspect.Parameter.empty)
    if method.name in _END_WITH_CALLER:
        kinds["connection"] = (Request, inspect.Parameter.empty)
    return inspect.Signature(
        [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                annotation=kind,
                default=default,
            )
            for name, (kind, default) in kinds.items()
        ]
    )


def add_server(routes: APIRouter, service: PolicyService, gate: Gate) -> None:
    """Add the routes of health and metrics."""
    errors = error_responses()

    @routes.get(
        "/v1/health",
        tags=["server"],
        response_model=model_of(wire.HealthResponse.DESCRIPTOR),
        # The document's one declaration of the body of an error.
        responses=errors | {503: {**errors[503], "model": error_body()}},
    )
    async def health(authorized: AuthorizedCallOf) -> JSONResponse:
        """200 where the server can take work, 503 otherwise."""
        answer = await gate.run(authorized, service.health, wire.HealthRequest())
        if answer.status != "ok":
            return error_response(RatoonError(ErrorCode.UNAVAILABLE, answer.status))
        return json_of(answer)

    @routes.get(
        "/metrics",
        tags=["server"],
        response_class=Response,
        responses={
            200: {"content": {"text/plain": {}}, "description": "Prometheus text."},
            **errors,
        },
    )
    async def metrics(authorized: AuthorizedCallOf) -> Response:
        """Totals over all processes: any replica answers the same."""
        gate.check_all(authorized)
        return Response(await service.metrics_text(), media_type=PROMETHEUS)


def add_events(routes: APIRouter, service: PolicyService, gate: Gate) -> None:
    """Add the routes of the two watches."""

    @routes.get(
        "/v1/operations/{operation_id}/events",
        tags=["operations"],
        response_class=StreamingResponse,
        responses={
            200: {"content": {MEDIA_TYPE: {}}, "description": "Events named `operation`."},
            **error_responses(ErrorCode.OPERATION_NOT_FOUND),
        },
    )
    async def watch_operation(
        authorized: AuthorizedCallOf, operation_id: OperationId
    ) -> StreamingResponse:
        """The operation now and as it changes, up to its end; leaving does not cancel it."""
        request = WatchOperationRequest(operation_id=operation_id)
        changes = gate.stream(authorized, service.watch_operation, request)
        return await event_stream("operation", changes)

    @routes.get(
        "/v1/policies/{policy_id}/weights/events",
        tags=["weights"],
        response_class=StreamingResponse,
        responses={
            200: {"content": {MEDIA_TYPE: {}}, "description": "Events named `weights`."},
            **error_responses(ErrorCode.POLICY_NOT_FOUND),
        },
    )
    async def watch_weights(
        authorized: AuthorizedCallOf, policy_id: PolicyId, known_version: KnownVersion = None
    ) -> StreamingResponse:
        """The newest manifest now and as versions are published, until the caller leaves."""
        request = WatchWeightsRequest(policy_id=policy_id, known_version=known_version)
        changes = gate.stream(authorized, service.watch_weights, request)
        return await event_stream("weights", changes)


async def event_stream(name: str, changes: AsyncGenerator[Message, None]) -> StreamingResponse:
    """Build a response that sends each of `changes` as an event.

    Raises the error of `changes` if it fails at once, before its first value.
    """
    first = asyncio.ensure_future(anext(changes))
    done, _ = await asyncio.wait({first}, timeout=_AT_ONCE_S)
    if done and isinstance(first.exception(), RatoonError):
        first.result()
    return StreamingResponse(
        _events(name, first, changes), media_type=MEDIA_TYPE, headers={"Cache-Control": "no-store"}
    )


async def _events(
    name: str, upcoming: asyncio.Future[Message], changes: AsyncGenerator[Message, None]
) -> AsyncGenerator[bytes, None]:
    try:
        while True:
            done, _ = await asyncio.wait({upcoming}, timeout=KEEP_ALIVE_S)
            if not done:
                yield b": keep-alive\n\n"
                continue
            yield _event(name, to_json(upcoming.result()))
            upcoming = asyncio.ensure_future(anext(changes))
    except StopAsyncIteration:
        return
    except RatoonError as error:
        yield _event("error", {"error": to_json(detail_of(error))})
    finally:
        upcoming.cancel()
        await asyncio.gather(upcoming, return_exceptions=True)
        await changes.aclose()


def _event(name: str, data: dict[str, object]) -> bytes:
    return f"event: {name}\ndata: {json.dumps(data)}\n\n".encode()
