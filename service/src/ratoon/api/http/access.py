"""The gate on HTTP: a request, and the policy in its path, is judged before its body is read.

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

from ratoon.api.convert.checks import policy_of_operation
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
        route, named = found
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
            error = self._of_other_policy(authorized, named)
            answer = self._app if error is None else error_response(error)
            await answer(scope, receive, note_status)
        except Exception:
            outcome = str(ErrorCode.INTERNAL)
            raise
        finally:
            self._gate.leave(authorized, named or "", outcome)

    def _of_other_policy(
        self, authorized: AuthorizedCall, policy_id: str | None
    ) -> RatoonError | None:
        """The refusal of a call whose path names a policy that the key is not for."""
        try:
            if policy_id is not None:
                self._gate.check_policy(authorized, policy_id)
        except RatoonError as error:
            return error
        return None


def presented_of(scope: Scope) -> Presented:
    client = scope.get("client")
    return Presented(
        authorization=Headers(scope=scope).get("authorization", ""),
        peer=str(client[0]) if client else "",
    )


def authorized_of(request: Request) -> AuthorizedCall:
    authorized = getattr(request.state, _AUTHORIZED)
    assert isinstance(authorized, AuthorizedCall)
    return authorized


AuthorizedCallOf = Annotated[AuthorizedCall, Depends(authorized_of)]


def _route_of(routes: Sequence[BaseRoute], scope: Scope) -> tuple[BaseRoute, str | None] | None:
    """The route of a request, and the policy that its path names; None where it names none."""
    for route in routes:
        match, child_scope = route.matches(scope)
        if match is Match.FULL:
            return route, policy_in(child_scope.get("path_params", {}))
    return None


def policy_in(path: Mapping[str, object]) -> str | None:
    """The policy that the parts of a path name."""
    if "operation_id" in path:
        return policy_of_operation(str(path["operation_id"]))
    return str(path["policy_id"]) if "policy_id" in path else None


def _name(route: BaseRoute) -> str:
    return str(getattr(route, "name", ""))


def _outcome(status: int) -> str:
    """The audit outcome for a status, for bodies that did not parse as requests."""
    codes = (str(code) for code, row in ERROR_TABLE.items() if row.http == status)
    return next(codes, ANSWERED if status < 400 else str(ErrorCode.INTERNAL))
