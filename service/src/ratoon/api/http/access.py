"""Judges, bounds and measures every HTTP request before its route is called.

The gate judges the request, and the policy in its path, before its body is read. The body is
bounded, a failure that nobody expected is answered with INTERNAL, and the request is counted and
timed. A route without a row in `CALL_SCOPES` is our bug and fails loudly. A request that matches no
route passes the gate, as nothing is behind it.

A service that asks for no keys refuses a browser's request for a page of another origin, whether
the page has rebound its name to this machine (DNS rebinding) or just posts to it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Annotated
from urllib.parse import urlsplit

from fastapi import Depends, Request
from starlette.datastructures import Headers
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ratoon.api.answers import internal_error
from ratoon.api.contract import body_bound, check_size, rpc_at
from ratoon.api.convert.checks import policy_of_operation
from ratoon.api.gate import ANSWERED, NO_ANSWER, AuthorizedCall, Gate
from ratoon.api.http.errors import TINKER_PREFIX, error_response
from ratoon.api.service import PolicyService
from ratoon.auth.access import CALL_SCOPES, Presented
from ratoon.config import LimitsConfig, is_loopback
from ratoon.edge.bodies import bounded_body
from ratoon.errors import ERROR_TABLE, ErrorCode, RatoonError
from ratoon.log import get_logger

# Routes whose name is not that of a call.
_CALLS: Mapping[str, str] = MappingProxyType(
    {
        "get_weight_manifest_latest": "get_weight_manifest",
        "get_weight_file": "fetch_weights",
        "head_weight_file": "fetch_weights",
        "openapi": "api_document",
        "swagger_ui_html": "api_document",
        "swagger_ui_redirect": "api_document",
        "redoc_html": "api_document",
    }
)
_AUTHORIZED = "ratoon_authorized"
# Labels of requests that match no route, and of those whose caller left before there was an answer.
UNKNOWN = "unknown"
UNANSWERED = "none"
# Health needs no key elsewhere either, and load balancers call it under any name.
_HEALTH = "/v1/health"
_log = get_logger("http")


def call_of(route_name: str) -> str:
    """Return the name by which `CALL_SCOPES` knows a route's call."""
    call = _CALLS.get(route_name, route_name)
    assert call in CALL_SCOPES, f"the route {route_name} has no scope"
    return call


class CallGate:
    """ASGI middleware: judges, bounds, answers for and measures every request.

    `routes`: all routes, with full paths. A route that is missing from them gets no authorized
    call, so it cannot answer.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        service: PolicyService,
        gate: Gate,
        limits: LimitsConfig,
        routes: Sequence[BaseRoute],
    ) -> None:
        self._app = app
        self._service = service
        self._gate = gate
        self._limits = limits
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer, start = _Answer(send), time.perf_counter()
        try:
            await self._judge(scope, receive, answer)
        except Exception as error:
            if answer.status is not None:
                raise
            _log.error("call failed", call=scope.get("path", ""), exc_info=error)
            await error_response(internal_error())(scope, receive, answer)
        finally:
            self._service.record_request(
                transport="http",
                method=getattr(scope.get("route"), "name", UNKNOWN),
                code=UNANSWERED if answer.status is None else str(answer.status),
                seconds=time.perf_counter() - start,
            )

    async def _judge(self, scope: Scope, receive: Receive, answer: _Answer) -> None:
        """Run the application between the gate's `enter` and `leave`, or answer a refusal."""
        found = _route_of(self._routes, scope)
        if found is None:
            await self._run(scope, receive, answer, lambda: None)
            return
        route, named = found
        # The meter's label: a refused request never reaches the router.
        scope["route"] = route
        try:
            authorized = self._gate.enter(call_of(_name(route)), presented_of(scope))
        except RatoonError as error:
            await error_response(error)(scope, receive, answer)
            return
        scope.setdefault("state", {})[_AUTHORIZED] = authorized
        has_failed = False
        try:
            await self._run(scope, receive, answer, partial(self._check, authorized, named))
        except Exception:
            has_failed = True
            raise
        finally:
            outcome = str(ErrorCode.INTERNAL) if has_failed else _outcome(answer.status)
            self._gate.leave(authorized, named or "", outcome)

    async def _run(
        self, scope: Scope, receive: Receive, answer: _Answer, check: Callable[[], None]
    ) -> None:
        """Run the application with a bounded body, unless `check` refuses that."""
        rpc = rpc_at(scope["path"])
        bound = body_bound(rpc, self._limits.max_body_bytes)
        try:
            check()
            bounded = bounded_body(
                scope, receive, self._limits, partial(check_size, rpc, bound=bound)
            )
        except RatoonError as error:
            await error_response(error)(scope, receive, answer)
            return
        await self._app(scope, bounded, answer)

    def _check(self, authorized: AuthorizedCall, policy_id: str | None) -> None:
        """Check that the key is for the policy that the path names, if any."""
        if policy_id is not None:
            self._gate.check_policy(authorized, policy_id)


class _Answer:
    """An ASGI `send` that notes the answer's status, which is None until it is sent."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status: int | None = None

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        await self._send(message)


def presented_of(scope: Scope) -> Presented:
    """Return the credentials that came with a request; the Tinker wire has a header of its own."""
    client, headers = scope.get("client"), Headers(scope=scope)
    is_tinker = getattr(scope.get("route"), "path", "").startswith(f"{TINKER_PREFIX}/")
    key = headers.get("x-api-key", "") if is_tinker else ""
    return Presented(
        authorization=headers.get("authorization", f"Bearer {key}" if key else ""),
        peer=str(client[0]) if client else "",
    )


def authorized_of(request: Request) -> AuthorizedCall:
    """Return the authorized call of a request that has passed the gate."""
    authorized = getattr(request.state, _AUTHORIZED)
    assert isinstance(authorized, AuthorizedCall)
    return authorized


async def _authorized(request: Request) -> AuthorizedCall:
    """See `authorized_of`, which as a plain function FastAPI would run in a thread."""
    return authorized_of(request)


AuthorizedCallOf = Annotated[AuthorizedCall, Depends(_authorized)]


def _route_of(routes: Sequence[BaseRoute], scope: Scope) -> tuple[BaseRoute, str | None] | None:
    """Return the route of a request, and the policy that its path names.

    None if no route matches; the policy is None if the path names none.
    """
    for route in routes:
        match, child_scope = route.matches(scope)
        if match is Match.FULL:
            return route, policy_in(child_scope.get("path_params", {}))
    return None


def policy_in(path: Mapping[str, object]) -> str | None:
    """Return the policy that the parameters of a path name; None if they name none."""
    if "operation_id" in path:
        return policy_of_operation(str(path["operation_id"]))
    return str(path["policy_id"]) if "policy_id" in path else None


def _name(route: BaseRoute) -> str:
    return str(getattr(route, "name", ""))


def _outcome(status: int | None) -> str:
    """Return the audit outcome for the status of a request that never reached the service."""
    if status is None:
        return NO_ANSWER
    codes = (str(code) for code, row in ERROR_TABLE.items() if row.http == status)
    return next(codes, ANSWERED if status < 400 else str(ErrorCode.INTERNAL))


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
