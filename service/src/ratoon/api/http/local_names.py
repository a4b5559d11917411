"""Keeps web pages out of a service that asks for no keys.

A browser's request for a page of another origin is refused, whether the page has rebound its name
to this machine (DNS rebinding) or just posts to it.
"""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from ratoon.api.http.errors import error_response
from ratoon.config import is_loopback
from ratoon.errors import ErrorCode, RatoonError
from ratoon.log import get_logger

# Health needs no key elsewhere either, and load balancers call it under any name.
_HEALTH = "/v1/health"
_log = get_logger("http")


class LocalNames:
    """ASGI middleware that refuses requests under foreign host names; it is the outermost.

    `allowed` are the host names that are accepted besides loopback's.
    """

    def __init__(self, app: ASGIApp, *, allowed: Iterable[str] = ()) -> None:
        self._app = app
        self._allowed = frozenset(name.lower() for name in allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] != _HEALTH:
            error = self._refusal(Headers(scope=scope))
            if error is not None:
                _log.warning("request of a web page refused", field=error.field)
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _refusal(self, headers: Headers) -> RatoonError | None:
        # Browsers always send Host, and Origin with every request that may change something.
        host, origin = headers.get("host"), headers.get("origin")
        if host is not None and not self._is_known(host):
            return _refused("host", "localhost, 127.0.0.1, [::1] or one of http.allowed_hosts")
        if origin is not None and _netloc(origin) != (host or "").lower():
            return _refused("origin", "none, or this service's own")
        return None

    def _is_known(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        return is_loopback(name) or name in self._allowed


def _refused(field: str, expected: str) -> RatoonError:
    return RatoonError(
        ErrorCode.PERMISSION_DENIED,
        f"{field}: without API keys this service answers no web page; expected {expected}",
        field=field,
        expected=expected,
    )


def _netloc(origin: str) -> str:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""
