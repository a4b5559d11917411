"""Routes of the Tinker wire: `/api/v1` beside `/v1`, behind the same gate and bounds.

Bodies are JSON, and protobuf for `forward_backward`; unknown fields are counted and ignored.
Errors are `{"detail": text, "error": text, "category": user or server}`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from google.protobuf.message import DecodeError
from pydantic import ValidationError
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from ratoon.api.counts import MalformedError, MessageCounter, check_json
from ratoon.api.gate import Gate
from ratoon.api.http.access import authorized_of
from ratoon.api.http.errors import TINKER_PREFIX, validation_error
from ratoon.api.http.routes import while_connected
from ratoon.api.service import PolicyService
from ratoon.api.tinker import bodies
from ratoon.api.tinker.answers import error_answer
from ratoon.api.tinker.calls import TinkerCalls, unknown_of
from ratoon.api.tinker.errors import shown_error, status_of
from ratoon.api.tinker.runs import Json
from ratoon.config import RatoonConfig
from ratoon.errors import ErrorCode, RatoonError, invalid, shown
from ratoon_proto.tinker.tinker_pb2 import ForwardBackwardRequest

_PROTOBUF = "application/x-protobuf"
_MAX_PAGE = 100
_Body = TypeVar("_Body", bound=bodies.Body)
_Answer = Json | bytes | None
_Handler = Callable[[Request], Awaitable[_Answer]]


def tinker_routes(service: PolicyService, gate: Gate, config: RatoonConfig) -> list[Route]:
    """Build the routes; none unless `tinker.enabled`."""
    if not config.tinker.enabled:
        return []
    calls = TinkerCalls(service, gate, config)
    counter = MessageCounter(ForwardBackwardRequest.DESCRIPTOR, config.limits)

    async def forward_backward(request: Request) -> _Answer:
        body = await _message(request, counter)
        calls.note_unknown("forward_backward", unknown_of(body))
        return await calls.forward_backward(authorized_of(request), body)

    async def client_config(_: Request) -> _Answer:
        return await calls.client_config()

    async def capabilities(_: Request) -> _Answer:
        return await calls.runs.capabilities()

    async def telemetry(request: Request) -> _Answer:
        await request.body()
        return {"status": "accepted"}

    async def health(_: Request) -> _Answer:
        return {"status": "ok"}

    def with_body(
        name: str, kind: type[_Body], call: Callable[..., Awaitable[_Answer]]
    ) -> tuple[str, _Handler]:
        async def handle(request: Request) -> _Answer:
            body = await _parsed(request, kind)
            calls.note_unknown(name, body.unknown_fields())
            return await call(authorized_of(request), body, **request.path_params)

        return name, handle

    def with_place(call: Callable[..., Awaitable[_Answer]]) -> _Handler:
        async def handle(request: Request) -> _Answer:
            return await call(authorized_of(request), **request.path_params)

        return handle

    def with_page(call: Callable[..., Awaitable[_Answer]]) -> _Handler:
        async def handle(request: Request) -> _Answer:
            page = _number(request, "offset", 0, 2**31), _number(request, "limit", 20, _MAX_PAGE)
            return await call(authorized_of(request), *page)

        return handle

    async def retrieve_future(request: Request) -> _Answer:
        body = await _parsed(request, bodies.RetrieveFuture)
        calls.note_unknown("retrieve_future", body.unknown_fields())
        call = calls.retrieve_future(authorized_of(request), body)
        try:
            return await while_connected(request, call)
        except ClientDisconnect:
            return None  # Nobody reads it.

    posts = (
        with_body("create_session", bodies.CreateSession, calls.create_session),
        with_body("create_model", bodies.CreateModel, calls.create_model),
        with_body("get_info", bodies.OfModel, calls.runs.get_info),
        with_body("optim_step", bodies.OptimStep, calls.optim_step),
        with_body("save_weights", bodies.SaveWeights, calls.save_weights),
        with_body("load_weights", bodies.LoadWeights, calls.load_weights),
        with_body("weights_info", bodies.OfPath, calls.runs.weights_info),
        with_body(
            "save_weights_for_sampler",
            bodies.SaveWeightsForSampler,
            calls.save_weights_for_sampler,
        ),
        with_body(
            "create_sampling_session", bodies.CreateSamplingSession, calls.samples.create_session
        ),
        with_body("asample", bodies.Asample, calls.samples.asample),
        ("retrieve_future", retrieve_future),
        ("forward_backward", forward_backward),
        ("telemetry", telemetry),
    )
    heartbeat = with_body("session_heartbeat", bodies.OfSession, calls.runs.heartbeat)[1]
    set_ttl = with_body("set_ttl", bodies.Ttl, calls.set_ttl)[1]
    session, run = "/sessions/{session_id}", "/training_runs/{model_id}"
    saved = f"{run}/checkpoints/{{checkpoint_id:path}}"
    return [
        *(_route(f"/{name}", "POST", name, handler) for name, handler in posts),
        _route("/client/config", "POST", "client_config", client_config),
        _route("/session_heartbeat", "POST", "heartbeat", heartbeat),
        _route(session, "GET", "session", with_place(calls.runs.session)),
        _route(f"{session}/finish", "POST", "finish_session", with_place(calls.finish_session)),
        _route("/samplers/{sampler_id}", "GET", "sampler", with_place(calls.samples.sampler)),
        _route("/get_server_capabilities", "GET", "capabilities", capabilities),
        _route("/healthz", "GET", "health", health),
        _route("/training_runs", "GET", "training_runs", with_page(calls.runs.training_runs)),
        _route(run, "GET", "training_run", with_place(calls.runs.training_run)),
        _route("/checkpoints", "GET", "checkpoints", with_page(calls.runs.checkpoints)),
        _route(
            f"{run}/checkpoints", "GET", "run_checkpoints", with_place(calls.runs.run_checkpoints)
        ),
        _route(saved, "DELETE", "delete_checkpoint", with_place(calls.delete_checkpoint)),
        _route(f"{saved}/ttl", "PUT", "set_ttl", set_ttl),
    ]


def _route(path: str, method: str, name: str, handle: _Handler) -> Route:
    async def endpoint(request: Request) -> Response:
        try:
            answer = await handle(request)
        except RatoonError as err:
            return _refused(shown_error(err))
        if answer is None:
            return Response(status_code=204)
        if isinstance(answer, bytes):
            return Response(answer, media_type=_PROTOBUF)
        return JSONResponse(answer)

    return Route(f"{TINKER_PREFIX}{path}", endpoint, methods=[method], name=f"tinker_{name}")


def _refused(error: RatoonError) -> JSONResponse:
    after = error.retry_after_s
    headers = {} if after is None else {"Retry-After": str(after)}
    content = {"detail": error.message, "code": str(error.code), **error_answer(error)}
    return JSONResponse(content, status_code=status_of(error), headers=headers)


async def _parsed(request: Request, kind: type[_Body]) -> _Body:
    """Return a JSON body. Raises MALFORMED_BODY, INVALID_ARGUMENT, BODY_TOO_LARGE."""
    body = await request.body()

    def parse() -> _Body:
        check_json(body)
        try:
            return kind.model_validate_json(body)
        except ValidationError as err:
            errors = [{**error, "loc": ("body", *error["loc"])} for error in err.errors()]
            raise validation_error(errors) from err

    return await asyncio.to_thread(parse)


async def _message(request: Request, counter: MessageCounter) -> ForwardBackwardRequest:
    """Return a protobuf body. Raises MALFORMED_BODY, BODY_TOO_LARGE."""
    body = await request.body()

    def parse() -> ForwardBackwardRequest:
        counter.count(body)
        return ForwardBackwardRequest.FromString(body)

    try:
        # Few at once, as bodies of JSON.
        async with request.app.state.parsing:
            return await asyncio.to_thread(parse)
    except (MalformedError, DecodeError) as err:
        raise RatoonError(
            ErrorCode.MALFORMED_BODY,
            "the body is not a ForwardBackwardRequest; it takes no seq, as none can be read",
            got=f"{len(body)} bytes",
            expected=_PROTOBUF,
        ) from err


def _number(request: Request, name: str, default: int, most: int) -> int:
    """Return a number of the query. Raises INVALID_ARGUMENT."""
    text = request.query_params.get(name, str(default))
    if not (text.isdecimal() and text.isascii() and len(text) < 11 and int(text) <= most):
        raise invalid(name, shown(text), f"at least 0 and at most {most}")
    return int(text)
