"""Disk capacity: new work is refused below a reserve, and a full disk is one typed error.

Only accepted work may use the reserve (its journal, checkpoints, versions).
"""

from __future__ import annotations

import errno
import shutil
import sqlite3
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from ratoon.errors import ErrorCode, RatoonError, exhausted

# Retry time for disk space, which is freed when bodies and versions are deleted, or by an operator.
_RETRY_S = 10.0
# Retry time for a queue place, which is freed when an operation ends.
_QUEUE_RETRY_S = 2.0
_DISK = "disk"
_FULL = (errno.ENOSPC, errno.EDQUOT)
# Code of disk_full (PostgreSQL's manual, appendix A).
_POSTGRESQL_DISK_FULL = "53100"


def check_room(name: str, resource: str, used: int, wanted: int, limit: int) -> None:
    """Raises RESOURCE_EXHAUSTED if `wanted` more of `resource` would exceed `limit`."""
    if used + wanted > limit:
        raise exhausted(
            f"{name}: {used} of at most {limit}, {wanted} more wanted",
            resource=resource,
            wanted=wanted,
            free=limit - used,
            limit=limit,
            retry_after_s=_QUEUE_RETRY_S,
        )


def disk_refusal(folder: Path, wanted_bytes: int, min_free_bytes: int) -> RatoonError | None:
    """Refusal of `wanted_bytes` more, if they would leave less than `min_free_bytes`.

    None: there is room. `folder` must exist.
    """
    if min_free_bytes == 0:
        return None
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes - wanted_bytes >= min_free_bytes:
        return None
    return exhausted(
        f"the disk has {free_bytes} bytes free, of which {min_free_bytes} are kept for work that "
        f"is accepted already; {wanted_bytes} were wanted",
        resource=_DISK,
        wanted=wanted_bytes,
        free=free_bytes - min_free_bytes,
        limit=min_free_bytes,
        retry_after_s=_RETRY_S,
    )


def disk_full(error: BaseException) -> RatoonError | None:
    """Refusal for an error that reports a full disk, or an exhausted quota of it; else None."""
    cause = getattr(error, "orig", error)  # SQLAlchemy wraps the driver's error.
    match cause:
        case OSError():
            is_full = cause.errno in _FULL
        case sqlite3.Error():
            is_full = _primary(cause) == sqlite3.SQLITE_FULL
        case _:
            # The error is PostgreSQL's; its library is not imported here.
            is_full = getattr(cause, "sqlstate", None) == _POSTGRESQL_DISK_FULL
    if not is_full:
        return None
    return exhausted(
        "the disk is full", resource=_DISK, wanted=1, free=0, limit=0, retry_after_s=_RETRY_S
    )


def is_disk_full(error: Exception) -> bool:
    """Whether `error` is a refusal because a disk is full."""
    return isinstance(error, RatoonError) and error.details.get("resource") == _DISK


def is_waited_for(error: BaseException) -> bool:
    """Whether the missing resource becomes available by itself: disk space or a GPU that others
    free, or a store."""
    if not isinstance(error, RatoonError):
        return False
    return error.code is ErrorCode.UNAVAILABLE or error.details.get("resource") in (_DISK, "GPU")


@contextmanager
def full_disk_refused() -> Generator[None, None, None]:
    """Raise RESOURCE_EXHAUSTED for a full disk in the block; other errors pass."""
    try:
        yield
    except Exception as err:
        refusal = disk_full(err)
        if refusal is None:
            raise
        raise refusal from err


def _primary(error: sqlite3.Error) -> int:
    """SQLite's primary error code, the low byte."""
    return (error.sqlite_errorcode or 0) & 0xFF
