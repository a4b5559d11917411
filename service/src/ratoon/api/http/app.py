"""The ASGI application of the gateway and of Serve's replicas, and the gateway's own server of it.

The application has all routes and one error format; its OpenAPI document names exactly the calls
that are built. The server is uvicorn, with our connections and our TLS.
"""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import uvicorn
from fastapi import Depends, FastAPI
from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ratoon import __version__
from ratoon.api.gate import Gate
from ratoon.api.http.access import CallGate, LocalNames
from ratoon.api.http.connection import BoundedConnection
from ratoon.api.http.errors import answer_errors
from ratoon.api.http.files import add_files
from ratoon.api.http.page import page_routes
from ratoon.api.http.routes import add_calls, add_events, add_server
from ratoon.api.service import PolicyService
from ratoon.config import LimitsConfig
from ratoon.edge.budget import EdgeBounds, EdgeBudget
from ratoon.errors import invalid, shown

_MAX_PARSING = 2
_POLL_S = 0.01


def create_app(
    service: PolicyService,
    limits: LimitsConfig,
    *,
    gate: Gate,
    allowed_hosts: Iterable[str] | None = None,
    tinker: Iterable[Route] = (),
) -> FastAPI:
    """Build the application of a service behind a gate; `tinker` are the Tinker wire's routes.

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
    app.router.routes[:0] = [_document(app), *page_routes(), *tinker]
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningHttp:
    """A started HTTP server. `port` is the port that it listens on."""

    server: uvicorn.Server
    serving: asyncio.Task[None]
    port: int

    async def stop(self, grace_s: float | None) -> None:
        """Refuse new requests, and answer those under way within `grace_s` seconds.

        None cuts them off.
        """
        self.server.should_exit = True
        self.server.force_exit = grace_s is None
        self.server.config.timeout_graceful_shutdown = None if grace_s is None else int(grace_s)
        await self.serving


async def start_http(
    app: Any,
    *,
    host: str,
    port: int,
    bounds: EdgeBounds,
    context: ssl.SSLContext | None = None,
) -> RunningHttp:
    """Serve `app` on `host`; port 0 picks a free one. `context` None: without TLS.

    Raises OSError where the port is taken.
    """
    # uvicorn itself would end the process.
    sockets = _bound(host, port)
    protocol = partial(BoundedConnection, budget=EdgeBudget(bounds))
    config = uvicorn.Config(
        app,
        http=cast("type[asyncio.Protocol]", protocol),
        ws="none",
        lifespan="off",
        ssl_context_factory=None if context is None else _always(context),
        timeout_keep_alive=bounds.idle_s,
        # Trust no forwarded address.
        proxy_headers=False,
        server_header=False,
        access_log=False,
        log_config=None,
        log_level="error",
    )
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve(sockets))
    while not server.started and not serving.done():  # noqa: ASYNC110 - uvicorn has no event for it
        await asyncio.sleep(_POLL_S)
    if serving.done():
        serving.result()
    return RunningHttp(server=server, serving=serving, port=sockets[0].getsockname()[1])


def _always(context: ssl.SSLContext) -> Callable[..., ssl.SSLContext]:
    def factory(*_: object) -> ssl.SSLContext:
        return context

    return factory


def _bound(host: str, port: int) -> list[socket.socket]:
    """Return a bound socket for each address of `host`; port 0 picks one port for all."""
    found: list[socket.socket] = []
    try:
        for family, kind, _, _, address in socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            one = socket.socket(family, kind)
            found.append(one)
            # Connections in TIME_WAIT must not keep a restarted gateway from its port.
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            taken = found[0].getsockname()[1] if len(found) > 1 else port
            one.bind((address[0], taken, *address[2:]))
    except OSError:
        for one in found:
            one.close()
        raise
    return found
