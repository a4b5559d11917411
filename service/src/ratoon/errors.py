"""Typed errors: what went wrong, on which field, and what the caller may do about it.

Every user-visible failure is a `RatoonError` whose code is a row of `ERROR_TABLE`, which alone
decides its HTTP and gRPC status.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

# Key in `details` of whole seconds.
RETRY_AFTER_DETAIL = "retry_after_s"
_MAX_SHOWN = 80
# Folders of an absolute path, up to the name of its file; not part of an address.
_FOLDERS = re.compile(r"(?<![\w:/.])/(?:[^\s/'\"]+/)*(?=[^\s/'\"])")


class ErrorCode(StrEnum):
    """Stable names of failures, as they stand in `ErrorDetail.code`."""

    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    MALFORMED_BODY = "MALFORMED_BODY"
    UNSUPPORTED = "UNSUPPORTED"
    UNAUTHENTICATED = "UNAUTHENTICATED"
    PERMISSION_DENIED = "PERMISSION_DENIED"
    POLICY_NOT_FOUND = "POLICY_NOT_FOUND"
    POLICY_EXISTS = "POLICY_EXISTS"
    POLICY_NOT_READY = "POLICY_NOT_READY"
    POLICY_FAILED = "POLICY_FAILED"
    OPERATION_NOT_FOUND = "OPERATION_NOT_FOUND"
    CHECKPOINT_NOT_FOUND = "CHECKPOINT_NOT_FOUND"
    UPLOAD_NOT_FOUND = "UPLOAD_NOT_FOUND"
    WEIGHTS_NOT_FOUND = "WEIGHTS_NOT_FOUND"
    ROLLOUTS_NOT_FOUND = "ROLLOUTS_NOT_FOUND"
    ROUTE_NOT_FOUND = "ROUTE_NOT_FOUND"
    METHOD_NOT_ALLOWED = "METHOD_NOT_ALLOWED"
    KEY_REUSED = "KEY_REUSED"
    SEQ_GAP = "SEQ_GAP"
    WINDOW_OPEN = "WINDOW_OPEN"
    WINDOW_EMPTY = "WINDOW_EMPTY"
    WINDOW_POISONED = "WINDOW_POISONED"
    VERSION_MISMATCH = "VERSION_MISMATCH"
    STALE_ROLLOUTS = "STALE_ROLLOUTS"
    CANCELLED = "CANCELLED"
    REQUEST_TIMEOUT = "REQUEST_TIMEOUT"
    BODY_TOO_LARGE = "BODY_TOO_LARGE"
    RESOURCE_EXHAUSTED = "RESOURCE_EXHAUSTED"
    RANGE_NOT_SATISFIABLE = "RANGE_NOT_SATISFIABLE"
    WORKER_LOST = "WORKER_LOST"
    UNAVAILABLE = "UNAVAILABLE"
    INTERNAL = "INTERNAL"


class CopyFailedError(Exception):
    """A rank is gone or unreachable: ranks may hold different states, and exchange no more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorRow:
    """Form of one code on each wire; `grpc` is the name of a `grpc.StatusCode`."""

    http: int
    grpc: str
    retryable: bool


def _row(http: int, grpc: str, *, retryable: bool = False) -> ErrorRow:
    return ErrorRow(http=http, grpc=grpc, retryable=retryable)


ERROR_TABLE: Mapping[ErrorCode, ErrorRow] = {
    ErrorCode.INVALID_ARGUMENT: _row(422, "INVALID_ARGUMENT"),
    ErrorCode.MALFORMED_BODY: _row(400, "INVALID_ARGUMENT"),
    ErrorCode.UNSUPPORTED: _row(422, "INVALID_ARGUMENT"),
    ErrorCode.UNAUTHENTICATED: _row(401, "UNAUTHENTICATED"),
    ErrorCode.PERMISSION_DENIED: _row(403, "PERMISSION_DENIED"),
    ErrorCode.POLICY_NOT_FOUND: _row(404, "NOT_FOUND"),
    ErrorCode.POLICY_EXISTS: _row(409, "ALREADY_EXISTS"),
    ErrorCode.POLICY_NOT_READY: _row(409, "FAILED_PRECONDITION", retryable=True),
    ErrorCode.POLICY_FAILED: _row(409, "FAILED_PRECONDITION"),
    ErrorCode.OPERATION_NOT_FOUND: _row(404, "NOT_FOUND"),
    ErrorCode.CHECKPOINT_NOT_FOUND: _row(404, "NOT_FOUND"),
    ErrorCode.UPLOAD_NOT_FOUND: _row(404, "NOT_FOUND"),
    ErrorCode.WEIGHTS_NOT_FOUND: _row(404, "NOT_FOUND"),
    ErrorCode.ROLLOUTS_NOT_FOUND: _row(404, "NOT_FOUND"),
    ErrorCode.ROUTE_NOT_FOUND: _row(404, "UNIMPLEMENTED"),
    ErrorCode.METHOD_NOT_ALLOWED: _row(405, "UNIMPLEMENTED"),
    ErrorCode.KEY_REUSED: _row(409, "ALREADY_EXISTS"),
    ErrorCode.SEQ_GAP: _row(409, "ABORTED", retryable=True),
    ErrorCode.WINDOW_OPEN: _row(409, "FAILED_PRECONDITION"),
    ErrorCode.WINDOW_EMPTY: _row(409, "FAILED_PRECONDITION"),
    ErrorCode.WINDOW_POISONED: _row(409, "FAILED_PRECONDITION"),
    ErrorCode.VERSION_MISMATCH: _row(409, "FAILED_PRECONDITION"),
    ErrorCode.STALE_ROLLOUTS: _row(409, "FAILED_PRECONDITION"),
    ErrorCode.CANCELLED: _row(409, "CANCELLED"),
    ErrorCode.REQUEST_TIMEOUT: _row(408, "DEADLINE_EXCEEDED", retryable=True),
    ErrorCode.BODY_TOO_LARGE: _row(413, "RESOURCE_EXHAUSTED"),
    ErrorCode.RESOURCE_EXHAUSTED: _row(429, "RESOURCE_EXHAUSTED", retryable=True),
    ErrorCode.RANGE_NOT_SATISFIABLE: _row(416, "OUT_OF_RANGE"),
    ErrorCode.WORKER_LOST: _row(503, "UNAVAILABLE", retryable=True),
    ErrorCode.UNAVAILABLE: _row(503, "UNAVAILABLE", retryable=True),
    ErrorCode.INTERNAL: _row(500, "INTERNAL"),
}


class RatoonError(Exception):
    """A failure with a code of `ERROR_TABLE` and, where there is one, the field at fault.

    `field` is a path with indexes (`groups[3].rollouts[17].sampler_logprobs`); `got` and `expected`
    are short texts; `details` holds what a program may act on (`missing_seq`, `wanted`, `free`,
    `retry_after_s`).
    """

    def __init__(
        self,
        code: ErrorCode,
        message: str,
        *,
        field: str = "",
        got: str = "",
        expected: str = "",
        details: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.field = field
        self.got = got
        self.expected = expected
        self.details: dict[str, str] = dict(details or {})

    def __reduce__(self) -> tuple[object, ...]:
        """Keep every field across process borders (Ray pickles exceptions by constructor)."""
        return (_rebuild, (self.to_dict(),))

    @property
    def retryable(self) -> bool:
        return ERROR_TABLE[self.code].retryable

    @property
    def retry_after_s(self) -> int | None:
        """Seconds after which to retry, rounded up; None: unknown, or never."""
        row = ERROR_TABLE[self.code]
        if not row.retryable or row.http not in (429, 503):
            return None
        return int(self.details.get(RETRY_AFTER_DETAIL, 1))

    def to_dict(self) -> dict[str, object]:
        """The wire form, with one key per field of `ErrorDetail`."""
        return {
            "code": str(self.code),
            "message": self.message,
            "field": self.field,
            "got": self.got,
            "expected": self.expected,
            "retryable": self.retryable,
            "details": dict(self.details),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> RatoonError:
        """Inverse of `to_dict`."""
        details = data.get("details") or {}
        assert isinstance(details, Mapping)
        return cls(
            ErrorCode(str(data["code"])),
            str(data["message"]),
            field=str(data.get("field", "")),
            got=str(data.get("got", "")),
            expected=str(data.get("expected", "")),
            details={str(key): str(value) for key, value in details.items()},
        )


def _rebuild(data: Mapping[str, object]) -> RatoonError:
    return RatoonError.from_dict(data)


def invalid(field: str, got: object, expected: str) -> RatoonError:
    """The usual validation failure: `field: got, expected`."""
    return RatoonError(
        ErrorCode.INVALID_ARGUMENT,
        f"{field}: got {got}, expected {expected}",
        field=field,
        got=str(got),
        expected=expected,
    )


def unsupported(field: str, got: object, expected: str, text: str = "") -> RatoonError:
    """What is well formed and not served: `field: got, expected`, or `text` in its place."""
    return RatoonError(
        ErrorCode.UNSUPPORTED,
        text or f"{field}: got {got}, expected {expected}",
        field=field,
        got=str(got),
        expected=expected,
    )


def shown(value: object) -> str:
    """`value` for use in a message: printable ASCII, truncated."""
    text = ascii(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN - 3]}..."


def without_folders(text: str) -> str:
    """Returns `text` in a form that a caller may read: only the last names of the server's
    files."""
    return _FOLDERS.sub("", text)


def described(error: BaseException) -> str:
    """Type and text of any exception, for a caller."""
    return f"{type(error).__name__}: {without_folders(str(error))}"


def exhausted(
    message: str, *, resource: str, wanted: int, free: int, limit: int, retry_after_s: float
) -> RatoonError:
    """Error for a reached limit: `limit` of `resource`, with `free` left and `wanted` requested."""
    numbers = {"wanted": wanted, "free": max(free, 0), "limit": limit}
    return RatoonError(
        ErrorCode.RESOURCE_EXHAUSTED,
        message,
        details={
            "resource": resource,
            **{name: str(value) for name, value in numbers.items()},
            RETRY_AFTER_DETAIL: str(max(math.ceil(retry_after_s), 1)),
        },
    )
