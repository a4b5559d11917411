"""What can go wrong, by who has to act: each a `RatoonClientError`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Self

_NO_DETAILS: Mapping[str, str] = MappingProxyType({})


class RatoonClientError(Exception):
    """Base of all."""


class RatoonApiError(RatoonClientError):
    """The service refused a call, or an operation failed.

    `code` is a row of the table in docs/api.md; `field` a path with indexes
    (`groups[3].rollouts[17].sampler_logprobs`); `details` holds what a program may act on.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        field: str = "",
        got: str = "",
        expected: str = "",
        retryable: bool = False,
        details: Mapping[str, str] = _NO_DETAILS,
    ) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.field = field
        self.got = got
        self.expected = expected
        self.retryable = retryable
        self.details: dict[str, str] = dict(details)

    def __reduce__(self) -> tuple[partial[Self], tuple[()]]:
        """To other processes with all its fields; an exception's own way knows its text alone."""
        again = partial(
            type(self),
            self.code,
            self.message,
            field=self.field,
            got=self.got,
            expected=self.expected,
            retryable=self.retryable,
            details=self.details,
        )
        return again, ()

    @property
    def retry_after_s(self) -> float:
        """Seconds that the service asks to wait before the next try; 0: it does not say."""
        text = self.details.get("retry_after_s", "")
        return float(text) if text.isdecimal() else 0.0


class TransportError(RatoonClientError):
    """No answer came, or none that the service wrote: whether the call was applied is unknown."""


class TlsError(TransportError):
    """The two ends do not agree on certificates or on TLS at all: trying again is of no use."""


class WrongPortError(TransportError):
    """The port speaks another protocol than the target names: trying again is of no use."""


class UnusableClientError(RatoonClientError, RuntimeError):
    """The client was closed, or is another process's. Nothing was sent."""


class IntegrityError(RatoonClientError):
    """Bytes are not what their digest, size or name says. Nothing was applied."""


class EngineError(RatoonClientError):
    """An engine does not answer, or did not take a version; the text says what it serves then."""


class ResultTimeoutError(RatoonClientError, TimeoutError):
    """The caller's wait is over; the operation goes on."""


class InvalidArgumentError(RatoonClientError, ValueError):
    """An argument that has no form on the wire."""

    def __init__(self, field: str, got: object, expected: str) -> None:
        super().__init__(f"{field}: got {got}, expected {expected}")
        self.field = field
        self.got = str(got)
        self.expected = expected

    def __reduce__(self) -> tuple[partial[Self], tuple[()]]:
        return partial(type(self), self.field, self.got, self.expected), ()


_NOT_VERIFIED = "the service's certificate does not verify"
_NOT_TLS = "no certificate: the service, or what answers there, speaks no TLS"
_OTHER_WIRE = "what answers there speaks another protocol: {} is for the {} port"
# What OpenSSL, gRPC with its own build of it, and httpx say.
_FLAWS = (
    ("CERTIFICATE_VERIFY_FAILED", TlsError, _NOT_VERIFIED),
    ("Hostname Verification Check failed", TlsError, _NOT_VERIFIED),
    ("WRONG_VERSION_NUMBER", TlsError, _NOT_TLS),
    ("record layer failure", TlsError, _NOT_TLS),
    ("connect an http1.x server", WrongPortError, _OTHER_WIRE.format("grpc://", "gRPC")),
    ("illegal request line", WrongPortError, _OTHER_WIRE.format("http://", "HTTP")),
    ("illegal status line", WrongPortError, _OTHER_WIRE.format("http://", "HTTP")),
)


def no_answer(text: str) -> TransportError:
    """The error where no answer came: of its own class where a library says that none will come.

    A service that hangs up looks the same for want of a client's certificate and in a restart.
    """
    for sign, error, flaw in _FLAWS:
        if sign in text:
            return error(f"{flaw} ({text})")
    return TransportError(text)
