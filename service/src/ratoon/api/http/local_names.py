"""Web pages kept out of a service that asks for no keys because it is on loopback.

Enters a request, leaves it where it came under a name of this machine and from no other page.
Invariant: what a browser sends for a page of another origin gets no further than this, whether the
page has made its name an address of this machine (DNS rebinding) or just posts to it.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from ratoon.api.http.errors import error_response
from ratoon.config import is_loopback
from ratoon.errors import ErrorCode, RatoonError
from ratoon.log import get_logger

# It is free elsewhere too, and balancers ask for it under any name.
_HEALTH = "/v1/health"
_log = get_logger("http")


class LocalNames:
    """ASGI middleware, outside of all others."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] != _HEALTH:
            error = _refusal(Headers(scope=scope))
            if error is not None:
                _log.warning("request of a web page refused", field=error.field)
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _refusal(headers: Headers) -> RatoonError | None:
    # Browsers always send the one, and the other with all that may change something.
    host, origin = headers.get("host"), headers.get("origin")
    if host is not None and not _is_local(host):
        return _refused("host", "a name of this machine: localhost, 127.0.0.1 or [::1]")
    if origin is not None and _netloc(origin) != (host or "").lower():
        return _refused("origin", "none, or this service's own")
    return None


def _refused(field: str, expected: str) -> RatoonError:
    return RatoonError(
        ErrorCode.PERMISSION_DENIED,
        f"{field}: without API keys this service answers no web page; expected {expected}",
        field=field,
        expected=expected,
    )


def _is_local(host: str) -> bool:
    try:
        return is_loopback(urlsplit(f"//{host}").hostname or "")
    except ValueError:
        return False


def _netloc(origin: str) -> str:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""
