"""Routes of operations: long poll, server-sent events, cancel."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from fastapi.responses import JSONResponse, StreamingResponse

from ratoon.api.gate import Gate
from ratoon.api.http.access import VisitOf
from ratoon.api.http.errors import error_responses
from ratoon.api.http.events import MEDIA_TYPE, event_stream
from ratoon.api.http.responses import OperationId, json_of
from ratoon.api.http.schema.operation import Operation
from ratoon.api.service import PolicyService
from ratoon.errors import ErrorCode
from ratoon_proto.v1 import service_pb2 as wire

WaitSeconds = Annotated[float, Query(ge=0, allow_inf_nan=False, examples=[30])]


def router(service: PolicyService, gate: Gate) -> APIRouter:
    routes = APIRouter(prefix="/v1/operations", tags=["operations"])

    @routes.get(
        "/{operation_id}",
        response_model=Operation,
        responses=error_responses(ErrorCode.OPERATION_NOT_FOUND, ErrorCode.SEQ_GAP),
    )
    async def get_operation(
        visit: VisitOf, operation_id: OperationId, wait_s: WaitSeconds = 0.0
    ) -> JSONResponse:
        """The operation once it has ended, or as it stands after `wait_s` seconds."""
        request = wire.GetOperationRequest(operation_id=operation_id, wait_s=wait_s)
        return json_of(await gate.run(visit, service.get_operation, request))

    @routes.get(
        "/{operation_id}/events",
        response_class=StreamingResponse,
        responses={
            200: {"content": {MEDIA_TYPE: {}}, "description": "Events named `operation`."},
            **error_responses(ErrorCode.OPERATION_NOT_FOUND),
        },
    )
    async def watch_operation(visit: VisitOf, operation_id: OperationId) -> StreamingResponse:
        """The operation now and as it changes, up to its end; leaving does not cancel it."""
        request = wire.WatchOperationRequest(operation_id=operation_id)
        return await event_stream(gate.stream(visit, service.watch_operation, request))

    @routes.post(
        "/{operation_id}/cancel",
        response_model=Operation,
        responses=error_responses(ErrorCode.OPERATION_NOT_FOUND),
    )
    async def cancel_operation(visit: VisitOf, operation_id: OperationId) -> JSONResponse:
        """Stop it before its optimizer step; one that has ended stays as it is."""
        request = wire.CancelOperationRequest(operation_id=operation_id)
        return json_of(await gate.run(visit, service.cancel_operation, request))

    return routes
