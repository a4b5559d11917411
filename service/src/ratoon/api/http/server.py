"""Routes of the server itself: health and metrics."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response

from ratoon.api.gate import Gate
from ratoon.api.http.access import AuthorizedCallOf
from ratoon.api.http.errors import error_response, error_responses
from ratoon.api.http.responses import json_of
from ratoon.api.http.schema.models import model_of
from ratoon.api.service import PolicyService
from ratoon.errors import ErrorCode, RatoonError
from ratoon_proto.v1 import service_pb2 as wire

PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


def server_router(service: PolicyService, gate: Gate) -> APIRouter:
    """Build the routes of health and metrics."""
    routes = APIRouter(tags=["server"])

    @routes.get(
        "/v1/health",
        response_model=model_of(wire.HealthResponse.DESCRIPTOR),
        responses=error_responses(),
    )
    async def health(authorized: AuthorizedCallOf) -> JSONResponse:
        """200 where the server can take work, 503 otherwise."""
        answer = await gate.run(authorized, service.health, wire.HealthRequest())
        if answer.status != "ok":
            return error_response(RatoonError(ErrorCode.UNAVAILABLE, answer.status))
        return json_of(answer)

    @routes.get(
        "/metrics",
        response_class=Response,
        responses={
            200: {"content": {"text/plain": {}}, "description": "Prometheus text."},
            **error_responses(),
        },
    )
    async def metrics(authorized: AuthorizedCallOf) -> Response:
        """Totals over all processes: any replica answers the same."""
        gate.check_all(authorized)
        return Response(await service.metrics_text(), media_type=PROMETHEUS)

    return routes
