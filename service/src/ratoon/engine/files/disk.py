"""Room on the disk: new work is refused while there is some left, and a full one has one name.

Enters a folder, or what a write has raised; leaves a typed refusal, or nothing. Invariant: what was
accepted may use the reserve (its journal, its checkpoints, its versions); what is new may not.
"""

from __future__ import annotations

import errno
import shutil
import sqlite3
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from ratoon.errors import RatoonError, exhausted

# Room comes back when bodies and versions go, or when somebody makes some.
_RETRY_S = 10.0
# A place in a queue, when something has run.
_QUEUE_RETRY_S = 2.0
_DISK = "disk"
_FULL = (errno.ENOSPC, errno.EDQUOT)
# disk_full (PostgreSQL's manual, appendix A).
_POSTGRESQL_DISK_FULL = "53100"


def check_room(name: str, resource: str, used: int, wanted: int, limit: int) -> None:
    """Raises RESOURCE_EXHAUSTED where `wanted` more of `resource` would be over `limit`."""
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
    """Why `wanted_bytes` more are not begun: fewer than `min_free_bytes` would be left of the disk.

    None: there is room. `folder` is there.
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
    """The refusal that `error` stands for where it says that a disk, or a quota of it, is full."""
    cause = getattr(error, "orig", error)  # SQLAlchemy's have the driver's own.
    match cause:
        case OSError():
            is_full = cause.errno in _FULL
        case sqlite3.Error():
            is_full = _primary(cause) == sqlite3.SQLITE_FULL
        case _:
            # PostgreSQL's, whose library is imported where it is used alone.
            is_full = getattr(cause, "sqlstate", None) == _POSTGRESQL_DISK_FULL
    if not is_full:
        return None
    return exhausted(
        "the disk is full", resource=_DISK, wanted=1, free=0, limit=0, retry_after_s=_RETRY_S
    )


def is_disk_full(error: Exception) -> bool:
    """Whether `error` is a refusal for want of room on a disk."""
    return isinstance(error, RatoonError) and error.details.get("resource") == _DISK


def is_waiting_for_capacity(error: BaseException) -> bool:
    """Whether `error` is a refusal for want of what others give back: room on a disk, a GPU."""
    return isinstance(error, RatoonError) and error.details.get("resource") in (_DISK, "GPU")


@contextmanager
def full_disk_refused() -> Generator[None, None, None]:
    """A full disk leaves the block as RESOURCE_EXHAUSTED, everything else as it is."""
    try:
        yield
    except Exception as err:
        refusal = disk_full(err)
        if refusal is None:
            raise
        raise refusal from err


def _primary(error: sqlite3.Error) -> int:
    """SQLite's primary code; its low byte."""
    return (error.sqlite_errorcode or 0) & 0xFF
