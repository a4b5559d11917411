"""Disk work off the event loop, and locks that one process of this user holds.

Work in a thread has ended when the caller goes on, cancelled or not, so nothing writes to a file
that has been closed.

A lock ends with its process. Whoever may open a lock's file may hold the lock. So no other user may
open one: its mode is 0600, and outside of a receiver's own folder it is in a folder that only this
user can enter.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import stat
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import ParamSpec, TypeVar

from ratoon_client.errors import InvalidArgumentError

P = ParamSpec("P")
T = TypeVar("T")


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    # A future, not a task: closing the client cancels all tasks.
    work = asyncio.get_running_loop().run_in_executor(None, partial(function, *args, **kwargs))
    is_cancelled = False
    while not work.done():
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            is_cancelled = True
        except BaseException:  # noqa: BLE001 - `work.result()` raises it
            break
    if is_cancelled:
        raise asyncio.CancelledError
    return work.result()


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
