"""Serves an ASGI application on a port of its own: uvicorn, with our connections and our TLS."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import uvicorn

from ratoon.api.http.connection import BoundedConnection
from ratoon.edge.budget import EdgeBounds, EdgeBudget

_POLL_S = 0.01


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
