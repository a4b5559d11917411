"""The gate on HTTP: a request is authorized before its body is read.

A route without a row in `CALL_SCOPES` is our bug and fails loudly. A request that matches no route
passes, as nothing is behind it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated

from fastapi import Depends, Request
from starlette.datastructures import Headers
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ratoon.api.gate import ANSWERED, NO_ANSWER, AuthorizedCall, Gate
from ratoon.api.http.errors import error_response
from ratoon.auth.access import Presented
from ratoon.auth.scopes import CALL_SCOPES
from ratoon.errors import ERROR_TABLE, ErrorCode, RatoonError

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


def call_of(route_name: str) -> str:
    """The row of `CALL_SCOPES` for a route."""
    call = _CALLS.get(route_name, route_name)
    assert call in CALL_SCOPES, f"the route {route_name} has no scope"
    return call


class AccessGate:
    """ASGI middleware, outside everything that reads the body. `routes`: all, with full paths.

    A route that is missing from them gets no authorized call, so it cannot answer.
    """

    def __init__(self, app: ASGIApp, *, gate: Gate, routes: Sequence[BaseRoute]) -> None:
        self._app = app
        self._gate = gate
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = _route_of(self._routes, scope) if scope["type"] == "http" else None
        if found is None:
            await self._app(scope, receive, send)
            return
        route, policy_id = found
        # For the meter's label: a refused request never reaches the router.
        scope["route"] = route
        try:
            authorized = self._gate.enter(call_of(_name(route)), presented_of(scope))
        except RatoonError as error:
            await error_response(error)(scope, receive, send)
            return
        scope.setdefault("state", {})[_AUTHORIZED] = authorized
        outcome = NO_ANSWER

        async def note_status(message: Message) -> None:
            nonlocal outcome
            if message["type"] == "http.response.start":
                outcome = _outcome(message["status"])
            await send(message)

        try:
            await self._app(scope, receive, note_status)
        except Exception:
            outcome = str(ErrorCode.INTERNAL)
            raise
        finally:
            self._gate.leave(authorized, policy_id, outcome)


def presented_of(scope: Scope) -> Presented:
    client = scope.get("client")
    return Presented(
        authorization=Headers(scope=scope).get("authorization", ""),
        peer=str(client[0]) if client else "",
    )


def _authorized_of(request: Request) -> AuthorizedCall:
    authorized = getattr(request.state, _AUTHORIZED)
    assert isinstance(authorized, AuthorizedCall)
    return authorized


AuthorizedCallOf = Annotated[AuthorizedCall, Depends(_authorized_of)]


def _route_of(routes: Sequence[BaseRoute], scope: Scope) -> tuple[BaseRoute, str] | None:
    """The route of a request, and the policy that its path names; "" where it names none."""
    for route in routes:
        match, child_scope = route.matches(scope)
        if match is Match.FULL:
            return route, str(child_scope.get("path_params", {}).get("policy_id", ""))
    return None


def _name(route: BaseRoute) -> str:
    return str(getattr(route, "name", ""))


def _outcome(status: int) -> str:
    """The audit outcome for a status, for bodies that did not parse as requests."""
    codes = (str(code) for code, row in ERROR_TABLE.items() if row.http == status)
    return next(codes, ANSWERED if status < 400 else str(ErrorCode.INTERNAL))
