"""An ASGI application behind the gateway's own HTTP listener, in this process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from harness.attacks.http import Target
from ratoon.api.http.app import start_http
from ratoon.edge.budget import EdgeBounds

LOCALHOST = "127.0.0.1"


@asynccontextmanager
async def served(app: Any, *, keep_alive_s: int = 5, **bounds: float) -> AsyncIterator[int]:
    """The port of `app`. `bounds`: those that differ from the defaults."""
    edge = EdgeBounds(idle_s=keep_alive_s, **bounds)  # type: ignore[arg-type]
    running = await start_http(app, host=LOCALHOST, port=0, bounds=edge)
    try:
        yield running.port
    finally:
        await running.stop(None)


def target_at(port: int) -> Target:
    return Target(host=LOCALHOST, port=port)
