"""The size of a body, bounded before it is read.

Enters an HTTP request, leaves it unchanged or refused with BODY_TOO_LARGE. Invariant: no more than
`max_body_bytes` of a body are ever held, whatever Content-Length said.
"""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ratoon.api.http.errors import error_response
from ratoon.errors import ErrorCode, RatoonError


class BodyLimit:
    """ASGI middleware; a body that lies about its length, or says none, is counted as it comes."""

    def __init__(self, app: ASGIApp, *, max_body_bytes: int) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = Headers(scope=scope).get("content-length", "0")
        if length.isdecimal() and int(length) > self._max_body_bytes:
            await error_response(self._too_large(int(length)))(scope, receive, send)
            return
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            if message["type"] == "http.request":
                num_bytes += len(message.get("body", b""))
                if num_bytes > self._max_body_bytes:
                    raise self._too_large(num_bytes)
            return message

        await self._app(scope, counted, send)

    def _too_large(self, num_bytes: int) -> RatoonError:
        return RatoonError(
            ErrorCode.BODY_TOO_LARGE,
            f"the body has at least {num_bytes} bytes, the limit is {self._max_body_bytes}: "
            "send the batch in parts",
            got=f"{num_bytes} bytes",
            expected=f"at most {self._max_body_bytes} bytes",
        )
