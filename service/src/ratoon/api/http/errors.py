"""Answers every failure of the HTTP wire as `{"error": ErrorDetail}`.

The status comes from `ERROR_TABLE`. No other error format leaves this server, whatever a handler,
FastAPI or a middleware raised.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, cast

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from ratoon.api.answers import detail_of
from ratoon.errors import ERROR_TABLE, ErrorCode, RatoonError, shown
from ratoon_proto.json_form import to_json

_STATUS_CODES = {
    400: ErrorCode.MALFORMED_BODY,
    404: ErrorCode.ROUTE_NOT_FOUND,
    405: ErrorCode.METHOD_NOT_ALLOWED,
}
# Begins the paths of the Tinker wire.
TINKER_PREFIX = "/api/v1"
_ERROR_BODY = {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorBody"}}}
# Errors that any route may answer.
_COMMON = (
    ErrorCode.MALFORMED_BODY,
    ErrorCode.INVALID_ARGUMENT,
    ErrorCode.UNAUTHENTICATED,
    ErrorCode.PERMISSION_DENIED,
    ErrorCode.REQUEST_TIMEOUT,
    ErrorCode.BODY_TOO_LARGE,
    ErrorCode.INTERNAL,
    ErrorCode.UNAVAILABLE,
)


def error_responses(*codes: ErrorCode) -> dict[int | str, dict[str, Any]]:
    """Return the `responses` of a route that may fail with `codes` or the common ones.

    They refer to the schema of `error_body`, which one route declares for the whole document:
    FastAPI builds a model's schema anew for every status of every route.
    """
    by_status: dict[int | str, list[ErrorCode]] = {}
    for code in (*codes, *_COMMON):
        by_status.setdefault(ERROR_TABLE[code].http, []).append(code)
    return {
        status: {"description": ", ".join(sorted(names)), "content": _ERROR_BODY}
        for status, names in by_status.items()
    }


def error_response(error: RatoonError, headers: dict[str, str] | None = None) -> JSONResponse:
    """Build the response that reports an error."""
    row = ERROR_TABLE[error.code]
    all_headers = dict(headers or {})
    if error.retry_after_s is not None:
        all_headers["Retry-After"] = str(error.retry_after_s)
    if error.code is ErrorCode.UNAUTHENTICATED:
        all_headers["WWW-Authenticate"] = "Bearer"
    if error.code is ErrorCode.REQUEST_TIMEOUT:
        # A caller that did not send the rest of this request will send no other.
        all_headers["Connection"] = "close"
    detail = detail_of(error)
    # In JSON a key is two plain fields.
    plain = detail.field.removeprefix("key.")
    detail.message = detail.message.replace(detail.field, plain, 1)
    detail.field = plain
    return JSONResponse({"error": to_json(detail)}, status_code=row.http, headers=all_headers)


def answer_errors(app: FastAPI) -> None:
    """Answer every exception of `app`'s routes in this format."""
    app.add_exception_handler(RatoonError, cast("_Handler", _answer_ratoon))
    app.add_exception_handler(RequestValidationError, cast("_Handler", _answer_validation))
    app.add_exception_handler(HTTPException, cast("_Handler", _answer_http))


_Handler = Callable[[Request, Exception], Awaitable[JSONResponse]]


async def _answer_ratoon(_: Request, error: RatoonError) -> JSONResponse:
    return error_response(error)


async def _answer_validation(request: Request, error: RequestValidationError) -> JSONResponse:
    errors = error.errors()
    # FastAPI leaves a body as bytes if it did not read it as JSON.
    if isinstance(errors[0].get("input"), bytes):
        return error_response(_no_json(request.headers.get("Content-Type", "")))
    return error_response(validation_error(errors))


def _no_json(content_type: str) -> RatoonError:
    """Return the error for another content type, such as the default of curl's `-d`."""
    got = shown(content_type) if content_type else "nothing"
    return RatoonError(
        ErrorCode.MALFORMED_BODY,
        f"Content-Type: got {got}: the body is to be sent as application/json",
        field="Content-Type",
        got=got,
        expected="application/json",
    )


async def _answer_http(request: Request, error: HTTPException) -> JSONResponse:
    """Answer FastAPI's own refusals, which wrap errors raised while it read the body."""
    cause = error.__cause__
    if isinstance(cause, RatoonError):
        return error_response(cause)
    code = _STATUS_CODES.get(error.status_code, ErrorCode.INTERNAL)
    text = f"{request.method} {shown(request.url.path)}: {error.detail}"
    if code is ErrorCode.ROUTE_NOT_FOUND and _is_of_absent_tinker(request):
        text += "; the Tinker wire is served with the setting tinker.enabled (docs/tinker.md)"
    refusal = RatoonError(code, text, got=request.method)
    return error_response(refusal, dict(error.headers or {}))


def _is_of_absent_tinker(request: Request) -> bool:
    """Whether a path is of the Tinker wire, of which the application has no route."""
    prefix = f"{TINKER_PREFIX}/"
    paths: list[str] = [getattr(route, "path", "") for route in request.app.routes]
    return request.url.path.startswith(prefix) and not any(
        path.startswith(prefix) for path in paths
    )


def validation_error(errors: Sequence[Any]) -> RatoonError:
    """Return pydantic's first error as an error of the service.

    Its path becomes the field, as in `groups[3].rollouts[17].reward`.
    """
    first = errors[0]
    if first["type"] == "json_invalid":
        return RatoonError(
            ErrorCode.MALFORMED_BODY,
            f"the body is not JSON: {first.get('ctx', {}).get('error', 'malformed')}",
            expected="JSON",
        )
    context = first.get("ctx", {})
    location = [*first["loc"][1:], *([context["index"]] if "index" in context else [])]
    field = field_path(location)
    got, expected = _described(first.get("input")), str(first["msg"])
    return RatoonError(
        ErrorCode.INVALID_ARGUMENT,
        f"{field or 'body'}: got {got}: {expected}",
        field=field,
        got=got,
        expected=expected,
    )


def field_path(location: Iterable[str | int]) -> str:
    """Return a path as the rest of the service names fields.

    The message around the groups is left out.
    """
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}"
    return path.removeprefix(".").removeprefix("batch.")


def _described(value: object) -> str:
    """Return a scalar as text; for anything else its type, as it may be large or private."""
    if value is None or isinstance(value, str | int | float | bool):
        return shown(value)
    return type(value).__name__
