"""Counts and times requests.

Labels are bounded: the method is a route's name, or `unknown` where none matches.
"""

from __future__ import annotations

import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ratoon.api.service import PolicyService

UNKNOWN = "unknown"
# The caller left before there was an answer.
NO_ANSWER = "none"


class RequestMeter:
    """ASGI middleware; a stream is one request, timed to its end."""

    def __init__(self, app: ASGIApp, *, service: PolicyService) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        code = NO_ANSWER

        async def note_status(message: Message) -> None:
            nonlocal code
            if message["type"] == "http.response.start":
                code = str(message["status"])
            await send(message)

        start = time.perf_counter()
        try:
            await self._app(scope, receive, note_status)
        finally:
            self._service.record_request(
                transport="http",
                method=getattr(scope.get("route"), "name", UNKNOWN),
                code=code,
                seconds=time.perf_counter() - start,
            )
