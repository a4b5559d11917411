"""Errors on the wire: `RatoonError` to `ErrorDetail` and back.

Texts are cut so that a message fits a gRPC trailer (8 KiB of metadata). Any other exception becomes
INTERNAL without its text.
"""

from __future__ import annotations

from collections.abc import Mapping

from ratoon.errors import ErrorCode, RatoonError
from ratoon_proto.v1 import operation_pb2 as wire

MAX_TEXT = 1024
MAX_DETAILS = 16


def cut(text: str) -> str:
    """`text` without what UTF-8 cannot encode, at most MAX_TEXT characters."""
    safe = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return safe if len(safe) <= MAX_TEXT else f"{safe[: MAX_TEXT - 3]}..."


def detail_of(error: RatoonError) -> wire.ErrorDetail:
    """The wire form of `error`, its texts cut to MAX_TEXT characters."""
    details = list(error.details.items())[:MAX_DETAILS]
    return wire.ErrorDetail(
        code=str(error.code),
        message=cut(error.message),
        field=cut(error.field)[:256],
        got=cut(error.got)[:256],
        expected=cut(error.expected)[:512],
        retryable=error.retryable,
        details={cut(key)[:64]: cut(value)[:128] for key, value in details},
    )


def detail_of_dict(data: Mapping[str, object]) -> wire.ErrorDetail:
    """The wire form of `RatoonError.to_dict()`."""
    return detail_of(RatoonError.from_dict(data))


def internal_error() -> RatoonError:
    """What a caller is told about our own bug; the log has the rest."""
    return RatoonError(ErrorCode.INTERNAL, "internal error; the server's log has the cause")
