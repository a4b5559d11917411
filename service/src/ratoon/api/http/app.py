"""The ASGI application of the gateway and of Serve's replicas: all routes, one error format.

Its OpenAPI document names exactly the calls that are built.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable

from fastapi import Depends, FastAPI
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ratoon import __version__
from ratoon.api.gate import Gate
from ratoon.api.http.access import CallGate, LocalNames
from ratoon.api.http.errors import answer_errors
from ratoon.api.http.events import add_events
from ratoon.api.http.files import add_files
from ratoon.api.http.routes import add_calls, add_server
from ratoon.api.service import PolicyService
from ratoon.config import LimitsConfig
from ratoon.errors import invalid, shown

_MAX_PARSING = 2


def create_app(
    service: PolicyService,
    limits: LimitsConfig,
    *,
    gate: Gate,
    allowed_hosts: Iterable[str] | None = None,
) -> FastAPI:
    """Build the application of a service behind a gate.

    `allowed_hosts` are the host names accepted besides loopback's; None accepts any.
    """
    app = FastAPI(
        title="Ratoon",
        version=__version__,
        summary="Policy updates for RL post-training: grouped rollouts in, new weights out.",
        separate_input_output_schemas=False,
        redirect_slashes=False,
        generate_unique_id_function=_operation_name,
        dependencies=[Depends(_only_known_parameters)],
    )
    app.state.parsing = asyncio.Semaphore(_MAX_PARSING)
    app.state.gate = gate
    app.router.routes.insert(0, _document(app))
    answer_errors(app)
    # Events come before a version's route, whose path would match too.
    add_events(app.router, service, gate)
    add_calls(app.router, service, gate)
    add_files(app.router, service, gate, max_fetch_bytes=limits.max_fetch_bytes)
    add_server(app.router, service, gate)
    app.add_middleware(CallGate, service=service, gate=gate, limits=limits, routes=app.routes)
    if allowed_hosts is not None:
        # The last one added is the outermost.
        app.add_middleware(LocalNames, allowed=allowed_hosts)
    return app


def _document(app: FastAPI) -> Route:
    """Build the route of the API document, which is rendered once.

    It needs no key, and FastAPI would render it per request.
    """
    body: asyncio.Task[bytes] | None = None

    def render() -> bytes:
        return json.dumps(app.openapi()).encode()

    async def openapi(_request: Request) -> Response:
        nonlocal body
        if body is None:
            body = asyncio.create_task(asyncio.to_thread(render))
        return Response(await asyncio.shield(body), media_type="application/json")

    return Route("/openapi.json", openapi, include_in_schema=False)


async def _only_known_parameters(request: Request) -> None:
    """Refuse query parameters that the route does not have, which FastAPI ignores.

    Raises INVALID_ARGUMENT, as for `?wait=30`.
    """
    route = request.scope["route"]
    known = sorted(field.alias for field in route.dependant.query_params)
    for name, value in request.query_params.items():
        if name not in known:
            expected = f"one of {', '.join(known)}" if known else "no parameter"
            raise invalid(shown(name)[1:-1], shown(value), expected)


def _operation_name(route: APIRoute) -> str:
    return route.name
