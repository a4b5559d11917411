"""A watched operation as server-sent events.

Sends `event: operation` with JSON data per change, and `event: error` where the watch fails. A
watch that fails at once is an ordinary HTTP error, not a stream.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator

from fastapi import APIRouter
from fastapi.responses import StreamingResponse

from ratoon.api.convert.errors import detail_of
from ratoon.api.gate import Gate
from ratoon.api.http.access import AuthorizedCallOf
from ratoon.api.http.errors import error_responses
from ratoon.api.http.responses import OperationId
from ratoon.api.service import PolicyService
from ratoon.errors import ErrorCode, RatoonError
from ratoon_proto.json_form import to_json
from ratoon_proto.v1.operation_pb2 import Operation
from ratoon_proto.v1.service_pb2 import WatchOperationRequest

MEDIA_TYPE = "text/event-stream"
KEEP_ALIVE_S = 15.0


def router(service: PolicyService, gate: Gate) -> APIRouter:
    routes = APIRouter(tags=["operations"])

    @routes.get(
        "/v1/operations/{operation_id}/events",
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
        return await event_stream(gate.stream(authorized, service.watch_operation, request))

    return routes


async def event_stream(operations: AsyncGenerator[Operation, None]) -> StreamingResponse:
    """Raises what `operations` raises before its first value."""
    first = await anext(operations)
    return StreamingResponse(
        _events(first, operations), media_type=MEDIA_TYPE, headers={"Cache-Control": "no-store"}
    )


async def _events(
    first: Operation, operations: AsyncGenerator[Operation, None]
) -> AsyncGenerator[bytes, None]:
    yield _event("operation", to_json(first))
    upcoming = asyncio.ensure_future(anext(operations))
    try:
        while True:
            done, _ = await asyncio.wait({upcoming}, timeout=KEEP_ALIVE_S)
            if not done:
                yield b": keep-alive\n\n"
                continue
            yield _event("operation", to_json(upcoming.result()))
            upcoming = asyncio.ensure_future(anext(operations))
    except StopAsyncIteration:
        return
    except RatoonError as error:
        yield _event("error", {"error": to_json(detail_of(error))})
    finally:
        upcoming.cancel()
        await asyncio.gather(upcoming, return_exceptions=True)
        await operations.aclose()


def _event(name: str, data: dict[str, object]) -> bytes:
    return f"event: {name}\ndata: {json.dumps(data)}\n\n".encode()
