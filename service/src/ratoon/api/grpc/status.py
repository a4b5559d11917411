"""A failed call's status: code, message and the trailer with the whole error.

Works on Serve's proxy and on the gateway, whose contexts both have these methods.
"""

from __future__ import annotations

from typing import Any, Protocol

import grpc

from ratoon.api.convert.errors import cut, detail_of, internal_error
from ratoon.errors import ERROR_TABLE, RatoonError
from ratoon.log import get_logger

# A serialized `ErrorDetail`.
ERROR_TRAILER = "ratoon-error-bin"
# Whole seconds, as HTTP's header.
RETRY_AFTER_TRAILER = "retry-after"

_log = get_logger("grpc")


class CallContext(Protocol):
    """What `grpc.aio.ServicerContext` and Serve's own context have in common."""

    def invocation_metadata(self) -> Any: ...
    def peer(self) -> str: ...
    def set_code(self, code: grpc.StatusCode) -> Any: ...
    def set_details(self, details: str) -> Any: ...
    def set_trailing_metadata(self, trailing_metadata: Any) -> Any: ...


def set_status(context: CallContext, error: RatoonError) -> grpc.StatusCode:
    """End the call of `context` with `error`; returns the status."""
    code = grpc.StatusCode[ERROR_TABLE[error.code].grpc]
    context.set_code(code)
    context.set_details(cut(error.message))
    trailers: list[tuple[str, str | bytes]] = [
        (ERROR_TRAILER, detail_of(error).SerializeToString())
    ]
    if error.retry_after_s is not None:
        trailers.append((RETRY_AFTER_TRAILER, str(error.retry_after_s)))
    context.set_trailing_metadata(trailers)
    return code


def as_ratoon_error(error: Exception, call: str) -> RatoonError:
    """`error` itself, or INTERNAL for an unexpected one, whose text is only logged."""
    if isinstance(error, RatoonError):
        return error
    _log.error("call failed", call=call, exc_info=error)
    return internal_error()
