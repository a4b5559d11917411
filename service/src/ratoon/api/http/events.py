"""Routes of watched operations and weights, as server-sent events.

Each change is sent as `event: operation` or `event: weights` with JSON data, and a failure of the
watch as `event: error`. A watch that fails at once is an ordinary HTTP error, not a stream.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator

from fastapi import APIRouter
from fastapi.responses import StreamingResponse
from google.protobuf.message import Message

from ratoon.api.answers import detail_of
from ratoon.api.gate import Gate
from ratoon.api.http.access import AuthorizedCallOf
from ratoon.api.http.errors import error_responses
from ratoon.api.http.routes import KnownVersion, OperationId, PolicyId
from ratoon.api.service import PolicyService
from ratoon.errors import ErrorCode, RatoonError
from ratoon_proto.json_form import to_json
from ratoon_proto.v1.service_pb2 import WatchOperationRequest, WatchWeightsRequest

MEDIA_TYPE = "text/event-stream"
KEEP_ALIVE_S = 15.0
# A failure within this time is an HTTP error; a later one is an event.
_AT_ONCE_S = 1.0


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
