"""Reads JSON bodies off the event loop, and hands FastAPI the finished model.

A body of a million tokens takes half a second, which would block every other call of the process.
Errors name the same field as FastAPI's own.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any, cast

from fastapi import Request, Response
from fastapi.routing import APIRoute
from google.protobuf.message import Message
from pydantic import BaseModel, ValidationError

from ratoon.api.counts import check_json
from ratoon.api.http.access import authorized_of, policy_in
from ratoon.api.http.errors import validation_error
from ratoon.errors import invalid
from ratoon_proto.fields import FieldError
from ratoon_proto.fill import fill


class BodyRoute(APIRoute):
    """A FastAPI route whose body is one model."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        assert self.body_field is not None, "a route without a body needs no reading"
        model = cast("type[BaseModel]", self.body_field.field_info.annotation)

        async def read_in_thread(request: Request) -> Response:
            return await handle(_ModelRequest(request.scope, request.receive, model))

        return read_in_thread


class _ModelRequest(Request):
    """A request whose `json` returns the validated model of its body."""

    def __init__(self, scope: Any, receive: Any, model: type[BaseModel]) -> None:
        super().__init__(scope, receive)
        self._model = model
        self._is_judged = policy_in(self.path_params) is not None

    async def body(self) -> bytes:
        """Read the body; if it names a policy, check that the caller's key is for it.

        Raises PERMISSION_DENIED.
        """
        body = await super().body()
        if not self._is_judged:
            self._is_judged = True
            named = await asyncio.to_thread(_named_policy, body)
            if named is not None:
                self.app.state.gate.check_policy(authorized_of(self), named)
        return body

    async def json(self) -> BaseModel:
        """Read and validate the body. Raises MALFORMED_BODY, INVALID_ARGUMENT, BODY_TOO_LARGE."""
        body = await self.body()
        # Few bodies at once: a parsed JSON list takes twenty times its bytes.
        async with self.app.state.parsing:
            return await asyncio.to_thread(_parsed, self._model, body)


def _named_policy(body: bytes) -> str | None:
    """Return the id in a policy's spec, whatever else the JSON is; None if there is none.

    Such a body is small, as is its call's bound.
    """
    try:
        found = json.loads(body)["spec"]["policy_id"]
    except (ValueError, TypeError, KeyError, IndexError, RecursionError):
        return None
    return found if isinstance(found, str) else None


def _parsed(model: type[BaseModel], body: bytes) -> BaseModel:
    check_json(body)
    try:
        return model.model_validate_json(body)
    except ValidationError as err:
        errors = [{**error, "loc": ("body", *error["loc"])} for error in err.errors()]
        raise validation_error(errors) from err


def fill_request(request: Message, body: BaseModel) -> None:
    """Copy a validated body into its message.

    Raises INVALID_ARGUMENT for fields that exclude each other.
    """
    try:
        fill(request, body)
    except FieldError as err:
        raise invalid(err.field.removeprefix("batch."), err.got, err.expected) from err
