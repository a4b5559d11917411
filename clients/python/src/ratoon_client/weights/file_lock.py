"""A lock that one process of this user holds, and that ends with it.

Whoever may open a lock's file may hold the lock. So no other user may open one: its mode is 0600,
and outside of a receiver's own folder it is in a folder that only this user can enter.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from ratoon_client.errors import InvalidArgumentError


def own_folder(path: Path) -> Path:
    """Make `path` a folder for this user alone; it may exist.

    Raises InvalidArgumentError where what is there is a link, another user's or open to others.
    """
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    status = path.lstat()
    is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
    if not is_own or status.st_mode & 0o077:
        raise InvalidArgumentError(
            "TMPDIR",
            f"one in which {path} is not a folder of this user alone",
            "that folder removed or closed to others (chmod 700), or another temporary folder",
        )
    return path


def open_lock(path: Path) -> int:
    """A descriptor of the lock's file, which is made where it is missing. Raises OSError."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(path, flags, 0o600)
    status = os.fstat(descriptor)
    if status.st_uid == os.geteuid() and status.st_mode & 0o077:
        os.fchmod(descriptor, 0o600)
    return descriptor


def take(path: Path) -> int:
    """A descriptor that holds the lock until it is closed. Raises BlockingIOError: it is held."""
    descriptor = open_lock(path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise
    return descriptor


@contextmanager
def held(path: Path) -> Generator[None]:
    """Raises BlockingIOError where another process holds it."""
    descriptor = take(path)
    try:
        yield
    finally:
        os.close(descriptor)
