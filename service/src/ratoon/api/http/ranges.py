"""Decides which bytes of a file to send for a Range request (RFC 9110, section 14)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ratoon.errors import ErrorCode, RatoonError

_RANGE = re.compile(r"bytes=(\d{0,19})-(\d{0,19})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """Send all bytes, with status 200."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Send bytes [start, stop), with status 206."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NotModified:
    """Send nothing, with status 304: the caller has these bytes already."""


def etag_of(digest: str) -> str:
    """Return the ETag of a file with this digest."""
    return f'"{digest}"'


def is_known(digest: str, if_none_match: str | None) -> bool:
    """Return whether the caller has the file already, by its If-None-Match."""
    tags = [tag.strip().removeprefix("W/") for tag in (if_none_match or "").split(",")]
    return "*" in tags or etag_of(digest) in tags


def choose_range(
    *,
    range_header: str | None,
    if_range: str | None,
    if_none_match: str | None,
    size_bytes: int,
    digest: str,
    max_bytes: int,
) -> Whole | Part | NotModified:
    """Return what to send of a file of `size_bytes`.

    A range over `max_bytes` is answered with its beginning, as the RFC allows. Multiple ranges are
    not served: the header is ignored then, as the RFC allows too. Raises RANGE_NOT_SATISFIABLE for
    a range outside the file, and for a whole file over `max_bytes`.
    """
    if is_known(digest, if_none_match):
        return NotModified()
    match = None
    if range_header is not None and if_range in (None, etag_of(digest)):
        match = _RANGE.fullmatch(range_header.strip())
    if match is None or match.group(1) == match.group(2) == "":
        if size_bytes > max_bytes:
            raise _unsatisfiable(
                f"a whole file of {size_bytes} bytes", f"ranges of at most {max_bytes} bytes"
            )
        return Whole()
    start, stop = _bounds(match.group(1), match.group(2), size_bytes)
    if start >= stop:
        raise _unsatisfiable(match.group(0), f"a range of the file's {size_bytes} bytes")
    return Part(start=start, stop=min(stop, start + max_bytes))


def _bounds(first: str, last: str, size_bytes: int) -> tuple[int, int]:
    """Return [start, stop) of the range `first-last`, `first-` or `-suffix length`."""
    if not first:
        return max(size_bytes - int(last), 0), size_bytes
    return int(first), min(int(last) + 1, size_bytes) if last else size_bytes


def _unsatisfiable(got: str, expected: str) -> RatoonError:
    return RatoonError(
        ErrorCode.RANGE_NOT_SATISFIABLE,
        f"Range: got {got}, expected {expected}",
        field="Range",
        got=got,
        expected=expected,
    )
