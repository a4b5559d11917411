"""JSON bodies read off the event loop.

Enters a request of a route with a model, leaves the model for FastAPI, which takes it as it is.
Invariant: what is refused is refused with the field that FastAPI itself would name. A body of a
million tokens takes half a second to read; every other call of the process would wait for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, cast

from fastapi import Request, Response
from fastapi.routing import APIRoute
from google.protobuf.message import Message
from pydantic import BaseModel, ValidationError

from ratoon.api.counts import check_json
from ratoon.api.http.errors import validation_error
from ratoon.errors import invalid
from ratoon_proto.fields import FieldError
from ratoon_proto.fill import fill


class BodyRoute(APIRoute):
    """A route whose body is one model."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        assert self.body_field is not None, "a route without a body needs no reading"
        model = cast("type[BaseModel]", self.body_field.field_info.annotation)

        async def read_in_thread(request: Request) -> Response:
            return await handle(_ModelRequest(request.scope, request.receive, model))

        return read_in_thread


class _ModelRequest(Request):
    """Its JSON is the model already."""

    def __init__(self, scope: Any, receive: Any, model: type[BaseModel]) -> None:
        super().__init__(scope, receive)
        self._model = model

    async def json(self) -> BaseModel:
        """Raises MALFORMED_BODY, INVALID_ARGUMENT, BODY_TOO_LARGE."""
        body = await self.body()
        # A few at once: a list in JSON takes twenty times its bytes.
        async with self.app.state.parsing:
            return await asyncio.to_thread(_parsed, self._model, body)


def _parsed(model: type[BaseModel], body: bytes) -> BaseModel:
    check_json(body)
    try:
        return model.model_validate_json(body)
    except ValidationError as err:
        errors = [{**error, "loc": ("body", *error["loc"])} for error in err.errors()]
        raise validation_error(errors) from err


def fill_request(request: Message, body: BaseModel) -> None:
    """Write a validated body into its message; where two fields exclude each other, refuse."""
    try:
        fill(request, body)
    except FieldError as err:
        raise invalid(err.field.removeprefix("batch."), err.got, err.expected) from err
