"""An ASGI application behind the connections of the service's HTTP port, in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, cast

import uvicorn

from harness.attacks.http import Target
from ratoon.api.http.connections import BoundedConnection
from ratoon.api.http.edge_budget import EdgeBounds, EdgeBudget

LOCALHOST = "127.0.0.1"


@asynccontextmanager
async def served(app: Any, *, keep_alive_s: int = 5, **bounds: float) -> AsyncIterator[int]:
    """The port of `app`. `bounds`: those that differ from the defaults."""
    budget = EdgeBudget(EdgeBounds(**bounds))  # type: ignore[arg-type]
    protocol = cast("type[asyncio.Protocol]", partial(BoundedConnection, budget=budget))
    config = uvicorn.Config(
        app, host=LOCALHOST, port=0, log_level="critical", lifespan="off",
        http=protocol, timeout_keep_alive=keep_alive_s,
    )  # fmt: skip
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
        await asyncio.sleep(0.01)
    try:
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = server.force_exit = True
        await task


def target_at(port: int) -> Target:
    return Target(host=LOCALHOST, port=port)
