"""Refuses heads of HTTP/1 requests that two readers may take for different requests.

httptools refuses most of them (obsolete folding, bare LF, two lengths, a length beside chunks). The
rest is refused here (RFC 9112, sections 2.3, 3.2 and 6.1).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from ratoon.api.http.errors import error_response
from ratoon.errors import ErrorCode, RatoonError

_HOST = re.compile(rb"(\[[0-9A-Fa-f:.]+(%[\w.~-]+)?\]|[A-Za-z0-9._~-]+)(:(\d{0,5}))?")
_ABSOLUTE = re.compile(rb"(?i:https?)://([^/?#]*)")
_MAX_PORT = 65535


def head_fault(
    version: str, target: bytes, headers: Sequence[tuple[bytes, bytes]]
) -> tuple[str, str] | None:
    """Return the field that makes a request ambiguous, and what is expected; None if none does.

    The names of `headers` are in lower case.
    """
    if version not in ("1.0", "1.1"):
        return "version", "HTTP/1.1 or HTTP/1.0"
    hosts = [value for name, value in headers if name == b"host"]
    if len(hosts) > 1 or (version == "1.1" and not hosts):
        return "Host", f"one, got {len(hosts)}"
    if hosts and not _is_host(hosts[0]):
        return "Host", "a name or an address, and a port or none"
    if not target.startswith(b"/") and target != b"*":
        absolute = _ABSOLUTE.match(target)
        if absolute is None or absolute[1].lower() not in [host.lower() for host in hosts]:
            return "target", "a path, or the same host as in Host"
    codings = [value.lower() for name, value in headers if name == b"transfer-encoding"]
    if codings and (version == "1.0" or codings != [b"chunked"]):
        return "Transfer-Encoding", "chunked alone, in HTTP/1.1"
    return None


def refusal(fault: tuple[str, str] | None, message: str) -> bytes:
    """Return the bytes of a 400 answer, after which the connection ends.

    `fault` is that of `head_fault`; None for bytes that are not HTTP.
    """
    field, expected = fault or ("", "HTTP/1.1 (RFC 9112)")
    error = RatoonError(
        ErrorCode.MALFORMED_BODY,
        f"{field}: expected {expected}" if field else message,
        field=field,
        expected=expected,
    )
    answer = error_response(error, {"connection": "close"})
    head = b"".join(b"%b: %b\r\n" % line for line in answer.raw_headers)
    return b"HTTP/1.1 400 Bad Request\r\n" + head + b"\r\n" + bytes(answer.body)


def _is_host(value: bytes) -> bool:
    found = _HOST.fullmatch(value)
    return found is not None and int(found[4] or 0) <= _MAX_PORT
